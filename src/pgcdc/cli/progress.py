"""How far the reading of tables is, for people: bars on a terminal, a line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from pgcdc.cli.report import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_INTERVAL_S = 10.0


class _Bars:
    """A bar for each table, on a terminal."""

    def __init__(self, *, transient: bool = False) -> None:
        self._transient = transient
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def draw(self, table: str, percent: float | None, what: str) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TextColumn

        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"))
            self._progress = Progress(*columns, console=Console(stderr=True), transient=self._transient)
            self._progress.start()
        if table not in self._bars:
            self._bars[table] = self._progress.add_task(escape(table), what="")
        total = None if percent is None else 100.0
        self._progress.update(self._bars[table], completed=percent or 0.0, total=total, what=what)

    def close(self) -> None:
        """Leave the bars as they are; what comes next is printed below them."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class CopyProgress:
    """Shows how far a copy is: called when a table's turn has come, now and then, and when it is complete."""

    def __init__(self, *, live: bool | None = None, interval_s: float = LINE_INTERVAL_S) -> None:
        self._bars = _Bars() if (sys.stderr.isatty() if live is None else live) else None
        self._interval_s = interval_s
        self._table = ""
        self._began = self._due = 0.0

    def __call__(self, table: str, rows: int, estimated_rows: int, is_complete: bool) -> None:
        now = time.monotonic()
        if table != self._table:
            self._table, self._began, self._due = table, now, now + self._interval_s
        seconds = now - self._began
        text = describe_rows(rows, 0 if is_complete else estimated_rows, seconds)
        if self._bars is not None:
            percent = 100.0 if is_complete else min(100.0, 100 * rows / estimated_rows) if estimated_rows else None
            self._bars.draw(table, percent, text)
        elif is_complete:
            took = describe_seconds(seconds) if seconds >= 1 else "less than 1 s"
            say(f"table {table}: {rows:,} row{'s' if rows != 1 else ''}, complete in {took}")
        elif rows and now >= self._due:
            self._due = now + self._interval_s
            say(f"table {table}: {text}")

    def close(self) -> None:
        """Nothing more will come, be it complete or not."""
        if self._bars is not None:
            self._bars.close()


class SnapshotProgress:
    """Shows the status of the initial snapshot whenever it is handed one."""

    def __init__(self, *, live: bool) -> None:
        self._bars = _Bars(transient=True) if live else None
        self._due = 0.0

    def show(self, status: dict[str, Any]) -> None:
        """Show it: all the time on a terminal, every ten seconds as lines, and once at the end."""
        if status["status"] == "complete":
            if self._bars is not None:
                self._bars.close()
            say(describe_snapshot(status))
        elif self._bars is not None:
            for one in status["tables"]:
                self._bars.draw(one["table"], one["percent"], _describe_table(one).partition(": ")[2])
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_INTERVAL_S
            say(describe_snapshot(status))


def describe_seconds(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`; `-` if that is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def describe_rows(rows: int, estimated_rows: int, seconds: float) -> str:
    """`120,000 of about 1,000,000 rows (12 %), 60,000 rows/s, 15 s left`; an estimate that was passed is not shown."""
    rate = rows / seconds if seconds > 0 else 0.0
    if rows >= estimated_rows:
        return f"{rows:,} rows, {rate:,.0f} rows/s"
    left = describe_seconds((estimated_rows - rows) / rate) if rate else "-"
    percent = 100 * rows // estimated_rows
    return f"{rows:,} of about {estimated_rows:,} rows ({percent} %), {rate:,.0f} rows/s, {left} left"


def describe_snapshot(status: dict[str, Any]) -> str:
    """One line: what is there, and of the tables that are just read how far they are."""
    tables = status.get("tables", [])
    if status["status"] == "complete":
        moved = [one["table"] for one in tables if one["status"] == "moved"]
        text = f"initial snapshot: {status['rows']:,} rows of {len(tables)} tables in {status['seconds']:.1f} s"
        return f"{text}; the rest of {', '.join(moved)} is read while changes come" if moved else text
    if status["status"] == "planning":
        return "initial snapshot: it is planned"
    ended = sum(one["status"] not in ("reading", "waiting") for one in tables)
    reading = [_describe_table(one) for one in tables if one["status"] == "reading"]
    return "; ".join([f"initial snapshot: {ended} of {len(tables)} tables are complete", *reading])


def _describe_table(one: dict[str, Any]) -> str:
    text = f"{one['table']}: {one['rows']:,} of about {one['estimated_rows']:,} rows ({one['percent']:.0f} %)"
    if one["rows_per_s"]:
        text += f", {one['rows_per_s']:,} rows/s"
    return f"{text}, {one['seconds_left']:,} s left" if one["seconds_left"] is not None else text
