"""Types that hold other types: arrays, rows, ranges, hstore.

A whole column is taken apart at once (`split`), what it holds is converted as one flat column by its own type, and put
together again (`assemble`). So the depth of a type costs, but not the number of values in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.types.assemble import (
    Nested,
    list_array,
    list_of,
    map_array,
    map_of,
    rejected_as,
    struct_array,
    struct_of,
    worst,
)
from pgcdc.postgres.types.catalog import TypeCatalog, TypeInfo
from pgcdc.postgres.types.column import ColumnType, Rejected, TypeOptions, split_columns
from pgcdc.postgres.types.geometry import SHAPES, PathColumn, PolygonColumn, ShapeColumn, VectorColumn
from pgcdc.postgres.types.interval import IntervalColumn
from pgcdc.postgres.types.split import (
    EMPTY,
    LOWER_INCLUSIVE,
    MAX_DIMENSIONS,
    UPPER_INCLUSIVE,
    Ranges,
    split_arrays,
    split_multiranges,
    split_pairs,
    split_ranges,
    split_rows,
)

InnerType = Callable[[TypeCatalog, int, int, int, TypeOptions], ColumnType]
"""What maps the types inside: `mapping.map_type`."""

_TEXT, _FLOAT4, _FLOAT8 = 25, 700, 701
_WORDS: Final = ("int2vectorout", "oidvectorout")
_VECTORS: Final = ("vector:vector_out", "vector:halfvec_out")


def nested_type(
    catalog: TypeCatalog, info: TypeInfo, typmod: int, ndims: int, options: TypeOptions, map_type: InnerType
) -> ColumnType | None:
    """What a type that holds others becomes; None if it holds none, or is to be read as text."""

    def inner(oid: int, typmod: int = -1, ndims: int = 0) -> ColumnType:
        return map_type(catalog, oid, typmod, ndims, options)

    output = info.output
    if output == "array_out" or output in _WORDS:
        if options.arrays == "string":
            return None
        if output in _WORDS:
            return WordsColumn.make(inner(info.inner))
        # Declared dimensions beyond what an array can have were accepted by older servers.
        depth = min(max(ndims, 1), MAX_DIMENSIONS)
        return ArrayColumn.make(inner(info.inner, typmod), depth, info.delimiter)
    if info.kind == "composite" and info.attributes and options.composites == "struct":
        attributes = zip(info.attributes, info.attribute_typmods, info.attribute_ndims, strict=True)
        return RowColumn.make(info.attribute_names, tuple(inner(*attribute) for attribute in attributes))
    if info.kind == "range":
        return RangeColumn.make(inner(info.inner))
    if info.kind == "multirange":
        return MultirangeColumn.make(inner(info.inner))
    if output == "hstore:hstore_out":
        return HstoreColumn.make(inner(_TEXT))
    if output == "interval_out":
        return None if options.out_of_range == "string" else IntervalColumn.make()
    if output in SHAPES:
        return ShapeColumn.make(SHAPES[output], inner(_FLOAT8))
    if output == "path_out":
        return PathColumn.make(inner(_FLOAT8))
    if output == "poly_out":
        return PolygonColumn.make(inner(_FLOAT8))
    if output in _VECTORS:
        return VectorColumn.make(inner(_FLOAT4))
    return None


@dataclass(frozen=True, slots=True)
class ArrayColumn(Nested):
    """Arrays of the declared number of dimensions: as many ARRAY levels."""

    element: ColumnType
    depth: int
    delimiter: bytes

    @classmethod
    def make(cls, element: ColumnType, depth: int, delimiter: str) -> ArrayColumn:
        """Arrays of these elements."""
        arrow = element.arrow
        for _ in range(depth):
            arrow = list_of(arrow)
        return cls(arrow, element.exactness, element.rule, element, depth, delimiter.encode())

    def convert(self, values: pa.Array) -> pa.Array:
        """All elements at once, then level by level, the innermost first."""
        offsets, leaves = split_arrays(values, self.depth, self.delimiter)
        with rejected_as("an element", *offsets):
            items = self.element.convert(leaves)
        for level in reversed(offsets[1:]):
            items = list_array(level, items)
        return list_array(offsets[0], items, values)


@dataclass(frozen=True, slots=True)
class WordsColumn(Nested):
    """int2vector and oidvector: numbers with blanks between."""

    element: ColumnType

    @classmethod
    def make(cls, element: ColumnType) -> WordsColumn:
        """Lists of these numbers."""
        return cls(list_of(element.arrow), element.exactness, element.rule, element)

    def convert(self, values: pa.Array) -> pa.Array:
        """All numbers at once, as if they were arrays."""
        is_wrong = pc.invert(pc.match_substring_regex(values, "^(?:-?[0-9]+(?: -?[0-9]+)*)?$"))
        if pc.any(is_wrong).as_py():
            raise Rejected(pc.index(is_wrong, True).as_py(), "it is no list of numbers")
        arrays = pc.binary_join_element_wise(b"{", pc.replace_substring(values, b" ", b","), b"}", b"")
        (offsets,), leaves = split_arrays(arrays, 1, b",")
        with rejected_as("an element", offsets):
            items = self.element.convert(leaves)
        return list_array(offsets, items, values)


@dataclass(frozen=True, slots=True)
class RowColumn(Nested):
    """Composite types, and the row types of tables: a STRUCT by the names of the attributes."""

    names: tuple[str, ...]
    attributes: tuple[ColumnType, ...]

    @classmethod
    def make(cls, names: tuple[str, ...], attributes: tuple[ColumnType, ...]) -> RowColumn:
        """Rows of these attributes."""
        return cls(
            struct_of(names, [one.arrow for one in attributes]),
            worst(attributes),
            "; ".join(f"{name}: {one.rule}" for name, one in zip(names, attributes, strict=True) if one.rule),
            names,
            attributes,
        )

    def convert(self, values: pa.Array) -> pa.Array:
        """One attribute of all rows after the other."""
        parts = split_columns(split_rows(values, len(self.names)), len(self.names))
        columns = []
        for name, attribute, part in zip(self.names, self.attributes, parts, strict=True):
            with rejected_as(f'attribute "{name}"'):
                columns.append(attribute.convert(part))
        return struct_array(self.names, columns, values)


_RANGE_FIELDS: Final = ("lower", "upper", "lower_inclusive", "upper_inclusive", "empty")
_RANGE_FLAGS: Final = (LOWER_INCLUSIVE, UPPER_INCLUSIVE, EMPTY)


@dataclass(frozen=True, slots=True)
class RangeColumn(Nested):
    """Ranges: a STRUCT of bounds, NULL where there is none, and of what belongs to it."""

    bound: ColumnType

    @classmethod
    def make(cls, bound: ColumnType) -> RangeColumn:
        """Ranges with these bounds."""
        return cls(_range_arrow(bound), bound.exactness, bound.rule, bound)

    def convert(self, values: pa.Array) -> pa.Array:
        """Both bounds of all ranges at once."""
        found = split_ranges(values)
        with rejected_as("a bound", each=2):
            bounds = self.bound.convert(found.leaves)
        return _range_structs(found, bounds, values)


@dataclass(frozen=True, slots=True)
class MultirangeColumn(Nested):
    """Multiranges: an ARRAY of ranges."""

    bound: ColumnType

    @classmethod
    def make(cls, bound: ColumnType) -> MultirangeColumn:
        """Multiranges with these bounds."""
        return cls(list_of(_range_arrow(bound)), bound.exactness, bound.rule, bound)

    def convert(self, values: pa.Array) -> pa.Array:
        """Both bounds of all ranges at once."""
        found = split_multiranges(values)
        with rejected_as("a bound", found.offsets, each=2):
            bounds = self.bound.convert(found.leaves)
        return list_array(found.offsets, _range_structs(found, bounds), values)


def _range_arrow(bound: ColumnType) -> pa.DataType:
    return struct_of(_RANGE_FIELDS, (bound.arrow, bound.arrow, *[pa.bool_()] * len(_RANGE_FLAGS)))


def _range_structs(found: Ranges, bounds: pa.Array, like: pa.Array | None = None) -> pa.Array:
    flags = [pa.array(found.kinds & flag != 0) for flag in _RANGE_FLAGS]
    return struct_array(_RANGE_FIELDS, (*split_columns(bounds, 2), *flags), like)


@dataclass(frozen=True, slots=True)
class HstoreColumn(Nested):
    """hstore: MAP<STRING, STRING>, of which values may be NULL."""

    text: ColumnType

    @classmethod
    def make(cls, text: ColumnType) -> HstoreColumn:
        """Maps of this text."""
        return cls(map_of(text.arrow, text.arrow), text.exactness, text.rule, text)

    def convert(self, values: pa.Array) -> pa.Array:
        """Keys and values of all maps at once."""
        (offsets,), leaves = split_pairs(values)
        with rejected_as("a key or value", offsets):
            texts = self.text.convert(leaves)
        keys, items = split_columns(texts, 2)
        return map_array((offsets // np.int32(2)).astype(np.int32), keys, items, values)
