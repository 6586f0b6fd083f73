"""The columns of one table: as the catalog has them now, and as the changes of a slot have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.relation import ShapeChange
from pgcdc.core.state import Identity
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.database import Connection, connect, explain_errors, name_table, quote_qualified, split_table
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.publications import pair_of
from pgcdc.source.postgres.setup.tables import Table, find_table, read_tables
from pgcdc.source.protocol import ColumnDescription

Shape = list[tuple[str, int, int]]
"""Name, type and modifier of each column."""

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

    def typed(self, catalog: TypeCatalog, types: TypeOptions) -> TypedColumn:
        """What becomes of it."""
        made = map_type(catalog, self.type_oid, self.typmod, self.ndims, types)
        return TypedColumn(self.name, self.type_oid, self.typmod, made)


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


def describe(
    columns: list[TableColumn], catalog: TypeCatalog, types: TypeOptions, spark_name: Callable[[pa.DataType], str]
) -> list[ColumnDescription]:
    """What becomes of these columns."""
    return [
        ColumnDescription(
            one.name,
            one.pg_type,
            spark_name(kind.arrow),
            not one.not_null,
            "primary" if one.is_primary_key else "identity" if one.is_key else "",
            kind.exactness.value,
            "; ".join(part for part in (kind.rule, _GENERATED[one.generated]) if part),
        )
        for one in columns
        for kind in [one.typed(catalog, types).type]
    ]


# --- as the changes of a slot have them


def typed_columns(
    sql: Connection,
    options: PostgresOptions,
    identity: Identity | None,
    table: tuple[str, str],
    types: TypeOptions,
    *,
    change: ShapeChange | None,
    noted: Shape | None,
    zset: bool,
) -> tuple[TypedColumn, ...]:
    """As `Source.typed_columns` says."""
    if not options.uses_existing:
        _refuse_partitioned(sql, *table)
    try:
        live = read_table_columns(sql, name_table(*table))
    except SourceError:
        if change is None:
            raise
        live = []
    if change is not None:
        shape: Shape = [(column.name, column.type_oid, column.typmod) for column in change.after.columns]
    elif noted is not None:
        shape = noted
    else:
        sent = _published(sql, options, identity, *table, live)
        shape = [(column.name, column.type_oid, column.typmod) for column in sent]
    catalog = TypeCatalog.load(sql)
    ndims = {(column.name, column.type_oid): column.ndims for column in live}
    if change is not None and change.details is not None:
        if change.details["types"]:  # those that are gone by now
            then = TypeCatalog.from_json(change.details["types"])
            catalog = replace(catalog, types={**then.types, **catalog.types})
        for column, (name, oid, _) in zip(change.details["columns"], shape, strict=True):
            ndims[name, oid] = column["ndims"]
    if zset:
        _check_identity(sql, *table)
    return tuple(
        TypedColumn(name, oid, typmod, map_type(catalog, oid, typmod, ndims.get((name, oid), 0), types))
        for name, oid, typmod in shape
    )


def _published(
    sql: Connection, options: PostgresOptions, identity: Identity | None, namespace: str, name: str,
    live: list[TableColumn],
) -> list[TableColumn]:  # fmt: skip
    """The columns that the publications send, or will send when they are made."""
    if identity is not None and SlotDetails.of(identity).publications:
        names = list(SlotDetails.of(identity).names)
    elif options.uses_existing:
        assert options.publication is not None
        names = [options.publication]
    else:
        names = list(pair_of(options.publication or options.slot_name))
    sent = _published_names(sql, names, namespace, name) if identity is not None or options.uses_existing else None
    if sent is not None:
        return [column for column in live if column.name in sent]
    rule = options.selection.rules().get((namespace, name))
    if rule is not None and rule.columns:
        return [column for column in live if column.name in rule.columns]
    return [one for one in live if not one.generated or (options.generated_columns and one.generated == "s")]


@explain_errors("read the published columns")
def _published_names(sql: Connection, publications: list[str], namespace: str, name: str) -> set[str] | None:
    """None: the server does not say (before PostgreSQL 15), or does not publish the table itself."""
    if sql.info.server_version < 150000:
        return None
    rows = sql.execute(
        "SELECT attnames::text[] FROM pg_publication_tables WHERE pubname = ANY (%s) AND schemaname = %s AND tablename = %s",
        [publications, namespace, name],
    ).fetchall()
    return {column for (names,) in rows for column in names} if rows else None


@explain_errors("read the published tables")
def check_captured(url: str, identity: Identity, table: str, *, zset: bool) -> None:
    """As `Source.check_captured` says."""
    namespace, name = split_table(table)
    with connect(url) as sql:
        rows = sql.execute(
            "SELECT p.pubupdate AND p.pubdelete FROM pg_publication_tables t JOIN pg_publication p ON p.pubname = t.pubname "
            "WHERE t.pubname = ANY (%s) AND t.schemaname = %s AND t.tablename = %s",
            [list(SlotDetails.of(identity).names), namespace, name],
        ).fetchall()
    if not rows:
        raise ConfigError(
            f"table {name_table(namespace, name)} is not captured by slot {identity.stream!r}",
            "Stop its queries and start them with option('tables', ...) naming all tables of the slot; or give this query "
            "its own slot and state_dir. A partitioned table needs a publication with publish_via_partition_root",
        )
    if zset and (True,) not in rows:
        raise SourceError(
            f"of table {name_table(namespace, name)} only inserts are captured by slot {identity.stream!r}: "
            "a Z-set needs all changes",
            "Give the table a primary key or REPLICA IDENTITY FULL, end all queries of the slot, and start again",
        )


@explain_errors("read the table")
def _refuse_partitioned(sql: Connection, namespace: str, name: str) -> None:
    """Our publications send the changes of partitions under the names of these."""
    row = sql.execute(
        "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(%s)", [quote_qualified(namespace, name)]
    ).fetchone()
    if row is not None and row[0]:
        raise SourceError(
            f"table {name_table(namespace, name)} is partitioned, and its changes come under the names of its partitions",
            f"Run: CREATE PUBLICATION p FOR TABLE {quote_qualified(namespace, name)} WITH (publish_via_partition_root); "
            "and give option('publication', 'p'). Or read the partitions one by one",
        )


@explain_errors("read the replica identity")
def _check_identity(sql: Connection, namespace: str, name: str) -> None:
    """A Z-set takes old rows back: the server has to send them."""
    rows = sql.execute(
        "SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.relreplident <> 'f' AND c.relkind = 'r' AND (c.oid = to_regclass(%s) OR c.oid IN "
        "(SELECT relid FROM pg_partition_tree(to_regclass(%s))))",
        [quote_qualified(namespace, name)] * 2,
    ).fetchall()
    if rows:
        commands = " ".join(f"ALTER TABLE {quote_qualified(*row)} REPLICA IDENTITY FULL;" for row in rows[:3])
        raise SourceError(
            f"a Z-set of {name_table(namespace, name)} needs the old rows, which the server sends only with "
            "REPLICA IDENTITY FULL",
            f"Run: {commands}",
        )
