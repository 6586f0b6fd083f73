"""`pgcdc snapshot`: the rows that are there, once to Parquet or as events, or again in a stream that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.report import exit_on_error

if TYPE_CHECKING:
    from pgcdc.run.copy_tables import Progress, Wanted

__all__ = ["print_snapshots", "snapshot"]

NOBODY_READS = 128 + signal.SIGPIPE
"""The exit code of every command of Unix whose reader has gone."""

Text = str
Type = str | None


def snapshot(
    db: Annotated[
        Text, typer.Option("--db", envvar="PGCDC_DB", show_envvar=True, help="URL of the source database.")
    ] = "",
    table: Annotated[list[str] | None, typer.Option(help="A table: orders, or schema.orders. Repeatable.")] = None,
    tables: Annotated[Text, typer.Option(help="Tables: a,b,schema.c.")] = "",
    schemas: Annotated[Text, typer.Option(help="All tables of these schemas: a,b.")] = "",
    all_tables: Annotated[bool, typer.Option("--all-tables", help="All tables.")] = False,
    where: Annotated[Text, typer.Option(help="Only rows for which this is true, of one table: 'total > 100'.")] = "",
    to: Annotated[Text, typer.Option(help="parquet:DIR: typed columns, a folder for each table.")] = "",
    adapter: Annotated[
        list[str] | None, typer.Option(help="Events to stdout or file. Repeatable. (default: stdout)")
    ] = None,
    file_path: Annotated[Path | None, typer.Option(help="The file of --adapter file.")] = None,
    partitions: Annotated[
        int | None, typer.Option(help="With --to: how many tasks read a table. (default: by its size)")
    ] = None,
    json_as: Annotated[Type, typer.Option("--json-as", help="With --to: json as string or variant.")] = None,
    numeric: Annotated[Type, typer.Option(help="With --to: numeric as decimal, string or double.")] = None,
    out_of_range: Annotated[Type, typer.Option(help="With --to: infinity, BC: error, clamp or string.")] = None,
    arrays: Annotated[Type, typer.Option(help="With --to: array or string.")] = None,
    composites: Annotated[Type, typer.Option(help="With --to: struct or string.")] = None,
    invalid_utf8: Annotated[
        Text, typer.Option(help="Of events: bytes that are not UTF-8: error, replace or base64.")
    ] = "error",
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Read tables again while their pipeline runs, into its stream.")
    ] = False,
    chunk_size: Annotated[int, typer.Option(help="With --incremental: rows at a time. (default: adaptive)")] = 0,
    chunk_delay: Annotated[Text, typer.Option(help="With --incremental: rest between chunks: 100ms, 2s.")] = "",
    pause: Annotated[Text, typer.Option(metavar="ID", help="Pause an incremental snapshot.")] = "",
    resume: Annotated[Text, typer.Option(metavar="ID", help="Go on with a paused one.")] = "",
    stop: Annotated[Text, typer.Option(metavar="ID", help="End one where it is.")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="Show incremental snapshots.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: for machines.")] = False,
    state_dir: Annotated[
        Path, typer.Option(help="Of the pipeline: for --incremental and what follows.", envvar="PGCDC_STATE_DIR")
    ] = Path(".pgcdc"),
) -> None:
    """Copy tables as they are now: consistent, complete, and without a trace on the server.

    With --incremental (and --pause, --resume, --stop, --list): rows again in the stream of a pipeline, beside its changes.
    """
    with exit_on_error():
        from pgcdc.core.errors import ConfigError
        from pgcdc.core.settings import split_outside_quotes

        names = [*(table or []), *split_outside_quotes(tables, ",")]
        types = {"json": json_as, "numeric": numeric, "out_of_range": out_of_range, "arrays": arrays}
        given_types = {name: one for name, one in {**types, "composites": composites}.items() if one is not None}
        changes = {"pause": pause, "resume": resume, "stop": stop}
        asked = [f"--{name}" for name, one in changes.items() if one]
        asked += [*(["--incremental"] if incremental else []), *(["--list"] if list_all else [])]
        if len(asked) > 1:
            raise ConfigError(f"{asked[0]} and {asked[1]} are given", "Give one of them")
        if not asked and (chunk_size or chunk_delay):
            raise ConfigError(
                "--chunk-size and --chunk-delay are for --incremental", "Add --incremental, or leave them out"
            )
        if asked:
            flags = {"to": to, "adapter": adapter, "file_path": file_path, "partitions": partitions, "schemas": schemas}
            for name, one in {**flags, "all_tables": all_tables, **given_types}.items():
                if one:
                    raise ConfigError(
                        f"{_flag(name)} is not for {asked[0]}", "Leave it out: rows go where the pipeline delivers"
                    )
        if incremental:
            _add(names, where, chunk_size, chunk_delay, state_dir)
        elif list_all:
            _list(state_dir, as_json)
        elif asked:
            _change(changes, state_dir)
        else:
            from pgcdc.run.copy_tables import Wanted

            wanted = Wanted(db, tuple(names), tuple(split_outside_quotes(schemas, ",")), all_tables, where)
            wanted.check()
            _copy(wanted, to, adapter, file_path, partitions, given_types, invalid_utf8)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# --- once


def _copy(
    wanted: Wanted,
    to: str,
    adapters: list[str] | None,
    file_path: Path | None,
    partitions: int | None,
    types: dict[str, str],
    invalid_utf8: str,
) -> None:
    from pgcdc.cli.copy_progress import make_progress
    from pgcdc.core.errors import ConfigError
    from pgcdc.event.frame import INVALID_TEXT

    if not to:
        for flag, one in (("partitions", partitions), *types.items()):
            if one is not None:
                raise ConfigError(f"{_flag(flag)} is for --to parquet:DIR", "Leave it out, or add --to")
        if file_path is not None and "file" not in (adapters or []):
            raise ConfigError("--file-path is given without --adapter file", "Add --adapter file")
    elif adapters or file_path:
        raise ConfigError("--to and --adapter are given", "Give one of them")
    if invalid_utf8 not in INVALID_TEXT:
        raise ConfigError(f"--invalid-utf8 {invalid_utf8} is not known", f"Give one of: {', '.join(INVALID_TEXT)}")
    progress = make_progress()
    signal.signal(signal.SIGTERM, _end)
    try:
        if to:
            rows = _to_parquet(wanted, to, partitions, types, progress)
        else:
            from pgcdc.run.copy_events import copy_to_adapters

            chosen = list(dict.fromkeys(adapters or ["stdout"]))
            rows = copy_to_adapters(wanted, chosen, file_path, invalid_text=invalid_utf8, progress=progress, say=_say)
    except BrokenPipeError:  # `| head`: it has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(NOBODY_READS) from None
    except KeyboardInterrupt:
        is_gone = to or adapters == ["file"]
        _say(f"stopped: {'nothing is left behind' if is_gone else 'what was written is not complete'}")
        raise
    finally:
        progress.close()
    _say(f"complete: {rows:,} row{'s' if rows != 1 else ''}")


def _to_parquet(wanted: Wanted, to: str, partitions: int | None, types: dict[str, str], progress: Progress) -> int:
    from pgcdc.core.errors import ConfigError

    kind, _, folder = to.partition(":")
    if kind != "parquet" or not folder:
        raise ConfigError(f"--to {to} is not known", "Write --to parquet:DIR")
    if re.match(r"\w+://", folder):
        raise ConfigError(f"--to {to} is not a folder of this host", "Write --to parquet:DIR, and copy it from there")
    if partitions is not None and partitions < 1:
        raise ConfigError(f"--partitions {partitions} is not a number above 0", "Leave it out for the default")
    from pgcdc.run.copy_parquet import copy_to_parquet

    return copy_to_parquet(wanted, Path(folder), partitions=partitions or 0, types=types, progress=progress, say=_say)


def _say(text: str) -> None:
    print(f"pgcdc: {text}", file=sys.stderr, flush=True)


def _end(number: int, _: FrameType | None) -> None:
    """As an interrupt from the keyboard: what was begun is removed."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


