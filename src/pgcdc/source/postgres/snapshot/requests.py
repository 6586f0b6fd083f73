"""The state of all snapshots of a pipeline, in one file: the initial one, and later requests.

`InitialPlan` says which chunks of which tables are read in which held snapshot. A chunk that was read is a file in the
folder, and a released one is in the log of releases. Neither is repeated here, so reading a chunk does not require
writing this file. A request is a table that is read by key beside the stream, with its progress. The part of a table
that a lost snapshot left unread becomes requests in the same step that removes the table from the plan.

The file is durable, so that a request survives any crash. It belongs to the capture process (`{"do": "snapshot"}` on
its control socket), or to whoever holds the capture's lock while no capture runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.core.state import read_json, write_durably
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.chunks import Chunk
from pgcdc.source.postgres.snapshot.held import Hold
from pgcdc.source.postgres.snapshot.releases import Staged

KINDS = ("incremental", "initial", "added", "always", "vanished", "repair", "reload")
"""In this order: requested by a user; the remainder of an interrupted initial snapshot; a table new in the publication;
at every start; a sink's keys that the table may no longer have; keys whose rows some adapters receive again; a table
whose content some adapters replace."""
BY_KEYS = ("vanished", "repair")
ADDRESSED = ("repair", "reload")
RETRIED = ("initial", "added", "repair", "reload")
"""Kinds that nobody requests twice: their rows would be missing forever, so a failed one is retried."""
RETRY_S, MAX_RETRY_S = 1.0, 300.0
KEPT_FINISHED = 20
_ENDED = ("done", "stopped", "failed")


# --- the initial snapshot

_DERIVED = Field(exclude=True)  # Not in the file; restored after a crash


@dataclass(frozen=True, slots=True)
class SkipRule:
    """A table was read in a younger snapshot than the slot's: the stream must not repeat what that snapshot saw."""

    oid: int
    visible: str  # A pg_snapshot
    lsn: int  # Everything it sees ends before this


@dataclass(slots=True)
class PlannedTable:
    """One table of the initial snapshot, with its progress."""

    published: PublishedTable
    hold: int  # The number of the snapshot in which it is read
    chunks: dict[str, Chunk] | None
    """Chunks not released yet; None: it cannot be read in that snapshot and needs a younger one."""
    estimated_rows: int = 0
    ended: str = ""  # complete, moved (the remainder is read beside the stream) or gone (the table was dropped)
    details: dict[str, Any] | None = None  # The catalog's description of its shape in that snapshot
    staged: Annotated[dict[str, Staged], _DERIVED] = field(default_factory=dict)
    """Chunks that were read: they are released even if their snapshot is lost. Derived from the folder."""
    is_described: Annotated[bool, _DERIVED] = False  # Whether its details were released. Derived like `is_started`
    is_started: Annotated[bool, _DERIVED] = False
    """Whether its start was released. Derived from the log of releases, like `rows`."""
    rows: Annotated[int, _DERIVED] = 0  # The number of released rows

    @property
    def oid(self) -> int:
        return self.published.relation.oid

    @property
    def is_whole(self) -> bool:
        """Whether everything that remains was read."""
        return self.chunks is not None and len(self.staged) == len(self.chunks)


