"""From segments to events: the columns that Spark sees, made from column buffers without a Python step per row.

The event shape is one schema for all tables: `row` and `old` are maps with PostgreSQL's own text, so that transforms are
native Spark expressions. A query that asks for fewer columns (`.schema("position STRING, line STRING")`) pays for no other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.operation import OldKind, Op
from pgcdc.core.relation import Relation
from pgcdc.core.shapes import ShapeChange
from pgcdc.event.edits import Edit, SimpleChain
from pgcdc.event.envelopes import render_envelope
from pgcdc.event.forms import FORMS, Form, TableShape, form_column, form_of, make_record, make_table, shapes_of
from pgcdc.event.frame import EventOptions, Frame, load_frame
from pgcdc.event.keys import find_barriers, key_hashes
from pgcdc.event.lines import OPERATION_OF, OPERATIONS, SOURCE_NAME, LineMaker
from pgcdc.event.shape import SHAPE, shape_array
from pgcdc.event.texts import I64, IdSeed, event_ids, places, position_texts
from pgcdc.spool.reader import SegmentSlice

__all__ = [
    "BLOCKS",
    "EVENT_COLUMNS",
    "EVENT_SCHEMA",
    "KEYED_BLOCKS",
    "KEYED_LINES",
    "KEY_COLUMNS",
    "LINES",
    "PIECE_BYTES",
    "RELATION_COLUMNS",
    "SHAPE_COLUMNS",
    "SHAPE_SCHEMA",
    "TEXT_COLUMNS",
    "block_schema",
    "drop_unwanted",
    "event_batch",
    "events_of",
    "open_blocks",
    "pack_block",
    "unpack_blocks",
]

EVENT_COLUMNS = {
    "id": "string",
    "channel": "string",
    "operation": "string",
    "schema": "string",
    "table": "string",
    "row": "map<string,string>",
    "old": "map<string,string>",
    "unchanged_toast_columns": "array<string>",
    "source": "string",
    "created_at": "timestamp",
    "position": "string",
    "lsn": "bigint",
    "ordinal": "bigint",
    "xid": "bigint",
    "origin": "string",
}
"""The columns of an event and their types, as Spark writes them."""
TEXT_COLUMNS = {"json": "string", "line": "string"}
"""The whole event as JSON text, without and with a newline: only for those who ask for it."""
SHAPE_COLUMNS = {"shape": SHAPE, "table_ordinal": "bigint"}
"""What envelopes need besides: the table's columns with their types, and which of its transaction's changes of this table a
change is, from 1. Only for those who ask for it."""
KEY_COLUMNS = {"key": "map<string,string>", "key_hash": "bigint", "is_barrier": "boolean"}
"""What tells which events must stay in order (`stream.keys`): only for those who ask for it."""
RELATION_COLUMNS = {"relation": "string"}
"""The table's shape as JSON (`event.forms.TableShape`), for forms that are made behind Spark."""
COMPRESS_BYTES = 64 << 10
PIECE_BYTES = 4 << 20
BLOCKS = "block BINARY, is_last BOOLEAN"
"""Rows in blocks, for a lane that only hands them on: each row is many events, packed (`unpack_blocks`), or a piece of that.

Spark moves a block nearly as cheaply as a single event (docs/decisions/0009).
"""
LINES = pa.schema([("position", pa.string()), ("line", pa.string())])
"""What is in a block, and what sinks of lines take."""
KEYED_BLOCKS = "keyed_block BINARY, is_last BOOLEAN"
"""Blocks of keyed lines, for a lane that may have executors write (`stream.parallel`)."""
_KEYED = pa.schema([("key_hash", pa.int64()), ("is_barrier", pa.bool_())])
KEYED_LINES = pa.schema([*LINES, *_KEYED])
EVENT_SCHEMA = ", ".join(f"{name} {kind.upper()}" for name, kind in EVENT_COLUMNS.items())
"""The columns of an event, as Spark DDL."""

SHAPE_SCHEMA = "".join(f", {name} {kind}" for name, kind in SHAPE_COLUMNS.items())
"""SHAPE_COLUMNS as Spark DDL, to be put behind EVENT_SCHEMA."""

Bools = npt.NDArray[np.bool_]


def event_batch(
    pieces: Sequence[SegmentSlice],
    relations: list[Relation],
    seed: IdSeed,
    schema: pa.Schema,
    options: EventOptions = EventOptions(),  # noqa: B008 - frozen
    schema_changes: Sequence[ShapeChange] = (),
    chains: Sequence[SimpleChain] = (),
) -> pa.RecordBatch | None:
    """The events of neighbouring slices as one record batch with exactly `schema`; None if they have none."""
    frame = load_frame(pieces, relations, options, schema_changes)
    return None if frame is None else events_of(frame, seed, schema, options, chains)


