"""What one adapter sets aside: refused events go to the dead letters, durably, before the others are delivered."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.counters import DEAD_LETTERS, counters
from pgcdc.core.errors import PgcdcError, Reject, SinkError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.letters.record import DELIVERED, DeadLetter, make_letter
from pgcdc.sink.letters.stores import DeadLetters, Query, ReadableDeadLetters

__all__ = ["SetAside"]


class SetAside:
    """The dead letters of one adapter, for the one thread that delivers to it."""

    def __init__(self, store: DeadLetters, adapter: str, limit: int) -> None:
        """More than `limit` refused events in a row are an error; 0: any number may be."""
        self._store = store
        self._adapter = adapter
        self._limit = limit
        self._row = 0
        """How many of the last events were refused, one after the other."""
        self._recorded: dict[str, str] | None = None
        """Letters of events behind the ack, position to id: of a try that failed later, or of a run that crashed."""
        self.count = 0
        """Letters of this run."""

    def begin(self, ack: Position) -> None:
        """Look which events behind the ack have letters, of a run that crashed: they may be taken now."""
        with contextlib.suppress(Exception):  # then it is looked at when an event is refused
            self._recorded = self._read_recorded(ack)

    def take(
        self, whole: Batch, out: set[str], rejects: Sequence[Reject], attempts: int, ack: Position
    ) -> list[DeadLetter]:
        """Record what of `whole` is refused now; `out` was before, and grows. SinkError: it cannot go on.

        Returns the letters that are new: an event that is refused again after a crash has its letter already.
        """
        by_position = {one.position: one for one in rejects}
        found = whole.only(by_position)
        lines: dict[str, list[str]] = {}
        for position, text in zip(found.positions().to_pylist(), found.texts(), strict=True):
            lines.setdefault(position, []).append(text)
        unknown = sorted(by_position.keys() - lines.keys()) or sorted(out & by_position.keys())
        if unknown:
            raise SinkError(
                f"adapter {self._adapter} refuses an event at {unknown[0]}, which it was not given",
                "This is a defect of the adapter: nothing goes on over it",
            )
        self._check_row(whole, out | by_position.keys(), rejects[0])
        letters = [
            make_letter(self._store.pipeline, self._adapter, lines[position], by_position[position], attempts)
            for position in sorted(lines)
        ]
        new = self._record(letters, ack)
        out.update(by_position)
        return new

    def settle(self, whole: Batch, out: set[str]) -> None:
        """All of `whole` but `out` is delivered."""
        if self._recorded:
            self._settle_letters(whole, out)
        if len(whole) and (out or self._row):
            self._row = int(self._rows(whole, out)[-1])

    def _record(self, letters: list[DeadLetter], ack: Position) -> list[DeadLetter]:
        first = letters[0]
        try:
            if self._recorded is None:
                self._recorded = self._read_recorded(ack)
            new = [letter for letter in letters if letter.position not in self._recorded]
            if new:
                self._store.record(new)
        except Exception as error:  # whatever it is: without its letter an event must not be passed over
            said = error.message if isinstance(error, PgcdcError) else f"{type(error).__name__}: {error}"
            advice = error.advice if isinstance(error, PgcdcError) else ""
            raise SinkError(
                f"the dead letter of the event at {first.position}, which adapter {self._adapter} refused "
                f"({first.error_kind}: {first.error}), could not be written: {said}",
                f"{advice + '. ' if advice else ''}Nothing is lost: it comes again at the next start",
            ) from error
        self._recorded |= {letter.position: letter.id for letter in new}
        self.count += len(new)
        counters.add(DEAD_LETTERS, len(new), adapter=self._adapter)
        hit("dlq.recorded")
        return new

    def _read_recorded(self, ack: Position) -> dict[str, str]:
        if not isinstance(self._store, ReadableDeadLetters):
            return {}
        query = Query(pipeline=self._store.pipeline, adapter=self._adapter, after=str(ack))
        return {letter.position: letter.id for letter in self._store.find(query)}

    def _settle_letters(self, whole: Batch, out: set[str]) -> None:
        """Events that were refused before and taken now, since somebody has repaired the target, are no letters any more."""
        assert self._recorded is not None
        taken = set(whole.events.column("position").to_pylist()) - out
        done = [self._recorded[position] for position in taken & self._recorded.keys()]
        if done and isinstance(self._store, ReadableDeadLetters):
            with contextlib.suppress(PgcdcError):  # then it is delivered once more by a replay, with the same id
                self._store.mark(done, DELIVERED, datetime.now(UTC))
        end = str(whole.end)
        self._recorded = {position: one for position, one in self._recorded.items() if position > end}

    def _check_row(self, whole: Batch, out: set[str], reject: Reject) -> None:
        longest = int(self._rows(whole, out).max())
        if 0 < self._limit < longest:
            raise SinkError(
                f"adapter {self._adapter} refuses {longest:,} events in a row; the last: {reject.kind}: {reject.text}",
                "A target that refuses everything is not what dead letters are for: correct it, or raise "
                f"{self._adapter}_dead_letter_limit (0: no limit). Nothing is lost",
            )

    def _rows(self, whole: Batch, out: set[str]) -> np.ndarray:
        """How many events are refused before the first one that is not, between these, and behind the last."""
        taken = np.flatnonzero(~_is_in(whole, out).to_numpy(zero_copy_only=False))
        bounds = np.concatenate([[-1 - self._row], taken, [len(whole)]])
        return np.diff(bounds) - 1


def _is_in(batch: Batch, positions: set[str] | dict[str, Reject]) -> pa.ChunkedArray:
    column = batch.positions()
    return pc.is_in(column, pa.array(sorted(positions), column.type))
