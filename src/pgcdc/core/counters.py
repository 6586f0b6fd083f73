"""Counters of what a pipeline has done, by the names of its metrics: one place for whoever exports them."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = [
    "CONFIG_RELOADS",
    "CONFIG_RELOAD_ERRORS",
    "DEAD_LETTERS",
    "EVENTS_DELIVERED",
    "EVENTS_DROPPED",
    "EXEC_RESTARTS",
    "LANE_MOVES",
    "WEBHOOK_REQUESTS",
    "Counters",
    "counters",
]

CONFIG_RELOADS = "pgcdc_config_reloads_total"
CONFIG_RELOAD_ERRORS = "pgcdc_config_reload_errors_total"
DEAD_LETTERS = "pgcdc_dead_letters_total"
"""By adapter: events that its target refused, and that were set aside."""
EVENTS_DELIVERED = "pgcdc_events_delivered_total"
"""By adapter."""
EVENTS_DROPPED = "pgcdc_events_dropped_total"
"""By adapter: what it skipped in fast mode."""
EXEC_RESTARTS = "pgcdc_exec_restarts_total"
"""By adapter: commands that were started again, because one failed or was ended."""
LANE_MOVES = "pgcdc_lane_moves_total"
"""By adapter and move: leave, rejoin, skip."""
WEBHOOK_REQUESTS = "pgcdc_webhook_requests_total"
"""By adapter and answer: ok, http_500, timeout, ..."""

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Numbers that only grow, by name and labels. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, Labels]] = Counter()

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        """Count."""
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += amount

    def get(self, name: str, **labels: str) -> int:
        """How far one has counted."""
        with self._lock:
            return self._values[name, tuple(sorted(labels.items()))]

    def read(self) -> dict[tuple[str, Labels], int]:
        """All of them."""
        with self._lock:
            return dict(self._values)


counters = Counters()
"""Those of this process."""
