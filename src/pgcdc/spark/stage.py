"""Reading of rows that are there already, by the tasks of a streaming query.

The tasks of a batch may have more to do than to read its changes: beside them, they read parts of tables for the initial
snapshot and stage them on disk (`capture/staging.py`). They add no row to the batch for that. The capture publishes what is
staged, and it comes as changes in a later batch. So a batch that runs again needs no care: what its tasks have to do is
asked of the capture anew.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

from pgcdc.core.errors import ConfigError, SpoolError
from pgcdc.core.position import Position
from pgcdc.source.postgres.snapshot.staging import Work, stage
from pgcdc.spark.capture_client import Feed

__all__ = ["StagePartition", "Stager", "find_url", "read_stage"]


@dataclass
class StagePartition(InputPartition):
    """What one task stages."""

    work: Work
    host: str


class Stager:
    """A query's share in the initial snapshot: whether its next batch should stage something, and what."""

    def __init__(self) -> None:
        self._is_over = False
        self._end = Position(0, 0)
        self._only = False
        self._settled: Position | None = None

    def number(self, feed: Feed, start: dict[str, Any]) -> int:
        """What stands in the offset under `stage`: one more than in `start` if tasks have something to do."""
        before = int(start.get("stage", 0))
        if self._is_over:
            return before
        reply = feed.stage(Position.from_offset(start), take=False)
        self._note(reply)
        return before + bool(reply.get("is_ready"))

    def partitions(self, feed: Feed, start: dict[str, Any], end: dict[str, Any]) -> list[StagePartition]:
        """The work of the batch, if it is to do some."""
        if end.get("stage", 0) <= start.get("stage", 0):
            return []
        reply = feed.stage(Position.from_offset(start), take=True)
        self._note(reply)
        host = socket.gethostname()
        return [StagePartition(Work.from_json(raw), host) for raw in reply.get("work", [])]

    def end(self, feed: Feed, start: dict[str, Any]) -> Position:
        """Up to where rows of snapshots are those of the initial one."""
        if not self._is_over:
            self.number(feed, start)
        return self._end if self._is_over else Position.end(feed.snapshot_lsn)

    def begin_run(self) -> None:
        """A run begins that ends behind everything that is asked for by now."""
        self._settled = None

    def needed(self, feed: Feed, target: Position) -> Position | None:
        """Where a run that delivers everything up to `target` ends; None: behind rows that are still to be read."""
        if self._is_over and self._settled is None:
            self._settled = feed.settled()
        if not self._is_over or self._settled is None:
            return None
        return max(self._end, self._settled) if self._only else max(self._end, self._settled, target)

    def _note(self, reply: dict[str, Any]) -> None:
        self._is_over = not reply["active"]
        if reply.get("end"):
            self._end = Position.parse(reply["end"])
            self._only = reply["only"]


def read_stage(partition: StagePartition, url: str) -> None:
    """In the executor: read the rows and stage them. `url` is what the option says."""
    try:
        stage(find_url(url), partition.work)
    except SpoolError:
        here = socket.gethostname()
        if here == partition.host:
            raise
        raise ConfigError(
            f"{partition.work.folder} of {partition.host} cannot be written on {here}",
            "Put the state directory on storage that every host of the cluster can read and write",
        ) from None


def find_url(url: str) -> str:
    """The database, on whichever host this is."""
    found = url or os.environ.get("PGCDC_DB", "")
    if not found:
        raise ConfigError(
            "no database is given on this host",
            "Set the variable PGCDC_DB for the executors as well, or give option url",
        )
    return found
