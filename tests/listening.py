"""`pgcdc listen` as a user runs it, for scenario tests: start, wait, kill, and look at what it delivered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import contents
import psutil
import psycopg

from pgcdc.capture.control import ControlClient
from pgcdc.capture.server import CaptureGone
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.playground import shop

START_TIMEOUT_S = 90.0


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Wait for a condition, never for luck. `what` may say how it stands when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


class Listener:
    """One `pgcdc listen --adapter file` with its state directory; may be started again after it ended."""

    adapter = "file"

    def __init__(
        self, url: str, folder: Path, *flags: str, slot: str = "s1", env: Mapping[str, str] | None = None
    ) -> None:
        self.url = url
        self.folder = folder
        self.flags = flags or ("--all-tables",)
        if not any(
            flag in self.flags for flag in ("--snapshot-mode", "--snapshot-first", "--start-from", "--temporary-slot")
        ):
            self.flags = (*self.flags, "--snapshot-mode", "never")
        self.slot = slot
        self.env = dict(env or {})
        self.state = StateDir(folder / "state")
        self.output = folder / "events.jsonl"
        self.log = folder / "listen.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, wait: bool = True, env: Mapping[str, str] | None = None) -> None:
        assert self.process is None or self.process.poll() is not None
        command = [
            *(sys.executable, "-m", "pgcdc", "listen", "--slot-name", self.slot, "--state-dir", str(self.state.path)),
            *("--adapter", self.adapter, *self.adapter_flags(), "--no-warm-up", *self.flags, *more),
        ]
        self._mark = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stderr=log, stdout=log, env={**os.environ, "PGCDC_DB": self.url, **self.env, **(env or {})}
            )
        if wait:
            self.wait_ready()

    def adapter_flags(self) -> tuple[str, ...]:
        return "--file-path", str(self.output)

    def said(self) -> str:
        """What this run has printed."""
        return self.log.read_bytes()[self._mark :].decode()

    def wait_ready(self) -> None:
        assert self.process is not None
        process = self.process

        def is_ready() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"listen ended with {process.returncode}: {self.said()}")
            return "pgcdc: ready" in self.said()

        wait_until(is_ready, START_TIMEOUT_S, "pgcdc says ready")

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill_all(self) -> None:
        """End everything at once: for the end of a test that failed."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    # --- its processes

    def capture_pid(self) -> int | None:
        holder = Lock.holder(self.state.capture_lock)
        return holder.get("pid") if holder else None

    def jvm_pid(self) -> int | None:
        assert self.process is not None
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return None
        return next((child.pid for child in children if child.name() == "java"), None)

    def worker_pids(self) -> list[int]:
        """Python processes of Spark (the source's, and those of tasks)."""
        jvm = self.jvm_pid()
        if jvm is None:
            return []
        found = []
        for child in psutil.Process(jvm).children(recursive=True):
            try:
                if "pyspark" in " ".join(child.cmdline()):
                    found.append(child.pid)
            except psutil.Error:
                continue
        return found

    # --- what it did

    def events(self) -> list[dict[str, Any]]:
        """The events in the file that are covered by the ack (behind them may be a batch in progress)."""
        detail = self.ack_detail()
        data = self.output.read_bytes()[: detail["size"]] if detail else b""
        return [json.loads(line) for line in data.splitlines()]

    def ack_detail(self) -> dict[str, Any] | None:
        path = self.state.acks / "file.json"
        return json.loads(path.read_text())["detail"] if path.exists() else None

    def ack(self) -> Position | None:
        path = self.state.acks / f"{self.adapter}.json"
        text = json.loads(path.read_text())["position"] if path.exists() else None
        return Position.parse(text) if text else None

    def delivered_lsn(self) -> int:
        ack = self.ack()
        return ack.commit if ack else 0

    def wait_delivered(self, timeout_s: float = 60.0) -> None:
        """Until everything that is committed now is in the file."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            row = conn.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        target = int(row[0])
        holder = Lock.holder(self.state.capture_lock)
        if holder and "address" in holder:
            # Hurry: do not wait for the next idle progress. A capture that was killed just now is asked by its successor.
            with contextlib.suppress(CaptureGone), contextlib.closing(ControlClient(holder["address"])) as client:
                client.target()

        def is_delivered() -> bool:
            if self.delivered_lsn() >= target:
                return True
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"listen ended with {self.process.returncode}: {self.said()[-2000:]}")
            return False

        wait_until(is_delivered, timeout_s, lambda: f"delivery up to {target:X}: {self.describe()}")

    def describe(self) -> str:
        """What it does now, for a test that waited in vain."""
        command = [sys.executable, "-m", "pgcdc", "status", "--json", "--state-dir", str(self.state.path)]
        status = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        log = self.state.path / "spark.log"
        spark = log.read_text()[-2000:] if log.exists() else ""
        return f"ack {self.ack()}\nstatus {status.stdout}{status.stderr}\nsaid {self.said()[-1500:]}\nspark.log {spark}"


def check_equal(one: Listener, *others: str) -> None:
    """The folded output equals the source tables: nothing lost, nothing twice, in order per key. `others` are left out."""
    events = one.events()
    positions = [event["position"] for event in events]
    assert positions == sorted(positions)
    assert len(set(positions)) == len(positions)
    assert len({event["id"] for event in events}) == len(events)
    with psycopg.connect(one.url, autocommit=True) as conn:
        source = contents.read_tables(conn, shop.KEYS)
    of_shop = [event for event in events if event["payload"]["table"] not in others]
    assert contents.differences(source, contents.fold_events(of_shop, shop.KEYS, strict=True)) == []
    assert sum(len(rows) for rows in source.values()) > 0


class ConfirmWatch:
    """Polls `confirmed_flush_lsn` all the time: it must never be ahead of the sink, nor of Spark's checkpoint."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._ended = threading.Event()
        self.polls = 0
        self.moves = 0
        self.violations: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ConfirmWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def _run(self) -> None:
        last = 0
        while not self._ended.wait(0.005):
            try:
                with psycopg.connect(self._listener.url, autocommit=True, connect_timeout=2) as conn:
                    while not self._ended.wait(0.005):
                        last = self._look(conn, last)
            except psycopg.Error:
                continue  # the server is being killed

    def _look(self, conn: psycopg.Connection[Any], last: int) -> int:
        row = conn.execute(
            "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s",
            [self._listener.slot],
        ).fetchone()
        if row is None or row[0] is None:
            return last
        confirmed = int(row[0])
        self.polls += 1
        self.moves += confirmed > last
        # Read after the slot: both only grow, so being behind now means having been behind then.
        ack = self._listener.delivered_lsn()
        if ack and confirmed > ack:
            self.violations.append(f"confirmed {confirmed:X} is ahead of the sink's {ack:X}")
        committed = self._committed()
        if committed is not None and confirmed > committed:
            self.violations.append(f"confirmed {confirmed:X} is ahead of Spark's {committed:X}")
        return confirmed

    def _committed(self) -> int | None:
        folder = self._listener.state.checkpoints / "main"
        commits = [int(path.name) for path in (folder / "commits").glob("[0-9]*") if path.name.isdigit()]
        if not commits:
            return None
        lines = (folder / "offsets" / str(max(commits))).read_text().splitlines()
        return Position.from_offset(json.loads(lines[2])).commit
