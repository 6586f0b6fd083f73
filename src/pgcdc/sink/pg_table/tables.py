"""Two sides of a table: what the source says about it at a position, and what the target's catalog says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pgcdc.core.errors import SinkError
from pgcdc.core.position import Position
from pgcdc.core.shapes import ShapeChange, ShapeHistory
from pgcdc.postgres.database import Connection, name_table, quote_identifier, quote_qualified
from pgcdc.postgres.types.catalog import TypeCatalog
from pgcdc.postgres.types.names import type_name
from pgcdc.sink.pg_table.mapping import TableName

__all__ = [
    "SourceTable",
    "TargetColumn",
    "TargetTable",
    "choose_key",
    "describe_change",
    "describe_source",
    "find_types",
    "load_target",
]


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of the source, as the history of shapes knows it."""

    name: TableName
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By column: what the type may be called at the target, best first."""
    key: tuple[str, ...] = ()
    """The columns by which its changes name a row; empty if that is the whole row, or unknown."""
    is_known: bool = False
    is_key_deferrable: bool = False
    """Within a transaction several rows may have the same key; changes bring their whole old rows then."""

    @property
    def title(self) -> str:
        """For messages."""
        return name_table(*self.name)


def describe_source(shapes: ShapeHistory, name: TableName, position: Position) -> SourceTable:
    """The table as it was for the change at `position`."""
    return describe_change(name, shapes.in_force(*name, position))


def describe_change(name: TableName, change: ShapeChange | None) -> SourceTable:
    """The table as a change has left it."""
    if change is None or (change.after.namespace, change.after.name) != name:
        return SourceTable(name)
    is_deferrable = change.after.replica_identity == "f" and bool((change.details or {}).get("is_key_deferrable"))
    return SourceTable(name, _types_of(change), _key_of(change), is_known=True, is_key_deferrable=is_deferrable)


def _types_of(change: ShapeChange) -> dict[str, tuple[str, ...]]:
    details = change.details or {}
    described = {column["name"]: str(column["type"]) for column in details.get("columns", ())}
    own = TypeCatalog.from_json(details["types"]) if details.get("types") else None
    found = {}
    for column in change.after.columns:
        names = [described.get(column.name) or type_name(column.type_oid, column.typmod)]
        info = own.types.get(column.type_oid) if own else None
        if info is not None and info.is_domain:  # its values are those of the type below
            names.append(type_name(info.inner, info.typmod))
        found[column.name] = tuple(names)
    return found


def _key_of(change: ShapeChange) -> tuple[str, ...]:
    names = [column.name for column in change.after.columns]
    primary = tuple((change.details or {}).get("primary_key") or ())
    if change.after.replica_identity in ("d", "i"):
        identity = tuple(column.name for column in change.after.columns if column.is_key)
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

    Those of the source, unless transforms have renamed or dropped them: then those of the target's primary key.
    """
    if source.key and all(name in columns for name in source.key):
        return source.key
    primary = target.primary_key if target is not None else ()
    if primary and all(name in columns for name in primary):
        return primary
    if source.is_known and not source.key:
        return ()
    if source.is_known:
        raise SinkError(
            f"rows of table {source.title} come without {_list_missing(source.key, columns)}, by which rows are found",
            "Leave the columns of the key as they are, or create the table at the target with a primary key of columns "
            "that the events have",
        )
    raise SinkError(
        f"nothing is known of the columns of table {source.title}",
        "Create it at the target, with a primary key, or begin with a new state directory",
    )


def _list_missing(key: Iterable[str], columns: Collection[str]) -> str:
    return ", ".join(quote_identifier(name) for name in key if name not in columns)


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
