"""Files that rotate: what they hold, what a crash at any step leaves, and what is never touched."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from running import run
from targets.events import END, START, STREAM, WHOLE, batch, batch_of, up_to
from targets.file import RotatingFile, RotatingGzip, RotatingZstd, read_rotated

from pgcdc.core import failpoint
from pgcdc.core.errors import ConfigError, SinkError, SinkUnavailable, StateError
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink import contract, line_files
from pgcdc.sink.contract import Progress
from pgcdc.sink.file import FileSink
from pgcdc.sink.line_files import KeyStore, Rotated, open_lines, tidy
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import check_adapters

KINDS = [RotatingFile, RotatingGzip, RotatingZstd]
ENDINGS = {"none": "", "gzip": ".gz", "zstd": ".zst"}


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda point: monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(point))


@pytest.fixture
def target(tmp_path: Path) -> RotatingFile:
    return RotatingFile(tmp_path)


def make(target: RotatingFile, **options: Any) -> Runner:
    given = {"max_bytes": int(target.max_size), "compression": target.compress, **options}
    sink = run(FileSink(target.path, **given), target.acks)
    sink.open(START)
    return sink


def read(target: RotatingFile) -> FileSink:
    """As a resync looks at it."""
    sink = FileSink(target.path)
    sink.bind(Progress(target.acks, "file"))
    return sink


def names(target: RotatingFile) -> list[str]:
    return sorted(path.name for path in target.path.parent.iterdir() if path.is_file())


def detail(target: RotatingFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target.acks / "file.json").read_text())["detail"]
    return found


# --- what they hold


def test_file_rotates_before_it_gets_too_large_and_numbers_rise(target: RotatingFile) -> None:
    sink = make(target)
    sink.write(batch(START, Position.end(120)))
    sink.write(batch(Position.end(120), END, 3))
    sink.close()
    rotated = [f"events.jsonl.{number:06d}" for number in range(1, len(target.rotated()) + 1)]
    assert names(target) == ["events.jsonl", *rotated]
    assert len(rotated) >= 3
    sizes = [path.stat().st_size for path in target.rotated()]
    assert all(size <= 1500 and size + len(WHOLE[0].encode()) > 1500 for size in sizes)
    assert target.path.stat().st_size > 0
    assert target.lines() == WHOLE


def test_event_that_is_larger_than_a_file_has_one_for_itself(target: RotatingFile) -> None:
    lines = [WHOLE[0], WHOLE[1].replace("🐘", "x" * 5000), WHOLE[2]]
    sink = make(target)
    sink.write(batch_of(START, END, lines))
    sink.close()
    assert [read_rotated(path).decode() for path in target.rotated()] == lines[:2]
    assert target.path.read_text() == lines[2]


def test_without_a_size_nothing_rotates_and_later_it_does_and_later_not(target: RotatingFile) -> None:
    for end, max_bytes in ((120, 0), (130, 1500), (150, 0)):
        sink = make(target, max_bytes=max_bytes)
        sink.write(batch(sink.ack, Position.end(end)))
        sink.close()
    assert len(target.rotated()) == 1
    assert target.rotated()[0].stat().st_size > 1500
    assert target.lines() == WHOLE


@pytest.mark.parametrize("kind", [RotatingGzip, RotatingZstd])
def test_rotated_files_are_compressed_in_a_form_that_others_read(tmp_path: Path, kind: type[RotatingFile]) -> None:
    target = kind(tmp_path)
    sink = make(target)
    sink.write(batch(START, END))
    sink.close()
    ending = ENDINGS[kind.compress]
    assert [name for name in names(target) if name != "events.jsonl"] == [
        f"{path.name}{ending}" for path in target.rotated()
    ]
    first = target.path.with_name(f"events.jsonl.000001{ending}")
    if kind is RotatingGzip:
        assert gzip.decompress(first.read_bytes()).decode() == "".join(WHOLE[: len(WHOLE) // 4])
    else:
        with pa.input_stream(str(first), compression="zstd") as stream:
            assert stream.read().decode() == "".join(WHOLE[: len(WHOLE) // 4])
    assert target.lines() == WHOLE


def test_events_of_the_past_are_appended_and_survive(target: RotatingFile) -> None:
    sink = make(target)
    sink.write(batch(START, END).without({str(STREAM[1])}))
    before = len(target.rotated())
    large = WHOLE[1].replace("🐘", "x" * 1000)
    assert not sink.redeliver(batch_of(STREAM[0], STREAM[1], [large]))
    assert sink.ack == END
    sink.close()
    sink = make(target)
    sink.close()
    assert target.lines() == [WHOLE[0], *WHOLE[2:], large]
    assert len(target.rotated()) == before + 1


# --- crashes at every step

STEPS = ["file.before_rotation", "file.renamed", "file.rotated", "file.half_written"]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("point", STEPS)
def test_crash_in_a_rotation_is_finished_at_the_next_start(
    target: RotatingFile, point: str, at: int, crash_at: Callable[[str], None], tmp_path: Path
) -> None:
    sink = make(target)
    sink.write(batch(START, Position.end(110)))
    crash_at(f"{point}=raise@{at}")
    with pytest.raises(FailpointError):
        sink.write(batch(Position.end(110), END))
    with KeyStore(tmp_path / "keys", {("public", "items"): ["id"]}) as store:  # a resync comes first
        before = run(FileSink(target.path), target.acks)
        before.check()
        read(target).read_events(store)
        count = store.write_keys(("public", "items"), target.acks / "found")
    assert count == len(up_to(before.ack))
    again = make(target)
    assert target.lines() == up_to(again.ack)
    assert detail(target)["last"] == len(target.rotated())
    again.write(batch(START, END))
    again.close()
    assert target.lines() == WHOLE
    assert names(target) == ["events.jsonl", *(path.name for path in target.rotated())]


@pytest.mark.parametrize("point", STEPS)
def test_same_sink_finishes_a_rotation_that_failed(
    target: RotatingFile, point: str, crash_at: Callable[[str], None]
) -> None:
    sink = make(target)
    crash_at(point)
    with pytest.raises(FailpointError):
        sink.write(batch(START, END))
    sink.write(batch(START, END))
    sink.close()
    assert target.lines() == WHOLE


@pytest.mark.parametrize("kind", [RotatingGzip, RotatingZstd])
@pytest.mark.parametrize("point", ["file.half_compressed", "file.before_compressed", "file.compressed"])
def test_crash_in_a_compression_leaves_nothing_and_loses_nothing(
    tmp_path: Path, kind: type[RotatingFile], point: str, crash_at: Callable[[str], None]
) -> None:
    target = kind(tmp_path)
    sink = make(target, compression="none")
    sink.write(batch(START, END))
    sink.close()
    last = len(target.rotated())
    crash_at(f"{point}=raise@2")
    with pytest.raises(FailpointError):
        tidy(target.path, Rotated(1, 1, last), target.compress, lambda: False)  # type: ignore[arg-type]
    assert target.lines() == WHOLE
    make(target).close()
    assert target.lines() == WHOLE
    assert names(target) == ["events.jsonl", *(f"{path.name}{ENDINGS[kind.compress]}" for path in target.rotated())]


def test_crash_while_files_are_removed_is_finished(target: RotatingFile, crash_at: Callable[[str], None]) -> None:
    sink = make(target)
    sink.write(batch(START, END))
    sink.close()
    last = len(target.rotated())
    assert last >= 3
    crash_at("file.removed")
    with pytest.raises(FailpointError):
        tidy(target.path, Rotated(1, last, last), "none", lambda: False)
    assert len(target.rotated()) == last - 1
    tidy(target.path, Rotated(1, last, last), "none", lambda: False)
    assert len(target.rotated()) == 1


@pytest.mark.parametrize("kind", [RotatingGzip, RotatingZstd])
def test_a_file_that_is_compressed_after_it_was_listed_is_read_all_the_same(
    tmp_path: Path, kind: type[RotatingFile]
) -> None:
    target = kind(tmp_path)
    sink = make(target, compression="none")
    sink.write(batch(START, END))
    sink.close()
    listed = target.rotated()
    contents = [path.read_bytes() for path in listed]
    tidy(target.path, Rotated(1, 1, len(listed)), target.compress, lambda: False)  # type: ignore[arg-type]
    assert not any(path.exists() for path in listed)
    for path, content in zip(listed, contents, strict=True):
        with open_lines(path) as file:
            assert file.read() == content


# --- a full disk


@pytest.mark.parametrize("step", ["rename", "ack", "create"])
def test_full_disk_in_a_rotation_is_tried_again(
    target: RotatingFile, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = make(target)
    sink.write(batch(START, Position.end(110)))
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise full

    def fail_state(*args: Any, **kwargs: Any) -> Any:
        raise StateError("file.json cannot be written: No space left on device", "Make room")

    with monkeypatch.context() as patched:
        if step == "rename":
            patched.setattr(os, "rename", fail)
        elif step == "create":
            patched.setattr(os, "open", fail)
        else:
            patched.setattr(contract, "write_json_durably", fail_state)
        for _ in range(2):
            with pytest.raises(SinkUnavailable, match="No space left"):
                sink.write(batch(Position.end(110), END))
    sink.write(batch(START, END))
    sink.close()
    assert target.lines() == WHOLE


def test_full_disk_in_a_compression_is_said_and_the_file_stays_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = RotatingZstd(tmp_path)

    def fail(plain: Path, partial: Path, *more: Any) -> bool:
        partial.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(line_files, "_write_compressed", fail)
        sink = make(target)
        sink.write(batch(START, END))
        sink.close()
    assert "pgcdc: adapter file: rotated files of" in capsys.readouterr().err
    assert names(target) == ["events.jsonl", *(path.name for path in target.rotated())]
    assert target.lines() == WHOLE
    make(target).close()
    assert all(name.endswith((".zst", ".jsonl")) for name in names(target))
    assert target.lines() == WHOLE


def test_compression_that_takes_too_long_is_left_for_the_next_start(tmp_path: Path) -> None:
    target = RotatingZstd(tmp_path)
    sink = make(target, compression="none")
    sink.write(batch(START, END))
    sink.close()
    tidy(target.path, Rotated(1, 1, len(target.rotated())), "zstd", lambda: True)
    assert names(target) == ["events.jsonl", *(path.name for path in target.rotated())]
    assert target.lines() == WHOLE


# --- deletion


def test_nothing_is_deleted_unless_it_is_told(target: RotatingFile) -> None:
    for end in (110, 120, 130, 150):
        sink = make(target)
        sink.write(batch(sink.ack, Position.end(end)))
        sink.close()
    assert target.lines() == WHOLE


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_newest_files_are_kept_if_that_is_told(tmp_path: Path, kind: type[RotatingFile]) -> None:
    target = kind(tmp_path)
    sink = make(target, max_files=2)
    sink.write(batch(START, END))
    sink.close()
    last = detail(target)["last"]
    assert [path.name for path in target.rotated()] == [f"events.jsonl.{number:06d}" for number in (last - 1, last)]
    assert target.lines() == WHOLE[len(WHOLE) - len(target.lines()) :]


def test_files_of_others_are_never_touched(target: RotatingFile) -> None:
    foreign = {
        "events.jsonl.000001": b"1",
        "events.jsonl.000004.gz": b"4",
        "events.jsonl.000003.zst.partial": b"3",
        "events.jsonl.old": b"old",
        "events.jsonl.1": b"one",
        "other.jsonl.000005": b"5",
    }
    for name, content in foreign.items():
        (target.path.parent / name).write_bytes(content)
    sink = make(target, max_files=1, compression="gzip")
    sink.write(batch(START, END))
    sink.close()
    assert {name: (target.path.parent / name).read_bytes() for name in foreign} == foreign
    last = detail(target)["last"]
    assert sorted(set(names(target)) - set(foreign)) == ["events.jsonl", f"events.jsonl.{last:06d}.gz"]
    assert detail(target)["first"] == 5


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_name_that_somebody_took_meanwhile_is_refused_and_left_alone(target: RotatingFile, ending: str) -> None:
    sink = make(target)
    sink.write(batch(START, Position.end(120)))
    foreign = target.path.with_name(f"events.jsonl.{detail(target)['last'] + 1:06d}{ending}")
    foreign.write_text("precious")
    with pytest.raises(SinkError, match=f"{foreign.name} exists and was not written") as caught:
        sink.write(batch(Position.end(120), END))
    assert not isinstance(caught.value, SinkUnavailable)
    assert foreign.read_text() == "precious"
    foreign.unlink()
    sink.write(batch(START, END))
    sink.close()
    assert target.lines() == WHOLE


def test_rotated_files_may_be_taken_away_by_their_reader(target: RotatingFile) -> None:
    taken: list[str] = []
    for end in (120, 130, 150):
        sink = make(target)
        sink.write(batch(sink.ack, Position.end(end)))
        sink.close()
        for path in target.rotated():
            taken += read_rotated(path).decode().splitlines(keepends=True)
            path.unlink()
    assert taken + target.lines() == WHOLE


# --- read back


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_read_back_over_rotated_files_and_missing_ones_are_refused(
    tmp_path: Path, kind: type[RotatingFile]
) -> None:
    target, table = kind(tmp_path), ("public", "items")
    sink = make(target)
    sink.write(batch(START, END))
    sink.close()
    reader = read(target)
    assert (reader.kind, reader.is_complete, reader.is_there) == ("events", True, True)
    with KeyStore(tmp_path / "keys", {table: ["id"]}) as store:
        reader.read_events(store)
        assert store.write_keys(table, tmp_path / "found") == len(WHOLE)
    gone = next(target.path.parent.glob("events.jsonl.000002*"))
    moved = gone.rename(tmp_path / "moved")
    with (
        KeyStore(tmp_path / "keys", {table: ["id"]}) as store,
        pytest.raises(SinkError, match="Move the missing files back"),
    ):
        reader.read_events(store)
    moved.rename(gone)
    gone.write_bytes(b"\x1f\x8b nothing")
    with KeyStore(tmp_path / "keys", {table: ["id"]}) as store, pytest.raises(SinkError):
        reader.read_events(store)


def test_files_that_were_removed_make_it_incomplete_even_if_they_are_still_there(target: RotatingFile) -> None:
    sink = make(target)
    sink.write(batch(START, Position.end(130)))
    sink.close()
    sink = make(target, max_files=1)
    sink.write(batch(START, END))
    sink.close()
    reader = read(target)
    assert not reader.is_complete
    with (
        KeyStore(target.path.parent / "keys", {("public", "items"): ["id"]}) as store,
        pytest.raises(SinkError, match="older files"),
    ):
        reader.read_events(store)


def test_another_path_begins_anew_and_leaves_the_old_files(target: RotatingFile) -> None:
    sink = make(target)
    sink.write(batch(START, Position.at(120, 1)))
    sink.close()
    kept = target.lines()
    other = RotatingFile.__new__(RotatingFile)
    other.acks, other.path = target.acks, target.path.with_name("other.jsonl")
    sink = make(other, max_files=1)
    sink.write(batch(START, END))
    sink.close()
    assert target.lines() == kept
    assert detail(other)["first"] == 1


def test_every_file_is_durable_before_it_gets_its_number(target: RotatingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def note(*args: Any, name: str = name, real: Any = real) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[0])
            calls.append(f"{name} {Path(path).name}")
            return real(*args)

        monkeypatch.setattr(os, name, note)
    sink = make(target)
    sink.write(batch(START, END))
    sink.close()
    folder = target.path.parent.name
    renamed = [number for number, call in enumerate(calls) if call == "rename events.jsonl"]
    assert len(renamed) == len(target.rotated())
    for number in renamed:
        assert "fsync events.jsonl" in calls[:number]
        following = calls[number + 1 :]
        assert following.index(f"fsync {folder}") < following.index("fsync acks")


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    from pgcdc import adapters

    made = adapters.file(tmp_path / "x.jsonl", max_size="2KB", max_files=3, compress="zstd")
    assert (made.options.max_size, made.options.max_files) == (2048, 3)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="compress applies to rotated files"):
        adapters.file("x", compress="gzip")
    with pytest.raises(ConfigError, match="is a folder"):
        check_adapters([adapters.file(f"{tmp_path}/", max_size=1)])


def test_large_files_rotate_in_whole_lines(tmp_path: Path) -> None:
    target = RotatingZstd(tmp_path)
    lines = [f'{{"position":"{110:016X}/{number:013X}"}}\n' for number in range(1, 20_001)]
    table = pa.table({"position": [line[13:43] for line in lines], "line": lines})
    sink = make(target, max_bytes=100_000)
    sink.write(Batch(START, Position.end(110), table))
    sink.close()
    assert len(target.rotated()) == 20_000 // (100_000 // len(lines[0]))
    assert target.lines() == lines
    shown = subprocess.run(["ls", str(target.path.parent)], capture_output=True, text=True, check=True).stdout.split()
    assert shown[-1] == f"{target.rotated()[-1].name}.zst"
