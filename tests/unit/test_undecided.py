"""Messages about streamed and prepared transactions: every field, and what a damaged one says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from wire import (
    encode_begin_prepare,
    encode_commit_prepared,
    encode_insert,
    encode_prepare,
    encode_rollback_prepared,
    encode_stream_abort,
    encode_stream_commit,
    encode_stream_start,
    encode_stream_stop,
    in_stream,
)

from pgcdc.core.errors import DecodeError
from pgcdc.source.postgres.wire import undecided as und

NOON = 1_700_000_000_000_000
Parser = Callable[..., Any]


CASES: dict[str, tuple[bytes, Parser, Any]] = {
    "stream_start": (encode_stream_start(7), und.parse_stream_start, und.StreamStart(7, True)),
    "stream_start_again": (encode_stream_start(7, False), und.parse_stream_start, und.StreamStart(7, False)),
    "stream_stop": (encode_stream_stop(), und.parse_stream_stop, None),
    "stream_commit": (
        encode_stream_commit(7, 105, 110, NOON),
        und.parse_stream_commit,
        und.StreamCommit(7, 105, 110, NOON),
    ),
    "stream_abort": (encode_stream_abort(7, 9), und.parse_stream_abort, und.StreamAbort(7, 9, 0, 0)),
    "parallel_abort": (
        encode_stream_abort(7, 9, (103, NOON)),
        und.parse_parallel_abort,
        und.StreamAbort(7, 9, 103, NOON),
    ),
    "begin_prepare": (
        encode_begin_prepare(7, "g ü", 105, 110, NOON),
        und.parse_begin_prepare,
        und.Prepare(105, 110, NOON, 7, "g ü"),
    ),
    "prepare": (encode_prepare(7, "g", 105, 110, NOON), und.parse_prepare, und.Prepare(105, 110, NOON, 7, "g")),
    "stream_prepare": (
        encode_prepare(7, "g", 105, 110, NOON, streamed=True),
        und.parse_stream_prepare,
        und.Prepare(105, 110, NOON, 7, "g"),
    ),
    "commit_prepared": (
        encode_commit_prepared(7, "g", 105, 110, NOON),
        und.parse_commit_prepared,
        und.CommitPrepared(105, 110, NOON, 7, "g"),
    ),
    "rollback_prepared": (
        encode_rollback_prepared(7, "g", 105, 110, (NOON, NOON + 1)),
        und.parse_rollback_prepared,
        und.RollbackPrepared(105, 110, NOON, NOON + 1, 7, "g"),
    ),
}


@pytest.mark.parametrize(("message", "parse", "expected"), CASES.values(), ids=CASES.keys())
def test_every_field_is_read(message: bytes, parse: Parser, expected: Any) -> None:
    assert parse(message) == expected
    assert parse(memoryview(message)) == expected


@pytest.mark.parametrize(("message", "parse", "expected"), CASES.values(), ids=CASES.keys())
def test_a_message_cut_anywhere_or_followed_by_more_is_an_error(message: bytes, parse: Parser, expected: Any) -> None:
    for size in range(len(message)):
        with pytest.raises(DecodeError, match="at 0/4D"):
            parse(message[:size], 77)
    with pytest.raises(DecodeError, match="is followed by 1 bytes"):
        parse(message + b"x", 77)
    with pytest.raises(DecodeError, match="tag is"):
        parse(b"Z" + message[1:], 77)


@pytest.mark.parametrize("name", [name for name in CASES if name != "stream_stop"])
def test_a_transaction_without_an_xid_is_an_error(name: str) -> None:
    message, parse, _ = CASES[name]
    with pytest.raises(DecodeError, match="xid is 0"):
        parse(message.replace(b"\0\0\0\7", b"\0\0\0\0"), 77)


def test_the_xid_of_a_streamed_message_is_split_off() -> None:
    insert = encode_insert(1, ["a"])
    assert und.split_xid(in_stream(7, insert)) == (7, insert)
    with pytest.raises(DecodeError, match="xid is truncated: needs 4 bytes, 3 are left"):
        und.split_xid(b"R\0\0\7")
    with pytest.raises(DecodeError, match="xid is 0"):
        und.split_xid(in_stream(0, insert))
