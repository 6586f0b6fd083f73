"""What the playground measures and shows: a checklist while things start and end, a live view while events flow.

The live view goes to a terminal; logs, pipes and plain terminals get lines of text. Memory stays flat.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson
from rich.cells import set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from pgcdc.postgres.lsn import format_lsn

if TYPE_CHECKING:  # the view is there before numpy and Arrow are loaded
    import pyarrow as pa

RECENT_S = 10.0
SHOWN_EVENTS = 60
LINE_INTERVAL_S, SCREEN_INTERVAL_S = 5.0, 0.3
_COLOURS = {"INSERT": "green", "UPDATE": "yellow", "DELETE": "red"}
_MAX_VALUE_LETTERS = 28
_TABLE_LETTERS = 18


class Meter:
    """Adds up what was delivered. One thread uses it.

    What was committed before the first delivery waited for the start, not for the pipeline: its latency is left out.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        """How long the traffic lasts; None: until Ctrl-C."""
        self.began_s: float | None = None
        """When the first event was delivered, in seconds since 1970."""
        self.events = self.commits = 0
        self.latencies: Counter[int] = Counter()
        """Events by the milliseconds from commit to delivery."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events by table and operation."""
        self.last: deque[tuple[dict[str, Any], float]] = deque(maxlen=SHOWN_EVENTS)
        """Events and their latencies in milliseconds, the newest last."""
        self.server_lsn = self.delivered_lsn = self.confirmed_lsn = 0
        self.note = ""
        self._recent: deque[tuple[float, int, int, Counter[int]]] = deque()
        self._last_commit = ""

    def add(self, batch: pa.Table, delivered_s: float) -> None:
        """Count one batch (`position` and `line` columns) that was delivered at this time (seconds since 1970)."""
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
        self.counts.update((_table(one), one["operation"]) for one in events)
        self.last.extend(zip(events, times, strict=True))
        self._recent.append((delivered_s, len(events), count, latencies))

    def recent(self, now_s: float) -> tuple[float, float, Counter[int]]:
        """Events and commits per second, and latencies, of the last ten seconds."""
        while self._recent and self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        span_s = min(RECENT_S, max(1.0, now_s - (self.began_s or now_s)))
        latencies: Counter[int] = Counter()
        for _, _, _, part in self._recent:
            latencies.update(part)
        return sum(one[1] for one in self._recent) / span_s, sum(one[2] for one in self._recent) / span_s, latencies

    def elapsed_s(self, now_s: float) -> float:
        """Since the first event."""
        return now_s - (self.began_s or now_s)


def _table(event: dict[str, Any]) -> str:
    return str(event["channel"].removeprefix("pgcdc:"))


# --- text


