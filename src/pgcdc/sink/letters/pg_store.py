"""Dead letters in a table of PostgreSQL, made when it is missing: the source's database, or another one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError
from pgcdc.postgres.database import Connection, connect, explain_errors, lock_creation, name_table, split_table
from pgcdc.sink.letters.record import DeadLetter, Query

_COLUMNS = (
    "id", "pipeline", "adapter", "position", "event_id", "channel", "operation", "error_kind", "error", "attempts",
    "payload", "created_at", "replayed_at", "outcome",
)  # fmt: skip
_DDL = """CREATE TABLE {table} (
    id uuid PRIMARY KEY,
    event_id text NOT NULL,
    adapter text NOT NULL,
    error text NOT NULL,
    payload json NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    replayed_at timestamptz,
    pipeline text NOT NULL,
    position text COLLATE "C" NOT NULL,
    channel text NOT NULL,
    operation text NOT NULL,
    error_kind text NOT NULL,
    attempts int NOT NULL,
    outcome text
)"""
_STATEMENT_TIMEOUT = "30s"
_FETCH = 500

_T = TypeVar("_T")


class PgDeadLetters:
    """One table. A connection is kept, and made anew once if it has ended meanwhile."""

    def __init__(self, url: str, table: str = "pgcdc_dead_letters") -> None:
        self.pipeline = ""
        self.table = split_table(table)
        self._url = url
        self._name = sql.Identifier(*self.table)
        self._lock = threading.RLock()
        self._conn: Connection | None = None

    def __repr__(self) -> str:
        return f"PgDeadLetters({name_table(*self.table)})"

    def check(self) -> None:
        with self._explain("use"), self._connect() as conn:
            self._check_encoding(conn)
            with contextlib.suppress(psycopg.Rollback), conn.transaction():
                self._create(conn)
                conn.execute(sql.SQL("INSERT INTO {} SELECT * FROM {} WHERE false").format(self._name, self._name))
                conn.execute(sql.SQL("UPDATE {} SET outcome = NULL WHERE false").format(self._name))
                raise psycopg.Rollback

    def open(self) -> None:
        with self._explain("create"), self._lock:
            conn = self._session()
            self._check_encoding(conn)
            try:
                with conn.transaction():
                    self._create(conn)
            except (psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation):
                pass  # another pipeline was faster

    def record(self, letters: Sequence[DeadLetter]) -> None:
        rows = [
            (
                one.id, one.pipeline, one.adapter, one.position, one.event_id, one.channel, one.operation,
                one.error_kind, one.error, one.attempts, _to_json(one.event), one.created_at, one.replayed_at,
                one.outcome,
            )
            for one in letters
        ]  # fmt: skip
        insert = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT (id) DO NOTHING").format(
            self._name,
            sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)),
            sql.SQL(", ").join(sql.Placeholder() for _ in _COLUMNS),
        )

        def write(conn: Connection) -> None:
            with conn.transaction(), conn.cursor() as cursor:
                cursor.executemany(insert, rows)

        self._call("write to", write)

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions; read in pieces, over a connection of its own."""
        columns = [sql.SQL("payload::text") if one == "payload" else sql.Identifier(one) for one in _COLUMNS]
        where, values = _where(query)
        select = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY position, adapter, id{}").format(
            sql.SQL(", ").join(columns), self._name, where, sql.SQL(f" LIMIT {query.limit:d}" if query.limit else "")
        )
        with self._explain("read"), self._connect() as conn:
            if not self._exists(conn):
                return
            with conn.transaction(), conn.cursor("letters") as cursor:
                cursor.itersize = _FETCH
                for row in cursor.execute(select, values):
                    yield _letter(row)

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        """Change these rows."""
        update = sql.SQL(
            "UPDATE {} SET outcome = %s, replayed_at = %s, error = coalesce(nullif(%s, ''), error), "
            "attempts = attempts + %s WHERE id = ANY (%s)"
        ).format(self._name)
        values = [outcome, at, error.replace("\0", ""), int(at is None), list(ids)]
        self._call("write to", lambda conn: conn.execute(update, values))

    def purge(self, query: Query) -> int:
        """Delete these rows."""
        where, values = _where(query)
        chosen = sql.SQL("SELECT id FROM {} WHERE {} ORDER BY position, adapter, id{}").format(
            self._name, where, sql.SQL(f" LIMIT {query.limit:d}" if query.limit else "")
        )
        delete = sql.SQL("DELETE FROM {} WHERE id IN ({})").format(self._name, chosen)

        def purge(conn: Connection) -> int:
            return conn.execute(delete, values).rowcount if self._exists(conn) else 0

        return self._call("delete from", purge)

    def close(self) -> None:
        with self._lock:
            if self._conn is not None:
                self._conn.close()
                self._conn = None

    # --- the connection

    def _call(self, action: str, do: Callable[[Connection], _T]) -> _T:
        """`do` may run twice: if the connection had ended, or ends with it."""
        with self._lock:
            for is_last in (False, True):
                try:
                    with self._explain(action):
                        return do(self._session())
                except ConnectionLost:
                    self.close()
                    if is_last:
                        raise
        raise AssertionError

    def _session(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
        return self._conn

    def _connect(self) -> Connection:
        conn = connect(self._url, application_name="pgcdc dead letters")
        try:
            conn.execute(f"SET statement_timeout = '{_STATEMENT_TIMEOUT}'; SET lock_timeout = '{_STATEMENT_TIMEOUT}'")
            conn.execute(  # durable when it returns, whatever the database thinks of that
                "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
            )
        except BaseException:
            conn.close()
            raise
        return conn

    def _exists(self, conn: Connection) -> bool:
        found = conn.execute("SELECT to_regclass(%s)", [self._name.as_string(conn)]).fetchone()
        return found is not None and found[0] is not None

    def _create(self, conn: Connection) -> None:
        if self._exists(conn):
            return
        with conn.transaction():
            lock_creation(conn)
            if not self._exists(conn):
                conn.execute(sql.SQL(_DDL).format(table=self._name))
                conn.execute(sql.SQL("CREATE INDEX ON {} (adapter, position)").format(self._name))

    def _check_encoding(self, conn: Connection) -> None:
        found = conn.execute("SHOW server_encoding").fetchone()
        if found is not None and found[0] not in ("UTF8", "SQL_ASCII"):
            raise SourceError(
                f"the database of the dead letters is encoded in {found[0]}, which does not have every character",
                "Use one in UTF8 (--dlq-db), or --dlq file",
            )

    @contextlib.contextmanager
    def _explain(self, action: str) -> Iterator[None]:
        title = name_table(*self.table)
        try:
            with explain_errors(f"{action} table {title} of dead letters"):
                yield
        except PgcdcError as error:
            if not error.advice:
                error.advice = f"Check --dlq-db, and that this role may create and write table {title}"
            raise


def _where(query: Query) -> tuple[sql.Composable, list[Any]]:
    parts: list[tuple[str, Any]] = [
        ("pipeline = %s", query.pipeline),
        ("adapter = %s", query.adapter),
        ("id::text = ANY (%s)", list(query.ids) or None),
        ("created_at >= %s", query.since),
        ("created_at < %s", query.before),
        ("(replayed_at IS NULL) = %s", query.is_waiting),
        ("position > %s", query.after),
    ]
    used = [(text, value) for text, value in parts if value is not None]
    conditions = sql.SQL(" AND ").join([sql.SQL("true"), *(sql.SQL(text) for text, _ in used)])
    return conditions, [value for _, value in used]


def _letter(row: tuple[Any, ...]) -> DeadLetter:
    raw = dict(zip(_COLUMNS, row, strict=True))
    event = _from_json(raw.pop("payload"))
    return DeadLetter(**{**raw, "id": str(raw["id"]), "event": event})


def _to_json(event: str) -> str:
    """The event itself, which `json` keeps as it is; several lines, a list, or what is no JSON, as a list of texts."""
    try:
        if "\n" in event or event.startswith("["):
            raise ValueError
        json.loads(event, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(event.split("\n"))
    return event


def _refuse(name: str) -> None:
    raise ValueError(name)


def _from_json(payload: str) -> str:
    if payload.startswith("["):
        lines = json.loads(payload)
        if lines and all(isinstance(line, str) for line in lines):
            return "\n".join(lines)
    return payload
