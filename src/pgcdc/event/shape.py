"""What a table looks like, and what a change of that was.

For envelopes, in whose documents values have types, a type is a number: a code and a modifier. What has changed from one
shape to the next depends on the record in the history alone, so that it is the same at every replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pgcdc.core.relation import Column, Relation, ShapeChange
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo, type_name


@dataclass(frozen=True, slots=True)
class TableShape:
    """What a table looks like behind a chain."""

    relation: Relation
    details: Mapping[str, Any] | None = None
    """What the catalog said about it."""

    def to_json(self) -> dict[str, Any]:
        return {"relation": self.relation.to_json(), "details": self.details}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TableShape:
        return cls(Relation.from_json(raw["relation"]), raw["details"])

    @property
    def key(self) -> list[str]:
        """The columns of the primary key, in the key's order; without one those of the replica identity."""
        names = [column.name for column in self.relation.columns]
        primary = self.details["primary_key"] if self.details is not None else []
        if primary and set(names).issuperset(primary):
            return list(primary)
        # With REPLICA IDENTITY FULL every column identifies the row, which says nothing about its key.
        is_full = self.relation.replica_identity == "f"
        return [column.name for column in self.relation.columns if column.is_key and not is_full]


@dataclass(frozen=True, slots=True)
class Described:
    """What is known besides the stream."""

    database: str = ""
    """Its name."""
    changes: tuple[ShapeChange, ...] = ()
    """What the catalog said about shapes of tables when they were first seen."""


class Family(IntEnum):
    """How the text of a value is to be read. Frequent ones come first: who looks for one asks in this order."""

    TEXT = 0
    INTEGER = 1
    BOOLEAN = 2
    DOUBLE = 3
    FLOAT = 4
    NUMERIC = 5
    """With a scale, which is the modifier."""
    TIMESTAMPTZ = 6
    """The modifier of this and of other times is the number of digits of its seconds."""
    TIMESTAMP = 7
    DATE = 8
    TIME = 9
    BYTES = 10
    NUMBER = 11
    """numeric without a scale."""
    UUID = 12
    INTERVAL = 13
    TIMETZ = 14
    BIT = 15
    """One bit."""
    BITS = 16
    MONEY = 17
    HSTORE = 18
    POINT = 19
    VECTOR = 20
    HALFVEC = 21
    SPARSEVEC = 22
    OTHER = 63


IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}
ARRAY = 64
ZERO = 2048
"""Added to a modifier, which may be negative: numeric(3,-2)."""
NO_MODIFIER = 4095
REQUIRED = 4096

_BY_OUTPUT = {
    "boolout": Family.BOOLEAN, "int2out": Family.INTEGER, "int4out": Family.INTEGER, "int8out": Family.INTEGER,
    "oidout": Family.INTEGER, "float4out": Family.FLOAT, "float8out": Family.DOUBLE, "numeric_out": Family.NUMERIC,
    "byteaout": Family.BYTES, "date_out": Family.DATE, "time_out": Family.TIME, "timetz_out": Family.TIMETZ,
    "timestamp_out": Family.TIMESTAMP, "timestamptz_out": Family.TIMESTAMPTZ, "interval_out": Family.INTERVAL,
    "uuid_out": Family.UUID, "bit_out": Family.BITS, "varbit_out": Family.BITS, "cash_out": Family.MONEY,
    "point_out": Family.POINT,
    **dict.fromkeys(
        ("textout", "varcharout", "bpcharout", "charout", "nameout", "inet_out", "cidr_out", "macaddr_out",
         "macaddr8_out", "json_out", "jsonb_out", "xml_out", "tsvectorout"),
        Family.TEXT,
    ),
}  # fmt: skip
_ARRAYS = {
    Family.TEXT, Family.INTEGER, Family.BOOLEAN, Family.DOUBLE, Family.FLOAT, Family.NUMERIC, Family.TIMESTAMPTZ,
    Family.TIMESTAMP, Family.DATE, Family.TIME, Family.BYTES, Family.NUMBER, Family.UUID, Family.TIMETZ, Family.HSTORE,
}  # fmt: skip
_NO_ARRAYS = {"nameout", "xml_out", "tsvectorout"}
"""What is text, but has no arrays that anybody reads."""
_BY_NAME = {
    "hstore": Family.HSTORE, "vector": Family.VECTOR, "halfvec": Family.HALFVEC, "sparsevec": Family.SPARSEVEC,
    "citext": Family.TEXT, "ltree": Family.TEXT, "isbn": Family.TEXT, "refcursor": Family.OTHER,
    **dict.fromkeys(("int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange"), Family.TEXT),
}  # fmt: skip
"""Of what is known by its name: types of extensions, whose functions may be anybody's, and ranges, which share one."""


