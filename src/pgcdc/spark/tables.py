"""Single tables as their queries see them: the columns at the query's place in the stream, with Spark's types.

`read_table` and `read_tables` (changes) and `read_snapshot` (rows) are for users; `describe` shows the Spark type of
every column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)  # fmt: skip

from pgcdc.capture.control import ask
from pgcdc.core.errors import ConfigError, ConversionError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeChange, ShapeHistory
from pgcdc.core.state import StateDir, read_json, write_json
from pgcdc.event.typed import BEFORE, UNCHANGED, WEIGHT, TypedColumn, TypedTable, show_value
from pgcdc.postgres.database import name_table, split_table
from pgcdc.postgres.types.column import Rejected, take_column
from pgcdc.source.protocol import ColumnsQuery, RowsOptions, TableRows, make_source
from pgcdc.spark.capture_client import driver_pid
from pgcdc.spark.options import StreamOptions
from pgcdc.spark.session import register
from pgcdc.spool.consumers import Consumers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


RENAMED_ADVICE = (
    "Read it under its new name: the same consumer continues there. For a new table with the old name, use a "
    "new consumer"
)
_FIRST = {"_op": StringType(), "_lsn": LongType(), "_ordinal": LongType(), "_xid": LongType(), "_ts": TimestampType()}


# --- Spark types


def spark_type(arrow: pa.DataType) -> DataType:
    """Spark's type for a `ColumnType.arrow`."""
    return from_arrow_type(arrow, prefer_timestamp_ntz=True)


def spark_name(arrow: pa.DataType) -> str:
    """The same type in Spark's notation."""
    return spark_type(arrow).simpleString()


def own_schema(columns: Iterable[TypedColumn]) -> StructType:
    return StructType([StructField(column.name, spark_type(column.type.arrow)) for column in columns])


def typed_schema(table: TypedTable, *, zset: bool) -> StructType:
    """The schema for Spark: the table's columns, then the metadata columns."""
    own = own_schema(table.columns)
    last = StructField(WEIGHT, IntegerType()) if zset else StructField(BEFORE, own)
    first = [StructField(name, kind) for name, kind in _FIRST.items()]
    return StructType([*own, *first, last, StructField(UNCHANGED, ArrayType(StringType()))])


def narrow(table: TypedTable, schema: StructType) -> TypedTable:
    """The same table, reduced to these columns."""
    old = next((field.dataType for field in schema if field.name == BEFORE), None)
    before = tuple(old.fieldNames()) if isinstance(old, StructType) else ()
    asked = {*schema.fieldNames(), *before}
    columns = tuple(column for column in table.columns if column.name in asked)
    return replace(table, columns=columns, is_whole=False, before=before)


def check_names(table: TypedTable) -> None:
    """Raise ConfigError for columns whose names Spark cannot distinguish."""
    taken = {*_FIRST, BEFORE, UNCHANGED, WEIGHT}
    for column in table.columns:
        if column.name.lower() in taken:
            raise ConfigError(
                f"table {table.title} has a column {column.name}, a name that typed rows reserve",
                "Read it as events (without option `table`), or select its other columns with .schema(...)",
            )
    lower = [column.name.lower() for column in table.columns]
    for name in lower:
        if lower.count(name) > 1:
            raise ConfigError(
                f"table {table.title} has two columns named {name}, which differ only in case",
                "Select one of them with .schema(...), or read it as events (without option `table`)",
            )


# --- for users


def read_table(spark: SparkSession, table: str, **options: str) -> DataFrame:
    """A streaming DataFrame of one table: its own columns, in Spark's types.

    `options` are those of `format("pgcdc")`, as in docs/tables.md; `slot`, `state_dir` and `consumer` identify the
    stream to read.
    """
    register(spark)
    return spark.readStream.format("pgcdc").options(**options).option("table", table).load()


def read_snapshot(spark: SparkSession, table: str, **options: str) -> DataFrame:
    """A DataFrame of the rows in a table, all from the same moment. Options: see docs/snapshots.md."""
    register(spark)
    return spark.read.format("pgcdc").options(**{"metadata": "false", **options}).option("table", table).load()


def read_tables(spark: SparkSession, tables: Iterable[str], **options: str) -> dict[str, DataFrame]:
    """One typed streaming DataFrame per table, all from one slot.

    Each is its own consumer, named after its table (`shop.orders`). The option `consumer` is a prefix
    (`report:shop.orders`).
    """
    if isinstance(tables, str):
        raise ConfigError("read_tables needs a list of tables, not a text", f"Write [{tables!r}], or use read_table")
    names = list(tables)
    titles = [name_table(*split_table(name)) for name in names]
    if not names or len(set(titles)) != len(titles):
        raise ConfigError("read_tables needs every table only once", "Pass a list of different tables")
    given = dict(options)
    prefix = given.pop("consumer", "")
    if not any(given.get(name) for name in ("tables", "schemas", "all_tables", "publication")):
        given["tables"] = ",".join(names)
    return {
        name: read_table(spark, name, consumer=f"{prefix}:{title}" if prefix else title, **given)
        for name, title in zip(names, titles, strict=True)
    }


# --- the query's place in the stream


