"""Geometric types: floats with the brackets of their kind."""

from __future__ import annotations

import struct

from pgcdc.source.postgres.wire.binary.numbers import format_float8
from pgcdc.source.postgres.wire.binary.reader import Damaged, Reader

__all__ = [
    "box_text", "circle_text", "line_text", "lseg_text", "path_text", "point_text", "polygon_text",
]  # fmt: skip

_POINT_BYTES = 16


def point_text(data: bytes) -> bytes:
    """(x,y)"""
    return b"(%b,%b)" % tuple(_format_floats(data, 2))


def line_text(data: bytes) -> bytes:
    """{A,B,C}"""
    return b"{%b,%b,%b}" % tuple(_format_floats(data, 3))


def lseg_text(data: bytes) -> bytes:
    """[(x,y),(x,y)]"""
    return b"[(%b,%b),(%b,%b)]" % tuple(_format_floats(data, 4))


def box_text(data: bytes) -> bytes:
    """(x,y),(x,y)"""
    return b"(%b,%b),(%b,%b)" % tuple(_format_floats(data, 4))


def circle_text(data: bytes) -> bytes:
    """<(x,y),r>"""
    return b"<(%b,%b),%b>" % tuple(_format_floats(data, 3))


def path_text(data: bytes) -> bytes:
    """((x,y),...) if it is closed, else [(x,y),...]"""
    closed, points = data[:1], _format_points(data[1:])
    if closed not in {b"\0", b"\1"}:
        raise Damaged(f"is neither open nor closed: {closed!r}")
    return b"(%b)" % points if closed == b"\1" else b"[%b]" % points


def polygon_text(data: bytes) -> bytes:
    """((x,y),...)"""
    return b"(%b)" % _format_points(data)


def _format_points(data: bytes) -> bytes:
    reader = Reader(data)
    count = reader.count(_POINT_BYTES)
    raw = reader.raw(count * _POINT_BYTES)
    reader.finish()
    numbers = iter(_format_floats(raw, 2 * count))
    return b",".join([b"(%b,%b)" % point for point in zip(numbers, numbers, strict=True)])


def _format_floats(data: bytes, count: int) -> list[bytes]:
    if len(data) != 8 * count:
        raise Damaged(f"has {len(data)} bytes, not {8 * count}")
    return [format_float8(number) for number in struct.unpack(f"!{count}d", data)]
