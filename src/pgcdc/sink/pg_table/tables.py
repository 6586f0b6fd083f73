"""A table on both sides: the source's description, and the target's catalog. The target's table is created if missing, and
altered with the source's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgcdc.core.errors import SinkError
from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.event.shape import diff_shapes
from pgcdc.postgres.database import Connection, name_table, quote_identifier, quote_qualified
from pgcdc.postgres.types.catalog import TypeCatalog, type_name
from pgcdc.sink.pg_table.options import PgTableOptions, TableName

Details = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A source table, from its changes and the history of shapes."""

    name: TableName
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By column: possible type names at the target, best first."""
    key: tuple[str, ...] = ()  # The columns by which its changes identify a row; empty: the whole row
    lost_key: tuple[str, ...] = ()  # Key columns that transforms dropped
    is_key_deferrable: bool = False
    """Within a transaction several rows may share a key; changes then bring their whole old rows."""

    @property
    def title(self) -> str:
        return name_table(*self.name)


def describe_source(relation: Relation, details: Details | None, before: ShapeChange | None = None) -> SourceTable:
    """A table as its changes have it, after transforms; `before`: as it is before them."""
    details = details or {}
    key, lost = _key_of(relation, details), ()  # type: tuple[str, ...], tuple[str, ...]
    if not key and before is not None:
        lost = _key_of(before.after, before.details or {})
        if set(lost) <= {column.name for column in relation.columns}:
            key, lost = lost, ()
    is_late = relation.replica_identity == "f" and bool(details.get("is_key_deferrable"))
    return SourceTable((relation.namespace, relation.name), _types_of(relation, details), key, lost, is_late)


def _types_of(relation: Relation, details: Details) -> dict[str, tuple[str, ...]]:
    described = {column["name"]: str(column["type"]) for column in details.get("columns", ())}
    own = TypeCatalog.from_json(details["types"]).types if details.get("types") else {}
    found = {}
    for column in relation.columns:
        names = [described.get(column.name) or type_name(column.type_oid, column.typmod)]
        info = own.get(column.type_oid)
        if info is not None and info.is_domain:  # its values are those of the type below
            names.append(type_name(info.inner, info.typmod))
        found[column.name] = tuple(names)
    return found


def _key_of(relation: Relation, details: Details) -> tuple[str, ...]:
    primary = tuple(details.get("primary_key") or ())
    if relation.replica_identity in ("d", "i"):
        identity = tuple(column.name for column in relation.columns if column.is_key)
        return primary if set(primary) == set(identity) else identity
    return primary if set(primary) <= {column.name for column in relation.columns} else ()


@dataclass(frozen=True, slots=True)
class TargetColumn:
    type: str  # As SQL writes it
    is_required: bool  # NOT NULL without a default
    identity: str  # `a` (always), `d` (by default) or empty
    is_generated: bool


@dataclass(frozen=True, slots=True)
class TargetTable:
    name: TableName
    columns: Mapping[str, TargetColumn]
    primary_key: tuple[str, ...]
    uniques: frozenset[frozenset[str]]  # The columns of unique indexes that are immediate and not partial

    @property
    def sql(self) -> str:
        return quote_qualified(*self.name)

    @property
    def title(self) -> str:
        return name_table(*self.name)

    def writable(self, names: Iterable[str]) -> list[str]:
        """The writable ones of the columns: not generated ones."""
        return [name for name in names if not self.columns[name].is_generated]

    def is_unique(self, key: Iterable[str]) -> bool:
        """Whether a second row with this key would be refused."""
        wanted = frozenset(key)
        return any(unique <= wanted for unique in self.uniques)


def choose_key(source: SourceTable, target: TargetTable | None, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that identify rows at the target; empty: the whole row. The source's key; if it has none or transforms
    dropped it, the target's primary key."""
    primary = target.primary_key if target is not None else ()
    if source.key or (primary and all(name in columns for name in primary)):
        return source.key or primary
    if not source.lost_key:
        return ()
    missing = ", ".join(quote_identifier(name) for name in source.lost_key if name not in columns)
    raise SinkError(
        f"rows of table {source.title} come without {missing}, by which rows are found",
        "Leave the columns of the key as they are, or create the table at the target with a primary key of columns "
        "that the events have",
    )


_TABLE = """
SELECT c.oid::int8, c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""
_COLUMNS = """
SELECT attname::text, format_type(atttypid, atttypmod), attnotnull AND NOT atthasdef AND attidentity = '',
  attidentity::text, attgenerated <> ''
FROM pg_attribute WHERE attrelid = %s::int8::oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_INDEXES = """
SELECT i.indisprimary, array_agg(a.attname::text ORDER BY k.place)
FROM pg_index i CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %s::int8::oid AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
  AND i.indexprs IS NULL AND k.place <= i.indnkeyatts
GROUP BY i.indexrelid, i.indisprimary
"""


