"""Connections to the source database. No other module opens connections or quotes names.

Every session, including walsenders, is pinned with SET right after connecting, because pgoutput's text depends on these
settings. SET overrides everything. Startup options would override ALTER ROLE and ALTER DATABASE, but not PGTZ and
PGDATESTYLE in our environment, which libpq sends after them.

Failures that may go away (refused, timeout, starting up, too many connections, unknown host, since name services have
outages) are ConnectionLost. Permanent ones (password, database, right, URL) are SourceError. libpq gives no SQLSTATE
for a failed connection, so its text decides; unknown text (another language) counts as temporary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc.core.errors import ConfigError, ConnectionLost, PgcdcError, SourceError

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"  # An open session; rows are tuples

_CREATION = 0x70676364635F7462  # The key of an advisory lock
_FALLBACKS = {
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",  # ms; no keepalives are sent while a status update waits for its TCP ack
}

_SESSION = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
_SESSION_SINCE = {"idle_session_timeout": 140000, "transaction_timeout": 170000}

_URL_ADVICE = (
    "Write postgresql://user:password@host:5432/database, with @ : / ? # % in the password percent-encoded (@ is %40)"
)

# libpq's messages for permanent failures, with our advice.
_PERMANENT = [
    (r"password authentication failed|no password supplied", "Check user name and password (or PGPASSWORD, ~/.pgpass)"),
    (r"no pg_hba.conf entry|pg_hba.conf rejects", "Allow this user, database and host in the server's pg_hba.conf"),
    (r"authentication failed", "Check the user name and the authentication method in pg_hba.conf"),
    (r"role .* does not exist|not permitted to log in", "Check the user name, or give it the LOGIN right"),
    (r"database .* does not exist", "Check the database name at the end of the URL"),
    (r"permission denied for database", "Run: GRANT CONNECT ON DATABASE ... TO this role"),
    (
        r"replication role|permission denied to start WAL sender",
        "Run as superuser: ALTER ROLE ... REPLICATION (on Amazon RDS: GRANT rds_replication TO ...)",
    ),
    (r"does not support SSL|SSL negotiation", "Check that PostgreSQL listens on this port, or change sslmode"),
    (r"certificate|SSL error", "Check sslmode, sslrootcert, sslcert and sslkey in the URL"),
    (r"unrecognized configuration parameter|unsupported startup", "Check options in the URL; connect without a pooler"),
    (r"^invalid ", _URL_ADVICE),
]
_TEMPORARY = [
    (r"max_wal_senders", "Raise max_wal_senders on the server, or end another replication connection"),
    (r"too many|connection slots", "Wait until connections are free, or raise max_connections on the server"),
    (r"resolve host|translate host name", "Check the host name in the URL"),
    (r"starting up|shutting down|recovery mode|not yet accepting", "Wait until the server accepts connections"),
    (r"", "Check host and port, that the server runs, and that no firewall is between"),
]


_LIBPQ_NOISE = re.compile(
    r"^connection (?:failed|is bad): |connection to server (?:at|on) [^\n]*? failed: |FATAL:  |\n\tIs the server run.*"
)


def connect(
    url: str,
    *,
    replication: bool = False,
    application_name: str = "pgcdc",
    connect_timeout_s: int = 10,
    may_retry: bool = True,
) -> Connection:
    """Open a session with pinned settings, in autocommit.

    `url` is a postgres:// or postgresql:// URL or a key=value DSN; its timeouts and keepalives are kept. With
    `replication` it is a walsender for logical replication: use its `pgconn`. With `may_retry=False` (nothing runs yet)
    an unreachable server raises SourceError instead of ConnectionLost, so that the command exits with 2.
    """
    params = parse_url(url)
    fallbacks = _FALLBACKS | {"connect_timeout": str(connect_timeout_s), "fallback_application_name": application_name}
    overrides = {"client_encoding": "UTF8"} | ({"replication": "database"} if replication else {})
    if application_name != "pgcdc":  # identifies our own sessions, so it overrides the URL
        overrides["application_name"] = application_name
    try:
        conn = psycopg.connect(make_conninfo("", **{**fallbacks, **params, **overrides}), autocommit=True)
    except psycopg.Error as exc:
        raise _explain(exc, params, may_retry) from None
    try:
        _pin_session(conn)
    except psycopg.Error as exc:
        conn.close()
        raise _explain(exc, params, may_retry) from None
    return conn


def parse_url(url: str) -> dict[str, Any]:
    """The connection parameters in a URL or DSN. The SourceError never quotes the URL, which may contain the
    password."""
    try:
        params = conninfo_to_dict(url)
    except UnicodeEncodeError:  # a variable or flag contained bytes that are not text
        raise SourceError("the database URL cannot be read (it is not UTF-8 text)", _URL_ADVICE) from None
    except psycopg.Error as exc:
        reason = str(exc).partition('"')[0].strip(" :\n") or "syntax error"
        raise SourceError(f"the database URL cannot be read ({reason})", _URL_ADVICE) from None
    if not url.strip():
        raise SourceError("no database URL is set", f"Use --db or PGCDC_DB. {_URL_ADVICE}")
    if _is_mangled(params):
        raise SourceError("the database URL cannot be read (unexpected host, port or database)", _URL_ADVICE)
    return params


def url_passwords(url: str | None) -> set[str]:
    """The passwords in a database URL; none if it cannot be parsed."""
    try:
        return {str(value) for key, value in parse_url(url or "").items() if "password" in key and value}
    except PgcdcError:
        return set()


def redact(url: str) -> str:
    """The URL or DSN with its passwords hidden, for messages. Hides too much rather than too little."""
    scheme, found, rest = url.partition("://")
    try:
        sane = not _is_mangled(conninfo_to_dict(url))
    except (psycopg.Error, UnicodeEncodeError):
        sane = False
    if not found:
        return _redact_dsn(url) if sane else "***"
    if not sane:  # unencoded @, / or ? in the password: it may extend to the last @
        user, colon, _ = rest.partition(":")
        return f"{scheme}://{user}:***@{rest.rpartition('@')[2]}" if colon and "@" in rest else f"{scheme}://***"
    rest = re.sub(r"^([^:@/?]*):[^@]*@", r"\1:***@", rest)
    return f"{scheme}://" + re.sub(r"([?&](?:password|sslpassword)=)[^&]*", r"\1***", rest)


def _redact_dsn(dsn: str) -> str:
    params = conninfo_to_dict(dsn)
    return make_conninfo("", **{key: "***" if "password" in key else value for key, value in params.items()})


def _is_mangled(params: dict[str, Any]) -> bool:
    """Whether an unencoded character in the password moved part of it into another field."""
    host, port, dbname = (str(params.get(key) or "") for key in ("host", "port", "dbname"))
    numeric = all(part == "" or (part.isascii() and part.isdigit()) for part in port.split(","))
    return "@" in host or not numeric or ("@" in dbname and "user" not in params)


def _pin_session(conn: Connection) -> None:
    settings = dict(_SESSION)
    settings.update({name: "0" for name, since in _SESSION_SINCE.items() if conn.info.server_version >= since})
    # a walsender accepts only a single simple query
    result = conn.pgconn.exec_("".join(f"SET {k} = {quote_literal(v)};" for k, v in settings.items()).encode())
    if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(result)


def _explain(exc: psycopg.Error, params: dict[str, Any], may_retry: bool) -> SourceError:
    """One line and advice for a failed connection. Never contains the password."""
    text, _, attempts = str(exc).partition("Multiple connection attempts failed")
    text = _hide_password(" ".join(_LIBPQ_NOISE.sub("", text).replace("\nDETAIL:", ":").split()), params).rstrip(".")
    host = params.get("host") or params.get("hostaddr") or os.environ.get("PGHOST") or "the local server"
    port = params.get("port") or os.environ.get("PGPORT") or "5432"
    where = f"{host}:{port}" + (f"/{params['dbname']}" if params.get("dbname") else "")
    message = f"cannot connect to {where}{' as ' + str(params['user']) if params.get('user') else ''}: {text}"
    for pattern, advice in _PERMANENT:
        if re.search(pattern, text) or (attempts and re.search(pattern, attempts)):
            return SourceError(message, advice)
    advice = next(advice for pattern, advice in _TEMPORARY if re.search(pattern, text))
    return (ConnectionLost if may_retry else SourceError)(message, advice)


def _hide_password(text: str, params: dict[str, Any]) -> str:
    public = [str(params.get(key) or "") for key in ("host", "port", "user", "dbname")]
    for secret in (params.get("password"), params.get("sslpassword"), os.environ.get("PGPASSWORD")):
        # if the password is part of a public name, hiding it there would reveal it
        if secret and not any(str(secret) in name for name in public):
            text = text.replace(str(secret), "***")
    return text


@contextmanager
def explain_errors(action: str) -> Iterator[None]:
    """Turn psycopg's errors into ConnectionLost if they may go away, else SourceError. Also works as a decorator."""
    try:
        yield
    except psycopg.Error as exc:
        text = " ".join((exc.diag.message_primary or str(exc)).split())
        if isinstance(exc, psycopg.InterfaceError) or (exc.sqlstate or "08").startswith(("08", "53", "57P")):
            raise ConnectionLost(f"cannot {action}: {text}", "Check that the server runs and is reachable") from exc
        advice = exc.diag.message_hint or ""
        if schema := _SCHEMA_DENIED.fullmatch(text):
            advice = f"Run: GRANT USAGE ON SCHEMA {quote_identifier(schema[1])} TO this role"
        raise SourceError(f"cannot {action}: {text}", advice) from exc


