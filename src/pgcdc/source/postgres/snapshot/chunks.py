"""How a table is cut into chunks that tasks read in parallel. Every row is in exactly one of them.

Cuts are by blocks of the heap (ctid ranges: a row does not move while a snapshot can see it), or by ranges of the
primary key. The first chunk has no start and the last no end, so rows outside the planned range are included, too.

When cut by blocks, a table must not be rewritten between plan and read (TRUNCATE, VACUUM FULL, ALTER TABLE); a snapshot
would not see its rows afterwards. So a chunk knows the file for which it was planned, and `lock_chunks` compares.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import psycopg

from pgcdc.core.errors import ConnectionLost, SourceError
from pgcdc.postgres.database import (
    Connection,
    connect,
    explain_errors,
    explain_right,
    name_table,
    quote_identifier,
    quote_literal,
    quote_qualified,
)  # fmt: skip
from pgcdc.source.postgres.setup.shapes import read_catalog
from pgcdc.source.postgres.setup.tables import PublishedTable, Table, read_published
from pgcdc.source.postgres.snapshot.held import import_snapshot

logger = logging.getLogger("pgcdc.capture")

TID_RANGE_SCAN: Final = 140000  # The first version that reads a ctid range without reading the whole table
SAMPLED_PER_CHUNK: Final = 200
SAMPLED_BLOCKS: Final = 16
CHUNK_BYTES = int(os.environ.get("PGCDC_SNAPSHOT_CHUNK_BYTES", "") or 16 << 20)
"""Bytes of a table for one task. (The variable is for tests.)"""
MAX_CHUNKS = 10_000
LOCK_TIMEOUT = "2s"
_LOCKED = "SELECT relation::int8::text FROM pg_locks WHERE locktype = 'relation' AND pid = pg_backend_pid()"
# A smaller table can always be read by its key, so that is how a crash's remainder of it is read
SMALL_BYTES = 256 << 20
CORRELATED = 0.5  # Above this, rows are stored roughly in key order, and reading by key does not jump around


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one table (or of one partition)."""

    schema: str
    table: str
    # The number of the file that holds the rows (for a root: the sum of its partitions' files); 0: any
    filenode: int = 0
    is_root: bool = False  # Includes the rows of all partitions
    first_block: int | None = None
    end_block: int | None = None  # The first block after the chunk
    key: tuple[str, ...] = ()
    low: tuple[str, ...] | None = None  # The smallest key, as text
    high: tuple[str, ...] | None = None  # The first key after the chunk

    @property
    def source(self) -> str:
        """The FROM clause."""
        return quote_qualified(self.schema, self.table) if self.is_root else f"ONLY {self.sql}"

    @property
    def sql(self) -> str:
        return quote_qualified(self.schema, self.table)

    @property
    def conditions(self) -> list[str]:
        """SQL conditions, joined with AND."""
        return [
            *([f"ctid >= '({self.first_block},0)'"] if self.first_block is not None else []),
            *([f"ctid < '({self.end_block},0)'"] if self.end_block is not None else []),
            *key_conditions(self.key, None, self.low, self.high),
        ]


def key_conditions(
    key: Sequence[str], after: Sequence[str] | None, low: Sequence[str] | None, high: Sequence[str] | None
) -> list[str]:
    """SQL conditions for keys after `after`, from `low` on, below `high`; None: no such bound."""
    columns = ", ".join(map(quote_identifier, key))
    bounds = ((">", after), (">=", low), ("<", high))
    return [f"({columns}) {sign} ({literals(bound)})" for sign, bound in bounds if bound is not None]


def literals(values: Sequence[str]) -> str:
    return ", ".join(map(quote_literal, values))


@dataclass(frozen=True, slots=True)
class _Part:
    """The thing to cut: a table, or one partition."""

    oid: int
    schema: str
    table: str
    filenode: int
    blocks: int
    nbytes: int
    rows: float  # An estimate; negative if the table was never analyzed
    is_heap: bool
    is_readable: bool
    key: tuple[str, ...]


@explain_errors("plan how to read the table")
def plan_chunks(conn: Connection, table: Table, *, count: int, by_key: bool = False) -> list[Chunk]:
    """About `count` chunks; at least one per partition. They are cut by blocks, unless each would read the whole table
    (before PostgreSQL 14) or `by_key` asks for keys; then a table without primary key is one chunk. An empty table is
    one chunk; a partitioned table without partitions has none."""
    parts = _read_parts(conn, table)
    if not all(part.is_readable for part in parts):  # the rows may still be readable through the root
        return [Chunk(table.schema, table.table, sum(part.filenode for part in parts), is_root=True)]
    by_key = by_key or conn.info.server_version < TID_RANGE_SCAN
    total = sum(part.nbytes for part in parts)
    chunks: list[Chunk] = []
    for part in parts:
        wanted = max(1, round(count * part.nbytes / total)) if total else 1
        chunks += _by_key(conn, part, wanted) if by_key or not part.is_heap else _by_blocks(part, wanted)
    return chunks


