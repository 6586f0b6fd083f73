"""Events on standard output: JSON lines, or a form for people.

A pipe cannot be taken back: after a crash the last batch may come twice, with its ids. Within a process nothing does: what
is out is remembered, to the byte, until the batch is acknowledged.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Collection
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.event.batch import Batch, line_buffers
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.pretty import Pretty

__all__ = ["StdoutSink"]

Format = Literal["auto", "json", "pretty"]
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOBUFS)
"""Of standard output that goes to a file."""


class StdoutSink(Sink):
    """Writes every event to a descriptor, standard output by default."""

    def __init__(self, descriptor: int = 1, format: Format = "json") -> None:
        self._descriptor = descriptor
        self._format = format
        self._pretty: Pretty | None = None
        self._out = ""
        """All events up to this position are out, acknowledged or not."""
        self._sent = 0
        """How many bytes the last attempt has written, if it failed."""
        self._begun = ("", 0)
        """The position that is out in part, and how many bytes of it."""
        self._owed = memoryview(b"")
        """The rest of a line of the past that is out in part: it comes before anything else."""

    def check(self, context: SinkContext) -> None:
        try:
            os.fstat(self._descriptor)
        except OSError as error:
            raise SinkError(
                "standard output is closed", "Start with a reader at it, or use another --adapter"
            ) from error

    def open(self, context: SinkContext) -> None:
        is_terminal = os.isatty(self._descriptor)
        if self._format == "pretty" or (self._format == "auto" and is_terminal):
            self._pretty = Pretty(is_terminal=is_terminal)

    def write(self, batch: Batch) -> None:
        events = batch.events
        if self._out:
            events = events.filter(pc.greater(events.column("position"), self._out))
        positions, texts = events.column("position"), self._texts(events)
        begun, out = self._begun
        skipped = out if events.num_rows and positions[0].as_py() == begun else 0
        self._send(positions, texts, skipped)
        self._out = max(self._out, str(batch.end))  # a failed attempt may have got further
        if self._begun[0] <= self._out:
            self._begun = ("", 0)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Write events of the past once more."""
        before = self._out, self._begun
        if before[1][1]:
            raise SinkUnavailable("an event is out in part, and ends first", "Try again when the stream goes on")
        texts = self._texts(batch.events)
        try:
            self._send(batch.events.column("position"), texts, 0)
        except SinkError:
            self._owe(texts)
            raise
        finally:
            self._out, self._begun = before
        return ()

    def _texts(self, events: pa.Table) -> pa.ChunkedArray:
        lines = events.column("line")
        if self._pretty is None:
            return lines
        return pa.chunked_array([[self._pretty.write(line) for line in lines.to_pylist()]], pa.large_string())

    def _send(self, positions: pa.ChunkedArray, texts: pa.ChunkedArray, skipped: int) -> None:
        """Write texts, without the first `skipped` bytes. After an error it is known what is out."""
        sent = 0
        try:
            while self._owed:
                self._owed = self._owed[self._write_some(self._owed) :]
            for piece in line_buffers(texts.chunks):
                rest = piece[max(0, skipped - sent) :]
                sent += len(piece) - len(rest)
                while rest:
                    count = self._write_some(rest)
                    sent += count
                    rest = rest[count:]
        except OSError as error:
            self._remember(positions, texts, sent)
            self._sent = sent
            if error.errno in _MAY_PASS:
                raise SinkUnavailable(
                    f"standard output cannot be written: {error.strerror}",
                    "Is the disk of the file full to which it goes? Nothing is lost: it is tried again",
                ) from error
            raise SinkError(
                f"standard output is closed: {error.strerror}", "Nothing is lost: start again with a reader at the pipe"
            ) from error

    def _write_some(self, data: memoryview) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # whoever shares the pipe or terminal may have switched it to that
                select.select([], [self._descriptor], [])

    def _owe(self, texts: pa.ChunkedArray) -> None:
        """What is missing of the line in which the last attempt ended."""
        for text in texts.to_pylist():
            line = text.encode()
            if self._sent < len(line):
                self._owed = memoryview(line[self._sent :]) if self._sent else self._owed
                return
            self._sent -= len(line)

    def _remember(self, positions: pa.ChunkedArray, texts: pa.ChunkedArray, sent: int) -> None:
        ends = np.cumsum(pc.binary_length(texts).to_numpy().astype(np.int64))
        count = int(np.searchsorted(ends, sent, side="right"))  # whole events
        names = positions.to_pylist()
        current = names[count] if count < len(names) else ""
        first = count
        while first and names[first - 1] == current:  # several events can have one position
            first -= 1
        if first:
            self._out = names[first - 1]
        self._begun = (current, sent - (int(ends[first - 1]) if first else 0))
