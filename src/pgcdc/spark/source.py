"""The Spark source `format("pgcdc")`: a stream of events of all tables, or typed rows of one table, as a stream or a
snapshot.

Every process of a query imports this module, so the parts for typed rows import their own dependencies when needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pgcdc.capture.server import Channel
from pgcdc.core.errors import ConfigError, GapError, SpoolError
from pgcdc.core.position import Position
from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.event.columns import EVENT_COLUMNS, EVENT_SCHEMA, KEY_COLUMNS, SHAPE_COLUMNS, TEXT_COLUMNS
from pgcdc.event.edits import parse_chains, without_hidden
from pgcdc.event.events import columns_for, drop_unwanted, event_batch, rows_for
from pgcdc.event.forms import form_of
from pgcdc.event.lines import IdSeed
from pgcdc.event.shape import Described, diff_shapes
from pgcdc.postgres.lsn import format_lsn
from pgcdc.spark.capture_client import Feed, StaticFeed
from pgcdc.spark.options import StreamOptions, check_kind, parse_options
from pgcdc.spark.quick import PREFETCH_BYTES, StreamReader
from pgcdc.spool.reader import SegmentSlice, plan_end

if TYPE_CHECKING:
    from pgcdc.event.typed import TypedTable
    from pgcdc.spark.tables import BatchReader


class ChangeSource(DataSource):
    """`format("pgcdc")`. Options: see docs/spark.md."""

    _table: TypedTable | None = None

    @classmethod
    def name(cls) -> str:
        return "pgcdc"

    def schema(self) -> str | StructType:
        options = parse_options(self.options)
        if options.table is None:
            return EVENT_SCHEMA
        # Spark does not say which read this is: a read and a stream with the same options get the same answer.
        if not options.metadata:
            from pgcdc.spark.tables import load_rows, own_schema

            return own_schema(load_rows(options).columns)
        from pgcdc.spark.tables import check_names, load_table, typed_schema

        self._table = load_table(options)  # the reader gets the same one: Spark passes this object on
        check_names(self._table)
        return typed_schema(self._table, zset=options.rows.zset)

    def reader(self, schema: StructType) -> BatchReader:
        options = parse_options(self.options)
        if options.table is None:
            raise ConfigError(
                "spark.read needs one table", "Name it with option('table', ...), or use spark.readStream"
            )
        check_kind(self.options, is_batch=True)
        from pgcdc.spark.tables import BatchReader, load_rows, whole_schema

        rows = load_rows(options)
        _compare(schema, {field.name: field.dataType.simpleString() for field in whole_schema(rows)}, rows.title)
        return BatchReader(options, schema, rows)

    def streamReader(self, schema: StructType) -> ChangeReader:
        options = parse_options(self.options)
        check_kind(self.options, is_batch=False)
        if options.table is None:
            _check_schema(schema)
            return ChangeReader(options, schema)
        from pgcdc.spark.tables import check_names, load_table, narrow
        from pgcdc.spark.typed_reader import TypedReader

        table = self._table
        if table is None:  # the user gave the schema
            table = load_table(options)
            _check_typed(schema, table, zset=options.rows.zset)
            table = narrow(table, schema)
            check_names(table)
        return TypedReader(options, schema, table)


def _check_schema(schema: StructType) -> None:
    """A user's schema may drop columns and ask for JSON, keys and shapes. Names and types are fixed."""
    known = {**EVENT_COLUMNS, **KEY_COLUMNS, **SHAPE_COLUMNS, **TEXT_COLUMNS}
    if schema.simpleString() in ("struct<block:binary,is_last:boolean>", "struct<keyed_block:binary,is_last:boolean>"):
        return
    if not any(form_of(name) for name in schema.fieldNames()):  # skip the check for a lane's own columns
        _compare(schema, known, "events")


def _check_typed(schema: StructType, table: TypedTable, *, zset: bool) -> None:
    """A user's schema may drop columns. Their types must be the table's."""
    from pgcdc.event.typed import BEFORE
    from pgcdc.spark.tables import typed_schema

    known = {field.name: field.dataType.simpleString() for field in typed_schema(table, zset=zset)}
    before = next((field.dataType for field in schema if field.name == BEFORE), None)
    if isinstance(before, StructType) and not zset:
        _compare(before, {column.name: known[column.name] for column in table.columns}, f"table {table.title}")
        known[BEFORE] = before.simpleString()
    _compare(schema, known, f"table {table.title}")


