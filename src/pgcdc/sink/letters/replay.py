"""Dead letters are delivered again: in the order of the stream, in batches, each marked when it is durable at its target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

import pyarrow as pa

from pgcdc.core.errors import PgcdcError, Policy, SinkRejected, policy_of
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.letters.record import DELIVERED, FAILED, SUPERSEDED, DeadLetter, safe_error
from pgcdc.sink.letters.stores import Query, ReadableDeadLetters

__all__ = ["Tally", "as_batch", "deliver_again", "find_batches"]

MAX_LETTERS = 500
MAX_CHARS = 8 << 20

Redeliver = Callable[[Batch], Collection[str]]


@dataclass
class Tally:
    """What became of letters."""

    delivered: int = 0
    superseded: int = 0
    failed: int = 0
    error: str = ""
    """Why the rest was not tried."""

    def add(self, other: Tally) -> None:
        """Count another one with this."""
        self.delivered += other.delivered
        self.superseded += other.superseded
        self.failed += other.failed
        self.error = self.error or other.error


def find_batches(store: ReadableDeadLetters, query: Query) -> Iterator[list[DeadLetter]]:
    """The letters in lists of one adapter, each to be delivered at once; an adapter's in the order of the stream."""
    found = sorted(store.find(query), key=lambda one: (one.adapter, one.position))
    for _, letters in groupby(found, key=lambda one: one.adapter):
        part: list[DeadLetter] = []
        chars = 0
        for letter in letters:
            if part and (len(part) >= MAX_LETTERS or chars + len(letter.event) > MAX_CHARS):
                yield part
                part, chars = [], 0
            part.append(letter)
            chars += len(letter.event)
        yield part


def as_batch(letters: Iterable[DeadLetter]) -> Batch:
    """Letters as a sink takes them: as lines, or as records, each of which waits for those before it."""
    rows = [(letter, line) for letter in letters for line in letter.lines()]
    columns = {
        "position": [letter.position for letter, _ in rows],
        "line": [line for _, line in rows],
        "id": [letter.event_id or letter.position for letter, _ in rows],
        "channel": [letter.channel for letter, _ in rows],
        "operation": [letter.operation for letter, _ in rows],
        "value": [line.removesuffix("\n") for _, line in rows],
        **{name: [None] * len(rows) for name in ("key", "traceparent", "tracestate")},
    }
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    for name, kind, value in (
        ("key_hash", pa.int64(), 0),
        ("relation", pa.int32(), 0),
        ("is_barrier", pa.bool_(), True),
    ):
        table = table.append_column(name, pa.array([value] * len(rows), kind))
    return Batch(Position.at(0, 0), Position.parse(rows[-1][0].position), table)


def deliver_again(store: ReadableDeadLetters, letters: Iterable[DeadLetter], redeliver: Redeliver) -> Tally:
    """Deliver one batch of letters of one adapter. What is refused once more stays, and so does what cannot be tried.

    A crash between delivery and mark delivers them once more, with the same ids.
    """
    tally, waiting = Tally(), {letter.position: letter for letter in letters}
    while waiting:
        try:
            left_out = set(redeliver(as_batch(waiting.values())))
        except SinkRejected as error:
            refused = [one for one in error.rejects if one.position in waiting]
            if policy_of(error) is not Policy.DEAD_LETTER or not refused:
                tally.error = str(error)
                return tally
            for one in refused:
                letter = waiting.pop(one.position)
                text = one.text if one.kind == letter.error_kind else f"{one.kind}: {one.text}"
                store.mark([letter.id], FAILED, None, safe_error(text))
            tally.failed += len(refused)
            continue
        except (PgcdcError, ConnectionError, TimeoutError) as error:
            tally.error = str(error)
            return tally
        hit("dlq.redelivered")
        now = datetime.now(UTC)
        old = [letter.id for position, letter in waiting.items() if position in left_out]
        new = [letter.id for position, letter in waiting.items() if position not in left_out]
        for ids, outcome in ((new, DELIVERED), (old, SUPERSEDED)):
            if ids:
                store.mark(ids, outcome, now)
        tally.delivered, tally.superseded = tally.delivered + len(new), tally.superseded + len(old)
        break
    return tally
