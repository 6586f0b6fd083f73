"""`pgcdc validate`: would it run? Everything is looked at, nothing is started, nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, given_flags
from pgcdc.cli.report import exit_on_error

if TYPE_CHECKING:
    from pgcdc.run.validation import Check

__all__ = ["validate"]

WRONG = 2


def validate(
    ctx: typer.Context,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Check configuration, connection, rights, tables and adapters. Starts nothing, leaves nothing behind."""
    logging.disable(logging.ERROR)
    with exit_on_error():
        checks = _run(given_flags(ctx), config, show=not as_json)
        failed = sum(one.status == "failed" for one in checks)
        if as_json:
            typer.echo(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(one) for one in checks]}, indent=2))
        else:
            typer.echo(
                f"pgcdc: {failed} of {len(checks)} checks failed" if failed else "pgcdc: ready to listen", err=True
            )
        if failed:
            raise typer.Exit(WRONG)


def _run(flags: dict[str, Any], path: Path | None, *, show: bool) -> list[Check]:
    from pgcdc.config.layers import load
    from pgcdc.core.errors import ConfigError
    from pgcdc.run.validation import Check, run_checks

    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        if show:
            advice = f". {check.advice}" if check.advice else ""
            typer.echo(" ".join(f"{check.status:<8} {check.name:<15} {check.detail}{advice}".split("\n")))

    try:
        loaded = load(flags, os.environ, path)
        loaded.check()
    except ConfigError as error:
        add(Check("configuration", "failed", error.message, error.advice))
        return checks
    add(Check("configuration", "ok", f"{loaded.file.path}" if loaded.file else "flags and variables"))
    for check in run_checks(loaded.config):
        add(check)
    return checks
