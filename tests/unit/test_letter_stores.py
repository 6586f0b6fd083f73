"""What dead letters are, and the stores that keep them: nothing is lost by a crash, a full disk or a purge."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pgcdc.core.errors import Reject, SinkError, StateError
from pgcdc.core.position import Position
from pgcdc.sink.letters.record import DeadLetter, Query, StderrDeadLetters, make_letter
from pgcdc.sink.letters.stores import FileDeadLetters, _from_json, _to_json


def at(*numbers: int) -> list[str]:
    return [str(Position.at(101, number)) for number in numbers]


# --- letters


def letter(
    number: int, adapter: str = "webhook", event: str = '{"id":"e","channel":"pgcdc:o"}', **other: Any
) -> DeadLetter:
    made = make_letter("1/slot", adapter, [event + "\n"], Reject(at(number)[0], "http_400", "bad"), 1)
    return replace(made, **other)


def test_letter_says_what_is_known_of_its_event_and_hides_secrets() -> None:
    line = '{"id":"abc","channel":"pgcdc:orders","operation":"INSERT"}\n'
    made = make_letter("p", "a", [line], Reject("1", "k", "to https://user:geheim@host/x failed\0"), 3)
    assert (made.event_id, made.channel, made.operation) == ("abc", "pgcdc:orders", "INSERT")
    assert "geheim" not in made.error and "\0" not in made.error
    assert DeadLetter.from_json(json.loads(json.dumps(made.to_json()))) == made
    for other in ("no json", "[1]", '{"id": 5}', "[" * 100_000):
        assert make_letter("p", "a", [other], Reject("1", "k", "t"), 1).event_id == ""


def test_same_event_of_the_same_adapter_has_the_same_id_and_no_other_has() -> None:
    def make(pipeline: str, adapter: str, position: str) -> str:
        return make_letter(pipeline, adapter, ["x"], Reject(position, "k", "t"), 1).id

    assert make("p", "a", "1") == make("p", "a", "1")
    assert len({make("p", "a", "1"), make("q", "a", "1"), make("p", "b", "1"), make("p", "a", "2")}) == 4


# --- the file


@pytest.fixture
def file(tmp_path: Path) -> FileDeadLetters:
    return FileDeadLetters(tmp_path / "dead_letters.jsonl")


def test_letters_in_a_file_are_read_back_in_order_once_each(file: FileDeadLetters) -> None:
    assert list(file.find(Query())) == []
    letters = [letter(number, event=f'{{"id":"{number}","ä":"\\u0000🐘"}}') for number in (3, 1, 2)]
    file.record(letters)
    file.record([replace(letters[0], error="another")])
    assert list(FileDeadLetters(file.path).find(Query())) == sorted(letters, key=lambda one: one.position)
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_letters_are_found_by_what_is_known_of_them(file: FileDeadLetters) -> None:
    now = datetime.now(UTC)
    old = letter(1, created_at=now - timedelta(days=2))
    new, other = letter(2, created_at=now), letter(3, "file", created_at=now)
    file.record([old, new, other])
    file.mark([other.id], "delivered", now)
    day = timedelta(days=1)

    def found(**query: Any) -> list[str]:
        return [one.id for one in file.find(Query(**query))]

    assert found(adapter="webhook") == [old.id, new.id]
    assert found(since=now - day) == [new.id, other.id]
    assert found(before=now - day) == [old.id]
    assert found(ids=(new.id,)) == [new.id]
    assert found(is_waiting=True) == [old.id, new.id]
    assert found(is_waiting=False) == [other.id]
    assert found(after=old.position) == [new.id, other.id]
    assert found(limit=2) == [old.id, new.id]
    assert found(pipeline="another") == []


def test_half_a_line_at_the_end_is_nobody_s_letter_and_the_next_one_is_whole(file: FileDeadLetters) -> None:
    file.record([letter(1)])
    whole = file.path.read_bytes()
    for half in (b'{"id":"ha', b"x" * 200_000):
        file.path.write_bytes(whole + half)
        assert len(list(file.find(Query()))) == 1
        file.record([letter(2)])
        assert [one.position for one in file.find(Query())] == at(1, 2)
        assert file.path.read_bytes().startswith(whole) and half not in file.path.read_bytes()


def test_disk_that_is_full_in_the_middle_leaves_the_file_as_it_was(
    file: FileDeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.record([letter(1)])
    before = file.path.read_bytes()

    def write_half(descriptor: int, data: memoryview) -> int:
        os.write(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pgcdc.sink.letters.stores.write_all", write_half)
    with pytest.raises(StateError, match="No space left") as caught:
        file.record([letter(2)])
    assert caught.value.advice
    assert file.path.read_bytes() == before


def test_letter_is_on_disk_before_record_returns(file: FileDeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((name, os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    file.record([letter(1)])
    assert (str(file.path.parent), file.path.parent.stat().st_size) in synced
    assert (str(file.path), file.path.stat().st_size) in synced
    file.mark([letter(1).id], "delivered", datetime.now(UTC))
    assert synced[-1] == (str(file.path), file.path.stat().st_size)
    synced.clear()
    file.open()  # of a run that was killed before its fsync
    assert synced == [(str(file.path), file.path.stat().st_size)]


def test_marks_say_what_became_of_letters(file: FileDeadLetters) -> None:
    now = datetime.now(UTC)
    file.record([letter(1), letter(2)])
    file.mark([letter(1).id], "delivered", now)
    file.mark([letter(2).id], "failed", None, "still bad")
    first, second = file.find(Query())
    assert (first.outcome, first.replayed_at, first.is_waiting) == ("delivered", now, False)
    assert (second.outcome, second.is_waiting, second.error) == ("failed", True, "still bad")
    file.record([letter(1)])  # again after a crash: what became of it stays
    assert not next(file.find(Query(adapter="webhook"))).is_waiting


def test_purge_deletes_what_is_meant_and_keeps_marks(file: FileDeadLetters) -> None:
    assert file.purge(Query()) == 0
    file.record([letter(1), letter(2), letter(3, "file")])
    file.mark([letter(1).id, letter(3).id], "delivered", datetime.now(UTC))
    assert file.purge(Query(adapter="file")) == 1
    assert [(one.position, one.outcome) for one in file.find(Query())] == list(
        zip(at(1, 2), ["delivered", None], strict=True)
    )
    assert file.purge(Query(is_waiting=False)) == 1
    assert [one.position for one in file.find(Query())] == at(2)
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_purge_never_shows_letters_to_others(file: FileDeadLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    file.record([letter(1), letter(2)])
    modes: list[int] = []

    def fsync(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode)

    monkeypatch.setattr(os, "fsync", fsync)
    assert file.purge(Query(ids=(letter(1).id,))) == 1
    assert [mode & 0o777 for mode in modes if stat.S_ISREG(mode)] == [0o600]


def test_only_what_is_meant_is_kept_in_memory(file: FileDeadLetters) -> None:
    file.record([letter(number, adapter) for number in (1, 2, 3) for adapter in ("webhook", "file")])
    assert len(file._read(Query(adapter="file", after=at(1)[0], is_waiting=True))) == 2


@pytest.mark.parametrize("event", ['["a","b"]', "[]", '{"a":1}', "a\nb", "no json"])
def test_any_event_comes_back_from_the_table_as_it_was(event: str) -> None:
    kept = _to_json(event)
    json.loads(kept)
    assert _from_json(kept) == event


def test_nothing_is_lost_between_a_purge_and_letters_that_come_meanwhile(file: FileDeadLetters) -> None:
    count, failed = 60, []

    def record() -> None:
        try:
            for number in range(1, count + 1):
                FileDeadLetters(file.path).record([letter(number)])
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=record)
    writer.start()
    for _ in range(20):
        file.record([letter(1, "nobody")])
        assert file.purge(Query(adapter="nobody")) == 1
    writer.join(60)
    assert not failed and not writer.is_alive()
    assert [one.position for one in file.find(Query(adapter="webhook"))] == at(*range(1, count + 1))


def test_line_that_is_no_letter_is_named(file: FileDeadLetters) -> None:
    file.record([letter(1), letter(2)])
    lines = file.path.read_bytes().splitlines(keepends=True)
    for wrong in (b"garbage\n", b"{}\n", b"[]\n"):
        file.path.write_bytes(lines[0] + wrong + lines[1])
        with pytest.raises(StateError, match="line 2 of"):
            list(file.find(Query()))


def test_file_that_cannot_be_written_is_found_before_it_is_needed(tmp_path: Path) -> None:
    FileDeadLetters(tmp_path / "new.jsonl").check()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place in ("missing/d.jsonl", "file/d.jsonl", "folder"):
        with pytest.raises(StateError, match=place) as caught:
            FileDeadLetters(tmp_path / place).check()
        assert caught.value.advice
        with pytest.raises(StateError, match=place):
            FileDeadLetters(tmp_path / place).open()


# --- those that are not read again


def test_stderr_gets_a_line_of_json_for_each_letter_and_a_closed_one_is_an_error() -> None:
    stream = StringIO()
    store = StderrDeadLetters(stream)
    store.record([letter(1), letter(2)])
    raw = [json.loads(line)["dead_letter"] for line in stream.getvalue().splitlines()]
    assert [one["position"] for one in raw] == at(1, 2)
    stream.close()
    with pytest.raises(SinkError, match="standard error"):
        store.record([letter(1)])
