"""A batch's changes for the TOAST step: turns a batch into arrays, and builds a batch with the values filled in."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.position import Kind, Position
from pgcdc.core.relation import OldKind, Op
from pgcdc.source.postgres.toast.identity_rules import TableRules
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_VALUE = struct.Struct("<HI")  # column and length
_HEAD_TYPE = np.dtype([("column", "<u2"), ("length", "<u4")])  # the same, for arrays
_LENGTH = struct.Struct("<I")


class Steps(NamedTuple):
    """What the changes mean for the cache, in order; one list element for each."""

    row: list[int]
    version: list[int]
    op: list[int]
    place: list[int]
    key: list[bytes | None]
    old_key: list[bytes | None]  # Only where it differs
    packed: list[bytes]  # Sent values that may be omitted as unchanged later
    first_mark: list[int]
    end_mark: list[int]  # The range of open marks that belong to it


def cache_place(commit: Any, kind: Any) -> Any:
    """Commit and kind (numbers or arrays) as one ordered number, the cache's clock."""
    return commit * 2 + kind


def pack_values(values: dict[int, bytes]) -> bytes:
    """Values by column, packed into one piece; equal values give equal bytes."""
    return b"".join([_VALUE.pack(column, len(values[column])) + values[column] for column in sorted(values)])


def unpack_values(data: bytes) -> dict[int, bytes]:
    values, at = {}, 0
    while at < len(data):
        column, size = _VALUE.unpack_from(data, at)
        at += _VALUE.size
        values[column] = data[at : at + size]
        at += size
    return values


def single_value(packed: bytes, column: int) -> bytes | None:
    """A column's value if it is the only one packed: the common case, handled without a dict."""
    if len(packed) < _VALUE.size or _VALUE.unpack_from(packed) != (column, len(packed) - _VALUE.size):
        return None
    return packed[_VALUE.size :]


