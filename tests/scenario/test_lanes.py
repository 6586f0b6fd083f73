"""Several sinks, one of which blocks or fails: the others go on, it gets everything once and in order, and comes back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from databases import Database
from laning import Run
from listening import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Writer:
    """Inserts rows with keys that count up, one transaction each."""

    def __init__(self, url: str) -> None:
        self._conn = psycopg.connect(url, autocommit=True)
        self._conn.execute("CREATE TABLE IF NOT EXISTS items (id bigint PRIMARY KEY, note text)")
        self._numbers = itertools.count(1)
        self.last = 0

    def write(self, count: int) -> int:
        for _ in range(count):
            self.last = next(self._numbers)
            self._conn.execute("INSERT INTO items VALUES (%s, 'x')", [self.last])
        return self.last

    def close(self) -> None:
        self._conn.close()


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    one = Writer(database.url)
    yield one
    one.close()


@pytest.fixture
def start(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*names: str, **more: Any) -> Run:
        runs.append(Run(spark, database.url, tmp_path, names, **more))
        return runs[-1].begin()

    yield begin
    for run in runs:
        for name in run.sinks:
            run.seen.tell(name, "")
        run.stop()
        run._thread.join(30)


def check_all(run: Run, last: int) -> None:
    for name, sink in run.sinks.items():
        assert run.seen.keys(name) == list(range(1, last + 1)), name
        assert sink.most_writers == 1, name


def test_a_blocked_sink_leaves_and_rejoins_and_the_others_do_not_wait(
    start: Callable[..., Run], writer: Writer
) -> None:
    run = start("a", "b", "c")
    seen = run.seen
    for name in run.sinks:
        seen.wait_for(name, writer.write(3) if name == "a" else writer.last)
    seen.tell("b", "block")
    began = time.monotonic()
    last = writer.write(1)
    seen.wait_for("a", last)
    wait_until(lambda: seen.is_out("b"), 10, "b leaves")
    seen.wait_for("a", writer.write(1))  # the next batch does not wait for b
    assert time.monotonic() - began < 10
    last = writer.write(50)
    seen.wait_for("c", last)
    assert seen.keys("b") == [1, 2, 3]
    assert run.said("adapter b is slow")
    (lane,) = seen.consumers() - {"main"}
    seen.tell("b", "")
    seen.wait_for("b", last)
    wait_until(lambda: not seen.is_out("b"), 20, f"b rejoins: {run.lines}")
    wait_until(lambda: lane not in seen.consumers(), 20, "its lane is forgotten")
    last = writer.write(5)
    for name in run.sinks:
        seen.wait_for(name, last)
    status = {one["adapter"]: one for one in run._running_lanes().status()}
    assert {one["lane"] for one in status.values()} == {"main"}
    run.end()
    check_all(run, last)