def whole_table(table: Table) -> Chunk:
    return Chunk(table.schema, table.table, is_root=table.kind == "p")


@explain_errors("read the files of the table")
def files_text(conn: Connection, table: Table) -> str:
    """Identifies the files that hold the rows: the table's, or those of its current partitions. For comparison only."""
    files = sorted((part.schema, part.table, part.filenode) for part in _read_parts(conn, table))
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]


@explain_errors("read the size of the table")
def table_bytes(conn: Connection, table: Table) -> int:
    """The rows' size on disk, with out-of-line values."""
    return sum(part.nbytes for part in _read_parts(conn, table))


@explain_errors("read the size of the table")
def estimate_rows(conn: Connection, table: Table) -> int:
    parts = _read_parts(conn, table)
    return round(sum(_estimate_rows(conn, part) if part.is_readable else max(part.rows, 0) for part in parts))


@explain_errors("lock the table")
def lock_chunks(conn: Connection, chunks: Sequence[Chunk]) -> None:
    """Keep the chunks' rows in place until the transaction ends. Raises SourceError if they have moved. Call it before
    any query of the transaction: without an imported snapshot, the transaction takes its own at its first query."""
    for chunk in chunks:
        try:
            with conn.transaction():
                conn.execute(f"LOCK TABLE {chunk.source} IN ACCESS SHARE MODE".encode())
        except psycopg.errors.InsufficientPrivilege:
            # The rights cover only some columns: a query is allowed where LOCK is not.
            conn.execute(f"SELECT FROM {chunk.source} LIMIT 0".encode())
    for chunk in chunks:
        if chunk.filenode and _filenode(conn, chunk) != chunk.filenode:
            raise SourceError(
                f"table {name_table(chunk.schema, chunk.table)} was truncated or rewritten while it was read",
                "Load it again",
            )


def check_partitions(conn: Connection, details: Mapping[str, Any] | None) -> None:
    """Call it after a query of a root. Raises ConnectionLost if the query missed a partition that its snapshot sees.
    ATTACH takes no lock that would exclude us, and other sessions see its rows slightly before they learn of the
    partition."""
    leaves = (details or {}).get("leaves", ())
    read = {oid for (oid,) in conn.execute(_LOCKED).fetchall()} if leaves else set()
    if not read.issuperset(leaves):
        raise ConnectionLost("a partition was attached at this moment")


def _filenode(conn: Connection, chunk: Chunk) -> int:
    # These functions see the present; a catalog query would see our snapshot.
    query = "SELECT pg_relation_filenode(%s::regclass)::int8"
    if chunk.is_root:
        query = "SELECT sum(pg_relation_filenode(relid)::int8)::int8 FROM pg_partition_tree(%s::regclass)"
    row = conn.execute(query.encode(), [chunk.sql]).fetchone()
    return row[0] if row and row[0] else 0


def _by_blocks(part: _Part, count: int) -> list[Chunk]:
    count = max(1, min(count, part.blocks))
    bounds = [round(part.blocks * number / count) for number in range(1, count)]
    return [
        Chunk(part.schema, part.table, part.filenode, first_block=first, end_block=end)
        for first, end in pairwise([None, *bounds, None])
    ]


def _by_key(conn: Connection, part: _Part, count: int) -> list[Chunk]:
    bounds = list(_sample_keys(conn, part, count)) if part.key and count > 1 else []
    return [
        Chunk(part.schema, part.table, part.filenode if part.is_heap else 0, key=part.key, low=low, high=high)
        for low, high in pairwise([None, *bounds, None])
    ]


def _sample_keys(conn: Connection, part: _Part, count: int) -> Iterator[tuple[str, ...]]:
    """The `count` - 1 keys that divide a sample into equal parts, in the server's order."""
    percent = 100 * count * SAMPLED_PER_CHUNK / max(part.rows, 1)
    sample = f" TABLESAMPLE SYSTEM ({percent:.6f})" if percent < 50 and part.is_heap else ""
    key = ", ".join(map(quote_identifier, part.key))
    # Texts from the output function, which the input function reads back as the same key.
    texts = ", ".join(f"format('%s', {quote_identifier(name)})" for name in part.key)
    query = (
        f"SELECT {texts} FROM (SELECT {key}, (row_number() OVER (ORDER BY {key}) - 1) * {count} AS place, "
        f"count(*) OVER () AS total FROM ONLY {quote_qualified(part.schema, part.table)}{sample}) s "
        f"WHERE place / total > (place - {count}) / total AND place >= total ORDER BY {key}"
    )
    yield from conn.execute(query.encode()).fetchall()


def _estimate_rows(conn: Connection, part: _Part) -> float:
    if part.rows >= 0 or not part.blocks or not part.is_heap:
        return max(part.rows, 0)
    seen = min(part.blocks, SAMPLED_BLOCKS)
    name = quote_qualified(part.schema, part.table)
    row = conn.execute(f"SELECT count(*) FROM ONLY {name} WHERE ctid < '({seen},0)'".encode()).fetchone()
    return row[0] * part.blocks / seen if row else 0


