"""Requests for snapshots: readable tables, new tables, and signals.

Signals are rows that somebody inserts into a captured table to request snapshots by plain SQL. They are read in the
stream like any change, and obeyed before they become visible. The position of the last one is durable together with its
request, so each is obeyed once, however often the stream is read again.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import psycopg
from pydantic import TypeAdapter

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Op
from pgcdc.core.state import Lock, StateDir
from pgcdc.postgres.database import (
    Connection,
    NoRight,
    connect,
    execute_one,
    explain_errors,
    explain_right,
    name_table,
    quote_identifier,
    quote_literal,
    quote_qualified,
    split_table,
)  # fmt: skip
from pgcdc.source.postgres.setup.guard import lost_on_error
from pgcdc.source.postgres.setup.tables import PublishedTable, find_published, read_published
from pgcdc.source.postgres.snapshot.copy import select_statement
from pgcdc.source.postgres.snapshot.requests import RequestQueue, RequestState, SnapshotRequest, new_id
from pgcdc.spool.segment import CaptureBatch

logger = logging.getLogger("pgcdc.capture")


@explain_errors("read the published tables")
def check_readable(sql: Connection, publications: Sequence[str]) -> None:
    """Raise SourceError unless all rows of every published table are readable."""
    for table in read_published(sql, publications):
        try:
            check_table(sql, table, table.row_filter or "", lock_timeout="0")
        except NoRight as error:
            raise NoRight(error.message, f"{error.advice}; or deliver only changes: --snapshot-mode never") from None


def find_table(
    conn: Connection, publications: Sequence[str], name: str, oid: int = 0, *, needs_key: bool = True
) -> PublishedTable:
    """The table of this name, if it can be read while the stream runs. Raises SourceError with advice if not."""
    wanted = split_table(name)
    known: list[PublishedTable] = []
    if oid:
        found = find_published(conn, publications, oid)
    else:
        known = read_published(conn, publications)
        found = next((one for one in known if (one.relation.namespace, one.relation.name) == wanted), None)
    if found is None:
        known = known or read_published(conn, publications)
        names = ", ".join(one.title for one in known[:10]) or "none"
        what = "is no longer captured" if oid else "is not captured"
        raise NeverReadable(f"table {name} {what}", f"Captured tables: {names}")
    if needs_key and not found.key:
        raise NeverReadable(
            f"table {found.title} has no primary key or replica identity index, so its existing rows cannot "
            "be read beside the stream",
            "Add a primary key, or read the whole table: pgcdc resync --table",
        )
    return found


def check_table(conn: Connection, table: PublishedTable, where: str = "", lock_timeout: str = "1s") -> None:
    """Raise SourceError if its rows are unreadable: a missing right, or an invalid condition. Timeout 0: wait for locks."""
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            conn.execute("SET LOCAL row_security = off")
            conn.execute(f"SET LOCAL lock_timeout = {quote_literal(lock_timeout)}".encode())
            execute_one(conn, select_statement(table.columns, table.source, [where], " LIMIT 0"))
    except psycopg.errors.InsufficientPrivilege as error:
        raise explain_right(table.title, table.sql, conn.info.user, error) from None
    except psycopg.errors.LockNotAvailable:
        raise SourceError(f"table {table.title} is locked", "Try again when the lock is released") from None
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.FeatureNotSupported) as error:
        if not where:
            raise
        raise SourceError(
            f"the condition {where!r} is invalid: {error.diag.message_primary}",
            f"Write an SQL expression over the columns of {table.title}, as after WHERE",
        ) from None


class NeverReadable(SourceError):
    """The table is gone, is no longer published, or has no key: a retry would not help."""


def note_tables(queue: RequestQueue, sql: Connection, publications: Sequence[str], *, is_wanted: bool) -> list[str]:
    """Record the existing tables; if `is_wanted`, request the rows of new ones and return their names. Record and
    requests become durable together, so no crash forgets a table. Nothing is requested the first time: these tables
    existed when the slot was created."""
    with lost_on_error():
        try:
            with sql.transaction():  # the view opens every table: the stream must not queue behind a VACUUM FULL
                sql.execute("SET LOCAL lock_timeout = '100ms'")
                found = {oid: name_table(*name) for oid, *name in sql.execute(_TABLES, [list(publications)])}
        except psycopg.errors.LockNotAvailable:
            return []  # we look again in a few seconds
    known = queue.tables
    if known == found.keys():
        return []
    fresh = sorted(found.keys() - known) if known is not None and is_wanted else []
    added = [(oid, found[oid]) for oid in fresh]
    queue.know(found, [SnapshotRequest(new_id(), name, "added", oid=oid) for oid, name in added])
    if added:
        logger.info("reading the existing rows of new tables: %s", ", ".join(name for _, name in added))
    return [name for _, name in added]


_TABLES = """
SELECT c.oid::int8, n.nspname::text, c.relname::text
FROM pg_publication_tables p JOIN pg_namespace n ON n.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
WHERE p.pubname = ANY (%s)
"""


def request_all(sql: Connection, state: StateDir, publications: Sequence[str]) -> None:
    """At a start with the mode `always`: request every table with a key again, to be read while the stream runs."""
    lock = Lock(state.capture_lock)
    if lock.acquire() is None:
        return  # a capture is running, so this is not a start
    try:
        queue = RequestQueue(state.requests_file)
        going = {one.request.table for one in queue.entries() if one.request.kind == "always" and not one.is_ended}
        tables = [one.title for one in read_published(sql, publications) if one.key and one.title not in going]
        queue.add(*(SnapshotRequest(new_id(), name, "always") for name in tables))
    finally:
        lock.release()


# --- signals

SIGNALS = ("execute-snapshot", "pause-snapshot", "resume-snapshot", "stop-snapshot")


def signal_table_ddl(name: str) -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {quote_qualified(*split_table(name))} "
        "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, signal text NOT NULL, payload jsonb)"
    )


def ensure_signal_table(sql: Connection, name: str, publication: str = "") -> bool:
    """Create the table if it is missing; returns whether it did. `publication` is the user's, and must already include
    the table."""
    table = name_table(*split_table(name))
    exists = sql.execute("SELECT to_regclass(%s) IS NOT NULL", [quote_qualified(*split_table(name))]).fetchone()
    is_there = bool(exists and exists[0])
    if publication:
        row = sql.execute(
            "SELECT count(*) FROM pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s",
            [publication, *split_table(name)],
        ).fetchone()
        if not row or not row[0]:
            add = f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE {quote_qualified(*split_table(name))}"
            raise SourceError(
                f"publication {publication} is yours and lacks the signal table {table}",
                f"Run: {'' if is_there else signal_table_ddl(name) + '; '}{add}",
            )
    if is_there:
        return False
    try:
        sql.execute(signal_table_ddl(name).encode())
    except psycopg.errors.InsufficientPrivilege:
        advice = f"Run as the database's owner: {signal_table_ddl(name)}"
        raise SourceError(f"the role may not create the signal table {table}", advice) from None
    except psycopg.Error as error:
        raise SourceError(f"the signal table cannot be created: {error.diag.message_primary}") from error
    return True


def drop_signal_table(url: str, name: str) -> None:
    """Undo what `ensure_signal_table` did."""
    with contextlib.suppress(SourceError), connect(url, may_retry=False) as sql:
        sql.execute(f"DROP TABLE IF EXISTS {quote_qualified(*split_table(name))}".encode())


def parse_signal(signal: str, payload: str | None) -> tuple[list[SnapshotRequest], str]:
    """A signal's requests, or the request id that it names ("" for none). Raises ConfigError if it is invalid."""
    try:
        content: Any = json.loads(payload) if payload else {}
    except ValueError:
        raise ConfigError("the payload is not JSON") from None
    if not isinstance(content, dict):
        raise ConfigError("the payload is not a JSON object")
    if signal not in SIGNALS:
        raise ConfigError(f"unknown signal {signal!r}", f"Use one of: {', '.join(SIGNALS)}")
    if signal != "execute-snapshot":
        return [], str(content.get("id") or "")
    tables = content.get("tables") or ([content["table"]] if content.get("table") else [])
    where = content.get("where") or ""
    if not tables or not isinstance(tables, list) or not all(isinstance(one, str) for one in (*tables, where)):
        raise ConfigError("the payload names no table", 'Write {"table": "orders"} or {"tables": ["orders", "items"]}')
    for table in tables:
        split_table(table)
    return [SnapshotRequest(new_id(), table, where=where) for table in tables], ""


