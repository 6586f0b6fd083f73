"""What of an event a request needs: its id and channel for the headers, and which other events it must not overtake.

Events of one row stay in order. Which columns tell rows of a table apart is known from the history of shapes; a table
without such columns is kept in order as a whole. An event that concerns more than one row (TRUNCATE, a changed key, a
marker, a change of the schema) has no key: it waits for everything before it, and everything behind it waits.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pgcdc.core.shapes import ShapeChange

__all__ = ["Event", "Place", "ShapeKeys", "read_events"]

Place = tuple[str, int]
"""The position of an event, and its number among those that share it."""
Key = tuple[Any, ...]

_ROWS = {"INSERT", "UPDATE", "DELETE", "SNAPSHOT", "c", "u", "d", "r"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(slots=True)
class Event:
    """One event that is to be sent."""

    place: Place
    body: bytes
    id: str
    channel: str
    key: Key | None
    """None: everything before it comes first, everything behind it later."""
    is_cut: bool
    """A table has another shape from here on: what is before has other keys."""
    trace: dict[str, str]

    @property
    def position(self) -> str:
        return self.place[0]


class ShapeKeys:
    """By which columns the rows of a channel are told apart, at each position."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[list[str], list[Sequence[str] | None]]] = {}
        self._changes: list[str] = []

    def set(self, changes: Iterable[ShapeChange]) -> None:
        """All that is known, in order."""
        self._of, self._changes = {}, []
        for change in changes:
            columns = [column.name for column in change.after.columns if column.is_key]
            has_key = change.after.replica_identity in ("d", "i") and bool(columns)
            positions, keys = self._of.setdefault(change.after.channel, ([], []))
            positions.append(str(change.position))
            keys.append(columns if has_key else None)
            self._changes.append(str(change.position))

    def columns(self, channel: str, position: str) -> Sequence[str] | None:
        """None: the table has no key, or is not known."""
        positions, keys = self._of.get(channel, ([], []))
        number = bisect.bisect_right(positions, position)
        return keys[number - 1] if number else None

    def changes_before(self, position: str) -> int:
        """How many changes of shapes there are up to a position."""
        return bisect.bisect_right(self._changes, position)


def read_events(positions: Sequence[str], lines: Sequence[str], keys: ShapeKeys) -> list[Event]:
    """The events of a batch, in order."""
    found: list[Event] = []
    last, number = "", 0
    shapes = keys.changes_before(positions[0]) if positions else 0
    for position, line in zip(positions, lines, strict=True):
        number = number + 1 if position == last else 0
        last = position
        body = line.removesuffix("\n").encode()
        now = keys.changes_before(position)
        found.append(_read(body, (position, number), keys, now != shapes))
        shapes = now
    return found


def _read(body: bytes, place: Place, keys: ShapeKeys, is_cut: bool) -> Event:
    try:
        document = orjson.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {}
    channel, operation, row, old = _look(document)
    key: Key | None
    columns = keys.columns(channel, place[0]) if channel else None
    if operation is None:  # nothing that we know: all of them in order
        key = ("", channel)
    elif operation not in _ROWS:
        key = None
    elif columns is None:
        key = (channel,)
    elif operation in ("UPDATE", "u") and old is not None:  # only if the key is another one
        key = None
    else:
        values = tuple(row.get(column) for column in columns) if isinstance(row, dict) else (None,)
        key = None if None in values else (channel, *map(str, values))
    number = f".{place[1]}" if place[1] else ""
    given = document.get("id") if operation is not None else None
    identity = given if isinstance(given, str) else f"{place[0]}{number}"
    return Event(place, body, identity, channel, key, is_cut, _trace(document, row))


def _look(document: dict[str, Any]) -> tuple[str, str | None, Any, Any]:
    """Channel, operation, row and old row: of our own events, CloudEvents or Debezium's; None: of none of these."""
    channel, operation = document.get("channel"), document.get("operation")
    payload = document.get("data" if "specversion" in document else "payload")
    if isinstance(channel, str) and isinstance(payload, dict):
        operation = operation if isinstance(operation, str) else payload.get("op")
        return channel, str(operation), payload.get("row"), payload.get("old")
    source, operation = document.get("source"), document.get("op")
    if isinstance(source, dict) and isinstance(operation, str) and "table" in source:
        name, schema, before = source.get("table"), source.get("schema"), document.get("before")
        channel = f"pgcdc:{name}" if schema == "public" else f"pgcdc:{schema}.{name}"
        return channel, operation, before if operation == "d" else document.get("after"), before
    return "", None, None, None


def _trace(document: dict[str, Any], row: Any) -> dict[str, str]:
    """The W3C trace that an event carries: as an attribute (CloudEvents), or in columns of these names."""
    for holder in (document, row):
        if isinstance(holder, dict) and isinstance(parent := holder.get("traceparent"), str):
            if not _TRACEPARENT.fullmatch(parent):
                continue
            state = holder.get("tracestate")
            known = isinstance(state, str) and _TRACESTATE.fullmatch(state)
            return {"traceparent": parent, "tracestate": str(state)} if known else {"traceparent": parent}
    return {}
