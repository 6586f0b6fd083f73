"""The figures as tables on the screen, as docs/benchmarks.md, and as plots."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pyspark
from peers import debezium_version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pgcdc.playground.postgres import find_binaries
from pgcdc.source.postgres.wire.rows import decoder_name

__all__ = [
    "Figure",
    "Peer",
    "at_least",
    "at_most",
    "describe_machine",
    "plot_latencies",
    "plot_rates",
    "print_peers",
    "print_table",
    "skipped",
    "write_page",
]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `passed` is None for what has no bar."""

    name: str
    bar: str
    value: str
    passed: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        return {None: "", True: "pass", False: "MISS"}[self.passed]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to read the same backlog, as it is shown."""

    name: str
    rate: str
    ratio: str = ""
    cpu: str = ""
    memory: str = ""
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.name, self.rate, self.ratio, self.cpu, self.memory, self.note)


PEER_COLUMNS = ("who", "changes", "of pg_recvlogical", "CPU a change", "peak RSS", "note")


def skipped(name: str, bar: str, reason: str) -> Figure:
    """A figure that cannot be measured here."""
    return Figure(name, bar, "skipped", None, reason)


def at_most(name: str, value: float, limit: float, unit: str, note: str = "", digits: int = 1) -> Figure:
    """A figure that must not be above its bar."""
    unit = unit if unit == "x" else f" {unit}"
    return Figure(name, f"<= {limit:g}{unit}", f"{value:,.{digits}f}{unit}", value <= limit, note)


def at_least(name: str, value: float, limit: float, unit: str, note: str = "") -> Figure:
    """A figure that must not be below its bar."""
    return Figure(name, f">= {limit:g}{unit}", f"{value:.2f}{unit}", value >= limit, note)


def print_table(figures: list[Figure], title: str, console: Console) -> None:
    """The table, and in one line how many bars were missed."""
    table = Table(title=title)
    for name in ("what", "bar", "measured", "", "note"):
        table.add_column(name, justify="right" if name in ("bar", "measured") else "left")
    for figure in figures:
        style = {None: "", True: "green", False: "bold red"}[figure.passed]
        verdict = f"[{style}]{figure.verdict}[/]" if style else ""
        table.add_row(figure.name, figure.bar, figure.value, verdict, escape(figure.note))
    console.print(table)
    missed = [figure.name for figure in figures if figure.passed is False]
    console.print(
        f"[bold red]{len(missed)} missed: {'; '.join(missed)}[/]" if missed else "[green]Every bar is met.[/]"
    )


def print_peers(peers: list[Peer], title: str, console: Console) -> None:
    """Rate, CPU and memory of everybody."""
    table = Table(title=title)
    for name in PEER_COLUMNS:
        table.add_column(name, justify="left" if name in ("who", "note") else "right")
    for peer in peers:
        table.add_row(*map(escape, peer.cells))
    console.print(table)


def describe_machine() -> dict[str, str]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    postgres = subprocess.run([find_binaries() / "postgres", "--version"], capture_output=True, text=True, check=True)
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    return {
        "CPU": f"{cpu}, {os.cpu_count()} cores",
        "Memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GB",
        "System": f"{platform.system()} {platform.release()}",
        "Load before the run": f"{os.getloadavg()[0]:.2f} (1 minute average)",
        "Python": platform.python_version(),
        "Java": java[0] if java else "unknown",
        "PySpark": pyspark.__version__,
        "PostgreSQL": postgres.stdout.strip().rpartition(" ")[2],
        "Decoder": decoder_name(),
        "Debezium engine": debezium_version() or "not installed",
    }


def write_page(
    path: Path,
    figures: list[Figure],
    peers: list[Peer],
    plots: dict[str, str],
    machine: dict[str, str],
    command: str,
    notes: list[str],
) -> None:
    """docs/benchmarks.md, as a whole. `plots` are titles by path."""
    missed = sum(figure.passed is False for figure in figures)
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{command}` on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; do not edit. Ratios are of one run on one",
        "machine, where all contenders take turns. "
        + (f"**{missed} bars are missed.**" if missed else "Every bar is met."),
        "",
        "| what | bar | measured | | note |",
        "| --- | ---: | ---: | --- | --- |",
        *(f"| {f.name} | {f.bar} | {f.value} | {f.verdict} | {f.note} |" for f in figures),
        "",
        "## Ours and others",
        "",
        "One backlog on one server, everybody with a slot of their own.",
        "",
        f"| {' | '.join(PEER_COLUMNS)} |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(f"| {' | '.join(peer.cells)} |" for peer in peers),
        "",
    ]
    for image, title in plots.items():
        lines += [f"![{title}]({image})", ""]
    lines += [
        "## How it is measured",
        "",
        *(f"- {note}" for note in notes),
        "",
        "## Machine",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in machine.items()),
        "",
    ]
    path.write_text("\n".join(lines))


def plot_rates(path: Path, rates: dict[str, list[float]]) -> None:
    """Changes per second of each contender: a bar for the median, a dot for each run."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.6 * len(rates)))
    for row, values in enumerate(reversed(rates.values())):
        middle = sorted(values)[len(values) // 2]
        axes.barh(row, middle / 1e3, color="#4878a8", height=0.6)
        axes.plot([value / 1e3 for value in values], [row] * len(values), "o", color="#1c2b39", markersize=4)
        axes.text(middle / 1e3, row + 0.33, f"{middle / 1e3:,.0f}k", ha="right", va="bottom", fontsize=9)
    axes.set_yticks(range(len(rates)), list(reversed(rates)))
    axes.set_xlabel("thousand changes per second (bar: median, dots: runs)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_latencies(path: Path, latencies_ms: list[float], marks: dict[str, float]) -> None:
    """A histogram with lines at the given percentiles."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3))
    axes.hist(latencies_ms, bins=80, color="#4878a8")
    for name, value in marks.items():
        axes.axvline(value, color="#b04030", linewidth=1)
        axes.text(value, axes.get_ylim()[1], f" {name} {value:.0f} ms", va="top", fontsize=9, rotation=90)
    axes.set_xlabel("milliseconds from commit to the line in the file")
    axes.set_ylabel("commits")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
