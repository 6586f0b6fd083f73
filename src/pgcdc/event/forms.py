"""The forms in which sinks take events, as columns of a frame: what the source makes for each chain that asks for one.

*lines*: the rendered event with its newline. *records*: the rendered event and what it is known by. *tables*: the values
themselves, with the shapes of the tables beside them. `event.batch` reads what is made here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.operation import Op
from pgcdc.core.relation import Relation
from pgcdc.event.edits import Edit, SimpleChain
from pgcdc.event.frame import EventOptions, Frame, make_frame
from pgcdc.event.keys import find_barriers, key_texts
from pgcdc.event.lines import LineMaker
from pgcdc.event.values import edited_column, edited_lists, edited_marks

__all__ = [
    "FORMS",
    "RECORD",
    "TABLE",
    "TRACES",
    "Form",
    "TableShape",
    "check_trace",
    "form_column",
    "form_of",
    "make_record",
    "make_table",
    "read_shape",
    "read_shapes",
    "render_changes",
    "shapes_of",
]

Form = Literal["lines", "records", "tables"]
_TEXTS = pa.list_(pa.string())
RECORD = pa.struct(
    [
        ("id", pa.string()),
        ("channel", pa.string()),
        ("operation", pa.string()),
        ("key", pa.string()),
        ("key_hash", pa.int64()),
        ("is_barrier", pa.bool_()),
        ("relation", pa.int32()),
        ("value", pa.string()),
        ("traceparent", pa.string()),
        ("tracestate", pa.string()),
    ]
)
TABLE = pa.struct(
    [
        ("id", pa.string()),
        ("op", pa.uint8()),
        ("relation", pa.int32()),
        ("new", _TEXTS),
        ("old", _TEXTS),
        ("old_kind", pa.uint8()),
        ("unchanged", pa.list_(pa.int16())),
        ("ordinal", pa.int64()),
        ("commit_time", pa.int64()),
        ("xid", pa.int64()),
    ]
)
FORMS: dict[Form, pa.DataType] = {"lines": pa.string(), "records": RECORD, "tables": TABLE}
_PREFIXES: dict[Form, str] = {"lines": "line_", "records": "record_", "tables": "table_"}
_ROW_CHANGES = np.zeros(256, np.bool_)
_ROW_CHANGES[[Op.INSERT, Op.UPDATE, Op.DELETE, Op.SNAPSHOT]] = True
TRACES = {
    "traceparent": r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\z",
    "tracestate": r"\A[\x20-\x7e]{1,512}\z",
}
"""Names of columns with a W3C trace context, and what their values look like."""


def form_column(number: int, form: Form = "lines") -> str:
    """The column with what a chain makes in this form; null: the chain does not have the event."""
    return f"{_PREFIXES[form]}{number}"


def form_of(column: str) -> tuple[int, Form] | None:
    """The chain and form behind `form_column`."""
    for form in get_args(Form):
        number = column.removeprefix(_PREFIXES[form])
        if number != column and number.isdigit():
            return int(number), form
    return None


def make_record(frame: Frame, edit: Edit, values: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
    """The records of a frame; `values` are the rendered events."""
    traces = {name: _trace(frame, edit, name) for name in TRACES}
    state = pa.scalar(None, pa.string())  # says nothing without a parent
    traces["tracestate"] = pc.if_else(traces["traceparent"].is_valid(), traces["tracestate"], state)
    arrays = {
        **{name: columns[name] for name in ("id", "channel", "operation", "key_hash")},
        "key": key_texts(frame, edit),
        "is_barrier": pa.array(find_barriers(frame) | ~_ROW_CHANGES[frame.op]),
        "relation": pa.array(frame.version),
        "value": values,
        **traces,
    }
    return _struct(RECORD, arrays, values.is_null() if values.null_count else None)


def _trace(frame: Frame, edit: Edit, wanted: str) -> pa.Array:
    """The values of the column of this name, wherever there is one that looks right."""
    found = pa.nulls(len(frame), pa.string())
    for number, name in enumerate(edit.names or ()):
        if name == wanted and not (edit.dropped is not None and edit.dropped[number]):
            version = int(np.searchsorted(frame.first, number, side="right")) - 1
            rows: npt.NDArray[np.bool_] = frame.version == version
            index = number - int(frame.first[version])
            values = edited_column(frame, edit, "new", index)
            values = pc.if_else(pa.array(frame.op == Op.DELETE), edited_column(frame, edit, "old", index), values)
            found = pc.if_else(pa.array(rows), values, found)
    return check_trace(found, wanted)


def check_trace(values: pa.Array, name: str) -> pa.Array:
    """The values of a column of TRACES that look right; null for others."""
    if values.null_count == len(values):
        return values
    return pc.if_else(pc.match_substring_regex(values, TRACES[name]), values, pa.scalar(None, pa.string()))


# --- tables


@dataclass(frozen=True, slots=True)
class TableShape:
    """What a table looks like behind a chain."""

    relation: Relation
    details: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"relation": self.relation.to_json(), "details": self.details}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TableShape:
        return cls(Relation.from_json(raw["relation"]), raw["details"])


def make_table(frame: Frame, edit: Edit, ids: pa.Array) -> pa.Array:
    """The changes of tables; null where an event is none, or the chain does not have it."""
    is_table = np.array([shape.oid != 0 for shape in frame.shapes], np.bool_)[frame.version]
    keep = is_table if edit.keep is None else is_table & (edit.keep != 0)
    arrays = {
        "id": ids,
        "op": pa.array(frame.op),
        "relation": pa.array(frame.version),
        "new": edited_lists(frame, edit, "new"),
        "old": edited_lists(frame, edit, "old"),
        "old_kind": pa.array(frame.old_kind),
        "unchanged": edited_marks(frame, edit),
        "ordinal": pa.array(frame.ordinal),
        "commit_time": pa.array(frame.commit_time),
        "xid": frame.owners.column("xid"),
    }
    return _struct(TABLE, arrays, None if keep.all() else pa.array(~keep))


def shapes_of(frame: Frame, chain: SimpleChain, options: EventOptions) -> str:
    """The shapes of the tables in a frame behind a chain, by their numbers, as JSON."""
    details = {change.after: change.details for change in options.described.changes}
    found = {}
    for number in np.unique(frame.version).tolist():
        shape = frame.shapes[number]
        if shape.oid:
            found[number] = TableShape(*chain.describe(shape, details.get(shape))).to_json()
    return json.dumps(found)


def read_shapes(texts: Iterable[str]) -> dict[int, TableShape]:
    """The shapes behind several `shapes_of`, which have the same numbers for the same."""
    raw = {number: shape for text in set(texts) for number, shape in json.loads(text).items()}
    return {int(number): TableShape.from_json(shape) for number, shape in raw.items()}


@cache
def read_shape(text: str) -> TableShape:
    """The shape behind the text of an event's column `relation`."""
    return TableShape.from_json(json.loads(text))


def render_changes(changes: pa.RecordBatch, shapes: Mapping[int, TableShape], *, transaction: bool) -> pa.Array:
    """The JSON events of changes of tables (`TABLE`)."""
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
    return LineMaker(frame, ids, positions, transaction=transaction, end="").lines()


def _struct(kind: pa.StructType, arrays: Mapping[str, pa.Array], mask: pa.Array | None) -> pa.Array:
    columns = [arrays[field.name] for field in kind]
    columns = [
        one if one.type == field.type else one.cast(field.type) for one, field in zip(columns, kind, strict=True)
    ]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)
