"""The files that a file leaves behind when it rotates: their names, their compression, and which of them have to go.

`events.jsonl` becomes `events.jsonl.000001`, the next one `.000002`: a file that was rotated keeps its number for ever.
Which numbers are ours stands in the ack. No file of another number is touched, and none is made where there is one.

A file is compressed beside itself, and goes when the other one is durable. So all of it can be done again after a crash.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

import pyarrow as pa

from pgcdc.core.failpoint import hit
from pgcdc.core.state import fsync_folder

Compression = Literal["none", "gzip", "zstd"]

_ENDINGS: dict[str, str] = {"gzip": ".gz", "zstd": ".zst"}
_PARTIAL = ".partial"
_CHUNK_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Numbers:
    """Which rotated files are ours: `first` to `last`, of which those before `oldest` have to go."""

    first: int
    oldest: int
    last: int


def rotated_name(path: Path, number: int) -> Path:
    """The name of a rotated file, before it is compressed."""
    return path.with_name(f"{path.name}.{number:06d}")


def _forms(path: Path, number: int) -> list[Path]:
    """The names that a rotated file can have, the best one first: while it is compressed, there are two."""
    plain = rotated_name(path, number)
    return [*(plain.with_name(plain.name + ending) for ending in _ENDINGS.values()), plain]


def find_rotated(path: Path, number: int) -> Path | None:
    """The rotated file with this number, compressed or not; None if it is not there."""
    return next((form for form in _forms(path, number) if form.exists()), None)


def highest_number(path: Path) -> int:
    """The highest number at this name, of whomever; 0 if there is none."""
    return max(_numbers(path), default=0)


def _numbers(path: Path) -> set[int]:
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6,})(?:\.gz|\.zst)?(?:\.partial)?")
    found = (pattern.fullmatch(name) for name in os.listdir(path.parent))
    return {int(one[1]) for one in found if one}


@contextlib.contextmanager
def open_lines(path: Path) -> Iterator[BinaryIO]:
    """A file of lines to read, whichever form it has."""
    kind = next((kind for kind, ending in _ENDINGS.items() if path.name.endswith(ending)), None)
    if kind is None:
        with open(path, "rb") as file:
            yield file
        return
    with pa.OSFile(str(path), "rb") as raw, pa.CompressedInputStream(raw, kind) as stream:
        yield cast(BinaryIO, io.BufferedReader(stream))


# --- what is done when a file was rotated


def tidy(path: Path, numbers: Numbers, compression: Compression, should_stop: Callable[[], bool]) -> None:
    """Remove what has to go and compress the rest. Harmless if it was done, or half done."""
    there = _numbers(path)
    for number in sorted(one for one in there if numbers.first <= one <= numbers.last):
        plain = rotated_name(path, number)
        for ending in _ENDINGS.values():  # of a compression that did not end
            plain.with_name(plain.name + ending + _PARTIAL).unlink(missing_ok=True)
        if number < numbers.oldest:
            for form in _forms(path, number):
                form.unlink(missing_ok=True)
            hit("file.removed")
        elif compression != "none" and plain.exists():
            _compress(plain, compression, should_stop)
        if should_stop():
            return


def _compress(plain: Path, compression: Compression, should_stop: Callable[[], bool]) -> None:
    final = plain.with_name(plain.name + _ENDINGS[compression])
    partial = final.with_name(final.name + _PARTIAL)
    if not any(plain.with_name(plain.name + ending).exists() for ending in _ENDINGS.values()):
        try:
            if not _write_compressed(plain, partial, compression, should_stop):
                partial.unlink()
                return
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk needs the room
            raise
        hit("file.before_compressed")
        os.rename(partial, final)
        fsync_folder(plain.parent)
    hit("file.compressed")
    plain.unlink()
    fsync_folder(plain.parent)


def _write_compressed(plain: Path, partial: Path, compression: str, should_stop: Callable[[], bool]) -> bool:
    """Whether it is written, durably: not if it is to stop."""
    with (
        open(plain, "rb") as source,
        open(partial, "wb") as target,
        pa.CompressedOutputStream(pa.PythonFile(target), compression) as out,
    ):
        while chunk := source.read(_CHUNK_BYTES):
            out.write(chunk)
            hit("file.half_compressed")
            if should_stop():
                return False
    with open(partial, "rb") as written:  # the stream closes what it writes to
        os.fsync(written.fileno())
    return True


class Housekeeper:
    """Does what `tidy` does in a thread of its own: nobody waits for a compression."""

    def __init__(self, path: Path, compression: Compression, say: Callable[[str], None]) -> None:
        self._path = path
        self._compression = compression
        self._say = say
        self._lock = threading.Lock()
        self._wanted: Numbers | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def ask(self, numbers: Numbers) -> None:
        """These are the rotated files now."""
        with self._lock:
            self._wanted, self._is_stopped = numbers, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rotated-files", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all is done, but not for ever: what is not is done after the next start."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            self._is_stopped = True
            thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                numbers, self._wanted = self._wanted, None
                if numbers is None or self._is_stopped:
                    self._thread = None
                    return
            try:
                tidy(self._path, numbers, self._compression, lambda: self._is_stopped)
            except (
                OSError
            ) as error:  # events are not at stake: the files are there, only larger or more than they could be
                self._say(f"rotated files of {self._path} could not be compressed or removed: {error.strerror}")
