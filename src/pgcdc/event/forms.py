"""The forms in which sinks take events, as columns of a frame; and which events must stay in order.

*lines*: the rendered event with its newline. *records*: the rendered event and its metadata. *tables*: the values
themselves, together with the shapes of their tables. `event.batch` reads what this module builds.

Changes of one row stay in order through a hash of its key. A hash collision is harmless: it only keeps two rows
together. A table without a key of its own (no key, or the whole row as key) is kept together as a whole.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.relation import OldKind, Op, Relation
from pgcdc.event.frame import I64, Bools, EventOptions, Frame, column_texts, make_frame, without_lacking
from pgcdc.event.lines import U64, event_layout, mix, quote_json, render
from pgcdc.event.shape import TableShape

Form = Literal["lines", "records", "fields", "tables", "changes"]
"""`changes` is `tables` plus events that change no table: messages, transaction markers, schema changes."""
RECORD = pa.struct(
    [
        *((name, pa.string()) for name in ("id", "channel", "operation", "key", "value", "traceparent", "tracestate")),
        *(("key_hash", pa.int64()), ("is_barrier", pa.bool_()), ("relation", pa.int32())),
    ]
)
FIELDS = pa.struct(
    [(name, pa.string()) for name in ("id", "channel", "operation", "payload", "source", "created_at", "transaction")]
)
"""The fields of an event. An event in another envelope has only `payload`: its whole text."""
TABLE = pa.struct(
    [
        *(("id", pa.string()), ("op", pa.uint8()), ("relation", pa.int32()), ("old_kind", pa.uint8())),
        *((side, pa.list_(pa.string())) for side in ("new", "old")),
        ("unchanged", pa.list_(pa.int16())),
        *((name, pa.int64()) for name in ("ordinal", "commit_time", "xid")),
    ]
)
WITH_SHAPES: tuple[Form, ...] = ("tables", "changes")
FORMS: dict[Form, pa.DataType] = {
    "lines": pa.string(), "records": RECORD, "fields": FIELDS, **dict.fromkeys(WITH_SHAPES, TABLE)
}  # fmt: skip
_OF_PREFIX: dict[str, Form | None] = {form.removesuffix("s"): form for form in FORMS} | {"event": None}
_ROW_CHANGES = np.zeros(256, np.bool_)
_ROW_CHANGES[[Op.INSERT, Op.UPDATE, Op.DELETE, Op.SNAPSHOT]] = True
TRACES = {
    "traceparent": r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\z",
    "tracestate": r"\A[\x20-\x7e]{1,512}\z",
}
"""Names of columns that hold a W3C trace context, and the pattern of valid values."""


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BARRIERS = np.zeros(256, np.bool_)
_BARRIERS[[Op.TRUNCATE, Op.SCHEMA_CHANGE, Op.SNAPSHOT_STARTED, Op.SNAPSHOT_COMPLETED, Op.SENTINEL]] = True


def form_column(number: int, form: Form = "lines") -> str:
    """The column with a chain's events in this form; null: dropped."""
    return f"{form.removesuffix('s')}_{number}"


def event_column(number: int) -> str:
    """The column with events after the first steps of a chain, from which Spark continues."""
    return f"event_{number}"


def form_of(column: str) -> tuple[int, Form | None] | None:
    """The chain and form of a `form_column`; the form is None for an `event_column`."""
    prefix, _, number = column.partition("_")
    return (int(number), _OF_PREFIX[prefix]) if prefix in _OF_PREFIX and number.isdigit() else None


