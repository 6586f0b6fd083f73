"""A lane: one streaming query that collects each batch once and hands it to its members in parallel.

Its checkpoint is Spark's plus a folder `ends`, which records where each batch ended according to its source.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pgcdc.core.errors import GapError, PgcdcError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import explain_writing
from pgcdc.core.state import fsync_folder as fsync
from pgcdc.event.batch import Batch
from pgcdc.run.member import Member, NotAMember, WriteFuture, may_pass
from pgcdc.run.roster import Write, WriteState, judge
from pgcdc.run.times import BatchTimes
from pgcdc.spark.parallel import LARGE_EVENTS, TIMEOUT_EVENTS, LargeBatch
from pgcdc.spark.quick import Collector, checkpoint_url
from pgcdc.spark.session import QueryFailed, headline, with_settings
from pgcdc.transform.program import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


FATAL_WAIT_S = 1.0  # How long the others may take to finish their writes when one failed for good
LARGE_GRACE_S = 5.0
"""Extra patience for a large batch: executors must start, and they write more at a time.

For TIMEOUT_EVENTS events; for more it grows in proportion.
"""


class LaneStopped(Exception):
    """Refuses a batch that arrived after the lane was stopped."""


class Planned(NamedTuple):
    """The next batch, as its source announced it."""

    start: Position
    end: Position
    events: int  # Approximate
    rows: int = 0  # How many rows go to Spark with its plan; 0: its tasks read them


class Lane:
    """One query and its members. `committed` returns what Spark has committed and every member has made durable."""

    def __init__(self, name: str, checkpoint: Path, initial: Position, members: Callable[[], list[Member]]) -> None:
        """`initial`: where the capture says that its consumer began. `members` is called at the start of each batch."""
        self.name = name
        self.members = members
        self.query: StreamingQuery | None = None
        self.program: Program | None = None
        self.error: BaseException | None = None  # The error of a failed batch
        self.events = 0
        self.boundary = threading.Lock()
        """Held while a batch runs. Between two batches the holder may move members."""
        self.moved = threading.Event()  # Set when a batch has ended, successfully or not
        self.ended = threading.Event()  # The same for acknowledging: the lanes of a run share it
        self.times = BatchTimes()
        self.on_begin: Callable[[Position], None] = lambda start: None
        """Called with the start of each batch, before `members`."""
        self.on_leave: Callable[[Member, Position, BaseException | None], None] | None = None
        """Gives a member its own lane, durably; None: no member leaves this lane."""
        self.on_batch: Callable[[Batch], None] | None = None
        """Called with the first chain's events of each collected batch, after the members have it."""
        self.large: Callable[..., LargeBatch] | None = None
        """Set before the start if executors should write large batches to the sinks that allow it."""
        self.planned: Planned | None = None
        self.is_stopping = False  # The running batch is the last one
        self.is_abandoned = False
        """Receives no more batches: its member moved away, and it waits to be stopped. Set by the holder of the
        boundary."""
        self.checkpoint = Checkpoint(checkpoint, initial)
        self._last_batch = self.checkpoint.last_batch  # by an earlier run, maybe not confirmed yet
        self._acked_batch = -1
        self.next_start = self.place
        """Where the next batch begins, or the earlier start of a repeated batch that every member has."""
        self.last_start = self.next_start  # Where the last batch began

    def start(self, spark: SparkSession, options: dict[str, str], program: Program, *, once: bool = False) -> None:
        """Start the query from its checkpoint. With an option `table` it delivers typed rows."""
        self.error = None
        self.is_stopping = False
        self.program = program
        reader = spark.readStream.format("pgcdc").options(**options, **program.source_options())
        if schema := program.source_schema():
            reader = reader.schema(schema)
        if "table" in options:
            reader = reader.option("_start", str(self.place))
        frame = program.project(reader.load())
        self._collector = Collector(frame)
        writer = frame.writeStream.queryName(self.name).option(
            "checkpointLocation", checkpoint_url(spark, self.checkpoint.folder)
        )
        trigger = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")
        with with_settings(spark, program.settings()):
            self.query = trigger.foreachBatch(self._deliver).start()

    @property
    def place(self) -> Position:
        """Where the query resumes: after what Spark has committed."""
        return self.checkpoint.place

    def committed(self, send: Callable[[Position], object] = lambda position: None) -> Position | None:
        """The end of the last batch that Spark has committed, made durable, then sent. None if it was sent before."""
        batch = self._last_batch
        while batch > self._acked_batch and not self.checkpoint.has_committed(batch):
            batch -= 1
        if batch <= self._acked_batch:
            return None
        position = self.checkpoint.end_of(batch)
        self.checkpoint.sync(max(self._acked_batch + 1, batch - 2), batch)  # Spark also reads the one before
        send(position)
        self._acked_batch = batch
        return position

    def await_boundary(self, timeout_s: float) -> bool:
        """While stopping: wait until the last batch is committed; False on timeout."""
        query, deadline = self.query, time.monotonic() + timeout_s
        while query is not None and query.isActive:
            is_free = not self.boundary.locked()  # before reading the number: no other batch begins
            batch = self._last_batch
            if is_free and (batch < 0 or self.checkpoint.has_committed(batch)):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _deliver(self, blocks: DataFrame, batch_id: int) -> None:
        """Spark's callback: runs once per batch, and again for the same batch after a crash."""
        with self.boundary:
            try:
                if self.is_stopping or self.is_abandoned:
                    raise LaneStopped("this batch is repeated after the restart")
                self._write(blocks, batch_id)
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.moved.set()
                self.ended.set()

    def _write(self, blocks: DataFrame, batch_id: int) -> None:
        hit("lane.planned")
        self.times.mark("called")
        assert self.program is not None
        start, end, events, rows = self._take_planned(batch_id)
        self.on_begin(start)
        self.last_start = start
        members = self.members()
        for member in members:
            if member.reached < start:
                raise GapError(f"adapter {member.name} is at {member.sink.ack}, but lane {self.name} is at {start}")
        waiting = [member for member in members if member.reached < end]
        chains = list(self.program.chains)
        if any(member.chain not in chains for member in waiting):
            raise LaneStopped("this batch is repeated with the new transforms")
        wanted = {member.name: chains.index(member.chain) for member in waiting}
        if waiting:
            collected: list[Batch] = []
            program, quick = self.program, partial(self._collector.to_arrow, rows=rows)

            def submit(member: Member) -> WriteFuture:
                if not collected:
                    collected.extend(program.collect(blocks, start, end, quick))
                    self.times.mark("collected")
                    hit("lane.collected")
                return member.submit(self.name, collected[wanted[member.name]])

            is_large = self.large is not None and events >= LARGE_EVENTS
            in_parts = [member for member in waiting if is_large and member.takes_parts]
            futures = {member.name: submit(member) for member in waiting if member not in in_parts}
            futures |= self._submit_large(blocks, start, end, events, in_parts) if in_parts else {}
            self._follow(start, futures, members, submit)
            self.times.mark("written")
            self.events += len(collected[0]) if collected else events
            if collected and self.on_batch is not None:
                self.on_batch(collected[0])
        self.checkpoint.note(batch_id, end)
        hit("lane.written")
        self._last_batch, self.next_start = batch_id, end
        self.times.mark("ended")

    def _take_planned(self, batch_id: int) -> Planned:
        """The source's announcement of this batch, which begins where the previous one ended."""
        planned, self.planned = self.planned, None
        expected = self.checkpoint.end_of(batch_id - 1)
        if planned is None or planned.start != expected:
            raise StateError(
                f"lane {self.name} expects batch {batch_id} to begin at {expected}, but its source says "
                f"{planned.start if planned else 'nothing'}",
                "Restore the whole state directory from one backup, or start over with a new slot: pgcdc "
                "resync --new-slot",
            )
        return planned

    def _submit_large(
        self, frame: DataFrame, start: Position, end: Position, events: int, members: list[Member]
    ) -> dict[str, WriteFuture]:
        """Have executors write a large batch to these sinks. If a sink leaves, its write may outlast the batch."""
        assert self.program is not None and self.large is not None
        explain = partial(self.program.explain, frame)
        futures: dict[str, WriteFuture] = {}
        for column in dict.fromkeys(self.program.line_column(one.chain) for one in members):
            blocks = self.program.keyed_blocks(frame, column)
            batch = self.large(blocks, start, end, events=events, column=column, explain=explain)
            users = [one for one in members if self.program.line_column(one.chain) == column]
            writes = [one.submit_large(self.name, batch) for one in users]
            for write in writes:
                write.grace_s = LARGE_GRACE_S * max(1.0, events / TIMEOUT_EVENTS)
                write.add_done_callback(partial(_close_after, batch, writes))
            futures |= {one.name: write for one, write in zip(users, writes, strict=True)}
        return futures

    def _follow(
        self,
        start: Position,
        futures: dict[str, WriteFuture],
        members: list[Member],
        submit: Callable[[Member], WriteFuture],
    ) -> None:
        """Wait for the writes of a batch. A sink that is too slow leaves, if another member has the batch.

        `submit` writes the batch whole, for a sink that cannot take it in parts.
        """
        began = time.monotonic()
        by_name = {one.name: one for one in members}
        while True:
            refused = [name for name, one in futures.items() if one.done() and not one.exception() and not one.result()]
            for name in refused:
                futures[name] = submit(by_name[name])
                began = time.monotonic()  # from now on the others wait for it
            writes = {one.name: _look_at(one, futures.get(one.name), began) for one in members}
            failed = {name: futures[name].exception() for name, one in writes.items() if one.state is WriteState.FAILED}
            fatal = next((name for name, error in failed.items() if not may_pass(error)), None)
            running = [future for future in futures.values() if not future.done()]
            if fatal is not None:
                wait(running, FATAL_WAIT_S)
                raise _name_adapter(fatal, failed[fatal])
            verdict = judge(writes, time.monotonic())
            if verdict.wait_s <= 0:
                break
            wait(running, None if math.isinf(verdict.wait_s) else verdict.wait_s, FIRST_COMPLETED)
        if self.on_leave is not None:
            for name in verdict.leave:
                self.on_leave(by_name[name], start, failed.pop(name, None))
        for error in failed.values():
            assert error is not None
            raise error


