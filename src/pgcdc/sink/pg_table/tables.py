"""Two sides of a table: what the source says about it, and what the target's catalog says; and its name on each side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pgcdc.core.errors import ConfigError, SinkError
from pgcdc.core.relation import Relation
from pgcdc.core.settings import split_outside_quotes
from pgcdc.core.shapes import ShapeChange
from pgcdc.postgres.database import (
    Connection,
    name_table,
    parse_identifier,
    quote_identifier,
    quote_qualified,
    split_table,
)
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.names import type_name

__all__ = [
    "SourceTable",
    "TableName",
    "TargetColumn",
    "TargetNames",
    "TargetTable",
    "choose_key",
    "describe_source",
    "find_loops",
    "find_types",
    "load_target",
]

TableName = tuple[str, str]
"""Schema and table."""

_ADVICE = "Write public.orders=mirror.orders2 for a table, sales.*=archive.* for a schema"


class TargetNames:
    """Rules for tables win over rules for schemas, and these over the one schema for all."""

    def __init__(self, rules: Iterable[str] = (), schema: str | None = None) -> None:
        """ConfigError: a rule cannot be read, or two tables would become one."""
        self._schema = schema
        self._tables: dict[TableName, TableName] = {}
        self._schemas: dict[str, str] = {}
        for rule in rules:
            self._add(rule)
        targets: dict[TableName, TableName] = {}
        for source, target in self._tables.items():
            if target in targets:
                both = f"{name_table(*targets[target])} and {name_table(*source)}"
                raise ConfigError(f"{both} would both go to {name_table(*target)}", "Give one of them another name")
            targets[target] = source

    def _add(self, rule: str) -> None:
        sides = split_outside_quotes(rule, "=")
        if len(sides) != 2:
            raise ConfigError(f"{rule!r} is not source=target", _ADVICE)
        source, target = sides
        whole = [side.endswith(".*") for side in sides]
        if all(whole):
            known, name = self._schemas, parse_identifier(source[:-2])
            again = name in known
            known[name] = parse_identifier(target[:-2])
        elif any(whole):
            raise ConfigError(f"{rule!r} names a table on one side and a schema on the other", _ADVICE)
        else:
            table = split_table(source)
            again = table in self._tables
            self._tables[table] = split_table(target, self._schema or "public")
        if again:
            raise ConfigError(f"there are two rules for {source}", "Leave one of them out")

    def __call__(self, table: TableName) -> TableName:
        """The table at the target."""
        if table in self._tables:
            return self._tables[table]
        schema, name = table
        return self._schemas.get(schema, self._schema or schema), name


def find_loops(names: TargetNames, captured: Iterable[TableName]) -> list[TableName]:
    """Captured tables of a database whose rows would go to a captured table of the same database."""
    tables = set(captured)
    return sorted(table for table in tables if names(table) in tables)


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of the source, as its changes and the history of shapes know it."""

    name: TableName
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By column: what the type may be called at the target, best first."""
    key: tuple[str, ...] = ()
    """The columns by which its changes name a row; empty if that is the whole row."""
    lost_key: tuple[str, ...] = ()
    """The columns of a key that transforms have dropped, in part or as a whole."""
    is_key_deferrable: bool = False
    """Within a transaction several rows may have the same key; changes bring their whole old rows then."""

    @property
    def title(self) -> str:
        """For messages."""
        return name_table(*self.name)


Details = Mapping[str, Any]


def describe_source(relation: Relation, details: Details | None, before: ShapeChange | None = None) -> SourceTable:
    """A table as its changes have it, behind transforms; `before`: as it is before them."""
    name = relation.namespace, relation.name
    details = details or {}
    columns = {column.name for column in relation.columns}
    key, lost = _key_of(relation, details), ()  # type: tuple[str, ...], tuple[str, ...]
    if not key and before is not None:
        lost = _key_of(before.after, before.details or {})
        if set(lost) <= columns:
            key, lost = lost, ()
    is_late = relation.replica_identity == "f" and bool(details.get("is_key_deferrable"))
    return SourceTable(name, _types_of(relation, details), key, lost, is_late)


def _types_of(relation: Relation, details: Details) -> dict[str, tuple[str, ...]]:
    described = {column["name"]: str(column["type"]) for column in details.get("columns", ())}
    own = TypeCatalog.from_json(details["types"]) if details.get("types") else None
    found = {}
    for column in relation.columns:
        names = [described.get(column.name) or type_name(column.type_oid, column.typmod)]
        info = own.types.get(column.type_oid) if own else None
        if info is not None and info.is_domain:  # its values are those of the type below
            names.append(type_name(info.inner, info.typmod))
        found[column.name] = tuple(names)
    return found


def _key_of(relation: Relation, details: Details) -> tuple[str, ...]:
    names = [column.name for column in relation.columns]
    primary = tuple(details.get("primary_key") or ())
    if relation.replica_identity in ("d", "i"):
        identity = tuple(column.name for column in relation.columns if column.is_key)
        return primary if set(primary) == set(identity) else identity
    return primary if set(primary) <= set(names) else ()


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column, as the target's catalog has it."""

    type: str
    """As SQL writes it."""
    is_required: bool
    """NOT NULL, and nothing that would be put in its place."""
    identity: str
    """`a` (always), `d` (by default) or empty."""
    is_generated: bool


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A table at the target."""

    name: TableName
    columns: Mapping[str, TargetColumn]
    primary_key: tuple[str, ...]
    uniques: frozenset[frozenset[str]]
    """The columns of unique indexes that are checked at once and for all rows."""

    @property
    def sql(self) -> str:
        """Its name in SQL."""
        return quote_qualified(*self.name)

    @property
    def title(self) -> str:
        """For messages."""
        return name_table(*self.name)

    def writable(self, names: Iterable[str]) -> list[str]:
        """Those of the columns that can be written: not the ones that the target computes."""
        return [name for name in names if not self.columns[name].is_generated]

    def is_unique(self, key: Iterable[str]) -> bool:
        """Whether a second row with this key would be refused."""
        wanted = frozenset(key)
        return any(unique <= wanted for unique in self.uniques)


def load_target(conn: Connection, name: TableName) -> TargetTable | None:
    """The table as it is now; None if there is none."""
    found = conn.execute(_TABLE, name).fetchone()
    if found is None:
        return None
    oid, kind = found
    if kind not in ("r", "p", "f"):
        raise SinkError(
            f"{name_table(*name)} at the target is not a table", "Map the table to another name, with tables"
        )
    columns: dict[str, TargetColumn] = {}
    for column, type_text, not_null, identity, generated, has_default in conn.execute(_COLUMNS, (oid,)):
        required = not_null and not has_default and not identity
        columns[column] = TargetColumn(type_text, required, identity, bool(generated))
    primary: tuple[str, ...] = ()
    uniques = set()
    for is_primary, names in conn.execute(_INDEXES, (oid,)):
        uniques.add(frozenset(names))
        if is_primary:
            primary = tuple(names)
    return TargetTable(name, columns, primary, frozenset(uniques))


def find_types(conn: Connection, wanted: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, str], list[str]]:
    """The type that each column gets at the target; and which are only text, since the target has no such type."""
    texts = sorted({text for names in wanted.values() for text in names})
    known = set()
    if texts:
        known = {text for text, is_there in conn.execute(_TYPES, (texts,)) if is_there}
    found, without = {}, []
    for column, names in wanted.items():
        chosen = next((text for text in names if text in known), None)
        if chosen is None and names:
            without.append(column)
        found[column] = chosen or "text"
    return found, without


def choose_key(source: SourceTable, target: TargetTable | None, columns: Collection[str]) -> tuple[str, ...]:
    """The columns by which rows are found at the target; empty: the whole row.

    Those of the source; where it has none, or transforms have dropped them, those of the target's primary key.
    """
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
SELECT attname::text, format_type(atttypid, atttypmod), attnotnull, attidentity::text, attgenerated::text, atthasdef
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
_TYPES = "SELECT t, to_regtype(t) IS NOT NULL FROM unnest(%s::text[]) AS t"
