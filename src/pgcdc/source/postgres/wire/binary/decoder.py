"""Rows with binary values become rows with text, so that everything behind them sees one form.

pgoutput's option `binary` sends most values in the binary form of their type. What comes out here is byte for byte what
the server would have sent without the option, in a session with our settings (`database`). Where that cannot be had
from the bytes alone (money depends on the server's locale, regclass on its catalog) it is an error, never a guess;
`unsupported` finds such types before anything is started.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pgcdc.core.errors import DecodeError, SourceError
from pgcdc.core.relation import Column
from pgcdc.postgres.database import Connection, name_table
from pgcdc.postgres.types.built_in import BUILT_IN
from pgcdc.postgres.types.catalog import TypeCatalog, TypeInfo
from pgcdc.source.postgres.wire.binary import nested, numbers, scalars
from pgcdc.source.postgres.wire.binary.reader import Damaged
from pgcdc.source.postgres.wire.messages import DELETE, decode_error, show_byte, truncated_error
from pgcdc.source.postgres.wire.rows import (
    ROW_NAMES,
    TUPLE_TAGS,
    count_error,
    kind_error,
    length_error,
    trailing_error,
    tuple_tag_error,
    value_field,
)

Converter = Callable[[bytes], bytes]

ADVICE: Final = "Leave --binary off"

_TEXT_FUNCTIONS = (
    ("nameout", "namesend"), ("textout", "textsend"), ("bpcharout", "bpcharsend"), ("varcharout", "varcharsend"),
    ("json_out", "json_send"), ("xml_out", "xml_send"), ("enum_out", "enum_send"),
)  # fmt: skip
_VERSIONED_FUNCTIONS = (
    ("jsonb_out", "jsonb_send"), ("jsonpath_out", "jsonpath_send"), ("ltree:ltree_out", "ltree:ltree_send"),
    ("ltree:lquery_out", "ltree:lquery_send"), ("ltree:ltxtq_out", "ltree:ltxtq_send"),
)  # fmt: skip

_SCALARS: Final[dict[tuple[str, str], Converter]] = {
    ("boolout", "boolsend"): numbers.bool_text,
    ("charout", "charsend"): numbers.char_text,
    ("int2out", "int2send"): numbers.int2_text,
    ("int4out", "int4send"): numbers.int4_text,
    ("int8out", "int8send"): numbers.int8_text,
    ("oidout", "oidsend"): numbers.uint32_text,
    ("xidout", "xidsend"): numbers.uint32_text,
    ("cidout", "cidsend"): numbers.uint32_text,
    ("xid8out", "xid8send"): numbers.uint64_text,
    ("float4out", "float4send"): numbers.float4_text,
    ("float8out", "float8send"): numbers.float8_text,
    ("numeric_out", "numeric_send"): numbers.numeric_text,
    ("vector:vector_out", "vector:vector_send"): numbers.vector_text,
    ("vector:halfvec_out", "vector:halfvec_send"): numbers.halfvec_text,
    ("vector:sparsevec_out", "vector:sparsevec_send"): numbers.sparsevec_text,
    ("byteaout", "byteasend"): scalars.bytea_text,
    ("bit_out", "bit_send"): scalars.bits_text,
    ("varbit_out", "varbit_send"): scalars.bits_text,
    ("uuid_out", "uuid_send"): scalars.uuid_text,
    ("inet_out", "inet_send"): scalars.inet_text,
    ("cidr_out", "cidr_send"): scalars.cidr_text,
    ("macaddr_out", "macaddr_send"): scalars.macaddr_text,
    ("macaddr8_out", "macaddr8_send"): scalars.macaddr8_text,
    ("tidout", "tidsend"): scalars.tid_text,
    ("pg_lsn_out", "pg_lsn_send"): scalars.lsn_text,
    ("pg_snapshot_out", "pg_snapshot_send"): scalars.snapshot_text,
    ("txid_snapshot_out", "txid_snapshot_send"): scalars.snapshot_text,  # until PostgreSQL 12
    ("hstore:hstore_out", "hstore:hstore_send"): scalars.hstore_text,
    ("date_out", "date_send"): scalars.date_text,
    ("time_out", "time_send"): scalars.time_text,
    ("timetz_out", "timetz_send"): scalars.timetz_text,
    ("timestamp_out", "timestamp_send"): scalars.timestamp_text,
    ("timestamptz_out", "timestamptz_send"): scalars.timestamptz_text,
    ("interval_out", "interval_send"): scalars.interval_text,
    ("point_out", "point_send"): numbers.point_text,
    ("line_out", "line_send"): numbers.line_text,
    ("lseg_out", "lseg_send"): numbers.lseg_text,
    ("box_out", "box_send"): numbers.box_text,
    ("path_out", "path_send"): numbers.path_text,
    ("poly_out", "poly_send"): numbers.polygon_text,
    ("circle_out", "circle_send"): numbers.circle_text,
    ("tsvectorout", "tsvectorsend"): nested.tsvector_text,
    ("tsqueryout", "tsquerysend"): nested.tsquery_text,
    **dict.fromkeys(_TEXT_FUNCTIONS, scalars.plain_text),
    **dict.fromkeys(_VERSIONED_FUNCTIONS, scalars.versioned_text),
}

_ARRAY = "array_out", "array_send"
_RECORD = "record_out", "record_send"
_RANGE = "range_out", "range_send"
_MULTIRANGE = "multirange_out", "multirange_send"
_WORD_LISTS = ("int2vectorout", "int2vectorsend"), ("oidvectorout", "oidvectorsend")

_OLDER: Final[dict[tuple[str, str], tuple[int, Converter]]] = {
    ("charout", "charsend"): (150000, numbers.older_char_text),
    ("interval_out", "interval_send"): (170000, scalars.finite_interval_text),
}
"""What was written otherwise until a version."""

_NEW = ord("N")
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_I16 = struct.Struct("!h")
_I32 = struct.Struct("!i")
_TEXT_HEADER = struct.Struct("!ci")
_MAX_TEXT = 2**31 - 1


class _NotSupported(Damaged):
    """A type whose text cannot be had from its binary form."""


class BinaryDecoder:
    """Turns binary values into text, for the types of one database.

    `reload` reads the catalog again: it is called when a type is met that was created after the first reading.
    """

    def __init__(self, catalog: TypeCatalog = BUILT_IN, reload: Callable[[], TypeCatalog] | None = None) -> None:
        self._catalog = catalog
        self._reload = reload
        self._converters: dict[int, Converter] = {}

    def to_text(self, type_oid: int, data: bytes) -> bytes:
        """One value. Raises DecodeError naming the type if that is damaged, or of a type that cannot be converted."""
        try:
            return self._convert(type_oid, data)
        except (Damaged, RecursionError) as cause:
            problem = self._explain(type_oid, cause)
            advice = ADVICE if isinstance(cause, _NotSupported) else ""
            raise DecodeError(f"binary value {problem}", advice) from cause

    def rewrite_row(self, message: bytes | memoryview, columns: Sequence[Column], lsn: int = 0) -> bytes:
        """The same Insert, Update or Delete message with every value of kind 'b' as text ('t')."""
        data = bytes(message)
        if not data:
            raise truncated_error("Row", "tag", 1, 0, lsn)
        if data[0] not in ROW_NAMES:
            raise decode_error("Row", "tag", f"is unknown: {show_byte(data[0])}", lsn)
        row = _Rewrite(data, ROW_NAMES[data[0]], lsn)
        row.copy("relation oid", 4)
        tag = row.copy_tuple_tag(TUPLE_TAGS[data[0]])
        if tag != _NEW:
            row.copy_values("old", columns, self._convert_column)
        if data[0] != DELETE:
            if tag != _NEW:
                row.copy_tuple_tag(b"N")
            row.copy_values("new", columns, self._convert_column)
        return row.finish()

    def _convert_column(self, row: _Rewrite, side: str, index: int, column: Column, value: bytes) -> bytes:
        try:
            text = self._convert(column.type_oid, value)
        except (Damaged, RecursionError) as cause:
            field = value_field(side, index, f"({column.name}) value")
            error = row.error(field, self._explain(column.type_oid, cause))
            if isinstance(cause, _NotSupported):
                error = DecodeError(error.message, ADVICE)
            raise error from cause
        if len(text) > _MAX_TEXT:
            raise row.error(value_field(side, index, f"({column.name}) value"), f"has a text of {len(text)} bytes")
        return text

    def _explain(self, type_oid: int, cause: Exception) -> str:
        problem = "is nested too deeply" if isinstance(cause, RecursionError) else str(cause)
        return f"of type {self._catalog.name(type_oid)} {problem}"

    def _convert(self, type_oid: int, data: bytes) -> bytes:
        converter = self._converters.get(type_oid)
        if converter is None:
            converter = self._converters[type_oid] = self._find_converter(type_oid)
        return converter(data)

    def _find_converter(self, type_oid: int) -> Converter:
        info = self._catalog.get(type_oid)
        if info is None and self._reload is not None:
            self._catalog = self._reload()
            info = self._catalog.get(type_oid)
        if info is None:
            raise _NotSupported(f"cannot be converted: the type with oid {type_oid} is not known")
        converter = _choose_converter(info, self._convert, self._catalog.server_version)
        if converter is None:
            raise _NotSupported(f"cannot be converted: {_explain_type(info)}")
        return converter


def _choose_converter(info: TypeInfo, convert: nested.Convert, server_version: int) -> Converter | None:
    functions = info.output, info.send or ""
    if functions in _OLDER and server_version < _OLDER[functions][0]:
        return _OLDER[functions][1]
    if functions in _SCALARS:
        return _SCALARS[functions]
    if functions == _ARRAY:
        delimiter = info.delimiter.encode()
        return lambda data: nested.array_text(data, delimiter, convert)
    if functions == _RECORD:
        return lambda data: nested.record_text(data, convert)
    if functions == _RANGE:
        return lambda data: nested.range_text(data, info.inner, convert)
    if functions == _MULTIRANGE:
        return lambda data: nested.multirange_text(data, info.inner, convert)
    if functions in _WORD_LISTS:
        return lambda data: nested.word_list_text(data, convert)
    return None


def _explain_type(info: TypeInfo) -> str:
    if info.send is None:
        return f"the server has no binary form of {info.name}"
    if info.output.startswith("reg"):
        return f"{info.name} is sent as a number and written as a name, which only the server knows"
    if info.output == "cash_out":
        return f"how {info.name} is written depends on the server's locale (lc_monetary)"
    return f"the binary form of {info.name} is not known"


class _Rewrite:
    """Walks one row message and copies it, with another form of the values."""

    __slots__ = ("_at", "_data", "_lsn", "_name", "_parts")

    def __init__(self, data: bytes, name: str, lsn: int) -> None:
        self._data = data
        self._at = 1
        self._name = name
        self._lsn = lsn
        self._parts = [data[:1]]

    def error(self, field: str, problem: str) -> DecodeError:
        return decode_error(self._name, field, problem, self._lsn)

    def copy(self, field: str, size: int) -> bytes:
        left = len(self._data) - self._at
        if left < size:
            raise truncated_error(self._name, field, size, left, self._lsn)
        raw = self._data[self._at : self._at + size]
        self._at += size
        self._parts.append(raw)
        return raw

    def copy_tuple_tag(self, allowed: bytes) -> int:
        tag = self.copy("tuple tag", 1)[0]
        if tag not in allowed:
            raise tuple_tag_error(self._name, tag, allowed, self._lsn)
        return tag

    def copy_values(self, side: str, columns: Sequence[Column], convert: _ConvertColumn) -> None:
        count = _I16.unpack(self.copy(f"{side} column count", 2))[0]
        if count != len(columns):
            raise count_error(self._name, side, count, len(columns), self._lsn)
        data, at, size, parts = self._data, self._at, len(self._data), self._parts
        for index, column in enumerate(columns):
            if at == size:
                raise truncated_error(self._name, value_field(side, index, "kind"), 1, 0, self._lsn)
            kind, start = data[at], at + 5
            if kind in {_NULL, _UNCHANGED}:
                parts.append(data[at : at + 1])
                at += 1
                continue
            if kind not in {_TEXT, _BINARY}:
                raise kind_error(self._name, side, index, kind, self._lsn)
            if start > size:
                raise truncated_error(self._name, value_field(side, index, "length"), 4, size - at - 1, self._lsn)
            length = _I32.unpack_from(data, at + 1)[0]
            if length < 0:
                raise length_error(self._name, side, index, length, self._lsn)
            end = start + length
            if end > size:
                raise truncated_error(self._name, value_field(side, index, "value"), length, size - start, self._lsn)
            if kind == _TEXT:
                parts.append(data[at:end])
            else:
                text = convert(self, side, index, column, data[start:end])
                parts.append(_TEXT_HEADER.pack(b"t", len(text)))
                parts.append(text)
            at = end
        self._at = at

    def finish(self) -> bytes:
        left = len(self._data) - self._at
        if left:
            raise trailing_error(self._name, left, self._lsn)
        return b"".join(self._parts)


_ConvertColumn = Callable[[_Rewrite, str, int, Column, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A type of whose values `binary` would give no exact text, or none at all."""

    type_oid: int
    name: str
    reason: str
    """A half-sentence, for behind a colon."""


