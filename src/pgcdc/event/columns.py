"""Records and changes of tables, made of the columns of events: for chains in which Spark has changed them.

The source makes the same from column buffers (`event.forms`), many times faster. Here rows are maps, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import TransformError
from pgcdc.core.operation import OldKind, Op
from pgcdc.core.relation import Column
from pgcdc.event.edits import TEXT_OID, SimpleChain
from pgcdc.event.forms import RECORD, TABLE, TRACES, TableShape, check_trace, read_shape
from pgcdc.event.keys import has_key
from pgcdc.event.texts import quote_json

__all__ = ["records_of", "tables_of"]

Event = Mapping[str, Any]


def records_of(base: pa.Table, events: Sequence[Event], lines: pa.ChunkedArray, chain: SimpleChain) -> pa.Table:
    """The records of events, given as Spark returned them; `lines` are the rendered ones."""
    relations = [_shape(text, chain) for text in base.column("relation").to_pylist()]
    versions = pc.dictionary_encode(base.column("relation").combine_chunks(), null_encoding="encode").indices
    columns = {
        **{name: base.column(name) for name in ("position", "id", "key_hash")},
        **{name: pa.array([event[name] for event in events], pa.string()) for name in ("channel", "operation")},
        "key": pa.array([_key(event, shape) for event, shape in zip(events, relations, strict=True)], pa.string()),
        "is_barrier": pc.or_(
            base.column("is_barrier"),
            pa.array(
                [event["operation"] not in ("INSERT", "UPDATE", "DELETE", "SNAPSHOT") for event in events], pa.bool_()
            ),
        ),
        "relation": versions,
        "value": pc.utf8_rtrim(lines, "\n"),
    }
    for name in TRACES:
        values = [(event["row"] or {}).get(name) for event in events]
        columns[name] = check_trace(pa.array(values, pa.string()), name)
    state = pa.scalar(None, pa.string())  # says nothing without a parent
    columns["tracestate"] = pc.if_else(columns["traceparent"].is_valid(), columns["tracestate"], state)
    return pa.table({name: columns[name] for name in ("position", *RECORD.names)})


def _shape(text: str | None, chain: SimpleChain) -> TableShape | None:
    if text is None:
        return None
    shape = read_shape(text)
    relation, details = chain.describe(shape.relation, shape.details)
    return TableShape(relation, details)


def _key(event: Event, shape: TableShape | None) -> str | None:
    names = [column.name for column in shape.relation.columns if column.is_key] if shape else []
    row = event["row"]
    if shape is None or row is None or not has_key(shape.relation) or not row.keys() >= set(names):
        return None
    return f"[{','.join(quote_json(row[name]) for name in names)}]"


def tables_of(base: pa.Table, events: Sequence[Event], chain: SimpleChain) -> tuple[pa.Table, dict[int, TableShape]]:
    """The changes of tables among events, and the shapes behind their numbers."""
    shapes: dict[tuple[Any, ...], tuple[int, TableShape]] = {}
    rows: list[dict[str, Any]] = []
    wanted: list[int] = []
    for number, (text, event) in enumerate(zip(base.column("relation").to_pylist(), events, strict=True)):
        if text is None or event["table"] is None:
            continue
        row, old, unchanged = event["row"], event["old"], tuple(event["unchanged_toast_columns"] or ())
        is_delete = event["operation"] == "DELETE"
        place = (text, event["schema"], event["table"], None if is_delete or row is None else (tuple(row), unchanged))
        if place not in shapes:
            shapes[place] = len(shapes), _variant(text, chain, event, None if place[3] is None else {*row, *unchanged})
        version, shape = shapes[place]
        names = [column.name for column in shape.relation.columns]
        before, after = (row, None) if is_delete else (old, row)
        keys = {column.name for column in shape.relation.columns if column.is_key}
        is_key = before is not None and len(before) < len(names) and before.keys() <= keys
        kind = OldKind.NONE if before is None else OldKind.KEY if is_key else OldKind.FULL
        marks = [names.index(name) for name in unchanged if name in names]
        if before is not None:
            sent = keys if is_key else names
            marks += [-1 - index for index, name in enumerate(names) if name in sent and name not in before]
        rows.append({
            "op": int(_operation(event)),
            "relation": version,
            "new": None if after is None else [after.get(name) for name in names],
            "old": None if before is None else [before.get(name) for name in names],
            "old_kind": int(kind),
            "unchanged": marks or None,
        })  # fmt: skip
        wanted.append(number)
    given = base.take(pa.array(wanted, pa.int64()))
    made = {field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in TABLE}
    made |= {name: given.column(name) for name in ("id", "ordinal", "xid")}
    made["commit_time"] = given.column("created_at").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    table = pa.table({"position": given.column("position"), **{name: made[name] for name in TABLE.names}})
    return table, dict(shapes.values())


def _operation(event: Event) -> Op:
    try:
        return Op[event["operation"]]
    except KeyError:
        raise TransformError(
            f"a transform has made the operation {event['operation']} of an event",
            f"A table knows {', '.join(op.name for op in Op)}",
        ) from None


def _variant(text: str, chain: SimpleChain, event: Event, present: set[str] | None) -> TableShape:
    """The shape behind the chain: without what a function took out of the row, with what was put into it as text."""
    shape = _shape(text, chain)
    assert shape is not None
    relation = replace(shape.relation, namespace=event["schema"], name=event["table"])
    if present is not None:
        known = {column.name for column in relation.columns}
        kept = tuple(column for column in relation.columns if column.name in present)
        more = tuple(Column(name, TEXT_OID, -1, False) for name in event["row"] if name not in known)
        relation = replace(relation, columns=(*kept, *more))
    return TableShape(relation, shape.details)
