"""How long each step of a batch takes, for `pgcdc status` and `make bench`."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise

KEPT = 200
STEPS = ("planned", "called", "collected", "written", "ended")
"""The source announced the batch, Spark called us with it, its events are here, all adapters have it, we return."""


class BatchTimes:
    """The steps of a lane's last batches."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._took: deque[dict[str, float]] = deque(maxlen=KEPT)

    def mark(self, step: str) -> None:
        """Record that a step is done. The last step ends the batch; a batch that failed earlier does not count."""
        self._at[step] = time.perf_counter()
        if step == "planned":
            self._at = {step: self._at[step]}
        elif step == STEPS[-1] and STEPS[0] in self._at:
            came = [one for one in STEPS if one in self._at]
            self._took.append({one: self._at[one] - self._at[before] for before, one in pairwise(came)})

    def status(self) -> dict[str, float]:
        """The median of each step in milliseconds, from the step before; empty before the first batch."""
        took = list(self._took)
        return {
            step: round(statistics.median(one[step] for one in took if step in one) * 1e3, 1)
            for step in STEPS[1:]
            if any(step in one for one in took)
        }
