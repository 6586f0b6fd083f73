"""What many changes leave of a table: for every key its last row, or that it is gone. Pure, on whole columns.

Keys and rows get numbers (`number_rows`); the last change of a number wins. A long value that an update did not send
(unchanged TOAST) comes from an earlier change of the same key, or is left to the target: then the row is a patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.relation import OldKind, Op
from pgcdc.event.batch import TableChanges
from pgcdc.event.changes import settle

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


class MissingKey(Exception):
    """A change that does not identify its row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of some columns; the values are PostgreSQL's texts."""

    columns: tuple[str, ...]
    values: list[pa.Array]

    def __len__(self) -> int:
        return len(self.values[0]) if self.values else 0

    def only(self, columns: Sequence[str]) -> Rows:
        return Rows(tuple(columns), [self.values[self.columns.index(name)] for name in columns])


@dataclass(frozen=True, slots=True)
class Folded:
    """Rows grouped by what to do with them, in this order."""

    gone: Rows | None = None
    """Keys of rows that the target has; whole rows for a table without a key or with a deferrable one."""
    undone: Rows | None = None  # Keys of rows that were added and removed here: the target should not have them
    puts: Rows | None = None  # Rows that the target has, or may have
    expected: int = 0  # How many of these it has, unless another client changed it
    patches: list[Rows] = field(default_factory=list)  # Some columns of the target's rows; the others keep their values
    fresh: Rows | None = None  # Rows that the target should not have

    @property
    def columns(self) -> list[str]:
        """All columns of the rows, in order."""
        groups = [one for one in (self.fresh, self.puts, *self.patches) if one is not None]
        return list(dict.fromkeys(name for rows in groups for name in rows.columns))


