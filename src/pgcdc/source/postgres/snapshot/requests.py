"""What is asked of incremental snapshots: which tables to read again, how far each one is, and which signals were heeded.

The file is durable, so that a request survives any crash; a request is added by the capture process (`{"do": "snapshot"}` on
its control socket), or by whoever holds the capture's lock while none runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.core.state import read_json, write_json_durably

KINDS = ("incremental", "initial", "added", "always", "vanished")
"""Asked for by a user; the rest of an interrupted initial snapshot; a table that is new in the publication; at every start;
keys of a sink that the table may have lost."""
RETRIED = ("initial", "added")
"""Kinds that nobody asks for again: their rows would be missing for ever, so that one that failed is tried again."""
RETRY_S, MAX_RETRY_S = 1.0, 300.0
KEPT_FINISHED = 20
_ENDED = ("done", "stopped", "failed")


def new_id() -> str:
    """A name for a request."""
    return secrets.token_hex(4)


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """One table to be read while the stream goes on."""

    id: str
    table: str
    """As users write it: `orders`, `sales.orders`."""
    kind: str = "incremental"
    """One of KINDS."""
    where: str = ""
    """Which rows, in SQL; "" for all."""
    low: tuple[str, ...] | None = None
    """The smallest key, as text, in the order of PublishedTable.key; None: from the first."""
    high: tuple[str, ...] | None = None
    """The first key that is not wanted; None: to the last."""
    keys_file: str = ""
    """Of the kind vanished: a file with one key in each line, a JSON array of texts in the order of PublishedTable.key."""
    chunk_size: int = 0
    """Rows at a time; 0: as many as are read in a moment."""
    chunk_delay_s: float = 0.0
    """How long to rest between chunks."""
    oid: int = 0
    """Which table is meant, whatever it is called by then; 0: the one that has the name when it is looked for."""

    def check(self) -> None:
        """Raise ConfigError for what cannot be."""
        if self.kind not in KINDS:
            raise ConfigError(f"{self.kind!r} is not a kind of snapshot", f"Give one of: {', '.join(KINDS)}")
        if (self.kind == "vanished") != bool(self.keys_file):
            raise ConfigError("a file of keys belongs to the kind vanished, and only to it")
        if self.chunk_size < 0 or self.chunk_delay_s < 0:
            raise ConfigError("chunk size and chunk delay are not below 0", "0 is the default of both")


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request, and how far it is."""

    request: SnapshotRequest
    status: str = "queued"
    """queued, running, paused, done, stopped or failed."""
    oid: int = 0
    """The table that was found under the name; 0 before the first chunk."""
    last_key: tuple[str, ...] | None = None
    """The last key that was read and released; of the kind vanished: how many bytes of its file are done, as text."""
    moved_done: int = -1
    """-1 while the table is read; then how many bytes of the file of moved keys are done."""
    chunks: int = 0
    """How many releases there were for it."""
    rows: int = 0
    """How many rows were released."""
    estimated_rows: int = 0
    """How many there are to read, about."""
    error: str = ""
    added: float = field(default_factory=time.time)
    started: float = 0.0
    finished: float = 0.0
    failures: int = 0
    """How often in a row it has failed."""
    retry_at: float = 0.0
    """When a failed one is tried again; 0: never."""

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.status in _ENDED and not self.is_retried

    @property
    def is_retried(self) -> bool:
        """Whether it has failed, but not for good."""
        return self.status == "failed" and self.retry_at > 0

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> RequestState:
        """What `asdict` made."""
        return cls(**{**_with_tuples(raw), "request": SnapshotRequest(**_with_tuples(raw["request"]))})


def _with_tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in raw.items()}


