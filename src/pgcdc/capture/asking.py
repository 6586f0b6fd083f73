"""Incremental snapshots, asked for from outside: of the capture if one runs, else of the queue that it will read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pgcdc.capture.control import ask_or_do
from pgcdc.core.errors import PgcdcError, StateError
from pgcdc.core.state import Lock, StateDir
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest, change_queue, describe

__all__ = ["add_snapshots", "ask_snapshots", "change_snapshot", "list_snapshots"]


def add_snapshots(state: StateDir, requests: Sequence[SnapshotRequest]) -> None:
    """Queue requests, all of them or none. Durable when this returns. Raises with advice for what cannot be."""
    for request in requests:
        request.check()
    added: list[SnapshotRequest] = []
    try:
        for request in requests:
            ask_snapshots(state, {"action": "add", **asdict(request)})
            added.append(request)
    except PgcdcError:
        for request in added:
            with contextlib.suppress(PgcdcError):
                change_snapshot(state, "stop", request.id)
        raise


def change_snapshot(state: StateDir, action: str, name: str) -> None:
    """Pause, resume or stop a request. ConfigError if it is not one that can be."""
    ask_snapshots(state, {"action": action, "id": name})


def list_snapshots(state: StateDir) -> list[dict[str, Any]]:
    """All requests that are known, with how far they are."""
    _check(state)
    if Lock.holder(state.capture_lock) is None:  # nothing is changed: no lock is needed
        return [describe(one) for one in RequestQueue(state.requests_file).entries()]
    found: list[dict[str, Any]] = ask_snapshots(state, {"action": "list"})["snapshots"]
    return found


def ask_snapshots(state: StateDir, content: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
    """Add, pause, resume, stop or list incremental snapshots (`action`), by the capture if one runs.

    Without one a new request is written down as it is: whether it can be done is seen when the pipeline runs.
    """
    _check(state)

    def change() -> dict[str, Any]:
        queue = RequestQueue(state.requests_file)
        return change_queue(queue, content) | {"snapshots": [describe(one) for one in queue.entries()]}

    return ask_or_do(state, {"do": "snapshot", **content}, change, timeout_s)


def _check(state: StateDir) -> None:
    if state.identity() is None:
        raise StateError(f"{state.path} is not a state directory of pgcdc", "Give --state-dir of a pipeline")
