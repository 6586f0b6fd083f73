"""Kill -9 of the driver in the middle of a move: every sink has every change once, in order, nothing confirmed early."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database
from laning import Child
from listening import wait_until

from pgcdc.core.state import Lock


class Traffic:
    """Inserts rows with keys that count up, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.last = 0
        self._url = url
        self._ended = threading.Event()
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as conn:
            while not self._ended.wait(0.02):
                conn.execute("INSERT INTO items VALUES (%s)", [self.last + 1])
                self.last += 1

    def stop(self) -> int:
        self._ended.set()
        self._thread.join(10)
        return self.last


@pytest.fixture
def child(database: Database, tmp_path: Path) -> Iterator[Child]:
    one = Child(database.url, tmp_path, ["a", "b"])
    yield one
    one.kill()


SOME = [("in", "fail", "lanes.saved=kill@2")]
"""Where b is before the driver starts, what it does then, and where the driver is killed. (The first start saves, too.)"""
ALL = [
    *SOME,
    ("out", "fail", "lanes.before_join=kill"),
    ("out", "", "lanes.joined=kill"),
    ("out", "", "lanes.before_save=kill"),
    ("out", "", "lanes.saved=kill"),
    ("out", "", "lanes.before_forget=kill"),
    ("out", "", "lanes.forgotten=kill"),
    ("in", "fail", "lanes.before_join=kill"),
    ("in", "fail", "lanes.joined=kill"),
    ("in", "fail", "lanes.before_save=kill"),
    ("in", "block", "lanes.before_save=kill"),
    ("in", "block", "lanes.saved=kill"),
]


def bring(child: Child, where: str) -> None:
    """Have b in main or out of it, and no driver."""
    seen = child.seen
    if seen.lanes() and seen.is_out("b") != (where == "out"):
        seen.tell("b", "fail" if where == "out" else "")
        child.start()
        wait_until(lambda: seen.is_out("b") == (where == "out"), 90, f"b is {where}")
        child.kill()
        wait_until(lambda: Lock.holder(child.folder / "state" / "capture.lock") is None, 20, "the capture ends")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rounds", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
def test_kill_9_in_the_middle_of_a_move_loses_and_repeats_nothing(
    child: Child, database: Database, rounds: list[tuple[str, str, str]]
) -> None:
    seen = child.seen
    traffic: Traffic | None = None
    with psycopg.connect(database.url, autocommit=True) as conn:
        for where, what, failpoint in rounds:
            bring(child, where)
            seen.tell("b", what)
            traffic = traffic or Traffic(database.url)
            child.start(failpoint, wait=False)
            assert child.wait_exit(120) == -signal.SIGKILL, child.log.read_text()[-2000:]
            wait_until(lambda: Lock.holder(child.folder / "state" / "capture.lock") is None, 20, "the capture ends")
            row = conn.execute("SELECT max(confirmed_flush_lsn) - '0/0'::pg_lsn FROM pg_replication_slots").fetchone()
            assert row is not None
            for name in "ab":
                ack = seen.ack(name)
                assert ack is not None and ack.commit >= int(row[0]), f"{name} is behind what was confirmed"
                assert traffic.last > (seen.keys(name) or [0])[-1], "changes must be in flight"
        assert traffic is not None
        seen.tell("b", "")
        child.start()
        wait_until(lambda: not seen.is_out("b"), 60, "b rejoins")
        last = traffic.stop()
        for name in "ab":
            seen.wait_for(name, last, 60)
        wait_until(lambda: seen.consumers() == {"main"}, 30, "no lane is left over")
        assert child.stop() == 0
    first_key = seen.keys("a")[0]
    for name in "ab":
        assert seen.keys(name) == list(range(first_key, last + 1)), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sink_that_blocks_for_ever_does_not_keep_the_process_from_ending(child: Child, database: Database) -> None:
    seen = child.seen
    child.start()
    traffic = Traffic(database.url)
    seen.tell("b", "block")
    wait_until(lambda: seen.is_out("b"), 60, "b leaves")
    assert child.stop() == 0
    assert "adapter b did not finish its batch" in child.log.read_text() or seen.keys("b") == []
    seen.tell("b", "")
    child.start()
    wait_until(lambda: not seen.is_out("b"), 60, "b rejoins")
    last = traffic.stop()
    for name in "ab":
        seen.wait_for(name, last, 60)
    assert child.stop() == 0
    first = seen.keys("a")[0]  # a table that is created later is captured from when it was noticed
    assert seen.keys("a") == seen.keys("b") == list(range(first, last + 1))
