"""What the playground measures, and the lines that show it. Memory stays flat."""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime
from typing import Any

import orjson
import pyarrow as pa

RECENT_S = 10.0
HISTORY_S = 120
SHOWN_EVENTS = 60
_MAX_VALUE_LETTERS = 28


class Meter:
    """Adds up what was delivered. One thread uses it.

    What was committed before the first delivery waited for the start, not for the pipeline: its latency is left out.
    """

    def __init__(self) -> None:
        self.began_s: float | None = None
        """When the first event was delivered, in seconds since 1970."""
        self.events = self.commits = 0
        self.latencies: Counter[int] = Counter()
        """Events by the milliseconds from commit to delivery."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events by table and operation."""
        self.last: deque[dict[str, Any]] = deque(maxlen=SHOWN_EVENTS)
        """The newest events."""
        self.server_lsn = self.delivered_lsn = 0
        self._recent: deque[tuple[float, int, int, Counter[int]]] = deque()
        self._last_commit = ""

    def add(self, batch: pa.Table, delivered_s: float) -> None:
        """Count one batch (`position` and `line` columns) that was delivered at this time (seconds since 1970)."""
        events = [orjson.loads(line) for line in batch.column("line").to_pylist()]
        if not events:
            return
        commits = list(dict.fromkeys(position[:16] for position in batch.column("position").to_pylist()))
        count = len(commits) - (commits[0] == self._last_commit)  # a huge transaction comes in several batches
        self._last_commit = commits[-1]
        self.began_s = self.began_s or delivered_s
        times = [(delivered_s - datetime.fromisoformat(one["created_at"]).timestamp()) * 1e3 for one in events]
        latencies = Counter(round(one) for one in times if one <= (delivered_s - self.began_s) * 1e3)
        self.events += len(events)
        self.commits += count
        self.latencies.update(latencies)
        self.counts.update((table_of(one), one["operation"]) for one in events)
        self.last.extend(events)
        self._recent.append((delivered_s, len(events), count, latencies))

    def recent(self, now_s: float) -> tuple[float, float, Counter[int]]:
        """Events and commits per second, and latencies, of the last ten seconds."""
        while self._recent and self._recent[0][0] < now_s - HISTORY_S:
            self._recent.popleft()
        span_s = min(RECENT_S, max(1.0, now_s - (self.began_s or now_s)))
        parts = [part for part in self._recent if part[0] > now_s - RECENT_S]
        latencies: Counter[int] = Counter()
        for _, _, _, part in parts:
            latencies.update(part)
        return sum(one[1] for one in parts) / span_s, sum(one[2] for one in parts) / span_s, latencies

    def history(self, now_s: float) -> list[int]:
        """Events in each whole second since the start, two minutes at most; the one that runs would look like a drop."""
        found = [0] * min(HISTORY_S, int(now_s) - int(self.began_s or now_s))
        for at_s, events, *_ in self._recent:
            age = int(now_s) - int(at_s)
            if 1 <= age <= len(found):
                found[-age] += events
        return found

    @property
    def lag_bytes(self) -> int:
        """How much WAL the server has written that is not delivered."""
        return max(0, self.server_lsn - self.delivered_lsn)


# --- text


def format_bytes(size: float) -> str:
    """`0 B`, `950 B`, `1.2 kB`, `34 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"


def format_ms(value: float) -> str:
    """`84 ms`, `1.2 s`."""
    return f"{value / 1e3:.1f} s" if value >= 999.5 else f"{value:.0f} ms"


def format_latency(latencies: Counter[int], share: float) -> str:
    """The latency that this share of the events does not exceed; `-` while there is nothing to tell."""
    left = share * latencies.total()
    for value in sorted(latencies):
        left -= latencies[value]
        if left <= 0:
            return format_ms(value)
    return "-"


def format_clock(seconds: float) -> str:
    """`0:07`, `12:00`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def progress_line(meter: Meter, now_s: float) -> str:
    """One line for a log."""
    events_per_s, commits_per_s, latencies = meter.recent(now_s)
    return (
        f"{format_clock(now_s - (meter.began_s or now_s))}  {meter.events:,} events in {meter.commits:,} commits, "
        f"{events_per_s:,.0f} events/s, {commits_per_s:,.0f} commits/s, "
        f"lag {format_bytes(meter.lag_bytes)}, "
        f"latency p50 {format_latency(latencies, 0.5)} p99 {format_latency(latencies, 0.99)}"
    )


def summary_line(latencies: Counter[int]) -> str:
    """Latency of the whole run."""
    p50, p99, top = (format_latency(latencies, share) for share in (0.5, 0.99, 1.0))
    return f"commit to file: p50 {p50}, p99 {p99}, max {top} over {latencies.total():,} events"


def describe_event(event: dict[str, Any]) -> str:
    """`UPDATE orders: id=1→2 note=null body=…`: a changed key has both values, an unchanged large value none."""
    payload = event["payload"]
    row, old = payload.get("row") or {}, payload.get("old") or {}
    shown = []
    for name, value in row.items():
        before = f"{_shorten(old[name])}→" if name in old and old[name] != value else ""
        shown.append(f"{name}={before}{_shorten(value)}")
    shown += [f"{name}=…" for name in payload.get("_unchanged_toast_columns") or ()]
    return f"{event['operation']} {table_of(event)}: {' '.join(shown)}"


def table_of(event: dict[str, Any]) -> str:
    """The name that its channel has."""
    return str(event["channel"]).removeprefix("pgcdc:")


def _shorten(value: str | None) -> str:
    if value is None:
        return "null"
    short = value if len(value) <= _MAX_VALUE_LETTERS else f"{value[:_MAX_VALUE_LETTERS]}…"
    return "".join(letter if letter.isprintable() else "·" for letter in short)