def unsupported(catalog: TypeCatalog, type_oids: Iterable[int]) -> list[Unsupported]:
    """Which of these column types need `binary` off, each once, in their order.

    A type without a binary form is fine as a column's (the server then sends text), but not inside of an array or row.
    """
    found = []
    for oid in dict.fromkeys(type_oids):
        info = catalog.get(oid)
        if info is not None and info.send is None:
            continue
        reason = _find_obstacle(catalog, oid, set())
        if reason:
            found.append(Unsupported(oid, catalog.name(oid), reason))
    return found


def _find_obstacle(catalog: TypeCatalog, oid: int, seen: set[int]) -> str:
    """Why a type cannot be converted, or nothing. Looks into what it is made of."""
    if oid in seen:
        return ""
    seen.add(oid)
    info = catalog.get(oid)
    if info is None:
        return f"the type with oid {oid} is not known"
    if _choose_converter(info, lambda _, data: data, catalog.server_version) is None:
        return _explain_type(info)
    functions = info.output, info.send
    inner = (info.inner,) if functions in {_ARRAY, _RANGE, _MULTIRANGE, *_WORD_LISTS} else info.attributes
    for part in inner:
        reason = _find_obstacle(catalog, part, seen)
        if reason:
            return reason
    return ""


_built_in = BinaryDecoder()


