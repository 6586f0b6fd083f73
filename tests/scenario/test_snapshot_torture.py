"""Snapshots while eight writers hammer the tables, and parts of the pipeline are killed: every row once, none older."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from listening import ConfirmWatch, Listener, wait_until
from proving import KEYS, Hammer, SnapshotKiller, ask, assert_equal, capture_status, create_tables, progress

from pgcdc.playground.postgres import EmbeddedPostgres

TARGETS = ["driver", "capture", "worker", "postgres"]
PERCENT = [10, 50, 90]
ROWS, WIDE = 120_000, 3_000
FEWER_ROWS, FEWER_WIDE = 30_000, 1_000
SMALL = ("--spool-limit", "2MB", "--max-batch-rows", "20000")
"""Rows are published only as fast as they are delivered: then there is a time for each percent of the snapshot."""
CHUNK = {"chunk_size": 2_000, "chunk_delay_s": 0.1}


@contextmanager
def pipeline(folder: Path, rows: int, wide: int) -> Iterator[tuple[Listener, EmbeddedPostgres, int]]:
    """A server with full tables, and a pipeline that is not started yet; and a seed, which is printed."""
    seed = int(os.environ.get("PGCDC_SEED", "0")) or random.randrange(1 << 30)
    print(f"seed {seed}")
    with EmbeddedPostgres.temporary(settings={"synchronous_commit": "on", "max_wal_size": "4GB"}) as server:
        with psycopg.connect(server.url(), autocommit=True) as conn:
            create_tables(conn, rows, wide)
        one = Listener(server.url(), folder, "--all-tables", "--snapshot-mode", "initial", *SMALL)
        try:
            yield one, server, seed
        finally:
            one.kill_all()


def finish(one: Listener, hammer: Hammer, *, resynced: bool = False) -> None:
    """Everything is delivered; what the file has is what the database has."""
    hammer.stop()
    one.wait_delivered(300)
    assert one.stop() == 0, one.said()
    assert hammer.commits > 100 and hammer.rollbacks > 0
    assert_equal(one.url, one.events(), resynced=resynced)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_initial_snapshot_under_writers_and_kills(tmp_path: Path, target: str) -> None:
    with pipeline(tmp_path, ROWS, WIDE) as (one, server, seed):
        one.start(wait=False)
        with Hammer(one.url, seed, rows=ROWS, wide=WIDE) as hammer, ConfirmWatch(one) as watch:
            killer = SnapshotKiller(one, server, hammer, seed, "initial")
            for percent in PERCENT:
                killer.kill_at(percent, target)
            killer.wait_for(lambda now: now == 100, "the snapshot is complete", 600)
            finish(one, hammer)
        assert watch.violations == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_incremental_snapshots_under_writers_and_kills(tmp_path: Path, target: str) -> None:
    with pipeline(tmp_path, FEWER_ROWS, FEWER_WIDE) as (one, server, seed):
        one.start()
        wait_until(lambda: progress(one, "initial") == 100, 300, "the initial snapshot is complete")
        with Hammer(one.url, seed, rows=FEWER_ROWS, wide=FEWER_WIDE) as hammer, ConfirmWatch(one) as watch:
            for table, key in KEYS.items():
                if key:
                    ask(one, action="add", table=table, **CHUNK)
            killer = SnapshotKiller(one, server, hammer, seed, "incremental")
            for percent in PERCENT:
                killer.kill_at(percent, target)
            killer.wait_for(lambda now: now == 100, "the snapshots are complete", 600)
            finish(one, hammer)
        assert watch.violations == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["driver", "postgres"])
def test_a_resync_after_a_lost_slot_under_writers_and_a_kill(tmp_path: Path, target: str) -> None:
    with pipeline(tmp_path, FEWER_ROWS, FEWER_WIDE) as (one, server, seed):
        one.start()
        with Hammer(one.url, seed, rows=FEWER_ROWS, wide=FEWER_WIDE) as hammer:
            wait_until(lambda: progress(one, "initial") == 100, 300, "the initial snapshot is complete")
            assert one.stop() == 0, one.said()
            with psycopg.connect(one.url, autocommit=True) as conn:
                conn.execute("SELECT pg_drop_replication_slot(%s)", [one.slot])
                conn.execute("DELETE FROM one WHERE id % 3 = 0")
            commits = hammer.commits
            wait_until(lambda: hammer.commits > commits + 100, 60, "changes that nobody will ever see")
            command = [sys.executable, "-m", "pgcdc", "resync", "--yes", "--state-dir", str(one.state.path)]
            subprocess.run(command, env={**os.environ, "PGCDC_DB": one.url}, check=True, timeout=300)
            one.start(wait=False)
            SnapshotKiller(one, server, hammer, seed, "initial").kill_at(10, target)
            wait_until(lambda: progress(one, "initial") == 100, 600, "the snapshot is complete")
            wait_until(lambda: progress(one, "vanished") == 100, 600, "deleted that the source no longer has")
            finish(one, hammer, resynced=True)
        asked = capture_status(one)["snapshots"]
        assert sum(snapshot["rows"] for snapshot in asked if snapshot["kind"] == "vanished") >= FEWER_ROWS // 4
