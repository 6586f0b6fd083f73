"""Writes the messages that the server would send: the other direction of `pgcdc.source.postgres.wire.messages` and `rows`.

Times are microseconds since 1970, as everywhere outside of the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Literal

from pgcdc.core.relation import Relation
from pgcdc.source.postgres.wire.messages import POSTGRES_EPOCH_US

__all__ = [
    "UNCHANGED",
    "Unchanged",
    "Value",
    "encode_begin",
    "encode_begin_prepare",
    "encode_commit",
    "encode_commit_prepared",
    "encode_delete",
    "encode_insert",
    "encode_keepalive",
    "encode_message",
    "encode_origin",
    "encode_prepare",
    "encode_relation",
    "encode_rollback_prepared",
    "encode_stream_abort",
    "encode_stream_commit",
    "encode_stream_start",
    "encode_stream_stop",
    "encode_truncate",
    "encode_tuple",
    "encode_type",
    "encode_update",
    "in_stream",
]


class Unchanged(Enum):
    """The type of UNCHANGED."""

    TOAST = "unchanged TOAST"


UNCHANGED = Unchanged.TOAST
"""A value that the server did not send because the update did not touch it."""

Value = bytes | str | None | Unchanged
"""A column's value: text, NULL or UNCHANGED."""


def encode_keepalive(wal_end: int, send_time: int = POSTGRES_EPOCH_US, reply_requested: bool = False) -> bytes:
    """A Keepalive."""
    return struct.pack("!cQq?", b"k", wal_end, send_time - POSTGRES_EPOCH_US, reply_requested)


def encode_begin(final_lsn: int, commit_time: int = POSTGRES_EPOCH_US, xid: int = 1) -> bytes:
    """A Begin."""
    return struct.pack("!cQqI", b"B", final_lsn, commit_time - POSTGRES_EPOCH_US, xid)


def encode_commit(commit_lsn: int, end_lsn: int, commit_time: int = POSTGRES_EPOCH_US, flags: int = 0) -> bytes:
    """A Commit."""
    return struct.pack("!cBQQq", b"C", flags, commit_lsn, end_lsn, commit_time - POSTGRES_EPOCH_US)


def encode_origin(lsn: int, name: str) -> bytes:
    """An Origin."""
    return struct.pack("!cQ", b"O", lsn) + _text(name)


def encode_relation(relation: Relation) -> bytes:
    """A Relation; the namespace pg_catalog is sent as nothing, as the server does."""
    identity = relation.replica_identity.encode()
    columns = b"".join(
        struct.pack("!B", column.is_key) + _text(column.name) + struct.pack("!Ii", column.type_oid, column.typmod)
        for column in relation.columns
    )
    head = struct.pack("!cI", b"R", relation.oid) + _namespace(relation.namespace) + _text(relation.name)
    return head + identity + struct.pack("!H", len(relation.columns)) + columns


def encode_type(oid: int, namespace: str, name: str) -> bytes:
    """A Type."""
    return struct.pack("!cI", b"Y", oid) + _namespace(namespace) + _text(name)


def encode_truncate(oids: Sequence[int], cascade: bool = False, restart_identity: bool = False) -> bytes:
    """A Truncate of one or more tables."""
    return struct.pack(f"!ciB{len(oids)}I", b"T", len(oids), cascade | restart_identity << 1, *oids)


def encode_message(prefix: str, content: bytes, lsn: int = 0, transactional: bool = True) -> bytes:
    """A Message."""
    return struct.pack("!cBQ", b"M", transactional, lsn) + _text(prefix) + struct.pack("!i", len(content)) + content


def in_stream(xid: int, message: bytes) -> bytes:
    """The message as it is inside of a block: with the xid of its subtransaction."""
    return message[:1] + struct.pack("!I", xid) + message[1:]


def encode_stream_start(xid: int, first: bool = True) -> bytes:
    """A Stream Start."""
    return struct.pack("!cI?", b"S", xid, first)


