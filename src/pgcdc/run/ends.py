"""Where the batches of a lane ended, as their source said: a file beside Spark's checkpoint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.core.state import explain_writing, fsync_folder, write_durably

__all__ = ["Ends", "fsync_file"]

KEPT_ENDS = 200
"""Ends of batches that a lane remembers: Spark keeps the last 100."""
MAX_LINES = 10_000


class Ends:
    """A line for each batch, written before Spark commits it and durable before it is acknowledged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: dict[int, Position] = {}
        self._lines = 0
        """How many the file has."""
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            number, _, text = line.partition(" ")
            if line.endswith("\n"):  # else it was being written: its batch was not committed
                with contextlib.suppress(ValueError):  # the same, by a machine that crashed
                    self._keep(int(number), Position.parse(text.strip()))
            self._lines += 1
        if self._lines:
            self._rewrite()

    def of(self, batch_id: int) -> Position:
        """The end of a batch."""
        if batch_id not in self._ends:
            raise StateError(
                f"{self._path} does not say where batch {batch_id} ended",
                "Restore the state directory from a backup, or begin with a new slot: pgcdc resync --new-slot",
            )
        return self._ends[batch_id]

    def note(self, batch_id: int, end: Position) -> None:
        """Durable after `sync`. A batch that comes again may have another end: the last line counts."""
        self._keep(batch_id, end)
        if not self._lines or self._lines >= MAX_LINES:
            self._rewrite()
            return
        with explain_writing(self._path), open(self._path, "a") as file:
            file.write(f"{batch_id} {end}\n")
        self._lines += 1

    def sync(self) -> None:
        """What was noted is durable when this returns."""
        if self._path.exists():
            fsync_file(self._path)

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._ends

    def _keep(self, batch_id: int, end: Position) -> None:
        self._ends.pop(batch_id, None)
        self._ends[batch_id] = end
        if len(self._ends) > KEPT_ENDS:
            del self._ends[next(iter(self._ends))]

    def _rewrite(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, "".join(f"{number} {end}\n" for number, end in self._ends.items()).encode())
        fsync_folder(self._path.parent.parent)
        self._lines = len(self._ends)


def fsync_file(path: Path) -> None:
    """Make the content of a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
