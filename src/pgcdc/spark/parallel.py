"""Large batches: the executors write them in parallel, and the driver commits.

    batch → split by key into parts (executors) → where are barriers? (driver)
          → for each segment between them: write the parts, durable and unseen (executors) → receipts → commit, ack (driver)

All changes of a key are in one part, in stream order. A change that affects more than one key (TRUNCATE, another schema, an
update that changes the key) is a barrier: everything before it is committed first, everything behind it afterwards.

Events travel in Arrow blocks (docs/decisions/0009): Spark moves blocks between executors, never single events.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SinkRejected
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.event.events import KEYED_LINES, open_blocks, pack_block
from pgcdc.sink.attempts import SinkTimeout
from pgcdc.sink.contract import ParallelSink, PartWriter, Receipt
from pgcdc.sink.runner import Runner
from pgcdc.spark.session import Explain, explained
from pgcdc.transform.steps import map_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LARGE_EVENTS = 50_000  # A batch is large from here on: below, one task and one commit are faster
MAX_SEGMENTS = 16
"""The driver writes a batch with more barriers in one piece, because each segment costs a Spark job and a commit."""
MAX_RUNS = 64  # A block that alternates more often between barriers and others stays in one piece
TIMEOUT_EVENTS = 100_000  # A sink's timeout applies to this many events, and grows in proportion for more

_PIECES = pa.schema(
    [
        ("part", pa.int32()),
        ("first", pa.string()),
        ("last", pa.string()),
        ("events", pa.int64()),
        ("is_serial", pa.bool_()),
        ("number", pa.int32()),
        ("block", pa.binary()),
        ("is_last", pa.bool_()),
    ]
)
_RECEIPTS = pa.schema([("receipt", pa.string())])


def open_large(
    spark: SparkSession, shapes: ShapeHistory, frame: DataFrame, start: Position, end: Position, **more: Any
) -> LargeBatch:
    """The batch (start, end], cut where a table's shape changes. `more` as for LargeBatch."""
    shapes.refresh()
    cuts = [change.position for change in shapes.between(start, end) if change.before is not None]
    return LargeBatch(spark, frame, start, end, cuts, **more)


# --- the driver's side


