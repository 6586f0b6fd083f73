"""How long to wait before the next try: full jitter, so that those who failed together do not come back together."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["full_jitter_s", "reconnect_delay_s"]


def full_jitter_s(
    attempt: int, base_s: float, cap_s: float, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Anything between 0 and `base_s` · 2^attempt, at most `cap_s`; the first attempt is 0."""
    return uniform(0.0, min(cap_s, base_s * 2.0 ** min(attempt, 64)))


def reconnect_delay_s(attempt: int) -> float:
    """Full jitter: anything up to 100 ms · 2^attempt, at most 30 s, at least 100 ms."""
    return max(0.1, full_jitter_s(attempt, 0.1, 30.0))
