"""How far the reading of tables is, for people: bars on a terminal, a line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from pgcdc.run.copy_source import Progress

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["LiveProgress", "PlainProgress", "describe_rows", "describe_seconds", "make_progress"]

LINE_INTERVAL_S = 10.0


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
    text = f"{rows:,} rows, {rate:,.0f} rows/s"
    if rows < estimated_rows:
        left = describe_seconds((estimated_rows - rows) / rate) if rate else "-"
        percent = 100 * rows // estimated_rows
        text = f"{rows:,} of about {estimated_rows:,} rows ({percent} %), {rate:,.0f} rows/s, {left} left"
    return text


def make_progress() -> Progress:
    """What fits where stderr goes."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


class PlainProgress(Progress):
    """A line for each table, and every 10 s."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._table, self._estimated = "", 0
        self._began = self._due = 0.0

    def begin(self, table: str, estimated_rows: int) -> None:
        """A table's turn has come."""
        self._table, self._estimated = table, estimated_rows
        self._began = time.monotonic()
        self._due = self._began + self._interval_s

    def advance(self, rows: int) -> None:
        """So many rows of it are read by now."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            self._say(describe_rows(rows, self._estimated, time.monotonic() - self._began))

    def end(self, rows: int) -> None:
        """It is complete."""
        seconds = time.monotonic() - self._began
        took = describe_seconds(seconds) if seconds >= 1 else "less than 1 s"
        self._say(f"{rows:,} row{'s' if rows != 1 else ''}, complete in {took}")

    def _say(self, text: str) -> None:
        print(f"pgcdc: table {self._table}: {text}", file=sys.stderr, flush=True)


class LiveProgress(Progress):
    """A bar for each table."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._began = 0.0

    def begin(self, table: str, estimated_rows: int) -> None:
        """A table's turn has come."""
        from rich.markup import escape

        self._bars.start()
        self._began = time.monotonic()
        self._task = self._bars.add_task(escape(table), total=estimated_rows or None, shown="")

    def advance(self, rows: int) -> None:
        """So many rows of it are read by now."""
        if self._task is not None:
            self._bars.update(self._task, completed=rows, shown=self._shown(rows))

    def end(self, rows: int) -> None:
        """It is complete."""
        if self._task is not None:
            self._bars.update(self._task, completed=rows, total=rows, shown=self._shown(rows))

    def close(self) -> None:
        """Leave the bars as they are; what comes next is printed below them."""
        self._bars.stop()

    def _shown(self, rows: int) -> str:
        seconds = time.monotonic() - self._began
        return f"{rows:,} rows, {rows / seconds if seconds > 0 else 0:,.0f} rows/s"
