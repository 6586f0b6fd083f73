"""A capture in a process of its own: `drain SLOT CHANGES` or `trickle SLOT SECONDS`. The URL is in PGCDC_DB.

Prints one line of JSON. A process of its own, so that CPU and memory are the capture's and nothing else's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import psutil
import pyarrow as pa
from workload import PUBLICATION

import pgcdc
from pgcdc.capture.stream import open_capture  # noqa: F401 - imported before the clock starts

FEEDBACK_INTERVAL_S = 1.0


def drain(slot: str, changes: int) -> dict[str, Any]:
    """Read until the last transaction is complete, as fast as the server sends."""
    wall, cpu = time.perf_counter(), _cpu_s()
    rows = batches = 0
    feedback_due = wall + FEEDBACK_INTERVAL_S
    with pgcdc.open_capture(os.environ["PGCDC_DB"], slot=slot, publication=PUBLICATION) as capture:
        while rows < changes:
            batch = capture.receive_batch(timeout_s=30)
            if batch is None:
                raise TimeoutError(f"nothing came for 30 s after {rows} of {changes} changes")
            rows += batch.data.num_rows
            batches += batch.rows > 0
            if time.perf_counter() >= feedback_due:
                capture.send_feedback(batch.last_lsn)
                feedback_due = time.perf_counter() + FEEDBACK_INTERVAL_S
        took_s, cpu_s = time.perf_counter() - wall, _cpu_s() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "rows": rows, "batches": batches, "took_s": took_s, "cpu_s": cpu_s, "rss_bytes": psutil.Process().memory_info().rss,
        "peak_rss_bytes": peak,
    }  # fmt: skip


def trickle(slot: str, seconds: float) -> dict[str, Any]:
    """Milliseconds from commit to Arrow, of every transaction that was committed after the first five seconds."""
    latencies: list[float] = []
    with pgcdc.open_capture(os.environ["PGCDC_DB"], slot=slot, publication=PUBLICATION) as capture:
        print("ready", file=sys.stderr, flush=True)
        warm = time.monotonic() + 5
        while time.monotonic() < warm + seconds:
            batch = capture.receive_batch(timeout_s=1)
            if batch is None or not batch.rows:
                continue
            data: pa.Table = batch.data
            now = time.time()
            assert data.num_rows
            if time.monotonic() > warm:
                latencies += [now * 1e3 - us / 1e3 for us in batch.transactions.column("commit_time").to_pylist()]
            capture.send_feedback(batch.last_lsn)
    return {"latencies_ms": latencies}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    what, name, amount = sys.argv[1:]
    print(json.dumps(drain(name, int(amount)) if what == "drain" else trickle(name, float(amount))))
