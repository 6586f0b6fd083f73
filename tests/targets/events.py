"""The events that contract tests give to sinks: real ones, of a table `items (id bigint primary key, position, text)`."""

from __future__ import annotations

import functools
import json
import uuid
import zlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.event.batch import Batch

START = Position.end(100)
STREAM = [Position.at(110 + 10 * t, n, sub) for t in range(4) for n in range(1, 4) for sub in range(2 if n == 2 else 1)]
END = Position.end(150)
_ROWS = ("INSERT", "UPDATE", "DELETE", "SNAPSHOT")
_IDS = uuid.UUID("5b0cb3a5-1f9e-4d0e-9c55-0f5f3a4e9d01")


def event(
    position: Position, key: int | None = None, operation: str = "INSERT", text: str | None = "ä🐘"
) -> dict[str, Any]:
    """One change of a row of `items`. Without a key: of a row that no other position has."""
    key = position.commit * 10_000_000 + position.ordinal * 10 + position.sub if key is None else key
    row: dict[str, str | None] = {"id": str(key)}
    if operation != "DELETE":
        row |= {"position": str(position), "text": text}
    return {
        "id": str(uuid.uuid5(_IDS, str(position))),
        "channel": "pgcdc:items",
        "operation": operation,
        "payload": {"op": operation, "table": "items", "row": row, "old": None},
        "source": "wal_replication",
        "created_at": "2026-11-16T00:46:06.258000Z",
        "position": str(position),
    }


def line(position: Position) -> str:
    """The event of a position of STREAM, as sinks get it."""
    return to_line(event(position))


def to_line(one: dict[str, Any]) -> str:
    return json.dumps(one, ensure_ascii=False, separators=(",", ":")) + "\n"


def position_of(text: str) -> str:
    """The position in a line."""
    return str(json.loads(text)["position"])


def batch(start: Position, end: Position, chunks: int = 1, kind: pa.DataType | None = None) -> Batch:
    """The events of STREAM in (start, end], as Spark would give them: in one or more chunks."""
    inside = [line(position) for position in STREAM if start < position <= end]
    size = -(-len(inside) // chunks) or 1
    groups = [inside[begin : begin + size] for begin in range(0, len(inside), size)]
    tables = [_table(group, kind or pa.string()) for group in groups]
    return Batch(start, end, pa.concat_tables(tables) if tables else _table([], kind or pa.string()))


def batch_of(start: Position, end: Position, lines: Sequence[str]) -> Batch:
    """These lines as the batch (start, end]."""
    return Batch(start, end, _table(lines, pa.string()))


def _table(lines: Sequence[str], kind: pa.DataType) -> pa.Table:
    """Lines, and the same as records and fields: whatever form a sink takes."""
    events = [json.loads(one) for one in lines]
    rows = [one["payload"]["row"] or {} for one in events]
    moved = [one["operation"] not in _ROWS or one["payload"]["old"] is not None for one in events]
    made = {
        "position": pa.array([one["position"] for one in events], kind),
        "line": pa.array(lines, kind),
        "value": pa.array([one.removesuffix("\n") for one in lines], kind),
        **{
            name: pa.array([one.get(name, "") for one in events], pa.string())
            for name in ("id", "channel", "operation")
        },
        "payload": pa.array([to_line(one["payload"]).strip() for one in events], pa.string()),
        **{name: pa.array([one.get(name) for one in events], pa.string()) for name in ("source", "created_at")},
        "transaction": pa.nulls(len(lines), pa.string()),
        "key": pa.array([json.dumps([row.get("id")]) for row in rows], pa.string()),
        "key_hash": pa.array([zlib.crc32(str(row.get("id")).encode()) for row in rows], pa.int64()),
        "is_barrier": pa.array(moved, pa.bool_()),
        "relation": pa.array([0] * len(lines), pa.int32()),
        "traceparent": pa.nulls(len(lines), pa.string()),
        "tracestate": pa.nulls(len(lines), pa.string()),
    }
    return pa.table(made)


def cut(lines: Sequence[str], start: Position, end: Position) -> Batch:
    """Those of these lines that lie in (start, end]."""
    return batch_of(start, end, [one for one in lines if str(start) < position_of(one) <= str(end)])


WHOLE = [line(position) for position in STREAM]


@functools.cache
def many(count: int) -> list[str]:
    """So many lines of one transaction."""
    return [line(Position.at(110, number)) for number in range(1, count + 1)]


def up_to(end: Position) -> list[str]:
    return [line(position) for position in STREAM if position <= end]


def by_key(lines: Sequence[str]) -> dict[str, list[str]]:
    """The lines of each key of `items`, in the order in which they stand there."""
    keyed = sorted(((json.loads(one)["payload"]["row"]["id"], one) for one in lines), key=lambda pair: pair[0])
    return {key: [one for _, one in group] for key, group in groupby(keyed, key=lambda pair: pair[0])}