def events_of(
    frame: Frame, seed: IdSeed, schema: pa.Schema, options: EventOptions, chains: Sequence[SimpleChain] = ()
) -> pa.RecordBatch:
    """The events of a frame as one record batch with exactly `schema`."""
    events = _Events(frame, seed, options, chains)
    arrays = [_as_type(events.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.with_metadata(events.shapes(schema.names) or None))


def block_schema(chains: Sequence[SimpleChain], *, keyed: bool = False) -> pa.Schema:
    """What is in a block for these chains (LINES if there is none), and in a keyed one."""
    made = [
        (form_column(number, form), FORMS[form]) for number, chain in enumerate(chains) for form in _forms(chain.forms)
    ]
    plain = pa.schema([("position", pa.string()), *made]) if made else LINES
    return pa.schema([*plain, *_KEYED]) if keyed else plain


def _forms(names: Iterable[str]) -> list[Form]:
    return [form for form in FORMS if form in names]


def drop_unwanted(events: pa.RecordBatch) -> pa.RecordBatch:
    """`events`, in a `block_schema`, without those that no chain has."""
    made = [events.column(name) for name in events.schema.names if form_of(name) is not None]
    if any(not column.null_count for column in made):
        return events
    wanted = made[0].is_valid()
    for column in made[1:]:
        wanted = pc.or_(wanted, column.is_valid())
    return events.filter(wanted)


def pack_block(events: pa.RecordBatch, name: str = "block") -> Iterator[pa.RecordBatch]:
    """`events`, in any schema, as an Arrow stream: one row, or several if it is large (a row of 200 MB, say).

    Compressed if it pays: the JVM copies it about ten times, and collecting that garbage cost more than all else.
    """
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


def unpack_blocks(blocks: pa.Table, chains: Sequence[SimpleChain] = ()) -> tuple[pa.Table, list[dict[bytes, bytes]]]:
    """The events of collected blocks, in order, in the `block_schema`, and what stands beside them in each."""
    schema = block_schema(chains)
    batches = [batch.select(schema.names) for batch in open_blocks(blocks.to_batches())]
    metadata = [batch.schema.metadata for batch in batches if batch.schema.metadata]
    return pa.Table.from_batches([batch.replace_schema_metadata() for batch in batches], schema), metadata


def open_blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What is in the blocks, one after the other. A block may be in several rows, which follow each other."""
    pieces: list[pa.Buffer] = []
    for batch in batches:
        for block, is_last in zip(batch.column(0), batch.column("is_last"), strict=True):
            pieces.append(block.as_buffer())
            if is_last.as_py():
                yield from pa.ipc.open_stream(pieces[0] if len(pieces) == 1 else pa.py_buffer(b"".join(pieces)))
                pieces = []


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


class _Events:
    """The columns of the events of a frame, each made when it is asked for, and once."""

    def __init__(self, frame: Frame, seed: IdSeed, options: EventOptions, chains: Sequence[SimpleChain]) -> None:
        self._frame = frame
        self._seed = seed
        self._options = options
        self._chains = chains
        self._made: dict[str, pa.Array] = {}
        self._makers: dict[str, LineMaker] = {}
        self._edits: dict[int, Edit] = {}

    def column(self, name: str) -> pa.Array:
        if name not in self._made:
            wanted = form_of(name)
            if wanted is not None:
                self._made[name] = self._form(*wanted)
            else:
                _MAKERS[name](self)
        return self._made[name]

    def shapes(self, columns: Iterable[str]) -> dict[str, str]:
        """What the columns with changes of tables need beside them."""
        wanted = {name: found for name in columns if (found := form_of(name)) is not None and found[1] == "tables"}
        return {name: shapes_of(self._frame, self._chains[one], self._options) for name, (one, _) in wanted.items()}

    def _form(self, number: int, form: Form) -> pa.Array:
        frame, edit = self._frame, self._edit(number)
        if form == "lines":
            return self._rendered(number, edit, "\n")
        if form == "tables":
            return make_table(frame, edit, self.column("id"))
        known = {name: self.column(name) for name in ("id", "channel", "operation", "key_hash")}
        return make_record(frame, edit, self._rendered(number, edit, ""), known)

    def _rendered(self, number: int, edit: Edit, end: str) -> pa.Array:
        chain = self._chains[number]
        if chain.envelope is None:
            return self._line_maker(end).lines(edit)
        columns = {name: self.column(name) for name in ("id", "position", "table_ordinal")}
        return render_envelope(self._frame, chain, edit, self._options, columns, end)

    def _edit(self, number: int) -> Edit:
        if number not in self._edits:
            self._edits[number] = self._chains[number].edit(self._frame)
        return self._edits[number]

    def _line_maker(self, end: str) -> LineMaker:
        if end not in self._makers:
            ids, positions = self.column("id"), self.column("position")
            maker = LineMaker(self._frame, ids, positions, transaction=self._options.transaction, end=end)
            self._makers[end] = maker
        return self._makers[end]

    def _ids(self) -> None:
        frame = self._frame
        self._made["id"] = event_ids(self._seed, frame.commit, frame.kind, frame.ordinal, frame.sub, frame.commit_time)

    def _channels(self) -> None:
        self._made["channel"] = self._pick([shape.channel for shape in self._frame.shapes])

    def _operations(self) -> None:
        self._made["operation"] = pa.array(OPERATIONS).take(pa.array(OPERATION_OF[self._frame.op]))

    def _schemas(self) -> None:
        self._made["schema"] = self._pick([shape.namespace if shape.oid else None for shape in self._frame.shapes])

    def _tables(self) -> None:
        self._made["table"] = self._pick([shape.name if shape.oid else None for shape in self._frame.shapes])

    def _rows(self) -> None:
        self._made["row"], self._made["old"] = _row_and_old(self._frame)

    def _unchanged(self) -> None:
        self._made["unchanged_toast_columns"] = _unchanged_names(self._frame)

    def _sources(self) -> None:
        self._made["source"] = pa.array([SOURCE_NAME]).take(pa.array(np.zeros(len(self._frame), np.int32)))

    def _times(self) -> None:
        alone = self._frame.is_alone
        times = pa.array(self._frame.commit_time, mask=alone if alone.any() else None)
        self._made["created_at"] = times.cast(pa.timestamp("us", tz="UTC"))

    def _positions(self) -> None:
        frame = self._frame
        self._made["position"] = position_texts(frame.commit, frame.kind, frame.ordinal, frame.sub)

    def _numbers(self) -> None:
        frame = self._frame
        self._made["lsn"], self._made["ordinal"] = pa.array(frame.commit), pa.array(places(frame.kind, frame.ordinal))

    def _owners(self) -> None:
        self._made["xid"], self._made["origin"] = self._frame.owners.column("xid"), self._frame.owners.column("origin")

    def _keys(self) -> None:
        self._made["key"] = _keys_of(self._frame)

    def _hashes(self) -> None:
        self._made["key_hash"] = pa.array(key_hashes(self._frame))

    def _barriers(self) -> None:
        self._made["is_barrier"] = pa.array(find_barriers(self._frame))

    def _text(self, name: str) -> None:
        self._made[name] = self._line_maker("\n" if name == "line" else "").lines()

    def _shapes(self) -> None:
        frame = self._frame
        self._made["shape"] = shape_array(frame.shapes, self._options.described).take(pa.array(frame.version))

    def _relations(self) -> None:
        details = {change.after: change.details for change in self._options.described.changes}
        texts = [
            json.dumps(TableShape(shape, details.get(shape)).to_json()) if shape.oid else None
            for shape in self._frame.shapes
        ]
        self._made["relation"] = self._pick(texts)

    def _table_ordinals(self) -> None:
        self._made["table_ordinal"] = _numbered_by_table(self._frame)

    def _pick(self, names: list[str | None]) -> pa.Array:
        return pa.array(names, pa.string()).take(pa.array(self._frame.version))


_MAKERS: dict[str, Callable[[_Events], None]] = {
    "id": _Events._ids,
    "channel": _Events._channels,
    "operation": _Events._operations,
    "schema": _Events._schemas,
    "table": _Events._tables,
    "row": _Events._rows,
    "old": _Events._rows,
    "unchanged_toast_columns": _Events._unchanged,
    "source": _Events._sources,
    "created_at": _Events._times,
    "position": _Events._positions,
    "lsn": _Events._numbers,
    "ordinal": _Events._numbers,
    "xid": _Events._owners,
    "origin": _Events._owners,
    "key": _Events._keys,
    "key_hash": _Events._hashes,
    "is_barrier": _Events._barriers,
    "json": lambda events: events._text("json"),
    "line": lambda events: events._text("line"),
    "shape": _Events._shapes,
    "relation": _Events._relations,
    "table_ordinal": _Events._table_ordinals,
}


# --- maps


def _row_and_old(frame: Frame) -> tuple[pa.Array, pa.Array]:
    """`row`: the new values (of a DELETE: the old ones). `old`: the old values of an UPDATE, as far as they were sent."""
    key_only: Bools = frame.old_kind == OldKind.KEY
    is_delete: Bools = frame.op == Op.DELETE
    unchanged = _flat_unchanged(frame)
    news = _maps(frame, "new", np.zeros(len(frame), np.bool_), unchanged)
    olds = _maps(frame, "old", key_only, unchanged)
    if not is_delete.any():
        return news, olds
    numbers = np.arange(len(frame))
    rows = pa.concat_arrays([news, olds]).take(pa.array(np.where(is_delete, numbers + len(frame), numbers)))
    return rows, olds.take(pa.array(numbers, mask=is_delete))


def _keys_of(frame: Frame) -> pa.Array:
    """The columns of the replica identity alone, new (of a DELETE: old); NULL where there are none."""
    everywhere, unchanged = np.ones(len(frame), np.bool_), _flat_unchanged(frame)
    sides = [_maps(frame, side, everywhere, unchanged) for side in ("new", "old")]
    has_any = np.array([any(column.is_key for column in shape.columns) for shape in frame.shapes], np.bool_)
    numbers = np.arange(len(frame))
    chosen = np.where(frame.op == Op.DELETE, numbers + len(frame), numbers)
    return pa.concat_arrays(sides).take(pa.array(chosen, mask=~has_any[frame.version]))


def _flat_unchanged(frame: Frame) -> tuple[I64, I64]:
    """(row number, column) of every unchanged TOAST value; a column of the old tuple is -1-i."""
    column = frame.changes.column("unchanged")
    if column.null_count == len(column):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return (
        pc.list_parent_indices(column).to_numpy().astype(np.int64),
        pc.list_flatten(column).to_numpy().astype(np.int64),
    )


def _maps(frame: Frame, side: str, key_only: Bools, unchanged: tuple[I64, I64]) -> pa.Array:
    """Lists of values as maps from column name to text; what was not sent (unchanged TOAST, no key) is left out."""
    lists = frame.changes.column(side)
    if lists.null_count == len(lists):
        return pa.nulls(len(lists), _MAP)
    counts: I64 = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    starts: I64 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total = int(starts[-1])
    row_of = np.repeat(np.arange(len(counts)), counts)
    name_of = frame.first[frame.version[row_of]] + np.arange(total) - starts[row_of]
    values = pc.list_flatten(lists)
    keep: Bools | None = None
    if key_only.any():
        keep = ~key_only[row_of] | (frame.is_key[name_of] != 0)
    rows, columns = unchanged
    mine = columns < 0 if side == "old" else columns >= 0
    if mine.any():
        keep = np.ones(total, np.bool_) if keep is None else keep
        keep[starts[rows[mine]] + (-1 - columns[mine] if side == "old" else columns[mine])] = False
    if keep is not None:
        values = values.filter(pa.array(keep))
        name_of = name_of[keep]
        starts = np.concatenate([[0], np.cumsum(np.bincount(row_of[keep], minlength=len(counts)))]).astype(np.int64)
    offsets = pa.array(starts.astype(np.int32), mask=_offset_mask(lists))
    keys = frame.names.take(pa.array(name_of))
    return pa.MapArray.from_arrays(offsets, keys, values.view(pa.string()), _MAP)  # the frame has checked the text


def _offset_mask(lists: pa.Array) -> Bools | None:
    """A null offset makes a null map."""
    if not lists.null_count:
        return None
    return np.append(lists.is_null().to_numpy(zero_copy_only=False), False)


_MAP = pa.map_(pa.string(), pa.string())


def _unchanged_names(frame: Frame) -> pa.Array:
    rows, columns = _flat_unchanged(frame)
    rows, columns = rows[columns >= 0], columns[columns >= 0]
    if not len(rows):
        return pa.nulls(len(frame), pa.list_(pa.string()))
    counts = np.bincount(rows, minlength=len(frame))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    names = frame.names.take(pa.array(frame.first[frame.version[rows]] + columns))
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), names)


# --- numbers


def _numbered_by_table(frame: Frame) -> pa.Array:
    """Row changes by transaction and table, from 1; NULL in a transaction whose beginning is not in this frame."""
    tables = np.array([shape.oid for shape in frame.shapes], np.int64)[frame.version]
    is_row = (frame.sub == 0) & (tables != 0)
    rows = np.flatnonzero(is_row)
    is_next = (np.diff(frame.commit) != 0) | (np.diff(frame.kind) != 0)
    of_row = np.append(0, np.cumsum(is_next))  # which transaction, in the frame's order
    order = rows[np.lexsort((frame.ordinal[rows], tables[rows], of_row[rows]))]
    owner, table = of_row[order], tables[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (owner[1:] != owner[:-1]) | (table[1:] != table[:-1])
    places = np.arange(len(order))
    numbers = np.zeros(len(frame), np.int64)
    numbers[order] = places - np.maximum.accumulate(np.where(is_first, places, 0)) + 1
    begun = np.unique(of_row[is_row & (frame.ordinal == 1)])
    return pa.array(numbers, mask=~(is_row & np.isin(of_row, begun)))
