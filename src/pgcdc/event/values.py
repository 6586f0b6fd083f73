"""Values of a frame as a chain shows them: without dropped columns, with the texts that masks made."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.event.edits import Edit, Replaced
from pgcdc.event.frame import Frame

__all__ = ["edited_column", "edited_lists", "edited_marks"]

Bools = npt.NDArray[np.bool_]


def edited_lists(frame: Frame, edit: Edit, side: str) -> pa.Array:
    """The rows as lists of texts."""
    lists = frame.changes.column(side)
    replaced: Replaced | None = getattr(edit, side)
    if replaced is None and edit.dropped is None:
        return _of_texts(lists.offsets, lists.values, lists)
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    values = lists.values.slice(first, last - first).view(pa.string())
    if replaced is not None:
        where = replaced.where[first:last]
        picked = np.where(where >= 0, len(values) + where, np.arange(len(values)))
        values = pa.concat_arrays([values, replaced.texts]).take(pa.array(picked))
    offsets = offsets - first
    if edit.dropped is not None:
        counts = np.diff(offsets)
        row_of = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(values)) - offsets[:-1][row_of]
        keep: Bools = edit.dropped[frame.first[frame.version[row_of]] + column] == 0
        values = values.filter(pa.array(keep))
        kept = np.bincount(row_of[keep], minlength=len(counts))
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return _of_texts(pa.array(offsets), values, lists)


def _of_texts(offsets: pa.Array, values: pa.Array, lists: pa.Array) -> pa.Array:
    mask = lists.is_null() if lists.null_count else None
    whole = pa.array(offsets.to_numpy())  # with a mask Arrow takes no slice
    return pa.ListArray.from_arrays(whole, values.view(pa.string()), mask=mask)


def edited_marks(frame: Frame, edit: Edit) -> pa.Array:
    """Which values are unchanged TOAST, by the numbers that columns have behind the edit; -1-i: of the old row."""
    marks = frame.changes.column("unchanged")
    if edit.dropped is None or marks.null_count == len(marks):
        return marks
    rows = pc.list_parent_indices(marks).to_numpy()
    columns = pc.list_flatten(marks).to_numpy().astype(np.int64)
    gone = np.concatenate([[0], np.cumsum(edit.dropped)])
    first = frame.first[frame.version[rows]]
    number = np.where(columns < 0, -1 - columns, columns)
    after = number - (gone[first + number] - gone[first])
    keep: Bools = edit.dropped[first + number] == 0
    after = np.where(columns < 0, -1 - after, after)[keep].astype(np.int16)
    counts = np.bincount(rows[keep], minlength=len(marks))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(after), mask=marks.is_null())


def edited_column(
    frame: Frame, edit: Edit, side: str, index: int, rows: npt.NDArray[np.int64] | None = None
) -> pa.Array:
    """The texts of one column, in some rows or all; null where a row has none, or fewer columns."""
    lists = frame.changes.column(side)
    rows = np.arange(len(frame)) if rows is None else rows
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    items = offsets[:-1][rows] + index
    is_out: Bools = (items >= offsets[1:][rows]) | lists.is_null().to_numpy(zero_copy_only=False)[rows]
    if is_out.all():
        return pa.nulls(len(rows), pa.string())
    found = lists.values.view(pa.string()).take(pa.array(items, mask=is_out))
    replaced: Replaced | None = getattr(edit, side)
    if replaced is None:
        return found
    where = replaced.where[np.where(is_out, 0, items)]
    is_kept: Bools = (where < 0) | is_out
    return pc.if_else(pa.array(is_kept), found, replaced.texts.take(pa.array(where, mask=is_kept)))