def to_text(type_oid: int, data: bytes) -> bytes:
    """One value of a type of PostgreSQL itself. Raises DecodeError naming the type."""
    return _built_in.to_text(type_oid, data)


def rewrite_row(message: bytes | memoryview, columns: Sequence[Column], lsn: int = 0) -> bytes:
    """The row with text for binary values, if their types are PostgreSQL's own: others need a BinaryDecoder."""
    return _built_in.rewrite_row(message, columns, lsn)


# --- before the start: published columns whose values cannot travel in binary form

_COLUMNS = """
SELECT t.schemaname, t.tablename, a.attname, a.atttypid::bigint
FROM pg_publication_tables t
JOIN pg_namespace n ON n.nspname = t.schemaname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE t.pubname = ANY (%s)
ORDER BY 1, 2, a.attnum
"""


def check_columns(conn: Connection, publications: Sequence[str]) -> None:
    """Raise unless every column of these publications has a type that we can turn into text."""
    rows = conn.execute(_COLUMNS, [list(publications)]).fetchall()
    refused = {one.type_oid: one for one in unsupported(TypeCatalog.load(conn), [row[3] for row in rows])}
    for schema, table, column, oid in rows:
        if oid in refused:
            raise SourceError(
                f"column {column} of table {name_table(schema, table)} cannot travel in binary form: {refused[oid].reason}",
                "Leave --binary off: text has the same values for every type",
            )
