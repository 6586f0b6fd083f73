"""The changes of one record batch with everything around them that events are made of, side by side.

What is not a row change of a table (a logical message, the begin or commit of a transaction, a new shape) becomes one of a
made-up relation here, so that whoever makes events of a frame knows only rows.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.errors import DecodeError
from pgcdc.core.position import Kind, Position
from pgcdc.core.relation import Column, Op, Relation, ShapeChange
from pgcdc.event.shape import Described, event_values
from pgcdc.spool.reader import SegmentSlice, read_slice
from pgcdc.spool.schema import CHANGES

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

MESSAGES = Relation(0, "public", "_messages", "n", (Column("prefix", 25, -1, False), Column("content", 25, -1, False)))
TRANSACTION_MARKS = Relation(0, "public", "_txn", "n", ())
SCHEMA_CHANGES = Relation(
    0,
    "public",
    "_schema",
    "n",
    tuple(Column(name, 25, -1, False) for name in ("schema", "table", "changes", "columns")),
)
SNAPSHOTS = Relation(
    0,
    "public",
    "_snapshot",
    "n",
    tuple(Column(name, 25, -1, False) for name in ("snapshot", "kind", "schema", "table", "rows")),
)
"""When the reading of a table began and ended: the id of the snapshot, initial or incremental, the table, rows so far."""
_MADE_UP = {
    Op.MESSAGE: MESSAGES,
    Op.BEGIN: TRANSACTION_MARKS,
    Op.COMMIT: TRANSACTION_MARKS,
    Op.SCHEMA_CHANGE: SCHEMA_CHANGES,
    Op.SNAPSHOT_STARTED: SNAPSHOTS,
    Op.SNAPSHOT_COMPLETED: SNAPSHOTS,
}


@dataclass(frozen=True, slots=True)
class EventOptions:
    """How events are made."""

    transaction: bool = False
    """Events say which transaction they belong to (in their JSON form)."""
    markers: bool = False
    """A BEGIN and a COMMIT event around the changes of each transaction."""
    invalid_text: str = "error"
    """What is done with bytes that are not UTF-8: error, replace or base64."""
    schema_events: bool = False
    """A SCHEMA_CHANGE event before the first change of a table that has another shape than the one before."""
    described: Described = Described()  # noqa: RUF009 - frozen
    """What is known of tables beside what is in the stream."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Changes, row by row with their transactions, and the shapes of their tables."""

    changes: pa.RecordBatch
    owners: pa.RecordBatch
    shapes: list[Relation]
    op: npt.NDArray[np.uint8]
    version: npt.NDArray[np.int32]
    """Index in `shapes`."""
    old_kind: npt.NDArray[np.uint8]
    commit: I64
    kind: npt.NDArray[np.uint8]
    ordinal: I64
    sub: I64
    commit_time: I64
    is_alone: Bools
    """A message outside of any transaction: it has no commit time."""
    first: I64
    """Where each shape's columns begin in `names` and `is_key`."""
    names: pa.Array
    is_key: npt.NDArray[np.uint8]
    channels: list[str]
    """For each shape."""
    details: list[Mapping[str, Any] | None]
    """For each shape what the catalog said about it, if that is known."""
    database: str
    source: str
    """As events name it."""
    lacking: Mapping[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """For a side the columns of all shapes that its rows do not have, because a function has taken them out or added them to
    the other side only. Not there: rows of this side have all columns."""

    def __len__(self) -> int:
        return len(self.op)


def load_frame(
    pieces: Sequence[SegmentSlice],
    relations: list[Relation],
    options: EventOptions,
    schema_changes: Sequence[ShapeChange] = (),
) -> Frame | None:
    """The changes in neighbouring slices; None if there are none. `schema_changes` are those that become events.

    Under light load segments are tiny: many of them in one frame cost little more than one.
    """
    shapes = [(change.position, event_values(change)) for change in schema_changes]
    read = [read_slice(piece, markers=options.markers, shapes=shapes) for piece in pieces]
    changes = _one_batch([table for table, _ in read])
    owners = _one_batch([table for _, table in read])
    return None if changes is None or owners is None else make_frame(changes, owners, relations, options)


def make_frame(
    changes: pa.RecordBatch, owners: pa.RecordBatch, relations: list[Relation], options: EventOptions
) -> Frame:
    """These changes; `owners` are their transactions, row by row."""
    shapes = [*relations, *_MADE_UP.values()]
    op = changes.column("op").to_numpy()
    xid = owners.column("xid").to_numpy()
    is_message: Bools = op == Op.MESSAGE
    if is_message.any():
        changes = _with_prefixes(changes, is_message)
    version = _versions(changes, op, len(relations))
    details = {change.after: change.details for change in options.described.changes}
    ordinal: I64 = changes.column("ordinal").to_numpy()
    for name in ("new", "old"):
        place = _Place(name, shapes, version, owners, ordinal)
        changes = _with_valid_text(changes, place, options.invalid_text)
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
    """Where the events of a spool come from, as they say it themselves: all its tables are of one source."""
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
    """A message's content is the one value of its row: put its prefix before it."""
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


@dataclass(frozen=True, slots=True)
class _Place:
    """To find the row and column of a value, for the error."""

    side: str
    shapes: list[Relation]
    version: npt.NDArray[np.int32]
    owners: pa.RecordBatch
    ordinal: I64

    def describe(self, offsets: npt.NDArray[np.int32], item: int) -> str:
        row = int(np.searchsorted(offsets, item, side="right")) - 1
        shape = self.shapes[self.version[row]]
        column = shape.columns[item - offsets[row]].name
        commit, kind = (self.owners.column(name)[row].as_py() for name in ("commit", "kind"))
        place = Position(commit, Kind(kind), int(self.ordinal[row]))
        return f"column {column} of table {shape.namespace}.{shape.name} at {place}"


def repair_text(changes: pa.RecordBatch, shape: Relation, owners: pa.RecordBatch, policy: str) -> pa.RecordBatch:
    """Changes of one shape without bytes that are not UTF-8, if the policy is to change them; else they are left alone."""
    if policy == "error":
        return changes
    version = np.zeros(changes.num_rows, np.int32)
    ordinal = changes.column("ordinal").to_numpy()
    for side in ("new", "old"):
        changes = _with_valid_text(changes, _Place(side, [shape], version, owners, ordinal), policy)
    return changes


def _with_valid_text(changes: pa.RecordBatch, place: _Place, policy: str) -> pa.RecordBatch:
    lists = changes.column(place.side)
    offsets: npt.NDArray[np.int32] = lists.offsets.to_numpy()
    offsets = offsets - offsets[0]
    values = lists.values.slice(lists.offsets[0].as_py(), int(offsets[-1]))  # of a cut segment only what is in range
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        repaired = [_repair(value, number, offsets, place, policy) for number, value in enumerate(values.to_pylist())]
    else:
        return changes
    fixed = pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(repaired, pa.binary()), type=lists.type, mask=lists.is_null()
    )
    return changes.set_column(CHANGES.get_field_index(place.side), CHANGES.field(place.side), fixed)


def _repair(
    value: bytes | None, number: int, offsets: npt.NDArray[np.int32], place: _Place, policy: str
) -> bytes | None:
    if value is None:
        return None
    try:
        value.decode()
    except UnicodeDecodeError:
        if policy == "replace":
            return value.decode(errors="replace").encode()
        if policy == "base64":
            return b"base64:" + base64.b64encode(value)
        raise DecodeError(
            f"a value is not valid UTF-8: {place.describe(offsets, number)}",
            "The database's encoding is SQL_ASCII. Correct the value, or choose what becomes of such bytes: "
            "--invalid-utf8 replace or --invalid-utf8 base64",
        ) from None
    return value
