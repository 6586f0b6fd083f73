"""`pgcdc verify` as users run it: beside `pgcdc listen`, its output and exit codes, now and then by itself, and repairs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from applying import two_databases
from databases import Database
from listening import wait_until
from mirror_listening import ListeningMirror

from pgcdc.core.state import read_json
from pgcdc.playground.postgres import EmbeddedPostgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def commits(url: str, rate_per_s: float) -> Iterator[list[int]]:
    """Updates of random rows, one commit each."""
    count, ended = [0], threading.Event()

    def write() -> None:
        with psycopg.connect(url, autocommit=True) as conn:
            while not ended.wait(1 / rate_per_s):
                conn.execute("UPDATE items SET n = n + 1 WHERE id = 1 + (random() * 19000)::int")
                count[0] += 1

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield count
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_beside_a_running_pipeline(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with two_databases(postgres) as (source, target):
        with psycopg.connect(source, autocommit=True) as conn:
            conn.execute("CREATE TABLE items (id int PRIMARY KEY, n int, word text)")
        one = ListeningMirror(source, target, tmp_path, "--all-tables")
        try:
            one.start()
            with psycopg.connect(source, autocommit=True) as conn:
                conn.execute("INSERT INTO items SELECT n, 0, 'w' || n FROM generate_series(1, 20000) n")
            with commits(source, 200) as count:  # by each of two threads, less what a commit takes
                while count[0] < 3000:
                    done = one.verify("--json")
                    assert done.returncode == 0, done.stdout + done.stderr
                    found = json.loads(done.stdout)
                    assert (found["verdict"], found["tables"][0]["rows"]) == ("equal", 20000)
            with psycopg.connect(target, autocommit=True) as conn:
                conn.execute("DELETE FROM items WHERE id = 19999")
                conn.execute("UPDATE items SET word = 'wrong' WHERE id = 20000")
            done = one.verify()
            assert done.returncode == 1
            assert 'pg_table, table items: missing: ["19999"]' in done.stdout
            assert 'pg_table, table items: different: ["20000"]' in done.stdout
            assert "different at 0" in done.stdout
            assert one.stop() == 0, one.said()
            one.start("--verify-every", "2s")
            wait_until(lambda: "verify: different at" in one.said(), 60, "it is said by itself")
            status = [sys.executable, "-m", "pgcdc", "status", "--state-dir", str(one.state.path)]
            shown = subprocess.run(status, capture_output=True, text=True, timeout=60, check=True).stdout
            assert "1 missing, 1 different" in shown
            assert one.stop() == 0, one.said()
            done = one.verify()
            assert done.returncode == 2 and "is not running" in done.stderr and "--at-rest" in done.stderr
            assert one.verify("--at-rest").returncode == 1
            one.url = target
            done = one.verify("--at-rest")
            assert done.returncode == 2 and "belongs to" in done.stderr
            assert read_json(one.state.path / "verify_last.json")["adapters"]["pg_table"]["missing"] == 1
        finally:
            one.kill_all()


def test_wrong_commands_are_refused(database: Database, tmp_path: Path) -> None:
    one = ListeningMirror(database.url, database.url, tmp_path, "--all-tables")
    for flags, text in (
        ((), "is not a state directory"),
        (("--keys", "-1"), "--keys"),
        (("--adapter", "webhook"), "webhook"),
    ):
        done = one.verify(*flags)
        assert done.returncode == 2 and text in done.stderr, done.stderr
