"""`pgcdc sentinel`: check that all targets have everything committed before now."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pgcdc.cli.flags import File, State, find_state
from pgcdc.cli.report import exit_on_error
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import parse_seconds


def sentinel(
    state_dir: State = None,
    config: File = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every adapter has it.")] = False,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="With --wait: only for this adapter. Repeatable.")
    ] = None,
    timeout: Annotated[
        str, typer.Option(help="With --wait: exit 1 after this time, such as 500ms, 30s or 5m.")
    ] = "30s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Mark this moment in a running pipeline's stream, and wait until its targets have everything before it."""
    with exit_on_error():
        from pgcdc.run.sentinel import Sentinel

        if adapter and not wait:
            raise ConfigError("--adapter selects the adapters to wait for", "Add --wait")
        try:
            timeout_s = parse_seconds(timeout)
        except ValueError as error:
            raise ConfigError(f"--timeout {timeout}: {error}", "Write a time such as 500ms, 30s or 5m") from None
        made, seconds = Sentinel(find_state(state_dir, config), adapter or ()), None
        try:
            seconds = made.wait(timeout_s) if wait else None
        finally:
            if as_json:
                report = {"id": made.id, "asked_at": made.asked_at.isoformat(), "adapters": made.took_s}
                print(json.dumps({**report, "position": made.position and str(made.position), "seconds": seconds}))
            elif wait:
                for name, took_s in made.took_s.items():
                    print(f"{name:<28} {took_s:.2f} s")
            else:
                print(made.id)
        if seconds is not None and not as_json:
            moment = f"{made.asked_at:%H:%M:%S.%f}"[:-3]
            who = "these targets" if adapter else "all targets"
            print(f"{who} have everything that was committed before {moment} ({seconds:.2f} s)")
