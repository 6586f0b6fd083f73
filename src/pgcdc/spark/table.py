"""A table as a typed query sees it: its columns at the query's place in the stream, and what they become in Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa

from pgcdc.capture.control import CaptureGone, ControlClient
from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Relation
from pgcdc.core.shapes import ShapeChange, ShapeHistory
from pgcdc.core.state import Lock, StateDir, read_json, write_json
from pgcdc.postgres.database import Connection, connect, explain_errors, name_table, quote_qualified, split_table
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import ColumnType
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.postgres.setup.publications import pair_of
from pgcdc.spark.describe import TableColumn, read_table_columns
from pgcdc.spool.consumers import Consumers

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pgcdc.spark.options import StreamOptions

__all__ = [
    "BEFORE",
    "LOAD_AGAIN",
    "RENAMED_ADVICE",
    "UNCHANGED",
    "WEIGHT",
    "TypedColumn",
    "TypedTable",
    "check_captured",
    "check_names",
    "load_table",
    "remember_table",
]

BEFORE = "_before"
UNCHANGED = "_unchanged_toast_columns"
WEIGHT = "_weight"
LOAD_AGAIN = "Load the table again"
"""How the advice begins that comes with SchemaChanged."""
RENAMED_ADVICE = (
    "Read it under its new name: the same consumer goes on there. For another table that has the old name now, use a new "
    "consumer"
)
_FIRST = ("_op", "_lsn", "_ordinal", "_xid", "_ts")


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """One column: what it is in PostgreSQL, and what it becomes."""

    name: str
    type_oid: int
    typmod: int
    type: ColumnType


@dataclass(frozen=True)
class TypedTable:
    """The shape that a query was made for. Picklable: it travels to the executors."""

    namespace: str
    name: str
    columns: tuple[TypedColumn, ...]
    is_whole: bool = True
    """The query wants all columns there are; else columns that it does not ask for may come and go."""
    before: tuple[str, ...] = ()
    """What of the old row it asked for."""

    @property
    def title(self) -> str:
        """Its name, for people."""
        return name_table(self.namespace, self.name)

    @property
    def sql(self) -> str:
        """Its name, for SQL."""
        return quote_qualified(self.namespace, self.name)

    @cached_property
    def by_name(self) -> dict[str, TypedColumn]:
        """Its columns."""
        return {column.name: column for column in self.columns}

    @cached_property
    def before_arrow(self) -> pa.StructType:
        """The Arrow type of `_before`."""
        return pa.struct([pa.field(name, self.by_name[name].type.arrow) for name in self.before])

    def schema(self, *, zset: bool) -> StructType:
        """What Spark is told: the table's columns, then ours."""
        from pyspark.sql.types import (
            ArrayType,
            IntegerType,
            LongType,
            StringType,
            StructField,
            StructType,
            TimestampType,
        )

        own = [StructField(column.name, column.type.spark) for column in self.columns]
        kinds = (StringType(), LongType(), LongType(), LongType(), TimestampType())
        first = [StructField(name, kind) for name, kind in zip(_FIRST, kinds, strict=True)]
        last = StructField(WEIGHT, IntegerType()) if zset else StructField(BEFORE, StructType(own))
        return StructType([*own, *first, last, StructField(UNCHANGED, ArrayType(StringType()))])

    def narrowed_to(self, schema: StructType) -> TypedTable:
        """The same table for a query that asks for these columns only."""
        before = next((tuple(field.dataType.fieldNames()) for field in schema if field.name == BEFORE), ())  # type: ignore[attr-defined]
        asked = {*schema.fieldNames(), *before}
        columns = tuple(column for column in self.columns if column.name in asked)
        return replace(self, columns=columns, is_whole=False, before=before)

    def is_named(self, shape: Relation) -> bool:
        """Whether changes of this shape are changes of this table."""
        return (shape.namespace, shape.name) == (self.namespace, self.name)

    def can_read(self, shape: Relation) -> bool:
        """Whether its columns can be read of this shape, with NULL for those that are not there any more.

        A column with another type only if its values come out exact, or are refused: text, integers and decimals.
        """
        theirs = {column.name: (column.type_oid, column.typmod) for column in shape.columns}
        return all(
            theirs.get(one.name, (one.type_oid, one.typmod)) == (one.type_oid, one.typmod) or _is_strict(one.type.arrow)
            for one in self.columns
        )

    def fits(self, shape: Relation) -> bool:
        """Whether changes of this shape have exactly the columns that the query was made for."""
        return not self._differences(shape)

    def explain(self, shape: Relation) -> str:
        """What is different, in a few words."""
        return "; ".join(self._differences(shape))

    def _differences(self, shape: Relation) -> list[str]:
        theirs = {column.name: (column.type_oid, column.typmod) for column in shape.columns}
        ours = {column.name: (column.type_oid, column.typmod) for column in self.columns}
        found = [f"column {name} is missing" for name in ours if name not in theirs]
        found += [f"column {name} has another type" for name in ours if name in theirs and theirs[name] != ours[name]]
        if self.is_whole:
            found += [f"column {name} is new" for name in theirs if name not in ours]
        return found


