"""Row changes, from pgoutput's bytes to Arrow columns.

This is the hot path of the capture: one call of `add` per row. Two implementations give the same results and the same
errors (property-tested against each other): `CompiledRowBuffer` in `_rows.pyx`, and `PythonRowBuffer` here. The Python
one runs if no compiler was available. Read it first. The compiled one does not describe what is wrong with a message:
it asks the Python one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.compiled import load_compiled
from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import OldKind, Op
from pgcdc.source.postgres.wire.messages import (
    DELETE,
    INSERT,
    U32,
    UPDATE,
    Fields,
    decode_error,
    show_byte,
    truncated_error,
)
from pgcdc.spool.schema import CHANGES

Runs = npt.NDArray[np.uint32]  # Two columns: the first change of a run, and the xid of all its changes

ROW_NAMES: Final = {INSERT: "Insert", UPDATE: "Update", DELETE: "Delete"}
_TUPLE_TAGS: Final = {INSERT: b"N", UPDATE: b"KON", DELETE: b"KO"}
_NEW = ord("N")
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_I16 = struct.Struct("!h")
_I32 = struct.Struct("!i")

_ROW_BYTES = 32  # A row's cost besides its values: the fixed columns and the lists' offsets
_NULL_BYTES = 4  # What a null costs in addition to its byte on the wire: its offset
_MAX_HELD = 2**31 - 1
"""Arrow's offsets are int32. Every value and null takes at least one byte on the wire, so it is enough to limit the
bytes."""

_Values = list[bytes | None]
_Row = tuple[int, int, int, int, _Values | None, _Values | None, int, list[int] | None, str | None]


class PythonRowBuffer:
    """Collects row changes until `take`, in plain Python. A row is decoded completely before it is kept, so a failed
    `add` changes nothing."""

    def __init__(self, max_held: int = _MAX_HELD) -> None:
        self._tables: dict[int, tuple[int, int]] = {}
        self._max_held = max_held
        self._rows: list[_Row] = []
        self._wire_bytes = 0
        self._nulls = 0
        self._runs: list[tuple[int, int]] = []
        self._full_rows = self._full_bytes = 2**62

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._wire_bytes + _NULL_BYTES * self._nulls + _ROW_BYTES * len(self._rows)

    def define(self, oid: int, relation: int, columns: int) -> None:
        """From now on the rows of table `oid` have this relation version. Still in force after `take`."""
        self._tables[oid] = relation, columns

    def forget(self) -> None:
        """Undefine all tables."""
        self._tables.clear()

    def limit(self, rows: int, nbytes: int) -> None:
        """Set the size at which the buffer is full. Still in force after `take`."""
        self._full_rows, self._full_bytes = rows, nbytes

    def add(self, message: bytes | memoryview, ordinal: int, lsn: int = 0, streamed: bool = False) -> bool:
        """Append the change of one Insert, Update or Delete message, including the tag byte; returns whether the buffer
        is now full. If `streamed`, the (sub)transaction's xid follows the tag. `lsn` is for errors."""
        if not message:
            raise truncated_error("Row", "tag", 1, 0, lsn)
        op = message[0]
        if op not in ROW_NAMES:
            raise decode_error("Row", "tag", f"is unknown: {show_byte(op)}", lsn)
        self._check_room(ROW_NAMES[op], len(message), lsn)
        fields = _RowFields(message, op, ROW_NAMES[op], lsn)
        xid = fields.xid("xid") if streamed else 0
        relation, columns = self._find(fields.number(U32, "relation oid"), ROW_NAMES[op], lsn)

        new: _Values | None = None
        old: _Values | None = None
        old_kind = int(OldKind.NONE)
        tag = fields.tuple_tag(_TUPLE_TAGS[op])
        if tag != _NEW:
            old_kind = tag
            old = fields.values("old", columns)
        if op != DELETE:
            if old is not None:
                fields.tuple_tag(b"N")
            new = fields.values("new", columns)
        fields.finish()
        row = (ordinal, 0, op, relation, new, old, old_kind, fields.unchanged or None, None)
        self._keep(row, len(message), fields.nulls, xid)
        return len(self._rows) >= self._full_rows or self.nbytes >= self._full_bytes

    def add_truncate(self, oid: int, ordinal: int, lsn: int = 0, xid: int = 0) -> None:
        relation, _ = self._find(oid, "Truncate", lsn)
        self._keep((ordinal, 0, Op.TRUNCATE, relation, None, None, OldKind.NONE, None, None), 0, 0, xid)

    def add_message(self, prefix: str, content: bytes, ordinal: int, sub: int, lsn: int = 0, xid: int = 0) -> None:
        """Append a logical message; its content becomes the only value of `new`."""
        size = 1 + len(prefix.encode()) + len(content)
        self._check_room("Message", size, lsn)
        self._keep((ordinal, sub, Op.MESSAGE, -1, [content], None, OldKind.NONE, None, prefix), size, 0, xid)

    def runs(self) -> Runs:
        """The (sub)transactions to which the changes belong: (first change, xid) of each run; empty if none was
        streamed."""
        return np.array(self._runs, np.uint32).reshape(-1, 2)

    def take(self) -> pa.RecordBatch:
        """All held changes, in the schema CHANGES, oldest first; empties the buffer."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(CHANGES)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, CHANGES, strict=True)]
        self._rows.clear()
        self._runs.clear()
        self._wire_bytes = 0
        self._nulls = 0
        return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)

    def _find(self, oid: int, name: str, lsn: int) -> tuple[int, int]:
        if oid not in self._tables:
            raise decode_error(name, "relation oid", f"{oid} was not described by a Relation message", lsn)
        return self._tables[oid]

    def _check_room(self, name: str, size: int, lsn: int) -> None:
        if size > self._max_held - self._wire_bytes:
            held = f"{self._wire_bytes} of {self._max_held} bytes are held and not taken"
            raise decode_error(name, "size", f"{size} does not fit: {held}", lsn)

    def _keep(self, row: _Row, wire_bytes: int, nulls: int, xid: int) -> None:
        if xid and (not self._runs or self._runs[-1][1] != xid):
            self._runs.append((len(self._rows), xid))
        self._rows.append(row)
        self._wire_bytes += wire_bytes
        self._nulls += nulls


RowBuffer = PythonRowBuffer  # The interface of both implementations


class _RowFields(Fields):
    """The fields of one row message; besides the values, it collects which are nulls and unchanged TOAST."""

    __slots__ = ("nulls", "unchanged")

    def __init__(self, data: bytes | memoryview, tag: int, name: str, lsn: int) -> None:
        super().__init__(data, tag, name, lsn)
        self.nulls = 0
        self.unchanged: list[int] = []

    def tuple_tag(self, allowed: bytes) -> int:
        tag = self.raw(1, "tuple tag")[0]
        if tag not in allowed:
            raise self.error("tuple tag", f"is {show_byte(tag)}, not one of {allowed.decode()}")
        return tag

    def values(self, side: str, columns: int) -> _Values:
        count = self.number(_I16, f"{side} column count")
        if count != columns:
            raise self.error(f"{side} column count", f"is {count}, but the relation has {columns}")
        values: _Values = []
        for index in range(columns):
            field = f"{side} column {index + 1}"  # counted from 1, as in PostgreSQL
            kind = self.raw(1, f"{field} kind")[0]
            if kind == _TEXT:
                values.append(self.raw(self.count(_I32, f"{field} length"), f"{field} value"))
                continue
            if kind == _UNCHANGED:
                self.unchanged.append(index if side == "new" else -1 - index)
            elif kind != _NULL:
                problem = "'b': binary values were not requested" if kind == _BINARY else f"unknown: {show_byte(kind)}"
                raise self.error(f"{field} kind", f"is {problem}")
            values.append(None)
            self.nulls += 1
        return values


def explain_damage(
    tables: dict[int, tuple[int, int]],
    wire_bytes: int,
    max_held: int,
    message: bytes | memoryview,
    lsn: int,
    streamed: bool,
) -> DecodeError:
    """The error for a message that the compiled decoder refused, given its tables and how full it was."""
    buffer = PythonRowBuffer(max_held)
    buffer._tables, buffer._wire_bytes = tables, wire_bytes
    try:
        buffer.add(message, 0, lsn, streamed)
    except DecodeError as error:
        return error
    raise AssertionError(f"the decoders do not agree about {bytes(message)!r}")


# Choice of implementation.


def new_row_buffer() -> RowBuffer:
    """An empty row buffer: the compiled one, unless it was not built or PGCDC_PURE_PYTHON=1 says otherwise."""
    return (_compiled() or PythonRowBuffer)()


def decoder_name() -> str:
    """The implementation that `new_row_buffer` uses: "compiled" or "python"."""
    return "compiled" if _compiled() else "python"


def _compiled() -> Callable[[], RowBuffer] | None:
    module = load_compiled("source.postgres.wire._rows")
    factory: Callable[[], RowBuffer] | None = module.CompiledRowBuffer if module is not None else None
    return factory
