"""Where sinks write to, seen from the other end, and the events that tests give them. A new sink joins in TARGETS.

What a target can say of itself stands in `targets/base.py`; docs/contract.md says what the suite does with it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import json
import os
import resource
import select
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from targets.base import BaseTarget as _Target
from targets.base import Target
from targets.events import (
    END,
    START,
    STREAM,
    WHOLE,
    batch,
    batch_of,
    by_key,
    cut,
    event,
    line,
    position_of,
    to_line,
    up_to,
)  # fmt: skip
from targets.exec import ExecByExit, ExecByLine, ExecByWrite
from targets.file import RotatingFile, RotatingGzip, RotatingZstd
from targets.pg_table import PgAppendTarget, PgApplyTarget
from targets.picky import PickyTarget
from targets.webhook import BatchedWebhook, WebhookTarget

from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.file import FileSink
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.sink.stdout import StdoutSink

__all__ = [
    "END", "PLAIN", "START", "STREAM", "TARGETS", "WHOLE", "FileTarget", "FolderInTwoParts", "FolderTarget", "Target",
    "_Target", "batch", "batch_of", "by_key", "check_all_arrived", "cut", "event", "fresh", "good", "having", "kind_of",
    "line", "opened", "position_of", "spoiled",
    "to_line", "up_to",
]  # fmt: skip


class _OnDisk(_Target):
    """Breaks as a disk does that is full: nothing can be written to any file of this process."""

    type, can_break = "file", True
    path: Path
    _limits = (-1, -1)

    def break_target(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def heal_target(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        return [
            ({}, "path"),
            ({"path": ""}, "path"),
            ({"path": str(self.path), "colour": "red"}, "colour is not known"),
            ({"path": str(self.path.parent / "missing" / "events.jsonl")}, "does not exist"),
            ({"path": f"/proc/{self.path.name}"}, "/proc/"),
        ]


class FileTarget(_OnDisk):
    before_ack, kill_points = "sink.before_ack", ("file.half_written", "sink.before_ack", "sink.after_ack")

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder, folder / "events.jsonl"

    def options(self) -> Mapping[str, Any]:
        return {"path": str(self.path)}

    def make(self) -> FileSink:
        return FileSink(self.path)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True) if self.path.exists() else []


class FolderTarget(_OnDisk):
    """What a reader sees who lists the folder in order."""

    before_ack = "folder.before_ack"
    kill_points = ("folder.half_written", "folder.before_ack", "folder.before_shown", "folder.after_shown")

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder / "acks", folder / "events"
        self.acks.mkdir()

    def options(self) -> Mapping[str, Any]:
        return {"path": f"{self.path}/"}

    def make(self) -> FolderSink:
        return FolderSink(self.path)

    def lines(self) -> list[str]:
        parts = sorted(self.path.glob("*.jsonl")) if self.path.exists() else []
        return [line for part in parts for line in part.read_text().splitlines(keepends=True)]


class FolderInTwoParts(FolderTarget):
    """The same, written as executors do: each batch in two parts, with a task that ran twice."""

    def make(self) -> FolderSink:
        return _InTwoParts(self.path)


class _InTwoParts(FolderSink):
    def write(self, batch: Batch) -> None:
        self._catch_up()
        if batch.end <= self._at:
            return
        events, writer, start = batch.events, self.part_writer(), batch.start
        half = events.num_rows // 2
        parts = [events.slice(0, half), events.slice(half)]
        writer.write_part(0, parts[0].to_batches())  # an attempt that was lost
        receipts = [writer.write_part(number, part.to_batches()) for number, part in enumerate(parts)]
        self.commit_parts(start, batch.end, [receipt for receipt in receipts if receipt])
        self.discard_parts()


class RedirectedStdout(_Target):
    """Standard output that goes to a file: `pgcdc listen > events.jsonl`."""

    type, repeats, before_ack = "stdout", True, "sink.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self._path = folder, folder / "stdout"
        self.stdout = str(self._path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def make(self) -> StdoutSink:
        return StdoutSink(self._descriptor)

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._descriptor)


class PipedStdout(_Target):
    """Standard output that another process reads: `pgcdc listen | jq`. A pipe holds 64 KB, so somebody must read."""

    type, repeats, before_ack = "stdout", True, "sink.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks = folder
        self._reading, self._writing = os.pipe()
        self.stdout = f"/proc/{os.getpid()}/fd/{self._writing}"
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

    def make(self) -> StdoutSink:
        return StdoutSink(self._writing)

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

    type, before_ack, keeps = "noop", "sink.before_ack", False

    def __init__(self, folder: Path) -> None:
        self.acks = folder

    def lines(self) -> list[str]:
        try:
            ack = json.loads((self.acks / f"{self.name or self.type}.json").read_text())
            return up_to(Position.parse(ack["position"]))
        except FileNotFoundError:
            return []
        except ValueError:  # a test damaged it
            return WHOLE

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        return [({"path": "x"}, "path is not known")]


class Delivered:
    """Another target, whose sink is in the wrapper that all sinks have in a pipeline."""

    def __init__(self, inner: Target, options: DeliveryOptions, large: int) -> None:
        self._inner, self._options = inner, options
        self.large = large

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sink(self, options: DeliveryOptions | None = None) -> Runner:
        return self._inner.sink(options or self._options)


def delivered(kind: Callable[[Path], Target], **options: float) -> Callable[[Path], Target]:
    def make(folder: Path) -> Any:
        return Delivered(kind(folder), DeliveryOptions(**options), 60 if options else 40_000)  # type: ignore[arg-type]

    return make


TARGETS: dict[str, Callable[[Path], Target]] = {
    "file": FileTarget,
    "stdout_to_file": RedirectedStdout,
    "stdout_to_pipe": PipedStdout,
    "noop": NoopTarget,
    "file_delivered": delivered(FileTarget),
    "file_delivered_in_parts": delivered(FileTarget, rate_limit=1e9, rate_limit_burst=3),
    "stdout_delivered": delivered(RedirectedStdout),
    "noop_delivered": delivered(NoopTarget),
    "file_picky": PickyTarget,
    "folder": FolderTarget,
    "folder_in_two_parts": FolderInTwoParts,
    "folder_delivered": delivered(FolderTarget),
    "file_rotating": RotatingFile,
    "file_rotating_gzip": RotatingGzip,
    "file_rotating_zstd": RotatingZstd,
    "exec_by_exit": ExecByExit,
    "exec_by_line": ExecByLine,
    "exec_by_write": ExecByWrite,
    "exec_delivered": delivered(ExecByLine, rate_limit=1e9, rate_limit_burst=3),
    "pg_append": PgAppendTarget,
    "pg_apply": PgApplyTarget,
    "webhook": WebhookTarget,
    "webhook_batched": BatchedWebhook,
}
"""A class, or a function of the folder in which a target may keep what it needs."""
PLAIN = [name for name in TARGETS if "_delivered" not in name]
"""Those whose sink is not wrapped: for stories that wrap it themselves."""


def kind_of(name: str) -> type[Target]:
    """The class of a target of PLAIN."""
    made = TARGETS[name]
    kind = made.func if isinstance(made, functools.partial) else made
    assert isinstance(kind, type), f"TARGETS[{name!r}] is neither a class nor a partial of one"
    assert issubclass(kind, _Target)
    return kind


def having(ability: str) -> list[str]:
    """Those of PLAIN with an ability that a target has not by default."""
    return [name for name in PLAIN if getattr(kind_of(name), ability) is not getattr(_Target, ability)]


@contextlib.contextmanager
def fresh(name: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        made = TARGETS[name](Path(folder))
        yield made
        made.close()


@contextlib.contextmanager
def opened(target: Target, start: Position = START) -> Iterator[Runner]:
    sink = target.sink()
    sink.open(start)
    yield sink
    sink.close()


def check_all_arrived(target: Target, expected: list[str] = WHOLE) -> None:
    """Every event once and in order; where the target cannot take back, repeats with the same id are allowed."""
    lines = target.lines()
    if not target.repeats:
        assert lines == expected
    first_seen = list(dict.fromkeys(lines))
    assert first_seen == expected


def spoiled(target: Target, bad: Sequence[Position]) -> list[str]:
    """The stream, with events at these places that the target refuses."""
    found = [target.bad_line(one) if one in bad else line(one) for one in STREAM]
    return [one for one in found if one is not None]


def good(bad: Sequence[Position]) -> list[str]:
    """The stream without these places."""
    return [line(one) for one in STREAM if one not in bad]
