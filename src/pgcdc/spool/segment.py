"""One segment (an immutable Arrow IPC file), and the batches from which it is built. A segment is written under a
temporary name and renamed when complete; its size and checksum are in the index. An incomplete file has no index
record; a file that does not match its record is damaged and never read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.errors import SpoolError
from pgcdc.core.position import Position
from pgcdc.core.relation import Relations
from pgcdc.core.state import write_all
from pgcdc.spool.schema import CHANGES, TRANSACTIONS

Written = tuple[int, int]  # Size in bytes and CRC-32 of a file
ADVICE = (
    "Stop pgcdc, delete the folder `spool` in the state directory and start again: everything not delivered "
    "yet is read again from the slot"
)


def write_segment(path: Path, batch: pa.RecordBatch) -> Written:
    """Write one segment so that `path` exists only when it is complete."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb", buffering=0) as file:
        checked = _Checked(file.fileno())
        with pa.ipc.new_file(pa.PythonFile(checked, "w"), CHANGES) as writer:
            writer.write_batch(batch)
    os.replace(partial, path)
    return checked.size, checked.crc


class _Checked:
    """A file to which Arrow writes its buffers directly, so that no segment is in memory twice."""

    closed = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = self.crc = 0

    def write(self, piece: pa.Buffer | bytes) -> int:
        self.crc = zlib.crc32(piece, self.crc)
        self.size += write_all(self._descriptor, memoryview(piece))
        return len(piece)

    def flush(self) -> None:
        """Nothing is buffered."""


def checksum_file(path: Path) -> Written:
    """Size and CRC-32 of a file, read in small pieces."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


def open_segment(path: Path, expected: Written) -> pa.Table:
    """The rows of a segment, memory-mapped. Raises SpoolError if the file does not match its index record."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise SpoolError(f"segment {path} is missing", ADVICE) from error
    if size != expected[0]:
        raise SpoolError(f"segment {path} has {size} bytes, but its index record says {expected[0]}", ADVICE)
    with pa.memory_map(str(path)) as source:
        if zlib.crc32(source.read_buffer()) != expected[1]:
            raise SpoolError(f"segment {path} is damaged: its checksum does not match", ADVICE)
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def read_segment(path: Path) -> pa.Table:
    """The rows of an unpublished file that this process wrote."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


# --- what the capture passes on: rows of committed transactions, and what to confirm once they are durable


@dataclass(frozen=True, slots=True)
class Part:
    """Rows, either in memory or in a pending file that is already a segment."""

    rows: int
    nbytes: int
    last: tuple[int, int]  # Ordinal and sub-ordinal of its last row
    batch: pa.RecordBatch | None
    path: Path | None = None

    @staticmethod
    def of(rows: pa.RecordBatch) -> Part:
        """Make a part of rows in memory, at least one."""
        last = (rows.column("ordinal")[-1].as_py(), rows.column("sub")[-1].as_py())
        return Part(rows.num_rows, rows.nbytes, last, rows)

    def load_batch(self) -> pa.RecordBatch:
        return self.batch if self.batch is not None else self.load().combine_chunks().to_batches()[0]

    def load(self) -> pa.Table:
        """The rows as a table in the CHANGES schema."""
        if self.path is not None:
            return read_segment(self.path)
        return pa.Table.from_batches([self.batch] if self.batch is not None else [], CHANGES)


@dataclass(frozen=True, slots=True)
class CaptureBatch:
    """Changes after `start` up to and including `end`. Without rows only the position moved (the database was idle)."""

    part: Part | None
    transactions: pa.RecordBatch
    relations: Relations
    end: Position
    last_lsn: int  # What may be confirmed once this batch is durable: the END lsn of its last complete transaction
    told: Mapping[int, int] = field(default_factory=dict)
    """Tables (oid) that the server described, as it does after any change to a table. 1: for the first time on its
    connection, before the table's changes here; 2: again, somewhere between them."""
    # What the source needs to continue after `last_lsn`: a GTID set, for example. Empty: the number is enough
    token: bytes = b""

    @property
    def rows(self) -> int:
        return self.part.rows if self.part else 0

    @property
    def data(self) -> pa.Table:
        return self.part.load() if self.part else CHANGES.empty_table()

    @staticmethod
    def advance(lsn: int, relations: Relations) -> CaptureBatch:
        """A batch without rows: everything up to `lsn` has been read."""
        return CaptureBatch(None, _NO_TRANSACTIONS, relations, Position.end(lsn), lsn)


_NO_TRANSACTIONS = pa.RecordBatch.from_pylist([], schema=TRANSACTIONS)


def count_rows(transactions: pa.RecordBatch, counts: Sequence[int] | npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The transactions with these numbers of rows."""
    index = TRANSACTIONS.get_field_index("rows")
    return transactions.set_column(index, TRANSACTIONS.field(index), pa.array(counts, pa.int64()))


def split_batch(batch: CaptureBatch, commit: int) -> tuple[CaptureBatch | None, CaptureBatch]:
    """The transactions up to `commit`, if any, and the remaining ones; the batch must end after `commit`."""
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
