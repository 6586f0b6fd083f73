"""What is asked of incremental snapshots over the control socket: checked first, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgcdc.core.errors import ConnectionLost
from pgcdc.postgres.database import Connection, explain_errors
from pgcdc.source.postgres.snapshot.chunk_reader import check_readable, find_table
from pgcdc.source.postgres.snapshot.incremental import IncrementalSnapshots
from pgcdc.source.postgres.snapshot.requests import change_queue, make_request

__all__ = ["answer_snapshot"]


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
