"""How commands end when something is wrong: one line on stderr, and the exit code of the error's kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pgcdc.errors import PgcdcError

__all__ = ["exit_on_error", "format_error"]

INTERRUPTED = 130


def format_error(error: PgcdcError) -> str:
    """`error: what happened. What to do`, in one line."""
    return " ".join(f"error: {error}".split())


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Around the body of a command, or as its decorator: errors of ours become a line on stderr and an exit code.

    Anything else is a defect and keeps its traceback.
    """
    try:
        yield
    except PgcdcError as error:
        typer.echo(format_error(error), err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `pgcdc slot list | head`: nobody reads on, and the flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
