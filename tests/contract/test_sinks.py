"""The contract of sinks: one suite, every sink. A new sink joins by one line in TARGETS.

A batch may come again, whole or cut in other places, before or after a crash at any point: a sink skips by position
alone, and after each of these stories every event must be at the target once, in order. A target that cannot take back
what it was given (`repeats`) may hold an event twice, but then it is the same line with the same id.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import shutil
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc.errors import SinkError, SinkUnavailable, StateError
from pgcdc.ops import failpoint
from pgcdc.ops.failpoint import FailpointError
from pgcdc.position import Position
from pgcdc.sink.base import Batch, Sink
from pgcdc.sink.delivery import Delivery
from pgcdc.sink.file import FileSink
from pgcdc.sink.folder import FolderSink, file_sink
from pgcdc.sink.noop import NoopSink
from pgcdc.sink.spec import DeliveryOptions, FileOptions
from pgcdc.sink.stdout import StdoutSink

START = Position.end(100)


# --- targets


class Target(Protocol):
    """Where a sink writes to, seen from its other end. It outlives the sink, as the real one outlives a crash."""

    repeats: bool
    """What was written before a crash cannot be taken back."""
    before_ack: str
    """The failpoint between durable and acknowledged."""
    acks: Path
    large: int
    """Events of a large batch."""
    keeps: bool
    """What was written can be looked at."""

    def sink(self) -> Sink:
        """A new process's sink for this target."""

    def lines(self) -> list[str]:
        """Everything that arrived, in order."""

    def close(self) -> None:
        """Clean up."""


class _Target:
    large, keeps = 40_000, True


class FileTarget(_Target):
    repeats, before_ack = False, "file.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder, folder / "events.jsonl"

    def sink(self) -> FileSink:
        return FileSink(self.path, self.acks)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True)

    def close(self) -> None:
        pass


class FolderTarget(_Target):
    """What a reader sees who lists the folder in order."""

    repeats, before_ack = False, "folder.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self.path = folder / "acks", folder / "events"
        self.acks.mkdir()

    def sink(self) -> FolderSink:
        return FolderSink(self.path, self.acks)

    def lines(self) -> list[str]:
        parts = sorted(self.path.glob("*.jsonl")) if self.path.exists() else []
        return [line for part in parts for line in part.read_text().splitlines(keepends=True)]

    def close(self) -> None:
        pass


class FolderInTwoParts(FolderTarget):
    """The same, written as executors do: each batch in two parts, with a task that ran twice."""

    def sink(self) -> FolderSink:
        return _InTwoParts(self.path, self.acks)


class _InTwoParts(FolderSink):
    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        start = self.ack
        events, writer = batch.after(start).events, self.part_writer()
        half = events.num_rows // 2
        parts = [events.slice(0, half), events.slice(half)]
        writer.write_part(0, parts[0].to_batches())  # an attempt that was lost
        receipts = [writer.write_part(number, part.to_batches()) for number, part in enumerate(parts)]
        self.commit_parts(start, batch.end, [receipt for receipt in receipts if receipt])
        self.discard_parts()


class RedirectedStdout(_Target):
    """Standard output that goes to a file: `pgcdc listen > events.jsonl`."""

    repeats, before_ack = True, "stdout.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks, self._path = folder, folder / "stdout"
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def sink(self) -> StdoutSink:
        return StdoutSink(self.acks, descriptor=self._descriptor)

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._descriptor)


class PipedStdout(_Target):
    """Standard output that another process reads: `pgcdc listen | jq`. A pipe holds 64 KB, so somebody must read."""

    repeats, before_ack = True, "stdout.before_ack"

    def __init__(self, folder: Path) -> None:
        self.acks = folder
        self._reading, self._writing = os.pipe()
        self._data = b""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            select.select([self._reading], [], [])
            with self._lock:
                piece = os.read(self._reading, 1 << 16)
                self._data += piece
            if not piece:
                return

    def sink(self) -> StdoutSink:
        return StdoutSink(self.acks, descriptor=self._writing)

    def lines(self) -> list[str]:
        while True:
            with self._lock:
                waiting = array.array("i", [0])
                fcntl.ioctl(self._reading, termios.FIONREAD, waiting)
                if not waiting[0]:
                    return self._data.decode().splitlines(keepends=True)

    def close(self) -> None:
        os.close(self._writing)
        self._thread.join(5)
        os.close(self._reading)