def make_record(frame: Frame, values: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
    arrays = {
        **{name: columns[name] for name in ("id", "channel", "operation", "key_hash", "relation")},
        "key": key_texts(frame),
        "is_barrier": pc.or_(columns["is_barrier"], pa.array(~_ROW_CHANGES[frame.op])),
        "value": values,
        **check_traces({name: _trace(frame, name) for name in TRACES}),
    }
    return _struct(RECORD, arrays, values.is_null() if values.null_count else None)


def _trace(frame: Frame, wanted: str) -> pa.Array:
    """The values of the column with this name, where it exists."""
    found = pa.nulls(len(frame), pa.string())
    for version, shape in enumerate(frame.shapes):
        for index, column in enumerate(shape.columns):
            if column.name == wanted:
                values = _row_texts(frame, index, np.arange(len(frame)), frame.op == Op.DELETE)
                found = pc.if_else(pa.array(frame.version == version), values, found)
    return found


def _row_texts(frame: Frame, index: int, rows: I64, is_old: Bools) -> pa.Array:
    """The texts of a column in some rows; where `is_old`, from the old row."""
    values = column_texts(frame, "new", index, rows)
    return pc.if_else(pa.array(is_old), column_texts(frame, "old", index, rows), values) if is_old.any() else values


def check_traces(traces: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Only the valid ones; a tracestate needs its traceparent."""
    if all(found.null_count == len(found) for found in traces.values()):
        return dict(traces)
    none = pa.scalar(None, pa.string())
    made = {
        name: pc.if_else(pc.match_substring_regex(found, TRACES[name]), found, none) for name, found in traces.items()
    }
    return made | {"tracestate": pc.if_else(made["traceparent"].is_valid(), made["tracestate"], none)}


def make_fields(known: Mapping[str, pa.Array]) -> pa.Array:
    payload = known["payload"]
    none = pa.nulls(len(payload), pa.string())
    arrays = {field.name: known.get(field.name, none) for field in FIELDS}
    return _struct(FIELDS, arrays, payload.is_null() if payload.null_count else None)


# --- tables


def make_table(frame: Frame, keep: npt.NDArray[np.uint8] | None, ids: pa.Array, *, only_tables: bool) -> pa.Array:
    """The table changes after a chain, or all events; null where an event is no table change or `keep` drops it."""
    frame = without_lacking(frame)
    is_other = np.array([only_tables and not shape.oid for shape in frame.shapes], np.bool_)[frame.version]
    is_out = is_other if keep is None else is_other | (keep == 0)
    arrays = {
        "id": ids,
        "op": pa.array(frame.op),
        "relation": pa.array(frame.version),
        **{name: frame.changes.column(name) for name in ("new", "old", "unchanged")},
        "old_kind": pa.array(frame.old_kind),
        "ordinal": pa.array(frame.ordinal),
        "commit_time": pa.array(frame.commit_time),
        "xid": frame.owners.column("xid"),
    }
    return _struct(TABLE, arrays, pa.array(is_out) if is_out.any() else None)


def shapes_of(frame: Frame) -> str:
    """The shapes of the tables in a frame after a chain, by number, as JSON."""
    frame = without_lacking(frame)
    shapes = {
        number: TableShape(frame.shapes[number], frame.details[number]) for number in np.unique(frame.version).tolist()
    }
    return json.dumps({number: shape.to_json() for number, shape in shapes.items()})


def read_shapes(texts: Iterable[str]) -> dict[int, TableShape]:
    """The shapes in several results of `shapes_of`; equal numbers mean equal shapes."""
    raw = {number: shape for text in set(texts) for number, shape in json.loads(text).items()}
    return {int(number): TableShape.from_json(shape) for number, shape in raw.items()}


def render_changes(changes: pa.RecordBatch, shapes: Mapping[int, TableShape], *, transaction: bool) -> pa.Array:
    """The JSON events of table changes (`TABLE`)."""
    numbers = sorted(shapes)
    places = np.zeros(max(numbers, default=0) + 1, np.int32)
    places[numbers] = np.arange(len(numbers))
    count = changes.num_rows
    zeros, none = pa.array(np.zeros(count, np.int32)), pa.nulls(count, pa.string())
    relation = pa.array(places[changes.column("relation").to_numpy()])
    given = {name: changes.column(name) for name in ("ordinal", "op", "new", "old", "old_kind", "unchanged")}
    rows = pa.RecordBatch.from_pydict({**given, "sub": zeros, "relation": relation, "prefix": none})
    owners = pa.RecordBatch.from_pydict(
        {
            "commit": zeros.cast(pa.int64()),
            "kind": zeros.cast(pa.uint8()),
            "commit_time": changes.column("commit_time"),
            "xid": changes.column("xid"),
        }
    )
    frame = make_frame(rows, owners, [shapes[number].relation for number in numbers], EventOptions())
    ids, positions = changes.column("id"), changes.column("position")
    return render(frame, event_layout(frame, ids, positions, transaction=transaction, end=""))


def _struct(kind: pa.StructType, arrays: Mapping[str, pa.Array], mask: pa.Array | None) -> pa.Array:
    columns = [arrays[field.name] for field in kind]
    columns = [
        one if one.type == field.type else one.cast(field.type) for one, field in zip(columns, kind, strict=True)
    ]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)


# --- keys: which changes must stay in order


def has_key(shape: Relation) -> bool:
    """Whether some columns identify the table's rows."""
    return shape.replica_identity in ("d", "i") and any(column.is_key for column in shape.columns)


def find_barriers(frame: Frame) -> Bools:
    """Changes that concern more than one key: earlier changes must be written before them, later ones after. An UPDATE
    has an old key only if the key changed (or is so long that PostgreSQL stores it out of line)."""
    moved: Bools = (frame.op == Op.UPDATE) & (frame.old_kind == OldKind.KEY)
    return _BARRIERS[frame.op] | moved


def key_hashes(frame: Frame) -> I64:
    """A number for every change that is equal for all changes of its row, in any process at any time."""
    seeds = np.array([zlib.crc32(shape.channel.encode()) for shape in frame.shapes], np.uint64)
    hashes: U64 = mix(seeds * _GOLDEN)[frame.version]
    for version in np.unique(frame.version).tolist():
        if has_key(frame.shapes[version]):
            rows = np.flatnonzero(frame.version == version)
            for index, column in enumerate(frame.shapes[version].columns):
                if column.is_key:
                    values = _hash_values(_row_texts(frame, index, rows, frame.op[rows] == Op.DELETE))
                    hashes[rows] += mix(values + np.full(1, index + 1, np.uint64) * _GOLDEN)
    return mix(hashes).view(np.int64)


def key_texts(frame: Frame) -> pa.Array:
    """The key's values as a JSON array. Null if the event is not about one row, its table has no key, or the key was
    not sent."""
    found = [pa.nulls(1, pa.string())]
    places = np.zeros(len(frame), np.int64)
    done = 1
    for version in np.unique(frame.version).tolist():
        shape = frame.shapes[version]
        if has_key(shape):
            rows = np.flatnonzero((frame.version == version) & (frame.op != Op.TRUNCATE))
            found.append(_join_key(frame, rows, [index for index, one in enumerate(shape.columns) if one.is_key]))
            places[rows] = done + np.arange(len(rows))
            done += len(rows)
    return pa.concat_arrays(found).take(pa.array(places))


def _join_key(frame: Frame, rows: I64, key: list[int]) -> pa.Array:
    is_delete: Bools = frame.op[rows] == Op.DELETE
    has_old: Bools = frame.old_kind[rows] != OldKind.NONE
    marks = frame.changes.column("unchanged")
    marked_rows = pc.list_parent_indices(marks).to_numpy()
    marked = pc.list_flatten(marks).to_numpy()
    pieces: list[pa.Array | str] = []
    is_missing = np.zeros(len(rows), np.bool_)
    for index in key:
        # A key so long that it is not sent again: its value is in the old row.
        is_old: Bools = is_delete | np.isin(rows, marked_rows[marked == index])
        is_missing |= is_old & ~has_old
        pieces += [",", _quoted(_row_texts(frame, index, rows, is_old))]
    texts = pc.binary_join_element_wise("[", *pieces[1:], "]", "")
    return pc.if_else(pa.array(is_missing), pa.scalar(None, pa.string()), texts) if is_missing.any() else texts


def _quoted(values: pa.Array) -> pa.Array:
    """JSON strings, or null."""
    plain = pc.fill_null(pc.binary_join_element_wise('"', values, '"', ""), "null")
    odd = pc.fill_null(pc.match_substring_regex(values, r'[\x00-\x1f"\\]'), False).to_numpy(zero_copy_only=False)
    if not odd.any():
        return plain
    escaped = pa.array([quote_json(text) for text in values.filter(pa.array(odd)).to_pylist()], pa.string())
    order = np.arange(len(values))
    order[odd] = len(values) + np.arange(len(escaped))
    return pa.concat_arrays([plain, escaped]).take(pa.array(order))


def _hash_values(values: pa.Array) -> U64:
    """A hash of each value: its bytes as digits in a large odd base, modulo 2^64."""
    _, offset_buffer, data_buffer = values.buffers()
    if offset_buffer is None or data_buffer is None:
        return np.zeros(len(values), np.uint64)
    offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64)
    offsets -= offsets[0]
    lengths = np.diff(offsets)
    place = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    powers = np.cumprod(np.full(int(lengths.max(initial=0)), np.uint64(0x100000001B3)), dtype=np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((data + np.uint64(1)) * powers[place], dtype=np.uint64)])
    result: U64 = sums[offsets[1:]] - sums[offsets[:-1]]
    return result
