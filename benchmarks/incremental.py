"""Snapshots of a table that is there, through `pgcdc listen`: beside a stream that runs, and before it begins."""

from __future__ import annotations

import bisect
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from latency import POLL_S, Listener, listener
from usage import SAMPLE_S, peak_rss_bytes, role_of
from workload import PUBLICATION, VALUES, Writer, connect, drop_slot

from pgcdc.capture.control import ask

__all__ = ["Beside", "Initial", "measure_beside", "measure_initial"]

TABLE = "existing"
OWN_PUBLICATION = "bench_existing"
DONE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Beside:
    """An incremental snapshot beside steady commits."""

    rows: int
    took_s: float
    commits_per_s: float
    without_ms: list[float]
    """From commit to the file, before the snapshot."""
    with_ms: list[float]
    """The same of commits while it ran."""
    peaks_bytes: dict[str, int]
    """The largest process of each role."""


@dataclass(frozen=True, slots=True)
class Initial:
    """An initial snapshot."""

    rows: int
    took_s: float
    """From the first line in the file to the last one; Spark's start is not in it."""
    peaks_bytes: dict[str, int]


@contextlib.contextmanager
def existing_table(url: str, rows: int) -> Iterator[None]:
    """The table, in the publication of the traffic and alone in one of its own."""
    with connect(url) as conn:
        conn.execute(f"CREATE TABLE {TABLE} (LIKE backlog INCLUDING ALL)".encode())
        conn.execute(f"INSERT INTO {TABLE} {VALUES.format(1, rows)}".encode())
        conn.execute(f"VACUUM (ANALYZE) {TABLE}".encode())
        conn.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {TABLE}".encode())
        conn.execute(f"CREATE PUBLICATION {OWN_PUBLICATION} FOR TABLE {TABLE}".encode())
        conn.execute("CHECKPOINT")
        try:
            yield
        finally:
            conn.execute(f"DROP PUBLICATION {OWN_PUBLICATION}".encode())
            conn.execute(f"DROP TABLE {TABLE}".encode())


def measure_beside(url: str, rows: int, *, warm_s: float, seconds: float, rate_per_s: float) -> Beside:
    """Steady commits, first alone and then with a snapshot of the table beside them."""
    with existing_table(url, rows), listener(url, f"bench_incremental_{rows}") as running:
        running.wait_ready()
        state = running.path.parent / "state"
        with Arrivals(running.path) as arrivals, Peaks(running.process.pid) as peaks, Writer(url, rate_per_s) as writer:
            began = time.monotonic()
            time.sleep(warm_s)
            alone = time.time()
            time.sleep(seconds)
            quiet = time.time()
            _ask(state)  # the start of Python is not counted: it has nothing to do with the snapshot
            asked = time.time()
            _wait_done(running, state)
            done = time.time()
            rate = writer.commits / (time.monotonic() - began)
        _settle(running.path)
        delays = _delays(running.path, arrivals)
        read = sum(1 for line in running.path.open("rb") if b'"operation":"SNAPSHOT",' in line)
    if read != rows:
        raise RuntimeError(f"{read} rows of the snapshot were delivered, the table has {rows}")
    without = [delay for commit, delay in delays if alone <= commit < quiet]
    during = [delay for commit, delay in delays if asked <= commit < done]
    return Beside(rows, done - asked, rate, without, during, peaks.found)


def measure_initial(url: str, rows: int) -> Initial:
    """An initial snapshot to a file, by a run that ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
    slot = f"bench_initial_{rows}"
    path = folder / "events.jsonl"
    command = [
        *(*_pgcdc(), "listen", "--slot-name", slot, "--publication", OWN_PUBLICATION, "--adapter", "file"),
        *("--file-path", str(path), "--state-dir", str(folder / "state"), "--snapshot-mode", "initial_only"),
    ]
    try:
        with existing_table(url, rows):
            environment = {**os.environ, "PGCDC_DB": url}
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
            assert process.stderr is not None
            with Arrivals(path) as arrivals, Peaks(process.pid) as peaks:
                said = process.stderr.read().decode()
            with connect(url) as conn:
                drop_slot(conn, slot)
        if process.wait():
            raise RuntimeError(f"pgcdc listen ended with code {process.returncode}: {said[-300:]}")
        read = sum(1 for line in path.open("rb") if b'"operation":"SNAPSHOT",' in line)
        if read != rows:
            raise RuntimeError(f"{read} rows were delivered, the table has {rows}")
        return Initial(rows, arrivals.times[-1] - arrivals.times[0], peaks.found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- the command


def _pgcdc() -> list[str]:
    own = Path(sys.executable).parent / "pgcdc"
    return [str(own)] if own.exists() else [sys.executable, "-m", "pgcdc"]


def _ask(state: Path) -> None:
    command = [*_pgcdc(), "snapshot", "--incremental", "--table", TABLE, "--state-dir", str(state)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _wait_done(running: Listener, state: Path) -> None:
    """Until the capture's status file says so: asking by the command would cost a start of Python each time."""
    deadline = time.monotonic() + DONE_TIMEOUT_S
    while time.monotonic() < deadline:
        found: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            found = ask(state / "capture.lock", {"do": "status"}).get("snapshots", [])
        if found and found[-1]["status"] == "done":
            return
        if found and found[-1]["status"] in ("failed", "stopped"):
            raise RuntimeError(f"the snapshot {found[-1]['status']}: {found[-1].get('error')}")
        if running.process.poll() is not None:
            raise RuntimeError(f"pgcdc listen ended with code {running.process.returncode}")
        time.sleep(0.2)
    raise TimeoutError(f"the snapshot was not done within {DONE_TIMEOUT_S:.0f} s")


def _settle(path: Path) -> None:
    """Until nothing more arrives."""
    size = -1
    while size != (size := path.stat().st_size):
        time.sleep(2)


# --- what is looked at meanwhile


class Arrivals:
    """When the file was how long: a line has arrived when the file is long enough for it."""

    def __init__(self, path: Path) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []
        self._path = path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        size = 0
        while not self._stopping.wait(POLL_S):
            with contextlib.suppress(FileNotFoundError):
                now = os.stat(self._path).st_size
                if now != size:
                    size = now
                    self.times.append(time.time())
                    self.sizes.append(size)

    def of(self, end: int) -> float | None:
        """When the byte before `end` had arrived."""
        place = bisect.bisect_left(self.sizes, end)
        return self.times[place] if place < len(self.times) else None


def _delays(path: Path, arrivals: Arrivals) -> list[tuple[float, float]]:
    """Commit time, and milliseconds until the line was in the file, of every change of the traffic."""
    found, end = [], 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            arrived = arrivals.of(end)
            if b'"channel":"pgcdc:trickle"' in line and arrived is not None:
                commit = datetime.fromisoformat(orjson.loads(line)["created_at"]).timestamp()
                found.append((commit, (arrived - commit) * 1e3))
    return found


class Peaks:
    """The largest RSS of a process of each role, of a process and what it started."""

    def __init__(self, pid: int) -> None:
        self.found: dict[str, int] = {}
        self._pid = pid
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peaks", daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(5 * SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(self._pid)
                for process in [top, *top.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        role = role_of(process, top)
                        self.found[role] = max(self.found.get(role, 0), peak_rss_bytes(process.pid))