def _look_at(member: Member, future: WriteFuture | None, began: float) -> Write:
    if future is None:
        return Write(WriteState.DONE, member.adapter.priority, began)  # it already has the batch
    if not future.done() or not (future.exception() or future.result()):  # or it wants the whole batch
        return Write(WriteState.RUNNING, member.adapter.priority, grace_s=future.grace_s)
    state, ended = WriteState.FAILED if future.exception() else WriteState.DONE, max(future.ended, began)
    return Write(state, member.adapter.priority, ended)


def _name_adapter(name: str, error: BaseException | None) -> BaseException:
    """Add the adapter's name to an unexpected error: Spark would only report that its callback failed."""
    assert error is not None
    if isinstance(error, (PgcdcError, NotAMember)) or not isinstance(error, Exception):
        return error
    advice = "See spark.log in the state directory. Nothing is lost: fix the cause and start again"
    made = QueryFailed(f"adapter {name} failed: {headline(error)}", advice)
    made.__cause__ = error
    return made


def _close_after(batch: LargeBatch, writes: list[WriteFuture], _: object) -> None:
    """Called when one of these writes has ended."""
    if all(one.done() for one in writes):
        batch.close()


# --- the checkpoint

KEPT_ENDS = 200  # How many ends of batches a lane keeps: Spark keeps the last 100
MAX_TAKEN_BACK = 50  # The most batches between two acks: nearly every batch ends with one


