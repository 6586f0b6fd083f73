"""How commands end when something is wrong: one line on stderr, and the exit code of the error's kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer

from pgcdc.core.errors import ConfigErrors, PgcdcError

INTERRUPTED = 130


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(f"pgcdc: {text}", file=sys.stderr, flush=True)


def format_error(error: PgcdcError) -> str:
    """`error: what happened. What to do`, in one line."""
    return " ".join(f"error: {error}".split())


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Around the body of a command, or as its decorator: our errors become a line on stderr and an exit code.

    Anything else is a defect and keeps its traceback.
    """
    try:
        yield
    except PgcdcError as error:
        for one in (isinstance(error, ConfigErrors) and error.errors) or (error,):
            typer.echo(format_error(one), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `pgcdc slot list | head`: nobody reads on, and the flush at exit must not complain
        drop_output()
        raise typer.Exit(0) from None


def drop_output() -> None:
    """Nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], headings: Mapping[str, str] | None = None
) -> None:
    """A drawn table on a terminal (`headings` for what is too long there), tabs where a program reads on."""
    if not sys.stdout.isatty():
        for row in [header, *rows]:
            typer.echo("\t".join(row))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in header:
        heading = (headings or {}).get(name, name)
        table.add_column(heading, overflow="fold", justify="right" if "bytes" in name else "left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


def show(value: object) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
