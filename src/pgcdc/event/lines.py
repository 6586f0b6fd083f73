"""Events as JSON text, rendered from the column buffers, and the texts in them (ids, positions and times), built for
whole columns at once. Two implementations give the same results: C (`_lines.pyx`), and Python here. The Python one runs
if no compiler was available. Read it first."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.compiled import load_compiled
from pgcdc.core.position import ORDINAL_BITS, Kind, Position
from pgcdc.core.relation import OldKind, Op, Relation
from pgcdc.event.frame import I64, Edit, Frame, Replaced, dropped_columns

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]

OPERATIONS = tuple(op.name for op in Op)
OPERATION_OF = np.zeros(256, np.int32)  # Maps the byte of an operation to its index in OPERATIONS
for _number, _name in enumerate(OPERATIONS):
    OPERATION_OF[Op[_name]] = _number

NO_EDIT = Edit()
TEXT, INTEGER, BOOLEAN, RAW, MOMENT, DECIMAL, NUMBER = range(7)
"""How a value is written: as a string, as a number if it is one, as true or false, or unchanged because it is JSON
already. Only the compiled renderer knows the others: Debezium's forms of timestamptz, and of numeric with and without a
scale."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The text around the values of an event, and how the values are written."""

    begin: bytes
    ids: pa.Array | None  # One for each event; they follow `begin`
    heads: pa.Array
    head_of: npt.NDArray[np.int32]  # Which of `heads` follows, up to the first object of values
    tails: pa.Array  # For each event, the text after its values
    whole: npt.NDArray[np.uint8] | None = None  # Which events consist of the tail alone
    kinds: npt.NDArray[np.uint8] | None = None
    """If set, columns have types and the old row comes before the new one. For each column of all shapes one of TEXT,
    INTEGER, BOOLEAN, RAW."""
    absent: pa.Array | None = None  # With types: the text for a value that an old row does not have; empty: nothing
    placeholders: pa.Array | None = None  # With types: the same for unchanged TOAST


def render(frame: Frame, layout: Layout, edit: Edit = NO_EDIT) -> pa.Array:
    """The JSON of every event; null where the chain of `edit` drops the event."""
    return _renderer()(Keyed(frame, edit), frame.changes, layout)


def event_layout(frame: Frame, ids: pa.Array, positions: pa.Array, *, transaction: bool, end: str) -> Layout:
    """The text around the values of our own events, each followed by `end`."""

    def head(version: int, op: str) -> str:
        channel = quote_json(frame.channels[version])
        return f'","channel":{channel},"operation":"{op}","payload":{_payload_head(frame, version, op)}'

    times = _times(frame)
    pieces: list[Any] = [f'}},"source":"{frame.source}","created_at":', times, ',"position":"', positions, '"']
    pieces += [',"transaction":', _transactions(frame, times)] if transaction else []
    tails = pc.binary_join_element_wise(*pieces, "}" + end, "")
    return Layout(b'{"id":"', ids, *by_shape_and_op(frame, head), tails)


def event_fields(frame: Frame, edit: Edit, *, transaction: bool) -> dict[str, pa.Array]:
    """The parts that `event_layout` joins into one text, separately: the payload (JSON), the time, and if wanted the
    transaction (JSON)."""
    times = _times(frame)
    found = {"created_at": pc.utf8_trim(times, '"')}
    found |= {"transaction": _transactions(frame, times)} if transaction else {}
    alone, none = pa.array(frame.is_alone), pa.scalar(None, pa.string())
    layout = Layout(b"", None, *by_shape_and_op(frame, partial(_payload_head, frame)), pa.repeat("}", len(frame)))
    texts = {name: pc.if_else(alone, none, one) for name, one in found.items()}
    return {"payload": render(frame, layout, edit), **texts}


def _payload_head(frame: Frame, version: int, op: str) -> str:
    """The text from the start of the payload to the row."""
    return f'{{"op":"{op}",{table_head(frame.shapes[version])}"row":'


def table_head(shape: Relation) -> str:
    """The table of a payload: schema and name, both null for what belongs to none."""
    schema, table = (quote_json(name if shape.oid else None) for name in (shape.namespace, shape.name))
    return f'"schema":{schema},"table":{table},'


def by_shape_and_op(frame: Frame, write: Callable[[int, str], str]) -> tuple[pa.Array, npt.NDArray[np.int32]]:
    """Texts determined by an event's shape number and operation, and for each event the index of its text."""
    places = frame.version.astype(np.int64) * len(OPERATIONS) + OPERATION_OF[frame.op]
    is_there = np.bincount(places) > 0  # faster than unique(), which sorts all events
    present = (divmod(place, len(OPERATIONS)) for place in np.flatnonzero(is_there).tolist())
    texts = pa.array([write(version, OPERATIONS[op]) for version, op in present], pa.string())
    return texts, (np.cumsum(is_there) - 1).astype(np.int32)[places]


