"""`pgcdc listen`: deliver changes until stopped, or once."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pgcdc.cli.flags import CONFIG_OPTION, given_flags
from pgcdc.cli.progress import SnapshotProgress
from pgcdc.cli.report import exit_on_error, say

if TYPE_CHECKING:
    from pgcdc.run.pipeline import Pipeline


def listen(ctx: typer.Context, config: Annotated[Path | None, CONFIG_OPTION] = None) -> None:
    """Deliver every committed change to the adapters, exactly once, until stopped."""
    logging.disable(logging.ERROR)  # libraries log what we report ourselves, in one line and with advice
    with exit_on_error():
        from pgcdc.config import load_config
        from pgcdc.run.pipeline import Pipeline

        flags = given_flags(ctx)
        settings = load_config(flags, os.environ, config)
        pipeline = Pipeline(settings, say=say, read_again=lambda: load_config(flags, os.environ, config))
        pipeline.on_stuck = lambda: _end_at_once(0)
        shares_terminal = any(one.type in ("stdout", "exec") for one in settings.adapter_specs) and sys.stdout.isatty()
        pipeline.snapshot.show = SnapshotProgress(live=sys.stderr.isatty() and not shares_terminal).show
        _stop_on_signals(pipeline)
        signal.signal(signal.SIGHUP, lambda number, frame: pipeline.request_reload())
        pipeline.run()


def _end_at_once(code: int) -> NoReturn:
    """End this process without waiting for anything, and the commands of adapters with it."""
    if commands := sys.modules.get("pgcdc.sink.exec"):  # not loaded: there are none
        commands.end_all()
    os._exit(code)


def _stop_on_signals(pipeline: Pipeline) -> None:
    """The first signal ends in order; the second at once (nothing is lost: what is not confirmed comes again)."""
    from pgcdc.run.pipeline import StopNow

    seen = 0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            _end_at_once(128 + number)
        say("stopping after this batch (a second signal ends at once)")
        pipeline.stop()
        if pipeline.is_starting:
            raise StopNow

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
