"""A real pipeline with a target that refuses an event: it stops nobody, is in the dead letters once, and can come again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import letters
import psycopg
import pytest
from commands import pgcdc
from databases import Database
from listening import wait_until

from pgcdc.capture.control import ask
from pgcdc.core.state import Lock, StateDir, read_json
from pgcdc.sink.letters.record import Query
from pgcdc.sink.letters.stores import FileDeadLetters


class Child:
    """`letters.PickyPipeline` in a process of its own."""

    def __init__(self, url: str, folder: Path, **more: Any) -> None:
        self.url, self.folder, self.more = url, folder, more
        self.state = StateDir(folder / "state")
        self.log = folder / "child.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, failpoints: str = "", *, wait: bool = True) -> None:
        before = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, letters.__file__, self.url, str(self.folder), json.dumps(self.more)],
                stdout=log, stderr=log, env={**os.environ, "PGCDC_FAILPOINTS": failpoints},
            )  # fmt: skip
        if wait:
            wait_until(lambda: b"ready:" in self.log.read_bytes()[before:], 90, "the child is ready")

    def wait_exit(self, timeout_s: float = 90) -> int:
        assert self.process is not None
        code = self.process.wait(timeout_s)
        wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 20, "the capture ends")
        return code

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.wait_exit()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def keys(self) -> list[int]:
        raw = read_json(self.state.acks / "file.json")
        data = (self.folder / "file.jsonl").read_bytes()[: raw["detail"]["size"]] if raw else b""
        return [int(json.loads(line)["payload"]["row"]["id"]) for line in data.splitlines()]

    def dlq(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return pgcdc("dlq", *arguments, "--state-dir", str(self.state.path), folder=self.folder)


@pytest.fixture
def child(database: Database, tmp_path: Path) -> Iterator[Child]:
    one = Child(database.url, tmp_path)
    yield one
    one.kill()


def insert(url: str, *rows: tuple[int, str]) -> None:
    with psycopg.connect(url) as conn, conn.cursor() as cursor:
        cursor.executemany("INSERT INTO items VALUES (%s, %s)", rows)


@pytest.mark.timeout(300)
def test_refused_event_is_in_the_dead_letters_once_after_kill_9_and_comes_again(
    child: Child, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY, v text)")
    child.start("dlq.recorded=kill", wait=False)
    wait_until(lambda: ask(child.state.run_lock, {"do": "status"}).get("phase") == "streaming", 90, "it streams")
    insert(database.url, (1, "good"), (2, "bad"), (3, "good"))
    assert child.wait_exit() == -signal.SIGKILL  # the letter is durable, the ack is not
    assert child.keys() == []
    store = FileDeadLetters(child.state.letters_file)
    assert len(list(store.find(Query()))) == 1

    child.start()
    wait_until(lambda: child.keys() == [1, 3], 60, "the others are delivered")
    assert len(child.state.letters_file.read_text().splitlines()) == 1
    (letter,) = store.find(Query())
    assert (letter.adapter, letter.error_kind, letter.operation, letter.is_waiting) == (
        "file",
        "bad_row",
        "INSERT",
        True,
    )
    assert json.loads(letter.event)["payload"]["row"] == {"id": "2", "v": "bad"}

    insert(database.url, (4, "bad"), (5, "good"))
    wait_until(lambda: child.keys() == [1, 3, 5], 60, "the stream goes on")
    wait_until(
        lambda: ask(child.state.run_lock, {"do": "status"})["lanes"][0]["dead_letters"] == 1, 10, "status counts"
    )
    assert b"refused 1 event" in child.log.read_bytes()
    shown = child.dlq("list", "--json")
    assert [one["operation"] for one in json.loads(shown.stdout)] == ["INSERT", "INSERT"], shown.stderr
    refused = child.dlq("replay")  # through the run: it refuses them once more
    assert (refused.returncode, refused.stdout) == (1, "0 delivered, 0 superseded, 2 refused again\n"), refused.stderr
    assert refused.stderr == "pgcdc: 2 refused again by adapter file: bad_row: it says bad\n"
    (tmp_path / "mended").touch()
    done = child.dlq("replay", "--id", letter.id)
    assert (done.returncode, done.stdout) == (0, "1 delivered, 0 superseded, 0 refused again\n"), done.stderr
    assert child.keys() == [1, 3, 5, 2]
    assert child.stop() == 0

    (tmp_path / "mended").unlink()
    again = child.dlq("replay", "--adapter", "file", "--file-path", str(tmp_path / "file.jsonl"))  # without a run
    assert (again.returncode, again.stdout) == (0, "1 delivered, 0 superseded, 0 refused again\n"), again.stderr
    assert child.keys() == [1, 3, 5, 2, 4]
    assert [one.outcome for one in store.find(Query())] == ["delivered", "delivered"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_store_that_is_down_stops_the_pipeline_and_nothing_is_lost(database: Database, tmp_path: Path) -> None:
    """The table of dead letters is dropped while it runs; the source database has it, and does not capture it."""
    child = Child(database.url, tmp_path, dlq="pg_table")
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY, v text)")
    try:
        child.start()
        insert(database.url, (1, "good"), (2, "bad"), (3, "good"))
        wait_until(lambda: child.keys() == [1, 3], 60, "the others are delivered")
        assert database.query("SELECT payload->'payload'->'row'->>'id' FROM pgcdc_dead_letters") == [("2",)]
        database.execute("ALTER TABLE pgcdc_dead_letters RENAME TO away")
        insert(database.url, (4, "bad"), (5, "good"))
        assert child.wait_exit() == 1
        assert b"could not be written" in child.log.read_bytes()
        assert child.keys() == [1, 3]
        confirmed = "SELECT confirmed_flush_lsn <= %s::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 'picky'"
        ack = int(read_json(child.state.acks / "file.json")["position"].partition("/")[0], 16)
        assert database.query(confirmed, [f"{ack >> 32:X}/{ack & 0xFFFFFFFF:X}"]) == [(True,)]
        database.execute("ALTER TABLE away RENAME TO pgcdc_dead_letters")
        child.start()
        wait_until(lambda: child.keys() == [1, 3, 5], 60, "the others are delivered")
        rows = database.query("SELECT payload->'payload'->'row'->>'id' FROM pgcdc_dead_letters ORDER BY position")
        assert rows == [("2",), ("4",)]
        assert child.stop() == 0
    finally:
        child.kill()
