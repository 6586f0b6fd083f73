"""Puts flat columns together to lists, structs and maps, in exactly the Arrow types that Spark wants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from pgcdc.postgres.types.column import ColumnType, Exactness, Rejected
from pgcdc.postgres.types.split import Offsets


@dataclass(frozen=True, slots=True)
class Nested:
    """What all types that hold others say about themselves."""

    arrow: pa.DataType
    exactness: Exactness
    rule: str


_ORDER: Final = (Exactness.EXACT, Exactness.CONVERTED, Exactness.TEXT)


def worst(parts: Iterable[ColumnType]) -> Exactness:
    """A value is as faithful as the least faithful value in it."""
    return max((part.exactness for part in parts), key=_ORDER.index, default=Exactness.EXACT)


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
    buffers = [_validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(list_of(items.type), len(offsets) - 1, buffers, children=[items])


def struct_array(names: Sequence[str], columns: Sequence[pa.Array], like: pa.Array | None = None) -> pa.Array:
    """Structs of the columns; NULL where `like` is."""
    made = struct_of(names, [column.type for column in columns])
    length = len(columns[0] if like is None else like)
    return pa.Array.from_buffers(made, length, [_validity(like)], children=list(columns))


def map_array(offsets: Offsets, keys: pa.Array, values: pa.Array, like: pa.Array) -> pa.Array:
    """Maps; NULL where `like` is."""
    made = map_of(keys.type, values.type)
    entries = pa.struct([made.key_field, made.item_field])
    pairs = pa.Array.from_buffers(entries, len(keys), [None], children=[keys, values])
    buffers = [_validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(made, len(like), buffers, children=[pairs])


def _validity(like: pa.Array | None) -> pa.Buffer | None:
    if like is None or like.null_count == 0:
        return None
    return like.is_valid().buffers()[1]


@contextmanager
def rejected_as(what: str, *levels: Offsets, each: int = 1) -> Iterator[None]:
    """What is refused inside is said of the value that holds it.

    `levels` are the lists around it, the outermost first; `each` is how many of it stand side by side in the innermost.
    """
    try:
        yield
    except Rejected as cause:
        index = cause.index // each
        for offsets in reversed(levels):
            # An empty list begins where the next one does: the last of them holds the item.
            index = int(np.searchsorted(offsets, index, side="right")) - 1
        raise Rejected(index, f"{what}: {cause.reason}", cause.advice) from None
