"""The folder as a target: what its readers see, and what a crash leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from running import run
from sink_targets import END, START, STREAM, WHOLE, FolderInTwoParts, FolderTarget, batch, batch_of, opened, up_to

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.file import FileOptions, FileSink
from pgcdc.sink.folder import FolderSink
from pgcdc.sink.line_files import KeyStore, content_kind


@pytest.fixture
def folder(tmp_path: Path) -> FolderTarget:
    return FolderTarget(tmp_path)


def names(folder: FolderTarget) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir() if path.is_file())


def hidden(folder: FolderTarget) -> list[Path]:
    return [path for path in (folder.path / "_pgcdc").iterdir() if path.name != "owner"]


def test_parts_are_named_by_position_and_nothing_else_is_seen(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, Position.at(120, 2)))
        sink.write(batch(Position.at(120, 2), Position.at(120, 2, 1)))
        sink.write(batch(Position.at(120, 2, 1), Position.end(125)))
        sink.write(batch(Position.end(125), Position.end(126)))  # empty
    assert names(folder) == [
        "0000000000000078-0000000000002-00000.jsonl",
        "0000000000000078-0000000000002.00000001-00000.jsonl",
        "000000000000007D-0FFFFFFFFFFFF-00000.jsonl",
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
        assert isinstance(sink.sink, FolderSink)
        receipt = sink.sink.part_writer().write_part(0, batch(START, END).events.to_batches())
        assert receipt is not None
        sink.write(batch(START, Position.end(120)))
        with pytest.raises(SinkUnavailable, match="begin at"):
            sink.sink.commit_parts(START, END, [receipt])
        sink.sink.commit_parts(START, Position.end(115), [receipt])  # the ack has it all: skipped
    assert folder.lines() == up_to(Position.end(120))


def test_parts_without_a_receipt_are_never_seen_and_deleted_at_the_next_start(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        assert isinstance(sink.sink, FolderSink)
        assert sink.sink.part_writer().write_part(0, []) is None
        assert hidden(folder) == []
        sink.sink.part_writer().write_part(3, batch(START, END).events.to_batches())
        assert len(hidden(folder)) == 1
    assert folder.lines() == []
    with opened(folder):
        assert hidden(folder) == []


def test_folder_of_somebody_else_is_refused_and_left_alone(folder: FolderTarget) -> None:
    folder.path.mkdir()
    (folder.path / "precious.txt").write_text("x")
    with pytest.raises(SinkError, match=r"a file that this pipeline did not write: precious\.txt"):
        folder.sink().check()
    with pytest.raises(SinkError, match="this pipeline did not write"), opened(folder):
        pass
    assert names(folder) == ["precious.txt"]
    assert not (folder.path / "_pgcdc").exists()


def test_folder_that_vanished_is_refused_and_not_made_again(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, END))
    shutil.rmtree(folder.path)
    with pytest.raises(SinkError, match="is missing"), opened(folder):
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
    assert isinstance(FileOptions(path=f"{tmp_path}/new/").make(), FolderSink)
    assert isinstance(FileOptions(path=str(tmp_path / "there")).make(), FolderSink)
    assert isinstance(FileOptions(path=str(tmp_path / "new")).make(), FileSink)
    for path, is_folder in ((f"{tmp_path}/new/", True), (f"{tmp_path}/new", False)):
        options = FileOptions.model_validate({"path": path})
        assert isinstance(options.make(), FolderSink) == is_folder


def test_keys_are_read_back_from_all_parts_and_missing_ones_are_refused(folder: FolderTarget, tmp_path: Path) -> None:
    def event(position: Position, operation: str, key: str) -> str:
        payload = {"op": operation, "table": "orders", "row": {"id": key}, "old": None}
        return json.dumps({"operation": operation, "channel": "pgcdc:orders", "payload": payload}) + "\n"

    first, second = Position.at(110, 1), Position.at(120, 1)
    with opened(folder) as sink:
        for start, position, operation, key in ((START, first, "INSERT", "7"), (first, second, "INSERT", "8")):
            table = pa.table({"position": [str(position)], "line": [event(position, operation, key)]})
            sink.write(Batch(start, position, table))
        assert isinstance(sink.sink, FolderSink)
        assert content_kind(folder.path) == "events"
        with KeyStore(tmp_path / "keys.db", {("public", "orders"): ["id"]}) as store:
            sink.sink.read_events(store)
            assert store.write_keys(("public", "orders"), tmp_path / "keys") == 2
        (folder.path / names(folder)[0]).unlink()
        with (
            pytest.raises(SinkError, match="has 1 part "),
            KeyStore(tmp_path / "keys.db", {("public", "orders"): ["id"]}) as store,
        ):
            sink.sink.read_events(store)


def test_part_that_the_driver_does_not_see_is_not_acknowledged(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        assert isinstance(sink.sink, FolderSink)
        receipt = sink.sink.part_writer().write_part(0, batch(START, END).events.to_batches())
        assert receipt is not None
        for wrong in ({**receipt, "size": 1}, {**receipt, "file": "gone"}):
            with pytest.raises(SinkUnavailable):
                sink.sink.commit_parts(START, END, [wrong])
            assert folder.sink().ack == START
        sink.sink.commit_parts(START, END, [receipt])
    assert folder.lines() == WHOLE


@pytest.mark.parametrize("next_target", ["folder", "file"])
def test_acknowledged_parts_are_shown_before_the_adapter_goes_on_elsewhere(
    folder: FolderTarget, tmp_path: Path, next_target: str, crash_at: Callable[[str], None]
) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, Position.end(110)))
        crash_at("folder.before_shown")
        with pytest.raises(FailpointError):
            sink.write(batch(Position.end(110), Position.end(130)))
    other = run(FileOptions(path=f"{tmp_path}/other{'/' * (next_target == 'folder')}").make(), folder.acks)
    other.open(START)
    assert other.ack == Position.end(130)
    assert folder.lines() == up_to(Position.end(130))
    other.close()


def test_acknowledged_parts_that_cannot_be_shown_are_told(
    folder: FolderTarget, tmp_path: Path, crash_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as sink:
        crash_at("folder.before_shown")
        with pytest.raises(FailpointError):
            sink.write(batch(START, END))

    def rename(*names: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(SinkError, match="acknowledged parts that are not visible yet"):
            run(FolderSink(tmp_path / "other"), folder.acks).open(START)
    shutil.rmtree(folder.path)  # thrown away: nothing is owed there
    run(FolderSink(tmp_path / "other"), folder.acks).open(START)


def test_folder_has_one_owner(folder: FolderTarget, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    with opened(folder) as sink:
        other = run(FolderSink(folder.path), tmp_path / "others")
        for call in (other.check, lambda: other.open(START)):
            with pytest.raises(SinkError, match="belongs to another pipeline"):
                call()
        sink.write(batch(START, END))
    assert folder.lines() == WHOLE
    (folder.path / "_pgcdc" / "owner").write_text("another")
    with pytest.raises(SinkError, match="belongs to another pipeline"), opened(folder):
        pass


def test_folder_in_which_nothing_was_written_is_free_again(folder: FolderTarget, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    with opened(folder):
        pass
    other = run(FolderSink(folder.path), tmp_path / "others")
    other.open(START)
    with pytest.raises(SinkError, match="belongs to another pipeline"), opened(folder):
        pass
    other.close()
    with opened(folder) as sink:
        sink.write(batch(START, END))


def test_part_that_was_deleted_before_it_was_shown_is_an_error(
    folder: FolderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(point: str) -> None:
        if point == "folder.before_shown":
            for path in hidden(folder):
                path.unlink()

    with opened(folder) as sink:
        monkeypatch.setattr("pgcdc.sink.folder.hit", delete)
        with pytest.raises(SinkError, match="was deleted under"):
            sink.write(batch(START, END))


def test_path_may_become_a_folder_and_a_file_again(folder: FolderTarget) -> None:
    first = run(FileSink(folder.path), folder.acks)
    first.open(START)
    first.write(batch(START, Position.end(110)))
    first.close()
    folder.path.unlink()
    with opened(folder) as sink:
        sink.write(batch(START, Position.end(120)))
    assert folder.lines() == up_to(Position.end(120))[len(up_to(Position.end(110))) :]
    shutil.rmtree(folder.path)
    again = run(FileSink(folder.path), folder.acks)
    again.open(START)
    assert again.ack == Position.end(120)
    again.close()


def test_crash_while_the_owner_is_written_leaves_a_folder_that_can_be_used(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, Position.end(110)))
    (folder.path / "_pgcdc" / "owner").write_text("")
    with opened(folder) as sink:
        sink.write(batch(Position.end(110), END))
    assert folder.lines() == WHOLE
    assert (folder.path / "_pgcdc" / "owner").read_text()


def test_crash_between_a_file_at_the_path_of_a_folder_and_its_ack(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        sink.write(batch(START, Position.end(110)))
    shutil.rmtree(folder.path)
    folder.path.touch()
    file = run(FileSink(folder.path), folder.acks)
    file.open(START)
    assert file.ack == Position.end(110)
    file.close()


# --- dead letters that come again


def _broken(*args: object) -> None:
    raise OSError(5, "Input/output error")


def past(number: int) -> Batch:
    return batch_of(STREAM[number - 1], STREAM[number], [WHOLE[number]])


def test_redelivered_events_are_parts_of_their_own_with_numbers_that_are_never_used_again(folder: FolderTarget) -> None:
    with opened(folder) as sink:
        assert isinstance(sink.sink, FolderSink)
        sink.write(batch(START, Position.end(120)))
        sink.redeliver(past(1))
        moved = next(folder.path.glob("*-R*.jsonl"))
        assert moved.name == "0000000000000078-0FFFFFFFFFFFF-R00001.jsonl"
        moved.unlink()  # its reader has taken it
        sink.redeliver(past(2))
        sink.write(batch(Position.end(120), END))
    with opened(folder) as sink:
        assert isinstance(sink.sink, FolderSink)
        sink.redeliver(past(3))
    assert [name for name in names(folder) if "-R" in name] == [
        "0000000000000078-0FFFFFFFFFFFF-R00002.jsonl",
        "0000000000000096-0FFFFFFFFFFFF-R00003.jsonl",
    ]


def test_redelivery_that_could_not_be_shown_is_shown_by_the_next_try_and_not_written_twice(
    folder: FolderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as sink:
        assert isinstance(sink.sink, FolderSink)
        sink.write(batch(START, Position.end(120)))
        real, failures = os.rename, [OSError(5, "Input/output error")]

        def rename(*names: Path) -> None:
            if failures:
                raise failures.pop()
            real(*names)

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(SinkUnavailable, match="Input/output error"):
            sink.redeliver(past(10))
        assert WHOLE[10] not in folder.lines()
        sink.redeliver(past(10))
        assert folder.lines().count(WHOLE[10]) == 1
        sink.redeliver(past(10))  # asked for once more: a second time
        assert folder.lines().count(WHOLE[10]) == 2


def test_crash_in_a_redelivery_leaves_all_of_it_or_nothing(
    folder: FolderTarget, crash_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as sink:
        assert isinstance(sink.sink, FolderSink)
        sink.write(batch(START, Position.end(120)))
        crash_at("folder.before_redelivered")
        with pytest.raises(FailpointError):
            sink.redeliver(past(10))
    with opened(folder) as sink:
        assert WHOLE[10] not in folder.lines()
        assert hidden(folder) == []
        monkeypatch.setattr("pgcdc.sink.folder._show_parts", _broken)
        assert isinstance(sink.sink, FolderSink)
        with pytest.raises(SinkUnavailable):
            sink.redeliver(past(10))
    monkeypatch.undo()
    with opened(folder):
        assert folder.lines().count(WHOLE[10]) == 1