def format_bytes(size: float) -> str:
    """`0 B`, `950 B`, `1.2 kB`, `34 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"


def format_ms(value: float) -> str:
    """`84 ms`, `1.2 s`."""
    return f"{value / 1e3:.1f} s" if value >= 999.5 else f"{value:.0f} ms"


def format_latency(latencies: Counter[int], share: float) -> str:
    """The latency that this share of the events does not exceed; `-` while there is nothing to tell."""
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
    """One line for a log."""
    events_per_s, commits_per_s, latencies = meter.recent(now_s)
    return (
        f"{format_clock(meter.elapsed_s(now_s))}  {meter.events:,} events in {meter.commits:,} commits, "
        f"{events_per_s:,.0f} events/s, {commits_per_s:,.0f} commits/s, "
        f"lag {format_bytes(max(0, meter.server_lsn - meter.delivered_lsn))}, "
        f"latency p50 {format_latency(latencies, 0.5)} p99 {format_latency(latencies, 0.99)}"
    )


def summary_line(latencies: Counter[int]) -> str:
    """Latency of the whole run."""
    p50, p99, top = (format_latency(latencies, share) for share in (0.5, 0.99, 1.0))
    return f"commit to file: p50 {p50}, p99 {p99}, max {top} over {latencies.total():,} events"


def describe_event(event: dict[str, Any], latency_ms: float) -> Text:
    """One line; a changed key is `id=1→2`, an unchanged large value `body=…`."""
    operation, payload = event["operation"], event["payload"]
    row, old = payload.get("row") or {}, payload.get("old") or {}
    text = Text(f"{event['created_at'][11:23]} {format_ms(latency_ms):>6} ", "dim", no_wrap=True, overflow="ellipsis")
    text.append(f"{operation:<8} ", _COLOURS.get(operation, "magenta"))
    text.append(f"{set_cell_size(_table(event), _TABLE_LETTERS)} ", "bold")
    for name, value in row.items():
        before = f"{_shorten(old[name])}→" if name in old and old[name] != value else ""
        text.append(f"{name}={before}{_shorten(value)} ", "")
    for name in payload.get("_unchanged_toast_columns") or ():
        text.append(f"{name}=… ", "dim italic")
    return text


def _shorten(value: str | None) -> str:
    if value is None:
        return "null"
    short = value if len(value) <= _MAX_VALUE_LETTERS else f"{value[:_MAX_VALUE_LETTERS]}…"
    return "".join(letter if letter.isprintable() else "·" for letter in short)


def render(meter: Meter, now_s: float, height: int) -> RenderableType:
    """The whole screen. What does not fit is left out from the bottom: last events first, then tables."""
    clock = format_clock(meter.elapsed_s(now_s)) + (f" of {format_clock(meter.seconds)}" if meter.seconds else "")
    title = Text.assemble(("pgcdc playground  ", "bold"), ("● streaming  ", "bold green"), (clock, "bold"))
    title.append("  Ctrl-C ends and compares  ", "dim").append(meter.note, "yellow")
    lsns = f"WAL {format_lsn(meter.server_lsn)}, confirmed {format_lsn(meter.confirmed_lsn)}"
    numbers = Text(progress_line(meter, now_s).partition("  ")[2].replace(", lag", "\nlag"), "cyan")
    parts: list[RenderableType] = [title, numbers, Text(lsns, "dim"), ""]
    tables = sorted({table for table, _ in meter.counts}, key=lambda table: ("." in table, table))
    left = height - 5
    if left > len(tables):
        grid = Table(box=None, padding=(0, 2, 0, 0))
        grid.add_column("")
        for one, colour in _COLOURS.items():
            grid.add_column(Text(f"{one.lower()}s", colour), justify="right")
        for table in tables:
            grid.add_row(Text(table), *(f"{meter.counts[table, one]:,}" for one in _COLOURS))
        parts += [grid, ""]
        left -= len(tables) + 2
    shown = list(meter.last)[-left:] if left > 0 else []
    return Group(*parts, *(describe_event(*one) for one in shown))


# --- where it is shown


class View:
    """Lines of text. One thread calls."""

    interval_s = LINE_INTERVAL_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due_s = 0.0

    def start_phase(self, text: str) -> None:
        """Something that takes time begins; what began before is done."""
        self._print(f"pgcdc: {text}")
        self._due_s = 0.0

    def show(self, meter: Meter) -> None:
        """Events flow: this is how it looks now. Called often, it shows something now and then."""
        if meter.events and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self.interval_s
            self._draw(meter)

    def close(self, failed: bool = False) -> None:
        """The last phase is over."""

    def _draw(self, meter: Meter) -> None:
        self._print(progress_line(meter, time.time()))

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class TerminalView(View):
    """A checklist with a spinner, which stays on the terminal, and the live view on the alternate screen between."""

    interval_s = SCREEN_INTERVAL_S

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | Status | None = None
        self._phase, self._began_s = "", 0.0

    def start_phase(self, text: str) -> None:
        self.close()
        self._phase, self._began_s = text, time.monotonic()
        self._live = self._console.status(text)
        self._live.start()

    def _draw(self, meter: Meter) -> None:
        if not isinstance(self._live, Live):
            self.close()
            self._live = Live(console=self._console, screen=True, auto_refresh=False)
            self._live.start()
        self._live.update(render(meter, time.time(), self._console.height), refresh=True)

    def close(self, failed: bool = False) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._phase:
            sign = ("✗ ", "red") if failed else ("✔ ", "green")
            took = f"  {time.monotonic() - self._began_s:.1f} s"
            self._console.print(Text.assemble(sign, self._phase, (took, "dim")))
            self._phase = ""


def choose_view(console: Console, is_terminal: bool) -> View:
    """The live view on a terminal that can show it, lines of text elsewhere."""
    is_able = is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return TerminalView(console) if is_able else View(console)