def _compare(schema: StructType, known: dict[str, str], what: str) -> None:
    for field in schema.fields:
        if not field.nullable:
            raise ConfigError(
                f"column {field.name} is NOT NULL in the schema, but empty in a DELETE or TRUNCATE",
                "Remove NOT NULL, and filter the rows that you want",
            )
        kind = field.dataType.simpleString()
        if field.name in known and known[field.name] != kind:
            actual = known[field.name]
            raise ConfigError(f"the schema has {field.name} {kind}, but in {what} it is {actual}", f"Write {actual}")
        if field.name not in known:
            raise ConfigError(
                f"the schema has a column {field.name} {kind}, which {what} lacks",
                f"Known columns: {', '.join(f'{name} {text}' for name, text in known.items())}",
            )


# --- the reader of a query: which changes are between two offsets, and how a task reads them
#
# It lives in one Python process per query on the driver; `read` runs on the executors and needs only its partition.
# Offsets are positions, and the same offsets always read the same changes.

LONG_POLL_S = 0.1
MAX_BATCH_BYTES = 64 << 20
PARTITION_BYTES = 8 << 20
RECORD_BATCH_BYTES = 4 << 20


@dataclass
class ChangePartition(InputPartition):
    seed: IdSeed
    host: str
    slices: list[SegmentSlice] = dataclasses.field(default_factory=list)
    relations: list[Relation] = dataclasses.field(default_factory=list)
    schema_changes: list[ShapeChange] = dataclasses.field(default_factory=list)  # The changes that become events
    described: Described = Described()  # noqa: RUF009 - frozen


