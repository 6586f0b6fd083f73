"""The initial snapshot: the rows that are there, then the changes, without a gap and without a repeat. No JVM."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from databases import Database
from initials import Initial, fill, writers
from listening import wait_until

KEY = {"public.t": ["id"]}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_SNAPSHOT_CHUNK_BYTES", "65536")


@pytest.fixture
def begin(database: Database, tmp_path: Path) -> Iterator[Callable[..., Initial]]:
    """Queries on one state directory; what they started ends with the test."""
    made: list[Initial] = []

    def make(**options: str) -> Initial:
        made.append(Initial(database, tmp_path, **{"all_tables": "true", **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()
    if made:
        made[-1].end()


def test_rows_come_first_then_changes(database: Database, begin: Callable[..., Initial]) -> None:
    fill(database, "t", 2000)
    query = begin().load()
    database.execute("INSERT INTO t VALUES (-1, 'during', ''); UPDATE t SET v = 'new' WHERE id = 3")
    query.run()
    operations = [event["operation"] for event in query.events]
    assert operations == ["SNAPSHOT_STARTED", *["SNAPSHOT"] * 2000, "SNAPSHOT_COMPLETED", "INSERT", "UPDATE"]
    assert {event["channel"] for event in query.events} == {"pgcdc:t", "pgcdc:_snapshot"}
    assert query.events[-3]["payload"]["row"]["rows"] == "2000"
    query.check_equal(KEY)
    status = query.status()
    assert status["rows"] == 2000 and [one["status"] for one in status["tables"]] == ["complete"]
    folder = query.state.snapshot
    assert not list(folder.glob("holder-*"))
    query.kill_capture()
    assert query.run() == [] and query.status()["status"] == "complete"


@pytest.mark.parametrize("seed", [7])
def test_eight_writers_during_the_hand_over_and_kills(
    database: Database, begin: Callable[..., Initial], seed: int
) -> None:
    fill(database, "t", 6000)
    choose = random.Random(seed)
    query = begin()
    with writers(database, "t", seed, 6000) as commits:
        query.load()
        for percent in (10, 50, 90):
            query.step_until(percent - choose.random() * 5)
            before = len(commits)
            start, end = query.offset, None
            query.kill_capture()
            if choose.random() < 0.7:  # the driver as well: its unfinished batch is planned again at once
                query.load()
            wait_until(lambda before=before: len(commits) > before, 10, "changes in flight")  # type: ignore[misc]
            end = query.reader.latestOffset(start, query.reader.getDefaultReadLimit())
            assert query.replay(start, end) == query.replay(start, end)
        query.run()
        wait_until(lambda: len(commits) > 200, 30, "enough changes")
    query.run()
    assert query.status()["status"] == "complete" and "lost" not in query.log()
    query.check_equal(KEY)


def test_a_lost_spool_is_filled_again_in_the_middle(database: Database, begin: Callable[..., Initial]) -> None:
    fill(database, "t", 8000)
    query = begin().load()
    query.step_until(40)
    first = query.batches[0]
    query.kill_capture()
    shutil.rmtree(query.state.spool)
    query.load()
    query.run()
    query.check_equal(KEY)
    assert first is query.batches[0]


def test_a_query_that_stops_leaves_the_rest_to_another(database: Database, begin: Callable[..., Initial]) -> None:
    fill(database, "t", 8000)
    query, other = begin().load(), begin(consumer="c2").load()
    query.step_until(30)
    query.close()
    other.run()
    other.check_equal(KEY)
    query.load()
    query.run()
    query.check_equal(KEY)


CRASHES = {
    "releases": ["releases.before_log", "releases.after_log@3", "spool.before_index@3"],
    "plan": ["driver.planned", "driver.staged@4", "releases.after_log@6", "capture.before_poll"],
    "readers": ["reader.reading", "reader.read@2"],
}


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(CRASHES["releases"], id="releases"),
        pytest.param(CRASHES["plan"], id="plan", marks=pytest.mark.slow),
        pytest.param(CRASHES["readers"], id="readers"),
    ],
)
def test_the_capture_and_its_readers_may_die_anywhere(
    database: Database,
    begin: Callable[..., Initial],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    points: list[str],
) -> None:
    fill(database, "t", 6000)
    database.execute("CREATE TABLE keyless AS SELECT i AS id, repeat('k', 50) AS v FROM generate_series(1, 3000) i")
    monkeypatch.setenv(
        "PGCDC_FAILPOINTS",
        ",".join(f"{point.replace('@', '=kill@')}" if "@" in point else f"{point}=kill" for point in points),
    )
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(tmp_path))
    query = begin().load()
    database.execute("UPDATE t SET v = 'new' WHERE id < 10; INSERT INTO keyless VALUES (0, 'new')")
    query.run()
    assert {path.stem for path in tmp_path.glob("*.hit")} == {point.partition("@")[0] for point in points}
    query.check_equal(KEY)
    keyless = [event for event in query.events if event["channel"] == "pgcdc:keyless"]
    assert sorted(int(event["payload"]["row"]["id"]) for event in keyless) == list(range(3001))


def test_a_start_that_was_killed_before_the_plan_is_begun_again(
    database: Database, begin: Callable[..., Initial], tmp_path: Path
) -> None:
    fill(database, "t", 500)
    query = begin()
    code = f"import sys; sys.path[:0] = {sys.path!r}\n"
    code += "from pgcdc.spark.source import ChangeSource\nfrom initials import EVENTS\n"
    code += f"ChangeSource({query.options!r}).streamReader(EVENTS).initialOffset()"
    killed = subprocess.run(
        [sys.executable, "-c", code], check=False, env={**os.environ, "PGCDC_FAILPOINTS": "prepare.created=kill"}
    )
    assert killed.returncode == -9
    database.execute("INSERT INTO t VALUES (-1, 'between', ''); DELETE FROM t WHERE id = 5")
    query.load()
    database.execute("UPDATE t SET v = 'after' WHERE id = -1")
    query.run()
    query.check_equal(KEY)
    assert [event["operation"] for event in query.events[-2:]] == ["SNAPSHOT_COMPLETED", "UPDATE"]


def test_a_transaction_that_is_open_while_the_slot_is_made(database: Database, begin: Callable[..., Initial]) -> None:
    fill(database, "t", 100)
    query = begin()
    with database.connect(autocommit=False) as conn:
        conn.execute("INSERT INTO t VALUES (-1, 'open', '')")
        loading = threading.Thread(target=query.load)
        loading.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'CREATE_REPL%'"
        wait_until(lambda: database.query(waits)[0][0] == 1, 20, "the slot waits")
        conn.execute("DELETE FROM t WHERE id = 1")
        conn.commit()
    loading.join(30)
    query.run()
    query.check_equal(KEY)