class RequestQueue:
    """The requests of one state directory, in their order. Everything is durable when a method returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        raw: dict[str, Any] = read_json(path) or {}
        self._states = {one["request"]["id"]: RequestState.from_json(one) for one in raw.get("requests", [])}
        self.heeded = Position.parse(raw["heeded"]) if "heeded" in raw else Position.at(0, 0)
        """The position of the last signal that was heeded: it is not heeded again when the stream is read again."""
        self.bad_signals: int = raw.get("bad_signals", 0)
        known = raw.get("tables")
        self.tables: frozenset[int] | None = frozenset(known) if known is not None else None
        """The tables (oid) whose rows were read already or need not be; None if nobody has looked yet."""

    def __getitem__(self, name: str) -> RequestState:
        return self._states[name]

    def entries(self) -> list[RequestState]:
        """All that are known: those that go on, in their order, and the last ones that have ended."""
        return list(self._states.values())

    def next(self) -> RequestState | None:
        """What to work on now; None if nothing is asked. A failed one comes last, when it is its time."""
        going = [one for one in self._states.values() if one.status in ("queued", "running")]
        if not going:
            now = time.time()
            going = [one for one in self._states.values() if one.is_retried and one.retry_at <= now]
        return next((one for one in going if one.status == "running"), going[0] if going else None)

    def add(self, *requests: SnapshotRequest) -> None:
        """Queue requests, all of them or none."""
        self._add(requests)
        self._save()

    def pause(self, name: str = "") -> RequestState:
        """Leave a request where it is; without a name, the one that runs."""
        return self._change(self._find(name, "queued", "running"), status="paused")

    def resume(self, name: str = "") -> RequestState:
        """Go on with a paused request; without a name, with the first one."""
        return self._change(self._find(name, "paused"), status="queued")

    def stop(self, name: str = "") -> RequestState:
        """End a request where it is; without a name, the one that runs."""
        return self.end(self._find(name, "queued", "running", "paused", "failed").id, "stopped")

    def begin(self, name: str, *, oid: int, estimated_rows: int) -> RequestState:
        """Its first chunk is about to be read."""
        state = self._states[name]
        started = state.started or time.time()
        return self._change(state, status="running", oid=oid, estimated_rows=estimated_rows, started=started, error="")

    def advance(self, name: str, *, is_last: bool = False, **progress: Any) -> RequestState:
        """A chunk was released: chunks and rows (since its beginning), last_key and moved_done are now these."""
        ended = {"status": "done", "finished": time.time()} if is_last else {}
        progress = _with_tuples(progress)
        state = self._change(self._states[name], **progress, failures=0, retry_at=0.0, **ended)
        self._drop_old()
        return state

    def end(self, name: str, status: str, error: str = "") -> RequestState:
        """Nothing more will happen to it."""
        state = self._change(self._states[name], status=status, error=error, finished=time.time(), retry_at=0.0)
        self._drop_old()
        return state

    def fail(self, name: str, error: str, *, for_good: bool) -> RequestState:
        """It cannot be done now. One of a kind that must not be missing is tried again, unless it failed for good."""
        state = self._states[name]
        if for_good or state.request.kind not in RETRIED:
            return self.end(name, "failed", error)
        now = time.time()
        retry_at = now + min(MAX_RETRY_S, RETRY_S * 2.0 ** min(state.failures, 20))
        failures = state.failures + 1
        return self._change(state, status="failed", error=error, finished=now, failures=failures, retry_at=retry_at)

    def retry(self, name: str) -> RequestState:
        """Try a failed one again. What was said of it stays until it goes on."""
        return self._change(self._states[name], status="queued", finished=0.0)

    def retry_all(self) -> None:
        """Try those that have not failed for good at once: at a start things may be otherwise."""
        for state in [one for one in self._states.values() if one.is_retried]:
            self._change(state, status="queued", finished=0.0, failures=0)

    def heed(self, position: Position, requests: Iterable[SnapshotRequest] = (), *, bad: int = 0) -> None:
        """Everything that a signal asks for, and that it was heeded, in one step."""
        self._add(requests)
        self.heeded = max(self.heeded, position)
        self.bad_signals += bad
        self._save()

    def know(self, tables: Iterable[int], requests: Iterable[SnapshotRequest] = ()) -> None:
        """These are the tables now, and of new ones the rows are asked for, in one step."""
        self._add(requests)
        self.tables = frozenset(tables)
        self._save()

    def _add(self, requests: Iterable[SnapshotRequest]) -> None:
        wanted = list(requests)
        for request in wanted:
            request.check()
            if request.id in self._states:
                raise ConfigError(f"there is a snapshot {request.id!r} already", "Choose another id")
        self._states |= {request.id: RequestState(request, oid=request.oid) for request in wanted}

    def _find(self, name: str, *statuses: str) -> RequestState:
        fitting = [one for one in self._states.values() if one.status in statuses and not one.is_ended]
        fitting.sort(key=lambda one: one.status != "running")
        found = next((one for one in fitting if name in ("", one.id)), None)
        if found is None:
            known = ", ".join(f"{one.id} ({one.status})" for one in self._states.values()) or "none"
            what = f"no snapshot {name!r}" if name else "no snapshot"
            raise ConfigError(f"there is {what} that is {' or '.join(statuses)}", f"Known snapshots: {known}")
        return found

    def _change(self, state: RequestState, **changes: Any) -> RequestState:
        changed = replace(state, **changes)
        self._states[state.id] = changed
        self._save()
        return changed

    def _drop_old(self) -> None:
        missing = [one.id for one in self._states.values() if one.status == "failed" and one.request.kind in RETRIED]
        ended = [one for one in self._states.values() if one.is_ended and one.id not in missing]
        ended.sort(key=lambda one: one.finished)
        for one in ended[:-KEPT_FINISHED]:
            del self._states[one.id]

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "requests": [asdict(one) for one in self._states.values()],
            "heeded": str(self.heeded),
            "bad_signals": self.bad_signals,
            "tables": sorted(self.tables) if self.tables is not None else None,
        }
        write_json_durably(self._path, content)


def describe(state: RequestState, rate: float | None = None) -> dict[str, Any]:
    """A request for `pgcdc status`; `rate` is in rows per second, if it is known."""
    percent = left = None
    rate = rate if state.status == "running" else None
    if state.status == "done":
        percent = 100.0
    elif state.estimated_rows:
        percent = min(99.9, 100.0 * state.rows / state.estimated_rows)
    if rate and state.estimated_rows:
        left = max(0.0, (state.estimated_rows - state.rows) / rate)
    asked = {name: getattr(state.request, name) for name in ("id", "table", "kind", "where")}
    known = {name: getattr(state, name) for name in ("status", "rows", "estimated_rows")}
    times = {name: getattr(state, name) for name in ("started", "finished", "error")}
    return {**asked, **known, "percent": percent, "rate": rate, "seconds_left": left, **times}


_FIELDS = ("kind", "where", "keys_file", "chunk_size", "chunk_delay_s", "low", "high")


def make_request(content: dict[str, Any]) -> SnapshotRequest:
    """The request in a message: `table`, and what else a SnapshotRequest has."""
    given = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    return SnapshotRequest(content.get("id") or new_id(), content["table"], **_with_tuples(given))


def change_queue(queue: RequestQueue, content: dict[str, Any]) -> dict[str, Any]:
    """The same without looking at the table; the id of the request that was changed comes back."""
    action = content["action"]
    if action == "list":
        return {"id": None}
    if action == "add":
        request = make_request(content)
        queue.add(request)
        return {"id": request.id}
    if action not in ("pause", "resume", "stop"):
        raise ConfigError(f"{action!r} cannot be done to a snapshot", "Give add, pause, resume, stop or list")
    changed: RequestState = getattr(queue, action)(content.get("id") or "")
    return {"id": changed.id}
