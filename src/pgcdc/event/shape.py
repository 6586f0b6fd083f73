"""What a table looks like, as a column of its events: for envelopes, in whose documents values have types.

Events carry values as text and say nothing about types. Who needs types asks for the column `shape` as well. It is made once
per shape of a table and then only pointed to, and it is small, because Spark copies it with every event: a type is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pyarrow as pa

from pgcdc.core.relation import Column, Relation
from pgcdc.core.shapes import ShapeChange
from pgcdc.postgres.types.built_in import BUILT_IN
from pgcdc.postgres.types.catalog import TypeCatalog, TypeInfo

__all__ = ["ARRAY", "NO_MODIFIER", "REQUIRED", "SHAPE", "ZERO", "Described", "Family", "column_types", "shape_array"]

SHAPE = "struct<database:string,names:array<string>,codes:array<int>,modifiers:array<int>,key:array<string>>"
"""`codes[i]` is the Family of the column `names[i]`, with ARRAY added if it is an array; `modifiers[i]` is what its type
says besides (NO_MODIFIER, or a number with ZERO added), with REQUIRED added if it is NOT NULL. `key` has the columns of the
primary key, in the key's order; without one those of the replica identity."""
_ARROW = pa.struct(
    [
        ("database", pa.string()),
        ("names", pa.list_(pa.string())),
        ("codes", pa.list_(pa.int32())),
        ("modifiers", pa.list_(pa.int32())),
        ("key", pa.list_(pa.string())),
    ]
)


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


def shape_array(shapes: Sequence[Relation], described: Described) -> pa.Array:
    """The column's value for each shape."""
    details = {change.after: change.details for change in described.changes if change.details is not None}
    return pa.array([_describe(shape, described.database, details.get(shape)) for shape in shapes], _ARROW)


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


def _describe(shape: Relation, database: str, details: Mapping[str, Any] | None) -> dict[str, Any]:
    # With REPLICA IDENTITY FULL every column identifies the row, which says nothing about its key.
    key = [column.name for column in shape.columns if column.is_key] if shape.replica_identity != "f" else []
    if details is not None:
        names = {column.name for column in shape.columns}
        key = details["primary_key"] if details["primary_key"] and names.issuperset(details["primary_key"]) else key
    types = column_types(shape, details)
    return {
        "database": database,
        "names": [column.name for column in shape.columns],
        "codes": [code for code, _ in types],
        "modifiers": [modifier for _, modifier in types],
        "key": key,
    }


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
