"""Output of commands: one-line errors with exit codes, tables, and progress of reading rows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from pgcdc.core.errors import ConfigError, ConfigErrors, PgcdcError
from pgcdc.core.log import is_json, say, say_error
from pgcdc.core.wording import counted

INTERRUPTED = 130
LINE_INTERVAL_S = 10.0


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turns our errors into a line on stderr and an exit code. Use it around the body of a command, or as its
    decorator.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
    except PgcdcError as error:
        for one in single_errors(error):
            say_error(one)
            show_excerpt(one)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `pgcdc slot list | head`: avoid an error from the flush at exit
        drop_output()
        raise typer.Exit(0) from None


def single_errors(error: PgcdcError) -> Sequence[PgcdcError]:
    return (isinstance(error, ConfigErrors) and error.errors) or (error,)


def show_excerpt(error: PgcdcError) -> None:
    """The line of the configuration file that an error is about, if it is about one."""
    if isinstance(error, ConfigError) and error.excerpt and not is_json():
        typer.echo(error.excerpt, err=True)


def confirm(question: str, refusal: str, advice: str = "Add --yes") -> None:
    """Ask on a terminal. Elsewhere nobody can answer, so it is an error."""
    if not sys.stdin.isatty():
        raise ConfigError(refusal, advice)
    typer.confirm(question, abort=True)


def drop_output() -> None:
    """Discard further output, since nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A drawn table on a terminal; tab-separated for other programs."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            typer.echo("\t".join(row))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold", justify="right" if "bytes" in name else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def show(value: object) -> str:
    """Format a value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


# --- progress of reading tables: bars on a terminal, otherwise a line from time to time; always on stderr


def has_bars() -> bool:
    return sys.stderr.isatty() and not is_json()


class Bars:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[what]}"))
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def draw(self, table: str, rows: int, estimated_rows: int, what: str) -> None:
        self._progress.start()
        if table not in self._tasks:
            self._tasks[table] = self._progress.add_task(table, what="")
        total = max(rows, estimated_rows) or None
        self._progress.update(self._tasks[table], completed=rows, total=total, what=what)

    def close(self) -> None:
        """Leave the bars as they are and continue below them."""
        self._progress.stop()


class CopyProgress:
    """Shows a copy's progress. Called when a table starts, from time to time, and when the table is complete."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S, *, live: bool | None = None) -> None:
        self._interval_s = interval_s
        self._bars = Bars() if (has_bars() if live is None else live) else None
        self._table = ""
        self._began = self._due = 0.0

    def __call__(self, table: str, rows: int, estimated_rows: int, is_complete: bool) -> None:
        now = time.monotonic()
        if table != self._table:
            self._table, self._began, self._due = table, now, now + self._interval_s
        seconds = now - self._began
        text = describe_rows(rows, 0 if is_complete else estimated_rows, seconds)
        if self._bars is not None:
            self._bars.draw(table, rows, 0 if is_complete else estimated_rows, text)
        elif is_complete:
            took = describe_seconds(seconds) if seconds >= 1 else "less than 1 s"
            say(f"table {table}: {counted(rows, 'row')} read in {took}")
        elif rows and now >= self._due:
            self._due = now + self._interval_s
            say(f"table {table}: {text}")

    def close(self) -> None:
        """The copy has ended, complete or not."""
        if self._bars is not None:
            self._bars.close()


class SnapshotProgress:
    """Shows the initial snapshot's progress: bars on a terminal, otherwise a line every ten seconds and one at the
    end."""

    def __init__(self, *, live: bool = False) -> None:
        self._bars = Bars() if live else None
        self._due = 0.0

    def show(self, status: dict[str, Any]) -> None:
        """Update the display with the current status."""
        if self._bars is not None and status["status"] != "complete":
            for one in status.get("tables", ()):
                self._bars.draw(
                    one["table"], one["rows"], one["estimated_rows"], _describe_table(one).partition(": ")[2]
                )
        elif status["status"] == "complete" or time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_INTERVAL_S
            if self._bars is not None:
                self._bars.close()
            say(describe_snapshot(status))


def describe_seconds(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`; `-` if unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def describe_rows(rows: int, estimated_rows: int, seconds: float) -> str:
    """`120,000 of about 1,000,000 rows (12 %), 60,000 rows/s, 15 s left`. Omits an estimate that was exceeded."""
    rate = rows / seconds if seconds > 0 else 0.0
    if rows >= estimated_rows:
        return f"{counted(rows, 'row')}, {rate:,.0f} rows/s"
    left = describe_seconds((estimated_rows - rows) / rate) if rate else "-"
    percent = 100 * rows // estimated_rows
    return f"{rows:,} of about {estimated_rows:,} rows ({percent} %), {rate:,.0f} rows/s, {left} left"


def describe_snapshot(status: dict[str, Any]) -> str:
    """One line: the tables that are complete, and the progress of those being read."""
    tables = status.get("tables", [])
    if status["status"] == "complete":
        moved = [one["table"] for one in tables if one["status"] == "moved"]
        rows = f"{counted(status['rows'], 'row')} of {counted(len(tables), 'table')}"
        text = f"initial snapshot: {rows} read in {status['seconds']:.1f} s"
        return f"{text}; the rest of {', '.join(moved)} is read beside the stream" if moved else text
    if status["status"] == "planning":
        return "initial snapshot: planning"
    ended = sum(one["status"] not in ("reading", "waiting") for one in tables)
    reading = [_describe_table(one) for one in tables if one["status"] == "reading"]
    return "; ".join([f"initial snapshot: {ended} of {counted(len(tables), 'table')} read", *reading])


def _describe_table(one: dict[str, Any]) -> str:
    seconds = one["rows"] / one["rows_per_s"] if one["rows_per_s"] else 0.0
    return f"{one['table']}: {describe_rows(one['rows'], one['estimated_rows'], seconds)}"
