"""Events on standard output: JSON lines, or a form for people, with colours if the terminal has them.

A value may hold anything, also what a terminal would take for a command: control characters are written as escapes.

A pipe cannot be taken back: after a crash the last batch may come twice, with its ids. Within a process nothing does: what
is out is remembered, to the byte, until the batch is acknowledged.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.core.settings import setting
from pgcdc.event.batch import Batch, line_buffers
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.spec import SinkOptions

Format = Literal["auto", "json", "pretty"]
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOBUFS)
"""Of standard output that goes to a file."""
MAX_VALUE = 200
"""Characters of one value that are shown."""

_STYLES = {
    "INSERT": "green",
    "UPDATE": "yellow",
    "DELETE": "red",
    "TRUNCATE": "bold red",
    "SNAPSHOT": "cyan",
    "other": "magenta",
    "quiet": "dim",
    "name": "bold",
}
_PLAIN = re.compile(r"[^\s\"'=,→…]+")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class StdoutOptions(SinkOptions):
    """Events on standard output, for programs or for people."""

    format: Format = setting(
        "auto", "json: one event per line; pretty: for people; auto: pretty on a terminal, else json"
    )

    def make(self) -> Sink:
        return StdoutSink(format=self.format)

    def target(self) -> str:
        return "standard output"


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


# --- for people


class Pretty:
    """Writes events as text. Colours are used on a terminal that has them, unless NO_COLOR is set."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._codes = _find_codes(is_terminal)

    def write(self, line: str) -> str:
        """The text of one line of JSON, which ends with a newline."""
        try:
            event = orjson.loads(line)
            return f"{' '.join(self._parts(event))}\n"
        except (ValueError, KeyError, TypeError, AttributeError):  # of another form: an envelope, or a typed row
            return _escape(line.rstrip("\n")) + "\n"

    def _parts(self, event: Mapping[str, Any]) -> Iterator[str]:
        operation, payload = event["operation"], event["payload"]
        channel = event["channel"].removeprefix("pgcdc:")
        time = event["created_at"].replace("T", " ")[:23]
        yield self._paint("quiet", _escape(time))
        yield self._paint(operation if operation in _STYLES else "other", f"{_escape(operation):<8}")
        yield self._paint("name", _escape(channel))
        row, old = payload["row"] or {}, payload["old"] or {}
        for name, value in row.items():
            shown = f"{_escape(name)}={self._value(value)}"
            if operation == "UPDATE" and name in old:
                if old[name] == value:
                    shown = self._paint("quiet", f"{_escape(name)}={_value(value)}")
                else:
                    shown = f"{self._paint('name', _escape(name))}: {self._value(old[name])} → {self._value(value)}"
            yield shown
        for name in payload.get("_unchanged_toast_columns", ()):
            yield self._paint("quiet", f"{_escape(name)} as before")
        for name, value in payload.items():
            if name not in ("op", "table", "row", "old", "_unchanged_toast_columns") and value is not None:
                yield f"{_escape(name)}={self._value(value)}"

    def _value(self, value: Any) -> str:
        return self._paint("quiet", "NULL") if value is None else _value(value)

    def _paint(self, style: str, text: str) -> str:
        if self._codes is None:
            return text
        before, after = self._codes[style]
        return f"{before}{text}{after}"


def _value(value: Any) -> str:
    """A value in one piece: quoted where its end could not be seen otherwise."""
    if value is None:
        return "NULL"
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    if len(text) > MAX_VALUE:
        return f"{_value(text[:MAX_VALUE])}… ({len(text)} characters)"
    if isinstance(value, str) and not _PLAIN.fullmatch(text):
        text = orjson.dumps(text).decode()
    return _escape(text)


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _find_codes(is_terminal: bool) -> dict[str, tuple[str, str]] | None:
    """What to write before and after a text, by style. Made once: rich itself is too slow for every event."""
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    console = Console(file=io.StringIO(), force_terminal=True if is_terminal else None)
    if not console.color_system or console.no_color:
        return None
    codes = {}
    for name, style in _STYLES.items():
        before, _, after = Style.parse(style).render("\0", color_system=ColorSystem.STANDARD).partition("\0")
        codes[name] = before, after
    return codes
