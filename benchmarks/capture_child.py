"""A capture in a process of its own: `drain SLOT CHANGES` or `trickle SLOT WARM_S SECONDS`. The URL is in PGCDC_DB.

Prints one line of JSON. A process of its own, so that CPU and memory are the capture's and nothing else's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psutil
import pyarrow as pa
from usage import cpu_s, peak_rss_bytes
from workload import PUBLICATION

import pgcdc
from pgcdc.source.postgres.wire.stream import open_capture  # noqa: F401 - imported before the clock starts

FEEDBACK_INTERVAL_S = 1.0
SILENCE_S = 300.0
"""A server that decodes one huge transaction says nothing until it has read all of it."""


def drain(slot: str, changes: int) -> dict[str, Any]:
    """Read until the last transaction is complete, as fast as the server sends."""
    wall, cpu = time.perf_counter(), cpu_s()
    rows = batches = 0
    feedback_due = wall + FEEDBACK_INTERVAL_S
    with pgcdc.open_capture(os.environ["PGCDC_DB"], slot=slot, publication=PUBLICATION) as capture:
        while rows < changes:
            batch = capture.receive_batch(timeout_s=SILENCE_S)
            if batch is None:
                raise TimeoutError(f"nothing came for {SILENCE_S:g} s after {rows} of {changes} changes")
            rows += batch.data.num_rows
            batches += batch.rows > 0
            if time.perf_counter() >= feedback_due:
                capture.send_feedback(batch.last_lsn)
                feedback_due = time.perf_counter() + FEEDBACK_INTERVAL_S
        took_s, used_s = time.perf_counter() - wall, cpu_s() - cpu
    return {
        "rows": rows,
        "batches": batches,
        "took_s": took_s,
        "cpu_s": used_s,
        "rss_bytes": psutil.Process().memory_info().rss,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def trickle(slot: str, warm_s: float, seconds: float) -> dict[str, Any]:
    """Milliseconds from commit to Arrow, of every transaction that came after the first `warm_s` seconds."""
    latencies: list[float] = []
    with pgcdc.open_capture(os.environ["PGCDC_DB"], slot=slot, publication=PUBLICATION) as capture:
        print("ready", file=sys.stderr, flush=True)
        warm = time.monotonic() + warm_s
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


if __name__ == "__main__":
    what, name, *amounts = sys.argv[1:]
    print(json.dumps(drain(name, int(amounts[0])) if what == "drain" else trickle(name, *map(float, amounts))))