def load_table(options: StreamOptions) -> TypedTable:
    """The table at the place where the query begins or resumes: from the history if it covers that place, else as it
    was when the query began, else as it is now. Raises with advice if the table does not exist or cannot be read in
    that form."""
    assert options.table is not None
    namespace, name = split_table(options.table)
    state = StateDir(options.state_dir)
    change = _shape_here(options, state, namespace, name)
    notes = (read_json(_notes(state, options.consumer)) or {}).get(name_table(namespace, name))
    noted = [(column, oid, typmod) for column, oid, typmod in notes] if notes is not None else None
    wanted = ColumnsQuery((namespace, name), options.types, change, noted, options.rows.zset)
    columns = make_source(options.source).typed_columns(state, wanted)
    return TypedTable(namespace, name, columns, before=tuple(column.name for column in columns))


def remember_table(state: StateDir, consumer: str, table: TypedTable) -> None:
    """Save the columns that a query began with: the next load may come before later shapes were read."""
    columns = [[column.name, column.type_oid, column.typmod] for column in table.columns]
    path = _notes(state, consumer)
    noted = {**(read_json(path) or {}), table.title: columns}
    path.parent.mkdir(exist_ok=True)
    write_json(path, noted)


def _notes(state: StateDir, consumer: str) -> Path:
    return state.path / "typed" / f"{quote(consumer, safe='')}.json"


def _shape_here(options: StreamOptions, state: StateDir, namespace: str, name: str) -> ShapeChange | None:
    """The shape in force where the query resumes. For a table first seen after that place, its first shape."""
    history = ShapeHistory(state.shapes_file)
    history.refresh()
    place = Position.parse(options.start) if options.start else _acknowledged(state, options.consumer)
    if place is None:
        return None
    found = history.in_force(namespace, name, place) or history.next(namespace, name, place)
    if found is None or (found.after.namespace, found.after.name) == (namespace, name):
        return found
    now = name_table(found.after.namespace, found.after.name)
    raise SourceError(f"table {name_table(namespace, name)} was renamed to {now} at {found.position}", RENAMED_ADVICE)


def _acknowledged(state: StateDir, consumer: str) -> Position | None:
    """The consumer's ack; the slot's position for a new consumer; None without a slot."""
    known = ask(state.capture_lock, {"do": "status"}).get("consumers", {})
    if consumer in known:
        return Position.parse(known[consumer]["ack"])
    identity = state.identity()
    if identity is None or not identity.created:
        return None
    consumers = Consumers(state.consumers_file)
    return consumers[consumer].ack if consumer in consumers else Position.end(consumers.confirmed_lsn)


# --- the existing rows of a table: spark.read.format("pgcdc")
#
# Spark plans a DataFrame only once, so all its reads see the same snapshot (or, for a table that one task reads, each
# read sees its own moment).
#
# No filters are pushed down, although Spark has a method for it: Spark 4.3 keeps the filters of the last query for all
# queries of the same DataFrame, so `df.filter(a).union(df.filter(b))` would have the rows of b twice. Use the option
# `where` to filter.

SNAPSHOT = "SNAPSHOT"  # `_op` of a row that already existed


def load_rows(options: StreamOptions) -> TableRows:
    """The table to read. Raises with advice if it does not exist."""
    assert options.table is not None
    return make_source(options.source).snapshot(options.table, options.types)


def whole_schema(rows: TableRows) -> StructType:
    """The table's columns, then the metadata columns whose names the table does not use."""
    own, columns = own_schema(rows.columns), {column.name for column in rows.columns}
    typed = typed_schema(TypedTable("", "", rows.columns), zset=False)
    return StructType([*own, *(one for one in typed if one.name not in columns)])


@dataclass
class RowsPartition(InputPartition):
    """What one task reads; `part` belongs to the source."""

    part: Any


class BatchReader(DataSourceReader):
    """Reads a table. Picklable, because executors need it; contains no password."""

    def __init__(self, options: StreamOptions, schema: StructType, rows: TableRows) -> None:
        self._batch = options.part(RowsOptions)
        self._rows = rows
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        by_name = {column.name: column.type for column in rows.columns}
        asked = [name for name in schema.fieldNames() if name in by_name]
        # Key columns that the user dropped are read too, for the message about a value that does not fit.
        self._names = [*asked, *(name for name in rows.key if name not in asked)] or [rows.columns[0].name]
        self._types = {name: by_name[name] for name in self._names}

    def partitions(self) -> list[RowsPartition]:
        return [RowsPartition(part) for part in self._rows.plan(self._names, self._batch, driver_pid())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RowsPartition):
            return  # Spark's own partition, for a table without any
        for values in self._rows.read(partition.part, self._names, self._batch.where):
            count = len(values) // len(self._names)
            arrays = [
                self._column(one.name, values) if one.name in self._types else _metadata(one, count)
                for one in self._arrow
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _column(self, name: str, values: pa.Array) -> pa.Array:
        try:
            return self._types[name].convert(take_column(values, len(self._names), self._names.index(name)))
        except Rejected as problem:
            width = len(self._names)
            row = values.slice(problem.index * width, width).to_pylist()
            shown = {column: show_value(value) for column, value in zip(self._names, row, strict=True)}
            key = ", ".join(f"{column}={shown[column]}" for column in self._rows.key)
            where = f"column {name} of {self._rows.title}{f', key {key}' if key else ''}"
            raise ConversionError(f"{where}: {problem.reason}", problem.advice) from problem


def _metadata(one: pa.Field, rows: int) -> pa.Array:
    if one.name == "_op":
        return pa.repeat(pa.scalar(SNAPSHOT, one.type), rows)
    return pa.nulls(rows, one.type)