class Checkpoint:
    """A file in `ends` for each batch: written before Spark commits the batch, and durable before it is
    acknowledged."""

    def __init__(self, folder: Path, initial: Position) -> None:
        """`initial`: where the first batch begins."""
        self.folder = folder
        self._ends = folder / "ends"
        self._initial = initial
        self._ends.mkdir(parents=True, exist_ok=True)
        for made in (folder, folder.parent):
            fsync(made)
        self._take_back()

    @property
    def last_batch(self) -> int:
        """The last batch that Spark has committed; -1: none."""
        return max(_numbers(self.folder / "commits"), default=-1)

    @property
    def place(self) -> Position:
        return self.end_of(self.last_batch)

    def end_of(self, batch: int) -> Position:
        """Where a batch ended; -1: where the first one begins."""
        if batch < 0:
            return self._initial
        try:
            text, is_whole, _ = (self._ends / str(batch)).read_text().partition("\n")
            return Position.parse(text if is_whole else "")
        except (FileNotFoundError, ValueError) as error:  # or the machine crashed while it was written
            raise StateError(
                f"{self._ends} does not record where batch {batch} ended",
                "Restore the state directory from a backup, or start over with a new slot: pgcdc resync --new-slot",
            ) from error

    def has_committed(self, batch: int) -> bool:
        return (self.folder / "commits" / str(batch)).exists()

    def note(self, batch: int, end: Position) -> None:
        """Record the end of a batch; durable after `sync`. A repeated batch may have another end: the last one
        counts."""
        with explain_writing(self._ends):
            (self._ends / str(batch)).write_text(f"{end}\n")
            (self._ends / str(batch - KEPT_ENDS)).unlink(missing_ok=True)

    def sync(self, first: int, last: int) -> None:
        """Make our and Spark's files of these batches durable."""
        for folder in ("ends", "offsets", "commits"):
            for number in range(first, last + 1):
                with contextlib.suppress(FileNotFoundError):
                    fsync(self.folder / folder / str(number))
            fsync(self.folder / folder)

    def _take_back(self) -> None:
        """After a crash of the machine Spark's log may be ahead of ours. Those batches were not acknowledged: repeat
        them."""
        last = known = self.last_batch
        while known >= 0 and last - known <= MAX_TAKEN_BACK:
            try:
                self.end_of(known)
                break
            except StateError:
                known -= 1
        else:
            return  # `place` then raises
        for number in range(known + 1, last + 2):
            (self.folder / "commits" / str(number)).unlink(missing_ok=True)
            (self.folder / "offsets" / str(number + 1)).unlink(missing_ok=True)


def _numbers(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.glob("[0-9]*") if file.name.isdigit()]
