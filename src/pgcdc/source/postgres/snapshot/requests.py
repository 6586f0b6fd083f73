"""The state of all snapshots of a pipeline, in one file: the initial one, and later requests.

`InitialPlan` says which chunks of which tables are read in which held snapshot. A chunk that was read is a file in the
folder, and a released one is in the log of releases: neither is repeated here, so that reading costs no write of this file.
A request is a table that is read by key beside the stream, with its progress. What a lost snapshot leaves of a table becomes
requests in the same step that removes it from the plan.

The file is durable, so that a request survives any crash. It belongs to the capture process (`{"do": "snapshot"}` on its
control socket), or to whoever holds the capture's lock while none runs.
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
"""Requested by a user; the rest of an interrupted initial snapshot; a table new in the publication; at every start; a sink's
keys that the table may have lost; keys whose rows some adapters get again; a table whose content some adapters replace."""
BY_KEYS = ("vanished", "repair")
ADDRESSED = ("repair", "reload")
RETRIED = ("initial", "added", "repair", "reload")
"""Kinds that nobody requests again: their rows would be missing forever, so a failed one is retried."""
RETRY_S, MAX_RETRY_S = 1.0, 300.0
KEPT_FINISHED = 20
_ENDED = ("done", "stopped", "failed")


# --- the initial snapshot

_DERIVED = Field(exclude=True)  # Not in the file: recovered after a crash


@dataclass(frozen=True, slots=True)
class SkipRule:
    """A table was read in a younger snapshot than the slot's: the stream must not repeat what that one saw."""

    oid: int
    visible: str  # A pg_snapshot
    lsn: int  # What it sees ends before


@dataclass(slots=True)
class PlannedTable:
    """One table of the initial snapshot, with its progress."""

    published: PublishedTable
    hold: int  # The number of the snapshot that it is read in
    chunks: dict[str, Chunk] | None
    """Chunks not released yet; None: unreadable in that snapshot, it needs a younger one."""
    estimated_rows: int = 0
    ended: str = ""  # complete, moved (the rest is read beside the stream) or gone (it was dropped)
    details: dict[str, Any] | None = None  # What the catalog said about its shape in that snapshot
    staged: Annotated[dict[str, Staged], _DERIVED] = field(default_factory=dict)
    """Chunks that were read: they are released, whatever happens to their snapshot. Derived from the folder."""
    is_described: Annotated[bool, _DERIVED] = False  # Whether its details were released. Derived like the next
    is_started: Annotated[bool, _DERIVED] = False
    """Whether its start was released. Derived from the log of releases, as for the rows."""
    rows: Annotated[int, _DERIVED] = 0  # How many are released

    @property
    def oid(self) -> int:
        return self.published.relation.oid

    @property
    def is_whole(self) -> bool:
        """Whether everything left was read."""
        return self.chunks is not None and len(self.staged) == len(self.chunks)


@dataclass(slots=True)
class InitialPlan:
    """The initial snapshot of a slot."""

    lsn: int = 0  # Where the slot begins: the rows are behind it. 0: no initial snapshot
    holds: dict[int, Hold] = field(default_factory=dict)
    tables: dict[int, PlannedTable] | None = None  # None: they are not planned yet
    completed: dict[str, Any] | None = None  # The final report; everything else is forgotten then

    @property
    def is_active(self) -> bool:
        """Whether rows come before the stream."""
        return self.lsn > 0 and self.completed is None

    @property
    def unfinished(self) -> list[PlannedTable]:
        return [table for table in (self.tables or {}).values() if not table.ended]

    @property
    def rules(self) -> list[SkipRule]:
        """What the stream must leave out, forever: it may be read again from its beginning."""
        if self.completed is not None:
            return [SkipRule(**rule) for rule in self.completed["rules"]]
        tables = ((table.oid, self.holds[table.hold]) for table in (self.tables or {}).values())
        return [SkipRule(oid, hold.visible, hold.lsn) for oid, hold in tables if hold.visible is not None]

    def note(self, oid: int, what: str, rows: int) -> None:
        """Something is in the stream: a table's `started` or `complete`, or the rows of a chunk."""
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
        """All tables have ended; `end` is the position behind the last row."""
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
    where: str = ""  # Which rows, in SQL; "" for all
    low: tuple[str, ...] | None = None
    """The smallest key, as text, in the order of PublishedTable.key; None: from the first."""
    high: tuple[str, ...] | None = None  # The first unwanted key; None: to the last
    keys_file: str = ""
    """Of given keys: a file with a key per line, a JSON array of texts in the order of PublishedTable.key."""
    chunk_size: int = 0  # Rows at a time; 0: as many as can be read in a moment
    chunk_delay_s: float = 0.0  # How long to rest between chunks
    oid: int = 0  # The meant table, whatever its name by then; 0: the one that has the name when it is looked up
    adapters: tuple[str, ...] = ()  # Who gets the rows; (): everybody

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
    """What a lost snapshot leaves of a table, to be read beside the stream: by key ranges, if it was cut so."""
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
    oid: int = 0  # The table that was found under the name; 0 before the first chunk
    last_key: tuple[str, ...] | None = None  # The last key that was read and released
    keys_done: int = -1
    """-1 while the table is read; then how many bytes of the file of keys, moved or vanished, are done."""
    chunks: int = 0  # How many releases there were for it
    rows: int = 0  # How many rows were released
    estimated_rows: int = 0  # How many there are to read, about
    error: str = ""
    added: float = field(default_factory=time.time)
    started: float = 0.0
    finished: float = 0.0
    failures: int = 0  # How often in a row it has failed
    retry_at: float = 0.0  # When a failed one is tried again; 0: never

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_ended(self) -> bool:
        return self.status in _ENDED and not self.is_retried

    @property
    def is_retried(self) -> bool:
        """Whether it has failed, but not for good."""
        return self.status == "failed" and self.retry_at > 0


