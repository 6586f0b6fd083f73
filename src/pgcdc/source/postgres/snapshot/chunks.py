"""How a table is cut into chunks that tasks read side by side. Every row is in exactly one of them.

By blocks of the heap (ctid ranges: a row does not move while a snapshot can see it), or by ranges of the primary key. The
first chunk has no beginning and the last no end, so that rows outside what was planned are in one of them, too.

By blocks a table must not be rewritten between plan and read (TRUNCATE, VACUUM FULL, ALTER TABLE), nor would a snapshot see
its rows afterwards: a chunk knows the file that it was planned for, and `lock_chunks` compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psycopg

from pgcdc.core.errors import SourceError
from pgcdc.core.state import append_lines, decode_lines, read_lines
from pgcdc.postgres.database import (
    Connection,
    explain_errors,
    name_table,
    quote_identifier,
    quote_literal,
    quote_qualified,
)  # fmt: skip
from pgcdc.source.postgres.setup.tables import PublishedTable, Table

TID_RANGE_SCAN: Final = 140000
"""The first version that reads a ctid range without reading the whole table."""
SAMPLED_PER_CHUNK: Final = 200
SAMPLED_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one table (of a partitioned one: of one partition)."""

    schema: str
    table: str
    filenode: int = 0
    """The file in which the rows are (of a root: the sum of those of its partitions); 0: whichever they are in."""
    is_root: bool = False
    """With the rows of all partitions."""
    first_block: int | None = None
    end_block: int | None = None
    """The first block that is not in the chunk."""
    key: tuple[str, ...] = ()
    low: tuple[str, ...] | None = None
    """The smallest key, as text."""
    high: tuple[str, ...] | None = None
    """The first key that is not in the chunk."""

    @property
    def source(self) -> str:
        """What stands behind FROM."""
        return quote_qualified(self.schema, self.table) if self.is_root else f"ONLY {self.sql}"

    @property
    def sql(self) -> str:
        """The table, as SQL takes it."""
        return quote_qualified(self.schema, self.table)

    @property
    def conditions(self) -> list[str]:
        """Which rows, in SQL: all of them are true."""
        return [
            *([f"ctid >= '({self.first_block},0)'"] if self.first_block is not None else []),
            *([f"ctid < '({self.end_block},0)'"] if self.end_block is not None else []),
            *key_conditions(self.key, None, self.low, self.high),
        ]

    def to_json(self) -> dict[str, Any]:
        """The form in which chunks stand in files."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Chunk:
        """The chunk behind `to_json()`."""
        fields: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in raw.items()}
        return cls(**fields)


def key_conditions(
    key: Sequence[str], after: Sequence[str] | None, low: Sequence[str] | None, high: Sequence[str] | None
) -> list[str]:
    """Which keys, in SQL: behind `after`, from `low` on, below `high`; None: no such bound."""
    columns = ", ".join(map(quote_identifier, key))
    bounds = ((">", after), (">=", low), ("<", high))
    return [f"({columns}) {sign} ({literals(bound)})" for sign, bound in bounds if bound is not None]


def literals(values: Sequence[str]) -> str:
    """Texts as SQL takes them."""
    return ", ".join(map(quote_literal, values))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is cut: a table, or one partition of it."""

    oid: int
    schema: str
    table: str
    filenode: int
    blocks: int
    nbytes: int
    rows: float
    """An estimate; below 0 if the table was never analyzed."""
    is_heap: bool
    is_readable: bool
    key: tuple[str, ...]


@explain_errors("plan how to read the table")
def plan_chunks(conn: Connection, table: Table, *, count: int, by_key: bool = False) -> list[Chunk]:
    """About `count` chunks; more of a partitioned table: no fewer than partitions.

    By blocks, unless that means to read the whole table for each (before PostgreSQL 14) or `by_key` asks for keys; a table
    that has no primary key is then one chunk. An empty table is one chunk, a partitioned table without partitions none.
    """
    parts = _read_parts(conn, table)
    if not all(part.is_readable for part in parts):  # it may still be that the rows can be read through the root
        return [Chunk(table.schema, table.table, sum(part.filenode for part in parts), is_root=True)]
    by_key = by_key or conn.info.server_version < TID_RANGE_SCAN
    total = sum(part.nbytes for part in parts)
    chunks: list[Chunk] = []
    for part in parts:
        wanted = max(1, round(count * part.nbytes / total)) if total else 1
        chunks += _by_key(conn, part, wanted) if by_key or not part.is_heap else _by_blocks(part, wanted)
    return chunks


def whole_table(table: Table) -> Chunk:
    """Everything that is in the table when it is read."""
    return Chunk(table.schema, table.table, is_root=table.kind == "p")


@explain_errors("read the files of the table")
def files_text(conn: Connection, table: Table) -> str:
    """Which files the rows are in: the table's, or those of the partitions that there are now. To be compared."""
    files = sorted((part.schema, part.table, part.filenode) for part in _read_parts(conn, table))
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]


