"""How far snapshots are, for the driver: what to show, what to warn of, what to say at the end, and whether that was all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pgcdc.core.position import Position
from pgcdc.source.postgres.snapshot.held import ALONE_S

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

__all__ = ["RequestWatch", "SnapshotWatch", "describe_stop"]

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

    def follow(self, read_status: Callable[[], dict[str, Any]], lanes: Lanes, *, at_once: bool = False) -> bool:
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
        if self._settled is None or lanes.place < self._settled:
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


class RequestWatch:
    """Says what became of requests for rows: one line for each that failed or is complete."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = time.time()
        self._due = 0.0
        self._told: set[str] = set()

    def follow(self, read_status: Callable[[], dict[str, Any]], *, at_once: bool = False) -> None:
        """Look, if it is time to (or `at_once`)."""
        now = time.monotonic()
        if now < self._due and not at_once:
            return
        self._due = now + INTERVAL_S
        for one in read_status().get("snapshots", []):
            # What ended before us was told by the run that it ended in.
            if one["status"] in ("done", "failed") and one["id"] not in self._told and one["finished"] >= self._began:
                self._told.add(one["id"])
                self._say(_describe_end(one))


def _describe_end(one: dict[str, Any]) -> str:
    if one["status"] == "failed":
        return f"snapshot {one['id']} of table {one['table']} failed: {one['error']}"
    if one["kind"] == "vanished":
        return (
            f"snapshot {one['id']} of table {one['table']} is complete: {one['rows']:,} rows that vanished are deleted"
        )
    return f"snapshot {one['id']} of table {one['table']} is complete: {one['rows']:,} rows"


def describe_stop(status: dict[str, Any], confirmed: str) -> str:
    """The last line of a run: what is delivered, and which snapshots are not at their end."""
    initial = status.get("initial_snapshot")
    if initial and initial["status"] != "complete":
        text = "stopped in the initial snapshot"
        if tables := initial["tables"]:
            rows, total = (sum(one[name] for one in tables) for name in ("rows", "estimated_rows"))
            text += f": {rows:,} of about {total:,} rows are read"
        if initial["held_seconds"]:
            text += f"; the snapshot is held for {ALONE_S / 60:.0f} minutes, and a later start goes on as well"
        else:
            text += "; the next start goes on"
    else:
        text = f"stopped: {confirmed}"
    left = sum(one["status"] in ("queued", "running") for one in status.get("snapshots", []))
    if left:
        text += f"; {left} incremental snapshot{'s go' if left > 1 else ' goes'} on at the next start"
    return text
