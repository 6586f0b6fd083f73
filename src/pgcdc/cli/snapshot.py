"""`pgcdc snapshot`: copy the existing rows once, through adapters or to Parquet, or reread them in a running stream."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.flags import CONFIG_OPTION, SettingsCommand, given_flags
from pgcdc.cli.report import drop_output, exit_on_error, print_table
from pgcdc.core.errors import ConfigError, PgcdcError, SinkError
from pgcdc.core.log import begin_log, say
from pgcdc.core.state import Lock, StateDir
from pgcdc.core.wording import counted

if TYPE_CHECKING:
    from pgcdc.config import Config
    from pgcdc.run.copy_source import Wanted

NOBODY_READS = 128 + signal.SIGPIPE  # The exit code of a Unix command whose reader has closed the pipe
DONE = {"pause": "paused", "resume": "resumed", "stop": "stopped"}
TYPES = ("numeric", "out_of_range", "arrays", "composites")


class SnapshotCommand(SettingsCommand):
    """Accepts the settings that a copy uses: database, tables, adapters, transforms and types."""

    left_out = (
        "table", "changelog", "truncate", "slot_name", "persistent_slot", "temporary_slot", "start_from", "streaming",
        "two_phase", "origin", "binary", "fail_fast", "generated_columns", "accept_publication", "adapter_priority",
        "bus_mode", "bus_buffer", "cooperative_checkpoint", "dlq", "dlq_file", "dlq_db", "dlq_db_file", "dlq_table",
        "snapshot_mode", "snapshot_first", "snapshot_table", "snapshot_hold_limit", "incremental_snapshot", "signal_table",
        "snapshot_chunk_size", "snapshot_chunk_delay", "toast", "toast_cache", "toast_cache_max_entries", "messages",
        "tx_metadata", "tx_markers", "schema_events", "sentinel_events", "spool_limit", "max_batch_rows", "once", "warm_up",
        "verify_every",
    )  # fmt: skip


def snapshot(
    ctx: typer.Context,
    config: Annotated[Path | None, CONFIG_OPTION] = None,
    name: Annotated[
        list[str] | None, typer.Option("--table", help="A table: orders, or schema.orders. Repeatable.")
    ] = None,
    where: Annotated[str, typer.Option(help="Only rows that match this condition, of one table: 'total > 100'.")] = "",
    to: Annotated[str, typer.Option(help="parquet:DIR writes typed columns, a folder for each table.")] = "",
    partitions: Annotated[
        int | None, typer.Option(help="With --to: how many tasks read a table. (default: by its size)")
    ] = None,
    json_as: Annotated[str | None, typer.Option("--json-as", help="With --to: read json as string or variant.")] = None,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Read tables again into the stream of their running pipeline.")
    ] = False,
    chunk_size: Annotated[int, typer.Option(help="With --incremental: rows per chunk. (default: adaptive)")] = 0,
    chunk_delay: Annotated[str, typer.Option(help="With --incremental: pause between chunks: 100ms, 2s.")] = "",
    pause: Annotated[str, typer.Option(metavar="ID", help="Pause an incremental snapshot.")] = "",
    resume: Annotated[str, typer.Option(metavar="ID", help="Resume a paused one.")] = "",
    stop: Annotated[str, typer.Option(metavar="ID", help="Stop one; rows already read stay.")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="Show incremental snapshots.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print JSON.")] = False,
) -> None:
    """Copy tables as they are now through adapters: consistent, complete, and without a trace on the server.

    Applies the transforms, masks and routes of the configuration. With --incremental (and --pause, --resume, --stop,
    --list), rereads rows in the stream of a running pipeline, beside its changes.
    """
    with exit_on_error():
        from pgcdc.config.layers import load

        flags = given_flags(ctx)
        changes = {"pause": pause, "resume": resume, "stop": stop}
        ways = {**changes, "incremental": incremental, "list": list_all}
        asked = [f"--{way}" for way, one in ways.items() if one]
        if len(asked) > 1:
            raise ConfigError(f"{asked[0]} and {asked[1]} cannot be combined", "Use one of them")
        if not asked and (chunk_size or chunk_delay):
            raise ConfigError("--chunk-size and --chunk-delay need --incremental", "Add --incremental, or remove them")
        for flag, one in {"to": to, "partitions": partitions, "json_as": json_as, **flags}.items() if asked else ():
            if one and flag not in ("tables", "state_dir", "db"):
                raise ConfigError(
                    f"{_flag(flag)} cannot be combined with {asked[0]}",
                    "Remove it: rows go where the pipeline delivers",
                )
        loaded = load(flags, os.environ, config)
        settings, names = loaded.config, [*(name or []), *((flags.get("tables") and loaded.config.tables) or ())]
        try:
            if incremental:
                _add(names, where, chunk_size, chunk_delay, StateDir(settings.state_dir))
            elif list_all:
                from pgcdc.run.control import list_snapshots

                found = list_snapshots(StateDir(settings.state_dir))
                print(json.dumps(found)) if as_json else print_snapshots(found)
            elif asked:
                from pgcdc.run.control import ask_snapshots

                action, one = next((action, one) for action, one in changes.items() if one)
                ask_snapshots(StateDir(settings.state_dir), {"action": action, "id": one})
                print(f"{one}\t{DONE[action]}")
            else:
                types = {"json": json_as, **{one: flags.get(one) for one in TYPES}}
                given = {one: text for one, text in types.items() if text is not None}
                _copy(settings, _wanted(settings, flags, names, where), to, partitions, given)
        except PgcdcError as error:
            raise loaded.safe(error) if isinstance(error, ConfigError) else error from error


snapshot_app = typer.Typer(add_completion=False)
snapshot_app.command("snapshot", cls=SnapshotCommand)(snapshot)


def _flag(name: str) -> str:
    return "--adapter" if name == "adapters" else f"--{name.replace('_', '-')}"


# --- a one-time copy


def _wanted(settings: Config, flags: dict[str, Any], names: list[str], where: str) -> Wanted:
    """The tables from the flags, or otherwise from the configuration."""
    from pgcdc.postgres.selection import Selection
    from pgcdc.run.copy_source import Wanted

    source = settings.source_options()
    chosen, publication = source.part(Selection), settings.publication if source.uses_existing else ""
    if names or flags.keys() & {"tables", "schemas", "all_tables", "publication"}:
        schemas = settings.schemas if "schemas" in flags else ()
        is_all = settings.all_tables and "all_tables" in flags
        chosen = Selection(tables=tuple(names), schemas=schemas, all_tables=is_all)
        chosen = chosen.but(row_filters=settings.row_filters, columns=settings.columns)
        publication = settings.publication if "publication" in flags else ""
    wanted = Wanted(settings.db, chosen, publication or "", where)
    wanted.check()
    return wanted


def _copy(settings: Config, wanted: Wanted, to: str, partitions: int | None, types: dict[str, str]) -> None:
    from pgcdc.cli.report import CopyProgress
    from pgcdc.event.frame import EventOptions
    from pgcdc.run.copy import copy_to_adapters, copy_to_parquet
    from pgcdc.run.settings import choose_specs
    from pgcdc.sink.spec import keep_secrets

    if not to:
        for flag, one in (("partitions", partitions), *types.items()):
            if one is not None:
                raise ConfigError(f"{_flag(flag)} needs --to parquet:DIR", "Remove it, or add --to")
    specs, transforms = choose_specs(settings, None), settings.global_transforms
    keep_secrets([settings.db, settings.dlq_db], specs, transforms)
    signal.signal(signal.SIGTERM, _end)
    begin_log(settings.log_format)
    progress = CopyProgress()
    try:
        if to:
            folder = _parquet_folder(settings, wanted, to, partitions)
            rows = copy_to_parquet(
                wanted, folder, partitions=partitions or 0, types=types, progress=progress, say=say
            )  # fmt: skip
        else:
            options = EventOptions(invalid_text=settings.invalid_utf8)
            rows = copy_to_adapters(wanted, specs, transforms, options=options, progress=progress, say=say)
    except SinkError as error:
        if not isinstance(error.__cause__, BrokenPipeError) or len(specs) > 1:
            raise
        drop_output()
        raise typer.Exit(NOBODY_READS) from None  # `| head`: the reader has enough
    except KeyboardInterrupt:
        say("stopped: the copy is incomplete")
        raise
    finally:
        progress.close()
    say(f"copy complete: {counted(rows, 'row')}")


def _parquet_folder(settings: Config, wanted: Wanted, to: str, partitions: int | None) -> Path:
    """The folder of `--to`. Parquet contains the tables' own columns, so refuse settings that would hide some of
    them."""
    if "adapters" in settings.model_fields_set:
        raise ConfigError("--to and --adapter cannot be combined", "Use one of them")
    rules = wanted.selection.row_filters or wanted.selection.columns or wanted.publication
    hiding = settings.global_transforms or any(one.transforms or one.routes for one in settings.adapter_specs)
    if rules or hiding:
        raise ConfigError(
            "--to parquet copies whole tables, but the configuration has transforms, routes, row filters or columns",
            "Copy events with --adapter, or remove them",
        )
    kind, _, folder = to.partition(":")
    if kind != "parquet" or not folder:
        raise ConfigError(f"unknown --to {to}", "Write --to parquet:DIR")
    if re.match(r"\w+://", folder):
        raise ConfigError(
            f"--to {to} is not a folder on this host", "Write --to parquet:DIR, and copy the files from there"
        )
    if partitions is not None and partitions < 1:
        raise ConfigError(f"--partitions must be at least 1, got {partitions}", "Remove it for the default")
    return Path(folder)


def _end(number: int, _: FrameType | None) -> None:
    """Treat the signal like Ctrl-C, which removes unfinished output."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


