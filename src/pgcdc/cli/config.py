"""`pgcdc config`: create a file, show the effective settings, print the schema. `pgcdc validate`: would it run?"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import exit_on_error, say

if TYPE_CHECKING:
    from pgcdc.source.protocol import Finding

config_app = typer.Typer(no_args_is_help=True, add_completion=False)
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@config_app.command("init")
@exit_on_error()
def init_command(
    config: Annotated[Path, typer.Option(help="The file to write; it must not exist.")] = Path("pgcdc.yaml"),
) -> None:
    """Write a file with every setting in it, as comments."""
    from pgcdc.config.documents import write_template

    write_template(config)
    say(f"{config} is written: name the tables in it, set PGCDC_DB, then: pgcdc validate")


@config_app.command("schema")
@exit_on_error()
def schema_command() -> None:
    """The JSON schema of pgcdc.yaml, for editors."""
    from pgcdc.config.documents import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@config_app.command("show", cls=SettingsCommand)
@exit_on_error()
def show_command(
    ctx: typer.Context, config: Annotated[Path | None, CONFIG_OPTION] = None, as_json: Json = False
) -> None:
    """The effective settings without secrets, and where each was set."""
    from pgcdc.config.documents import effective, show_yaml
    from pgcdc.config.layers import load

    loaded = load(given_flags(ctx), os.environ, config)
    if as_json:
        shown = {name: {"value": value, "origin": origin} for name, (value, origin) in effective(loaded).items()}
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(show_yaml(loaded), nl=False)
    loaded.check()


@exit_on_error()
def validate(ctx: typer.Context, config: Annotated[Path | None, CONFIG_OPTION] = None, as_json: Json = False) -> None:
    """Check everything that a start needs; start nothing, leave nothing behind."""
    logging.disable(logging.ERROR)
    checks = []
    for check in _run_checks(given_flags(ctx), config):
        checks.append(check)
        if not as_json:
            advice = f". {check.advice}" if check.advice else ""
            typer.echo(f"{check.status:<8} {check.name:<15} {check.detail}{advice}".replace("\n", " "))
    failed = sum(one.status == "failed" for one in checks)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(one) for one in checks]}, indent=2))
    else:
        say(f"{failed} of {len(checks)} checks failed" if failed else "ready to listen")
    if failed:
        raise typer.Exit(2)


def _run_checks(flags: dict[str, Any], path: Path | None) -> Iterator[Finding]:
    from pgcdc.config.layers import load
    from pgcdc.core.errors import ConfigError
    from pgcdc.run.validation import run_checks
    from pgcdc.source.protocol import Finding

    try:
        loaded = load(flags, os.environ, path)
        loaded.check()
    except ConfigError as error:
        yield Finding("configuration", "failed", error.message, error.advice)
        return
    yield Finding("configuration", "ok", f"{loaded.file.path}" if loaded.file else "flags and variables")
    yield from run_checks(loaded.config)
