"""Events that a target refuses: each goes to the dead letters once, durably, before the others are delivered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from deliveries import END, START, Diary, FakeClock, ScriptedSink, batch, down, make_runner
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.core.counters import DEAD_LETTERS, counters
from pgcdc.core.errors import Policy, Reject, SinkError, SinkRejected, SinkUnavailable, StateError, policy_of
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.attempts import BreakerState, CircuitOpen, SinkTimeout
from pgcdc.sink.contract import SinkContext
from pgcdc.sink.letters.record import DeadLetter, DeadLetters, Dropped, Query
from pgcdc.sink.spec import DeliveryOptions


class Memory:
    """A store that can fail."""

    def __init__(self) -> None:
        self.pipeline = "1/slot"
        self.letters: dict[str, DeadLetter] = {}
        self.calls: list[int] = []
        self.fails: Exception | None = None

    def check(self) -> None: ...
    def open(self) -> None: ...
    def close(self) -> None: ...

    def record(self, letters: Sequence[DeadLetter]) -> None:
        if self.fails is not None:
            raise self.fails
        self.calls.append(len(letters))
        for letter in letters:
            self.letters.setdefault(letter.id, letter)

    def find(self, query: Query) -> Iterator[DeadLetter]:
        return iter(sorted(filter(query.matches, self.letters.values()), key=lambda one: one.position))

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        for name in ids:
            self.letters[name] = replace(self.letters[name], outcome=outcome, replayed_at=at)

    def purge(self, query: Query) -> int:
        raise NotImplementedError

    @property
    def positions(self) -> list[str]:
        return sorted(one.position for one in self.letters.values())


class PickySink(ScriptedSink):
    """Refuses events for good, whenever it is asked: `bad` by position. After what the script says."""

    def __init__(self, bad: Sequence[str], *script: Exception | str | None, at_once: int = 1_000_000) -> None:
        super().__init__(*script)
        self.bad = set(bad)
        self.at_once = at_once

    def _write(self, batch: Batch) -> None:
        if not self.script or self.script[0] is None:
            found = [one for one in batch.events.column("position").to_pylist() if one in self.bad]
            if found:
                del self.script[:1]
                self.sizes.append(batch.events.num_rows)
                rejects = [Reject(one, "http_400", f"no {one}") for one in found[: self.at_once]]
                raise SinkRejected("refused", "look at it", rejects)
        super()._write(batch)


class Setup:
    def __init__(self, sink: ScriptedSink, store: DeadLetters | None = None, **options: Any) -> None:
        self.clock, self.sink, self.diary = FakeClock(), sink, Diary()
        self.store = store or Memory()
        self.delivery = make_runner(sink, DeliveryOptions(**options), self.diary, self.store, self.clock)


def at(*numbers: int) -> list[str]:
    return [str(Position.at(101, number)) for number in numbers]


# --- delivery


@pytest.mark.parametrize("at_once", [1, 2, 10])
def test_refused_events_are_recorded_and_the_others_are_delivered(at_once: int) -> None:
    setup = Setup(PickySink(at(2, 4, 5), at_once=at_once))
    before = counters.get(DEAD_LETTERS, adapter="scripted")
    setup.delivery.write(batch(6))
    assert setup.sink.written == [f"{one}\n" for one in at(1, 3, 6)]
    assert setup.delivery.ack == END
    assert isinstance(setup.store, Memory) and setup.store.positions == at(2, 4, 5)
    letter = next(iter(setup.store.letters.values()))
    assert (letter.pipeline, letter.adapter, letter.error_kind, letter.attempts) == (
        "1/slot",
        "scripted",
        "http_400",
        1,
    )
    assert letter.lines() == [f"{letter.position}\n"]
    assert setup.delivery.dead_letters == 3 == counters.get(DEAD_LETTERS, adapter="scripted") - before
    assert [one[1] for one in setup.diary.told if one[0] == "failure"] == []


def test_letters_are_there_before_anything_is_delivered_without_them() -> None:
    sink, seen = PickySink(at(2)), []
    setup = Setup(sink)
    inner = sink._write

    def write(batch: Batch) -> None:
        assert isinstance(setup.store, Memory)
        seen.append((batch.events.num_rows, setup.store.positions))
        inner(batch)

    sink._write = write  # type: ignore[method-assign]
    setup.delivery.write(batch(3))
    assert seen == [(3, []), (2, at(2))]


def test_batch_of_which_everything_is_refused_moves_the_ack() -> None:
    setup = Setup(PickySink(at(1, 2, 3)))
    setup.delivery.write(batch(3))
    assert setup.sink.written == [] and setup.delivery.ack == END and setup.delivery.dead_letters == 3


def test_tries_before_the_refusal_count_and_the_rest_has_all_its_tries() -> None:
    setup = Setup(PickySink(at(2), down(), down(), None), max_retries=2, backoff_base=0.1)
    setup.delivery.write(batch(3))
    assert isinstance(setup.store, Memory)
    assert [one.attempts for one in setup.store.letters.values()] == [3]
    assert setup.delivery.ack == END


def test_without_a_store_a_refused_event_stops_everything() -> None:
    delivery = make_runner(PickySink(at(2)))
    with pytest.raises(SinkRejected):
        delivery.write(batch(3))
    assert delivery.ack == START


def test_nameless_refusal_stops_everything() -> None:
    setup = Setup(ScriptedSink(SinkRejected("some of them")))
    with pytest.raises(SinkRejected):
        setup.delivery.write(batch(3))
    assert setup.delivery.ack == START and setup.delivery.dead_letters == 0


@pytest.mark.parametrize("error", [StateError("disk full", "make room"), OSError(5, "I/O"), ValueError("x")], ids=repr)
def test_store_that_is_down_stops_the_adapter_and_nothing_is_passed_over(error: Exception) -> None:
    setup = Setup(PickySink(at(2)))
    assert isinstance(setup.store, Memory)
    setup.store.fails = error
    with pytest.raises(SinkError, match="could not be written") as caught:
        setup.delivery.write(batch(3))
    assert policy_of(caught.value) is Policy.STOP and not isinstance(caught.value, SinkUnavailable)
    assert at(2)[0] in caught.value.message and "http_400" in caught.value.message
    assert setup.delivery.ack == START and setup.sink.written == [] and setup.delivery.dead_letters == 0
    setup.store.fails = None
    setup.delivery.write(batch(3))
    assert setup.store.positions == at(2) and setup.delivery.ack == END


def test_event_that_it_was_not_given_is_a_defect() -> None:
    setup = Setup(ScriptedSink(SinkRejected("x", "", [Reject(str(Position.at(999, 1)), "k", "t")])))
    with pytest.raises(SinkError, match="was not sent"):
        setup.delivery.write(batch(3))


def test_event_that_is_refused_again_when_it_was_left_out_is_a_defect_and_no_endless_loop() -> None:
    reject = SinkRejected("x", "", [Reject(at(2)[0], "k", "t")])
    setup = Setup(ScriptedSink(reject, reject))
    with pytest.raises(SinkError, match="was not sent"):
        setup.delivery.write(batch(3))


def test_lines_that_share_a_position_are_one_letter() -> None:
    positions = at(1, 2, 2, 3)
    table = pa.table({"position": positions, "line": ["a\n", "b\n", "c\n", "d\n"]})
    setup = Setup(PickySink(at(2)))
    setup.delivery.write(Batch(START, END, table))
    assert isinstance(setup.store, Memory)
    assert [one.lines() for one in setup.store.letters.values()] == [["b\n", "c\n"]]
    assert setup.sink.written == ["a\n", "d\n"]


# --- again, after a failure or a crash


def test_refused_again_by_a_later_try_or_process_it_has_one_letter() -> None:
    store = Memory()
    first = Setup(PickySink(at(2), None, down(), down()), store, max_retries=1)
    with pytest.raises(SinkUnavailable):
        first.delivery.write(batch(3))
    assert store.positions == at(2) and first.delivery.ack == START
    first.delivery.write(batch(3))
    assert store.calls == [1] and first.delivery.dead_letters == 1
    second = Setup(PickySink(at(2)), store)  # its process crashed before the ack
    second.delivery.write(batch(3))
    assert store.calls == [1] and len(store.letters) == 1 and second.delivery.dead_letters == 0
    assert second.sink.written == [f"{one}\n" for one in at(1, 3)]


def test_event_that_is_taken_after_all_is_no_dead_letter_any_more() -> None:
    store = Memory()
    sink = PickySink(at(2, 3), None, down(), down())
    setup = Setup(sink, store, max_retries=1)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    sink.bad = set(at(3))  # somebody repaired the target
    setup.delivery.write(batch(3))
    assert {one.position: one.outcome for one in store.letters.values()} == dict(
        zip(at(2, 3), ["delivered", None], strict=True)
    )


def test_event_that_is_taken_after_a_crash_is_no_dead_letter_though_nothing_else_is_refused() -> None:
    store = Memory()
    first = Setup(PickySink(at(2), None, down(), down()), store, max_retries=1)
    with pytest.raises(SinkUnavailable):
        first.delivery.write(batch(3))
    second = Setup(ScriptedSink(), store)  # the next run: somebody repaired the target meanwhile
    second.delivery.open(START)
    second.delivery.write(batch(3))
    assert len(second.sink.written) == 3
    assert [one.outcome for one in store.letters.values()] == ["delivered"]


def test_store_that_is_down_is_no_reason_not_to_open() -> None:
    class Down(Memory):
        def find(self, query: Query) -> Iterator[DeadLetter]:
            raise StateError("down")

    setup = Setup(ScriptedSink(), Down())
    setup.delivery.open(START)
    setup.delivery.write(batch(3))
    assert setup.delivery.ack == END


def test_what_is_left_of_an_older_delivery_does_not_settle_what_was_filtered_out() -> None:
    store = Memory()
    setup = Setup(PickySink(at(2), None, down(), down()), store, max_retries=1)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    setup.delivery.write(batch(3).without(at(2)))  # another route now
    assert [one.is_waiting for one in store.letters.values()] == [True]


# --- too many


def test_more_refused_events_in_a_row_than_allowed_stop_the_adapter() -> None:
    setup = Setup(PickySink(at(*range(1, 6))), dead_letter_limit=4)
    with pytest.raises(SinkError, match="refuses 5 events in a row") as caught:
        setup.delivery.write(batch(6))
    assert policy_of(caught.value) is Policy.STOP
    assert "scripted_dead_letter_limit" in caught.value.advice
    assert setup.delivery.ack == START


@pytest.mark.parametrize("at_once", [1, 3])
def test_row_goes_over_batches_and_one_success_ends_it(at_once: int) -> None:
    def story(sink_bad: Sequence[str]) -> Setup:
        setup = Setup(PickySink(sink_bad, at_once=at_once), dead_letter_limit=3)
        setup.delivery.write(batch(2))
        setup.delivery.write(batch(2, END, Position.end(120)))
        return setup

    first, second = at(1, 2), [str(Position.at(111, number)) for number in (1, 2)]
    with pytest.raises(SinkError, match="4 events in a row"):
        story([*first, *second])
    assert story([*first, second[1]]).delivery.dead_letters == 3
    assert story([first[1], *second]).delivery.dead_letters == 3


def test_row_may_be_endless() -> None:
    setup = Setup(PickySink(at(*range(1, 3001))), dead_letter_limit=0)
    setup.delivery.write(batch(3000))
    assert setup.delivery.dead_letters == 3000


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4), st.integers(1, 30))
def test_the_longest_row_decides_whatever_the_cuts(bad: list[bool], limit: int, at_once: int, size: int) -> None:
    longest = max(map(len, "".join("x" if one else " " for one in bad).split()), default=0)
    numbers = range(1, len(bad) + 1)
    setup = Setup(
        PickySink([one for one, is_bad in zip(at(*numbers), bad, strict=True) if is_bad], at_once=at_once),
        dead_letter_limit=limit, rate_limit=1e6, rate_limit_burst=size,
    )  # fmt: skip
    if longest > limit:
        with pytest.raises(SinkError, match="in a row"):
            setup.delivery.write(batch(len(bad)))
    else:
        setup.delivery.write(batch(len(bad)))
        assert setup.delivery.dead_letters == sum(bad)
        assert len(setup.sink.written) == len(bad) - sum(bad)


# --- tries that are used up


def busy(*numbers: int) -> SinkUnavailable:
    error = down()
    error.positions = tuple(at(*numbers))
    return error


def test_used_up_tries_wait_unless_told_otherwise() -> None:
    setup = Setup(ScriptedSink(busy(2), busy(2)), max_retries=1)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    assert setup.delivery.dead_letters == 0


def test_event_that_used_up_its_tries_is_set_aside_if_that_is_wanted() -> None:
    setup = Setup(ScriptedSink(busy(2), busy(2)), max_retries=1, on_exhausted="dead_letter")
    setup.delivery.write(batch(3))
    assert isinstance(setup.store, Memory)
    (letter,) = setup.store.letters.values()
    assert (letter.position, letter.error_kind, letter.attempts) == (at(2)[0], "exhausted", 2)
    assert setup.delivery.ack == END and setup.sink.written == [f"{one}\n" for one in at(1, 3)]


def test_target_that_is_down_takes_nobody_with_it() -> None:
    setup = Setup(ScriptedSink(down(), down()), max_retries=1, on_exhausted="dead_letter")
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    assert setup.delivery.dead_letters == 0 and setup.delivery.ack == START


def test_breaker_opens_before_everything_has_used_up_its_tries() -> None:
    setup = Setup(ScriptedSink(busy(1), busy(2), busy(3)), max_retries=0, on_exhausted="dead_letter", cb_max_failures=2)
    with pytest.raises(CircuitOpen):
        setup.delivery.write(batch(3))
    assert setup.delivery.dead_letters == 2 and setup.delivery.ack == START


def test_one_try_in_a_half_open_breaker_is_not_all_tries() -> None:
    setup = Setup(
        ScriptedSink(down(), busy(2)), max_retries=0, on_exhausted="dead_letter", cb_max_failures=1, cb_reset=60
    )
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    setup.delivery.attempts.options = DeliveryOptions(max_retries=3, on_exhausted="dead_letter")
    setup.clock.time += 60
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    assert setup.delivery.dead_letters == 0


def test_write_that_hangs_is_no_reason_for_a_dead_letter() -> None:
    setup = Setup(ScriptedSink("hang"), max_retries=0, on_exhausted="dead_letter", timeout=30)
    with pytest.raises(SinkTimeout):
        setup.delivery.write(batch(3))
    assert setup.delivery.dead_letters == 0
    setup.sink.let_go()


def test_refusal_is_an_answer_for_the_breaker() -> None:
    setup = Setup(PickySink(at(2), down()), max_retries=0, cb_max_failures=1, cb_reset=60)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(3))
    setup.clock.time += 60
    setup.delivery.write(batch(3))
    assert setup.delivery.attempts.breaker is BreakerState.CLOSED and setup.delivery.dead_letters == 1


# --- how long the target wants to be left alone


def wait(seconds: float) -> SinkUnavailable:
    error = down()
    error.retry_in_s = seconds
    return error


def test_pause_is_at_least_what_the_target_asks_for() -> None:
    setup = Setup(ScriptedSink(wait(7.0), wait(0.01)), backoff_base=0.5, backoff_cap=1.0)
    setup.delivery.write(batch())
    assert setup.clock.time == 1000 + 7.0 + 1.0
    assert [one for one in setup.diary.told if one[0] == "retry"] == [("retry", 1, 7.0), ("retry", 2, 1.0)]


def test_target_is_left_alone_by_the_next_delivery_as_well() -> None:
    setup = Setup(ScriptedSink(wait(7.0)), max_retries=0)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch())
    assert setup.clock.time == 1000
    setup.delivery.write(batch())
    assert setup.clock.time == 1007


# --- again to the target


class Replayable(ScriptedSink):
    def __init__(self, *script: Exception | str | None) -> None:
        super().__init__(*script)
        self.again: list[str] = []

    def redeliver(self, batch: Batch) -> set[str]:
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        self.again += batch.events.column("line").to_pylist()
        return {at(1)[0]}


def test_redelivery_is_tried_again_and_the_ack_stays() -> None:
    setup = Setup(Replayable(down(), None))
    assert set(setup.delivery.redeliver(batch(3))) == {at(1)[0]}
    assert isinstance(setup.sink, Replayable) and len(setup.sink.again) == 3 and setup.delivery.ack == START
    assert setup.delivery.attempts.failing is None  # else the adapter would be taken for a slow one


def test_target_that_is_an_older_copy_after_a_lost_redelivery_is_not_touched() -> None:
    setup = Setup(Replayable(None, down()), max_retries=1)
    setup.sink.keeps_position = True  # type: ignore[misc]
    setup.delivery.write(batch(3))
    setup.sink.open = lambda context: START  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="an older state of the target was restored"):
        setup.delivery.redeliver(batch(3))
    assert isinstance(setup.sink, Replayable) and not setup.sink.again


class OneByOne(ScriptedSink):
    """Delivers the first event of a batch, and fails while the script says so."""

    def open(self, context: SinkContext) -> None:
        self._delivered = context.delivered

    def redeliver(self, batch: Batch) -> tuple[str, ...]:
        lines, step = batch.texts(), self.script.pop(0) if self.script else None
        if not isinstance(step, Exception):
            self.written += lines
            return ()
        self.written += lines[:1]
        self._delivered(batch.positions().to_pylist()[:1])
        raise step


def test_redelivery_leaves_out_what_an_earlier_try_delivered() -> None:
    setup = Setup(OneByOne(down(), down()))
    setup.delivery.redeliver(batch(4))
    assert setup.sink.written == batch(4).texts()
    setup = Setup(OneByOne(down(), down()), max_retries=0)
    for _ in range(2):
        with pytest.raises(SinkUnavailable):
            setup.delivery.redeliver(batch(4))
    setup.delivery.redeliver(batch(4))
    assert setup.sink.written == batch(4).texts()


def test_redelivery_that_failed_is_no_success_though_the_ack_is_far() -> None:
    setup = Setup(Replayable(down(), down()), max_retries=1)
    setup.delivery.progress.save(END)
    with pytest.raises(SinkUnavailable):
        setup.delivery.redeliver(batch(3))


def test_what_is_refused_again_comes_out_and_makes_no_letter() -> None:
    setup = Setup(Replayable(SinkRejected("no", "", [Reject(at(2)[0], "k", "t")])))
    with pytest.raises(SinkRejected):
        setup.delivery.redeliver(batch(3))
    assert setup.delivery.dead_letters == 0


def test_sink_that_says_nothing_else_writes_them() -> None:
    setup = Setup(ScriptedSink())
    assert list(setup.delivery.redeliver(batch(2))) == [] and len(setup.sink.written) == 2
    assert setup.delivery.ack == START


# --- none


def test_none_drops_and_says_so() -> None:
    said: list[str] = []
    setup = Setup(PickySink(at(2)), Dropped(said.append))
    setup.delivery.write(batch(3))
    assert setup.delivery.ack == END and setup.delivery.dead_letters == 1
    assert len(said) == 1 and at(2)[0] in said[0] and "dropped" in said[0]
