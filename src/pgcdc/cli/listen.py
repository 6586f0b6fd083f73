"""`pgcdc listen`: deliver changes until stopped, or once."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgcdc.cli.progress import SnapshotProgress
from pgcdc.cli.report import exit_on_error

if TYPE_CHECKING:
    from pgcdc.pipeline import Pipeline

__all__ = ["listen"]

Text = str | None
Flag = bool | None


def listen(
    db: Annotated[Text, typer.Option(help="Database URL. Better in PGCDC_DB: arguments are visible to others.")] = None,
    detector: Annotated[Text, typer.Option(help="Where changes come from: wal.")] = None,
    slot_name: Annotated[
        Text, typer.Option(help="Replication slot; created if it does not exist. (default: pgcdc)")
    ] = None,
    persistent_slot: Annotated[Flag, typer.Option("--persistent-slot", help="Accepted; slots are persistent.")] = None,
    temporary_slot: Annotated[
        Flag, typer.Option("--temporary-slot", help="For trials with stdout: no state, ends with the connection.")
    ] = None,
    publication: Annotated[Text, typer.Option(help="Use this existing publication.")] = None,
    tables: Annotated[Text, typer.Option(help="Capture these tables: a,b,schema.c. Creates our publication.")] = None,
    all_tables: Annotated[
        Flag, typer.Option("--all-tables", help="Capture all tables. Creates our publication.")
    ] = None,
    schemas: Annotated[
        Text, typer.Option(help="Capture all tables of these schemas: a,b. Creates our publication.")
    ] = None,
    table: Annotated[
        Text, typer.Option(help="Typed rows of this table instead of events: its own columns. See docs/types.md.")
    ] = None,
    changelog: Annotated[
        Text, typer.Option(help="With --table: changes, or zset (rows with weights). (default: changes)")
    ] = None,
    truncate: Annotated[
        Text, typer.Option(help="With --changelog zset: error, or mark (a row for it). (default: error)")
    ] = None,
    numeric: Annotated[
        Text, typer.Option(help="With --table: numeric as decimal, string or double. (default: decimal)")
    ] = None,
    out_of_range: Annotated[
        Text, typer.Option(help="With --table: infinity, BC: error, clamp, or dates as string. (default: error)")
    ] = None,
    arrays: Annotated[Text, typer.Option(help="With --table: array or string. (default: array)")] = None,
    composites: Annotated[Text, typer.Option(help="With --table: struct or string. (default: struct)")] = None,
    row_filter: Annotated[
        list[str] | None, typer.Option(help="Only these rows: 'orders=total > 100'. Repeatable. PostgreSQL 15.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="Only these columns: orders=id,total. Repeatable. PostgreSQL 15.")
    ] = None,
    generated_columns: Annotated[
        Flag, typer.Option("--generated-columns", help="Also stored generated columns. PostgreSQL 18.")
    ] = None,
    streaming: Annotated[
        Flag,
        typer.Option("--streaming/--no-streaming", help="Read large transactions while they run. (default: yes)"),
    ] = None,
    two_phase: Annotated[
        Flag, typer.Option("--two-phase", help="Decode prepared transactions at PREPARE. PostgreSQL 15, new slots.")
    ] = None,
    origin: Annotated[
        Text, typer.Option(help="none: leave out what was replicated to the server. PostgreSQL 16. (default: any)")
    ] = None,
    binary: Annotated[
        Flag, typer.Option("--binary", help="Values travel in binary form; events are the same. PostgreSQL 14.")
    ] = None,
    toast: Annotated[
        Text,
        typer.Option(help="Long values that an update left alone: full (old row), cache, or mark. (default: mark)"),
    ] = None,
    toast_cache_max_entries: Annotated[
        int | None, typer.Option(help="Rows that --toast cache remembers. (default: 100000)")
    ] = None,
    messages: Annotated[
        Flag, typer.Option("--messages", help="Also what pg_logical_emit_message writes. PostgreSQL 14.")
    ] = None,
    tx_metadata: Annotated[
        Flag, typer.Option("--tx-metadata", help="Events name their transaction: xid, commit time, number.")
    ] = None,
    tx_markers: Annotated[
        Flag, typer.Option("--tx-markers", help="Also BEGIN and COMMIT events, on pgcdc:_txn.")
    ] = None,
    schema_events: Annotated[
        Flag, typer.Option("--schema-events", help="Also an event when a table is altered, on pgcdc:_schema.")
    ] = None,
    invalid_utf8: Annotated[
        Text, typer.Option(help="Bytes that are not UTF-8: error, replace or base64. (default: error)")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="Where events go: stdout, file. Repeatable. (default: stdout)")
    ] = None,
    file_path: Annotated[Path | None, typer.Option(help="The file of --adapter file.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Spool, acks and checkpoints. (default: .pgcdc)")] = None,
    snapshot_mode: Annotated[
        Text,
        typer.Option(help="Rows that are there: initial, never, always or initial_only. (default: initial, new slots)"),
    ] = None,
    snapshot_first: Annotated[
        Flag, typer.Option("--snapshot-first", help="The same as --snapshot-mode initial.")
    ] = None,
    snapshot_hold_limit: Annotated[
        Text, typer.Option(help="Give the initial snapshot up after this time: 30m, 6h. (default: 6h)")
    ] = None,
    incremental_snapshot: Annotated[
        Flag, typer.Option("--incremental-snapshot", help="Capture the table of signals; created if it is missing.")
    ] = None,
    signal_table: Annotated[
        Text, typer.Option(help="Rows inserted there ask for snapshots. (default: pgcdc_signals)")
    ] = None,
    snapshot_chunk_size: Annotated[
        int | None, typer.Option(help="Rows that incremental snapshots read at a time. (default: 0, by time and size)")
    ] = None,
    snapshot_chunk_delay: Annotated[
        float | None, typer.Option(help="Seconds that they rest between chunks. (default: 0)")
    ] = None,
    spool_limit: Annotated[
        Text, typer.Option(help="Stop reading when this much is undelivered. (default: 1GB)")
    ] = None,
    max_batch_rows: Annotated[
        int | None, typer.Option(help="At most about this many events a batch. (default: 100000)")
    ] = None,
    start_from: Annotated[Text, typer.Option(help="slot: begin with what an existing slot still has.")] = None,
    once: Annotated[Flag, typer.Option("--once", help="Deliver everything committed up to now, confirm, exit.")] = None,
    fail_fast: Annotated[
        Flag, typer.Option("--fail-fast", help="Exit 1 when the connection is lost, for supervisors.")
    ] = None,
    accept_publication: Annotated[
        Flag, typer.Option("--accept-publication", help="Go on with a publication that was narrowed on purpose.")
    ] = None,
    warm_up: Annotated[
        Flag,
        typer.Option(
            "--warm-up/--no-warm-up", help="Warm Spark up before saying ready; --once does not. (default: yes)"
        ),
    ] = None,
    spark_master: Annotated[
        Text, typer.Option(help="Spark cluster: spark://host:7077, yarn, k8s://... (default: local)")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file. (default: pgcdc.yaml, if it exists)")] = None,
) -> None:
    """Deliver every committed change to the adapters, exactly once, until stopped."""
    flags: dict[str, Any] = {
        name: value
        for name, value in {
            "db": db, "detector": detector, "slot_name": slot_name, "persistent_slot": persistent_slot,
            "temporary_slot": temporary_slot, "publication": publication, "tables": tables, "all_tables": all_tables,
            "table": table, "changelog": changelog, "truncate": truncate, "numeric": numeric,
            "out_of_range": out_of_range, "arrays": arrays, "composites": composites,
            "schemas": schemas, "row_filters": tuple(row_filter) if row_filter else None,
            "columns": tuple(columns) if columns else None, "generated_columns": generated_columns,
            "streaming": streaming, "two_phase": two_phase, "origin": origin, "binary": binary, "messages": messages,
            "toast": toast, "toast_cache_max_entries": toast_cache_max_entries,
            "tx_metadata": tx_metadata, "tx_markers": tx_markers, "schema_events": schema_events,
            "invalid_utf8": invalid_utf8,
            "adapters": tuple(adapter) if adapter else None, "file_path": file_path, "state_dir": state_dir,
            "snapshot_mode": snapshot_mode or ("initial" if snapshot_first else None),
            "incremental_snapshot": incremental_snapshot, "signal_table": signal_table,
            "snapshot_chunk_size": snapshot_chunk_size, "snapshot_chunk_delay": snapshot_chunk_delay,
            "snapshot_hold_limit": snapshot_hold_limit, "spool_limit": spool_limit, "max_batch_rows": max_batch_rows,
            "start_from": start_from, "once": once, "fail_fast": fail_fast,
            "accept_publication": accept_publication, "warm_up": warm_up, "spark_master": spark_master,
        }.items()
        if value is not None
    }  # fmt: skip
    logging.disable(logging.ERROR)  # libraries log what we report ourselves, in one line and with advice
    with exit_on_error():
        from pgcdc.config import load_config
        from pgcdc.errors import ConfigError
        from pgcdc.pipeline import Pipeline

        if snapshot_first and snapshot_mode not in (None, "initial"):
            raise ConfigError(
                f"--snapshot-first does not go with --snapshot-mode {snapshot_mode}", "Leave one of them out"
            )
        settings = load_config(flags, os.environ, config)
        pipeline = Pipeline(settings, say=_say)
        shares_terminal = "stdout" in settings.adapters and sys.stdout.isatty()
        pipeline.snapshot.show = SnapshotProgress(_say, live=sys.stderr.isatty() and not shares_terminal).show
        _stop_on_signals(pipeline)
        pipeline.run()


def _say(text: str) -> None:
    print(f"pgcdc: {text}", file=sys.stderr, flush=True)


def _stop_on_signals(pipeline: Pipeline) -> None:
    """The first signal ends in order; the second at once (nothing is lost: what is not confirmed comes again)."""
    from pgcdc.pipeline import StopNow

    seen = 0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(128 + number)
        _say("stopping after this batch (a second signal ends at once)")
        pipeline.stop()
        if pipeline.is_starting:
            raise StopNow

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
