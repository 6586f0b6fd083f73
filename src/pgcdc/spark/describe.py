"""A table as Spark will see it: its live columns from the catalog, and what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc.postgres.database import Connection, connect, explain_errors
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.postgres.types.mapping import check_options, map_type
from pgcdc.source.postgres.setup.tables import Table, find_table, read_tables

__all__ = ["ColumnDescription", "TableColumn", "describe", "describe_columns", "read_table_columns"]

_GENERATED = {"": "", "s": "in the stream only with --generated-columns", "v": "virtual: never in the stream"}


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column, as the catalog has it now."""

    name: str
    type_oid: int
    typmod: int
    ndims: int
    """Declared dimensions of an array. PostgreSQL does not enforce them, and some ways to make a table lose them: 0."""
    number: int
    pg_type: str
    """As in CREATE TABLE: `numeric(12,2)`."""
    not_null: bool
    is_key: bool
    """Part of the replica identity: known of deleted rows."""
    is_primary_key: bool
    generated: str
    """`s` (stored), `v` (virtual) or nothing. Virtual columns are never in the stream, stored ones by option."""


@dataclass(frozen=True, slots=True)
class ColumnDescription:
    """What `pgcdc describe` says about a column."""

    column: str
    pg_type: str
    spark_type: str
    """As Spark writes it: `decimal(12,2)`."""
    nullable: bool
    key: str
    """`primary`, `identity` (part of the replica identity, but of no primary key) or nothing."""
    exactness: str
    """`exact`, `converted` (by `rule`) or `text` (PostgreSQL's own)."""
    rule: str
    """How it is converted, or why it is text; and of a generated column, whether the stream has it."""


def describe(
    url: str,
    table: str,
    *,
    json: str = "string",
    numeric: str = "decimal",
    out_of_range: str = "error",
    arrays: str = "array",
    composites: str = "struct",
) -> list[ColumnDescription]:
    """The columns of a table, and what they become in Spark with these options (docs/types.md)."""
    options = check_options(TypeOptions(json, numeric, out_of_range, arrays, composites))
    with connect(url, application_name="pgcdc describe", may_retry=False) as conn:
        columns = read_table_columns(conn, table)
        catalog = TypeCatalog.load(conn)
    return describe_columns(catalog, columns, options)


def describe_columns(catalog: TypeCatalog, columns: list[TableColumn], options: TypeOptions) -> list[ColumnDescription]:
    """What these columns become."""
    found = []
    for column in columns:
        kind = map_type(catalog, column.type_oid, column.typmod, column.ndims, options)
        key = "primary" if column.is_primary_key else "identity" if column.is_key else ""
        rule = "; ".join(part for part in (kind.rule, _GENERATED[column.generated]) if part)
        spark_type, exactness = kind.spark.simpleString(), kind.exactness.value
        found.append(
            ColumnDescription(column.name, column.pg_type, spark_type, not column.not_null, key, exactness, rule)
        )
    return found


@explain_errors("read the columns of the table")
def read_table_columns(conn: Connection, table: Table | str) -> list[TableColumn]:
    """The live columns of a table, in their order. SourceError if it does not exist, or is none that can be captured."""
    found = table if isinstance(table, Table) else find_table(read_tables(conn), table, "--table")
    return [TableColumn(*row) for row in conn.execute(_COLUMNS, [found.oid]).fetchall()]


# Columns that an index only includes are part of no key.
_COLUMNS = """
SELECT a.attname::text, a.atttypid::int8, a.atttypmod, a.attndims::int4, a.attnum::int4,
       format_type(a.atttypid, a.atttypmod), a.attnotnull,
       c.relreplident = 'f' OR coalesce(bool_or(i.indimmediate AND i.indisvalid AND CASE c.relreplident
           WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END), false),
       coalesce(bool_or(i.indisprimary), false),
       a.attgenerated::text
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_index i ON i.indrelid = c.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
WHERE c.oid = %s AND a.attnum > 0 AND NOT a.attisdropped
GROUP BY c.oid, a.attrelid, a.attname, a.atttypid, a.atttypmod, a.attndims, a.attnum, a.attnotnull, a.attgenerated
ORDER BY a.attnum
"""
