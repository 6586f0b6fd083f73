"""Events as columns, one row each: what Spark sees, and the way back. All tables share one schema: `row` and `old` are
maps that hold PostgreSQL's own text. Columns that Spark changed become a frame again (`ColumnReader`), so that later
steps share the source's code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import TransformError
from pgcdc.core.position import ORDINAL_BITS
from pgcdc.core.relation import Column, OldKind, Op, Relation
from pgcdc.event.edits import TEXT_OID
from pgcdc.event.frame import I64, Bools, Frame, column_places, source_name
from pgcdc.event.shape import TableShape

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
}  # Types in Spark's notation
CHANGEABLE = ("channel", "operation", "schema", "table", "row", "old", "unchanged_toast_columns")
"""The columns that transforms may change. An event's identity never changes: id, position, time and transaction."""
TEXT_COLUMNS = {"json": "string", "line": "string"}
"""The whole event as JSON text, without and with a newline. Only on request."""
SHAPE_COLUMNS = {"shape": "string", "table_ordinal": "bigint"}
"""For envelopes, only on request: the table's shape as JSON (`read_shape`), and the change's number (from 1) among its
transaction's changes of this table."""
KEY_COLUMNS = {"key": "map<string,string>", "key_hash": "bigint", "is_barrier": "boolean"}
"""Which events must stay in order (`event.forms`). Only on request."""
EVENT_SCHEMA = ", ".join(f"{name} {kind.upper()}" for name, kind in EVENT_COLUMNS.items())
"""The columns of an event, as Spark DDL."""
SHAPE_SCHEMA = "".join(f", {name} {kind.upper()}" for name, kind in SHAPE_COLUMNS.items())
"""SHAPE_COLUMNS as Spark DDL, to append to EVENT_SCHEMA."""

MAP = pa.map_(pa.string(), pa.string())
NAMES = pa.list_(pa.string())


# --- from a frame to columns


def shape_text(shape: TableShape, database: str = "") -> str:
    """The `shape` column's value for events of this shape."""
    return json.dumps({"database": database, **shape.to_json()})


def shape_texts(frame: Frame) -> list[str]:
    shapes = zip(frame.shapes, frame.details, strict=True)
    return [shape_text(TableShape(*one), frame.database) for one in shapes]


@cache
def read_shape(text: str) -> tuple[TableShape, str]:
    """The shape in a `shape` column's value, and the name of its database."""
    return TableShape.from_json(raw := json.loads(text)), raw["database"]


def row_and_old(frame: Frame) -> tuple[pa.Array, pa.Array]:
    """`row`: the new values (for a DELETE, the old ones). `old`: the old values of an UPDATE, as far as they were sent."""
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


def key_maps(frame: Frame) -> pa.Array:
    """Only the replica identity's columns: new values, or old ones for a DELETE. NULL if there are none."""
    everywhere, unchanged = np.ones(len(frame), np.bool_), _flat_unchanged(frame)
    sides = [_maps(frame, side, everywhere, unchanged) for side in ("new", "old")]
    has_any = np.array([any(column.is_key for column in shape.columns) for shape in frame.shapes], np.bool_)
    numbers = np.arange(len(frame))
    chosen = np.where(frame.op == Op.DELETE, numbers + len(frame), numbers)
    return pa.concat_arrays(sides).take(pa.array(chosen, mask=~has_any[frame.version]))


def unchanged_names(frame: Frame) -> pa.Array:
    """Names of columns whose new values are unchanged TOAST; NULL if there are none."""
    rows, columns = _flat_unchanged(frame)
    rows, columns = rows[columns >= 0], columns[columns >= 0]
    if not len(rows):
        return pa.nulls(len(frame), NAMES)
    counts = np.bincount(rows, minlength=len(frame))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    names = frame.names.take(pa.array(frame.first[frame.version[rows]] + columns))
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), names)


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
    """Lists of values as maps from column name to text, without values that were not sent (unchanged TOAST, columns
    outside the key)."""
    lists = frame.changes.column(side)
    if lists.null_count == len(lists):
        return pa.nulls(len(lists), MAP)
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
    if side == "new" and frame.lacking is not None:
        has = frame.lacking[name_of] == 0
        keep = has if keep is None else keep & has
    if keep is not None:
        values = values.filter(pa.array(keep))
        name_of = name_of[keep]
        starts = np.concatenate([[0], np.cumsum(np.bincount(row_of[keep], minlength=len(counts)))]).astype(np.int64)
    is_null = np.append(lists.is_null().to_numpy(zero_copy_only=False), False) if lists.null_count else None
    offsets = pa.array(starts.astype(np.int32), mask=is_null)  # a null offset makes a null map
    keys = frame.names.take(pa.array(name_of))
    # the frame has already checked the text
    return pa.MapArray.from_arrays(offsets, keys, values.view(pa.string()), MAP)


# --- and back