def number_rows(columns: Sequence[pa.Array]) -> tuple[I64, int]:
    """A number for each row, the same for equal rows, and how many numbers there are."""
    codes: I64 | None = None
    count = 1
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        found: I64 = encoded.indices.to_numpy().astype(np.int64)
        if codes is None:
            codes, count = found, len(encoded.dictionary)
        else:
            pairs = pa.array(codes * len(encoded.dictionary) + found).dictionary_encode()
            codes, count = pairs.indices.to_numpy().astype(np.int64), len(pairs.dictionary)
    assert codes is not None
    return codes, count


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys in some changes, with a number for each key."""

    columns: list[pa.Array]  # Their values: after each change, then the old ones of updates
    codes: I64  # Their numbers
    count: int
    moved: I64  # Indexes of changes that give a row another key
    left: I64  # The numbers of the keys that these rows had


def _number_keys(changes: TableChanges, values: list[pa.Array], key: Sequence[int]) -> _Keys:
    with_old: I64 = np.flatnonzero((changes.op == Op.UPDATE) & (changes.old_kind != OldKind.NONE))
    columns = [values[one] for one in key]
    if len(with_old):
        columns = [
            pa.concat_arrays([after, changes.old[one].take(pa.array(with_old))])
            for one, after in zip(key, columns, strict=True)
        ]
    codes, count = number_rows(columns)
    before = codes[len(changes) :]
    differs: Bools = before != codes[with_old]
    return _Keys(columns, codes, count, with_old[differs], before[differs])


def find_moves(changes: TableChanges, key: Sequence[int], *, keeps_more: bool) -> list[int]:
    """Updates that give a row another key and that only the target can do, because it has values that are not in the
    change.

    `keeps_more`: the target has more columns, so this applies to all such updates.
    """
    values, unknown = settle(changes, key)
    partial = [one for one in unknown if one is not None]
    if not keeps_more and not partial:
        return []
    moved = _number_keys(changes, values, key).moved
    if not keeps_more:
        moved = moved[np.logical_or.reduce([one[moved] for one in partial])]
    found: list[int] = moved.tolist()
    return found


def fold_keyed(changes: TableChanges, key: Sequence[int]) -> Folded:
    """Fold the changes of a table with a key (column numbers), without those of `find_moves`."""
    values, unknown = settle(changes, key)
    for number in key:
        if unknown[number] is not None:
            raise MissingKey(changes.relation.columns[number].name)
    keys = _number_keys(changes, values, key)
    row: I64 = np.arange(len(changes))
    code = keys.codes[: len(changes)]
    is_gone: Bools = changes.op == Op.DELETE
    is_new: Bools = (changes.op == Op.INSERT) | (changes.op == Op.SNAPSHOT)
    was_absent = is_new
    if len(keys.moved):  # such an update is two steps: remove the old key, add the new one
        row = np.insert(row, keys.moved, keys.moved)
        leaves: I64 = keys.moved + np.arange(len(keys.moved))
        code, is_gone, is_new = code[row], is_gone[row], is_new[row]
        was_absent = is_new.copy()
        code[leaves], is_gone[leaves], was_absent[leaves + 1] = keys.left, True, True
    step: I64 = np.arange(len(row))
    first, last, left = (np.full(keys.count, -1, np.int64) for _ in range(3))
    first[code[::-1]] = step[::-1]
    last[code] = step  # for equal numbers the last one stays
    left[code[is_gone]] = step[is_gone]
    seen: I64 = np.flatnonzero(last >= 0)  # an old key that no change leaves has no step
    ends: Bools = left[seen] == last[seen]
    absent: Bools = was_absent[first[seen]]
    place = np.zeros(keys.count, np.int64)
    place[keys.codes] = np.arange(len(keys.codes))
    key_names = tuple(changes.relation.columns[one].name for one in key)
    gone, undone = (_take(key_names, keys.columns, place[seen[ends & one]]) for one in (~absent, absent))
    kept: I64 = seen[~ends]
    is_fresh: Bools = is_new[first[kept]] & (left[kept] < 0)
    names = tuple(column.name for column in changes.relation.columns)
    sources = [row[last[kept]]] * len(names)
    missing: dict[int, Bools] = {}
    for number, lacks in enumerate(unknown):
        if lacks is None:
            continue
        told: Bools = ~is_gone & ~lacks[row]
        known = np.full(keys.count, -1, np.int64)
        known[code[told]] = step[told]
        found: Bools = known[kept] > left[kept]
        sources[number] = row[np.where(found, known[kept], last[kept])]
        if not found.all():
            missing[number] = ~found
    whole: Bools = ~np.logical_or.reduce(list(missing.values())) if missing else np.ones(len(kept), np.bool_)
    puts: Bools = whole & ~is_fresh
    return Folded(
        gone,
        undone,
        _pick(names, values, sources, puts),
        int((puts & ~absent[~ends]).sum()),
        list(_patches(names, values, sources, missing)),
        _pick(names, values, sources, whole & is_fresh),
    )


def _take(columns: tuple[str, ...], values: Sequence[pa.Array], places: I64) -> Rows | None:
    return Rows(columns, [one.take(pa.array(places)) for one in values]) if len(places) else None


def _pick(columns: tuple[str, ...], values: Sequence[pa.Array], sources: Sequence[I64], where: Bools) -> Rows | None:
    """Some rows, each column from its own places."""
    if not where.any():
        return None
    return Rows(columns, [one.take(pa.array(place[where])) for one, place in zip(values, sources, strict=True)])


def _patches(
    columns: tuple[str, ...], values: Sequence[pa.Array], sources: Sequence[I64], missing: dict[int, Bools]
) -> Iterator[Rows]:
    """Rows with missing values, grouped by the columns that are missing."""
    if not missing:
        return
    marks, kind = np.unique(np.stack(list(missing.values()), axis=1), axis=0, return_inverse=True)
    for number, mark in enumerate(marks):
        lacks = {column for column, is_missing in zip(missing, mark, strict=True) if is_missing}
        keep = [one for one in range(len(columns)) if one not in lacks]
        if lacks and (rows := _pick(columns, values, sources, kind.ravel() == number)) is not None:
            yield rows.only([columns[one] for one in keep])


def _balance(changes: TableChanges) -> tuple[list[pa.Array], I64, I64]:
    """Whole rows that were added or removed, in stream order.

    Returns for each distinct row its last place, and how many more were added than removed. That is enough where every
    change contains its whole old row. MissingKey: an update or delete came without it.
    """
    goes: Bools = (changes.op == Op.UPDATE) | (changes.op == Op.DELETE)
    if (goes & (changes.old_kind != OldKind.FULL)).any():
        raise MissingKey("(the whole row)")
    values, unknown = settle(changes, ())
    out, into = np.flatnonzero(goes), np.flatnonzero(changes.op != Op.DELETE)
    for number, (lacks, old_lacks) in enumerate(zip(unknown, changes.old_unchanged, strict=True)):
        if lacks is not None or (old_lacks is not None and old_lacks[out].any()):
            raise MissingKey(changes.relation.columns[number].name)
    # An update removes its old row before it adds the new one.
    order = np.argsort(np.concatenate([2 * out, 2 * into + 1]), kind="stable")
    columns = [
        pa.concat_arrays([old.take(pa.array(out)), new.take(pa.array(into))]).take(pa.array(order))
        for old, new in zip(changes.old, values, strict=True)
    ]
    code, count = number_rows(columns)
    last = np.zeros(count, np.int64)
    last[code] = np.arange(len(code))
    more = np.bincount(code, np.where(order < len(out), -1, 1), count).astype(np.int64)
    return columns, last, more


def fold_bag(changes: TableChanges) -> Folded:
    """Fold the changes of a table without a key: how many of each row were added and removed."""
    names = tuple(column.name for column in changes.relation.columns)
    if ((changes.op == Op.INSERT) | (changes.op == Op.SNAPSHOT)).all():
        return Folded(fresh=Rows(names, list(changes.new)))
    rows, last, count = _balance(changes)
    less, more = (np.repeat(last, np.maximum(one, 0)) for one in (-count, count))
    return Folded(gone=_take(names, rows, less), fresh=_take(names, rows, more))


def fold_late(changes: TableChanges, key: Sequence[int]) -> Folded:
    """Fold the changes of a table with a deferrable key.

    Until the transaction ends, several rows may share a key, as with `UPDATE t SET id = id + 1`. Every change contains
    the whole old row, which tells them apart.
    """
    names = tuple(column.name for column in changes.relation.columns)
    rows, last, more = _balance(changes)
    keys, count = number_rows([rows[one] for one in key])
    newest = np.full(count, -1, np.int64)
    came = np.sort(last[more > 0])
    newest[keys[came]] = came
    has_left: Bools = np.zeros(count, np.bool_)
    has_left[keys[last[more < 0]]] = True
    put, fresh = (newest[(newest >= 0) & one] for one in (has_left, ~has_left))
    gone = np.repeat(last, np.maximum(-more, 0))
    return Folded(
        gone=_take(names, rows, gone[newest[keys[gone]] < 0]),
        puts=_take(names, rows, put),
        expected=len(put),
        fresh=_take(names, rows, fresh),
    )


def part_of(run: TableChanges, begin: int, end: int) -> TableChanges:
    """The changes in [begin, end)."""
    if (begin, end) == (0, len(run)):
        return run
    return replace(
        run,
        op=run.op[begin:end],
        rows=run.rows[begin:end],
        new=[one.slice(begin, end - begin) for one in run.new],
        old=[one.slice(begin, end - begin) for one in run.old],
        old_kind=run.old_kind[begin:end],
        unchanged=[_marks(one, begin, end) for one in run.unchanged],
        old_unchanged=[_marks(one, begin, end) for one in run.old_unchanged],
    )


def _marks(marks: Bools | None, begin: int, end: int) -> Bools | None:
    return marks[begin:end] if marks is not None and marks[begin:end].any() else None
