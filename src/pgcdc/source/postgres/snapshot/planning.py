"""How an initial snapshot is cut into entries, in the very snapshot in which they are read; and whether it can be read."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg

from pgcdc.core.errors import ConnectionLost, SourceError
from pgcdc.core.state import Lock, StateDir
from pgcdc.postgres.database import (
    Connection,
    connect,
    execute_one,
    explain_errors,
    explain_right,
    quote_identifier,
    quote_literal,
)
from pgcdc.source.postgres.setup.published import PublishedTable, read_published
from pgcdc.source.postgres.setup.tables import Table
from pgcdc.source.postgres.snapshot.chunks import Chunk, estimate_rows, plan_chunks, table_bytes
from pgcdc.source.postgres.snapshot.plan import Entry, Hold, PlannedTable
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id

__all__ = [
    "NOTHING_LOST",
    "TableLocked",
    "check_readable",
    "plan_tables",
    "published_names",
    "request_all",
    "requests_for_rest",
]

logger = logging.getLogger("pgcdc.capture")

CHUNK_BYTES = int(os.environ.get("PGCDC_SNAPSHOT_CHUNK_BYTES", "") or 16 << 20)
"""Of a table, for one task. (The variable is for tests.)"""
MAX_CHUNKS = 10_000
LOCK_TIMEOUT = "2s"
NOTHING_LOST = "nothing is lost: start again after that"
SMALL_BYTES = 256 << 20
"""A table that is smaller is read by its key in any case: what a crash leaves of it can be read by key as well."""
CORRELATED = 0.5
"""Rows that stand in the table about in the order of the key can be read by it without jumping."""


@explain_errors("look at the published tables")
def check_readable(sql: Connection, publications: Sequence[str]) -> None:
    """Raise SourceError unless the rows of every published table can be read, all of them."""
    for table in read_published(sql, publications):
        columns = ", ".join(map(quote_identifier, table.columns))
        where = f"WHERE ({table.row_filter}\n) " if table.row_filter else ""
        try:
            with sql.transaction():
                sql.execute("SET LOCAL row_security = off")
                execute_one(sql, f"SELECT {columns} FROM {table.source} {where}LIMIT 0")
        except psycopg.errors.InsufficientPrivilege as error:
            refused = explain_right(table.title, table.sql, sql.info.user, error)
            raise SourceError(
                refused.message, f"{refused.advice}; or deliver only changes: --snapshot-mode never"
            ) from None


class TableLocked(SourceError):
    """Somebody has locked a table: what was asked for can be done later."""


@contextmanager
def _not_waiting_for_locks() -> Iterator[None]:
    try:
        yield
    except SourceError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise TableLocked(error.message, error.advice) from error.__cause__
        raise


def _connect(url: str) -> Connection:
    """Who plans is the capture's loop, which has more to do: it must not wait for locks."""
    conn = connect(url, application_name="pgcdc snapshot reader")
    conn.execute(f"SET lock_timeout = {quote_literal(LOCK_TIMEOUT)}".encode())
    return conn


@_not_waiting_for_locks()
@explain_errors("look at the published tables")
def published_names(url: str, publications: Sequence[str]) -> dict[int, str]:
    """The published tables, as they are called now. TableLocked: try again."""
    with _connect(url) as conn:
        return {one.relation.oid: one.title for one in read_published(conn, publications)}


@_not_waiting_for_locks()
@explain_errors("plan the initial snapshot")
def plan_tables(
    url: str, publications: Sequence[str], hold: Hold, oids: set[int] | None = None
) -> tuple[list[tuple[PublishedTable, list[Entry]]], list[PublishedTable]] | None:
    """The entries of these tables (None: all) in a snapshot, and the tables that cannot be read in it.

    None: the snapshot is not held any more. A table that was truncated or altered since cannot be read in it; one
    that is in neither list is gone. TableLocked: try again.
    """
    with _connect(url) as conn:
        now = {one.relation.oid: one for one in read_published(conn, publications)}
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            conn.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(hold.name)}".encode())
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.ObjectNotInPrerequisiteState):
            return None
        then = {one.relation.oid: one for one in read_published(conn, publications)}
        planned: list[tuple[PublishedTable, list[Entry]]] = []
        others: list[PublishedTable] = []
        for oid, table in now.items():
            if oids is not None and oid not in oids:
                continue
            entries = None
            if oid in then and then[oid].relation == table.relation and not _is_rewritten(conn, oid):
                entries = _try_to_cut(conn, table, hold)
            if entries is None:
                others.append(table)
            else:
                planned.append((table, entries))
    return planned, others


