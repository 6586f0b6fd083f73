"""The lines of a batch as events again, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

from pgcdc.errors import SinkError

__all__ = ["Event", "parse_lines"]

Event = dict[str, Any]

PIECE_EVENTS = 4096


def parse_lines(events: pa.Table) -> Iterator[list[Event]]:
    """The events, in order. A line ends with its only newline: so many lines are one JSON list, but for its commas."""
    for chunk in events.column("line").chunks:
        kind = "q" if pa.types.is_large_string(chunk.type) else "i"
        for begin in range(0, len(chunk), PIECE_EVENTS):
            piece = chunk.slice(begin, PIECE_EVENTS)
            _, offset_buffer, data = piece.buffers()
            offsets = memoryview(offset_buffer).cast(kind)
            first, last = offsets[piece.offset], offsets[piece.offset + len(piece)]
            text = bytes(memoryview(data)[first:last]).rstrip(b"\n").replace(b"\n", b",")
            try:
                parsed: list[Event] = orjson.loads(b"[%b]" % text)
            except orjson.JSONDecodeError as error:
                raise SinkError(
                    f"a line is not JSON: {error}", "A transform made it: pg_table can apply events only"
                ) from None
            yield parsed