def column_types(shape: Relation, details: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """Code and modifier of each column."""
    catalog = BUILT_IN
    required: set[str] = set()
    if details is not None:
        required = {column["name"] for column in details["columns"] if column["not_null"]}
        if details["types"] is not None:
            own = TypeCatalog.from_json(details["types"])
            catalog = TypeCatalog({**BUILT_IN.types, **own.types}, own.server_version)
    types = [_type(catalog, column) for column in shape.columns]
    return [
        (code, modifier + REQUIRED * (column.name in required))
        for column, (code, modifier) in zip(shape.columns, types, strict=True)
    ]


def _type(catalog: TypeCatalog, column: Column) -> tuple[int, int]:
    """Code and modifier."""
    info, typmod = _base(catalog, catalog.types.get(column.type_oid), column.typmod)
    is_array = info is not None and info.kind == "array"
    if info is not None and is_array:
        element = catalog.types.get(info.inner)
        # An array of a domain is not an array of its base type to those who know types by their oids.
        info = None if element is None or element.is_domain else element
    family = _family(info, typmod)
    if is_array and info is not None and (family not in _ARRAYS or info.output in _NO_ARRAYS):
        family = Family.OTHER
    return family + ARRAY * is_array, _modifier(family, typmod)


def _base(catalog: TypeCatalog, info: TypeInfo | None, typmod: int) -> tuple[TypeInfo | None, int]:
    while info is not None and info.is_domain:
        typmod = info.typmod
        info = catalog.types.get(info.inner)
    return info, typmod


def _family(info: TypeInfo | None, typmod: int) -> Family:
    if info is None:
        return Family.OTHER
    if info.kind == "enum":
        return Family.TEXT
    name = info.name.rpartition(".")[2]
    family = _BY_NAME.get(name)
    if family is None:
        is_own = info.oid not in BUILT_IN.types
        family = Family.OTHER if info.kind != "base" or is_own else _BY_OUTPUT.get(info.output, Family.OTHER)
    if family is Family.NUMERIC and typmod < 0:
        return Family.NUMBER
    if family is Family.BITS and (typmod == 1 or (typmod < 0 and name == "bit")):
        return Family.BIT
    return family


def _modifier(family: Family, typmod: int) -> int:
    if typmod < 0 or family in (Family.BITS, Family.BIT):
        return NO_MODIFIER
    if family is Family.NUMERIC:
        return ((typmod - 4 & 0x7FF ^ 0x400) - 0x400) + ZERO  # 11 bits with a sign
    if family in (Family.TIME, Family.TIMETZ, Family.TIMESTAMP, Family.TIMESTAMPTZ):
        return typmod + ZERO
    return NO_MODIFIER


# --- from one shape to the next


@dataclass(frozen=True, slots=True)
class _Side:
    """A shape, and what the catalog said about it."""

    shape: Relation
    details: dict[str, Any] | None

    @property
    def table(self) -> str:
        return f"{self.shape.namespace}.{self.shape.name}"

    @property
    def attnums(self) -> dict[str, int] | None:
        """By name. A number is never given to another column of the table."""
        if self.details is None:
            return None
        return {column["name"]: column["attnum"] for column in self.details["columns"]}

    @property
    def primary_key(self) -> list[str] | None:
        return None if self.details is None else self.details["primary_key"]

    @property
    def keys(self) -> list[str]:
        return [column.name for column in self.shape.columns if column.is_key]

    def type_of(self, column: Column) -> str:
        for described in self.details["columns"] if self.details else ():
            if described["name"] == column.name:
                return str(described["type"])
        return type_name(column.type_oid, column.typmod)


def diff_shapes(change: ShapeChange) -> list[dict[str, Any]]:
    """What is different, one by one; nothing for a table that was first seen. Never empty if there was a shape before.

    A column is known again by its number in the catalog. Where that is not known for both shapes, by its name, and then
    a rename is told as a removal and an addition: order and type never prove one (docs/decisions/0010-shapes.md).
    """
    if change.before is None:
        return []
    before, after = _Side(change.before, change.before_details), _Side(change.after, change.details)
    found = [] if before.table == after.table else [{"type": "table_renamed", "from": before.table, "to": after.table}]
    return [*found, *_diff_columns(before, after), *_diff_keys(before, after)]


def _diff_columns(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    olds, news = _by_identity(before, after)
    for identity, old in olds.items():
        if identity not in news:
            yield {"type": "column_removed", "column": old.name, "old_type": before.type_of(old)}
    for identity, new in news.items():
        if identity not in olds:
            continue
        old = olds[identity]
        if old.name != new.name:
            yield {"type": "column_renamed", "from": old.name, "to": new.name}
        if (old.type_oid, old.typmod) != (new.type_oid, new.typmod):
            types = {"old_type": before.type_of(old), "new_type": after.type_of(new)}
            yield {"type": "column_type_changed", "column": new.name, **types}
    for identity, new in news.items():
        if identity not in olds:
            yield {"type": "column_added", "column": new.name, "new_type": after.type_of(new)}
    if [one for one in olds if one in news] != [one for one in news if one in olds]:
        yield {"type": "columns_reordered", "columns": [column.name for column in after.shape.columns]}


def _by_identity(before: _Side, after: _Side) -> tuple[dict[int | str, Column], dict[int | str, Column]]:
    """The columns of both shapes by what makes them the same one."""
    if before.attnums is None or after.attnums is None:
        return {one.name: one for one in before.shape.columns}, {one.name: one for one in after.shape.columns}
    return (
        {before.attnums[one.name]: one for one in before.shape.columns},
        {after.attnums[one.name]: one for one in after.shape.columns},
    )


def _diff_keys(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    old, new = before.shape.replica_identity, after.shape.replica_identity
    if old != new:
        yield {
            "type": "replica_identity_changed",
            "old": IDENTITIES.get(old, old), "new": IDENTITIES.get(new, new),
        }  # fmt: skip
    keys = before.primary_key, after.primary_key
    if keys[0] is not None and keys[1] is not None and not _same_columns(before, keys[0], after, keys[1]):
        yield {"type": "primary_key_changed", "old": keys[0], "new": keys[1]}
        if old == "d":
            return  # what identifies a row now follows from it
    if old == new != "f" and not _same_columns(before, before.keys, after, after.keys):  # of a full one all columns are
        yield {"type": "key_columns_changed", "old": before.keys, "new": after.keys}


def _same_columns(before: _Side, olds: list[str], after: _Side, news: list[str]) -> bool:
    """Whether these are the same columns in the same order, as far as their numbers are known under other names."""
    if before.attnums is None or after.attnums is None:
        return olds == news
    return [before.attnums.get(name, name) for name in olds] == [after.attnums.get(name, name) for name in news]


def event_values(change: ShapeChange) -> list[bytes]:
    """The values of a SCHEMA_CHANGE event: schema, table, changes and columns."""
    after = _Side(change.after, change.details)
    columns = [{"name": one.name, "type": after.type_of(one), "key": one.is_key} for one in change.after.columns]
    texts = (change.after.namespace, change.after.name, _to_json(diff_shapes(change)), _to_json(columns))
    return [text.encode() for text in texts]


def _to_json(value: list[dict[str, Any]]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def describe_change(change: ShapeChange) -> list[str]:
    """For people: `table public.orders: column note (text) added`, a line for each difference."""
    table = f"{change.after.namespace}.{change.after.name}"
    return [f"table {table}: {_say(one)}" for one in diff_shapes(change)]


def _say(one: dict[str, Any]) -> str:
    kind = one["type"]
    if kind == "table_renamed":
        return f"renamed from {one['from']}"
    if kind == "column_added":
        return f"column {one['column']} ({one['new_type']}) added"
    if kind == "column_removed":
        return f"column {one['column']} ({one['old_type']}) removed"
    if kind == "column_renamed":
        return f"column {one['from']} renamed to {one['to']}"
    if kind == "column_type_changed":
        return f"column {one['column']} changed from {one['old_type']} to {one['new_type']}"
    if kind == "columns_reordered":
        return f"columns in another order: {', '.join(one['columns'])}"
    what = {"replica_identity_changed": "replica identity", "primary_key_changed": "primary key"}.get(kind, "key")
    old, new = (value if isinstance(value, str) else f"({', '.join(value)})" for value in (one["old"], one["new"]))
    return f"{what} changed from {old} to {new}"
