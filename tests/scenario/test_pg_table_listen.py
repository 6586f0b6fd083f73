"""`pgcdc listen --adapter pg_table --pg-table-mode apply` as users run it: kill -9, and databases that mirror each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import contents
import psycopg
import pytest
from databases import Database
from listening import wait_until
from mirror_listening import ListeningMirror

from pgcdc.playground import shop

EVENTS = (
    "id uuid PRIMARY KEY, channel text, operation text, payload jsonb, source text, created_at timestamptz, "
    "position text, transaction jsonb"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def other(database: Database) -> Iterator[Database]:
    """A second database on the same server."""
    name = f"{database.name}_other"
    database.execute(f"CREATE DATABASE {name}")
    yield Database(name, database.server.url(name), database.server)
    with psycopg.connect(database.server.url(), autocommit=True) as admin:
        for (slot,) in admin.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = %s", (name,)
        ).fetchall():
            wait_until(partial(_drop_slot, admin, slot), 20, f"slot {slot} is free")
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        for (origin,) in admin.execute("SELECT roname FROM pg_replication_origin").fetchall():
            wait_until(partial(_drop_origin, admin, origin), 20, f"origin {origin} is free")


def _drop_slot(admin: psycopg.Connection[tuple[object, ...]], slot: str) -> bool:
    try:
        admin.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    except psycopg.errors.ObjectInUse:
        return False
    return True


def _drop_origin(admin: psycopg.Connection[tuple[object, ...]], origin: str) -> bool:
    try:
        admin.execute("SELECT pg_replication_origin_drop(%s)", (origin,))
    except psycopg.errors.ObjectInUse:
        return False
    return True


def test_kill_9_at_every_step_leaves_both_databases_equal(database: Database, other: Database, tmp_path: Path) -> None:
    with database.connect() as conn:
        shop.create_tables(conn)
    one = ListeningMirror(database.url, other.url, tmp_path / "run", "--all-tables", slot="m1")
    try:
        one.start(wait=False, env={"PGCDC_FAILPOINTS": "pg_table.committed=kill@2"})
        wait_until(lambda: bool(one.ack()), 90, "the sink is open")
        with database.connect() as conn:
            shop.add_first_rows(conn)
        traffic = shop.Traffic(database.url, seed=7, rate_per_s=150.0)
        traffic.start()
        for point in ("", "pg_table.before_ack=kill@3", "sink.after_ack=kill@4", "lane.written=kill@2"):
            if point:
                one.start(wait=False, env={"PGCDC_FAILPOINTS": point})
            assert one.wait_exit(120) == -signal.SIGKILL, one.said()
            before = traffic.commits
            wait_until(partial(lambda n: traffic.commits > n, before), 10, "changes are in flight")
            wait_until(lambda: one.capture_pid() is None, 20, "the capture ends with the driver")
        one.start()
        traffic.stop()
        one.wait_delivered()
        assert one.stop() == 0, one.said()
        with database.connect() as source, other.connect() as target:
            wanted = contents.read_tables(source, shop.KEYS)
            found = contents.read_tables(target, shop.KEYS)
        assert contents.differences(wanted, found) == []
        assert sum(map(len, wanted.values())) > 100
    finally:
        one.kill_all()


def test_two_databases_mirror_each_other_without_loops_across_a_restart(
    database: Database, other: Database, tmp_path: Path
) -> None:
    for one in (database, other):
        one.execute("CREATE TABLE notes (id int PRIMARY KEY, author text, version int)")
    flags = ("--tables", "notes", "--origin", "none")
    there = ListeningMirror(database.url, other.url, tmp_path / "there", *flags, slot="there")
    back = ListeningMirror(other.url, database.url, tmp_path / "back", *flags, slot="back")

    def rows(one: Database) -> list[tuple[object, ...]]:
        return one.query("SELECT * FROM notes ORDER BY id")

    def writers(one: Database, author: str) -> list[tuple[object, ...]]:
        """Which transactions wrote the rows of an author: an echo would be another one."""
        return one.query("SELECT id, xmin::text FROM notes WHERE author = %s ORDER BY id", [author])

    def settle() -> None:
        wait_until(lambda: rows(database) == rows(other), 60, f"both are equal: {there.said()} {back.said()}")
        there.wait_delivered()  # and what they wrote to each other has been read, too
        back.wait_delivered()

    try:
        there.start()
        back.start()
        database.execute("INSERT INTO notes SELECT n, 'first', 1 FROM generate_series(1, 500) n")
        other.execute("INSERT INTO notes SELECT n, 'second', 1 FROM generate_series(1001, 1500) n")
        mine, yours = writers(database, "first"), writers(other, "second")
        settle()
        assert len(rows(database)) == 1000
        assert back.process is not None
        back.process.kill()
        back.wait_exit()
        assert there.stop() == 0, there.said()
        other.execute("UPDATE notes SET version = 2 WHERE id IN (1, 2, 1001)")
        database.execute("DELETE FROM notes WHERE id IN (3, 1003)")
        database.execute("UPDATE notes SET version = 2 WHERE id = 1004")
        back.start()
        there.start()
        settle()
        found = {row[0]: row[2] for row in rows(database)}
        assert [found.get(key) for key in (1, 2, 3, 1001, 1003, 1004, 1005)] == [2, 2, None, 2, None, 2, 1]
        touched = {1, 2, 3, 1001, 1003, 1004}
        for one, author, before in ((database, "first", mine), (other, "second", yours)):
            assert [row for row in writers(one, author) if row[0] not in touched] == [
                row for row in before if row[0] not in touched
            ]
        assert there.stop() == 0 and back.stop() == 0
    finally:
        there.kill_all()
        back.kill_all()


@pytest.mark.parametrize("mode", ["append", "apply"])
def test_refused_row_of_a_large_batch_is_a_dead_letter_and_comes_again(
    database: Database, other: Database, tmp_path: Path, mode: str
) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, text text)")
    other.execute("CREATE TABLE items (id int PRIMARY KEY, text text CONSTRAINT taste CHECK (text <> 'bad'))")
    other.execute(f"CREATE TABLE pgcdc_events ({EVENTS}, CONSTRAINT taste CHECK (payload #>> '{{row,text}}' <> 'bad'))")
    table = "items" if mode == "apply" else "pgcdc_events"
    flags = ["--tables", "items", "--slot-name", "m3", "--state-dir", str(tmp_path / "state"), "--adapter", "pg_table"]
    flags += ["--pg-table-mode", mode]
    environment = {**os.environ, "PGCDC_DB": database.url, "PGCDC_PG_TABLE_DB": other.url}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pgcdc", *arguments], env=environment, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("listen", *flags, "--once", "--snapshot-mode", "never")
    database.execute(
        "INSERT INTO items SELECT n, CASE n WHEN 31415 THEN 'bad' ELSE 'good' END FROM generate_series(1, 60000) n"
    )
    run("listen", *flags, "--once", "--snapshot-mode", "never")
    assert other.query(f"SELECT count(*) FROM {table}") == [(59_999,)]
    state = ("--state-dir", str(tmp_path / "state"), "--json")
    (listed,) = json.loads(run("dlq", "list", *state))
    assert (listed["adapter"], listed["error_kind"]) == ("pg_table", "check_violation")
    letter = json.loads(run("dlq", "show", listed["id"], *state))
    assert json.loads(letter["event"])["payload"]["row"]["id"] == "31415"
    other.execute(f"ALTER TABLE {table} DROP CONSTRAINT taste")
    run("dlq", "replay", *flags)
    assert other.query(f"SELECT count(*) FROM {table}") == [(60_000,)]
