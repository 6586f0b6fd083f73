"""The lines of a batch as events again, many at a time: rows come out in the text format of COPY.

`scan` has two implementations with the same results, in C (`_scan.pyx`) and here in Python, which runs where there was no
compiler and is the one to read first. The one in C leaves to Python what is not common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import orjson
import pyarrow as pa

from pgcdc.core.compiled import load_compiled
from pgcdc.core.errors import SinkError
from pgcdc.event.batch import line_buffers
from pgcdc.sink.pg_table.copy_text import write_row

__all__ = ["Columns", "Event", "Scanned", "parse_events", "parse_head", "parse_line", "scan_lines", "scan_python"]

Event = dict[str, Any]
Columns = tuple[str, ...]
Scanned = tuple[bytes | None, Columns | None, bytes | None, Columns | None, bytes | None]
"""(head, columns of the row, row, columns of the old row, old row). The head is the JSON text between id and row: what is
the same for events of one kind. Without a head: a line that is to be parsed, in the place of the row."""

PIECE_EVENTS = 4096

_HEAD = '","channel":{0},"operation":{1},"payload":{{"op":{2},"table":{3},"row":'


def scan_lines(events: pa.Table) -> Iterator[list[Scanned]]:
    """The events, in order."""
    scan, known = _scanner(), {}  # type: tuple[Callable[..., list[Scanned]], dict[bytes, tuple[bytes, Columns]]]
    for text in _texts(events):
        yield scan(text, known)


def parse_events(events: pa.Table) -> Iterator[Event]:
    """The events, in order, as they are: for few of them."""
    for text in _texts(events):
        for line in text.split(b"\n"):
            if line:
                yield parse_line(line)


def parse_line(line: bytes) -> Event:
    """One event. SinkError: it is none of ours."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise SinkError(f"a line is not JSON: {error}", "A transform made it: pg_table applies events only") from None
    if not isinstance(event, dict) or not {"channel", "operation", "payload", "position"} <= event.keys():
        raise other_envelope(event)
    return event


def parse_head(head: bytes) -> tuple[str, str, str]:
    """Channel, operation and table behind a head."""
    event = orjson.loads(b'{"id":"%bnull}}' % head)
    return event["channel"], event["operation"], event["payload"]["table"]


def scan_python(text: bytes, known: dict[bytes, tuple[bytes, Columns]]) -> list[Scanned]:
    """The events of many lines."""
    return [_scan_line(line) for line in text.split(b"\n") if line]


def _scan_line(line: bytes) -> Scanned:
    raw: Scanned = (None, None, line, None, None)
    try:
        event = orjson.loads(line)
        payload = event["payload"]
        if list(event)[:4] != ["id", "channel", "operation", "payload"]:
            return raw
        if list(payload) != ["op", "table", "row", "old"]:  # unchanged TOAST, or of somebody else
            return raw
        parts = (event["channel"], event["operation"], payload["op"], payload["table"])
        if not isinstance(event["id"], str) or not all(isinstance(one, str) for one in parts[:3]):
            return raw
        sides = [_row(payload["row"]), _row(payload["old"])]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return raw
    head = _HEAD.format(*(orjson.dumps(part).decode() for part in parts)).encode()
    return (head, *sides[0], *sides[1])


def _row(row: dict[str, str | None] | None) -> tuple[Columns | None, bytes | None]:
    return (None, None) if row is None else (tuple(row), write_row(row.values()))


def _texts(events: pa.Table) -> Iterator[bytes]:
    for chunk in events.column("line").chunks:
        for begin in range(0, len(chunk), PIECE_EVENTS):
            yield b"".join(line_buffers([chunk.slice(begin, PIECE_EVENTS)]))


def other_envelope(event: object) -> SinkError:
    """The error for lines that are not events of ours."""
    inner = event.get("payload", event) if isinstance(event, dict) else event
    what = "Debezium's" if isinstance(inner, dict) and "op" in inner and "before" in inner else "another"
    return SinkError(
        f"pg_table in the mode apply got a line with {what} envelope",
        "It applies pgcdc's own events: take the transform debezium or cloudevents out of this adapter's, or use the mode "
        "append",
    )


@cache
def _scanner() -> Callable[..., list[Scanned]]:
    module = load_compiled("sink.pg_table._scan")
    scan: Callable[..., list[Scanned]] = module.scan if module is not None else scan_python
    return scan
