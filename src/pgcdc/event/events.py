"""From segments to events: columns for Spark and forms for sinks, built from column buffers without a Python step per
row. A query that asks for fewer columns (`.schema("position STRING, line STRING")`) does not pay for the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.relation import Relation, ShapeChange
from pgcdc.event.columns import CHANGEABLE, ColumnReader, key_maps, row_and_old, shape_texts, unchanged_names
from pgcdc.event.edits import SimpleChain
from pgcdc.event.envelopes import render_cloudevents, render_debezium
from pgcdc.event.forms import (
    FORMS,
    WITH_SHAPES,
    Form,
    event_column,
    find_barriers,
    form_column,
    form_of,
    key_hashes,
    make_fields,
    make_record,
    make_table,
    shapes_of,
)
from pgcdc.event.frame import Edit, EventOptions, Frame, load_frame
from pgcdc.event.lines import (
    OPERATION_OF,
    OPERATIONS,
    IdSeed,
    Layout,
    event_fields,
    event_ids,
    event_layout,
    places,
    position_texts,
    render,
)
from pgcdc.spool.reader import SegmentSlice

COMPRESS_BYTES = 64 << 10
PIECE_BYTES = 4 << 20
BLOCKS = "block BINARY, is_last BOOLEAN"
"""Events in packed blocks, for a lane that only passes them on. A row holds many events (`unpack_blocks`) or a piece of
such a block. Spark moves a block nearly as cheaply as one event (docs/decisions/0009)."""
LINES = pa.schema([("position", pa.string()), ("line", pa.string())])  # Used in blocks, and for sinks that take lines
KEYED_BLOCKS = "keyed_block BINARY, is_last BOOLEAN"
"""Blocks of keyed lines, for a lane whose executors may write to the sink (`stream.parallel`)."""
_KEYED = pa.schema([("key_hash", pa.int64()), ("is_barrier", pa.bool_())])
KEYED_LINES = pa.schema([*LINES, *_KEYED])


def event_batch(
    pieces: Sequence[SegmentSlice],
    relations: list[Relation],
    seed: IdSeed,
    schema: pa.Schema,
    options: EventOptions = EventOptions(),  # noqa: B008 - frozen
    schema_changes: Sequence[ShapeChange] = (),
    chains: Sequence[SimpleChain] = (),
) -> pa.RecordBatch | None:
    """The events of adjacent slices as one record batch with exactly `schema`; None if there are none."""
    frame = load_frame(pieces, relations, options, schema_changes)
    return None if frame is None else events_of(frame, seed, schema, options, chains)


def events_of(
    frame: Frame,
    seed: IdSeed | None,
    schema: pa.Schema,
    options: EventOptions,
    chains: Sequence[SimpleChain] = (),
    given: Mapping[str, pa.Array] | None = None,
) -> pa.RecordBatch:
    """The events of a frame as one record batch with exactly `schema`. `given` columns are used as they are; ids must
    be given unless there is a seed."""
    events = EventColumns(frame, seed, options, chains, given)
    arrays = [_as_type(events.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.with_metadata(events.shapes(schema.names) or None))


def render_columns(
    events: pa.RecordBatch, steps: Sequence[Mapping[str, Any]] = (), *, transaction: bool = False
) -> pa.Array:
    """The text of events given as columns: their JSON, or their envelope; null where an envelope has none."""
    frame, given = ColumnReader().read(events)
    made = EventColumns(frame, None, EventOptions(transaction), [SimpleChain((), tuple(steps))], given)
    return made.rendered(0, "")


def edit_columns(events: pa.RecordBatch, steps: Sequence[Mapping[str, Any]]) -> pa.Array:
    """The changeable columns of events (and `shape`) after simple steps, as structs; null: dropped."""
    frame, given = ColumnReader().read(events)
    chain = SimpleChain((), tuple(steps), ("shapes",) if "shape" in events.schema.names else ())
    return EventColumns(frame, None, EventOptions(), [chain], given).column(event_column(0))


def block_schema(chains: Sequence[SimpleChain], *, keyed: bool = False) -> pa.Schema:
    """The schema of a block for these chains (LINES if there are none); with `keyed`, that of a keyed block."""
    made = [
        (form_column(number, form), FORMS[form]) for number, chain in enumerate(chains) for form in _forms(chain.forms)
    ]
    plain = pa.schema([("position", pa.string()), *made]) if made else LINES
    return pa.schema([*plain, *_KEYED]) if keyed else plain


def _forms(names: Iterable[str]) -> list[Form]:
    return [form for form in FORMS if form in names]


def drop_unwanted(events: pa.RecordBatch) -> pa.RecordBatch:
    """The events without those that every chain drops."""
    made = [events.column(name) for name in events.schema.names if form_of(name) is not None]
    if any(not column.null_count for column in made):
        return events
    wanted = made[0].is_valid()
    for column in made[1:]:
        wanted = pc.or_(wanted, column.is_valid())
    return events.filter(wanted)


def columns_for(schema: pa.Schema, chains: Sequence[SimpleChain]) -> pa.Schema:
    """The columns from which `rows_for` builds rows of this schema."""
    if schema.names[0] not in ("block", "keyed_block"):
        return schema
    return pa.schema([*block_schema(chains, keyed=schema.names[0] == "keyed_block"), *list(schema)[2:]])


def rows_for(schema: pa.Schema, events: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Events as rows of a source with this schema: packed into blocks, or unchanged."""
    if schema.names[0] not in ("block", "keyed_block"):
        yield events
        return
    beside = events.select(schema.names[2:])
    inside = [name for name in events.schema.names if name not in beside.schema.names]
    for piece in pack_block(events.select(inside), schema.names[0]):
        yield pa.RecordBatch.from_arrays([*piece.columns, *(pa.nulls(1, one.type) for one in beside)], schema.names)
    if beside.num_columns:  # after each block, one row for each of its events
        count = events.num_rows
        none = [pa.nulls(count, pa.binary()), pa.nulls(count, pa.bool_())]
        yield pa.RecordBatch.from_arrays([*none, *beside.columns], schema.names)


