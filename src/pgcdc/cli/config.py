"""`pgcdc config`: create a file, show the effective settings, print the schema. `pgcdc validate`: check that it would
run."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import exit_on_error, show_excerpt, single_errors
from pgcdc.config.documents import effective, json_schema, show_yaml, write_template
from pgcdc.config.layers import load
from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.log import say
from pgcdc.core.state import Lock, StateDir
from pgcdc.core.wording import counted
from pgcdc.run.settings import PipelineSettings, view_source
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec, describe_options, make_sink
from pgcdc.source.protocol import Finding, make_source
from pgcdc.spool.consumers import MAIN
from pgcdc.transform.specs import Chain, PythonSpec, missing_columns
from pgcdc.transform.steps import load_function

config_app = typer.Typer(no_args_is_help=True, add_completion=False)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@config_app.command("init")
@exit_on_error()
def init_command(
    config: Annotated[Path, typer.Option(help="The file to write; it must not exist.")] = Path("pgcdc.yaml"),
) -> None:
    """Write a file with every setting in it, as comments."""
    write_template(config)
    say(f"{config} is written. Name the tables in it, set PGCDC_DB, then run: pgcdc validate")


@config_app.command("schema")
@exit_on_error()
def schema_command() -> None:
    """The JSON schema of pgcdc.yaml, for editors."""
    typer.echo(json.dumps(json_schema(), indent=2))


@config_app.command("show", cls=SettingsCommand)
@exit_on_error()
def show_command(
    ctx: typer.Context, config: Annotated[Path | None, CONFIG_OPTION] = None, as_json: Json = False
) -> None:
    """The effective settings without secrets, and where each was set."""
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


# --- would this configuration run? All checks in the order of a start; nothing is started or left behind


def _run_checks(flags: dict[str, Any], path: Path | None) -> Iterator[Finding]:
    try:
        loaded = load(flags, os.environ, path)
        loaded.check()
    except ConfigError as error:
        yield Finding("configuration", "failed", error.message, error.advice)
        for one in single_errors(error):
            show_excerpt(one)
        return
    yield Finding("configuration", "ok", f"{loaded.file.path}" if loaded.file else "flags and variables")
    yield from run_checks(loaded.config)


def run_checks(config: PipelineSettings) -> Iterator[Finding]:
    """Check everything that a start needs, in the same order. Skips checks whose subject cannot be reached."""
    yield _try("java", _look_at_java)
    state = _try("state directory", partial(_look_at_state, config))
    yield state
    if state.status == "failed":  # run the other checks as for a new directory
        config = config.model_copy(update={"state_dir": Path(tempfile.gettempdir()) / f"pgcdc-none-{uuid.uuid4()}"})
    yield from _check_source(config)
    for spec in config.adapter_specs:
        yield _try(f"adapter {spec.name}", partial(_look_at_adapter, config, spec))
    yield _try("dead letters", partial(_look_at_dead_letters, config))
    chains = (config.global_transforms, *(adapter.transforms for adapter in config.adapter_specs))
    for name in dict.fromkeys(one.function for chain in chains for one in chain if isinstance(one, PythonSpec)):
        yield _try("transform", partial(_look_at_function, name))


def _try(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", look())
    except PgcdcError as error:
        return Finding(name, "failed", error.message.removeprefix(f"{name}: "), error.advice)


def _check_source(config: PipelineSettings) -> Iterator[Finding]:
    source, state, is_sound = make_source(config.source), StateDir(config.state_dir), True
    for finding in source.check(state, MAIN):
        is_sound = is_sound and (finding.status == "ok" or finding.name == "rows")
        yield finding
    if not is_sound:
        return
    if config.table:
        yield _try("typed rows", partial(_look_at_table, config))
    chains = [Chain((*config.global_transforms, *one.transforms), one.routes) for one in config.adapter_specs]
    for missing in missing_columns(chains, source.tables(state)):
        yield Finding("columns", "failed", missing, "Names are case-sensitive")


def _look_at_table(config: PipelineSettings) -> str:
    from pgcdc.spark.options import parse_options, write_options
    from pgcdc.spark.tables import load_table

    table = load_table(parse_options(write_options(config)).but(source=config.source))
    return f"{table.title} with {counted(len(table.columns), 'column')}"


def _look_at_java() -> str:
    from pgcdc.spark.session import MINIMUM_JAVA, check_java

    check_java()
    return f"Java {MINIMUM_JAVA} or newer"


def _look_at_state(config: PipelineSettings) -> str:
    if config.temporary_slot:
        return "none: the slot is temporary"
    state = StateDir(config.state_dir)
    folder = state.path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StateError(
            f"the state directory {state.path} is not writable: {folder} is {'a file' if folder.is_file() else 'closed'}",
            "Choose another one with --state-dir, or change its owner or permissions",
        )
    if not state.path.exists():
        return f"{state.path} will be created"
    state.check_whole()
    holder = Lock.holder(state.run_lock)
    if holder is not None:
        return f"{state.path} is in use by process {holder.get('pid', '?')}; stop it before you start another run"
    return f"{state.path} is {'ours' if state.identity() is not None else 'new'}"


def _look_at_adapter(config: PipelineSettings, spec: AdapterSpec) -> str:
    acks = StateDir(config.state_dir).acks
    Runner(make_sink(spec), acks, spec.name).check()
    chain = Chain((*config.global_transforms, *spec.transforms), spec.routes)
    spec.options.check_source(spec.name, view_source(config, StateDir(config.state_dir), chain))
    routes = f", only {', '.join(spec.routes)}" if spec.routes else ""
    return f"type {spec.type}{describe_options(spec.options)}{routes}"


def _look_at_dead_letters(config: PipelineSettings) -> str:
    from pgcdc.run.letter_service import check_not_captured, make_store

    check_not_captured(config)
    store = make_store(config)
    store.check()
    if config.dlq == "pg_table":
        where = "another database" if config.dlq_db else "the source's database"
        return f"go to table {config.dlq_table} in {where}"
    return "are lost (dlq: none)" if config.dlq == "none" else f"go to {getattr(store, 'path', 'standard error')}"


def _look_at_function(name: str) -> str:
    load_function(name)
    return f"{name} can be loaded"
