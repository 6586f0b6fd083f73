"""What the playground measures, from delivered batches: rates, counts, latency and lag. Memory stays flat."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any

import orjson
import pyarrow as pa

SHOWN_EVENTS = 60
RATE_SPAN_S = 5.0
LATENCY_SPAN_S = 10.0
HISTORY_S = 120
_MAX_SAMPLES = 10_000
_STEP = math.log(1.02)
_LEAST_MS = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """One delivered event, as far as it is shown."""

    created_at: str
    operation: str
    table: str
    row: dict[str, str | None]
    old: dict[str, str | None]
    unchanged: tuple[str, ...]
    latency_ms: float

    @classmethod
    def parse(cls, line: str, delivered_s: float) -> Event:
        raw: dict[str, Any] = orjson.loads(line)
        payload = raw["payload"]
        return cls(
            created_at=raw["created_at"],
            operation=raw["operation"],
            table=raw["channel"].removeprefix("pgcdc:"),
            row=payload.get("row") or {},
            old=payload.get("old") or {},
            unchanged=tuple(payload.get("_unchanged_toast_columns") or ()),
            latency_ms=(delivered_s - datetime.fromisoformat(raw["created_at"]).timestamp()) * 1e3,
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """Commit to delivery over some events, within 2 %."""

    events: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0

    @staticmethod
    def bucket(latency_ms: float) -> int:
        """What is counted as the same latency."""
        return int(math.log(max(latency_ms, _LEAST_MS) / _LEAST_MS) / _STEP)

    @classmethod
    def of(cls, buckets: Counter[int]) -> Latency:
        """From the number of events in each bucket."""
        total, ordered = buckets.total(), sorted(buckets)
        if not total:
            return cls()
        reached = list(accumulate(buckets[one] for one in ordered))
        found = [next(one for one, count in zip(ordered, reached, strict=True) if count >= share * total)
                 for share in (0.5, 0.99, 1.0)]  # fmt: skip
        return cls(total, *(_LEAST_MS * math.exp((one + 0.5) * _STEP) for one in found))


class LagMeter:
    """How far delivery is behind the server: bytes of WAL, and the age of the oldest WAL that is not delivered."""

    def __init__(self) -> None:
        self._delivered_lsn = self._server_lsn = 0
        self._waiting: deque[tuple[float, int]] = deque(maxlen=_MAX_SAMPLES)

    def observe_server(self, now_s: float, lsn: int) -> None:
        """The server has written up to `lsn`."""
        if lsn > self._server_lsn:
            self._server_lsn = lsn
            self._waiting.append((now_s, lsn))

    def observe_delivery(self, lsn: int) -> None:
        """Everything up to `lsn` is delivered."""
        self._delivered_lsn = max(self._delivered_lsn, lsn)
        while self._waiting and self._waiting[0][1] <= self._delivered_lsn:
            self._waiting.popleft()

    @property
    def lag_bytes(self) -> int:
        return max(0, self._server_lsn - self._delivered_lsn) if self._waiting else 0

    def lag_ms(self, now_s: float) -> float:
        return (now_s - self._waiting[0][0]) * 1e3 if self._waiting else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the view shows, at one moment."""

    elapsed_s: float = 0.0
    seconds: float | None = None
    """How long the traffic lasts; None: until Ctrl-C."""
    events: int = 0
    commits: int = 0
    events_per_s: float = 0.0
    commits_per_s: float = 0.0
    history: tuple[int, ...] = ()
    """Events in each of the last seconds, the newest last."""
    latency: Latency = Latency()
    lag_bytes: int = 0
    lag_ms: float = 0.0
    confirmed_lsn: str = "-"
    server_lsn: str = "-"
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """Events by table and operation."""
    last: tuple[Event, ...] = ()
    note: str = ""


class Meter:
    """Adds up what was delivered.

    What was committed before the first delivery waited for the start, not for the pipeline: its latency is left out.
    """

    def __init__(self) -> None:
        self.events = self.commits = 0
        self.lag = LagMeter()
        self.latency: Counter[int] = Counter()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._batches: deque[tuple[float, int, int, Counter[int]]] = deque()
        self._last: deque[Event] = deque(maxlen=SHOWN_EVENTS)
        self._last_commit = ""
        self._first_s: float | None = None

    def add(self, batch: pa.Table, delivered_s: float) -> None:
        """Count one batch (`position` and `line` columns) that was delivered at this time (seconds since 1970)."""
        events = [Event.parse(line, delivered_s) for line in batch.column("line").to_pylist()]
        if not events:
            return
        commits = list(dict.fromkeys(position[:16] for position in batch.column("position").to_pylist()))
        count = len(commits) - (commits[0] == self._last_commit)  # a huge transaction comes in several batches
        self._last_commit = commits[-1]
        self._first_s = self._first_s or delivered_s
        patience_ms = (delivered_s - self._first_s) * 1e3
        buckets = Counter(Latency.bucket(one.latency_ms) for one in events if one.latency_ms <= patience_ms)
        self.events += len(events)
        self.commits += count
        self.latency.update(buckets)
        self._counts.update((one.table, one.operation) for one in events)
        self._batches.append((delivered_s, len(events), count, buckets))
        self._last.extend(events)

    def snapshot(self, now_s: float, *, started_s: float, **more: Any) -> Snapshot:
        """What there is to show now, with `more` about the run; what is older than the windows is forgotten."""
        while self._batches and self._batches[0][0] < now_s - HISTORY_S:
            self._batches.popleft()
        span_s = min(RATE_SPAN_S, max(1.0, now_s - started_s))
        recent = [(events, commits) for at, events, commits, _ in self._batches if at > now_s - span_s]
        latency = Counter[int]()
        for at, _, _, buckets in self._batches:
            if at >= now_s - LATENCY_SPAN_S:
                latency.update(buckets)
        return Snapshot(
            elapsed_s=now_s - started_s,
            events=self.events,
            commits=self.commits,
            events_per_s=sum(events for events, _ in recent) / span_s,
            commits_per_s=sum(commits for _, commits in recent) / span_s,
            history=self._history(now_s, started_s),
            latency=Latency.of(latency),
            lag_bytes=self.lag.lag_bytes,
            lag_ms=self.lag.lag_ms(now_s),
            counts=dict(self._counts),
            last=tuple(self._last),
            **more,
        )

    def _history(self, now_s: float, started_s: float) -> tuple[int, ...]:
        """Whole seconds since the start: the one that runs is left out, it would always look like a drop."""
        length = min(HISTORY_S, max(0, int(now_s) - int(started_s)))
        history = [0] * length
        for at, events, *_ in self._batches:
            age = int(now_s) - int(at)
            if 1 <= age <= length:
                history[-age] += events
        return tuple(history)
