"""Puts flat columns together to lists, structs and maps, in exactly the Arrow types that Spark wants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from pgcdc.types.column import Rejected
from pgcdc.types.split import Offsets

__all__ = ["list_array", "list_type", "map_array", "map_type", "owner", "rejected_as", "struct_array", "struct_type"]


def list_type(element: pa.DataType) -> pa.DataType:
    """Spark's ARRAY: elements may be NULL."""
    return pa.list_(pa.field("element", element))


def struct_type(names: Sequence[str], types: Sequence[pa.DataType]) -> pa.DataType:
    """Spark's STRUCT: each field may be NULL."""
    return pa.struct([pa.field(name, one) for name, one in zip(names, types, strict=True)])


def map_type(key: pa.DataType, value: pa.DataType) -> pa.DataType:
    """Spark's MAP: values may be NULL."""
    return pa.map_(pa.field("key", key, nullable=False), pa.field("value", value))


def list_array(offsets: Offsets, items: pa.Array, like: pa.Array | None = None) -> pa.Array:
    """Lists of the items; NULL where `like` is."""
    buffers = [_validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(list_type(items.type), len(offsets) - 1, buffers, children=[items])


def struct_array(names: Sequence[str], columns: Sequence[pa.Array], like: pa.Array | None = None) -> pa.Array:
    """Structs of the columns; NULL where `like` is."""
    made = struct_type(names, [column.type for column in columns])
    length = len(columns[0] if like is None else like)
    return pa.Array.from_buffers(made, length, [_validity(like)], children=list(columns))


def map_array(offsets: Offsets, keys: pa.Array, values: pa.Array, like: pa.Array) -> pa.Array:
    """Maps; NULL where `like` is."""
    made = map_type(keys.type, values.type)
    entries = pa.Array.from_buffers(
        pa.struct([made.key_field, made.item_field]), len(keys), [None], children=[keys, values]
    )
    buffers = [_validity(like), pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(made, len(like), buffers, children=[entries])


def _validity(like: pa.Array | None) -> pa.Buffer | None:
    if like is None or like.null_count == 0:
        return None
    return like.is_valid().buffers()[1]


def owner(offsets: Offsets, item: int) -> int:
    """The list that an item is in."""
    return int(np.searchsorted(offsets, item, side="right")) - 1


@contextmanager
def rejected_as(what: str, *levels: Offsets, each: int = 1) -> Iterator[None]:
    """What is refused inside is said of the value that holds it: each level's lists hold `each` items of the next."""
    try:
        yield
    except Rejected as cause:
        index = cause.index // each
        for offsets in reversed(levels):
            index = owner(offsets, index)
        raise Rejected(index, f"{what}: {cause.reason}", cause.advice) from None
