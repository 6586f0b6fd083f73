"""Row changes, from pgoutput's bytes into Arrow columns.

The hot path of the capture: one call of `add` per row. There are two implementations with the same results and the
same errors (property-tested against each other): `CompiledRowBuffer` in `_rows.pyx`, and `PythonRowBuffer` here, which
runs where there was no compiler, and is the one to read first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.compiled import load_compiled
from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import OldKind, Op
from pgcdc.source.postgres.wire.messages import DELETE, INSERT, UPDATE, decode_error, show_byte, truncated_error
from pgcdc.spool.schema import CHANGES

Runs = npt.NDArray[np.uint32]
"""Two columns: the first change of a run, and the xid of all its changes."""


class RowBuffer(Protocol):
    """Collects row changes until `take`. An `add` that fails leaves everything as it was."""

    @property
    def rows(self) -> int:
        """How many changes are held."""

    @property
    def nbytes(self) -> int:
        """About how many bytes are held."""

    def define(self, oid: int, relation: int, columns: int) -> None:
        """From now on the rows of table `oid` are of this relation version. Outlives `take` and `discard`."""

    def forget(self) -> None:
        """No table is defined any more."""

    def limit(self, rows: int, nbytes: int) -> None:
        """How much makes it full. Outlives `take` and `discard`."""

    def add(self, message: bytes | memoryview, ordinal: int, lsn: int = 0, streamed: bool = False) -> bool:
        """Append the change of one Insert, Update or Delete message, tag byte included; True if that made it full.

        If `streamed`, the xid of the (sub)transaction follows the tag. `lsn` is for the error.
        """

    def add_truncate(self, oid: int, ordinal: int, lsn: int = 0, xid: int = 0) -> None:
        """Append the truncation of one table."""

    def add_message(self, prefix: str, content: bytes, ordinal: int, sub: int, lsn: int = 0, xid: int = 0) -> None:
        """Append a logical message: its content is the one value of `new`."""

    def runs(self) -> Runs:
        """Which (sub)transactions the changes held are of: (first change, xid) of each run; empty if none was streamed."""

    def take(self) -> pa.RecordBatch:
        """Everything held, in the schema CHANGES, oldest first; nothing is held afterwards."""

    def discard(self) -> None:
        """Drop everything held."""


ROW_NAMES: Final = {INSERT: "Insert", UPDATE: "Update", DELETE: "Delete"}
TUPLE_TAGS: Final = {INSERT: b"N", UPDATE: b"KON", DELETE: b"KO"}
_NEW = ord("N")
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_I16 = struct.Struct("!h")
_I32 = struct.Struct("!i")
_U32 = struct.Struct("!I")

_ROW_BYTES = 32
"""What a row costs beside its values: the fixed columns and the offsets of the lists."""
_NULL_BYTES = 4
"""What a null costs beyond the byte it has on the wire: its offset."""
_MAX_HELD = 2**31 - 1
"""Arrow's offsets are int32. Every value and every null has at least a byte on the wire, so bounding those suffices."""
_MAX_COLUMNS = 2**15 - 1
"""`unchanged` counts columns in int16 (PostgreSQL ends at 1,600)."""
_MAX_SUB = 2**31 - 2
"""The greatest one belongs to the COMMIT marker."""

_Values = list[bytes | None]
_Row = tuple[int, int, int, int, _Values | None, _Values | None, int, list[int] | None, str | None]


