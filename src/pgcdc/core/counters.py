"""The pipeline's counters by metric name: the one place that exporters read."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

CHANGES_CAPTURED = "pgcdc_changes_captured_total"  # By the capture process: rows written to the spool, with repeats
CONNECTIONS_LOST = "pgcdc_connections_lost_total"
CONFIG_RELOADS = "pgcdc_config_reloads_total"
CONFIG_RELOAD_ERRORS = "pgcdc_config_reload_errors_total"
DEAD_LETTERS = "pgcdc_dead_letters_total"  # By adapter: events that its target refused and that were set aside
EVENTS_DELIVERED = "pgcdc_events_delivered_total"  # By adapter
EVENTS_DROPPED = "pgcdc_events_dropped_total"  # By adapter: events skipped in fast mode
EXEC_RESTARTS = "pgcdc_exec_restarts_total"  # By adapter: commands restarted after they failed or ended
LANE_MOVES = "pgcdc_lane_moves_total"  # By adapter and move: leave, rejoin, skip
ROWS_MISSED = "pgcdc_rows_missed_total"  # By adapter and table: rows to change that the target did not have
TABLE_RELOADS = "pgcdc_table_reloads_total"  # By adapter: tables reloaded because their copy could not follow
TARGET_RECOVERIES = "pgcdc_target_recoveries_total"  # By adapter: target outages that ended
WEBHOOK_REQUESTS = "pgcdc_webhook_requests_total"  # By adapter and answer: ok, http_500, timeout, ...

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Numbers that only increase, by name and labels. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, Labels]] = Counter()
        self._taken: dict[str, dict[tuple[str, Labels], int]] = {}

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += amount

    def get(self, name: str, **labels: str) -> int:
        with self._lock:
            return self._values[name, tuple(sorted(labels.items()))]

    def total(self, name: str, **labels: str) -> int:
        """The sum over all other labels."""
        wanted = set(labels.items())
        with self._lock:
            return sum(value for (one, given), value in self._values.items() if one == name and wanted <= set(given))

    def read(self) -> dict[tuple[str, Labels], int]:
        with self._lock:
            return dict(self._values)

    def to_json(self) -> list[Any]:
        """The counts, for `take` in another process."""
        return [[name, list(map(list, labels)), value] for (name, labels), value in self.read().items()]

    def take(self, process: str, values: list[Any]) -> None:
        """Add what another process has counted since its last `to_json()`."""
        now = {(name, tuple((key, text) for key, text in labels)): int(value) for name, labels, value in values}
        with self._lock:
            before = self._taken.get(process, {})
            self._taken[process] = now
            for key, value in now.items():
                self._values[key] += value - before.get(key, 0)


counters = Counters()  # The counters of this process
