"""A file that rotates, as somebody sees it who reads the rotated files and the last one, in order."""

from __future__ import annotations

import gzip
import io
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from targets.base import BaseTarget

__all__ = ["RotatingFile", "RotatingGzip", "RotatingZstd", "read_rotated"]


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
        "file.half_written", "sink.before_ack", "sink.after_ack", "file.before_rotation", "file.rotation_noted",
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
            ({"path": path, "max_files": 3}, "max_files is for files that rotate"),
            ({"path": path, "compress": "zstd"}, "compress is for files that rotate"),
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
