"""The playground's measurements and display: rates, latency, events per table, and the newest events.

`draw_screen` is a function of the meter. A terminal that cannot show it gets `progress_line` instead.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import orjson
import pyarrow as pa
from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pgcdc.core.wording import counted

RECENT_S = 10.0
HISTORY_S = 120
SHOWN_EVENTS = 60
_MAX_VALUE_LETTERS = 28
_COLOURS = {"INSERT": "green", "UPDATE": "yellow", "DELETE": "red", "TRUNCATE": "magenta"}
_BARS = " ▁▂▃▄▅▆▇█"
REFRESH_S = 0.3
LINE_INTERVAL_S = 5.0


class Meter:
    """Adds up deliveries, in one thread.

    Commits before the first delivery waited for the start rather than for the pipeline, so their latency is not
    counted.
    """

    def __init__(self) -> None:
        self.began_s: float | None = None  # When the first event was delivered, in seconds since 1970
        self.events = self.commits = 0
        self.latencies: Counter[int] = Counter()  # Events by the milliseconds from commit to delivery
        self.counts: Counter[tuple[str, str]] = Counter()  # Events by table and operation
        self.last: deque[dict[str, Any]] = deque(maxlen=SHOWN_EVENTS)  # The newest events
        self.server_lsn = self.delivered_lsn = 0
        self._recent: deque[tuple[float, int, int, Counter[int]]] = deque()
        self._last_commit = ""

    def add(self, batch: pa.Table, delivered_s: float) -> None:
        """Count one batch (`position` and `line` columns), delivered at this time (seconds since 1970)."""
        events = [orjson.loads(line) for line in batch.column("line").to_pylist()]
        if not events:
            return
        commits = list(dict.fromkeys(position[:16] for position in batch.column("position").to_pylist()))
        count = len(commits) - (commits[0] == self._last_commit)  # a huge transaction comes in several batches
        self._last_commit = commits[-1]
        self.began_s = self.began_s or delivered_s
        times = [(delivered_s - datetime.fromisoformat(one["created_at"]).timestamp()) * 1e3 for one in events]
        latencies = Counter(round(one) for one in times if one <= (delivered_s - self.began_s) * 1e3)
        self.events += len(events)
        self.commits += count
        self.latencies.update(latencies)
        self.counts.update((table_of(one), one["operation"]) for one in events)
        self.last.extend(events)
        self._recent.append((delivered_s, len(events), count, latencies))

    def recent(self, now_s: float) -> tuple[float, float, Counter[int]]:
        """Events and commits per second, and latencies, of the last ten seconds."""
        while self._recent and self._recent[0][0] < now_s - HISTORY_S:
            self._recent.popleft()
        span_s = min(RECENT_S, max(1.0, now_s - (self.began_s or now_s)))
        parts = [part for part in self._recent if part[0] > now_s - RECENT_S]
        latencies = sum((one[3] for one in parts), Counter[int]())
        return sum(one[1] for one in parts) / span_s, sum(one[2] for one in parts) / span_s, latencies

    def history(self, now_s: float) -> list[int]:
        """Events in each whole second since the start, two minutes at most. Excludes the current second, which would
        look like a drop."""
        found = [0] * min(HISTORY_S, int(now_s) - int(self.began_s or now_s))
        for at_s, events, *_ in self._recent:
            age = int(now_s) - int(at_s)
            if 1 <= age <= len(found):
                found[-age] += events
        return found

    @property
    def lag_bytes(self) -> int:
        """WAL on the server that is not delivered yet."""
        return max(0, self.server_lsn - self.delivered_lsn)


# --- text


def format_ms(value: float) -> str:
    """`84 ms`, `1.2 s`."""
    return f"{value / 1e3:.1f} s" if value >= 999.5 else f"{value:.0f} ms"


def format_latency(latencies: Counter[int], share: float) -> str:
    """The latency that this share of the events does not exceed; `-` without data."""
    left = share * latencies.total()
    for value in sorted(latencies):
        left -= latencies[value]
        if left <= 0:
            return format_ms(value)
    return "-"


def format_clock(seconds: float) -> str:
    """`0:07`, `12:00`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def progress_line(meter: Meter, now_s: float) -> str:
    events_per_s, commits_per_s, latencies = meter.recent(now_s)
    return (
        f"{format_clock(now_s - (meter.began_s or now_s))}  {counted(meter.events, 'event')} in "
        f"{counted(meter.commits, 'commit')}, "
        f"{events_per_s:,.0f} events/s, {commits_per_s:,.0f} commits/s, "
        f"lag {filesize.decimal(meter.lag_bytes)}, "
        f"latency p50 {format_latency(latencies, 0.5)} p99 {format_latency(latencies, 0.99)}"
    )


