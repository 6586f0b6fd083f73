"""One wrapper for all sinks: retry, circuit breaker, rate limit, timeout, dead letters and hooks; a sink's own protocol.

What becomes of an error is decided in `errors.policy_of`: what may pass is tried again here; events that will never be taken
are set aside as dead letters, durably, and then the others are delivered without them. A sink has one writer at a time,
whatever happens: a write that did not end in time is left alone, and no other one starts before it has ended. What it did
until then is told by the sink's ack, which is asked before every try.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pgcdc.core.backoff import full_jitter_s
from pgcdc.core.errors import PgcdcError, Policy, Reject, SinkError, SinkRejected, SinkUnavailable, policy_of
from pgcdc.core.position import Position
from pgcdc.sink.base import Batch, ReplayableSink, Sink, takes_parts
from pgcdc.sink.letters.record import DeadLetter
from pgcdc.sink.letters.set_aside import SetAside
from pgcdc.sink.letters.stores import DeadLetters
from pgcdc.sink.pace import BreakerState, CircuitBreaker, TokenBucket
from pgcdc.sink.spec import DeliveryOptions

__all__ = [
    "CircuitOpen",
    "Clock",
    "Delivery",
    "DeliveryHooks",
    "DeliveryStopped",
    "NoHooks",
    "SinkTimeout",
    "SystemClock",
]


EXHAUSTED = "exhausted"
"""The kind of a dead letter whose tries were used up."""


class CircuitOpen(SinkUnavailable):
    """The sink failed too often: it is left in peace for a while."""

    retry_in_s: float = 0.0
    """When the next try is."""


class SinkTimeout(SinkUnavailable):
    """A write did not end in time, or still has not."""


class DeliveryStopped(SinkUnavailable):
    """The pipeline stops: nothing is waited for any more."""


class Clock(Protocol):
    """Time, as far as a delivery needs it: a test has one that does not wait."""

    def now(self) -> float:
        """Seconds since whenever."""

    def wait(self, condition: threading.Condition, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait, with `condition` held, until `done()` or until the time is over. Whether it is done."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, done: Callable[[], bool], timeout_s: float) -> bool:
        return condition.wait_for(done, timeout_s)


class DeliveryHooks(Protocol):
    """What metrics want to know of one sink. Called in the thread that delivers; must not raise, and must be quick."""

    def on_write(self, events: int, seconds: float) -> None:
        """These events are durable; the last try took so long."""

    def on_retry(self, attempt: int, delay_s: float, error: BaseException) -> None:
        """Try number `attempt` (from 1) failed; the next one comes after `delay_s`."""

    def on_failure(self, error: BaseException) -> None:
        """The delivery is given up, and the caller gets this error."""

    def on_breaker(self, state: BreakerState) -> None:
        """The circuit breaker has another state."""

    def on_dead_letters(self, letters: Sequence[DeadLetter]) -> None:
        """These events were refused, and are recorded."""


class NoHooks:
    """Nobody wants to know."""

    def on_write(self, events: int, seconds: float) -> None:
        pass

    def on_retry(self, attempt: int, delay_s: float, error: BaseException) -> None:
        pass

    def on_failure(self, error: BaseException) -> None:
        pass

    def on_breaker(self, state: BreakerState) -> None:
        pass

    def on_dead_letters(self, letters: Sequence[DeadLetter]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Refusal:
    """How a delivery ended that is worth another one, without some events."""

    rejects: tuple[Reject, ...]
    attempts: int


class Delivery:
    """A sink that is called with care. `stop` ends every wait at once, from any thread."""

    def __init__(
        self,
        sink: Sink,
        options: DeliveryOptions = DeliveryOptions(),  # noqa: B008 - frozen
        hooks: DeliveryHooks | None = None,
        dead_letters: DeadLetters | None = None,
        *,
        clock: Clock | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Without `dead_letters`, an event that is refused ends the delivery."""
        self.sink = sink
        self.name = sink.name
        self.options = options
        self._hooks = hooks or NoHooks()
        self._clock = clock or SystemClock()
        self._uniform = uniform
        self._breaker = CircuitBreaker(options.cb_max_failures, options.cb_reset)
        self._bucket = (
            TokenBucket(options.rate_limit, options.rate_limit_burst, self._clock.now()) if options.rate_limit else None
        )
        self._aside = SetAside(dead_letters, sink.name, options.dead_letter_limit) if dead_letters is not None else None
        self._rest_until = -math.inf
        """The target wants to be left alone until then."""
        self._condition = threading.Condition()
        self._is_taken = False
        """Somebody is inside of `write` or `deliver`."""
        self._is_writing = False
        """The sink is inside of a write, maybe one that was given up."""
        self._is_stopped = False
        self._outcome: BaseException | None = None
        """How the last write ended."""
        self.failing: BaseException | None = None
        """What the last try failed with, while there is another one to come."""
        self._cause = ""
        """What the sink failed with when it last counted as failed."""

    @property
    def ack(self) -> Position:
        return self.sink.ack

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breaker."""
        return self._breaker.state

    @property
    def dead_letters(self) -> int:
        """How many events of this run were set aside."""
        return self._aside.count if self._aside is not None else 0

    @property
    def is_busy(self) -> bool:
        """Whether somebody delivers, or a write that was given up still runs."""
        with self._condition:
            return self._is_taken or self._is_writing

    def check(self) -> None:
        self.sink.check()

    def open(self, start: Position) -> None:
        with self._taken():
            self.sink.open(start)
            if self._aside is not None:
                self._aside.begin(self.sink.ack)

    def write(self, batch: Batch) -> None:
        with self._taken():
            while batch.end > self.sink.ack:
                batch = batch.after(self.sink.ack)
                with self._telling():
                    self._write(self._cut(batch))

    def deliver(self, end: Position, events: int, write: Callable[[], None], timeout_s: float | None = None) -> None:
        """Like `write`, for one that is not made by the sink's `write`: `write` makes everything up to `end` durable.

        SinkRejected comes out: only `write` knows the events, and can set some aside.
        """
        with self._taken():
            if end > self.sink.ack:
                with self._telling():
                    self._deliver(end, events, write, timeout_s)

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Deliver dead letters again (`ReplayableSink`). SinkRejected comes out: these have their letters."""
        sink, left_out = self.sink, list[str]()
        if not isinstance(sink, ReplayableSink):
            raise SinkError(f"adapter {self.name} cannot deliver dead letters again", "Deliver them in another way")

        def write() -> None:
            left_out[:] = sink.redeliver(batch)

        with self._taken():
            self._pass_breaker()
            try:
                self._try_often(None, batch.events.num_rows, write, self.options.timeout)
            finally:
                self.failing = None
        return left_out

    def stop(self) -> None:
        """End all waits: a write that runs may finish, nothing is tried again. What is not delivered raises."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()

    def close(self) -> None:
        """Close the sink, unless a write still runs in it: nothing is lost if it is never closed."""
        with self._condition:
            if self._is_writing:
                return
        self.sink.close()

    # --- one delivery

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Be the only one who delivers, and the only writer."""

        def is_free() -> bool:
            return not (self._is_taken or self._is_writing)

        with self._condition:
            self._clock.wait(self._condition, lambda: is_free() or self._is_stopped, self.options.timeout)
            if not is_free():
                kind = DeliveryStopped if self._is_stopped else SinkTimeout
                raise kind(
                    f"an earlier write of adapter {self.name} has not ended yet",
                    "No other one starts before: look at the target, nothing is lost",
                )
            self._is_taken = True
        try:
            yield
        finally:
            with self._condition:
                self._is_taken = False
                self._condition.notify_all()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._hooks.on_failure(error)
            raise
        finally:
            self.failing = None

    def _write(self, whole: Batch) -> None:
        """Everything of a batch that the target takes; what it refuses is in the dead letters first."""
        part, out = whole, set[str]()
        while True:
            write = partial(self.sink.write, part)
            refusal = self._deliver(part.end, part.events.num_rows, write, may_refuse=self._aside is not None)
            if self._aside is None or refusal is None:
                break
            letters = self._aside.take(whole, out, refusal.rejects, refusal.attempts, self.sink.ack)
            if letters:
                self._hooks.on_dead_letters(letters)
            part = whole.without(out)
        if self._aside is not None:
            self._aside.settle(whole, out)

    def _deliver(
        self,
        end: Position,
        events: int,
        write: Callable[[], None],
        timeout_s: float | None = None,
        *,
        may_refuse: bool = False,
    ) -> _Refusal | None:
        self._pass_breaker()
        refusal = self._try_often(end, events, write, timeout_s or self.options.timeout, may_refuse=may_refuse)
        if refusal is None and self.sink.ack < end:
            raise SinkError(
                f"adapter {self.name} has written up to {end}, but acknowledges only {self.sink.ack}",
                "This is a defect of the adapter: nothing goes on over it",
            )
        return refusal

    def _try_often(
        self,
        end: Position | None,
        events: int,
        write: Callable[[], None],
        timeout_s: float,
        *,
        may_refuse: bool = False,
    ) -> _Refusal | None:
        """Until it succeeds, by its own word or by the ack, which is at `end` then; what ends it otherwise is raised."""
        # Half open, one try decides.
        last = 0 if self._breaker.state is BreakerState.HALF_OPEN else self.options.max_retries
        for attempt in range(last + 1):
            if (rest_s := self._rest_until - self._clock.now()) > 0:
                self._pause(rest_s)
            self._wait_for_tokens(events)
            began = self._clock.now()
            error = self._run(write, timeout_s)
            policy = policy_of(error) if error is not None else None
            if error is None or (end is not None and self.sink.ack >= end and policy is Policy.RETRY):
                self._move_breaker(self._breaker.succeed)
                self._hooks.on_write(events, self._clock.now() - began)
                return None
            if may_refuse and policy is Policy.DEAD_LETTER and isinstance(error, SinkRejected):
                self._move_breaker(self._breaker.succeed)  # it has answered
                return _Refusal(error.rejects, attempt + 1)
            if policy is not Policy.RETRY:
                if self._breaker.state is BreakerState.HALF_OPEN:
                    self._fail(error)
                raise error
            rest_s = error.retry_in_s if isinstance(error, SinkUnavailable) else 0.0
            self._rest_until = self._clock.now() + rest_s
            if attempt == last or isinstance(error, SinkTimeout):
                self._fail(error)
                if may_refuse and attempt == self.options.max_retries and (given_up := self._give_up(error)):
                    return _Refusal(given_up, attempt + 1)
                if isinstance(error, PgcdcError):
                    raise error
                raise SinkUnavailable(
                    f"adapter {self.name}: {error or type(error).__name__}", "Is the target up and reachable?"
                ) from error
            delay_s = full_jitter_s(attempt, self.options.backoff_base, self.options.backoff_cap, self._uniform)
            delay_s = max(delay_s, rest_s)
            self.failing = error
            self._hooks.on_retry(attempt + 1, delay_s, error)
            self._pause(delay_s, error)
        return None

    def _give_up(self, error: BaseException) -> tuple[Reject, ...]:
        """The events whose tries are used up, if the sink can tell which, and if they are not to be waited for."""
        is_named = isinstance(error, SinkUnavailable) and not isinstance(error, SinkTimeout)
        if self.options.on_exhausted != "dead_letter" or not is_named:
            return ()
        assert isinstance(error, SinkUnavailable)
        return tuple(Reject(position, EXHAUSTED, error.message) for position in error.positions)

    def _run(self, write: Callable[[], None], timeout_s: float) -> BaseException | None:
        """Write in a thread of its own, for so long at most; what it failed with."""

        def run() -> None:
            outcome: BaseException | None = None
            try:
                write()
            except BaseException as error:  # also what ends the pipeline: the caller decides
                outcome = error
            with self._condition:
                self._outcome, self._is_writing = outcome, False
                self._condition.notify_all()

        with self._condition:
            self._is_writing = True
            # A daemon: one that hangs for ever must not keep the process from ending.
            threading.Thread(target=run, name=f"write-{self.name}", daemon=True).start()
            if self._clock.wait(self._condition, lambda: not self._is_writing, timeout_s):
                outcome, self._outcome = self._outcome, None
                return outcome
        return SinkTimeout(
            f"a write of adapter {self.name} has not ended within {timeout_s:g} s",
            f"Look at the target, or raise {self.name}_timeout. Nothing is lost: it is tried again when this one has ended",
        )

    # --- waits

    def _pause(self, seconds: float, error: BaseException | None = None) -> None:
        with self._condition:
            if seconds > 0:
                self._clock.wait(self._condition, lambda: self._is_stopped, seconds)
            if self._is_stopped:
                raise DeliveryStopped(
                    f"adapter {self.name} was waiting when the pipeline stopped",
                    "What it misses comes at the next start",
                ) from error

    def _pass_breaker(self) -> None:
        left = 0.0

        def ask() -> None:
            nonlocal left
            left = self._breaker.wait_s(self._clock.now())

        self._move_breaker(ask)
        if left:
            cause = f"; the last failure: {self._cause}" if self._cause else ""
            error = CircuitOpen(
                f"adapter {self.name} failed {self._breaker.failures} times in a row: the next try is in "
                f"{math.ceil(left)} s{cause}",
                "Look at the target; nothing is lost meanwhile",
            )
            error.retry_in_s = left
            raise error

    def _fail(self, error: BaseException) -> None:
        text = error.message if isinstance(error, PgcdcError) else str(error) or type(error).__name__
        self._cause = text.removeprefix(f"adapter {self.name}: ")
        self._move_breaker(lambda: self._breaker.fail(self._clock.now()))

    def _move_breaker(self, move: Callable[[], None]) -> None:
        before = self._breaker.state
        move()
        if self._breaker.state is not before:
            self._hooks.on_breaker(self._breaker.state)

    def _wait_for_tokens(self, events: int) -> None:
        if self._bucket is None:
            return
        wait_s = self._bucket.take(events, self._clock.now())
        if wait_s > 0:
            try:
                self._pause(wait_s)
            except DeliveryStopped:
                self._bucket.give_back(events)
                raise

    def _cut(self, batch: Batch) -> Batch:
        """As much of a batch as the sink can do in time, and the rate limit gives at once, if the sink takes parts."""
        first_part: Callable[[Batch], Batch] | None = getattr(self.sink, "first_part", None)
        batch = first_part(batch) if first_part is not None else batch
        if self._bucket is None or batch.events.num_rows <= self._bucket.burst or not takes_parts(self.sink):
            return batch
        return batch.first(self._bucket.burst)
