"""The state directory: who holds it, who it belongs to, and that "durable" means fsynced (kill -9 cannot show that)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pgcdc.core.errors import GapError, StateError
from pgcdc.core.state import (
    FORMAT,
    Identity,
    Lock,
    StateDir,
    read_json,
    write_all,
    write_json,
    write_json_durably,
)
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import check_identity
from pgcdc.source.postgres.source import PostgresSource
from pgcdc.source.rate.options import RateOptions
from pgcdc.source.rate.source import RateSource

DETAILS = {"timeline": 1, "publications": [{"name": "orders", "tables": ["x"]}], "asked": {}}
IDENTITY = Identity("postgres", "7300000000000000001", "shop", "orders", "a1b2", 42, DETAILS)

_HOLDER = """
import sys
from pathlib import Path
from pgcdc.core.state import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
lock.write({"pid": 1, "address": "/tmp/x"})
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `tmp_path/run.lock` until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "run.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["{}\n", "held\n"]
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait(10)


# --- locks


def test_lock_is_exclusive_between_processes(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert Lock(tmp_path / "run.lock").acquire() is None
    assert Lock.holder(tmp_path / "run.lock") == {"pid": 1, "address": "/tmp/x"}


def test_failed_attempt_leaves_the_holder_alone(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    Lock(tmp_path / "run.lock").acquire()
    Lock(tmp_path / "run.lock").release()
    assert Lock(tmp_path / "run.lock").acquire() is None
    assert Lock.holder(tmp_path / "run.lock") == {"pid": 1, "address": "/tmp/x"}


def test_lock_is_freed_by_kill_9_and_tells_who_held_it(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait(10)
    lock = Lock(tmp_path / "run.lock")
    assert Lock.holder(tmp_path / "run.lock") is None
    assert lock.acquire() == {"pid": 1, "address": "/tmp/x"}
    lock.release()


def test_lock_that_was_given_back_tells_nothing(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait(10)
    lock = Lock(tmp_path / "run.lock")
    assert lock.acquire() == {}
    lock.release()


def test_lock_is_exclusive_within_a_process_and_can_be_taken_again(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert first.acquire() == {}
    assert second.acquire() is None
    assert Lock.holder(tmp_path / "lock") == {}
    first.release()
    first.release()
    assert second.acquire() == {}
    second.release()


def test_what_the_holder_writes_replaces_what_it_wrote_before(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    lock.acquire()
    lock.write({"pid": 1, "address": "a long address"})
    lock.write({"pid": 2})
    assert Lock.holder(tmp_path / "lock") == {"pid": 2}
    lock.release()


@pytest.mark.parametrize("content", ['{"pid": 1', "\0\0\0", ""])
def test_half_written_lock_file_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    lock = Lock(tmp_path / "lock")
    assert lock.acquire() == {}
    assert Lock.holder(tmp_path / "lock") == {}
    lock.release()


def test_nobody_holds_a_lock_that_never_was(tmp_path: Path) -> None:
    assert Lock.holder(tmp_path / "lock") is None


# --- files


class Trace:
    """Records fsync and replace in order; an fsync with the size that the file had at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, int]] = []
        fsync, rename = os.fsync, os.replace

        def traced_fsync(descriptor: int) -> None:
            status = os.fstat(descriptor)
            fsync(descriptor)
            self.calls.append(("fsync", status.st_ino, status.st_size))

        def traced_replace(source: Path, target: Path) -> None:
            rename(source, target)
            self.calls.append(("replace", target.stat().st_ino, target.stat().st_size))

        monkeypatch.setattr(os, "fsync", traced_fsync)
        monkeypatch.setattr(os, "replace", traced_replace)


@pytest.mark.parametrize("size", [1, 100_000])
def test_durable_write_syncs_the_whole_file_then_renames_then_syncs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "ack.json"
    write_json_durably(path, {"old": True})
    trace = Trace(monkeypatch)
    write_json_durably(path, {"position": "x" * size})
    file, folder = path.stat(), tmp_path.stat()
    assert trace.calls == [
        ("fsync", file.st_ino, file.st_size),
        ("replace", file.st_ino, file.st_size),
        ("fsync", folder.st_ino, folder.st_size),
    ]
    assert read_json(path) == {"position": "x" * size}


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("write", [write_json, write_json_durably])
def test_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, failing: str
) -> None:
    path = tmp_path / "ack.json"
    write(path, {"n": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        if not (failing == "fsync" and write is write_json):
            with pytest.raises(StateError, match="No space"):
                write(path, {"n": 2})
            assert read_json(path) == {"n": 1}
    write(path, {"n": 3})
    assert read_json(path) == {"n": 3}


def test_written_file_is_alone_in_its_folder(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", 1)
    write_json_durably(tmp_path / "b.json", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_missing_json_is_none_and_damaged_json_is_a_state_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "consumers.json"
    assert read_json(path) is None
    for damaged in (b"", b'{"a": ', b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(StateError, match=r"consumers\.json is damaged"):
            read_json(path)


def test_write_all_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with open(tmp_path / "out", "wb", buffering=0) as file:
        assert write_all(file.fileno(), memoryview(b"0123456789")) == 10
        assert write_all(file.fileno(), memoryview(b"")) == 0
    assert (tmp_path / "out").read_bytes() == b"0123456789"


# --- the directory


def test_new_directory_is_for_its_owner_only_and_has_no_identity(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "a" / "state")
    state.create()
    assert state.path.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in state.path.iterdir()) == ["acks", "checkpoints", "spool"]
    assert state.identity() is None
    state.create()


def test_directory_that_cannot_be_made_is_a_state_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="is not writable: Not a directory") as caught:
        StateDir(tmp_path / "file" / "state").create()
    assert "--state-dir" in caught.value.advice


def test_identity_round_trips(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.save_identity(IDENTITY)
    assert StateDir(tmp_path).identity() == IDENTITY


@pytest.mark.parametrize("other", [None, 1, FORMAT + 1])
def test_a_directory_in_another_format_is_refused_with_the_way_out(tmp_path: Path, other: int | None) -> None:
    state = StateDir(tmp_path)
    state.save_identity(IDENTITY)
    raw = json.loads(state.identity_file.read_text())
    state.identity_file.write_text(json.dumps({**raw, "format": other} if other else {**asdict(IDENTITY)}))
    with pytest.raises(StateError, match=f"has format {other or 1}, .* reads format {FORMAT}") as caught:
        state.identity()
    assert "--state-dir" in caught.value.advice


def connected(**changed: Any) -> dict[str, Any]:
    return {"system": "7300000000000000001", "timeline": 1, "database": "shop", "slot": "orders"} | changed


def test_same_server_timeline_database_and_slot_may_go_on() -> None:
    check_identity(IDENTITY, **connected())
    check_identity(replace(IDENTITY, instance="other", details={**DETAILS, "publications": []}), **connected())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"system": "7300000000000000002"}, "7300000000000000002"),
        ({"timeline": 2}, "timeline 2"),
        ({"database": "bank"}, "bank"),
        ({"slot": "invoices"}, "invoices"),
    ],
)
def test_anything_else_is_a_gap_and_says_what_differs(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(GapError, match=named) as caught:
        check_identity(IDENTITY, **connected(**changed))
    assert caught.value.advice


# --- a directory that is new


def test_a_directory_of_another_source_is_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    RateSource(RateOptions()).prepare(state, consumer="main")
    known = state.identity()
    assert known is not None
    source = PostgresSource(PostgresOptions(db="postgresql://nobody.invalid/shop", tables=("orders",)))
    named = "belongs to a source of kind rate, not postgres.*another --state-dir"
    with pytest.raises(GapError, match=named):
        source.prepare(state, consumer="main")
    with pytest.raises(GapError, match=named):
        source.join(known, {}, is_typed=False)
    assert state.identity() == known


def test_a_new_directory_is_removed_again_if_it_was_not_begun(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "deep" / "state")
    with pytest.raises(RuntimeError), state.claim(Lock(state.run_lock), 0.1) as taken:
        assert taken and state.spool.is_dir()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_stays_if_it_was_there_is_held_by_another_or_has_begun(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    first, second = Lock(state.run_lock), Lock(state.run_lock)
    with pytest.raises(RuntimeError), state.claim(first, 0.1):
        with pytest.raises(RuntimeError), state.claim(second, 0) as taken:
            assert not taken
            raise RuntimeError
        assert state.spool.is_dir()
        state.save_identity(IDENTITY)  # another process, which came first to another lock
        raise RuntimeError
    assert state.identity() == IDENTITY
    state.identity_file.unlink()
    first.release()
    with pytest.raises(RuntimeError), state.claim(second, 0.1):
        raise RuntimeError
    assert state.path.is_dir(), "it was there before"
    second.release()


def test_a_new_directory_stays_if_another_process_was_faster_to_lock_it(tmp_path: Path) -> None:
    class Taken(Lock):
        def acquire(self, timeout_s: float = 0.2) -> None:
            return None

    state = StateDir(tmp_path / "state")
    with pytest.raises(RuntimeError), state.claim(Taken(state.run_lock), 0) as taken:
        assert not taken
        raise RuntimeError
    assert state.path.is_dir()
