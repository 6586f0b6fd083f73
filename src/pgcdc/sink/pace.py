"""When a sink may be called: a circuit breaker, and a bucket of tokens. Both are told the time and never wait themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

__all__ = ["BreakerState", "CircuitBreaker", "Clock", "SystemClock", "TokenBucket"]


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


class BreakerState(Enum):
    """`CLOSED`: everything goes through. `OPEN`: nothing does. `HALF_OPEN`: one try is let through, and decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after `max_failures` in a row (0: never), and lets one try through after `reset_s`."""

    def __init__(self, max_failures: int, reset_s: float) -> None:
        self._max_failures = max_failures
        self._reset_s = reset_s
        self._opened = 0.0
        self.failures = 0
        """In a row."""
        self.state = BreakerState.CLOSED

    def wait_s(self, now: float) -> float:
        """How long nothing may be tried; 0 lets the caller through, who then says how it went."""
        if self.state is BreakerState.OPEN:
            left = self._opened + self._reset_s - now
            if left > 0:
                return left
            self.state = BreakerState.HALF_OPEN
        return 0.0

    def succeed(self) -> None:
        """What was let through went well."""
        self.failures = 0
        self.state = BreakerState.CLOSED

    def fail(self, now: float) -> None:
        """What was let through failed."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN or 0 < self._max_failures <= self.failures:
            self.state, self._opened = BreakerState.OPEN, now


class TokenBucket:
    """One token per event: `rate` of them come in a second, and at most `burst` are kept."""

    def __init__(self, rate: float, burst: int, now: float) -> None:
        self.burst = burst or max(1, int(rate))
        self._rate = rate
        self._tokens = float(self.burst)
        self._at = now

    def take(self, events: int, now: float) -> float:
        """Take the tokens of `events`; how long to wait before they may be sent.

        More than a burst at once is allowed: the bucket owes them then, and the wait is that much longer.
        """
        self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self._rate) - events
        self._at = now
        return max(0.0, -self._tokens / self._rate)

    def give_back(self, events: int) -> None:
        """These were not sent after all."""
        self._tokens += events
