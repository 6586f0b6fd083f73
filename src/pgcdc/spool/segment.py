"""One segment: an immutable Arrow IPC file, visible only when complete.

A segment is written to a temporary name and renamed; its size and checksum stand in the index. A half-written file has no
index record, and one that does not match its record is damage, never data.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pyarrow as pa

from pgcdc.core.errors import SpoolError
from pgcdc.core.state import write_all
from pgcdc.spool.schema import CHANGES

Written = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""
ADVICE = (
    "Stop pgcdc, delete the folder `spool` in the state directory and start again: "
    "everything that is not delivered yet is read again from the slot"
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
    """A file that Arrow writes its buffers to as they are, so that no segment is in memory twice."""

    closed = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = self.crc = 0

    def write(self, piece: pa.Buffer | bytes) -> int:
        self.crc = zlib.crc32(piece, self.crc)
        self.size += write_all(self._descriptor, memoryview(piece))
        return len(piece)

    def flush(self) -> None:
        """Nothing is held back."""


def checksum_file(path: Path) -> Written:
    """Size and CRC-32 of a file, read in small pieces."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


def open_segment(path: Path, expected: Written) -> pa.Table:
    """The rows of a segment, memory-mapped. Raises SpoolError if the file is not what its index record says."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise SpoolError(f"segment {path} is missing", ADVICE) from error
    if size != expected[0]:
        raise SpoolError(f"segment {path} has {size} bytes, its index record says {expected[0]}", ADVICE)
    with pa.memory_map(str(path)) as source:
        if zlib.crc32(source.read_buffer()) != expected[1]:
            raise SpoolError(f"segment {path} is damaged: its checksum does not match", ADVICE)
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def read_segment(path: Path) -> pa.Table:
    """The rows of a file that this process wrote itself and has not published yet."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
