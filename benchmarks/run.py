"""`make bench`: the bars of the project, measured in one run.

    python benchmarks/run.py                 everything; writes docs/benchmarks.md
    python benchmarks/run.py --quick         a smaller workload to try the benchmark itself; writes nothing
    python benchmarks/run.py --only backlog  one item (backlog, latency, arrow, start, idle); writes nothing
    python benchmarks/run.py --demo          also the playground's time to its first event

A missed bar is reported with its figure and does not fail the run. Exit code 1: the decoder is not the compiled one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from backlog import Contender, run_child, run_contenders
from latency import measure_idle, measure_latency, measure_start
from report import Figure, at_least, at_most, describe_machine, plot_latencies, plot_rates, print_table, write_page
from rich.console import Console
from workload import Writer, connect, drop_slot, new_slot, prepare_backlog, start_server

from pgcdc.capture.rows import decoder_name
from pgcdc.playground.postgres import EmbeddedPostgres

ROOT = Path(__file__).parent.parent
ITEMS = ("backlog", "latency", "arrow", "start", "idle")
RATE_PER_S = 50


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    changes: int = 1_000_000
    rounds: int = 3
    warm_s: float = 15
    latency_s: float = 60
    starts: int = 3
    settle_s: float = 15
    idle_s: float = 30


QUICK = Scale(changes=50_000, rounds=1, warm_s=5, latency_s=10, starts=1, settle_s=5, idle_s=10)


@dataclass(slots=True)
class Results:
    """What one run found."""

    figures: list[Figure] = field(default_factory=list)
    contenders: dict[str, Contender] = field(default_factory=dict)
    changes: int = 0
    latencies_ms: list[float] = field(default_factory=list)


def measure_backlog(server: EmbeddedPostgres, scale: Scale, results: Results, console: Console) -> None:
    """Three ways to drain one backlog."""
    url = server.url()
    backlog = prepare_backlog(url, scale.changes)
    size = f"{backlog.changes:,} changes in {backlog.transactions:,} transactions, {backlog.wal_bytes / 1e6:,.0f} MB of WAL"
    console.print(f"backlog: {size}")
    found = run_contenders(url, backlog, scale.rounds, console.print)
    with connect(url) as conn:
        drop_slot(conn, backlog.slot)
    base, arrow, spark = found["recvlogical"], found["arrow"], found["spark"]
    to_arrow, to_file = (base.median("took_s") / one.median("took_s") for one in (arrow, spark))
    results.contenders, results.changes = found, backlog.changes

    def describe(one: Contender) -> str:
        rate = f"{backlog.changes / one.median('took_s') / 1e3:,.0f}k changes/s"
        return rate if one is spark else f"{rate}, {one.median('cpu_s') * 1e6 / backlog.changes:.2f} µs CPU a change"

    results.figures += [
        Figure("backlog: pg_recvlogical, the yardstick", "", f"{base.median('took_s'):.2f} s", None, describe(base)),
        at_least("backlog: capture to Arrow", to_arrow, 0.8, "x", describe(arrow)),
        at_least("backlog: through Spark to a file", to_file, 0.5, "x", describe(spark)),
        at_most("capture process: peak RSS, backlog through Spark", spark.worst("peak_rss_bytes") / (1 << 20), 150, "MB",
            f"{spark.worst('rss_bytes') / (1 << 20):.0f} MB at the end; open_capture alone: "
            f"peak {arrow.worst('peak_rss_bytes') / (1 << 20):.0f} MB", 0),
    ]  # fmt: skip


def measure_listen_latency(server: EmbeddedPostgres, scale: Scale, results: Results, console: Console) -> None:
    """Commit to the line in the file."""
    found = measure_latency(server.url(), warm_s=scale.warm_s, seconds=scale.latency_s, rate_per_s=RATE_PER_S)
    p50, p95, p99 = _percentiles(found)
    results.latencies_ms = found
    note = f"{len(found):,} commits, p95 {p95:.1f} ms, longest {max(found):.0f} ms"
    results.figures += [
        at_most("commit to the file, p50", p50, 100, "ms", note),
        at_most("commit to the file, p99", p99, 300, "ms"),
    ]


def measure_capture_latency(server: EmbeddedPostgres, scale: Scale, results: Results, console: Console) -> None:
    """Commit to Arrow."""
    url = server.url()
    with connect(url) as conn:
        new_slot(conn, "bench_arrow")
        with Writer(url, RATE_PER_S):
            found = run_child("capture_child.py", "trickle", "bench_arrow", str(scale.latency_s), url=url)[
                "latencies_ms"
            ]
        drop_slot(conn, "bench_arrow")
    p50, p95, p99 = _percentiles(found)
    note = f"{len(found):,} commits, p50 {p50:.2f} ms, p95 {p95:.2f} ms"
    results.figures.append(at_most("commit to Arrow in the capture, p99", p99, 10, "ms", note, 2))


def measure_starts(server: EmbeddedPostgres, scale: Scale, results: Results, console: Console) -> None:
    """Process start to first event."""
    found = sorted(measure_start(server.url(), f"bench_start_{number}") for number in range(scale.starts))
    note = f"median of {len(found)}: {', '.join(f'{one:.1f}' for one in found)}"
    results.figures.append(at_most("start of `pgcdc listen` to the first event", found[len(found) // 2], 25, "s", note))


def measure_idle_cpu(server: EmbeddedPostgres, scale: Scale, results: Results, console: Console) -> None:
    """What waiting costs."""
    found = measure_idle(server.url(), settle_s=scale.settle_s, seconds=scale.idle_s)
    note = ", ".join(f"{name} {value:.1f}%" for name, value in sorted(found.items(), key=lambda item: -item[1]))
    results.figures.append(at_most("idle with one adapter, of one core", sum(found.values()), 10, "%", note))


def measure_demo() -> Figure:
    """What the playground says about its own first event, measured from here."""
    began = time.monotonic()
    command = [str(Path(sys.executable).parent / "pgcdc"), "playground", "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    told = re.search(r"first event ([\d.]+) s after the start", done.stdout + done.stderr)
    name = "playground: first event on the screen"
    if done.returncode or told is None:
        took_s = time.monotonic() - began
        return Figure(
            name, "<= 30 s", "not told", None, f"`pgcdc playground` ended with {done.returncode} after {took_s:.0f} s"
        )
    return at_most(name, float(told.group(1)), 30, "s", "packages installed")


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
    return p50, p95, p99


MEASURES = {
    "backlog": measure_backlog,
    "latency": measure_listen_latency,
    "arrow": measure_capture_latency,
    "start": measure_starts,
    "idle": measure_idle_cpu,
}


def main() -> int:
    """Measure, print, and write the page if everything was measured in full."""
    parser = argparse.ArgumentParser(description="Measure pgcdc against its bars.")
    parser.add_argument("--quick", action="store_true", help="a smaller workload, to try the benchmark; writes nothing")
    parser.add_argument("--only", choices=ITEMS, help="one item; writes nothing")
    parser.add_argument("--demo", action="store_true", help="also run the playground")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    if decoder_name() != "compiled":
        console.print(f"[bold red]The decoder is {decoder_name()!r}, not the compiled one: run `make install`.[/]")
        return 1
    scale = QUICK if arguments.quick else Scale()
    machine = describe_machine()
    results = Results()
    with start_server() as server:
        for item in [arguments.only] if arguments.only else ITEMS:
            console.print(f"[bold]{item}[/]")
            MEASURES[item](server, scale, results, console)
    if arguments.demo:
        results.figures.append(measure_demo())
    print_table(results.figures, ", ".join(f"{name} {value}" for name, value in machine.items()), console)
    if arguments.quick or arguments.only:
        why = "the workload was shrunk by --quick" if arguments.quick else "only one item was measured"
        console.print(f"docs/benchmarks.md is left as it is: {why}.")
        return 0
    _write(results, machine, scale, "make bench ARGS=--demo" if arguments.demo else "make bench")
    console.print("docs/benchmarks.md is written.")
    return 0


def _write(results: Results, machine: dict[str, str], scale: Scale, command: str) -> None:
    images = ROOT / "docs" / "img"
    rates = {one.name: [results.changes / run["took_s"] for run in one.runs] for one in results.contenders.values()}
    p50, p95, p99 = _percentiles(results.latencies_ms)
    plot_rates(images / "benchmarks-rates.png", rates)
    plot_latencies(images / "benchmarks-latency.png", results.latencies_ms, {"p50": p50, "p95": p95, "p99": p99})
    write_page(ROOT / "docs" / "benchmarks.md", results.figures, machine, command, _notes(scale))


def _notes(scale: Scale) -> list[str]:
    return [
        f"Backlog: {scale.changes:,} changes, 10 mixed columns, transactions of 1 to 1000 rows, 20% updates, 5% deletes; "
        f"each contender reads its own copy of the same slot, {scale.rounds} rounds taking turns, medians. "
        "`pg_recvlogical` is timed from the start of its process to its exit at the same END.",
        "Capture to Arrow: `pgcdc.open_capture` in a process of its own, from connecting (imports are done) to the "
        "last END.",
        "Through Spark: from the start of the replication connection, made when Spark is warm, until the last line is "
        "written and fsynced; the lines in the file are counted.",
        f"Latency: {RATE_PER_S} single-row commits a second for {scale.latency_s:g} s after {scale.warm_s:g} s of the same "
        "traffic; from the server's commit time to the moment when a look at the file every millisecond finds the line.",
        "Start: from the start of the process to the first line in the file; the commit is waiting behind the slot.",
        f"Idle: CPU of the listen process, the JVM, Spark's Python processes and the capture over {scale.idle_s:g} s.",
    ]


if __name__ == "__main__":
    sys.exit(main())
