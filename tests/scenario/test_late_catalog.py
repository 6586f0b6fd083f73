"""A capture that is behind reads the catalog later than the rows were written. What was rewritten in between is noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from databases import Database
from mirroring import Mirror, compare, mirror_of


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[Mirror]:
    with mirror_of(database, tmp_path) as made:
        yield made


@contextmanager
def asleep(mirror: Mirror) -> Iterator[None]:
    pid = mirror.capture_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_reloaded(mirror: Mirror) -> bool:
    return any("It is read again" in one for one in mirror.said)


REWRITES = {
    "values computed anew": ["ALTER TABLE t ALTER COLUMN n TYPE int USING n * 2"],
    "there and back": ["ALTER TABLE t RENAME TO away", "ALTER TABLE away RENAME TO t", "VACUUM t"],
    "another column of the same name": ["ALTER TABLE t DROP COLUMN n", "ALTER TABLE t ADD COLUMN n int DEFAULT 5"],
    "a partition is attached": [
        "CREATE TABLE p2 (id int PRIMARY KEY, n int)", "INSERT INTO p2 VALUES (200, 1)",
        "ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (200) TO (300)",
    ],
    "a partition is truncated": ["TRUNCATE p1"],
    "a new partition is truncated, and a row tells another shape first": [
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (200) TO (300)", "INSERT INTO p VALUES (201, 1)", "TRUNCATE p2",
        "ALTER TABLE p ADD COLUMN x int", "INSERT INTO p VALUES (2, 5)",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", REWRITES)
def test_a_table_that_was_rewritten_before_it_was_first_seen(mirror: Mirror, case: str) -> None:
    mirror.options["snapshot_mode"] = "never"
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    mirror.run("CREATE TABLE p (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)")
    mirror.run("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (200)")
    mirror.start()
    with asleep(mirror):
        mirror.run("INSERT INTO t VALUES (1, 10), (2, 20)", "INSERT INTO p VALUES (1, 10)", *REWRITES[case])
        mirror.run("INSERT INTO t VALUES (3, 30)")
    mirror.settle(also=lambda: not compare(mirror.database.url, mirror.target, ["t", "p"]))
    assert is_reloaded(mirror) == (case != "there and back")


def test_a_table_that_was_not_altered_is_not_read_again(mirror: Mirror) -> None:
    mirror.options["snapshot_mode"] = "never"
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, n int)")
    mirror.start()
    with asleep(mirror):
        mirror.run("INSERT INTO t VALUES (1, 10)", "ALTER TABLE t ADD COLUMN v text", "VACUUM FULL t")
        mirror.run("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO t VALUES (2, 10)")
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t"]) == []
    mirror.run("INSERT INTO t VALUES (3, 10)")
    mirror.settle()
    assert compare(mirror.database.url, mirror.target, ["t"]) == []


TYPES = {
    "an attribute is added": ("AS (x int, y text)", "'(1,a)'", "ADD ATTRIBUTE z int"),
    "an attribute is dropped": ("AS (x int, y text)", "'(1,a)'", "DROP ATTRIBUTE y"),
    "a label gets another name": ("AS ENUM ('a')", "'a'", "RENAME VALUE 'a' TO 'b'"),
}


@pytest.mark.parametrize("is_whole", [False, True], ids=["alone", "in its transaction"])
@pytest.mark.parametrize("case", TYPES)
def test_the_type_of_a_new_column_is_altered_before_the_column_is_seen(
    mirror: Mirror, case: str, is_whole: bool
) -> None:
    definition, value, change = TYPES[case]
    mirror.run(f"CREATE TYPE own {definition}", "CREATE TABLE t (id int PRIMARY KEY)")
    mirror.start()
    mirror.settle()
    statements = ["ALTER TABLE t ADD COLUMN v own", f"INSERT INTO t VALUES (1, {value})", f"ALTER TYPE own {change}"]
    with asleep(mirror), mirror.database.connect(autocommit=not is_whole) as conn:
        for statement in statements:
            conn.execute(statement.encode())
        conn.commit()
    mirror.settle(also=lambda: not compare(mirror.database.url, mirror.target, ["t"]))
    assert is_reloaded(mirror)


_READ = """
SELECT query_start FROM pg_stat_activity WHERE application_name LIKE %s AND state = 'idle' AND query LIKE %s
ORDER BY query_start DESC LIMIT 1
"""


def test_a_new_table_that_is_rewritten_while_its_first_chunk_waits(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = tmp_path / "tickets"
    tickets.mkdir()
    monkeypatch.setenv("PGCDC_FAILPOINTS", "reader.read=wait")
    monkeypatch.setenv("PGCDC_FAILPOINT_TICKETS", str(tickets))

    def last_read() -> list[tuple[datetime]]:
        """When the reader was ready; it waits for a ticket."""
        return mirror.database.query(_READ, ["pgcdc % chunks", "%pg_current_wal_flush_lsn%"])

    mirror.start()
    mirror.settle()
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t SELECT g, g FROM generate_series(1, 50) g")
    mirror.settle_until(lambda: bool(last_read()))  # what the table is like
    looked = last_read()
    (tickets / "go").touch()
    mirror.settle_until(lambda: last_read() not in ([], looked))
    mirror.run("ALTER TABLE t ALTER COLUMN n TYPE int USING n * 2")
    (tickets / "go").touch()
    mirror.settle_until(lambda: not list(tickets.glob("*")))
    tickets.rmdir()
    mirror.settle(also=lambda: not compare(mirror.database.url, mirror.target, ["t"]))
    assert is_reloaded(mirror)