@dataclass(slots=True)
class InitialPlan:
    """The initial snapshot of a slot."""

    lsn: int = 0  # Where the slot begins: the rows follow it. 0: no initial snapshot
    holds: dict[int, Hold] = field(default_factory=dict)
    tables: dict[int, PlannedTable] | None = None  # None: not planned yet
    completed: dict[str, Any] | None = None  # The final report; everything else is then dropped

    @property
    def is_active(self) -> bool:
        """Whether rows still come before the stream."""
        return self.lsn > 0 and self.completed is None

    @property
    def unfinished(self) -> list[PlannedTable]:
        return [table for table in (self.tables or {}).values() if not table.ended]

    @property
    def rules(self) -> list[SkipRule]:
        """What the stream must always omit: it may be read again from its beginning."""
        if self.completed is not None:
            return [SkipRule(**rule) for rule in self.completed["rules"]]
        tables = ((table.oid, self.holds[table.hold]) for table in (self.tables or {}).values())
        return [SkipRule(oid, hold.visible, hold.lsn) for oid, hold in tables if hold.visible is not None]

    def note(self, oid: int, what: str, rows: int) -> None:
        """Note what is now in the stream: a table's `started` or `complete`, or the rows of a chunk."""
        if self.tables is None or (table := self.tables.get(oid)) is None:
            return
        if what == "described":
            table.is_described = True
        elif what == "started":
            table.is_started = True
        elif what == "complete":
            table.ended = what
        else:
            table.rows += rows
            table.staged.pop(what, None)
            (table.chunks or {}).pop(what, None)

    def complete(self, end: Position) -> dict[str, Any]:
        """All tables have ended; `end` is the position after the last row."""
        now, tables = time.time(), (self.tables or {}).values()
        begun = min((hold.time for hold in self.holds.values()), default=now)
        self.completed = {
            "end": str(end),
            "time": now,
            "seconds": round(max(0.0, now - begun), 1),
            "rows": sum(table.rows for table in tables),
            "tables": [{"table": one.published.title, "rows": one.rows, "status": one.ended} for one in tables],
            "rules": [asdict(rule) for rule in self.rules],
        }
        self.holds, self.tables = {}, None
        return self.completed


# --- requests


def new_id() -> str:
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """One table to read while the stream runs."""

    id: str
    table: str  # As users write it: `orders`, `sales.orders`
    kind: str = "incremental"  # One of KINDS
    where: str = ""  # An SQL condition for the rows; "" for all
    low: tuple[str, ...] | None = None
    """The smallest key, as text, in the order of PublishedTable.key; None: from the first."""
    high: tuple[str, ...] | None = None  # The first key after the range; None: to the last
    keys_file: str = ""
    """For given keys: a file with one key per line, as a JSON array of texts in the order of PublishedTable.key."""
    chunk_size: int = 0  # Rows per chunk; 0: as many as can be read in a short time
    chunk_delay_s: float = 0.0  # How long to pause between chunks
    oid: int = 0  # The table, whatever its name is by then; 0: the table that has the name when it is looked up
    adapters: tuple[str, ...] = ()  # The adapters that receive the rows; (): all

    def check(self) -> None:
        """Raise ConfigError if invalid."""
        if self.kind not in KINDS:
            raise ConfigError(f"unknown kind of snapshot {self.kind!r}", f"Use one of: {', '.join(KINDS)}")
        if (self.kind in BY_KEYS) != bool(self.keys_file):
            raise ConfigError(f"snapshots of the kinds {' and '.join(BY_KEYS)} need a file of keys, others have none")
        if (self.kind in ADDRESSED) != bool(self.adapters):
            raise ConfigError(f"snapshots of the kinds {' and '.join(ADDRESSED)} name adapters, others do not")
        if self.chunk_size < 0 or self.chunk_delay_s < 0:
            raise ConfigError("chunk size and chunk delay cannot be negative", "0 is the default of both")


