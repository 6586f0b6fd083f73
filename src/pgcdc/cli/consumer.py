"""`pgcdc consumer`: who reads a state directory's spool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pgcdc.cli.report import exit_on_error

__all__ = ["consumer_app"]

consumer_app = typer.Typer(
    help="Consumers of a slot: each holds back WAL until it has acknowledged.",
    no_args_is_help=True,
    add_completion=False,
)

State = Annotated[Path, typer.Option(help="The state directory.", envvar="PGCDC_STATE_DIR")]


@consumer_app.command("list")
def list_consumers(state_dir: State = Path(".pgcdc")) -> None:
    """Show all consumers and their acknowledged positions."""
    with exit_on_error():
        from pgcdc.core.errors import StateError
        from pgcdc.core.state import StateDir
        from pgcdc.spool.consumers import Consumers

        state = StateDir(state_dir)
        if not state.consumers_file.exists():
            raise StateError(f"{state.path} is not a state directory", "Give --state-dir")
        consumers = Consumers(state.consumers_file)
        for name in consumers.names():
            print(f"{name}\t{consumers[name].ack}")


@consumer_app.command("forget")
def forget_consumer(name: str, state_dir: State = Path(".pgcdc")) -> None:
    """Forget a consumer that will not come back, so that it holds nothing back any more."""
    with exit_on_error():
        from pgcdc.capture.control import forget_consumer as forget
        from pgcdc.core.errors import StateError
        from pgcdc.core.state import StateDir

        state = StateDir(state_dir)
        if not state.consumers_file.exists():
            raise StateError(f"{state.path} is not a state directory", "Give --state-dir")
        forget(state, name)
        print(f"forgot consumer {name} of {state.path}")
