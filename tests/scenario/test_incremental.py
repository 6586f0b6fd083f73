"""Incremental snapshots: existing rows while the stream goes on, each as it is at its place, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from databases import Database
from listening import wait_until
from snapshots import Backfill, Writers, contents, fold, make_table

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.position import Position
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.run.control import ask_snapshots
from pgcdc.source.postgres.snapshot.requests import RequestQueue


@pytest.fixture
def query(database: Database, tmp_path: Path) -> Iterator[Backfill]:
    one = Backfill(database, tmp_path)
    yield one
    one.end()


def keys_of_snapshots(query: Backfill) -> list[str]:
    return [dict(event["row"])["id"] for event in query.of("t") if event["operation"] == "SNAPSHOT"]


def has_rows(query: Backfill, count: int) -> bool:
    return len(keys_of_snapshots(query)) >= count


def has_commits(writers: Writers, count: int) -> bool:
    return writers.commits >= count


def test_rows_that_were_there_come_between_the_changes(database: Database, query: Backfill) -> None:
    make_table(database, 2_500)
    query.load()
    name = query.add("t", chunk_size=1_000)
    query.complete(name)
    query.drain()
    assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])
    assert query.marks() == ["SNAPSHOT_STARTED t", "SNAPSHOT_COMPLETED t"]
    state = query.states()[name]
    assert (state["rows"], state["percent"], state["kind"]) == (2_500, 100.0, "incremental")


def test_an_empty_table_and_a_condition(database: Database, query: Backfill) -> None:
    make_table(database, 100)
    database.execute("CREATE TABLE empty (id int PRIMARY KEY)")
    query.load()
    names = [query.add("empty"), query.add("t", where="id % 10 = 0 -- every tenth")]
    query.complete(*names)
    query.drain()
    assert sorted(map(int, keys_of_snapshots(query))) == list(range(0, 100, 10))
    assert query.marks() == [
        f"SNAPSHOT_{what} {table}" for table in ("empty", "t") for what in ("STARTED", "COMPLETED")
    ]


def test_eight_writers_while_a_table_is_read(database: Database, query: Backfill) -> None:
    make_table(database)
    query.load()
    with Writers(database, seed=65) as writers:
        names = [query.add("t", chunk_size=37) for _ in range(3)]
        query.complete(*names)
        assert writers.commits > 50
    query.drain()
    assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])
    assert len(keys_of_snapshots(query)) > 300


POINTS = ["beside.read", "beside.staged", "releases.before_log", "releases.after_log", "beside.advanced"]


def test_kill_9_at_every_step_releases_every_row_once(
    database: Database, query: Backfill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("PGCDC_FAILPOINTS", ",".join(f"{point}=kill@2" for point in POINTS))
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(marks))
    make_table(database, 300)
    query.load()
    name = query.add("t", chunk_size=20)
    query.complete(name)
    query.drain()
    assert {path.stem for path in marks.iterdir()} == set(POINTS)
    assert sorted(map(int, keys_of_snapshots(query))) == list(range(300))
    assert query.marks() == ["SNAPSHOT_STARTED t", "SNAPSHOT_COMPLETED t"]
    assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])


@pytest.mark.slow
def test_kill_9_on_the_way_with_changes_in_flight(database: Database, query: Backfill) -> None:
    make_table(database)
    query.load()
    with Writers(database, seed=7, count=4) as writers:
        name = query.add("t", chunk_size=25)
        for percent in (10, 50, 90):
            query.pull_until(partial(has_rows, query, percent * 2))
            before = writers.commits
            query.kill()
            wait_until(partial(has_commits, writers, before + 1), 10, "changes are in flight")
        query.complete(name)
    query.drain()
    assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_kills_of_capture_and_server_with_changes_in_flight(tmp_path: Path) -> None:
    seed = int(os.environ.get("PGCDC_SEED", "0")) or random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with EmbeddedPostgres.temporary() as server:
        database = Database("postgres", server.url(), server)
        make_table(database)
        query = Backfill(database, tmp_path, toast=chance.choice(("mark", "cache"))).load()
        try:
            with Writers(database, seed=seed % 1000):
                for victim in chance.sample(["capture", "capture", "server", "spool"], 4):
                    name = query.add("t", chunk_size=chance.choice((10, 25, 60)))
                    enough = len(keys_of_snapshots(query)) + chance.choice((20, 100, 180))
                    query.pull_until(partial(has_rows, query, enough))
                    if victim == "server":
                        server.kill()
                        server.restart()
                    else:
                        query.kill()
                        if victim == "spool":
                            shutil.rmtree(query.state.spool)
                            query.load()
                    query.complete(name, timeout_s=120)
            query.drain()
            assert fold(query.events, "t", ["id"]) == contents(database, "t", ["id"])
        finally:
            query.end()


# --- what replays


def everything(query: Backfill, start: Position) -> list[dict[str, object]]:
    assert query.offset is not None
    return query.replay(start.to_offset(), query.offset)


def test_a_spool_that_is_lost_comes_back_with_every_row_in_its_place(database: Database, query: Backfill) -> None:
    make_table(database, 200)
    query.load()
    keeper = Backfill(database, query.state.path.parent, consumer="keeper").load()  # acknowledges nothing
    assert keeper.offset is not None
    start = Position.from_offset(keeper.offset)
    with Writers(database, seed=3, count=2):
        query.complete(query.add("t", chunk_size=30))
    query.drain()
    keeper.offset = query.offset
    before = everything(keeper, start)
    assert before == query.events
    query.kill()
    shutil.rmtree(query.state.spool)
    keeper.load()
    assert everything(keeper, start) == before
    keeper.close()


def test_what_was_released_into_an_idle_database_needs_no_traffic_to_come_back(
    database: Database, query: Backfill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the log and the spool; nothing is written to the WAL any more."""
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("PGCDC_FAILPOINTS", "releases.after_log=kill@1")
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(marks))
    make_table(database, 20)
    query.load()
    query.pull()
    name = query.add("t")
    wait_until(lambda: bool(list(marks.iterdir())), 30, "the capture is killed")
    query.complete(name)
    query.drain()
    assert len(keys_of_snapshots(query)) == 20


