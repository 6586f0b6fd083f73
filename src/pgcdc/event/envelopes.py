"""Other forms of the whole event: Debezium's documents and CloudEvents. See docs/envelopes.md. They are rendered from
column buffers like our own events (`event.lines`): only the text around the values differs, and Debezium's values have
types. test_envelopes.py compares them with Debezium's own output."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.relation import Op, Relation
from pgcdc.event.columns import read_shape
from pgcdc.event.debezium_values import absent, json_texts, placeholder, write_key
from pgcdc.event.frame import Edit, Frame, rewritten
from pgcdc.event.lines import (
    BOOLEAN,
    DECIMAL,
    INTEGER,
    MOMENT,
    NUMBER,
    RAW,
    TEXT,
    Layout,
    by_shape_and_op,
    is_compiled,
    quote_json,
    render,
    table_head,
    time_texts,
)
from pgcdc.event.shape import Family, ValueType, column_types

Step = Mapping[str, Any]
_DEBEZIUM_OPS = {Op.INSERT: "c", Op.UPDATE: "u", Op.DELETE: "d", Op.TRUNCATE: "t", Op.SNAPSHOT: "r"}
_KINDS = {Family.TEXT: TEXT, Family.UUID: TEXT, Family.INTEGER: INTEGER, Family.BOOLEAN: BOOLEAN}
_FREQUENT = {Family.TIMESTAMPTZ: MOMENT, Family.NUMERIC: DECIMAL, Family.NUMBER: NUMBER}
_LOOKS = {
    MOMENT: r"\A[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?\+00\z",
    **dict.fromkeys((DECIMAL, NUMBER), r"\A-?[0-9]{1,9}(?:\.[0-9]{1,9})?\z"),
}
"""Frequent types that the compiled renderer can write; this module writes the others."""


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


def render_cloudevents(frame: Frame, edit: Edit, step: Step, ids: pa.Array, positions: pa.Array, end: str) -> pa.Array:
    """The events of a frame, each followed by `end`; null where the chain drops the event."""
    prefix = f"{step['type_prefix']}."
    kinds = _pick(
        frame,
        lambda shape, op: (
            f'","source":{quote_json(step["source"])},"type":{quote_json(prefix + op.lower())}'
            + (f',"subject":{quote_json(f"{shape.namespace}.{shape.name}")}' if shape.oid else "")
        ),
    )
    payloads = _pick(
        frame,
        lambda shape, op: f',"datacontenttype":"application/json","data":{{"op":"{op}",{table_head(shape)}"row":',
    )
    times = _join(',"time":', time_texts(frame.commit_time))
    times = pc.if_else(pa.array(frame.is_alone), "", times) if frame.is_alone.any() else times
    xid = frame.owners.column("xid")
    xids = pc.if_else(pc.equal(xid, 0), "", _join(',"xid":"', xid.cast(pa.string()), '"'))
    channels = _by_shape(frame, [f'","channel":{quote_json(channel)}' for channel in frame.channels])
    origins = _origins(frame, (',"origin":', ""), "")
    heads = _join(kinds, times, ',"sequence":"', positions, channels, xids, origins, payloads)
    tails = pa.array(["}}" + end]).take(pa.array(np.zeros(len(frame), np.int32)))
    begin = b'{"specversion":"1.0","id":"'
    return render(frame, Layout(begin, ids, heads, np.arange(len(frame), dtype=np.int32), tails), edit)


def _pick(frame: Frame, write: Callable[[Relation, str], str]) -> pa.Array:
    """The text for each event, chosen by its table and operation."""
    texts, of_row = by_shape_and_op(frame, lambda version, op: write(frame.shapes[version], op))
    return texts.take(pa.array(of_row))


# --- Debezium


def render_debezium(
    frame: Frame, keep: npt.NDArray[np.uint8] | None, step: Step, ordinals: pa.Array | None, end: str
) -> pa.Array:
    """The events of a frame after a chain, each followed by `end`; null where the chain (`keep`) or Debezium drops the
    event. `ordinals`: the column `table_ordinal`; None: omit the transaction."""
    known = np.zeros(256, np.bool_)
    known[[*_DEBEZIUM_OPS, Op.MESSAGE, Op.BEGIN, Op.COMMIT]] = True
    is_kept = known[frame.op] if keep is None else known[frame.op] & (keep != 0)
    types = [one for shape in zip(frame.shapes, frame.details, strict=True) for one in column_types(*shape)]
    is_other = np.array([one.family is Family.OTHER for one in types], np.bool_)
    kinds = np.array([_kind(one) for one in types], np.uint8)
    is_wanted = (kinds >= RAW) & ~is_other

    def write(number: int, values: pa.Array) -> tuple[npt.NDArray[np.bool_] | slice, pa.Array]:
        """Write values as JSON that the renderer cannot write."""
        if kinds[number] not in _LOOKS:
            return slice(None), json_texts(values, types[number])
        looks_right = pc.fill_null(pc.match_substring_regex(values, _LOOKS[kinds[number]]), True)
        is_odd: npt.NDArray[np.bool_] = ~looks_right.to_numpy(zero_copy_only=False)
        return is_odd, json_texts(values.filter(pa.array(is_odd)), types[number])

    edit = Edit(
        dropped=is_other.astype(np.uint8) if is_other.any() else None,
        keep=None if is_kept.all() else is_kept.astype(np.uint8),
        new=rewritten(frame, "new", is_kept, is_wanted, write),
        old=rewritten(frame, "old", is_kept, is_wanted, write),
    )
    tails, whole = _debezium_tails(frame, step, ordinals, end)
    layout = Layout(
        b"",
        None,
        pa.array(['{"before":']),
        np.zeros(len(frame), np.int32),
        tails,
        whole,
        kinds,
        pa.array([absent(one) for one in types], pa.string()),
        pa.array([placeholder(one) for one in types], pa.string()),
    )
    return render(frame, layout, edit)


def _kind(type_: ValueType) -> int:
    if type_.is_array:
        return RAW
    frequent = _FREQUENT.get(type_.family) if is_compiled() and type_.digits == 6 else None
    return _KINDS.get(type_.family, RAW) if frequent is None else frequent


def _debezium_tails(
    frame: Frame, step: Step, ordinals: pa.Array | None, end: str
) -> tuple[pa.Array, npt.NDArray[np.uint8] | None]:
    """The text after each event's rows, and which events consist of that text alone."""
    now = time.time_ns() // 1000
    xid, ordinal, lsn = frame.owners.column("xid"), _numbers(frame.ordinal), _numbers(frame.commit)
    xids = xid.cast(pa.string())
    micros = np.where(frame.is_alone, now, frame.commit_time)
    source = _join(
        '{"version":'
        + json.dumps(importlib.metadata.version("pgcdc"))
        + f',"connector":"postgresql","name":{json.dumps(step["topic_prefix"])},"ts_ms":',
        _numbers(micros // 1000),
        _pick(
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
    if ordinals is not None:
        order = pc.fill_null(ordinals.cast(pa.string()), "null")
        described = ['{"id":"', xids, ":", lsn, '","total_order":', ordinal, ',"data_collection_order":', order, "}"]
        block = pc.if_else(pc.equal(xid, 0), "null", _join(*described))
    times = f'","ts_ms":{now // 1000},"ts_us":{now},"ts_ns":{now}000}}{end}'
    letters = _pick(frame, lambda _, op: _DEBEZIUM_OPS.get(Op[op], ""))
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
    encoded = base64.b64encode(content.encode()).decode()
    message = f'{{"prefix":{quote_json(prefix)},"content":"{encoded}"}}'
    return f'{{"op":"m","ts_ms":{now // 1000},{around},"message":{message}}}'


def _mark(frame: Frame, row: int) -> str:
    is_begin = frame.op[row] == Op.BEGIN
    count = "null" if is_begin else str(frame.ordinal[row])
    return (
        f'{{"status":"{"BEGIN" if is_begin else "END"}","id":"{frame.owners.column("xid")[row]}:{frame.commit[row]}"'
        f',"event_count":{count},"data_collections":null,"ts_ms":{frame.commit_time[row] // 1000}}}'
    )


def write_keys(events: pa.RecordBatch) -> pa.Array:
    """Debezium's message keys for events given as columns; null where an event has no key."""
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
