"""`pgcdc reload`: have a run take the transforms and routes of its configuration, as they are now."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Annotated

import typer

from pgcdc.cli.report import exit_on_error
from pgcdc.core.errors import ConfigError, StateError
from pgcdc.core.state import Lock, StateDir

TIMEOUT_S = 60.0


def reload(
    state_dir: Annotated[Path, typer.Option(help="The state directory of the run.", envvar="PGCDC_STATE_DIR")] = Path(
        ".pgcdc"
    ),
) -> None:
    """Have a running `pgcdc listen` read its transforms and routes again: they change at a batch boundary."""
    with exit_on_error():
        from pgcdc.capture.control import ask

        state = StateDir(state_dir)
        if Lock.holder(state.run_lock) is None:
            raise StateError(f"nothing runs in {state.path}", "Start it with pgcdc listen, or give --state-dir")
        phase = ask(state.run_lock, {"do": "status"}).get("phase", "starting")
        if phase != "streaming":
            raise StateError(f"the run is not ready yet: {phase}", "Try again in a moment")
        request, deadline = {"do": "reload", "id": str(uuid.uuid4())}, time.monotonic() + TIMEOUT_S
        while not (found := ask(state.run_lock, request)):
            if Lock.holder(state.run_lock) is None:
                raise StateError("the run has ended", "Look at its output")
            if time.monotonic() > deadline:
                raise StateError(f"the run did not answer within {TIMEOUT_S:.0f} s", "Look at pgcdc status")
            time.sleep(0.05)
        if found["refused"]:
            raise ConfigError(f"not reloaded, the old one goes on: {found['refused']}")
        print("reloaded: transforms and routes hold from the next batch on")
