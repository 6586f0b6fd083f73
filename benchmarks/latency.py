"""`pgcdc listen` as a user runs it: the time to its first event, its latency, and what it costs when nothing happens."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson
from usage import cpu_of_tree, cpu_since, pss_of_tree
from workload import PUBLICATION, Writer, connect, drop_slot, insert_row, new_slot

from pgcdc.cli.status import read_status

__all__ = [
    "Command", "Idle", "Listener", "busy_core", "commit_time", "listen_command", "listener", "measure_idle",
    "measure_latency", "measure_once", "measure_start", "tail",
]  # fmt: skip

READY_TIMEOUT_S = 120.0
POLL_S = 0.001
"""Of the state directory: milliseconds (or text) by the name of a part of a batch."""


Command = Callable[[str, Path], list[str]]


def listen_command(slot: str, folder: Path) -> list[str]:
    """`pgcdc listen` with a file, on a slot that exists."""
    command = [sys.executable, "-m", "pgcdc.cli.main", "listen", "--slot-name", slot, "--publication", PUBLICATION]
    if shutil.which("pgcdc", path=str(Path(sys.executable).parent)):
        command[:3] = [str(Path(sys.executable).parent / "pgcdc")]
    command += ["--adapter", "file", "--file-path", str(folder / "events.jsonl"), "--state-dir", str(folder / "state")]
    return [*command, "--start-from", "slot"]


class Listener:
    """A running `pgcdc listen --adapter file` on a slot that exists."""

    def __init__(
        self, url: str, slot: str, folder: Path, command: Command | None = None, more: dict[str, str] | None = None
    ) -> None:
        """`command`: another one that writes to the same file. `more`: for its environment."""
        self.path = folder / "events.jsonl"
        self.started = time.time()
        words = (command or listen_command)(slot, folder)
        environment = {**os.environ, "PGCDC_DB": url, **(more or {})}
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
        self._trouble = ""  # What makes figures those of something else
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_ready(self) -> None:
        """Until it says that it is ready."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        with contextlib.suppress(queue.Empty):
            while True:
                text = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
                if "ready" in text:
                    return
                if not text:
                    raise RuntimeError(f"pgcdc listen ended with code {self.process.wait()}")
        raise TimeoutError(f"pgcdc listen was not ready within {READY_TIMEOUT_S:.0f} s")

    def wait_line(self) -> float:
        """When the first line was in the file."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path).st_size:
                    return time.time()
            if self.process.poll() is not None:
                raise RuntimeError(f"pgcdc listen ended with code {self.process.returncode}")
            time.sleep(0.005)
        raise TimeoutError(f"no event within {READY_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """SIGTERM, and its exit code must be 0. Raises if it did not take the short ways."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        if code or self._trouble:
            raise RuntimeError(self._trouble or f"pgcdc listen ended with code {code}")

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._trouble = self._trouble or (line.strip() if "slower way through Spark" in line else "")
            self._said.put(line)
        self._said.put("")


@contextlib.contextmanager
def listener(
    url: str, slot: str, *, waiting: bool = False, command: Command | None = None, more: dict[str, str] | None = None
) -> Iterator[Listener]:
    """A listener on a new slot; with `waiting`, one commit is already there."""
    with connect(url) as conn:
        new_slot(conn, slot)
        if waiting:
            conn.execute("TRUNCATE waiting")
            insert_row(conn, "waiting", 1)
        folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
        try:
            running = Listener(url, slot, folder, command, more)
            try:
                yield running
            except BaseException:
                running.process.kill()
                running.process.wait()
                raise
            running.stop()
        finally:
            drop_slot(conn, slot)
            shutil.rmtree(folder, ignore_errors=True)


def measure_latency(
    url: str,
    *,
    warm_s: float,
    seconds: float,
    rate_per_s: float,
    command: Command | None = None,
    say: Callable[[str], None] | None = None,
) -> list[float]:
    """Milliseconds from commit (the server's time, same clock) to the line being in the file. `say` gets the parts of a
    batch."""
    arrivals: list[float] = []
    with listener(url, "bench_latency", command=command) as running:
        running.wait_ready()
        with Writer(url, rate_per_s):
            begin = time.time() + warm_s
            tail(running.path, arrivals, begin + seconds)
        tail(running.path, arrivals, time.time() + 1)
        commits = [commit_time(line) for line in running.path.read_bytes().splitlines()]
        if say is not None:
            parts = read_status(running.path.parent / "state")["batch_ms"]
            say(f"medians of a batch, in ms from its announcement and then from step to step: {parts}")
    pairs = zip(commits, arrivals, strict=False)
    return [(arrival - commit) * 1e3 for commit, arrival in pairs if begin <= commit < begin + seconds]


def tail(path: Path, arrivals: list[float], until: float) -> None:
    """Add the arrival time of every new line: a line has arrived when the file is that long."""
    with open(path, "rb") as file:
        lines = 0
        size = 0
        known = len(arrivals)
        while time.time() < until:
            time.sleep(POLL_S)
            now = time.time()
            if os.fstat(file.fileno()).st_size == size:
                continue
            piece = file.read()
            size += len(piece)
            lines += piece.count(b"\n")
            arrivals += [now] * (lines - known)
            known = max(known, lines)


def commit_time(line: bytes) -> float:
    """When the change of an event was committed."""
    return datetime.fromisoformat(orjson.loads(line)["created_at"]).timestamp()


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy meanwhile."""
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        load.kill()
        load.wait()


def measure_start(url: str, slot: str, more: dict[str, str] | None = None) -> float:
    """Seconds from the start of the process to its first event in the file; the commit was waiting."""
    with listener(url, slot, waiting=True, more=more) as running:
        return running.wait_line() - running.started


def measure_once(url: str, slot: str, more: dict[str, str] | None = None) -> float:
    """Seconds from the start of `pgcdc listen --once` with nothing to do to its end."""
    with connect(url) as conn, tempfile.TemporaryDirectory(prefix="pgcdc-bench-") as folder:
        new_slot(conn, slot)
        command = [*listen_command(slot, Path(folder)), "--once"]
        began = time.monotonic()
        environment = {**os.environ, "PGCDC_DB": url, **(more or {})}
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        took_s = time.monotonic() - began
        drop_slot(conn, slot)
    return took_s


@dataclass(frozen=True, slots=True)
class Idle:
    """What each process of an idle `pgcdc listen` costs, with what it starts and reaps."""

    percent: dict[str, float]
    """Of one core."""
    pss_bytes: dict[str, float]
    """Memory, with pages that several processes share divided among them."""


def measure_idle(url: str, *, settle_s: float, seconds: float, command: Command | None = None) -> Idle:
    """An idle `pgcdc listen` that has delivered one event."""
    with listener(url, "bench_idle", waiting=True, command=command) as running:
        running.wait_line()
        time.sleep(settle_s)
        before, began = cpu_of_tree(running.process.pid), time.monotonic()
        time.sleep(seconds)
        after, took_s = cpu_of_tree(running.process.pid), time.monotonic() - began
        pss_bytes = pss_of_tree(running.process.pid)
    return Idle({role: 100 * used_s / took_s for role, used_s in cpu_since(before, after).items()}, pss_bytes)