class Targets:
    """One session's knowledge of the target's tables. Make a new one after a rollback."""

    def __init__(
        self,
        conn: Connection,
        options: PgTableOptions,
        say: Callable[[str], None],
        were_there: Collection[TableName] = (),
    ) -> None:
        """`were_there`: tables that the target had. A missing one is not recreated as new: it would lack rows."""
        self._conn, self._options, self._names, self._say = conn, options, options.names, say
        self._known: dict[TableName, TargetTable | None] = {}
        self.were_there = set(were_there)  # With what is there now; without names that are free by right

    def see(self) -> set[TableName]:
        return self.were_there | {name for name, target in self._known.items() if target is not None}

    def find(self, name: TableName) -> TargetTable | None:
        if name not in self._known:
            self._known[name] = self._load(name)
        return self._known[name]

    def of(self, source: SourceTable) -> TargetTable | None:
        """The target of a source table; None if missing."""
        return self.find(self._names(source.name))

    def _load(self, name: TableName) -> TargetTable | None:
        found = self._conn.execute(_TABLE, name).fetchone()
        if found is None:
            return None
        oid, kind = found
        if kind not in ("r", "p", "f"):
            raise SinkError(
                f"{name_table(*name)} at the target is not a table", "Map the table to another name, with tables"
            )
        columns = {column: TargetColumn(*more) for column, *more in self._conn.execute(_COLUMNS, (oid,))}
        indexes = [(is_primary, tuple(names)) for is_primary, names in self._conn.execute(_INDEXES, (oid,))]
        primary = next((names for is_primary, names in indexes if is_primary), ())
        return TargetTable(name, columns, primary, frozenset(frozenset(names) for _, names in indexes))

    def prepare(self, source: SourceTable, columns: Iterable[str], key: tuple[str, ...]) -> TargetTable:
        """The target's table with all these columns: creates what is missing, if allowed."""
        name = self._names(source.name)
        target = self.find(name)
        if target is None:
            return self._create(source, name, columns, key)
        missing = [column for column in columns if column not in target.columns]
        if not missing:
            return target
        types, note = self._types(source, missing)
        added = ", ".join(f"ADD COLUMN {quote_identifier(column)} {kind}" for column, kind in types.items())
        statement = f"ALTER TABLE {target.sql} {added}"
        if self._options.evolve == "none":
            raise SinkError(
                f"table {target.title} at the target has no column {', '.join(missing)}, which rows of {source.title} have",
                f"Run there: {statement}; or set evolve to add",
            )
        self._run(statement, f"cannot add columns to table {target.title} at the target")
        self._say(
            f"table {target.title}: column {', '.join(missing)} added{note}; rows that are there have "
            "NULL in it until they change or a snapshot brings them"
        )
        return self._load_again(name)

    def _create(
        self, source: SourceTable, name: TableName, columns: Iterable[str], key: tuple[str, ...]
    ) -> TargetTable:
        title = name_table(*name)
        types, note = self._types(source, columns)
        # Nothing but the key is NOT NULL: what the source allows may change.
        listed = [f"{quote_identifier(column)} {kind}" for column, kind in types.items()]
        if key:
            listed.append(f"PRIMARY KEY ({', '.join(map(quote_identifier, key))})")
        statement = f"CREATE TABLE {quote_qualified(*name)} ({', '.join(listed)})"
        if not self._options.create:
            raise SinkError(f"table {title} is not at the target", f"Run there: {statement}; or set create to true")
        if name in self.were_there:
            raise SinkError(
                f"table {title} is no longer at the target: made again, it would lack all rows but those that change",
                f"Restore it, or run there: {statement}; and take a snapshot of the table: pgcdc snapshot",
            )
        self._create_schema(name[0], f"cannot create table {title} at the target")
        self._run(statement, f"cannot create table {title} at the target")
        self._say(f"table {title} created{note}")
        return self._load_again(name)

    def _create_schema(self, name: str, action: str) -> None:
        if not self._conn.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,)).fetchone():
            self._run(f"CREATE SCHEMA IF NOT EXISTS {quote_identifier(name)}", action)

    def _types(self, source: SourceTable, columns: Iterable[str]) -> tuple[dict[str, str], str]:
        """Each column's type (a transform's columns are text), and a note on those that become text."""
        wanted = {column: source.types.get(column, ()) for column in columns}
        known = self._existing(text for names in wanted.values() for text in names)
        types = {column: next((text for text in names if text in known), "text") for column, names in wanted.items()}
        without = ", ".join(column for column, names in wanted.items() if names and not known.intersection(names))
        return types, f" ({without} as text: the target does not have the type)" if without else ""

    def _existing(self, types: Iterable[str]) -> set[str]:
        query = "SELECT t FROM unnest(%s::text[]) AS t WHERE to_regtype(t) IS NOT NULL"
        return {text for (text,) in self._conn.execute(query, (sorted(set(types)),))}

    def _load_again(self, name: TableName) -> TargetTable:
        target = self._known[name] = self._load(name)
        assert target is not None
        return target

    def _run(self, statement: str, action: str) -> None:
        try:
            self._conn.execute(statement.encode())
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            raise SinkError(
                f"{action}: {error.diag.message_primary}", f"Run there, as its owner: {statement}"
            ) from error

    # --- after ALTER TABLE at the source

    def follow(self, change: ShapeChange) -> None:
        """Repeat a source table's change at the target. New columns come with the first row that has them."""
        if self._options.evolve != "full" or change.before is None:
            return
        old = self._names((change.before.namespace, change.before.name))
        name = self._names((change.after.namespace, change.after.name))
        for one in diff_shapes(change):
            if one["type"] == "table_renamed":
                self._rename(old, name)
            target = self.find(name)
            if target is not None:
                self._follow_column(target, one)

    def say_new(self, source: TableName) -> None:
        """A recreated table: nothing tells the target which rows are gone."""
        target = self.find(self._names(source))
        if target is None:
            self.were_there.discard(self._names(source))
        else:
            self._say(
                f"table {name_table(*source)} was dropped and made again at the source; the rows of the one before stay in "
                f"{target.title}: TRUNCATE that, and take a snapshot of the table, if they should not"
            )

    def _rename(self, old: TableName, new: TableName) -> None:
        if old == new or self.find(old) is None:
            return
        source, target = name_table(*old), name_table(*new)
        move = f"ALTER TABLE {quote_qualified(*old)} RENAME TO {quote_identifier(new[1])}"
        if self.find(new) is not None:
            raise SinkError(
                f"table {source} was renamed to {target} at the source, but the target has both: rows of two tables "
                "would be mixed",
                f"Do at the target what was done at the source, like: ALTER TABLE {quote_qualified(*new)} RENAME TO ...; "
                f"{move}",
            )
        action = f"cannot rename table {source} at the target"
        self._create_schema(new[0], action)
        if old[1] != new[1]:
            self._run(move, action)
        if old[0] != new[0]:
            self._run(f"ALTER TABLE {quote_qualified(old[0], new[1])} SET SCHEMA {quote_identifier(new[0])}", action)
        self._known.clear()
        self.were_there.discard(old)
        self._say(f"table {source} renamed to {target}")

    def _follow_column(self, target: TargetTable, one: Mapping[str, Any]) -> None:
        if one["type"] == "column_renamed":
            old, new = one["from"], one["to"]
            if old in target.columns and new not in target.columns:
                self._alter(target, f"RENAME COLUMN {quote_identifier(old)} TO {quote_identifier(new)}")
                self._say(f"table {target.title}: column {old} renamed to {new}")
        elif one["type"] == "column_removed":
            column = one["column"]
            had = target.columns.get(column)
            if had is not None and had.is_required and column not in target.primary_key:
                self._alter(target, f"ALTER COLUMN {quote_identifier(column)} DROP NOT NULL")
                self._say(f"table {target.title}: column {column} may be empty, the source no longer has it")
        elif one["type"] == "column_type_changed":
            self._retype(target, one["column"], one["old_type"], one["new_type"])

    def _retype(self, target: TargetTable, column: str, old: str, new: str) -> None:
        """Only columns that had the source's type: another one was somebody's choice."""
        known = self._existing([old, new])
        old, new = (kind if kind in known else "text" for kind in (old, new))
        had = target.columns.get(column)
        if had is None or had.type != old or had.type == new:
            return
        quoted = quote_identifier(column)
        action = f"ALTER COLUMN {quoted} TYPE {new} USING"
        try:
            with self._conn.transaction():
                self._alter(target, f"{action} ({quoted})::{new}")
        except (psycopg.errors.CannotCoerce, psycopg.errors.DatatypeMismatch):  # written as text, and read again
            self._alter(target, f"{action} ({quoted}::text)::{new}")
        self._say(f"table {target.title}: column {column} is {new} now, it was {old}")

    def _alter(self, target: TargetTable, action: str) -> None:
        statement = f"ALTER TABLE {target.sql} {action}"
        try:
            self._run(statement, f"cannot alter table {target.title} at the target")
        except psycopg.DataError as error:
            raise SinkError(
                f"cannot alter table {target.title} at the target as the source's was: {error.diag.message_primary}",
                f"Do by hand what was done at the source, like: {statement}",
            ) from error
        self._known.pop(target.name, None)
