"""Geometric types and pgvector's vectors: numbers in the brackets of their type."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.types.column import (
    ColumnType,
    Nested,
    Offsets,
    list_array,
    list_of,
    nest,
    rejected_as,
    struct_array,
    struct_of,
)
from pgcdc.postgres.types.split import ColumnText, offsets_of, require

Fields = tuple[tuple[str, int], ...]

_NUMBER = r'[^()\[\]{}<>,"\\]+'
_POINT = rf"\({_NUMBER},{_NUMBER}\)"
_POINTS = rf"{_POINT}(?:,{_POINT})*"
_VECTOR = rf"\[{_NUMBER}(?:,{_NUMBER})*\]"
_POLYGON = rf"\({_POINTS}\)"
_PATH = rf"{_POLYGON}|\[{_POINTS}\]"


def split_numbers(
    values: pa.Array, number: ColumnType, name: str, pattern: str, instead: bytes = b""
) -> tuple[Offsets, pa.Array]:
    """The numbers of every value, and those of `instead` for NULL. `pattern` describes the brackets and commas."""
    require(values, pattern, f"it is not a {name}")
    text = ColumnText(values, instead)
    found = text.cut(b"([{<,", b")]}>,")
    offsets = offsets_of(text.begins, found.begins)
    with rejected_as(f"a number of the {name}", offsets):
        return offsets, number.convert(found.leaves)


class Shape(NamedTuple):
    """A geometric type with a fixed number of numbers."""

    name: str
    example: bytes  # Replaces NULL, so that every value has the same count of numbers
    fields: Fields  # Its fields in Spark: one number each, or two for a point

    @property
    def pattern(self) -> str:
        """The pattern that a value matches."""
        return re.escape(self.example.decode()).replace("0", _NUMBER)


SHAPES: Final = {
    "point_out": Shape("point", b"(0,0)", (("x", 1), ("y", 1))),
    "line_out": Shape("line", b"{0,0,0}", (("a", 1), ("b", 1), ("c", 1))),
    "lseg_out": Shape("lseg", b"[(0,0),(0,0)]", (("start", 2), ("end", 2))),
    "box_out": Shape("box", b"(0,0),(0,0)", (("upper_right", 2), ("lower_left", 2))),
    "circle_out": Shape("circle", b"<(0,0),0>", (("center", 2), ("radius", 1))),
}
"""Shapes by the function that writes the type."""
_COORDINATES: Final = SHAPES["point_out"].fields
_PATH_FIELDS: Final = ("closed", "points")


def geometric_type(output: str, number: ColumnType) -> Nested:
    """The Spark type for the type with this output function, using this number type."""
    if output in SHAPES:
        return nest(_arrow_type(SHAPES[output].fields, number.arrow), number, _read_shapes, SHAPES[output])
    points = list_of(_arrow_type(_COORDINATES, number.arrow))
    if output == "poly_out":
        return nest(points, number, _read_points, "polygon", _POLYGON)
    return nest(struct_of(_PATH_FIELDS, (pa.bool_(), points)), number, _read_paths)


def vector_type(number: ColumnType) -> Nested:
    """pgvector's vector and halfvec: ARRAY<FLOAT>."""
    return nest(list_of(number.arrow), number, _read_vectors)


def _read_shapes(values: pa.Array, number: ColumnType, shape: Shape) -> pa.Array:
    """point, line, lseg, box, circle: a STRUCT of numbers and points."""
    _, numbers = split_numbers(values, number, shape.name, shape.pattern, shape.example)
    return _structs(shape.fields, numbers, values)


def _read_points(values: pa.Array, number: ColumnType, name: str, pattern: str) -> pa.Array:
    """polygon: an ARRAY of points."""
    offsets, numbers = split_numbers(values, number, name, pattern)
    return list_array(offsets // 2, _structs(_COORDINATES, numbers), values)


def _read_paths(values: pa.Array, number: ColumnType) -> pa.Array:
    """path: STRUCT<closed BOOLEAN, points ARRAY<point>>. The outer brackets show whether it is closed."""
    points = _read_points(values, number, "path", _PATH)
    return struct_array(_PATH_FIELDS, (pc.starts_with(values, b"("), points), values)


def _read_vectors(values: pa.Array, number: ColumnType) -> pa.Array:
    offsets, numbers = split_numbers(values, number, "vector", _VECTOR)
    return list_array(offsets, numbers, values)


def _structs(fields: Fields, numbers: pa.Array, like: pa.Array | None = None) -> pa.Array:
    """Structs of numbers and points, built from one flat array of numbers."""
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
