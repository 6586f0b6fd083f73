"""`make bench-quick`: the core figures with small workloads, in a few minutes, against those that were kept.

    python benchmarks/quick.py             measures, and says what got worse
    python benchmarks/quick.py --write     keeps what was measured, in the part `quick` of docs/benchmarks.json

Small workloads give other figures than `make bench`, so they have a part of their own. Exit code 1: a fast
path is not in use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from backlog import quick_contenders, run_contenders
from bench import Bench, Scale, percentiles, prepare
from decode import measure_decoding
from figures import Run, load, save
from latency import measure_latency, measure_start
from rich.console import Console
from rich.table import Table

CHANGES, ROUNDS = 400_000, 2
WARM_S, LATENCY_S, RATE_PER_S = 8.0, 20.0, 50
STARTS = 2
WORSE = 0.97
LESS_IS_BETTER = ("ms", "s")


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description="The core figures, quickly, against those that were kept.")
    parser.add_argument("--write", action="store_true", help="keep them")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    prepare()
    began, data = time.monotonic(), load()
    table = Table("what", "before", "now", "of before", "")
    worse, run = [], Run.now("make bench-quick")
    with Bench(Scale(changes=CHANGES, rounds=ROUNDS), console.print) as bench:
        for name, value, unit in measure(bench):
            old = data["quick"].get(name)
            better = (old["value"] / value if unit in LESS_IS_BETTER else value / old["value"]) if old else None
            is_worse = better is not None and better < WORSE
            worse += [name] if is_worse else []
            shown = [f"{one:.2f} {unit}" if one is not None else "" for one in (old and old["value"], value)]
            table.add_row(name, *shown, f"{better:.2f}x" if better else "", "[bold red]worse[/]" if is_worse else "")
            if arguments.write:
                record = {"value": round(value, 3), "unit": unit, "date": run.date, "commit": run.commit}
                data["quick"][name] = record
    console.print(table)
    console.print(f"Worse than {WORSE}x: {', '.join(worse) or 'nothing'}. Took {time.monotonic() - began:.0f} s.")
    if worse:
        console.print("A tenth may be chance with so small a workload: repeat it, or run `make bench-against REV=...`.")
    if arguments.write:
        save(data)
    return 0


def measure(bench: Bench) -> Iterator[tuple[str, float, str]]:
    """Name, value and unit of each figure; ratios where there is something to compare with in the same minute."""
    found = run_contenders(bench.url(), bench.backlog(), quick_contenders(), ROUNDS, bench.say)
    bench.forget_backlog()
    took = {key: min(run["took_s"] for run in one.runs) for key, one in found.items()}  # two rounds have no median
    yield "capture to Arrow, of pg_recvlogical", took["recvlogical"] / took["arrow"], "x"
    yield "through Spark to a file, of pg_recvlogical", took["recvlogical"] / took["spark"], "x"
    yield "SQL where, of the plain pipeline", took["spark"] / took["where"], "x"
    yield "Debezium's envelope, of the plain pipeline", took["spark"] / took["debezium"], "x"
    compiled = statistics.median(measure_decoding(bench.url(), 50_000, 5))
    yield "decoder, of its Python twin", compiled / _in_python(lambda: measure_decoding(bench.url(), 10_000, 3)), "x"
    latencies = measure_latency(bench.url(), warm_s=WARM_S, seconds=LATENCY_S, rate_per_s=RATE_PER_S, say=bench.say)
    p50, _, p99 = percentiles(latencies)
    yield "commit to the file, p50", p50, "ms"
    yield "commit to the file, p99", p99, "ms"
    yield "start to the first event", min(measure_start(bench.url(), f"bench_start_{n}") for n in range(STARTS)), "s"


def _in_python(measure_rates: Callable[[], list[float]]) -> float:
    os.environ["PGCDC_PURE_PYTHON"] = "1"
    try:
        return statistics.median(measure_rates())
    finally:
        del os.environ["PGCDC_PURE_PYTHON"]


if __name__ == "__main__":
    sys.exit(main())
