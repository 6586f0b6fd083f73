"""What the playground measures, from delivered batches: rates, counts, latency and lag.

Every event is looked at in its Arrow column: head and tail of its line have a known form, so only the few events that are
shown are parsed. Memory stays flat however long the playground runs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Event", "LagMeter", "Latency", "LatencyHistogram", "Measured", "Meter", "Snapshot", "measure"]

Floats = npt.NDArray[np.float64]

SHOWN_EVENTS = 60
RATE_SPAN_S = 5.0
LATENCY_SPAN_S = 10.0
HISTORY_S = 120

# The head ends before the payload, the tail begins after it: nothing of a row can look like either.
_HEAD = r'^\{"id":"[^"]*","channel":"(?P<channel>(?:[^"\\]|\\.)*)","operation":"(?P<operation>[A-Z]+)"'
_HEAD_LETTERS = 400
_TAIL = r'"created_at":"(?P<created_at>[^"]*)"[^{}]*\}\s*$'
_TAIL_LETTERS = 200


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


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch, measured."""

    delivered_s: float
    commits: tuple[str, ...]
    """The different LSNs of its events, in order."""
    counts: dict[tuple[str, str], int]
    """Events by table and operation."""
    latency_ms: Floats
    """Commit to delivery, of every event."""
    last: tuple[Event, ...]

    @property
    def events(self) -> int:
        """How many events the batch has."""
        return len(self.latency_ms)


def measure(events: pa.Table, delivered_s: float, shown: int = SHOWN_EVENTS) -> Measured:
    """Measure one batch (`position` and `line` columns) that was delivered at this time (seconds since 1970)."""
    if not events.num_rows:
        return Measured(delivered_s, (), {}, np.zeros(0), ())
    line = events.column("line").combine_chunks()
    head = pc.extract_regex(pc.utf8_slice_codeunits(line, 0, _HEAD_LETTERS), _HEAD)
    tail = pc.extract_regex(pc.utf8_slice_codeunits(line, -_TAIL_LETTERS), _TAIL)
    names, operations = pc.struct_field(head, "channel"), pc.struct_field(head, "operation")
    counted = pa.table({"channel": names, "operation": operations}).group_by(["channel", "operation"])
    counts = {
        (table_name(group["channel"] or "?"), group["operation"] or "?"): group["count_all"]
        for group in counted.aggregate([([], "count_all")]).to_pylist()
    }
    created = pc.struct_field(tail, "created_at").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    latency_ms = delivered_s * 1e3 - created.to_numpy(zero_copy_only=False) / 1e3
    lsns = pc.unique(pc.utf8_slice_codeunits(events.column("position"), 0, 16)).to_pylist()
    last = zip(line[-shown:].to_pylist(), latency_ms[-shown:].tolist(), strict=True)
    return Measured(delivered_s, tuple(lsns), counts, latency_ms, tuple(parse_event(*one) for one in last))


def parse_event(line: str, latency_ms: float) -> Event:
    """One line, for showing it."""
    raw: dict[str, Any] = orjson.loads(line)
    payload = raw["payload"]
    return Event(
        created_at=raw["created_at"],
        operation=raw["operation"],
        table=table_name(raw["channel"]),
        row=payload.get("row") or {},
        old=payload.get("old") or {},
        unchanged=tuple(payload.get("_unchanged_toast_columns") or ()),
        latency_ms=latency_ms,
    )


def table_name(channel: str) -> str:
    """The table as people say it: `orders`, or `billing.invoices` outside of public."""
    return channel.removeprefix("pgcdc:")


@dataclass(frozen=True, slots=True)
class Latency:
    """Commit to delivery over some events."""

    events: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0

    @classmethod
    def of(cls, parts: Sequence[Floats]) -> Latency:
        """Exact, from every single latency."""
        values = np.concatenate(parts) if parts else np.zeros(0)
        if not len(values):
            return cls()
        p50, p99, top = np.percentile(values, [50, 99, 100]).tolist()
        return cls(len(values), p50, p99, top)


class LatencyHistogram:
    """Percentiles of a whole run, within 2 %, in a few kB."""

    _STEP = math.log(1.02)
    _LEAST_MS = 0.1
    _BUCKETS = 1024  # up to 17 hours

    def __init__(self) -> None:
        self._counts = np.zeros(self._BUCKETS, np.int64)
        self._max_ms = 0.0

    def add(self, latency_ms: Floats) -> None:
        """Count these latencies."""
        if len(latency_ms):
            exponents = np.log(np.maximum(latency_ms, self._LEAST_MS) / self._LEAST_MS) / self._STEP
            buckets = np.minimum(exponents.astype(np.int64), self._BUCKETS - 1)
            self._counts += np.bincount(buckets, minlength=self._BUCKETS)
            self._max_ms = max(self._max_ms, float(latency_ms.max()))

    def latency(self) -> Latency:
        """What was counted so far."""
        total = int(self._counts.sum())
        return Latency(total, self._percentile(total, 0.50), self._percentile(total, 0.99), self._max_ms)

    def _percentile(self, total: int, share: float) -> float:
        if not total:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self._counts), share * total))
        return min(self._max_ms, self._LEAST_MS * math.exp((bucket + 0.5) * self._STEP))


