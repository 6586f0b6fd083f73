"""The contract every sink keeps.

A sink makes batches durable and remembers how far it is: its ack. After a crash a batch comes again, maybe cut in other
places, so a sink deduplicates by position, and only by position: neither query nor batch numbers are stable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.position import Position

__all__ = ["Batch", "ParallelSink", "PartWriter", "Receipt", "ReplayableSink", "Sink", "line_buffers", "takes_parts"]

Receipt = dict[str, Any]
"""What a part writer says about a part, for the commit: a few words that JSON can carry."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The events in (start, end] of one Spark micro-batch, in stream order.

    `events` has a row per event: `position` (text that sorts in stream order) and `line` (the JSON event and a newline).
    """

    start: Position
    end: Position
    events: pa.Table

    def after(self, ack: Position) -> Batch:
        """The same batch without what `ack` already covers."""
        if ack <= self.start:
            return self
        return Batch(ack, self.end, self.events.filter(pc.greater(self.events.column("position"), str(ack))))

    def first(self, count: int) -> Batch:
        """The part with the first `count` events: a few more if they share a position, which is never cut."""
        positions, total = self.events.column("position"), self.events.num_rows
        while 0 < count < total and positions[count] == positions[count - 1]:
            count += 1
        if count >= total:
            return self
        end = Position.parse(positions[count - 1].as_py()) if count else self.start
        return Batch(self.start, end, self.events.slice(0, count))

    def without(self, positions: Collection[str]) -> Batch:
        """The same batch without the events at these positions."""
        if not positions:
            return self
        is_out = pc.is_in(self.events.column("position"), pa.array(sorted(positions), pa.string()))
        return Batch(self.start, self.end, self.events.filter(pc.invert(is_out)))

    def lines(self) -> Iterator[memoryview]:
        """The lines one after the other, as few buffers as there are chunks: nothing is copied."""
        return line_buffers(self.events.column("line").chunks)


def line_buffers(arrays: Iterable[pa.Array]) -> Iterator[memoryview]:
    """The bytes of arrays of text, one after the other: nothing is copied."""
    for chunk in arrays:
        if len(chunk):
            offsets, data = chunk.buffers()[1:3]
            large = pa.types.is_large_string(chunk.type)
            view = memoryview(offsets).cast("q") if large else memoryview(offsets).cast("i")
            first, last = view[chunk.offset], view[chunk.offset + len(chunk)]
            yield memoryview(data)[first:last]


class Sink(Protocol):
    """Where events go. All sinks pass the same contract tests."""

    name: str

    @property
    def ack(self) -> Position:
        """Everything up to here is durable at the target."""

    def check(self) -> None:
        """Look at the target before anything is created, and leave it as it is. SinkError: it cannot be used."""

    def open(self, start: Position) -> None:
        """Check the target and restore it to the ack; a new sink begins at `start`. SinkError: it must not be touched."""

    def write(self, batch: Batch) -> None:
        """Make one batch durable, then move the ack to its end. What the ack already covers is skipped.

        SinkRejected names events that the target will never take: then the batch comes again without them. What a target
        that cannot take anything back got of it before is not sent again meanwhile.
        """

    def close(self) -> None:
        """Release what is held; nothing is lost if this is never called."""


@runtime_checkable
class ReplayableSink(Protocol):
    """A sink that takes dead letters again. All sinks of the registry are."""

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Deliver events of the past again, which went to dead letters; the ack stays where it is.

        Returns the positions of those that were left out, because the target has something newer for their key. Raises as
        `write` does; for an opened sink only, and never while it writes.
        """


class PartWriter(Protocol):
    """Writes parts of a large batch, on the executors of Spark. It stands in Spark's plan: no secret, no connection."""

    def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
        """Make the events of one task durable where nobody sees them, and say how to find them; None if there were none.

        `lines` has `position` and `line`, in order. A task may run again, or twice at the same time: each attempt writes
        for itself, and only one gets into a commit.
        """


@runtime_checkable
class ParallelSink(Sink, Protocol):
    """A sink to which executors write large batches, side by side. The driver commits."""

    needs_key_order: bool
    """Changes of one key stand in one part, in order, and a large batch is cut where that is not enough (TRUNCATE, say). If
    not, parts are as Spark reads them."""

    def part_writer(self) -> PartWriter:
        """What goes to the executors."""

    def commit_parts(self, start: Position, end: Position, receipts: Sequence[Receipt]) -> None:
        """Make the parts of these receipts, and of no others, what the sink has of (start, end]; then move the ack to `end`.

        Atomic: after a crash all of them are there or none. A commit of what the ack covers is skipped; one that begins
        before the ack and ends behind it is SinkUnavailable.
        """

    def discard_parts(self) -> None:
        """Throw away parts that no commit has seen: of a crash, a lost task, or an attempt that came second."""


def takes_parts(sink: Sink) -> bool:
    """Whether a batch may be given to the sink in parts. One that needs it whole says `whole_batches = True`."""
    return not getattr(sink, "whole_batches", False)
