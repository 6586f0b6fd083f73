"""`pgcdc playground` as a user runs it: it proves itself, notices a lost event, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import psutil
import pytest
from commands import pgcdc

START_TIMEOUT_S = 200.0  # a busy machine; an idle one needs a tenth of it
END_TIMEOUT_S = 60.0

LOSE_ONE_EVENT = """
import sys
from pgcdc.playground import run

compare = run.compare

def lose_the_last_insert(path, *more):
    lines = path.read_bytes().splitlines(keepends=True)
    at = max(n for n, line in enumerate(lines) if b'"operation":"INSERT"' in line)
    path.write_bytes(b"".join(lines[:at] + lines[at + 1:]))
    return compare(path, *more)

run.compare = lose_the_last_insert
sys.exit(run.run_playground(seconds=2, seed=7))
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The temp dir of a playground, which must be empty in the end; the server's account has to reach it."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o711)
    (tmp_path / "tmp").mkdir(mode=0o777)
    return tmp_path / "tmp"


@contextmanager
def start(scratch: Path, *command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "TMPDIR": str(scratch), **(env or {})}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def play(scratch: Path, *command: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    with start(scratch, *command, env=env) as process:
        stdout, stderr = process.communicate(timeout=START_TIMEOUT_S)
    return process.returncode, stdout, stderr


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}: {process.stderr.read()}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def check_nothing_left(scratch: Path, processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    """Our files are gone at once; a JVM whose parent has gone needs a moment to clean up."""
    assert [name for name in files_left(scratch) if name.startswith("pgcdc-")] == []
    _, alive = psutil.wait_procs(processes, timeout_s)
    assert alive == []
    deadline = time.monotonic() + timeout_s
    while files_left(scratch) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert files_left(scratch) == []


def files_left(scratch: Path) -> list[str]:
    """What is there but for caches, which are meant to stay."""
    names = sorted(path.name for path in scratch.iterdir() if not is_of_spark(path))
    return [name for name in names if not name.startswith(("pgcdc-spark-", "pgcdc-postgres-", "hsperfdata_"))]


def is_of_spark(path: Path) -> bool:
    """PySpark removes the folder in which the JVM writes its address, and fails to if the JVM is just doing so."""
    return path.name.startswith("tmp") and path.is_dir() and all(one.suffix == ".info" for one in path.iterdir())


def test_the_playground_proves_that_source_and_delivered_content_are_equal(scratch: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    arguments = ["playground", "--seconds", "4", "--rate", "40", "--seed", "7", "--keep", str(kept)]
    code, stdout, stderr = play(scratch, "-m", "pgcdc", *arguments)
    assert code == 0, stdout + stderr
    closing = re.search(
        r"^source and delivered content are equal: (\d+) rows in 7 tables, ([\d,]+) events, none lost, none twice$",
        stdout,
        re.MULTILINE,
    )
    assert closing is not None, stdout
    lines = (kept / "events.jsonl").read_bytes().splitlines()
    assert len(lines) == int(closing.group(2).replace(",", "")) > 80
    assert {orjson.loads(line)["operation"] for line in lines} == {"INSERT", "UPDATE", "DELETE"}
    assert re.search(r"^commit to file: p50 .*, p99 .* over [\d,]+ events$", stdout, re.MULTILINE)
    assert re.search(r"^\d+:\d\d  [\d,]+ events in \d+ commits?, ", stdout, re.MULTILINE)
    assert "\x1b" not in stdout
    check_nothing_left(scratch, [])

    code, _, stderr = play(scratch, "-m", "pgcdc", *arguments)
    assert code == 2 and "events.jsonl" in stderr  # never written over


@pytest.mark.slow
def test_a_lost_event_is_noticed(scratch: Path) -> None:
    code, stdout, stderr = play(scratch, "-c", LOSE_ONE_EVENT)
    assert code == 1, stdout + stderr
    assert "source and delivered content differ: " in stdout
    assert re.search(r"missing in the output|does not exist", stdout)
    check_nothing_left(scratch, [])


def test_ctrl_c_ends_the_traffic_and_compares(scratch: Path) -> None:
    with start(scratch, "-m", "pgcdc", "playground", "--rate", "50") as process:
        read_until(process, " commits/s")
        processes = descendants(process)
        assert len(processes) > 3
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to everybody in the foreground
        stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0, stdout + stderr
    assert "source and delivered content are equal: " in stdout
    check_nothing_left(scratch, processes)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(scratch: Path) -> None:
    with start(scratch, "-m", "pgcdc", "playground", "--rate", "50") as process:
        read_until(process, " commits/s")
        processes = descendants(process)
        os.killpg(process.pid, signal.SIGINT)
        read_until(process, "stopping Spark")
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stderr) == (130, "")
    assert "comparing" not in stdout
    check_nothing_left(scratch, processes)


def test_ctrl_c_while_spark_starts_ends_at_once(scratch: Path) -> None:
    with start(scratch, "-m", "pgcdc", "playground") as process:
        read_until(process, "starting Spark")
        processes = descendants(process)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stderr) == (130, "")
    assert "ready" not in stdout
    check_nothing_left(scratch, processes)


def test_without_java_it_says_so_in_one_line(scratch: Path) -> None:
    done = pgcdc("playground", env={"JAVA_HOME": str(scratch), "TMPDIR": str(scratch)}, folder=scratch)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Spark needs Java 17") and len(done.stderr.splitlines()) == 1
    check_nothing_left(scratch, [])


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--rate", "0"], ["--rate", "x"], ["--keep", "/proc/1/fd/x"]])
def test_flags_out_of_range_are_refused(scratch: Path, flags: list[str]) -> None:
    done = pgcdc("playground", *flags, env={"TMPDIR": str(scratch)}, folder=scratch)
    assert done.returncode == 2
    check_nothing_left(scratch, [])
