"""`pgcdc listen` with a command and with files that rotate, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from databases import Database
from listening import Listener, wait_until
from targets.file import RotatingZstd

HIDDEN = "hush-hush-hush"


@pytest.fixture
def listener(database: Database, tmp_path: Path) -> Iterator[Listener]:
    one = Listener(database.url, tmp_path, slot=f"s_{database.name}")
    yield one
    one.kill_all()


def test_command_that_does_not_exist_is_told_before_anything_is_made(listener: Listener, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    listener.start("--adapter", "exec", "--exec-command", "no-such-command --now", wait=False)
    assert listener.wait_exit(90) == 2
    assert "error: adapter exec: the command no-such-command does not exist" in listener.said()
    assert database.query("SELECT count(*) FROM pg_replication_slots") == [(0,)]
    assert not listener.output.exists()


@pytest.mark.slow
def test_command_and_rotated_files_have_everything_and_nothing_is_left_running(
    listener: Listener, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    out, env = tmp_path / "out", tmp_path / "env"
    program = f"trap '' TERM; env > {env}; echo started >&2; tee -a {out}; exec sleep 600"
    listener.start(
        "--adapter", "exec", "--exec-command", program, "--exec-ack", "line", "--file-max-size", "2KB",
        "--file-compress", "zstd", env={"MY_DB": database.url, "PGCDC_EXEC_TIMEOUT": "20", "PGPASSWORD": HIDDEN},
    )  # fmt: skip
    for number in range(10):
        database.execute(
            "INSERT INTO t SELECT n, 'x' FROM generate_series(%s::int, %s::int) n", [number * 10, number * 10 + 9]
        )
        listener.wait_delivered()
    found = [json.loads(line)["payload"]["row"]["id"] for line in out.read_text().splitlines()]
    assert found == [str(number) for number in range(100)]
    assert "pgcdc: adapter exec: started" in listener.said()
    assert HIDDEN not in env.read_text() and "PGCDC_" not in env.read_text()

    assert listener.process is not None
    commands = [
        one
        for one in psutil.Process(listener.process.pid).children(recursive=True)
        if one.name() in ("sh", "tee", "sleep") and str(out) in " ".join(one.cmdline())
    ]
    assert commands
    listener.process.send_signal(signal.SIGTERM)
    listener.process.send_signal(signal.SIGTERM)  # at once
    listener.wait_exit(60)
    wait_until(
        lambda: all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in commands), 10, "all ended"
    )

    rotated = RotatingZstd.__new__(RotatingZstd)
    rotated.path = listener.output
    assert len(rotated.rotated()) > 5
    assert [json.loads(line)["payload"]["row"]["id"] for line in rotated.lines()] == found
    assert os.path.getsize(listener.output) <= 2048
