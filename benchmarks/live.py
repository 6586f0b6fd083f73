"""Sections that run `pgcdc listen` as a user does: latency, starts, what waiting costs, and what happens after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from backlog import run_child
from bench import MB, RATE_PER_S, Bench, percentiles
from fanout import MORE_SINKS, child_command
from figures import ROOT
from latency import (
    Command,
    Listener,
    busy_core,
    commit_time,
    listen_command,
    listener,
    measure_idle,
    measure_latency,
    measure_once,
    measure_start,
)
from workload import Writer, connect, drop_slot, insert_row, new_slot

import pgcdc
from pgcdc.core.state import Lock, StateDir

__all__ = [
    "measure_busy", "measure_capture_latency", "measure_demo", "measure_idle_cost", "measure_listen_latency",
    "measure_recovery", "measure_six", "measure_sql", "measure_starts",
]  # fmt: skip

ARROW_RATE_PER_S = 100
ARCHIVE_TIMEOUT_S = 240.0
KILLS = 3
CONFIRMATIONS = 200
_CONFIRMED = "SELECT confirmed_flush_lsn - '0/0' >= %s FROM pg_replication_slots WHERE slot_name = 'bench_confirm'"


def _latencies(bench: Bench, command: Command | None = None) -> list[float]:
    scale = bench.scale
    return measure_latency(
        bench.url(), warm_s=scale.warm_s, seconds=scale.latency_s, rate_per_s=RATE_PER_S, command=command, say=bench.say
    )


def _note(found: list[float]) -> str:
    p50, p95, p99 = percentiles(found)
    return f"{len(found):,} commits, p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, longest {max(found):.0f} ms"


def measure_listen_latency(bench: Bench) -> None:
    """Commit to the line in the file."""
    found = _latencies(bench)
    p50, _, p99 = percentiles(found)
    bench.add("latency.p50", p50, _note(found))
    bench.add("latency.p99", p99)
    bench.add("latency.target", p50)


def measure_six(bench: Bench) -> None:
    """What five more adapters (no-op) cost the first."""

    def latency_and_idle(noops: int) -> tuple[list[float], float]:
        def command(slot: str, folder: Path) -> list[str]:
            return child_command(slot, folder, noops)

        latencies = _latencies(bench, command)
        idle = measure_idle(bench.url(), settle_s=bench.scale.settle_s, seconds=bench.scale.idle_s, command=command)
        return latencies, sum(idle.percent.values())

    (alone, idle), (together, busier) = latency_and_idle(0), latency_and_idle(MORE_SINKS)
    before, after = percentiles(alone), percentiles(together)
    note = f"p50 {after[0]:.1f} ms against {before[0]:.1f} ms, p99 {after[2]:.0f} ms against {before[2]:.0f} ms"
    bench.add("sinks.p50", after[0], _note(together))
    bench.add("sinks.ratio", after[0] / before[0], note)
    bench.add("sinks.idle", busier - idle, f"{busier:.1f} % against {idle:.1f} %")


def measure_sql(bench: Bench) -> None:
    """Commit to the file with one SQL transform."""

    def command(slot: str, folder: Path) -> list[str]:
        transforms = {"global": [{"type": "sql", "set": {"short": "upper(row['short'])"}}]}
        config = folder / "pgcdc.yaml"
        config.write_text(json.dumps({"transforms": transforms}))
        return [*listen_command(slot, folder), "--config", str(config)]

    found = _latencies(bench, command)
    bench.add("sql.p50", percentiles(found)[0], _note(found))


def measure_busy(bench: Bench) -> None:
    """Commit to the file beside a load that keeps one core busy."""
    with busy_core():
        found = _latencies(bench)
    p50, _, p99 = percentiles(found)
    bench.add("busy.p50", p50, f"{_note(found)}; of an older commit: `make bench-against`")
    bench.add("busy.p99", p99)


def measure_capture_latency(bench: Bench) -> None:
    """Commit to Arrow."""
    url = bench.url()
    amounts = (str(bench.scale.warm_s), str(bench.scale.latency_s))
    with connect(url) as conn:
        new_slot(conn, "bench_arrow")
        with Writer(url, ARROW_RATE_PER_S):
            found = run_child("capture_child.py", "trickle", "bench_arrow", *amounts, url=url)["latencies_ms"]
        drop_slot(conn, "bench_arrow")
    p50, p95, p99 = percentiles(found)
    note = f"{len(found):,} commits at {ARROW_RATE_PER_S}/s, p50 {p50:.2f} ms, p95 {p95:.2f} ms, longest {max(found):.1f} ms"
    bench.add("arrow.p99", p99, note)


def measure_starts(bench: Bench) -> None:
    """Process start to the first event, and a run that has nothing to do."""
    url, rounds = bench.url(), range(bench.scale.starts)
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-", ignore_cleanup_errors=True) as folder:
        archive = {"PGCDC_CLASS_ARCHIVE": folder}
        bench.add("start.first", measure_start(url, "bench_start_first", archive), "one start")
        deadline = time.monotonic() + ARCHIVE_TIMEOUT_S
        while not list(Path(folder).glob("classes-*.json")) and time.monotonic() < deadline:
            time.sleep(0.5)  # another process makes the archive beside the first run
        for key, found in (
            ("start.second", [measure_start(url, f"bench_start_{number}", archive) for number in rounds]),
            ("start.once", [measure_once(url, f"bench_once_{number}", archive) for number in rounds]),
        ):
            shown = ", ".join(f"{one:.1f}" for one in sorted(found))
            bench.add(key, statistics.median(found), f"median of {len(found)}: {shown}")


def measure_idle_cost(bench: Bench) -> None:
    """What waiting costs: CPU and memory, by process."""
    found = measure_idle(bench.url(), settle_s=bench.scale.rest_s, seconds=bench.scale.idle_s)
    cpu = ", ".join(f"{role} {value:.1f} %" for role, value in _largest(found.percent))
    memory = ", ".join(f"{role} {value / MB:,.0f} MB" for role, value in _largest(found.pss_bytes))
    bench.add("idle.cpu", sum(found.percent.values()), cpu)
    bench.add("idle.pss", sum(found.pss_bytes.values()) / MB, memory)
    bench.add("idle.capture", found.pss_bytes["capture"] / MB)


def _largest(by_role: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(by_role.items(), key=lambda item: -item[1])


def measure_recovery(bench: Bench) -> None:
    """After a kill of the capture; how soon a confirmed position is the server's."""
    with listener(bench.url(), "bench_recovery") as running:
        running.wait_ready()
        with Writer(bench.url(), RATE_PER_S):
            time.sleep(bench.scale.warm_s)
            kills = []
            for _ in range(KILLS):
                kills.append(_recover_s(running))
                time.sleep(bench.scale.settle_s / 3)
    shown = ", ".join(f"{one:.2f}" for one in kills)
    bench.add(
        "recovery.capture", statistics.median(kills), f"median of {KILLS}: {shown}; to a row committed after the kill"
    )
    p50, _, p99 = percentiles(_confirmations_ms(bench.url()))
    note = (
        f"p99 {p99:.2f} ms, `send_feedback` to the answer of `pg_replication_slots`; a pipeline confirms once a second"
    )
    bench.add("recovery.confirm", p50, note)


