"""`spark.read.format("pgcdc")`: the rows of a table as they are, in parallel and of one moment, in Spark's types.

Spark plans a DataFrame once, however often it is read: all its reads are of the same snapshot (or, of a table that one task
reads, each of its own moment).

No filters are pushed down, though Spark has a method for it: Spark 4.3 keeps the filters of the last query for all queries
of the same DataFrame, so that `df.filter(a).union(df.filter(b))` has the rows of b twice. The option `where` filters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from pgcdc.core.errors import ConfigError, ConversionError, SourceError
from pgcdc.postgres.database import Connection, connect, execute_one, explain_errors, quote_identifier
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import Rejected
from pgcdc.postgres.types.mapping import map_type
from pgcdc.postgres.types.rows import take_column
from pgcdc.source.postgres.setup.tables import Table, find_table, read_tables
from pgcdc.source.postgres.snapshot.chunks import Chunk, files_text, lock_chunks, plan_chunks, table_bytes, whole_table
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.held import HeldSnapshot, hold_snapshot, read_in_snapshot
from pgcdc.spark.capture_client import driver_pid
from pgcdc.spark.describe import read_table_columns
from pgcdc.spark.options import BatchOptions, StreamOptions
from pgcdc.spark.table import TypedColumn, TypedTable

__all__ = ["SNAPSHOT", "BatchReader", "ChunkPartition", "LiveTable", "load_live_table"]

SNAPSHOT: Final = "SNAPSHOT"
"""`_op` of a row that was there already."""
PARTITION_BYTES: Final = 64 << 20
SMALL_PARTITION_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class LiveTable:
    """A table as it is now."""

    table: Table
    typed: TypedTable
    key: tuple[str, ...]
    """Its primary key, as far as we may read it."""

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"table {self.typed.title}"

    @cached_property
    def own_schema(self) -> StructType:
        """Its own columns."""
        return StructType([StructField(column.name, column.type.spark) for column in self.typed.columns])

    @cached_property
    def whole_schema(self) -> StructType:
        """With those of typed changes, as far as it has none of that name itself."""
        own = self.typed.by_name
        added = [one for one in self.typed.schema(zset=False) if one.name not in own]
        return StructType([*self.own_schema, *added])


def load_live_table(options: StreamOptions) -> LiveTable:
    """The table with all its columns, generated ones too. Raises with advice if there is no such table."""
    assert options.table is not None
    if not options.db:
        raise ConfigError("no database is given", "Use option('url', ...) or the variable PGCDC_DB")
    with connect(options.db, may_retry=False) as conn, explain_errors("read the columns of the table"):
        table = find_table(read_tables(conn), options.table, "option table")
        found = read_table_columns(conn, table)
        catalog = TypeCatalog.load(conn)
        allowed = {
            name
            for (name,) in conn.execute(
                "SELECT attname::text FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped "
                "AND has_column_privilege(attrelid, attnum, 'SELECT')",
                [table.oid],
            ).fetchall()
        }
    columns = tuple(
        TypedColumn(
            one.name,
            one.type_oid,
            one.typmod,
            map_type(catalog, one.type_oid, one.typmod, one.ndims, options.types),
        )
        for one in found
    )
    typed = TypedTable(table.schema, table.table, columns, table.kind == "p", before=tuple(one.name for one in columns))
    return LiveTable(table, typed, tuple(one.name for one in found if one.is_primary_key and one.name in allowed))


@dataclass
class ChunkPartition(InputPartition):
    """What one task reads."""

    chunks: list[Chunk]
    held: HeldSnapshot | None = None
    """None: one task reads everything, so that its own snapshot is as good."""


class BatchReader(DataSourceReader):
    """Reads a table by COPY. Picklable: it travels to the executors, without a password."""

    def __init__(self, options: StreamOptions, schema: StructType, table: LiveTable) -> None:
        """Of the URL only what the option says; without it every host takes its own variable PGCDC_DB."""
        self._url = options.url
        self._batch = options.part(BatchOptions)
        self._table = table.table
        self._title = table.title
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        by_name = table.typed.by_name
        asked = [name for name in schema.fieldNames() if name in by_name]
        # What the user did not ask for of the key is read as well, for the message about a value that has no place.
        self._names = [*asked, *(name for name in table.key if name not in asked)] or [table.typed.columns[0].name]
        self._types = {name: by_name[name].type for name in self._names}
        self._key = table.key

    # --- in the driver

    def partitions(self) -> list[ChunkPartition]:
        url = find_url(self._url)
        with connect(url, may_retry=False) as conn:
            self._check_readable(conn)
            nbytes = table_bytes(conn, self._table)
            count = self._batch.partitions or choose_count(nbytes, os.cpu_count() or 1)
            if count == 1 and not self._batch.held:
                return [ChunkPartition([whole_table(self._table)])]
            # What is planned before the snapshot must be true in it: else it would lack rows without anybody noticing.
            files = self._batch.files or files_text(conn, self._table)
            chunks = plan_chunks(conn, self._table, count=count)
            if self._batch.held:
                held = HeldSnapshot.from_text(self._batch.held)
            else:
                held = hold_snapshot(url, watch_pid=driver_pid(), keep_s=self._batch.snapshot_keep)
            if files != files_text(conn, self._table):
                raise SourceError(
                    f"{self._title} was truncated or altered while its reading was planned", "Load it again"
                )
        size = -(-len(chunks) // count)
        groups = [chunks[first : first + size] for first in range(0, len(chunks), max(size, 1))]
        return [ChunkPartition(group, held) for group in groups]

    def _check_readable(self, conn: Connection) -> None:
        """Ask for no row: what is wrong with rights, columns or the condition is said before anything starts."""
        columns = ", ".join(map(quote_identifier, self._names))
        where = f"WHERE ({self._batch.where}\n) " if self._batch.where else ""
        with self._explained():
            try:
                execute_one(conn, f"SELECT {columns} FROM {self._table.sql} {where}LIMIT 0")
            except (psycopg.ProgrammingError, psycopg.DataError) as error:
                if not where or isinstance(error, psycopg.errors.InsufficientPrivilege):
                    raise
                text = " ".join((error.diag.message_primary or str(error)).split())
                raise ConfigError(
                    f"option where is no condition on {self._title}: {text}",
                    "Write it as behind WHERE in SQL: total > 100",
                ) from error

    # --- in the executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ChunkPartition):
            return  # Spark's own, for a table of no partitions
        with self._explained(), read_in_snapshot(find_url(self._url), partition.held) as conn:
            lock_chunks(conn, partition.chunks)
            for chunk in partition.chunks:
                conditions = [*chunk.conditions, *([self._batch.where] if self._batch.where else [])]
                statement = copy_statement(self._names, chunk.source, conditions)
                for values in copy_rows(conn, statement, len(self._names)):
                    yield self._batch_of(values)

    def _batch_of(self, values: pa.Array) -> pa.RecordBatch:
        rows = len(values) // len(self._names)
        arrays = [self._column(one, values) if one.name in self._types else _metadata(one, rows) for one in self._arrow]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _column(self, one: pa.Field, values: pa.Array) -> pa.Array:
        texts = take_column(values, len(self._names), self._names.index(one.name))
        try:
            return self._types[one.name].convert(texts)
        except Rejected as problem:
            raise self._rejected(one.name, values, problem) from problem

    def _rejected(self, name: str, values: pa.Array, problem: Rejected) -> ConversionError:
        width = len(self._names)
        row = values.slice(problem.index * width, width).to_pylist()
        shown = {column: _show(value) for column, value in zip(self._names, row, strict=True)}
        key = ", ".join(f"{column}={shown[column]}" for column in self._key)
        where = f"column {name} of {self._title}{f', key {key}' if key else ''}"
        return ConversionError(f"{where}: {problem.reason}", problem.advice)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with explain_errors(f"read {self._title}"):
                yield
        except SourceError as error:
            advice = _ADVICE.get(getattr(error.__cause__, "sqlstate", None) or "")
            if advice is None or error.advice:
                raise
            raise SourceError(error.message, advice(self._table)) from error.__cause__


def choose_count(nbytes: int, cores: int) -> int:
    """How many tasks read so much: enough for small results of each, and for all cores if there is enough for them."""
    return max(1, -(-nbytes // PARTITION_BYTES), min(cores, nbytes // SMALL_PARTITION_BYTES))


_GONE: Callable[[Table], str] = lambda table: "It was dropped or altered meanwhile: load it again"  # noqa: E731
_ADVICE: dict[str, Callable[[Table], str]] = {
    "42501": lambda table: f"Run: GRANT SELECT ON {table.sql} TO this role (and on its partitions, if it has any)",
    "42P01": _GONE,
    "42703": _GONE,
}


def _metadata(one: pa.Field, rows: int) -> pa.Array:
    if one.name == "_op":
        return pa.repeat(pa.scalar(SNAPSHOT, one.type), rows)
    return pa.nulls(rows, one.type)


def _show(value: bytes | None) -> str:
    text = "NULL" if value is None else value.decode(errors="replace")
    return text if len(text) <= 60 else f"{text[:60]}..."


def find_url(url: str) -> str:
    """The database, on whichever host this is."""
    found = url or os.environ.get("PGCDC_DB", "")
    if not found:
        raise ConfigError(
            "no database is given on this host",
            "Set the variable PGCDC_DB for the executors as well, or give option url",
        )
    return found
