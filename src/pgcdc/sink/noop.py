"""Accepts everything and stores nothing: for measurements, and to see what a pipeline costs."""

from __future__ import annotations

from pgcdc.event.batch import Batch
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.spec import SinkOptions


class NoopSink(Sink):
    """Acknowledges every batch."""

    def open(self, context: SinkContext) -> None:
        pass

    def write(self, batch: Batch) -> None:
        pass


class NoopOptions(SinkOptions):
    """Takes everything and keeps nothing: for measurements, and for a look at what a pipeline costs."""

    def make(self) -> Sink:
        return NoopSink()