class _Place(NamedTuple):
    """What distinguishes variants: the columns, and the names in their maps (None: no map)."""

    channel: str
    schema: str | None
    table: str | None
    shape: str | None
    new: tuple[str, ...] | None
    old: tuple[str, ...] | None
    unchanged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    """What all rows of one place share. The relation has the columns of both maps."""

    relation: Relation
    channel: str
    details: Mapping[str, Any] | None
    database: str
    lacking: tuple[bool, ...]
    places: dict[str, list[int]]  # For each map, where each column is in it; -1: nowhere
    old_kind: OldKind
    marks: list[int]


class ColumnReader:
    """Turns batches of columns into frames. A shape has the same number in all of them."""

    def __init__(self) -> None:
        self._variants: dict[_Place, tuple[int, _Variant]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._made: list[_Variant] = []
        self._oids: dict[tuple[str | None, str | None], int] = {}
        self._texts: dict[str | None, int] = {}

    def read(self, events: pa.RecordBatch) -> tuple[Frame, dict[str, pa.Array]]:
        """A frame of these events, and the columns that are not derived from it. A missing column is NULL everywhere."""
        columns = {name: _whole(events, name) for name in (*EVENT_COLUMNS, "shape")}
        is_delete: Bools = pc.equal(columns["operation"], "DELETE").to_numpy(zero_copy_only=False)
        of_row, numbers, variants = self._find(columns, is_delete)
        sides = {"new": columns["row"], "old": columns["old"]}
        if is_delete.any():
            rows = np.arange(events.num_rows)
            both = pa.concat_arrays([sides["old"], sides["new"]])
            sides = {
                "new": sides["new"].take(pa.array(rows, mask=is_delete)),
                "old": both.take(pa.array(np.where(is_delete, rows + events.num_rows, rows))),
            }
        lists = {side: _lists(maps, of_row, [one.places[side] for one in variants]) for side, maps in sides.items()}
        marks = pa.array([one.marks or None for one in variants], pa.list_(pa.int16())).take(pa.array(of_row))
        shapes = [one.relation for one in self._made]
        lacking = np.array([flag for one in self._made for flag in one.lacking], np.uint8)
        times = columns["created_at"]
        ordinal: I64 = pc.fill_null(columns["ordinal"], 0).to_numpy()
        frame = Frame(
            pa.RecordBatch.from_pydict({**lists, "unchanged": marks}),
            pa.RecordBatch.from_pydict({"xid": pc.fill_null(columns["xid"], 0), "origin": columns["origin"]}),
            shapes,
            _operations(columns["operation"]),
            np.array(numbers, np.int32)[of_row],
            np.array([one.old_kind for one in variants], np.uint8)[of_row],
            pc.fill_null(columns["lsn"], 0).to_numpy(),
            (ordinal >> ORDINAL_BITS).astype(np.uint8),
            ordinal & ((1 << ORDINAL_BITS) - 1),
            np.zeros(events.num_rows, np.int64),
            pc.fill_null(times.cast(pa.timestamp("us", "UTC")).cast(pa.int64()), 0).to_numpy(),
            times.is_null().to_numpy(zero_copy_only=False),
            *column_places(shapes),
            [one.channel for one in self._made],
            [one.details for one in self._made],
            next((one.database for one in variants), ""),
            next((one.as_py() for one in columns["source"].drop_null()[:1]), source_name([])),
            lacking if lacking.any() else None,
        )
        given = {name: events.column(name) for name in _GIVEN if name in events.schema.names}
        # one shape serves all variants of a table
        texts = pc.dictionary_encode(columns["shape"], null_encoding="encode")
        of_text = [self._texts.setdefault(text, len(self._texts)) for text in texts.dictionary.to_pylist()]
        given["relation"] = pa.array(np.array(of_text, np.int32)[texts.indices.to_numpy()])
        return frame, given

    def _find(
        self, columns: dict[str, pa.Array], is_delete: Bools
    ) -> tuple[npt.NDArray[np.int64], list[int], list[_Variant]]:
        """Each row's variant number, the numbers of their shapes, and the variants."""
        code = is_delete.astype(np.int64)
        for name in ("channel", "schema", "table", "row", "old", "unchanged_toast_columns", "shape"):
            column = columns[name]
            texts = _joined(column) if column.type in (MAP, NAMES) else column
            encoded = pc.dictionary_encode(texts, null_encoding="encode")
            if len(encoded.dictionary) > 1:
                code = np.unique(code * len(encoded.dictionary) + encoded.indices.to_numpy(), return_inverse=True)[1]
        _, firsts, of_row = np.unique(code, return_index=True, return_inverse=True)
        found = [self._variant(columns, int(row), is_delete=bool(is_delete[row])) for row in firsts]
        return of_row, [number for number, _ in found], [one for _, one in found]

    def _variant(self, columns: dict[str, pa.Array], row: int, *, is_delete: bool) -> tuple[int, _Variant]:
        plain = (columns[name][row].as_py() for name in ("channel", "schema", "table", "shape"))
        *maps, unchanged = (columns[name][row].as_py() for name in ("row", "old", "unchanged_toast_columns"))
        new, old = (None if one is None else tuple(key for key, _ in one) for one in maps)
        place = _Place._make((*plain, *((None, new) if is_delete else (new, old)), tuple(unchanged or ())))
        if place not in self._variants:
            made = self._make(place)
            known = (place[:4], made.relation, made.lacking)
            if known not in self._numbers:
                self._numbers[known] = len(self._made)
                self._made.append(made)
            self._variants[place] = self._numbers[known], made
        return self._variants[place]

    def _make(self, place: _Place) -> _Variant:
        shape, database = read_shape(place.shape) if place.shape is not None else (None, "")
        known = {} if shape is None else {column.name: column for column in shape.relation.columns}
        names, before = _order(list(known), place), place.old
        has = {"new": set(names) if place.new is None else {*place.new, *place.unchanged}, "old": set(before or ())}
        if any(column.is_key and name not in has["new"] for name, column in known.items()):
            # part of a key does not identify rows
            known = {name: replace(one, is_key=False) for name, one in known.items()}
        columns = tuple(known.get(name) or Column(name, TEXT_OID, -1, False) for name in names)
        keys = {column.name for column in columns if column.is_key}
        identity = shape.relation.replica_identity if shape is not None and keys else "n"
        # We assign a number of our own if only the table's name is known.
        number = self._oids.setdefault((place.schema, place.table), -1 - len(self._oids))
        base = Relation(number, "", "", "n", ()) if shape is None else shape.relation
        oid = 0 if place.table is None else base.oid
        is_key = identity != "f" and before is not None and len(before) < len(names) and has["old"] <= keys
        marks = [names.index(name) for name in place.unchanged if name in names]
        if before is not None:
            sent = keys if is_key else set(names)
            marks += [-1 - index for index, name in enumerate(names) if name in sent and name not in has["old"]]
        return _Variant(
            Relation(oid, place.schema or "", place.table or "", identity, columns, base.source),
            place.channel,
            None if shape is None else shape.details,
            database,
            tuple(name not in has["new"] for name in names),
            {side: [-1 if name not in its else its.index(name) for name in names]
             for side, its in (("new", place.new or ()), ("old", before or ()))},
            OldKind.NONE if before is None else OldKind.KEY if is_key else OldKind.FULL,
            marks,
        )  # fmt: skip


_GIVEN = ("id", "position", "source", "table_ordinal", "key_hash", "is_barrier")


def _whole(events: pa.RecordBatch, name: str) -> pa.Array:
    kinds = {"string": pa.string(), "bigint": pa.int64(), "timestamp": pa.timestamp("us", "UTC")}
    kind = EVENT_COLUMNS.get(name, "string")
    wanted = MAP if kind.startswith("map") else NAMES if kind.startswith("array") else kinds[kind]
    if name not in events.schema.names:
        return pa.nulls(events.num_rows, wanted)
    found = events.column(name)
    return found if found.type == wanted else found.cast(wanted)


def _joined(column: pa.Array) -> pa.Array:
    """Text that is equal for rows with the same names in the same order; PostgreSQL's names contain no NUL."""
    if column.type == NAMES:
        return pc.binary_join(column, "\0")
    keys = pa.ListArray.from_arrays(pa.array(column.offsets.to_numpy()), column.keys, mask=column.is_null())
    counts = pc.list_value_length(keys).cast(pa.string())
    return pc.binary_join_element_wise(counts, pc.binary_join(keys, "\0"), "\0")


def _lists(maps: pa.Array, of_row: npt.NDArray[np.int64], places: Sequence[list[int]]) -> pa.Array:
    """Maps as lists of values, in the order of each row's variant."""
    lengths = np.array([len(one) for one in places], np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    is_null = maps.is_null().to_numpy(zero_copy_only=False)
    counts = np.where(is_null, 0, lengths[of_row])
    row_of = np.repeat(np.arange(len(counts)), counts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    index = np.arange(len(row_of)) - offsets[row_of]
    place = np.array([one for each in places for one in each], np.int64)[begins[of_row[row_of]] + index]
    items = maps.offsets.to_numpy()[:-1][row_of] + place
    values = maps.items.take(pa.array(items, mask=place < 0)).view(pa.binary())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(is_null))


def _order(known: list[str], place: _Place) -> list[str]:
    """The columns of both maps: first those of the table in its order, then added ones."""
    new, old = place.new, place.old or ()
    if new is None:
        return list(dict.fromkeys([*known, *old]))
    present = dict.fromkeys([*new, *place.unchanged, *old])
    known = known or list(old if len(old) > len(new) else new)
    names = list(dict.fromkeys([*(name for name in known if name in present), *present]))
    if [name for name in names if name in new] != list(new):  # a function has changed their order
        return list(present)
    return names


def _operations(column: pa.Array) -> npt.NDArray[np.uint8]:
    encoded = pc.dictionary_encode(column)
    names = encoded.dictionary.to_pylist()
    wrong = next((name for name in names if name not in Op.__members__), None)
    if wrong is not None or encoded.null_count:
        raise TransformError(
            f"a transform set the unknown operation {wrong}", f"Use one of: {', '.join(op.name for op in Op)}"
        )
    numbers: npt.NDArray[np.uint8] = np.array([Op[name] for name in names], np.uint8)[encoded.indices.to_numpy()]
    return numbers
