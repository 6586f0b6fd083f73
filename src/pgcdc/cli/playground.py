"""`pgcdc playground`: see it work, without a database."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pgcdc.cli.report import INTERRUPTED, exit_on_error


def playground(
    seconds: Annotated[
        float | None, typer.Option(min=1, help="How long the traffic lasts. [until Ctrl-C]", show_default=False)
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, max=2000, help="Commits per second.")] = 20.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same traffic.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the delivered events in this folder.", show_default=False)
    ] = None,
) -> None:
    """A PostgreSQL of its own under random traffic, captured through Spark, with a proof at the end."""
    with exit_on_error():
        from rich.console import Console

        from pgcdc.playground.view import choose_view

        _forget_libpq_settings()
        console = Console()
        view = choose_view(console, sys.stdout.isatty())
        try:
            view.start_phase("loading")
            from pgcdc.playground.run import PlaygroundOptions, run_playground

            options = PlaygroundOptions(seconds=seconds, rate_per_s=rate, seed=seed, keep=keep)
            code = run_playground(options, console, view)
        except KeyboardInterrupt:
            # everything is cleaned up; a pipeline that was ended in the middle must not hold up the exit
            view.close(failed=True)
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        except BaseException:
            view.close(failed=True)
            raise
        raise typer.Exit(code)


def _forget_libpq_settings() -> None:
    """PGSSLMODE, PGOPTIONS and the like are for the user's databases, not for ours."""
    for name in [name for name in os.environ if name.startswith("PG") and not name.startswith("PGCDC_")]:
        del os.environ[name]
