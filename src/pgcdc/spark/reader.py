"""The reader of a query: which changes lie between two offsets, and how a task reads them.

It lives in one Python process per query on the driver; `read` runs on the executors and needs nothing but its partition.
Offsets are positions, and the same offsets always read the same changes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pgcdc.capture.control import Channel
from pgcdc.core.errors import ConfigError, GapError, SpoolError
from pgcdc.core.position import Position
from pgcdc.core.relation import Relation
from pgcdc.core.shapes import ShapeChange, ShapeHistory
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, drop_unwanted, event_batch, pack_block
from pgcdc.event.shape import Described
from pgcdc.event.texts import IdSeed
from pgcdc.postgres.lsn import format_lsn
from pgcdc.spark.capture_client import CaptureFeed, Feed, StaticFeed
from pgcdc.spark.options import StreamOptions
from pgcdc.spool.reader import SegmentSlice, SpoolReader, plan_end

LONG_POLL_S = 0.1
MAX_BATCH_BYTES = 64 << 20
PARTITION_BYTES = 8 << 20
RECORD_BATCH_BYTES = 4 << 20


@dataclass
class ChangePartition(InputPartition):
    """What one task reads: slices of segments, and what is needed to read them."""

    slices: list[SegmentSlice]
    relations: list[Relation]
    seed: IdSeed
    host: str
    schema_changes: list[ShapeChange]
    """Those that become events."""
    described: Described = field(default=Described(), kw_only=True)


class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Serves sealed segments."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._schema = schema
        self._options = options
        self._spool: SpoolReader | None = None
        self._shapes: ShapeHistory | None = None
        self._feed: Feed | None = None
        self._run: Channel | None = None
        self._target: Position | None = None
        self._needed: Position | None = None
        """Where a run that has an end, ends; None while rows of snapshots are still to be read before."""
        self._acked = Position.at(0, 0)
        """What the consumer had acknowledged when the query began."""
        self._told = self._acked
        """What was acknowledged since."""

    def initialOffset(self) -> dict[str, Any]:
        initial, ack = self._open().join()
        if ack != initial:
            raise GapError(
                f"the query has no checkpoint, but consumer {self._options.consumer!r} has acknowledged everything up to "
                f"{format_lsn(ack.commit)}",
                "Restore the query's checkpoint. To begin with what the slot still has, forget the consumer first: "
                f"pgcdc consumer forget {self._options.consumer} --state-dir {self._options.state_dir} (rows that "
                "were delivered do not come again then; with all rows: pgcdc resync --new-slot)",
            )
        return initial.to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_batch_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        feed = self._open()
        begin = Position.from_offset(start)
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else 1 << 62
        while True:
            needed = self._find_end(feed)
            if needed is not None and begin >= needed:
                break
            end = self._look(feed, begin)
            assert self._spool is not None
            planned = plan_end(self._spool.after(begin), end, max_rows, MAX_BATCH_BYTES) if end > begin else None
            if planned is not None:
                return self._limit(feed, begin, planned).to_offset()
            if end > begin:  # the capture is just publishing a large transaction
                feed.wait(LONG_POLL_S)
            if self._target is None or (needed is not None and end >= needed):
                break
        return start

    def _find_end(self, feed: Feed) -> Position | None:
        """Of a run that delivers everything up to now: behind its target, and all rows that were asked for by then."""
        if self._target is not None and self._needed is None:
            settled = feed.settled()
            if settled.end is not None:
                self._needed = settled.end if settled.only else max(settled.end, self._target)
        return self._needed

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._spool.end.to_offset() if self._spool is not None else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = Position.end(self._open().target())
        self._needed = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        feed = self._open()
        begin, stop = Position.from_offset(start), Position.from_offset(end)
        self._wait_for(feed, stop)
        assert self._spool is not None
        slices = self._spool.slices(begin, stop)
        relations = list(self._spool.relations())
        changes = self._schema_changes(begin, stop)
        described = self._describe(feed, relations)
        self._announce(begin, stop)
        return [
            ChangePartition(group, relations, feed.seed, socket.gethostname(), changes, described=described)
            for group in group_slices(slices, PARTITION_BYTES)
        ]

    def _announce(self, begin: Position, stop: Position) -> None:
        """Tell the run where the batch that Spark is about to run begins and ends."""
        if not self._options.run:
            return
        if self._run is None:
            self._run = Channel(self._options.run)
        batch = {"lane": self._options.consumer, "start": str(begin), "end": str(stop)}
        self._run.request({"do": "plan", **batch})

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangePartition)
        yield from self._batches(partition)

    def _batches(self, partition: ChangePartition) -> Iterator[pa.RecordBatch]:
        name = self._schema.fieldNames()[0]
        in_blocks = name in ("block", "keyed_block")
        chains = parse_chains(self._options.chains)
        contents = block_schema(chains, keyed=name == "keyed_block")
        schema = contents if in_blocks else to_arrow_schema(self._schema, timezone="UTC")
        options = replace(self._options.events, described=partition.described)
        for pieces in group_slices(partition.slices, RECORD_BATCH_BYTES):
            with self._readable(partition, pieces):
                batch = event_batch(
                    pieces,
                    partition.relations,
                    partition.seed,
                    schema,
                    options,
                    partition.schema_changes,
                    chains,
                )
            if batch is not None and chains:
                batch = drop_unwanted(batch)
            if batch is not None and batch.num_rows:
                yield from pack_block(batch, name) if in_blocks else [batch]

    def _limit(self, feed: Feed, begin: Position, end: Position) -> Position:
        """Where a batch that could go up to `end` has to end before."""
        return end

    @contextlib.contextmanager
    def _readable(self, partition: ChangePartition, pieces: list[SegmentSlice]) -> Iterator[None]:
        """Say what is wrong if these files are on the disk of another host."""
        try:
            yield
        except SpoolError:
            here = socket.gethostname()
            if here == partition.host:
                raise
            raise ConfigError(
                f"the spool {Path(pieces[0].path).parent} of {partition.host} cannot be read on {here}",
                "Put the state directory on storage that every host of the cluster can read",
            ) from None

    def commit(self, end: dict[str, Any]) -> None:
        position = Position.from_offset(end)
        if not self._options.run:
            self._open().ack(position)
        if self._spool is not None:
            self._spool.forget(position)

    def stop(self) -> None:
        if self._feed is not None:
            self._feed.close()
        if self._run is not None:
            self._run.close()

    def _open(self) -> Feed:
        """The feed, opened at first use: the constructor also runs where nothing should be started."""
        if self._feed is None:
            options = self._options
            self._feed = StaticFeed(Path(options.spool)) if options.spool else CaptureFeed(options)
            self._spool = SpoolReader(self._feed.spool)
            self._shapes = ShapeHistory(self._feed.shapes)
            self._acked = self._feed.join()[1]
        return self._feed

    def _schema_changes(self, begin: Position, stop: Position) -> list[ShapeChange]:
        """What becomes events. The history is ahead of the spool: what is visible there has its record here."""
        if not self._options.events.schema_events:
            return []
        assert self._shapes is not None
        self._shapes.refresh()
        return [change for change in self._shapes.between(begin, stop) if change.before is not None]

    def _describe(self, feed: Feed, relations: list[Relation]) -> Described:
        """What is known of shapes besides, if the query asks for it: by the column `shape`, or by its chains."""
        needs_shapes = any(chain.needs_shapes for chain in parse_chains(self._options.chains))
        if "shape" not in self._schema.fieldNames() and not needs_shapes:
            return Described()
        assert self._shapes is not None
        self._shapes.refresh()
        wanted = set(relations)
        return Described(feed.database, tuple(change for change in self._shapes.changes if change.after in wanted))

    def _look(self, feed: Feed, begin: Position) -> Position:
        """How far the spool goes; waits a little if there is nothing new.

        What Spark has committed is then acknowledged at once. It says so only with its next batch, and that one may have
        to wait for room in the spool.
        """
        assert self._spool is not None
        self._spool.refresh()
        if self._spool.end <= begin:
            if not self._options.run and begin > max(self._acked, self._told):
                feed.ack(begin)
                self._told = begin
            feed.wait(LONG_POLL_S)
            self._spool.refresh()
        return self._spool.end

    def _wait_for(self, feed: Feed, position: Position) -> None:
        """After a restart Spark plans its unfinished batch at once: wait for the capture, never return a prefix."""
        assert self._spool is not None
        self._spool.refresh()
        while self._spool.end < position:
            feed.wait(LONG_POLL_S, until=position)
            self._spool.refresh()


def group_slices(slices: list[SegmentSlice], size: int) -> list[list[SegmentSlice]]:
    """Slices in order, in groups of about `size` bytes."""
    groups: list[list[SegmentSlice]] = []
    held = size
    for piece in slices:
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += piece.written[0]
    return groups
