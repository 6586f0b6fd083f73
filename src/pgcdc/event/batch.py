"""The events of one batch, in the form that a sink takes: lines, records, fields, or table changes.

The source builds a form's columns for each chain that asks for it (`event.forms`); this module reads them. Masks,
drops, renames and routes are already applied. A sink that needs values takes `records`, `fields` or `tables`. Rendered
text is parsed only where nothing else exists: for dead letters (`event.changes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relation
from pgcdc.event.forms import RECORD, WITH_SHAPES, Form, form_column, read_shapes, render_changes
from pgcdc.event.lines import quote_json
from pgcdc.event.shape import TableShape

COMBINED_BYTES = 1 << 30  # Columns up to this size are combined into one: offsets have 32 bits

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Records:
    """One row per event, in stream order."""

    position: pa.ChunkedArray
    id: pa.ChunkedArray
    channel: pa.ChunkedArray
    operation: pa.ChunkedArray
    key: pa.ChunkedArray  # The values of the key columns as a JSON array; null if the event has no key
    key_hash: pa.ChunkedArray  # Equal for all events of one row; without a key, for all events of the table
    is_barrier: pa.ChunkedArray  # Everything before it must be written first, everything after it later
    value: pa.ChunkedArray  # The rendered event, without a newline
    traceparent: pa.ChunkedArray
    tracestate: pa.ChunkedArray


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes of one table in one shape, in stream order. A TRUNCATE is alone in its run and has no values."""

    relation: Relation
    """The shape after the chain's edits. `event.forms.has_key` says whether its rows have a key (no, if the chain drops
    part of it)."""
    details: Mapping[str, Any] | None
    """The catalog's description of this shape (`source.postgres.setup.shapes`), also after the edits."""
    op: npt.NDArray[np.uint8]  # See `core.operation.Op`
    rows: I64  # The numbers of these events in the batch
    new: list[pa.Array]  # For each column of `relation`, its values as text; NULL is null. For a DELETE all are null
    old: list[pa.Array]  # The values before the change, as far as `old_kind` says
    old_kind: npt.NDArray[np.uint8]  # See `core.operation.OldKind`
    unchanged: list[Bools | None]
    """For each column, which new values are unchanged TOAST: they were not sent, so null in `new` does not mean NULL."""
    old_unchanged: list[Bools | None]

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class Batch:
    """The events in (start, end], in stream order."""

    start: Position
    end: Position
    events: pa.Table  # One row per event: `position` (text that sorts in stream order) and the columns of the form
    shapes: Mapping[int, TableShape] = field(default_factory=dict)  # For table changes, by number
    transaction: bool = False  # Whether events include their transaction

    def __len__(self) -> int:
        return int(self.events.num_rows)

    @property
    def form(self) -> Form:
        names = self.events.column_names
        known: dict[str, Form] = {"line": "lines", "value": "records", "payload": "fields"}
        return next((form for name, form in known.items() if name in names), "tables")

    def positions(self) -> pa.ChunkedArray:
        return self.events.column("position")

    def after(self, ack: Position) -> Batch:
        """The same batch without the events that `ack` already covers."""
        if ack <= self.start:
            return self
        return replace(self, start=ack, events=self.events.filter(pc.greater(self.positions(), str(ack))))

    def up_to(self, end: Position) -> Batch:
        """The same batch without the events after `end`."""
        return replace(self, end=end, events=self.events.filter(pc.less_equal(self.positions(), str(end))))

    def first(self, count: int) -> Batch:
        """The first `count` events, or a few more: events that share a position stay together."""
        return self.slice(0, count)

    def slice(self, begin: int, end: int) -> Batch:
        """The events in [begin, end). A position that would be cut belongs entirely to the part in which it begins."""
        begin, end = self._boundary(begin), self._boundary(end)
        if begin == 0 and end == len(self):
            return self
        start, stop = self._reached(begin), self._reached(end)
        return replace(self, start=start, end=stop, events=self.events.slice(begin, max(0, end - begin)))

    def _reached(self, rows: int) -> Position:
        """The position where the first `rows` events end."""
        if 0 < rows < len(self):
            return Position.parse(self.positions()[rows - 1].as_py())
        return self.end if rows else self.start

    def _boundary(self, row: int) -> int:
        """The first index at or after `row` that does not split a position."""
        positions, total = self.positions(), len(self)
        while 0 < row < total and positions[row] == positions[row - 1]:
            row += 1
        return min(max(row, 0), total)

    def without(self, positions: Collection[str]) -> Batch:
        """The same batch without the events at these positions."""
        if not positions:
            return self
        is_out = pc.is_in(self.positions(), pa.array(sorted(positions), self.positions().type))
        return replace(self, events=self.events.filter(pc.invert(is_out)))

    def only(self, positions: Collection[str]) -> Batch:
        """The same batch with only the events at these positions."""
        is_in = pc.is_in(self.positions(), pa.array(sorted(positions), self.positions().type))
        return replace(self, events=self.events.filter(is_in))

    def lines(self) -> Iterator[memoryview]:
        """The rendered events, each with a newline, concatenated into one piece per chunk."""
        if self.form == "lines":
            return line_buffers(self.events.column("line").chunks)
        return (memoryview(f"{text}\n".encode()) for text in self.texts())

    def texts(self) -> list[str]:
        """The rendered events in any form, without newlines. For messages and dead letters, which are few."""
        if self.form == "lines":
            return [line.removesuffix("\n") for line in self.events.column("line").to_pylist()]
        if self.form == "records":
            return list(self.events.column("value").to_pylist())
        if self.form == "fields":
            return [_join_fields(one, transaction=self.transaction) for one in self.events.to_pylist()]
        found = (render_changes(part, self.shapes, transaction=self.transaction) for part in self._parts())
        return [text for texts in found for text in texts.to_pylist()]

    def records(self) -> Records:
        """The events with the fields that brokers, caches and HTTP need."""
        events = self.events if "value" in self.events.column_names else _bare_records(self.events)
        columns = {name: events.column(name) for name in Records.__slots__}
        barriers = columns["is_barrier"].to_numpy() | _new_shapes(events)
        columns["is_barrier"] = pa.chunked_array([pa.array(barriers)], pa.bool_())
        return Records(**columns)

    def tables(self) -> Iterator[TableChanges]:
        """Table changes, in stream order for each table. Each run has one shape of one table; a TRUNCATE is its own
        run. Events that change no table appear only in the form `changes`, with a made-up relation."""
        done = 0
        for part in self._parts():
            yield from _read_runs(part, done, self.shapes)
            done += part.num_rows

    def _parts(self) -> list[pa.RecordBatch]:
        is_small = self.events.nbytes < COMBINED_BYTES
        parts: list[pa.RecordBatch] = (self.events.combine_chunks() if is_small else self.events).to_batches()
        return parts


