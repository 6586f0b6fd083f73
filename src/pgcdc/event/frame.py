"""The changes of one record batch with everything that events need. Anything that is not a row change (a logical
message, a transaction's begin or commit, a new shape, a sentinel) becomes a row of a made-up relation, so that later
steps see only rows. An edit is the effect of a chain on a frame."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import DecodeError
from pgcdc.core.position import Kind, Position
from pgcdc.core.relation import Column, Op, Relation, ShapeChange
from pgcdc.event.shape import Described, event_values
from pgcdc.spool.reader import SegmentSlice, read_slice
from pgcdc.spool.schema import CHANGES

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


def _made_up(name: str, *columns: str) -> Relation:
    return Relation(0, "public", name, "n", tuple(Column(column, 25, -1, False) for column in columns))


MESSAGES = _made_up("_messages", "prefix", "content")
TRANSACTION_MARKS = _made_up("_txn")
SCHEMA_CHANGES = _made_up("_schema", "schema", "table", "changes", "columns")
SNAPSHOTS = _made_up("_snapshot", "snapshot", "kind", "schema", "table", "rows")
"""Start and end of reading a table: the snapshot's id, its kind (initial or incremental), the table, and the rows so
far."""
SENTINELS = _made_up("_sentinel", "id", "asked_at")
_MADE_UP = {
    Op.MESSAGE: MESSAGES,
    Op.BEGIN: TRANSACTION_MARKS,
    Op.COMMIT: TRANSACTION_MARKS,
    Op.SCHEMA_CHANGE: SCHEMA_CHANGES,
    Op.SNAPSHOT_STARTED: SNAPSHOTS,
    Op.SNAPSHOT_COMPLETED: SNAPSHOTS,
    Op.SENTINEL: SENTINELS,
}


@dataclass(frozen=True, slots=True)
class EventOptions:
    """How events are built."""

    transaction: bool = False  # Events include their transaction (in their JSON form)
    markers: bool = False  # Emit a BEGIN and a COMMIT event around the changes of each transaction
    invalid_text: str = "error"
    """How to handle bytes that are not UTF-8: error, replace or base64; or keep, if nobody reads them as text."""
    schema_events: bool = False
    """Emit a SCHEMA_CHANGE event before the first change of a table whose shape differs from its previous one."""
    described: Described = Described()  # noqa: RUF009 - frozen
    """What is known of tables beyond the stream."""
    addressed: bool = False  # Include rows addressed to some adapters: the reader knows which
    sentinels: bool = False  # Emit a SENTINEL event for each sentinel


@dataclass(frozen=True, slots=True)
class Frame:
    """Changes, row by row with their transactions, and the shapes of their tables."""

    changes: pa.RecordBatch
    owners: pa.RecordBatch
    shapes: list[Relation]
    op: npt.NDArray[np.uint8]
    version: npt.NDArray[np.int32]  # Index in `shapes`
    old_kind: npt.NDArray[np.uint8]
    commit: I64
    kind: npt.NDArray[np.uint8]
    ordinal: I64
    sub: I64
    commit_time: I64
    is_alone: Bools  # A message outside any transaction: it has no commit time
    first: I64  # For each shape, where its columns begin in `names` and `is_key`
    names: pa.Array
    is_key: npt.NDArray[np.uint8]
    channels: list[str]  # For each shape
    details: list[Mapping[str, Any] | None]  # For each shape, the catalog's description, if known
    database: str
    source: str  # The name used in events
    lacking: npt.NDArray[np.uint8] | None = None
    """Marks, among the columns of all shapes, those missing from new rows: a function removed them there but not from
    old rows."""

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class Replaced:
    """Replacement texts for some values of a column of tuples."""

    where: npt.NDArray[np.int32]  # For each list item, the index of its text, or -1
    texts: pa.Array


@dataclass(frozen=True, slots=True)
class Edit:
    """The effect of a chain on one frame. None: no difference."""

    names: list[str] | None = None  # For all columns of all shapes
    dropped: npt.NDArray[np.uint8] | None = None
    keep: npt.NDArray[np.uint8] | None = None  # Which events the chain keeps
    new: Replaced | None = None
    old: Replaced | None = None


def load_frame(
    pieces: Sequence[SegmentSlice],
    relations: list[Relation],
    options: EventOptions,
    schema_changes: Sequence[ShapeChange] = (),
) -> Frame | None:
    """The changes in adjacent slices; None if there are none. `schema_changes` are those that become events. Under
    light load segments are tiny: many of them in one frame cost little more than one."""
    shapes = [(change.position, event_values(change)) for change in schema_changes]
    wanted: dict[str, Any] = {
        "markers": options.markers,
        "addressed": options.addressed,
        "sentinels": options.sentinels,
    }
    read = [read_slice(piece, shapes=shapes, **wanted) for piece in pieces]
    changes = _one_batch([table for table, _ in read])
    owners = _one_batch([table for _, table in read])
    return None if changes is None or owners is None else make_frame(changes, owners, relations, options)


def make_frame(
    changes: pa.RecordBatch, owners: pa.RecordBatch, relations: list[Relation], options: EventOptions
) -> Frame:
    """A frame of these changes; `owners` are their transactions, row by row."""
    shapes = [*relations, *_MADE_UP.values()]
    op = changes.column("op").to_numpy()
    xid = owners.column("xid").to_numpy()
    is_message: Bools = op == Op.MESSAGE
    if is_message.any():
        changes = _with_prefixes(changes, is_message)
    version = _versions(changes, op, len(relations))
    details = {change.after: change.details for change in options.described.changes}
    ordinal: I64 = changes.column("ordinal").to_numpy()
    changes = _with_valid_text(changes, shapes, version, owners, options.invalid_text)
    return Frame(
        changes,
        owners,
        shapes,
        op,
        version,
        changes.column("old_kind").to_numpy(),
        owners.column("commit").to_numpy(),
        owners.column("kind").to_numpy(),
        ordinal,
        changes.column("sub").to_numpy().astype(np.int64),
        owners.column("commit_time").to_numpy(),
        is_message & (xid == 0),
        *column_places(shapes),
        [shape.channel for shape in shapes],
        [details.get(shape) for shape in shapes],
        options.described.database,
        source_name(shapes),
    )


def source_name(shapes: Sequence[Relation]) -> str:
    """The name of the source in events: all tables of a spool come from the same source."""
    kind = shapes[0].source if shapes else "postgres"
    return "wal_replication" if kind == "postgres" else kind


def column_places(shapes: Sequence[Relation]) -> tuple[I64, pa.Array, npt.NDArray[np.uint8]]:
    """`first`, `names` and `is_key` of a frame with these shapes."""
    counts = [len(shape.columns) for shape in shapes]
    return (
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pa.array([column.name for shape in shapes for column in shape.columns], pa.string()),
        np.array([column.is_key for shape in shapes for column in shape.columns], np.uint8),
    )


def _one_batch(tables: list[pa.Table]) -> pa.RecordBatch | None:
    batches = pa.concat_tables(tables).combine_chunks().to_batches()
    return batches[0] if batches else None


def _versions(changes: pa.RecordBatch, op: npt.NDArray[np.uint8], tables: int) -> npt.NDArray[np.int32]:
    version: npt.NDArray[np.int32] = changes.column("relation").to_numpy()
    if (version >= 0).all():
        return version
    made_up = np.zeros(256, np.int32)
    for number, known in enumerate(_MADE_UP):
        made_up[known] = tables + number
    return np.where(version < 0, made_up[op], version)


# --- messages


def _with_prefixes(changes: pa.RecordBatch, is_message: Bools) -> pa.RecordBatch:
    """Put each message's prefix before its content, which is the only value of its row."""
    rows = np.flatnonzero(is_message)
    messages = changes.take(pa.array(rows))
    pairs = [
        [prefix.encode(), content[0]]
        for prefix, content in zip(
            messages.column("prefix").to_pylist(), messages.column("new").to_pylist(), strict=True
        )
    ]
    order = np.arange(len(is_message))
    order[rows] = len(is_message) + np.arange(len(rows))
    new = pa.concat_arrays([changes.column("new"), pa.array(pairs, CHANGES.field("new").type)]).take(pa.array(order))
    return changes.set_column(CHANGES.get_field_index("new"), CHANGES.field("new"), new)


