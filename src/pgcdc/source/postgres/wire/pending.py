"""Changes of transactions whose outcome is not known yet: in memory up to a bound over all of them, on disk beyond.

Beside a part stands which of its changes are of which subtransaction: one that is rolled back takes only its own with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import SpoolError
from pgcdc.source.postgres.wire.rows import RowBuffer, Runs
from pgcdc.spool.segment import Part, write_segment

_FEW_RUNS = 64
"""More runs than that stand on disk beside their part: a transaction of many subtransactions has one for each."""


@dataclass(frozen=True, slots=True)
class Table:
    """The shape in which the rows of a table come."""

    version: int
    columns: int
    number: int
    """Counts Relation messages: the greater one is the newer one."""


@dataclass(frozen=True, slots=True)
class PendingPart:
    """A part, and which of its changes are of which subtransaction."""

    part: Part
    runs: Runs | None = None
    runs_path: Path | None = None

    def load_runs(self) -> Runs:
        """Two columns: the first change of a run, and its xid."""
        if self.runs is not None:
            return self.runs
        if self.runs_path is None:
            return np.empty((0, 2), np.uint32)
        return np.fromfile(self.runs_path, np.uint32).reshape(-1, 2)

    def drop(self) -> None:
        """Remove what is on disk."""
        for path in (self.part.path, self.runs_path):
            if path is not None:
                path.unlink(missing_ok=True)


@dataclass(slots=True)
class Transaction:
    """One whose outcome has not come yet."""

    xid: int
    ordinal: int = 0
    sub: int = 0
    origin: str | None = None
    gid: str | None = None
    """Its name, if it began with Begin Prepare."""
    parts: list[PendingPart] = field(default_factory=list)
    # What only a streamed one has: its rows arrive between others, and its relations are its own until it commits.
    rows: RowBuffer | None = None
    buffered: int = 0
    tables: dict[int, Table] = field(default_factory=dict)
    aborted: array[int] = field(default_factory=lambda: array("I"))
    told: dict[int, int] = field(default_factory=dict)
    """As in CaptureBatch."""

    @property
    def last(self) -> tuple[int, int]:
        """Ordinal and sub-ordinal of the last change so far."""
        return self.ordinal, self.sub


class PendingStore:
    """Keeps parts: in memory while all of them together are small, on disk when not."""

    def __init__(self, folder: Path | None, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._held = 0
        self._written = 0

    def keep(self, rows: pa.RecordBatch, last: tuple[int, int], runs: Runs) -> PendingPart:
        """A part of these rows, whose last has this number."""
        if self._folder is None or self._held + rows.nbytes <= self._limit_bytes:
            self._held += rows.nbytes
            return PendingPart(Part(rows.num_rows, rows.nbytes, last, rows), runs if len(runs) else None)
        self._written += 1
        path = self._folder / f"pending-{self._written:08d}.arrow"
        runs_path = path.with_suffix(".xids") if len(runs) > _FEW_RUNS else None
        try:
            write_segment(path, rows)
            if runs_path is not None:
                runs.tofile(runs_path)
        except OSError as error:
            raise SpoolError(
                f"the changes of an open transaction cannot be written to {self._folder}: {error.strerror}",
                "Make room on its disk and start again: nothing is lost",
            ) from error
        kept = runs.copy() if runs_path is None and len(runs) else None
        return PendingPart(Part(rows.num_rows, rows.nbytes, last, None, path), kept, runs_path)

    def release(self, parts: Iterable[PendingPart]) -> None:
        """These parts are on their way out: they do not count any more."""
        self._held -= sum(one.part.nbytes for one in parts if one.part.path is None)

    def drop(self, parts: list[PendingPart]) -> None:
        """Nobody wants these parts."""
        self.release(parts)
        for one in parts:
            one.drop()
