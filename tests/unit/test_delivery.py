"""The wrapper of all sinks: when it tries again, when it gives up, and that a sink never has two writers.

Time is made up: what would be waited for has passed, unless a write really runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest
from deliveries import END, REAL_TIMEOUT_S, START, Diary, FakeClock, ScriptedSink, batch, down, make_runner
from hypothesis import given
from hypothesis import strategies as st

from pgcdc.core import errors
from pgcdc.core.counters import TARGET_RECOVERIES, counters
from pgcdc.core.errors import (
    PgcdcError,
    Policy,
    Reject,
    SinkError,
    SinkRejected,
    SinkUnavailable,
    full_jitter_s,
    policy_of,
)
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.attempts import BreakerState, CircuitBreaker, CircuitOpen, DeliveryStopped, SinkTimeout, TokenBucket
from pgcdc.sink.contract import Progress, SinkContext
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions


class Setup:
    """A scripted sink in a delivery with made-up time; every random number is the largest."""

    def __init__(self, *script: Exception | str | None, **options: float) -> None:
        self.clock, self.sink, self.diary = FakeClock(), ScriptedSink(*script), Diary()
        self.delivery = make_runner(
            self.sink,
            DeliveryOptions(**options),  # type: ignore[arg-type]
            self.diary,
            clock=self.clock,
        )

    def release(self) -> None:
        """Let a hanging write go on, and wait until it has ended."""
        self.sink.let_go()
        attempts = self.delivery.attempts
        with attempts.condition:
            assert attempts.condition.wait_for(lambda: not attempts.is_calling, REAL_TIMEOUT_S)


# --- which thread


def test_all_writes_of_a_sink_are_in_one_thread_which_ends_with_it() -> None:
    setup = Setup()
    seen: list[threading.Thread] = []
    for _ in range(3):
        assert setup.delivery.attempts.run(lambda: seen.append(threading.current_thread()), 5) is None
    assert len(set(seen)) == 1 and seen[0].name == f"write-{setup.delivery.name}"
    setup.delivery.close()
    seen[0].join(REAL_TIMEOUT_S)
    assert not seen[0].is_alive()
    assert setup.delivery.attempts.run(lambda: seen.append(threading.current_thread()), 5) is None
    assert seen[-1] is not seen[0]
    setup.delivery.close()


# --- which errors


@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (down(), Policy.RETRY),
        (errors.ConnectionLost("x"), Policy.RETRY),
        (SinkError("x"), Policy.STOP),
        (SinkRejected("x"), Policy.STOP),
        (SinkRejected("x", "", [Reject("1", "http_400", "no")]), Policy.DEAD_LETTER),
        (errors.StateError("x"), Policy.STOP),
        (errors.GapError("x"), Policy.STOP),
        (ConnectionRefusedError(111, "refused"), Policy.RETRY),
        (TimeoutError("slow"), Policy.RETRY),
        (OSError(28, "disk full"), Policy.STOP),
        (ValueError("a defect"), Policy.STOP),
        (KeyboardInterrupt(), Policy.STOP),
    ],
    ids=repr,
)
def test_every_error_has_one_policy_and_a_refusal_needs_names(error: BaseException, policy: Policy) -> None:
    assert policy_of(error) is policy


@pytest.mark.parametrize("error", [SinkError("touched"), SinkRejected("never"), ValueError("a defect")], ids=repr)
def test_error_that_does_not_pass_is_not_tried_again_and_not_changed(error: Exception) -> None:
    setup = Setup(error)
    with pytest.raises(type(error)) as caught:
        setup.delivery.write(batch())
    assert caught.value is error
    assert setup.sink.sizes == [3]
    assert setup.diary.told == [("failure", type(error))]
    assert setup.delivery.attempts.breaker is BreakerState.CLOSED


# --- retry


def test_write_that_fails_is_tried_again_after_pauses_that_double() -> None:
    setup = Setup(down(), ConnectionResetError(), down(), backoff_base=0.5, backoff_cap=1.5)
    setup.delivery.write(batch())
    assert setup.sink.written == batch().events.column("line").to_pylist()
    assert setup.clock.time == 1000.0 + 0.5 + 1.0 + 1.5
    assert setup.diary.told == [("retry", 1, 0.5), ("retry", 2, 1.0), ("retry", 3, 1.5), ("write", 3, 0.0)]


def test_what_is_tried_again_says_why_until_it_is_over() -> None:
    setup = Setup(down(), None, *[down() for _ in range(9)], backoff_base=1.0, max_retries=1)
    seen: list[str] = []
    setup.clock.at = [(1000.5, lambda: seen.append(str(setup.delivery.attempts.failing)))]
    setup.delivery.write(batch())
    assert seen == [str(down())] and setup.delivery.attempts.failing is None
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(start=END, end=Position.end(END.commit + 50)))
    assert setup.delivery.attempts.failing is None


def test_after_the_last_try_the_error_comes_out() -> None:
    setup = Setup(*[down() for _ in range(9)], max_retries=2)
    with pytest.raises(SinkUnavailable, match="it is down"):
        setup.delivery.write(batch())
    assert len(setup.sink.sizes) == 3
    assert setup.diary.told[-1] == ("failure", SinkUnavailable)


def test_error_of_a_library_comes_out_as_one_of_ours() -> None:
    setup = Setup(ConnectionRefusedError(111, "Connection refused"), max_retries=0)
    with pytest.raises(SinkUnavailable, match=r"adapter scripted: .*Connection refused") as caught:
        setup.delivery.write(batch())
    assert caught.value.advice


@given(st.integers(0, 200), st.floats(0.001, 10), st.floats(0.001, 100), st.floats(0, 1))
def test_full_jitter_is_anything_up_to_the_doubled_base(attempt: int, base: float, cap: float, share: float) -> None:
    delay = full_jitter_s(attempt, base, cap, lambda low, high: low + share * (high - low))
    assert 0 <= delay <= cap
    assert delay == pytest.approx(share * min(cap, base * 2.0 ** min(attempt, 64)))


def test_what_the_ack_covers_is_not_written_at_all() -> None:
    setup = Setup()
    setup.delivery.progress.save(END)
    setup.delivery.write(batch())
    assert setup.sink.sizes == []
    assert setup.diary.told == []


def test_after_a_write_that_failed_the_word_of_a_target_that_keeps_the_position_counts() -> None:
    setup = Setup(SinkUnavailable("the answer got lost"), backoff_base=0.5)
    opened: list[Position] = []

    def open(context: SinkContext) -> Position:
        opened.append(context.start)
        return END

    setup.sink.keeps_position = True  # type: ignore[misc]
    setup.sink.open = open  # type: ignore[method-assign]
    setup.delivery.write(batch())
    assert opened == [START]
    assert setup.sink.sizes == [3], "it has everything, by its own word"
    assert setup.delivery.ack == END == setup.delivery.progress.written
    assert [one[0] for one in setup.diary.told] == ["retry", "write"]


def test_target_that_is_behind_what_was_written_to_it_is_not_touched() -> None:
    setup = Setup()
    setup.sink.keeps_position = True  # type: ignore[misc]
    setup.delivery.write(batch())
    for said in (START, None):
        setup.sink.open = lambda context, said=said: said  # type: ignore[method-assign, misc]
        with pytest.raises(SinkError, match="an older state of the target was restored"):
            setup.delivery.open(START)


@pytest.mark.parametrize("place", [START, Position.end(END.commit + 50)], ids=["before_the_ack", "behind_the_ack"])
def test_target_that_has_lost_its_record_begins_again_after_a_resync(place: Position) -> None:
    setup = Setup()
    setup.sink.keeps_position = True  # type: ignore[misc]
    setup.delivery.write(batch())
    asked: list[bool] = []

    def open(context: SinkContext) -> Position | None:
        asked.append(context.progress.is_rewound)
        return context.start if context.progress.is_rewound else None

    setup.sink.open = open  # type: ignore[method-assign]
    progress = setup.delivery.progress
    Progress(progress._path.parent, progress.name).rewind(place)
    again = Runner(setup.sink, progress._path.parent, progress.name)
    again.open(START)
    assert asked == [True] and again.ack == place == again.progress.written
    found = Progress(progress._path.parent, progress.name)
    assert not found.is_rewound and found.position == place


def test_sink_that_keeps_the_position_gets_no_empty_batch() -> None:
    setup = Setup()
    setup.sink.keeps_position = True  # type: ignore[misc]
    setup.delivery.write(batch(0))
    assert setup.delivery.ack == END
    assert setup.sink.sizes == []


def test_ack_is_on_disk_before_it_counts() -> None:
    """A write whose ack cannot be saved comes again, and nobody is told that it is there."""
    setup = Setup(max_retries=0)
    path = setup.delivery.progress._path
    path.with_suffix(".kept").write_bytes(path.read_bytes())
    path.unlink()
    path.mkdir()
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch())
    assert setup.delivery.ack == START
    path.rmdir()
    setup.delivery.write(batch())
    assert setup.sink.sizes == [3, 3]
    assert Progress(path.parent, "scripted").position == END


def test_open_that_hangs_is_given_up_and_nothing_is_written_before_it_has_ended() -> None:
    setup = Setup(timeout=30)
    gate = threading.Event()

    def open(context: SinkContext) -> None:
        assert gate.wait(REAL_TIMEOUT_S)

    setup.sink.open = open  # type: ignore[method-assign]
    setup.sink.is_hanging = True
    setup.delivery.open(START)  # it has an ack to begin from
    assert setup.clock.time == 1030
    with pytest.raises(SinkTimeout, match="is still running"):
        setup.delivery.write(batch())
    gate.set()
    setup.release()
    setup.delivery.write(batch())
    assert setup.sink.sizes == [3]


def test_what_was_delivered_in_part_is_left_out_of_the_next_try_and_the_ack_follows_it() -> None:
    setup, three = Setup(max_retries=0), batch()
    seen: list[list[str]] = []
    names = three.events.column("position").to_pylist()

    def write(batch: Batch) -> None:
        seen.append(batch.events.column("position").to_pylist())
        if len(seen) == 1:
            setup.delivery._note([names[0], names[2]])
            raise down()

    setup.sink._write = write  # type: ignore[method-assign]
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(three)
    assert str(setup.delivery.ack) == names[0]
    setup.delivery.write(three)
    assert seen == [names, [names[1]]]


@pytest.mark.parametrize("bad", [(1,), (3,), (5,), (1, 2, 5), (1, 2, 3, 4, 5)])
def test_bad_event_is_found_by_halves_in_order_and_nothing_is_written_twice(bad: tuple[int, ...]) -> None:
    setup = Setup()
    five = batch(5)
    names = five.events.column("position").to_pylist()
    wrong = {names[number - 1] for number in bad}
    found: list[str] = []

    def write(batch: Batch) -> None:
        if wrong & set(batch.events.column("position").to_pylist()):
            raise SinkRejected("one of them", "look", kind="bad", text="no")
        found.extend(batch.events.column("position").to_pylist())

    setup.sink.finds_by_halves = True  # type: ignore[misc]
    setup.sink._write = write  # type: ignore[method-assign]
    left = five
    while True:
        try:
            setup.delivery.write(left)
            break
        except SinkRejected as error:
            (reject,) = error.rejects
            assert (reject.kind, reject.text) == ("bad", "no")
            left = left.without([reject.position])
            wrong.discard(reject.position)
    assert found == [one for number, one in enumerate(names, 1) if number not in bad]


# --- circuit breaker


def test_breaker_opens_after_failures_in_a_row_and_says_when_the_next_try_is() -> None:
    setup = Setup(*[down() for _ in range(9)], max_retries=0, cb_max_failures=2, cb_reset=60)
    for _ in range(2):
        with pytest.raises(SinkUnavailable, match="it is down"):
            setup.delivery.write(batch())
    assert setup.delivery.attempts.breaker is BreakerState.OPEN
    setup.clock.time += 18.5
    said = "failed 2 times in a row; the next attempt is in 42 s. Its last failure: it is down"
    with pytest.raises(CircuitOpen, match=said) as caught:
        setup.delivery.write(batch())
    assert caught.value.retry_in_s == pytest.approx(41.5)
    assert policy_of(caught.value) is Policy.RETRY
    assert PgcdcError.from_json(caught.value.to_json()).policy is Policy.RETRY
    assert len(setup.sink.sizes) == 2


def test_half_open_lets_one_try_through_and_success_closes_it() -> None:
    setup = Setup(down(), max_retries=0, cb_max_failures=1, cb_reset=60)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch())
    setup.clock.time += 60
    setup.delivery.write(batch())
    states = [one[1] for one in setup.diary.told if one[0] == "breaker"]
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


@pytest.mark.parametrize("error", [down(), SinkError("touched")], ids=repr)
def test_half_open_and_failing_again_is_open_again_without_another_try(error: Exception) -> None:
    setup = Setup(down(), error, max_retries=0, cb_max_failures=1, cb_reset=60)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch())
    setup.delivery.attempts.options = DeliveryOptions(max_retries=5)
    setup.clock.time += 60
    with pytest.raises(type(error)):
        setup.delivery.write(batch())
    assert len(setup.sink.sizes) == 2
    with pytest.raises(CircuitOpen, match="60 s"):
        setup.delivery.write(batch())


def test_breaker_can_be_switched_off() -> None:
    setup = Setup(*[down() for _ in range(30)], max_retries=0, cb_max_failures=0)
    for _ in range(30):
        with pytest.raises(SinkUnavailable, match="it is down"):
            setup.delivery.write(batch())
    setup.delivery.write(batch())


@given(
    st.integers(1, 4), st.floats(1, 100), st.lists(st.tuples(st.booleans(), st.floats(0, 50, width=16)), max_size=40)
)
def test_breaker_lets_through_only_when_it_may(limit: int, reset: float, story: list[tuple[bool, float]]) -> None:
    breaker, now, row, opened = CircuitBreaker(limit, reset), 0.0, 0, float("-inf")
    is_open = False
    for is_good, pause in story:
        now += pause
        wait = breaker.wait_s(now)
        assert (wait > 0) == (is_open and now < opened + reset)
        if wait:
            assert now + wait == pytest.approx(opened + reset)
            continue
        if is_good:
            breaker.succeed()
            row, is_open = 0, False
        else:
            breaker.fail(now)
            row += 1
            if is_open or row >= limit:
                is_open, opened = True, now
        assert (breaker.state is BreakerState.OPEN) == is_open


# --- rate limit


def test_batch_larger_than_the_burst_is_cut_and_paced() -> None:
    setup = Setup(rate_limit=10, rate_limit_burst=4)
    setup.delivery.write(batch(10))
    assert setup.sink.sizes == [4, 4, 2]
    assert setup.sink.written == batch(10).events.column("line").to_pylist()
    assert setup.delivery.ack == END
    assert setup.clock.time == pytest.approx(1000.6)  # four at once, six more at ten in a second


def test_sink_that_needs_whole_batches_waits_before() -> None:
    setup = Setup(rate_limit=10, rate_limit_burst=4)
    setup.sink.whole_batches = True  # type: ignore[misc]
    setup.delivery.write(batch(10))
    assert setup.sink.sizes == [10]
    assert setup.clock.time == pytest.approx(1000.6)


def test_without_a_burst_it_is_what_comes_in_a_second() -> None:
    setup = Setup(rate_limit=2.5)
    setup.delivery.write(batch(5))
    assert setup.sink.sizes == [2, 2, 1]


def test_tries_count_too() -> None:
    setup = Setup(down(), rate_limit=10, rate_limit_burst=4, backoff_base=0.0001)
    setup.delivery.write(batch(4))
    assert setup.clock.time == pytest.approx(1000.4)


def test_part_that_was_written_is_not_written_again_when_the_next_fails() -> None:
    setup = Setup(None, down(), rate_limit=10, rate_limit_burst=4, max_retries=0)
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch(6))
    assert setup.delivery.ack == Position.at(101, 4)
    setup.delivery.write(batch(6))
    assert setup.sink.sizes == [4, 2, 2]
    assert setup.sink.written == batch(6).events.column("line").to_pylist()


def test_events_that_share_a_position_are_not_cut_apart() -> None:
    positions = [str(Position.at(101, number)) for number in (1, 2, 2, 3)]
    table = pa.table({"position": positions, "line": ["a\n", "b\n", "c\n", "d\n"]})
    setup = Setup(rate_limit=1000, rate_limit_burst=2)
    setup.delivery.write(Batch(START, END, table))
    assert setup.sink.sizes == [3, 1]
    assert setup.sink.written == ["a\n", "b\n", "c\n", "d\n"]


@given(
    st.floats(0.5, 1000), st.integers(1, 100), st.lists(st.tuples(st.integers(0, 100), st.floats(0, 5)), max_size=40)
)
def test_never_more_than_rate_and_burst_allow(rate: float, burst: int, story: list[tuple[int, float]]) -> None:
    bucket, now, sent = TokenBucket(rate, burst, 0.0), 0.0, 0
    for events, pause in story:
        now += pause
        wait = bucket.take(events, now)
        now += wait
        sent += events
        assert sent <= burst + rate * now + 1e-6
        assert wait == 0 or sent >= events


# --- timeout


def test_write_that_hangs_has_failed_after_its_timeout_and_no_other_starts_before_it_ended() -> None:
    setup = Setup("hang", timeout=30)
    with pytest.raises(SinkTimeout, match="did not finish within 30 s") as caught:
        setup.delivery.write(batch())
    assert policy_of(caught.value) is Policy.RETRY
    assert "scripted_timeout" in caught.value.advice
    assert setup.clock.time == 1030
    with pytest.raises(SinkTimeout, match=r"an earlier write .* is still running"):
        setup.delivery.write(batch())
    busy = [setup.delivery.attempts.is_busy]
    assert setup.sink.sizes == [3]
    setup.release()
    assert [*busy, setup.delivery.attempts.is_busy] == [True, False]
    setup.delivery.write(batch())  # what the hung one did is known by the ack
    assert setup.sink.sizes == [3]
    assert setup.sink.written == batch().events.column("line").to_pylist()
    assert setup.sink.most_writers == 1


def test_hung_write_that_failed_in_the_end_is_written_again() -> None:
    setup = Setup("hang", timeout=30)
    setup.sink.fails_late = down()
    with pytest.raises(SinkTimeout):
        setup.delivery.write(batch())
    setup.release()
    setup.sink.fails_late = None
    setup.delivery.write(batch())
    assert setup.sink.sizes == [3, 3]
    assert setup.sink.most_writers == 1


def test_next_delivery_waits_for_the_hung_one_and_goes_on_when_it_ends() -> None:
    setup = Setup("hang", timeout=30)
    with pytest.raises(SinkTimeout):
        setup.delivery.write(batch())
    setup.clock.at = [(1040.0, setup.sink.let_go)]
    setup.delivery.write(batch(2, END, Position.end(120)))
    assert setup.sink.sizes == [3, 2]
    assert setup.sink.most_writers == 1


def test_open_and_close_leave_a_hung_write_alone() -> None:
    setup = Setup("hang", timeout=30)
    with pytest.raises(SinkTimeout):
        setup.delivery.write(batch())
    with pytest.raises(SinkTimeout):
        setup.delivery.open(START)
    setup.delivery.close()
    assert not setup.sink.is_closed
    setup.release()
    setup.delivery.close()
    assert setup.sink.is_closed


def test_timeouts_count_for_the_breaker() -> None:
    setup = Setup("hang", timeout=30, cb_max_failures=1)
    with pytest.raises(SinkTimeout):
        setup.delivery.write(batch())
    setup.release()
    setup.delivery.progress.save(START)
    with pytest.raises(CircuitOpen):
        setup.delivery.write(batch())


def test_two_callers_are_served_one_after_the_other() -> None:
    delivery = make_runner(sink := ScriptedSink("hang"))
    callers = [threading.Thread(target=delivery.write, args=[batch()]) for _ in range(2)]
    for caller in callers:
        caller.start()
    sink.let_go()
    for caller in callers:
        caller.join(REAL_TIMEOUT_S)
    assert sink.most_writers == 1
    assert sink.sizes == [3]


def test_a_write_of_another_kind_is_delivered_the_same_way() -> None:
    setup = Setup()
    tries: Iterator[Exception | None] = iter([down(), None])

    def write() -> None:
        if error := next(tries):
            raise error

    setup.delivery.deliver(END, 7, write)
    setup.delivery.deliver(END, 7, write)
    assert [one[0] for one in setup.diary.told] == ["retry", "write"]


# --- stop


def test_stop_ends_the_pause_between_tries_at_once() -> None:
    setup = Setup(down(), backoff_base=20)
    setup.clock.at = [(1005.0, setup.delivery.stop)]
    with pytest.raises(DeliveryStopped) as caught:
        setup.delivery.write(batch())
    assert setup.clock.time == 1005
    assert isinstance(caught.value.__cause__, SinkUnavailable)
    assert setup.sink.sizes == [3]


def test_stop_ends_the_wait_for_tokens() -> None:
    setup = Setup(rate_limit=1, rate_limit_burst=2)
    setup.clock.at = [(1000.5, setup.delivery.stop)]
    with pytest.raises(DeliveryStopped):
        setup.delivery.write(batch(6))
    assert setup.clock.time == 1000.5
    assert setup.delivery.ack == Position.at(101, 2)


def test_stop_ends_the_wait_for_a_hung_write() -> None:
    setup = Setup("hang", timeout=30)
    with pytest.raises(SinkTimeout):
        setup.delivery.write(batch())
    setup.clock.at = [(1031.0, setup.delivery.stop)]
    with pytest.raises(DeliveryStopped, match="is still running"):
        setup.delivery.write(batch())
    assert setup.clock.time == 1031
    setup.release()


def test_batch_that_is_on_its_way_when_all_stops_is_still_written() -> None:
    setup = Setup()
    setup.delivery.stop()
    setup.delivery.write(batch())
    assert setup.delivery.ack == END


def test_stop_really_wakes_a_thread_that_waits() -> None:
    delivery = make_runner(ScriptedSink(down()), DeliveryOptions(backoff_base=600, backoff_cap=600))
    raised: list[BaseException] = []
    retried = threading.Event()
    delivery.attempts.hooks.on_retry = lambda *_: retried.set()  # type: ignore[method-assign]

    def write() -> None:
        try:
            delivery.write(batch())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert retried.wait(REAL_TIMEOUT_S)
    delivery.stop()
    thread.join(REAL_TIMEOUT_S)
    assert isinstance(raised[0], DeliveryStopped)


# --- the end of an outage


def test_end_of_an_outage_is_said_once_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    setup = Setup(down(), down(), down(), max_retries=1, cb_max_failures=0, backoff_base=4.0)
    before = counters.get(TARGET_RECOVERIES, adapter="scripted")
    with pytest.raises(SinkUnavailable):
        setup.delivery.write(batch())
    setup.clock.time += 60
    setup.delivery.write(batch())  # the first try fails again
    setup.delivery.write(batch(3, END, Position.end(120)))
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "recovered" in one]
    assert line == "pgcdc: adapter scripted: recovered after 68 s and 4 attempts"
    assert counters.get(TARGET_RECOVERIES, adapter="scripted") == before + 1


def test_a_try_that_failed_and_was_repeated_at_once_is_counted_and_not_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = counters.get(TARGET_RECOVERIES, adapter="scripted")
    Setup(down(), backoff_base=0.1).delivery.write(batch())
    assert "recovered" not in capfd.readouterr().err
    assert counters.get(TARGET_RECOVERIES, adapter="scripted") == before + 1


@pytest.mark.parametrize(
    ("message", "text"),
    [("it is full", "it is full. Wait"), ("it is full.", "it is full. Wait"), ("why?", "why? Wait"), ("", "Wait")],
)
def test_what_a_client_said_gets_one_full_stop(message: str, text: str) -> None:
    assert str(SinkError(message, "Wait")) == text
    assert str(SinkError(message)) == message