_SCHEMA_DENIED = re.compile(r"permission denied for schema (.+)")


class NoRight(SourceError):
    """This role has no right to read the table."""


def explain_right(title: str, table: str, role: str, error: psycopg.Error) -> NoRight:
    """The error for rows that this role may not read; `table` is quoted for SQL."""
    role = quote_identifier(role)
    text = " ".join((error.diag.message_primary or str(error)).split())
    advice = f"Run: GRANT SELECT ON {table} TO {role}"
    if "row-level security" in text:  # without an error, hidden rows would be missing
        advice = f"Run as superuser: ALTER ROLE {role} BYPASSRLS"
    elif schema := _SCHEMA_DENIED.fullmatch(text):
        advice = f"Run: GRANT USAGE ON SCHEMA {quote_identifier(schema[1])} TO {role}"
    return NoRight(f"the rows of table {title} cannot be read: {text}", advice)


def execute_one(conn: Connection, statement: str) -> psycopg.Cursor[tuple[Any, ...]]:
    """Run exactly one statement. The extended protocol refuses more, even if the user's text contains a semicolon."""
    return conn.execute(statement.encode(), binary=True)


def lock_creation(conn: Connection) -> None:
    """Let only one session create our tables until the transaction ends: two concurrent IF NOT EXISTS fail."""
    conn.execute("SELECT pg_advisory_xact_lock(%s)", (_CREATION,))


