"""`pgcdc status`: how a pipeline is doing, from another terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pgcdc.cli.report import exit_on_error

__all__ = ["status"]


def status(
    state_dir: Annotated[Path, typer.Option(help="The state directory.", envvar="PGCDC_STATE_DIR")] = Path(".pgcdc"),
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Phase, positions, lag in bytes and seconds, and the last error of the pipeline that owns a state directory."""
    with exit_on_error():
        report = read_status(state_dir)
        if as_json:
            print(json.dumps(report))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in report.items():
            table.add_row(f"[bold]{name.replace('_', ' ')}[/]", "-" if value is None else str(value))
        Console().print(table)


def read_status(state_dir: Path) -> dict[str, Any]:
    """One flat report from what driver and capture last wrote."""
    from pgcdc.errors import StateError
    from pgcdc.state import Lock, StateDir, read_json

    state = StateDir(state_dir)
    identity = state.identity()
    if identity is None:
        state.check_whole()
        raise StateError(f"{state.path} is not a state directory of pgcdc", "Give --state-dir")
    run: dict[str, Any] = read_json(state.run_status) or {}
    capture: dict[str, Any] = read_json(state.capture_status) or {}
    running = Lock.holder(state.run_lock) is not None
    capturing = Lock.holder(state.capture_lock) is not None
    phase = run.get("phase", "never started") if running else f"not running (last: {run.get('phase', 'never started')})"
    error = run.get("last_error") or capture.get("last_error")
    return {
        "phase": phase,
        "capture": capture.get("phase", "-") if capturing else "not running",
        "slot": identity.slot,
        "database": identity.database,
        "adapters": ", ".join(run.get("adapters", [])) or None,
        "events_delivered": run.get("events", 0),
        "delivered_position": run.get("position"),
        "server_lsn": capture.get("server_lsn"),
        "received_lsn": capture.get("received_lsn"),
        "confirmed_lsn": capture.get("confirmed_lsn"),
        "lag_bytes": capture.get("lag_bytes"),
        "lag_seconds": _lag_seconds(capture) if capturing else None,
        "spool_bytes": capture.get("spool_bytes"),
        "schema_changes": capture.get("schema_changes"),
        "toast_cache_hits": capture.get("toast_cache_hits"),
        "toast_cache_misses": capture.get("toast_cache_misses"),
        "toast_cache_entries": capture.get("toast_cache_entries"),
        "last_error": f"{error['message']}. {error['advice']}" if error else None,
        "updated_seconds_ago": round(time.time() - capture["time"], 1) if "time" in capture else None,
    }


def _lag_seconds(capture: dict[str, Any]) -> float | None:
    """Age of the oldest change that is not confirmed; 0 if there is none, None if that is not known."""
    seconds = capture.get("lag_seconds")
    return None if seconds is None else round(float(seconds), 1)
