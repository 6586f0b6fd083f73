"""What PostgreSQL says about transactions whose outcome is not known yet: those that it streams while they run, and
those that are prepared for a two-phase commit. Pure functions from bytes to one type per message, as in `messages`.

A streamed transaction comes in blocks (Stream Start ... Stream Stop), between which blocks of others and whole
transactions may stand. Inside of a block, every message but Origin has the xid of its subtransaction behind the tag.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pgcdc.source.postgres.wire.messages import Fields, decode_error, truncated_error

__all__ = [
    "BEGIN_PREPARE",
    "COMMIT_PREPARED",
    "PREPARE",
    "ROLLBACK_PREPARED",
    "STREAM_ABORT",
    "STREAM_COMMIT",
    "STREAM_PREPARE",
    "STREAM_START",
    "STREAM_STOP",
    "BeginPrepare",
    "CommitPrepared",
    "Prepare",
    "RollbackPrepared",
    "StreamAbort",
    "StreamCommit",
    "StreamStart",
    "parse_begin_prepare",
    "parse_commit_prepared",
    "parse_prepare",
    "parse_rollback_prepared",
    "parse_stream_abort",
    "parse_stream_commit",
    "parse_stream_start",
    "parse_stream_stop",
    "split_xid",
]

STREAM_START = ord("S")
STREAM_STOP = ord("E")
STREAM_COMMIT = ord("c")
STREAM_ABORT = ord("A")
BEGIN_PREPARE = ord("b")
PREPARE = ord("P")
COMMIT_PREPARED = ord("K")
ROLLBACK_PREPARED = ord("r")
STREAM_PREPARE = ord("p")

_U8 = struct.Struct("!B")
_U32 = struct.Struct("!I")
_U64 = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Opens a block of a transaction."""

    xid: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction has committed."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A streamed transaction, or (then `subxid` differs) one subtransaction of it, has been rolled back."""

    xid: int
    subxid: int
    abort_lsn: int
    """0 unless the stream is a parallel one; 0 also where the transaction ended with a crash of the server."""
    abort_time: int


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """Opens a transaction that ends with Prepare."""

    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE TRANSACTION: what comes next about it is Commit Prepared or Rollback Prepared."""

    prepare_lsn: int
    """Where its record starts: a slot that has confirmed more does not send the transaction again."""
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED: now the transaction counts, at this END lsn."""

    commit_lsn: int
    end_lsn: int
    commit_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED."""

    prepare_end_lsn: int
    end_lsn: int
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str


def split_xid(data: bytes | memoryview, lsn: int = 0) -> tuple[int, bytes]:
    """The xid behind the tag of a message in a block, and the message as it would be outside of one."""
    if len(data) < 5:
        raise truncated_error("Streamed", "xid", 4, len(data) - 1, lsn)
    xid: int = _U32.unpack_from(data, 1)[0]
    if not xid:
        raise decode_error("Streamed", "xid", "is 0", lsn)
    return xid, bytes(data[:1]) + bytes(data[5:])


def parse_stream_start(data: bytes | memoryview, lsn: int = 0) -> StreamStart:
    """A Stream Start message."""
    fields = Fields(data, STREAM_START, "Stream Start", lsn)
    start = StreamStart(xid=_xid(fields), is_first=bool(fields.number(_U8, "first segment")))
    fields.finish()
    return start


def parse_stream_stop(data: bytes | memoryview, lsn: int = 0) -> None:
    """A Stream Stop message: it has nothing but its tag."""
    Fields(data, STREAM_STOP, "Stream Stop", lsn).finish()


def parse_stream_commit(data: bytes | memoryview, lsn: int = 0) -> StreamCommit:
    """A Stream Commit message."""
    fields = Fields(data, STREAM_COMMIT, "Stream Commit", lsn)
    xid = _xid(fields)
    fields.number(_U8, "flags")
    commit = StreamCommit(
        xid=xid,
        commit_lsn=fields.number(_U64, "commit LSN"),
        end_lsn=fields.number(_U64, "end LSN"),
        commit_time=fields.time("commit time"),
    )
    fields.finish()
    return commit


def parse_stream_abort(data: bytes | memoryview, lsn: int = 0, *, parallel: bool = False) -> StreamAbort:
    """A Stream Abort message; one of a `parallel` stream tells also where and when."""
    fields = Fields(data, STREAM_ABORT, "Stream Abort", lsn)
    abort = StreamAbort(
        xid=_xid(fields),
        subxid=fields.number(_U32, "subtransaction xid"),
        abort_lsn=fields.number(_U64, "abort LSN") if parallel else 0,
        abort_time=fields.time("abort time") if parallel else 0,
    )
    fields.finish()
    return abort


def parse_begin_prepare(data: bytes | memoryview, lsn: int = 0) -> BeginPrepare:
    """A Begin Prepare message."""
    fields = Fields(data, BEGIN_PREPARE, "Begin Prepare", lsn)
    begin = BeginPrepare(
        prepare_lsn=fields.number(_U64, "prepare LSN"),
        end_lsn=fields.number(_U64, "end LSN"),
        prepare_time=fields.time("prepare time"),
        xid=_xid(fields),
        gid=fields.text("gid"),
    )
    fields.finish()
    return begin


def parse_prepare(data: bytes | memoryview, lsn: int = 0) -> Prepare:
    """A Prepare or Stream Prepare message: they differ only in their tags."""
    is_streamed = bool(data) and data[0] == STREAM_PREPARE
    name = "Stream Prepare" if is_streamed else "Prepare"
    fields = Fields(data, STREAM_PREPARE if is_streamed else PREPARE, name, lsn)
    fields.number(_U8, "flags")
    prepare = Prepare(
        prepare_lsn=fields.number(_U64, "prepare LSN"),
        end_lsn=fields.number(_U64, "end LSN"),
        prepare_time=fields.time("prepare time"),
        xid=_xid(fields),
        gid=fields.text("gid"),
    )
    fields.finish()
    return prepare


def parse_commit_prepared(data: bytes | memoryview, lsn: int = 0) -> CommitPrepared:
    """A Commit Prepared message."""
    fields = Fields(data, COMMIT_PREPARED, "Commit Prepared", lsn)
    fields.number(_U8, "flags")
    commit = CommitPrepared(
        commit_lsn=fields.number(_U64, "commit LSN"),
        end_lsn=fields.number(_U64, "end LSN"),
        commit_time=fields.time("commit time"),
        xid=_xid(fields),
        gid=fields.text("gid"),
    )
    fields.finish()
    return commit


def parse_rollback_prepared(data: bytes | memoryview, lsn: int = 0) -> RollbackPrepared:
    """A Rollback Prepared message."""
    fields = Fields(data, ROLLBACK_PREPARED, "Rollback Prepared", lsn)
    fields.number(_U8, "flags")
    rollback = RollbackPrepared(
        prepare_end_lsn=fields.number(_U64, "prepare end LSN"),
        end_lsn=fields.number(_U64, "end LSN"),
        prepare_time=fields.time("prepare time"),
        rollback_time=fields.time("rollback time"),
        xid=_xid(fields),
        gid=fields.text("gid"),
    )
    fields.finish()
    return rollback


def _xid(fields: Fields) -> int:
    xid = fields.number(_U32, "xid")
    if not xid:
        raise fields.error("xid", "is 0")
    return xid
