"""The spool's index: which segments there are, in order, and which transactions they hold.

The index is a list of chunk files (`index-00000001.log`). A chunk is a list of records; each record is framed with its
length and checksum, so that a half-written one is seen as such. A chunk's first record tells where the chunk begins, and
a chunk is deleted once everything in it is delivered, so the index does not grow with time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pgcdc.core.errors import SpoolError
from pgcdc.core.position import Position
from pgcdc.core.relation import Relation
from pgcdc.core.state import decode_lines
from pgcdc.spool.schema import TRANSACTIONS
from pgcdc.spool.segment import ADVICE, Written

_FRAME = struct.Struct("!IIII")  # magic, header bytes, body bytes, CRC-32 of both
_MAGIC = 0x70674344
_OF_SEGMENT = ("file", "written", "rows", "relations")


Place = tuple[int, int, int]
"""Number of the chunk, and where in it a record begins and ends."""


class Token(NamedTuple):
    """What a source said of a transaction, to go on behind it. Only the source can read the value."""

    commit: int
    value: bytes


NO_TOKEN = Token(0, b"")


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """One step of the stream: a segment, or (without a file) a position that moved while nothing was published."""

    end: Position
    file: str | None = None
    written: Written = (0, 0)
    rows: int = 0
    transactions: pa.RecordBatch | None = None
    relations: int = 0
    """How many relations were known: the segment names none beyond."""
    place: Place = (0, 0, 0)
    """Where it stands, for a reader that loads the transactions only when it needs them."""
    is_base: bool = False
    """The first record of a chunk: everything up to `end` stood in earlier chunks."""
    token: bytes = b""
    """What the source needs to go on behind `end`, if a number is not enough for it."""


def encode_record(record: IndexRecord) -> bytes:
    """The framed bytes of one record."""
    header: dict[str, Any] = {"end": str(record.end)}
    if record.is_base:
        header["base"] = True
    if record.token:
        header["token"] = record.token.hex()
    body = b""
    if record.file is not None and record.transactions is not None:
        header |= {name: getattr(record, name) for name in _OF_SEGMENT}
        body = record.transactions.serialize().to_pybytes()
    head = json.dumps(header, separators=(",", ":")).encode()
    crc = zlib.crc32(body, zlib.crc32(head))
    return _FRAME.pack(_MAGIC, len(head), len(body), crc) + head + body


def parse_records(data: bytes, where: str) -> Iterator[tuple[IndexRecord, int]]:
    """The complete records in `data`, each with the offset behind it. An incomplete tail is left alone; damage raises."""
    for header, body, end in _frames(data, where):
        record = _decode(header)
        if record.file is not None:
            record = replace(record, transactions=pa.ipc.read_record_batch(pa.py_buffer(body), TRANSACTIONS))
        yield record, end


def scan_records(data: bytes, where: str, chunk: int, begin: int) -> Iterator[IndexRecord]:
    """The same without their transactions; `data` stands in chunk `chunk` from `begin` on."""
    start = begin
    for header, _, end in _frames(data, where):
        yield replace(_decode(header), place=(chunk, start, begin + end))
        start = begin + end


def load_transactions(data: bytes, record: IndexRecord, where: str) -> bytes:
    """The serialized transactions of a record, from the bytes at its place."""
    for header, body, _ in _frames(data, where):
        if replace(_decode(header), place=record.place) == record:
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


def _decode(header: dict[str, Any]) -> IndexRecord:
    position, token = Position.parse(header["end"]), bytes.fromhex(header.get("token", ""))
    if "file" not in header:
        return IndexRecord(position, is_base="base" in header, token=token)
    size, crc = header["written"]
    return IndexRecord(position, header["file"], (size, crc), header["rows"], None, header["relations"], token=token)


def parse_relations(data: bytes) -> list[tuple[Relation, int]]:
    """The sound lines at the beginning of `relations.jsonl`, each with the offset behind it."""
    found, offset = [], 0
    for record, size in decode_lines(data):
        offset += size
        found.append((Relation.from_json(record), offset))
    return found


def chunk_path(folder: Path, number: int) -> Path:
    """The file of chunk `number`."""
    return folder / f"index-{number:08d}.log"


def chunk_number(path: Path) -> int:
    """The number in a chunk's file name."""
    return int(path.stem.removeprefix("index-"))


def list_chunks(folder: Path) -> list[Path]:
    """All chunk files, oldest first."""
    return sorted(folder.glob("index-*.log"), key=chunk_number)
