"""JSON lines on standard output. A pipe cannot be taken back: after a crash the last batch may come twice, with its ids."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pgcdc.errors import SinkError
from pgcdc.ops.failpoint import hit
from pgcdc.position import Position
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch
from pgcdc.state import write_all

__all__ = ["StdoutSink"]


class StdoutSink:
    """Writes every event as one line to a descriptor, standard output by default."""

    def __init__(self, acks: Path, name: str = "stdout", descriptor: int = 1) -> None:
        self.name = name
        self._ack = AckFile(acks, name)
        self._descriptor = descriptor

    @property
    def ack(self) -> Position:
        assert self._ack.position is not None
        return self._ack.position

    def check(self) -> None:
        try:
            os.fstat(self._descriptor)
        except OSError as error:
            raise SinkError(
                "standard output is closed", "Start with a reader at it, or use another --adapter"
            ) from error

    def open(self, start: Position) -> None:
        if self._ack.position is None:
            self._ack.save(start, {})

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        self._print(batch.after(self.ack))
        hit("stdout.before_ack")
        self._ack.save(batch.end, {})

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Print events of the past again; the ack stays."""
        self._print(batch)
        return ()

    def _print(self, batch: Batch) -> None:
        try:
            for lines in batch.lines():
                write_all(self._descriptor, lines)
        except OSError as error:
            raise SinkError(
                f"standard output is closed: {error.strerror}", "Nothing is lost: start again with a reader at the pipe"
            ) from error

    def close(self) -> None:
        pass
