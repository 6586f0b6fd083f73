"""Messages about transactions whose outcome is not known yet: those that PostgreSQL streams while they run, and those
that are prepared for a two-phase commit. Pure functions from bytes to one type per message, as in `messages`.

A streamed transaction is sent in blocks (Stream Start ... Stream Stop). Blocks of others and whole transactions may
come in between. Inside a block, every message except Origin has the xid of its subtransaction after the tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc.source.postgres.wire.messages import U8, U32, U64, Fields, Layout, Readers, decode_error, truncated_error

STREAM_START = ord("S")
STREAM_STOP = ord("E")
STREAM_COMMIT = ord("c")
STREAM_ABORT = ord("A")
BEGIN_PREPARE = ord("b")
PREPARE = ord("P")
COMMIT_PREPARED = ord("K")
ROLLBACK_PREPARED = ord("r")
STREAM_PREPARE = ord("p")


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
    """A streamed transaction has been rolled back, or one of its subtransactions (then `subxid` differs)."""

    xid: int
    subxid: int
    abort_lsn: int = 0
    """0 unless the stream is parallel; also 0 if the transaction ended with a crash of the server."""
    abort_time: int = 0


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE TRANSACTION, sent at its start, its end or both; Commit Prepared or Rollback Prepared follows."""

    prepare_lsn: int  # Where its record starts: a slot that has confirmed more does not send the transaction again
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED: the transaction takes effect at this END lsn."""

    commit_lsn: int
    end_lsn: int
    commit_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    prepare_end_lsn: int
    end_lsn: int
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str


def split_xid(data: bytes | memoryview, lsn: int = 0) -> tuple[int, bytes]:
    """The xid after the tag of a message in a block, and the message without it."""
    if len(data) < 5:
        raise truncated_error("Streamed", "xid", 4, len(data) - 1, lsn)
    xid: int = U32.unpack_from(data, 1)[0]
    if not xid:
        raise decode_error("Streamed", "xid", "is 0", lsn)
    return xid, bytes(data[:1]) + bytes(data[5:])


def _skipped(fields: Fields, field: str) -> None:
    fields.number(U8, field)


_PREPARE: Readers = {
    "prepare LSN": U64,
    "end LSN": U64,
    "prepare time": Fields.time,
    "xid": Fields.xid,
    "gid": Fields.text,
}
_COMMIT: Readers = {"commit LSN": U64, "end LSN": U64, "commit time": Fields.time}
_ABORT: Readers = {"xid": Fields.xid, "subtransaction xid": U32}
_FLAGS: Readers = {"flags": _skipped}

parse_stream_start = Layout(
    STREAM_START, "Stream Start", StreamStart, {"xid": Fields.xid, "first segment": Fields.flag}
)
parse_stream_stop = Layout(STREAM_STOP, "Stream Stop", lambda: None, {})
parse_stream_commit = Layout(STREAM_COMMIT, "Stream Commit", StreamCommit, {"xid": Fields.xid, **_FLAGS, **_COMMIT})
parse_stream_abort = Layout(STREAM_ABORT, "Stream Abort", StreamAbort, _ABORT)
parse_parallel_abort = Layout(
    STREAM_ABORT, "Stream Abort", StreamAbort, {**_ABORT, "abort LSN": U64, "abort time": Fields.time}
)
parse_begin_prepare = Layout(BEGIN_PREPARE, "Begin Prepare", Prepare, _PREPARE)
parse_prepare = Layout(PREPARE, "Prepare", Prepare, {**_FLAGS, **_PREPARE})
parse_stream_prepare = Layout(STREAM_PREPARE, "Stream Prepare", Prepare, {**_FLAGS, **_PREPARE})
parse_commit_prepared = Layout(
    COMMIT_PREPARED, "Commit Prepared", CommitPrepared, {**_FLAGS, **_COMMIT, "xid": Fields.xid, "gid": Fields.text}
)
parse_rollback_prepared = Layout(
    ROLLBACK_PREPARED,
    "Rollback Prepared",
    RollbackPrepared,
    {
        **_FLAGS,
        "prepare end LSN": U64,
        "end LSN": U64,
        "prepare time": Fields.time,
        "rollback time": Fields.time,
        "xid": Fields.xid,
        "gid": Fields.text,
    },
)
