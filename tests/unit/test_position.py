"""Positions: their order is the order of the stream, in memory, as text and as Spark offsets."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.core.position import LAST_CHUNK, LAST_ORDINAL, LAST_SUB, MAX_CHUNK_ROWS, Position
from pgcdc.postgres.lsn import format_lsn, parse_lsn

lsns = st.integers(0, 2**64 - 1)
ends = st.integers(0, 2**64 - 2)
chunks = st.integers(0, 3) | st.integers(0, LAST_CHUNK)
inside = st.builds(Position.at, ends, st.integers(0, LAST_ORDINAL - 1), st.integers(0, LAST_SUB))


snapshot_rows = st.builds(Position.of_chunk, ends, chunks, st.integers(0, MAX_CHUNK_ROWS))
snapshots = snapshot_rows | st.builds(Position.chunk_end, ends, chunks)
positions = inside | snapshots | st.builds(Position.end, ends)
# Few different numbers, so that neighbours and equals come up.
few = st.integers(0, 2)
near = (
    st.builds(Position.at, few, few, few)
    | st.builds(Position.end, few)
    | st.builds(Position.of_chunk, few, few, few)
    | st.builds(Position.chunk_end, few, few)
)

STREAM = [
    Position.at(0, 0),
    Position.end(8),
    Position.at(0x10, 0, 1),  # a message before the first row change
    Position.at(0x10, 1),
    Position.at(0x10, 1, 1),
    Position.at(0x10, 1, 0x10),
    Position.at(0x10, 2),
    Position.at(0x10, 0x10),
    Position.end(0x10),
    Position.of_chunk(0x10, 0, 1),  # a row of a snapshot, behind the transaction
    Position.of_chunk(0x10, 0, 2),
    Position.chunk_end(0x10, 0),
    Position.of_chunk(0x10, 1, 1),
    Position.chunk_end(0x10, 1),
    Position.of_chunk(0x10, 0x10, 0),
    Position.chunk_end(0x10, LAST_CHUNK),
    Position.at(0x11, 0, 1),
    Position.at(1 << 32, 1),
    Position.end(2**64 - 8),
]


def test_order_is_stream_order() -> None:
    assert all(earlier < later for earlier, later in pairwise(STREAM))


def test_text_order_is_stream_order() -> None:
    assert sorted(map(str, reversed(STREAM))) == [str(position) for position in STREAM]


@given(positions | near, positions | near)
def test_text_compares_like_positions(one: Position, other: Position) -> None:
    assert (one < other) == (str(one) < str(other))
    assert (one == other) == (str(one) == str(other))


@given(positions | near, positions | near)
def test_commit_and_place_compare_like_positions(one: Position, other: Position) -> None:
    assert (one < other) == ((one.commit, one.place, one.sub) < (other.commit, other.place, other.sub))


@given(positions)
def test_text_round_trips(position: Position) -> None:
    assert Position.parse(str(position)) == position


@given(positions)
def test_offset_round_trips_through_json(position: Position) -> None:
    assert Position.from_offset(json.loads(json.dumps(position.to_offset()))) == position


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (Position.at(0x16_B374D848, 7), "00000016B374D848/0000000000007"),
        (Position.at(0x10, 1, 2), "0000000000000010/0000000000001.00000002"),
        (Position.end(0x10), "0000000000000010/0FFFFFFFFFFFF"),
        (Position.of_chunk(0x10, 0, 1), "0000000000000010/1000000000001"),
        (
            Position.chunk_end(0x10, 2),
            "0000000000000010/100002FFFFFFF",
        ),
        (Position.behind(0x10), "0000000000000010/1FFFFFFFFFFFF"),
    ],
)
def test_forms_that_stand_in_events_and_checkpoints_stay(position: Position, text: str) -> None:
    assert (str(position), position.to_offset()) == (text, {"position": text})


@given(ends, st.integers(0, LAST_ORDINAL - 1), st.integers(0, LAST_SUB))
def test_only_the_end_of_a_transaction_is_confirmable(lsn: int, ordinal: int, sub: int) -> None:
    assert Position.end(lsn).confirmable == lsn
    assert Position.at(lsn, ordinal, sub).confirmable == 0


@given(ends, chunks, st.integers(0, MAX_CHUNK_ROWS))
def test_the_end_of_a_chunk_confirms_the_transaction_that_it_stands_behind(lsn: int, chunk: int, row: int) -> None:
    assert Position.chunk_end(lsn, chunk).confirmable == lsn
    assert Position.of_chunk(lsn, chunk, row).confirmable == 0


@given(ends, st.integers(0, LAST_ORDINAL - 1), st.integers(0, LAST_SUB), chunks, st.integers(0, MAX_CHUNK_ROWS))
def test_what_is_of_a_snapshot_and_what_of_the_stream(lsn: int, ordinal: int, sub: int, chunk: int, row: int) -> None:
    one, end = Position.of_chunk(lsn, chunk, row), Position.chunk_end(lsn, chunk)
    assert one.is_snapshot and not one.is_end and end.is_snapshot and end.is_end
    assert one.chunk == end.chunk == chunk
    assert one.commit == end.commit == lsn
    change = Position.at(lsn, ordinal, sub)
    assert not change.is_snapshot and not change.is_end
    assert Position.end(lsn).is_end and not Position.end(lsn).is_snapshot


@given(inside)
def test_end_is_after_everything_of_its_transaction_and_before_the_next(position: Position) -> None:
    assert position < Position.end(position.commit) < Position.at(position.commit + 1, 0)


@given(snapshot_rows)
def test_rows_of_a_snapshot_stand_between_two_transactions_chunk_by_chunk(row: Position) -> None:
    lsn = row.commit
    assert (
        Position.end(lsn) < row < Position.chunk_end(lsn, row.chunk) <= Position.behind(lsn) < Position.at(lsn + 1, 0)
    )
    if row.chunk < LAST_CHUNK:
        assert Position.chunk_end(lsn, row.chunk) < Position.of_chunk(lsn, row.chunk + 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0/10",
        "0000000000000010",
        "0000000000000010/",
        "0000000000000010/1",
        "000000000000010/0000000000001",
        "0000000000000010/000000000001",
        "0000000000000010/00000000000001",
        "0000000000000010/2000000000001",
        "000000000000001G/0000000000001",
        "0000000000000010/000000000000G",
        "0000000000000010/0000000000001.0000000G",
    ],
)
def test_parse_refuses_what_is_no_position(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Position.parse(text)


@pytest.mark.parametrize(
    ("lsn", "text"), [(0, "0/0"), (0x16_B374D848, "16/B374D848"), (2**64 - 1, "FFFFFFFF/FFFFFFFF"), (1 << 32, "1/0")]
)
def test_lsn_is_written_as_postgresql_does(lsn: int, text: str) -> None:
    assert format_lsn(lsn) == text
    assert parse_lsn(text) == lsn
    assert parse_lsn(text.lower()) == lsn


@given(lsns)
def test_lsn_round_trips(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


@pytest.mark.parametrize("text", ["", "/", "1", "1/", "/1", "G/0", "0/G", "123456789/0", "0/123456789", "1/2/3"])
def test_parse_lsn_refuses_what_is_no_lsn(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_lsn(text)
