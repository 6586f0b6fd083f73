"""One wrapper for all sinks: retry, circuit breaker, rate limit, timeout and hooks for metrics, with a sink's own protocol.

What becomes of an error is decided in `errors.policy_of`: only what may pass is tried again here. A sink has one writer at a
time, whatever happens: a write that did not end in time is left alone, and no other one starts before it has ended. What it
did until then is told by the sink's ack, which is asked before every try.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from pgcdc.errors import PgcdcError, Policy, SinkError, SinkUnavailable, policy_of
from pgcdc.ops.backoff import full_jitter_s
from pgcdc.position import Position
from pgcdc.sink.base import Batch, Sink, takes_parts
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


class Delivery:
    """A sink that is called with care. `stop` ends every wait at once, from any thread."""

    def __init__(
        self,
        sink: Sink,
        options: DeliveryOptions = DeliveryOptions(),  # noqa: B008 - frozen
        hooks: DeliveryHooks | None = None,
        *,
        clock: Clock | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
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

    @property
    def ack(self) -> Position:
        return self.sink.ack

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breaker."""
        return self._breaker.state

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

    def write(self, batch: Batch) -> None:
        with self._taken():
            while batch.end > self.sink.ack:
                batch = batch.after(self.sink.ack)
                part = self._cut(batch)
                self._deliver(part.end, part.events.num_rows, partial(self.sink.write, part))

    def deliver(self, end: Position, events: int, write: Callable[[], None], timeout_s: float | None = None) -> None:
        """Like `write`, for one that is not made by the sink's `write`: `write` makes everything up to `end` durable."""
        with self._taken():
            if end > self.sink.ack:
                self._deliver(end, events, write, timeout_s)

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

    def _deliver(self, end: Position, events: int, write: Callable[[], None], timeout_s: float | None = None) -> None:
        try:
            self._pass_breaker()
            self._try_often(end, events, write, timeout_s or self.options.timeout)
            if self.sink.ack < end:
                raise SinkError(
                    f"adapter {self.name} has written up to {end}, but acknowledges only {self.sink.ack}",
                    "This is a defect of the adapter: nothing goes on over it",
                )
        except BaseException as error:
            self._hooks.on_failure(error)
            raise
        finally:
            self.failing = None

    def _try_often(self, end: Position, events: int, write: Callable[[], None], timeout_s: float) -> None:
        # Half open, one try decides.
        last = 0 if self._breaker.state is BreakerState.HALF_OPEN else self.options.max_retries
        for attempt in range(last + 1):
            self._wait_for_tokens(events)
            began = self._clock.now()
            error = self._run(write, timeout_s)
            if error is None or (self.sink.ack >= end and policy_of(error) is Policy.RETRY):
                self._move_breaker(self._breaker.succeed)
                self._hooks.on_write(events, self._clock.now() - began)
                return
            if policy_of(error) is not Policy.RETRY:
                if self._breaker.state is BreakerState.HALF_OPEN:
                    self._move_breaker(lambda: self._breaker.fail(self._clock.now()))
                raise error
            if attempt == last or isinstance(error, SinkTimeout):
                self._move_breaker(lambda: self._breaker.fail(self._clock.now()))
                if isinstance(error, PgcdcError):
                    raise error
                raise SinkUnavailable(
                    f"adapter {self.name}: {error or type(error).__name__}", "Is the target up and reachable?"
                ) from error
            delay_s = full_jitter_s(attempt, self.options.backoff_base, self.options.backoff_cap, self._uniform)
            self.failing = error
            self._hooks.on_retry(attempt + 1, delay_s, error)
            self._pause(delay_s, error)

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
            error = CircuitOpen(
                f"adapter {self.name} failed {self._breaker.failures} times in a row: the next try is in "
                f"{math.ceil(left)} s",
                "Look at the target; nothing is lost meanwhile",
            )
            error.retry_in_s = left
            raise error

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
        """As much of a batch as the rate limit gives at once, if the sink takes parts."""
        if self._bucket is None or batch.events.num_rows <= self._bucket.burst or not takes_parts(self.sink):
            return batch
        return batch.first(self._bucket.burst)
