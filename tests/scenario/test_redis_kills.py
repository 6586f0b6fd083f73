"""The adapter redis beside kill -9 of its process and of the server: what is there in the end is what a model says."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from redising import START, deliver
from targets.redis import RedisServer

from pgcdc.core.position import Position
from pgcdc.core.relation import Column, OldKind, Op, Relation
from pgcdc.event.batch import Batch
from pgcdc.event.forms import TABLE
from pgcdc.event.shape import TableShape

KILLS = int(os.environ.get("PGCDC_KILLS", "200"))
COLUMNS = ("a", "b", "n", "note")
SHAPE = Relation(7, "public", "t", "d", tuple(Column(name, 25, -1, name in ("a", "b")) for name in COLUMNS))
Row = dict[str, str | None]


class Stream:
    """Made-up changes, and what they leave of the table."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.rows: dict[tuple[str, str], Row] = {}
        self.unsent = 0
        self._count = 0

    def batch(self) -> Batch:
        """One transaction."""
        self._count += 1
        commit = START.commit + 10 * self._count
        changes: dict[str, list[Any]] = {name: [] for name in ("position", *(field.name for field in TABLE))}
        for ordinal in range(1, self._random.choice((20, 200, 2500))):
            op, new, old, unsent = self._change()
            self.unsent += len(unsent)
            values = {
                "position": str(Position.at(commit, ordinal)), "id": f"{commit}-{ordinal}", "op": op, "relation": 0,
                "new": new and [None if at in unsent else new[name] for at, name in enumerate(COLUMNS)],
                "old": old and [old[0], old[1], None, None], "old_kind": OldKind.KEY if old else OldKind.NONE,
                "unchanged": unsent, "ordinal": ordinal, "commit_time": 0, "xid": 0,
            }  # fmt: skip
            for name, value in values.items():
                changes[name].append(value)
        arrays = {"position": pa.array(changes["position"], pa.string())}
        arrays |= {field.name: pa.array(changes[field.name], field.type) for field in TABLE}
        begin = Position.end(commit - 10)
        return Batch(begin, Position.end(commit), pa.table(arrays), {0: TableShape(SHAPE)})

    def _change(self) -> tuple[Op, Row | None, tuple[str, str] | None, list[int]]:
        pick = self._random.random()
        if pick < 0.0005:
            self.rows.clear()
            return Op.TRUNCATE, None, None, []
        key = self._random.choice("xyz:%"), str(self._random.randrange(300))
        found = self.rows.get(key)
        if found is None:
            self.rows[key] = {"a": key[0], "b": key[1], "n": "0", "note": self._random.choice((None, self._note()))}
            return Op.INSERT, self.rows[key], None, []
        if pick < 0.1:
            del self.rows[key]
            return Op.DELETE, None, key, []
        new, unsent = {**found, "n": str(self._random.randrange(10**6))}, [3]
        if self._random.random() < 0.1:
            new["note"], unsent = self._note(), []
        other = self._random.choice("xyz:%"), str(self._random.randrange(300))
        if pick < 0.3 and other not in self.rows:
            del self.rows[key]
            self.rows[other] = {**new, "a": other[0], "b": other[1]}
            return Op.UPDATE, self.rows[other], key, unsent
        self.rows[key] = new
        return Op.UPDATE, new, None, unsent

    def _note(self) -> str:
        return 'ä/"\\' + self._random.randbytes(self._random.randrange(200)).hex()


class Delivery:
    """One process that delivers."""

    def __init__(self, server: RedisServer, acks: Path, batches: list[Batch]) -> None:
        context = multiprocessing.get_context("fork")  # no helper process that would outlive the test
        self._told, telling = context.Pipe(duplex=False)
        self.process = context.Process(target=deliver, args=(server.url, str(acks), batches, telling), daemon=True)
        self.process.start()
        telling.close()
        self.last, self.written = "", ""

    def hear(self, *, wait: bool) -> bool:
        """The next message, or everything that was said; False: there is no more."""
        try:
            while wait or self._told.poll(0):
                self.last, position = self._told.recv()
                self.written = position if self.last == "written" else self.written
                if wait:
                    return True
        except EOFError:
            return False
        return True


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_beside_updates_with_unchanged_toast_end_equal(tmp_path: Path) -> None:
    seed = int(os.environ.get("PGCDC_SEED", time.time_ns() % 10**9))
    print(f"seed {seed}")
    chance, stream = random.Random(seed), Stream(seed)
    (tmp_path / "server").mkdir()
    acks = tmp_path / "state" / "acks"
    acks.mkdir(parents=True)
    server = RedisServer(tmp_path / "server")
    backlog: list[Batch] = []
    kills = {"process": 0, "server": 0}
    try:
        while sum(kills.values()) < KILLS:
            backlog += [stream.batch() for _ in range(4)]
            delivery = Delivery(server, acks, backlog)
            for _ in range(chance.randrange(1, 8)):
                delivery.hear(wait=True)
            time.sleep(chance.uniform(0, 0.03))
            delivery.hear(wait=False)
            if chance.random() < 0.25:
                server.kill()
                kills["server"] += delivery.last == "writing"
                server.start()
                time.sleep(chance.uniform(0, 0.05))
            delivery.process.kill()
            delivery.process.join()
            while delivery.hear(wait=True):
                pass
            kills["process"] += delivery.last == "writing"
            backlog = [one for one in backlog if str(one.end) >= delivery.written]  # the last one comes again
            if sum(kills.values()) % 20 == 0:
                backlog = _check(server, acks, backlog, stream)
        _check(server, acks, backlog, stream)
    finally:
        server.kill()
    print(f"{kills}, {stream.unsent} values were not sent, {len(stream.rows)} rows")
    assert kills["server"] > KILLS / 20
    assert stream.unsent > 50 * KILLS


def _check(server: RedisServer, acks: Path, backlog: list[Batch], stream: Stream) -> list[Batch]:
    """Everything arrives, and is what the model says."""
    delivery = Delivery(server, acks, backlog)
    while delivery.hear(wait=True):
        pass
    delivery.process.join()
    assert delivery.process.exitcode == 0
    client = server.client
    keys = list(client.scan_iter("t:*", 5000))
    found = {key: json.loads(text) for key, text in zip(keys, client.mget(keys), strict=True)} if keys else {}
    escaped = {one: one.replace("%", "%25").replace(":", "%3A") for one in "xyz:%"}
    assert found == {f"t:{escaped[a]}:{b}": row for (a, b), row in stream.rows.items()}
    return []
