"""This tree against an older commit, taking turns: `python benchmarks/against.py REV [--rounds 5] [--only backlog,busy]`.

The older tree is unpacked and compiled in a temporary folder, and runs its own benchmark scripts with this environment's
packages. Prints the median of each side, and their ratio. Exit code 1: a ratio misses its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import prepare
from latency import busy_core
from rich.console import Console
from rich.table import Table
from workload import copied_slot, prepare_backlog, start_server

ROOT = Path(__file__).parent.parent
SECTIONS = ("backlog", "webhook", "batches", "initial", "latency", "busy")
WARM_S, LATENCY_S, RATE_PER_S = 10, 30, 50
RATES = {"rate": (">=", 0.97, "{:,.0f}/s"), "cpu_us": ("<=", 1.03, "{:.2f} µs CPU")}
BARS: dict[str, dict[str, tuple[str, float, str]]] = {
    "latency": {"p50_ms": ("<=", 1.03, "p50 {:.1f} ms"), "p99_ms": ("<=", 1.03, "p99 {:.1f} ms")},
    "busy": {"p50_ms": ("<=", 0.5, "p50 {:.1f} ms"), "p99_ms": ("<=", 1.03, "p99 {:.1f} ms")},
}
"""What a section measures, the bar of the ratio, and how it is shown; the others have `RATES`. The bar of
`busy` is for a much older commit, so it is measured only when asked for."""

# Both sides have these functions; CPU is that of the process and of everything that it has started and ended.
_CHILD = """
import json, resource, sys
sys.path.insert(0, "benchmarks")
def cpu():
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)
began = cpu()
{call}
print(json.dumps({{"rate": rate, "cpu_us": (cpu() - began) / count * 1e6}}))
"""
_INITIAL = """
from incremental import measure_initial
count = {count}
rate = count / measure_initial({url!r}, count).took_s
"""
_WEBHOOK = """
from webhook import measure_webhook
count = {count}
posted = measure_webhook(count, {size})
assert not posted.wrong
rate = posted.rate
"""
_LATENCY = f"""
import json, sys
sys.path.insert(0, "benchmarks")
import numpy
from latency import measure_latency
found = measure_latency({{url!r}}, warm_s={WARM_S}, seconds={LATENCY_S}, rate_per_s={RATE_PER_S})
p50, p99 = numpy.percentile(found, [50, 99])
print(json.dumps({{{{"p50_ms": p50, "p99_ms": p99}}}}))
"""


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="Compare this tree with an older commit.")
    parser.add_argument("revision", help="the older commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(SECTIONS[:-1]), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--changes", type=int, default=1_000_000, help="size of the backlog, and rows of the snapshot")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    prepare()
    table = Table("", "bar", "older", "now", "ratio")
    missed = False
    with tempfile.TemporaryDirectory(prefix="pgcdc-older-") as folder, start_server(18) as server:
        console.print(f"building {given.revision}")
        trees = {"older": unpack(given.revision, Path(folder)), "now": ROOT}
        for name in given.only.split(","):
            runs = alternate(trees, section(name, server.url(), given.changes), given.rounds, console, name)
            for what, (sign, limit, form) in BARS.get(name, RATES).items():
                older, now = (statistics.median(one[what] for one in runs[side]) for side in trees)
                ratio = now / older
                is_met = ratio >= limit if sign == ">=" else ratio <= limit
                missed |= not is_met
                shown = (form.format(older), form.format(now))
                table.add_row(name, f"{sign} {limit}x", *shown, f"{ratio:.3f}x{'' if is_met else ' missed'}")
    console.print(table)
    return 1 if missed else 0


def unpack(revision: str, folder: Path) -> Path:
    """The tree of a commit, with its compiled modules."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def section(name: str, url: str, changes: int) -> Callable[[Path, str], dict[str, float]]:
    """What one side does in one round: it gets its tree, and a name that no other run has."""
    if name == "backlog":
        made = prepare_backlog(url, changes)

        def drain(tree: Path, key: str) -> dict[str, float]:
            with copied_slot(url, made.slot, key) as slot, tempfile.TemporaryDirectory() as folder:
                found = run(tree, url, ["benchmarks/spark_child.py", slot, str(made.changes), folder])
            assert found["lines"] == made.changes
            return {"rate": made.changes / found["took_s"], "cpu_us": found["cpu_s"] / made.changes * 1e6}

        return drain
    if name in BARS:

        def trickle(tree: Path, _: str) -> dict[str, float]:
            with busy_core() if name == "busy" else contextlib.nullcontext():
                return run(tree, url, ["-c", _LATENCY.format(url=url)])

        return trickle
    calls = {
        "initial": _INITIAL.format(count=changes, url=url),
        "webhook": _WEBHOOK.format(count=20_000, size=1),
        "batches": _WEBHOOK.format(count=200_000, size=100),
    }
    return lambda tree, _: run(tree, url, ["-c", _CHILD.format(call=calls[name])])


def alternate(
    trees: dict[str, Path], once: Callable[[Path, str], dict[str, float]], rounds: int, console: Console, name: str
) -> dict[str, list[dict[str, float]]]:
    """Both sides in every round, every other round backwards."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in trees}
    for number in range(rounds):
        for side in list(trees) if number % 2 == 0 else reversed(trees):
            found = once(trees[side], f"against_{side}_{number}")
            runs[side].append(found)
            shown = ", ".join(form.format(found[what]) for what, (_, _, form) in BARS.get(name, RATES).items())
            console.print(f"{name} {number + 1}/{rounds} {side}: {shown}")
    return runs


def run(tree: Path, url: str, arguments: list[str]) -> dict[str, Any]:
    """Run Python in a tree; the last line that it prints is JSON."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PGCDC_DB": url, "PGSSLMODE": "disable"}
    command = [sys.executable, *arguments]
    said = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


if __name__ == "__main__":
    sys.exit(main())
