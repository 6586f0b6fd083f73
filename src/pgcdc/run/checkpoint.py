"""Spark's checkpoint of a lane, and a file beside it: where each batch ended, as its source said."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.core.state import explain_writing, write_durably
from pgcdc.core.state import fsync_folder as fsync

KEPT_ENDS = 200
"""Ends of batches that a lane remembers: Spark keeps the last 100."""
MAX_LINES = 10_000
MAX_TAKEN_BACK = 50
"""Batches between two acks: there is one every quarter of a second."""


class Checkpoint:
    """A line for each batch, written before Spark commits it and durable before it is acknowledged."""

    def __init__(self, folder: Path, initial: Position) -> None:
        """`initial`: where the first batch begins."""
        self.folder = folder
        self._path = folder / "ends"
        self._ends: dict[int, Position] = {}
        self._lines = 0
        """How many the file has."""
        for line in self._path.read_text().splitlines(keepends=True) if self._path.exists() else ():
            number, _, text = line.partition(" ")
            if line.endswith("\n"):  # else it was being written: its batch was not committed
                with contextlib.suppress(ValueError):  # the same, by a machine that crashed
                    self._keep(int(number), Position.parse(text.strip()))
            self._lines += 1
        self._initial = initial
        if self._lines:
            self._rewrite()
        self._take_back()

    @property
    def last_batch(self) -> int:
        """The last one that Spark has committed; -1: none."""
        files = (self.folder / "commits").glob("[0-9]*")
        return max((int(file.name) for file in files if file.name.isdigit()), default=-1)

    @property
    def place(self) -> Position:
        """Where the query goes on: behind what Spark has committed."""
        return self.end_of(self.last_batch)

    def end_of(self, batch: int) -> Position:
        """Where a batch ended; -1: where the first one begins."""
        if batch < 0:
            return self._initial
        if batch not in self._ends:
            raise StateError(
                f"{self._path} does not say where batch {batch} ended",
                "Restore the state directory from a backup, or begin with a new slot: pgcdc resync --new-slot",
            )
        return self._ends[batch]

    def has_committed(self, batch: int) -> bool:
        """Whether Spark has committed a batch."""
        return (self.folder / "commits" / str(batch)).exists()

    def note(self, batch: int, end: Position) -> None:
        """Durable after `sync`. A batch that comes again may have another end: the last line counts."""
        self._keep(batch, end)
        if not self._lines or self._lines >= MAX_LINES:
            self._rewrite()
            return
        with explain_writing(self._path), open(self._path, "a") as file:
            file.write(f"{batch} {end}\n")
        self._lines += 1

    def sync(self, first: int, last: int) -> None:
        """These batches, ours and Spark's files of them, are durable when this returns."""
        if self._path.exists():
            fsync(self._path)
        for folder in ("offsets", "commits"):
            for number in range(first, last + 1):
                with contextlib.suppress(FileNotFoundError):
                    fsync(self.folder / folder / str(number))
            fsync(self.folder / folder)

    def _take_back(self) -> None:
        """After a crash of the machine Spark's log may be ahead of ours. Nobody has acknowledged that: it comes again."""
        last = self.last_batch
        known = max((batch for batch in self._ends if self.has_committed(batch)), default=-1)
        if known < 0 or last - known > MAX_TAKEN_BACK:
            return  # `place` refuses to go on
        for number in range(known + 1, last + 2):
            (self.folder / "commits" / str(number)).unlink(missing_ok=True)
            (self.folder / "offsets" / str(number + 1)).unlink(missing_ok=True)

    def _keep(self, batch: int, end: Position) -> None:
        self._ends.pop(batch, None)
        self._ends[batch] = end
        if len(self._ends) > KEPT_ENDS:
            del self._ends[next(iter(self._ends))]

    def _rewrite(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, "".join(f"{number} {end}\n" for number, end in self._ends.items()).encode())
        fsync(self.folder.parent)
        self._lines = len(self._ends)