# --- bytes that are not text


def _with_valid_text(
    changes: pa.RecordBatch,
    shapes: list[Relation],
    version: npt.NDArray[np.int32],
    owners: pa.RecordBatch,
    policy: str,
) -> pa.RecordBatch:
    for side in ("new", "old") if policy != "keep" else ():
        lists = changes.column(side)
        offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
        offsets = offsets - offsets[0]
        # For a cut segment, only the values in range.
        values = lists.values.slice(lists.offsets[0].as_py(), int(offsets[-1]))
        try:
            values.cast(pa.string())
            continue
        except pa.ArrowInvalid:
            repaired = [None if value is None else _repair(value, policy) for value in values.to_pylist()]
        valid = values.is_valid().to_pylist()
        bad = next((item for item, value in enumerate(repaired) if value is None and valid[item]), None)
        if bad is not None:
            row = int(np.searchsorted(offsets, bad, side="right")) - 1
            shape, ordinal = shapes[version[row]], changes.column("ordinal")[row].as_py()
            commit, kind = (owners.column(name)[row].as_py() for name in ("commit", "kind"))
            raise DecodeError(
                f"a value is not valid UTF-8: column {shape.columns[bad - offsets[row]].name} of table "
                f"{shape.namespace}.{shape.name} at {Position(commit, Kind(kind), ordinal)}",
                "The database's encoding is SQL_ASCII. Correct the value, or choose how such bytes are "
                "delivered: --invalid-utf8 replace or --invalid-utf8 base64",
            )
        fixed = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(repaired, pa.binary()), type=lists.type, mask=lists.is_null()
        )
        changes = changes.set_column(CHANGES.get_field_index(side), CHANGES.field(side), fixed)
    return changes