class PythonRowBuffer:
    """The row buffer in plain Python: a row is decoded whole, and only then kept."""

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
        """How many changes are held."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """About how many bytes are held."""
        return self._wire_bytes + _NULL_BYTES * self._nulls + _ROW_BYTES * len(self._rows)

    def define(self, oid: int, relation: int, columns: int) -> None:
        """From now on the rows of table `oid` are of this relation version."""
        if not 0 <= columns <= _MAX_COLUMNS:
            raise column_count_error(columns)
        self._tables[oid] = relation, columns

    def forget(self) -> None:
        """No table is defined any more."""
        self._tables.clear()

    def limit(self, rows: int, nbytes: int) -> None:
        """How much makes it full."""
        self._full_rows, self._full_bytes = rows, nbytes

    def add(self, message: bytes | memoryview, ordinal: int, lsn: int = 0, streamed: bool = False) -> bool:
        """Append the change of one Insert, Update or Delete message."""
        data = bytes(message)
        if not data:
            raise truncated_error("Row", "tag", 1, 0, lsn)
        op = data[0]
        if op not in ROW_NAMES:
            raise decode_error("Row", "tag", f"is unknown: {show_byte(op)}", lsn)
        self._check_room(ROW_NAMES[op], len(data), lsn)
        scan = _Scan(data, ROW_NAMES[op], lsn)
        xid = 0
        if streamed:
            xid = scan.number("xid")
            if not xid:
                raise no_xid_error(ROW_NAMES[op], lsn)
        oid = scan.number("relation oid")
        if oid not in self._tables:
            raise unknown_relation_error(ROW_NAMES[op], oid, lsn)
        relation, columns = self._tables[oid]

        new: _Values | None = None
        old: _Values | None = None
        old_kind = int(OldKind.NONE)
        tag = scan.tuple_tag(TUPLE_TAGS[op])
        if tag != _NEW:
            old_kind = tag
            old = scan.values("old", columns)
        if op != DELETE:
            if old is not None:
                scan.tuple_tag(b"N")
            new = scan.values("new", columns)
        scan.finish()
        row = (ordinal, 0, op, relation, new, old, old_kind, scan.unchanged or None, None)
        self._keep(row, len(data), scan.nulls, xid)
        return len(self._rows) >= self._full_rows or self.nbytes >= self._full_bytes

    def add_truncate(self, oid: int, ordinal: int, lsn: int = 0, xid: int = 0) -> None:
        """Append the truncation of one table."""
        if oid not in self._tables:
            raise unknown_relation_error("Truncate", oid, lsn)
        relation, _ = self._tables[oid]
        self._keep((ordinal, 0, Op.TRUNCATE, relation, None, None, OldKind.NONE, None, None), 0, 0, xid)

    def add_message(self, prefix: str, content: bytes, ordinal: int, sub: int, lsn: int = 0, xid: int = 0) -> None:
        """Append a logical message."""
        if not 0 <= sub <= _MAX_SUB:
            raise sub_ordinal_error(sub, lsn)
        size = 1 + len(prefix.encode()) + len(content)
        self._check_room("Message", size, lsn)
        self._keep((ordinal, sub, Op.MESSAGE, -1, [content], None, OldKind.NONE, None, prefix), size, 0, xid)

    def runs(self) -> Runs:
        """Which (sub)transactions the changes held are of."""
        return np.array(self._runs, np.uint32).reshape(-1, 2)

    def take(self) -> pa.RecordBatch:
        """Everything held, in the schema CHANGES."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(CHANGES)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, CHANGES, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=CHANGES)
        self.discard()
        return batch

    def discard(self) -> None:
        """Drop everything held."""
        self._rows.clear()
        self._runs.clear()
        self._wire_bytes = 0
        self._nulls = 0

    def _check_room(self, name: str, size: int, lsn: int) -> None:
        if size > self._max_held - self._wire_bytes:
            raise too_much_held_error(name, size, self._wire_bytes, self._max_held, lsn)

    def _keep(self, row: _Row, wire_bytes: int, nulls: int, xid: int) -> None:
        if xid and (not self._runs or self._runs[-1][1] != xid):
            self._runs.append((len(self._rows), xid))
        self._rows.append(row)
        self._wire_bytes += wire_bytes
        self._nulls += nulls


class _Scan:
    """Walks one row message; collects beside the values what they say about nulls and unchanged TOAST."""

    __slots__ = ("_at", "_data", "_lsn", "_name", "nulls", "unchanged")

    def __init__(self, data: bytes, name: str, lsn: int) -> None:
        self._data = data
        self._at = 1
        self._name = name
        self._lsn = lsn
        self.nulls = 0
        self.unchanged: list[int] = []

    def number(self, field: str) -> int:
        self._need(field, 4)
        number: int = _U32.unpack_from(self._data, self._at)[0]
        self._at += 4
        return number

    def tuple_tag(self, allowed: bytes) -> int:
        self._need("tuple tag", 1)
        tag = self._data[self._at]
        if tag not in allowed:
            raise tuple_tag_error(self._name, tag, allowed, self._lsn)
        self._at += 1
        return tag

    def values(self, side: str, columns: int) -> _Values:
        self._need(f"{side} column count", 2)
        data, at, size = self._data, self._at + 2, len(self._data)
        count = _I16.unpack_from(data, self._at)[0]
        if count != columns:
            raise count_error(self._name, side, count, columns, self._lsn)
        values: _Values = []
        read_length = _I32.unpack_from
        for index in range(columns):
            if at == size:
                raise truncated_error(self._name, value_field(side, index, "kind"), 1, 0, self._lsn)
            kind = data[at]
            at += 1
            if kind == _TEXT:
                start = at + 4
                if start > size:
                    raise truncated_error(self._name, value_field(side, index, "length"), 4, size - at, self._lsn)
                length = read_length(data, at)[0]
                if length < 0:
                    raise length_error(self._name, side, index, length, self._lsn)
                at = start + length
                if at > size:
                    raise truncated_error(
                        self._name, value_field(side, index, "value"), length, size - start, self._lsn
                    )
                values.append(data[start:at])
                continue
            if kind == _UNCHANGED:
                self.unchanged.append(index if side == "new" else -1 - index)
            elif kind != _NULL:
                raise kind_error(self._name, side, index, kind, self._lsn)
            values.append(None)
            self.nulls += 1
        self._at = at
        return values

    def finish(self) -> None:
        left = len(self._data) - self._at
        if left:
            raise trailing_error(self._name, left, self._lsn)

    def _need(self, field: str, size: int) -> None:
        left = len(self._data) - self._at
        if left < size:
            raise truncated_error(self._name, field, size, left, self._lsn)


