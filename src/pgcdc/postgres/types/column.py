"""What a column becomes in Spark, and how its values get there. Values arrive as PostgreSQL's own text (exactly these bytes
are in the spool, with or without `binary`). A column type converts a whole column into one Arrow array, or names the value
that it cannot convert: never a NULL instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Offsets = npt.NDArray[np.int32]  # Where each list begins among the items of all, and at last where the last one ends

CHOICES = {
    "json": ("string", "variant"),
    "numeric": ("decimal", "string", "double"),
    "out_of_range": ("error", "clamp", "string"),
    "arrays": ("array", "string"),
    "composites": ("struct", "string"),
}  # The values of each of the TypeOptions


class Exactness(Enum):
    """How faithful a Spark value is to PostgreSQL's."""

    EXACT = "exact"  # The same value: it can be turned back into what PostgreSQL wrote
    CONVERTED = "converted"  # The same value in another form, by a stated rule
    TEXT = "text"  # PostgreSQL's own text


class Rejected(Exception):
    """A value that does not fit the column's Spark type."""

    def __init__(self, index: int, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.index = index  # Which value of the column
        self.reason = reason  # What is wrong with it, without the value itself if that may be long
        self.advice = advice  # Which option makes it possible


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """What users may choose."""

    json: str = "string"  # json and jsonb: `string` or `variant`
    numeric: str = "decimal"
    """numeric: `decimal` (where a precision is declared that Spark has; text without), `string`, or `double`."""
    out_of_range: str = "error"
    """infinity, years before 1 or after 9999, 24:00: `error`, `clamp` (to Spark's nearest value) or `string` (all dates and
    times as text)."""
    arrays: str = "array"  # Arrays: `array` or `string`
    composites: str = "struct"  # Composite types: `struct` or `string`


class ColumnType(Protocol):
    """What a PostgreSQL type becomes. Picklable: it goes to the executors."""

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type, exactly as Spark wants it from a Python source; `spark.tables.spark_type` is Spark's own type."""

    @property
    def exactness(self) -> Exactness:
        """How faithful it is."""

    @property
    def rule(self) -> str:
        """For `pgcdc describe` and docs/types.md: the conversion rule in a few words; may be empty."""

    def convert(self, values: pa.Array) -> pa.Array:
        """An array of the type `arrow` from PostgreSQL's text in a binary array; NULL stays NULL. Raises Rejected."""


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
    """What Spark calls a type of single values, for messages."""
    is_decimal = pa.types.is_decimal(kind)
    return f"decimal({kind.precision},{kind.scale})" if is_decimal else _SPARK_NAMES.get(kind, str(kind))


# --- from rows to columns: the values of many rows lie in one flat array, row after row


def split_columns(values: pa.BinaryArray, width: int) -> list[pa.Array]:
    """The values of each column; `values` has `width` per row. 0.01 µs per value, a third of the cost of casting ten
    columns: a compiled splitter would gain too little."""
    return [take_column(values, width, column) for column in range(width)]


def take_column(values: pa.BinaryArray, width: int, column: int) -> pa.Array:
    rows, left = divmod(len(values), width)
    if left:
        raise ValueError(f"{len(values)} values are not rows of {width}")
    return values.take(pa.array(np.arange(column, rows * width, width, dtype=np.int64)))


# --- lists, structs and maps, in exactly the Arrow types that Spark wants


@dataclass(frozen=True, slots=True)
class Nested:
    arrow: pa.DataType
    exactness: Exactness
    rule: str
    read: Callable[..., pa.Array]  # A module's function, so that it pickles: from the values and `parts`
    parts: tuple[Any, ...] = ()

    def convert(self, values: pa.Array) -> pa.Array:
        return self.read(values, *self.parts)


def nest(arrow: pa.DataType, inner: ColumnType, read: Callable[..., pa.Array], *parts: object) -> Nested:
    """A type that holds only values of the type `inner`; `read` takes the values, it, and the parts."""
    return Nested(arrow, inner.exactness, inner.rule, read, (inner, *parts))


def worst(parts: Iterable[ColumnType]) -> Exactness:
    """A value is as faithful as the least faithful value in it."""
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
    """Lists of the items; NULL where `like` is."""
    buffers = [validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(list_of(items.type), len(offsets) - 1, buffers, children=[items])


def struct_array(names: Sequence[str], columns: Sequence[pa.Array], like: pa.Array | None = None) -> pa.Array:
    """Structs of the columns; NULL where `like` is."""
    made = struct_of(names, [column.type for column in columns])
    length = len(columns[0] if like is None else like)
    return pa.Array.from_buffers(made, length, [validity(like)], children=list(columns))


def map_array(offsets: Offsets, keys: pa.Array, values: pa.Array, like: pa.Array) -> pa.Array:
    """Maps; NULL where `like` is."""
    made = map_of(keys.type, values.type)
    entries = pa.struct([made.key_field, made.item_field])
    pairs = pa.Array.from_buffers(entries, len(keys), [None], children=[keys, values])
    buffers = [validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(made, len(like), buffers, children=[pairs])


def validity(like: pa.Array | None) -> pa.Buffer | None:
    """Its own bitmap of NULLs, from the first value on."""
    if like is None or like.null_count == 0:
        return None
    return like.is_valid().buffers()[1]


@contextmanager
def rejected_as(what: str, *levels: Offsets, each: int = 1) -> Iterator[None]:
    """What is refused inside is said of the value that holds it. `levels` are the lists around it, the outermost first;
    `each` is how many of it stand side by side in the innermost."""
    try:
        yield
    except Rejected as cause:
        index = cause.index // each
        for offsets in reversed(levels):
            # An empty list begins where the next one does: the last of them holds the item.
            index = int(np.searchsorted(offsets, index, side="right")) - 1
        raise Rejected(index, f"{what}: {cause.reason}", cause.advice) from None