class LagMeter:
    """How far delivery is behind the server: bytes of WAL, and the age of the oldest WAL that is not delivered."""

    _MAX_SAMPLES = 10_000

    def __init__(self) -> None:
        self._delivered_lsn = 0
        self._server_lsn = 0
        self._waiting: deque[tuple[float, int]] = deque(maxlen=self._MAX_SAMPLES)

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
        """WAL that is written and not delivered."""
        return max(0, self._server_lsn - self._delivered_lsn) if self._waiting else 0

    def lag_ms(self, now_s: float) -> float:
        """How long the oldest of it has been there, as far as we have looked."""
        return (now_s - self._waiting[0][0]) * 1e3 if self._waiting else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the view shows, at one moment."""

    elapsed_s: float = 0.0
    seconds: float | None = None
    """How long the traffic lasts; None: until Ctrl-C."""
    is_stopping: bool = False
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
    last: tuple[Event, ...] = ()
    note: str = ""


class Meter:
    """Adds up what was delivered.

    What was committed before the first delivery waited for the start, not for the pipeline: its latency is left out.
    """

    def __init__(self) -> None:
        self.events = 0
        self.commits = 0
        self.lag = LagMeter()
        self.total = LatencyHistogram()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._batches: deque[tuple[float, int, int]] = deque()
        self._latencies: deque[tuple[float, Floats]] = deque()
        self._last: deque[Event] = deque(maxlen=SHOWN_EVENTS)
        self._last_commit = ""
        self._first_s: float | None = None

    def add(self, batch: Measured) -> None:
        """Count one delivered batch."""
        if not batch.events:
            return
        commits = sum(lsn != self._last_commit for lsn in batch.commits)  # a huge transaction comes in several batches
        self._last_commit = batch.commits[-1]
        self.events += batch.events
        self.commits += commits
        self._first_s = self._first_s or batch.delivered_s
        latency_ms = batch.latency_ms[batch.latency_ms <= (batch.delivered_s - self._first_s) * 1e3]
        self.total.add(latency_ms)
        self._counts.update(batch.counts)
        self._batches.append((batch.delivered_s, batch.events, commits))
        self._latencies.append((batch.delivered_s, latency_ms))
        self._last.extend(batch.last)

    def snapshot(
        self,
        now_s: float,
        *,
        started_s: float,
        seconds: float | None = None,
        is_stopping: bool = False,
        confirmed_lsn: str = "-",
        server_lsn: str = "-",
        note: str = "",
    ) -> Snapshot:
        """What there is to show now; what is older than the windows is forgotten."""
        while self._batches and self._batches[0][0] < now_s - HISTORY_S:
            self._batches.popleft()
        while self._latencies and self._latencies[0][0] < now_s - LATENCY_SPAN_S:
            self._latencies.popleft()
        span_s = min(RATE_SPAN_S, max(1.0, now_s - started_s))
        recent = [(events, commits) for at, events, commits in self._batches if at > now_s - span_s]
        return Snapshot(
            elapsed_s=now_s - started_s,
            seconds=seconds,
            is_stopping=is_stopping,
            events=self.events,
            commits=self.commits,
            events_per_s=sum(events for events, _ in recent) / span_s,
            commits_per_s=sum(commits for _, commits in recent) / span_s,
            history=self._history(now_s, started_s),
            latency=Latency.of([values for _, values in self._latencies]),
            lag_bytes=self.lag.lag_bytes,
            lag_ms=self.lag.lag_ms(now_s),
            confirmed_lsn=confirmed_lsn,
            server_lsn=server_lsn,
            counts=dict(self._counts),
            last=tuple(self._last),
            note=note,
        )

    def _history(self, now_s: float, started_s: float) -> tuple[int, ...]:
        """Whole seconds since the start: the one that runs is left out, it would always look like a drop."""
        length = min(HISTORY_S, max(0, int(now_s) - int(started_s)))
        history = [0] * length
        for at, events, _ in self._batches:
            age = int(now_s) - int(at)
            if 1 <= age <= length:
                history[-age] += events
        return tuple(history)
