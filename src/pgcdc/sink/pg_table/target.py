"""The target's database: sessions, what its errors mean for a batch, and our own tables in it.

In apply mode a session fires no triggers and checks no foreign keys (`session_replication_role`), because the source
already did both. Its changes carry a replication origin, which lets a capture of the target leave them out.
Both need rights that not every role has. Without them the adapter continues, and reports it.

| class of SQLSTATE | meaning | consequence |
| --- | --- | --- |
| none, 08, 40, 53, 55P03, 55006, 57, 58, 25006, 25P03, 25P04 | connection, deadlock, full, locked, read-only | retry |
| 21, 22, 23, 44, 54, P0 | a value, a constraint, a limit, a trigger that refuses | an event is to blame |
| 42701, 42703, 42804, 42P01, 42P07, 428C9 | a table is not as expected | apply mode: an event is to blame; else stop |
| anything else | rights, shape, a bug | stop |

`pgcdc_positions` records how far an adapter is. Its row changes in the same transaction as the data, so nothing can be
duplicated or missing after a crash. The ack in the state directory follows the row. Every change of the row compares its
old value first, so a process that was assumed dead cannot overwrite its successor.

`pgcdc_rejected` lists the keys that have an event in the dead letters, so that a replay never overwrites a newer row with an
old one. It is created with the first reject; while it has no waiting rows, it costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

import psycopg
from psycopg import errors

from pgcdc.core.errors import ConnectionLost, SinkError, SinkUnavailable, SourceError
from pgcdc.core.position import Position
from pgcdc.postgres.database import (
    Connection,
    connect,
    lock_creation,
    name_table,
    quote_identifier,
    quote_literal,
    quote_qualified,
)
from pgcdc.sink.pg_table.options import TableName

Say = Callable[[str], None]

LOCK_TIMEOUT_S = 10.0
_NAME_BYTES = 63
_MINE = "adapter = %s AND stream = %s"
_NO_ORIGIN = (
    errors.InsufficientPrivilege,
    errors.ObjectNotInPrerequisiteState,
    errors.ConfigurationLimitExceeded,
)
_SETTINGS = {
    "idle_in_transaction_session_timeout": "300s",  # a hanging process of ours must not keep locks forever
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "xmloption": "content",
}


def connect_target(adapter: str, url: str, timeout_s: float) -> Connection:
    """A session in autocommit; one write may take `timeout_s`. SinkUnavailable: not now; SinkError: not with this
    URL."""
    name = f"pgcdc {adapter}"[:_NAME_BYTES]
    try:
        conn = connect(url, application_name=name, connect_timeout_s=max(2, min(10, int(timeout_s / 2))))
    except SourceError as error:
        kind = SinkUnavailable if isinstance(error, ConnectionLost) else SinkError
        raise kind(f"adapter {adapter}: {error.message}", error.advice) from None
    settings = {**_SETTINGS, "lock_timeout": f"{int(1000 * min(LOCK_TIMEOUT_S, timeout_s / 2))}ms"}
    calls = [f"set_config({quote_literal(name)}, {quote_literal(value)}, false)" for name, value in settings.items()]
    # Acknowledged data must survive a crash of the target. Stricter settings of the role or URL are kept.
    keep = "coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on')"
    # For a few thousand keys, the default settings scan a whole table of millions, although the pages are close
    # together or cached.
    cost = "least(current_setting('random_page_cost')::float8, 1.1 * current_setting('seq_page_cost')::float8)::text"
    calls += [f"set_config('synchronous_commit', {keep}, false)", f"set_config('random_page_cost', {cost}, false)"]
    try:
        conn.execute(f"SELECT {', '.join(calls)}".encode())
    except psycopg.Error as error:
        conn.close()
        raise explain(adapter, "begin a session", error) from error
    return conn


def set_replica(conn: Connection, say: Say) -> None:
    """Disable triggers and foreign key checks, if this role may."""
    try:
        conn.execute("SET session_replication_role = replica")
    except errors.InsufficientPrivilege:
        say(
            "triggers and foreign keys of the target's tables fire, because this role may not disable them. Run as "
            f'superuser: GRANT SET ON PARAMETER session_replication_role TO "{conn.info.user}" (PostgreSQL 15), or set '
            "--pg-table-triggers on"
        )


def set_origin(conn: Connection, adapter: str, origin: str, say: Say, *, is_wanted: bool) -> bool:
    """Use a replication origin; returns whether this role may. `is_wanted`: the user named the origin, so a refusal is
    a SinkError."""
    try:
        conn.execute(
            "SELECT pg_replication_origin_create(%s) WHERE pg_replication_origin_oid(%s) IS NULL", (origin, origin)
        )
        conn.execute("SELECT pg_replication_origin_session_setup(%s)", (origin,))
    except _NO_ORIGIN as error:
        functions = ("create(text)", "oid(text)", "session_setup(text)", "xact_setup(pg_lsn, timestamptz)")
        names = ", ".join(f"pg_replication_origin_{name}" for name in functions)
        advice = f'Run as superuser: GRANT EXECUTE ON FUNCTION {names} TO "{conn.info.user}"'
        if isinstance(error, errors.ConfigurationLimitExceeded):
            advice = (
                "Raise max_replication_slots (since PostgreSQL 18: max_active_replication_origins), or drop "
                "unused origins with pg_replication_origin_drop"
            )
        if is_wanted:
            raise SinkError(f"adapter {adapter} cannot use a replication origin: {describe(error)}", advice) from None
        say(
            f"changes have no replication origin ({describe(error)}), so a capture of the target cannot tell "
            f"them from others. {advice}"
        )
        return False
    return True


# --- errors


class RowFault(psycopg.DataError):
    """A row that cannot be applied in our own judgement: the target did not refuse it."""

    sqlstate = "22000"

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Blame(Enum):
    TARGET_NOW = "may pass"
    EVENT = "one event, maybe"
    SHAPE = "one event, maybe, where events are applied to tables"
    SETUP = "stop"


_CLASSES = {
    Blame.TARGET_NOW: ("08", "40", "53", "57", "58", "55P03", "55006", "25006", "25P03", "25P04"),
    Blame.SHAPE: ("42701", "42703", "42804", "42P01", "42P07", "428C9"),
    Blame.EVENT: ("21", "22", "23", "44", "54", "P0"),
    Blame.SETUP: ("",),
}
_ADVICE = {
    "25006": "It is read-only: is it a standby, or is default_transaction_read_only on? Nothing is lost meanwhile",
    "53100": "Free space on the disk of the target; nothing is lost meanwhile",
    "55P03": "Another session holds a lock on the table: see pg_locks at the target. Nothing is lost meanwhile",
    "55006": "Another session uses the replication origin. If that is a run that just ended, wait a moment",
    "42501": "Grant this right to the role of the URL at the target",
    "3F000": "Create the schema, or grant the role the right to create it",
    "0A000": "See docs/adapters/pg_table.md",
}
_COLUMN = re.compile(r"^COPY [^\n]*?, line \d+, column (.+?)(?:: |$)", re.M)
_CONFLICTS = (
    errors.UniqueViolation,
    errors.ExclusionViolation,
    errors.ForeignKeyViolation,
    errors.RestrictViolation,
    errors.CardinalityViolation,
)


def blame(error: psycopg.Error) -> Blame:
    code = error.sqlstate
    if code is None:
        return Blame.TARGET_NOW if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) else Blame.SETUP
    return next(found for found, classes in _CLASSES.items() if code.startswith(classes))


def kind_of(error: psycopg.Error) -> str:
    """The name of the SQLSTATE in PostgreSQL's manual, such as `not_null_violation`."""
    if error.sqlstate is None:
        return "connection_lost"
    try:
        name = errors.lookup(error.sqlstate).__name__
    except KeyError:
        return f"sqlstate_{error.sqlstate}"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def describe(error: psycopg.Error) -> str:
    """The server's message on one line, without the row's values (they are in the event)."""
    return " ".join((error.diag.message_primary or str(error) or type(error).__name__).split())