@dataclass(slots=True)
class _Content:
    """The file."""

    requests: list[RequestState] = field(default_factory=list)
    heeded: str = str(Position.at(0, 0))
    """The position of the last obeyed signal: it is not obeyed again when the stream is read again."""
    bad_signals: int = 0
    tables: frozenset[int] | None = None  # Tables (oid) whose rows were read or need not be; None before the first look
    initial: InitialPlan = field(default_factory=InitialPlan)


_CONTENT = TypeAdapter(_Content)


class RequestQueue:
    """The requests of one state directory, in their order. Everything is durable when a method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = _CONTENT.validate_python(read_json(path) or {})
        self._states = {one.id: one for one in found.requests}
        self.heeded, self.bad_signals = Position.parse(found.heeded), found.bad_signals
        self.tables, self.initial = found.tables, found.initial  # Whoever changes `initial` calls `save`

    def __getitem__(self, name: str) -> RequestState:
        return self._states[name]

    def entries(self) -> list[RequestState]:
        """All known ones: active ones in order, and the last ended ones."""
        return list(self._states.values())

    def next(self, *, is_reload: bool = False) -> RequestState | None:
        """The next request to work on, or None: a reload, or any other. A failed one comes last, when it is due."""
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
        """Queue a request unless it waits or runs already: who asks for it may ask again after a crash."""
        known = self._states.get(request.id)
        if known is None or (known.is_ended and known.status != "done"):
            self._states.pop(request.id, None)
            self.add(request)

    def move_rest(self, table: PlannedTable) -> None:
        """A table's snapshot was lost: request the rest and remove it from the plan, in one step."""
        self._add(requests_for_rest(table))
        table.ended = "moved"
        self.save()

    def begin_initial(self, lsn: int, hold: Hold | None) -> None:
        """A slot that begins at `lsn` gets an initial snapshot (0: none); without a hold, in a younger one."""
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
        """A chunk was released: chunks, rows (since its start), last_key and keys_done have these values now."""
        ended = {"status": "done", "finished": time.time()} if is_last else {}
        progress["last_key"] = progress.get("last_key") and tuple(progress["last_key"])  # a list, after a crash
        state = self._change(self._states[name], **progress, failures=0, retry_at=0.0, **ended)
        self._drop_old()
        return state

    def end(self, name: str, status: str, error: str = "") -> RequestState:
        state = self._change(self._states[name], status=status, error=error, finished=time.time(), retry_at=0.0)
        self._drop_old()
        return state

    def fail(self, name: str, error: str, *, for_good: bool) -> RequestState:
        """It cannot be done now. A kind that must not be missing is retried, unless it failed for good."""
        state = self._states[name]
        if for_good or state.request.kind not in RETRIED:
            return self.end(name, "failed", error)
        now = time.time()
        retry_at = now + min(MAX_RETRY_S, RETRY_S * 2.0 ** min(state.failures, 20))
        failures = state.failures + 1
        return self._change(state, status="failed", error=error, finished=now, failures=failures, retry_at=retry_at)

    def retry(self, name: str) -> RequestState:
        """Retry a failed one. Its error stays until it makes progress."""
        return self._change(self._states[name], status="queued", finished=0.0)

    def retry_all(self) -> None:
        """Retry at once those that have not failed for good: a start may change things."""
        for state in [one for one in self._states.values() if one.is_retried]:
            self._change(state, status="queued", finished=0.0, failures=0)

    def heed(self, position: Position, requests: Iterable[SnapshotRequest] = (), *, bad: int = 0) -> None:
        """A signal's requests, and the fact that it was obeyed, in one step."""
        self._add(requests)
        self.heeded = max(self.heeded, position)
        self.bad_signals += bad
        self.save()

    def know(self, tables: Iterable[int], requests: Iterable[SnapshotRequest] = ()) -> None:
        """The current tables, and requests for the rows of new ones, in one step."""
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
        if not name:  # a reload is nobody's request: without it a copy would never go on
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
