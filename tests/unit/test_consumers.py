"""Consumers: what is confirmed is the least that all have made durable, and it is on disk before it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc.core.errors import ConfigError, GapError, StateError
from pgcdc.core.position import Position
from pgcdc.spool import consumers as consumers_module
from pgcdc.spool.consumers import Consumers

START = Position.end(800)
lsns = st.integers(90, 130).map(lambda number: 8 * number)
"""Where transactions end: at multiples of 8, as in PostgreSQL."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "consumers.json"


@pytest.fixture
def consumers(path: Path) -> Consumers:
    made = Consumers(path)
    made.begin(800)
    return made


def test_new_slot_begins_where_it_was_created_and_remembers_it(path: Path, consumers: Consumers) -> None:
    assert (consumers.confirmable(), consumers.names()) == (800, [])
    assert Consumers(path).confirmed_lsn == 800


def test_minimum_of_all_consumers_is_confirmed(consumers: Consumers) -> None:
    for name, lsn in (("a", 2400), ("b", 1600), ("c", 2000)):
        consumers.join(name, START)
        consumers.ack(name, Position.end(lsn))
    assert consumers.confirmable() == 1600
    consumers.ack("b", Position.end(3200))
    assert consumers.confirmable() == 2000


def test_consumer_that_has_acked_nothing_holds_everything_back(consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(2400))
    consumers.join("b", START)
    assert consumers.confirmable() == 800


def test_late_consumer_never_moves_confirmation_back(path: Path, consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(2400))
    assert consumers.confirmable() == 2400
    with pytest.raises(GapError, match=r"cannot start at .*: changes are kept only after"):
        consumers.join("late", START)
    assert consumers.join("late").initial == Position.end(2400)
    assert consumers.confirmable() == 2400
    assert Consumers(path).confirmed_lsn == 2400


def test_ack_inside_of_a_transaction_confirms_only_the_end_before_it(consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(1600))
    for inside in (Position.at(2400, 0, 1), Position.at(2400, 1), Position.at(2400, 5, 2), Position.at(2400, 1 << 40)):
        consumers.ack("a", inside)
        assert consumers["a"].ack == inside
        assert consumers.confirmable() == 1600
    consumers.ack("a", Position.end(2400))
    assert consumers.confirmable() == 2400


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.builds(Position.end, lsns) | st.builds(Position.at, lsns, st.integers(0, 3)),
        ),
        max_size=12,
    )
)
def test_confirmation_is_always_an_end_that_every_consumer_has_acked(acks: list[tuple[str, Position]]) -> None:
    saved: list[object] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(consumers_module, "write_json_durably", lambda _, content: saved.append(content))
    consumers = Consumers(Path("/nowhere/consumers.json"))
    consumers.begin(800)
    for name in "abc":
        consumers.join(name, START)
    last = 800
    for count, (name, position) in enumerate(acks, 1):
        consumers.ack(name, position)
        lsn = consumers.confirmable()
        ends = {800, *(position.commit for _, position in acks[:count] if position.is_end)}
        assert lsn in ends
        for one in "abc":
            assert lsn <= max(
                [800, *(position.commit for who, position in acks[:count] if who == one and position.is_end)]
            )
        assert lsn >= last
        last = lsn
    patch.undo()


def test_rows_behind_a_transaction_are_not_needed_when_all_have_acked_them(path: Path, consumers: Consumers) -> None:
    """Rows of snapshots stand behind what was confirmed: they confirm no more, but need not be kept either."""
    for name in "ab":
        consumers.join(name, START)
    for name, chunk in (("a", 2), ("b", 1)):
        consumers.ack(name, Position.chunk_end(800, chunk))
    assert (consumers.confirmable(), consumers.base) == (800, Position.chunk_end(800, 1))
    assert Consumers(path).base == Position.chunk_end(800, 1)
    consumers.ack("b", Position.chunk_end(1600, 0))
    assert (consumers.confirmable(), consumers.base) == (800, Position.chunk_end(800, 2))
    consumers.ack("a", Position.of_chunk(1600, 0, 5))
    assert (consumers.confirmable(), consumers.base) == (800, Position.end(800)), (
        "inside of a chunk nothing is confirmed"
    )
    consumers.ack("a", Position.chunk_end(1600, 0))
    assert (consumers.confirmable(), consumers.base) == (1600, Position.chunk_end(1600, 0))


def test_older_ack_changes_nothing(consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(2400))
    consumers.ack("a", Position.end(1600))
    consumers.ack("a", Position.at(2400, 7))
    assert consumers["a"].ack == Position.end(2400)
    assert consumers.confirmable() == 2400


def test_what_is_confirmed_is_on_disk_before_it_is_returned(path: Path, consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(2400))
    assert Consumers(path).confirmed_lsn == 800
    assert Consumers(path).confirmed_lsn == 800
    lsn = consumers.confirmable()
    again = Consumers(path)
    assert (again.confirmed_lsn, again["a"].ack, again.confirmable()) == (lsn, Position.end(2400), 2400)


def test_confirmation_that_cannot_be_written_is_not_returned(
    path: Path, consumers: Consumers, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(2400))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(consumers_module, "write_json_durably", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                consumers.confirmable()
    assert Consumers(path).confirmed_lsn == 800
    assert consumers.confirmable() == 2400
    assert Consumers(path).confirmed_lsn == 2400


def test_ack_inside_of_a_transaction_survives_with_what_it_confirms(path: Path, consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(1600))
    consumers.ack("a", Position.at(2400, 5, 1))
    consumers.confirmable()
    again = Consumers(path)
    assert (again["a"].ack, again["a"].confirmable, again.confirmed_lsn) == (Position.at(2400, 5, 1), 1600, 1600)


def test_join_gives_the_same_initial_position_forever(path: Path, consumers: Consumers) -> None:
    first = consumers.join("a", START)
    assert (first.initial, first.ack) == (START, START)
    assert Consumers(path).join("a", Position.end(7992)).initial == START
    consumers.ack("a", Position.end(2400))
    consumers.confirmable()
    again = Consumers(path).join("a", Position.end(2400))
    assert (again.initial, again.ack) == (START, Position.end(2400))


def test_forgotten_consumer_holds_nothing_back_and_stays_forgotten(path: Path, consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.join("gone", START)
    consumers.ack("a", Position.end(2400))
    assert consumers.confirmable() == 800
    consumers.forget("gone")
    assert "gone" not in Consumers(path)
    assert consumers.confirmable() == 2400
    assert consumers.names() == ["a"]


def test_last_consumer_forgotten_confirms_nothing_more(consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.ack("a", Position.end(2400))
    consumers.forget("a")
    assert consumers.confirmable() == 800


def test_consumer_that_comes_back_after_being_forgotten_begins_anew(consumers: Consumers) -> None:
    consumers.join("a", START)
    consumers.forget("a")
    assert consumers.join("a", Position.end(1200)).initial == Position.end(1200)


def test_forgetting_an_unknown_consumer_names_the_known_ones(consumers: Consumers) -> None:
    consumers.join("b", START)
    consumers.join("a", START)
    with pytest.raises(ConfigError, match="consumer 'x' does not exist") as caught:
        consumers.forget("x")
    assert "a, b" in caught.value.advice


def test_damaged_file_is_refused(path: Path, consumers: Consumers) -> None:
    path.write_text(path.read_text()[:-3])
    with pytest.raises(StateError, match="damaged"):
        Consumers(path)
