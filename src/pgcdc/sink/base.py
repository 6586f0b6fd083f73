"""The contract every sink keeps.

A sink makes batches durable and remembers how far it is: its ack. After a crash a batch comes again, maybe cut in other
places, so a sink deduplicates by position, and only by position: neither query nor batch numbers are stable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.position import Position

__all__ = ["Batch", "Sink", "takes_parts"]


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

    def lines(self) -> Iterator[memoryview]:
        """The lines one after the other, as few buffers as there are chunks: nothing is copied."""
        for chunk in self.events.column("line").chunks:
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
        """Make one batch durable, then move the ack to its end. What the ack already covers is skipped."""

    def close(self) -> None:
        """Release what is held; nothing is lost if this is never called."""


def takes_parts(sink: Sink) -> bool:
    """Whether a batch may be given to the sink in parts. One that needs it whole says `whole_batches = True`."""
    return not getattr(sink, "whole_batches", False)