def _try_to_cut(conn: Connection, table: PublishedTable, hold: Hold) -> list[Entry] | None:
    """The entries; None if the table was changed just now."""
    try:
        with conn.transaction():
            return _cut(conn, table, hold)
    except ConnectionLost:
        raise
    except SourceError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise
        if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            refused = explain_right(table.title, table.sql, conn.info.user, error.__cause__)
            raise SourceError(refused.message, f"{refused.advice} ({NOTHING_LOST})") from error.__cause__
        logger.warning("table %s: %s", table.title, error.message)
        return None


def _is_rewritten(conn: Connection, oid: int) -> bool:
    """Whether the table (or a partition of it) has another file now than in the snapshot, which would not see its rows."""
    row = conn.execute(_REWRITTEN, [oid, oid]).fetchone()
    return bool(row and row[0])


# The catalog is that of the snapshot; the function looks at what is now.
_REWRITTEN = """
SELECT bool_or(c.relfilenode::int8 IS DISTINCT FROM pg_relation_filenode(c.oid)::int8)
FROM pg_class c WHERE c.relkind = 'r' AND (c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
"""


def _cut(conn: Connection, published: PublishedTable, hold: Hold) -> list[Entry]:
    if not published.columns:
        return []
    relation = published.relation
    table = Table(
        relation.oid, relation.namespace, relation.name, published.kind, "p", False, True, True, False, ()
    )  # fmt: skip
    nbytes = table_bytes(conn, table)
    count = max(1, min(MAX_CHUNKS, math.ceil(nbytes / CHUNK_BYTES)))
    chunks = plan_chunks(conn, table, count=count, by_key=_by_key(conn, published, nbytes))
    rows = estimate_rows(conn, table)
    return [
        Entry(f"{relation.oid}-{hold.number}-{number}", chunk, rows // len(chunks), nbytes // len(chunks))
        for number, chunk in enumerate(chunks)
    ]


def _by_key(conn: Connection, published: PublishedTable, nbytes: int) -> bool:
    relation = published.relation
    if published.kind != "r" or not published.key or relation.replica_identity not in "df":
        return False
    if nbytes < SMALL_BYTES:
        return True
    row = conn.execute(
        "SELECT abs(correlation) >= %s FROM pg_stats WHERE schemaname = %s AND tablename = %s AND attname = %s",
        [CORRELATED, relation.namespace, relation.name, published.key[0]],
    ).fetchone()
    return bool(row and row[0])


def requests_for_rest(table: PlannedTable, title: str) -> list[SnapshotRequest]:
    """What is left of a table whose snapshot was lost, to be read incrementally: by ranges of the key, if it was cut so.

    `title` is what it is called now. Asked again after a crash, the requests have the same ids.
    """
    published, left = table.published, table.left
    if any(entry.chunk.key != published.key or published.kind != "r" for entry in left):
        return [SnapshotRequest(f"initial-{left[0].id}", title, "initial", oid=table.oid)]
    ranges: list[tuple[str, Chunk, Chunk]] = []
    for entry in left:
        if ranges and ranges[-1][2].high is not None and ranges[-1][2].high == entry.chunk.low:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], entry.chunk)
        else:
            ranges.append((entry.id, entry.chunk, entry.chunk))
    return [
        SnapshotRequest(f"initial-{name}", title, "initial", low=first.low, high=last.high, oid=table.oid)
        for name, first, last in ranges
    ]


def request_all(sql: Connection, state: StateDir, publications: Sequence[str]) -> None:
    """A start with the mode `always`: every table that has a key is read again, while the stream goes on."""
    lock = Lock(state.capture_lock)
    if lock.acquire() is None:
        return  # the capture runs: this is no start
    try:
        queue = RequestQueue(state.requests_file)
        going = {one.request.table for one in queue.entries() if one.request.kind == "always" and not one.is_ended}
        tables = [one.title for one in read_published(sql, publications) if one.key and one.title not in going]
        queue.add(*(SnapshotRequest(new_id(), name, "always") for name in tables))
    finally:
        lock.release()