def summary_line(latencies: Counter[int]) -> str:
    p50, p99, top = (format_latency(latencies, share) for share in (0.5, 0.99, 1.0))
    return f"commit to file: p50 {p50}, p99 {p99}, max {top} over {counted(latencies.total(), 'event')}"


def describe_event(event: dict[str, Any]) -> str:
    """`UPDATE orders: id=1→2 note=null body=…`: shows both values of a changed key, and none for an unchanged large
    value."""
    payload = event["payload"]
    row, old = payload.get("row") or {}, payload.get("old") or {}
    shown = []
    for name, value in row.items():
        before = f"{_shorten(old[name])}→" if name in old and old[name] != value else ""
        shown.append(f"{name}={before}{_shorten(value)}")
    shown += [f"{name}=…" for name in payload.get("_unchanged_toast_columns") or ()]
    return f"{event['operation']} {table_of(event)}: {' '.join(shown)}"


def table_of(event: dict[str, Any]) -> str:
    return str(event["channel"]).removeprefix("pgcdc:")


def _shorten(value: str | None) -> str:
    if value is None:
        return "null"
    short = value if len(value) <= _MAX_VALUE_LETTERS else f"{value[:_MAX_VALUE_LETTERS]}…"
    return "".join(letter if letter.isprintable() else "·" for letter in short)


# --- display


@contextlib.contextmanager
def open_view(meter: Meter, seconds: float | None, console: Console | None = None) -> Iterator[Callable[[float], None]]:
    """Returns a function that shows the meter; call it repeatedly with the current time."""
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
    """The whole screen. Drops what does not fit: first the latest events, then tables."""
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
    """The last `width` values as bars, the newest on the right; anything but 0 is visible."""
    shown = list(values[-width:]) if width > 0 else []
    top = max(shown, default=0)
    return "".join(_BARS[max(1, round(value / top * 8)) if value else 0] for value in shown).rjust(max(0, width))


def _header(meter: Meter, now_s: float, seconds: float | None) -> RenderableType:
    clock = format_clock(now_s - (meter.began_s or now_s)) + (f" of {format_clock(seconds)}" if seconds else "")
    return _columns(
        Text.assemble((" pgcdc playground  ", "bold"), ("● streaming", "bold green"), no_wrap=True),
        Text.assemble((clock, "bold"), ("  Ctrl-C stops and compares ", "dim"), justify="right", no_wrap=True),
    )


def _figures(meter: Meter, now_s: float, width: int) -> RenderableType:
    events_per_s, commits_per_s, latencies = meter.recent(now_s)
    p50, p99 = (format_latency(latencies, share) for share in (0.5, 0.99))
    rate = Text.assemble(
        (f"{events_per_s:,.0f}", "bold cyan"), " events/s   ", (f"{commits_per_s:,.0f}", "bold cyan"), " commits/s\n",
        (sparkline(meter.history(now_s), width // 2 - 4), "cyan"), "\n",
        (f"{counted(meter.events, 'event')} in {counted(meter.commits, 'commit')}", "dim"), no_wrap=True,
    )  # fmt: skip
    times = Text.assemble(
        "p50 ", (p50, "bold cyan"), "   p99 ", (p99, "bold cyan"), ("   last 10 s", "dim"), "\n",
        "lag ", (filesize.decimal(meter.lag_bytes), "bold"), " of WAL\n",
        ("every event is fsynced before PostgreSQL may discard it", "dim"), no_wrap=True, overflow="ellipsis",
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
