"""From segments to events: the columns that Spark sees, made from column buffers without a Python step per row.

The event shape is one schema for all tables: `row` and `old` are maps with PostgreSQL's own text, so that transforms are
native Spark expressions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.errors import DecodeError
from pgcdc.position import Position
from pgcdc.relation import Relation
from pgcdc.spool.reader import SegmentSlice, read_slice
from pgcdc.spool.schema import OldKind, Op

__all__ = ["EVENT_SCHEMA", "IdSeed", "event_batch", "event_ids", "position_texts"]

EVENT_SCHEMA = (
    "id STRING, channel STRING, operation STRING, schema STRING, table STRING, row MAP<STRING,STRING>, "
    "old MAP<STRING,STRING>, unchanged_toast_columns ARRAY<STRING>, source STRING, created_at TIMESTAMP, "
    "position STRING, lsn BIGINT, ordinal BIGINT, xid BIGINT, origin STRING"
)
"""The columns of an event, as Spark DDL."""

SOURCE_NAME = "wal_replication"

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IdSeed:
    """What makes the ids of one stream its own: a hash of server and slot."""

    high: int
    low: int

    @classmethod
    def of(cls, system_identifier: str, slot: str) -> IdSeed:
        """The seed of a slot of a server."""
        digest = hashlib.sha256(f"{system_identifier}/{slot}".encode()).digest()
        return cls(int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big"))


def event_batch(
    pieces: Sequence[SegmentSlice], relations: list[Relation], seed: IdSeed, schema: pa.Schema
) -> pa.RecordBatch | None:
    """The events of neighbouring slices as one record batch with exactly `schema`; None if they have none.

    Under light load segments are tiny: many of them in one batch cost little more than one.
    """
    read = [read_slice(piece) for piece in pieces]
    changes = _one_batch([table for table, _ in read])
    owners = _one_batch([table for _, table in read])
    if changes is None or owners is None:
        return None
    lsn: I64 = owners.column("lsn").to_numpy()
    commit_time: I64 = owners.column("commit_time").to_numpy()
    ordinal: I64 = changes.column("ordinal").to_numpy()
    sub: I64 = changes.column("sub").to_numpy().astype(np.int64)
    op = changes.column("op").to_numpy()
    version = changes.column("relation").to_numpy()
    shapes = _Shapes(relations)
    row, old = _row_and_old(changes, op, version, shapes)
    columns = {
        "id": event_ids(seed, lsn, ordinal, sub, commit_time),
        "channel": _pick([shape.channel for shape in relations], version),
        "operation": _OPERATIONS.take(pa.array(_OPERATION_OF[op])),
        "schema": _pick([shape.namespace for shape in relations], version),
        "table": _pick([shape.name for shape in relations], version),
        "row": row,
        "old": old,
        "unchanged_toast_columns": _unchanged_names(changes, version, shapes),
        "source": _pick([SOURCE_NAME], np.zeros(len(version), np.int32)),
        "created_at": pa.array(commit_time).cast(pa.timestamp("us", tz="UTC")),
        "position": position_texts(lsn, ordinal, sub),
        "lsn": pa.array(lsn),
        "ordinal": pa.array(ordinal),
        "xid": owners.column("xid"),
        "origin": owners.column("origin"),
    }
    return pa.RecordBatch.from_arrays([_as_type(columns[field.name], field.type) for field in schema], schema=schema)


def _one_batch(tables: list[pa.Table]) -> pa.RecordBatch | None:
    batches = pa.concat_tables(tables).combine_chunks().to_batches()
    return batches[0] if batches else None


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


_OPERATIONS = pa.array(["INSERT", "UPDATE", "DELETE", "TRUNCATE", "MESSAGE"])
_OPERATION_OF = np.zeros(256, np.int32)
for _number, _op in enumerate((Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE, Op.MESSAGE)):
    _OPERATION_OF[_op] = _number


def _pick(names: list[str], index: npt.NDArray[np.int32]) -> pa.Array:
    return pa.array(names, pa.string()).take(pa.array(index))


class _Shapes:
    """All relations side by side: where each one's columns begin, their names, and whether they are of the key."""

    def __init__(self, relations: list[Relation]) -> None:
        counts = [len(relation.columns) for relation in relations]
        self.first: I64 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.names = pa.array([c.name for relation in relations for c in relation.columns], pa.string())
        self.is_key: Bools = np.array([c.is_key for relation in relations for c in relation.columns], np.bool_)


def _row_and_old(
    changes: pa.RecordBatch, op: npt.NDArray[np.uint8], version: npt.NDArray[np.int32], shapes: _Shapes
) -> tuple[pa.Array, pa.Array]:
    """`row`: the new values (of a DELETE: the old ones). `old`: the old values of an UPDATE, as far as they were sent."""
    new, old = changes.column("new"), changes.column("old")
    key_only: Bools = changes.column("old_kind").to_numpy() == OldKind.KEY
    is_delete: Bools = op == Op.DELETE
    nobody = np.zeros(len(op), np.bool_)
    unchanged = _flat_unchanged(changes)
    news = _maps(new, version, shapes, nobody, unchanged, old=False)
    olds = _maps(old, version, shapes, key_only, unchanged, old=True)
    if not is_delete.any():
        return news, olds
    numbers = np.arange(len(op))
    rows = pa.concat_arrays([news, olds]).take(pa.array(np.where(is_delete, numbers + len(op), numbers)))
    return rows, olds.take(pa.array(numbers, mask=is_delete))