class Signals:
    """Looks for signals in the stream. An invalid one is counted and logged; capture continues."""

    def __init__(self, queue: RequestQueue, table: str) -> None:
        self._queue = queue
        self._table = split_table(table)
        self._versions: list[int] = []
        self._looked = 0

    def see(self, batch: CaptureBatch) -> None:
        """Take changes of the stream before they become visible."""
        for version in range(self._looked, len(batch.relations)):
            relation = batch.relations[version]
            if (relation.namespace, relation.name) == self._table:
                self._versions.append(version)
        self._looked = len(batch.relations)
        if self._versions and batch.part is not None:
            self._find(batch)

    def _find(self, batch: CaptureBatch) -> None:
        assert batch.part is not None
        data = batch.part.load_batch()
        versions = data.column("relation").to_numpy()
        mine = np.isin(versions, self._versions) & (data.column("op").to_numpy() == Op.INSERT)
        if not mine.any():
            return
        counts = batch.transactions.column("rows").to_numpy()
        lsns = np.repeat(batch.transactions.column("commit").to_numpy(), counts)
        for row in np.flatnonzero(mine).tolist():
            position = Position.at(int(lsns[row]), data.column("ordinal")[row].as_py())
            if position > self._queue.heeded:
                names = [column.name for column in batch.relations[int(versions[row])].columns]
                values = data.column("new")[row].as_py()
                self._heed(position, dict(zip(names, values, strict=True)))

    def _heed(self, position: Position, row: dict[str, bytes | None]) -> None:
        signal = (row.get("signal") or b"").decode("utf-8", "replace")
        payload = row.get("payload")
        try:
            requests, name = parse_signal(signal, payload.decode("utf-8", "replace") if payload else None)
            if not requests:
                getattr(self._queue, signal.removesuffix("-snapshot"))(name)
        except ConfigError as error:
            logger.warning("signal at %s ignored: %s", position, error)
            self._queue.heed(position, bad=1)
            return
        logger.info("signal at %s: %s", position, signal)
        self._queue.heed(position, requests)


