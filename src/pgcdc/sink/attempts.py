"""Calls a sink: one call at a time, each with a time limit, retried where that may help.

A call that exceeds its limit is abandoned, and no other call starts before it ends.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from pgcdc.core.counters import TARGET_RECOVERIES, counters
from pgcdc.core.errors import (
    PgcdcError,
    Policy,
    Reject,
    SinkRejected,
    SinkUnavailable,
    StateError,
    full_jitter_s,
    policy_of,
)
from pgcdc.core.wording import counted
from pgcdc.sink.letters.record import DeadLetter
from pgcdc.sink.spec import DeliveryOptions

TELL_S = 5.0  # An outage this long is reported when it ends, even if no delivery failed for good
EXHAUSTED = "exhausted"  # The kind of a dead letter whose attempts were used up


class CircuitOpen(SinkUnavailable):
    """The sink failed too often and is left alone for a while. `retry_in_s` says when the next attempt is."""


class SinkTimeout(SinkUnavailable):
    """A write did not end in time, or an earlier one still runs."""


class DeliveryStopped(SinkUnavailable):
    """The pipeline stops, so nothing waits any longer."""


class Clock:
    """Time, as far as a delivery needs it. Tests use a clock that does not wait."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait, holding `condition`, until `done()` or the timeout. Returns whether it is done."""
        return condition.wait_for(done, timeout_s)


class BreakerState(Enum):
    """`CLOSED`: calls pass. `OPEN`: no call passes. `HALF_OPEN`: one attempt passes and decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after `max_failures` in a row (0: never), and lets one attempt through after `reset_s`. Calls `tell` with
    each new state."""

    def __init__(
        self, max_failures: int, reset_s: float, tell: Callable[[BreakerState], None] = lambda state: None
    ) -> None:
        self._max_failures, self._reset_s, self._tell = max_failures, reset_s, tell
        self._opened = 0.0
        self.failures = 0  # Consecutive
        self.state = BreakerState.CLOSED

    def wait_s(self, now: float) -> float:
        """How long to wait. With 0 the caller may proceed, and must report the outcome."""
        if self.state is BreakerState.OPEN:
            left = self._opened + self._reset_s - now
            if left > 0:
                return left
            self._move(BreakerState.HALF_OPEN)
        return 0.0

    def succeed(self) -> None:
        self.failures = 0
        self._move(BreakerState.CLOSED)

    def fail(self, now: float) -> None:
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN or 0 < self._max_failures <= self.failures:
            self._opened = now
            self._move(BreakerState.OPEN)

    def _move(self, state: BreakerState) -> None:
        before, self.state = self.state, state
        if state is not before:
            self._tell(state)


class TokenBucket:
    """One token per event: `rate` tokens arrive per second, and at most `burst` are kept."""

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self.burst = burst or max(1, int(rate))
        self._rate = rate
        self._tokens = float(self.burst)
        self._at = now

    def take(self, events: int, now: float) -> float:
        """Take the tokens of `events`; returns how long to wait before sending.

        A request may exceed `burst`: the bucket then goes into debt, and the wait grows.
        """
        self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self._rate) - events
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class DeliveryHooks:
    """What metrics need to know about one sink. Called in the delivering thread, so methods must be quick and must not
    raise."""

    def on_write(self, events: int, seconds: float) -> None:
        """These events are durable; the last attempt took `seconds`."""

    def on_retry(self, attempt: int, delay_s: float, error: BaseException) -> None:
        """Attempt number `attempt` (from 1) failed; the next one starts after `delay_s`."""

    def on_failure(self, error: BaseException) -> None:
        """The delivery failed for good, and the caller gets this error."""

    def on_breaker(self, state: BreakerState) -> None:
        """The circuit breaker changed its state."""

    def on_dead_letters(self, letters: Sequence[DeadLetter]) -> None:
        """These events were refused and recorded."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A delivery that should be repeated without some events. No `rejects`: the events are not known."""

    rejects: tuple[Reject, ...]
    attempts: int
    error: SinkRejected | None = None


Calls = queue.SimpleQueue[Callable[[], None] | None]


def _call(calls: Calls) -> None:
    while (do := calls.get()) is not None:
        do()
        del do  # it holds the batch


