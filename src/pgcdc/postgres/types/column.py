"""The Spark type of a column, and the conversion of its values.

Values arrive as PostgreSQL's own text; the spool contains exactly these bytes, with or without `binary`. A column type
converts a whole column into one Arrow array, or names the value that it cannot convert. It never turns such a value
into NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Offsets = npt.NDArray[np.int32]  # Where each list begins in the flat array of items, then where the last one ends

CHOICES = {
    "json": ("string", "variant"),
    "numeric": ("decimal", "string", "double"),
    "out_of_range": ("error", "clamp", "string"),
    "arrays": ("array", "string"),
    "composites": ("struct", "string"),
}  # The values of each field of TypeOptions


class Exactness(Enum):
    """How faithful a Spark value is to PostgreSQL's value."""

    EXACT = "exact"  # The same value: it converts back into what PostgreSQL wrote
    CONVERTED = "converted"  # The same value in another form, by a documented rule
    TEXT = "text"  # PostgreSQL's own text


class Rejected(Exception):
    """A value that does not fit the Spark type of its column."""

    def __init__(self, index: int, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.index = index  # The index of the value in the column
        self.reason = reason  # The problem; never includes a value that may be long
        self.advice = advice  # The option that would allow the value


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """The choices of the user."""

    json: str = "string"  # json and jsonb: `string` or `variant`
    numeric: str = "decimal"
    """numeric: `decimal` (text if no precision that Spark supports is declared), `string`, or `double`."""
    out_of_range: str = "error"
    """infinity, years before 1 or after 9999, 24:00: `error`, `clamp` (the nearest value in Spark) or `string` (all
    dates and times as text)."""
    arrays: str = "array"  # Arrays: `array` or `string`
    composites: str = "struct"  # Composite types: `struct` or `string`


class ColumnType(Protocol):
    """The Spark side of a PostgreSQL type. Picklable, because executors need it."""

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type that Spark expects from a Python source. `spark.tables.spark_type` returns Spark's own
        type."""

    @property
    def exactness(self) -> Exactness:
        """How faithful the Spark values are."""

    @property
    def rule(self) -> str:
        """The conversion rule in a few words, for `pgcdc describe` and docs/types.md; may be empty."""

    def convert(self, values: pa.Array) -> pa.Array:
        """Convert PostgreSQL's text in a binary array into an array of the type `arrow`. NULL stays NULL. Raises
        Rejected."""


_SPARK_NAMES = {
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", "UTC"): "timestamp",
}


def spark_name(kind: pa.DataType) -> str:
    """Spark's name for a type of single values, for messages."""
    is_decimal = pa.types.is_decimal(kind)
    return f"decimal({kind.precision},{kind.scale})" if is_decimal else _SPARK_NAMES.get(kind, str(kind))


# --- from rows to columns: the values of many rows are stored in one flat array, row after row


def split_columns(values: pa.BinaryArray, width: int) -> list[pa.Array]:
    """The values of each column; `values` has `width` per row.

    Costs 0.01 µs per value, a third of the cost of casting ten columns, so a compiled version would gain too little.
    """
    return [take_column(values, width, column) for column in range(width)]


def take_column(values: pa.BinaryArray, width: int, column: int) -> pa.Array:
    rows, left = divmod(len(values), width)
    if left:
        raise ValueError(f"{len(values)} values are not rows of {width}")
    return values.take(pa.array(np.arange(column, rows * width, width, dtype=np.int64)))


# --- lists, structs and maps, in exactly the Arrow types that Spark expects


@dataclass(frozen=True, slots=True)
class Nested:
    arrow: pa.DataType
    exactness: Exactness
    rule: str
    read: Callable[..., pa.Array]  # A module-level function, so that it can be pickled: takes the values and `parts`
    parts: tuple[Any, ...] = ()

    def convert(self, values: pa.Array) -> pa.Array:
        return self.read(values, *self.parts)


def nest(arrow: pa.DataType, inner: ColumnType, read: Callable[..., pa.Array], *parts: object) -> Nested:
    """A type whose values all contain the type `inner`. `read` takes the values, `inner` and the parts."""
    return Nested(arrow, inner.exactness, inner.rule, read, (inner, *parts))


def worst(parts: Iterable[ColumnType]) -> Exactness:
    """A value is only as faithful as its least faithful part."""
    return max((part.exactness for part in parts), key=list(Exactness).index)


def list_of(element: pa.DataType) -> pa.DataType:
    """Spark's ARRAY: elements may be NULL."""
    return pa.list_(pa.field("element", element))


def struct_of(names: Sequence[str], types: Sequence[pa.DataType]) -> pa.DataType:
    """Spark's STRUCT: each field may be NULL."""
    return pa.struct([pa.field(name, one) for name, one in zip(names, types, strict=True)])


def map_of(key: pa.DataType, value: pa.DataType) -> pa.DataType:
    """Spark's MAP: values may be NULL."""
    return pa.map_(pa.field("key", key, nullable=False), pa.field("value", value))


def list_array(offsets: Offsets, items: pa.Array, like: pa.Array | None = None) -> pa.Array:
    """Lists of the items; NULL where `like` is NULL."""
    buffers = [validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(list_of(items.type), len(offsets) - 1, buffers, children=[items])


def struct_array(names: Sequence[str], columns: Sequence[pa.Array], like: pa.Array | None = None) -> pa.Array:
    """Structs of the columns; NULL where `like` is NULL."""
    made = struct_of(names, [column.type for column in columns])
    length = len(columns[0] if like is None else like)
    return pa.Array.from_buffers(made, length, [validity(like)], children=list(columns))


def map_array(offsets: Offsets, keys: pa.Array, values: pa.Array, like: pa.Array) -> pa.Array:
    """Maps; NULL where `like` is NULL."""
    made = map_of(keys.type, values.type)
    entries = pa.struct([made.key_field, made.item_field])
    pairs = pa.Array.from_buffers(entries, len(keys), [None], children=[keys, values])
    buffers = [validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(made, len(like), buffers, children=[pairs])


def validity(like: pa.Array | None) -> pa.Buffer | None:
    """A copy of the bitmap of NULLs that starts at the first value."""
    if like is None or like.null_count == 0:
        return None
    return like.is_valid().buffers()[1]


@contextmanager
def rejected_as(what: str, *levels: Offsets, each: int = 1) -> Iterator[None]:
    """Report a rejected inner value as a problem of the value that contains it.

    `levels` are the lists around it, outermost first; `each` is the number of inner values per item of the innermost
    list.
    """
    try:
        yield
    except Rejected as cause:
        index = cause.index // each
        for offsets in reversed(levels):
            # An empty list has the same offset as the list after it: the last one with that offset contains the item.
            index = int(np.searchsorted(offsets, index, side="right")) - 1
        raise Rejected(index, f"{what}: {cause.reason}", cause.advice) from None
