"""The figures as a table on the screen, and as docs/benchmarks.md with its pictures, made from docs/benchmarks.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bars import BARS
from figures import ROOT, Figure, verdict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["print_table", "render", "write_page"]

PAGE = ROOT / "docs" / "benchmarks.md"
METHOD = Path(__file__).with_name("method.md")
GROUPS = {
    "Latency": ("latency", "sinks", "sql", "busy", "arrow"),
    "Start, rest and recovery": ("start", "demo", "idle", "recovery"),
    "A backlog": ("backlog", "typed", "transforms", "envelopes"),
    "Ours and others, of pg_recvlogical's rate": ("peers", "tls"),
    "Adapters": ("apply", "append", "three", "webhook"),
    "Existing rows": ("snapshot", "initial", "incremental"),
    "Memory": ("toast", "large", "large-spark"),
    "Parts alone": ("decode", "cast", "cli", "sentinel"),
    "Right under load": ("blocked", "reload", "verify", "verify-beside", "key-change"),
    "Size and tests": ("size", "coverage"),
}
PICTURES = {
    "Latency": (
        "latency", "milliseconds from commit to the line in the file",
        ("latency.p50", "latency.p99", "sinks.p50", "sql.p50", "busy.p50", "busy.p99"),
    ),
    "Start, rest and recovery": ("start", "seconds", ("start.first", "start.second", "start.once", "demo.first")),
    "A backlog": (
        "rates", "rate, of that of pg_recvlogical",
        ("backlog.arrow", "backlog.spark", "typed.rate", "peers.debezium", "peers.debezium_json", "peers.wal2json"),
    ),
}  # fmt: skip
"""By group: name of the file, what the axis shows, and its figures."""


def print_table(figures: list[Figure], kept: dict[str, Any], title: str, console: Console) -> None:
    """The figures with those of the page beside them, and in one line which bars were missed."""
    table = Table(title=title)
    for name in ("what", "bar", "before", "measured", "", "note"):
        table.add_column(name, justify="right" if name in ("bar", "before", "measured") else "left")
    for figure in figures:
        bar, old = BARS[figure.key], kept.get(figure.key, {}).get("value")
        style = {None: "", True: "green", False: "bold red"}[figure.is_met]
        shown = f"[{style}]{verdict(figure.is_met)}[/]" if style else ""
        before = "" if old is None else bar.show(old)
        table.add_row(escape(bar.name), bar.text, before, figure.shown, shown, escape(figure.note))
    console.print(table)
    missed = [BARS[figure.key].name for figure in figures if figure.is_met is False]
    console.print(
        f"[bold red]{len(missed)} missed: {'; '.join(missed)}[/]" if missed else "[green]Every bar is met.[/]"
    )


def write_page(data: dict[str, Any]) -> None:
    """The page and its pictures."""
    PAGE.write_text(render(data))
    for name, axis, keys in PICTURES.values():
        rows = [(BARS[key].name, data["figures"][key], key) for key in keys if _value(data, key) is not None]
        if rows:
            _plot(PAGE.parent / "img" / f"benchmarks-{name}.png", axis, rows)


def render(data: dict[str, Any]) -> str:
    """The page: nothing in it was written by hand."""
    figures = data["figures"]
    missed = sum(BARS[key].is_met(one["value"]) is False for key, one in figures.items() if one["value"] is not None)
    lines = [
        "# Benchmarks",
        "",
        "This page is generated from [benchmarks.json](benchmarks.json), which also has the command behind each figure.",
        'Do not edit it: `make bench` measures everything, `make bench ARGS="--write --only latency,start"` some sections.',
        "",
        "Ratios are of one run on one machine, where all contenders take turns. *Before* is the figure that was here until",
        "then. *Anchors* are not ours: they show how fast the machine was. *Spec 003* marks targets of the specification",
        f"that pgcdc began with. **{len(figures)} figures, {missed} missed bars.**",
        "",
    ]
    for title, sections in GROUPS.items():
        rows = [_row(key, figures[key]) for key in BARS if key.partition(".")[0] in sections and key in figures]
        if not rows:
            continue
        lines += [f"## {title}", ""]
        if title in PICTURES and any(_value(data, key) is not None for key in PICTURES[title][2]):
            name, axis, _ = PICTURES[title]
            lines += [f"![{title}: {axis}](img/benchmarks-{name}.png)", ""]
        lines += [
            "| what | bar | before | measured | | note | when |",
            "| --- | ---: | ---: | ---: | --- | --- | --- |",
        ]
        lines += [*rows, ""]
    lines += ["## How it is measured", "", METHOD.read_text()]
    lines += ["## Machine of the newest figures", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in data["machine"].items()]
    return "\n".join(lines) + "\n"


def _row(key: str, one: dict[str, Any]) -> str:
    bar, figure = BARS[key], Figure(key, one["value"])
    before = bar.show(one["before"]["value"]) if one["before"] else ""
    cells = [
        bar.name,
        bar.text,
        before,
        figure.shown,
        verdict(figure.is_met),
        one["note"],
        f"{one['date']} {one['commit']}",
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _value(data: dict[str, Any], key: str) -> float | None:
    value: float | None = data["figures"].get(key, {}).get("value")
    return value


def _plot(path: Path, axis: str, rows: list[tuple[str, dict[str, Any], str]]) -> None:
    """A bar for each figure, a red line for what it has to be, a circle for what it was before."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.45 * len(rows)))
    for y, (_, one, key) in enumerate(reversed(rows)):
        bar = BARS[key]
        axes.barh(y, one["value"], color="#4878a8", height=0.55)
        axes.text(one["value"], y, f"   {bar.show(one['value'])}", va="center", fontsize=8)
        if bar.sign:
            axes.plot([bar.limit] * 2, [y - 0.38, y + 0.38], color="#b04030", linewidth=2)
        if one["before"]:
            axes.plot(one["before"]["value"], y, "o", color="#1c2b39", markerfacecolor="none", markersize=6)
    axes.set_yticks(range(len(rows)), [name.replace("`", "") for name, *_ in reversed(rows)], fontsize=8)
    axes.set_xlabel(f"{axis} (red: the bar, circle: before)", fontsize=8)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
