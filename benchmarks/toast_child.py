"""The capture with its TOAST step and spool, in a process of its own: `SLOT CHANGES MODE ENTRIES FOLDER`.

The URL is in PGCDC_DB. Prints one line of JSON. It does
what the capture process does, and confirms once a second what it has written, as if every sink were as fast.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from usage import cpu_s, peak_rss_bytes

from pgcdc.core.position import Position
from pgcdc.core.state import StateDir
from pgcdc.postgres.database import connect
from pgcdc.source.postgres.options import ToastOptions
from pgcdc.source.postgres.toast.resolver import ToastStep
from pgcdc.source.postgres.wire.stream import Capture
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.writer import SpoolWriter

PUBLICATIONS = ("bench_toast",)
CONFIRM_INTERVAL_S = 1.0


def drain(slot: str, changes: int, mode: str, entries: int, folder: Path) -> dict[str, Any]:
    """Read until the last change is in the spool."""
    state = StateDir(folder / "state")
    state.create()
    url = os.environ["PGCDC_DB"]
    spool = SpoolWriter(state.spool, Position.end(0))
    options = ToastOptions.model_validate({"toast": mode, "toast_cache_max_entries": entries})
    step = ToastStep(options, PUBLICATIONS, state, resume=Position.end(0), instance="bench")
    capture = Capture(url, slot=slot, publications=PUBLICATIONS, relations=spool.relations, spill_dir=state.spool)
    consumers = Consumers(state.consumers_file)
    consumers.join("bench", Position.end(0))
    sql = connect(url)
    wall, cpu = time.perf_counter(), cpu_s()
    step.look(sql)
    capture.connect()
    rows = unresolved = 0
    peak_anonymous = 0
    confirm_due = wall + CONFIRM_INTERVAL_S
    while rows < changes:
        batch = capture.poll(drain=False)
        if batch is None:
            if capture.is_drained:
                select.select([capture.fileno()], [], [], min(0.5, capture.keep_alive()))
                batch = capture.poll()
            if batch is None:
                continue
        for piece in step.resolve(batch, sql):
            spool.append(piece)
            rows += piece.rows
            if piece.part is not None and piece.part.batch is not None:
                marks = piece.part.batch.column("unchanged")
                unresolved += len(marks) - marks.null_count
        if time.perf_counter() >= confirm_due:
            step.make_durable()
            consumers.ack("bench", Position.end(batch.last_lsn))
            consumers.confirmable()
            capture.send_feedback(batch.last_lsn)
            spool.release(Position.end(batch.last_lsn))
            step.release(batch.last_lsn)
            confirm_due = time.perf_counter() + CONFIRM_INTERVAL_S
            peak_anonymous = max(peak_anonymous, _anonymous_bytes())
    step.make_durable()
    took_s, used_s = time.perf_counter() - wall, cpu_s() - cpu
    found = {
        "rows": rows,
        "unresolved": unresolved,
        "took_s": took_s,
        "cpu_s": used_s,
        "rss_bytes": psutil.Process().memory_info().rss,
        "peak_rss_bytes": peak_rss_bytes(),
        "peak_anonymous_bytes": peak_anonymous,
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in state.toast.rglob("*"))
        if state.toast.exists()
        else 0,
        **step.status(),
    }
    capture.close()
    sql.close()
    step.close()
    spool.close()
    return found


def _anonymous_bytes() -> int:
    """Memory that is really the process's own: mapped files are the page cache's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    name, amount, how, limit, where = sys.argv[1:]
    print(json.dumps(drain(name, int(amount), how, int(limit), Path(where))))
