"""The contract of sinks: kill -9 in the middle of a write, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sink_child import Children
from sink_targets import (
    END,
    START,
    STREAM,
    TARGETS,
    WHOLE,
    batch,
    check_all_arrived,
    cut,
    fresh,
    good,
    having,
    opened,
    spoiled,
    up_to,
)

from pgcdc.core.position import Position
from pgcdc.sink.letters.record import Query
from pgcdc.sink.letters.stores import FileDeadLetters


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as made:
        yield made


# What a test makes itself is what it is in this process only.
NAMES = [name for name, kind in TARGETS.items() if kind.is_made_by_options]
KILLS = [(name, point) for name in NAMES for point in (TARGETS[name].kill_points or (TARGETS[name].before_ack,))]


@pytest.mark.parametrize(("name", "point"), KILLS)
def test_process_that_is_killed_in_the_middle_of_a_write_loses_nothing(
    name: str, point: str, children: Children
) -> None:
    middle = Position.end(130)
    with fresh(name) as target:
        ended = children.write(target, [batch(START, Position.end(110)), batch(Position.end(110), middle, 3)], point)
        assert ended.was_killed, f"{point} was not hit: {ended}"
        assert ended.written == 1, "the second write was not in flight"
        with opened(target) as sink:
            assert Position.end(110) <= sink.ack <= middle
            assert not target.keeps or set(up_to(sink.ack)) <= set(target.lines())
            sink.write(batch(START, middle, 2))  # it comes again, in other pieces
            sink.write(batch(middle, END))
        check_all_arrived(target)
        assert set(target.lines()) == set(WHOLE)


@pytest.mark.parametrize("name", NAMES)
def test_process_that_is_killed_at_its_first_write_again_and_again_loses_nothing(name: str, children: Children) -> None:
    with fresh(name) as target:
        for _ in range(2):
            ended = children.write(target, [batch(START, Position.end(130))], target.before_ack)
            assert ended.was_killed, ended
            assert ended.written == 0
        with opened(target) as sink:
            assert sink.ack == START
            sink.write(batch(START, END))
        check_all_arrived(target)


@pytest.mark.parametrize("point", ["dlq.recorded", "before_ack"])
@pytest.mark.parametrize("name", [name for name in having("bad_line") if name in NAMES])
def test_process_that_is_killed_behind_a_dead_letter_leaves_one_and_loses_nothing(
    name: str, point: str, children: Children, tmp_path: Path
) -> None:
    bad, middle = STREAM[4], Position.end(130)
    with fresh(name) as target:
        lines = spoiled(target, [bad])
        batches = [cut(lines, START, Position.end(110)), cut(lines, Position.end(110), middle)]
        ended = children.write(
            target, batches, point.replace("before_ack", target.before_ack), tmp_path / "letters.jsonl"
        )
        assert ended.was_killed, ended
        assert ended.written == 1, "the second write was not in flight"
        letters = FileDeadLetters(tmp_path / "letters.jsonl")
        letters.open()
        assert [one.position for one in letters.find(Query())] == [str(bad)]
        delivery = target.sink(dead_letters=letters)
        delivery.open(START)
        delivery.write(cut(lines, START, END))
        delivery.close()
        check_all_arrived(target, good([bad]))
        (letter,) = letters.find(Query())
        assert (letter.position, letter.is_waiting) == (str(bad), True)
        assert letter.lines() == [lines[4]]
        letters.close()
