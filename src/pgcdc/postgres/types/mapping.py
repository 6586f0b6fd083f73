"""Chooses the Spark type for a PostgreSQL type. docs/types.md describes the same rules, and a test compares them.

A type is identified by the function that writes it (`catalog`), so citext is text, and an unknown type is read as what
it is on the wire: text.

For types with inner values (arrays, rows, ranges, hstore), a whole column is split at once (`split`). The inner values
are converted as one flat column by their own type, and then reassembled. The cost therefore grows with the depth of a
type, not with the number of values in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConfigError
from pgcdc.postgres.types import split
from pgcdc.postgres.types.catalog import TypeCatalog, TypeInfo, numeric_digits
from pgcdc.postgres.types.column import (
    CHOICES,
    ColumnType,
    Exactness,
    Nested,
    TypeOptions,
    list_array,
    list_of,
    map_array,
    map_of,
    nest,
    rejected_as,
    split_columns,
    struct_array,
    struct_of,
    worst,
)
from pgcdc.postgres.types.geometry import SHAPES, geometric_type, vector_type
from pgcdc.postgres.types.interval import INTERVALS
from pgcdc.postgres.types.scalars import Bits, Bytes, Decimals, Moments, Nearest, Numbers, Text, Variants

_MAX_PRECISION = 38
_TEXT, _FLOAT4, _FLOAT8 = 25, 700, 701
_WORDS: Final = ("int2vectorout", "oidvectorout")
_VECTORS: Final = ("vector:vector_out", "vector:halfvec_out")
_RANGE_FIELDS: Final = ("lower", "upper", "lower_inclusive", "upper_inclusive", "empty")


def check_options(options: TypeOptions) -> TypeOptions:
    """Return the options; ConfigError if a value is not among the choices."""
    for name, choices in CHOICES.items():
        chosen = getattr(options, name)
        if chosen not in choices:
            raise ConfigError(f"{name}={chosen} is not a valid choice", f"Use one of {', '.join(choices)}")
    return options


def map_type(catalog: TypeCatalog, oid: int, typmod: int, ndims: int, options: TypeOptions) -> ColumnType:
    """The column type for this PostgreSQL type. A domain is treated as its base type, and an unknown type as text."""
    info = catalog.types.get(oid)
    while info is not None and info.is_domain:
        typmod, ndims = info.typmod, info.ndims
        info = catalog.types.get(info.inner)
    if info is None:
        return _text(Exactness.TEXT, "the type is unknown")
    found = _nested_type(catalog, info, typmod, ndims, options) or _PLAIN.get(info.output)
    if found is not None:
        return found
    make = _MAKERS.get(info.output)
    return make(typmod, options) if make else _text(Exactness.TEXT)


def _text(exactness: Exactness, rule: str = "") -> Text:
    return Text(pa.string(), exactness, rule)


def _make_numeric(typmod: int, options: TypeOptions) -> ColumnType:
    if options.numeric == "double":
        return Nearest(pa.float64(), Exactness.CONVERTED, "the nearest double")
    if options.numeric == "string":
        return _text(Exactness.TEXT)
    if typmod < 0:
        return _text(Exactness.TEXT, "no precision is declared")
    precision, scale = numeric_digits(typmod)
    # numeric(3,-2) has values up to 99900, numeric(2,4) up to 0.0099.
    digits, places = max(precision - min(scale, 0), scale), max(scale, 0)
    if digits > _MAX_PRECISION:
        return _text(Exactness.TEXT, f"Spark's DECIMAL has at most {_MAX_PRECISION} digits")
    return Decimals(pa.decimal128(digits, places))


def _make_moments(arrow: pa.DataType, typmod: int, options: TypeOptions) -> ColumnType:
    if options.out_of_range == "string":
        return _text(Exactness.TEXT)
    if options.out_of_range == "clamp":
        return Moments(arrow, Exactness.CONVERTED, "clamped to the years 1 to 9999", clamp=True)
    return Moments(arrow)


def _make_json(typmod: int, options: TypeOptions) -> ColumnType:
    return Variants() if options.json == "variant" else _text(Exactness.TEXT)


_MAKERS: dict[str, Callable[[int, TypeOptions], ColumnType]] = {
    "numeric_out": _make_numeric,
    "date_out": partial(_make_moments, pa.date32()),
    "timestamp_out": partial(_make_moments, pa.timestamp("us")),
    "timestamptz_out": partial(_make_moments, pa.timestamp("us", "UTC")),
    "json_out": _make_json,
    "jsonb_out": _make_json,
}
"""Types that depend on the modifier or on the options."""

_PLAIN: dict[str, ColumnType] = {
    "boolout": Bits(pa.bool_()),
    "int2out": Numbers(pa.int16()),
    "int4out": Numbers(pa.int32()),
    # oid, xid and cid are unsigned 32-bit numbers, which need a signed 64-bit type
    **dict.fromkeys(("int8out", "oidout", "xidout", "cidout"), Numbers(pa.int64())),
    "float4out": Numbers(pa.float32()),
    "float8out": Numbers(pa.float64()),
    "byteaout": Bytes(pa.binary()),
    "bpcharout": _text(Exactness.EXACT, "padded with blanks"),
    **dict.fromkeys(("textout", "varcharout", "nameout", "charout", "xml_out", "enum_out"), _text(Exactness.EXACT)),
}


# --- types with inner values


def _nested_type(
    catalog: TypeCatalog, info: TypeInfo, typmod: int, ndims: int, options: TypeOptions
) -> ColumnType | None:
    """The column type for a type with inner values; None if it has none, or should be read as text."""

    def inner(oid: int, typmod: int = -1, ndims: int = 0) -> ColumnType:
        return map_type(catalog, oid, typmod, ndims, options)

    output = info.output
    if output == "array_out" or output in _WORDS:
        if options.arrays == "string":
            return None
        element = inner(info.inner, typmod)
        if output in _WORDS:
            return nest(list_of(element.arrow), element, _read_words)
        # Older servers accepted more declared dimensions than an array can have.
        depth = min(max(ndims, 1), split.MAX_DIMENSIONS)
        arrow = element.arrow
        for _ in range(depth):
            arrow = list_of(arrow)
        return nest(arrow, element, _read_arrays, depth, info.delimiter.encode())
    if info.kind == "composite" and info.attributes and options.composites == "struct":
        attributes = zip(info.attributes, info.attribute_typmods, info.attribute_ndims, strict=True)
        return _row_type(info.attribute_names, tuple(inner(*attribute) for attribute in attributes))
    if info.kind in {"range", "multirange"}:
        bound = inner(info.inner)
        arrow = struct_of(_RANGE_FIELDS, (bound.arrow, bound.arrow, *[pa.bool_()] * 3))
        if info.kind == "range":
            return nest(arrow, bound, read_ranges)
        return nest(list_of(arrow), bound, read_multiranges)
    if output == "hstore:hstore_out":
        text = inner(_TEXT)
        return nest(map_of(text.arrow, text.arrow), text, _read_hstore)
    if output == "interval_out":
        return None if options.out_of_range == "string" else INTERVALS
    if output in {*SHAPES, "path_out", "poly_out"}:
        return geometric_type(output, inner(_FLOAT8))
    return vector_type(inner(_FLOAT4)) if output in _VECTORS else None


def _read_arrays(values: pa.Array, element: ColumnType, depth: int, delimiter: bytes) -> pa.Array:
    """Arrays with the declared number of dimensions, one ARRAY level each."""
    return _lists(values, element, split.split_arrays(values, depth, delimiter))


def _read_words(values: pa.Array, element: ColumnType) -> pa.Array:
    """int2vector and oidvector: numbers separated by spaces."""
    return _lists(values, element, split.split_words(values))


def _lists(values: pa.Array, element: ColumnType, found: split.Lists) -> pa.Array:
    """Convert all elements together, then build the lists level by level, innermost first."""
    offsets, leaves = found
    with rejected_as("an element", *offsets):
        items = element.convert(leaves)
    for level in reversed(offsets[1:]):
        items = list_array(level, items)
    return list_array(offsets[0], items, values)


def _row_type(names: tuple[str, ...], attributes: tuple[ColumnType, ...]) -> Nested:
    """Composite types and row types of tables: a STRUCT with the names of the attributes."""
    arrow = struct_of(names, [one.arrow for one in attributes])
    rule = "; ".join(f"{name}: {one.rule}" for name, one in zip(names, attributes, strict=True) if one.rule)
    return Nested(arrow, worst(attributes), rule, _read_rows, (names, attributes))


def _read_rows(values: pa.Array, names: tuple[str, ...], attributes: tuple[ColumnType, ...]) -> pa.Array:
    """Convert one attribute of all rows after the other."""
    parts = split_columns(split.split_rows(values, len(names)), len(names))
    columns = []
    for name, attribute, part in zip(names, attributes, parts, strict=True):
        with rejected_as(f'attribute "{name}"'):
            columns.append(attribute.convert(part))
    return struct_array(names, columns, values)


def read_ranges(values: pa.Array, bound: ColumnType) -> pa.Array:
    """A STRUCT of the bounds (NULL if there is none) and whether each bound is included and the range empty."""
    split.require(values, f"empty|{split.RANGE}", "it is not a range, or is quoted wrongly")
    is_empty = pc.equal(values, b"empty").fill_null(True)
    found = split.ColumnText(pc.if_else(is_empty, b"(,)", values)).cut(b"[(,", b",)]")
    with rejected_as("a bound", each=2):
        bounds = bound.convert(found.leaves)
    return _range_structs(found, bounds, is_empty, values)


def read_multiranges(values: pa.Array, bound: ColumnType) -> pa.Array:
    """An ARRAY of ranges."""
    split.require(
        values, rf"\{{(?:{split.RANGE}(?:,{split.RANGE})*)?\}}", "it is not a multirange, or is quoted wrongly"
    )
    text = split.ColumnText(pc.binary_slice(values, 1, -1))  # without the outer braces
    found = text.cut(b"[(,", b",)]")
    offsets = split.offsets_of(text.begins, found.begins[::2])
    with rejected_as("a bound", offsets, each=2):
        bounds = bound.convert(found.leaves)
    is_empty = pa.array(np.zeros(len(bounds) // 2, np.bool_))
    return list_array(offsets, _range_structs(found, bounds, is_empty), values)


def _range_structs(found: split.Pieces, bounds: pa.Array, is_empty: pa.Array, like: pa.Array | None = None) -> pa.Array:
    inclusive = [
        pa.array(brackets == ord(one)) for one, brackets in (("[", found.opening[::2]), ("]", found.closing[1::2]))
    ]
    return struct_array(_RANGE_FIELDS, (*split_columns(bounds, 2), *inclusive, is_empty), like)


def _read_hstore(values: pa.Array, text: ColumnType) -> pa.Array:
    """MAP<STRING, STRING> with nullable values. Converts the keys and values of all maps together."""
    (offsets,), leaves = split.split_pairs(values)
    with rejected_as("a key or value", offsets):
        texts = text.convert(leaves)
    keys, items = split_columns(texts, 2)
    return map_array((offsets // np.int32(2)).astype(np.int32), keys, items, values)