def _flat_unchanged(changes: pa.RecordBatch) -> tuple[I64, I64]:
    """(row number, column) of every unchanged TOAST value; a column of the old tuple is -1-i."""
    column = changes.column("unchanged")
    if column.null_count == len(column):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return (
        pc.list_parent_indices(column).to_numpy().astype(np.int64),
        pc.list_flatten(column).to_numpy().astype(np.int64),
    )


def _maps(
    lists: pa.Array,
    version: npt.NDArray[np.int32],
    shapes: _Shapes,
    key_only: Bools,
    unchanged: tuple[I64, I64],
    *,
    old: bool,
) -> pa.Array:
    """Lists of values as maps from column name to text; what was not sent (unchanged TOAST, no key) is left out."""
    if lists.null_count == len(lists):
        return pa.nulls(len(lists), _MAP)
    counts: I64 = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    starts: I64 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total = int(starts[-1])
    row_of = np.repeat(np.arange(len(counts)), counts)
    name_of = shapes.first[version[row_of]] + np.arange(total) - starts[row_of]
    values = pc.list_flatten(lists)
    keep: Bools | None = None
    if key_only.any():
        keep = ~key_only[row_of] | shapes.is_key[name_of]
    rows, columns = unchanged
    mine = columns < 0 if old else columns >= 0
    if mine.any():
        keep = np.ones(total, np.bool_) if keep is None else keep
        keep[starts[rows[mine]] + (-1 - columns[mine] if old else columns[mine])] = False
    if keep is not None:
        values = values.filter(pa.array(keep))
        name_of = name_of[keep]
        starts = np.concatenate([[0], np.cumsum(np.bincount(row_of[keep], minlength=len(counts)))]).astype(np.int64)
    offsets = pa.array(starts.astype(np.int32), mask=_offset_mask(lists))
    keys = shapes.names.take(pa.array(name_of))
    return pa.MapArray.from_arrays(offsets, keys, _as_text(values), _MAP)


def _offset_mask(lists: pa.Array) -> Bools | None:
    """A null offset makes a null map."""
    if not lists.null_count:
        return None
    return np.append(lists.is_null().to_numpy(zero_copy_only=False), False)


def _as_text(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise DecodeError(
            "a value is not valid UTF-8",
            "The database's encoding is SQL_ASCII or its data is damaged: correct the value, or use a UTF8 database",
        ) from error


_MAP = pa.map_(pa.string(), pa.string())


def _unchanged_names(changes: pa.RecordBatch, version: npt.NDArray[np.int32], shapes: _Shapes) -> pa.Array:
    rows, columns = _flat_unchanged(changes)
    rows, columns = rows[columns >= 0], columns[columns >= 0]
    if not len(rows):
        return pa.nulls(changes.num_rows, pa.list_(pa.string()))
    counts = np.bincount(rows, minlength=changes.num_rows)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    names = shapes.names.take(pa.array(shapes.first[version[rows]] + columns))
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), names)


# --- ids and positions as text


def _mix(x: U64) -> U64:
    """A 64-bit finaliser: every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def event_ids(seed: IdSeed, lsn: I64, ordinal: I64, sub: I64, commit_time: I64) -> pa.Array:
    """UUIDv7s of commit time and position: the same change has the same id on every replay."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    x = _mix(lsn.view(np.uint64) * golden + np.uint64(seed.high))
    rest = sub.view(np.uint64)  # beyond 16 bits it must not run into the ordinal
    rest = (rest & np.uint64(0xFFFF)) + (rest >> np.uint64(16)) * golden
    x = _mix(x + (ordinal.view(np.uint64) << np.uint64(16)) + rest)
    y = _mix(x + np.uint64(seed.low))
    milliseconds = (np.maximum(commit_time, 0) // 1000).astype(np.uint64)
    high = (milliseconds << np.uint64(16)) | np.uint64(0x7000) | (x >> np.uint64(52))
    low = np.uint64(0x8000000000000000) | (y >> np.uint64(2))
    digits = np.concatenate([_hex(high), _hex(low)], axis=1)
    dash = np.full((len(lsn), 1), ord("-"), np.uint8)
    pieces = [
        digits[:, :8],
        dash,
        digits[:, 8:12],
        dash,
        digits[:, 12:16],
        dash,
        digits[:, 16:20],
        dash,
        digits[:, 20:],
    ]
    return _fixed_text(np.concatenate(pieces, axis=1))


def position_texts(lsn: I64, ordinal: I64, sub: I64) -> pa.Array:
    """`str(Position)` of every row."""
    if sub.any():
        return pa.array([str(Position(*p)) for p in zip(lsn.tolist(), ordinal.tolist(), sub.tolist(), strict=True)])
    slash = np.full((len(lsn), 1), ord("/"), np.uint8)
    upper = [_hex(lsn.view(np.uint64), _UPPER), slash, _hex(ordinal.view(np.uint64), _UPPER)[:, 4:]]
    return _fixed_text(np.concatenate(upper, axis=1))


def _digit_pairs(digits: str) -> npt.NDArray[np.uint8]:
    return np.array([[ord(digits[byte >> 4]), ord(digits[byte & 15])] for byte in range(256)], np.uint8)


_LOWER = _digit_pairs("0123456789abcdef")
_UPPER = _digit_pairs("0123456789ABCDEF")


def _hex(numbers: U64, digits: npt.NDArray[np.uint8] = _LOWER) -> npt.NDArray[np.uint8]:
    """16 hexadecimal digits for each number."""
    octets = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return digits[octets].reshape(-1, 16)


def _fixed_text(letters: npt.NDArray[np.uint8]) -> pa.Array:
    count, width = letters.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(letters)))