class Keyed:
    """What the renderers need of a frame, with column names as JSON keys, and what a chain does to it."""

    def __init__(self, frame: Frame, edit: Edit = NO_EDIT) -> None:
        names = edit.names
        if names is None:
            names = [column.name for shape in frame.shapes for column in shape.columns]
        self.keys = pa.array([f"{quote_json(name)}:" for name in names], pa.string())
        self.edit = edit
        self.dropped = {side: dropped_columns(frame, edit, side) for side in ("new", "old")}
        self.first = frame.first
        self.is_key = frame.is_key
        self.version = frame.version
        self.op = frame.op
        self.old_kind = frame.old_kind


def _times(frame: Frame) -> pa.Array:
    """Each event's commit time, as JSON."""
    times = time_texts(frame.commit_time)
    return pc.if_else(pa.array(frame.is_alone), "null", times) if frame.is_alone.any() else times


def _transactions(frame: Frame, times: pa.Array) -> pa.Array:
    """Each event's transaction, as JSON."""
    xid, seq = frame.owners.column("xid").cast(pa.string()), pa.array(frame.ordinal).cast(pa.string())
    described = pc.binary_join_element_wise('{"xid":', xid, ',"commit_time":', times, ',"seq":', seq, "}", "")
    return pc.if_else(pa.array(frame.is_alone), "null", described)


def render_python(frame: Keyed, changes: pa.RecordBatch, layout: Layout) -> pa.Array:
    """The events of `changes`, one JSON text for each."""
    keys, heads, edit = frame.keys.to_pylist(), layout.heads.to_pylist(), frame.edit
    lines: list[str | None] = []
    lists = (changes.column(side).cast(pa.list_(pa.binary())) for side in ("new", "old"))
    news, olds = (_replaced_values(one, replaced) for one, replaced in zip(lists, (edit.new, edit.old), strict=True))
    dropped = {side: set() if one is None else set(np.flatnonzero(one).tolist()) for side, one in frame.dropped.items()}
    ids = [""] * len(news) if layout.ids is None else _values(layout.ids)
    columns = (ids, news, olds, _values(changes.column("unchanged")), _values(layout.tails))
    for row, (event_id, new, old, unchanged, tail) in enumerate(zip(*columns, strict=True)):
        if edit.keep is not None and not edit.keep[row]:
            lines.append(None)
            continue
        if layout.whole is not None and layout.whole[row]:
            lines.append(tail)
            continue
        first, marks = int(frame.first[frame.version[row]]), unchanged or []
        gone = {side: {one - first for one in found} for side, found in dropped.items()}
        not_sent = {-1 - mark for mark in marks if mark < 0}
        if frame.old_kind[row] == OldKind.KEY and old is not None:
            not_sent |= {index for index in range(len(old)) if not frame.is_key[first + index]}
        before = _object(old, keys, first, gone["old"], not_sent, layout, layout.absent)
        is_delete = frame.op[row] == Op.DELETE
        unsent = {mark for mark in marks if mark >= 0}
        after = None if is_delete else _object(new, keys, first, gone["new"], unsent, layout, layout.placeholders)
        begin = f"{layout.begin.decode()}{event_id}{heads[layout.head_of[row]]}"
        if layout.kinds is not None:
            lines.append(f'{begin}{before},"after":{after or "null"}{tail}')
            continue
        names = ",".join(keys[first + mark][:-1] for mark in marks if mark >= 0 and mark not in gone["new"])
        toast = f',"_unchanged_toast_columns":[{names}]' if names else ""
        lines.append(f'{begin}{after or before},"old":{before if after else "null"}{toast}{tail}')
    return pa.array(lines, pa.string())


