"""The Spark source `format("pgcdc")`: a stream of events of all tables, or typed rows of one, as a stream or as it is.

Every query imports this in each of its processes, so that what only typed rows need is imported where they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from pgcdc.core.errors import ConfigError
from pgcdc.event.columns import EVENT_COLUMNS, EVENT_SCHEMA, KEY_COLUMNS, SHAPE_COLUMNS, TEXT_COLUMNS
from pgcdc.event.forms import form_of
from pgcdc.spark.options import check_kind, parse_options
from pgcdc.spark.reader import ChangeReader

if TYPE_CHECKING:
    from pgcdc.event.typed import TypedTable
    from pgcdc.spark.tables import BatchReader


class ChangeSource(DataSource):
    """`format("pgcdc")`. Options: see docs/spark.md."""

    _table: TypedTable | None = None

    @classmethod
    def name(cls) -> str:
        return "pgcdc"

    def schema(self) -> str | StructType:
        options = parse_options(self.options)
        if options.table is None:
            return EVENT_SCHEMA
        # Spark does not say for whom it asks: what a read and a stream of the same options get is the same.
        if not options.metadata:
            from pgcdc.spark.tables import load_rows, own_schema

            return own_schema(load_rows(options).columns)
        from pgcdc.spark.tables import check_names, load_table, typed_schema

        self._table = load_table(options)  # the reader gets the same: Spark hands this object on
        check_names(self._table)
        return typed_schema(self._table, zset=options.rows.zset)

    def reader(self, schema: StructType) -> BatchReader:
        options = parse_options(self.options)
        if options.table is None:
            raise ConfigError(
                "spark.read needs one table", "Name it with option('table', ...), or use spark.readStream"
            )
        check_kind(self.options, is_batch=True)
        from pgcdc.spark.tables import BatchReader, load_rows, whole_schema

        rows = load_rows(options)
        _compare(schema, {field.name: field.dataType.simpleString() for field in whole_schema(rows)}, rows.title)
        return BatchReader(options, schema, rows)

    def streamReader(self, schema: StructType) -> ChangeReader:
        options = parse_options(self.options)
        check_kind(self.options, is_batch=False)
        if options.table is None:
            _check_schema(schema)
            return ChangeReader(options, schema)
        from pgcdc.spark.tables import check_names, load_table, narrow
        from pgcdc.spark.typed_reader import TypedReader

        table = self._table
        if table is None:  # the user gave the schema
            table = load_table(options)
            _check_typed(schema, table, zset=options.rows.zset)
            table = narrow(table, schema)
            check_names(table)
        return TypedReader(options, schema, table)


def _check_schema(schema: StructType) -> None:
    """A user's schema may leave columns out, and ask for JSON, keys and shapes; names and types are ours."""
    known = {**EVENT_COLUMNS, **KEY_COLUMNS, **SHAPE_COLUMNS, **TEXT_COLUMNS}
    if schema.simpleString() in ("struct<block:binary,is_last:boolean>", "struct<keyed_block:binary,is_last:boolean>"):
        return
    if not any(form_of(name) for name in schema.fieldNames()):  # what a lane asks for is right
        _compare(schema, known, "events")


def _check_typed(schema: StructType, table: TypedTable, *, zset: bool) -> None:
    """A user's schema may leave columns out; their types are the table's."""
    from pgcdc.event.typed import BEFORE
    from pgcdc.spark.tables import typed_schema

    known = {field.name: field.dataType.simpleString() for field in typed_schema(table, zset=zset)}
    before = next((field.dataType for field in schema if field.name == BEFORE), None)
    if isinstance(before, StructType) and not zset:
        _compare(before, {column.name: known[column.name] for column in table.columns}, f"table {table.title}")
        known[BEFORE] = before.simpleString()
    _compare(schema, known, f"table {table.title}")


def _compare(schema: StructType, known: dict[str, str], what: str) -> None:
    for field in schema.fields:
        if not field.nullable:
            raise ConfigError(
                f"the schema has {field.name} NOT NULL, but a DELETE or TRUNCATE may leave it empty",
                "Leave NOT NULL out, and filter the rows that you want",
            )
        kind = field.dataType.simpleString()
        if field.name in known and known[field.name] != kind:
            actual = known[field.name]
            raise ConfigError(
                f"the schema asks for {field.name} {kind}, but it is {actual} of {what}", f"Write {actual}"
            )
        if field.name not in known:
            raise ConfigError(
                f"the schema asks for a column {field.name} {kind}, which {what} does not have",
                f"There are: {', '.join(f'{name} {text}' for name, text in known.items())}",
            )
