"""Standard output: the form for people, and what is out stays out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from running import run
from targets.events import END, START, STREAM, WHOLE, batch, batch_of, event, to_line

from pgcdc import adapters
from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable, StateError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink import contract
from pgcdc.sink.stdout import MAX_VALUE, Pretty, StdoutSink

PLAIN = Pretty(is_terminal=False)


def change(operation: str, row: Any, old: Any = None, channel: str = "pgcdc:orders", **more: Any) -> str:
    payload = {"op": operation, "table": "orders", "row": row, "old": old, **more}
    made = {**event(STREAM[0]), "channel": channel, "operation": operation, "payload": payload}
    return to_line(made)


# --- for people


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (change("INSERT", {"id": "1", "name": None}), "INSERT   orders id=1 name=NULL"),
        (change("INSERT", {"id": "1"}, channel="pgcdc:sales.orders"), "INSERT   sales.orders id=1"),
        (change("UPDATE", {"id": "1", "n": "2"}), "UPDATE   orders id=1 n=2"),
        (
            change("UPDATE", {"id": "1", "n": "2", "v": None}, {"id": "1", "n": None, "v": "x"}),
            "UPDATE   orders id=1 n: NULL → 2 v: x → NULL",
        ),
        (change("UPDATE", {"id": "2", "n": "2"}, {"id": "1"}), "UPDATE   orders id: 1 → 2 n=2"),
        (
            change("UPDATE", {"id": "1"}, None, _unchanged_toast_columns=["body"]),
            "UPDATE   orders id=1 body as before",
        ),
        (change("DELETE", {"id": "1"}), "DELETE   orders id=1"),
        (change("TRUNCATE", None), "TRUNCATE orders"),
        (change("MESSAGE", None, content="hello you", prefix="p"), 'MESSAGE  orders content="hello you" prefix=p'),
        (change("INSERT", {"a b": 'x "y"', "e": "", "f": "a=b"}), r'INSERT   orders a b="x \"y\"" e="" f="a=b"'),
        (change("INSERT", {"j": '{"a":1}'}), r'INSERT   orders j="{\"a\":1}"'),
    ],
)
def test_event_is_one_line_with_what_changed(line: str, text: str) -> None:
    assert PLAIN.write(line) == f"2026-11-16 00:46:06.258 {text}\n"


def test_value_cannot_command_the_terminal() -> None:
    evil = "\x1b[2J\x07\x9b31m\u202e\r\n\x00"
    line = change("INSERT", {evil: evil}, channel=f"pgcdc:{evil}")
    other = json.dumps({"after": evil}, ensure_ascii=False) + "\n"
    for text in (PLAIN.write(line), PLAIN.write(other), PLAIN.write(evil + "\n")):
        assert not {character for character in text[:-1] if ord(character) < 32 or ord(character) in (0x9B, 0x202E)}
        assert text.endswith("\n")


def test_long_value_is_cut_and_its_length_is_told() -> None:
    text = PLAIN.write(change("INSERT", {"v": "x" * 5000}))
    assert f"v={'x' * MAX_VALUE}… (5000 characters)" in text


@pytest.mark.parametrize(
    "line", ['{"before":null,"after":{"id":1}}\n', '{"_op":"INSERT","id":1}\n', "[1]\n", "not JSON\n", "7\n", "\n"]
)
def test_lines_of_another_form_stay_as_they_are(line: str) -> None:
    assert PLAIN.write(line) == line


@pytest.mark.parametrize(
    ("environ", "is_terminal", "has_colour"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm-256color"}, False, False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, False, True),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    environ: dict[str, str], is_terminal: bool, has_colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    text = Pretty(is_terminal=is_terminal).write(change("DELETE", {"id": "1"}))
    assert ("\x1b[31mDELETE" in text) == has_colour
    assert ("\x1b" in text) == has_colour


@pytest.mark.parametrize(("format", "is_pretty"), [("auto", True), ("json", False), ("pretty", True)])
def test_terminal_gets_the_form_for_people(
    tmp_path: Path, format: Any, is_pretty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    reading, writing = os.openpty()
    seen = b""

    def read() -> None:
        nonlocal seen
        while seen.count(b"\n") < len(WHOLE):
            seen += os.read(reading, 1 << 16)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    sink = run(StdoutSink(descriptor=writing, format=format), tmp_path, "stdout")
    sink.open(START)
    sink.write(batch(START, END))
    thread.join(10)
    assert (
        seen.startswith(b"2026-11-16 00:46:06.258 INSERT   items id=" if is_pretty else b"{") and not thread.is_alive()
    )
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize(("format", "is_pretty"), [("auto", False), ("json", False), ("pretty", True)])
def test_file_or_pipe_gets_json_lines_unless_told_otherwise(tmp_path: Path, format: Any, is_pretty: bool) -> None:
    out = tmp_path / "out"
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT)
    sink = run(StdoutSink(descriptor=descriptor, format=format), tmp_path, "stdout")
    sink.open(START)
    sink.write(batch(START, END))
    os.close(descriptor)
    assert (out.read_text() == "".join(WHOLE)) != is_pretty
    assert len(out.read_text().splitlines()) == len(WHOLE)


def test_format_is_an_option() -> None:
    assert adapters.stdout().options.format == "auto"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="format"):
        adapters.stdout(**dict[str, Any](format="xml"))


# --- what is out stays out


class Disk:
    """Takes so many bytes, then it is full; `room` more come with each call of `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.data, self.error = 0, b"", errno.ENOSPC
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, descriptor: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(self.error, os.strerror(self.error))
        taken = bytes(data[: min(self.room, 100)])
        self.data += taken
        self.room -= len(taken)
        return len(taken)


@pytest.mark.parametrize("format", ["json", "pretty"])
@pytest.mark.parametrize("room", [23, 150, 333, 1000])
def test_full_disk_is_tried_again_and_nothing_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, format: Any
) -> None:
    sink = run(StdoutSink(format=format), tmp_path, "stdout")
    sink.open(START)
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        cuts = [Position.end(110), Position.at(120, 2), Position.at(120, 2, 1), END]
        tries = 0
        while sink.ack < END:
            end = cuts[tries % 4]  # cut in other places each time
            tries += 1
            try:
                disk.room += room
                sink.write(batch(START, end, 1 + tries % 3))
            except SinkUnavailable as error:
                assert error.advice
    expected = WHOLE if format == "json" else [PLAIN.write(line) for line in WHOLE]
    assert disk.data.decode() == "".join(expected)


def test_events_with_one_position_are_remembered_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = [str(STREAM[n]) for n in (0, 1, 1, 1, 2)]
    table = pa.table({"position": positions, "line": ["a\n", "bb\n", "cc\n", "dd\n", "e\n"]})
    sink = run(StdoutSink(), tmp_path, "stdout")
    sink.open(START)
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        while sink.ack < END:
            disk.room += 1
            try:
                sink.write(Batch(START, END, table))
            except SinkUnavailable:
                continue
    assert disk.data == b"a\nbb\ncc\ndd\ne\n"


def test_ack_that_cannot_be_written_does_not_make_events_come_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT)
    sink = run(StdoutSink(descriptor=descriptor), tmp_path, "stdout")
    sink.open(START)

    def fail(*args: Any) -> None:
        raise StateError("full", "Make room")

    with monkeypatch.context() as patched:
        patched.setattr(contract, "write_json_durably", fail)
        with pytest.raises(SinkUnavailable, match="full"):
            sink.write(batch(START, Position.end(120)))
    sink.write(batch(START, END))
    os.close(descriptor)
    assert out.read_text() == "".join(WHOLE)


def test_reader_that_is_gone_stops(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sink = run(StdoutSink(descriptor=writing), tmp_path, "stdout")
    sink.open(START)
    with pytest.raises(SinkError, match="Broken pipe") as caught:
        sink.write(batch(START, END))
    assert not isinstance(caught.value, SinkUnavailable)
    os.close(writing)


def test_pipe_that_somebody_made_non_blocking_is_waited_for(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    sink = run(StdoutSink(descriptor=writing), tmp_path, "stdout")
    sink.open(START)
    seen: list[bytes] = []
    total = sum(len(line.encode()) for line in WHOLE)

    def read() -> None:
        while sum(map(len, seen)) < total:
            seen.append(os.read(reading, 500))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    sink.write(batch(START, END))
    thread.join(10)
    assert b"".join(seen).decode() == "".join(WHOLE)
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("room", [0, 10, len(WHOLE[0].encode()), len(WHOLE[0].encode()) + 7])
def test_events_of_the_past_are_written_and_no_line_is_left_in_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    sink = run(StdoutSink(), tmp_path, "stdout")
    sink.open(START)
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        disk.room = room
        with pytest.raises(SinkUnavailable):
            sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
        begun = disk.data.decode().splitlines(keepends=True)
        disk.room = 5  # the rest of the line in two pieces
        with pytest.raises(SinkUnavailable):
            sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
        disk.room = 10**6
        assert not sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
        sink.write(batch(START, END))
    written = disk.data.decode().splitlines(keepends=True)
    again = max(len(begun), 1) + (room == len(WHOLE[0].encode()))
    assert written[again:] == [*WHOLE[:3], *WHOLE] and set(written) == set(WHOLE)


def test_event_that_is_out_in_part_ends_before_one_of_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = run(StdoutSink(), tmp_path, "stdout")
    sink.open(START)
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        disk.room = 10
        with pytest.raises(SinkUnavailable):
            sink.write(batch(START, END))
        disk.room = 10**6
        with pytest.raises(SinkUnavailable, match="out in part"):
            sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
        sink.write(batch(START, END))
        sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
    assert disk.data.decode() == "".join([*WHOLE, *WHOLE[:3]])
