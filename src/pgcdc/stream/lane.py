"""A lane: one streaming query that collects each batch once and hands it to its sinks, side by side."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pgcdc.errors import GapError, StateError
from pgcdc.ops.failpoint import hit
from pgcdc.position import Position
from pgcdc.sink.base import Batch, Sink
from pgcdc.state import fsync_folder
from pgcdc.stream.events import BLOCKS, KEYED_BLOCKS, LINES, unpack_blocks
from pgcdc.transform.row_json import row_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from pgcdc.sink.delivery import Delivery
    from pgcdc.stream.parallel import LargeBatches

__all__ = ["Lane", "read_offset"]


class LaneStopped(Exception):
    """Refuses a batch that came after the lane was told to stop."""


class Lane:
    """One query and its sinks. `committed` tells what Spark has committed and what is durable at every sink."""

    def __init__(self, name: str, checkpoint: Path, sinks: Sequence[Sink]) -> None:
        self.name = name
        self.sinks = list(sinks)
        self.error: BaseException | None = None
        """What a sink failed with, if one did."""
        self.batches = 0
        self.events = 0
        self._checkpoint = checkpoint
        self._pool = ThreadPoolExecutor(max(1, len(self.sinks)), thread_name_prefix=f"lane-{name}")
        self._last_batch = -1
        self._acked_batch = -1
        self._lock = threading.Lock()
        self._stopping = False
        self._running = False
        self._initial = Position(0, 0)
        self._is_typed = False
        self.on_batch: Callable[[Batch], None] | None = None
        self.large: LargeBatches | None = None
        """Set before the start: then executors write large batches to the sinks that can."""

    def open(self, initial: Position) -> None:
        """Open the sinks where the query will go on. One that was left out of earlier runs would miss what came between."""
        self._initial = initial
        self._last_batch = max(self._committed_batches(), default=-1)  # by an earlier run, maybe not yet confirmed
        start = self.place
        for sink in self.sinks:
            sink.open(start)
            if sink.ack < start:
                raise GapError(
                    f"adapter {sink.name} stands at {sink.ack}, but the others were served up to {start} without it",
                    f"What came between cannot be delivered any more. To let it begin at {start}, delete its ack in "
                    "the state directory (acks/) and give it a new target",
                )

    def start(self, spark: SparkSession, options: dict[str, str], *, once: bool = False) -> StreamingQuery:
        """Start the query from its checkpoint. With an option `table` it delivers typed rows."""
        self.error = None
        reader = spark.readStream.format("pgcdc").options(**options)
        self._is_typed = "table" in options
        if self._is_typed:
            frame = row_lines(reader.option("_start", str(self.place)).load())
        else:  # no transform wants the columns: the executors render the JSON, and rows travel in blocks
            frame = reader.schema(KEYED_BLOCKS if self.large else BLOCKS).load()
        writer = frame.writeStream.queryName(self.name).option("checkpointLocation", str(self._checkpoint))
        trigger = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")
        at_once = "10000" if self._is_typed else "1"  # one block at a time through the JVM
        with _setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", at_once):
            return trigger.foreachBatch(self._deliver).start()

    def _stages(self, batch_id: int) -> bool:
        """Whether tasks of the batch read rows of the initial snapshot, besides the changes of the batch."""
        before = _raw_offset(self._checkpoint, batch_id - 1) if batch_id else {}
        return bool(_raw_offset(self._checkpoint, batch_id).get("stage", 0) > before.get("stage", 0))

    @property
    def place(self) -> Position:
        """Where the query goes on: behind what Spark has committed."""
        commits = self._committed_batches()
        return read_offset(self._checkpoint, max(commits)) if commits else self._initial

    def _committed_batches(self) -> list[int]:
        return [int(file.name) for file in (self._checkpoint / "commits").glob("[0-9]*") if file.name.isdigit()]

    def committed(self) -> Position | None:
        """The end of the last batch that Spark has committed, made durable; None if nothing is new since the last call."""
        with self._lock:
            batch = self._last_batch
        while batch > self._acked_batch and not (self._checkpoint / "commits" / str(batch)).exists():
            batch -= 1
        if batch <= self._acked_batch or batch < 0:
            return None
        position = read_offset(self._checkpoint, batch)
        for folder in ("offsets", "commits"):
            for number in range(max(self._acked_batch, batch - 2), batch + 1):  # Spark also reads the one before
                with contextlib.suppress(FileNotFoundError):
                    _fsync(self._checkpoint / folder / str(number))
            fsync_folder(self._checkpoint / folder)
        self._acked_batch = batch
        return position

    def stop(self, query: StreamingQuery, timeout_s: float) -> None:
        """End the query between two batches: the one that runs is finished and committed first."""
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        while query.isActive and time.monotonic() < deadline:
            with self._lock:
                batch, running = self._last_batch, self._running
            if not running and (batch < 0 or (self._checkpoint / "commits" / str(batch)).exists()):
                break
            time.sleep(0.01)
        query.stop()

    def close(self) -> None:
        """Close the sinks."""
        self._pool.shutdown()
        for sink in self.sinks:
            sink.close()

    def _deliver(self, blocks: DataFrame, batch_id: int) -> None:
        """Spark's callback: runs once per batch, and again for the same batch after a crash."""
        if self._stopping:
            raise LaneStopped("this batch comes again after the restart")
        with self._lock:
            self._running = True
        try:
            self._write(blocks, batch_id)
        except BaseException as error:
            self.error = error
            raise
        finally:
            with self._lock:
                self._running = False

    def _write(self, blocks: DataFrame, batch_id: int) -> None:
        hit("lane.planned")
        end = read_offset(self._checkpoint, batch_id)
        start = read_offset(self._checkpoint, batch_id - 1) if batch_id else self._initial
        waiting = [sink for sink in self.sinks if sink.ack < end]
        if not waiting and self._stages(batch_id):
            blocks.toArrow()  # it has no rows, but its tasks have something to do
        large = self.large.open(blocks, start, end) if waiting and self.large and not self._is_typed else None
        if large is not None:
            with large:
                written = self._pool.map(large.write, cast("list[Delivery]", waiting))
                waiting = [sink for sink, done in zip(waiting, list(written), strict=True) if not done]
            self.batches += not waiting
            self.events += 0 if waiting else large.events
        if waiting:
            collected = blocks.toArrow()
            batch = Batch(start, end, collected.cast(LINES) if self._is_typed else unpack_blocks(collected))
            hit("lane.collected")
            list(self._pool.map(lambda sink: sink.write(batch), waiting))
            self.batches += 1
            self.events += batch.events.num_rows
            if self.on_batch is not None:
                self.on_batch(batch)
        hit("lane.written")
        with self._lock:
            self._last_batch = batch_id


def read_offset(checkpoint: Path, batch_id: int) -> Position:
    """The end of a batch, from Spark's offset log."""
    return Position.from_offset(_raw_offset(checkpoint, batch_id))


def _raw_offset(checkpoint: Path, batch_id: int) -> dict[str, Any]:
    """What the source said (one line of metadata, then one line per source)."""
    path = checkpoint / "offsets" / str(batch_id)
    try:
        offset: dict[str, Any] = json.loads(path.read_text().splitlines()[2])
        Position.from_offset(offset)
        return offset
    except (OSError, IndexError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"Spark's offset log {path} cannot be read: {error}",
            "Restore the checkpoint from a backup, or begin with a new slot: pgcdc resync --new-slot",
        ) from error


@contextlib.contextmanager
def _setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """A query keeps the settings with which it was started."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name) if before is None else spark.conf.set(name, before)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
