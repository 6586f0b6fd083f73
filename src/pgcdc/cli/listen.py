"""`pgcdc listen`: deliver changes until stopped, or once. `pgcdc playground`: see it work, without a database."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pgcdc.cli.flags import CONFIG_OPTION, given_flags
from pgcdc.cli.report import INTERRUPTED, SnapshotProgress, exit_on_error, has_bars
from pgcdc.core.log import begin_log, say
from pgcdc.core.signals import on_end_signals

if TYPE_CHECKING:
    from pgcdc.run.pipeline import Pipeline


def listen(ctx: typer.Context, config: Annotated[Path | None, CONFIG_OPTION] = None) -> None:
    """Deliver every committed change to the adapters, exactly once, until stopped."""
    logging.disable(logging.ERROR)  # libraries also log what we report in one line with advice
    with exit_on_error():
        from pgcdc.config import load_config
        from pgcdc.run.pipeline import Pipeline, StopNow

        flags = given_flags(ctx)
        settings = load_config(flags, os.environ, config)
        begin_log(settings.log_format)
        pipeline = Pipeline(settings, say=say, read_again=lambda: load_config(flags, os.environ, config))
        pipeline.on_stuck = lambda: _end_at_once(0)
        shares_terminal = any(one.type in ("stdout", "exec") for one in settings.adapter_specs) and sys.stdout.isatty()
        pipeline.snapshot.show = SnapshotProgress(live=has_bars() and not shares_terminal).show
        with contextlib.suppress(StopNow):  # a signal before `run` has begun
            _stop_on_signals(pipeline)
            signal.signal(signal.SIGHUP, lambda number, frame: pipeline.request_reload())
            pipeline.run()


def _end_at_once(code: int) -> NoReturn:
    """Exit without waiting, and kill the adapters' commands."""
    if commands := sys.modules.get("pgcdc.sink.exec"):  # if not loaded, there are none
        commands.end_all()
    os._exit(code)


def _stop_on_signals(pipeline: Pipeline) -> None:
    """The first signal stops cleanly; the second exits immediately. Nothing is lost: unconfirmed events are
    repeated."""
    from pgcdc.run.pipeline import StopNow

    seen = 0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            _end_at_once(128 + number)
        say("stopping after this batch (a second signal stops at once)")
        pipeline.stop()
        if pipeline.is_starting:
            raise StopNow

    on_end_signals(handle)
    show = (
        sys.unraisablehook
    )  # Python prints what a signal raises in a callback of the interpreter; `stop` holds anyway
    sys.unraisablehook = lambda one: None if isinstance(one.exc_value, StopNow) else show(one)


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
    """Run a temporary PostgreSQL under random traffic, capture it through Spark, and compare the result at the end."""
    with exit_on_error():
        # PGSSLMODE, PGOPTIONS and the like are for the user's databases, not the playground's
        for name in [name for name in os.environ if name.startswith("PG") and not name.startswith("PGCDC_")]:
            del os.environ[name]
        typer.echo("pgcdc: loading")
        try:
            from pgcdc.playground.run import run_playground

            code = run_playground(seconds, rate, seed, keep)
        except KeyboardInterrupt:
            # everything is cleaned up; a pipeline that was interrupted must not delay the exit
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        raise typer.Exit(code)
