"""The role may not alter the target's tables: the adapter stops, and after what it advises its copies end up equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database
from mirroring import Mirror, compare, mirror_of

from pgcdc.core.errors import SinkError

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, a text, n text NOT NULL, v varchar(9))",
    "INSERT INTO t SELECT g, 'a' || g, g, 'v' FROM generate_series(1, 9) g",
    "CREATE TABLE empty (id int PRIMARY KEY)",
)
# Statements at the source, and how many stops there are.
CASES: dict[str, tuple[str, int]] = {
    "default": ("ALTER TABLE t ADD COLUMN x int DEFAULT 7", 1),
    "several": (
        "ALTER TABLE t ADD COLUMN x int DEFAULT 7, ADD COLUMN y int; "
        "ALTER TABLE t RENAME a TO b; ALTER TABLE t RENAME n TO c",
        1,
    ),
    "rename": ("ALTER TABLE t RENAME a TO b", 1),
    "swap": ("ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME n TO a; ALTER TABLE t RENAME x TO n", 1),
    "moved up": ("ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME n TO a", 1),
    "replaced": ("ALTER TABLE t DROP COLUMN a; ALTER TABLE t ADD COLUMN a int DEFAULT 3", 1),
    "key": ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (n)", 1),
    "retype": ("ALTER TABLE t ALTER v TYPE varchar(20)", 1),
    "new table": ("INSERT INTO empty VALUES (1)", 1),
    "new name": ("ALTER TABLE t RENAME TO more", 1),
    "new name and schema": ("CREATE SCHEMA s; ALTER TABLE t RENAME TO more; ALTER TABLE more SET SCHEMA s", 1),
    "truncate": ("TRUNCATE t", 1),
    "reload": ("ALTER TABLE t ADD COLUMN x float8 DEFAULT random()", 2),
}  # fmt: skip


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[Mirror]:
    """Its role may make tables, and somebody else owns those that it has made."""
    role = f"{database.name}_role"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with mirror_of(database, tmp_path) as made:
            as_owner(made, f"GRANT CREATE, USAGE ON SCHEMA public TO {role}")
            made.target = database.server.url(f"{database.name}_copy", role)
            made.run(*SETUP)
            made.start()
            made.settle()
            as_owner(
                made,
                "ALTER TABLE t OWNER TO CURRENT_USER",
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON t TO {role}",
                f"REVOKE CREATE ON SCHEMA public FROM {role}",
            )
            yield made
    finally:
        database.execute(f"DROP ROLE {role}")


def as_owner(mirror: Mirror, *statements: str) -> list[tuple[object, ...]]:
    url = mirror.database.server.url(f"{mirror.database.name}_copy")
    with psycopg.connect(url, autocommit=True) as conn:
        for statement in statements:
            found = conn.execute(statement.encode())
        return found.fetchall() if found.description else []


KEYS = """
SELECT c.oid::regclass::text, pg_get_constraintdef(p.oid) FROM pg_class c
LEFT JOIN pg_constraint p ON p.conrelid = c.oid AND p.contype = 'p'
WHERE c.oid::regclass::text = ANY('{t,empty,more,s.more}')
"""


@pytest.mark.parametrize("case", CASES)
def test_its_advice_is_enough(mirror: Mirror, case: str) -> None:
    script, stops = CASES[case]
    mirror.run(*script.split("; "))
    for _ in range(stops):
        with pytest.raises(SinkError) as caught:
            mirror.settle(also=lambda: False, timeout_s=30)
        advice, _, statements = caught.value.advice.partition(": ")
        assert "Run there" in advice
        mirror.end()
        as_owner(mirror, statements)
        mirror.start()
    tables = [name for (name, _) in mirror.database.query(KEYS)]
    mirror.settle(also=lambda: compare(mirror.database.url, mirror.target, tables) == [])
    assert set(as_owner(mirror, KEYS)) <= set(mirror.database.query(KEYS))
    assert mirror.dead_letters() == []