def pack_block(events: pa.RecordBatch, name: str = "block") -> Iterator[pa.RecordBatch]:
    """`events`, in any schema, as an Arrow stream: one row, or several if it is large (200 MB in one row would be too
    much). Compressed if that saves space: the JVM copies it about ten times, and collecting that garbage cost more than
    everything else."""
    options = pa.ipc.IpcWriteOptions(compression="lz4" if events.nbytes >= COMPRESS_BYTES else None)
    target = pa.BufferOutputStream()
    with pa.ipc.new_stream(target, events.schema, options=options) as stream:
        stream.write_batch(events)
    data = target.getvalue()
    for begin in range(0, data.size, PIECE_BYTES):
        piece = data.slice(begin, min(PIECE_BYTES, data.size - begin))
        ends = pa.array([0, piece.size], pa.int32()).buffers()[1]
        block = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, ends, piece])
        yield pa.RecordBatch.from_arrays([block, pa.array([begin + piece.size == data.size])], [name, "is_last"])


def unpack_blocks(
    blocks: pa.Table, chains: Sequence[SimpleChain] = (), *, keyed: bool = False
) -> tuple[pa.Table, list[dict[bytes, bytes]]]:
    """The events of collected blocks, in order, in the `block_schema`; and each block's other columns."""
    schema = block_schema(chains, keyed=keyed)
    batches = [batch.select(schema.names) for batch in open_blocks(blocks.to_batches())]
    metadata = [batch.schema.metadata for batch in batches if batch.schema.metadata]
    return pa.Table.from_batches([batch.replace_schema_metadata() for batch in batches], schema), metadata


