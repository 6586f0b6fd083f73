"""Tables that an adapter takes only from their reload, and rows that are not for it.

A sink that cannot follow a change of a table raises ReloadNeeded. The runner then holds the table: durably, beside the ack,
so that nothing of it is written until the capture has read it again. A hold ends with the last row of its own reload, and of
no other one: that could be older. What becomes of a batch follows from its positions, the holds at its start and the
addressed rows in it, so a replay does the same.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.event.audience import Audience, Letter
from pgcdc.event.batch import Batch
from pgcdc.postgres.database import name_table

if TYPE_CHECKING:
    from pgcdc.sink.contract import Progress

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hold:
    """A table whose copy is replaced."""

    id: str  # Of the request
    table: str  # For people, and to find it
    reason: str = ""


def new_hold(table: str, reason: str) -> Hold:
    return Hold(f"reload-{secrets.token_hex(4)}", table, reason)


def parse_holds(raw: Mapping[str, Any]) -> dict[int, Hold]:
    return {int(oid): Hold(**one) for oid, one in raw.items()}


def dump_holds(holds: Mapping[int, Hold]) -> dict[str, Any]:
    return {str(oid): asdict(one) for oid, one in holds.items()}


def find_misnamed(batch: Batch, shapes: ShapeHistory) -> dict[int, tuple[str, str]]:
    """Tables (as in ReloadNeeded) with changes under a name that another table has by then. The server does not say that a
    partitioned table was renamed, before our next look at the catalog does."""
    shapes.refresh()
    found: dict[int, tuple[str, str]] = {}
    for number, shape in batch.shapes.items():
        table = shape.relation
        if not shapes.is_shared(table):
            continue
        mine = batch.positions().filter(pc.equal(batch.events.column("relation"), number)).to_pylist()
        places = [one for one in map(Position.parse, mine) if not one.is_snapshot]  # what was read has the name of then
        ends = [*(change.position for change in shapes.of(table.namespace, table.name)), batch.end]
        lasts = {bisect_right(places, end) for end in ends} - {0}  # the last ones before the name has another owner
        if any(shapes.is_misnamed(table, places[one - 1]) for one in lasts):
            name = name_table(table.namespace, table.name)
            found[table.oid] = (name, "another table has taken its name, and its own new name is unknown")
    return found


class Holds:
    """What one adapter gets of a batch. `is_keyed`: it keeps tables equal; others take everything that is addressed to
    them, in its order."""

    def __init__(self, audience: Audience, progress: Progress, adapter: str, *, is_keyed: bool) -> None:
        self._audience, self._progress, self._adapter, self._is_keyed = audience, progress, adapter, is_keyed

    def add(self, tables: Mapping[int, Hold], without: int = 0) -> None:
        """Hold these tables, and no longer `without`. Durable when this returns."""
        kept = {oid: one for oid, one in self._progress.holds.items() if oid != without}
        self._progress.hold({**kept, **tables})

    def is_addressed(self, start: Position, end: Position) -> bool:
        """Whether something in (start, end] is not for everybody."""
        return bool(self._audience.between(start, end))

    def after(self, start: Position, end: Position) -> dict[int, Hold]:
        """The holds at `end`, if those of the ack count at `start`."""
        holds = self._progress.holds
        for letter in self._reloads(start, end):
            if letter.last <= str(end):
                holds = _advanced(holds, letter)
        return holds

    def first_end(self, batch: Batch) -> Position | None:
        """Where the first reload of a batch ends, if something comes behind it."""
        ends = (Position.parse(one.last) for one in self._reloads(batch.start, batch.end) if one.is_last)
        return next((end for end in ends if end < batch.end), None)

    def take(self, batch: Batch) -> Batch:
        """The rows of a batch that begins at the ack: without those of others, and of held tables only their reload."""
        letters = self._audience.between(batch.start, batch.end)
        if not letters and not self._progress.holds:
            return batch
        positions = batch.positions()
        keep: Bools = np.ones(len(batch), np.bool_)
        for letter in letters:
            if self._adapter not in letter.adapters:
                keep &= ~_within(positions, letter.first, letter.last)
        if self._is_keyed and len(batch) and batch.form == "tables":
            keep &= self._kept(batch, positions)
        return batch if keep.all() else replace(batch, events=batch.events.filter(pa.array(keep)))

    def _kept(self, batch: Batch, positions: pa.ChunkedArray) -> Bools:
        numbers = batch.events.column("relation").to_numpy()
        known = np.zeros(int(numbers.max(initial=0)) + 1, np.int64)
        for number, shape in batch.shapes.items():
            if number < len(known):
                known[number] = shape.relation.oid
        oids = known[numbers]
        keep: Bools = np.ones(len(batch), np.bool_)
        holds, done = self._progress.holds, ""
        for letter in self._reloads(batch.start, batch.end):
            keep &= ~(np.isin(oids, list(holds)) & _within(positions, done, letter.first))
            after = _advanced(holds, replace(letter, is_last=False))
            if after[letter.oid].id != letter.reload:  # of an older request
                keep &= ~_within(positions, letter.first, letter.last)
            holds, done = _advanced(after, letter), letter.last
        return keep & ~(np.isin(oids, list(holds)) & _within(positions, done, "~"))

    def _reloads(self, start: Position, end: Position) -> Iterable[Letter]:
        mine = (one for one in self._audience.between(start, end) if self._adapter in one.adapters)
        return (one for one in mine if one.reload and self._is_keyed)


def _advanced(holds: dict[int, Hold], letter: Letter) -> dict[int, Hold]:
    """The holds behind a release of a reload: its first one holds a table that nobody holds yet."""
    if letter.oid not in holds:
        holds = {**holds, letter.oid: Hold(letter.reload, letter.table)}
    if letter.is_last and holds[letter.oid].id == letter.reload:
        return {oid: one for oid, one in holds.items() if oid != letter.oid}
    return holds


def _within(positions: pa.ChunkedArray, first: str, last: str) -> Bools:
    """Behind `first`, up to `last`."""
    found = pc.and_(pc.greater(positions, first), pc.less_equal(positions, last))
    result: Bools = found.to_numpy()
    return result
