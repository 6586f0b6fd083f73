"""`pgcdc status` and `pgcdc reload`: check on a running pipeline, or reload its transforms, from another terminal."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from pgcdc.cli.flags import File, State, find_state
from pgcdc.cli.report import describe_snapshot, exit_on_error, print_table, show
from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.moment import show_time
from pgcdc.core.state import Lock, StateDir, read_json

RELOAD_TIMEOUT_S = 60.0
_LANE = ("adapter", "lane", "ack", "lag_bytes", "dropped", "dead_letters", "missed_rows", "reloading", "last_error")
_OF_SNAPSHOT = ("held_seconds", "hold_limit_seconds", "wal_held_bytes", "warning")
_OF_CAPTURE = ("schema_changes", "toast_cache_hits", "toast_cache_misses", "toast_cache_entries", "bad_signals")


def status(
    state_dir: State = None,
    config: File = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show phase, positions, lag in bytes and seconds, and the last error of the pipeline that owns a state
    directory."""
    with exit_on_error():
        report = read_status(find_state(state_dir, config).path)
        if as_json:
            print(json.dumps(report))
            return
        from pgcdc.cli.snapshot import print_snapshots

        snapshots, lanes = report.pop("snapshots"), report.pop("lanes")
        for name, value in report.items():
            print(f"{name.replace('_', ' '):<28} {show(value)}")
        if lanes:
            print()
            print_table(
                [name.replace("_", " ") for name in _LANE], [[show(one.get(name)) for name in _LANE] for one in lanes]
            )
        if snapshots:
            print()
            print_snapshots(snapshots)


def read_status(state_dir: Path) -> dict[str, Any]:
    """One flat report from the run and the capture. If one is not running, from the state it left behind."""
    from pgcdc.capture.control import ask
    from pgcdc.run.verify.report import describe_last

    state = StateDir(state_dir)
    identity = state.identity()
    if identity is None:
        state.check_whole()
        raise StateError(f"{state.path} is not a state directory of pgcdc", "Set --state-dir to that of the pipeline")
    running = Lock.holder(state.run_lock) is not None
    capturing = Lock.holder(state.capture_lock) is not None
    run: dict[str, Any] = ask(state.run_lock, {"do": "status"}) or _last_run(state)
    capture: dict[str, Any] = run.get("capture") or ask(state.capture_lock, {"do": "status"}) or _last_capture(state)
    phase = run.get("phase", "never started") if running else f"not running (last: {run.get('phase', 'never started')})"
    initial = capture.get("initial_snapshot") or {}
    lag_seconds = capture.get("lag_seconds") if capturing else None
    error = run.get("last_error") or capture.get("last_error")
    return {
        "phase": phase,
        "phase_since": _time_of(run),
        "capture": capture.get("phase", "-") if capturing else "not running",
        "capture_since": _time_of(capture) if capturing else None,
        "slot": identity.stream,
        "database": identity.database,
        "adapters": ", ".join(run.get("adapters", [])) or None,
        "lanes": run.get("lanes", []),
        "events_delivered": run.get("events", 0),
        "fast_paths": ", ".join(f"{name} {way}" for name, way in run.get("ways", {}).items()) or None,
        "batch_ms": ", ".join(f"{name} {took:g}" for name, took in run.get("batch_ms", {}).items()) or None,
        **{name: run.get(name) for name in ("reloads", "reload_errors", "last_reload_at", "last_reload_error")},
        "delivered_position": run.get("position"),
        **{name: capture.get(name) for name in ("server_lsn", "received_lsn", "confirmed_lsn", "lag_bytes")},
        "lag_seconds": None if lag_seconds is None else round(float(lag_seconds), 1),
        "spool_bytes": capture.get("spool_bytes"),
        "snapshot": describe_snapshot(initial) if initial else None,
        **{f"snapshot_{name}": initial.get(name) for name in _OF_SNAPSHOT},
        **{name: capture.get(name) for name in _OF_CAPTURE},
        "snapshots": _snapshots_of(state, capture, capturing),
        "verify": describe_last(state),
        "last_error": str(PgcdcError.from_json(error)) if error else None,
        "updated_seconds_ago": round(time.time() - capture["time"], 1) if "time" in capture else None,
    }


def _time_of(status: dict[str, Any]) -> str | None:
    return show_time(status["phase_since"]) if "phase_since" in status else None


def _last_run(state: StateDir) -> dict[str, Any]:
    """What a run left behind: its last status, or the one from the start of streaming if it was killed. Acks are always
    current."""
    from pgcdc.sink.contract import Progress

    run: dict[str, Any] = read_json(state.run_status) or {}
    for lane in run.get("lanes", []):
        ack = Progress(state.acks, lane["adapter"]).position
        lane["ack"] = str(ack) if ack else None
    return run


def _last_capture(state: StateDir) -> dict[str, Any]:
    """The last status of a capture that ended cleanly, or what is known about a killed one."""
    from pgcdc.postgres.lsn import format_lsn
    from pgcdc.spool.consumers import Consumers

    last: dict[str, Any] = read_json(state.capture_status) or {}
    return {**last, "confirmed_lsn": format_lsn(Consumers(state.consumers_file).confirmed_lsn)}


def _snapshots_of(state: StateDir, capture: dict[str, Any], capturing: bool) -> list[dict[str, Any]]:
    """Tables of an incomplete initial snapshot, and incremental snapshots that the capture knows of or that are
    waiting."""
    from pgcdc.run.control import list_snapshots

    initial = capture.get("initial_snapshot") or {"status": "complete"}
    tables = [] if initial["status"] == "complete" else initial["tables"]
    others = capture.get("snapshots", []) if capturing else list_snapshots(state)
    return [*({"kind": "initial", **table} for table in tables), *others]


def reload(state_dir: State = None, config: File = None) -> None:
    """Make a running `pgcdc listen` reload its transforms and routes. They apply from the next batch on."""
    with exit_on_error():
        from pgcdc.capture.control import ask

        state = find_state(state_dir, config)
        if Lock.holder(state.run_lock) is None:
            raise StateError(f"no pipeline runs in {state.path}", "Start it with pgcdc listen, or set --state-dir")
        phase = ask(state.run_lock, {"do": "status"}).get("phase", "starting")
        if phase != "streaming":
            raise StateError(f"the pipeline is not ready yet: {phase}", "Try again in a moment")
        request, deadline = {"do": "reload", "id": str(uuid.uuid4())}, time.monotonic() + RELOAD_TIMEOUT_S
        while not (found := ask(state.run_lock, request)):
            if Lock.holder(state.run_lock) is None:
                raise StateError("the pipeline has ended", "See its output")
            if time.monotonic() > deadline:
                raise StateError(f"the pipeline did not answer within {RELOAD_TIMEOUT_S:.0f} s", "See pgcdc status")
            time.sleep(0.05)
        if found["refused"]:
            raise ConfigError(f"not reloaded, the previous configuration stays in effect: {found['refused']}")
        print("reloaded: transforms and routes apply from the next batch on")