def explain(adapter: str, action: str, error: psycopg.Error) -> SinkError:
    """Our error for an error of the target: it is temporary, or the pipeline stops."""
    text = f"adapter {adapter} cannot {action}: {describe(error)}"
    advice = _ADVICE.get(error.sqlstate or "")
    if blame(error) is Blame.TARGET_NOW:
        return SinkUnavailable(text, advice or "Is the target up and reachable? Nothing is lost meanwhile")
    return SinkError(text, advice or error.diag.message_hint or "See docs/adapters/pg_table.md")


def is_conflict(error: psycopg.Error) -> bool:
    """Whether the order of changes may be the cause, so that single changes may succeed."""
    return isinstance(error, _CONFLICTS)


def describe_fault(error: psycopg.Error, table: str) -> tuple[str, str]:
    """Kind and text of a reject. Names the column, and adds advice if a transform causes the problem."""
    if isinstance(error, RowFault):
        return error.kind, str(error)
    found = _COLUMN.search(error.diag.context or "")
    column = error.diag.column_name or (found[1] if found else "")
    text = f"table {table}{f', column {column}' if column else ''}: {describe(error)}"
    if (error.sqlstate or "").startswith("22") and column:
        text += ". Change the type of the column at the target; if a transform masks it, to text"
    return kind_of(error), text


