"""What many events leave of a table: for every key the last row, or that it is gone. Pure.

A row is its columns and a line in the text format of COPY. Where an update did not bring a long value (unchanged TOAST), it
is taken from an earlier event of the same batch, or else left to the target: then the row is a Patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pgcdc.sink.pg_table.copy_text import read_value
from pgcdc.sink.pg_table.lines import Columns

__all__ = ["Bag", "Fold", "Keyed", "Late", "Move", "Patch", "Row", "values_of"]

Row = tuple[Columns, bytes]


class Patch(tuple[Columns, bytes]):
    """Some columns of a row that the target has; the others keep their values."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A row gets another key where it stands: the target has values of it that are not in the event."""

    old: dict[str, str | None]
    """The columns of the key."""
    row: Row
    is_partial: bool
    """Values are missing: without the row at the target they are not known."""


def values_of(columns: Columns, line: bytes) -> dict[str, bytes]:
    """A row taken apart; the values are texts of COPY."""
    return dict(zip(columns, line.split(b"\t"), strict=True)) if columns else {}


def _row_of(values: dict[str, bytes]) -> Row:
    return tuple(values), b"\t".join(values.values())


class Keyed:
    """Rows of a table with a key."""

    def __init__(self, key: Columns, keeps_more: Callable[[Iterable[str]], bool] = lambda columns: False) -> None:
        """`keeps_more`: whether the target has other columns than these; then a row that moves is not inserted anew."""
        self.key = key
        self._keeps_more = keeps_more
        self._finders: dict[Columns, Callable[[bytes], bytes]] = {}
        self.rows: dict[bytes, Row | None] = {}
        """By key, as a line of COPY: the row, a Patch, or None if it is gone."""
        self.stale: set[bytes] = set()
        """Keys that the target may have: those whose first event here was no INSERT."""

    def __len__(self) -> int:
        return len(self.rows)

    def key_of(self, columns: Columns, line: bytes) -> bytes:
        """The key of a row. KeyError: it does not have one of the columns."""
        find = self._finders.get(columns)
        if find is None:
            find = self._finders[columns] = _make_finder(self.key, columns)
        return find(line)

    def insert(self, columns: Columns, line: bytes) -> None:
        """The row is now this."""
        self.rows[self.key_of(columns, line)] = columns, line

    def delete(self, columns: Columns, line: bytes) -> None:
        """The row is gone."""
        key = self.key_of(columns, line)
        self.rows[key] = None
        self.stale.add(key)

    def update(
        self,
        columns: Columns,
        line: bytes,
        old_columns: Columns | None = None,
        old: bytes | None = None,
        unchanged: Iterable[str] = (),
    ) -> Move | None:
        """The row is now this, as far as it is told. A Move is to be done by the caller, after all that was before it."""
        if unchanged and old_columns is not None and old is not None:
            columns, line = _row_of({**values_of(old_columns, old), **values_of(columns, line)})
        key = self.key_of(columns, line)
        is_partial = any(name not in columns for name in unchanged)
        if old_columns is not None and old is not None:
            old_key = self.key_of(old_columns, old)
            if old_key != key:
                return self._move(old_key, key, (columns, line), is_partial)
        rows = self.rows
        if key not in rows:
            self.stale.add(key)
        rows[key] = _complete(rows.get(key), (columns, line)) if is_partial else (columns, line)
        return None

    def _move(self, old_key: bytes, key: bytes, row: Row, is_partial: bool) -> Move | None:
        before = self.rows.get(old_key)
        is_known = type(before) is tuple
        if is_partial and is_known:
            row, is_partial = _complete(before, row), False
        is_ours = is_known and old_key not in self.stale
        if is_partial or (not is_ours and self._keeps_more(row[0])):
            values = map(read_value, old_key.split(b"\t"))
            return Move(dict(zip(self.key, values, strict=True)), row, is_partial)
        self.rows[old_key] = None
        self.stale.update((old_key, key))
        self.rows[key] = row
        return None