def _join_fields(event: Mapping[str, str | None], *, transaction: bool) -> str:
    """Build the text of an event from its fields."""
    if event["id"] is None:
        return str(event["payload"])
    texts = {name: quote_json(event[name]) for name in ("id", "channel", "operation")}
    texts["payload"] = str(event["payload"])
    texts |= {name: quote_json(event[name]) for name in ("source", "created_at", "position")}
    texts |= {"transaction": event["transaction"] or "null"} if transaction else {}
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def split_forms(
    batch: Batch,
    wanted: Sequence[tuple[int, Form]],
    beside: Sequence[Mapping[bytes, bytes]] = (),
    kept: Mapping[int, pa.ChunkedArray] | None = None,
) -> list[Batch]:
    """Split a batch that has a column per chain and form (`form_column`) into one batch per column. `kept`: for each
    chain, which of those events it keeps."""
    made: dict[tuple[int, Form], Batch] = {}
    for number, form in wanted:
        if (number, form) not in made:
            name = form_column(number, form)
            column, positions = batch.events.column(name), batch.positions()
            chosen = (kept or {}).get(number)
            if column.null_count:
                chosen = column.is_valid() if chosen is None else pc.and_(chosen, column.is_valid())
            if chosen is not None and not pc.all(chosen, skip_nulls=False).as_py():
                positions, column = positions.filter(chosen), column.filter(chosen)
            fields = [("line", column)] if form == "lines" else zip(column.type.names, column.flatten(), strict=True)
            texts = (one[name.encode()].decode() for one in beside if form in WITH_SHAPES)
            events = pa.table({"position": positions, **dict(fields)})
            made[number, form] = replace(batch, events=events, shapes=read_shapes(texts))
    return [made[one] for one in wanted]


def line_buffers(arrays: Iterable[pa.Array]) -> Iterator[memoryview]:
    """The bytes of text arrays, concatenated without copying."""
    for chunk in arrays:
        if len(chunk):
            offsets, data = chunk.buffers()[1:3]
            large = pa.types.is_large_string(chunk.type)
            view = memoryview(offsets).cast("q") if large else memoryview(offsets).cast("i")
            first, last = view[chunk.offset], view[chunk.offset + len(chunk)]
            yield memoryview(data)[first:last]


