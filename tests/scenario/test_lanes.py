"""Several sinks, one of which blocks or fails: the others go on, it gets everything once and in order, and comes back."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from databases import Database
from laning import Run, TestSink
from listening import wait_until

from pgcdc import adapters, transform
from pgcdc.core.counters import EVENTS_DROPPED, counters
from pgcdc.core.errors import ConfigError, GapError
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.core.state import read_json
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions

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
        with contextlib.suppress(Exception):
            run.wait(30)


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
    wait_until(lambda: run.said("adapter b is slow"), 20, f"it is said: {run.lines}")
    (lane,) = seen.consumers() - {"main"}
    seen.tell("b", "")
    seen.wait_for("b", last)
    wait_until(lambda: not seen.is_out("b"), 20, f"b rejoins: {run.lines}")
    wait_until(lambda: lane not in seen.consumers(), 20, "its lane is forgotten")
    last = writer.write(5)
    for name in run.sinks:
        seen.wait_for(name, last)
    status = {one["adapter"]: one for one in run.status()["lanes"]}
    assert {one["lane"] for one in status.values()} == {"main"}
    run.end()
    check_all(run, last)


def test_a_failing_sink_goes_on_alone_through_a_restart_and_gets_everything(
    start: Callable[..., Run], writer: Writer
) -> None:
    run = start("a", "b")
    run.seen.wait_for("b", writer.write(2))
    run.seen.tell("b", "fail")
    run.seen.wait_for("a", writer.write(1))
    wait_until(lambda: run.seen.is_out("b"), 10, "b leaves")
    run.seen.wait_for("a", writer.write(20))
    wait_until(lambda: run.sinks["b"].writes > 3, 20, "it is tried again and again")
    (status,) = [one for one in run._running_lanes().status() if one["adapter"] == "b"]
    assert status["lane"] == "own" and status["lag_bytes"] > 0
    assert "b was told to fail" in status["last_error"]
    began = time.monotonic()
    run.end()  # a sink that fails for ever does not hold the end up
    assert time.monotonic() - began < 15
    assert run.seen.keys("b") == [1, 2]
    assert run.seen.is_out("b")
    again = start("a", "b")
    last = writer.write(3)
    again.seen.wait_for("a", last)
    assert again.seen.is_out("b")
    again.seen.tell("b", "")
    wait_until(lambda: not again.seen.is_out("b"), 30, f"b rejoins: {again.lines}")
    again.seen.wait_for("b", last)
    again.end()
    check_all(again, last)


def test_a_batch_that_fails_after_a_sink_left_in_it_is_replayed_without_it(
    start: Callable[..., Run], writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("a", "b")
    run.seen.wait_for("b", writer.write(2))
    before = run.seen.ack("b")
    fired: list[str] = []

    def hit(name: str) -> None:
        if name == "lane.written" and not fired and run.seen.is_out("b"):
            fired.append(name)
            raise FailpointError(name)

    monkeypatch.setattr("pgcdc.run.lane.hit", hit)
    run.seen.tell("b", "fail")
    last = writer.write(10)
    run.seen.wait_for("a", last)
    wait_until(lambda: bool(fired), 20, "the batch fails")
    (lane,) = [read_json(run.state.lanes_file)["adapters"]["b"]["start"]]
    assert before is not None and Position.parse(lane) >= before
    assert run.seen.ack("b") == Position.parse(lane), "it begins where the batch began that b does not have"
    last = writer.write(5)
    run.seen.wait_for("a", last)
    run.seen.tell("b", "")
    run.seen.wait_for("b", last)
    wait_until(lambda: not run.seen.is_out("b"), 30, f"b rejoins: {run.lines}")
    run.end()
    check_all(run, last)


def test_adapters_come_and_go_while_it_runs(start: Callable[..., Run], writer: Writer) -> None:
    run = start("a")
    run.seen.wait_for("a", writer.write(3))
    run.sinks["late"] = TestSink(run.folder, "late")
    run.add_adapter(adapters.noop(name="late"))
    assert "late" in run.seen.lanes()
    last = writer.write(5)
    run.seen.wait_for("late", last)
    wait_until(lambda: not run.seen.is_out("late"), 30, f"it joins main: {run.lines}")
    assert run.seen.keys("late") == [4, 5, 6, 7, 8]
    with pytest.raises(ConfigError, match="two adapters are named late"):
        run.add_adapter(adapters.noop(name="late"))
    run.remove_adapter("late")
    assert set(run.seen.lanes()) == {"a"}
    for _ in range(2):  # when the second batch is there, the first one is over
        run.seen.wait_for("a", writer.write(1))
    assert run.seen.keys("late") == [4, 5, 6, 7, 8]
    with pytest.raises(GapError, match="the others continued"):
        run.sinks["late"] = TestSink(run.folder, "late")
        run.add_adapter(adapters.noop(name="late"))
    with pytest.raises(ConfigError, match="adapter 'late' does not exist"):
        run.remove_adapter("late")
    run.end()
    assert run.seen.keys("a") == list(range(1, 11))


def test_a_reload_changes_every_sink_at_a_batch_boundary_while_one_is_away(
    start: Callable[..., Run], writer: Writer
) -> None:
    run = start("a", "b")
    first = writer.write(3)
    for name in "ab":
        run.seen.wait_for(name, first)
    run.seen.tell("b", "fail")
    for number in range(1, 4):
        writer.write(5)
        if number == 2:
            run.seen.tell("b", "")
        own = {name: ([transform.sql({"tag": f"'{name}{number}'"})], ()) for name in "ab"}
        run.reload([transform.sql({"all": f"'{number}'"})], own)
        run.seen.wait_for("a", writer.write(5))
    with pytest.raises(ConfigError, match="adapter 'c' does not exist"):
        run.reload([], {"c": ((), ())})
    with pytest.raises(ConfigError, match="nonsense"):
        run.reload([transform.sql({"tag": "nonsense("})], {})
    run.seen.wait_for("b", writer.last)
    wait_until(lambda: not run.seen.is_out("b"), 30, f"b rejoins: {run.lines}")
    last = writer.write(2)
    for name in "ab":
        run.seen.wait_for(name, last)
    run.end()
    check_all(run, last)
    for name in "ab":
        rows = [event["payload"]["row"] for event in run.seen.events(name)]
        tags = [row.get("tag", "") for row in rows]
        assert tags == sorted(tags), "an older program never follows a newer one"
        assert tags[0] == "" and tags[-1] == f"{name}3"
        assert [row.get("all", "") for row in rows] == [tag[1:] for tag in tags], "both change at once"


def test_once_ends_when_every_lane_is_done(start: Callable[..., Run], writer: Writer) -> None:
    first = start("a", "b")
    first.seen.tell("b", "fail")
    first.seen.wait_for("a", writer.write(2))
    wait_until(lambda: first.seen.is_out("b"), 10, "b leaves")
    first.end()
    last = writer.write(30)
    first.seen.tell("b", "")
    run = start("a", "b", once=True)
    run.wait()
    check_all(run, last)
    assert not run.seen.is_out("b")
    assert run.seen.consumers() == {"main"}


def test_in_fast_mode_a_sink_that_is_too_far_behind_skips_ahead_and_it_is_counted(
    start: Callable[..., Run], writer: Writer
) -> None:
    run = start("a", "b", "c", priorities={"c": "critical"}, bus_mode="fast", bus_buffer=50)
    for name in "abc":
        run.seen.wait_for(name, writer.write(1) if name == "a" else writer.last)
    before = counters.get(EVENTS_DROPPED, adapter="b")
    run.seen.tell("b", "fail")
    run.seen.tell("c", "fail")
    last = writer.write(200)
    run.seen.wait_for("a", last)
    wait_until(lambda: run.said("dropped (--bus-mode fast)"), 20, f"b skips: {run.lines}")
    run.seen.tell("b", "")
    run.seen.tell("c", "")
    last = writer.write(3)
    for name in "bc":
        run.seen.wait_for(name, last)
        wait_until(lambda: not run.seen.is_out("b") and not run.seen.is_out("c"), 30, f"back: {run.lines}")
    run.end()
    kept = run.seen.keys("b")
    dropped = counters.get(EVENTS_DROPPED, adapter="b") - before
    assert 0 < dropped == last - len(kept)
    assert kept == sorted(set(kept)) and kept[0] == 1
    assert run.seen.keys("a") == run.seen.keys("c") == list(range(1, last + 1))
    status = {one["adapter"]: one["dropped"] for one in run.status()["lanes"]}
    assert status == {"a": 0, "b": dropped, "c": 0}


def test_the_end_does_not_wait_for_a_rate_limit(
    spark: SparkSession, database: Database, tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgcdc.run.supervisor.STOP_TIMEOUT_S", 1.0)

    def begin(options: DeliveryOptions) -> Run:
        run = Run(spark, database.url, tmp_path, ["a"])
        sinks: dict[str, Any] = {"a": Runner(TestSink(tmp_path, "a"), run.state.acks, "a", options)}
        run.sinks = sinks
        return run.begin()

    run = begin(DeliveryOptions(rate_limit=10, rate_limit_burst=10))
    writer._conn.execute("INSERT INTO items SELECT g, 'x' FROM generate_series(1, 400) g")
    wait_until(lambda: len(run.seen.keys("a")) > 10, 20, "some are there")
    began = time.monotonic()
    run.end()
    assert time.monotonic() - began < 12
    assert len(run.seen.keys("a")) < 300
    again = begin(DeliveryOptions())
    again.seen.wait_for("a", 400)
    again.end()
    assert again.seen.keys("a") == list(range(1, 401))
