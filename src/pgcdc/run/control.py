"""Requests from other processes: to a run, through its control socket, and for snapshots, to the capture or its queue.

A run's sources announce the batches they plan; commands ask for its status.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pgcdc.capture.control import ask_or_do
from pgcdc.capture.server import Channel, ControlServer
from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.source.postgres.snapshot.asking import change_queue, describe
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest
from pgcdc.source.protocol import find_source


class RunServer:
    """Serves requests in its own thread, one at a time. No answer may block."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._selector = selectors.DefaultSelector()
        self._server = ControlServer(self._selector, answer)
        self.address = self._server.address
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        with contextlib.suppress(PgcdcError):
            Channel(self.address).close()  # wakes it up
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for key, _ in self._selector.select():
                key.data(key)
        self._server.close()
        self._selector.close()


# --- incremental snapshots, requested from outside: through the capture if one runs, otherwise through the queue it
# will read


def add_snapshots(state: StateDir, requests: Sequence[SnapshotRequest]) -> None:
    """Queue requests, all or none. Durable on return. Raises with advice for an invalid one."""
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
                ask_snapshots(state, {"action": "stop", "id": request.id})
        raise


def list_snapshots(state: StateDir) -> list[dict[str, Any]]:
    """All known requests, with their progress."""
    _check(state)
    if Lock.holder(state.capture_lock) is None:  # nothing changes, so no lock is needed
        return [describe(one) for one in RequestQueue(state.requests_file).entries()]
    found: list[dict[str, Any]] = ask_snapshots(state, {"action": "list"})["snapshots"]
    return found


def ask_snapshots(state: StateDir, content: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
    """Add, pause, resume, stop or list incremental snapshots (`action`), through the capture if one runs.

    Without one, a new request is stored unchecked, and the running pipeline checks it later.
    """
    identity = _check(state)
    if refused := find_source(identity.kind).no_requests:  # nothing would ever process the queue
        raise ConfigError(*refused)

    def change() -> dict[str, Any]:
        queue = RequestQueue(state.requests_file)
        return change_queue(queue, content) | {"snapshots": [describe(one) for one in queue.entries()]}

    return ask_or_do(state, {"do": "snapshot", **content}, change, timeout_s)


def _check(state: StateDir) -> Identity:
    identity = state.identity()
    if identity is None:
        raise StateError(f"{state.path} is not a state directory of pgcdc", "Set --state-dir to that of a pipeline")
    return identity
