"""The contract that every sink keeps, and what the runner around it (`sink/runner.py`) gives it.

A sink makes batches durable, and nothing else: the runner keeps the ack, retries, paces, sets refused events aside and
remembers what was delivered in part. After a crash a batch comes again, maybe cut in other places; the runner leaves out
what is acknowledged, by position alone: neither query nor batch numbers are stable.

What a sink needs and can do stands on its class, which derives from `Sink`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from pgcdc.core.errors import SinkError, SinkUnavailable, StateError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.core.secrets import redact_text
from pgcdc.core.state import Identity, read_json, write_json_durably
from pgcdc.event.batch import Batch
from pgcdc.event.edits import SimpleChain
from pgcdc.event.forms import Form
from pgcdc.event.shape import TableShape
from pgcdc.sink.holds import Hold, dump_holds, parse_holds

__all__ = [
    "ErrorPolicies",
    "Form",
    "ParallelSink",
    "PartWriter",
    "Progress",
    "Receipt",
    "Sink",
    "SinkContext",
    "explained",
]

Receipt = dict[str, Any]  # What a part writer says about a part, for the commit: a few words that JSON can carry


class Progress:
    """How far a sink is, on disk: the ack, and a small detail for the sink. Durable when `save` returns. The runner saves
    after every write. A sink saves itself where the detail must be on disk before its next step."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self._path = folder / f"{name}.json"
        raw = read_json(self._path)
        self.position: Position | None = None  # Everything up to here is durable; None: nothing was ever written
        self.acked: Position | None = None  # The same, without what a sink has yet to `settle`
        self.written: Position | None = None
        """The target's own position, for a sink that `keeps_position`: empty batches move only the ack."""
        self.is_rewound = False  # `rewind` was called, and the target must still follow
        self.detail: dict[str, Any] = {}
        self.next_detail: dict[str, Any] | None = None
        """What the next `save` puts into `detail`: a sink leaves it for the runner."""
        self._owner = ""
        self.is_keyed = False  # It keeps tables equal: the runner says so
        self.holds: dict[int, Hold] = {}  # By oid: tables that it takes only from their reload
        if raw is not None:
            try:
                self.position = Position.parse(raw["position"]) if raw["position"] else None
                self.written = Position.parse(raw["written"]) if raw.get("written") else None
                self.detail, self._owner = dict(raw["detail"]), str(raw.get("owner", ""))
                self.is_rewound = bool(raw.get("is_rewound"))
                self.is_keyed, self.holds = bool(raw.get("is_keyed")), parse_holds(raw.get("holds", {}))
            except (KeyError, TypeError, ValueError) as error:
                raise StateError(f"{self._path} is damaged", "Restore it from a backup") from error
        self.acked = self.position

    def save(
        self,
        position: Position,
        detail: dict[str, Any] | None = None,
        *,
        written: Position | None = None,
        is_settled: bool = True,
        holds: dict[int, Hold] | None = None,
    ) -> None:
        """Replace the state on disk. `is_settled=False`: the ack stays until `settle`; after a crash `open` comes first."""
        self.holds = self.holds if holds is None else holds
        detail = detail if detail is not None else self.next_detail if self.next_detail is not None else self.detail
        written = written or self.written
        self._write(position, detail, written, is_rewound=False)
        self.position, self.detail, self.written, self.next_detail = position, detail, written, None
        self.is_rewound = False
        if is_settled:
            self.acked = position

    def hold(self, holds: dict[int, Hold]) -> None:
        """Take these tables only from their reload."""
        self.holds = holds
        self._write(self.position, self.detail, self.written, is_rewound=self.is_rewound)

    def rewind(self, position: Position) -> None:
        """The source restarts there (`pgcdc resync`), before or behind the ack: the target must follow."""
        self.holds = {}
        self._write(position, self.detail, self.written, is_rewound=True)
        self.position = self.acked = position
        self.is_rewound = True

    def settle(self) -> None:
        """The saved state now counts."""
        self.acked = self.position

    @property
    def owner(self) -> str:
        """A random name of this sink, the same in every run: it marks what a target stores as ours."""
        if not self._owner:
            self._owner = str(uuid.uuid4())
            self._write(
                self.position, self.detail, self.written, is_rewound=self.is_rewound
            )  # before a target knows it
        return self._owner

    @property
    def has_owner(self) -> bool:
        return bool(self._owner)

    def _write(
        self, position: Position | None, detail: dict[str, Any], written: Position | None, *, is_rewound: bool
    ) -> None:
        values = {"position": position, "written": written}
        texts = {name: str(value) for name, value in values.items() if value is not None}
        owner = {"owner": self._owner} if self._owner else {}
        rewound = {"is_rewound": True} if is_rewound else {}
        holds = {"holds": dump_holds(self.holds)} if self.holds else {}
        keyed = {"is_keyed": True} if self.is_keyed else {}
        found = {"position": None, **texts, **owner, **rewound, **keyed, **holds, "detail": detail}
        write_json_durably(self._path, found)


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink is given. There are no paths in it."""

    name: str  # The adapter's name
    start: Position  # Where a new sink begins
    progress: Progress
    shapes: ShapeHistory  # The history of the shapes of the source's tables; `refresh()` before use
    say: Callable[[str], None]  # A line for the person at the terminal, or for the log
    timeout_s: float = 30.0  # How long a write may take
    stream: str = ""
    """The pipeline's source. A target's records are keyed by (`progress.owner`, `stream`): positions of different streams
    are unrelated, and streams may share a target."""
    source: str = ""  # Where the events come from, for people
    identity: Identity | None = None  # The captured database and tables: for a target that may be the same database
    chain: Callable[[], SimpleChain] = lambda: SimpleChain((), ())
    """What the adapter's transforms do to columns now: shapes in `shapes` are before them."""
    delivered: Callable[[Iterable[str]], None] = field(default=lambda positions: None)
    """For a target that takes events one by one and cannot undo: these positions are delivered, whatever happens to the rest
    of the write. They are not repeated in this process."""


