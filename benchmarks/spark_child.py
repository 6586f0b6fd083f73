"""The pipeline in a process of its own: `SLOT CHANGES FOLDER [SETTINGS]`. The URL is in PGCDC_DB. Prints one line of JSON.

SETTINGS is JSON: what the configuration has besides. With `end`, a position in the WAL, the time ends when every adapter has
acknowledged it; else when the file has as many events as there are changes.

The same parts in the same roles as `pgcdc listen`, in another order: the capture connects when Spark is warm, so that the
time counts from START_REPLICATION.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from usage import cpu_of_tree, cpu_since, peak_rss_bytes
from workload import PUBLICATION, wait_for_reader

from pgcdc.config import Config
from pgcdc.event.batch import Batch
from pgcdc.postgres.lsn import parse_lsn
from pgcdc.run.pipeline import Pipeline


class WarmPipeline(Pipeline):
    """Starts Spark first and the capture when Spark is warm; stops at the last change."""

    def __init__(self, config: Config, changes: int, end: str | None = None) -> None:
        super().__init__(config)
        self.on_batch = self._count
        self.began = 0.0
        self.ended = 0.0
        self.batches: list[tuple[float, int]] = []
        """When each batch was on disk, and its events."""
        self.progress: list[dict[str, Any]] = []
        self.capture_rss: tuple[int, int] = (0, 0)
        self.cpu_s: dict[str, float] = {}
        """CPU seconds by role, from the start of the replication connection to the last line."""
        self.peaks: dict[str, int] = {}
        """The largest RSS of each role; of several workers, their sum."""
        self._cpu_before: dict[psutil.Process, tuple[str, float]] = {}
        self._left = changes
        self._end = parse_lsn(end) if end else None

    def _run(self) -> None:
        assert self._prepared is not None
        os.environ["PGCDC_DB"] = self.config.db
        os.environ["PGCDC_WATCH_PID"] = str(os.getpid())
        self._start_spark()
        self._warm_up()
        self._open_lanes()
        self.began = wait_for_reader(self.config.db, self.config.slot_name)
        self._cpu_before = cpu_of_tree(os.getpid())
        if self._end is not None:
            threading.Thread(target=self._watch_acks, args=[self._end], daemon=True).start()
        self._stream()
        self._finish()

    def _count(self, batch: Batch) -> None:
        now = time.time()
        self._left -= batch.events.num_rows
        self.batches.append((now, batch.events.num_rows))
        if self._end is None and self._left <= 0 and not self.ended:
            self.ended = now
            threading.Thread(target=self._conclude).start()

    def _watch_acks(self, end: int) -> None:
        assert self._lanes is not None
        while any(member.sink.ack.commit < end for member in self._lanes.members()):
            time.sleep(0.01)
        self.ended = time.time()
        self._conclude()

    def _conclude(self) -> None:
        after = cpu_of_tree(os.getpid())
        self.cpu_s = cpu_since(self._cpu_before, after)
        process = psutil.Process(int(self.capture_status()["pid"]))
        self.capture_rss = (process.memory_info().rss, peak_rss_bytes(process.pid))
        for one, (role, _) in after.items():
            self.peaks[role] = self.peaks.get(role, 0) + peak_rss_bytes(one.pid)
        assert self._lanes is not None and self._lanes.main.query is not None
        query = self._lanes.main.query
        time.sleep(0.5)  # the last batch's progress is reported after its commit
        self.progress = [json.loads(one.json) for one in query.recentProgress if one.numInputRows]
        self.stop()


def main() -> None:
    """Drain the slot into a file and say how long it took."""
    slot, changes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    settings: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    end = settings.pop("end", None)
    options: dict[str, Any] = {
        "db": os.environ["PGCDC_DB"],
        "slot_name": slot,
        "publication": PUBLICATION,
        "adapters": ("file",),
        "state_dir": folder / "state",
        "start_from": "slot",
        **settings,
    }
    file_path = folder / "events.jsonl"
    if "file" in options["adapters"]:
        options["file_path"] = file_path
    pipeline = WarmPipeline(Config.model_validate(options), changes, end)
    pipeline.run()
    lines = 0
    if file_path.exists():
        with open(file_path, "rb") as file:
            lines = sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    begin = pipeline.began
    answer = {
        "lines": lines,
        "took_s": pipeline.ended - begin,
        "cpu_s": sum(pipeline.cpu_s.values()),
        "cpu_by_role_s": pipeline.cpu_s,
        "capture_rss_bytes": pipeline.capture_rss[0],
        "capture_peak_rss_bytes": pipeline.capture_rss[1],
        "peaks_bytes": pipeline.peaks,
        "batches": [(moment - begin, rows) for moment, rows in pipeline.batches],
        "phases_ms": [one["durationMs"] for one in pipeline.progress],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