# --- positions


class Positions:
    """The table `pgcdc_positions` of a schema, for one stream of one adapter."""

    def __init__(self, schema: str, adapter: str, stream: str) -> None:
        self.adapter, self._key = adapter, (adapter, stream)
        self.title = name_table(schema, "pgcdc_positions")
        self.quoted = quote_qualified(schema, "pgcdc_positions")

    def missing(self, conn: Connection) -> list[str]:
        """The statement that creates the table, unless it exists."""
        if conn.execute("SELECT to_regclass(%s)", (self.quoted,)).fetchone() != (None,):
            return []
        return [
            f"CREATE TABLE IF NOT EXISTS {self.quoted} (adapter text, stream text, owner uuid NOT NULL, "
            '"position" text COLLATE "C" NOT NULL, source text, updated_at timestamptz NOT NULL DEFAULT now(), '
            "tables text[], PRIMARY KEY (adapter, stream)) WITH (fillfactor = 50)"
        ]

    def read(self, conn: Connection, owner: str) -> tuple[Position, set[TableName]] | None:
        """This stream's position, and the tables that the target had. SinkError: this adapter belongs to another
        pipeline, or may not write here."""
        rights = "SELECT has_table_privilege(%s, 'INSERT') AND has_table_privilege(%s, 'UPDATE'), current_user::text"
        may, role = conn.execute(rights, (self.quoted, self.quoted)).fetchone() or (True, "")
        if not may:
            raise SinkError(
                f"adapter {self.adapter}: role {role} cannot write to {self.title} at the target",
                f"Run there: GRANT SELECT, INSERT, UPDATE ON {self.quoted} TO {quote_identifier(role)}; and "
                "grant its rights on the tables that it writes: docs/adapters/pg_table.md",
            )
        columns = "stream, owner::text, \"position\", coalesce(source, ''), updated_at::text, coalesce(tables, '{}')"
        query = f"SELECT {columns} FROM {self.quoted} WHERE adapter = %s"
        found = None
        for stream, whose, position, source, moment, tables in conn.execute(query.encode(), (self.adapter,)):
            if whose != owner:
                described = f"{source}, at {moment}" if source else f"at {moment}"
                raise SinkError(
                    f"{self.title} at the target has adapter {self.adapter} of another pipeline ({described})",
                    "Rename this adapter: {name: ..., type: pg_table}. If the other pipeline is gone for "
                    f"good: DELETE FROM {self.quoted} WHERE adapter = '{self.adapter}'",
                )
            if stream == self._key[1]:
                try:
                    found = Position.parse(position), set(zip(tables[::2], tables[1::2], strict=True))
                except ValueError:
                    raise SinkError(
                        f"{self.title} at the target has {position!r} for adapter {self.adapter}, which is "
                        "not a position",
                        "Restore that row from a backup",
                    ) from None
        return found

    def begin(self, conn: Connection, owner: str, position: Position, source: str, *, may_exist: bool = False) -> None:
        """Create the row in the data's transaction; `may_exist`: or move it. SinkUnavailable: another process was
        faster."""
        columns = 'adapter, stream, owner, "position", source'
        moved = '(adapter, stream) DO UPDATE SET "position" = excluded."position", updated_at = now(), tables = NULL'
        query = (
            f"INSERT INTO {self.quoted} AS p ({columns}) SELECT %s, %s, %s::uuid, %s, %s WHERE NOT EXISTS "
            f"(SELECT FROM {self.quoted} WHERE adapter = %s AND owner <> %s) "
            f"ON CONFLICT {f'{moved} WHERE p.owner = excluded.owner' if may_exist else 'DO NOTHING'}"
        )
        self._write(conn, query, (*self._key, owner, str(position), source, self.adapter, owner), "already has a row")

    def advance(self, conn: Connection, owner: str, before: Position, after: Position) -> None:
        """Move the row in the data's transaction. SinkUnavailable: it is not where we left it."""
        query = (
            f'UPDATE {self.quoted} SET "position" = %s, updated_at = now() '
            f'WHERE {_MINE} AND owner = %s AND "position" = %s'
        )
        self._write(conn, query, (str(after), *self._key, owner, str(before)), f"is no longer at {before}")

    def _write(self, conn: Connection, query: str, values: tuple[str, ...], found: str) -> None:
        if conn.execute(query.encode(), values).rowcount != 1:
            raise SinkUnavailable(
                f"{self.title} at the target {found} for adapter {self.adapter}: another process writes to it",
                "Is a second copy of this pipeline running? The position is read again",
            )

    def note_tables(self, conn: Connection, tables: Iterable[TableName]) -> None:
        """Record the existing tables, in the transaction that saw them."""
        names = [part for name in sorted(tables) for part in name]
        conn.execute(f"UPDATE {self.quoted} SET tables = %s WHERE {_MINE}".encode(), (names, *self._key))