def _read_parts(conn: Connection, table: Table) -> list[_Part]:
    found = conn.execute(_PARTS, [table.oid] * 2).fetchall()
    return [_Part(*(*fields, tuple(key))) for *fields, key in found]


# An empty table's row estimate is -1 since PostgreSQL 14, and was 0 before. The table may have grown since the
# estimate, so we use the row density.
_PARTS = """
SELECT c.oid::int8, n.nspname::text, c.relname::text, coalesce(pg_relation_filenode(c.oid), 0)::int8,
       coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int8, coalesce(pg_table_size(c.oid), 0),
       CASE WHEN c.relpages > 0 AND c.reltuples >= 0
            THEN c.reltuples::float8 / c.relpages * pg_relation_size(c.oid) / current_setting('block_size')::int8
            WHEN pg_relation_size(c.oid) = 0 THEN 0 ELSE -1 END,
       c.relkind = 'r' AND a.amname = 'heap',
       has_any_column_privilege(c.oid, 'SELECT'),
       ARRAY(SELECT t.attname::text
             FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
             JOIN pg_attribute t ON t.attrelid = c.oid AND t.attnum = k.number
             WHERE i.indrelid = c.oid AND i.indisprimary AND k.place <= i.indnkeyatts ORDER BY k.place)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_am a ON a.oid = c.relam
WHERE c.relkind <> 'p' AND (c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
ORDER BY n.nspname, c.relname
"""


# --- tables of an initial snapshot, cut in the same snapshot in which they are read


@explain_errors("plan the initial snapshot")
def plan_tables(
    url: str, publications: Sequence[str], snapshot: str, oids: set[int] | None = None
) -> list[tuple[PublishedTable, dict[str, Any] | None, tuple[list[Chunk], int] | None]] | None:
    """These tables (None: all) with the details of their shapes in a snapshot, their chunks there, and the estimated
    rows. The result is None if the snapshot was lost. The chunks are None for a table truncated or altered since, which
    cannot be read in it. A table that no longer exists is missing. The capture's loop calls this and must not wait for
    locks: then LockNotAvailable is the cause of a SourceError."""
    with connect(url, application_name="pgcdc snapshot reader") as conn:
        conn.execute(f"SET lock_timeout = {quote_literal(LOCK_TIMEOUT)}".encode())
        now = {one.relation.oid: one for one in read_published(conn, publications)}
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if not import_snapshot(conn, snapshot):
            return None
        then = {one.relation.oid: one for one in read_published(conn, publications)}
        chosen = {oid: table for oid, table in now.items() if oids is None or oid in oids}
        look = read_catalog(conn, [table.relation for table in chosen.values()], publications)
        return [
            (table, look.describe(table.relation), _try_to_cut(conn, table, then.get(oid)))
            for oid, table in chosen.items()
        ]


def published_oids(url: str, publications: Sequence[str]) -> set[int]:
    with connect(url, application_name="pgcdc snapshot reader") as conn:
        return {one.relation.oid for one in read_published(conn, publications)}


def _try_to_cut(conn: Connection, table: PublishedTable, then: PublishedTable | None) -> tuple[list[Chunk], int] | None:
    """The chunks and estimated rows; None if the table has changed since the snapshot."""
    if then is None or then.relation != table.relation or _is_rewritten(conn, table.relation.oid):
        return None
    try:
        with conn.transaction():
            return _cut(conn, table)
    except ConnectionLost:
        raise
    except SourceError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise
        if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            raise explain_right(table.title, table.sql, conn.info.user, error.__cause__) from None
        logger.warning("table %s: %s", table.title, error.message)
        return None


def _is_rewritten(conn: Connection, oid: int) -> bool:
    """Whether the table (or a partition) has a different file than in the snapshot, which would not see its rows."""
    row = conn.execute(_REWRITTEN, [oid, oid]).fetchone()
    return bool(row and row[0])


# The catalog query sees the snapshot; the function sees the present.
_REWRITTEN = """
SELECT bool_or(c.relfilenode::int8 IS DISTINCT FROM pg_relation_filenode(c.oid)::int8)
FROM pg_class c WHERE c.relkind = 'r' AND (c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
"""


def _cut(conn: Connection, published: PublishedTable) -> tuple[list[Chunk], int]:
    one = published.relation
    if not published.columns:
        return [], 0
    table = Table(one.oid, one.namespace, one.name, published.kind, "p", False, True, True, False, ())
    nbytes = table_bytes(conn, table)
    count = max(1, min(MAX_CHUNKS, math.ceil(nbytes / CHUNK_BYTES)))
    chunks = plan_chunks(conn, table, count=count, by_key=_is_by_key(conn, published, nbytes))
    return chunks, estimate_rows(conn, table)


def _is_by_key(conn: Connection, published: PublishedTable, nbytes: int) -> bool:
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
