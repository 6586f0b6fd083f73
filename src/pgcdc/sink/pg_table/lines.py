"""The lines of a batch as events again, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

from pgcdc.errors import SinkError
from pgcdc.sink.base import line_buffers

__all__ = ["Event", "parse_lines"]

Event = dict[str, Any]

PIECE_EVENTS = 4096


def parse_lines(events: pa.Table) -> Iterator[list[Event]]:
    """The events, in order. A line ends with its only newline: so many lines are one JSON list, but for its commas."""
    for chunk in events.column("line").chunks:
        for begin in range(0, len(chunk), PIECE_EVENTS):
            text = b"".join(line_buffers([chunk.slice(begin, PIECE_EVENTS)])).rstrip(b"\n").replace(b"\n", b",")
            try:
                parsed: list[Event] = orjson.loads(b"[%b]" % text)
            except orjson.JSONDecodeError as error:
                advice = "A transform made it: pg_table applies events only"
                raise SinkError(f"a line is not JSON: {error}", advice) from None
            yield parsed