def _is_strict(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def remember_table(state: StateDir, consumer: str, table: TypedTable) -> None:
    """Write down the columns with which a query began: what follows may not have been read when it is loaded again."""
    columns = [[column.name, column.type_oid, column.typmod] for column in table.columns]
    path = _notes(state, consumer)
    noted = {**(read_json(path) or {}), table.title: columns}
    path.parent.mkdir(exist_ok=True)
    write_json(path, noted)


def _notes(state: StateDir, consumer: str) -> Path:
    return state.path / "typed" / f"{quote(consumer, safe='')}.json"


def load_table(options: StreamOptions) -> TypedTable:
    """The table as it is where the query begins or goes on: from the history if that place has one, else as the query was
    begun, else from the catalog.

    Raises with advice if there is no such table, or if it cannot be read in that form.
    """
    assert options.table is not None
    namespace, name = split_table(options.table)
    state = StateDir(options.state_dir)
    if not options.db:
        raise ConfigError("no database is given", "Use option('url', ...) or the variable PGCDC_DB")
    with connect(options.db, may_retry=False) as sql:
        if not options.uses_existing:
            _refuse_partitioned(sql, namespace, name)
        change = _shape_here(options, state, namespace, name)
        columns = _described(sql, options, state, (namespace, name), change)
        if options.rows.zset:
            _check_identity(sql, namespace, name)
    return TypedTable(namespace, name, columns, before=tuple(column.name for column in columns))


def _described(
    sql: Connection, options: StreamOptions, state: StateDir, table: tuple[str, str], change: ShapeChange | None
) -> tuple[TypedColumn, ...]:
    """The columns at the query's place, with what they become."""
    try:
        live = read_table_columns(sql, name_table(*table))
    except SourceError:
        if change is None:
            raise
        live = []
    noted = (read_json(_notes(state, options.consumer)) or {}).get(name_table(*table)) if change is None else None
    shape: list[tuple[str, int, int]]
    if change is not None:
        shape = [(column.name, column.type_oid, column.typmod) for column in change.after.columns]
    elif noted is not None:
        shape = [(column, oid, typmod) for column, oid, typmod in noted]
    else:
        sent = _published(sql, options, state, *table, live)
        shape = [(column.name, column.type_oid, column.typmod) for column in sent]
    catalog = TypeCatalog.load(sql)
    ndims = {(column.name, column.type_oid): column.ndims for column in live}
    if change is not None and change.details is not None:
        if change.details["types"]:  # those that are gone by now
            then = TypeCatalog.from_json(change.details["types"])
            catalog = replace(catalog, types={**then.types, **catalog.types})
        for column, (name, oid, _) in zip(change.details["columns"], shape, strict=True):
            ndims[name, oid] = column["ndims"]
    return tuple(
        TypedColumn(name, oid, typmod, map_type(catalog, oid, typmod, ndims.get((name, oid), 0), options.types))
        for name, oid, typmod in shape
    )


def check_names(table: TypedTable) -> None:
    """Raise ConfigError for columns that Spark could not tell apart from others."""
    taken = {*_FIRST, BEFORE, UNCHANGED, WEIGHT}
    for column in table.columns:
        if column.name.lower() in taken:
            raise ConfigError(
                f"table {table.title} has a column {column.name}, which is a name that typed rows use themselves",
                "Read it as events (leave option `table` out), or ask for its other columns with .schema(...)",
            )
    lower = [column.name.lower() for column in table.columns]
    for name in lower:
        if lower.count(name) > 1:
            raise ConfigError(
                f"table {table.title} has two columns named {name}, different only in upper and lower case",
                "Ask for one of them with .schema(...), or read it as events (leave option `table` out)",
            )


# --- the place of the query


def _shape_here(options: StreamOptions, state: StateDir, namespace: str, name: str) -> ShapeChange | None:
    """The shape in force where the query goes on; if the table was not seen before that place, the first one behind it."""
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
    """How far the consumer has come; where the slot stands, if it is new; None if there is no slot yet."""
    holder = Lock.holder(state.capture_lock)
    if holder and "address" in holder:
        with contextlib.suppress(CaptureGone), contextlib.closing(ControlClient(holder["address"])) as client:
            known = client.status()["consumers"]
            if consumer in known:
                return Position.parse(known[consumer]["ack"])
    identity = state.identity()
    if identity is None or not identity.created_lsn:
        return None
    consumers = Consumers(state.consumers_file)
    return consumers[consumer].ack if consumer in consumers else Position.end(consumers.confirmed_lsn)


# --- what the catalog says


def _published(
    sql: Connection, options: StreamOptions, state: StateDir, namespace: str, name: str, live: list[TableColumn]
) -> list[TableColumn]:
    """The columns that the publications send, or will send when they are made."""
    identity = state.identity()
    if identity is not None and identity.publications:
        names = [item["name"] for item in identity.publications]
    elif options.uses_existing:
        assert options.publication is not None
        names = [options.publication]
    else:
        names = list(pair_of(options.publication or options.slot_name))
    sent = _published_names(sql, names, namespace, name) if identity is not None or options.uses_existing else None
    if sent is None:
        rule = options.selection.rules().get((namespace, name))
        chosen = set(rule.columns) if rule is not None and rule.columns else None
        with_generated = options.generated_columns
        return [
            column
            for column in live
            if (chosen is None and (not column.generated or (with_generated and column.generated == "s")))
            or (chosen is not None and column.name in chosen)
        ]
    return [column for column in live if column.name in sent]


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
def check_captured(url: str, publications: Sequence[str], table: str, slot: str, *, zset: bool) -> None:
    """Raise ConfigError if the changes of the table do not come: a query for it would wait forever."""
    namespace, name = split_table(table)
    with connect(url) as sql:
        rows = sql.execute(
            "SELECT p.pubupdate AND p.pubdelete FROM pg_publication_tables t JOIN pg_publication p ON p.pubname = t.pubname "
            "WHERE t.pubname = ANY (%s) AND t.schemaname = %s AND t.tablename = %s",
            [list(publications), namespace, name],
        ).fetchall()
    if not rows:
        raise ConfigError(
            f"table {name_table(namespace, name)} is not captured by slot {slot!r}",
            "Stop its queries and start them with option('tables', ...) naming all tables of the slot; or give this query "
            "its own slot and state_dir. A partitioned table needs a publication with publish_via_partition_root",
        )
    if zset and (True,) not in rows:
        raise SourceError(
            f"of table {name_table(namespace, name)} only inserts are captured by slot {slot!r}: a Z-set needs all changes",
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
