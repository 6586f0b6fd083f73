"""The replication stream's messages: pure functions from bytes to one type per message, and back.

The envelope is the replication protocol's (XLogData, Keepalive, status update); XLogData contains one pgoutput message.
This module has protocol version 1; later additions are in `undecided`. Row changes (Insert, Update, Delete) have no
type here: they go straight into column buffers, in `rows`. Every function takes the whole message, including the tag
byte, and the LSN to name in errors if it is damaged.

Parsed times are microseconds since 1970-01-01 UTC; the wire counts from 2000 (`POSTGRES_EPOCH_US`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import Column, Relation
from pgcdc.postgres.lsn import format_lsn

XLOG_DATA = ord("w")
KEEPALIVE = ord("k")
STATUS_UPDATE = ord("r")

BEGIN = ord("B")
COMMIT = ord("C")
ORIGIN = ord("O")
RELATION = ord("R")
TYPE = ord("Y")
INSERT = ord("I")
UPDATE = ord("U")
DELETE = ord("D")
TRUNCATE = ord("T")
MESSAGE = ord("M")

POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01 UTC, where PostgreSQL's clock starts, in microseconds since 1970
_MAX_TIME = 2**63 - 1 - POSTGRES_EPOCH_US

U8 = struct.Struct("!B")
U32 = struct.Struct("!I")
U64 = struct.Struct("!Q")
_I16 = struct.Struct("!h")
_I32 = struct.Struct("!i")
_I64 = struct.Struct("!q")
_STATUS_UPDATE = struct.Struct("!BQQQqB")

XLOG_DATA_HEADER_BYTES = 25  # Where the payload of an XLogData starts

_ADVICE = (
    "Nothing from there on was confirmed: start again to read it again. If it fails at the same place, "
    "report it with the server's version"
)


# Errors. The compiled decoder uses the same functions, so that the messages are identical.


def decode_error(message: str, field: str, problem: str, lsn: int) -> DecodeError:
    """The error for one field of one message. LSN 0 is unknown (the server sends 0 with Relation and Type)."""
    place = f" at {format_lsn(lsn)}" if lsn else ""
    return DecodeError(f"{message} message{place}: {field} {problem}", _ADVICE)


def truncated_error(message: str, field: str, needed: int, left: int, lsn: int) -> DecodeError:
    """The error for a field longer than the rest of the message."""
    return decode_error(message, field, f"is truncated: needs {needed} bytes, {left} are left", lsn)


def show_byte(byte: int) -> str:
    """A tag as an error shows it: `'I'`, or `0x07` if it is not a visible character."""
    return repr(chr(byte)) if 0x20 <= byte < 0x7F else f"0x{byte:02X}"


# The envelope.


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How far the server has come. `wal_end` may be confirmed only when everything received before it is flushed."""

    wal_end: int
    send_time: int
    reply_requested: bool


# The messages of pgoutput.