class NoopTarget(_Target):
    """What it has is what its ack covers."""

    repeats, before_ack, keeps = False, "noop.before_ack", False

    def __init__(self, folder: Path) -> None:
        self.acks = folder

    def sink(self) -> NoopSink:
        return NoopSink(self.acks)

    def lines(self) -> list[str]:
        try:
            return up_to(Position.parse(json.loads((self.acks / "noop.json").read_text())["position"]))
        except FileNotFoundError:
            return []
        except ValueError:  # a test damaged it
            return WHOLE

    def close(self) -> None:
        pass


class Delivered:
    """Another target, whose sink is in the wrapper that all sinks have in a pipeline."""

    def __init__(self, inner: Target, options: DeliveryOptions, large: int) -> None:
        self.repeats, self.before_ack, self.acks, self.keeps = inner.repeats, inner.before_ack, inner.acks, inner.keeps
        self.large = large
        self._inner, self._options = inner, options

    def sink(self) -> Delivery:
        return Delivery(self._inner.sink(), self._options)

    def lines(self) -> list[str]:
        return self._inner.lines()

    def close(self) -> None:
        self._inner.close()


def delivered(kind: Callable[[Path], Target], **options: float) -> Callable[[Path], Target]:
    return lambda folder: Delivered(
        kind(folder),
        DeliveryOptions(**options),  # type: ignore[arg-type]
        60 if options else 40_000,
    )


TARGETS: dict[str, Callable[[Path], Target]] = {
    "file": FileTarget,
    "stdout_to_file": RedirectedStdout,
    "stdout_to_pipe": PipedStdout,
    "noop": NoopTarget,
    "file_delivered": delivered(FileTarget),
    "file_delivered_in_parts": delivered(FileTarget, rate_limit=1e9, rate_limit_burst=3),
    "stdout_delivered": delivered(RedirectedStdout),
    "noop_delivered": delivered(NoopTarget),
    "folder": FolderTarget,
    "folder_in_two_parts": FolderInTwoParts,
    "folder_delivered": delivered(FolderTarget),
}


@contextlib.contextmanager
def fresh(name: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        made = TARGETS[name](Path(folder))
        yield made
        made.close()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with fresh(request.param) as made:
        yield made


@contextlib.contextmanager
def opened(target: Target, start: Position = START) -> Iterator[Sink]:
    sink = target.sink()
    sink.open(start)
    yield sink
    sink.close()


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda point: monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(point))


# --- events

STREAM = [Position(110 + 10 * t, n, sub) for t in range(4) for n in range(1, 4) for sub in range(2 if n == 2 else 1)]
END = Position.end(150)


def line(position: Position) -> str:
    return json.dumps({"id": f"id of {position}", "position": str(position), "text": "ä🐘"}, ensure_ascii=False) + "\n"


