"""One table: its columns in the current catalog and in the changes of a slot, and its rows, by COPY."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.state import Identity
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.database import Connection, connect, explain_errors, name_table, quote_qualified, split_table
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.tables import (
    Table,
    TableColumn,
    find_table,
    read_columns,
    read_published,
    read_tables,
)
from pgcdc.source.postgres.snapshot.chunks import Chunk, files_text, lock_chunks, plan_chunks, table_bytes, whole_table
from pgcdc.source.postgres.snapshot.copy import check_condition, copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.held import HeldSnapshot, hold_snapshot, read_in_snapshot
from pgcdc.source.protocol import ColumnsQuery, RowsOptions

PARTITION_BYTES: Final = 64 << 20
SMALL_PARTITION_BYTES: Final = 8 << 20

_GENERATED = {"": "", "s": "in the stream only with --generated-columns", "v": "virtual: never in the stream"}


@dataclass(frozen=True, slots=True)
class ColumnDescription:
    """A column in the output of `pgcdc describe`."""

    column: str
    pg_type: str  # As the database writes it: `numeric(12,2)`
    spark_type: str  # As Spark writes it: `decimal(12,2)`
    nullable: bool
    key: str  # `primary`, `identity` (in the replica identity, but in no primary key) or empty
    exactness: str  # `exact`, `converted` (by `rule`) or `text` (PostgreSQL's own)
    rule: str  # How it is converted, or why it stays text; for a generated column, whether the stream includes it


@explain_errors("read the columns of the table")
def read_table_columns(conn: Connection, table: Table | str) -> list[TableColumn]:
    """The live columns of a table, in order. SourceError if it does not exist or cannot be captured."""
    found = table if isinstance(table, Table) else find_table(read_tables(conn), table, "--table")
    return read_columns(conn, [found.oid]).get(found.oid, [])


def typed(column: TableColumn, catalog: TypeCatalog, types: TypeOptions) -> TypedColumn:
    made = map_type(catalog, column.type_oid, column.typmod, column.ndims, types)
    return TypedColumn(column.name, column.type_oid, column.typmod, made)


def describe(
    columns: list[TableColumn], catalog: TypeCatalog, types: TypeOptions, spark_name: Callable[[pa.DataType], str]
) -> list[ColumnDescription]:
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
        for kind in [typed(one, catalog, types).type]
    ]


def describe_table(
    url: str, table: str, types: TypeOptions, spark_name: Callable[[pa.DataType], str]
) -> list[ColumnDescription]:
    """A table's current columns, and their types in Spark, named by `spark_name`."""
    with connect(url, application_name="pgcdc describe", may_retry=False) as conn:
        return describe(read_table_columns(conn, table), TypeCatalog.load(conn), types, spark_name)


# --- as the changes of a slot have them


def typed_columns(options: PostgresOptions, identity: Identity | None, wanted: ColumnsQuery) -> tuple[TypedColumn, ...]:
    with connect(options.require_db(), may_retry=False) as sql:
        change, live = wanted.change, list[TableColumn]()
        try:
            table = find_table(read_tables(sql), name_table(*wanted.table), "--table")
            if table.kind == "p" and not _sends_root(options, identity):
                raise _partitioned(table)
            live = read_table_columns(sql, table)
        except SourceError:
            if change is None:
                raise
        if change is not None:
            shape = [(column.name, column.type_oid, column.typmod) for column in change.after.columns]
        elif wanted.noted is not None:
            shape = wanted.noted
        else:
            sent = _published(sql, options, identity, wanted.table, live)
            shape = [(column.name, column.type_oid, column.typmod) for column in sent]
        catalog = TypeCatalog.load(sql)
        ndims = {(column.name, column.type_oid): column.ndims for column in live}
        if change is not None and change.details is not None:
            if change.details["types"]:  # those that no longer exist
                then = TypeCatalog.from_json(change.details["types"])
                catalog = replace(catalog, types={**then.types, **catalog.types})
            for column, (name, oid, _) in zip(change.details["columns"], shape, strict=True):
                ndims[name, oid] = column["ndims"]
        if wanted.zset:
            _check_identity(sql, *wanted.table)
    return tuple(
        TypedColumn(name, oid, typmod, map_type(catalog, oid, typmod, ndims.get((name, oid), 0), wanted.types))
        for name, oid, typmod in shape
    )


def _published(
    sql: Connection,
    options: PostgresOptions,
    identity: Identity | None,
    table: tuple[str, str],
    live: list[TableColumn],
) -> list[TableColumn]:
    """The columns that the publications send, or will send once created."""
    if identity is not None or options.uses_existing:
        known = SlotDetails.of(identity).names if identity is not None else ()
        for one in read_published(sql, known or options.publications):
            if (one.relation.namespace, one.relation.name) == table:
                return [column for column in live if column.name in one.columns]
    rule = options.rules().get(table)
    if rule is not None and rule.columns:
        return [column for column in live if column.name in rule.columns]
    return [one for one in live if not one.generated or (options.generated_columns and one.generated == "s")]


