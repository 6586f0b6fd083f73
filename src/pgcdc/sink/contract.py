"""The contract of every sink, and what the runner around it (`sink/runner.py`) provides.

A sink only makes batches durable. The runner keeps the ack, retries, limits the rate, sets refused events aside and
remembers partial deliveries. After a crash a batch is repeated, maybe with other boundaries. The runner skips what is
acknowledged, by position alone, because neither query numbers nor batch numbers are stable.

A sink declares its needs and abilities as class attributes; it derives from `Sink`.
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

Receipt = dict[str, Any]  # How a part writer describes a part to the commit: a small JSON object


class Progress:
    """A sink's progress on disk: the ack, and a small detail for the sink. Durable when `save` returns.

    The runner saves after every write. A sink calls `save` only when the detail must be on disk before its next step.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder
        self._path = folder / f"{name}.json"
        raw = read_json(self._path)
        self.position: Position | None = None  # Everything up to here is durable; None: nothing was written yet
        self.acked: Position | None = None  # The same, but only what the sink has settled (`settle`)
        self.written: Position | None = None
        """The target's own position, for a sink that `keeps_position`: empty batches move only the ack."""
        self.is_rewound = False  # `rewind` was called, and the target has not followed yet
        self.detail: dict[str, Any] = {}
        self.next_detail: dict[str, Any] | None = None
        """What the next `save` puts into `detail`. A sink sets it for the runner."""
        self._owner = ""
        self.is_keyed = False  # It keeps tables equal; set by the runner
        self.holds: dict[int, Hold] = {}  # By oid: tables accepted only from their reload
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
        """Replace the state on disk. `is_settled=False`: the ack stays until `settle`; after a crash, `open` runs
        first."""
        self.holds = self.holds if holds is None else holds
        detail = detail if detail is not None else self.next_detail if self.next_detail is not None else self.detail
        written = written or self.written
        self._write(position, detail, written, is_rewound=False)
        self.position, self.detail, self.written, self.next_detail = position, detail, written, None
        self.is_rewound = False
        if is_settled:
            self.acked = position

    def hold(self, holds: dict[int, Hold]) -> None:
        """Accept these tables only from their reload."""
        self.holds = holds
        self._write(self.position, self.detail, self.written, is_rewound=self.is_rewound)

    def rewind(self, position: Position) -> None:
        """Restart from a position before or after the ack, as `pgcdc resync` does. The target must follow."""
        self.holds = {}
        self._write(position, self.detail, self.written, is_rewound=True)
        self.position = self.acked = position
        self.is_rewound = True

    def settle(self) -> None:
        """Count the saved state as acknowledged."""
        self.acked = self.position

    @property
    def owner(self) -> str:
        """A random name of this sink, the same in every run. It marks our records in a target."""
        if not self._owner:
            self._owner = str(uuid.uuid4())
            self._write(
                self.position, self.detail, self.written, is_rewound=self.is_rewound
            )  # saved before a target sees it
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
    """What a sink receives. Contains no paths."""

    name: str  # The adapter's name
    start: Position  # Where a new sink starts
    progress: Progress
    shapes: ShapeHistory  # The shapes of the source's tables; call `refresh()` before use
    say: Callable[[str], None]  # Prints a line on the terminal or in the log
    timeout_s: float = 30.0  # The time limit of a write
    stream: str = ""
    """The pipeline's source. A target's records are keyed by (`progress.owner`, `stream`): positions of different
    streams are unrelated, and streams may share a target."""
    source: str = ""  # Where the events come from, for people
    identity: Identity | None = None  # The captured database and tables: the target may be the same database
    chain: Callable[[], SimpleChain] = lambda: SimpleChain((), ())
    """How the adapter's transforms currently change columns. `shapes` holds the shapes before transforms."""
    delivered: Callable[[Iterable[str]], None] = field(default=lambda positions: None)
    """For targets that accept events one by one and cannot undo: reports positions as delivered, whatever happens to
    the rest of the write. They are not repeated in this process."""


ErrorPolicies = Sequence[tuple[str, bool, str]]
"""Kinds of client errors (class names, or how the message begins; empty: all), whether they may be temporary, and
advice. The first match counts."""


