"""The row filter or column list of the user's own publication is changed: the copy ends up with what is published now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database
from mirroring import Mirror, mirror_of

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


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[Mirror]:
    with mirror_of(database, tmp_path) as made:
        del made.options["all_tables"]
        yield made


def rows(url: str, columns: str, where: str = "") -> list[tuple[object, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute(f"SELECT {columns} FROM t {where} ORDER BY id".encode()).fetchall()


@pytest.mark.parametrize("change", CHANGES)
def test_the_copy_has_what_is_published(mirror: Mirror, change: str) -> None:
    before, after, is_stop = CHANGES[change]
    mirror.options["publication"] = "theirs"
    mirror.run("CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    mirror.run("INSERT INTO t SELECT g, 'a' || g, 'b' || g FROM generate_series(1, 10) g")
    mirror.run(f"CREATE PUBLICATION theirs FOR TABLE {before}")
    mirror.start()
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
    columns = after[after.index("(") + 1 : -1] if "(" in after and "WHERE" not in after else "id, a, b"
    where = after.partition("t ")[2] if "WHERE" in after else ""

    def is_equal() -> bool:
        return rows(mirror.target, columns) == rows(mirror.database.url, columns, where)

    mirror.settle(also=is_equal, timeout_s=30)
    assert any("It is read again" in one for one in mirror.said)
