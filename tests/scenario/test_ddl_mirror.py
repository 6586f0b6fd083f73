"""Every DDL at the source has a defined end at a mirror: followed exactly, or by a reload of exactly that table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from databases import Database
from ddl_cases import CASES, DML, EITHER, EXACT, MORE, MORE_SETUP, PARTITIONED, RELOAD, SETUP, TREES
from mirroring import Mirror, compare, mirror_of

from pgcdc.sink.holds import new_hold


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[Mirror]:
    with mirror_of(database, tmp_path) as made:
        yield made


def tables_of(database: Database) -> list[str]:
    query = """
        SELECT oid::regclass::text FROM pg_class
        WHERE relkind IN ('r', 'p') AND NOT relispartition AND relnamespace::regnamespace::text !~ '^(pg_|info)'
    """
    return [name for (name,) in database.query(query)]


@pytest.mark.parametrize("then", ["dml", "nothing"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_followed(mirror: Mirror, case: str, then: str) -> None:
    how, script = CASES[case]
    mirror.run(*SETUP)
    follow(mirror, how, script, DML if then == "dml" else ())


@pytest.mark.parametrize("case", MORE)
def test_more_is_followed(mirror: Mirror, case: str) -> None:
    mirror.run(*MORE_SETUP)
    follow(mirror, *MORE[case])


@pytest.mark.parametrize("case", TREES)
def test_a_tree_of_partitions_is_one_table_at_the_mirror(mirror: Mirror, case: str) -> None:
    how, script = TREES[case]
    mirror.run(*PARTITIONED)
    follow(mirror, how, script)
    assert compare(mirror.database.url, mirror.target, ["p"]) == []
    with psycopg.connect(mirror.target) as conn:
        assert conn.execute("SELECT to_regclass('p0')").fetchone() == (None,)


def follow(mirror: Mirror, how: str, script: str, then: Sequence[str] = ()) -> None:
    mirror.start()
    mirror.settle()
    for statement in script.split("; "):
        mirror.run(statement)
    for statement in then:
        try:
            mirror.run(statement)
        except psycopg.Error:
            continue  # the table has other columns or another name now

    def is_done() -> bool:
        is_reloaded = any("It is read again" in one for one in mirror.said)
        return how in (EITHER, RELOAD if is_reloaded else EXACT) and not compare(
            mirror.database.url, mirror.target, tables_of(mirror.database)
        )

    mirror.settle(also=is_done)
    assert mirror.dead_letters() == []


def at_target(mirror: Mirror, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(mirror.target, autocommit=True) as conn:
        found = conn.execute(statement.encode())
        return found.fetchall() if found.description else []


def test_rows_at_the_target_that_do_not_fit_a_new_key_are_reloaded(mirror: Mirror) -> None:
    mirror.run(*SETUP)
    mirror.start()
    mirror.settle()
    at_target(mirror, "UPDATE t SET b = 1 WHERE id < 4")
    mirror.run(*CASES["another key"][1].split("; "))
    mirror.settle(also=lambda: compare(mirror.database.url, mirror.target, ["t"]) == [])
    assert any("do not fit its new key" in one for one in mirror.said)


def test_a_dropped_table_stays_and_an_unlogged_one_is_refused(mirror: Mirror) -> None:
    mirror.run(*SETUP)
    mirror.start()
    mirror.settle()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="unlogged"):
        mirror.run("ALTER TABLE t SET UNLOGGED")
    mirror.run("DROP TABLE other", "INSERT INTO t (id) VALUES (999)")
    mirror.settle()
    assert at_target(mirror, "SELECT count(*) FROM other") == [(20,)]
    assert compare(mirror.database.url, mirror.target, ["t"]) == []


def test_a_table_without_columns_keeps_its_number_of_rows(mirror: Mirror) -> None:
    mirror.run("CREATE TABLE bag (k int)", "ALTER TABLE bag REPLICA IDENTITY FULL", "INSERT INTO bag VALUES (1), (2)")
    mirror.start()
    mirror.settle()
    mirror.run("ALTER TABLE bag DROP COLUMN k")
    mirror.settle()
    some = "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag LIMIT 3)"
    mirror.run("INSERT INTO bag SELECT FROM generate_series(1, 5)", some)
    mirror.settle()
    assert at_target(mirror, "SELECT count(*) FROM bag") == [(4,)]
    mirror.run(some, "INSERT INTO bag DEFAULT VALUES")
    mirror.settle()
    assert at_target(mirror, "SELECT count(*) FROM bag") == [(2,)]
    at_target(mirror, "DELETE FROM bag")
    mirror.run("DELETE FROM bag")
    mirror.settle()
    assert [one.partition(":")[0] for one in mirror.said if "not found at the target" in one] == ["table bag"]
    assert mirror.dead_letters() == []
    at_target(mirror, "INSERT INTO bag DEFAULT VALUES")
    mirror.runner.holds.add(
        {mirror.database.query("SELECT 'bag'::regclass::oid::int8")[0][0]: new_hold("bag", "a test")}
    )
    mirror.run("INSERT INTO bag SELECT FROM generate_series(1, 7)")
    mirror.settle()
    assert at_target(mirror, "SELECT count(*) FROM bag") == [(7,)]


def test_a_row_of_a_partition_that_no_query_sees_any_longer(mirror: Mirror) -> None:
    parts = [f"CREATE TABLE p{n} PARTITION OF p FOR VALUES FROM ({n}0) TO ({n}9)" for n in (1, 2)]
    mirror.run("CREATE TABLE p (k int PRIMARY KEY) PARTITION BY RANGE (k)", *parts)
    mirror.start()
    mirror.run("INSERT INTO p VALUES (11), (21)")  # so that the server has announced both
    mirror.settle()
    with mirror.database.connect() as older:
        older.execute("BEGIN")
        older.execute("INSERT INTO p VALUES (15)")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            mirror.run("SET lock_timeout = '200ms'", "ALTER TABLE p DETACH PARTITION p1 CONCURRENTLY")
        mirror.settle(also=lambda: at_target(mirror, "SELECT * FROM p") == [(21,)])
        older.execute("COMMIT")
    mirror.settle(also=lambda: sum("It is read again" in one for one in mirror.said) == 2)
    assert compare(mirror.database.url, mirror.target, ["p"]) == []


def test_an_enum_that_the_target_has_is_used(mirror: Mirror) -> None:
    mirror.run(*SETUP)
    mirror.start()
    mirror.settle()
    at_target(mirror, "CREATE TYPE mood AS ENUM ('a', 'b')")
    mirror.run(*CASES["enum with a new value"][1].split("; "))
    mirror.settle(also=lambda: compare(mirror.database.url, mirror.target, ["t"]) == [])
    kind = "SELECT atttypid::regtype::text FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = 'm'"
    assert at_target(mirror, kind) == [("mood",)]
    assert mirror.dead_letters() == []
