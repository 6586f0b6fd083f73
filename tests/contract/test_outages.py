"""The contract of sinks: a target that goes away and comes back, through the wrapper that all sinks have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sink_targets import (
    END,
    START,
    TARGETS,
    WHOLE,
    Target,
    batch,
    check_all_arrived,
    fresh,
    having,
    opened,
    up_to,
)

from pgcdc.core.errors import PgcdcError, Policy, SinkUnavailable, policy_of
from pgcdc.core.position import Position
from pgcdc.sink.attempts import DeliveryHooks
from pgcdc.sink.spec import DeliveryOptions

QUICK = DeliveryOptions(max_retries=2, backoff_base=0.001, backoff_cap=0.002, cb_max_failures=0, timeout=20.0)
MIDDLE = Position.end(120)


class _Healer(DeliveryHooks):
    """Heals the target when the first try has failed."""

    def __init__(self, target: Target | None = None) -> None:
        self.target, self.retries = target, 0

    def on_retry(self, attempt: int, delay_s: float, error: BaseException) -> None:
        self.retries += 1
        if self.target is not None:
            self.target.heal_target()
            self.target = None


@contextmanager
def broken(target: Target) -> Iterator[None]:
    target.break_target()
    try:
        yield
    finally:
        target.heal_target()


def test_only_targets_that_cannot_go_away_have_no_outage() -> None:
    kinds = {TARGETS[name].type for name in TARGETS}
    assert kinds - {TARGETS[name].type for name in having("can_break")} == {"stdout", "noop"}


@pytest.mark.parametrize("name", having("can_break"))
def test_outage_that_lasts_is_said_and_afterwards_everything_arrives(name: str) -> None:
    hooks = _Healer()
    with fresh(name) as target:
        delivery = target.sink(QUICK, hooks)
        delivery.open(START)
        delivery.write(batch(START, MIDDLE))
        with broken(target):
            for _ in range(2):
                with pytest.raises(SinkUnavailable) as caught:
                    delivery.write(batch(MIDDLE, END))
                assert policy_of(caught.value) is Policy.RETRY
                assert caught.value.advice
                assert delivery.ack == MIDDLE
        assert hooks.retries == 4
        assert set(up_to(MIDDLE)) <= set(target.lines())
        delivery.write(batch(MIDDLE, END))
        assert delivery.ack == END
        delivery.close()
        check_all_arrived(target)


@pytest.mark.parametrize("name", having("can_break"))
def test_short_outage_is_not_noticed(name: str) -> None:
    with fresh(name) as target:
        hooks = _Healer(target)
        delivery = target.sink(QUICK, hooks)
        delivery.open(START)
        delivery.write(batch(START, MIDDLE))
        target.break_target()
        try:
            delivery.write(batch(MIDDLE, END))
        finally:
            if hooks.target is not None:
                target.heal_target()
        assert hooks.retries >= 1, "the target was not broken"
        delivery.close()
        check_all_arrived(target)


@pytest.mark.parametrize("name", having("can_break"))
def test_sink_that_is_made_during_an_outage_works_or_says_so_and_loses_nothing(name: str) -> None:
    with fresh(name) as target:
        with opened(target) as sink:
            sink.write(batch(START, MIDDLE))
        with broken(target):
            sink = target.sink()
            try:
                sink.open(START)
                sink.write(batch(START, END))
                pytest.fail("the target was not broken")
            except PgcdcError as error:
                assert error.advice
            finally:
                sink.close()
        with opened(target) as sink:
            assert sink.ack == MIDDLE
            sink.write(batch(START, END))
        check_all_arrived(target)


@pytest.mark.parametrize("name", having("break_after"))
def test_outage_in_the_middle_of_a_batch_sends_nothing_twice(name: str) -> None:
    """Nothing has crashed: a target that cannot take anything back does not get again what it has taken."""
    with fresh(name) as target:
        delivery = target.sink(QUICK)
        delivery.open(START)
        target.break_after(6)
        with pytest.raises(SinkUnavailable):
            delivery.write(batch(START, END))
        taken = len(target.lines())
        assert 6 <= taken < len(WHOLE), "the outage was not in the middle"
        target.heal_target()
        delivery.write(batch(START, END))
        delivery.close()
        assert target.lines() == WHOLE


def test_every_target_that_takes_nothing_back_has_an_outage_in_the_middle() -> None:
    kinds = {TARGETS[name].type for name in TARGETS if TARGETS[name].repeats}
    assert kinds - {TARGETS[name].type for name in having("break_after")} == {"stdout"}