def _bare_records(lines: pa.Table) -> pa.Table:
    """Typed rows as records: without channel and key, so that all of them stay in order."""
    ids: list[str] = []
    number, positions = 0, lines.column("position").to_pylist()
    for before, position in zip([None, *positions], positions, strict=False):
        number = number + 1 if position == before else 0
        ids.append(f"{position}.{number}" if number else position)
    value = pc.utf8_rtrim(lines.column("line"), "\n")
    columns: dict[str, Any] = {"position": lines.column("position"), "id": pa.array(ids, pa.string()), "value": value}
    empty = {"channel": "", "operation": "", "key_hash": 0, "is_barrier": False, "relation": 0}
    for one in RECORD:
        columns.setdefault(one.name, pa.repeat(pa.scalar(empty.get(one.name), one.type), len(ids)))
    return pa.table(columns)


def _new_shapes(events: pa.Table) -> Bools:
    """Which events follow a change of their channel's shape: rows before them may have other keys."""
    versions = events.column("relation").to_numpy()
    result = np.zeros(len(versions), np.bool_)
    if len(versions) and (versions != versions[0]).any():
        channels = pc.dictionary_encode(events.column("channel")).combine_chunks().indices.to_numpy()
        order = np.argsort(channels, kind="stable")
        differs = (versions[order][1:] != versions[order][:-1]) & (channels[order][1:] == channels[order][:-1])
        result[order[1:][differs]] = True
    return result


def is_single(batch: Batch) -> bool:
    """Whether all events of a batch share one position, which cannot be split."""
    positions = batch.positions()
    return len(positions) > 0 and positions[0] == positions[len(positions) - 1]


def halve(batch: Batch) -> Batch:
    """About the first half of a batch; the whole batch if it has only one position."""
    positions = batch.positions().to_pylist()
    if is_single(batch) or not positions:
        return batch
    half = batch.first(max(1, len(positions) // 2))
    if len(half) == len(positions):  # the whole second half shares one position
        half = batch.first(positions.index(positions[-1]))
    return half


# --- tables


def _read_runs(part: pa.RecordBatch, done: int, shapes: Mapping[int, TableShape]) -> Iterator[TableChanges]:
    op: npt.NDArray[np.uint8] = part.column("op").to_numpy()
    version: npt.NDArray[np.int32] = part.column("relation").to_numpy()
    old_kind: npt.NDArray[np.uint8] = part.column("old_kind").to_numpy()
    numbers = np.unique(version)
    oids = np.array([shapes[number].relation.oid for number in numbers.tolist()], np.int64)
    table = oids[np.searchsorted(numbers, version)]
    runs: list[npt.NDArray[np.int64]] = []
    for oid in np.unique(oids):
        rows = np.flatnonzero(table == oid)
        alone: Bools = op[rows] == Op.TRUNCATE
        begins = (version[rows][1:] != version[rows][:-1]) | alone[1:] | alone[:-1]
        runs += np.split(rows, np.flatnonzero(begins) + 1)
    sides = {side: _Side(part.column(side)) for side in ("new", "old")}
    marks = _Marks(part.column("unchanged"))
    for rows in sorted(runs, key=lambda one: int(one[0])):
        shape = shapes[int(version[rows[0]])]
        count = len(shape.relation.columns)
        yield TableChanges(
            shape.relation,
            shape.details,
            op[rows],
            rows + done,
            [sides["new"].column(rows, index) for index in range(count)],
            [sides["old"].column(rows, index) for index in range(count)],
            old_kind[rows],
            [marks.column(rows, index) for index in range(count)],
            [marks.column(rows, -1 - index) for index in range(count)],
        )


class _Side:
    """Rows as lists of values, from which columns are extracted."""

    def __init__(self, lists: pa.Array) -> None:
        self._values = lists.values
        self._begins: npt.NDArray[np.int32] = lists.offsets.to_numpy()[:-1]
        self._is_null: Bools = lists.is_null().to_numpy(zero_copy_only=False)

    def column(self, rows: I64, index: int) -> pa.Array:
        is_null = self._is_null[rows]
        if is_null.all():
            return pa.nulls(len(rows), pa.string())
        return self._values.take(pa.array(self._begins[rows] + index, mask=is_null if is_null.any() else None))


class _Marks:
    """Which values are unchanged TOAST."""

    def __init__(self, lists: pa.Array) -> None:
        self._rows: I64 = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
        self._columns: I64 = pc.list_flatten(lists).to_numpy().astype(np.int64)

    def column(self, rows: I64, number: int) -> Bools | None:
        mine = self._rows[self._columns == number]
        found: Bools = np.isin(rows, mine)
        return found if found.any() else None