@explain_errors("read the published tables")
def check_captured(url: str, identity: Identity, table: str, *, zset: bool) -> None:
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
            "Stop its queries and start them with option('tables', ...) naming all tables of the slot; or "
            "use a separate slot and state_dir for this query. A partitioned table needs a publication with "
            "publish_via_partition_root",
        )
    if zset and (True,) not in rows:
        raise SourceError(
            f"slot {identity.stream!r} captures only inserts of table {name_table(namespace, name)}, but a "
            "Z-set needs all changes",
            "Give the table a primary key or REPLICA IDENTITY FULL, stop all queries of the slot, and start again",
        )


def _sends_root(options: PostgresOptions, identity: Identity | None) -> bool:
    """Whether a partitioned table is sent as one table. A user's publication decides that itself: anything missing
    there is found later."""
    if options.uses_existing:
        return True
    if identity is None:
        return options.partition_root
    return all(item["via_root"] for item in SlotDetails.of(identity).publications)


def _partitioned(table: Table) -> SourceError:
    """The error if the publications send the changes of partitions under the partitions' names."""
    return SourceError(
        f"table {table.name} is partitioned, and its changes carry the names of its partitions",
        "Start over with a new slot and state directory, without partition_root=false (PostgreSQL 13). Or "
        "read the partitions one by one",
    )


@explain_errors("read the replica identity")
def _check_identity(sql: Connection, namespace: str, name: str) -> None:
    """Raise unless the server sends old rows: a Z-set retracts them."""
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


# --- its existing rows


@dataclass(frozen=True, slots=True)
class ChunkPart:
    chunks: list[Chunk]
    held: HeldSnapshot | None = None  # None: one task reads everything, in its own snapshot


def find_rows(options: PostgresOptions, name: str, types: TypeOptions) -> PostgresRows:
    """The table with all its columns, including generated ones. Raises with advice if there is no such table."""
    url = options.resolved().require_db()
    with connect(url, may_retry=False) as conn, explain_errors("read the columns of the table"):
        table = find_table(read_tables(conn), name, "option table")
        found = read_table_columns(conn, table)
        catalog = TypeCatalog.load(conn)
    key = tuple(one.name for one in found if one.is_primary_key and one.is_readable)
    return PostgresRows(options, table, tuple(typed(one, catalog, types) for one in found), key)


@dataclass(frozen=True, slots=True)
class PostgresRows:
    """The current rows of a table; implements `source.protocol.TableRows`."""

    options: PostgresOptions  # As given: each host takes secrets from its own environment
    table: Table
    columns: tuple[TypedColumn, ...]
    key: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"table {self.table.name}"

    def plan(self, names: list[str], wanted: RowsOptions, watch_pid: int) -> list[ChunkPart]:
        url = self.options.resolved().require_db()
        with connect(url, may_retry=False) as conn:
            with self._explained():
                wrong = f"option where is not a valid condition on {self.title}" if wanted.where else ""
                check_condition(conn, names, self.table.sql, [wanted.where], wrong)
            count = wanted.partitions or choose_count(table_bytes(conn, self.table), os.cpu_count() or 1)
            if count == 1 and not wanted.held:
                return [ChunkPart([whole_table(self.table)])]
            # Everything planned before the snapshot must be true in it: otherwise rows would be missing unnoticed.
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
        url = self.options.resolved().require_db()
        with self._explained(), read_in_snapshot(url, part.held) as conn:
            lock_chunks(conn, part.chunks)
            for chunk in part.chunks:
                statement = copy_statement(names, chunk.source, [*chunk.conditions, where])
                yield from copy_rows(conn, statement, len(names))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with explain_errors(f"read {self.title}"):
                yield
        except SourceError as error:
            advice = _ADVICE.get(getattr(error.__cause__, "sqlstate", None) or "")
            if advice is None or error.advice:
                raise
            raise SourceError(error.message, advice.format(self.table.sql)) from error.__cause__


def choose_count(nbytes: int, cores: int) -> int:
    """How many tasks to use: enough to keep each result small, and enough for all cores if there is much to read."""
    return max(1, -(-nbytes // PARTITION_BYTES), min(cores, nbytes // SMALL_PARTITION_BYTES))


_GONE = "It was dropped or altered meanwhile: load it again"
_ADVICE = {
    "42501": "Run: GRANT SELECT ON {} TO this role (and on its partitions, if it has any)",
    "42P01": _GONE,
    "42703": _GONE,
}
