"""`pgcdc config`: begin a file, see what holds and why, and help editors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import exit_on_error

__all__ = ["config_app"]

config_app = typer.Typer(
    help="Begin a configuration file, see what holds, help editors.", no_args_is_help=True, add_completion=False
)


@config_app.command("init")
@exit_on_error()
def init_command(
    config: Annotated[Path, typer.Option(help="The file to write; it must not exist.")] = Path("pgcdc.yaml"),
) -> None:
    """Write a file with every setting in it, as comments."""
    from pgcdc.config.template import write_template

    write_template(config)
    typer.echo(f"pgcdc: {config} is written: name the tables in it, set PGCDC_DB, then: pgcdc validate", err=True)


@config_app.command("schema")
@exit_on_error()
def schema_command() -> None:
    """The JSON schema of pgcdc.yaml, for editors."""
    from pgcdc.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@config_app.command("show", cls=SettingsCommand)
@exit_on_error()
def show_command(
    ctx: typer.Context,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """The configuration that holds, without secrets, and where each value comes from."""
    from pgcdc.config.layers import load
    from pgcdc.config.show import effective, show_yaml

    loaded = load(given_flags(ctx), os.environ, config)
    if as_json:
        shown = {name: {"value": value, "origin": origin} for name, (value, origin) in effective(loaded).items()}
        typer.echo(json.dumps(shown, indent=2))
    else:
        typer.echo(show_yaml(loaded), nl=False)
    loaded.check()
