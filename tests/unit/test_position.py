"""Positions: their order is the order of the stream, in memory, as text and as Spark offsets."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.position import LAST_ORDINAL, LAST_SUB, Position, format_lsn, parse_lsn

lsns = st.integers(0, 2**64 - 1)
inside = st.builds(Position, lsns, st.integers(0, LAST_ORDINAL - 1), st.integers(0, LAST_SUB))
positions = inside | st.builds(Position.end, lsns)
# Few different numbers, so that neighbours and equals come up.
near = st.builds(Position, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)) | st.builds(
    Position.end, st.integers(0, 2)
)

STREAM = [
    Position(0, 0),
    Position.end(0xF),
    Position(0x10, 0, 1),  # a message before the first row change
    Position(0x10, 1),
    Position(0x10, 1, 1),
    Position(0x10, 1, 0x10),
    Position(0x10, 2),
    Position(0x10, 0x10),
    Position.end(0x10),
    Position(0x11, 0, 1),
    Position(1 << 32, 1),
    Position.end(2**64 - 1),
]


def test_order_is_stream_order() -> None:
    assert all(earlier < later for earlier, later in pairwise(STREAM))


def test_text_order_is_stream_order() -> None:
    assert sorted(map(str, reversed(STREAM))) == [str(position) for position in STREAM]


@given(positions | near, positions | near)
def test_text_compares_like_positions(one: Position, other: Position) -> None:
    assert (one < other) == (str(one) < str(other))
    assert (one == other) == (str(one) == str(other))


@given(positions)
def test_text_round_trips(position: Position) -> None:
    assert Position.parse(str(position)) == position


@given(positions)
def test_offset_round_trips_through_json(position: Position) -> None:
    assert Position.from_offset(json.loads(json.dumps(position.to_offset()))) == position


@pytest.mark.parametrize(
    ("position", "text", "offset"),
    [
        (Position(0x16_B374D848, 7), "00000016B374D848/000000000007", {"lsn": "16/B374D848", "ordinal": 7}),
        (Position(0x10, 1, 2), "0000000000000010/000000000001.00000002", {"lsn": "0/10", "ordinal": 1, "sub": 2}),
        (Position.end(0x10), "0000000000000010/FFFFFFFFFFFF", {"lsn": "0/10"}),
    ],
)
def test_forms_that_stand_in_events_and_checkpoints_stay(
    position: Position, text: str, offset: dict[str, object]
) -> None:
    assert (str(position), position.to_offset()) == (text, offset)


@given(lsns, st.integers(0, LAST_ORDINAL - 1), st.integers(0, LAST_SUB))
def test_only_the_end_of_a_transaction_is_confirmable(lsn: int, ordinal: int, sub: int) -> None:
    assert Position.end(lsn).confirmable_lsn == lsn
    assert Position(lsn, ordinal, sub).confirmable_lsn == 0


@given(inside)
def test_end_is_after_everything_of_its_transaction_and_before_the_next(position: Position) -> None:
    assert position < Position.end(position.lsn) < Position(position.lsn + 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0/10",
        "0000000000000010",
        "0000000000000010/",
        "0000000000000010/1",
        "000000000000010/000000000001",
        "0000000000000010/0000000000001",
        "000000000000001G/000000000001",
        "0000000000000010/00000000000G",
        "0000000000000010/000000000001.0000000G",
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
