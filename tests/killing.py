"""Kills parts of a running `pgcdc listen`, for crash tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Protocol

import psutil
import psycopg
import pytest
from listening import Listener, wait_until

from pgcdc.playground.postgres import EmbeddedPostgres


def daemons() -> list[psutil.Process]:
    """The processes that workers of tasks are forked from; each has its own path to what it imported."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            found += [one] if one.cmdline()[-2:] == ["pgcdc.spark.daemon", "pyspark.worker"] else []
    return [one for one in found if one.parent() not in found]


class Traffic(Protocol):
    """What changes the database meanwhile."""

    @property
    def commits(self) -> int: ...


class Killer:
    """Kills parts of a pipeline at random moments while changes are in flight."""

    def __init__(self, one: Listener, server: EmbeddedPostgres, traffic: Traffic, seed: int) -> None:
        self.one, self.server, self.traffic = one, server, traffic
        self.random = random.Random(seed)

    def round(self, target: str) -> None:
        self.wait_for_flight()
        before = self.traffic.commits
        getattr(self, f"kill_{target}")()
        wait_until(lambda: self.traffic.commits > before + 5, 60, "traffic goes on after the kill")
        lsn = self.one.delivered_lsn()
        wait_until(lambda: self.one.delivered_lsn() > lsn, 120, f"delivery goes on after the kill of {target}")

    def wait_for_flight(self) -> None:
        """A kill counts only if there are committed changes that the sink does not have yet."""
        time.sleep(self.random.uniform(0.2, 1.5))  # the moment is random, from the seed: that is the point

        def in_flight() -> bool:
            try:
                with psycopg.connect(self.one.url, autocommit=True) as conn:
                    row = conn.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
            except psycopg.Error:
                return False
            return row is not None and int(row[0]) > self.one.delivered_lsn()

        wait_until(in_flight, 30, "changes in flight")

    def kill_capture(self) -> None:
        wait_until(lambda: self.one.capture_pid() is not None, 30, "a capture process")
        pid = self.one.capture_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def kill_worker(self) -> None:
        wait_until(lambda: bool(self.one.worker_pids()), 30, "a Python worker")
        victim = self.random.choice(self.one.worker_pids())
        with pytest.MonkeyPatch.context():
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                self.kill_worker()

    def kill_jvm(self) -> None:
        wait_until(lambda: self.one.jvm_pid() is not None, 30, "a JVM")
        pid = self.one.jvm_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert self.one.wait_exit(60) == 1, self.one.said()
        assert "Spark JVM" in self.one.said()
        self.one.start()

    def kill_driver(self) -> None:
        assert self.one.process is not None
        self.one.process.kill()
        self.one.wait_exit()
        self.one.start()

    def kill_postgres(self) -> None:
        self.server.kill()
        self.server.restart()
