"""An adapter as lanes see it: one sink with one writing thread, whichever lane it is in."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from pgcdc.core.counters import EVENTS_DELIVERED, counters
from pgcdc.core.errors import GapError, PgcdcError, Policy
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.run.roster import Membership
from pgcdc.sink.runner import Runner
from pgcdc.spark.parallel import LargeBatch
from pgcdc.transform.specs import Chain, column_chain


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    sink: Runner
    chain: Chain = field(default_factory=Chain)
    priority: str = "normal"


class NotAMember(Exception):
    """Refuses a write for a lane that the adapter has left."""


class WriteFuture(Future[bool]):
    """One write; `ended` is its end by the monotonic clock. False: the sink wants the whole batch."""

    ended = 0.0
    grace_s = 0.0  # How much longer than usual the others wait for it


def may_pass(error: BaseException | None) -> bool:
    """Whether a failed sink is worth another attempt while the others continue."""
    return isinstance(error, PgcdcError) and error.policy is Policy.RETRY


def left_out(name: str, ack: Position, start: Position) -> GapError:
    """The error of an adapter that missed too much."""
    return GapError(
        f"adapter {name} is at {ack}, but the others continued to {start} without it",
        f"The events between can no longer be delivered. To start it at {start}, delete its ack in the state "
        "directory (acks/) and give it a new target",
    )


class Member:
    """One sink and the only thread that ever writes to it, a daemon thread."""

    def __init__(self, adapter: Adapter, membership: Membership) -> None:
        self.adapter = adapter
        self.name = adapter.name
        self.sink = adapter.sink
        self.chain = adapter.chain
        self.sink.chain = lambda: column_chain(self.chain)  # a reload changes it
        self.is_open = False
        self.last_error: BaseException | None = None
        self.away_s = 0.0  # How long it stays out of main: longer each time it soon leaves again
        self.rejoin_at = 0.0
        self.rejoined_at = -math.inf
        self.hold_at = 0.0  # From when on main may wait for it
        self._membership = membership
        self._left = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[str | None, Callable[[], bool], WriteFuture] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"adapter-{self.name}", daemon=True).start()

    @property
    def reached(self) -> Position:
        """Everything up to here is settled for this adapter."""
        return self._membership.reached(self.name, self.sink.ack)

    @property
    def is_busy(self) -> bool:
        """Whether a write runs or waits, including an abandoned one."""
        with self._lock:
            return self._left > 0 or self.sink.attempts.is_busy

    def open(self, start: Position) -> None:
        """Open the sink where its lane resumes. A sink that missed earlier runs would have a gap."""
        if not self.is_open:
            self.sink.open(start)
            self.is_open, self.last_error = True, None
        if self.reached < start:
            raise left_out(self.name, self.sink.ack, start)

    @property
    def takes_parts(self) -> bool:
        """Whether executors may write to it: its sink supports that, and no rate limit needs its events in sequence."""
        return self.sink.sink.takes_executors and not self.sink.options.rate_limit

    def submit(self, lane: str, batch: Batch) -> WriteFuture:
        def write() -> bool:
            rest, dead = batch.after(self.reached), self.sink.dead_letters
            self.sink.write(rest)
            counters.add(EVENTS_DELIVERED, len(rest) - self.sink.dead_letters + dead, adapter=self.name)
            return True

        return self._submit(lane, lambda: batch.end <= self.reached or write())

    def submit_large(self, lane: str, batch: LargeBatch) -> WriteFuture:
        """Have executors write a large batch, after everything submitted before."""

        def write() -> bool:
            if self.sink.holds.is_addressed(batch.start, batch.end):
                return False  # some of it may not be for this adapter
            is_written = batch.write(self.sink, self.reached)
            counters.add(EVENTS_DELIVERED, batch.events if is_written else 0, adapter=self.name)
            return is_written

        return self._submit(lane, lambda: batch.end <= self.reached or write())

    def submit_other(self, do: Callable[[], object]) -> WriteFuture:
        """Run something else with the sink between two batches. Its errors are not failures of the adapter."""
        return self._submit(None, lambda: bool(do()) or True)

    def _submit(self, lane: str | None, write: Callable[[], bool]) -> WriteFuture:
        future = WriteFuture()
        with self._lock:
            if not self._is_closed:
                self._left += 1
                self._tasks.put((lane, write, future))
                return future
        future.ended = time.monotonic()
        future.set_exception(NotAMember(f"adapter {self.name} was removed"))
        return future

    def close(self) -> None:
        """End the thread and close the sink. Abandons a sink that is still being written to."""
        with self._lock:
            self._is_closed = True
            self._tasks.put(None)
        if self.is_open and not self.is_busy:
            self.sink.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            lane, write, future = task
            error: BaseException | None = None
            done = True
            try:
                done = self._as_member(lane or self._membership[self.name].lane, write)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._left -= 1
            if lane is not None and not isinstance(error, NotAMember):
                self.last_error = error
            future.ended = time.monotonic()
            future.set_result(done) if error is None else future.set_exception(error)

    def _as_member(self, lane: str, write: Callable[[], bool]) -> bool:
        if not self._membership.begin_write(self.name, lane):
            raise NotAMember(f"adapter {self.name} is no longer in lane {lane}")
        try:
            return write()
        finally:
            self._membership.end_write(self.name)
