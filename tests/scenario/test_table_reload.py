"""Reloads of single tables beside the stream: whatever the copy was like before, it is equal afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database, drop_database
from mirroring import Mirror, compare
from psycopg import sql

from pgcdc.sink.holds import new_hold


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[Mirror]:
    name = f"{database.name}_copy"
    with psycopg.connect(database.server.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        made = Mirror(database, database.server.url(name), tmp_path)
        try:
            yield made
        finally:
            made.end()
            drop_database(admin, name)


def _oid(mirror: Mirror, table: str) -> int:
    return int(mirror.database.query("SELECT %s::regclass::oid::int8", [table])[0][0])


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
