"""Every DDL at the source has a defined end at a mirror: followed exactly, or by a reload of exactly that table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from databases import Database
from ddl_cases import CASES, DML, EITHER, EXACT, PARTITIONED, RELOAD, SETUP, TREES
from mirroring import Mirror, compare, mirror_of


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
