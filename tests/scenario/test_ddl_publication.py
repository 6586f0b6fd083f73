"""The user's own publication is changed: the copy ends up with what is published now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database
from mirroring import Mirror, mirror_of
from redising import RedisMirror, redis_mirror_of, rows_of_server

from pgcdc.core.errors import GapError

CHANGES = {
    "a filter is dropped": ("t WHERE (id > 5)", "t", True),
    "a filter is added": ("t", "t WHERE (id > 5)", True),
    "another filter": ("t WHERE (id > 5)", "t WHERE (id < 7)", True),
    "a column more": ("t (id, a)", "t (id, a, b)", False),
    "a column less": ("t (id, a, b)", "t (id, a)", True),
    "the list is dropped": ("t (id, a)", "t", False),
    "a list is added": ("t", "t (id, b)", True),
}


@pytest.fixture(params=[mirror_of, redis_mirror_of], ids=["pg_table", "redis"])
def mirror(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mirror]:
    with request.param(database, tmp_path) as made:
        del made.options["all_tables"]
        yield made


def rows(url: str, columns: str, where: str = "") -> list[tuple[object, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute(f"SELECT {columns} FROM t {where} ORDER BY id".encode()).fetchall()


def is_equal(mirror: Mirror, published: str) -> bool:
    columns = published[published.index("(") + 1 : -1] if "(" in published and "WHERE" not in published else "id, a, b"
    where = published.partition("t ")[2] if "WHERE" in published else ""
    wanted = rows(mirror.database.url, columns, where)
    if isinstance(mirror, RedisMirror):
        found = rows_of_server(mirror.server, "t:*").values()
        names = columns.split(", ")
        texts = [dict(zip(names, map(str, row), strict=True)) for row in wanted]
        return sorted(found, key=lambda row: int(row["id"] or 0)) == texts
    return rows(mirror.target, columns) == wanted


@pytest.mark.parametrize("change", CHANGES)
def test_the_copy_has_what_is_published(mirror: Mirror, change: str) -> None:
    before, after, is_stop = CHANGES[change]
    mirror.options["publication"] = "theirs"
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    mirror.run("INSERT INTO t SELECT g, 'a' || g, 'b' || g FROM generate_series(1, 10) g")
    mirror.run(f"CREATE PUBLICATION theirs FOR TABLE {before}")
    mirror.start()
    if isinstance(mirror, RedisMirror):  # a table at the target comes with its first row
        mirror.settle(also=lambda: is_equal(mirror, before))
    mirror.settle()
    mirror.run(f"ALTER PUBLICATION theirs SET TABLE {after}", "UPDATE t SET a = 'new', b = 'new' WHERE id IN (3, 6, 8)")
    mirror.run("INSERT INTO t VALUES (11, 'a', 'b')")
    if is_stop:
        with pytest.raises(GapError) as caught:
            mirror.settle(timeout_s=40, also=lambda: False)
        assert "--accept-publication" in caught.value.advice
        mirror.end()
        mirror.options["accept_publication"] = "true"
        mirror.start()
    mirror.settle(also=lambda: is_equal(mirror, after), timeout_s=30)
    assert any("It is read again" in one for one in mirror.said)


# What is done between two looks, so that the publication is as before.
UNSEEN = {
    "updates are not published": (
        "FOR TABLE t",
        "ALTER PUBLICATION theirs SET (publish = 'insert'); UPDATE t SET a = 'y' WHERE id < 5; DELETE FROM t WHERE id = 9; "
        "ALTER PUBLICATION theirs SET (publish = 'insert, update, delete, truncate')",
    ),
    "the same for all tables": (
        "FOR ALL TABLES",
        "ALTER PUBLICATION theirs SET (publish = 'insert'); UPDATE t SET a = 'y' WHERE id < 5; "
        "ALTER PUBLICATION theirs SET (publish = 'insert, update, delete, truncate')",
    ),
    "the table is in another schema": (
        "FOR TABLES IN SCHEMA public",
        "ALTER TABLE t SET SCHEMA away; UPDATE away.t SET a = 'y'; ALTER TABLE away.t SET SCHEMA public",
    ),
    "TRUNCATE is never published": (
        "FOR TABLE t WITH (publish = 'insert, update, delete')", "TRUNCATE t; INSERT INTO t VALUES (50, 'q')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSEEN)
def test_what_the_publication_hides_for_a_moment_is_read_again(mirror: Mirror, case: str) -> None:
    members, statements = UNSEEN[case]
    mirror.options["publication"] = "theirs"
    mirror.run("CREATE SCHEMA away", "CREATE TABLE t (id int PRIMARY KEY, a text)")
    mirror.run("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 9) g", f"CREATE PUBLICATION theirs {members}")
    mirror.start()
    mirror.settle(also=lambda: is_equal(mirror, "t (id, a)"))
    with mirror.database.connect() as conn, conn.transaction():
        for statement in statements.split("; "):
            conn.execute(statement.encode())
    mirror.settle(also=lambda: is_equal(mirror, "t (id, a)"), timeout_s=30)
    assert any("It is read again" in one for one in mirror.said)