class ChangeReader(StreamReader, SupportsTriggerAvailableNow):
    """Serves sealed segments."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._schema = schema
        self._options = options
        self._feed: Feed | None = None
        self._run: Channel | None = None
        self._target: Position | None = None
        self._needed: Position | None = None  # Where a bounded run ends; None until the snapshot rows are complete
        self._acked = Position.at(0, 0)  # The consumer's ack when the query began
        self._told = self._acked  # The last acknowledgement since then

    def initialOffset(self) -> dict[str, Any]:
        initial, ack = self._open().claim()
        if ack != initial:
            raise GapError(
                f"the query has no checkpoint, but consumer {self._options.consumer!r} has acknowledged "
                f"everything up to {format_lsn(ack.commit)}",
                "If that was another query, give this one its own name: option('consumer', ...). Otherwise restore the "
                "query's checkpoint. To start with what the slot still has, forget the consumer "
                f"first: pgcdc consumer forget {self._options.consumer} --state-dir {self._options.state_dir} "
                "(delivered rows are not repeated; to get all rows: pgcdc resync --new-slot)",
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
            planned = plan_end(feed.spool.after(begin), end, max_rows, MAX_BATCH_BYTES) if end > begin else None
            if planned is not None:
                return self._limit(feed, begin, planned).to_offset()
            if end > begin:  # the capture is still publishing a large transaction
                feed.wait(LONG_POLL_S)
            if self._target is None or (needed is not None and end >= needed):
                break
        return start

    def _find_end(self, feed: Feed) -> Position | None:
        """The end of a run that delivers everything up to now: after its target, and after all rows requested by
        then."""
        if self._target is not None and self._needed is None:
            settled = feed.settled()
            if settled.end is not None:
                self._needed = settled.end if settled.only else max(settled.end, self._target)
        return self._needed

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._feed.spool.end.to_offset() if self._feed is not None else None

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = Position.end(self._open().target())
        self._needed = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        feed = self._open()
        begin, stop = Position.from_offset(start), Position.from_offset(end)
        self._wait_for(feed, stop)
        found, rows = self._divide(feed, start, end), 0
        if len(found) == 1 and sum(piece.written[0] for piece in found[0].slices) <= PREFETCH_BYTES:
            rows = self.prefetch(start, end, self._batches(found[0]))
        self._announce(feed, begin, stop, rows)
        return found

    def _divide(self, feed: Feed, start: dict[str, Any], end: dict[str, Any]) -> list[ChangePartition]:
        begin, stop = Position.from_offset(start), Position.from_offset(end)
        slices, plan = feed.spool.slices(begin, stop), self._plan(feed, begin, stop)
        return [replace(plan, slices=group) for group in group_slices(slices, PARTITION_BYTES)]

    def _plan(self, feed: Feed, begin: Position, stop: Position) -> ChangePartition:
        relations = list(feed.spool.relations())
        changes, described = self._schema_changes(feed, begin, stop), self._describe(feed, relations, stop)
        return ChangePartition(feed.seed, socket.gethostname(), [], relations, changes, described)

    def _announce(self, feed: Feed, begin: Position, stop: Position, rows: int) -> None:
        """Tell the run the start, end and approximate event count of the batch that Spark is about to run, and how many
        rows its plan carries."""
        if not self._options.run:
            return
        if self._run is None:
            self._run = Channel(self._options.run)
        whole = itertools.takewhile(lambda record: record.end <= stop, feed.spool.after(begin))
        batch = {"lane": self._options.consumer, "start": str(begin), "end": str(stop), "rows": rows}
        self._run.request({"do": "plan", **batch, "events": sum(record.rows for record in whole)})

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangePartition)
        yield from self._batches(partition)

    def _batches(self, partition: ChangePartition) -> Iterator[pa.RecordBatch]:
        chains = parse_chains(self._options.chains)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        columns = columns_for(schema, chains)
        options = replace(self._options.events, described=partition.described, addressed=bool(self._options.run))
        for pieces in group_slices(partition.slices, RECORD_BATCH_BYTES):
            with self._readable(partition, pieces):
                batch = event_batch(
                    pieces,
                    partition.relations,
                    partition.seed,
                    columns,
                    options,
                    partition.schema_changes,
                    chains,
                )
            if batch is not None and chains:
                batch = drop_unwanted(batch)
            if batch is not None and batch.num_rows:
                yield from rows_for(schema, batch)

    def _limit(self, feed: Feed, begin: Position, end: Position) -> Position:
        """The furthest position up to `end` where a batch may end."""
        return end

    @contextlib.contextmanager
    def _readable(self, partition: ChangePartition, pieces: list[SegmentSlice]) -> Iterator[None]:
        """Raise with advice if these files are on another host's disk."""
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
        feed = self._open()
        if not self._options.run:
            feed.acknowledge(position)
        feed.spool.forget(position)

    def stop(self) -> None:
        if self._feed is not None:
            self._feed.close()
        if self._run is not None:
            self._run.close()

    def _open(self) -> Feed:
        """The feed, opened on first use: the constructor also runs where nothing should be started."""
        if self._feed is None:
            options = self._options
            self._feed = StaticFeed(Path(options.spool)) if options.spool else Feed(options)
            self._acked = self._feed.claim()[1]
        return self._feed

    def _schema_changes(self, feed: Feed, begin: Position, stop: Position) -> list[ShapeChange]:
        """The schema changes that become events. The history is ahead of the spool, so it contains everything visible
        there."""
        if not self._options.events.schema_events:
            return []
        feed.shapes.refresh()
        chains = parse_chains(self._options.chains)
        changes = (
            change for change in feed.shapes.between(begin, stop) if change.before is not None and diff_shapes(change)
        )
        return [without_hidden(change, chains) for change in changes]

    def _describe(self, feed: Feed, relations: list[Relation], stop: Position) -> Described:
        """Details of shapes as known up to `stop`, if the query's column `shape` or its chains need them."""
        needs_shapes = any(chain.needs_shapes for chain in parse_chains(self._options.chains))
        if "shape" not in self._schema.fieldNames() and not needs_shapes:
            return Described()
        feed.shapes.refresh()
        wanted = set(relations)
        known = [change for change in feed.shapes.changes if change.position <= stop and change.after in wanted]
        return Described(feed.database, tuple(known))

    def _look(self, feed: Feed, begin: Position) -> Position:
        """How far the spool reaches; waits briefly if nothing is new.

        In that case it also acknowledges what Spark has committed. Spark reports a commit only with its next batch,
        which may itself have to wait for room in the spool.
        """
        feed.spool.refresh()
        if feed.spool.end <= begin:
            if not self._options.run and begin > max(self._acked, self._told):
                feed.acknowledge(begin)
                self._told = begin
            feed.wait(LONG_POLL_S)
            feed.spool.refresh()
        return feed.spool.end

    def _wait_for(self, feed: Feed, position: Position) -> None:
        """After a restart Spark plans its unfinished batch immediately: wait for the capture, and never return a part
        of it."""
        feed.spool.refresh()
        while feed.spool.end < position:
            feed.wait(LONG_POLL_S, until=position)
            feed.spool.refresh()


def group_slices(slices: list[SegmentSlice], size: int) -> list[list[SegmentSlice]]:
    """The slices in order, in groups of about `size` bytes."""
    groups: list[list[SegmentSlice]] = []
    held = size
    for piece in slices:
        if held >= size:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += piece.written[0]
    return groups
