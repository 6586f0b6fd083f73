"""What many events leave of a table: for every key the last row, or that it is gone. Pure.

A row is the mapping of an event: column to PostgreSQL's text. Where an update did not bring a long value (unchanged TOAST),
it is taken from an earlier event of the same batch, or else left to the target: then the row is a Patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

__all__ = ["Bag", "Fold", "Keyed", "Move", "Patch", "Row"]

Row = dict[str, str | None]


class Patch(Row):
    """Some columns of a row that the target has; the others keep their values."""


@dataclass(frozen=True, slots=True)
class Move:
    """A row gets another key where it stands: the target has values of it that are not in the event."""

    old: Row
    """With the columns of the key."""
    row: Row
    is_partial: bool
    """Values are missing: without the row at the target they are not known."""


_ABSENT: Any = object()


class Keyed:
    """Rows of a table with a key."""

    def __init__(self, key: tuple[str, ...], keeps_more: Callable[[Row], bool] = lambda row: False) -> None:
        """`keeps_more`: whether the target has values that a row does not bring; then the row is not inserted anew."""
        self.key = key
        self._key_of: Callable[[Row], Any] = itemgetter(*key)
        self._keeps_more = keeps_more
        self.rows: dict[Any, Row | None] = {}
        """By key (a text, or a tuple of texts): the row, a Patch, or None if it is gone."""
        self.stale: set[Any] = set()
        """Keys that the target may have: those whose first event here was no INSERT."""

    def __len__(self) -> int:
        return len(self.rows)

    def insert(self, row: Row) -> None:
        """The row is now this."""
        self.rows[self._key_of(row)] = row

    def delete(self, row: Row) -> None:
        """The row is gone."""
        key = self._key_of(row)
        self.rows[key] = None
        self.stale.add(key)

    def update(self, row: Row, old: Row | None, unchanged: Iterable[str] = ()) -> Move | None:
        """The row is now this, as far as it is told. A Move is to be done by the caller, after all that was before it."""
        if unchanged and old:
            row = {**old, **row}
        key = self._key_of(row)
        is_partial = any(name not in row for name in unchanged)
        if old:
            old_key = self._key_of(old)
            if old_key != key:
                return self._move(old_key, key, old, row, is_partial)
        if is_partial:
            row = _complete(self.rows.get(key), row)
        if key not in self.rows:
            self.stale.add(key)
        self.rows[key] = row
        return None

    def _move(self, old_key: Any, key: Any, old: Row, row: Row, is_partial: bool) -> Move | None:
        before = self.rows.get(old_key)
        is_known = type(before) is dict
        if is_partial and is_known:
            row, is_partial = _complete(before, row), False
        is_ours = is_known and old_key not in self.stale
        if is_partial or (not is_ours and self._keeps_more(row)):
            return Move({name: old[name] for name in self.key}, row, is_partial)
        self.rows[old_key] = None
        self.stale.update((old_key, key))
        self.rows[key] = row
        return None


def _complete(before: Row | None, row: Row) -> Row:
    """A row of which values are missing, with those of the row before."""
    if before is None:
        return Patch(row)
    # In the order of the row before: rows with the same columns are written together.
    together = {**before, **row}
    return together if type(before) is dict else Patch(together)


class Bag:
    """Rows of a table without a key: how many of each came, and how many went."""

    key: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._counts: dict[tuple[tuple[str, str | None], ...], int] = {}
        self._gone: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows) + len(self._counts) + len(self._gone)

    @property
    def inserted(self) -> list[Row]:
        """Rows that are new, after those that are gone went."""
        more = [dict(items) for items, count in self._counts.items() for _ in range(count)]
        return [*self._rows, *more]

    @property
    def deleted(self) -> list[Row]:
        """Rows of which one of each must go."""
        return self._gone

    def insert(self, row: Row) -> None:
        """One more of these rows."""
        self._rows.append(row)

    def delete(self, row: Row) -> None:
        """One less: of those that came here, or else of the target's."""
        for one in self._rows:
            items = tuple(one.items())
            self._counts[items] = self._counts.get(items, 0) + 1
        self._rows = []
        items = tuple(row.items())
        if self._counts.get(items):
            self._counts[items] -= 1
        else:
            self._gone.append(row)

    def update(self, row: Row, old: Row | None, unchanged: Iterable[str] = ()) -> Move | None:
        """One row instead of another."""
        if old is None:
            raise KeyError("old")
        self.delete(old)
        self.insert({**old, **row} if unchanged else row)
        return None


Fold = Keyed | Bag
