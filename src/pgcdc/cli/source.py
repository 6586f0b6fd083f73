"""`pgcdc slot`, `pgcdc consumer` and `pgcdc describe` show a server and a state directory; and `pgcdc resync`."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated, Any

import typer

from pgcdc.cli.flags import File, State, find_state
from pgcdc.cli.report import confirm, exit_on_error, print_table, show
from pgcdc.core.errors import ConfigError, SourceError, StateError
from pgcdc.core.log import say
from pgcdc.core.state import Lock, StateDir
from pgcdc.postgres.database import Connection, connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.setup.slots import SlotInfo, drop_slot, get_slot, list_slots

slot_app = typer.Typer(no_args_is_help=True, add_completion=False)
consumer_app = typer.Typer(no_args_is_help=True, add_completion=False)

Db = Annotated[str, typer.Option("--db", envvar="PGCDC_DB", show_envvar=True, help="URL of the source database.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Option("--slot-name", help="Name of the slot.")]

_COLUMNS = ("name", "plugin", "database", "active", "wal_status", "confirmed_flush_lsn", "lag_bytes", "retained_bytes")


@slot_app.command("list")
@exit_on_error()
def list_command(db: Db = "", as_json: Json = False) -> None:
    """Every slot of the server."""
    with _connect(db) as conn:
        slots = [_describe_slot(slot) for slot in list_slots(conn)]
    _print(_COLUMNS, slots, as_json)


@slot_app.command("status")
@exit_on_error()
def status_command(
    name: Annotated[str, typer.Argument(help="Name of the slot.", show_default=False)] = "",
    slot_name: Name = "",
    db: Db = "",
    as_json: Json = False,
) -> None:
    """Show one slot: its reader, its position, and how much WAL the server keeps for it."""
    wanted = _require(name or slot_name, "slot", "--slot-name")
    with _connect(db) as conn:
        slot = get_slot(conn, wanted)
    if slot is None:
        raise SourceError(f"slot {wanted} does not exist", "List them with: pgcdc slot list")
    found = _describe_slot(slot)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_table(["slot", slot.name], [[key, show(value)] for key, value in found.items() if key != "name"])


@slot_app.command("drop")
@exit_on_error()
def drop_command(
    slot_name: Name = "",
    db: Db = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Drop a slot. Changes that it holds and that were not delivered are lost."""
    name = _require(slot_name, "slot", "--slot-name")
    if not yes:
        confirm(
            f"Drop slot {name}? Changes that were not delivered will be lost",
            f"dropping slot {name} needs confirmation",
        )
    with _connect(db) as conn:
        drop_slot(conn, name)
    typer.echo(f"slot {name} dropped")


def _connect(db: str) -> Connection:
    return connect(db, application_name="pgcdc slot", may_retry=False)


def _describe_slot(slot: SlotInfo) -> dict[str, Any]:
    """The slot as JSON: LSNs as PostgreSQL writes them, sizes in bytes."""
    raw = dataclasses.asdict(slot)
    for key in ("restart_lsn", "confirmed_flush_lsn"):
        raw[key] = format_lsn(raw[key]) if raw[key] is not None else None
    return raw


def _require(name: str, what: str, flag: str) -> str:
    if not name:
        raise ConfigError(f"no {what} is named", f"Use {flag} NAME")
    return name


