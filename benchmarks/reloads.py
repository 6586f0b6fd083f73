"""Hot reload under load: `pgcdc listen` with two adapters takes other transforms again and again, by SIGHUP."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
from latency import Listener, listener
from workload import PUBLICATION, Writer, connect

from pgcdc.capture.control import ask

__all__ = ["Reloads", "measure_reloads"]

ADAPTERS = ("file", "other")
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reloads:
    """What the two files have of all rows that were written meanwhile."""

    reloads: int
    rows: int
    lost: int
    repeated: int
    halves: int
    """Events with the global transforms of one configuration and the own ones of another, or of an older one than before."""
    longest_s: float
    """From the signal to the answer."""


def measure_reloads(url: str, *, reloads: int, rate_per_s: float) -> Reloads:
    """So many reloads beside steady commits; then every row of the table is looked for in both files."""

    def command(slot: str, folder: Path) -> list[str]:
        _write(folder, slot, 0)
        return [sys.executable, "-m", "pgcdc", "listen", "--config", str(folder / "pgcdc.yaml")]

    took: list[float] = []
    with connect(url) as conn:
        row = conn.execute("SELECT coalesce(max(id), 0) FROM trickle").fetchone()
        before = row[0] if row else 0
    with listener(url, "bench_reload", command=command) as running:
        running.wait_ready()
        folder = running.path.parent
        with Writer(url, rate_per_s) as writer:
            for number in range(1, reloads + 1):
                _write(folder, "bench_reload", number)
                took.append(_reload(running, folder, number))
        last = before + writer.commits
        found = {name: _await(folder / f"{name}.jsonl", last) for name in ("events", "other")}
    wanted = range(before + 1, last + 1)
    lost = sum(len(set(wanted) - {key for key, _, _ in one}) for one in found.values())
    repeated = sum(len(one) - len({key for key, _, _ in one}) for one in found.values())
    halves = sum(_halves(one) for one in found.values())
    return Reloads(reloads, len(wanted), lost, repeated, halves, max(took))


def _write(folder: Path, slot: str, number: int) -> None:
    """The configuration with this number in both of its lists of transforms: `mask` and `sql` in turn."""
    own = {name: [{"type": "sql", "set": {"own": f"'{number}'"}}] for name in ADAPTERS}
    settings = {
        "slot_name": slot,
        "publication": PUBLICATION,
        "state_dir": str(folder / "state"),
        "start_from": "slot",
        "file_path": str(folder / "events.jsonl"),
        "adapters": ["file", {"name": "other", "type": "file", "path": str(folder / "other.jsonl")}],
        "transforms": {"global": [{"type": "sql", "set": {"all": f"'{number}'"}}], "adapter": own},
    }
    beside = folder / "pgcdc.yaml.new"
    beside.write_text(json.dumps(settings))  # which is YAML as well
    beside.rename(folder / "pgcdc.yaml")


def _reload(running: Listener, folder: Path, number: int) -> float:
    """Send the signal, and wait for the answer in the status of the run."""
    began = time.monotonic()
    os.kill(running.process.pid, signal.SIGHUP)
    while True:
        status = ask(folder / "state" / "run.lock", {"do": "status"})
        if status["reloads"] >= number:
            return time.monotonic() - began
        if status["reload_errors"]:
            raise RuntimeError(f"reload {number} was refused: {status['last_reload_error']}")
        if time.monotonic() - began > TIMEOUT_S or running.process.poll() is not None:
            raise TimeoutError(f"reload {number} was not answered")
        time.sleep(0.01)


def _await(path: Path, last: int) -> list[tuple[int, int, int]]:
    """Key, and both numbers, of every event, once the last one is there."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        rows = [orjson.loads(line)["payload"]["row"] for line in path.read_bytes().splitlines()]
        found = [(int(row["id"]), int(row["all"]), int(row["own"])) for row in rows]
        if found and max(key for key, _, _ in found) >= last:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} has nothing up to {last}")
        time.sleep(0.2)


def _halves(events: list[tuple[int, int, int]]) -> int:
    newest, bad = 0, 0
    for _, all_, own in events:
        bad += all_ != own or all_ < newest
        newest = max(newest, all_)
    return bad
