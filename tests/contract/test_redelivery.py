"""The contract of sinks: events of the past that come again, and the order of changes of a key."""

from __future__ import annotations

import pytest
from sink_targets import (
    END,
    START,
    STREAM,
    TARGETS,
    WHOLE,
    batch,
    batch_of,
    by_key,
    cases,
    cut,
    event,
    fresh,
    opened,
    position_of,
    to_line,
)

from pgcdc.core.errors import SinkError
from pgcdc.core.position import Position

MIDDLE = Position.end(125)


@pytest.mark.parametrize("name", TARGETS)
def test_events_of_the_past_are_delivered_again_and_stay(name: str) -> None:
    """Also those that were never refused, unless the target has rows: then they may be older than what is there."""
    missing = [STREAM[3], STREAM[9]]
    left_out: set[str] = set()
    with fresh(name) as target:
        with opened(target) as sink:
            sink.write(batch(START, MIDDLE).without([str(one) for one in missing]))
            left_out |= set(sink.redeliver(batch_of(STREAM[2], STREAM[3], [WHOLE[3]])))
            assert sink.ack == MIDDLE
            assert target.sink().ack == MIDDLE
        with opened(target) as sink:  # the next process keeps it
            assert sink.ack == MIDDLE
            sink.write(batch(START, END).without([str(one) for one in missing]))
            left_out |= set(sink.redeliver(batch_of(STREAM[8], STREAM[9], [WHOLE[9]])))
            assert sink.ack == END
        assert target.sink().ack == END
        assert not left_out or not target.keeps_history
        if target.keeps:
            assert sorted(target.lines()) == sorted(one for one in WHOLE if position_of(one) not in left_out)


@pytest.mark.parametrize("name", TARGETS)
def test_redelivery_of_nothing_changes_nothing(name: str) -> None:
    with fresh(name) as target, opened(target) as sink:
        sink.write(batch(START, END))
        assert list(sink.redeliver(batch_of(STREAM[2], STREAM[3], []))) == []
        assert sink.ack == END
        assert target.lines() == WHOLE


def test_rows_of_a_database_that_refused_nothing_are_not_called_superseded() -> None:
    """Another target of a replay: it does not know what is newer, and nothing is marked that was not delivered."""
    with fresh("pg_apply") as target, opened(target) as sink:
        with pytest.raises(SinkError, match=r"has (written|applied) nothing to this"):
            sink.redeliver(batch_of(STREAM[2], STREAM[3], [WHOLE[3]]))
        assert target.lines() == []


# --- order


def _changes() -> list[str]:
    """Three rows that come, change and go; two of them are there at the end."""
    made = []
    for number in range(28):
        operation = "DELETE" if number % 10 > 6 else "UPDATE" if number % 10 > 2 else "INSERT"
        position = Position.at(110 + 10 * (number // 10), number % 10 + 1)
        made.append(to_line(event(position, key=number % 3, operation=operation, text=f"state {number}")))
    return made


@pytest.mark.parametrize(
    ("name", "cuts"),
    cases([[], [110], [110, 120, 130], [115, 120]], [name for name, kind in TARGETS.items() if kind.keeps]),
)
def test_changes_of_a_key_arrive_in_order(name: str, cuts: list[int]) -> None:
    changes = _changes()
    with fresh(name) as target:
        places = [START, *map(Position.end, cuts), END]
        with opened(target) as sink:
            for number, end in enumerate(places[1:]):
                sink.write(cut(changes, places[max(0, number - 1)], end))  # each begins before the ack
        arrived = by_key(target.arrived())
        if target.keeps_history:
            assert arrived == by_key(changes)
            return
        last = {key: lines[-1] for key, lines in by_key(changes).items()}
        assert {key: position_of(lines[0]) for key, lines in arrived.items()} == {
            key: position_of(one) for key, one in last.items() if '"operation":"DELETE"' not in one
        }
