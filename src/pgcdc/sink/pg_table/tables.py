"""A table on both sides: the source's description, and the target's catalog.

Creates the target's table if it is missing; `evolve.py` makes it follow the source's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgcdc.core.errors import ReloadNeeded, SinkError
from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.postgres.database import Connection, name_table, quote_identifier, quote_qualified
from pgcdc.postgres.types.catalog import TypeCatalog, type_name
from pgcdc.sink.pg_table.options import PgTableOptions, TableName

Details = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A source table, described by its changes and the history of shapes."""

    name: TableName
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By column: possible type names at the target, best first."""
    key: tuple[str, ...] = ()  # The columns by which its changes identify a row; empty: the whole row
    lost_key: tuple[str, ...] = ()  # Key columns that transforms dropped
    oid: int = 0
    is_key_deferrable: bool = False
    """Within a transaction several rows may share a key; changes then contain their whole old rows."""

    @property
    def title(self) -> str:
        return name_table(*self.name)

    def needs(self, reason: str) -> ReloadNeeded:
        """The error that its copy cannot continue."""
        return ReloadNeeded(tables={self.oid: (self.title, reason)})


def describe_source(relation: Relation, details: Details | None, before: ShapeChange | None = None) -> SourceTable:
    """A table as its changes show it, after transforms; `before`: as it was before them."""
    details = details or {}
    key, lost = _key_of(relation, details), ()  # type: tuple[str, ...], tuple[str, ...]
    if not key and before is not None:
        lost = _key_of(before.after, before.details or {})
        if set(lost) <= {column.name for column in relation.columns}:
            key, lost = lost, ()
    is_late = relation.replica_identity == "f" and bool(details.get("is_key_deferrable"))
    name = relation.namespace, relation.name
    return SourceTable(name, _types_of(relation, details), key, lost, relation.oid, is_late)


def _types_of(relation: Relation, details: Details) -> dict[str, tuple[str, ...]]:
    described = {column["name"]: str(column["type"]) for column in details.get("columns", ())}
    own = TypeCatalog.from_json(details["types"]).types if details.get("types") else {}
    found = {}
    for column in relation.columns:
        names = [described.get(column.name) or type_name(column.type_oid, column.typmod)]
        info = own.get(column.type_oid)
        if info is not None and info.is_domain:  # its values are those of the base type
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
    type: str  # As written in SQL
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
        """The columns that can be written: generated ones cannot."""
        return [name for name in names if not self.columns[name].is_generated]

    def is_unique(self, key: Iterable[str]) -> bool:
        """Whether a second row with this key would be refused."""
        wanted = frozenset(key)
        return any(unique <= wanted for unique in self.uniques)


def choose_key(source: SourceTable, target: TargetTable | None, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that identify rows at the target; empty: the whole row.

    The source's key. If it has none or transforms dropped it, the target's primary key.
    """
    primary = target.primary_key if target is not None else ()
    if source.key or (primary and all(name in columns for name in primary)):
        return source.key or primary
    if not source.lost_key:
        return ()
    missing = ", ".join(quote_identifier(name) for name in source.lost_key if name not in columns)
    raise SinkError(
        f"rows of table {source.title} lack {missing}, the key by which rows are found",
        "Do not drop or rename columns of the key, or create the table at the target with a primary key of "
        "columns that the events have",
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
    """One session's knowledge of the target's tables. Create a new one after a rollback."""

    def __init__(
        self,
        conn: Connection,
        options: PgTableOptions,
        say: Callable[[str], None],
        were_there: Collection[TableName] = (),
    ) -> None:
        """`were_there`: tables that the target had. If one is missing, it is not created as new, since rows would be
        missing."""
        self.conn, self.options, self.name_of, self._say = conn, options, options.names, say
        self._refused: list[tuple[str, SinkError]] | None = None
        self._known: dict[TableName, TargetTable | None] = {}
        self.were_there = set(were_there)  # Plus tables written since, minus names given up on purpose

    def forget(self, name: TableName) -> None:
        """Forget a table that was altered."""
        self._known.pop(name, None)

    def forget_all(self) -> None:
        self._known.clear()

    def see(self) -> set[TableName]:
        return self.were_there | {name for name, target in self._known.items() if target is not None}

    def find(self, name: TableName) -> TargetTable | None:
        if name not in self._known:
            self._known[name] = self._load(name)
        return self._known[name]

    def of(self, source: SourceTable) -> TargetTable | None:
        """The target of a source table; None if missing."""
        return self.find(self.name_of(source.name))

    def _load(self, name: TableName) -> TargetTable | None:
        found = self.conn.execute(_TABLE, name).fetchone()
        if found is None:
            return None
        oid, kind = found
        if kind not in ("r", "p", "f"):
            raise SinkError(
                f"{name_table(*name)} at the target is not a table", "Map the table to another name with `tables`"
            )
        columns = {column: TargetColumn(*more) for column, *more in self.conn.execute(_COLUMNS, (oid,))}
        indexes = [(is_primary, tuple(names)) for is_primary, names in self.conn.execute(_INDEXES, (oid,))]
        primary = next((names for is_primary, names in indexes if is_primary), ())
        return TargetTable(name, columns, primary, frozenset(frozenset(names) for _, names in indexes))

    def prepare(self, source: SourceTable, columns: Iterable[str], key: tuple[str, ...]) -> TargetTable:
        """The target's table with all these columns. Creates what is missing, if allowed."""
        name = self.name_of(source.name)
        target = self.find(name)
        if target is None:
            return self.create(source, name, columns, key)
        self.were_there.add(name)
        missing = [column for column in columns if column not in target.columns]
        if not missing:
            return target
        if self.options.evolve == "full" and self._has_rows(target):
            raise source.needs(f"the target has no column {', '.join(missing)}, so its rows lack those values")
        types, note = self.types(source, missing)
        added = ", ".join(f"ADD COLUMN {quote_identifier(column)} {kind}" for column, kind in types.items())
        statement = f"ALTER TABLE {target.sql} {added}"
        if self.options.evolve == "none":
            raise SinkError(
                f"table {target.title} at the target has no column {', '.join(missing)}, which rows of "
                f"{source.title} have",
                f"Run there: {statement}; or set evolve to add",
            )
        self.run(statement, f"cannot add columns to table {target.title} at the target")
        self.say(f"table {target.title}: column {', '.join(missing)} added{note}")
        return self.load_again(name)

    def create(self, source: SourceTable, name: TableName, columns: Iterable[str], key: tuple[str, ...]) -> TargetTable:
        title = name_table(*name)
        types, note = self.types(source, columns)
        # Only the key is NOT NULL: what the source allows may change.
        listed = [f"{quote_identifier(column)} {kind}" for column, kind in types.items()]
        if key:
            listed.append(f"PRIMARY KEY ({', '.join(map(quote_identifier, key))})")
        statement = f"CREATE TABLE {quote_qualified(*name)} ({', '.join(listed)})"
        if not self.options.create:
            raise SinkError(
                f"table {title} is missing at the target and `create` is false",
                f"Run there: {statement}; or set create to true",
            )
        if name in self.were_there:
            raise source.needs("it was dropped at the target")
        self.create_schema(name[0], f"cannot create table {title} at the target")
        owned = f"ALTER TABLE {quote_qualified(*name)} OWNER TO {self._role}"
        self.run(statement, f"cannot create table {title} at the target", f"{statement}; {owned}")
        self.were_there.add(name)
        self.say(f"table {title} created{note}")
        return self.load_again(name)

    def _has_rows(self, target: TargetTable) -> bool:
        return bool(self.conn.execute(f"SELECT 1 FROM {target.sql} LIMIT 1".encode()).fetchone())

    def create_schema(self, name: str, action: str) -> None:
        if not self.conn.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,)).fetchone():
            statement = f"CREATE SCHEMA IF NOT EXISTS {quote_identifier(name)}"
            self.run(statement, action, f"{statement} AUTHORIZATION {self._role}")

    def types(self, source: SourceTable, columns: Iterable[str]) -> tuple[dict[str, str], str]:
        """Each column's type (columns added by transforms are text), and a note on columns that become text."""
        wanted = {column: source.types.get(column, ()) for column in columns}
        known = self.existing(text for names in wanted.values() for text in names)
        types = {column: next((text for text in names if text in known), "text") for column, names in wanted.items()}
        without = ", ".join(column for column, names in wanted.items() if names and not known.intersection(names))
        return types, f" ({without} as text: the target does not have the type)" if without else ""

    def existing(self, types: Iterable[str]) -> set[str]:
        query = "SELECT t FROM unnest(%s::text[]) AS t WHERE to_regtype(t) IS NOT NULL"
        asked = sorted(
            {text for text in types if not text.startswith("oid ")}
        )  # a type that the catalog was not asked for
        return {text for (text,) in self.conn.execute(query, (asked,))}

    def load_again(self, name: TableName) -> TargetTable:
        target = self._known[name] = self._load(name)
        assert target is not None
        return target

    @property
    def _role(self) -> str:
        return quote_identifier(self.conn.info.user)

    def say(self, text: str) -> None:
        if not self._refused:
            self._say(text)

    @contextmanager
    def together(self, owned: TargetTable | None = None) -> Iterator[None]:
        """Collects statements that this role may not run and advises on them together: after the first refusal no
        statement runs.

        `owned`: this role must own the table, because the target would not show that another role has run the
        statements.
        """
        self._refused = []
        try:
            yield
            refused = self._refused
        finally:
            self._refused = None
        if refused:
            error = refused[0][1]
            advice = f"Run there, as its owner: {'; '.join(statement for statement, _ in refused)}"
            if owned is not None:
                owns = f"ALTER TABLE {owned.sql} OWNER TO {self._role}"
                advice = f"This role must create it. Run there, as superuser: {owns}"
            raise SinkError(error.message, advice) from error.__cause__

    def run(self, statement: str, action: str, remedy: str = "") -> None:
        """Run a statement. `remedy`: what a user with more rights can run instead."""
        remedy = remedy or statement
        if self._refused:
            self._refused.append((remedy, self._refused[0][1]))
            return
        try:
            with self.conn.transaction():
                self.conn.execute(statement.encode())
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            refusal = SinkError(f"{action}: {error.diag.message_primary}", f"Run there, as its owner: {remedy}")
            if self._refused is None:
                raise refusal from error
            refusal.__cause__ = error
            self._refused.append((remedy, refusal))

    def truncate(self, targets: Sequence[TargetTable]) -> None:
        """Empty all these tables together, since they may reference each other. FeatureNotSupported: another table
        refers to them."""
        listed = ", ".join(target.sql for target in targets)
        try:
            with self.conn.transaction():
                self.conn.execute(f"TRUNCATE {listed}".encode())
        except psycopg.errors.InsufficientPrivilege as error:
            raise SinkError(
                f"cannot empty table {', '.join(target.title for target in targets)} at the target: "
                f"{error.diag.message_primary}",
                f"Run there, as its owner: GRANT TRUNCATE ON {listed} TO {self._role}",
            ) from error