# --- what can be asked


def test_what_cannot_be_read_is_refused_at_once(database: Database, query: Backfill) -> None:
    make_table(database, 10)
    database.execute("CREATE TABLE keyless (n int)")
    query.load()
    with pytest.raises(SourceError, match="table nothing is not captured"):
        query.add("nothing")
    with pytest.raises(SourceError, match="no primary key or replica identity index"):
        query.add("keyless")
    for condition in ("id >", "missing = 1", "true); DELETE FROM t; SELECT (1", "id"):
        with pytest.raises(SourceError, match="is invalid"):
            query.add("t", where=condition)
    with pytest.raises(ConfigError, match="snapshot 'abc' does not exist"):
        query.ask(action="pause", id="abc")
    with pytest.raises(ConfigError, match="unknown snapshot action"):
        query.ask(action="explode")
    assert query.states() == {} and len(contents(database, "t", ["id"])) == 10


def test_no_right_to_read_is_refused_with_the_grant(database: Database, tmp_path: Path) -> None:
    make_table(database, 10)
    database.execute("CREATE PUBLICATION theirs FOR TABLE t")
    database.execute(f"CREATE ROLE r_{database.name} LOGIN REPLICATION")
    url = database.url.replace("postgres@", f"r_{database.name}@")
    query = Backfill(Database(database.name, url, database.server), tmp_path, publication="theirs", all_tables="false")
    try:
        query.load()
        with pytest.raises(SourceError, match=f'GRANT SELECT ON "public"."t" TO "r_{database.name}"'):
            query.add("t")
    finally:
        query.end()
        with psycopg.connect(database.url, autocommit=True) as conn:
            conn.execute(f"DROP ROLE r_{database.name}".encode())