@dataclass(frozen=True, slots=True)
class Begin:
    final_lsn: int  # Where its Commit record starts: the commit LSN, not the END lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Ends a transaction. Confirm `end_lsn`."""

    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Follows Begin if the transaction was replicated to this server from another one."""

    lsn: int  # Its commit LSN on the origin
    name: str


@dataclass(frozen=True, slots=True)
class Type:
    """Describes a type that is not built in, before the Relation that uses it."""

    oid: int
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """One TRUNCATE, of one or more tables."""

    relation_oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A message written with `pg_logical_emit_message`. A non-transactional one comes outside Begin and Commit."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class Fields:
    """Reads the fields of one message in order, including the tag byte. Raises DecodeError for anything that does not
    fit."""

    __slots__ = ("_at", "_data", "_lsn", "_name")

    def __init__(self, data: bytes | memoryview, tag: int, name: str, lsn: int) -> None:
        self._data = bytes(data)
        self._at = 0
        self._name = name
        self._lsn = lsn
        found = self.number(U8, "tag")
        if found != tag:
            raise self.error("tag", f"is {show_byte(found)}, not {show_byte(tag)}")

    def error(self, field: str, problem: str) -> DecodeError:
        return decode_error(self._name, field, problem, self._lsn)

    def number(self, form: struct.Struct, field: str) -> int:
        at = self._advance(form.size, field)
        value: int = form.unpack_from(self._data, at)[0]
        return value

    def count(self, form: struct.Struct, field: str) -> int:
        """A number that cannot be negative."""
        value = self.number(form, field)
        if value < 0:
            raise self.error(field, f"is negative: {value}")
        return value

    def xid(self, field: str) -> int:
        xid = self.number(U32, field)
        if not xid:
            raise self.error(field, "is 0")
        return xid

    def flag(self, field: str) -> bool:
        return bool(self.number(U8, field))

    def time(self, field: str) -> int:
        """Microseconds since 1970."""
        value = self.number(_I64, field)
        if value > _MAX_TIME:
            raise self.error(field, f"is out of range: {value}")
        return value + POSTGRES_EPOCH_US

    def text(self, field: str) -> str:
        """NUL-terminated text."""
        end = self._data.find(0, self._at)
        if end < 0:
            raise self.error(field, "has no NUL terminator")
        raw = self._data[self._at : end]
        self._at = end + 1
        try:
            return raw.decode()
        except UnicodeDecodeError as cause:
            raise self.error(field, f"is not UTF-8: {raw!r}") from cause

    def raw(self, size: int, field: str) -> bytes:
        at = self._advance(size, field)
        return self._data[at : at + size]

    def finish(self) -> None:
        """Raise if bytes are left."""
        left = len(self._data) - self._at
        if left:
            raise self.error("end", f"is followed by {left} bytes")

    def _advance(self, size: int, field: str) -> int:
        at, left = self._at, len(self._data) - self._at
        if size > left:
            raise truncated_error(self._name, field, size, left, self._lsn)
        self._at = at + size
        return at


_M = TypeVar("_M")
Readers = Mapping[str, struct.Struct | Callable[[Fields, str], Any]]  # By name (for errors), in wire order


@dataclass(frozen=True, slots=True)
class Layout(Generic[_M]):
    """A message of consecutive fields; call it to parse."""

    tag: int
    name: str
    make: Callable[..., _M]  # Gets the fields in order; None is skipped
    fields: Readers

    def __call__(self, data: bytes | memoryview, lsn: int = 0) -> _M:
        fields = Fields(data, self.tag, self.name, lsn)
        values = [
            fields.number(read, field) if isinstance(read, struct.Struct) else read(fields, field)
            for field, read in self.fields.items()
        ]
        fields.finish()
        return self.make(*(value for value in values if value is not None))


def encode_status_update(written: int, flushed: int, applied: int, now_us: int, reply_requested: bool) -> bytes:
    """A standby status update. The slot moves to `flushed`; `now_us` counts from 2000, as on the wire."""
    return _STATUS_UPDATE.pack(STATUS_UPDATE, written, flushed, applied, now_us, int(reply_requested))


parse_keepalive = Layout(
    KEEPALIVE, "Keepalive", Keepalive, {"WAL end": U64, "send time": Fields.time, "reply requested": Fields.flag}
)
parse_begin = Layout(BEGIN, "Begin", Begin, {"final LSN": U64, "commit time": Fields.time, "xid": U32})
parse_commit = Layout(
    COMMIT, "Commit", Commit, {"flags": U8, "commit LSN": U64, "end LSN": U64, "commit time": Fields.time}
)
parse_origin = Layout(ORIGIN, "Origin", Origin, {"LSN": U64, "name": Fields.text})


def parse_relation(data: bytes | memoryview, lsn: int = 0) -> Relation:
    """A Relation message: the shape that rows of a table have from now on."""
    fields = Fields(data, RELATION, "Relation", lsn)
    oid = fields.number(U32, "oid")
    namespace = _namespace(fields)
    name = fields.text("name")
    identity = fields.number(U8, "replica identity")
    if identity not in b"dnfi":
        raise fields.error("replica identity", f"is unknown: {show_byte(identity)}")
    columns = tuple(_column(fields, f"column {index + 1}") for index in range(fields.count(_I16, "column count")))
    fields.finish()
    return Relation(oid, namespace, name, chr(identity), columns)


def _column(fields: Fields, label: str) -> Column:
    is_key = bool(fields.number(U8, f"{label} flags") & 1)
    return Column(
        name=fields.text(f"{label} name"),
        type_oid=fields.number(U32, f"{label} type oid"),
        typmod=fields.number(_I32, f"{label} type modifier"),
        is_key=is_key,
    )


def _namespace(fields: Fields, field: str = "namespace") -> str:
    # The server saves bytes: it sends an empty name for the one schema that every database has.
    return fields.text(field) or "pg_catalog"


parse_type = Layout(TYPE, "Type", Type, {"oid": U32, "namespace": _namespace, "name": Fields.text})


def parse_truncate(data: bytes | memoryview, lsn: int = 0) -> Truncate:
    fields = Fields(data, TRUNCATE, "Truncate", lsn)
    count = fields.count(_I32, "relation count")
    options = fields.number(U8, "options")
    oids = tuple(fields.number(U32, f"relation {index + 1} oid") for index in range(count))
    fields.finish()
    return Truncate(oids, cascade=bool(options & 1), restart_identity=bool(options & 2))


def parse_message(data: bytes | memoryview, lsn: int = 0) -> Message:
    """A Message message; its content is the application's bytes."""
    fields = Fields(data, MESSAGE, "Message", lsn)
    transactional = bool(fields.number(U8, "flags") & 1)
    written_at = fields.number(U64, "LSN")
    prefix = fields.text("prefix")
    content = fields.raw(fields.count(_I32, "content length"), "content")
    fields.finish()
    return Message(transactional, written_at, prefix, content)


_Parsed = Begin | Commit | Origin | Relation | Type | Truncate | Message

_PARSERS: dict[int, Callable[[bytes | memoryview, int], _Parsed]] = {
    BEGIN: parse_begin,
    COMMIT: parse_commit,
    ORIGIN: parse_origin,
    RELATION: parse_relation,
    TYPE: parse_type,
    TRUNCATE: parse_truncate,
    MESSAGE: parse_message,
}


def parse_pgoutput(data: bytes | memoryview, lsn: int = 0) -> _Parsed:
    """Any pgoutput message except row changes (Insert, Update, Delete), which go to a RowBuffer."""
    if not data:
        raise truncated_error("pgoutput", "tag", 1, 0, lsn)
    parser = _PARSERS.get(data[0])
    if parser is None:
        raise decode_error("pgoutput", "tag", f"is unknown: {show_byte(data[0])}", lsn)
    return parser(data, lsn)
