"""Lanes with sinks that executors write to: one that fails or hangs there keeps nobody else waiting, and ends no run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
import running
from databases import Database
from laning import Run, TestSink
from listening import wait_until

from pgcdc.sink.contract import Receipt
from pgcdc.sink.folder import FolderPartWriter, FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE = 100


@pytest.fixture(autouse=True)
def small_batches_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.run.lane.LARGE_EVENTS", LARGE)


@pytest.fixture
def run(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[Run]:
    """Folders a and c, which executors write to, and a file b. What a does is told by a file."""

    class Told:
        def __init__(self, inner: FolderPartWriter) -> None:
            self.inner, self.control = inner, str(tmp_path / "a.do")

        def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
            import time
            from pathlib import Path

            from pgcdc.core.errors import SinkUnavailable

            while part == 0 and (what := Path(self.control).read_text()):
                if what == "fail":
                    raise SinkUnavailable("the disk is full", "Make room")
                time.sleep(0.05)
            return self.inner.write_part(part, lines)

    class ToldSink(FolderSink):
        def part_writer(self) -> Any:
            return Told(super().part_writer())

    made = Run(spark, database.url, tmp_path, ["a", "b", "c"])
    acks = made.state.acks
    acks.mkdir(parents=True)
    options = DeliveryOptions(max_retries=1, backoff_base=0.01, cb_reset=1.0)
    sinks: dict[str, Any] = {
        "a": Runner(ToldSink(tmp_path / "a"), acks, "a", options),
        "b": running.run(TestSink(tmp_path, "b"), acks, "b", timeout=600),
        "c": Runner(FolderSink(tmp_path / "c"), acks, "c", options),
    }
    made.sinks = sinks
    made.seen.tell("a", "")
    yield made
    made.seen.tell("a", "")
    made.stop()
    with contextlib.suppress(Exception):
        made.wait(30)


def keys(run: Run, name: str) -> list[int]:
    parts = sorted((run.folder / name).glob("*.jsonl"))
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    return sorted(int(one["payload"]["row"]["id"]) for one in lines)


@pytest.mark.parametrize(
    ("what", "why", "grace_s"),
    [("fail", "failed (the disk is full", 20.0), pytest.param("block", "is slow", 3.0, marks=pytest.mark.slow)],
)
def test_one_sink_fails_in_the_executors_and_the_others_go_on(
    run: Run, database: Database, monkeypatch: pytest.MonkeyPatch, what: str, why: str, grace_s: float
) -> None:
    monkeypatch.setattr("pgcdc.run.lane.LARGE_GRACE_S", grace_s)
    with psycopg.connect(database.url, autocommit=True) as conn:
        conn.execute("CREATE TABLE items (id bigint PRIMARY KEY)")

        def insert(first: int, last: int) -> None:
            conn.execute("INSERT INTO items SELECT generate_series(%s::int, %s)", [first, last])
            wait_until(lambda: keys(run, "c") == list(range(1, last + 1)), 20, f"c has {last}: {run.lines}")
            run.seen.wait_for("b", last)

        run.begin()
        run.seen.tell("a", what)
        insert(1, 500)
        wait_until(lambda: run.seen.is_out("a"), 20, f"a leaves: {run.lines}")
        wait_until(lambda: run.said(f"adapter a {why}"), 20, f"it is said why: {run.lines}")
        assert keys(run, "a") == []
        insert(501, 1000)  # large again: main goes on while a's lane stands where it was
        run.seen.tell("a", "")
        wait_until(lambda: keys(run, "a") == list(range(1, 1001)), 30, f"a has everything: {run.lines}")
        wait_until(lambda: not run.seen.is_out("a"), 30, f"a rejoins: {run.lines}")
        insert(1001, 1002)
        wait_until(lambda: keys(run, "a") == list(range(1, 1003)), 20, f"a has everything: {run.lines}")
    run.end()