class Late(Keyed):
    """Rows of a table whose key is checked at the end of a transaction: until then several rows may have the same one, as
    with `UPDATE t SET id = id + 1`. Every change brings the whole old row, which says of which of them it is."""

    def __init__(self, key: Columns) -> None:
        super().__init__(key)
        self._here: dict[bytes, list[Row]] = {}
        """By key, the rows that came."""
        self.gone: dict[bytes, list[Row]] = {}
        """By key, the rows that the target may have, and that went."""

    def insert(self, columns: Columns, line: bytes) -> None:
        """A row more."""
        key = self.key_of(columns, line)
        self._here.setdefault(key, []).append((columns, line))
        self._settle(key)

    def delete(self, columns: Columns, line: bytes) -> None:
        """One less: of those that came here, or else the target's."""
        key, row = self.key_of(columns, line), (columns, line)
        here = self._here.get(key, [])
        if row in here:
            here.remove(row)
        else:
            self.gone.setdefault(key, []).append(row)
            self.stale.add(key)
        self._settle(key)

    def update(
        self,
        columns: Columns,
        line: bytes,
        old_columns: Columns | None = None,
        old: bytes | None = None,
        unchanged: Iterable[str] = (),
    ) -> Move | None:
        """One row instead of another."""
        _replace(self, (columns, line), old_columns, old, unchanged)
        return None

    def _settle(self, key: bytes) -> None:
        here = self._here.get(key)
        if here:
            self.rows[key] = here[-1]
            return
        self._here.pop(key, None)
        if key in self.gone:
            self.rows[key] = None
        else:  # what came has gone again
            self.rows.pop(key, None)


def _replace(
    fold: Late | Bag, row: Row, old_columns: Columns | None, old: bytes | None, unchanged: Iterable[str]
) -> None:
    """Where every change brings the whole old row: that one goes, and the new one comes. KeyError: it does not."""
    if old_columns is None or old is None:
        raise KeyError("old")
    fold.delete(old_columns, old)
    fold.insert(*(_row_of({**values_of(old_columns, old), **values_of(*row)}) if unchanged else row))


def _make_finder(key: Columns, columns: Columns) -> Callable[[bytes], bytes]:
    places = [columns.index(name) if name in columns else -1 for name in key]
    if -1 in places:
        raise KeyError(key[places.index(-1)])
    count = len(places)
    if places == list(range(count)):  # the first columns, as nearly always
        if count == len(columns):
            return lambda line: line
        if count == 1:
            return lambda line: line[: line.index(b"\t")]
        return lambda line: b"\t".join(line.split(b"\t", count)[:count])

    def find(line: bytes) -> bytes:
        values = line.split(b"\t")
        return b"\t".join([values[place] for place in places])

    return find


def _complete(before: Row | None, row: Row) -> Row:
    """A row of which values are missing, with those of the row before."""
    if before is None:
        return Patch(row)
    # In the order of the row before: rows with the same columns are written together.
    together = _row_of({**values_of(*before), **values_of(*row)})
    return together if type(before) is tuple else Patch(together)


class Bag:
    """Rows of a table without a key: how many of each came, and how many went."""

    key: Columns = ()

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._counts: dict[Row, int] = {}
        self.deleted: list[Row] = []
        """Rows of which one of each must go."""

    def __len__(self) -> int:
        return len(self._rows) + len(self._counts) + len(self.deleted)

    @property
    def inserted(self) -> list[Row]:
        """Rows that are new, after those that are gone went."""
        return [*self._rows, *(row for row, count in self._counts.items() for _ in range(count))]

    def insert(self, columns: Columns, line: bytes) -> None:
        """One more of these rows."""
        self._rows.append((columns, line))

    def delete(self, columns: Columns, line: bytes) -> None:
        """One less: of those that came here, or else of the target's."""
        for one in self._rows:
            self._counts[one] = self._counts.get(one, 0) + 1
        self._rows = []
        row = columns, line
        if self._counts.get(row):
            self._counts[row] -= 1
        else:
            self.deleted.append(row)

    def update(
        self,
        columns: Columns,
        line: bytes,
        old_columns: Columns | None = None,
        old: bytes | None = None,
        unchanged: Iterable[str] = (),
    ) -> Move | None:
        """One row instead of another."""
        _replace(self, (columns, line), old_columns, old, unchanged)
        return None


Fold = Keyed | Bag
