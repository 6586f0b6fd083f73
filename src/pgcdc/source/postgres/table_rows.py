"""The rows of a table as they are, in parallel and of one moment, by COPY."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.database import connect, explain_errors
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.tables import Table, find_table, read_tables
from pgcdc.source.postgres.snapshot.chunks import Chunk, files_text, lock_chunks, plan_chunks, table_bytes, whole_table
from pgcdc.source.postgres.snapshot.copy import check_condition, copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.held import HeldSnapshot, hold_snapshot, read_in_snapshot
from pgcdc.source.postgres.table_columns import read_table_columns
from pgcdc.source.protocol import RowsOptions

PARTITION_BYTES: Final = 64 << 20
SMALL_PARTITION_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What one task reads."""

    chunks: list[Chunk]
    held: HeldSnapshot | None = None
    """None: one task reads everything, so that its own snapshot is as good."""


def find_rows(options: PostgresOptions, name: str, types: TypeOptions) -> PostgresRows:
    """The table with all its columns, generated ones too. Raises with advice if there is no such table."""
    url = options.resolved().require_db()
    with connect(url, may_retry=False) as conn, explain_errors("read the columns of the table"):
        table = find_table(read_tables(conn), name, "option table")
        found = read_table_columns(conn, table)
        catalog = TypeCatalog.load(conn)
        allowed = {
            one
            for (one,) in conn.execute(
                "SELECT attname::text FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped "
                "AND has_column_privilege(attrelid, attnum, 'SELECT')",
                [table.oid],
            ).fetchall()
        }
    key = tuple(one.name for one in found if one.is_primary_key and one.name in allowed)
    return PostgresRows(options, table, tuple(one.typed(catalog, types) for one in found), key)


@dataclass(frozen=True, slots=True)
class PostgresRows:
    """A table as it is now, as `source.protocol.TableRows` says."""

    options: PostgresOptions
    """As they were given: what is a secret is taken from the environment, on each host."""
    table: Table
    columns: tuple[TypedColumn, ...]
    key: tuple[str, ...]

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"table {self.table.name}"

    def plan(self, names: list[str], wanted: RowsOptions, watch_pid: int) -> list[ChunkPart]:
        url = self._url()
        with connect(url, may_retry=False) as conn:
            with self._explained():
                wrong = f"option where is no condition on {self.title}" if wanted.where else ""
                check_condition(conn, names, self.table.sql, [wanted.where], wrong)
            count = wanted.partitions or choose_count(table_bytes(conn, self.table), os.cpu_count() or 1)
            if count == 1 and not wanted.held:
                return [ChunkPart([whole_table(self.table)])]
            # What is planned before the snapshot must be true in it: else it would lack rows without anybody noticing.
            files = wanted.files or files_text(conn, self.table)
            chunks = plan_chunks(conn, self.table, count=count)
            if wanted.held:
                held = HeldSnapshot.from_text(wanted.held)
            else:
                held = hold_snapshot(url, watch_pid=watch_pid, keep_s=wanted.snapshot_keep)
            if files != files_text(conn, self.table):
                raise SourceError(
                    f"{self.title} was truncated or altered while its reading was planned", "Load it again"
                )
        size = -(-len(chunks) // count)
        groups = [chunks[first : first + size] for first in range(0, len(chunks), max(size, 1))]
        return [ChunkPart(group, held) for group in groups]

    def read(self, part: ChunkPart, names: list[str], where: str) -> Iterator[pa.Array]:
        with self._explained(), read_in_snapshot(self._url(), part.held) as conn:
            lock_chunks(conn, part.chunks)
            for chunk in part.chunks:
                statement = copy_statement(names, chunk.source, [*chunk.conditions, where])
                yield from copy_rows(conn, statement, len(names))

    def _url(self) -> str:
        found = self.options.resolved().db
        if not found:
            raise ConfigError(
                "no database is given on this host",
                "Set the variable PGCDC_DB for the executors as well, or give option url",
            )
        return found

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with explain_errors(f"read {self.title}"):
                yield
        except SourceError as error:
            advice = _ADVICE.get(getattr(error.__cause__, "sqlstate", None) or "")
            if advice is None or error.advice:
                raise
            raise SourceError(error.message, advice(self.table)) from error.__cause__


def choose_count(nbytes: int, cores: int) -> int:
    """How many tasks read so much: enough for small results of each, and for all cores if there is enough for them."""
    return max(1, -(-nbytes // PARTITION_BYTES), min(cores, nbytes // SMALL_PARTITION_BYTES))


_GONE: Callable[[Table], str] = lambda table: "It was dropped or altered meanwhile: load it again"  # noqa: E731
_ADVICE: dict[str, Callable[[Table], str]] = {
    "42501": lambda table: f"Run: GRANT SELECT ON {table.sql} TO this role (and on its partitions, if it has any)",
    "42P01": _GONE,
    "42703": _GONE,
}
