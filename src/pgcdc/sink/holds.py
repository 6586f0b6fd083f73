"""Tables that an adapter accepts only from their reload, and rows that are not meant for it.

When a sink cannot follow a change of a table, it raises ReloadNeeded. The runner then holds the table: durably, in the
same file as the ack, so that nothing of it is written until the capture has read it again. A hold ends with the last
row of its own reload. Any other reload could be older and does not end it.

What happens to a batch depends only on its positions, the holds at its start and the addressed rows in it, so a replay
has the same result.
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
    """A table whose copy is being replaced."""

    id: str  # The id of the request
    table: str  # For people, and to find the table
    reason: str = ""


def new_hold(table: str, reason: str) -> Hold:
    return Hold(f"reload-{secrets.token_hex(4)}", table, reason)


def parse_holds(raw: Mapping[str, Any]) -> dict[int, Hold]:
    return {int(oid): Hold(**one) for oid, one in raw.items()}


def dump_holds(holds: Mapping[int, Hold]) -> dict[str, Any]:
    return {str(oid): asdict(one) for oid, one in holds.items()}


def find_misnamed(batch: Batch, shapes: ShapeHistory) -> dict[int, tuple[str, str]]:
    """Tables (as in ReloadNeeded) with changes under a name that another table has by then.

    This happens to a renamed partitioned table: the server does not report the rename, and we only notice it at our next
    look at the catalog.
    """
    shapes.refresh()
    found: dict[int, tuple[str, str]] = {}
    for number, shape in batch.shapes.items():
        table = shape.relation
        if not shapes.is_shared(table):
            continue
        mine = batch.positions().filter(pc.equal(batch.events.column("relation"), number)).to_pylist()
        # Rows of a snapshot have the name that the table had when it was read.
        places = [one for one in map(Position.parse, mine) if not one.is_snapshot]
        ends = [*(change.position for change in shapes.of(table.namespace, table.name)), batch.end]
        lasts = {bisect_right(places, end) for end in ends} - {0}  # the last ones before the name changes its owner
        if any(shapes.is_misnamed(table, places[one - 1]) for one in lasts):
            name = name_table(table.namespace, table.name)
            found[table.oid] = (name, "another table has taken its name, and its own new name is unknown")
    return found


class Holds:
    """Decides which rows of a batch an adapter gets. `is_keyed`: the adapter keeps tables equal. Other adapters accept
    everything that is addressed to them, in order."""

    def __init__(self, audience: Audience, progress: Progress, adapter: str, *, is_keyed: bool) -> None:
        self._audience, self._progress, self._adapter, self._is_keyed = audience, progress, adapter, is_keyed

    def add(self, tables: Mapping[int, Hold], without: int = 0) -> None:
        """Hold these tables, and release `without`. Durable when this returns."""
        kept = {oid: one for oid, one in self._progress.holds.items() if oid != without}
        self._progress.hold({**kept, **tables})

    def is_addressed(self, start: Position, end: Position) -> bool:
        """Whether something in (start, end] is meant for some adapters only."""
        return bool(self._audience.between(start, end))

    def after(self, start: Position, end: Position) -> dict[int, Hold]:
        """The holds at `end`, given that those of the ack apply at `start`."""
        holds = self._progress.holds
        for letter in self._reloads(start, end):
            if letter.last <= str(end):
                holds = _advanced(holds, letter)
        return holds

    def first_end(self, batch: Batch) -> Position | None:
        """The end of the first reload in a batch, if more follows it."""
        ends = (Position.parse(one.last) for one in self._reloads(batch.start, batch.end) if one.is_last)
        return next((end for end in ends if end < batch.end), None)

    def take(self, batch: Batch) -> Batch:
        """The adapter's rows of a batch that starts at the ack: without rows for others, and of held tables only their
        reload."""
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
            if after[letter.oid].id != letter.reload:  # a reload of an older request
                keep &= ~_within(positions, letter.first, letter.last)
            holds, done = _advanced(after, letter), letter.last
        return keep & ~(np.isin(oids, list(holds)) & _within(positions, done, "~"))

    def _reloads(self, start: Position, end: Position) -> Iterable[Letter]:
        mine = (one for one in self._audience.between(start, end) if self._adapter in one.adapters)
        return (one for one in mine if one.reload and self._is_keyed)


def _advanced(holds: dict[int, Hold], letter: Letter) -> dict[int, Hold]:
    """The holds after part of a reload was released. The first part of a reload also holds a table that was not
    held."""
    if letter.oid not in holds:
        holds = {**holds, letter.oid: Hold(letter.reload, letter.table)}
    if letter.is_last and holds[letter.oid].id == letter.reload:
        return {oid: one for oid, one in holds.items() if oid != letter.oid}
    return holds


def _within(positions: pa.ChunkedArray, first: str, last: str) -> Bools:
    """After `first`, up to and including `last`."""
    found = pc.and_(pc.greater(positions, first), pc.less_equal(positions, last))
    result: Bools = found.to_numpy()
    return result
