"""`pgcdc listen` with an initial snapshot, as users run it: with Spark, and with a driver that is killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import contents
import psycopg
import pytest
from databases import Database
from initials import fill, writers
from listening import Listener, wait_until

from pgcdc.capture.control import ask
from pgcdc.core.state import Lock


def check(one: Listener) -> None:
    events = [event for event in one.events() if event["channel"] == "pgcdc:t"]
    positions = [event["position"] for event in one.events()]
    assert positions == sorted(set(positions))
    with psycopg.connect(one.url, autocommit=True) as conn:
        source = contents.read_tables(conn, ["public.t"])
    assert contents.differences(source, contents.fold_events(events, {"public.t": ["id"]}, strict=True)) == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_once_delivers_rows_and_changes_though_the_driver_is_killed(database: Database, tmp_path: Path) -> None:
    fill(database, "t", 3000)
    environment = {"PGCDC_SNAPSHOT_CHUNK_BYTES": "65536", "PGCDC_FAILPOINT_ONCE": str(tmp_path)}
    one = Listener(database.url, tmp_path, "--once", "--all-tables", "--snapshot-first", slot=f"s_{database.name}")
    one.start(wait=False, env={**environment, "PGCDC_FAILPOINTS": "lane.collected=kill@1"})
    assert one.wait_exit(120) == -9, one.said()
    database.execute("UPDATE t SET v = 'later' WHERE id < 5; DELETE FROM t WHERE id = 7")
    one.start(wait=False, env=environment)
    assert one.wait_exit(120) == 0, one.said()
    check(one)
    assert "is delivered and confirmed" in one.said()
    command = [sys.executable, "-m", "pgcdc", "status", "--state-dir", str(one.state.path), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert report["snapshot"].startswith("initial snapshot: 3,000 rows of 1 tables")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_writers_kills_of_the_driver_and_a_stop_in_the_middle(database: Database, tmp_path: Path) -> None:
    fill(database, "t", 60_000)
    environment = {"PGCDC_SNAPSHOT_CHUNK_BYTES": "65536"}
    one = Listener(
        database.url, tmp_path, "--all-tables", "--snapshot-first", slot=f"s_{database.name}", env=environment
    )

    def rows() -> int:
        status = ask(one.state.capture_lock, {"do": "status"})
        found = status.get("initial_snapshot") or {}
        return sum(table["rows"] for table in found.get("tables", []))

    try:
        with writers(database, "t", 5, 60_000):
            for number, percent in enumerate((10, 50, 90)):
                one.start()
                wait_until(lambda percent=percent: rows() >= 600 * percent, 120, f"{percent} %")  # type: ignore[misc]
                if number == 1:
                    assert one.stop() == 0, one.said()
                else:
                    assert one.process is not None
                    one.process.kill()
                    one.wait_exit()
                    wait_until(lambda: Lock.holder(one.state.capture_lock) is None, 20, "the capture ends")
            one.start()
        one.wait_delivered(120)
        check(one)
        assert "lost" not in (one.state.path / "capture.log").read_text()
        assert os.listdir(one.state.snapshot)
    finally:
        one.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_initial_only_ends_by_itself_and_the_changes_follow_later(database: Database, tmp_path: Path) -> None:
    fill(database, "t", 500)
    one = Listener(database.url, tmp_path, "--all-tables", "--snapshot-mode", "initial_only", slot=f"s_{database.name}")
    one.start(wait=False)
    assert one.wait_exit(120) == 0 and "the existing rows are delivered. The slot remains" in one.said()
    assert {event["operation"] for event in one.events()} == {"SNAPSHOT_STARTED", "SNAPSHOT", "SNAPSHOT_COMPLETED"}
    database.execute("INSERT INTO t VALUES (-1, 'between', '')")
    one.flags = ("--all-tables", "--once")
    one.start(wait=False)
    assert one.wait_exit(120) == 0, one.said()
    check(one)
