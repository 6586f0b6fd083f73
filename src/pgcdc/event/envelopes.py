"""Other forms of the whole event: Debezium's documents and CloudEvents. See docs/envelopes.md.

They are rendered from the column buffers as our own events are (`event.lines`): what is around the values differs, and in
Debezium's documents values have types. What is different from Debezium itself is compared with its own output in
test_envelopes.py.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.relation import Op
from pgcdc.event.columns import read_shape
from pgcdc.event.debezium_values import absent, json_texts, placeholder, write_key
from pgcdc.event.edits import Edit, Replaced, SimpleChain
from pgcdc.event.frame import Frame
from pgcdc.event.lines import (
    BOOLEAN,
    DECIMAL,
    INTEGER,
    MOMENT,
    NUMBER,
    OPERATION_OF,
    OPERATIONS,
    RAW,
    TEXT,
    Layout,
    is_compiled,
    quote_json,
    render,
    time_texts,
)
from pgcdc.event.shape import ARRAY, NO_MODIFIER, REQUIRED, Family, column_types

Step = Mapping[str, Any]
_DEBEZIUM_OPS = {Op.INSERT: "c", Op.UPDATE: "u", Op.DELETE: "d", Op.TRUNCATE: "t", Op.SNAPSHOT: "r"}
_KINDS: dict[int, int] = {Family.TEXT: TEXT, Family.UUID: TEXT, Family.INTEGER: INTEGER, Family.BOOLEAN: BOOLEAN}
_FREQUENT: dict[int, int] = {Family.TIMESTAMPTZ: MOMENT, Family.NUMERIC: DECIMAL, Family.NUMBER: NUMBER}
_LOOKS = {
    MOMENT: r"\A[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?\+00\z",
    **dict.fromkeys((DECIMAL, NUMBER), r"\A-?[0-9]{1,9}(?:\.[0-9]{1,9})?\z"),
}
"""What the compiled renderer can write of types that are frequent; the rest of them is written here."""


def render_envelope(
    frame: Frame, chain: SimpleChain, edit: Edit, columns: Mapping[str, pa.Array], end: str
) -> pa.Array:
    """The events of a frame in the envelope of a chain, each followed by `end`; null: the chain has none for it.

    `columns` are `id`, `position` and `table_ordinal` of the events.
    """
    step = chain.envelope
    assert step is not None
    if step["type"] == "cloudevents":
        return render(frame, _cloudevents(frame, step, columns, end), edit)
    return _debezium(frame, chain, edit, step, columns, end)


def _join(*pieces: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(*pieces, "")


def _numbers(values: npt.NDArray[Any]) -> pa.Array:
    return pa.array(values).cast(pa.string())


def _by_shape(frame: Frame, texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.string()).take(pa.array(frame.version))


def _origins(frame: Frame, around: tuple[str, str], nothing: str) -> pa.Array:
    origin = frame.owners.column("origin")
    if origin.null_count == len(origin):
        return pa.array([nothing]).take(pa.array(np.zeros(len(frame), np.int32)))
    texts = [nothing if one is None else f"{around[0]}{quote_json(one)}{around[1]}" for one in origin.to_pylist()]
    return pa.array(texts, pa.string())


# --- CloudEvents


def _cloudevents(frame: Frame, step: Step, columns: Mapping[str, pa.Array], end: str) -> Layout:
    prefix = f"{step['type_prefix']}."
    kinds = _by_shape_and_op(
        frame,
        lambda shape, op: (
            f'","source":{quote_json(step["source"])},"type":{quote_json(prefix + op.lower())}'
            + (f',"subject":{quote_json(f"{shape.namespace}.{shape.name}")}' if shape.oid else "")
        ),
    )
    payloads = _by_shape_and_op(
        frame,
        lambda shape, op: (
            f',"datacontenttype":"application/json","data":{{"op":"{op}",'
            f'"table":{quote_json(shape.name if shape.oid else None)},"row":'
        ),
    )
    times = _join(',"time":', time_texts(frame.commit_time))
    times = pc.if_else(pa.array(frame.is_alone), "", times) if frame.is_alone.any() else times
    xid = frame.owners.column("xid")
    xids = pc.if_else(pc.equal(xid, 0), "", _join(',"xid":"', xid.cast(pa.string()), '"'))
    channels = _by_shape(frame, [f'","channel":{quote_json(channel)}' for channel in frame.channels])
    origins = _origins(frame, (',"origin":', ""), "")
    heads = _join(kinds, times, ',"sequence":"', columns["position"], channels, xids, origins, payloads)
    tails = pa.array(["}}" + end]).take(pa.array(np.zeros(len(frame), np.int32)))
    begin = b'{"specversion":"1.0","id":"'
    return Layout(begin, columns["id"], heads, np.arange(len(frame), dtype=np.int32), tails)


def _by_shape_and_op(frame: Frame, write: Any) -> pa.Array:
    """A text for each event that its table and operation decide."""
    places = frame.version.astype(np.int64) * len(OPERATIONS) + OPERATION_OF[frame.op]
    present, of_row = np.unique(places, return_inverse=True)
    texts = [
        write(frame.shapes[place // len(OPERATIONS)], OPERATIONS[place % len(OPERATIONS)]) for place in present.tolist()
    ]
    return pa.array(texts, pa.string()).take(pa.array(of_row))


# --- Debezium


def _debezium(
    frame: Frame, chain: SimpleChain, edit: Edit, step: Step, columns: Mapping[str, pa.Array], end: str
) -> pa.Array:
    known = np.zeros(256, np.bool_)
    known[[*_DEBEZIUM_OPS, Op.MESSAGE, Op.BEGIN, Op.COMMIT]] = True
    keep = known[frame.op] if edit.keep is None else known[frame.op] & (edit.keep != 0)
    types = _types(frame, chain)
    codes = np.array([code for code, _ in types], np.int64)
    is_other = codes & (ARRAY - 1) == Family.OTHER
    dropped = is_other if edit.dropped is None else is_other | (edit.dropped != 0)
    kinds = np.array([_kind(*one) for one in types], np.uint8)
    written = {side: _written(frame, edit, side, types, kinds, dropped, keep) for side in ("new", "old")}
    after = Edit(
        edit.names,
        dropped.astype(np.uint8) if dropped.any() else None,
        None if keep.all() else keep.astype(np.uint8),
        written["new"],
        written["old"],
    )
    tails, whole = _debezium_tails(frame, step, columns["table_ordinal"], end)
    zeros = np.zeros(len(frame), np.int32)
    layout = Layout(
        b"",
        None,
        pa.array(['{"before":']),
        zeros,
        tails,
        whole,
        kinds,
        pa.array([absent(*one) for one in types], pa.string()),
        pa.array([placeholder(code) for code, _ in types], pa.string()),
    )
    return render(frame, layout, after)


def _kind(code: int, modifier: int) -> int:
    frequent = _FREQUENT.get(code) if is_compiled() else None
    if frequent is not None and (code != Family.TIMESTAMPTZ or modifier & NO_MODIFIER == NO_MODIFIER):
        return frequent
    return _KINDS.get(code, RAW)


def _types(frame: Frame, chain: SimpleChain) -> list[tuple[int, int]]:
    """Code and modifier of all columns of all shapes. What a mask has put text into is text."""
    found: list[tuple[int, int]] = []
    for shape, details in zip(frame.shapes, frame.details, strict=True):
        for (code, modifier), is_text in zip(column_types(shape, details), chain.text_columns(shape), strict=True):
            found.append((Family.TEXT, NO_MODIFIER | modifier & REQUIRED) if is_text else (code, modifier))
    return found


def _written(
    frame: Frame,
    edit: Edit,
    side: str,
    types: list[tuple[int, int]],
    kinds: npt.NDArray[np.uint8],
    dropped: npt.NDArray[np.bool_],
    keep: npt.NDArray[np.bool_],
) -> Replaced | None:
    """The values of a side of which the renderer does not know how to write them, as JSON; beside what masks made."""
    lists = frame.changes.column(side)
    replaced: Replaced | None = getattr(edit, side)
    is_wanted = (kinds >= RAW) & ~dropped
    if lists.null_count == len(lists) or not is_wanted.any():
        return replaced
    begins: npt.NDArray[np.int32] = lists.offsets.to_numpy()[:-1]
    valid = lists.is_valid().to_numpy(zero_copy_only=False) & keep
    values = lists.values.view(pa.string())
    where = np.full(len(values), -1, np.int32) if replaced is None else replaced.where.copy()
    texts = [] if replaced is None else [replaced.texts]
    done = 0 if replaced is None else len(replaced.texts)
    for version in np.unique(frame.version[valid]).tolist():
        starts = begins[valid & (frame.version == version)]
        for number in range(int(frame.first[version]), int(frame.first[version + 1])):
            if is_wanted[number]:
                items = starts + (number - int(frame.first[version]))
                column = values.take(pa.array(items))
                if replaced is not None and (replaced.where[items] >= 0).any():  # a zero of its own type
                    column = replaced.texts.take(pa.array(replaced.where[items]))
                elif kinds[number] in _LOOKS:
                    is_odd = ~pc.fill_null(pc.match_substring_regex(column, _LOOKS[kinds[number]]), True).to_numpy(
                        zero_copy_only=False
                    )
                    items, column = items[is_odd], column.filter(pa.array(is_odd))
                texts.append(json_texts(column, *types[number]))
                where[items] = np.arange(done, done + len(items), dtype=np.int32)
                done += len(items)
    return Replaced(where, pa.concat_arrays(texts)) if texts else None


def _debezium_tails(
    frame: Frame, step: Step, ordinals: pa.Array, end: str
) -> tuple[pa.Array, npt.NDArray[np.uint8] | None]:
    """What follows the rows; and which events have no rows, so that this is all of them."""
    now = time.time_ns() // 1000
    xid, ordinal, lsn = frame.owners.column("xid"), _numbers(frame.ordinal), _numbers(frame.commit)
    xids = xid.cast(pa.string())
    micros = np.where(frame.is_alone, now, frame.commit_time)
    source = _join(
        '{"version":'
        + json.dumps(importlib.metadata.version("pgcdc"))
        + f',"connector":"postgresql","name":{json.dumps(step["topic_prefix"])},"ts_ms":',
        _numbers(micros // 1000),
        _by_shape_and_op(
            frame,
            lambda _, op: (
                f',"snapshot":"{"true" if op == "SNAPSHOT" else "false"}","db":{quote_json(frame.database)}'
                ',"sequence":"[\\"'
            ),
        ),
        lsn,
        '\\",\\"',
        ordinal,
        '\\"]","ts_us":',
        _numbers(micros),
        ',"ts_ns":',
        _numbers(micros * 1000),
        _by_shape(
            frame,
            [
                f',"schema":{quote_json(shape.namespace if shape.oid else "")}'
                f',"table":{quote_json(shape.name if shape.oid else "")},"txId":'
                for shape in frame.shapes
            ],
        ),
        pc.if_else(pc.equal(xid, 0), "null", xids),
        ',"lsn":',
        lsn,
        ',"xmin":null,"origin":',
        _origins(frame, ("", ""), "null"),
        ',"origin_lsn":null}',
    )
    block: pa.Array | str = "null"
    if step["transaction"]:
        order = pc.fill_null(ordinals.cast(pa.string()), "null")
        described = ['{"id":"', xids, ":", lsn, '","total_order":', ordinal, ',"data_collection_order":', order, "}"]
        block = pc.if_else(pc.equal(xid, 0), "null", _join(*described))
    times = f'","ts_ms":{now // 1000},"ts_us":{now},"ts_ns":{now}000}}{end}'
    letters = _by_shape_and_op(frame, lambda _, op: _DEBEZIUM_OPS.get(Op[op], ""))
    tails = _join(',"source":', source, ',"transaction":', block, ',"op":"', letters, times)
    whole: npt.NDArray[np.bool_] = np.isin(frame.op, [Op.MESSAGE, Op.BEGIN, Op.COMMIT])
    if not whole.any():
        return tails, None
    blocks = [block] * len(frame) if isinstance(block, str) else block.to_pylist()
    texts = tails.to_pylist()
    for row in np.flatnonzero(whole).tolist():
        if frame.op[row] == Op.MESSAGE:
            text = _message(frame, row, f'"source":{source[row].as_py()},"transaction":{blocks[row]}', now)
        else:
            text = _mark(frame, row)
        texts[row] = text + end
    return pa.array(texts, pa.string()), whole.astype(np.uint8)


def _message(frame: Frame, row: int, around: str, now: int) -> str:
    prefix, content = frame.changes.column("new")[row].as_py()
    encoded = base64.b64encode(content).decode()
    message = f'{{"prefix":{quote_json(prefix.decode())},"content":"{encoded}"}}'
    return f'{{"op":"m","ts_ms":{now // 1000},{around},"message":{message}}}'


def _mark(frame: Frame, row: int) -> str:
    is_begin = frame.op[row] == Op.BEGIN
    count = "null" if is_begin else str(frame.ordinal[row])
    return (
        f'{{"status":"{"BEGIN" if is_begin else "END"}","id":"{frame.owners.column("xid")[row]}:{frame.commit[row]}"'
        f',"event_count":{count},"data_collections":null,"ts_ms":{frame.commit_time[row] // 1000}}}'
    )


def write_keys(events: pa.RecordBatch) -> pa.Array:
    """What Debezium makes the keys of messages about events that are given as columns; null: without a key."""
    columns = (events.column(name).to_pylist() for name in ("operation", "row", "shape"))
    found: list[str | None] = []
    for operation, pairs, text in zip(*columns, strict=True):
        row = None if pairs is None else dict(pairs)
        if operation == "MESSAGE" and row is not None:
            found.append(f'{{"prefix":{quote_json(row["prefix"])}}}')
        else:
            shape = None if text is None else read_shape(text)[0]
            found.append(write_key(row, shape) if shape is not None and shape.relation.oid else None)
    return pa.array(found, pa.string())
