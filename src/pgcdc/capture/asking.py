"""Incremental snapshots, asked for from outside: of the capture if one runs, else of the queue that it will read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pgcdc.capture.control import ask_or_do
from pgcdc.capture.requests import RequestQueue, RequestState, SnapshotRequest
from pgcdc.errors import PgcdcError, StateError
from pgcdc.state import Lock, StateDir

__all__ = ["add_snapshots", "change_snapshot", "list_snapshots"]


def add_snapshots(state: StateDir, requests: Sequence[SnapshotRequest]) -> None:
    """Queue requests, all of them or none. Durable when this returns. Raises with advice for what cannot be."""
    for request in requests:
        request.check()
    added: list[SnapshotRequest] = []
    try:
        for request in requests:
            _ask(state, {"action": "add", **asdict(request)}, partial(_add, request))
            added.append(request)
    except PgcdcError:
        for request in added:
            with contextlib.suppress(PgcdcError):
                change_snapshot(state, "stop", request.id)
        raise


def _add(request: SnapshotRequest, queue: RequestQueue) -> None:
    queue.add(request)


def change_snapshot(state: StateDir, action: str, name: str) -> None:
    """Pause, resume or stop a request. ConfigError if it is not one that can be."""
    changes: dict[str, Callable[[RequestQueue], object]] = {
        "pause": lambda queue: queue.pause(name),
        "resume": lambda queue: queue.resume(name),
        "stop": lambda queue: queue.stop(name),
    }
    _ask(state, {"action": action, "id": name}, changes[action])


def list_snapshots(state: StateDir) -> list[dict[str, Any]]:
    """All requests that are known, with how far they are."""
    _check(state)
    if Lock.holder(state.capture_lock) is None:  # nothing is changed: no lock is needed
        return [_describe(one) for one in RequestQueue(state.requests_file).entries()]
    found: list[dict[str, Any]] = _ask(state, {"action": "list"}, lambda queue: queue.entries())["snapshots"]
    return found


def _ask(state: StateDir, request: dict[str, Any], otherwise: Callable[[RequestQueue], object]) -> dict[str, Any]:
    _check(state)

    def change() -> dict[str, Any]:
        queue = RequestQueue(state.requests_file)
        otherwise(queue)
        return {"snapshots": [_describe(one) for one in queue.entries()]}

    return ask_or_do(state, {"do": "snapshot", **request}, change)


def _check(state: StateDir) -> None:
    if state.identity() is None:
        raise StateError(f"{state.path} is not a state directory of pgcdc", "Give --state-dir of a pipeline")


def _describe(one: RequestState) -> dict[str, Any]:
    """As the capture describes it in its status; nothing moves while none runs."""
    percent = 100.0 if one.status == "done" else None
    if percent is None and one.estimated_rows:
        percent = min(99.0, 100 * one.rows / one.estimated_rows)
    return {
        "id": one.id,
        "table": one.request.table,
        "kind": one.request.kind,
        "status": one.status,
        "rows": one.rows,
        "estimated_rows": one.estimated_rows,
        "percent": percent,
        "rate": None,
        "seconds_left": None,
        "error": one.error,
    }
