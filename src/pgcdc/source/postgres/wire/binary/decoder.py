"""Converts rows with binary values to rows with text, so that all later code sees one form.

pgoutput's option `binary` sends most values in their type's binary form. The result is byte for byte what the server
would have sent without the option, under our session settings (`database`). Types whose text cannot be derived from the
bytes alone (money needs the server's locale, regclass its catalog) are errors, never guesses; `unsupported` finds them
before the start.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

from pgcdc.core.errors import DecodeError, SourceError
from pgcdc.core.relation import Column
from pgcdc.postgres.database import Connection, name_table
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo
from pgcdc.source.postgres.wire.binary import nested
from pgcdc.source.postgres.wire.binary.numbers import Converter, Damaged
from pgcdc.source.postgres.wire.binary.scalars import OLDER, SCALARS
from pgcdc.source.postgres.wire.messages import decode_error
from pgcdc.source.postgres.wire.rows import ROW_NAMES

_ADVICE = "Remove --binary"

_SIZE = struct.Struct("!i")
_MAX_TEXT = 2**31 - 1
_HOLDING = {"array_", "range_", "multirange_", "int2vector", "oidvector"}  # Types that contain values of one other type


class _NotSupported(Damaged):
    """A type whose text cannot be derived from its binary form."""


class BinaryDecoder:
    """Converts binary values to text, for the types of one database. `reload` reads the catalog again when a new type
    appears."""

    def __init__(self, catalog: TypeCatalog = BUILT_IN, reload: Callable[[], TypeCatalog] | None = None) -> None:
        self._catalog = catalog
        self._reload = reload
        self._converters: dict[int, Converter] = {}

    def to_text(self, type_oid: int, data: bytes) -> bytes:
        """One value as text. DecodeError names the type if the value is damaged or the type cannot be converted."""
        try:
            return self._convert(type_oid, data)
        except (Damaged, RecursionError) as cause:
            problem, advice = self._explain(type_oid, cause)
            raise DecodeError(f"binary value {problem}", advice) from cause

    def rewrite_row(self, message: bytes | memoryview, columns: Sequence[Column], lsn: int = 0, head: int = 1) -> bytes:
        """The same Insert, Update or Delete message with every 'b' value as text ('t'). `head` bytes come before the
        relation's oid. Damaged messages pass unchanged: the row buffer reports them."""
        data = bytes(message)
        parts: list[bytes] = []
        at, copied, count = head + 4, 0, struct.pack("!h", len(columns))
        for _ in range(2):  # the old and the new tuple
            side = "new" if data[at : at + 1] == b"N" else "old"
            at += 3
            if data[at - 2 : at] != count:
                break
            for index, column in enumerate(columns):
                kind, start = data[at : at + 1], at + 5
                if kind not in {b"t", b"b"}:
                    at += 1
                    continue
                end = start + int.from_bytes(data[at + 1 : start], "big", signed=True)
                if not start <= end <= len(data):
                    return b"".join([*parts, data[copied:at], b"t", data[at + 1 :]])
                if kind == b"b":
                    field = f"{side} column {index + 1} ({column.name}) value"
                    text = self._convert_column(
                        data[start:end], column.type_oid, ROW_NAMES.get(data[0], "Row"), field, lsn
                    )
                    parts += (data[copied:at], b"t", _SIZE.pack(len(text)), text)
                    copied = end
                at = end
        return b"".join([*parts, data[copied:]])

    def _convert_column(self, value: bytes, type_oid: int, name: str, field: str, lsn: int) -> bytes:
        try:
            text = self._convert(type_oid, value)
        except (Damaged, RecursionError) as cause:
            problem, advice = self._explain(type_oid, cause)
            error = decode_error(name, field, problem, lsn)
            raise DecodeError(error.message, advice or error.advice) from cause
        if len(text) > _MAX_TEXT:
            raise decode_error(name, field, f"has a text of {len(text)} bytes", lsn)
        return text

    def _explain(self, type_oid: int, cause: Exception) -> tuple[str, str]:
        """What is wrong with a value, and advice if there is any."""
        problem = "is nested too deeply" if isinstance(cause, RecursionError) else str(cause)
        return f"of type {self._catalog.name(type_oid)} {problem}", _ADVICE if isinstance(cause, _NotSupported) else ""

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
            raise _NotSupported(f"cannot be converted: the type with oid {type_oid} is unknown")
        converter = _choose_converter(info, self._convert, self._catalog.server_version)
        if converter is None:
            raise _NotSupported(f"cannot be converted: {_explain_type(info)}")
        return converter


def _stem(info: TypeInfo) -> str:
    """The common stem of its two functions' names: `int4`, `numeric_`; empty if they differ."""
    stem = info.output.removesuffix("out")
    return stem if info.send == f"{stem}send" else ""


def _choose_converter(info: TypeInfo, convert: nested.Convert, server_version: int) -> Converter | None:
    stem = _stem(info)
    if stem in OLDER and server_version < OLDER[stem][0]:
        return OLDER[stem][1]
    if stem == "array_":
        delimiter = info.delimiter.encode()
        return lambda data: nested.array_text(data, delimiter, convert)
    if stem == "record_":
        return lambda data: nested.record_text(data, convert)
    if stem == "range_":
        return lambda data: nested.range_text(data, info.inner, convert)
    if stem == "multirange_":
        return lambda data: nested.multirange_text(data, info.inner, convert)
    if stem in {"int2vector", "oidvector"}:
        return lambda data: nested.word_list_text(data, convert)
    return SCALARS.get(stem) or nested.SEARCHES.get(stem)


def _explain_type(info: TypeInfo) -> str:
    if info.send is None:
        return f"the server has no binary form of {info.name}"
    if info.output.startswith("reg"):
        return f"{info.name} is sent as a number and written as a name, which only the server knows"
    if info.output == "cash_out":
        return f"how {info.name} is written depends on the server's locale (lc_monetary)"
    return f"the binary form of {info.name} is unknown"


def unsupported(catalog: TypeCatalog, type_oids: Iterable[int]) -> dict[int, str]:
    """Which of these column types need `binary` off, in order, and why (half a sentence, to follow a colon). A column's
    type may have no binary form (the server then sends text), but a type inside an array or row must have one."""
    found = {}
    for oid in dict.fromkeys(type_oids):
        info = catalog.get(oid)
        if (info is None or info.send is not None) and (reason := _find_obstacle(catalog, oid, set())):
            found[oid] = reason
    return found


def _find_obstacle(catalog: TypeCatalog, oid: int, seen: set[int]) -> str:
    """Why a type, or a type inside it, cannot be converted; empty if it can."""
    if oid in seen:
        return ""
    seen.add(oid)
    info = catalog.get(oid)
    if info is None:
        return f"the type with oid {oid} is unknown"
    if _choose_converter(info, lambda _, data: data, catalog.server_version) is None:
        return _explain_type(info)
    inner = (info.inner,) if _stem(info) in _HOLDING else info.attributes
    return next(filter(None, (_find_obstacle(catalog, part, seen) for part in inner)), "")


# --- before the start: find published columns whose values cannot be sent in binary form

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
    """Raise unless all published columns have types that we can convert to text."""
    rows = conn.execute(_COLUMNS, [list(publications)]).fetchall()
    refused = unsupported(TypeCatalog.load(conn), [row[3] for row in rows])
    for schema, table, column, oid in rows:
        if oid in refused:
            raise SourceError(
                f"column {column} of table {name_table(schema, table)} cannot travel in binary form: {refused[oid]}",
                "Remove --binary: text has the same values for every type",
            )
