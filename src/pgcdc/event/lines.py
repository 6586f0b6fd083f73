"""Events as JSON text, rendered from the column buffers: what sinks of lines take when no transform needs the columns.

`transform.event_json` makes the same text, byte by byte, of the columns of an event by Spark expressions: the way for
pipelines with transforms. This one is several times cheaper. It has two implementations with the same results, in C
(`_lines.pyx`) and here in Python, which runs where there was no compiler and is the one to read first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.compiled import load_compiled
from pgcdc.core.operation import OldKind, Op
from pgcdc.core.relation import Relation
from pgcdc.event.edits import Edit, Replaced
from pgcdc.event.frame import Frame
from pgcdc.event.texts import quote_json, time_texts

__all__ = ["OPERATIONS", "OPERATION_OF", "SOURCE_NAME", "Keyed", "LineMaker", "quote_json", "render_python"]

SOURCE_NAME = "wal_replication"
OPERATIONS = tuple(op.name for op in Op)
OPERATION_OF = np.zeros(256, np.int32)
"""From the byte of an operation to its index in OPERATIONS."""
for _number, _name in enumerate(OPERATIONS):
    OPERATION_OF[Op[_name]] = _number

NO_EDIT = Edit()


class LineMaker:
    """Makes JSON of the events of a frame, each followed by `end`: once, or once for each chain of transforms."""

    def __init__(self, frame: Frame, ids: pa.Array, positions: pa.Array, *, transaction: bool, end: str) -> None:
        self._frame = frame
        self._ids = ids
        self._heads = pa.array([text for shape in frame.shapes for text in _heads(shape)], pa.string())
        self._head_of = (frame.version * len(OPERATIONS) + OPERATION_OF[frame.op]).astype(np.int32)
        self._tails = _tails(frame, positions, transaction, end)

    def lines(self, edit: Edit = NO_EDIT) -> pa.Array:
        """The JSON of every event; null where the chain behind `edit` does not have it."""
        keyed = Keyed(self._frame, edit)
        return _renderer()(keyed, self._frame.changes, self._ids, self._heads, self._head_of, self._tails)


class Keyed:
    """What the renderers need of a frame, with the columns' names as JSON keys, and of what a chain does to it."""

    def __init__(self, frame: Frame, edit: Edit = NO_EDIT) -> None:
        names = edit.names
        if names is None:
            names = [column.name for shape in frame.shapes for column in shape.columns]
        self.keys = pa.array([f"{quote_json(name)}:" for name in names], pa.string())
        self.edit = edit
        self.first = frame.first
        self.is_key = frame.is_key
        self.version = frame.version
        self.op = frame.op
        self.old_kind = frame.old_kind


def _heads(shape: Relation) -> list[str]:
    """From the id to the row, for each operation."""
    channel = quote_json(shape.channel)
    table = quote_json(shape.name if shape.oid else None)
    return [
        f'","channel":{channel},"operation":"{operation}","payload":{{"op":"{operation}","table":{table},"row":'
        for operation in OPERATIONS
    ]


def _tails(frame: Frame, positions: pa.Array, transaction: bool, end: str) -> pa.Array:
    """From the payload's end to the event's."""
    times = time_texts(frame.commit_time)
    alone = pa.array(frame.is_alone)
    if frame.is_alone.any():
        times = pc.if_else(alone, "null", times)
    pieces: list[Any] = [f'}},"source":"{SOURCE_NAME}","created_at":', times, ',"position":"', positions]
    if transaction:
        xid, seq = frame.owners.column("xid").cast(pa.string()), pa.array(frame.ordinal).cast(pa.string())
        block = ['","transaction":{"xid":', xid, ',"commit_time":', times, ',"seq":', seq, "}"]
        described = pc.binary_join_element_wise(*block, "")
        pieces.append(pc.if_else(alone, '","transaction":null', described))
    else:
        pieces.append('"')
    return pc.binary_join_element_wise(*pieces, "}" + end, "")


def render_python(
    frame: Keyed,
    changes: pa.RecordBatch,
    ids: pa.Array,
    heads: pa.Array,
    head_of: npt.NDArray[np.int32],
    tails: pa.Array,
) -> pa.Array:
    """The events of `changes`, one JSON text for each."""
    keys, head_texts, edit = frame.keys.to_pylist(), heads.to_pylist(), frame.edit
    lines: list[str | None] = []
    news, olds = (_replaced_values(changes.column(side), getattr(edit, side)) for side in ("new", "old"))
    dropped = set() if edit.dropped is None else set(np.flatnonzero(edit.dropped).tolist())
    columns = (_values(ids), news, olds, _values(changes.column("unchanged")), _values(tails))
    for row, (event_id, new, old, unchanged, tail) in enumerate(zip(*columns, strict=True)):
        if edit.keep is not None and not edit.keep[row]:
            lines.append(None)
            continue
        first, marks = int(frame.first[frame.version[row]]), unchanged or []
        key_only = frame.old_kind[row] == OldKind.KEY
        gone = {index for index in range(len(new or old or ())) if first + index in dropped} if dropped else set()
        left_out = gone | {-1 - mark for mark in marks if mark < 0}
        if key_only and old is not None:
            left_out |= {index for index in range(len(old)) if not frame.is_key[first + index]}
        before = _object(old, keys, first, left_out)
        is_delete = frame.op[row] == Op.DELETE
        after = before if is_delete else _object(new, keys, first, gone | {mark for mark in marks if mark >= 0})
        names = ",".join(keys[first + mark][:-1] for mark in marks if mark >= 0 and mark not in gone)
        toast = f',"_unchanged_toast_columns":[{names}]' if names else ""
        shown = "null" if is_delete else before
        lines.append(f'{{"id":"{event_id}{head_texts[head_of[row]]}{after},"old":{shown}{toast}{tail}')
    return pa.array(lines, pa.string())


def _values(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _replaced_values(lists: pa.Array, replaced: Replaced | None) -> list[Any]:
    """Lists of values, with the texts that a mask made of them."""
    if replaced is None:
        return _values(lists)
    values = lists.values.to_pylist()
    for item in np.flatnonzero(replaced.where >= 0).tolist():
        text = replaced.texts[int(replaced.where[item])].as_py()
        values[item] = None if text is None else text.encode()
    ends = lists.offsets.to_pylist()
    return [values[ends[row] : ends[row + 1]] if lists[row].is_valid else None for row in range(len(lists))]


def _object(values: list[bytes | None] | None, keys: list[str], first: int, left_out: set[int]) -> str:
    if values is None:
        return "null"
    fields = (
        keys[first + index] + quote_json(None if value is None else value.decode())
        for index, value in enumerate(values)
        if index not in left_out
    )
    return f"{{{','.join(fields)}}}"


@cache
def _renderer() -> Callable[..., pa.Array]:
    module = load_compiled("event._lines")
    render: Callable[..., pa.Array] = module.render if module is not None else render_python
    return render