def requests_for_rest(table: PlannedTable) -> list[SnapshotRequest]:
    """The part of a table that a lost snapshot left unread, as requests to read beside the stream. By key ranges, if
    the table was cut that way."""
    published, left = table.published, list((table.chunks or {}).items())
    if any(chunk.key != published.key or published.kind != "r" for _, chunk in left):
        return [SnapshotRequest(f"initial-{left[0][0]}", published.title, "initial", oid=table.oid)]
    ranges: list[tuple[str, Chunk, Chunk]] = []
    for name, chunk in left:
        if ranges and ranges[-1][2].high is not None and ranges[-1][2].high == chunk.low:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], chunk)
        else:
            ranges.append((name, chunk, chunk))
    return [
        SnapshotRequest(f"initial-{name}", published.title, "initial", low=one.low, high=last.high, oid=table.oid)
        for name, one, last in ranges
    ]


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request with its progress."""

    request: SnapshotRequest
    status: str = "queued"  # queued, running, paused, done, stopped or failed
    oid: int = 0  # The table found under that name; 0 before the first chunk
    last_key: tuple[str, ...] | None = None  # The last key read and released
    keys_done: int = -1
    """-1 while the table is being read; then the number of bytes processed in the file of keys (moved or vanished)."""
    chunks: int = 0  # The number of its releases
    rows: int = 0  # The number of released rows
    estimated_rows: int = 0  # The approximate number of rows to read
    error: str = ""
    added: float = field(default_factory=time.time)
    started: float = 0.0
    finished: float = 0.0
    failures: int = 0  # Failures in a row
    retry_at: float = 0.0  # When to retry a failed one; 0: never

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_ended(self) -> bool:
        return self.status in _ENDED and not self.is_retried

    @property
    def is_retried(self) -> bool:
        """Whether it has failed, but not permanently."""
        return self.status == "failed" and self.retry_at > 0


@dataclass(slots=True)
class _Content:
    """The content of the file."""

    requests: list[RequestState] = field(default_factory=list)
    heeded: str = str(Position.at(0, 0))
    """The position of the last obeyed signal, so that it is not obeyed again when the stream is read again."""
    bad_signals: int = 0
    # Tables (oid) whose rows were read or are not needed; None before the first look
    tables: frozenset[int] | None = None
    initial: InitialPlan = field(default_factory=InitialPlan)


_CONTENT = TypeAdapter(_Content)


class RequestQueue:
    """The requests of one state directory, in order. Everything is durable when a method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = _CONTENT.validate_python(read_json(path) or {})
        self._states = {one.id: one for one in found.requests}
        self.heeded, self.bad_signals = Position.parse(found.heeded), found.bad_signals
        self.tables, self.initial = found.tables, found.initial  # Whoever changes `initial` must call `save`

    def __getitem__(self, name: str) -> RequestState:
        return self._states[name]

    def entries(self) -> list[RequestState]:
        """All known requests: active ones in order, and the most recently ended ones."""
        return list(self._states.values())

    def next(self, *, is_reload: bool = False) -> RequestState | None:
        """The next request to work on, or None. `is_reload` selects reloads, otherwise all others. A failed one comes
        last, once its retry is due."""
        mine = [one for one in self._states.values() if (one.request.kind == "reload") == is_reload]
        going = [one for one in mine if one.status in ("queued", "running")]
        if not going:
            now = time.time()
            going = [one for one in mine if one.is_retried and one.retry_at <= now]
        return next((one for one in going if one.status == "running"), going[0] if going else None)

    def add(self, *requests: SnapshotRequest) -> None:
        """Queue requests, all or none."""
        self._add(requests)
        self.save()

    def ensure(self, request: SnapshotRequest) -> None:
        """Queue a request unless it is already waiting or running: the requester may ask again after a crash."""
        known = self._states.get(request.id)
        if known is None or (known.is_ended and known.status != "done"):
            self._states.pop(request.id, None)
            self.add(request)

    def move_rest(self, table: PlannedTable) -> None:
        """A table's snapshot was lost: request the remainder and remove the table from the plan, in one step."""
        self._add(requests_for_rest(table))
        table.ended = "moved"
        self.save()

    def begin_initial(self, lsn: int, hold: Hold | None) -> None:
        """Plan the initial snapshot of a slot that begins at `lsn` (0: none). Without a hold, a younger snapshot is
        used."""
        self.initial = InitialPlan(lsn, {hold.number: hold} if hold else {})
        self.save()

    def pause(self, name: str = "") -> RequestState:
        """Pause a request; without a name, the running one."""
        return self._change(self._find(name, "queued", "running"), status="paused")

    def resume(self, name: str = "") -> RequestState:
        """Resume a paused request; without a name, the first one."""
        return self._change(self._find(name, "paused"), status="queued")

    def stop(self, name: str = "") -> RequestState:
        """Stop a request; without a name, the running one."""
        return self.end(self._find(name, "queued", "running", "paused", "failed").id, "stopped")

    def begin(self, name: str, *, oid: int, estimated_rows: int) -> RequestState:
        state = self._states[name]
        started = state.started or time.time()
        return self._change(state, status="running", oid=oid, estimated_rows=estimated_rows, started=started, error="")

    def advance(self, name: str, *, is_last: bool = False, **progress: Any) -> RequestState:
        """Record a released chunk: the new values of chunks, rows (since its start), last_key and keys_done."""
        ended = {"status": "done", "finished": time.time()} if is_last else {}
        progress["last_key"] = progress.get("last_key") and tuple(progress["last_key"])  # a list after a crash
        state = self._change(self._states[name], **progress, failures=0, retry_at=0.0, **ended)
        self._drop_old()
        return state

    def end(self, name: str, status: str, error: str = "") -> RequestState:
        state = self._change(self._states[name], status=status, error=error, finished=time.time(), retry_at=0.0)
        self._drop_old()
        return state

    def fail(self, name: str, error: str, *, for_good: bool) -> RequestState:
        """The request cannot be executed now. A kind whose rows must not be missing is retried, unless it failed
        `for_good`."""
        state = self._states[name]
        if for_good or state.request.kind not in RETRIED:
            return self.end(name, "failed", error)
        now = time.time()
        retry_at = now + min(MAX_RETRY_S, RETRY_S * 2.0 ** min(state.failures, 20))
        failures = state.failures + 1
        return self._change(state, status="failed", error=error, finished=now, failures=failures, retry_at=retry_at)

    def retry(self, name: str) -> RequestState:
        """Retry a failed request. Its error stays until it makes progress."""
        return self._change(self._states[name], status="queued", finished=0.0)

    def retry_all(self) -> None:
        """Retry everything that has not failed permanently, without waiting: a start may change things."""
        for state in [one for one in self._states.values() if one.is_retried]:
            self._change(state, status="queued", finished=0.0, failures=0)

    def heed(self, position: Position, requests: Iterable[SnapshotRequest] = (), *, bad: int = 0) -> None:
        """Record a signal's requests and the fact that it was obeyed, in one step."""
        self._add(requests)
        self.heeded = max(self.heeded, position)
        self.bad_signals += bad
        self.save()

    def know(self, tables: Iterable[int], requests: Iterable[SnapshotRequest] = ()) -> None:
        """Record the current tables, and requests for the rows of new ones, in one step."""
        self._add(requests)
        self.tables = frozenset(tables)
        self.save()

    def _add(self, requests: Iterable[SnapshotRequest]) -> None:
        wanted = list(requests)
        for request in wanted:
            request.check()
            if request.id in self._states:
                raise ConfigError(f"snapshot {request.id!r} exists already", "Choose another id")
        for request in wanted:
            self._states[request.id] = RequestState(request, oid=request.oid, keys_done=0 if request.keys_file else -1)

    def _find(self, name: str, *statuses: str) -> RequestState:
        fitting = [one for one in self._states.values() if one.status in statuses]
        if not name:  # without a name, skip reloads: no user requested them, and a copy would stay incomplete
            fitting = [one for one in fitting if one.request.kind != "reload"]
        fitting.sort(key=lambda one: one.status != "running")
        found = next((one for one in fitting if name in ("", one.id)), None)
        if found is None:
            known = ", ".join(f"{one.id} ({one.status})" for one in self._states.values()) or "none"
            what = f"no snapshot is {' or '.join(statuses)}"
            if name:
                other = self._states.get(name)
                said = f"is {other.status}, not {' or '.join(statuses)}" if other is not None else "does not exist"
                what = f"snapshot {name!r} {said}"
            raise ConfigError(what, f"Known snapshots: {known}")
        return found

    def _change(self, state: RequestState, **changes: Any) -> RequestState:
        changed = replace(state, **changes)
        self._states[state.id] = changed
        self.save()
        return changed

    def _drop_old(self) -> None:
        missing = [one.id for one in self._states.values() if one.status == "failed" and one.request.kind in RETRIED]
        ended = [one for one in self._states.values() if one.is_ended and one.id not in missing]
        ended.sort(key=lambda one: one.finished)
        for one in ended[:-KEPT_FINISHED]:
            del self._states[one.id]

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        states, heeded = list(self._states.values()), str(self.heeded)
        content = _Content(states, heeded, self.bad_signals, self.tables, self.initial)
        write_durably(self._path, _CONTENT.dump_json(content))
