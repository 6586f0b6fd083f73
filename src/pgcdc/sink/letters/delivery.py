"""Refused events: recorded durably before the other events are delivered, and redelivered in stream order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.counters import DEAD_LETTERS, counters
from pgcdc.core.errors import PgcdcError, Policy, Reject, SinkError, SinkRejected, policy_of, sentences
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.wording import counted
from pgcdc.event.batch import Batch
from pgcdc.event.forms import RECORD, TRACES, check_traces
from pgcdc.sink.letters.record import (
    DELIVERED,
    FAILED,
    SUPERSEDED,
    DeadLetter,
    DeadLetters,
    Query,
    ReadableDeadLetters,
    make_letter,
    read_event,
    safe_error,
)

MAX_LETTERS = 500
MAX_CHARS = 8 << 20

_KNOWN = {"id", "channel", "operation"}  # The fields of a batch's events, unless it only has lines


class SetAside:
    """The dead letters of one adapter, used only by its delivering thread."""

    def __init__(self, store: DeadLetters, adapter: str, limit: int) -> None:
        """More than `limit` refused events in a row are an error; 0: no limit."""
        self._store = store
        self._adapter = adapter
        self._limit = limit
        self._row = 0  # Refused events in a row, up to the latest one
        self._recorded: dict[str, str] | None = None
        """Letters of events after the ack, position to id: from an attempt that failed later, or from a crashed run."""
        self.count = 0  # Letters of this run

    def begin(self, ack: Position) -> None:
        """Find letters of events after the ack that a crashed run left: the target may accept these events now."""
        with contextlib.suppress(Exception):  # otherwise checked when an event is refused
            self._recorded = self._read_recorded(ack)

    def take(
        self, whole: Batch, out: set[str], rejects: Sequence[Reject], attempts: int, ack: Position
    ) -> list[DeadLetter]:
        """Record the events of `whole` that were refused now, and add them to `out`, the events refused before.

        SinkError: delivery cannot continue. Returns the new letters: an event that is refused again after a crash
        already has its letter.
        """
        by_position = {one.position: one for one in rejects}
        found = whole.only(by_position)
        positions = found.positions().to_pylist()
        unknown = sorted(by_position.keys() - set(positions)) or sorted(out & by_position.keys())
        if unknown:
            raise SinkError(
                f"adapter {self._adapter} refuses an event at {unknown[0]}, which was not sent to it",
                "This is a bug in the adapter. The pipeline stopped; no events were lost",
            )
        longest = int(self._rows(whole, out | by_position.keys()).max())
        if 0 < self._limit < longest:
            raise SinkError(
                f"adapter {self._adapter} refuses {counted(longest, 'event')} in a row; the last: {rejects[0].kind}: "
                f"{rejects[0].text}",
                "Dead letters are for single events. Fix the target, or raise "
                f"{self._adapter}_dead_letter_limit (0: no limit). Nothing is lost",
            )
        known = found.events.to_pylist() if _KNOWN.issubset(found.events.column_names) else [None] * len(positions)
        letters = []
        for position, rows in groupby(zip(positions, found.texts(), known, strict=True), lambda row: row[0]):
            _, lines, events = zip(*rows, strict=True)
            reject = by_position[position]
            letters.append(make_letter(self._store.pipeline, self._adapter, lines, reject, attempts, events[0]))
        new = self._record(letters, ack)
        out.update(by_position)
        return new

    def settle(self, whole: Batch, out: set[str]) -> None:
        if self._recorded:
            self._settle_letters(self._recorded, whole, out)
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
        except Exception as error:  # whatever happens, an event must not be skipped without its letter
            said = error.message if isinstance(error, PgcdcError) else f"{type(error).__name__}: {error}"
            advice = error.advice if isinstance(error, PgcdcError) else ""
            raise SinkError(
                f"the dead letter of the event at {first.position}, which adapter {self._adapter} refused "
                f"({first.error_kind}: {first.error}), could not be written: {said}",
                sentences(advice, "Nothing is lost: the event is delivered again at the next start"),
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

    def _settle_letters(self, recorded: dict[str, str], whole: Batch, out: set[str]) -> None:
        """Mark letters as settled whose events the target has accepted after all (it was repaired)."""
        taken = set(whole.positions().to_pylist()) - out
        done = [recorded[position] for position in taken & recorded.keys()]
        if done and isinstance(self._store, ReadableDeadLetters):
            with contextlib.suppress(PgcdcError):  # otherwise a replay delivers it again, with the same id
                self._store.mark(done, DELIVERED, datetime.now(UTC))
        self._recorded = {position: one for position, one in recorded.items() if position > str(whole.end)}

    def _rows(self, whole: Batch, out: set[str]) -> np.ndarray:
        """How many events are refused before the first delivered one, between two delivered ones, and after the
        last."""
        positions = whole.positions()
        is_out = pc.is_in(positions, pa.array(sorted(out), positions.type))
        taken = np.flatnonzero(~is_out.to_numpy(zero_copy_only=False))
        return np.diff(np.concatenate([[-1 - self._row], taken, [len(whole)]])) - 1


# --- redelivery


@dataclass
class Tally:
    delivered: int = 0
    superseded: int = 0
    failed: int = 0
    error: str = ""  # Why the rest was not attempted
    reasons: dict[str, int] = field(default_factory=dict)  # Who refused letters again and why; how many of them

    def refuse(self, reason: str, count: int = 1) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + count

    def add(self, other: Tally) -> None:
        self.delivered += other.delivered
        self.superseded += other.superseded
        self.failed += other.failed
        self.error = self.error or other.error
        for reason, count in other.reasons.items():
            self.refuse(reason, count)


def deliver_all(store: ReadableDeadLetters, query: Query, deliver: Callable[[str, list[DeadLetter]], Tally]) -> Tally:
    """Redeliver letters batch by batch. An adapter that fails is not tried again."""
    tally, failed = Tally(), set[str]()
    for letters in find_batches(store, query):
        adapter = letters[0].adapter
        if adapter not in failed:
            part = deliver(adapter, letters)
            tally.add(part)
            failed |= {adapter} if part.error else set()
    return tally


def find_batches(store: ReadableDeadLetters, query: Query) -> Iterator[list[DeadLetter]]:
    """The letters in lists of one adapter, one per delivery. An adapter's letters are in stream order."""
    part: list[DeadLetter] = []
    chars = 0
    for letter in sorted(store.find(query), key=lambda one: (one.adapter, one.position)):
        is_full = len(part) >= MAX_LETTERS or chars + len(letter.event) > MAX_CHARS
        if part and (is_full or part[0].adapter != letter.adapter):
            yield part
            part, chars = [], 0
        part.append(letter)
        chars += len(letter.event)
    if part:
        yield part