def test_pause_resume_stop_and_the_order_of_requests(database: Database, query: Backfill) -> None:
    make_table(database, 400)
    database.execute("CREATE TABLE second (id int PRIMARY KEY)")
    query.load()
    first, second = query.add("t", chunk_size=10, chunk_delay_s=0.05), query.add("second")
    query.pull_until(lambda: query.states()[first]["rows"] >= 20)
    assert query.states()[second]["status"] == "queued"
    assert query.ask(action="pause")["id"] == first
    query.complete(second)
    rows = query.states()[first]["rows"]
    assert rows < 400 and query.states()[first]["status"] == "paused"
    query.kill()
    query.pull()
    assert query.states()[first]["rows"] == rows
    query.ask(action="resume", id=first)
    query.pull_until(lambda: query.states()[first]["rows"] > rows)
    assert query.ask(action="stop", id=first)["id"] == first
    with pytest.raises(ConfigError, match="is stopped, not paused"):
        query.ask(action="resume", id=first)
    assert query.states()[first]["status"] == "stopped"


def test_signals_ask_for_snapshots_and_bad_ones_stop_nothing(database: Database, query: Backfill) -> None:
    make_table(database, 30)
    database.execute("CREATE TABLE pgcdc_signals (id serial PRIMARY KEY, signal text, payload jsonb)")
    query.load(all_tables="false", tables="t,pgcdc_signals")
    insert = "INSERT INTO pgcdc_signals (signal, payload) VALUES (%s, %s)"
    database.execute(insert, ["execute-snapshot", '{"table": "t", "where": "id < 10"}'])
    for signal, payload in [("explode", None), ("execute-snapshot", "[1]"), ("pause-snapshot", '{"id": "no"}')]:
        database.execute(insert, [signal, payload])
    database.execute(insert, ["execute-snapshot", '{"tables": ["missing", "t"]}'])
    query.pull_until(lambda: [one["status"] for one in query.states().values()] == ["done", "failed", "done"])
    query.drain()
    assert len(keys_of_snapshots(query)) == 40
    assert len(query.of("pgcdc_signals")) == 5
    query.kill()
    shutil.rmtree(query.state.spool)
    query.load()
    query.drain()
    queue = RequestQueue(query.state.snapshot / "requests.json")
    assert len(queue.entries()) == 3 and queue.bad_signals == 3


def test_the_table_of_signals_is_made_and_captured(database: Database, query: Backfill) -> None:
    make_table(database, 10)
    database.execute("CREATE SCHEMA ops")
    query.options |= {"incremental_snapshot": "true", "signal_table": "ops.asked", "snapshot_chunk_size": "3"}
    query.load()
    database.execute("INSERT INTO ops.asked (signal, payload) VALUES ('execute-snapshot', '{\"table\": \"t\"}')")
    query.pull_until(lambda: [one["status"] for one in query.states().values()] == ["done"])
    query.drain()
    assert len(keys_of_snapshots(query)) == 10 and len(query.of("asked")) == 1
    (state,) = RequestQueue(query.state.snapshot / "requests.json").entries()
    assert state.chunks == 4


def test_without_a_capture_requests_are_written_down(database: Database, query: Backfill) -> None:
    make_table(database, 10)
    query.load()
    query.end()
    name = ask_snapshots(query.state, {"action": "add", "table": "t"})["id"]
    missing = ask_snapshots(query.state, {"action": "add", "table": "missing"})["id"]
    ask_snapshots(query.state, {"action": "pause", "id": name})
    assert ask_snapshots(query.state, {"action": "resume"})["id"] == name
    query.load()
    query.complete(name)
    query.drain()
    assert len(keys_of_snapshots(query)) == 10
    wait_until(lambda: "is not captured" in query.states()[missing]["error"], 30, "the other one is refused")
