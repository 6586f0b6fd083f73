"""A file; one that rotates, as somebody sees it who reads the rotated files and the last one, in order; and a folder."""

from __future__ import annotations

import gzip
import io
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pgcdc.event.batch import Batch
from pgcdc.sink.file import FileSink
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from targets.base import BaseTarget

__all__ = ["FileTarget", "FolderInTwoParts", "FolderTarget", "RotatingFile", "read_rotated"]


def read_rotated(path: Path) -> bytes:
    """The content of a rotated file, whichever form it has by now."""
    while True:
        for ending, read in ((".gz", _read_gzip), (".zst", _read_zstd), ("", Path.read_bytes)):
            try:
                return read(path.with_name(path.name + ending))
            except FileNotFoundError:  # not yet, or not any more
                continue


def _read_gzip(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()


def _read_zstd(path: Path) -> bytes:
    with open(path, "rb") as raw, pa.CompressedInputStream(pa.PythonFile(raw), "zstd") as stream:
        return io.BufferedReader(stream).read()


class RotatingFile(BaseTarget):
    """A new file after a few events."""

    type, before_ack, can_break, large = "file", "sink.before_ack", True, 60
    kill_points = (
        "file.half_written", "sink.before_ack", "sink.after_ack", "file.before_rotation",
        "file.renamed", "file.rotated",
    )  # fmt: skip
    max_size: int | str = 1500
    compress = "none"
    _limits = (-1, -1)

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder / "acks", folder / "events.jsonl"
        self.acks.mkdir()

    def options(self) -> Mapping[str, Any]:
        in_a_pipeline = self.acks.parent != self.path.parent  # with many events: not that many files
        max_size = "1MB" if in_a_pipeline else self.max_size
        return {"path": str(self.path), "max_size": max_size, "compress": self.compress}

    def rotated(self) -> list[Path]:
        """The names of the rotated files, without the ending of their compression, in order."""
        pattern = re.compile(rf"({re.escape(self.path.name)}\.\d{{6,}})(?:\.gz|\.zst)?")
        found = (pattern.fullmatch(path.name) for path in self.path.parent.iterdir())
        return [self.path.with_name(name) for name in sorted({one[1] for one in found if one})]

    def lines(self) -> list[str]:
        parts = [read_rotated(path) for path in self.rotated()]
        if self.path.exists():
            parts.append(self.path.read_bytes())
        return [line for part in parts for line in part.decode().splitlines(keepends=True)]

    def expect_many(self) -> None:
        self.max_size = "2MB"

    def break_target(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def heal_target(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        path = str(self.path)
        return [
            ({"path": path, "max_files": 3}, "max_files applies to rotated files"),
            ({"path": path, "compress": "zstd"}, "compress applies to rotated files"),
            ({"path": path, "max_size": "many"}, "not a size"),
            ({"path": path, "max_size": -1}, "max_size"),
            ({"path": path, "max_size": 1, "max_files": -1}, "max_files"),
            ({"path": path, "max_size": 1, "compress": "rar"}, "compress"),
            ({"path": f"{self.path.parent}/", "max_size": 1}, "is a folder"),
        ]


class RotatingGzip(RotatingFile):
    compress = "gzip"


class RotatingZstd(RotatingFile):
    compress = "zstd"


class _OnDisk(BaseTarget):
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
            ({"path": str(self.path), "colour": "red"}, "unknown key colour"),
            ({"path": str(self.path.parent / "missing" / "events.jsonl")}, "does not exist"),
            ({"path": f"/proc/{self.path.name}"}, "/proc/"),
        ]


class FileTarget(_OnDisk):
    is_reference = True
    before_ack, kill_points = "sink.before_ack", ("file.half_written", "sink.before_ack", "sink.after_ack")

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder, folder / "events.jsonl"

    def options(self) -> Mapping[str, Any]:
        return {"path": str(self.path)}

    def make(self) -> FileSink:
        return FileSink(self.path)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True) if self.path.exists() else []


class FileInParts(FileTarget):
    """The same, by a rate limit that gives three events at once."""

    is_reference, large = False, 60

    def sink(self, options: DeliveryOptions | None = None, *args: Any, **kwargs: Any) -> Runner:
        return super().sink(options or DeliveryOptions(rate_limit=1e9, rate_limit_burst=3), *args, **kwargs)


class FolderTarget(_OnDisk):
    """What a reader sees who lists the folder in order."""

    is_reference = True

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

    is_reference, is_made_by_options = False, False

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


TARGETS = {
    "file": FileTarget,
    "file_in_parts": FileInParts,
    "file_rotating": RotatingFile,
    "file_rotating_gzip": RotatingGzip,
    "file_rotating_zstd": RotatingZstd,
    "folder": FolderTarget,
    "folder_in_two_parts": FolderInTwoParts,
}
