"""The contract every sink keeps.

A sink makes batches durable and remembers how far it is: its ack. After a crash a batch comes again, maybe cut in other
places, so a sink deduplicates by position, and only by position: neither query nor batch numbers are stable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.event.batch import Batch, line_buffers

__all__ = ["Batch", "ParallelSink", "PartWriter", "Receipt", "ReplayableSink", "Sink", "line_buffers", "takes_parts"]

Receipt = dict[str, Any]
"""What a part writer says about a part, for the commit: a few words that JSON can carry."""


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
