"""A snapshot that is held for others: all read the same moment, and it ends with the driver or when nobody reads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from databases import Database
from listening import wait_until

from pgcdc.core.errors import SourceError
from pgcdc.source.postgres.snapshot.held import HeldSnapshot, hold_snapshot, read_in_snapshot


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives as long as the test wants."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def count(url: str, held: HeldSnapshot | None) -> int:
    with read_in_snapshot(url, held) as conn:
        row = conn.execute("SELECT count(*) FROM t").fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture(params=["forked", "started"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to get a process that holds it."""
    monkeypatch.setattr(threading, "active_count", lambda: 1 if request.param == "forked" else 2)


def holders(database: Database) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = 'pgcdc snapshot'"
    return int(database.query(query, [database.name])[0][0])


@pytest.mark.usefixtures("way")
def test_everybody_reads_the_same_moment_until_the_driver_ends(
    database: Database, driver: subprocess.Popen[bytes]
) -> None:
    database.execute("CREATE TABLE t AS SELECT generate_series(1, 10) AS id")
    held = hold_snapshot(database.url, watch_pid=driver.pid, keep_s=60)
    database.execute("INSERT INTO t VALUES (11)")
    assert [count(database.url, held) for _ in range(2)] == [10, 10] and count(database.url, None) == 11
    driver.kill()
    driver.wait()
    wait_until(lambda: holders(database) == 0, 10, "the snapshot is released")
    with pytest.raises(SourceError, match=r"no longer held\. Load it again"):
        count(database.url, held)


@pytest.mark.usefixtures("way")
def test_a_snapshot_that_nobody_reads_is_released_and_one_that_is_read_is_not(
    database: Database, driver: subprocess.Popen[bytes]
) -> None:
    database.execute("CREATE TABLE t AS SELECT generate_series(1, 10) AS id")
    held = hold_snapshot(database.url, watch_pid=driver.pid, keep_s=1.5)
    with read_in_snapshot(database.url, held) as conn:
        until = time.monotonic() + 3
        wait_until(lambda: time.monotonic() > until, 10, "longer than it is kept without a reader")
        assert holders(database) == 1 and conn.execute("SELECT count(*) FROM t").fetchone() == (10,)
    wait_until(lambda: holders(database) == 0, 10, "the snapshot is released")


def test_readers_cannot_write(database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    with read_in_snapshot(database.url, None) as conn, pytest.raises(Exception, match="read-only transaction"):
        conn.execute("INSERT INTO t VALUES (1)")


@pytest.mark.usefixtures("way")
def test_what_is_wrong_is_said_by_who_asked(database: Database, driver: subprocess.Popen[bytes]) -> None:
    with pytest.raises(SourceError, match="cannot connect to"):
        hold_snapshot(database.url + "_not", watch_pid=driver.pid, keep_s=60)
