"""The playground's live view: rates, latency, what each table got, and the newest events.

`draw_screen` is a function of the meter. Where there is no terminal that can show it, `progress_line` is printed instead.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pgcdc.playground.meter import Meter, describe_event, format_bytes, format_clock, format_latency, progress_line

_COLOURS = {"INSERT": "green", "UPDATE": "yellow", "DELETE": "red", "TRUNCATE": "magenta"}
_BARS = " ▁▂▃▄▅▆▇█"
REFRESH_S = 0.3
LINE_INTERVAL_S = 5.0


@contextlib.contextmanager
def open_view(meter: Meter, seconds: float | None, console: Console | None = None) -> Iterator[Callable[[float], None]]:
    """Call what this gives with the time of now, again and again: it shows what the meter has."""
    console = console or Console()
    if not console.is_terminal or console.is_dumb_terminal or not console.encoding.startswith("utf"):
        yield _every(LINE_INTERVAL_S, lambda now_s: console.print(progress_line(meter, now_s), soft_wrap=True))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield _every(
            REFRESH_S,
            lambda now_s: live.update(draw_screen(meter, now_s, seconds, console.width, console.height), refresh=True),
        )


def _every(interval_s: float, show: Callable[[float], None]) -> Callable[[float], None]:
    shown_s = 0.0

    def show_if_due(now_s: float) -> None:
        nonlocal shown_s
        if now_s >= shown_s + interval_s:
            shown_s = now_s
            show(now_s)

    return show_if_due


def draw_screen(meter: Meter, now_s: float, seconds: float | None, width: int, height: int) -> RenderableType:
    """The whole screen. What does not fit is left out: last events first, then tables."""
    parts: list[RenderableType] = [_header(meter, now_s, seconds), _figures(meter, now_s, width)]
    names = sorted({table for table, _ in meter.counts})
    left = height - 7
    if left >= len(names) + 3:
        parts.append(_tables(meter, names, width))
        left -= len(names) + 3
    if left >= 3:
        parts.append(_events(meter, left - 2, width))
    return Group(*parts)


def sparkline(values: Sequence[int], width: int) -> str:
    """The last `width` values as bars, the newest at the right end; anything but 0 is visible."""
    shown = list(values[-width:]) if width > 0 else []
    top = max(shown, default=0)
    return "".join(_BARS[max(1, round(value / top * 8)) if value else 0] for value in shown).rjust(max(0, width))


def _header(meter: Meter, now_s: float, seconds: float | None) -> RenderableType:
    clock = format_clock(now_s - (meter.began_s or now_s)) + (f" of {format_clock(seconds)}" if seconds else "")
    return _columns(
        Text.assemble((" pgcdc playground  ", "bold"), ("● streaming", "bold green"), no_wrap=True),
        Text.assemble((clock, "bold"), ("  Ctrl-C ends and compares ", "dim"), justify="right", no_wrap=True),
    )


def _figures(meter: Meter, now_s: float, width: int) -> RenderableType:
    events_per_s, commits_per_s, latencies = meter.recent(now_s)
    p50, p99 = (format_latency(latencies, share) for share in (0.5, 0.99))
    rate = Text.assemble(
        (f"{events_per_s:,.0f}", "bold cyan"), " events/s   ", (f"{commits_per_s:,.0f}", "bold cyan"), " commits/s\n",
        (sparkline(meter.history(now_s), width // 2 - 4), "cyan"), "\n",
        (f"{meter.events:,} events in {meter.commits:,} commits", "dim"), no_wrap=True,
    )  # fmt: skip
    times = Text.assemble(
        "p50 ", (p50, "bold cyan"), "   p99 ", (p99, "bold cyan"), ("   last 10 s", "dim"), "\n",
        "lag ", (format_bytes(meter.lag_bytes), "bold"), " of WAL\n",
        ("every event is fsynced before PostgreSQL may forget it", "dim"), no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    return _columns(_panel(rate, "rate"), _panel(times, "commit to file"))


def _tables(meter: Meter, names: list[str], width: int) -> RenderableType:
    totals: Counter[str] = Counter()
    for (table, _), count in meter.counts.items():
        totals[table] += count
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    shown = [operation for operation in _COLOURS if operation != "TRUNCATE"]
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for _ in (*shown, "events"):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1)
    grid.add_row("", *(Text(f"{name.lower()}s", _COLOURS[name]) for name in shown), Text("events", "bold"), "")
    room = max(4, width - max(map(len, names), default=0) - 50)
    for name in names:
        counts = [f"{meter.counts[name, operation]:,}" for operation in shown]
        bar = "━" * max(1, round(totals[name] / max(totals.values()) * room))
        grid.add_row(name, *counts, Text(f"{totals[name]:,}", "bold"), Text(bar, "blue"))
    return _panel(grid, "tables")


def _events(meter: Meter, rows: int, width: int) -> RenderableType:
    """The newest at the bottom, as in a log."""
    lines = []
    for event in list(meter.last)[-rows:]:
        line = Text(describe_event(event), no_wrap=True)
        line.stylize(_COLOURS.get(event["operation"], ""), 0, len(event["operation"]))
        line.truncate(width - 4, overflow="ellipsis")
        lines.append(line)
    return _panel(Text("\n").join([*lines, *([Text()] * (rows - len(lines)))]), "last events")


def _columns(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="bright_black", box=box.ROUNDED)
