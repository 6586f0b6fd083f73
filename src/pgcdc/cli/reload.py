"""`pgcdc reload`: have a run take the transforms and routes of its configuration, as they are now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pgcdc.cli.report import exit_on_error

__all__ = ["reload"]

TIMEOUT_S = 60.0


def reload(
    state_dir: Annotated[Path, typer.Option(help="The state directory of the run.", envvar="PGCDC_STATE_DIR")] = Path(
        ".pgcdc"
    ),
) -> None:
    """Have a running `pgcdc listen` read its transforms and routes again: they change at a batch boundary."""
    with exit_on_error():
        from pgcdc.capture.control import ask
        from pgcdc.core.errors import ConfigError, StateError
        from pgcdc.core.state import Lock, StateDir

        state = StateDir(state_dir)

        def counts() -> tuple[dict[str, Any], int]:
            found = ask(state.run_lock, {"do": "status"})
            return found, found.get("reloads", 0) + found.get("reload_errors", 0)

        if Lock.holder(state.run_lock) is None:
            raise StateError(f"nothing runs in {state.path}", "Start it with pgcdc listen, or give --state-dir")
        status, before = counts()
        if status.get("phase") != "streaming":
            raise StateError(f"the run is not ready yet: {status.get('phase', 'starting')}", "Try again in a moment")
        ask(state.run_lock, {"do": "reload"})
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            status, now = counts()
            if now > before:
                break
            if Lock.holder(state.run_lock) is None:
                raise StateError("the run has ended", "Look at its output")
            if time.monotonic() > deadline:
                raise StateError(f"the run did not answer within {TIMEOUT_S:.0f} s", "Look at pgcdc status")
            time.sleep(0.05)
        if status.get("last_reload_error"):
            raise ConfigError(f"not reloaded, the old one goes on: {status['last_reload_error']}")
        print("reloaded: transforms and routes hold from the next batch on")
