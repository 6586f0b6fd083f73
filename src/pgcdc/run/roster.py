"""Which adapter is in which lane: the decisions, and the order of the durable steps of a move. No Spark, no files, no clock.

Every adapter is in exactly one lane: `main`, or a lane of its own. This assignment survives a crash (`lanes.json`), and each
move is one replacement of that file. A lane is also a consumer of the capture, which keeps everything that the lane has not
read. A lane's consumer is therefore created before the file names the lane, and removed after the file has forgotten it. A
consumer that no file knows is left from a crash between these two steps, and is released at the next start.

    leave     a sink failed or is slow in the batch (start, end] of main: its own lane begins at `start`
    rejoin    its lane has brought it to where main's next batch begins
    skip      fast mode: a new lane begins further ahead, and the events in between are counted as dropped
    add       a new adapter begins in its own lane, and rejoins like any other
    remove    it is in no lane
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from pgcdc.core.errors import ConfigError, StateError
from pgcdc.core.position import Position
from pgcdc.spool.consumers import MAIN, is_side_lane

__all__ = ["MAIN", "Membership", "Outside", "Place", "Roster", "Verdict", "Write", "WriteState", "judge"]

PATIENCE_S = {"critical": math.inf, "normal": 1.0, "best-effort": 0.2}
"""How long the others wait for a sink after all of them have a batch, by priority."""


class WriteState(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Write:
    state: WriteState
    priority: str = "normal"
    ended: float = 0.0  # When it ended, by the clock of `judge`
    grace_s: float = 0.0  # How much longer than usual the others wait for it


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do in a batch: how long to wait before the next look (0: it is over), and which adapters leave the
    lane."""

    wait_s: float = 0.0
    leave: tuple[str, ...] = ()


def judge(writes: Mapping[str, Write], now: float) -> Verdict:
    """Which adapters must leave a lane so that those that have the batch can continue. None leaves before another sink
    has the batch."""
    done = [one.ended for one in writes.values() if one.state is WriteState.DONE]
    failed = [name for name, one in writes.items() if one.state is WriteState.FAILED]
    running = {name: one for name, one in writes.items() if one.state is WriteState.RUNNING}
    if not done:
        return Verdict(math.inf if running else 0.0)
    since = max(one.ended for one in writes.values() if one.state is not WriteState.RUNNING)
    left_s = max((since + PATIENCE_S[one.priority] + one.grace_s - now for one in running.values()), default=0.0)
    return Verdict(left_s) if left_s > 0 else Verdict(0.0, (*failed, *running))


@dataclass(frozen=True, slots=True)
class Place:
    """An adapter's lane, and where that lane began (main's checkpoint knows its own)."""

    lane: str = MAIN
    start: Position | None = None
    floor: Position = Position.at(0, 0)  # noqa: RUF009 - frozen
    """Everything up to here counts as delivered to it, including what fast mode skipped."""
    dropped: int = 0  # How many events were skipped in total


