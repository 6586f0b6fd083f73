"""`pgcdc slot`: the replication slots of a server."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated, Any

import typer

from pgcdc.cli.report import exit_on_error, print_table, show
from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.postgres.database import connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.setup.slots import SlotInfo, drop_slot, get_slot, list_slots

__all__ = ["slot_app"]

slot_app = typer.Typer(help="List, inspect and drop replication slots.", no_args_is_help=True, add_completion=False)

Db = Annotated[str, typer.Option("--db", envvar="PGCDC_DB", show_envvar=True, help="URL of the source database.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Name = Annotated[str, typer.Option("--slot-name", help="Name of the slot.")]

_COLUMNS = ("name", "plugin", "database", "active", "wal_status", "confirmed_flush_lsn", "lag_bytes", "retained_bytes")

_HEADINGS = {"wal_status": "wal", "confirmed_flush_lsn": "confirmed", "lag_bytes": "lag B", "retained_bytes": "kept B"}


@slot_app.command("list")
@exit_on_error()
def list_command(db: Db = "", as_json: Json = False) -> None:
    """Every slot of the server."""
    with connect(db, application_name="pgcdc slot", may_retry=False) as conn:
        slots = [describe(slot) for slot in list_slots(conn)]
    if as_json:
        typer.echo(json.dumps(slots, indent=2))
        return
    rows = [[show(slot[column]) for column in _COLUMNS] for slot in slots]
    print_table(_COLUMNS, rows, _HEADINGS)


@slot_app.command("status")
@exit_on_error()
def status_command(
    name: Annotated[str, typer.Argument(help="Name of the slot.", show_default=False)] = "",
    slot_name: Name = "",
    db: Db = "",
    as_json: Json = False,
) -> None:
    """One slot: who reads it, how far, and how much WAL the server keeps for it."""
    wanted = _require(name or slot_name)
    with connect(db, application_name="pgcdc slot", may_retry=False) as conn:
        slot = get_slot(conn, wanted)
    if slot is None:
        raise SourceError(f"slot {wanted} does not exist", "pgcdc slot list shows those that do")
    if as_json:
        typer.echo(json.dumps(describe(slot), indent=2))
        return
    print_table(["slot", slot.name], [[key, show(value)] for key, value in describe(slot).items() if key != "name"])


@slot_app.command("drop")
@exit_on_error()
def drop_command(
    slot_name: Name = "",
    db: Db = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Drop a slot: what it holds and was not delivered is lost."""
    name = _require(slot_name)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"dropping slot {name} needs a confirmation", "Add --yes")
        typer.confirm(f"Drop slot {name}? Changes that were not delivered are lost", abort=True)
    with connect(db, application_name="pgcdc slot", may_retry=False) as conn:
        drop_slot(conn, name)
    typer.echo(f"slot {name} dropped")


def describe(slot: SlotInfo) -> dict[str, Any]:
    """The slot as JSON: LSNs as PostgreSQL writes them, sizes in bytes."""
    raw = dataclasses.asdict(slot)
    for key in ("restart_lsn", "confirmed_flush_lsn"):
        raw[key] = format_lsn(raw[key]) if raw[key] is not None else None
    return raw


def _require(name: str) -> str:
    if not name:
        raise ConfigError("no slot is named", "Use --slot-name NAME")
    return name
