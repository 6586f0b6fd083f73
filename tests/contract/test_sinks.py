"""The contract of sinks: one suite, every sink. A new sink joins by one line in TARGETS (tests/sink_targets.py).

A batch may come again, whole or cut in other places, before or after a crash at any point: a sink skips by position
alone, and after each of these stories every event must be at the target once, in order. A target that cannot take back
what it was given (`repeats`) may hold an event twice, but then it is the same line with the same id.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_targets import (
    END,
    REFERENCES,
    START,
    STREAM,
    WHOLE,
    FileTarget,
    Target,
    batch,
    cases,
    check_all_arrived,
    fresh,
    opened,
    up_to,
)
from targets.events import many

from pgcdc.core.errors import SinkError, StateError
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch

# --- a quiet day


def test_new_sink_begins_at_the_start_and_touches_nothing(target: Target) -> None:
    with opened(target) as sink:
        assert sink.ack == START
    assert target.lines() == []


def test_a_look_at_the_target_changes_nothing_before_and_after_the_first_events(target: Target) -> None:
    target.sink().check()
    assert list(target.acks.glob("*.json")) == []
    with opened(target) as sink:
        sink.write(batch(START, END))
    before = {path: path.read_bytes() for path in target.acks.iterdir() if path.is_file()}
    target.sink().check()
    assert {path: path.read_bytes() for path in target.acks.iterdir() if path.is_file()} == before
    check_all_arrived(target)


def test_events_arrive_in_order_over_batches(target: Target) -> None:
    with opened(target) as sink:
        for start, end in pairwise([START, Position.end(110), Position.at(120, 2), Position.end(130), END]):
            sink.write(batch(start, end))
            assert sink.ack == end
            assert target.lines() == up_to(end)
    assert target.lines() == WHOLE


@pytest.mark.parametrize(("name", "case"), cases(product([1, 100, 3], [pa.string(), pa.large_string()])))
def test_batch_may_come_in_any_number_of_chunks(name: str, case: tuple[int, pa.DataType]) -> None:
    with fresh(name) as target:
        with opened(target) as sink:
            sink.write(batch(START, END, *case))
        assert target.lines() == WHOLE


def test_empty_batch_moves_the_ack_and_writes_nothing(target: Target) -> None:
    with opened(target) as sink:
        for end in (Position.end(104), Position.end(105)):
            sink.write(batch(sink.ack, end))
            assert sink.ack == end
        assert target.lines() == []
        sink.write(batch(sink.ack, END))
    assert target.lines() == WHOLE


def test_ack_survives_and_the_next_process_goes_on_there(target: Target) -> None:
    start = START
    for end in (Position.at(110, 2), Position.at(110, 2, 1), Position.end(120), END):
        with opened(target, start) as sink:
            sink.write(batch(sink.ack, end))
        assert target.sink().ack == end
        start = Position.end(999)  # a start is for a sink that is new
    assert target.lines() == WHOLE


def test_large_batch(target: Target) -> None:
    lines = many(target.large)
    positions = [str(Position.at(110, number)) for number in range(1, target.large + 1)]
    table = pa.table({"position": positions, "line": lines})
    with opened(target) as sink:
        sink.write(Batch(START, Position.end(110), table))
        sink.write(Batch(START, Position.end(110), table))
        assert sink.ack == Position.end(110)
    assert not target.keeps or target.lines() == lines


def test_closing_twice_is_harmless(target: Target) -> None:
    with opened(target) as sink:
        sink.close()


# --- batches that come again


def test_repeated_batch_is_skipped(target: Target) -> None:
    with opened(target) as sink:
        for _ in range(3):
            sink.write(batch(START, Position.end(120)))
        assert target.lines() == up_to(Position.end(120))
    with opened(target) as sink:
        sink.write(batch(START, Position.end(120)))
        assert sink.ack == Position.end(120)
    assert target.lines() == up_to(Position.end(120))


def test_older_batch_never_moves_the_ack_back(target: Target) -> None:
    with opened(target) as sink:
        sink.write(batch(START, END))
        sink.write(batch(START, Position.end(110)))
        sink.write(batch(Position.end(110), Position.at(120, 1)))
        assert sink.ack == END
    assert target.lines() == WHOLE


_ACKS = [Position.end(110), Position.at(120, 1), Position.at(120, 2, 1), Position.end(145), Position.at(120, 2)]


@pytest.mark.parametrize(("name", "case"), cases(product(_ACKS, [1, 4])))
def test_batch_that_starts_before_the_ack_gives_only_what_is_new(name: str, case: tuple[Position, int]) -> None:
    ack, chunks = case
    with fresh(name) as target:
        with opened(target) as sink:
            sink.write(batch(START, ack))
        with opened(target) as sink:
            sink.write(batch(START, END, chunks))
            assert sink.ack == END
        assert target.lines() == WHOLE


places = st.sampled_from([START, *STREAM, *(Position.end(lsn) for lsn in (110, 120, 130, 140)), END])


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=12)
@given(st.lists(st.tuples(places, places, st.booleans()), max_size=6))
def test_any_cuts_with_restarts_between_give_every_event_once(
    name: str, plan: list[tuple[Position, Position, bool]]
) -> None:
    with fresh(name) as target, contextlib.ExitStack() as stack:
        sink = stack.enter_context(opened(target))
        for one, other, restart in plan:
            start, end = min(one, other, sink.ack), max(one, other)  # a lane never gives what is behind a gap
            before = sink.ack
            sink.write(batch(start, end, 2))
            assert sink.ack == max(before, end)
            assert target.lines() == up_to(sink.ack)
            if restart:
                sink.close()  # one process has one sink; those that are killed are in test_kills.py
                sink = stack.enter_context(opened(target))
        sink.write(batch(sink.ack, END))
        assert target.lines() == WHOLE


# --- crashes


@pytest.mark.parametrize(("name", "cut"), cases([Position.end(120), Position.end(130), END, Position.at(120, 2)]))
def test_crash_between_write_and_ack(name: str, cut: Position, crash_at: Callable[[str], None]) -> None:
    with fresh(name) as target:
        with opened(target) as sink:
            sink.write(batch(START, Position.end(110)))
            crash_at(target.before_ack)
            with pytest.raises(FailpointError):
                sink.write(batch(Position.end(110), Position.end(130)))
        assert target.sink().ack == Position.end(110)
        with opened(target) as sink:
            assert sink.ack == Position.end(110)
            sink.write(batch(Position.end(110), cut))
            sink.write(batch(cut, END))
        check_all_arrived(target)


def test_crash_after_crash(target: Target, crash_at: Callable[[str], None]) -> None:
    for _ in range(3):
        with opened(target) as sink:
            crash_at(target.before_ack)
            with pytest.raises(FailpointError):
                sink.write(batch(START, Position.end(130)))
    with opened(target) as sink:
        sink.write(batch(START, END))
    check_all_arrived(target)


def test_failed_attempt_is_tried_again_by_the_same_sink(target: Target, crash_at: Callable[[str], None]) -> None:
    with opened(target) as sink:
        crash_at(target.before_ack)
        with pytest.raises(FailpointError):
            sink.write(batch(START, Position.end(130)))
        assert sink.ack == START
        sink.write(batch(START, Position.end(130)))
        sink.write(batch(Position.end(130), END))
    check_all_arrived(target)


def test_damaged_ack_is_refused_and_not_taken_for_a_new_sink(target: Target) -> None:
    with opened(target) as sink:
        sink.write(batch(START, END))
        name = sink.name
    (target.acks / f"{name}.json").write_text('{"position": "00')
    with pytest.raises(StateError, match="damaged"):
        target.sink()
    assert target.lines() == WHOLE


# --- the file alone: what it restores, and what it refuses to touch


@pytest.fixture
def file(tmp_path: Path) -> FileTarget:
    return FileTarget(tmp_path)


def test_half_written_batch_is_cut_off_at_the_next_start(file: FileTarget, crash_at: Callable[[str], None]) -> None:
    with opened(file) as sink:
        sink.write(batch(START, Position.end(110)))
        crash_at("file.half_written=raise@2")
        with pytest.raises(FailpointError):
            sink.write(batch(Position.end(110), END, chunks=4))
    assert len(file.lines()) > len(up_to(Position.end(110)))
    with opened(file) as sink:
        assert file.lines() == up_to(Position.end(110))
        sink.write(batch(Position.end(110), END))
    assert file.lines() == WHOLE


@pytest.mark.parametrize("garbage", [b"\n", b'{"id": "half', b"x" * 100_000])
def test_bytes_behind_the_ack_are_cut_off(file: FileTarget, garbage: bytes) -> None:
    with opened(file) as sink:
        sink.write(batch(START, Position.end(120)))
    with open(file.path, "ab") as out:
        out.write(garbage)
    with opened(file) as sink:
        assert file.lines() == up_to(Position.end(120))
        sink.write(batch(Position.end(120), END))
    assert file.lines() == WHOLE


def test_file_of_somebody_else_is_refused_and_left_alone(file: FileTarget) -> None:
    file.path.write_text("precious\n")
    with pytest.raises(SinkError, match="was not written by this pipeline") as caught, opened(file):
        pass
    assert caught.value.advice
    assert file.path.read_text() == "precious\n"
    assert not list(file.acks.glob("*.json"))


def test_empty_file_of_somebody_else_may_be_used(file: FileTarget) -> None:
    file.path.touch()
    with opened(file) as sink:
        sink.write(batch(START, END))
    assert file.lines() == WHOLE


def test_file_that_shrank_is_refused_and_left_alone(file: FileTarget) -> None:
    with opened(file) as sink:
        sink.write(batch(START, END))
    size = file.path.stat().st_size
    os.truncate(file.path, size - 1)
    with pytest.raises(SinkError, match=f"has {size - 1} bytes, but {size} were written"), opened(file):
        pass
    assert file.path.stat().st_size == size - 1
    assert file.sink().ack == END


def test_file_that_vanished_is_refused_and_not_made_again(file: FileTarget) -> None:
    with opened(file) as sink:
        sink.write(batch(START, END))
    file.path.unlink()
    with pytest.raises(SinkError, match="is missing"), opened(file):
        pass
    assert not file.path.exists()


def test_file_that_was_restored_goes_on(file: FileTarget) -> None:
    with opened(file) as sink:
        sink.write(batch(START, Position.end(120)))
    content = file.path.read_bytes()
    file.path.unlink()
    with pytest.raises(SinkError), opened(file):
        pass
    file.path.write_bytes(content)
    with opened(file) as sink:
        sink.write(batch(START, END))
    assert file.lines() == WHOLE


def test_other_path_goes_on_in_the_new_file_and_the_old_one_stays(file: FileTarget) -> None:
    with opened(file) as sink:
        sink.write(batch(START, Position.end(120)))
    other = FileTarget(file.acks)
    other.path = file.acks / "other.jsonl"
    with opened(other) as sink:
        assert sink.ack == Position.end(120)
        sink.write(batch(START, END))
    assert file.lines() == up_to(Position.end(120))
    assert file.lines() + other.lines() == WHOLE
    with opened(other) as sink:
        assert sink.ack == END
    with pytest.raises(SinkError, match="was not written by this pipeline"), opened(file):
        pass


@pytest.mark.parametrize("place", ["missing/events.jsonl", "a_file/events.jsonl", "a_folder"])
def test_path_that_cannot_be_written_is_a_sink_error_that_names_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "a_file").write_text("x")
    (tmp_path / "a_folder").mkdir()
    target = FileTarget(tmp_path)
    target.path = tmp_path / place
    with pytest.raises(SinkError, match=place) as caught, opened(target):
        pass
    assert caught.value.advice
    with pytest.raises(SinkError, match=place):
        target.sink().check()


def test_a_look_finds_the_file_of_somebody_else_one_that_shrank_and_one_that_vanished(file: FileTarget) -> None:
    file.path.write_text("precious\n")
    with pytest.raises(SinkError, match="was not written by this pipeline"):
        file.sink().check()
    file.path.unlink()
    file.sink().check()
    assert not file.path.exists()
    with opened(file) as sink:
        sink.write(batch(START, END))
    file.path.write_text("short")
    with pytest.raises(SinkError, match="were written"):
        file.sink().check()
    file.path.unlink()
    with pytest.raises(SinkError, match="is missing"):
        file.sink().check()
