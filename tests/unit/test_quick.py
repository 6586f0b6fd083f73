"""Shorter ways through Spark: which ones are in use, and what a reader gives to Spark when it plans a batch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyspark
import pytest

from pgcdc.core.compiled import describe_ways, find_version, has_short_ways
from pgcdc.core.state import write_json
from pgcdc.run import warm
from pgcdc.spark import archive, session
from pgcdc.spark.archive import ClassArchive
from pgcdc.spark.quick import StreamReader, is_prefetching

ROWS = pa.record_batch({"n": [1, 2, 3]})


def test_the_shorter_ways_are_in_use_with_the_spark_that_we_test() -> None:
    assert has_short_ways(pyspark.__version__) and is_prefetching()


def test_a_pyspark_that_is_only_on_the_path_has_a_version_and_one_without_its_reader_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_metadata(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", no_metadata)
    assert find_version("pyspark") == pyspark.__version__ and find_version("no_such_package") == "unknown"
    assert describe_ways()["small batches"].startswith("short")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert describe_ways()["small batches"].startswith("ordinary")


def test_rows_go_with_the_plan_of_their_own_batch_and_once() -> None:
    reader = StreamReader.__new__(StreamReader)
    assert reader.prefetch({"p": "1"}, {"p": "2"}, iter([ROWS])) == 3
    assert list(reader.getCache({"p": "1"}, {"p": "2"}) or ()) == [ROWS]
    assert reader.getCache({"p": "1"}, {"p": "2"}) is None
    reader.prefetch({"p": "2"}, {"p": "3"}, iter([ROWS]))
    assert reader.getCache({"p": "2"}, {"p": "4"}) is None


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(archive.SWITCH, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "a.jar").write_text("a")
    return tmp_path / "jars"


def made(jars: Path, java: str = "17") -> ClassArchive:
    found = ClassArchive.of(java, jars)
    assert found is not None
    new = jars.parent / "new"
    new.write_text("classes")
    found.take(new)
    return found


def test_an_archive_is_used_as_it_was_made_and_only_there(jars: Path) -> None:
    said: list[str] = []
    one = made(jars)
    assert f'"-XX:SharedArchiveFile={one.file}"' in one.options(said.append)
    other = ClassArchive.of("21", jars)
    assert other is not None and other.file != one.file and other.options(said.append) == ""
    (jars / "b.jar").write_text("b")
    assert ClassArchive.of("17", jars) != one
    assert said == []


@pytest.mark.parametrize(
    "damage", ["truncated", "other bytes", "no note", "a wrong note", "half a note", "others may write"]
)
def test_an_archive_that_is_not_as_it_was_made_is_said_and_made_again(jars: Path, damage: str) -> None:
    said: list[str] = []
    one = made(jars)
    note = one.file.with_suffix(".json")
    if damage == "truncated":
        os.truncate(one.file, 3)
    elif damage == "other bytes":
        os.utime(one.file, ns=(1, 1))
    elif damage == "no note":
        note.unlink()
    elif damage == "others may write":
        one.file.chmod(0o666)
    else:
        note.write_text(json.dumps([0, 0]) if damage == "a wrong note" else "[1, ")
    assert one.options(said.append) == ""
    assert len(said) == 1 and "created again" in said[0]
    assert one.is_wanted
    assert one.options(said.append) == "" and len(said) == 1
    again = made(jars)
    assert again.options(said.append) and not again.is_wanted and len(said) == 1


@pytest.mark.parametrize("note", ["as it was", "half a note"])
def test_an_archive_whose_file_is_gone_is_made_again(jars: Path, note: str) -> None:
    one = made(jars)
    one.file.unlink()
    if note == "half a note":
        one.file.with_suffix(".json").write_text("[1, ")
    assert one.is_wanted and made(jars).options(print)


def test_a_crash_while_it_is_put_in_its_place_leaves_nothing_that_is_believed(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(archive, "write_json", crash)
        made(jars)
    one = ClassArchive.of("17", jars)
    assert one is not None and one.file.exists() and one.is_wanted


def test_a_failed_attempt_is_said_once_and_repeated_after_a_day(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ClassArchive.of("17", jars)
    assert one is not None
    one.fail("the disk is full")
    assert not one.is_wanted and (one.failure(), one.failure()) == ("the disk is full", None) and not one.is_wanted
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + archive.RETRY_S)
    assert one.is_wanted


@pytest.mark.parametrize("age_s", [60, 2 * archive.RETRY_S])
def test_an_archive_that_java_refuses_is_said_and_made_again_once_a_day(
    jars: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    one, said, proc = made(jars), list[str](), jars.parent / "proc"
    (proc / "7").mkdir(parents=True)
    monkeypatch.setattr(archive, "PROC", proc)
    os.utime(one.file, (time.time() - age_s,) * 2)
    (proc / "7" / "maps").write_text("7f45 /lib/other.jsa")
    (proc / "7" / "cmdline").write_text("java\0-Xmx2g")
    one.check_used(7, said.append)  # somebody's own options for Java
    (proc / "7" / "cmdline").write_text(f"java\0-XX:SharedArchiveFile={one.file}")
    (proc / "7" / "maps").write_text(f"7f45 {one.file}")
    one.check_used(7, said.append)
    assert one.file.exists() and said == []
    (proc / "7" / "maps").write_text("7f45 /lib/other.jsa")
    one.check_used(7, said.append)
    assert len(said) == 1 and not one.file.exists() and one.failure() is None
    assert one.is_wanted == (age_s > archive.RETRY_S)


def test_a_copy_with_times_in_whole_seconds_is_the_same(jars: Path) -> None:
    one = made(jars)
    for file in (one.file, jars / "a.jar"):
        os.utime(file, ns=(int(file.stat().st_mtime) * 10**9,) * 2)
    again = ClassArchive.of("17", jars)
    assert again == one and again.options(pytest.fail)


def test_a_folder_where_others_may_write_is_not_used(
    jars: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(jars.parent))
    one = made(jars)
    one.file.parent.chmod(0o777)
    for _ in range(2):
        other = ClassArchive.of("17", jars)
        assert other is not None and other.file.parent == jars.parent / f"pgcdc-spark-{os.getuid()}"
        assert other.file.parent.stat().st_mode & 0o777 == 0o700
    assert capfd.readouterr().err.count("other users may write") == 1
    one.file.parent.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: one.file.stat().st_uid + 1)
    assert archive.is_safe(one.file) == (one.file.stat().st_uid == 0)


@pytest.mark.parametrize("switch", [None, "", "off", "file/cache", "read-only"])
def test_without_a_home_that_can_be_written_the_temporary_folder_serves(
    jars: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], switch: str | None
) -> None:
    (jars.parent / "file").write_text("not a folder")
    (jars.parent / "read-only").mkdir(mode=0o755)
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("read-only"))  # root may write anywhere
    monkeypatch.setattr(tempfile, "tempdir", str(jars.parent))
    monkeypatch.setenv("HOME", str(jars.parent / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(archive.SWITCH)
    if switch is not None:
        monkeypatch.setenv(archive.SWITCH, str(jars.parent / switch) if switch not in ("", "off") else switch)
    private = jars.parent / f"pgcdc-spark-{os.getuid()}"
    for _ in range(2):
        assert session._unzipped_home().parent == private
    found = ClassArchive.of("17", jars)
    assert found is None if switch == "off" else found is not None and found.file.parent == private
    assert capfd.readouterr().err.count("\n") == (
        switch in ("file/cache", "read-only")
    )  # only what somebody asked for is said


@pytest.mark.parametrize("failure", ["it does not end", "it ends with an error", "it makes none"])
def test_an_attempt_that_fails_ends_its_jvm_and_leaves_the_reason(
    jars: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    one = ClassArchive.of("17", jars)
    assert one is not None
    script = {"it does not end": "exec sleep 60", "it ends with an error": "exit 3", "it makes none": "exit 0"}[failure]
    jvm = subprocess.Popen(["sh", "-c", f"read x; {script}"], stdin=subprocess.PIPE)
    gateway = SimpleNamespace(proc=jvm, shutdown=lambda: None)

    def begin(log_file: Path, **_: str) -> SimpleNamespace:
        log_file.write_text("...\nUnable to write to shared archive file.\n")
        if script != "exit 0":
            one.file.with_suffix(".new").write_text("half of it")
        return SimpleNamespace(stop=lambda: None)

    monkeypatch.setattr(warm, "session", begin)
    monkeypatch.setattr(warm, "find_archive", lambda: one)
    monkeypatch.setattr(warm, "warm_up", lambda *_: None)
    monkeypatch.setattr(warm, "EXIT_S", 1.0)
    monkeypatch.setattr(pyspark.SparkContext, "_gateway", gateway)
    assert warm.main() == 0
    assert jvm.poll() == (-signal.SIGKILL if failure == "it does not end" else int(script[-1])) and not one.is_wanted
    assert sorted(file.name for file in one.file.parent.iterdir()) == [f"{one.file.stem}.json", "classes.lock"]
    reason = {"exit 0": None, "exit 3": "Java ended with code 3: Unable to write to shared archive file."}
    assert one.failure() == reason.get(script, "Java did not end: Unable to write to shared archive file.")


@pytest.mark.parametrize("has_note", [True, False])
def test_a_run_says_once_why_there_is_no_archive(jars: Path, monkeypatch: pytest.MonkeyPatch, has_note: bool) -> None:
    one, said = ClassArchive.of("17", jars), list[str]()
    assert one is not None
    process = jars.parent / "process"
    process.write_text("#!/bin/sh\nsleep 1; exit 1\n")
    process.chmod(0o755)
    monkeypatch.setattr(warm, "find_archive", lambda: one)
    monkeypatch.setattr(sys, "executable", str(process))
    warm.make_archive_beside(said.append)
    if has_note:
        one.fail("the memory is too small")
    deadline = time.monotonic() + 20
    while len(said) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "creating" in said[0] and ("the memory is too small" if has_note else "ended with code 1") in said[1]
    if has_note:
        warm.make_archive_beside(said.append)
    assert len(said) == 2


def test_java_is_asked_once_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\necho 'openjdk version \"17.0.1\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert len({session.check_java() for _ in range(3)}) == 1
    assert (tmp_path / "asked").read_text() == "x\n"


@pytest.mark.parametrize("end", ["killed", "taken away"])
def test_an_attempt_that_does_not_come_to_its_end_is_not_repeated_at_each_start(
    jars: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    one = ClassArchive.of("17", jars)
    assert one is not None

    class Killed(BaseException):
        pass

    def make(**_: object) -> SimpleNamespace:
        assert one.failure() is None, "it is still being made"
        if end == "killed":
            raise Killed
        one.file.with_suffix(".new").write_text("classes")
        jvm = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        monkeypatch.setattr(pyspark.SparkContext, "_gateway", SimpleNamespace(proc=jvm, shutdown=lambda: None))
        return SimpleNamespace(stop=lambda: None)

    monkeypatch.setattr(warm, "session", make)
    monkeypatch.setattr(warm, "find_archive", lambda: one)
    monkeypatch.setattr(warm, "warm_up", lambda *_: None)

    def write(path: Path, note: object) -> None:
        one.options(print)  # as another start does
        write_json(path, note)

    monkeypatch.setattr(archive, "write_json", write)
    monkeypatch.setattr(sys, "argv", ["warm", "beside"])
    monkeypatch.setattr(os, "nice", lambda _: None)
    with pytest.raises(Killed) if end == "killed" else contextlib.nullcontext():
        warm.main()
    assert not one.is_wanted
    reason = {"killed": "the process that made it was killed", "taken away": "another start removed it"}
    assert one.failure() == reason[end]


def test_what_cannot_be_read_of_jars_or_notes_is_no_error(jars: Path) -> None:
    one = ClassArchive.of("17", jars)
    assert one is not None
    write_json(one.file.with_suffix(".json"), {"failed": "by another version"})
    assert one.is_wanted and one.failure() is None
    (jars / "gone.jar").symlink_to(jars / "nowhere")
    assert ClassArchive.of("17", jars) is None


def test_old_archives_go(jars: Path) -> None:
    several = [made(jars, java) for java in ("17", "18", "19", "20")]
    assert sorted(jars.parent.glob("cache/*.jsa")) == sorted(one.file for one in several[2:])


def test_it_can_be_switched_off(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(archive.SWITCH, "off")
    assert ClassArchive.of("17", jars) is None


def test_a_java_that_makes_none_is_not_asked_again(jars: Path) -> None:
    said: list[str] = []
    one = ClassArchive.of("17", jars)
    assert one is not None and one.is_wanted
    one.give_up()
    again = ClassArchive(one.file)
    assert not again.is_wanted and again.options(said.append) == "" and said == []


def test_no_home_is_no_error(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (archive.SWITCH, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(jars.parent))
    found = ClassArchive.of("17", jars)
    assert found is not None and found.file.parent.parent == jars.parent


def test_tests_without_spark_need_no_java(tmp_path: Path) -> None:
    known = {
        name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME", archive.SWITCH)
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_units.py"]
    ran = subprocess.run(
        command,
        env=known | {"PATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