def _values(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _replaced_values(lists: pa.Array, replaced: Replaced | None) -> list[Any]:
    """Lists of values, with the texts by which a mask replaced some of them."""
    if replaced is None:
        return _values(lists)
    values = lists.values.to_pylist()
    for item in np.flatnonzero(replaced.where >= 0).tolist():
        text = replaced.texts[int(replaced.where[item])].as_py()
        values[item] = None if text is None else text.encode()
    ends = lists.offsets.to_pylist()
    return [values[ends[row] : ends[row + 1]] if lists[row].is_valid else None for row in range(len(lists))]


def _object(
    values: list[bytes | None] | None,
    keys: list[str],
    first: int,
    gone: set[int],
    not_sent: set[int],
    layout: Layout,
    instead: pa.Array | None,
) -> str:
    if values is None:
        return "null"
    fields = []
    for index, value in enumerate(values):
        column = first + index
        if index not in gone and index not in not_sent:
            kind = TEXT if layout.kinds is None else int(layout.kinds[column])
            fields.append(keys[column] + _write(None if value is None else value.decode(), kind))
        elif index not in gone and instead is not None and (text := instead[column].as_py()):
            fields.append(keys[column] + text)
    return f"{{{','.join(fields)}}}"


def _write(text: str | None, kind: int) -> str:
    if text is not None and kind != TEXT:
        if kind == RAW or (kind == INTEGER and len(text) < 21 and re.fullmatch("-?[0-9]+", text, re.ASCII)):
            return text
        if kind == BOOLEAN and text in ("t", "f"):
            return "true" if text == "t" else "false"
    return quote_json(text)


def is_compiled() -> bool:
    """Whether the renderer in C is in use."""
    return _renderer() is not render_python


@cache
def _renderer() -> Callable[..., pa.Array]:
    module = load_compiled("event._lines")
    render: Callable[..., pa.Array] = module.render if module is not None else render_python
    return render


# --- texts of numbers


@dataclass(frozen=True, slots=True)
class IdSeed:
    """Makes the ids of one stream unique: a hash of server and slot."""

    high: int
    low: int

    @classmethod
    def of(cls, system_identifier: str, slot: str) -> IdSeed:
        """The seed for a server's slot."""
        digest = hashlib.sha256(f"{system_identifier}/{slot}".encode()).digest()
        return cls(int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big"))


def mix(x: U64) -> U64:
    """A 64-bit finaliser: every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def places(kind: U8, ordinal: I64) -> I64:
    """`Position.place` of every row."""
    return (kind.astype(np.int64) << ORDINAL_BITS) | ordinal


def event_ids(seed: IdSeed, commit: I64, kind: U8, ordinal: I64, sub: I64, commit_time: I64) -> pa.Array:
    """UUIDv7s of commit time and position: the same change has the same id on every replay."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    x = mix(commit.view(np.uint64) * golden + kind.astype(np.uint64) + np.uint64(seed.high))
    small, many = sub.view(np.uint64), sub.view(np.uint64) >> np.uint64(16)
    x = mix(x + (ordinal.view(np.uint64) << np.uint64(16)) + small + many * golden)
    y = mix(x + np.uint64(seed.low))
    milliseconds = (np.maximum(commit_time, 0) // 1000).astype(np.uint64)
    high = (milliseconds << np.uint64(16)) | np.uint64(0x7000) | (x >> np.uint64(52))
    low = np.uint64(0x8000000000000000) | (y >> np.uint64(2))
    digits = np.concatenate([_hex(high), _hex(low)], axis=1)
    dash = np.full((len(commit), 1), ord("-"), np.uint8)
    cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    pieces = [piece for begin, end in cuts for piece in (dash, digits[:, begin:end])][1:]
    return _fixed_text(np.concatenate(pieces, axis=1))


def position_texts(commit: I64, kind: U8, ordinal: I64, sub: I64) -> pa.Array:
    """`str(Position)` of every row."""
    if sub.any():
        rows = zip(commit.tolist(), kind.tolist(), ordinal.tolist(), sub.tolist(), strict=True)
        return pa.array([str(Position(row[0], Kind(row[1]), *row[2:])) for row in rows], pa.string())
    slash = np.full((len(commit), 1), ord("/"), np.uint8)
    upper = [_hex(commit.view(np.uint64), _UPPER), slash, _hex(places(kind, ordinal).view(np.uint64), _UPPER)[:, 3:]]
    return _fixed_text(np.concatenate(upper, axis=1))


def time_texts(microseconds: I64) -> pa.Array:
    """Times as JSON strings with six digits of the second, in UTC."""
    count, width = len(microseconds), len("2026-11-16T00:46:06.258000")
    # Changes of one transaction are adjacent: each distinct time is written once.
    moments, index = np.unique(microseconds, return_inverse=True)
    texts = np.datetime_as_string(moments.view("datetime64[us]"), unit="us").astype(f"S{width}")
    letters = texts.view(np.uint8).reshape(-1, width)[index]
    quote = np.full((count, 1), ord('"'), np.uint8)
    end = np.broadcast_to(np.frombuffer(b'Z"', np.uint8), (count, 2))
    return _fixed_text(np.concatenate([quote, letters, end], axis=1))


def _digit_pairs(digits: str) -> npt.NDArray[np.uint8]:
    return np.array([[ord(digits[byte >> 4]), ord(digits[byte & 15])] for byte in range(256)], np.uint8)


_LOWER = _digit_pairs("0123456789abcdef")
_UPPER = _digit_pairs("0123456789ABCDEF")


def _hex(numbers: U64, digits: npt.NDArray[np.uint8] = _LOWER) -> npt.NDArray[np.uint8]:
    """16 hexadecimal digits for each number."""
    octets = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return digits[octets].reshape(-1, 16)


def _fixed_text(letters: npt.NDArray[np.uint8]) -> pa.Array:
    count, width = letters.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(letters)))


_ESCAPES = {
    **{byte: f"\\u{byte:04X}" for byte in range(32)},
    **{ord(raw): f"\\{letter}" for raw, letter in zip('\b\t\n\f\r"\\', 'btnfr"\\', strict=True)},
}


def quote_json(text: str | None) -> str:
    """A JSON string (or null) as Spark writes it: only what must be escaped is escaped."""
    return "null" if text is None else f'"{text.translate(_ESCAPES)}"'
