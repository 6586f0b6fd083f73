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
    name_table,
    quote_identifier,
    quote_literal,
    split_table,
)
from pgcdc.source.postgres.setup.guard import connection_ended
from pgcdc.source.postgres.setup.published import PublishedTable, find_published, read_published
from pgcdc.source.postgres.setup.tables import Table
from pgcdc.source.postgres.snapshot.chunks import Chunk, estimate_rows, plan_chunks, table_bytes
from pgcdc.source.postgres.snapshot.held import Hold, import_snapshot
from pgcdc.source.postgres.snapshot.plan import Entry, PlannedTable
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, new_id

__all__ = [
    "NOTHING_LOST",
    "NeverReadable",
    "NoRight",
    "SnapshotLost",
    "TableLocked",
    "check_readable",
    "check_table",
    "find_table",
    "note_tables",
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
        try:
            check_table(sql, table, table.row_filter or "", lock_timeout="0")
        except NoRight as error:
            raise NoRight(error.message, f"{error.advice}; or deliver only changes: --snapshot-mode never") from None


def find_table(conn: Connection, publications: Sequence[str], name: str, oid: int = 0) -> PublishedTable:
    """The table that is meant, if it can be read while the stream goes on. SourceError with advice if not."""
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
        what = "is not captured any more" if oid else "is not captured"
        raise NeverReadable(f"table {name} {what}", f"Name one of those that are: {names}")
    if not found.key:
        raise NeverReadable(
            f"table {found.title} has no primary key or replica identity index: its existing rows cannot be read while the "
            "stream goes on",
            "Add a primary key; or begin anew with all tables: pgcdc resync --new-slot",
        )
    return found


def check_table(conn: Connection, table: PublishedTable, where: str = "", lock_timeout: str = "1s") -> None:
    """Raise SourceError if its rows cannot be read: no right, or a condition that is none. Timeout 0: wait for locks."""
    columns = ", ".join(map(quote_identifier, table.columns))
    condition = f" WHERE ({where}\n)" if where else ""
    try:
        with conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            conn.execute("SET LOCAL row_security = off")
            conn.execute(f"SET LOCAL lock_timeout = {quote_literal(lock_timeout)}".encode())
            execute_one(conn, f"SELECT {columns} FROM {table.source}{condition} LIMIT 0")
    except psycopg.errors.InsufficientPrivilege as error:
        refused = explain_right(table.title, table.sql, conn.info.user, error)
        raise NoRight(refused.message, refused.advice) from None
    except psycopg.errors.LockNotAvailable:
        raise SourceError(f"table {table.title} is locked", "Try again when nobody alters it") from None
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.FeatureNotSupported) as error:
        if not where:
            raise
        raise SourceError(
            f"the condition {where!r} cannot be used: {error.diag.message_primary}",
            f"Write an SQL expression over the columns of {table.title}, as behind WHERE",
        ) from None


class NeverReadable(SourceError):
    """The table is gone, is not published any more, or has no key: to try again is no use."""


class SnapshotLost(SourceError):
    """The snapshot is not held any more."""


class NoRight(SourceError):
    """The table must not be read."""


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
        if not import_snapshot(conn, hold.name):
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


def note_tables(queue: RequestQueue, sql: Connection, publications: Sequence[str], *, is_wanted: bool) -> list[str]:
    """Note which tables there are; of those that are new, the rows are asked for if that `is_wanted`. Returns these.

    What was noted is durable together with the requests, so that no crash forgets a table. At the first time nothing is
    asked for: these tables are those of the slot's beginning.
    """
    try:
        with sql.transaction():  # the view opens every table: the stream must not wait behind a VACUUM FULL
            sql.execute("SET LOCAL lock_timeout = '100ms'")
            found = {oid: name_table(schema, name) for oid, schema, name in sql.execute(_TABLES, [list(publications)])}
    except psycopg.errors.LockNotAvailable:
        return []  # we look again in a few seconds
    except psycopg.Error as error:
        raise connection_ended(error) from error
    known = queue.tables
    if known == found.keys():
        return []
    fresh = sorted(found.keys() - known) if known is not None and is_wanted else []
    added = [(oid, found[oid]) for oid in fresh]
    queue.know(found, [SnapshotRequest(new_id(), name, "added", oid=oid) for oid, name in added])
    if added:
        logger.info("new tables, whose existing rows are read: %s", ", ".join(name for _, name in added))
    return [name for _, name in added]


_TABLES = """
SELECT c.oid::int8, n.nspname::text, c.relname::text
FROM pg_publication_tables p JOIN pg_namespace n ON n.nspname = p.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
WHERE p.pubname = ANY (%s)
"""


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