def open_blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The content of the blocks, in order. A block may span several consecutive rows."""
    pieces: list[pa.Buffer] = []
    for batch in batches:
        for block, is_last in zip(batch.column(0), batch.column("is_last"), strict=True):
            pieces.append(block.as_buffer())
            if is_last.as_py():
                yield from pa.ipc.open_stream(pieces[0] if len(pieces) == 1 else pa.py_buffer(b"".join(pieces)))
                pieces = []


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


class EventColumns:
    """The columns of a frame's events, each built on first use."""

    def __init__(
        self,
        frame: Frame,
        seed: IdSeed | None,
        options: EventOptions,
        chains: Sequence[SimpleChain] = (),
        given: Mapping[str, pa.Array] | None = None,
    ) -> None:
        self._frame = frame
        self._seed = seed
        self._options = options
        self._chains = chains
        self._made = dict(given or {})
        self._layouts: dict[str, Layout] = {}
        self._edits: dict[int, Edit] = {}
        self._frames: dict[int, Frame] = {}

    def column(self, name: str) -> pa.Array:
        if name not in self._made:
            wanted = form_of(name)
            self._made[name] = self._make(name) if wanted is None else self._form(*wanted)
        return self._made[name]

    def shapes(self, columns: Iterable[str]) -> dict[str, str]:
        """The table descriptions that columns with table changes need."""
        wanted = {name: form_of(name) or (0, None) for name in columns}
        return {name: shapes_of(self._behind(one)) for name, (one, form) in wanted.items() if form in WITH_SHAPES}

    def _form(self, number: int, form: Form | None) -> pa.Array:
        if form == "lines":
            return self.rendered(number, "\n")
        if form == "fields" and self._chains[number].envelope is not None:
            return make_fields({"payload": self.rendered(number, "")})
        if form == "fields":
            known = {name: self.column(name) for name in ("id", "channel", "operation", "source")}
            more = event_fields(self._frame, self._edit(number), transaction=self._options.transaction)
            return make_fields(known | more)
        behind, keep = self._behind(number), self._edit(number).keep
        if form in WITH_SHAPES:
            return make_table(behind, keep, self.column("id"), only_tables=form == "tables")
        if form == "records":
            names = ("id", "channel", "operation", "key_hash", "is_barrier", "relation")
            return make_record(behind, self.rendered(number, ""), {name: self.column(name) for name in names})
        events, chain = EventColumns(behind, self._seed, self._options), self._chains[number]
        # The columns that a condition reads, or those that Spark may change.
        shown = chain.asked or [*CHANGEABLE, *(["shape"] if chain.needs_shapes else [])]
        is_out = None if keep is None else pa.array(keep == 0)
        return pa.StructArray.from_arrays([events.column(name) for name in shown], shown, mask=is_out)

    def rendered(self, number: int, end: str) -> pa.Array:
        """The texts of a chain's events; null where it drops the event."""
        chain, edit = self._chains[number], self._edit(number)
        if chain.envelope is None:
            return render(self._frame, self._layout(end), edit)
        step = chain.envelope
        if step["type"] == "cloudevents":
            return render_cloudevents(self._frame, edit, step, self.column("id"), self.column("position"), end)
        ordinals = self.column("table_ordinal") if step["transaction"] else None
        return render_debezium(self._behind(number), edit.keep, step, ordinals, end)

    def _edit(self, number: int) -> Edit:
        if number not in self._edits:
            self._edits[number] = self._chains[number].edit(self._frame)
        return self._edits[number]

    def _behind(self, number: int) -> Frame:
        if number not in self._frames:
            self._frames[number] = self._chains[number].apply(self._frame, self._edit(number))
        return self._frames[number]

    def _layout(self, end: str) -> Layout:
        if end not in self._layouts:
            ids, positions = self.column("id"), self.column("position")
            made = event_layout(self._frame, ids, positions, transaction=self._options.transaction, end=end)
            self._layouts[end] = made
        return self._layouts[end]

    def _pick(self, texts: Sequence[str | None]) -> pa.Array:
        return pa.array(texts, pa.string()).take(pa.array(self._frame.version))

    @cached_property
    def _sides(self) -> tuple[pa.Array, pa.Array]:
        return row_and_old(self._frame)

    def _make(self, name: str) -> pa.Array:
        frame = self._frame
        match name:
            case "id":
                assert self._seed is not None
                return event_ids(self._seed, frame.commit, frame.kind, frame.ordinal, frame.sub, frame.commit_time)
            case "channel":
                return self._pick(frame.channels)
            case "operation":
                return pa.array(OPERATIONS).take(pa.array(OPERATION_OF[frame.op]))
            case "schema":
                return self._pick([shape.namespace if shape.oid else None for shape in frame.shapes])
            case "table":
                return self._pick([shape.name if shape.oid else None for shape in frame.shapes])
            case "row" | "old":
                return self._sides[name == "old"]
            case "unchanged_toast_columns":
                return unchanged_names(frame)
            case "source":
                return pa.repeat(frame.source, len(frame))
            case "created_at":
                times = pa.array(frame.commit_time, mask=frame.is_alone if frame.is_alone.any() else None)
                return times.cast(pa.timestamp("us", tz="UTC"))
            case "position":
                return position_texts(frame.commit, frame.kind, frame.ordinal, frame.sub)
            case "lsn":
                return pa.array(frame.commit)
            case "ordinal":
                return pa.array(places(frame.kind, frame.ordinal))
            case "xid" | "origin":
                return frame.owners.column(name)
            case "key":
                return key_maps(frame)
            case "key_hash":
                return pa.array(key_hashes(frame))
            case "is_barrier":
                return pa.array(find_barriers(frame))
            case "json" | "line":
                return render(frame, self._layout("\n" if name == "line" else ""))
            case "shape":
                return self._pick(shape_texts(frame))
            case "relation":
                return pa.array(frame.version)
            case "table_ordinal":
                return _numbered_by_table(frame)
        raise KeyError(name)


def _numbered_by_table(frame: Frame) -> pa.Array:
    """Number row changes by transaction and table, from 1; NULL in a transaction that began before this frame."""
    tables = np.array([shape.oid for shape in frame.shapes], np.int64)[frame.version]
    is_row = (frame.sub == 0) & (tables != 0)
    rows = np.flatnonzero(is_row)
    is_next = (np.diff(frame.commit) != 0) | (np.diff(frame.kind) != 0)
    of_row = np.append(0, np.cumsum(is_next))  # the index of each row's transaction, in the frame's order
    order = rows[np.lexsort((frame.ordinal[rows], tables[rows], of_row[rows]))]
    owner, table = of_row[order], tables[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (owner[1:] != owner[:-1]) | (table[1:] != table[:-1])
    places = np.arange(len(order))
    numbers = np.zeros(len(frame), np.int64)
    numbers[order] = places - np.maximum.accumulate(np.where(is_first, places, 0)) + 1
    begun = np.unique(of_row[is_row & (frame.ordinal == 1)])
    return pa.array(numbers, mask=~(is_row & np.isin(of_row, begun)))
