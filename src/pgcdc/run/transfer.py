"""Moves adapters between lanes: carries out `roster.py`'s decisions with real lanes, files and the capture.

Lock order: main's boundary, another lane's boundary, then the locks inside the core. A side lane's batch never takes
main's.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from pgcdc.capture.control import CaptureLink
from pgcdc.core.counters import EVENTS_DROPPED, LANE_MOVES, counters
from pgcdc.core.errors import PgcdcError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import StateDir, read_json, write_json_durably
from pgcdc.core.wording import counted
from pgcdc.run.lane import Lane
from pgcdc.run.member import Adapter, Member, left_out, may_pass
from pgcdc.run.roster import Membership, Roster
from pgcdc.sink.contract import Progress
from pgcdc.sink.runner import Runner
from pgcdc.spool.consumers import MAIN, is_side_lane
from pgcdc.spool.reader import SpoolReader, read_slice

HOLD_S = 1.0  # How long a batch of main may wait for an adapter that is about to rejoin
HOLD_AGAIN_S = 10.0  # After waiting in vain, main does not wait again for this long
STEADY_S = 60.0  # An adapter that was in main this long leaves for a new reason
FIRST_AWAY_S = 5.0
LONGEST_AWAY_S = 300.0

Say = Callable[[str], None]


class Moves:
    """The lanes and their members. Main's batch calls `leave` and `begin_batch`; the watching thread calls the rest."""

    def __init__(self, state: StateDir, link: CaptureLink, say: Say) -> None:
        self._state = state
        self._link = link
        self._say = say
        self.members: dict[str, Member] = {}
        self.lanes: dict[str, Lane] = {}
        self.left_over: list[Lane] = []  # Lanes to stop and forget
        self.ended = threading.Event()  # Set when a batch of any lane has ended
        self.membership = Membership(Roster.from_json(read_json(state.lanes_file)), self)
        self._removed: dict[str, Member] = {}  # Adapters that were writing when they were removed
        self._spool: SpoolReader | None = None  # For `skip_ahead`, while an adapter is in its own lane
        self._lock = threading.RLock()

    # --- durable state: `lanes.json` and the consumers of the capture

    def save(self, roster: Roster) -> None:
        hit("lanes.before_save")
        write_json_durably(self._state.lanes_file, roster.to_json())
        hit("lanes.saved")

    def join(self, lane: str, at: Position) -> None:
        """Have the capture keep everything after `at` for this lane."""
        hit("lanes.before_join")
        self._link.join(lane, start=at)
        hit("lanes.joined")

    def forget(self, lane: str) -> None:
        hit("lanes.before_forget")
        self._link.forget(lane)
        hit("lanes.forgotten")
        shutil.rmtree(self._state.checkpoints / lane, ignore_errors=True)

    # --- which adapter is in which lane

    @property
    def main(self) -> Lane:
        return self.lanes[MAIN]

    @property
    def side_lanes(self) -> list[tuple[Lane, Member]]:
        """Lanes of a single adapter, with that adapter."""
        places = self.membership.roster.places
        # Main's batch may call this while another thread removes an adapter, which then has no place.
        found = [(places.get(one.name), one) for one in list(self.members.values())]
        lanes = [(self.lanes.get(place.lane), one) for place, one in found if place is not None]
        return [(lane, one) for lane, one in lanes if lane is not None and lane.name != MAIN]

    def open(self, adapters: list[Adapter]) -> None:
        """Open the lanes for these adapters as they were left. Cleans up after a crash in the middle of a move."""
        consumers = self._link.status()["consumers"]
        self._open_lane(MAIN)
        self.membership.recover([one.name for one in adapters])
        for adapter in adapters:
            self.members[adapter.name] = Member(adapter, self.membership)
        self.open_missing()
        for member in self.members.values():
            if self.membership[member.name].lane == MAIN:
                member.open(self.main.place)
        self.let_go_unknown(list(consumers))
        for folder in self._state.checkpoints.iterdir():
            if is_side_lane(folder.name) and not self.membership.members(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def _open_lane(self, name: str) -> Lane:
        with self._lock:  # main's batch and the watching thread may both find it missing
            if name not in self.lanes:
                initial, _ = self._link.join(name)
                lane = Lane(name, self._state.checkpoints / name, initial, lambda: self._members_of(name))
                lane.ended = self.ended
                if name == MAIN:
                    lane.on_begin, lane.on_leave = self.begin_batch, self.leave
                self.lanes[name] = lane
            return self.lanes[name]

    def open_missing(self) -> None:
        """Open the lanes of all adapters: at the start, and after a move whose later steps failed."""
        with self._lock:
            for member in list(self.members.values()):
                self._open_lane(self.membership[member.name].lane)

    def _members_of(self, lane: str) -> list[Member]:
        return [one for name in self.membership.members(lane) if (one := self.members.get(name)) is not None]

    # --- leaving main

    def leave(self, member: Member, start: Position, error: BaseException | None) -> None:
        """Called in a batch of main that began at `start` and that the others have. Durable when this returns."""
        lane = self.membership.leave(member.name, start)
        self._open_lane(lane)
        now = time.monotonic()
        is_steady = now - member.rejoined_at >= STEADY_S
        member.away_s = 0.0 if is_steady else min(LONGEST_AWAY_S, max(FIRST_AWAY_S, 2 * member.away_s))
        member.rejoin_at = now + member.away_s
        counters.add(LANE_MOVES, adapter=member.name, move="leave")
        error = error or member.sink.attempts.failing  # it is slow because it retries
        why = f"failed ({error.message if isinstance(error, PgcdcError) else error})" if error else "is slow"
        self._say(f"adapter {member.name} {why}: moved to its own lane; the other adapters continue")

    # --- returning to main

    def begin_batch(self, start: Position) -> None:
        """A batch of main begins: adapters that caught up join now; main waits for one that nearly has."""
        self._bring_all_in(start, may_hold=True)

    def rejoin_between(self) -> None:
        """Between two batches of main, which may be far apart: adapters that caught up join."""
        if not self.side_lanes or not self.main.boundary.acquire(blocking=False):
            return
        try:
            self._bring_all_in(self.main.next_start, may_hold=False)
        finally:
            self.main.boundary.release()

    def _bring_all_in(self, start: Position, *, may_hold: bool) -> None:
        chains = self.main.program.chains if self.main.program is not None else ()
        for lane, member in self.side_lanes:
            now = time.monotonic()
            if member.chain not in chains or not member.is_open or lane.is_abandoned or now < member.rejoin_at:
                continue
            is_near = may_hold and lane.query is not None and member.reached >= self.main.last_start
            is_held = is_near and now >= member.hold_at
            if not self._bring_in(lane, member, start, now + HOLD_S if is_held else now) and is_held:
                member.hold_at = time.monotonic() + HOLD_AGAIN_S

    def _bring_in(self, lane: Lane, member: Member, start: Position, deadline: float) -> bool:
        """Make an adapter a member of main, whose next batch begins at `start`. The caller holds main's boundary."""
        while True:
            lane.moved.clear()
            with _held(lane, deadline - time.monotonic()) as is_held:
                is_free = is_held and not member.is_busy
                if is_free and self.membership.rejoin(member.name, member.sink.ack, start):
                    self._abandon(lane)
                    member.rejoined_at = time.monotonic()
                    counters.add(LANE_MOVES, adapter=member.name, move="rejoin")
                    self._say(f"adapter {member.name} has caught up and is back in the main lane")
                    return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not lane.moved.wait(left_s):
                return False

    def _abandon(self, lane: Lane) -> None:
        with self._lock:
            lane.is_abandoned = True
            if self.lanes.pop(lane.name, None) is not None:
                self.left_over.append(lane)

    def let_go(self, lane: Lane) -> None:
        self.membership.let_go(lane.name)
        self.left_over.remove(lane)

    def let_go_unknown(self, consumers: list[str]) -> None:
        """Release consumers left by a failed step, or by a query that ended late."""
        waiting = {lane.name for lane in self.left_over}
        for name in consumers:
            if name not in waiting:
                self.membership.let_go(name)

    # --- skipping ahead

    def skip_ahead(self, limit: int) -> None:
        """Fast mode: an adapter that is more than `limit` events behind in its own lane continues with the newest
        commit."""
        found = [(lane, one) for lane, one in self.side_lanes if one.adapter.priority != "critical" and one.is_open]
        if not found:
            self._spool = None
            return
        first, spool = min(one.reached for _, one in found), self._spool
        if (
            spool is None or first < spool.base
        ):  # an adapter that left main since may be further behind than the reader knows
            spool = self._spool = SpoolReader(self._state.spool)
        spool.refresh()
        spool.forget(first)
        for lane, member in found:
            if sum(record.rows for record in spool.after(member.reached)) <= limit:
                continue
            lane.is_stopping = True  # its current batch is its last, so its ack is then final
            with _held(lane, 0) as is_held:
                if is_held and not member.is_busy:
                    self._skip(lane, member, spool)

    def _skip(self, lane: Lane, member: Member, spool: SpoolReader) -> None:
        reached = member.reached
        ends = [spool.end, *(record.end for record in reversed(spool.records))]
        to = next((end for end in ends if end.is_end), reached)
        if to <= reached:
            return
        dropped = sum(read_slice(piece)[0].num_rows for piece in spool.slices(reached, to))
        name = self.membership.skip(member.name, to, dropped)
        self._abandon(lane)
        self._open_lane(name)
        counters.add(EVENTS_DROPPED, dropped, adapter=member.name)
        counters.add(LANE_MOVES, adapter=member.name, move="skip")
        self._say(
            f"adapter {member.name} is too far behind: {counted(dropped, 'event')} after {reached} up to {to} were "
            "dropped (--bus-mode fast)"
        )

    # --- changes while it runs

    def add(self, adapter: Adapter, make: Callable[[], Runner] | None = None) -> None:
        """Add an adapter, in its own lane from main's place. GapError if its ack is older: it would miss something.

        `make` creates its sink when no write to it is running: an earlier sink would have an older ack in memory.
        """
        before = self._removed.get(adapter.name)
        if before is not None and before.is_busy:
            raise PgcdcError(
                f"adapter {adapter.name} has not finished a write from before it was removed",
                "Try again when it has ended",
            )
        self._removed.pop(adapter.name, None)
        start = self.main.next_start
        ack = Progress(self._state.acks, adapter.name).position
        if ack is not None and ack < start:  # before its target is touched
            raise left_out(adapter.name, ack, start)
        if make is not None:
            adapter = replace(adapter, sink=make())
        # The sink comes last: an ack without a lane would be a gap after a crash.
        self.membership.add(adapter.name, start)
        member = self.members[adapter.name] = Member(adapter, self.membership)
        try:
            self._open_lane(self.membership[adapter.name].lane)
            member.open(start)
        except Exception as error:
            if not may_pass(error):
                self.remove(adapter.name, 0)
                raise
            member.last_error = error  # the watching thread tries again
        self._say(f"adapter {adapter.name} was added")

    def remove(self, name: str, timeout_s: float) -> None:
        """Stop delivering to this adapter; its ack stays."""
        while not self._take_out(name, timeout_s):
            pass
        member = self.members.pop(name)
        member.close()
        member.sink.stop()  # its writes need not finish
        if member.is_busy:
            self._removed[name] = member
        self._say(f"adapter {name} was removed")

    def _take_out(self, name: str, timeout_s: float) -> bool:
        """Take it out of its lane. False: a batch that we waited for has moved it to another lane."""
        lane = self.lanes.get(self.membership[name].lane) if name in self.membership else self.main
        with _held(lane, timeout_s) if lane is not None else contextlib.nullcontext(True) as is_held:
            if not is_held and lane is self.main:
                raise PgcdcError(f"adapter {name} cannot be removed in the middle of a batch", "Try again")
            if lane is not None and name in self.membership and self.membership[name].lane != lane.name:
                return False
            self.membership.remove(name)
            if lane is not None and lane is not self.main:
                self._abandon(lane)
        return True


@contextlib.contextmanager
def _held(lane: Lane, timeout_s: float) -> Iterator[bool]:
    """Hold a lane between two batches, if one ends in time."""
    is_held = lane.boundary.acquire(timeout=timeout_s) if timeout_s > 0 else lane.boundary.acquire(blocking=False)
    try:
        yield is_held
    finally:
        if is_held:
            lane.boundary.release()