def batch(start: Position, end: Position, chunks: int = 1, kind: pa.DataType | None = None) -> Batch:
    """The events of STREAM in (start, end], as Spark would give them: in one or more chunks."""
    inside = [position for position in STREAM if start < position <= end]
    size = -(-len(inside) // chunks) or 1
    groups = [inside[begin : begin + size] for begin in range(0, len(inside), size)]
    columns = [
        pa.chunked_array([[str(one) for one in group] for group in groups], kind or pa.string()),
        pa.chunked_array([[line(one) for one in group] for group in groups], kind or pa.string()),
    ]
    return Batch(start, end, pa.table(columns, ["position", "line"]))


WHOLE = [line(position) for position in STREAM]


def up_to(end: Position) -> list[str]:
    return [line(position) for position in STREAM if position <= end]


def check_all_arrived(target: Target, expected: list[str] = WHOLE) -> None:
    """Every event once and in order; where the target cannot take back, repeats with the same id are allowed."""
    lines = target.lines()
    if not target.repeats:
        assert lines == expected
    first_seen = list(dict.fromkeys(lines))
    assert first_seen == expected


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
        for start, end in pairwise([START, Position.end(110), Position(120, 2), Position.end(130), END]):
            sink.write(batch(start, end))
            assert sink.ack == end
            assert target.lines() == up_to(end)
    assert target.lines() == WHOLE


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_batch_may_come_in_any_number_of_chunks(target: Target, chunks: int, kind: pa.DataType) -> None:
    with opened(target) as sink:
        sink.write(batch(START, END, chunks, kind))
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
    for end in (Position(110, 2), Position(110, 2, 1), Position.end(120), END):
        with opened(target, start) as sink:
            sink.write(batch(sink.ack, end))
        assert target.sink().ack == end
        start = Position.end(999)  # a start is for a sink that is new
    assert target.lines() == WHOLE


def test_large_batch(target: Target) -> None:
    positions = [f"{110:016X}/{number:012X}" for number in range(1, target.large + 1)]
    lines = [f'{{"position":"{one}","text":"{"x" * 80}"}}\n' for one in positions]
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
        sink.write(batch(Position.end(110), Position(120, 1)))
        assert sink.ack == END
    assert target.lines() == WHOLE


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    "ack", [Position.end(110), Position(120, 1), Position(120, 2), Position(120, 2, 1), Position.end(145)], ids=str
)
def test_batch_that_starts_before_the_ack_gives_only_what_is_new(target: Target, ack: Position, chunks: int) -> None:
    with opened(target) as sink:
        sink.write(batch(START, ack))
    with opened(target) as sink:
        sink.write(batch(START, END, chunks))
        assert sink.ack == END
    assert target.lines() == WHOLE


places = st.sampled_from([START, *STREAM, *(Position.end(lsn) for lsn in (110, 120, 130, 140)), END])


@pytest.mark.parametrize("name", TARGETS)
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
                sink = stack.enter_context(opened(target))
        sink.write(batch(sink.ack, END))
        assert target.lines() == WHOLE


# --- crashes


@pytest.mark.parametrize("cut", [Position(120, 2), Position.end(120), Position.end(130), END], ids=str)
def test_crash_between_write_and_ack(target: Target, cut: Position, crash_at: Callable[[str], None]) -> None:
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
    with pytest.raises(SinkError, match="is gone"), opened(file):
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
    with pytest.raises(SinkError, match="were written to it"):
        file.sink().check()
    file.path.unlink()
    with pytest.raises(SinkError, match="is gone"):
        file.sink().check()


# --- the folder alone


@pytest.fixture
def folder(tmp_path: Path) -> FolderTarget:
    return FolderTarget(tmp_path)


def names(folder: FolderTarget) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir() if path.is_file())


def hidden(folder: FolderTarget) -> list[Path]:
    return list((folder.path / "_pgcdc").iterdir())


def test_parts_are_named_by_position_and_nothing_else_is_seen(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, Position(120, 2)))
        sink.write(batch(Position(120, 2), Position(120, 2, 1)))
        sink.write(batch(Position(120, 2, 1), Position.end(125)))
        sink.write(batch(Position.end(125), Position.end(126)))  # empty
    assert names(folder) == [
        "0000000000000078-000000000002-00000.jsonl",
        "0000000000000078-000000000002.00000001-00000.jsonl",
        "000000000000007D-FFFFFFFFFFFF-00000.jsonl",
    ]
    assert hidden(folder) == []


