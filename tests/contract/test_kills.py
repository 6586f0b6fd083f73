"""The contract of sinks: kill -9 in the middle of a write, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sink_child import Children
from sink_targets import END, PLAIN, START, WHOLE, batch, check_all_arrived, fresh, kind_of, opened, up_to

from pgcdc.position import Position


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as made:
        yield made


KILLS = [(name, point) for name in PLAIN for point in (kind_of(name).kill_points or (kind_of(name).before_ack,))]


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


@pytest.mark.parametrize("name", PLAIN)
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
