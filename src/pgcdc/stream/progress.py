"""How far the initial snapshot is, for the driver: what to show, what to warn of, and whether it was all that was wanted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pgcdc.position import Position

if TYPE_CHECKING:
    from pgcdc.stream.lane import Lane

__all__ = ["SnapshotWatch"]

INTERVAL_S = 1.0


class SnapshotWatch:
    """Looks at the capture's status once a second, until there is nothing more to see."""

    def __init__(self, say: Callable[[str], None], *, is_all: bool) -> None:
        """`is_all`: the rows are all that is wanted (`initial_only`)."""
        self._say = say
        self._is_all = is_all
        self._began = time.time()
        self._due = 0.0
        self._seen = ""
        self._settled: Position | None = None
        """Where the last of the rows stands, also of those that were read beside the stream."""
        self._warned: str | None = None
        self.show: Callable[[dict[str, Any]], None] | None = None
        """Gets the status every second while rows are read, and once when the snapshot is complete."""

    def follow(self, read_status: Callable[[], dict[str, Any]], lane: Lane, *, at_once: bool = False) -> bool:
        """Look, if it is time to (or `at_once`). True: all that was wanted is delivered."""
        now = time.monotonic()
        if (now < self._due and not at_once) or (self._seen == "complete" and not self._is_all):
            return False
        self._due = now + INTERVAL_S
        capture = read_status()
        if "initial_snapshot" not in capture:  # the capture has not said anything yet
            return False
        status: dict[str, Any] = capture["initial_snapshot"] or {"status": "complete", "end": None}
        if status["status"] == "reading" or (self._seen != "complete" and status.get("time", 0) > self._began):
            self._tell(status)
        self._seen = status["status"]
        if not self._is_all or self._seen != "complete":
            return False
        if self._settled is None and capture.get("settled"):
            self._settled = Position.parse(capture["settled"])
        if self._settled is None or lane.place < self._settled:
            return False
        self._say("the rows are delivered. The slot stays: start again without initial_only to go on with the changes")
        return True

    def _tell(self, status: dict[str, Any]) -> None:
        if self.show is not None:
            self.show(status)
        warning = status.get("warning")
        if warning and warning != self._warned:
            self._warned = warning
            self._say(warning)
