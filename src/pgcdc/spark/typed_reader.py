"""The reader of a typed query: one table. A batch never crosses a change of its columns."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from pgcdc.core.errors import SchemaChanged
from pgcdc.core.position import SCHEMA_SUB, Kind, Position
from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.core.state import StateDir
from pgcdc.event.shape import diff_shapes
from pgcdc.event.typed import LOAD_AGAIN, TypedTable, heartbeat_batch, typed_batch
from pgcdc.postgres.database import name_table
from pgcdc.spark.capture_client import Feed
from pgcdc.spark.options import StreamOptions
from pgcdc.spark.source import RECORD_BATCH_BYTES, ChangePartition, ChangeReader, group_slices
from pgcdc.spark.tables import RENAMED_ADVICE, remember_table
from pgcdc.spool.reader import SegmentSlice, read_slice

CLOCK_POLL_S = 1.0


@dataclass
class TypedPartition(ChangePartition):
    """What one task reads of a table."""

    versions: dict[int, Relation] = field(default_factory=dict)  # The shapes of the table, by version
    heartbeat: tuple[Position, int] | None = None
    """Sent at the end of the batch: the stream's time, in microseconds since 1970."""
    snapshot_end: Position = Position.at(0, 0)  # noqa: RUF009 - frozen
    """Snapshot rows up to here belong to the initial snapshot."""


class TypedReader(ChangeReader):
    """Serves the changes of one table as typed rows."""

    def __init__(self, options: StreamOptions, schema: StructType, table: TypedTable) -> None:
        super().__init__(options, schema)
        self._table = table
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        self._times: deque[tuple[Position, int]] = deque()
        self._clock_due = 0.0
        self._snapshot_end: Position | None = None

    def _open(self) -> Feed:
        is_first = self._feed is None
        feed = super()._open()
        if is_first and self._table.is_whole and not self._options.spool:
            remember_table(StateDir(self._options.state_dir), self._options.consumer, self._table)
        return feed

    # --- the ends of batches

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        end = dict(super().latestOffset(start, limit))
        if self._options.heartbeat_s:
            end["time"] = self._time_at(start, Position.from_offset(end))
        return end

    def _limit(self, feed: Feed, begin: Position, end: Position) -> Position:
        """End a batch before the table gets columns that the query does not have, and start none there."""
        feed.shapes.refresh()
        others = self._other_versions(feed, begin)
        if not others:
            return end
        for piece in feed.spool.slices(begin, end):
            found = _first_of(piece, others)
            if found is None:
                continue
            place, shape = found
            if place > begin:
                return place
            if not self._options.run:
                feed.acknowledge(begin)  # Spark has committed it: the next load starts with the columns in force here
            raise self._explain(shape, place)
        return end

    def _other_versions(self, feed: Feed, begin: Position) -> dict[int, Relation]:
        """Shapes of the table's rows after `begin` that the query cannot read."""
        numbers = {shape: number for number, shape in enumerate(feed.spool.relations())}
        others = {}
        for change in feed.shapes.reachable(begin):
            number = numbers.get(change.after)
            if number is None or not change.concerns(self._table.namespace, self._table.name):
                continue
            if not self._table.is_named(change.after) or not self._can_read(change):
                others[number] = change.after
        return others

    def _can_read(self, change: ShapeChange) -> bool:
        if not self._options.rows.other_shapes:
            return not self._table.explain(change.after)
        renamed = [one for one in diff_shapes(change) if one["type"] == "column_renamed"]
        return self._table.can_read(change.after) and not any(one["from"] in self._table.by_name for one in renamed)

    def _explain(self, shape: Relation, place: Position) -> SchemaChanged:
        table = self._table
        if not table.is_named(shape):
            now = name_table(shape.namespace, shape.name)
            return SchemaChanged(f"table {table.title} is {now} from {place} on", RENAMED_ADVICE)
        if self._acked > place:
            return SchemaChanged(
                f"table {table.title} has other columns at {place} than at {self._acked}, where consumer "
                f"{self._options.consumer!r} has acknowledged: the checkpoint is older than that",
                "Restore the checkpoint that belongs to this state directory, or start with a new consumer",
            )
        advice = f"{LOAD_AGAIN} and start the query with the same checkpoint: it continues there, with the new columns"
        if self._options.rows.other_shapes:
            advice += ". Renamed columns and columns whose new type does not fit cannot be ignored"
        else:
            advice += (
                ". To continue with the old columns (dropped ones become NULL, renamed ones still stop the "
                "query), set option('schema_change', 'ignore')"
            )
        return SchemaChanged(f"table {table.title} has other columns from {place} on: {table.explain(shape)}", advice)

    # --- tasks

    def _divide(self, feed: Feed, start: dict[str, Any], end: dict[str, Any]) -> list[ChangePartition]:
        found = super()._divide(feed, start, end)
        if end.get("time", 0) > start.get("time", 0):
            stop = Position.from_offset(end)
            last = found.pop() if found else self._plan(feed, stop, stop)
            assert isinstance(last, TypedPartition)
            found.append(replace(last, heartbeat=(stop, int(end["time"]))))
        return found

    def _plan(self, feed: Feed, begin: Position, stop: Position) -> ChangePartition:
        if self._snapshot_end is None:
            self._snapshot_end = feed.settled().initial_end
        return TypedPartition(
            feed.seed,
            socket.gethostname(),
            versions={n: shape for n, shape in enumerate(feed.spool.relations()) if self._table.is_named(shape)},
            snapshot_end=self._snapshot_end or Position.behind(feed.created),
        )

    def _batches(self, partition: ChangePartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TypedPartition)
        options = replace(self._options.rows, snapshot_end=partition.snapshot_end)
        for pieces in group_slices(partition.slices, RECORD_BATCH_BYTES):
            with self._readable(partition, pieces):
                batch = typed_batch(pieces, partition.versions, self._table, self._arrow, options)
            if batch is not None:
                yield batch
        if partition.heartbeat is not None:
            yield heartbeat_batch(*partition.heartbeat, self._arrow)

    # --- time

    def _time_at(self, start: dict[str, Any], end: Position) -> int:
        """The stream's time at `end`: everything committed before it has been read. Advances by at least the
        interval."""
        now = time.monotonic()
        if now >= self._clock_due and (self._target is None or end < self._target):
            self._clock_due = now + CLOCK_POLL_S
            reading = self._open().clock()
            if reading is not None and (not self._times or reading[1] > self._times[-1][1]):
                self._times.append(reading)
        before = int(start.get("time", 0))
        known = before
        while self._times and self._times[0][0] <= end:
            known = max(known, self._times.popleft()[1])
        if known - before >= self._options.heartbeat_s * 1_000_000:
            return known
        if known > before:
            self._times.appendleft((Position.at(0, 0), known))
        return before


def _first_of(piece: SegmentSlice, versions: dict[int, Relation]) -> tuple[Position, Relation] | None:
    """The position directly before the first change in one of these shapes."""
    changes, owners = read_slice(piece)
    numbers = changes.column("relation").to_numpy()
    rows = np.flatnonzero(np.isin(numbers, list(versions)))
    if not len(rows):
        return None
    row = int(rows[0])
    commit, kind = (owners.column(name)[row].as_py() for name in ("commit", "kind"))
    place = Position(commit, Kind(kind), changes.column("ordinal")[row].as_py() - 1, SCHEMA_SUB)
    return place, versions[int(numbers[row])]