def _recover_s(running: Listener) -> float:
    """Kill the capture; seconds until a row that was committed after that is in the file."""
    holder = Lock.holder(StateDir(running.path.parent / "state").capture_lock) or {}
    with open(running.path, "rb") as file:
        file.seek(0, os.SEEK_END)
        os.kill(holder["pid"], signal.SIGKILL)
        killed, text = time.time(), b""
        while time.time() < killed + 60:
            text += file.read()
            lines = text.split(b"\n")
            text = lines.pop()
            if any(commit_time(line) > killed for line in lines):
                return time.time() - killed
            time.sleep(0.005)
    raise TimeoutError("no event within 60 s after the kill of the capture")


def _confirmations_ms(url: str) -> list[float]:
    found = []
    with connect(url) as conn:
        new_slot(conn, "bench_confirm")
        with pgcdc.open_capture(url, slot="bench_confirm", publication="bench") as capture:
            for number in range(CONFIRMATIONS):
                insert_row(conn, "waiting", 1_000 + number)
                while (batch := capture.receive_batch()) is None or not batch.rows:
                    pass
                began = time.perf_counter()
                capture.send_feedback(batch.last_lsn)
                while conn.execute(_CONFIRMED, [batch.last_lsn]).fetchone() != (True,):
                    pass
                found.append((time.perf_counter() - began) * 1e3)
        drop_slot(conn, "bench_confirm")
        conn.execute("TRUNCATE waiting")
    return found


def measure_demo(bench: Bench) -> None:
    """What the playground says about its own first event."""
    command = [str(Path(sys.executable).parent / "pgcdc"), "playground", "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    told = re.search(r"first event ([\d.]+) s after the start", done.stdout + done.stderr)
    if done.returncode or told is None:
        raise RuntimeError(f"`pgcdc playground` ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    bench.add("demo.first", float(told.group(1)), "packages installed")
