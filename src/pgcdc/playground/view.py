"""What the playground shows: a checklist while things start and end, a live view while events flow.

`render` and `progress_line` are functions of a snapshot; the two classes say where it goes: a terminal, or lines of text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # the view is there before numpy and Arrow are loaded
    from pgcdc.playground.meter import Event, Latency, Snapshot

OPERATIONS = ("INSERT", "UPDATE", "DELETE")
_COLOURS = {"INSERT": "green", "UPDATE": "yellow", "DELETE": "red", "TRUNCATE": "magenta"}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BARS = " ▁▂▃▄▅▆▇█"
_WIDE = 92
"""From this width on there is room for the time and latency of every event."""
_MAX_VALUE_LETTERS = 28
_MAX_TABLE_LETTERS = 18
PLAIN_INTERVAL_S = 5.0


# --- text


def sparkline(values: Sequence[int], width: int) -> str:
    """The last `width` values as bars, the newest at the right end; anything but 0 is visible."""
    shown = list(values[-width:]) if width > 0 else []
    top = max(shown, default=0)
    bars = [_BARS[max(1, round(value / top * 8)) if value else 0] for value in shown]
    return "".join(bars).rjust(max(0, width))


def format_bytes(size: float) -> str:
    """`0 B`, `950 B`, `1.2 kB`, `34 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"


def format_ms(value: float) -> str:
    """`84 ms`, `1.2 s`."""
    if value >= 999.5:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if value >= 1 or value <= 0 else "<1 ms"


def format_latency(latency: Latency) -> tuple[str, str]:
    """p50 and p99; `-` while there is nothing to tell."""
    return (format_ms(latency.p50_ms), format_ms(latency.p99_ms)) if latency.events else ("-", "-")


def format_clock(seconds: float) -> str:
    """`0:07`, `12:00`."""
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def progress_line(snapshot: Snapshot) -> str:
    """One line for a log."""
    p50, p99 = format_latency(snapshot.latency)
    return (
        f"{format_clock(snapshot.elapsed_s)}  {snapshot.events:,} events in {snapshot.commits:,} commits, "
        f"{snapshot.events_per_s:.0f} events/s, {snapshot.commits_per_s:.0f} commits/s, "
        f"lag {format_bytes(snapshot.lag_bytes)} {format_ms(snapshot.lag_ms)}, "
        f"latency p50 {p50} p99 {p99}"
    )


def summary_line(latency: Latency) -> str:
    """Latency of the whole run."""
    p50, p99 = format_latency(latency)
    return f"commit to file: p50 {p50}, p99 {p99}, max {format_ms(latency.max_ms)} over {latency.events:,} events"


def describe_row(event: Event) -> Text:
    """The row in short; a changed key as `id=1→2`, an unchanged large value as `body=…`."""
    text = Text(no_wrap=True, overflow="ellipsis")
    names = list(event.row) + [name for name in event.unchanged if name not in event.row]
    for name in names:
        text.append(f"{name}=", "dim")
        if name in event.unchanged:
            text.append("… ", "dim italic")
            continue
        value = event.row[name]
        if name in event.old and event.old[name] != value:
            text.append(f"{_shorten(event.old[name])}→", "cyan")
        text.append(f"{_shorten(value)} ", "dim italic" if value is None else "")
    return text


def _shorten(value: str | None) -> str:
    if value is None:
        return "null"
    short = value[: _MAX_VALUE_LETTERS + 1]
    short = f"{short[:-1]}…" if len(short) > _MAX_VALUE_LETTERS else short
    return "".join(letter if letter.isprintable() else "·" for letter in short)


# --- the live view


def render(snapshot: Snapshot, width: int, height: int) -> RenderableType:
    """The whole screen. What does not fit is left out from the bottom: last events first, then tables."""
    parts: list[RenderableType] = [_header(snapshot, width), _metrics(snapshot, width)]
    left = height - 6
    # the busiest first would jump about: by name, those of `public` before others
    names = sorted({table for table, _ in snapshot.counts}, key=lambda table: ("." in table, table))
    if left >= len(names) + 3:
        parts.append(_counts(snapshot, names, width))
        left -= len(names) + 3
    if left >= 3:
        parts.append(_last_events(snapshot.last, left - 2, width))
    return Group(*parts)


def _header(snapshot: Snapshot, width: int) -> RenderableType:
    title = Text.assemble((" pgcdc playground  ", "bold"), ("● streaming", "bold green"))
    if snapshot.note:
        title.append(f"  {snapshot.note}", "yellow")
    clock = format_clock(snapshot.elapsed_s)
    if snapshot.seconds is not None:
        clock += f" of {format_clock(snapshot.seconds)}"
    ending = Text.assemble((clock, "bold"), ("  Ctrl-C ends and compares ", "dim") if width >= 60 else "")
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(title, ending)
    return grid


def _metrics(snapshot: Snapshot, width: int) -> RenderableType:
    p50, p99 = format_latency(snapshot.latency)
    half = width // 2 - 4
    rate = Text.assemble(
        (f"{snapshot.events_per_s:,.0f}", "bold cyan"), " events/s   ",
        (f"{snapshot.commits_per_s:,.0f}", "bold cyan"), " commits/s\n",
        (sparkline(snapshot.history, half), "cyan"), "\n",
        (f"{snapshot.events:,} events in {snapshot.commits:,} commits", "dim"),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    times = Text.assemble(
        "p50 ", (p50, "bold cyan"), "   p99 ", (p99, "bold cyan"),
        ("   last 10 s", "dim"), "\n",
        "lag ", (format_bytes(snapshot.lag_bytes), "bold"), "   ", (format_ms(snapshot.lag_ms), "bold"), "\n",
        (f"WAL {snapshot.server_lsn}, confirmed {snapshot.confirmed_lsn}", "dim"),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(_panel(rate, "rate"), _panel(times, "commit to file"))
    return grid


def _counts(snapshot: Snapshot, names: list[str], width: int) -> RenderableType:
    totals: Counter[str] = Counter()
    for (table, _), count in snapshot.counts.items():
        totals[table] += count
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for _ in range(len(OPERATIONS) + 1):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1)
    grid.add_row("", *(Text(f"{name.lower()}s", _COLOURS[name]) for name in OPERATIONS), Text("events", "bold"), "")
    top = max(totals.values(), default=1)
    room = max(4, width - max((len(name) for name in names), default=0) - 50)
    for table in names:
        counts = [snapshot.counts.get((table, operation), 0) for operation in OPERATIONS]
        cells = [Text(f"{count:,}" if count else "-", "" if count else "dim") for count in counts]
        bar = Text("━" * max(1, round(totals[table] / top * room)), "blue")
        grid.add_row(Text(table), *cells, Text(f"{totals[table]:,}", "bold"), bar)
    return _panel(grid, "tables")


def _last_events(events: Sequence[Event], rows: int, width: int) -> RenderableType:
    """The newest at the bottom, as in a log. Laid out by hand: a table of this size costs a tenth of a core."""
    shown = events[-rows:]
    names = min(_MAX_TABLE_LETTERS, max((cell_len(event.table) for event in shown), default=0))
    lines = []
    for event in shown:
        line = Text(no_wrap=True)
        if width >= _WIDE:
            line.append(f"{event.created_at[11:23]} {format_ms(event.latency_ms):>6} ", "dim")
        line.append(f"{event.operation:<8} ", _COLOURS.get(event.operation, ""))
        line.append(f"{set_cell_size(event.table, names)} ", "bold")
        line.append_text(describe_row(event))
        line.truncate(width - 4, overflow="ellipsis")
        lines.append(line)
    return _panel(Text("\n").join([*lines, *([Text()] * (rows - len(lines)))]), "last events")


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="bright_black", box=box.ROUNDED)


# --- where it is shown


class View:
    """Where the playground reports: lines of text, for logs, pipes and terminals that can do no more. One thread calls."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._due_s = 0.0

    def start_phase(self, text: str) -> None:
        """Something that takes time begins; what began before is done."""
        self._print(f"pgcdc: {text}")
        self._due_s = 0.0

    def show(self, snapshot: Snapshot) -> None:
        """Events flow: this is how it looks now."""
        now = time.monotonic()
        if now >= self._due_s and snapshot.events:
            self._due_s = now + PLAIN_INTERVAL_S
            self._print(progress_line(snapshot))

    def close(self, failed: bool = False) -> None:
        """The last phase is over."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class TerminalView(View):
    """A checklist with a spinner, which stays on the terminal, and the live view on the alternate screen between."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._phase, self._began_s = "", 0.0
        self._snapshot: Snapshot | None = None

    def start_phase(self, text: str) -> None:
        self.close()
        self._phase, self._began_s = text, time.monotonic()
        self._start(self._draw_phase, refresh_per_second=10, transient=True)

    def show(self, snapshot: Snapshot) -> None:
        is_first = self._snapshot is None
        if is_first:
            self.close()
        self._snapshot = snapshot
        if is_first:
            self._start(self._draw_screen, refresh_per_second=3, screen=True)

    def close(self, failed: bool = False) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = self._snapshot = None
        if self._phase:
            self._console.print(self._draw_phase((" ✗ ", "red") if failed else (" ✔ ", "green")))
            self._phase = ""

    def _start(self, draw: Callable[[], RenderableType], **options: Any) -> None:
        self._live = Live(get_renderable=draw, console=self._console, **options)
        self._live.start()

    def _draw_phase(self, sign: tuple[str, str] | None = None) -> Text:
        now = time.monotonic()
        sign = sign or (f" {_SPINNER[int(now * 10) % len(_SPINNER)]} ", "cyan")
        took = f"  {now - self._began_s:.1f} s"
        return Text.assemble(sign, self._phase, (took, "dim"), no_wrap=True, overflow="ellipsis")

    def _draw_screen(self) -> RenderableType:
        return render(self._snapshot, self._console.width, self._console.height) if self._snapshot else ""


def choose_view(console: Console, is_terminal: bool) -> View:
    """The live view on a terminal that can show it, lines of text elsewhere."""
    if is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return TerminalView(console)
    return View(console)
