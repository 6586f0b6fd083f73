"""Where sinks write to, seen from the other end, and the events that tests give them. A new sink joins in TARGETS."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from pgcdc.position import Position
from pgcdc.sink.base import Batch, Sink
from pgcdc.sink.delivery import Delivery
from pgcdc.sink.file import FileSink
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.noop import NoopSink
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.sink.stdout import StdoutSink

START = Position.end(100)


# --- targets


class Target(Protocol):
    """Where a sink writes to, seen from its other end. It outlives the sink, as the real one outlives a crash."""

    repeats: bool
    """What was written before a crash cannot be taken back."""
    before_ack: str
    """The failpoint between durable and acknowledged."""
    acks: Path
    large: int
    """Events of a large batch."""
    keeps: bool
    """What was written can be looked at."""

    def sink(self) -> Sink:
        """A new process's sink for this target."""

    def lines(self) -> list[str]:
        """Everything that arrived, in order."""

    def close(self) -> None:
        """Clean up."""


class _Target:
    large, keeps = 40_000, True


class FileTarget(_Target):
    repeats, before_ack = False, "file.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder, folder / "events.jsonl"

    def sink(self) -> FileSink:
        return FileSink(self.path, self.acks)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True)

    def close(self) -> None:
        pass


class FolderTarget(_Target):
    """What a reader sees who lists the folder in order."""

    repeats, before_ack = False, "folder.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder / "acks", folder / "events"
        self.acks.mkdir()

    def sink(self) -> FolderSink:
        return FolderSink(self.path, self.acks)

    def lines(self) -> list[str]:
        parts = sorted(self.path.glob("*.jsonl")) if self.path.exists() else []
        return [line for part in parts for line in part.read_text().splitlines(keepends=True)]

    def close(self) -> None:
        pass


class FolderInTwoParts(FolderTarget):
    """The same, written as executors do: each batch in two parts, with a task that ran twice."""

    def sink(self) -> FolderSink:
        return _InTwoParts(self.path, self.acks)


class _InTwoParts(FolderSink):
    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        start = self.ack
        events, writer = batch.after(start).events, self.part_writer()
        half = events.num_rows // 2
        parts = [events.slice(0, half), events.slice(half)]
        writer.write_part(0, parts[0].to_batches())  # an attempt that was lost
        receipts = [writer.write_part(number, part.to_batches()) for number, part in enumerate(parts)]
        self.commit_parts(start, batch.end, [receipt for receipt in receipts if receipt])
        self.discard_parts()


class RedirectedStdout(_Target):
    """Standard output that goes to a file: `pgcdc listen > events.jsonl`."""

    repeats, before_ack = True, "stdout.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self._path = folder, folder / "stdout"
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def sink(self) -> StdoutSink:
        return StdoutSink(self.acks, descriptor=self._descriptor)

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._descriptor)


class PipedStdout(_Target):
    """Standard output that another process reads: `pgcdc listen | jq`. A pipe holds 64 KB, so somebody must read."""

    repeats, before_ack = True, "stdout.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks = folder
        self._reading, self._writing = os.pipe()
        self._data = b""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            select.select([self._reading], [], [])
            with self._lock:
                piece = os.read(self._reading, 1 << 16)
                self._data += piece
            if not piece:
                return

    def sink(self) -> StdoutSink:
        return StdoutSink(self.acks, descriptor=self._writing)

    def lines(self) -> list[str]:
        while True:
            with self._lock:
                waiting = array.array("i", [0])
                fcntl.ioctl(self._reading, termios.FIONREAD, waiting)
                if not waiting[0]:
                    return self._data.decode().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._writing)
        self._thread.join(5)
        os.close(self._reading)


class NoopTarget(_Target):
    """What it has is what its ack covers."""

    repeats, before_ack, keeps = False, "noop.before_ack", False

    def __init__(self, folder: Path) -> None:
        self.acks = folder

    def sink(self) -> NoopSink:
        return NoopSink(self.acks)

    def lines(self) -> list[str]:
        try:
            return up_to(Position.parse(json.loads((self.acks / "noop.json").read_text())["position"]))
        except FileNotFoundError:
            return []
        except ValueError:  # a test damaged it
            return WHOLE

    def close(self) -> None:
        pass


class Delivered:
    """Another target, whose sink is in the wrapper that all sinks have in a pipeline."""

    def __init__(self, inner: Target, options: DeliveryOptions, large: int) -> None:
        self.repeats, self.before_ack, self.acks, self.keeps = inner.repeats, inner.before_ack, inner.acks, inner.keeps
        self.large = large
        self._inner, self._options = inner, options

    def sink(self) -> Delivery:
        return Delivery(self._inner.sink(), self._options)

    def lines(self) -> list[str]:
        return self._inner.lines()

    def close(self) -> None:
        self._inner.close()


def delivered(kind: Callable[[Path], Target], **options: float) -> Callable[[Path], Target]:
    return lambda folder: Delivered(
        kind(folder),
        DeliveryOptions(**options),  # type: ignore[arg-type]
        60 if options else 40_000,
    )


TARGETS: dict[str, Callable[[Path], Target]] = {
    "file": FileTarget,
    "stdout_to_file": RedirectedStdout,
    "stdout_to_pipe": PipedStdout,
    "noop": NoopTarget,
    "file_delivered": delivered(FileTarget),
    "file_delivered_in_parts": delivered(FileTarget, rate_limit=1e9, rate_limit_burst=3),
    "stdout_delivered": delivered(RedirectedStdout),
    "noop_delivered": delivered(NoopTarget),
    "folder": FolderTarget,
    "folder_in_two_parts": FolderInTwoParts,
    "folder_delivered": delivered(FolderTarget),
}


@contextlib.contextmanager
def fresh(name: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        made = TARGETS[name](Path(folder))
        yield made
        made.close()


@contextlib.contextmanager
def opened(target: Target, start: Position = START) -> Iterator[Sink]:
    sink = target.sink()
    sink.open(start)
    yield sink
    sink.close()


# --- events

STREAM = [Position(110 + 10 * t, n, sub) for t in range(4) for n in range(1, 4) for sub in range(2 if n == 2 else 1)]
END = Position.end(150)


def line(position: Position) -> str:
    return json.dumps({"id": f"id of {position}", "position": str(position), "text": "ä🐘"}, ensure_ascii=False) + "\n"


def batch(start: Position, end: Position, chunks: int = 1, kind: pa.DataType | None = None) -> Batch:
    """The events of STREAM in (start, end], as Spark would give them: in one or more chunks."""
    inside = [position for position in STREAM if start < position <= end]
    size = -(-len(inside) // chunks) or 1
    groups = [inside[begin : begin + size] for begin in range(0, len(inside), size)]
    columns = [
        pa.chunked_array([[str(one) for one in group] for group in groups], kind or pa.string()),
        pa.chunked_array([[line(one) for one in group] for group in groups], kind or pa.string()),
    ]
    return Batch(start, end, pa.table(columns, ["position", "line"]))


WHOLE = [line(position) for position in STREAM]


def up_to(end: Position) -> list[str]:
    return [line(position) for position in STREAM if position <= end]


def check_all_arrived(target: Target, expected: list[str] = WHOLE) -> None:
    """Every event once and in order; where the target cannot take back, repeats with the same id are allowed."""
    lines = target.lines()
    if not target.repeats:
        assert lines == expected
    first_seen = list(dict.fromkeys(lines))
    assert first_seen == expected
