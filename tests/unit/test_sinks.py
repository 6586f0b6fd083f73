"""What sinks are made of: batches, acks, and that a write is on disk before it is acknowledged."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import run

from pgcdc.core.errors import Policy, SinkError, SinkUnavailable, StateError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.contract import Progress
from pgcdc.sink.file import FileSink
from pgcdc.sink.stdout import StdoutSink

START = Position.end(100)
POSITIONS = [Position.at(110, 1), Position.at(110, 2), Position.at(110, 2, 1), Position.at(120, 1), Position.at(130, 1)]
END = Position.end(130)


def batch(lines: list[str], start: Position = START, end: Position = END) -> Batch:
    positions = [str(position) for position in POSITIONS[: len(lines)]]
    return Batch(start, end, pa.table({"position": positions, "line": lines}))


LINES = ["one\n", "two\n", "three\n", "four\n", "five\n"]


# --- batches


@pytest.mark.parametrize(
    ("ack", "left"),
    [
        (Position.end(90), 5),
        (START, 5),
        (Position.at(110, 1), 4),
        (Position.at(110, 2), 3),
        (Position.at(110, 2, 1), 2),
        (Position.end(110), 2),
        (Position.end(125), 1),
        (END, 0),
    ],
)
def test_after_an_ack_only_later_events_are_left(ack: Position, left: int) -> None:
    rest = batch(LINES).after(ack)
    assert rest.events.column("line").to_pylist() == LINES[len(LINES) - left :]
    assert (rest.start, rest.end) == (max(ack, START), END)


@given(
    st.lists(st.lists(st.text(max_size=5).map(lambda text: text + "\n"), max_size=4), max_size=4),
    st.sampled_from([pa.string(), pa.large_string()]),
    st.integers(0, 10),
    st.integers(0, 10),
)
def test_lines_are_all_bytes_in_order_also_of_a_slice(
    chunks: list[list[str]], kind: pa.DataType, skip: int, take: int
) -> None:
    column = pa.chunked_array(chunks, kind).slice(skip, take)
    made = Batch(START, END, pa.table({"line": column}))
    written = b"".join(bytes(view) for view in made.lines())
    assert written == "".join([line for chunk in chunks for line in chunk][skip : skip + take]).encode()


def test_lines_of_a_chunk_are_one_buffer() -> None:
    assert len(list(batch(LINES).lines())) == 1


# --- acks


def test_ack_round_trips_with_its_detail(tmp_path: Path) -> None:
    assert Progress(tmp_path, "file").position is None
    Progress(tmp_path, "file").save(Position.at(110, 2, 1), {"size": 7})
    again = Progress(tmp_path, "file")
    assert (again.position, again.detail) == (Position.at(110, 2, 1), {"size": 7})
    assert Progress(tmp_path, "other").position is None


def test_ack_that_could_not_be_saved_did_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ack = Progress(tmp_path, "file")
    ack.save(START, {})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StateError, match="No space"):
        ack.save(END, {})
    assert ack.position == Progress(tmp_path, "file").position == START


def test_a_batch_whose_ack_failed_is_written_once_by_the_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = run(FileSink(tmp_path / "out"), tmp_path)
    sink.open(START)
    batch = Batch(START, END, pa.table({"position": [str(Position.at(END.commit, 1))], "line": ["x\n"]}))
    with monkeypatch.context() as broken:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr(os, "replace", fail)
        with pytest.raises(SinkUnavailable):
            sink.write(batch)
    sink.write(batch)
    assert (tmp_path / "out").read_bytes() == b"x\n"


# --- durable before acknowledged (invariant 1: kill -9 cannot show a missing fsync, so the calls are traced)


class Trace:
    """What was written, synced and renamed, by file name and in order; an fsync with the file's size at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[Path, str]) -> None:
        self.calls: list[tuple[str, str, int]] = []
        fsync, rename, write = os.fsync, os.replace, os.write

        def name_of(descriptor: int) -> str:
            status = os.fstat(descriptor)
            for path, name in names.items():
                if path.exists() and os.path.samestat(path.stat(), status):
                    return name
            return "new file"

        def traced_fsync(descriptor: int) -> None:
            fsync(descriptor)
            size = 0 if os.path.isdir(f"/dev/fd/{descriptor}") else os.fstat(descriptor).st_size
            self.calls.append(("fsync", name_of(descriptor), size))

        def traced_replace(source: Path, target: Path) -> None:
            rename(source, target)
            self.calls.append(("replace", names[target], target.stat().st_size))

        def traced_write(descriptor: int, data: bytes) -> int:
            done = write(descriptor, data)
            self.calls.append(("write", name_of(descriptor), done))
            return done

        monkeypatch.setattr(os, "fsync", traced_fsync)
        monkeypatch.setattr(os, "replace", traced_replace)
        monkeypatch.setattr(os, "write", traced_write)


