"""What is asked of incremental snapshots over the control socket: checked first, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgcdc.capture.chunk_reader import check_readable, find_table
from pgcdc.capture.database import Connection, explain_errors
from pgcdc.capture.incremental import IncrementalSnapshots
from pgcdc.capture.requests import RequestQueue, RequestState, SnapshotRequest, describe, new_id
from pgcdc.errors import ConfigError, ConnectionLost

__all__ = ["answer_snapshot", "change_queue", "describe", "make_request"]

_FIELDS = ("kind", "where", "keys_file", "chunk_size", "chunk_delay_s", "low", "high")


def make_request(content: dict[str, Any]) -> SnapshotRequest:
    """The request in a message: `table`, and what else a SnapshotRequest has."""
    given = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    given |= {name: tuple(given[name]) for name in ("low", "high") if name in given}
    return SnapshotRequest(content.get("id") or new_id(), content["table"], **given)


def answer_snapshot(
    snapshots: IncrementalSnapshots, content: dict[str, Any], sql: Connection | None, publications: Sequence[str]
) -> dict[str, Any]:
    """Do what is asked: `action` is add, pause, resume, stop or list. All that is known comes back under `snapshots`."""
    if content["action"] == "add":
        request = make_request(content)
        request.check()
        if sql is None or sql.closed:
            raise ConnectionLost("the server is not connected")
        with explain_errors("look at the table"):
            check_readable(sql, find_table(sql, publications, request.table), request.where)
    return change_queue(snapshots.queue, content) | {"snapshots": snapshots.status()}


def change_queue(queue: RequestQueue, content: dict[str, Any]) -> dict[str, Any]:
    """The same without looking at the table; the id of the request that was changed comes back."""
    action = content["action"]
    if action == "list":
        return {"id": None}
    if action == "add":
        request = make_request(content)
        queue.add(request)
        return {"id": request.id}
    if action not in ("pause", "resume", "stop"):
        raise ConfigError(f"{action!r} cannot be done to a snapshot", "Give add, pause, resume, stop or list")
    changed: RequestState = getattr(queue, action)(content.get("id") or "")
    return {"id": changed.id}