class Piece(NamedTuple):
    """What the driver knows about a block: its first and last position, and whether it must be written alone."""

    first: str
    last: str
    events: int
    is_serial: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks that are written and committed together: those that begin in (start, end]."""

    start: Position
    end: Position
    events: int


def plan_segments(
    pieces: Iterable[Piece], start: Position, end: Position, cuts: Sequence[Position] = ()
) -> list[Segment]:
    """The segments of a batch, in order. Neighbours that can be written together share one."""
    segments: list[Segment] = []
    begin, last, count, kind = start, "", 0, False
    texts = sorted(str(cut) for cut in cuts)
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if last and (piece.is_serial != kind or any(last <= cut < piece.first for cut in texts)):
            segments.append(Segment(begin, Position.parse(last), count))
            begin, count, last = segments[-1].end, 0, ""
        kind, count, last = piece.is_serial, count + piece.events, max(last, piece.last)
    return [*segments, Segment(begin, end, count)]


@dataclass(eq=False)
class LargeBatch:
    """One batch for several sinks, read and split once. `write` may be called from any thread; `close` after the last
    one."""

    spark: SparkSession
    frame: DataFrame
    """Contains KEYED_BLOCKS, or a row per event with `position`, `key_hash`, `is_barrier` and lines in `column`."""
    start: Position
    end: Position
    cuts: Sequence[Position] = ()  # Positions where the shape of a table changes
    events: int = 0  # Approximate
    column: str = "line"
    explain: Explain | None = None  # Finds the cause of a failure of the frame itself
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pieces: DataFrame | None = None
    _segments: list[Segment] = field(default_factory=list)

    def close(self) -> None:
        """Free what Spark caches. Call it after the last `write`."""
        with contextlib.suppress(Exception):  # Spark may be gone, together with its cache
            if self._pieces is not None:
                self._pieces.unpersist()

    def write(self, member: Runner, reached: Position | None = None) -> bool:
        """Have the executors write to this sink everything after its ack and `reached`. False: the driver must write
        the batch itself.

        That includes a sink that refuses events: the driver sets them aside and writes the rest.
        """
        reached = max(member.ack, reached or member.ack)
        if reached >= self.end:
            return True
        pieces, segments = self._split()
        if len(segments) > MAX_SEGMENTS:
            return False
        try:
            for segment in segments:
                if reached < segment.end:
                    inside = pieces.where(f"first > '{segment.start}' AND first <= '{segment.end}'")
                    self._deliver(member, inside, segment, reached)
        except SinkRejected:  # only the driver can find out which events are refused
            return False
        return True

    def _split(self) -> tuple[DataFrame, list[Segment]]:
        """The batch split by key, each part in order, and its segments. Spark caches the result until `close`."""
        with self._lock:
            if self._pieces is None:
                count = max(2, self.spark.sparkContext.defaultParallelism)
                split = map_in_arrow(self.frame, _Split(count, tuple(map(str, self.cuts)), self.column), _PIECES)
                pieces = split.repartitionById(count, "part").sortWithinPartitions("first", "number").persist()
                try:
                    with explained(self.explain, "the batch cannot be split"):
                        known = pieces.where("number = 0").select("first", "last", "events", "is_serial").collect()
                except BaseException:
                    with contextlib.suppress(Exception):
                        pieces.unpersist()
                    raise
                self._segments = plan_segments((Piece(*row) for row in known), self.start, self.end, self.cuts)
                self._pieces = pieces  # set last: other sinks of the batch then see the segments too
            return self._pieces, self._segments

    def _deliver(self, member: Runner, frame: DataFrame, segment: Segment, reached: Position) -> None:
        sink, tag = cast(ParallelSink, member.sink), f"pgcdc-{uuid.uuid4().hex}"
        context = self.spark.sparkContext

        def write() -> None:
            begin = max(segment.start, member.ack, reached)
            sink.discard_parts()  # of a failed attempt
            context.addJobTag(tag)
            try:
                writing = _Write(sink.part_writer(), str(begin), self.column)
                with explained(self.explain, f"adapter {member.name} cannot be written to"):
                    rows = map_in_arrow(frame, writing, _RECEIPTS).collect()
            finally:
                context.removeJobTag(tag)
            hit("parallel.written")
            receipts: list[Receipt] = [json.loads(row["receipt"]) for row in rows]
            sink.commit_parts(begin, segment.end, receipts)
            sink.discard_parts()  # of duplicate attempts

        timeout_s = member.options.timeout * max(1.0, segment.events / TIMEOUT_EVENTS)
        try:
            member.deliver(segment.end, segment.events, write, timeout_s)
        except SinkTimeout:
            context.cancelJobsWithTag(tag)  # ends the write, so that the next one can start
            raise


# --- the executors' side


@dataclass(frozen=True, slots=True)
class _Split:
    """Cuts blocks at barriers, and splits everything between them into parts by key."""

    parts: int
    cuts: tuple[str, ...]
    column: str = "line"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for events in _open(batches, self.column):
            if events.num_rows:
                yield from self._pieces(events)

    def _pieces(self, events: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        is_barrier = events.column("is_barrier").to_numpy(zero_copy_only=False)
        bounds = [0, *(np.flatnonzero(np.diff(is_barrier)) + 1).tolist(), len(is_barrier)]
        if len(bounds) > MAX_RUNS:
            yield from self._pack(events, 0, is_serial=True)
            return
        for cut in self.cuts:
            bounds.append(pc.sum(pc.less_equal(events.column("position"), cut)).as_py())
        for begin, end in itertools.pairwise(sorted(set(bounds))):
            run = events.slice(begin, end - begin)
            if is_barrier[begin]:
                yield from self._pack(run, 0, is_serial=True)
            else:
                yield from self._by_key(run)

    def _by_key(self, run: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        part = run.column("key_hash").to_numpy().view(np.uint64) % np.uint64(self.parts)
        order = np.argsort(part, kind="stable")  # keeps the stream order within a part
        sorted_run, sorted_part = run.take(pa.array(order)), part[order]
        for number in np.unique(sorted_part):
            begin, end = np.searchsorted(sorted_part, number), np.searchsorted(sorted_part, number, side="right")
            yield from self._pack(sorted_run.slice(int(begin), int(end - begin)), int(number), is_serial=False)

    def _pack(self, events: pa.RecordBatch, part: int, *, is_serial: bool) -> Iterator[pa.RecordBatch]:
        positions = events.column("position")
        known = [part, positions[0].as_py(), positions[-1].as_py(), events.num_rows, is_serial]
        for number, piece in enumerate(pack_block(events.select(["position", "line"]))):
            scalars = [pa.array([value], field.type) for value, field in zip([*known, number], _PIECES, strict=False)]
            yield pa.RecordBatch.from_arrays([*scalars, *piece.columns], schema=_PIECES)


@dataclass(frozen=True, slots=True)
class _Write:
    """Writes the rows of a task as one part, and returns the receipt."""

    writer: PartWriter
    after: str  # What the sink already has
    column: str = "line"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        events = (
            rest
            for batch in _open(batches, self.column)
            if (rest := batch.filter(pc.greater(batch.column("position"), self.after))).num_rows
        )
        first = next(events, None)
        if first is None:
            return
        receipt = self.writer.write_part(context.partitionId() if context else 0, itertools.chain([first], events))
        if receipt is not None:
            yield pa.RecordBatch.from_pydict({"receipt": [json.dumps(receipt)]}, _RECEIPTS)


def _open(batches: Iterable[pa.RecordBatch], column: str) -> Iterator[pa.RecordBatch]:
    """The events in batches of keyed blocks, pieces or events whose `column` holds a line."""
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        return
    everything = itertools.chain([first], batches)
    names = first.schema.names
    if "block" in names:  # a piece: lines that were selected earlier
        yield from open_blocks(batch.select(["block", "is_last"]) for batch in everything)
        return
    for batch in open_blocks(everything) if "keyed_block" in names else everything:
        lines = batch.column(column)
        chosen = [lines if one.name == "line" else batch.column(one.name) for one in KEYED_LINES]
        arrays = [one.cast(field.type) for one, field in zip(chosen, KEYED_LINES, strict=True)]
        events = pa.RecordBatch.from_arrays(arrays, schema=KEYED_LINES)
        yield events.filter(lines.is_valid()) if lines.null_count else events
