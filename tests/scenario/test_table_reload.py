"""Reloads of single tables beside the stream: whatever the copy was like before, it is equal afterwards."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from databases import Database
from listening import wait_until
from mirroring import Mirror, compare, mirror_of
from redising import redis_mirror_of
from snapshots import Backfill

from pgcdc import transform
from pgcdc.core.errors import SinkError
from pgcdc.run.resync import Resync
from pgcdc.run.table_reloads import find_tables, hold_tables
from pgcdc.sink.holds import new_hold
from pgcdc.transform.specs import Chain


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[Mirror]:
    with mirror_of(database, tmp_path) as made:
        yield made


def _oid(mirror: Mirror, table: str) -> int:
    return int(mirror.database.query("SELECT %s::regclass::oid::int8", [table])[0][0])


class Traffic:
    """Updates of single rows, as quick as one connection can."""

    def __init__(self, mirror: Mirror) -> None:
        self._url, self._ended, self._count = mirror.database.url, threading.Event(), 0

    def __enter__(self) -> Traffic:
        self._thread = threading.Thread(target=self._write)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def commits_since_start(self) -> int:
        return self._count

    def _write(self) -> None:
        chance = random.Random(1)
        with psycopg.connect(self._url, autocommit=True) as conn:
            while not self._ended.wait(0.002):
                conn.execute("UPDATE t SET v = %s WHERE id = %s", (str(self._count), chance.randint(1, 3000)))
                if not self._count % 10:
                    conn.execute("DELETE FROM t WHERE id = %s", (chance.randint(1, 3000),))
                self._count += 1


def _at_target(mirror: Mirror, *statements: str) -> None:
    with psycopg.connect(mirror.target, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement)


@pytest.mark.parametrize("key", ["PRIMARY KEY", ""])
def test_a_copy_that_somebody_spoilt_is_replaced(mirror: Mirror, key: str) -> None:
    mirror.run(f"CREATE TABLE t (id int {key}, v text)", "CREATE TABLE other (id int PRIMARY KEY)")
    mirror.run("INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 5000) g")
    mirror.run("ALTER TABLE t REPLICA IDENTITY FULL")
    mirror.start()
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t", "other"]) == []
    _at_target(mirror, "DELETE FROM t WHERE id % 7 = 0", "UPDATE t SET v = 'x' WHERE id % 5 = 0")
    assert compare(mirror.database.url, mirror.target, ["t"]) != []
    mirror.runner.holds.add({_oid(mirror, "t"): new_hold("t", "a test")})
    mirror.run("UPDATE t SET v = 'new' WHERE id <= 10", "DELETE FROM t WHERE id = 11", "INSERT INTO other VALUES (1)")
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t", "other"]) == []
    assert mirror.dead_letters() == []


POINTS = ["reload.read=kill", "reload.released=kill@1", "reload.released=kill@2", "releases.after_log=kill@2"]


@pytest.mark.parametrize("point", POINTS)
def test_a_reload_survives_kills_of_the_capture(mirror: Mirror, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, v text, long text)")
    mirror.run("INSERT INTO t SELECT g, 'v', repeat(md5(g::text), 200) FROM generate_series(1, 3000) g")
    mirror.start()
    mirror.settle()
    mirror.end()
    monkeypatch.setenv("PGCDC_FAILPOINTS", point)
    mirror.start()
    monkeypatch.delenv("PGCDC_FAILPOINTS")
    before = mirror.capture_pid()
    _at_target(mirror, "DELETE FROM t WHERE id < 100", "UPDATE t SET v = 'bad' WHERE id > 2000")
    mirror.runner.holds.add({_oid(mirror, "t"): new_hold("t", "a test")})
    with Traffic(mirror) as traffic:
        mirror.settle_until(lambda: mirror.capture_pid() not in (None, before))
        assert traffic.commits_since_start() > 0, "changes were in flight"
        mirror.restart()
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t"]) == []
    assert mirror.dead_letters() == []


def test_a_reload_begins_again_when_the_table_is_altered_meanwhile(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    mirror.run("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 2000) g")
    mirror.start()
    mirror.settle()
    mirror.end()
    tickets = tmp_path / "tickets"
    tickets.mkdir()
    monkeypatch.setenv("PGCDC_FAILPOINTS", "reader.read=wait")
    monkeypatch.setenv("PGCDC_FAILPOINT_TICKETS", str(tickets))
    mirror.start()
    mirror.runner.holds.add({_oid(mirror, "t"): new_hold("t", "a test")})
    mirror.settle_until(
        lambda: bool(list(mirror.state.snapshot.glob("reload-*.arrow")))
    )  # it is read, and not released
    mirror.run("ALTER TABLE t ADD COLUMN a int DEFAULT 1", "UPDATE t SET v = 'new', a = 2 WHERE id < 10")
    mirror.run("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD COLUMN s bigserial PRIMARY KEY")
    mirror.run("DELETE FROM t WHERE id > 1990")
    (tickets / "go").touch()
    mirror.settle_until(lambda: not list(tickets.glob("*")))
    tickets.rmdir()
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t"]) == []


def test_only_the_addressed_adapter_gets_a_reload_and_no_query_sees_it(mirror: Mirror, tmp_path: Path) -> None:
    mirror.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 50) g"
    )
    mirror.start()
    mirror.settle()
    query = Backfill(mirror.database, tmp_path, slot=f"s_{mirror.database.name}", consumer="another")
    query.state = mirror.state
    query.options["state_dir"] = str(mirror.state.path)
    query.load()
    mirror.runner.holds.add({_oid(mirror, "t"): new_hold("t", "a test")})
    mirror.run("UPDATE t SET v = 'new' WHERE id = 3")
    mirror.settle()
    query.pull()
    # The initial snapshot, which is for everybody, and the change.
    assert [event["operation"] for event in query.of("t")] == ["SNAPSHOT"] * 50 + ["UPDATE"]
    query.close()


def test_an_adapter_that_may_not_reload_stops_and_names_the_command_that_does(mirror: Mirror) -> None:
    mirror.delivery = {"on_drift": "stop"}
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'v')")
    mirror.start()
    mirror.settle()
    mirror.run("ALTER TABLE t ADD COLUMN x bigserial", "INSERT INTO t VALUES (2, 'v')")
    with pytest.raises(SinkError, match="table t cannot follow its source") as caught:
        mirror.settle()
    assert caught.value.advice.endswith("pgcdc resync --table t --adapter copy")
    captured = mirror.source.captured(mirror.identity())
    mirror.end()
    hold_tables(mirror.state, find_tables(mirror.state, captured, ["t"], ["copy"]), ["copy"])
    mirror.start()
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t"]) == []


def test_a_new_slot_brings_missed_deletes_to_a_mirror(mirror: Mirror) -> None:
    bring_missed_deletes(
        mirror, lambda: compare(mirror.database.url, mirror.target, ["t"]) == [], "ALTER TABLE t ADD COLUMN n int"
    )


def test_a_new_slot_brings_missed_deletes_to_keys(database: Database, tmp_path: Path) -> None:
    with redis_mirror_of(database, tmp_path) as mirror:
        bring_missed_deletes(mirror, mirror.is_equal)


def bring_missed_deletes(mirror: Mirror, is_equal: Callable[[], bool], *more: str) -> None:
    mirror.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 500) g"
    )
    mirror.start()
    mirror.settle(also=is_equal)
    mirror.end()
    mirror.run(f"SELECT pg_drop_replication_slot('s_{mirror.database.name}')")
    mirror.run("DELETE FROM t WHERE id > 400", "UPDATE t SET v = 'new' WHERE id < 10", *more)
    with Resync(mirror.database.url, mirror.state.path) as resync:
        plan = resync.plan()
        assert any("adapter copy empties its copies of the tables" in line for line in plan), plan
        resync.run()
    mirror.start()
    mirror.settle(also=is_equal)


USING, CONSTANT = "ALTER TABLE t ALTER COLUMN n TYPE int USING n * 10", "ALTER TABLE t ADD COLUMN x int DEFAULT 7"


@pytest.mark.parametrize("ddl", [USING, CONSTANT])
def test_ddl_behind_a_reload_in_the_same_batch_is_followed(mirror: Mirror, ddl: str) -> None:
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t SELECT g, g FROM generate_series(1, 50) g")
    mirror.start()
    mirror.settle()
    mirror.runner.holds.add({_oid(mirror, "t"): new_hold("t", "a test")})
    mirror._reloads.follow()
    wait_until(lambda: [one["status"] for one in mirror.snapshots()] == ["done"], 30, "it is read, and not delivered")
    schemas = mirror.state.shapes_file.read_text().count("\n")
    mirror.run(ddl, "INSERT INTO t (id, n) VALUES (99, 99)")

    def is_noticed() -> bool:
        mirror.reader._open().wait(0.05)  # as one that reads
        return mirror.state.shapes_file.read_text().count("\n") > schemas

    wait_until(is_noticed, 30, "the capture has seen it")
    mirror.settle(also=lambda: compare(mirror.database.url, mirror.target, ["t"]) == [])
    assert mirror.dead_letters() == []


def test_a_filter_of_operations_does_not_keep_a_reload_out(database: Database, tmp_path: Path) -> None:
    only = transform.filter(operations=["INSERT", "UPDATE", "DELETE"])
    with mirror_of(database, tmp_path, chain=replace(Chain((only,)).made(), form="tables")) as mirror:
        mirror.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
        mirror.start()
        mirror.run("INSERT INTO t SELECT g, 'v' FROM generate_series(1, 20) g")
        mirror.settle()
        mirror.run("ALTER TABLE t ADD COLUMN x double precision DEFAULT random()", "INSERT INTO t VALUES (99, 'v')")
        mirror.settle(also=lambda: compare(mirror.database.url, mirror.target, ["t"]) == [])


def test_a_table_that_is_dropped_while_it_is_held_is_let_go(mirror: Mirror) -> None:
    mirror.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"
    )
    mirror.start()
    mirror.settle()
    oid = _oid(mirror, "t")
    mirror.run("DROP TABLE t")
    mirror.runner.holds.add({oid: new_hold("t", "a test")})
    mirror.run("INSERT INTO other VALUES (1)")
    mirror.settle()
    assert mirror.runner.progress.holds == {} and compare(mirror.database.url, mirror.target, ["other"]) == []