@dataclass(frozen=True, slots=True)
class Roster:
    places: Mapping[str, Place] = field(default_factory=dict)
    number: int = 0  # Number of the last lane created: names are never reused

    def to_json(self) -> dict[str, Any]:
        adapters = {
            name: {**asdict(one), "start": str(one.start) if one.start else None, "floor": str(one.floor)}
            for name, one in self.places.items()
        }
        return {"version": 1, "number": self.number, "adapters": adapters}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> Roster:
        """Inverse of `to_json()`; None: no adapter has moved yet. StateError: invalid."""
        if raw is None:
            return cls()
        try:
            places = {
                name: Place(
                    one["lane"],
                    Position.parse(one["start"]) if one["start"] else None,
                    Position.parse(one["floor"]),
                    int(one["dropped"]),
                )
                for name, one in raw["adapters"].items()
            }
            if raw["version"] != 1 or any((one.lane == MAIN) != (one.start is None) for one in places.values()):
                raise ValueError("unknown version, or a lane without a beginning")
            return cls(places, int(raw["number"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"lanes.json is damaged: {error}", "Restore it from a backup") from error


class Outside(Protocol):
    """The side effects of a move. Each method is durable when it returns and harmless to repeat."""

    def save(self, roster: Roster) -> None:
        """Replace `lanes.json`."""

    def join(self, lane: str, at: Position) -> None:
        """Have the capture keep everything after `at` for this lane. GapError: it no longer has it."""

    def forget(self, lane: str) -> None:
        """Let the capture release what it keeps for this lane."""


class Membership:
    """Thread-safe. A method that raises leaves at most an unknown consumer behind."""

    def __init__(self, roster: Roster, outside: Outside) -> None:
        self.roster = roster  # Which adapter is in which lane
        self._outside = outside
        self._lock = threading.RLock()
        self._writing: set[str] = set()
        self._number = 0  # The number of the last lane that was attempted

    def __getitem__(self, adapter: str) -> Place:
        return self.roster.places[adapter]

    def __contains__(self, adapter: str) -> bool:
        return adapter in self.roster.places

    def members(self, lane: str) -> list[str]:
        return [name for name, one in self.roster.places.items() if one.lane == lane]

    def reached(self, adapter: str, ack: Position) -> Position:
        """The position up to which an adapter is settled: delivered or skipped."""
        place = self.roster.places.get(adapter)
        return max(ack, place.floor) if place else ack  # an adapter that is being removed has no place

    def recover(self, adapters: Iterable[str]) -> None:
        """Called at the start with the wanted adapters. Afterwards the caller opens the sinks, then releases unknown
        consumers.

        The order matters: the consumer of a lane that lost its file is unknown and its sink has a gap, but what it
        needs is still kept.
        """
        with self._lock:
            places = {name: self.roster.places.get(name, Place()) for name in adapters}
            if places != self.roster.places:
                self._save(replace(self.roster, places=places))
            for one in places.values():
                if one.start is not None:
                    self._outside.join(one.lane, one.start)

    def begin_write(self, adapter: str, lane: str) -> bool:
        """Whether a lane may write to an adapter now: it is the adapter's lane, and no other write is running."""
        with self._lock:
            if adapter not in self.members(lane) or adapter in self._writing:
                return False
            self._writing.add(adapter)
            return True

    def end_write(self, adapter: str) -> None:
        with self._lock:
            self._writing.discard(adapter)

    def leave(self, adapter: str, start: Position) -> str:
        """Give an adapter its own lane, from the start of the batch it does not have. Returns the lane's name."""
        return self._move(adapter, start, self[adapter])

    def rejoin(self, adapter: str, ack: Position, next_start: Position) -> bool:
        """Return an adapter to main, if main's next batch begins at or before its place and no write to it is running.
        False: not yet."""
        with self._lock:
            place = self.roster.places.get(adapter)
            if (
                place is None
                or place.lane == MAIN
                or adapter in self._writing
                or self.reached(adapter, ack) < next_start
            ):
                return False
            self._place(adapter, replace(place, lane=MAIN, start=None))
            return True

    def skip(self, adapter: str, to: Position, events: int) -> str:
        """Let an adapter continue after `to`, without `events` events. Returns its new lane's name."""
        with self._lock:
            before = self[adapter]
            if before.lane == MAIN or adapter in self._writing:
                raise StateError(f"adapter {adapter} cannot skip events: it is in {before.lane}, or being written to")
            return self._move(adapter, to, replace(before, floor=to, dropped=before.dropped + events))

    def add(self, adapter: str, start: Position) -> str:
        """Add an adapter in its own lane that begins at `start`. Returns the lane's name."""
        with self._lock:
            if adapter in self:
                raise ConfigError(f"adapter {adapter!r} exists already", "Choose another name")
            return self._move(adapter, start, Place())

    def remove(self, adapter: str) -> None:
        with self._lock:
            if adapter not in self:
                known = ", ".join(self.roster.places) or "none"
                raise ConfigError(f"adapter {adapter!r} does not exist", f"Known adapters: {known}")
            places = {name: one for name, one in self.roster.places.items() if name != adapter}
            self._save(replace(self.roster, places=places))

    def let_go(self, lane: str) -> None:
        with self._lock:
            if is_side_lane(lane) and not self.members(lane):
                self._outside.forget(lane)

    def _move(self, adapter: str, start: Position, place: Place) -> str:
        """Move to a new lane. Its consumer comes first, so that nothing after `start` can be lost."""
        with self._lock:
            # Never reuse a number, even after a failed step: it may have left a consumer with another start.
            number = self._number = max(self._number, self.roster.number) + 1
            lane = f"{MAIN}~{adapter}~{number}"
            self._outside.join(lane, start)
            self._place(adapter, replace(place, lane=lane, start=start), number)
            return lane

    def _place(self, adapter: str, place: Place, number: int | None = None) -> None:
        places = {**self.roster.places, adapter: place}
        self._save(Roster(places, self.roster.number if number is None else number))

    def _save(self, roster: Roster) -> None:
        self._outside.save(roster)
        self.roster = roster
