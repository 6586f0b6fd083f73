"""Sentinels in pipelines that run: when the wait is over, the targets have everything that was committed before it began."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from commands import pgcdc
from databases import Database
from laning import Run
from listening import Listener, wait_until

from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.state import Lock
from pgcdc.run.sentinel import Sentinel, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Write = Callable[[int], list[int]]


@pytest.fixture
def write(database: Database) -> Iterator[Write]:
    """Inserts rows, one transaction each; returns the keys of all rows so far."""
    keys: list[int] = []
    with psycopg.connect(database.url, autocommit=True) as conn:
        conn.execute("CREATE TABLE items (id bigint PRIMARY KEY)")

        def insert(count: int) -> list[int]:
            for _ in range(count):
                keys.append(len(keys) + 1)
                conn.execute("INSERT INTO items VALUES (%s)", [keys[-1]])
            return list(keys)

        yield insert


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


def test_the_wait_ends_when_every_target_has_what_was_committed(start: Callable[..., Run], write: Write) -> None:
    run = start("one", "two")
    for count in (300, 1, 40):
        keys = write(count)
        sentinel = run.sentinel()
        assert 0 < sentinel.wait(30) < 30
        assert run.seen.keys("one") == run.seen.keys("two") == keys
        assert sentinel.took_s.keys() == {"one", "two"}
        ack = run.seen.ack("one")
        assert sentinel.position is not None and ack is not None and sentinel.position <= ack
    # At rest nothing but the sentinel itself makes a batch.
    assert run.sentinel().wait(5) < 5
    assert sentinel.position is not None and wait_for(run.state, ["one"]) > sentinel.position
    assert {event["operation"] for event in run.seen.events("one")} == {"INSERT"}


def test_it_holds_beside_small_and_large_transactions(
    start: Callable[..., Run], write: Write, database: Database
) -> None:
    run, committed, is_over = start("one"), [0], threading.Event()

    def insert() -> None:
        with psycopg.connect(database.url, autocommit=True) as conn:
            for number in itertools.count(1):
                if is_over.wait(0.01):
                    return
                first, size = committed[0] + 1, 1 if number % 100 else 10_000
                conn.execute("INSERT INTO items SELECT generate_series(%s::bigint, %s)", [first, first + size - 1])
                committed[0] = first + size - 1

    writer = threading.Thread(target=insert)
    writer.start()
    try:
        for _ in range(5):
            before = committed[0]
            run.sentinel().wait(60)
            keys = run.seen.keys("one")
            assert len(keys) >= before and keys == list(range(1, len(keys) + 1))
    finally:
        is_over.set()
        writer.join()


def test_a_target_that_lacks_it_is_named_with_its_error(start: Callable[..., Run], write: Write) -> None:
    run = start("good", "bad")
    write(1)
    run.sentinel().wait(30)
    run.seen.tell("bad", "fail")
    keys = write(20)
    assert run.sentinel(["good"]).wait(30) > 0
    assert run.seen.keys("good") == keys
    sentinel = run.sentinel()
    with pytest.raises(
        PgcdcError, match=r"adapter bad lacks them \([\d,]+ bytes behind, last error: .*told to fail"
    ) as late:
        sentinel.wait(2)
    assert "adapter good" not in str(late.value) and sentinel.took_s.keys() == {"good"}
    assert run.seen.is_out("bad")
    run.seen.tell("bad", "")  # in its own lane it gets there as well
    sentinel.wait(30)
    assert run.seen.keys("bad") == keys
    with pytest.raises(ConfigError, match=r"adapter 'nobody' does not exist.*good, bad"):
        run.sentinel(["nobody"])


def test_it_becomes_an_event_where_that_is_asked_for(start: Callable[..., Run], write: Write) -> None:
    run = start("one", sentinel_events=True)
    keys = write(3)
    sentinel = run.sentinel()
    sentinel.wait(30)
    *rows, event = run.seen.events("one")
    assert [int(one["payload"]["row"]["id"]) for one in rows] == keys
    assert (event["channel"], event["operation"]) == ("pgcdc:_sentinel", "SENTINEL")
    assert event["payload"]["table"] is None and event["payload"]["row"]["id"] == sentinel.id
    asked_at = datetime.fromisoformat(event["payload"]["row"]["asked_at"])
    assert abs(asked_at - sentinel.asked_at) < timedelta(seconds=5)


def test_a_capture_that_dies_meanwhile_is_asked_again(start: Callable[..., Run], write: Write) -> None:
    run = start("one")
    keys = write(50)
    sentinel = run.sentinel()
    os.kill((Lock.holder(run.state.capture_lock) or {})["pid"], signal.SIGKILL)
    sentinel.position = None  # as if the answer had not come before
    sentinel.wait(60)
    assert run.seen.keys("one") == keys


def test_a_driver_that_dies_meanwhile_is_said_and_the_next_one_serves(
    database: Database, tmp_path: Path, write: Write
) -> None:
    listener = Listener(database.url, tmp_path, "--all-tables", "--sentinel-events")
    try:
        listener.start()
        write(5)
        sentinel = Sentinel(listener.state)
        assert listener.process is not None
        listener.process.kill()
        listener.wait_exit()
        with pytest.raises(StateError, match="no pipeline runs in"):
            sentinel.wait(30)
        asked = pgcdc("sentinel", "--wait", "--state-dir", str(listener.state.path))
        assert asked.returncode == 2 and "Start it with pgcdc listen" in asked.stderr
        wait_until(lambda: listener.capture_pid() is None, 30, "the capture has ended with its driver")
        listener.start()
        keys = write(5)
        asked = pgcdc("sentinel", "--wait", "--state-dir", str(listener.state.path))
        assert asked.returncode == 0, asked.stderr
        assert "all targets have everything that was committed before" in asked.stdout
        rows = [one["payload"]["row"]["id"] for one in listener.events() if one["operation"] == "INSERT"]
        assert rows == [str(key) for key in keys]
        asked = pgcdc("sentinel", "--wait", "--json", "--state-dir", str(listener.state.path))
        said = json.loads(asked.stdout)
        assert said["adapters"].keys() == {"file"} and said["seconds"] > 0
        last = listener.events()[-1]
        assert (last["operation"], last["payload"]["row"]["id"]) == ("SENTINEL", said["id"])
        assert listener.stop() == 0
    finally:
        listener.kill_all()
