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

__all__ = ["Written", "checksum_file", "open_segment", "read_segment", "write_segment"]

Written = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


def write_segment(path: Path, batch: pa.RecordBatch) -> Written:
    """Write one segment so that `path` exists only when it is complete."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, CHANGES) as writer:
        writer.write_batch(batch)
    buffer = sink.getvalue()
    partial = path.with_suffix(".partial")
    with open(partial, "wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(buffer))
    os.replace(partial, path)
    return buffer.size, zlib.crc32(buffer)


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
        raise SpoolError(f"segment {path} is missing", _ADVICE) from error
    if size != expected[0]:
        raise SpoolError(f"segment {path} has {size} bytes, its index record says {expected[0]}", _ADVICE)
    with pa.memory_map(str(path)) as source:
        if zlib.crc32(source.read_buffer()) != expected[1]:
            raise SpoolError(f"segment {path} is damaged: its checksum does not match", _ADVICE)
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def read_segment(path: Path) -> pa.Table:
    """The rows of a file that this process wrote itself and has not published yet."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


_ADVICE = (
    "Stop pgcdc, delete the folder `spool` in the state directory and start again: "
    "everything that is not delivered yet is read again from the slot"
)
