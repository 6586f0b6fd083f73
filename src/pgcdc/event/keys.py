"""Which changes must stay in order: those of one row, by a hash of its key; and those that everything waits for.

Two rows with the same hash do no harm, they are only kept together. A table without a key of its own (none, or the whole
row) is kept together as a whole.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.operation import OldKind, Op
from pgcdc.core.relation import Relation
from pgcdc.event.edits import Edit
from pgcdc.event.frame import Frame
from pgcdc.event.texts import I64, U64, mix, quote_json
from pgcdc.event.values import edited_column

__all__ = ["find_barriers", "has_key", "key_hashes", "key_texts"]

Bools = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BARRIERS = np.zeros(256, np.bool_)
_BARRIERS[[Op.TRUNCATE, Op.SCHEMA_CHANGE, Op.SNAPSHOT_STARTED, Op.SNAPSHOT_COMPLETED]] = True


def has_key(shape: Relation) -> bool:
    """Whether rows of the table can be told apart by some of their columns."""
    return shape.replica_identity in ("d", "i") and any(column.is_key for column in shape.columns)


def find_barriers(frame: Frame) -> Bools:
    """Changes that concern more than one key: what was before them must be written before, what is behind them after.

    An UPDATE has an old key only if it is another one (or so long that PostgreSQL stores it elsewhere).
    """
    moved: Bools = (frame.op == Op.UPDATE) & (frame.old_kind == OldKind.KEY)
    return _BARRIERS[frame.op] | moved


def key_hashes(frame: Frame) -> I64:
    """For every change a number that all changes of its row have, in any process and at any time."""
    seeds = np.array([zlib.crc32(shape.channel.encode()) for shape in frame.shapes], np.uint64)
    hashes: U64 = mix(seeds * _GOLDEN)[frame.version]
    counts = [len(shape.columns) for shape in frame.shapes]
    is_key: Bools = (frame.is_key != 0) & np.repeat([has_key(shape) for shape in frame.shapes], counts)
    if is_key.any():
        is_delete: Bools = frame.op == Op.DELETE
        hashes = hashes + _side(frame, "new", ~is_delete, is_key) + _side(frame, "old", is_delete, is_key)
    return mix(hashes).view(np.int64)


def key_texts(frame: Frame, edit: Edit) -> pa.Array:
    """The values of the key as a JSON array, as a chain shows them.

    Null: the event is not about one row, its table has no key, the chain drops a column of it, or it was not sent.
    """
    found = [pa.nulls(1, pa.string())]
    places = np.zeros(len(frame), np.int64)
    done = 1
    for version in np.unique(frame.version).tolist():
        shape, first = frame.shapes[version], int(frame.first[version])
        key = [index for index, column in enumerate(shape.columns) if column.is_key] if has_key(shape) else []
        if key and (edit.dropped is None or not edit.dropped[[first + index for index in key]].any()):
            rows = np.flatnonzero((frame.version == version) & (frame.op != Op.TRUNCATE))
            found.append(_join_key(frame, edit, rows, key))
            places[rows] = done + np.arange(len(rows))
            done += len(rows)
    return pa.concat_arrays(found).take(pa.array(places))


def _join_key(frame: Frame, edit: Edit, rows: I64, key: list[int]) -> pa.Array:
    is_delete: Bools = frame.op[rows] == Op.DELETE
    has_old: Bools = frame.old_kind[rows] != OldKind.NONE
    marks = frame.changes.column("unchanged")
    marked_rows = pc.list_parent_indices(marks).to_numpy()
    marked = pc.list_flatten(marks).to_numpy()
    pieces: list[pa.Array | str] = []
    is_missing = np.zeros(len(rows), np.bool_)
    for index in key:
        # A key so long that it is not sent again has its old value beside it.
        is_old: Bools = is_delete | np.isin(rows, marked_rows[marked == index])
        values = edited_column(frame, edit, "new", index, rows)
        if is_old.any():
            values = pc.if_else(pa.array(is_old), edited_column(frame, edit, "old", index, rows), values)
            is_missing |= is_old & ~has_old
        pieces += [",", _quoted(values)]
    texts = pc.binary_join_element_wise("[", *pieces[1:], "]", "")
    return pc.if_else(pa.array(is_missing), pa.scalar(None, pa.string()), texts) if is_missing.any() else texts


def _quoted(values: pa.Array) -> pa.Array:
    """JSON strings, or null."""
    plain = pc.fill_null(pc.binary_join_element_wise('"', values, '"', ""), "null")
    odd = pc.fill_null(pc.match_substring_regex(values, r'[\x00-\x1f"\\]'), False).to_numpy(zero_copy_only=False)
    if not odd.any():
        return plain
    escaped = pa.array([quote_json(text) for text in values.filter(pa.array(odd)).to_pylist()], pa.string())
    order = np.arange(len(values))
    order[odd] = len(values) + np.arange(len(escaped))
    return pa.concat_arrays([plain, escaped]).take(pa.array(order))


def _side(frame: Frame, side: str, rows: Bools, is_key: Bools) -> U64:
    """The hash of the key values of some rows, 0 for the others."""
    lists = frame.changes.column(side)
    if lists.null_count == len(lists) or not rows.any():
        return np.zeros(len(frame), np.uint64)
    counts: I64 = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    starts: I64 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    row_of = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(int(starts[-1])) - starts[row_of]
    wanted: Bools = is_key[frame.first[frame.version[row_of]] + number] & rows[row_of]
    row_of, number = row_of[wanted], number[wanted]
    values = _hash_values(pc.list_flatten(lists).filter(pa.array(wanted)))
    mixed = mix(values + (number + 1).astype(np.uint64) * _GOLDEN)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    ends = np.searchsorted(row_of, np.arange(len(counts)), side="right")
    begins = np.searchsorted(row_of, np.arange(len(counts)), side="left")
    result: U64 = sums[ends] - sums[begins]
    return result


def _hash_values(values: pa.Array) -> U64:
    """A number for each value: its bytes as digits in a large odd base, modulo 2^64."""
    _, offset_buffer, data_buffer = values.buffers()
    if offset_buffer is None or data_buffer is None:
        return np.zeros(len(values), np.uint64)
    offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64)
    offsets -= offsets[0]
    lengths = np.diff(offsets)
    place = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    powers = np.cumprod(np.full(int(lengths.max(initial=0)), np.uint64(0x100000001B3)), dtype=np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((data + np.uint64(1)) * powers[place], dtype=np.uint64)])
    result: U64 = sums[offsets[1:]] - sums[offsets[:-1]]
    return result