def quote_identifier(name: str) -> str:
    """Quote a name for SQL, whatever it contains. Replication commands accept no doubled quote, but slot names contain
    none."""
    if not name or "\0" in name:
        raise ConfigError(f"{name!r} is not a valid PostgreSQL name")
    return '"' + name.replace('"', '""') + '"'


def quote_qualified(schema: str, table: str) -> str:
    return f"{quote_identifier(schema)}.{quote_identifier(table)}"


def quote_literal(text: str) -> str:
    """Quote a string for commands without parameters. Safe only in our sessions, which take backslashes literally."""
    if "\0" in text:
        raise ConfigError(f"{text!r} is not a valid PostgreSQL text")
    return "'" + text.replace("'", "''") + "'"


_PART = r'(?:"((?:[^"\0]|"")+)"|([^\W\d][\w$]*))'
_TABLE = re.compile(rf"\s*{_PART}(?:\s*\.\s*{_PART})?\s*")


def split_table(name: str, default_schema: str = "public") -> tuple[str, str]:
    """The schema and table in `orders`, `sales.orders` or `"We.ird"."Ta""ble"`. Unquoted names are lower-cased, as in
    SQL."""
    match = _TABLE.fullmatch(name)
    if match is None:
        advice = 'Write table or schema.table; quote other names as in SQL: public."Order-Items"'
        raise ConfigError(f"{name!r} is not a table name", advice)
    first, second = (_unquote(*match.group(i, i + 1)) for i in (1, 3))
    return (first, second) if second else (default_schema, first)


def parse_identifier(text: str) -> str:
    """The name in `orders` or `"Order-Items"`. Unquoted names are lower-cased, as in SQL."""
    match = re.fullmatch(rf"\s*{_PART}\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a valid name", 'Quote other names as in SQL: "Order-Items"')
    return _unquote(match[1], match[2])


def _unquote(quoted: str | None, plain: str | None) -> str:
    if quoted is not None:
        return quoted.replace('""', '"')
    # ASCII only, because that is how the server folds names
    return re.sub("[A-Z]+", lambda match: match[0].lower(), plain or "")


def name_table(schema: str, table: str) -> str:
    """The shortest text that `split_table` reads back as this table: for messages and lists."""
    parts = [part if re.fullmatch(r"[a-z_][a-z0-9_$]*", part) else quote_identifier(part) for part in (schema, table)]
    return parts[1] if schema == "public" else ".".join(parts)