class ToastRows:
    """The columns of a batch as arrays, and the locations of its unchanged values."""

    def __init__(self, batch: CaptureBatch, data: pa.RecordBatch) -> None:
        self._batch = batch
        self.data = data
        self.relations = batch.relations
        self.op = data.column("op").to_numpy()
        self.relation = data.column("relation").to_numpy()
        self._new, self._old = data.column("new"), data.column("old")
        self._new_at = self._new.offsets.to_numpy().astype(np.int64)
        self._old_at = self._old.offsets.to_numpy().astype(np.int64)
        self._has_old = data.column("old_kind").to_numpy() != OldKind.NONE
        marked = data.column("unchanged")
        at = marked.offsets.to_numpy()
        self.mark_row = np.repeat(np.arange(len(marked)), np.diff(at))
        self.mark_column = marked.values.to_numpy()[at[0] : at[-1]].astype(np.int64)
        self.mark_left = np.ones(len(self.mark_row), bool)
        counts = batch.transactions.column("rows").to_numpy()
        commits, kinds = (batch.transactions.column(name).to_numpy() for name in ("commit", "kind"))
        self._commits = commits
        self._ends = np.cumsum(counts)
        self.place = np.repeat(cache_place(commits, kinds), counts)
        self._lengths: Ints | None = None
        self._from_old = np.empty(0, np.int64)

    @property
    def open_marks(self) -> Ints:
        """Indexes of the marks whose new value is unresolved."""
        return np.flatnonzero(self.mark_left & (self.mark_column >= 0))

    @property
    def is_changed(self) -> bool:
        """Whether any value was taken from an old tuple."""
        return len(self._from_old) > 0

    def resolve_old(self) -> None:
        """Take values from the old tuple. An unchanged value is never NULL, so any value found there is the right one."""
        marks = self.open_marks
        marks = marks[self._has_old[self.mark_row[marks]]]
        if len(marks):
            old = self._old.values.take(pa.array(self._old_at[self.mark_row[marks]] + self.mark_column[marks]))
            marks = marks[old.is_valid().to_numpy(zero_copy_only=False)]
            self.mark_left[marks] = False
        self._from_old = marks

    def position(self, row: int) -> Position:
        transaction = int(np.searchsorted(self._ends, row, "right"))
        commit, kind = (self._batch.transactions.column(name)[transaction].as_py() for name in ("commit", "kind"))
        ordinal, sub = (self.data.column(name)[row].as_py() for name in ("ordinal", "sub"))
        return Position(commit, Kind(kind), ordinal, sub)

    def complete_place(self, end: int) -> int:
        """`cache_place` of the last complete transaction within the first `end` rows; 0 if there is none."""
        count = self._count_complete(end)
        return int(self.place[self._ends[count - 1] - 1]) if count else 0

    def _count_complete(self, end: int) -> int:
        count = int(np.searchsorted(self._ends, end, "right"))
        if count and not self._batch.transactions.column("complete")[count - 1].as_py():
            count -= 1
        return count

    # --- what the cache needs

    def plan(self, tables: Sequence[tuple[int, Ints, TableRules, bool]], marks: Ints) -> Steps:
        """What to do for rows of these tables: (version, rows, rules, whether it has entries). `marks` are the open
        ones. Short rows of a table without entries do not concern the cache, and are omitted."""
        mark_row = self.mark_row[marks]
        has_marks = np.zeros(self.data.num_rows, bool)
        has_marks[mark_row] = True
        plans = [plan for one in tables if (plan := self._plan_table(*one, has_marks)) is not None]
        if not plans:
            return Steps(*([] for _ in Steps._fields))
        row = np.concatenate([plan[0] for plan in plans])
        order = np.argsort(row, kind="stable")
        row = row[order]
        keys, old_keys, packed = plans[0][1:]
        if len(plans) > 1:
            every = list(itertools.chain.from_iterable(zip(*plan[1:], strict=True) for plan in plans))
            chosen = [every[at] for at in order.tolist()]
            keys, old_keys, packed = ([one[part] for one in chosen] for part in (0, 1, 2))
        return Steps(
            row.tolist(), self.relation[row].tolist(), self.op[row].tolist(), self.place[row].tolist(), keys, old_keys,
            packed, np.searchsorted(mark_row, row, "left").tolist(), np.searchsorted(mark_row, row, "right").tolist(),
        )  # fmt: skip

    def _plan_table(
        self, version: int, mine: Ints, rules: TableRules, has_entries: bool, has_marks: Flags
    ) -> tuple[Ints, list[bytes | None], list[bytes | None], list[bytes]] | None:
        """Rows, keys, old keys that differ, and packed values."""
        op = self.op[mine]
        has_new = (op == Op.INSERT) | (op == Op.SNAPSHOT) | (op == Op.UPDATE)
        written = mine[has_new]
        lengths = self._lengths_of(written, len(rules.toastable))
        is_long = rules.is_long(lengths) | has_marks[written]
        if not has_entries:
            if not is_long.any():
                return None
            later = written >= written[is_long][0]  # earlier rows would find nothing
            mine = mine[mine >= written[is_long][0]]
            written, lengths, is_long = written[later], lengths[later], is_long[later]
        keys: list[bytes | None] = [None] * len(mine)
        packed = [b""] * len(mine)
        at = np.searchsorted(mine, written)
        new_keys = self._keys(self._new, self._new_at, written, rules.keys)
        new_packed = self._pack(written, lengths, rules.worth_keeping(lengths, is_long))
        if len(written) == len(mine):
            keys, packed = new_keys, new_packed
        else:
            for number, key, one in zip(at.tolist(), new_keys, new_packed, strict=True):
                keys[number], packed[number] = key, one
        old_keys: list[bytes | None] = [None] * len(mine)
        which = np.flatnonzero(self._has_old[mine])
        for number, key in zip(
            which.tolist(), self._keys(self._old, self._old_at, mine[which], rules.keys), strict=True
        ):
            if keys[number] is None:  # a delete, or a key that is itself out of line and unchanged
                keys[number] = key
            elif key != keys[number]:
                old_keys[number] = key
        return mine, keys, old_keys, packed

    def _pack(self, rows: Ints, lengths: Ints, keep: Flags) -> list[bytes]:
        """The values to keep, packed as by `pack_values`."""
        columns = np.flatnonzero(keep.any(axis=0)).tolist()
        if not columns:
            return [b""] * len(rows)
        parts = []
        for column in columns:
            heads = np.empty(len(rows), _HEAD_TYPE)
            heads["column"], heads["length"] = column, lengths[:, column]
            buffers = [None, pa.py_buffer(heads.tobytes())]
            head = pa.Array.from_buffers(pa.binary(_HEAD_TYPE.itemsize), len(rows), buffers).cast(pa.binary())
            values = self._new.values.take(pa.array(self._new_at[rows] + column))
            if not keep[:, column].all():
                is_kept = pa.array(keep[:, column])
                head, values = (pc.if_else(is_kept, part, b"") for part in (head, values))
            parts += [head, values]
        found: list[bytes] = pc.binary_join_element_wise(*parts, b"").to_pylist()
        return found

    def _lengths_of(self, rows: Ints, columns: int) -> Ints:
        """The lengths of the new values of rows with this many columns."""
        if self._lengths is None:
            values = self._new.values
            buffer = values.buffers()[1]
            offsets = np.frombuffer(buffer, np.int32)[values.offset : values.offset + len(values) + 1]
            self._lengths = np.diff(offsets).astype(np.int64)
        found: Ints = self._lengths[self._new_at[rows][:, None] + np.arange(columns)]
        return found

    @staticmethod
    def _keys(lists: pa.ListArray, at: Ints, rows: Ints, columns: Sequence[int]) -> list[bytes | None]:
        """The values of the key columns as one piece; None if one is missing."""
        parts = [lists.values.take(pa.array(at[rows] + column)).to_pylist() for column in columns]
        if len(parts) == 1:
            found: list[bytes | None] = parts[0]
            return found
        return [
            None if None in several else b"".join([_LENGTH.pack(len(one)) + one for one in several])
            for several in zip(*parts, strict=True)
        ]

    # --- output

    def rebuild(self, begin: int, end: int, found: Sequence[tuple[int, bytes]]) -> CaptureBatch:
        """The changes of rows `begin` to `end`, with the old tuple's values and `found` (mark, value) filled in."""
        size = end - begin
        self.mark_left[[mark for mark, _ in found]] = False
        data = self.data.slice(begin, size)
        new, unchanged = self._rebuild_new(begin, end, found), self._rebuild_marks(begin, end)
        columns = dict(zip(CHANGES.names, data.columns, strict=True)) | {"new": new, "unchanged": unchanged}
        made = pa.RecordBatch.from_arrays(list(columns.values()), schema=CHANGES)
        part = Part.of(made)
        if size == self.data.num_rows:
            return replace(self._batch, part=part, told={})
        transactions = self._cut_transactions(begin, end)
        count = self._count_complete(end)
        commit = int(self._commits[count - 1]) if count else 0
        position = self._batch.end if end == self.data.num_rows else self.position(end - 1)
        if end < self.data.num_rows and transactions.column("complete")[-1].as_py():
            position = Position.end(commit)
        return CaptureBatch(part, transactions, self.relations, position, commit)

    def _rebuild_new(self, begin: int, end: int, found: Sequence[tuple[int, bytes]]) -> pa.ListArray:
        at = self._new_at[begin : end + 1]
        row = self.mark_row[self._from_old]
        from_old = self._from_old[(row >= begin) & (row < end)]
        old_places = self._old_at[self.mark_row[from_old]] + self.mark_column[from_old]
        marks = np.concatenate([from_old, np.array([mark for mark, _ in found], np.int64)])
        count = int(at[-1] - at[0])
        pick = np.arange(count)
        pick[self._new_at[self.mark_row[marks]] + self.mark_column[marks] - at[0]] = count + np.arange(len(marks))
        pool = pa.concat_arrays([
            self._new.values.slice(int(at[0]), count),
            self._old.values.take(pa.array(old_places)),
            pa.array([value for _, value in found], pa.binary()),
        ])  # fmt: skip
        offsets = pa.array((at - at[0]).astype(np.int32))
        return pa.ListArray.from_arrays(
            offsets, pool.take(pa.array(pick)), mask=self._new.slice(begin, end - begin).is_null()
        )

    def _rebuild_marks(self, begin: int, end: int) -> pa.ListArray:
        kept = self.mark_left & (self.mark_row >= begin) & (self.mark_row < end)
        counts = np.bincount(self.mark_row[kept] - begin, minlength=end - begin)
        offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        columns = pa.array(self.mark_column[kept].astype(np.int16))
        return pa.ListArray.from_arrays(offsets, columns, mask=pa.array(counts == 0))

    def _cut_transactions(self, begin: int, end: int) -> pa.RecordBatch:
        starts = np.concatenate([[0], self._ends[:-1]])
        rows = np.minimum(self._ends, end) - np.maximum(starts, begin)
        inside = np.flatnonzero(rows > 0)
        cut = self._batch.transactions.slice(int(inside[0]), len(inside))
        complete = cut.column("complete").to_numpy(zero_copy_only=False) & (self._ends[inside] <= end)
        columns = dict(zip(TRANSACTIONS.names, cut.columns, strict=True))
        columns |= {"rows": pa.array(rows[inside], pa.int64()), "complete": pa.array(complete)}
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=TRANSACTIONS)
