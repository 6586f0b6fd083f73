"""The webhook: events to a receiver in another process, one by one and in arrays, and each key's events in order."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
from http_clients import Receiver, receive

from pgcdc import adapters
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation, ShapeChange, append_shapes
from pgcdc.event.batch import Batch
from pgcdc.event.forms import RECORD
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import make_sink

__all__ = ["BATCH_SIZE", "WORKERS", "Posted", "measure_webhook", "receiver", "what_arrived"]

KEYS = 1000
WORKERS = 16
BATCH_SIZE = 100
BATCH_EVENTS = 20_000
"""Of one batch of the lane."""
_START = Position.end(100)


@dataclass(frozen=True, slots=True)
class Posted:
    """How fast it was."""

    rate: float
    cpu_us: float
    """Of this process, for each event."""
    requests: int
    wrong: int
    """Events that are missing, or that overtook another one of their key."""


def measure_webhook(events: int, batch_size: int) -> Posted:
    """Send so many events, in batches, through the wrapper that every sink has."""
    batches = list(_batches(events))
    with receiver() as (url, ours), tempfile.TemporaryDirectory() as folder:
        acks = Path(folder) / "acks"
        acks.mkdir()
        columns = tuple(Column(name, 25, -1, name == "id") for name in ("id", "n", "note"))
        append_shapes(
            Path(folder) / "shapes.jsonl", [ShapeChange(_START, Relation(1, "public", "orders", "d", columns))]
        )
        spec = adapters.webhook(
            url, concurrency=WORKERS, batch_size=batch_size, signing_key="a key", allow_private=True, timeout=300
        )
        sink = Runner(make_sink(spec), acks, spec.name, spec.delivery)
        sink.open(_START)
        began, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            sink.write(batch)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        sink.close()
        requests, arrived, wrong = what_arrived(url, ours)
    return Posted(events / took, cpu / events * 1e6, requests, wrong + events - arrived)


def _batches(events: int) -> Iterator[Batch]:
    start = _START
    for first in range(0, events, BATCH_EVENTS):
        numbers = range(first, min(first + BATCH_EVENTS, events))
        positions = [Position.at(1000 + number, 1) for number in numbers]
        yield Batch(start, positions[-1], _table(numbers, positions))
        start = positions[-1]


def _table(numbers: Sequence[int], positions: Sequence[Position]) -> pa.Table:
    """Records, with the lines that older commits read."""
    lines = [_line(number, position) for number, position in zip(numbers, positions, strict=True)]
    rows = [
        {
            "position": str(position), "line": line, "value": line.removesuffix("\n"), "channel": "pgcdc:orders",
            "id": f"01a1e1d1-81b2-7e0a-8c3e-{number:012x}", "operation": "UPDATE", "key": f'["{number % KEYS}"]',
            "key_hash": number % KEYS, "is_barrier": False, "relation": 0,
        }
        for number, position, line in zip(numbers, positions, lines, strict=True)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, pa.schema([("position", pa.string()), ("line", pa.string()), *RECORD]))


def _line(number: int, position: Position) -> str:
    row = {"id": str(number % KEYS), "n": str(number), "note": "x" * 200}
    event = {
        "id": f"01a1e1d1-81b2-7e0a-8c3e-{number:012x}", "channel": "pgcdc:orders", "operation": "UPDATE",
        "payload": {"op": "UPDATE", "table": "orders", "row": row, "old": None}, "source": "wal_replication",
        "created_at": "2026-11-16T00:46:06.258000Z", "position": str(position),
    }  # fmt: skip
    return json.dumps(event, separators=(",", ":")) + "\n"


# --- the other process


@contextmanager
def receiver() -> Iterator[tuple[str, Connection]]:
    """Takes whatever is posted to its URL; the connection is for `what_arrived`."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/", ours
    finally:
        process.kill()
        process.join()


def what_arrived(url: str, ours: Connection) -> tuple[int, int, int]:
    """Requests, events, and events that came behind a later one of their key."""
    urllib.request.urlopen(urllib.request.Request(f"{url}check", b"", method="POST"), timeout=60).close()
    found: tuple[int, int, int] = ours.recv()
    return found


def _serve(pipe: Connection) -> None:
    bodies: list[bytes] = []

    def keep(head: bytes, body: bytes) -> None:
        if head.startswith(b"POST /check"):
            pipe.send(_check(bodies))
        else:
            bodies.append(body)  # looked at when the time is taken

    class Keeping(Receiver):
        on_body = staticmethod(keep)

    asyncio.run(receive(Keeping, pipe.send))


def _check(bodies: list[bytes]) -> tuple[int, int, int]:
    """Requests, events, and events that came behind a later one of their key."""
    last: dict[str, str] = {}
    count = wrong = 0
    for body in bodies:
        content = json.loads(body)
        for event in content if isinstance(content, list) else [content]:
            count += 1
            key, position = event["payload"]["row"]["id"], event["position"]
            wrong += position <= last.get(key, "")
            last[key] = position
    return len(bodies), count, wrong