# --- for the control socket and the status

_REQUEST = TypeAdapter(SnapshotRequest)


def describe(state: RequestState, rate: float | None = None) -> dict[str, Any]:
    """A request for `pgcdc status`; `rate` is in rows per second, if known."""
    percent = left = None
    rate = rate if state.status == "running" else None
    if state.status == "done":
        percent = 100.0
    elif state.estimated_rows:
        percent = min(99.9, 100.0 * state.rows / state.estimated_rows)
    if rate and state.estimated_rows:
        left = max(0.0, (state.estimated_rows - state.rows) / rate)
    asked = {name: getattr(state.request, name) for name in ("id", "table", "kind", "where", "oid")}
    known = {name: getattr(state, name) for name in ("status", "rows", "estimated_rows")}
    times = {name: getattr(state, name) for name in ("started", "finished", "error")}
    return {**asked, **known, "percent": percent, "rate": rate, "seconds_left": left, **times}


def make_request(content: dict[str, Any]) -> SnapshotRequest:
    """The request in a message: `table` and other fields of a SnapshotRequest."""
    return _REQUEST.validate_python({"id": new_id(), **{name: one for name, one in content.items() if one is not None}})


def change_queue(queue: RequestQueue, content: dict[str, Any]) -> dict[str, Any]:
    """Handle a control message without checking the table; returns the id of the changed request."""
    action = content["action"]
    if action == "list":
        return {"id": None}
    if action == "add":
        request = make_request(content)
        queue.ensure(request) if request.kind == "reload" else queue.add(request)
        return {"id": request.id}
    if action not in ("pause", "resume", "stop"):
        raise ConfigError(f"unknown snapshot action {action!r}", "Use add, pause, resume, stop or list")
    changed: RequestState = getattr(queue, action)(content.get("id") or "")
    return {"id": changed.id}