ErrorPolicies = Sequence[tuple[str, bool, str]]
"""Kinds of client errors (class names, or how the message begins; empty: all), whether they may pass, and advice; the first
match counts."""


@contextmanager
def explained(adapter: str, kind: type[Exception], policies: ErrorPolicies) -> Iterator[None]:
    """A client's errors become SinkUnavailable or SinkError, with advice."""
    try:
        yield
    except kind as error:
        names = {one.__name__ for one in type(error).__mro__} | {str(error).partition(" ")[0]}
        for wanted, may_pass, advice in policies:
            if not wanted or names & set(wanted.split()):
                what = SinkUnavailable if may_pass else SinkError
                raise what(f"adapter {adapter}: {type(error).__name__}: {redact_text(str(error))}", advice) from error
        raise


class Sink(Protocol):
    """Where events go. All sinks pass the same contract tests (docs/contract.md)."""

    form: Form = "lines"
    """What it reads: `batch.lines()`, `batch.records()`, the fields of each event (`batch.events`), or `batch.tables()`."""
    whole_batches: ClassVar[bool] = False  # A batch must not be given in parts
    keeps_position: ClassVar[bool] = False
    """The target keeps the position, and changes it in one step with what is written: `open` returns it. After a write that
    failed, `open` is called again, and the target's word counts. Empty batches move the ack alone.

    `open` finds the record of `progress.owner` and `context.stream`. If there is none, it begins one at `context.start`
    (only while `progress.written` is None), or returns None: a new one then begins with the first write. If the ack
    `is_rewound`, it moves the record to `context.start`, or begins one there."""
    finds_by_halves: ClassVar[bool] = False
    """SinkRejected without names says that some event is wrong: the runner finds it by giving halves."""
    takes_executors: bool = False  # Executors may write large batches to it: it is a `ParallelSink`
    reads_back: bool = False  # What the target has can be read again, with `read_back`: `pgcdc verify`
    part_events: int = 0
    """So many events are in the first part of a batch; its pace decides on the next. 0: batches come as they are."""

    def check(self, context: SinkContext) -> None:
        """Look at the target before anything is created, and leave it as it is. SinkError: it cannot be used."""
        return None

    def open(self, context: SinkContext) -> Position | None:
        """Restore the target to `context.progress`. What the target itself says that it has, if it `keeps_position`.
        SinkError: it must not be touched. SinkUnavailable: it is tried again, and nothing is written before."""

    def write(self, batch: Batch) -> None:
        """Make a batch durable: it begins where the ack is. Then the runner moves the ack to its end. SinkUnavailable: it
        comes again. SinkRejected names events that the target will never take: the batch comes again without them.
        ReloadNeeded (of the form `tables`) names tables whose copy cannot follow: the batch comes again without them, and
        they come whole later, after a TRUNCATE. Such a sink also gets an empty batch if a table has another shape in it."""

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Deliver dead letters: events of the past. The ack stays. Raises as `write` does. Returns the positions of those
        that were left out, because the target has something newer for their key."""
        self.write(batch)
        return ()

    def read_back(self, context: SinkContext, shape: TableShape, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows that the target has for a table, as this adapter's transforms leave it: each once, in any order, as text
        columns of these names; null where it has none. Another process may be writing: neither it nor the target is
        touched, and `open` was not called. It has at least everything that the ack covered at the call. Called only if it
        `reads_back`."""
        raise SinkError(f"adapter {context.name} cannot be read back", "See docs/verify.md for the adapters that can")

    def close(self) -> None:
        """Release what is held; nothing is lost if this is never called, and harmless if it is called twice."""
        return None


class PartWriter(Protocol):
    """Writes parts of a large batch, on the executors of Spark. It stands in Spark's plan: no secret, no connection."""

    def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
        """Make the events of one task durable where nobody sees them, and say how to find them; None if there were none.
        `lines` has `position` and `line`, in order. A task may run again, or twice at the same time: each attempt writes for
        itself, and only one gets into a commit."""


class ParallelSink(Sink, Protocol):
    """A sink to which executors write large batches, side by side. The driver commits. Changes of one key stand in one part,
    in order, and a large batch is cut where that is not enough (TRUNCATE, say)."""

    def part_writer(self) -> PartWriter:
        """What goes to the executors."""

    def commit_parts(self, start: Position, end: Position, receipts: Sequence[Receipt]) -> None:
        """Make the parts of these receipts, and of no others, what the sink has of (start, end]. Atomic: after a crash all
        of them are there or none. One that begins before the ack is SinkUnavailable."""

    def discard_parts(self) -> None:
        """Throw away parts that no commit has seen: of a crash, a lost task, or an attempt that came second."""
