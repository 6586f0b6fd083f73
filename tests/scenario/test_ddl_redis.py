"""Every DDL at the source has a defined end at a keyed store, too: what a client of our own finds is what SQL finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database
from ddl_cases import CASES, DML, MORE, MORE_SETUP, PARTITIONED, SETUP, TREES
from redising import RedisMirror, redis_mirror_of, rows_of_server

from pgcdc.core.errors import SinkError

KEYLESS = ("drop the key, rows found by all values", "a child table without a key")


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[RedisMirror]:
    with redis_mirror_of(database, tmp_path) as made:
        yield made


def follow(mirror: RedisMirror, script: str, then: tuple[str, ...] = ()) -> None:
    mirror.start()
    mirror.settle(also=mirror.is_equal)
    for statement in [*script.split("; "), *then]:
        try:
            mirror.run(statement)
        except psycopg.Error:
            assert statement in then  # the table has other columns or another name now
    mirror.settle(also=mirror.is_equal)
    assert mirror.dead_letters() == []


@pytest.mark.parametrize("case", [case for case in CASES if case not in KEYLESS])
def test_it_is_followed(mirror: RedisMirror, case: str) -> None:
    mirror.run(*SETUP)
    follow(mirror, CASES[case][1], DML)


@pytest.mark.parametrize("case", MORE)
def test_more_is_followed(mirror: RedisMirror, case: str) -> None:
    mirror.run(*MORE_SETUP)
    follow(mirror, MORE[case][1])


def test_keys_of_a_dropped_table_stay(mirror: RedisMirror) -> None:
    mirror.run(*SETUP)
    follow(mirror, "DROP TABLE other; INSERT INTO t (id) VALUES (999)")
    assert len(rows_of_server(mirror.server, "other:*")) == 20


@pytest.mark.parametrize("case", TREES)
def test_partitions_are_followed(mirror: RedisMirror, case: str) -> None:
    mirror.run(*PARTITIONED)
    follow(mirror, TREES[case][1])


def test_keys_of_a_table_that_was_made_again_are_no_longer_valid(mirror: RedisMirror) -> None:
    mirror.mode = "invalidate"
    mirror.run(*SETUP)
    client = mirror.server.client
    client.set("t:200", "cached")
    mirror.start()
    mirror.settle(also=lambda: client.get("t:200") is None)  # the last row of the initial snapshot
    client.set("t:5", "cached")
    mirror.run("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (7)")
    mirror.settle(also=lambda: client.get("t:5") is None)


def test_a_table_without_a_key_stops_it_with_advice(mirror: RedisMirror) -> None:
    mirror.run(*SETUP)
    mirror.start()
    mirror.settle()
    mirror.run(
        "ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t DROP CONSTRAINT t_pkey", "DELETE FROM t WHERE id = 1"
    )
    with pytest.raises(SinkError, match="rows of table t have no key") as caught:
        mirror.settle()
    assert "Give it a primary key" in caught.value.advice