# Errors, shared with the compiled decoder so that both say the same. Columns are counted from 1, as PostgreSQL does.


def value_field(side: str, index: int, part: str) -> str:
    """How an error names a part of a value: `new column 3 length`."""
    return f"{side} column {index + 1} {part}"


def unknown_relation_error(name: str, oid: int, lsn: int) -> DecodeError:
    """A row of a table that no Relation message has described."""
    return decode_error(name, "relation oid", f"{oid} was not described by a Relation message", lsn)


def no_xid_error(name: str, lsn: int) -> DecodeError:
    """A streamed message that is of no transaction."""
    return decode_error(name, "xid", "is 0", lsn)


def tuple_tag_error(name: str, tag: int, allowed: bytes, lsn: int) -> DecodeError:
    """A tuple that is neither new nor old, or not the one this message has here."""
    return decode_error(name, "tuple tag", f"is {show_byte(tag)}, not one of {allowed.decode()}", lsn)


def count_error(name: str, side: str, count: int, columns: int, lsn: int) -> DecodeError:
    """A tuple that does not have the columns of its relation."""
    return decode_error(name, f"{side} column count", f"is {count}, but the relation has {columns}", lsn)


def kind_error(name: str, side: str, index: int, kind: int, lsn: int) -> DecodeError:
    """A value that is neither text, nor null, nor unchanged."""
    problem = "is 'b': binary values were not asked for" if kind == _BINARY else f"is unknown: {show_byte(kind)}"
    return decode_error(name, value_field(side, index, "kind"), problem, lsn)


def length_error(name: str, side: str, index: int, length: int, lsn: int) -> DecodeError:
    """A value of less than no bytes."""
    return decode_error(name, value_field(side, index, "length"), f"is negative: {length}", lsn)


def trailing_error(name: str, left: int, lsn: int) -> DecodeError:
    """A message that goes on after its end."""
    return decode_error(name, "end", f"is followed by {left} bytes", lsn)


def too_much_held_error(name: str, size: int, held: int, limit: int, lsn: int) -> DecodeError:
    """A change for which the offsets of a batch are too small."""
    return decode_error(name, "size", f"{size} does not fit: {held} of {limit} bytes are held and not taken", lsn)


def sub_ordinal_error(sub: int, lsn: int) -> DecodeError:
    """A message that has no place in the order, because too many follow the same row change."""
    return decode_error("Message", "sub-ordinal", f"{sub} is not within 0 and {_MAX_SUB}", lsn)


def column_count_error(columns: int) -> ValueError:
    """A definition that no Relation message can have led to."""
    return ValueError(f"a relation has 0 to {_MAX_COLUMNS} columns, not {columns}")


# Which implementation runs.


def new_row_buffer() -> RowBuffer:
    """An empty row buffer: the compiled one, unless it was not built or PGCDC_PURE_PYTHON=1 says otherwise."""
    return (_compiled() or PythonRowBuffer)()


def decoder_name() -> str:
    """Which implementation `new_row_buffer` gives: "compiled" or "python"."""
    return "compiled" if _compiled() else "python"


def _compiled() -> Callable[[], RowBuffer] | None:
    module = load_compiled("source.postgres.wire._rows")
    factory: Callable[[], RowBuffer] | None = module.CompiledRowBuffer if module is not None else None
    return factory
