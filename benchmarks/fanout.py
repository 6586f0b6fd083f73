"""Several sinks: what five more of them cost, and what the others notice of one that blocks."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from latency import Listener, commit_time, listener, tail
from workload import VALUES, Writer, connect

__all__ = ["MORE_SINKS", "Blocked", "child_command", "measure_blocked"]

MORE_SINKS = 5
SETTLE_S = 5.0
WATCH_S = 12.0
"""Long enough for the move, and for two seconds after it."""
ROWS_PER_COMMIT = 100
"""Of the rows that measure throughput: small transactions, as they come from applications."""


def child_command(slot: str, folder: Path, noops: int, *more: str) -> list[str]:
    """A pipeline with a file and so many no-op sinks."""
    return [sys.executable, str(Path(__file__).with_name("lanes_child.py")), slot, str(folder), str(noops), *more]


@dataclass(frozen=True, slots=True)
class Blocked:
    """What the file noticed of a sink that blocks."""

    move_ms: list[float]
    """Commit to the file, of commits from the block until two seconds after the move."""
    left_s: float
    """From the block to the move."""
    before_s: float
    after_s: float
    """How long the same rows took, before the block and after the move."""
    rows: int


def measure_blocked(url: str, *, warm_s: float, rows: int, rate_per_s: float) -> Blocked:
    """Block one of three sinks while commits go on; throughput before and after."""

    def command(slot: str, folder: Path) -> list[str]:
        return child_command(slot, folder, 1, "block")

    with listener(url, "bench_blocked", command=command) as running:
        running.wait_ready()
        folder, arrivals = running.path.parent, list[float]()
        with Writer(url, rate_per_s):
            time.sleep(warm_s)
        before_s = _burst(url, running, rows)
        moments: list[float] = []
        thread = threading.Thread(target=_block, args=(folder, moments))
        with Writer(url, rate_per_s):
            thread.start()
            tail(running.path, arrivals, time.time() + WATCH_S)
        thread.join()
        began, left = moments
        time.sleep(SETTLE_S)
        after_s = _burst(url, running, rows)
        (folder / "block").unlink()
        lines = running.path.read_bytes().splitlines()[: len(arrivals)]
    pairs = zip(arrivals, map(commit_time, lines), strict=True)
    found = [(arrival - commit) * 1e3 for arrival, commit in pairs if began <= commit <= left + 2]
    return Blocked(found, left - began, before_s, after_s, rows)


def _block(folder: Path, moments: list[float]) -> None:
    """Block the sink after a moment; when that was, and when it had left."""
    time.sleep(SETTLE_S / 2)
    (folder / "block").touch()
    moments.append(time.time())
    while not _is_out(folder):
        time.sleep(0.02)
    moments.append(time.time())


def _is_out(folder: Path) -> bool:
    path = folder / "state" / "lanes.json"
    return bool(json.loads(path.read_text())["adapters"]["blocked"]["lane"] != "main")


def _burst(url: str, running: Listener, rows: int) -> float:
    """Seconds until so many rows, all committed before, are in the file: its throughput."""
    size = running.path.read_bytes().count(b"\n")
    with connect(url) as conn:
        began = time.monotonic()
        first = conn.execute("SELECT coalesce(max(id), 0) FROM trickle").fetchone()
        assert first is not None
        for begin in range(0, rows, ROWS_PER_COMMIT):
            values = VALUES.format(first[0] + begin + 1, first[0] + begin + ROWS_PER_COMMIT)
            conn.execute(f"INSERT INTO trickle {values}".encode())
    deadline = time.monotonic() + 300
    seen = 0
    with open(running.path, "rb") as file:
        while seen < size + rows:
            seen += file.read(1 << 24).count(b"\n")
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {seen - size:,} of {rows:,} rows are there")
            time.sleep(0.002)
    return time.monotonic() - began
