"""What the capture hands on: rows of committed transactions, in Arrow, with what to confirm once they are durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.core.relation import Relations
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import read_segment

__all__ = ["CaptureBatch", "Part", "split_batch"]


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


def split_batch(batch: CaptureBatch, commit: int) -> tuple[CaptureBatch | None, CaptureBatch]:
    """The transactions up to `commit`, if there are any, and the others. There are others: the batch ends behind it."""
    count = int(np.searchsorted(batch.transactions.column("commit").to_numpy(), commit, side="right"))
    if batch.part is None or count == 0:
        return None, batch
    rows = int(batch.transactions.column("rows").to_numpy()[:count].sum())
    data = batch.part.load().combine_chunks().to_batches()[0]
    pieces = []
    for transactions, changes in (
        (batch.transactions.slice(0, count), data.slice(0, rows)),
        (batch.transactions.slice(count), data.slice(rows)),
    ):
        last = (changes.column("ordinal")[-1].as_py(), changes.column("sub")[-1].as_py())
        part = Part(changes.num_rows, changes.nbytes, last, changes)
        end_lsn = transactions.column("commit")[-1].as_py()
        pieces.append((part, transactions, end_lsn))
    (first, earlier, before_lsn), (second, later, _) = pieces
    return (
        CaptureBatch(first, earlier, batch.relations, Position.end(before_lsn), before_lsn, batch.told),
        CaptureBatch(second, later, batch.relations, batch.end, batch.last_lsn, batch.told),
    )
