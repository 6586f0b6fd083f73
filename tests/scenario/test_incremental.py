"""Incremental snapshots: existing rows while the stream goes on, each as it is at its place, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import Database
from snapshots import Backfill, Writers, contents, fold, make_table


@pytest.fixture
def query(database: Database, tmp_path: Path) -> Iterator[Backfill]:
    one = Backfill(database, tmp_path)
    yield one
    one.end()


def test_rows_that_were_there_come_between_the_changes(database: Database, query: Backfill) -> None:
    make_table(database, 2_500)
    query.load()
    query.pull()
    name = query.add("t", chunk_size=1_000)
    query.complete(name)
    assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])
    assert query.marks() == ["SNAPSHOT_STARTED t", "SNAPSHOT_COMPLETED t"]
    assert query.states()[name]["rows"] == 2_500 and query.states()[name]["percent"] == 100.0


def test_eight_writers_while_a_table_is_read(database: Database, query: Backfill) -> None:
    make_table(database)
    query.load()
    with Writers(database, seed=1) as writers:
        query.pull_until(lambda: writers.commits > 50)
        names = [query.add("t", chunk_size=37) for _ in range(3)]
        query.complete(*names)
        assert writers.commits > 100
    query.pull()
    assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])
    assert sum(event["operation"] == "SNAPSHOT" for event in query.events) > 600