# --- rejects


class Effect(NamedTuple):
    table: str
    key: str  # As JSON; empty for a table without a key
    position: str


class Rejected:
    """The rows of one adapter and stream in `pgcdc_rejected`: one for each key of an event that may still be
    replayed."""

    def __init__(self, schema: str, key: tuple[str, str]) -> None:
        self._table = quote_qualified(schema, "pgcdc_rejected")
        self._key = key
        self.waiting: dict[tuple[str, str], list[str]] = {}  # The positions of these events, by table and key

    def look(self, conn: Connection) -> None:
        self.waiting = {}
        if conn.execute("SELECT to_regclass(%s)", (self._table,)).fetchone() != (None,):
            query = f'SELECT "table", key, "position" FROM {self._table} WHERE {_MINE}'
            for table, key, position in conn.execute(query.encode(), self._key):
                self.waiting.setdefault((table, key), []).append(position)

    def note(self, conn: Connection, effects: Iterable[Effect]) -> None:
        """Record rejected events."""
        if conn.execute("SELECT to_regclass(%s)", (self._table,)).fetchone() == (None,):
            lock_creation(conn)
            conn.execute(
                f'CREATE TABLE IF NOT EXISTS {self._table} (adapter text, stream text, "table" text, key text, '
                '"position" text COLLATE "C", noted_at timestamptz DEFAULT now(), '
                'PRIMARY KEY (adapter, stream, "position", "table", key))'.encode()
            )
        columns = 'adapter, stream, "table", key, "position"'
        query = f"INSERT INTO {self._table} ({columns}) VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
        conn.cursor().executemany(query.encode(), [(*self._key, *one) for one in effects])
        self.look(conn)

    def supersede(self, conn: Connection, newest: Mapping[tuple[str, str], str], cleared: Mapping[str, str]) -> None:
        """Record that these keys changed at these positions, and that tables were emptied at those in `cleared`.
        Earlier rejects are no longer replayed to these rows."""
        gone: list[tuple[str, ...]] = []
        for (table, key), positions in self.waiting.items():
            by = max((newest.get((table, key), "") if key else ""), cleared.get(table, ""))
            gone += [(*self._key, table, key, one) for one in positions if one < by]
        if gone:
            query = f'DELETE FROM {self._table} WHERE {_MINE} AND "table" = %s AND key = %s AND "position" = %s'
            conn.cursor().executemany(query.encode(), gone)
            self.look(conn)

    def follow(self, conn: Connection, old: str, new: str) -> None:
        """Apply the rename of a table."""
        if old != new:
            query = f'UPDATE {self._table} SET "table" = %s WHERE {_MINE} AND "table" = %s'
            conn.execute(query.encode(), (new, *self._key, old))
            self.look(conn)

    def keys_of(self, position: str) -> set[str]:
        """The keys to which this event may still be applied. Empty: it is done or superseded."""
        return {key for (_, key), positions in self.waiting.items() if position in positions}

    def forget(self, conn: Connection, position: str) -> None:
        """Remove an event that was replayed."""
        conn.execute(f'DELETE FROM {self._table} WHERE {_MINE} AND "position" = %s'.encode(), (*self._key, position))
        self.look(conn)
