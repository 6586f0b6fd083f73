"""What the capture hands on: rows of committed transactions, in Arrow, with what to confirm once they are durable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.core.relation import Relations
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import read_segment


@dataclass(frozen=True, slots=True)
class Part:
    """Rows, in memory or in a pending file that is already a segment."""

    rows: int
    nbytes: int
    last: tuple[int, int]
    """Ordinal and sub-ordinal of its last row."""
    batch: pa.RecordBatch | None
    path: Path | None = None

    @staticmethod
    def of(rows: pa.RecordBatch) -> Part:
        """Rows in memory; there is at least one."""
        last = (rows.column("ordinal")[-1].as_py(), rows.column("sub")[-1].as_py())
        return Part(rows.num_rows, rows.nbytes, last, rows)

    def load_batch(self) -> pa.RecordBatch:
        """The rows in one piece."""
        return self.batch if self.batch is not None else self.load().combine_chunks().to_batches()[0]

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
    token: bytes = b""
    """What the source needs to go on behind `last_lsn`: a GTID set, say. Empty: the number is enough."""

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


def count_rows(transactions: pa.RecordBatch, counts: Sequence[int] | npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The transactions with so many rows each."""
    index = TRANSACTIONS.get_field_index("rows")
    return transactions.set_column(index, TRANSACTIONS.field(index), pa.array(counts, pa.int64()))


def split_batch(batch: CaptureBatch, commit: int) -> tuple[CaptureBatch | None, CaptureBatch]:
    """The transactions up to `commit`, if there are any, and the others. There are others: the batch ends behind it."""
    commits = batch.transactions.column("commit").to_numpy()
    count = int(np.searchsorted(commits, commit, side="right"))
    if batch.part is None or count == 0:
        return None, batch
    rows, lsn = int(batch.transactions.column("rows").to_numpy()[:count].sum()), int(commits[count - 1])
    data = batch.part.load_batch()
    first, rest = Part.of(data.slice(0, rows)), Part.of(data.slice(rows))
    earlier, later = batch.transactions.slice(0, count), batch.transactions.slice(count)
    return (
        replace(batch, part=first, transactions=earlier, end=Position.end(lsn), last_lsn=lsn, token=b""),
        replace(batch, part=rest, transactions=later),
    )