def _repair(value: bytes, policy: str) -> bytes | None:
    """The value as text; None if it is not valid text and the policy says to leave it."""
    try:
        value.decode()
    except UnicodeDecodeError:
        if policy == "replace":
            return value.decode(errors="replace").encode()
        return b"base64:" + base64.b64encode(value) if policy == "base64" else None
    return value


# --- values as a chain shows them


def rewritten(
    frame: Frame,
    side: str,
    keep: Bools | None,
    wanted: Bools,
    write: Callable[[int, pa.Array], tuple[Bools | slice, pa.Array]],
) -> Replaced | None:
    """Replacement texts for the values of the wanted columns in the events that are kept; other values are skipped.
    `write` gets a column's number among those of all shapes, and its values. It returns which of them to replace, and
    the new texts."""
    lists = frame.changes.column(side)
    if lists.null_count == len(lists) or not wanted.any():
        return None
    begins: npt.NDArray[np.int32] = lists.offsets.to_numpy()[:-1]
    is_there: Bools = lists.is_valid().to_numpy(zero_copy_only=False)
    is_there = is_there if keep is None else is_there & keep
    values = lists.values.view(pa.string())
    where = np.full(len(values), -1, np.int32)
    texts, done = [pa.nulls(0, pa.string())], 0
    for version in np.unique(frame.version[is_there]).tolist():
        first, last = frame.first[version : version + 2].tolist()
        starts = begins[is_there & (frame.version == version)]
        for number in first + np.flatnonzero(wanted[first:last]):
            items = starts + (number - first)
            chosen, made = write(number, values.take(pa.array(items)))
            where[items[chosen]] = np.arange(done, done + len(made), dtype=np.int32)
            texts.append(made)
            done += len(made)
    return Replaced(where, pa.concat_arrays(texts))