def encode_stream_stop() -> bytes:
    """A Stream Stop."""
    return b"E"


def encode_stream_commit(xid: int, commit_lsn: int, end_lsn: int, commit_time: int = POSTGRES_EPOCH_US) -> bytes:
    """A Stream Commit."""
    return struct.pack("!cIBQQq", b"c", xid, 0, commit_lsn, end_lsn, commit_time - POSTGRES_EPOCH_US)


def encode_stream_abort(xid: int, subxid: int, where: tuple[int, int] | None = None) -> bytes:
    """A Stream Abort; `where` (LSN and time) is what parallel streams add."""
    more = b"" if where is None else struct.pack("!Qq", where[0], where[1] - POSTGRES_EPOCH_US)
    return struct.pack("!cII", b"A", xid, subxid) + more


def encode_begin_prepare(xid: int, gid: str, prepare_lsn: int, end_lsn: int, time: int = POSTGRES_EPOCH_US) -> bytes:
    """A Begin Prepare."""
    return struct.pack("!cQQqI", b"b", prepare_lsn, end_lsn, time - POSTGRES_EPOCH_US, xid) + _text(gid)


def encode_prepare(
    xid: int, gid: str, prepare_lsn: int, end_lsn: int, time: int = POSTGRES_EPOCH_US, *, streamed: bool = False
) -> bytes:
    """A Prepare or Stream Prepare."""
    tag = b"p" if streamed else b"P"
    return struct.pack("!cBQQqI", tag, 0, prepare_lsn, end_lsn, time - POSTGRES_EPOCH_US, xid) + _text(gid)


def encode_commit_prepared(xid: int, gid: str, commit_lsn: int, end_lsn: int, time: int = POSTGRES_EPOCH_US) -> bytes:
    """A Commit Prepared."""
    return struct.pack("!cBQQqI", b"K", 0, commit_lsn, end_lsn, time - POSTGRES_EPOCH_US, xid) + _text(gid)


def encode_rollback_prepared(
    xid: int, gid: str, prepare_end_lsn: int, end_lsn: int, times: tuple[int, int] = (POSTGRES_EPOCH_US,) * 2
) -> bytes:
    """A Rollback Prepared, with the times of PREPARE and ROLLBACK."""
    prepared, rolled_back = (time - POSTGRES_EPOCH_US for time in times)
    head = struct.pack("!cBQQqqI", b"r", 0, prepare_end_lsn, end_lsn, prepared, rolled_back, xid)
    return head + _text(gid)


def encode_insert(oid: int, new: Sequence[Value]) -> bytes:
    """An Insert."""
    return struct.pack("!cI", b"I", oid) + b"N" + encode_tuple(new)


def encode_update(
    oid: int, new: Sequence[Value], old: Sequence[Value] | None = None, old_kind: Literal["K", "O"] = "O"
) -> bytes:
    """An Update; without `old`, that of a row whose replica identity did not change."""
    before = b"" if old is None else old_kind.encode() + encode_tuple(old)
    return struct.pack("!cI", b"U", oid) + before + b"N" + encode_tuple(new)


def encode_delete(oid: int, old: Sequence[Value], old_kind: Literal["K", "O"] = "K") -> bytes:
    """A Delete."""
    return struct.pack("!cI", b"D", oid) + old_kind.encode() + encode_tuple(old)


def encode_tuple(values: Sequence[Value]) -> bytes:
    """TupleData: the count, and every value with its kind."""
    return struct.pack("!H", len(values)) + b"".join(map(_value, values))


def _value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, Unchanged):
        return b"u"
    raw = value.encode() if isinstance(value, str) else value
    return b"t" + struct.pack("!i", len(raw)) + raw


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


def _namespace(namespace: str) -> bytes:
    return _text("" if namespace == "pg_catalog" else namespace)
