"""Dead letters in a file of JSON lines, in the state directory unless another one is named.

Lines are only added: a letter, or what became of letters. A crash may leave half a line at the end; nobody was told that it
is there, so the next writer cuts it off. `purge` writes the rest to a new file and puts it in the old one's place. Whoever
writes holds a lock on the file: a pipeline and a command may have it at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pgcdc.core.errors import StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import fsync_folder, write_all, write_durably
from pgcdc.sink.letters.record import DeadLetter, Query

_BLOCK = 64 << 10


class FileDeadLetters:
    """One file. It is opened for each call, so that a purge by another process is noticed."""

    def __init__(self, path: Path, *, makes_folder: bool = False) -> None:
        """`makes_folder`: somebody will make the folder, if it can be made."""
        self.pipeline = ""
        self.path = path.absolute()
        self._makes_folder = makes_folder

    def check(self) -> None:
        with self._explain():
            if self.path.exists():
                os.close(os.open(self.path, os.O_RDWR | os.O_APPEND))
                return
            folder = self.path.parent
            while self._makes_folder and not folder.exists():
                folder = folder.parent
            tempfile.TemporaryFile(dir=folder).close()

    def open(self) -> None:
        with self._explain(), self._locked() as descriptor:
            _cut_half_line(descriptor)
            os.fsync(descriptor)  # what a run wrote that was killed before its own: it is not written again

    def record(self, letters: Sequence[DeadLetter]) -> None:
        self._append([letter.to_json() for letter in letters])

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        """One more line: what became of these."""
        time = at.isoformat(timespec="microseconds") if at else None
        self._append([{"mark": list(ids), "outcome": outcome, "replayed_at": time, "error": error}] if ids else [])

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions; the file is read to its end first."""
        found = sorted(filter(query.matches, self._read(query).values()), key=lambda one: (one.position, one.adapter))
        return iter(found[: query.limit] if query.limit else found)

    def purge(self, query: Query) -> int:
        """Write the others to a new file, which takes the place of this one."""
        if not self.path.exists():
            return 0
        with self._explain(), self._locked() as descriptor:
            letters = self._read()
            chosen = {one.id for one in list(filter(query.matches, letters.values()))[: query.limit or None]}
            kept = [one for one in letters.values() if one.id not in chosen]
            if chosen:
                content = b"".join(_line(one.to_json()) for one in kept)
                write_durably(self.path, content, os.fstat(descriptor))
        return len(chosen)

    def close(self) -> None:
        pass

    # --- the file

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        if not records:
            return
        with self._explain(), self._locked() as descriptor:
            size = _cut_half_line(descriptor)
            try:
                for record in records:
                    write_all(descriptor, memoryview(_line(record)))
                    hit("dlq.file_written")
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):  # what is half written is cut off by the next one otherwise
                    os.ftruncate(descriptor, size)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, for us alone; made if it is not there."""
        while True:
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not _is_at(self.path, descriptor):  # a purge has put another one in its place
                    continue
                if is_new:
                    fsync_folder(self.path.parent)
                yield descriptor
                return
            finally:
                os.close(descriptor)

    def _read(self, query: Query = Query()) -> dict[str, DeadLetter]:  # noqa: B008 - frozen
        """What the file has of what is meant; whether a letter waits may be said by a later line."""
        letters: dict[str, DeadLetter] = {}
        number, query = 0, replace(query, is_waiting=None)
        try:
            with self._explain("read"), open(self.path, "rb") as file:
                for line in file:
                    number += 1
                    if not line.endswith(b"\n"):
                        break  # half written, or just being written
                    _fold(letters, json.loads(line), query)
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"line {number} of {self.path} is no dead letter", "Repair that line; the others are sound"
            ) from error
        return letters

    @contextlib.contextmanager
    def _explain(self, done: str = "written") -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if done == "read":
                raise
            raise StateError(
                f"the file of dead letters {self.path} cannot be written: its folder does not exist", "Create it first"
            ) from None
        except OSError as error:
            raise StateError(
                f"the file of dead letters {self.path} cannot be {done}: {error.strerror}",
                "Check the folder, its permissions, and that the disk is not full; or choose another one with --dlq-file",
            ) from error


def _fold(letters: dict[str, DeadLetter], raw: dict[str, Any], query: Query) -> None:
    if "mark" not in raw:
        letter = DeadLetter.from_json(raw)
        if query.matches(letter):
            letters.setdefault(letter.id, letter)
        return
    for name in raw["mark"]:
        if name in letters:
            at = raw["replayed_at"]
            letters[name] = replace(
                letters[name],
                outcome=raw["outcome"],
                replayed_at=datetime.fromisoformat(at) if at else None,
                error=raw["error"] or letters[name].error,
                attempts=letters[name].attempts + (not at),
            )


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


def _cut_half_line(descriptor: int) -> int:
    """The size of the file without half a line at its end, which a crash has left."""
    size = end = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        begin = max(0, end - _BLOCK)
        end = begin + os.pread(descriptor, end - begin, begin).rfind(b"\n") + 1
    if end != size:
        os.ftruncate(descriptor, end)
    return end


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