def _print(columns: tuple[str, ...], rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        print_table(columns, [[show(row[column]) for column in columns] for row in rows])


@consumer_app.command("list")
@exit_on_error()
def list_consumers(state_dir: State = None, config: File = None) -> None:
    """Show all consumers and their acknowledged positions."""
    from pgcdc.spool.consumers import Consumers

    consumers = Consumers(_check_state(find_state(state_dir, config)).consumers_file)
    for name in consumers.names():
        print(f"{name}\t{consumers[name].ack}")


@consumer_app.command("forget")
@exit_on_error()
def forget_consumer(name: str, state_dir: State = None, config: File = None) -> None:
    """Forget a consumer that will not come back, so that it no longer holds back WAL and segments."""
    from pgcdc.capture.control import forget_consumer as forget

    state = _check_state(find_state(state_dir, config))
    forget(state, name)
    print(f"forgot consumer {name} of {state.path}")


def _check_state(state: StateDir) -> StateDir:
    if not state.consumers_file.exists():
        raise StateError(f"{state.path} is not a state directory", "Set --state-dir to that of the pipeline")
    return state


@exit_on_error()
def describe(
    table: Annotated[str, typer.Option(help="The table: orders, or schema.orders.")] = "",
    db: Db = "",
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
    json_as: Annotated[str, typer.Option("--json", help="json and jsonb: string or variant.")] = "string",
    numeric: Annotated[str, typer.Option(help="numeric: decimal, string or double.")] = "decimal",
    out_of_range: Annotated[
        str, typer.Option(help="Dates and timestamps outside of Spark's range: error, clamp or string.")
    ] = "error",
    arrays: Annotated[str, typer.Option(help="Arrays: array or string.")] = "array",
    composites: Annotated[str, typer.Option(help="Composite types: struct or string.")] = "struct",
) -> None:
    """Show a table as Spark will see it."""
    from pgcdc.source.postgres.single_table import ColumnDescription
    from pgcdc.sources import describe as describe_table

    _require(table, "table", "--table")
    if output not in ("table", "json"):
        raise ConfigError(f"unknown --format {output}", "Use table or json")
    chosen = {"numeric": numeric, "out_of_range": out_of_range, "arrays": arrays, "composites": composites}
    found = [dataclasses.asdict(column) for column in describe_table(db, table, json=json_as, **chosen)]
    _print(tuple(field.name for field in dataclasses.fields(ColumnDescription)), found, output == "json")


@exit_on_error()
def resync(
    db: Db = "",
    state_dir: State = None,
    config: File = None,
    table: Annotated[
        list[str] | None,
        typer.Option(help="The slot works: read only this table again. Repeatable."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="With --table: only this adapter replaces its copy, also while the pipeline runs. Repeatable."
        ),
    ] = None,
    new_slot: Annotated[
        bool, typer.Option("--new-slot", help="Replace a slot that still works, or follow another server.")
    ] = False,
    tables: Annotated[
        str, typer.Option(help="Capture these tables from now on: a,b,schema.c. (default: the same as before)")
    ] = "",
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Send a TRUNCATE of every table before its rows, instead of comparing keys."),
    ] = False,
    two_phase: Annotated[
        bool, typer.Option("--two-phase", help="Create the new slot for pgcdc listen --two-phase.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Repair targets: one copy (--table, --adapter), or everything after a lost slot, including deletes."""
    from pgcdc.config.layers import load
    from pgcdc.core.settings import split_outside_quotes
    from pgcdc.run.resync import Resync

    given = {"db": db, "state_dir": state_dir}
    settings = load({name: one for name, one in given.items() if one}, os.environ, config).config
    db, state = settings.db, StateDir(settings.state_dir)
    if not db:
        raise ConfigError("no database is set", "Use --db or the variable PGCDC_DB")
    if adapter:
        _replace(db, state, table or [], adapter, yes)
        return
    chosen = tuple(name for name in split_outside_quotes(tables, ",") if name)
    with Resync(db, state.path, tuple(table or ()), new_slot, chosen, truncate, two_phase, say) as one:
        for line in one.plan():
            say(line)
        if not yes and not one.note:
            confirm("Continue?", "nothing was changed: a resync needs confirmation")
        one.run()
    say("done. Start pgcdc listen as before: it repairs the targets")


def _replace(db: str, state: StateDir, tables: list[str], adapters: list[str], yes: bool) -> None:
    from pgcdc.run.table_reloads import find_tables, hold_tables
    from pgcdc.source.postgres.options import PostgresOptions
    from pgcdc.source.protocol import make_source

    if not tables:
        raise ConfigError("--adapter selects the adapters that replace their copy of a table", "Add --table NAME")
    identity = state.identity()
    if identity is None:
        raise StateError(f"{state.path} is not a state directory of pgcdc", "Set --state-dir to that of the pipeline")
    captured = make_source(PostgresOptions(db=db)).captured(identity)
    wanted = find_tables(state, captured, tables, adapters)
    say(f"{', '.join(adapters)} will empty {', '.join(wanted.values())} and receive every row again")
    if not yes:
        confirm("Continue?", "nothing was changed: a resync needs confirmation")
    hold_tables(state, wanted, adapters)
    is_running = Lock.holder(state.run_lock) is not None
    when = "requested: pgcdc sentinel --wait returns when the copies are complete"
    say(when if is_running else "done. Start pgcdc listen as before: it replaces them")
