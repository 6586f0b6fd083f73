"""How far an initial snapshot is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["SnapshotProgress", "describe_snapshot", "describe_table"]

LINE_INTERVAL_S = 10.0


class SnapshotProgress:
    """Shows the status of the initial snapshot whenever it is handed one."""

    def __init__(self, say: Callable[[str], None], *, live: bool) -> None:
        self._say = say
        self._live = live
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._due = 0.0

    def show(self, status: dict[str, Any]) -> None:
        """Show it: all the time on a terminal, every ten seconds as lines, and once at the end."""
        if status["status"] == "complete":
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
            self._say(describe_snapshot(status))
        elif self._live:
            self._draw(status["tables"])
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_INTERVAL_S
            self._say(describe_snapshot(status))

    def _draw(self, tables: list[dict[str, Any]]) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"))
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        for one in tables:
            if one["table"] not in self._bars:
                self._bars[one["table"]] = self._progress.add_task(one["table"], total=100.0, what="")
            what = describe_table(one).partition(": ")[2]
            self._progress.update(self._bars[one["table"]], completed=one["percent"], what=what)


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
    reading = [describe_table(one) for one in tables if one["status"] == "reading"]
    return "; ".join([f"initial snapshot: {ended} of {len(tables)} tables are complete", *reading])


def describe_table(one: dict[str, Any]) -> str:
    """One table: rows, percent, rate and time left."""
    text = f"{one['table']}: {one['rows']:,} of about {one['estimated_rows']:,} rows ({one['percent']:.0f} %)"
    if one["rows_per_s"]:
        text += f", {one['rows_per_s']:,} rows/s"
    return f"{text}, {one['seconds_left']:,} s left" if one["seconds_left"] is not None else text
