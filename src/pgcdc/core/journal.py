"""Files of JSON lines with a checksum each, to which lines are only added: what a crash leaves half-written is not there."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pgcdc.core.state import explain_writing, fsync_folder, write_all


def encode_line(record: dict[str, Any]) -> bytes:
    """One line: a checksum and the record."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode_lines(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """The sound lines at the beginning of `data`, each with its size in bytes."""
    for line in data.splitlines(keepends=True):
        crc, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text):
            return
        yield json.loads(text), len(line)


def append_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Add records, durably: when this returns, they survive a crash of the machine."""
    with explain_writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            write_all(descriptor, memoryview(b"".join(map(encode_line, records))))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_folder(path.parent)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records, for the one who writes the file: a half-written last line is cut off."""
    if not path.exists():
        return []
    found = list(decode_lines(path.read_bytes()))
    os.truncate(path, sum(size for _, size in found))
    return [record for record, _ in found]
