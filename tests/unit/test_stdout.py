"""Standard output: the form for people, and what is out stays out."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from running import run
from targets.events import END, START, STREAM, WHOLE, batch, batch_of, event, to_line

from pgcdc import adapters
from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable, StateError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, OldKind, Op, Relation
from pgcdc.event.batch import Batch
from pgcdc.event.forms import FORMS
from pgcdc.event.shape import TableShape
from pgcdc.sink import contract
from pgcdc.sink.stdout import MAX_VALUE, Pretty, StdoutOptions, StdoutSink

PLAIN = Pretty(is_terminal=False)
TIME_US = 1_794_789_966_258_000
Row = dict[str, str | None]


def tables(*changes: tuple[Op, Row, Row | None], namespace: str = "public", identity: str = "d") -> Batch:
    """Changes of a table `orders`: operation, new row, old row. A column that the new row lacks was not sent."""
    names = list(dict.fromkeys(name for _, row, old in changes for name in [*row, *(old or {}), "id"]))
    columns = tuple(Column(name, 25, -1, identity == "f" or name == "id") for name in names)
    rows = []
    for number, (op, row, old) in enumerate(changes):
        kind = OldKind.NONE if old is None else OldKind.FULL if identity == "f" else OldKind.KEY
        unchanged = [at for at, name in enumerate(names) if name not in row and op is Op.UPDATE]
        has_new = op not in (Op.DELETE, Op.TRUNCATE)
        rows.append(
            {
                "position": str(STREAM[number]), "id": f"e{number}", "op": int(op), "relation": 1,
                "new": [row.get(name) for name in names] if has_new else None,
                "old": [old.get(name) for name in names] if old is not None else None,
                "old_kind": int(kind), "unchanged": unchanged, "ordinal": 1, "commit_time": TIME_US, "xid": 7,
            }
        )  # fmt: skip
    schema = pa.schema([("position", pa.string()), *FORMS["tables"]])
    shape = TableShape(Relation(1, namespace, "orders", identity, columns), None)
    return Batch(START, END, pa.Table.from_pylist(rows, schema), {1: shape})


# --- for people


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ((Op.INSERT, {"id": "1", "name": None}, None), "INSERT   orders id=1 name=NULL"),
        ((Op.SNAPSHOT, {"id": "1"}, None), "SNAPSHOT orders id=1"),
        ((Op.UPDATE, {"id": "1", "n": "2"}, None), "UPDATE   orders id=1 n=2"),
        ((Op.UPDATE, {"id": "2", "n": "2"}, {"id": "1"}), "UPDATE   orders id: 1 → 2 n=2"),
        ((Op.UPDATE, {"id": "1"}, {"id": "1", "body": None}), "UPDATE   orders id=1 body as before"),
        ((Op.DELETE, {}, {"id": "1", "name": None}), "DELETE   orders id=1"),
        ((Op.TRUNCATE, {}, None), "TRUNCATE orders"),
        ((Op.INSERT, {"id": 'x "y"', "e": "", "f": "a=b"}, None), r'INSERT   orders id="x \"y\"" e="" f="a=b"'),
        ((Op.INSERT, {"id": '{"a":1}'}, None), r'INSERT   orders id="{\"a\":1}"'),
    ],
)
def test_event_is_one_line_with_what_changed(change: Any, text: str) -> None:
    assert PLAIN.write(tables(change)) == [f"2026-11-16 00:46:06.258 {text}\n"]


def test_update_shows_old_and_new_values_if_the_old_row_came() -> None:
    change = (Op.UPDATE, {"id": "1", "n": "2", "v": None}, {"id": "1", "n": None, "v": "x"})
    (line,) = PLAIN.write(tables(change, namespace="sales", identity="f"))
    assert line.endswith("UPDATE   sales.orders id=1 n: NULL → 2 v: x → NULL\n")
    (line,) = PLAIN.write(tables((Op.DELETE, {}, {"id": "1", "n": None}), identity="f"))
    assert line.endswith("DELETE   orders id=1 n=NULL\n")


def test_lines_stand_in_the_order_of_the_stream_and_nothing_rendered_is_read() -> None:
    first, second = tables((Op.INSERT, {"id": "1"}, None)), tables((Op.INSERT, {"id": "2"}, None), namespace="a")
    other = second.events.set_column(3, "relation", pa.array([2], pa.int32()))
    shapes = {**first.shapes, 2: replace(second.shapes[1], relation=replace(second.shapes[1].relation, oid=2))}
    events = pa.concat_tables([first.events, other, first.events])
    assert [line.split()[-2:] for line in PLAIN.write(replace(first, events=events, shapes=shapes))] == [
        ["orders", "id=1"], ["a.orders", "id=2"], ["orders", "id=1"],
    ]  # fmt: skip


def test_value_cannot_command_the_terminal() -> None:
    evil = "\x1b[2J\x07\x9b31m\u202e\r\n\x00"
    (line,) = PLAIN.write(tables((Op.INSERT, {"id": evil, evil: evil}, None), namespace=evil))
    (other,) = StdoutSink(format="pretty")._texts(batch_of(START, END, [to_line({**event(STREAM[0]), "x": evil})]))
    for text in (line, other.as_py()):
        assert not {character for character in text[:-1] if ord(character) < 32 or ord(character) in (0x9B, 0x202E)}
        assert text.endswith("\n")


def test_long_value_is_cut_and_its_length_is_told() -> None:
    (text,) = PLAIN.write(tables((Op.INSERT, {"id": "x" * 5000}, None)))
    assert f"id={'x' * MAX_VALUE}… (5000 characters)" in text


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
    (text,) = Pretty(is_terminal=is_terminal).write(tables((Op.DELETE, {}, {"id": "1"})))
    assert ("\x1b[31mDELETE" in text) == has_colour
    assert ("\x1b" in text) == has_colour


@pytest.mark.parametrize(("format", "is_pretty"), [("auto", True), ("json", False), ("pretty", True)])
def test_terminal_gets_the_form_for_people(
    tmp_path: Path, format: Any, is_pretty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    reading, writing = os.openpty()
    sink = StdoutSink(descriptor=writing, format=format)
    assert sink.is_pretty == is_pretty
    runner = run(sink, tmp_path, "stdout")
    runner.open(START)
    runner.write(tables((Op.INSERT, {"id": "7"}, None)) if is_pretty else batch(START, END))
    seen = os.read(reading, 1 << 16)
    assert seen.startswith(b"2026-11-16 00:46:06.258 INSERT   orders id=7" if is_pretty else b"{")
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize(("format", "is_pretty"), [("auto", False), ("json", False), ("pretty", True)])
def test_file_or_pipe_gets_json_lines_unless_told_otherwise(tmp_path: Path, format: Any, is_pretty: bool) -> None:
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    assert StdoutSink(descriptor=descriptor, format=format).is_pretty == is_pretty
    os.close(descriptor)
    assert StdoutOptions(format="json").form() == "lines" and StdoutOptions(format="pretty").form() == "changes"


def test_lines_of_another_form_stay_as_they_are(tmp_path: Path) -> None:
    """Typed rows, and dead letters."""
    out = tmp_path / "out"
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT)
    runner = run(StdoutSink(descriptor=descriptor, format="pretty"), tmp_path, "stdout")
    runner.open(START)
    runner.write(batch(START, END))
    os.close(descriptor)
    assert out.read_text() == "".join(WHOLE)


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
    assert disk.data.decode() == "".join(WHOLE)


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
def test_events_of_the_past_are_written_once_and_no_line_is_left_in_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    sink = run(StdoutSink(), tmp_path, "stdout")
    sink.open(START)
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        disk.room = room
        for _ in range(2):  # the rest of the line in two pieces
            with pytest.raises(SinkUnavailable):
                sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
            disk.room = 5
        disk.room = 10**6
        assert not sink.redeliver(batch_of(START, STREAM[3], WHOLE[:3]))
        sink.write(batch(START, END))
    assert disk.data.decode() == "".join([*WHOLE[:3], *WHOLE])


def test_event_that_is_out_in_part_ends_before_one_of_the_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = run(StdoutSink(), tmp_path, "stdout")
    sink.open(START)
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        disk.room = 10
        with pytest.raises(SinkUnavailable):
            sink.write(batch(START, END))
        disk.room = 10**6
        sink.redeliver(batch_of(START, STREAM[3], WHOLE[1:3]))
        sink.write(batch(START, END))
    assert disk.data.decode() == "".join([WHOLE[0], *WHOLE[1:3], *WHOLE[1:]])
