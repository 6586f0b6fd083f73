"""An initial snapshot that is lost before all rows are read: nothing is missing all the same, and nothing comes twice."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from databases import Database
from initials import Initial, fill, writers
from listening import wait_until
from preparing import Wanted, prepare

from pgcdc.core.errors import SourceError, SpoolError
from pgcdc.core.state import Lock
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.source.postgres.setup.tables import read_published
from pgcdc.source.postgres.snapshot.chunks import Chunk
from pgcdc.source.postgres.snapshot.reader import Reader, StageOrder
from pgcdc.source.postgres.snapshot.releases import Staged

KEY = {"public.t": ["id"]}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_SNAPSHOT_CHUNK_BYTES", "65536")


@pytest.fixture
def begin(database: Database, tmp_path: Path) -> Iterator[Callable[..., Initial]]:
    made: list[Initial] = []

    def make(**options: str) -> Initial:
        made.append(Initial(database, tmp_path, **{"all_tables": "true", **options}))
        return made[-1]

    yield make
    for one in made:
        one.end()


def requests(query: Initial) -> list[dict[str, object]]:
    path = query.state.snapshot / "requests.json"
    return [one["request"] for one in json.loads(path.read_text())["requests"]] if path.exists() else []


def test_tables_that_were_not_begun_are_read_in_a_new_snapshot(
    database: Database, begin: Callable[..., Initial]
) -> None:
    fill(database, "t", 4000)
    database.execute("CREATE TABLE keyless AS SELECT i AS id FROM generate_series(1, 2000) i")
    query = begin()
    with writers(database, "t", 3, 4000) as commits:
        query.load()
        wait_until(lambda: query.status()["status"] == "reading", 20, "the plan")
        before = len(commits)
        wait_until(lambda: len(commits) > before + 50, 20, "changes that the lost snapshot does not see")
        query.lose_snapshot()
        query.run()
    database.execute("INSERT INTO keyless VALUES (0)")
    query.run()
    assert "in a new snapshot" in query.log() and requests(query) == []
    query.check_equal(KEY)
    keyless = [event["payload"]["row"]["id"] for event in query.events if event["channel"] == "pgcdc:keyless"]
    assert sorted(map(int, keyless)) == list(range(2001))
    # What is left out is left out again when the stream is read again.
    query.kill_capture()
    assert query.run() == []


def test_the_rest_of_a_table_that_came_in_part_is_asked_for_by_key(
    database: Database, begin: Callable[..., Initial]
) -> None:
    fill(database, "t", 8000)
    query = begin().load()
    query.step_until(20)
    query.lose_snapshot()
    database.execute("UPDATE t SET v = 'later' WHERE id = 7999")
    query.run()
    assert [one["status"] for one in query.status()["tables"]] == ["moved"]
    came = sorted(int(event["payload"]["row"]["id"]) for event in query.events if event["operation"] == "SNAPSHOT")
    asked = requests(query)
    assert came == list(range(8000)), "every row once, though its snapshot was lost"
    assert {one["kind"] for one in asked} == {"initial"} and all(one["low"] or one["high"] for one in asked)
    query.check_equal(KEY, strict=False)


def test_a_table_without_a_key_comes_whole_or_in_a_new_snapshot(
    database: Database, begin: Callable[..., Initial]
) -> None:
    database.execute("CREATE TABLE keyless AS SELECT i AS id, repeat('x', 90) AS v FROM generate_series(1, 8000) i")
    query = begin().load()
    query.read_some()
    wait_until(lambda: query.staged() != set(), 20, "a chunk is staged")
    assert query.step() is None, "not by halves"
    database.execute("INSERT INTO keyless VALUES (0, 'between')")
    query.lose_snapshot()
    database.execute("INSERT INTO keyless VALUES (-1, 'later')")
    query.run()
    ids = [int(event["payload"]["row"]["id"]) for event in query.events if "keyless" in event["channel"]]
    assert sorted(ids) == list(range(-1, 8001))


def test_what_is_staged_is_published_though_its_snapshot_is_lost(
    database: Database, begin: Callable[..., Initial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE keyless AS SELECT i AS id FROM generate_series(1, 500) i")
    monkeypatch.setenv("PGCDC_FAILPOINTS", "driver.staged=kill")
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(tmp_path))
    query = begin().load()
    query.read_some()
    wait_until(lambda: Lock.holder(query.state.capture_lock) is None, 20, "the capture dies")
    query.lose_snapshot()
    database.execute("DELETE FROM keyless")
    query.run()
    assert "new snapshot" not in query.log()
    ids = [int(event["payload"]["row"]["id"]) for event in query.events if event["operation"] == "SNAPSHOT"]
    assert sorted(ids) == list(range(1, 501))


@pytest.mark.parametrize(
    "what",
    [
        "TRUNCATE t",
        pytest.param("ALTER TABLE t ALTER id TYPE bigint", marks=pytest.mark.slow),
        pytest.param("ALTER TABLE t RENAME TO u", marks=pytest.mark.slow),
        "DROP TABLE t",
    ],
)
def test_a_table_that_is_changed_before_it_is_read(
    database: Database, begin: Callable[..., Initial], what: str
) -> None:
    fill(database, "t", 300)
    database.execute("CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)")
    query = begin().load()
    wait_until(lambda: query.status()["status"] == "reading", 20, "the plan")
    database.execute("UPDATE t SET v = 'seen' WHERE id = 1")
    database.execute(what)
    if "DROP" not in what:
        name = "u" if "RENAME" in what else "t"
        database.execute(f"INSERT INTO {name} VALUES (1000, 'new', '')")
        query.run()
        query.check_equal({f"public.{name}": ["id"], "public.other": ["id"]})
        assert "SNAPSHOT" in {event["operation"] for event in query.events if event["channel"] == f"pgcdc:{name}"}
    else:
        query.run()
        query.check_equal({"public.other": ["id"]})
        assert "table t was dropped" in query.log()


@pytest.mark.parametrize(
    "what",
    [
        "TRUNCATE t",
        pytest.param("ALTER TABLE t RENAME TO u; ALTER TABLE u RENAME COLUMN v TO w", marks=pytest.mark.slow),
    ],
)
def test_a_table_that_is_changed_before_it_is_planned(
    database: Database, begin: Callable[..., Initial], what: str
) -> None:
    fill(database, "t", 300)
    query = begin()
    source = Wanted(
        db=database.url, slot_name=query.options["slot"], all_tables=True, state_dir=str(query.state.path),
        snapshot_mode="initial",
    )  # fmt: skip
    prepare(source)
    database.execute(what)
    name = "u" if "RENAME" in what else "t"
    database.execute(f"INSERT INTO {name} VALUES (1000, 'new', '')")
    query.load().run()
    query.check_equal({f"public.{name}": ["id"]})
    assert [one["rows"] for one in query.status()["tables"]] == [301 if name == "u" else 1]


@pytest.mark.slow
def test_the_time_limit_gives_the_snapshot_up(database: Database, begin: Callable[..., Initial]) -> None:
    fill(database, "t", 300)
    query = begin(snapshot_hold_limit="1s").load()
    holders = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgcdc snapshot' AND datname = %s"
    wait_until(lambda: query.status()["status"] == "reading", 20, "the plan")
    log = query.state.path / "capture.log"
    wait_until(lambda: "in a new snapshot" in log.read_text(), 20, "the first one is given up")
    assert query.status()["hold_limit_seconds"] == 1
    query.run()
    query.check_equal(KEY)
    wait_until(lambda: database.query(holders, [database.name])[0][0] == 0, 10, "nothing is held")


@pytest.mark.slow
def test_a_snapshot_that_is_lost_again_and_again_is_an_error(database: Database, begin: Callable[..., Initial]) -> None:
    fill(database, "t", 300)
    query = begin(snapshot_hold_limit="1s").load()
    with pytest.raises(SourceError, match=r"3 snapshots were lost .* --snapshot-hold-limit"):
        wait_until(lambda: query.status()["status"] == "complete", 30, "it gives up")
    query.load()  # it can be tried again
    query.run()
    query.check_equal(KEY)


@pytest.mark.slow
def test_a_restart_of_the_server(tmp_path: Path) -> None:
    with EmbeddedPostgres.temporary(settings={"fsync": "off"}) as server:
        database = Database("postgres", server.url(), server)
        for table in "tuvw":
            fill(database, table, 4000)
        query = Initial(database, tmp_path, all_tables="true").load()
        try:
            query.step_until(5)
            server.kill()
            server.restart()
            wait_until(lambda: query.capture_status()["phase"] == "initial snapshot", 30, "the capture is back")
            database.execute("UPDATE w SET v = 'new' WHERE id = 1")
            query.run()
            statuses = {one["table"]: one["status"] for one in query.status()["tables"]}
            assert "moved" in statuses.values() and statuses["w"] == "complete" and requests(query)
            query.check_equal({"public.w": ["id"]})
        finally:
            query.end()


def test_a_full_disk_is_an_error_with_advice_and_staging_goes_on_afterwards(database: Database, tmp_path: Path) -> None:
    fill(database, "t", 3000)
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    with database.connect() as conn:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        name = str(conn.execute("SELECT pg_export_snapshot()").fetchone()[0])  # type: ignore[index]
        published = next(one for one in read_published(conn, ["p"]) if one.title == "t")
        order = StageOrder("1-1-0", name, replace(published, row_filter="id >= 10"), Chunk("public", "t"), tmp_path)
        reader = Reader(database.url, ["p"], "test")
        handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            found = reader.read(order)
            assert isinstance(found, SpoolError) and "Free space on the disk" in str(found)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert list(tmp_path.iterdir()) == []
        found = reader.read(order)
        assert isinstance(found, Staged) and found.rows == 2990 and (tmp_path / found.file).exists()
        reader.close()
