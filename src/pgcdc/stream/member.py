"""An adapter as lanes see it: one sink, with one thread that writes to it, whichever lane it is in."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from pgcdc.errors import GapError, PgcdcError, Policy
from pgcdc.ops.counters import EVENTS_DELIVERED, counters
from pgcdc.position import Position
from pgcdc.sink.base import Batch, Sink
from pgcdc.stream.membership import Membership
from pgcdc.transform.program import Chain

__all__ = ["Adapter", "Member", "NotAMember", "WriteFuture", "may_pass"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a pipeline has to know of one adapter."""

    name: str
    sink: Sink
    chain: Chain = field(default_factory=Chain)
    priority: str = "normal"


class NotAMember(Exception):
    """Refuses a write for a lane that the adapter has left meanwhile."""


class WriteFuture(Future[None]):
    """One write; `ended` is when it was over, by the monotonic clock."""

    ended = 0.0


def may_pass(error: BaseException | None) -> bool:
    """Whether a sink that failed so is worth another try, while the others go on."""
    return isinstance(error, PgcdcError) and error.policy is Policy.RETRY


class Member:
    """One sink and the only thread that ever writes to it. The thread does not keep the process from ending."""

    def __init__(self, adapter: Adapter, membership: Membership) -> None:
        self.adapter = adapter
        self.name = adapter.name
        self.sink = adapter.sink
        self.chain = adapter.chain
        self.is_open = False
        self.last_error: BaseException | None = None
        self.leaves = 0
        """How often it has left main lately: each time it has to stay away for longer."""
        self.rejoin_at = 0.0
        self.rejoined_at = -math.inf
        self.hold_at = 0.0
        """From when on main may be held for it."""
        self._membership = membership
        self._left = 0
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[str, Callable[[], None], WriteFuture] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"adapter-{self.name}", daemon=True).start()

    @property
    def reached(self) -> Position:
        """Up to where it needs nothing."""
        return self._membership.reached(self.name, self.sink.ack)

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or waits to be."""
        with self._lock:
            return self._left > 0

    def open(self, start: Position) -> None:
        """Open the sink where its lane goes on. One that was left out of earlier runs would miss what came between."""
        if not self.is_open:
            self.sink.open(start)
            self.is_open = True
        if self.reached < start:
            raise GapError(
                f"adapter {self.name} stands at {self.sink.ack}, but the others were served up to {start} without it",
                f"What came between cannot be delivered any more. To let it begin at {start}, delete its ack in "
                "the state directory (acks/) and give it a new target",
            )

    @property
    def is_hanging(self) -> bool:
        """Whether the sink is still at a write that nobody waits for any more (`sink/delivery.py`: its time was over)."""
        return bool(getattr(self.sink, "is_busy", False))

    def submit(self, lane: str, batch: Batch) -> WriteFuture:
        """Write a batch, after everything that was submitted before."""

        def write() -> None:
            reached = self.reached
            if batch.end > reached:
                rest = batch.after(reached)
                self.sink.write(rest)
                counters.add(EVENTS_DELIVERED, rest.events.num_rows, adapter=self.name)

        return self.run(lane, write)

    def run(self, lane: str, do: Callable[[], None]) -> WriteFuture:
        """Have the sink's thread do something that writes, after everything before. NotAMember: it is elsewhere by then."""
        future = WriteFuture()
        with self._lock:
            self._left += 1
        self._tasks.put((lane, do, future))
        return future

    def stop(self) -> None:
        """The pipeline stops: a sink that waits for another try need not."""
        if callable(stop := getattr(self.sink, "stop", None)):
            stop()

    def close(self) -> None:
        """End the thread and close the sink; one that is still being written to is left to itself."""
        self._tasks.put(None)
        if not self.is_busy and not self.is_hanging and self.is_open:
            self.sink.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            lane, do, future = task
            try:
                error: BaseException | None = None
                self._do(lane, do)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._left -= 1
            if not isinstance(error, NotAMember):
                self.last_error = error
            future.ended = time.monotonic()
            future.set_result(None) if error is None else future.set_exception(error)

    def _do(self, lane: str, do: Callable[[], None]) -> None:
        if not self._membership.begin_write(self.name, lane):
            raise NotAMember(f"adapter {self.name} is not in lane {lane} any more")
        try:
            do()
        finally:
            self._membership.end_write(self.name)