class Attempts:
    """The calls of one sink. `stop` ends every wait immediately, from any thread."""

    def __init__(
        self,
        name: str,
        options: DeliveryOptions,
        hooks: DeliveryHooks | None = None,
        clock: Clock | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = name
        self.options = options
        self.hooks = hooks or DeliveryHooks()
        self.clock = clock or Clock()
        self._uniform = uniform
        self._breaker = CircuitBreaker(options.cb_max_failures, options.cb_reset, self.hooks.on_breaker)
        self.bucket = (
            TokenBucket(options.rate_limit, options.rate_limit_burst, self.clock.now()) if options.rate_limit else None
        )
        self._rest_until = -math.inf  # The target asked for no requests before this time
        self.condition = threading.Condition()
        self._is_taken = False  # A delivery is running
        self.is_calling = False  # The sink is inside a call, possibly an abandoned one
        self._is_stopped = False
        self._outcome: BaseException | None = None  # The error of the last call
        self._caller: Calls | None = None  # The call that the thread takes next; one at a time, so one thread is enough
        self.failing: BaseException | None = None  # The last attempt's error, while a retry is pending
        self._cause = ""  # The last failure of the sink that was counted
        self._say = say
        self._outage: tuple[float, int] | None = None  # When the target began to fail, and failed attempts since
        self._is_told = False  # The outage was reported, because a delivery failed for good

    @property
    def breaker(self) -> BreakerState:
        return self._breaker.state

    @property
    def is_busy(self) -> bool:
        """Whether a delivery is running, or an abandoned call still is."""
        with self.condition:
            return self._is_taken or self.is_calling

    def stop(self) -> None:
        """End all waits. A running call may finish; nothing is retried."""
        with self.condition:
            self._is_stopped = True
            self.condition.notify_all()
        self.rest()

    def rest(self) -> None:
        """End the calling thread after its current call. A later call gets a new thread."""
        with self.condition:
            caller, self._caller = self._caller, None
        if caller is not None:
            caller.put(None)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the exclusive right to deliver and write."""

        def is_free() -> bool:
            return not (self._is_taken or self.is_calling)

        with self.condition:
            self.clock.wait(self.condition, lambda: is_free() or self._is_stopped, self.options.timeout)
            if not is_free():
                kind = DeliveryStopped if self._is_stopped else SinkTimeout
                raise kind(
                    f"an earlier write of adapter {self.name} is still running",
                    "Waiting for it to finish. Check the target; nothing is lost",
                )
            self._is_taken = True
        try:
            yield
        finally:
            with self.condition:
                self._is_taken, self.failing = False, None
                self.condition.notify_all()

    def try_often(
        self,
        events: int,
        write: Callable[[], None],
        timeout_s: float,
        *,
        is_done: Callable[[], bool] = lambda: False,
        may_refuse: bool = False,
        may_halve: bool = False,
    ) -> Refusal | None:
        """Retry until it succeeds or `is_done`; otherwise raises the error that ended it.

        `may_refuse`: events may be set aside. `may_halve`: even if the sink does not name them.
        """
        # Half open: a single attempt decides.
        last = 0 if self._breaker.state is BreakerState.HALF_OPEN else self.options.max_retries
        for attempt in range(last + 1):
            if (rest_s := self._rest_until - self.clock.now()) > 0:
                self._pause(rest_s)
            if self.bucket is not None:
                self._pause(self.bucket.take(events, self.clock.now()))
            began = self.clock.now()
            error = self.run(write, timeout_s)
            policy = policy_of(error) if error is not None else None
            if error is None or (policy is Policy.RETRY and is_done()):
                self._succeed()
                self.hooks.on_write(events, self.clock.now() - began)
                return None
            if isinstance(error, SinkRejected):
                is_unnamed = may_halve and not error.rejects and events > 0
                if is_unnamed or (may_refuse and policy is Policy.DEAD_LETTER):
                    self._succeed()  # it has answered
                    return Refusal(error.rejects, attempt + 1, error)
            if policy is not Policy.RETRY:
                if self._breaker.state is BreakerState.HALF_OPEN:
                    self._fail(error)
                raise error
            self.note_failure(began)
            rest_s = error.retry_in_s if isinstance(error, SinkUnavailable) else 0.0
            self._rest_until = self.clock.now() + rest_s
            if attempt == last or isinstance(error, SinkTimeout):
                self._fail(error)
                if may_refuse and attempt == self.options.max_retries and (given_up := self._give_up(error)):
                    return Refusal(given_up, attempt + 1)
                if isinstance(error, PgcdcError):
                    raise error
                raise SinkUnavailable(
                    f"adapter {self.name}: {error or type(error).__name__}", "Is the target up and reachable?"
                ) from error
            delay_s = full_jitter_s(attempt, self.options.backoff_base, self.options.backoff_cap, self._uniform)
            delay_s = max(delay_s, rest_s)
            self.failing = error
            self.hooks.on_retry(attempt + 1, delay_s, error)
            self._pause(delay_s, error)
        return None

    def _give_up(self, error: BaseException) -> tuple[Reject, ...]:
        """The events whose attempts are used up, if the sink can name them and the options do not say to wait."""
        is_named = isinstance(error, SinkUnavailable) and not isinstance(error, SinkTimeout)
        if self.options.on_exhausted != "dead_letter" or not is_named:
            return ()
        assert isinstance(error, SinkUnavailable)
        return tuple(Reject(position, EXHAUSTED, error.message) for position in error.positions)

    def run(self, do: Callable[[], None], timeout_s: float, what: str = "a write of") -> BaseException | None:
        """Call the sink in its own thread, for at most `timeout_s`; returns its error."""

        def run() -> None:
            outcome: BaseException | None = None
            try:
                do()
            except StateError as error:  # from saving the ack: the disk may have room again later
                outcome = SinkUnavailable(error.message, error.advice)
            except BaseException as error:  # even errors that end the pipeline: the caller decides
                outcome = error
            with self.condition:
                self._outcome, self.is_calling = outcome, False
                self.condition.notify_all()

        with self.condition:
            self.is_calling = True
            if self._caller is None:
                self._caller = queue.SimpleQueue()
                # A daemon, because a call that hangs forever must not keep the process alive.
                threading.Thread(target=_call, args=(self._caller,), name=f"write-{self.name}", daemon=True).start()
            self._caller.put(run)
            if self.clock.wait(self.condition, lambda: not self.is_calling, timeout_s):
                outcome, self._outcome = self._outcome, None
                return outcome
        return SinkTimeout(
            f"{what} adapter {self.name} did not finish within {timeout_s:g} s",
            f"Check the target, or raise {self.name}_timeout. Nothing is lost: it is retried when this write has ended",
        )

    # --- waits

    def _pause(self, seconds: float, error: BaseException | None = None) -> None:
        with self.condition:
            if seconds > 0:
                self.clock.wait(self.condition, lambda: self._is_stopped, seconds)
            if self._is_stopped:
                raise DeliveryStopped(
                    f"adapter {self.name} was waiting when the pipeline stopped",
                    "It receives the missing events at the next start",
                ) from error

    def pass_breaker(self) -> None:
        left = self._breaker.wait_s(self.clock.now())
        if left:
            cause = f". Its last failure: {self._cause}" if self._cause else ""
            raise CircuitOpen(
                f"adapter {self.name} failed {counted(self._breaker.failures, 'time')} in a row; the next attempt is in "
                f"{math.ceil(left)} s{cause}",
                "Check the target; nothing is lost meanwhile",
                retry_in_s=left,
            )

    def _succeed(self) -> None:
        self.failing = None
        self._breaker.succeed()
        if self._outage is not None:
            (began, tries), is_told = self._outage, self._is_told
            self._outage, self._is_told = None, False
            seconds = self.clock.now() - began
            counters.add(TARGET_RECOVERIES, adapter=self.name)
            if is_told or seconds >= TELL_S:
                self._say(f"recovered after {seconds:.0f} s and {counted(tries + 1, 'attempt')}")

    def note_failure(self, began: float, *, is_told: bool = False) -> None:
        """Record that an attempt started at `began` failed and may succeed later."""
        since, tries = self._outage or (began, 0)
        self._outage = since, tries + 1
        self._is_told |= is_told

    def _fail(self, error: BaseException) -> None:
        self._is_told = True
        text = error.message if isinstance(error, PgcdcError) else str(error) or type(error).__name__
        self._cause = text.removeprefix(f"adapter {self.name}: ")
        self._breaker.fail(self.clock.now())
