"""What the capture hands on: rows of committed transactions, in Arrow, with what to confirm once they are durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pgcdc.position import Position
from pgcdc.relation import Relations
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import read_segment

__all__ = ["CaptureBatch", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows, in memory or in a pending file that is already a segment."""

    rows: int
    nbytes: int
    last: tuple[int, int]
    """Ordinal and sub-ordinal of its last row."""
    batch: pa.RecordBatch | None
    path: Path | None = None

    def load(self) -> pa.Table:
        """The rows as a table in the CHANGES schema."""
        if self.path is not None:
            return read_segment(self.path)
        return pa.Table.from_batches([self.batch] if self.batch is not None else [], CHANGES)


@dataclass(frozen=True, slots=True)
class CaptureBatch:
    """Changes after `start` up to and including `end`. No rows: only the position moved (the database was idle)."""

    part: Part | None
    transactions: pa.RecordBatch
    relations: Relations
    end: Position
    last_lsn: int
    """What may be confirmed once this batch is durable: the END lsn of the last transaction that is complete in it."""
    told: Mapping[int, int] = field(default_factory=dict)
    """Tables (oid) that the server has described: 1 for the first time on its connection, before the table's changes here;
    2 once more, somewhere between them. It does so after whatever was done to a table."""

    @property
    def rows(self) -> int:
        """How many changes."""
        return self.part.rows if self.part else 0

    @property
    def data(self) -> pa.Table:
        """The changes, in the CHANGES schema."""
        return self.part.load() if self.part else CHANGES.empty_table()

    @staticmethod
    def advance(lsn: int, relations: Relations) -> CaptureBatch:
        """A batch without rows that says: everything up to `lsn` has been read."""
        return CaptureBatch(None, _NO_TRANSACTIONS, relations, Position.end(lsn), lsn)


_NO_TRANSACTIONS = pa.RecordBatch.from_pylist([], schema=TRANSACTIONS)
