"""Sentinels: marks in the stream after everything committed before they were requested (`pgcdc sentinel`)."""

from __future__ import annotations

from datetime import UTC, datetime

from psycopg import Connection

from pgcdc.core.errors import ConnectionLost
from pgcdc.core.position import Position
from pgcdc.core.relation import Op
from pgcdc.source.postgres.setup.guard import lost_on_error, wal_place
from pgcdc.source.postgres.snapshot.marks import Mark, Marks
from pgcdc.source.postgres.snapshot.releases import Release, marker

KEPT = 100


class Sentinels:
    """The last sentinels by id, in memory: after a crash, whoever waits asks for the same id again."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._known: dict[str, Position | None] = {}  # None: the stream has not reached it yet

    def has(self, name: str) -> bool:
        return name in self._known

    def ask(self, name: str, sql: Connection | None) -> Position | None:
        """Where the sentinel with this id ends; None while it is pending. An unknown id creates a new sentinel."""
        if name not in self._known:
            if sql is None or sql.closed:
                raise ConnectionLost(
                    "there is no connection to the server", "Try again when pgcdc status says capture: streaming"
                )
            asked_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            with lost_on_error():
                lsn = wal_place(sql)
            rows = [marker(Op.SENTINEL, name, asked_at)]
            self._marks.ask(lsn, lambda: Mark(rows), lambda release: self._note(name, release))
            self._known[name] = None
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        return self._known[name]

    def _note(self, name: str, release: Release) -> None:
        if name in self._known:
            self._known[name] = release.end
