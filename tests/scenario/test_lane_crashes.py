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

from pgcdc.state import Lock


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


SOME = [("fail then recover", "lanes.saved=kill@2")]
"""What b does, and where the driver is killed: in a rejoin, after a leave."""
ALL = [
    *SOME,
    ("fail", "lanes.before_join=kill"),
    ("fail", "lanes.joined=kill"),
    ("fail", "lanes.before_save=kill"),
    ("fail", "lanes.saved=kill"),
    ("", "lanes.before_save=kill"),
    ("", "lanes.saved=kill"),
    ("fail", "lanes.before_forget=kill"),
    ("block then recover", "lanes.saved=kill@2"),
    ("block", "lanes.forgotten=kill"),
    ("block", "lanes.saved=kill"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
def test_kill_9_in_the_middle_of_a_move_loses_and_repeats_nothing(
    child: Child, database: Database, rounds: list[tuple[str, str]]
) -> None:
    seen = child.seen
    traffic: Traffic | None = None
    with psycopg.connect(database.url, autocommit=True) as conn:
        for what, failpoint in rounds:
            seen.tell("b", what.partition(" ")[0])
            traffic = traffic or Traffic(database.url)
            child.start(failpoint, wait=False)
            if what.endswith("then recover"):
                wait_until(lambda: bool(seen.lanes()) and seen.is_out("b"), 90, "b leaves")
                seen.tell("b", "")
            assert child.wait_exit(120) == -signal.SIGKILL, child.log.read_text()[-2000:]
            wait_until(lambda: Lock.holder(child.folder / "state" / "capture.lock") is None, 20, "the capture ends")
            row = conn.execute("SELECT max(confirmed_flush_lsn) - '0/0'::pg_lsn FROM pg_replication_slots").fetchone()
            assert row is not None
            for name in "ab":
                ack = seen.ack(name)
                assert ack is not None and ack.lsn >= int(row[0]), f"{name} is behind what was confirmed"
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
    assert seen.keys("a") == seen.keys("b") == list(range(1, last + 1))
