"""The spool's index: its segments, in order, and the transactions they hold.

The index is a list of chunk files (`index-00000001.log`). A chunk is a list of records, each framed with its length and
checksum, so that an incomplete one is recognised. A chunk's first record says where the chunk begins. A chunk is
deleted once everything in it is delivered, so the index does not grow over time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pgcdc.core.errors import SpoolError
from pgcdc.core.position import Position
from pgcdc.spool.segment import ADVICE, Written

_FRAME = struct.Struct("!IIII")  # magic, header bytes, body bytes, CRC-32 of both
_MAGIC = 0x70674344
_STORED = ("file", "written", "rows", "relations", "since_us", "is_base")


Place = tuple[int, int, int]  # Number of the chunk, and the record's start and end in it


class Token(NamedTuple):
    """What a source needs to continue after a transaction. Only the source reads the value."""

    commit: int
    value: bytes


NO_TOKEN = Token(0, b"")


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """One step of the stream: a segment, or (without a file) a new position without changes."""

    end: Position
    file: str = ""
    written: Written = (0, 0)
    rows: int = 0
    relations: int = 0  # The number of relations known: the segment refers to no later ones
    since_us: int = 0  # Commit time of the segment's first transaction, in microseconds since 1970
    is_base: bool = False  # The first record of a chunk: everything up to `end` was in earlier chunks
    token: bytes = b""  # What the source needs to continue after `end`, if a number is not enough
    place: Place = (0, 0, 0)  # Its location; the segment's transactions are loaded from there when needed


def encode_record(record: IndexRecord, transactions: pa.RecordBatch | None = None) -> bytes:
    """The framed bytes of one record, including the transactions of its segment."""
    header: dict[str, Any] = {"end": str(record.end)}
    header |= {name: value for name in _STORED if (value := getattr(record, name))}
    if record.token:
        header["token"] = record.token.hex()
    body = transactions.serialize().to_pybytes() if transactions is not None else b""
    head = json.dumps(header, separators=(",", ":")).encode()
    crc = zlib.crc32(body, zlib.crc32(head))
    return _FRAME.pack(_MAGIC, len(head), len(body), crc) + head + body


def scan_records(data: bytes, where: str, chunk: int, begin: int = 0) -> Iterator[IndexRecord]:
    """The complete records in `data`, which starts at `begin` in chunk `chunk`, without transactions. Skips an
    incomplete tail; raises for damage."""
    start = begin
    for header, _, end in _frames(data, where):
        yield _decode(header, (chunk, start, begin + end))
        start = begin + end


def load_transactions(data: bytes, record: IndexRecord, where: str) -> bytes:
    """The serialized transactions of a record, from the bytes at its place."""
    for header, body, _ in _frames(data, where):
        if _decode(header, record.place) == record:
            return body
        break
    raise SpoolError(f"index {where} no longer holds segment {record.file}", ADVICE)


def _frames(data: bytes, where: str) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """Header, body and end of every complete record."""
    offset = 0
    while len(data) - offset >= _FRAME.size:
        magic, head_size, body_size, crc = _FRAME.unpack_from(data, offset)
        if magic != _MAGIC:
            raise SpoolError(f"index {where} is damaged at byte {offset}", ADVICE)
        begin = offset + _FRAME.size
        end = begin + head_size + body_size
        if end > len(data):
            return
        if zlib.crc32(data[begin:end]) != crc:
            raise SpoolError(f"index {where} is damaged at byte {offset}: its checksum does not match", ADVICE)
        header = json.loads(data[begin : begin + head_size])
        yield header, data[begin + head_size : end], end
        offset = end


def _decode(header: dict[str, Any], place: Place) -> IndexRecord:
    size, crc = header.pop("written", (0, 0))
    end, token = Position.parse(header.pop("end")), bytes.fromhex(header.pop("token", ""))
    return IndexRecord(end, written=(size, crc), token=token, place=place, **header)


def chunk_path(folder: Path, number: int) -> Path:
    return folder / f"index-{number:08d}.log"


def chunk_number(path: Path) -> int:
    return int(path.stem.removeprefix("index-"))


def list_chunks(folder: Path) -> list[Path]:
    """All chunk files, oldest first."""
    return sorted(folder.glob("index-*.log"), key=chunk_number)