def test_file_is_synced_before_its_ack_and_the_ack_before_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks, out = tmp_path / "acks", tmp_path / "out"
    acks.mkdir()
    out.mkdir()
    sink = run(FileSink(out / "events.jsonl"), acks)
    sink.open(START)
    names = {out / "events.jsonl": "data", acks / "file.json": "ack", acks: "folder of acks", out: "folder of data"}
    trace = Trace(monkeypatch, names)
    sink.write(batch(LINES))
    size, ack_size = (out / "events.jsonl").stat().st_size, (acks / "file.json").stat().st_size
    assert trace.calls == [
        ("write", "data", size),
        ("fsync", "data", size),
        ("fsync", "new file", ack_size),
        ("replace", "ack", ack_size),
        ("fsync", "folder of acks", 0),
    ]
    sink.close()


def test_new_file_and_its_folder_are_synced_before_the_first_ack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks, out = tmp_path / "acks", tmp_path / "out"
    acks.mkdir()
    out.mkdir()
    sink = run(FileSink(out / "events.jsonl"), acks)
    names = {out / "events.jsonl": "data", acks / "file.json": "ack", acks: "folder of acks", out: "folder of data"}
    trace = Trace(monkeypatch, names)
    sink.open(START)
    assert [call[:2] for call in trace.calls] == [
        ("fsync", "data"),
        ("fsync", "folder of data"),
        ("fsync", "new file"),
        ("replace", "ack"),
        ("fsync", "folder of acks"),
    ]
    sink.close()


def test_stdout_writes_everything_before_its_ack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with open(out, "wb") as file:
        sink = run(StdoutSink(descriptor=file.fileno()), tmp_path, "stdout")
        sink.open(START)
        trace = Trace(monkeypatch, {out: "data", tmp_path / "stdout.json": "ack", tmp_path: "folder"})
        sink.write(batch(LINES))
    assert [call[:2] for call in trace.calls] == [
        ("write", "data"),
        ("fsync", "new file"),
        ("replace", "ack"),
        ("fsync", "folder"),
    ]


# --- targets that fail


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_file_that_cannot_be_written_now_is_unavailable_and_nothing_is_acked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    sink = run(FileSink(tmp_path / "events.jsonl"), tmp_path)
    sink.open(START)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(SinkUnavailable, match=r"events\.jsonl cannot be written: No space left") as caught:
            sink.write(batch(LINES))
    assert caught.value.policy is Policy.RETRY
    assert sink.ack == run(FileSink(tmp_path / "events.jsonl"), tmp_path).ack == START
    sink.write(batch(LINES))
    assert (tmp_path / "events.jsonl").read_text() == "".join(LINES)
    sink.close()


def test_write_that_fails_half_way_is_written_again_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = run(FileSink(tmp_path / "events.jsonl"), tmp_path)
    sink.open(START)
    write = os.write
    left = [7]

    def full(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        done = write(descriptor, data[: left[0]])
        left[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SinkUnavailable):
            sink.write(batch(LINES))
    assert (tmp_path / "events.jsonl").read_text() == "".join(LINES)[:7]
    sink.write(batch(LINES))
    assert (tmp_path / "events.jsonl").read_text() == "".join(LINES)
    sink.close()


def test_closed_stdout_is_found_by_a_look(tmp_path: Path) -> None:
    read, write = os.pipe()
    run(StdoutSink(descriptor=write), tmp_path, "stdout").check()
    os.close(read)
    os.close(write)
    with pytest.raises(SinkError, match="closed"):
        run(StdoutSink(descriptor=write), tmp_path, "stdout").check()


def test_closed_pipe_is_a_sink_error_and_nothing_is_acked(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sink = run(StdoutSink(descriptor=writing), tmp_path, "stdout")
    sink.open(START)
    with pytest.raises(SinkError, match="standard output is closed: Broken pipe") as caught:
        sink.write(batch(LINES))
    assert caught.value.policy is Policy.STOP
    assert sink.ack == run(StdoutSink(), tmp_path, "stdout").ack == START
    os.close(writing)