@contextmanager
def explained(adapter: str, kind: type[Exception], policies: ErrorPolicies) -> Iterator[None]:
    """Turn a client's errors into SinkUnavailable or SinkError, with advice."""
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
    """The form it reads: `batch.lines()`, `batch.records()`, the fields of each event (`batch.events`), or
    `batch.tables()`."""
    whole_batches: ClassVar[bool] = False  # Never split a batch
    keeps_position: ClassVar[bool] = False
    """The target stores the position and updates it in the same step as the data; `open` returns it.

    After a failed write, `open` is called again, and the target's position counts. Empty batches move only the ack.

    `open` finds the record of `progress.owner` and `context.stream`. If there is none, it creates one at
    `context.start` (only while `progress.written` is None), or returns None, and the first write creates it. If the ack
    `is_rewound`, it moves the record to `context.start`, or creates one there.
    """
    finds_by_halves: ClassVar[bool] = False
    """A SinkRejected without names means that some event is wrong. The runner finds it by writing halves of the
    batch."""
    takes_executors: bool = False  # Executors may write large batches: it is a `ParallelSink`
    reads_back: bool = False  # `pgcdc verify` can read the target's content with `read_back`
    part_events: int = 0
    """The number of events in the first part of a batch; its speed determines the next size. 0: batches are not
    split."""

    def check(self, context: SinkContext) -> None:
        """Check the target without changing it, before anything is created. SinkError: the target cannot be used."""
        return None

    def open(self, context: SinkContext) -> Position | None:
        """Restore the target to the state of `context.progress`. Returns the target's own position if it
        `keeps_position`.

        SinkError: the target must not be touched. SinkUnavailable: `open` is retried, and nothing is written before it
        succeeds.
        """

    def write(self, batch: Batch) -> None:
        """Make a batch durable. It starts at the ack, and the runner then moves the ack to its end.

        SinkUnavailable: the batch is repeated. SinkRejected names events that the target will never accept: the batch
        is repeated without them. ReloadNeeded (form `tables`) names tables whose copy cannot follow: the batch is
        repeated without them, and later they come whole, after a TRUNCATE. Such a sink also receives an empty batch in
        which a table's shape changes.
        """

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Deliver dead letters, which are past events. The ack stays. Raises the same errors as `write`.

        Returns the positions it skipped because the target has something newer for their key.
        """
        self.write(batch)
        return ()

    def read_back(self, context: SinkContext, shape: TableShape, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows that the target has for a table, in the form that this adapter's transforms produce.

        Each row once, in any order, as text columns with these names; null where it has none. It must include
        everything that the ack covers at the time of the call. Another process may be writing: the method must touch
        neither it nor the target, and `open` has not been called. Only called if the sink `reads_back`.
        """
        raise SinkError(f"adapter {context.name} cannot be read back", "See docs/verify.md for the adapters that can")

    def close(self) -> None:
        """Release resources. Nothing is lost without this call, and a second call is harmless."""
        return None


class PartWriter(Protocol):
    """Writes parts of a large batch, on Spark's executors. It is part of Spark's plan, so it holds no secret and no
    connection."""

    def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
        """Make the events of one task durable but invisible, and return how to find them; None if there were none.

        `lines` has `position` and `line`, in order. A task may run again, or twice at the same time: each attempt
        writes its own part, and only one of them is committed.
        """


class ParallelSink(Sink, Protocol):
    """A sink whose large batches are written by executors in parallel, and committed by the driver.

    Changes of one key are in one part, in order. Where that is not enough (TRUNCATE, for example), the batch is cut.
    """

    def part_writer(self) -> PartWriter:
        """The writer that is sent to the executors."""

    def commit_parts(self, start: Position, end: Position, receipts: Sequence[Receipt]) -> None:
        """Make the parts of these receipts, and no others, the sink's content for (start, end].

        Atomic: after a crash either all of them are there or none. SinkUnavailable for a part that begins before the
        ack.
        """

    def discard_parts(self) -> None:
        """Delete parts that were not committed: from a crash, a lost task, or a duplicate attempt."""