# --- in a running stream


def _add(names: list[str], where: str, chunk_size: int, chunk_delay: str, state: StateDir) -> None:
    from pgcdc.core.settings import parse_seconds
    from pgcdc.postgres.database import name_table, split_table
    from pgcdc.run.control import add_snapshots
    from pgcdc.source.postgres.snapshot.requests import SnapshotRequest, new_id

    if not names:
        raise ConfigError("no table is named", "Use --table NAME")
    if where and len(names) > 1:
        raise ConfigError("--where applies to one table", "Request one table at a time")
    try:
        delay_s = parse_seconds(chunk_delay) if chunk_delay else 0.0
    except ValueError:
        raise ConfigError(f"--chunk-delay {chunk_delay} is not a time", "Write it like 100ms or 2s") from None
    chosen = dict.fromkeys(name_table(*split_table(name)) for name in names)
    requests = [
        SnapshotRequest(new_id(), name, "incremental", where, chunk_size=chunk_size, chunk_delay_s=delay_s)
        for name in chosen
    ]
    add_snapshots(state, requests)
    later = "" if Lock.holder(state.capture_lock) else ", starts when the pipeline runs"
    for request in requests:
        print(f"{request.id}\t{request.table}\tqueued{later}")


def print_snapshots(snapshots: list[dict[str, Any]]) -> None:
    """Print the snapshots in progress as a table for people; also used by `pgcdc status`."""
    from pgcdc.cli.report import describe_seconds

    header = ["id", "table", "kind", "status", "rows", "of about", "percent", "rows/s", "left", "error"]
    rows = [
        [
            *(str(one.get(name) or "-") for name in header[:4]),
            f"{one.get('rows') or 0:,}",
            f"{one['estimated_rows']:,}" if one.get("estimated_rows") else "-",
            f"{one['percent']:.0f} %" if one.get("percent") is not None else "-",
            f"{rate:,.0f}" if (rate := one.get("rate") or one.get("rows_per_s")) else "-",
            describe_seconds(one.get("seconds_left")),
            str(one.get("error") or ""),
        ]
        for one in snapshots
    ]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    print_table(header, rows)