# --- in a stream


def _add(names: list[str], where: str, chunk_size: int, chunk_delay: str, state_dir: Path) -> None:
    from pgcdc.capture.asking import add_snapshots
    from pgcdc.core.errors import ConfigError
    from pgcdc.core.state import Lock, StateDir
    from pgcdc.postgres.database import name_table, split_table
    from pgcdc.source.postgres.snapshot.requests import SnapshotRequest, new_id

    if not names:
        raise ConfigError("no table is named", "Use --table NAME")
    if where and len(names) > 1:
        raise ConfigError("--where is a condition on one table", "Ask for one table at a time")
    delay_s = _parse_delay(chunk_delay)
    chosen = dict.fromkeys(name_table(*split_table(name)) for name in names)
    requests = [
        SnapshotRequest(new_id(), name, "incremental", where, chunk_size=chunk_size, chunk_delay_s=delay_s)
        for name in chosen
    ]
    state = StateDir(state_dir)
    add_snapshots(state, requests)
    later = "" if Lock.holder(state.capture_lock) else ", begins when the pipeline runs"
    for request in requests:
        print(f"{request.id}\t{request.table}\tqueued{later}")


def _parse_delay(text: str) -> float:
    from pgcdc.core.errors import ConfigError
    from pgcdc.core.units import parse_seconds

    try:
        return parse_seconds(text) if text else 0.0
    except ValueError:
        raise ConfigError(f"--chunk-delay {text} is not a time", "Write 100ms, or 2s") from None


def _change(changes: dict[str, str], state_dir: Path) -> None:
    from pgcdc.capture.asking import change_snapshot
    from pgcdc.core.state import StateDir

    action, name = next((action, name) for action, name in changes.items() if name)
    change_snapshot(StateDir(state_dir), action, name)
    done = {"pause": "paused", "resume": "goes on", "stop": "stopped"}
    print(f"{name}\t{done[action]}")


def _list(state_dir: Path, as_json: bool) -> None:
    from pgcdc.capture.asking import list_snapshots
    from pgcdc.core.state import StateDir

    found = list_snapshots(StateDir(state_dir))
    if as_json:
        print(json.dumps(found))
    else:
        print_snapshots(found)


def print_snapshots(snapshots: list[dict[str, Any]]) -> None:
    """A table of what is read, for people; also for `pgcdc status`."""
    from pgcdc.cli.copy_progress import describe_seconds
    from pgcdc.cli.report import print_table

    header = ["id", "table", "kind", "status", "rows", "of about", "percent", "rows/s", "left", "error"]
    rows = [
        [
            str(one.get("id") or "-"),
            str(one.get("table")),
            str(one.get("kind") or "-"),
            str(one.get("status") or "-"),
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
