"""The contract of sinks: events that a target refuses, and events of the past that it gets again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sink_targets import (
    END,
    START,
    STREAM,
    TARGETS,
    WHOLE,
    batch_of,
    cases,
    check_all_arrived,
    cut,
    fresh,
    good,
    having,
    opened,
    spoiled,
)
from targets.letters import Letters

from pgcdc.core.errors import SinkError, SinkRejected
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.sink.spec import DeliveryOptions

QUICK = DeliveryOptions(max_retries=1, backoff_base=0.001, backoff_cap=0.002, timeout=20.0)
MIDDLE = Position.end(125)
BAD = {
    "one": [STREAM[5]],
    "the first": [STREAM[0]],
    "the last": [STREAM[-1]],
    "some in both batches": [STREAM[1], STREAM[4], STREAM[10], STREAM[15]],
    "a whole batch": STREAM[:8],
    "neighbours": STREAM[6:9],
}


def test_only_targets_that_take_everything_refuse_nothing() -> None:
    kinds = {TARGETS[name].type for name in TARGETS}
    assert kinds - {TARGETS[name].type for name in having("bad_line")} == {"stdout", "noop"}
    assert "exec_by_write" not in having("bad_line")  # nobody is asked


@pytest.mark.parametrize(("name", "which"), cases(BAD, having("bad_line")))
def test_refused_event_is_a_dead_letter_once_and_the_others_arrive_in_order(name: str, which: str) -> None:
    bad, letters = BAD[which], Letters()
    with fresh(name) as target:
        lines = spoiled(target, bad)
        delivery = target.sink(QUICK, dead_letters=letters)
        delivery.open(START)
        for start, end in ((START, MIDDLE), (MIDDLE, END)):
            delivery.write(cut(lines, start, end))
            assert delivery.ack == end
        delivery.write(cut(lines, START, END))  # it is over
        delivery.close()
        assert target.lines() == good(bad)  # once: the process has not crashed
        assert letters.lines() == [one for one in lines if one not in WHOLE]
        for letter in letters.kept.values():
            assert letter.adapter == delivery.name
            assert letter.error_kind
            assert letter.error
            assert letter.attempts >= 1
            assert letter.operation == "INSERT"


@pytest.mark.parametrize("name", having("bad_line"))
def test_without_a_place_for_dead_letters_the_adapter_stops_and_nothing_is_lost(name: str) -> None:
    with fresh(name) as target:
        lines = spoiled(target, [STREAM[5]])
        delivery = target.sink(QUICK)
        delivery.open(START)
        with pytest.raises(SinkRejected) as caught:
            delivery.write(cut(lines, START, END))
        assert caught.value.advice
        assert [reject.position for reject in caught.value.rejects] == [str(STREAM[5])]
        assert delivery.ack < STREAM[5]
        delivery.close()
        target.accept_bad()
        with opened(target) as sink:
            sink.write(cut(lines, START, END))
        check_all_arrived(target, lines)


@pytest.mark.parametrize("name", having("bad_line"))
def test_dead_letter_that_cannot_be_written_stops_the_adapter_and_nothing_is_lost(name: str) -> None:
    letters = Letters()
    letters.is_up = False
    with fresh(name) as target:
        lines = spoiled(target, [STREAM[5]])
        delivery = target.sink(QUICK, dead_letters=letters)
        delivery.open(START)
        with pytest.raises(SinkError, match="could not be written") as caught:
            delivery.write(cut(lines, START, END))
        assert "the store of dead letters is away" in str(caught.value)
        assert delivery.ack < STREAM[5]
        assert letters.kept == {}
        delivery.close()
        letters.is_up = True
        again = target.sink(QUICK, dead_letters=letters)
        again.open(START)
        again.write(cut(lines, START, END))
        again.close()
        check_all_arrived(target, good([STREAM[5]]))
        assert letters.lines() == [lines[5]]


@pytest.mark.parametrize("name", having("bad_line"))
def test_crash_behind_the_dead_letter_leaves_one_letter_and_loses_nothing(
    name: str, crash_at: Callable[[str], None]
) -> None:
    letters = Letters()
    with fresh(name) as target:
        lines = spoiled(target, [STREAM[0]])
        delivery = target.sink(QUICK, dead_letters=letters)
        delivery.open(START)
        crash_at(target.before_ack)
        with pytest.raises(FailpointError):
            delivery.write(cut(lines, START, END))
        assert letters.lines() == [lines[0]]
        delivery.close()
        again = target.sink(QUICK, dead_letters=letters)
        again.open(START)
        again.write(cut(lines, START, END))
        again.close()
        check_all_arrived(target, good([STREAM[0]]))
        assert letters.lines() == [lines[0]]


# --- delivered again


@pytest.mark.parametrize("name", having("bad_line"))
def test_dead_letter_is_delivered_again_when_the_target_takes_it(name: str) -> None:
    letters = Letters()
    with fresh(name) as target:
        lines = spoiled(target, [STREAM[5]])
        delivery = target.sink(QUICK, dead_letters=letters)
        delivery.open(START)
        delivery.write(cut(lines, START, END))
        with pytest.raises(SinkRejected) as caught:  # still
            delivery.redeliver(batch_of(STREAM[4], STREAM[5], letters.lines()))
        assert [reject.position for reject in caught.value.rejects] == [str(STREAM[5])]
        target.accept_bad()
        assert list(delivery.redeliver(batch_of(STREAM[4], STREAM[5], letters.lines()))) == []
        assert delivery.ack == END
        delivery.close()
        assert sorted(target.lines()) == sorted(lines)
