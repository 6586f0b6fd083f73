"""Marks that the capture itself puts into the stream, at a position after everything that the server had written when
the mark was requested. A mark needs no right and no write at the source. It is released like a chunk of a snapshot, so
it is durable and has the same position in every replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.core.relation import Relation
from pgcdc.source.postgres.snapshot.releases import Release, Releases


@dataclass(frozen=True, slots=True)
class Mark:
    """The rows of a mark, and the shape of their table if they belong to one."""

    rows: list[pa.RecordBatch]
    relation: Relation | None = None
    note: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    lsn: int
    make: Callable[[], Mark | None]
    done: Callable[[Release], object]


class Marks:
    """Marks that wait until the stream has come far enough. They do not survive a crash: the requester asks again."""

    def __init__(self, releases: Releases) -> None:
        self._releases = releases
        self._asked: deque[_Asked] = deque()

    @property
    def target_lsn(self) -> int:
        """The LSN that the stream must reach; 0 if none is required."""
        return max((one.lsn for one in self._asked), default=0)

    def ask(
        self, lsn: int, make: Callable[[], Mark | None], done: Callable[[Release], object] = lambda release: None
    ) -> None:
        """When the stream has passed `lsn`, `make` returns what to release (None: nothing); `done` gets the release."""
        self._asked.append(_Asked(lsn, make, done))

    def step(self, end: Position, *, may_work: bool) -> Release | None:
        """The release that is due after `end`, the spool's end. It is durable, and must become visible before anything
        else."""
        if not may_work or not Releases.has_place(end):
            return None
        while self._asked and self._asked[0].lsn <= end.commit:
            asked = self._asked.popleft()
            mark = asked.make()
            if mark is not None:
                release = self._releases.add(end, self._releases.stage(mark.rows), mark.relation, mark.note)
                asked.done(release)
                return release
        return None