@pytest.mark.parametrize("point", ["folder.before_ack", "folder.before_shown", "folder.after_shown"])
def test_parts_are_shown_all_or_none_after_a_crash_in_the_commit(
    folder: FolderTarget, point: str, crash_at: Callable[[str], None]
) -> None:
    target = FolderInTwoParts.__new__(FolderInTwoParts)
    target.acks, target.path = folder.acks, folder.path
    with opened(target) as sink:
        sink.write(batch(START, Position.end(110)))
        crash_at(point)
        with pytest.raises(FailpointError):
            sink.write(batch(Position.end(110), Position.end(130)))
    with opened(target) as sink:
        expected = Position.end(110 if point == "folder.before_ack" else 130)
        assert sink.ack == expected
        assert target.lines() == up_to(expected)
        assert hidden(folder) == []
        sink.write(batch(Position.end(110), END))
    assert target.lines() == WHOLE


def test_commit_that_could_not_be_shown_is_shown_by_the_next_try(
    folder: FolderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as sink:
        real, failures = os.rename, [OSError(5, "Input/output error")]

        def rename(*names: Path) -> None:
            if failures:
                raise failures.pop()
            real(*names)

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(SinkUnavailable, match="Input/output error"):
            sink.write(batch(START, Position.end(120)))
        assert sink.ack == START  # nobody may rely on it yet
        sink.write(batch(START, END))
        assert sink.ack == END
    assert folder.lines() == WHOLE


def test_parts_that_begin_before_the_ack_are_refused(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        assert isinstance(sink, FolderSink)
        receipt = sink.part_writer().write_part(0, batch(START, END).events.to_batches())
        assert receipt is not None
        sink.write(batch(START, Position.end(120)))
        with pytest.raises(SinkUnavailable, match="begin at"):
            sink.commit_parts(START, END, [receipt])
        sink.commit_parts(START, Position.end(115), [receipt])  # the ack has it all: skipped
    assert folder.lines() == up_to(Position.end(120))


def test_parts_without_a_receipt_are_never_seen_and_deleted_at_the_next_start(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        assert isinstance(sink, FolderSink)
        assert sink.part_writer().write_part(0, []) is None
        assert hidden(folder) == []
        sink.part_writer().write_part(3, batch(START, END).events.to_batches())
        assert len(hidden(folder)) == 1
    assert folder.lines() == []
    with opened(folder):
        assert hidden(folder) == []


def test_folder_of_somebody_else_is_refused_and_left_alone(folder: FolderTarget) -> None:
    folder.path.mkdir()
    (folder.path / "precious.txt").write_text("x")
    with pytest.raises(SinkError, match=r"precious\.txt that was not written by this pipeline"):
        folder.sink().check()
    with pytest.raises(SinkError, match="was not written by this pipeline"), opened(folder):
        pass
    assert names(folder) == ["precious.txt"]
    assert not (folder.path / "_pgcdc").exists()


def test_folder_that_vanished_is_refused_and_not_made_again(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, END))
    shutil.rmtree(folder.path)
    with pytest.raises(SinkError, match="is gone"), opened(folder):
        pass
    assert not folder.path.exists()


def test_parts_may_be_taken_away_by_their_reader(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, Position.end(120)))
    for name in names(folder):
        (folder.path / name).unlink()
    with opened(folder) as sink:
        sink.write(batch(START, END))
    assert up_to(Position.end(120)) + folder.lines() == WHOLE


def test_path_with_a_slash_or_of_a_folder_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert isinstance(file_sink(f"{tmp_path}/new/", tmp_path), FolderSink)
    assert isinstance(file_sink(tmp_path / "there", tmp_path), FolderSink)
    assert isinstance(file_sink(tmp_path / "new", tmp_path), FileSink)
    for path, is_folder in ((f"{tmp_path}/new/", True), (f"{tmp_path}/new", False)):
        options = FileOptions.model_validate({"path": path})
        assert isinstance(file_sink(options.path, tmp_path, is_folder=options.is_folder), FolderSink) == is_folder
