"""Events on standard output: JSON lines, or table changes for people, coloured on a terminal.

Control characters are escaped, because a terminal could treat them as commands.

Output to a pipe cannot be undone: after a crash the last batch may be repeated, with the same ids. Within a process
nothing is repeated: it remembers what was written, to the byte, until the batch is acknowledged.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from typing import Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.relation import OldKind, Op
from pgcdc.core.settings import setting
from pgcdc.event.batch import Batch, TableChanges, line_buffers
from pgcdc.event.changes import settle
from pgcdc.event.forms import Form
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.spec import SinkOptions

Format = Literal["auto", "json", "pretty"]
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOBUFS)  # If standard output goes to a file
MAX_VALUE = 200  # Characters of one value that are shown

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

    def form(self) -> Form:
        return "changes" if StdoutSink(format=self.format).is_pretty else "lines"

    def target(self) -> str:
        return "standard output"


class StdoutSink(Sink):
    """Writes every event to a descriptor, standard output by default."""

    def __init__(self, descriptor: int = 1, format: Format = "json") -> None:
        self._descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)
        self.is_pretty = format == "pretty" or (format == "auto" and self._is_terminal)
        """Whether to write table changes for people. Typed rows and dead letters always stay lines."""
        self._out: Position | None = None  # All events up to this position are written, acknowledged or not
        self._owed = memoryview(b"")  # The rest of a partly written position: it comes first
        self._begun = set[str]()  # Positions that are written and must not be repeated

    def check(self, context: SinkContext) -> None:
        try:
            os.fstat(self._descriptor)
        except OSError as error:
            raise SinkError(
                "standard output is closed", "Start pgcdc with a reader on it, or use another --adapter"
            ) from error

    def open(self, context: SinkContext) -> None:
        self._delivered, self._pretty = context.delivered, Pretty(is_terminal=self._is_terminal)

    def write(self, batch: Batch) -> None:
        self._send(batch.after(self._out) if self._out else batch)
        self._out = max(self._out or batch.end, batch.end)

    def redeliver(self, batch: Batch) -> Collection[str]:
        self._send(batch)
        return ()

    def _send(self, batch: Batch) -> None:
        """Write events. Even after an error it is known what was written, to the byte."""
        given, batch = batch, batch.without(self._begun)
        texts, sent = self._texts(batch), 0
        try:
            while self._owed:
                self._owed = self._owed[self._write_some(self._owed) :]
            for piece in line_buffers(texts.chunks):
                rest = piece
                while rest:
                    count = self._write_some(rest)
                    sent, rest = sent + count, rest[count:]
        except OSError as error:
            if sent:
                self._remember(batch.positions().to_pylist(), texts, sent)
            if error.errno in _MAY_PASS:
                raise SinkUnavailable(
                    f"standard output cannot be written: {error.strerror}",
                    "Is the disk of the output file full? Nothing is lost: it is retried",
                ) from error
            raise SinkError(
                f"standard output is closed: {error.strerror}", "Nothing is lost: start again with a reader on the pipe"
            ) from error
        if self._begun:
            self._begun.difference_update(given.positions().to_pylist())

    def _texts(self, batch: Batch) -> pa.ChunkedArray:
        if not self.is_pretty:
            return batch.events.column("line")
        texts = self._pretty.write(batch) if batch.form == "tables" else [f"{_escape(one)}\n" for one in batch.texts()]
        return pa.chunked_array([pa.array(texts, pa.large_string())])

    def _write_some(self, data: memoryview) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # another user of the pipe or terminal may have set O_NONBLOCK
                select.select([], [self._descriptor], [])

    def _remember(self, names: list[str], texts: pa.ChunkedArray, sent: int) -> None:
        """Record which events these bytes cover, and what is left of the last, partial position."""
        ends = np.cumsum(pc.binary_length(texts).to_numpy().astype(np.int64))
        count = int(np.searchsorted(ends, sent, side="right"))  # whole events
        first, last = (
            bisect_left(names, names[count]),
            bisect_right(names, names[count]),
        )  # several events can share a position
        self._delivered(names[:first])
        begun = sent - int(ends[first - 1]) if first else sent
        if begun:
            whole = b"".join(line_buffers(texts.slice(first, last - first).chunks))
            self._owed = memoryview(whole)[begun:]
            self._begun.add(names[count])


# --- for people


class Pretty:
    """Writes changes of tables as text. Uses colours on a terminal that supports them, unless NO_COLOR is set."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._codes = _find_codes(is_terminal)

    def write(self, batch: Batch) -> list[str]:
        """A line for each event."""
        lines = [""] * len(batch)
        times = batch.events.column("commit_time").cast(pa.timestamp("us")).to_pylist()
        for run in batch.tables():
            table = self._paint("name", _escape(run.relation.channel.removeprefix("pgcdc:")))
            for at, (row, columns) in enumerate(zip(run.rows.tolist(), self._columns(run), strict=True)):
                operation = Op(run.op[at]).name
                time = self._paint("quiet", times[row].isoformat(" ", "milliseconds"))
                said = self._paint(operation if operation in _STYLES else "other", f"{operation:<8}")
                lines[row] = f"{' '.join([time, said, table, *columns])}\n"
        return lines

    def _columns(self, run: TableChanges) -> Iterator[list[str]]:
        values, unknown = settle(run)
        found = [
            (column.is_key, _escape(column.name), new.to_pylist(), old.to_pylist(), marks)
            for column, new, old, marks in zip(run.relation.columns, values, run.old, unknown, strict=True)
        ]
        for at, (op, kind) in enumerate(zip(run.op.tolist(), run.old_kind.tolist(), strict=True)):
            shown: list[str] = []
            for is_key, name, new, old, marks in found if op != Op.TRUNCATE else ():
                has_old = kind == OldKind.FULL or (kind == OldKind.KEY and is_key)
                if op == Op.DELETE and not has_old:
                    continue
                if marks is not None and marks[at]:
                    shown.append(self._paint("quiet", f"{name} as before"))
                elif op != Op.UPDATE or not has_old:
                    shown.append(f"{name}={self._value(new[at])}")
                elif old[at] == new[at]:
                    shown.append(self._paint("quiet", f"{name}={_value(new[at])}"))
                else:
                    shown.append(f"{self._paint('name', name)}: {self._value(old[at])} → {self._value(new[at])}")
            yield shown

    def _value(self, value: str | None) -> str:
        return self._paint("quiet", "NULL") if value is None else _value(value)

    def _paint(self, style: str, text: str) -> str:
        if self._codes is None:
            return text
        before, after = self._codes[style]
        return f"{before}{text}{after}"


def _value(value: str | None) -> str:
    """A value in one piece: quoted where its end would be unclear."""
    if value is None:
        return "NULL"
    if len(value) > MAX_VALUE:
        return f"{_value(value[:MAX_VALUE])}… ({len(value)} characters)"
    return _escape(value if _PLAIN.fullmatch(value) else orjson.dumps(value).decode())


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _find_codes(is_terminal: bool) -> dict[str, tuple[str, str]] | None:
    """What to write before and after a text, by style. Computed once: rich itself is too slow for every event."""
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
