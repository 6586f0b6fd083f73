"""Takes everything and keeps nothing but its ack: for measurements, and for a look at what a pipeline costs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch

__all__ = ["NoopSink"]


class NoopSink:
    """Acknowledges every batch."""

    def __init__(self, acks: Path, name: str = "noop") -> None:
        self.name = name
        self._ack = AckFile(acks, name)

    @property
    def ack(self) -> Position:
        assert self._ack.position is not None
        return self._ack.position

    def check(self) -> None:
        pass

    def open(self, start: Position) -> None:
        if self._ack.position is None:
            self._ack.save(start, {})

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        hit("noop.before_ack")
        self._ack.save(batch.end, {})

    def redeliver(self, batch: Batch) -> Collection[str]:
        return ()

    def close(self) -> None:
        pass