@explain_errors("read the size of the table")
def table_bytes(conn: Connection, table: Table) -> int:
    """What the rows take on disk, with values that are stored apart."""
    return sum(part.nbytes for part in _read_parts(conn, table))


@explain_errors("read the size of the table")
def estimate_rows(conn: Connection, table: Table) -> int:
    """About how many rows there are."""
    parts = _read_parts(conn, table)
    return round(sum(_estimate_rows(conn, part) if part.is_readable else max(part.rows, 0) for part in parts))


@explain_errors("lock the table")
def lock_chunks(conn: Connection, chunks: Sequence[Chunk]) -> None:
    """Keep the chunks' rows where they are until the transaction ends. SourceError if they are there no more.

    Call it before any query of the transaction: without a snapshot of others its own begins with the first.
    """
    for chunk in chunks:
        try:
            with conn.transaction():
                conn.execute(f"LOCK TABLE {chunk.source} IN ACCESS SHARE MODE".encode())
        except psycopg.errors.InsufficientPrivilege:  # of some columns only: a query may do what LOCK may not
            conn.execute(f"SELECT FROM {chunk.source} LIMIT 0".encode())
    for chunk in chunks:
        if chunk.filenode and _filenode(conn, chunk) != chunk.filenode:
            raise SourceError(
                f"table {name_table(chunk.schema, chunk.table)} was truncated or rewritten while it was read",
                "Load it again",
            )


def _filenode(conn: Connection, chunk: Chunk) -> int:
    # These functions look at what is now, a query of the catalog would look into our snapshot.
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
    """The `count` - 1 keys that cut a sample into equal parts, in the server's order."""
    percent = 100 * count * SAMPLED_PER_CHUNK / max(part.rows, 1)
    sample = f" TABLESAMPLE SYSTEM ({percent:.6f})" if percent < 50 and part.is_heap else ""
    key = ", ".join(map(quote_identifier, part.key))
    # As the output function writes them, which the input function reads back as the same key.
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


# The rows estimated of a table without any are -1 since PostgreSQL 14, and were 0 before. What the estimate was made for
# may have grown since, so it is the density that counts.
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


# --- chunks of given keys: files with one in each line
#
# Moved: a row may go from what is still to be read to what was. An UPDATE has the whole new row, so that this does no harm,
# except for long values that it does not change: these are not in the stream, and whoever has not got the row yet would
# never have them. So the new keys of such rows are written down, durably, before the change becomes visible, and read last.
# Vanished: keys that a sink has, and the table perhaps no more.

Key = tuple[bytes, ...]
"""The values of the key's columns."""


class MovedKeys:
    """The file of one request. Keys are texts by the names of their columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: set[Key] | None = None
        read_lines(path)  # cuts off what a crash has left half-written: the change comes again

    @property
    def nbytes(self) -> int:
        """How much is in it."""
        return self.path.stat().st_size if self.path.exists() else 0

    def add(self, moves: Iterable[tuple[Key, Key]], columns: list[str], done: int) -> None:
        """Old and new keys, by `columns`. When all else was read (`done` >= 0), only those that were not read yet count."""
        wanted = list(moves)
        if done >= 0:
            pending = self._load_pending(columns, done)
            kept = []
            for old, new in wanted:  # in order: a row may move on
                if old in pending:
                    pending.add(new)
                    kept.append((old, new))
            wanted = kept
        if wanted:
            texts = ([one.decode("utf-8", "surrogateescape") for one in new] for _, new in wanted)
            append_lines(self.path, [dict(zip(columns, key, strict=True)) for key in texts])

    def read(self, done: int, count: int, key: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], int]:
        """The next keys, each once, in the order of `key`, and how many bytes are done then."""
        found: dict[tuple[str, ...], None] = {}
        for raw, size in decode_lines(self.path.read_bytes()[done:] if self.nbytes else b""):
            if len(found) == count:
                break
            done += size
            if set(key) <= set(raw):
                found[tuple(raw[name] for name in key)] = None
        return tuple(found), done

    def move_on(self) -> None:
        """Some of it was read: what was read is not pending."""
        self._pending = None

    def _load_pending(self, columns: list[str], done: int) -> set[Key]:
        if self._pending is None:
            keys, _ = self.read(done, 1 << 62, tuple(columns))
            self._pending = {tuple(one.encode("utf-8", "surrogateescape") for one in key) for key in keys}
        return self._pending


def read_candidates(
    keys_file: str, begin: int, count: int, table: PublishedTable
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """The next keys in a file, each once, and how many bytes are done then. No keys: it is at its end."""
    found: dict[tuple[str, ...], None] = {}
    try:
        with open(keys_file, "rb") as file:
            file.seek(begin)
            while len(found) < count and (line := file.readline()):
                key = json.loads(line)
                if not isinstance(key, list) or [type(one) for one in key] != [str] * len(table.key):
                    raise ValueError(f"not a key of {len(table.key)} texts: {line[:80]!r}")
                found[tuple(key)] = None
                begin += len(line)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"the keys of table {table.title} in {keys_file} cannot be read: {error}", "Make the file again"
        ) from error
    return tuple(found), begin