def dropped_columns(frame: Frame, edit: Edit, side: str) -> npt.NDArray[np.uint8] | None:
    """Which columns of all shapes to omit from the rows of a side; None: none."""
    if frame.lacking is None or side == "old":
        return edit.dropped
    return frame.lacking if edit.dropped is None else frame.lacking | edit.dropped


def without_lacking(frame: Frame) -> Frame:
    """The same frame with only the columns that its new rows have."""
    lacking = frame.lacking
    if lacking is None:
        return frame
    shapes = []
    for shape, first in zip(frame.shapes, frame.first, strict=False):
        left = tuple(one for number, one in enumerate(shape.columns, first) if not lacking[number])
        shapes.append(replace(shape, columns=left))
    return replace(reshaped(frame, Edit(dropped=lacking), shapes), lacking=None)


def reshaped(frame: Frame, edit: Edit, shapes: list[Relation]) -> Frame:
    """The frame with edited values, which have these shapes."""
    sides = {side: _edited_lists(frame, edit, side) for side in ("new", "old")}
    changes = pa.RecordBatch.from_pydict({**sides, "unchanged": _edited_marks(frame, edit)})
    first, names, is_key = column_places(shapes)
    return replace(frame, changes=changes, shapes=shapes, first=first, names=names, is_key=is_key)


def _edited_lists(frame: Frame, edit: Edit, side: str) -> pa.Array:
    """The rows as lists of texts."""
    lists = frame.changes.column(side)
    replaced: Replaced | None = getattr(edit, side)
    if replaced is None and edit.dropped is None:
        return _of_texts(lists.offsets, lists.values, lists)
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    values = lists.values.slice(first, last - first).view(pa.string())
    if replaced is not None:
        where = replaced.where[first:last]
        picked = np.where(where >= 0, len(values) + where, np.arange(len(values)))
        values = pa.concat_arrays([values, replaced.texts]).take(pa.array(picked))
    offsets = offsets - first
    if edit.dropped is not None:
        counts = np.diff(offsets)
        row_of = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(values)) - offsets[:-1][row_of]
        keep: Bools = edit.dropped[frame.first[frame.version[row_of]] + column] == 0
        values = values.filter(pa.array(keep))
        kept = np.bincount(row_of[keep], minlength=len(counts))
        offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return _of_texts(pa.array(offsets), values, lists)


def _of_texts(offsets: pa.Array, values: pa.Array, lists: pa.Array) -> pa.Array:
    mask = lists.is_null() if lists.null_count else None
    whole = pa.array(offsets.to_numpy())  # Arrow does not accept a slice together with a mask
    return pa.ListArray.from_arrays(whole, values.view(pa.string()), mask=mask)


def _edited_marks(frame: Frame, edit: Edit) -> pa.Array:
    """Which values are unchanged TOAST, by column number after the edit; -1-i for the old row."""
    marks = frame.changes.column("unchanged")
    if edit.dropped is None or marks.null_count == len(marks):
        return marks
    rows = pc.list_parent_indices(marks).to_numpy()
    columns = pc.list_flatten(marks).to_numpy().astype(np.int64)
    gone = np.concatenate([[0], np.cumsum(edit.dropped)])
    first = frame.first[frame.version[rows]]
    number = np.where(columns < 0, -1 - columns, columns)
    after = number - (gone[first + number] - gone[first])
    keep: Bools = edit.dropped[first + number] == 0
    after = np.where(columns < 0, -1 - after, after)[keep].astype(np.int16)
    counts = np.bincount(rows[keep], minlength=len(marks))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(after), mask=marks.is_null())


def column_texts(frame: Frame, side: str, index: int, rows: npt.NDArray[np.int64]) -> pa.Array:
    """The texts of one column in some rows; null where a row has no value or fewer columns."""
    lists = frame.changes.column(side)
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    items = offsets[:-1][rows] + index
    is_out: Bools = (items >= offsets[1:][rows]) | lists.is_null().to_numpy(zero_copy_only=False)[rows]
    return lists.values.view(pa.string()).take(pa.array(np.where(is_out, 0, items), mask=is_out))
