"""Geometric types and pgvector's vectors: numbers with the brackets of their kind.

What the brackets say is the same for every value of a column, so they are checked with one pattern, and what is left are
the numbers, all of them in one flat column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.types.assemble import (
    Nested,
    list_array,
    list_of,
    rejected_as,
    struct_array,
    struct_of,
)
from pgcdc.postgres.types.column import ColumnType, Rejected
from pgcdc.postgres.types.split import Lists

Fields = tuple[tuple[str, int], ...]

_NUMBER = r"[^()\[\]{}<>,]+"
_POINT = rf"\({_NUMBER},{_NUMBER}\)"
_POINTS = rf"{_POINT}(?:,{_POINT})*"
_VECTOR = rf"^\[{_NUMBER}(?:,{_NUMBER})*\]$"

_DROPPED = b"()[]{}<>,"
_IS_DROPPED = bytes(byte in _DROPPED for byte in range(256))


def split_numbers(values: pa.Array, name: str, pattern: str, instead: bytes = b"") -> Lists:
    """The numbers of every value, and of `instead` for NULL.

    `pattern` says where brackets and commas stand; each value begins with a bracket.
    """
    is_wrong = pc.invert(pc.match_substring_regex(values, pattern))
    if pc.any(is_wrong).as_py():
        raise Rejected(pc.index(is_wrong, True).as_py(), f"it is no {name}")
    if values.null_count:
        values = pc.fill_null(values, instead)
    if len(values) == 0:
        return Lists([np.zeros(1, np.int32)], values)
    _, ends, buffer = values.buffers()
    starts = np.frombuffer(ends, np.int32)[values.offset : values.offset + len(values) + 1]
    data = buffer.slice(starts[0], starts[-1] - starts[0]).to_pybytes() if buffer else b""
    starts = starts - starts[0]
    # A number begins behind a comma and behind the first bracket of a value; other brackets are left out as well.
    dropped = np.flatnonzero(np.frombuffer(data.translate(_IS_DROPPED), np.bool_))
    is_begin = np.frombuffer(data, np.uint8)[dropped] == ord(",")
    is_begin[np.searchsorted(dropped, starts[:-1][starts[:-1] < starts[1:]])] = True
    begins = dropped[is_begin]
    offsets = np.empty(len(begins) + 1, np.int32)
    offsets[:-1] = begins - np.flatnonzero(is_begin)
    offsets[-1] = len(data) - len(dropped)
    kept = data.translate(None, _DROPPED)
    leaves = pa.Array.from_buffers(pa.binary(), len(begins), [None, pa.py_buffer(offsets), pa.py_buffer(kept)])
    return Lists([np.searchsorted(begins, starts).astype(np.int32)], leaves)


class Shape(NamedTuple):
    """A geometric type with a fixed number of numbers."""

    name: str
    example: bytes
    """Stands for NULL, so that each value has as many numbers."""
    fields: Fields
    """Its fields in Spark: of one number, or of two, which are a point."""

    @property
    def pattern(self) -> str:
        """What a value looks like."""
        return f"^{re.escape(self.example.decode()).replace('0', _NUMBER)}$"


SHAPES: Final = {
    "point_out": Shape("point", b"(0,0)", (("x", 1), ("y", 1))),
    "line_out": Shape("line", b"{0,0,0}", (("a", 1), ("b", 1), ("c", 1))),
    "lseg_out": Shape("lseg", b"[(0,0),(0,0)]", (("start", 2), ("end", 2))),
    "box_out": Shape("box", b"(0,0),(0,0)", (("upper_right", 2), ("lower_left", 2))),
    "circle_out": Shape("circle", b"<(0,0),0>", (("center", 2), ("radius", 1))),
}
"""By the function that writes the type."""
_COORDINATES: Final = SHAPES["point_out"].fields
_PATH_FIELDS: Final = ("closed", "points")


@dataclass(frozen=True, slots=True)
class ShapeColumn(Nested):
    """point, line, lseg, box, circle: a STRUCT of numbers and points."""

    shape: Shape
    number: ColumnType

    @classmethod
    def make(cls, shape: Shape, number: ColumnType) -> ShapeColumn:
        """Of numbers of this type."""
        return cls(_arrow_type(shape.fields, number.arrow), number.exactness, number.rule, shape, number)

    def convert(self, values: pa.Array) -> pa.Array:
        """Every number at once, then the structs."""
        leaves = split_numbers(values, self.shape.name, self.shape.pattern, self.shape.example).leaves
        with rejected_as(f"a number of the {self.shape.name}", each=_width(self.shape.fields)):
            numbers = self.number.convert(leaves)
        return _structs(self.shape.fields, numbers, values)


@dataclass(frozen=True, slots=True)
class PolygonColumn(Nested):
    """polygon: an ARRAY of points."""

    number: ColumnType

    @classmethod
    def make(cls, number: ColumnType) -> PolygonColumn:
        """Of numbers of this type."""
        return cls(list_of(_arrow_type(_COORDINATES, number.arrow)), number.exactness, number.rule, number)

    def convert(self, values: pa.Array) -> pa.Array:
        """Every number at once, then the points."""
        return _points(values, "polygon", rf"^\({_POINTS}\)$", self.number)


@dataclass(frozen=True, slots=True)
class PathColumn(Nested):
    """path: STRUCT<closed BOOLEAN, points ARRAY<point>>."""

    number: ColumnType

    @classmethod
    def make(cls, number: ColumnType) -> PathColumn:
        """Of numbers of this type."""
        points = PolygonColumn.make(number)
        return cls(struct_of(_PATH_FIELDS, (pa.bool_(), points.arrow)), number.exactness, number.rule, number)

    def convert(self, values: pa.Array) -> pa.Array:
        """Every number at once; the brackets around all say whether it is closed."""
        points = _points(values, "path", rf"^(?:\({_POINTS}\)|\[{_POINTS}\])$", self.number)
        return struct_array(_PATH_FIELDS, (pc.starts_with(values, b"("), points), values)


@dataclass(frozen=True, slots=True)
class VectorColumn(Nested):
    """vector and halfvec of pgvector: ARRAY<FLOAT>."""

    number: ColumnType

    @classmethod
    def make(cls, number: ColumnType) -> VectorColumn:
        """Of numbers of this type."""
        return cls(list_of(number.arrow), number.exactness, number.rule, number)

    def convert(self, values: pa.Array) -> pa.Array:
        """Every number at once."""
        (offsets,), leaves = split_numbers(values, "vector", _VECTOR)
        with rejected_as("a number of the vector", offsets):
            numbers = self.number.convert(leaves)
        return list_array(offsets, numbers, values)


def _points(values: pa.Array, name: str, pattern: str, number: ColumnType) -> pa.Array:
    (offsets,), leaves = split_numbers(values, name, pattern)
    with rejected_as(f"a number of the {name}", offsets):
        numbers = number.convert(leaves)
    return list_array(offsets // 2, _structs(_COORDINATES, numbers), values)


def _structs(fields: Fields, numbers: pa.Array, like: pa.Array | None = None) -> pa.Array:
    """Structs of numbers and of points, from all numbers in a row."""
    table = numbers.to_numpy().reshape(-1, _width(fields))
    columns, first = [], 0
    for _, count in fields:
        part = pa.array(table[:, first : first + count].reshape(-1))
        columns.append(part if count == 1 else _structs(_COORDINATES, part))
        first += count
    return struct_array([name for name, _ in fields], columns, like)


def _width(fields: Fields) -> int:
    return sum(count for _, count in fields)


def _arrow_type(fields: Fields, number: pa.DataType) -> pa.DataType:
    types = [number if count == 1 else _arrow_type(_COORDINATES, number) for _, count in fields]
    return struct_of([name for name, _ in fields], types)