def as_batch(letters: Iterable[DeadLetter]) -> Batch:
    """Letters in a form that sinks accept: lines, or records that each wait for the previous ones."""
    made = [
        {
            "position": letter.position, "id": letter.event_id or letter.position, "channel": letter.channel,
            "operation": letter.operation, "value": line.removesuffix("\n"), "line": line, "key_hash": 0, "relation": 0,
            "is_barrier": True, **_read_traces(line),
        }
        for letter in letters for line in letter.lines()
    ]  # fmt: skip
    schema = pa.schema([("position", pa.string()), ("line", pa.string()), *RECORD])
    table = pa.Table.from_pylist(made, schema)
    found = {name: table.column(name).combine_chunks() for name in TRACES}
    for name, values in check_traces(found).items():
        table = table.set_column(schema.get_field_index(name), name, values)
    return Batch(Position.at(0, 0), Position.parse(str(made[-1]["position"])), table)


def _read_traces(line: str) -> dict[str, str]:
    """The trace in a rendered event's row, in any of our envelopes."""
    event = read_event(line)
    payload = next((one for one in map(event.get, ("payload", "data")) if isinstance(one, dict)), event)
    row: Mapping[str, Any] = next(
        (one for one in map(payload.get, ("row", "after", "before")) if isinstance(one, dict)), {}
    )
    return {name: row[name] for name in TRACES if isinstance(row.get(name), str)}


def deliver_again(
    store: ReadableDeadLetters, letters: Iterable[DeadLetter], redeliver: Callable[[Batch], Collection[str]]
) -> Tally:
    """Redeliver one batch of letters of one adapter. Letters that are refused again or not attempted stay.

    A crash between delivery and mark repeats them, with the same ids.
    """
    tally, waiting = Tally(), {letter.position: letter for letter in letters}
    while waiting:
        try:
            left_out = set(redeliver(as_batch(waiting.values())))
        except (PgcdcError, ConnectionError, TimeoutError) as error:
            rejects = error.rejects if isinstance(error, SinkRejected) else ()
            refused = [one for one in rejects if one.position in waiting]
            if policy_of(error) is not Policy.DEAD_LETTER or not refused:
                tally.error = str(error)
                return tally
            for one in refused:
                letter = waiting.pop(one.position)
                text = one.text if one.kind == letter.error_kind else f"{one.kind}: {one.text}"
                store.mark([letter.id], FAILED, None, safe_error(text))
                tally.refuse(safe_error(f"adapter {letter.adapter}: {one.kind}: {one.text}"))
            tally.failed += len(refused)
            continue
        hit("dlq.redelivered")
        now = datetime.now(UTC)
        old = [letter.id for position, letter in waiting.items() if position in left_out]
        new = [letter.id for position, letter in waiting.items() if position not in left_out]
        for ids, outcome in ((new, DELIVERED), (old, SUPERSEDED)):
            if ids:
                store.mark(ids, outcome, now)
        tally.delivered, tally.superseded = len(new), len(old)
        break
    return tally
