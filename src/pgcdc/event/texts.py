"""Numbers as the texts that events carry: ids, positions and times, made for whole columns at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.position import ORDINAL_BITS, Kind, Position

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class IdSeed:
    """What makes the ids of one stream its own: a hash of server and slot."""

    high: int
    low: int

    @classmethod
    def of(cls, system_identifier: str, slot: str) -> IdSeed:
        """The seed of a slot of a server."""
        digest = hashlib.sha256(f"{system_identifier}/{slot}".encode()).digest()
        return cls(int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big"))


def mix(x: U64) -> U64:
    """A 64-bit finaliser: every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def places(kind: U8, ordinal: I64) -> I64:
    """`Position.place` of every row."""
    return (kind.astype(np.int64) << ORDINAL_BITS) | ordinal


def event_ids(seed: IdSeed, commit: I64, kind: U8, ordinal: I64, sub: I64, commit_time: I64) -> pa.Array:
    """UUIDv7s of commit time and position: the same change has the same id on every replay."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    x = mix(commit.view(np.uint64) * golden + kind.astype(np.uint64) + np.uint64(seed.high))
    small, many = sub.view(np.uint64), sub.view(np.uint64) >> np.uint64(16)
    x = mix(x + (ordinal.view(np.uint64) << np.uint64(16)) + small + many * golden)
    y = mix(x + np.uint64(seed.low))
    milliseconds = (np.maximum(commit_time, 0) // 1000).astype(np.uint64)
    high = (milliseconds << np.uint64(16)) | np.uint64(0x7000) | (x >> np.uint64(52))
    low = np.uint64(0x8000000000000000) | (y >> np.uint64(2))
    digits = np.concatenate([_hex(high), _hex(low)], axis=1)
    dash = np.full((len(commit), 1), ord("-"), np.uint8)
    cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    pieces = [piece for begin, end in cuts for piece in (dash, digits[:, begin:end])][1:]
    return _fixed_text(np.concatenate(pieces, axis=1))


def position_texts(commit: I64, kind: U8, ordinal: I64, sub: I64) -> pa.Array:
    """`str(Position)` of every row."""
    if sub.any():
        rows = zip(commit.tolist(), kind.tolist(), ordinal.tolist(), sub.tolist(), strict=True)
        return pa.array([str(Position(row[0], Kind(row[1]), *row[2:])) for row in rows], pa.string())
    slash = np.full((len(commit), 1), ord("/"), np.uint8)
    upper = [_hex(commit.view(np.uint64), _UPPER), slash, _hex(places(kind, ordinal).view(np.uint64), _UPPER)[:, 3:]]
    return _fixed_text(np.concatenate(upper, axis=1))


def time_texts(microseconds: I64) -> pa.Array:
    """Times as JSON strings with six digits of the second, in UTC."""
    count, width = len(microseconds), len("2026-11-16T00:46:06.258000")
    # Changes of one transaction are neighbours: each of its times is written once.
    moments, index = np.unique(microseconds, return_inverse=True)
    texts = np.datetime_as_string(moments.view("datetime64[us]"), unit="us").astype(f"S{width}")
    letters = texts.view(np.uint8).reshape(-1, width)[index]
    quote = np.full((count, 1), ord('"'), np.uint8)
    end = np.broadcast_to(np.frombuffer(b'Z"', np.uint8), (count, 2))
    return _fixed_text(np.concatenate([quote, letters, end], axis=1))


def _digit_pairs(digits: str) -> npt.NDArray[np.uint8]:
    return np.array([[ord(digits[byte >> 4]), ord(digits[byte & 15])] for byte in range(256)], np.uint8)


_LOWER = _digit_pairs("0123456789abcdef")
_UPPER = _digit_pairs("0123456789ABCDEF")


def _hex(numbers: U64, digits: npt.NDArray[np.uint8] = _LOWER) -> npt.NDArray[np.uint8]:
    """16 hexadecimal digits for each number."""
    octets = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return digits[octets].reshape(-1, 16)


def _fixed_text(letters: npt.NDArray[np.uint8]) -> pa.Array:
    count, width = letters.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(letters)))


_ESCAPES = {
    **{byte: f"\\u{byte:04X}" for byte in range(32)},
    **{ord(raw): f"\\{letter}" for raw, letter in zip('\b\t\n\f\r"\\', 'btnfr"\\', strict=True)},
}


def quote_json(text: str | None) -> str:
    """A JSON string (or null) as Spark writes it: nothing is escaped that need not be."""
    return "null" if text is None else f'"{text.translate(_ESCAPES)}"'
