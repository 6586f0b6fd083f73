"""What becomes of a publication while a pipeline uses it: our own changes are no gap, those of others are. No Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from preparing import Wanted, follow_tables, prepare

from pgcdc import adapters, sources, transform
from pgcdc.capture.control import ControlClient, ensure_capture
from pgcdc.config import load_config
from pgcdc.core.errors import GapError, SourceError, StateError
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import connect
from pgcdc.run.pipeline import Pipeline
from pgcdc.source.postgres import slot_stream as process
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails, check_unchanged, read_fingerprint


def options(database: Database, folder: Path, **more: Any) -> Wanted:
    state = {"db": database.url, "slot_name": f"s_{database.name}", "state_dir": str(folder / "state")}
    return Wanted(**{**state, **more})


def members(database: Database, name: str) -> list[str]:
    return [
        row[0]
        for row in database.query(
            "SELECT tablename::text FROM pg_publication_tables WHERE pubname = %s ORDER BY 1", [name]
        )
    ]


def identity(folder: Path) -> Identity:
    found = StateDir(folder / "state").identity()
    assert found is not None
    return found


def details(folder: Path) -> SlotDetails:
    return SlotDetails.of(identity(folder))


@pytest.fixture(params=[18, 16])
def theirs(request: pytest.FixtureRequest, database: Database) -> Iterator[Database]:
    """A database with tables a and b and the publications `theirs` and `whole`, on two versions of the server."""
    if request.param == 18:
        yield prepare_theirs(database)
        return
    with EmbeddedPostgres.temporary(version=request.param, settings={"fsync": "off"}) as server:
        yield prepare_theirs(Database("postgres", server.url(), server))


def prepare_theirs(database: Database) -> Database:
    database.execute("CREATE TABLE a (id int PRIMARY KEY, v text)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY, v text)")
    database.execute("CREATE SCHEMA s")
    database.execute("CREATE TABLE s.c (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION theirs FOR TABLE a WHERE (id > 0), b (id, v)")
    database.execute("CREATE PUBLICATION whole FOR TABLES IN SCHEMA s")
    return database


NARROWED = {
    "a table is taken out": "ALTER PUBLICATION theirs DROP TABLE a",
    "a table is taken out and put back": "ALTER PUBLICATION theirs DROP TABLE a; ALTER PUBLICATION theirs ADD TABLE a",
    "another row filter": "ALTER PUBLICATION theirs SET TABLE a WHERE (id > 1), b (id, v)",
    "a schema is taken out": "ALTER PUBLICATION whole DROP TABLES IN SCHEMA s",
    "columns are left out": "ALTER PUBLICATION theirs SET TABLE a WHERE (id > 0), b (id)",
}


def test_what_somebody_takes_out_of_a_publication_is_a_gap(theirs: Database, tmp_path: Path) -> None:
    with connect(theirs.url) as conn:
        known = read_fingerprint(conn, ["theirs", "whole"])
        for what, change in NARROWED.items():
            with conn.transaction(force_rollback=True):
                for statement in change.split(";"):
                    conn.execute(statement.encode())
                with pytest.raises(GapError) as caught:
                    check_unchanged(conn, known)
                assert "publication theirs" in caught.value.message or "schema s" in caught.value.message, what
                assert "--accept-publication" in caught.value.advice
        with conn.transaction(force_rollback=True):  # the same again
            conn.execute("ALTER PUBLICATION theirs SET TABLE a WHERE (id > 0), b (id, v)")
            assert check_unchanged(conn, known) == known
        with conn.transaction(force_rollback=True):  # a table or schema that does not exist any more has no changes
            conn.execute("DROP TABLE a; DROP SCHEMA s CASCADE")
            assert check_unchanged(conn, known) != known
        with conn.transaction(force_rollback=True):  # names do not matter
            conn.execute("ALTER TABLE a RENAME TO aa; ALTER TABLE aa RENAME id TO key; ALTER SCHEMA s RENAME TO ss")
            found = check_unchanged(conn, known)
            assert [{**item, "names": {}} for item in found] == [{**item, "names": {}} for item in known]


REPLACED = {
    "dropped": "CREATE TABLE new (id int PRIMARY KEY); DROP TABLE a; ALTER TABLE new RENAME TO a",
    "renamed": "ALTER TABLE a RENAME TO old; CREATE TABLE a (id int PRIMARY KEY)",
}


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("ours", [True, False])
def test_another_table_in_the_place_of_a_captured_one_is_a_gap(
    database: Database, tmp_path: Path, ours: bool, how: str
) -> None:
    prepare_theirs(database)
    source = options(database, tmp_path, **({"tables": ("a",)} if ours else {"publication": "theirs"}))
    name = prepare(source).names[0]
    database.execute(REPLACED[how])
    with pytest.raises(GapError, match=f"another table has the name a now and is not in publication {name}") as caught:
        prepare(source)
    assert "--accept-publication" in caught.value.advice
    if not ours:
        with database.connect(autocommit=False) as conn:  # whoever puts it in has no gap
            conn.execute("ALTER PUBLICATION theirs ADD TABLE a")
            check_unchanged(conn, details(tmp_path).publications)
            conn.rollback()
    prepare(source.but(accept_publication=True))
    assert ("a" in members(database, name)) is ours
    prepare(source)


def test_a_running_capture_stops_when_a_dropped_table_comes_back_and_is_not_published(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    source = options(database, tmp_path, tables=("a", "b"))
    client = ensure_capture(prepare(source).spec, is_restart=False)
    try:
        database.execute("DROP TABLE a")
        while len(details(tmp_path).publications[0]["tables"]) == 2:  # it has looked, and goes on
            client.wait(process.CHECK_INTERVAL_S)
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
        deadline = time.monotonic() + 4 * process.CHECK_INTERVAL_S
        with pytest.raises(GapError, match="another table has the name a now"):
            while time.monotonic() < deadline:
                client.wait(process.CHECK_INTERVAL_S)
    finally:
        client.close()


def test_a_dropped_table_that_is_not_wanted_any_more_may_come_back(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    source = options(database, tmp_path, tables=("a", "b"))
    prepare(source)
    database.execute("DROP TABLE a")
    only = source.but(tables=("b",))
    prepare(only)
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    prepare(only)


def test_a_new_table_in_the_place_of_another_is_followed_with_all_tables(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    source = options(database, tmp_path, all_tables=True)
    name = prepare(source).names[0]
    for look in (follow_tables, prepare):
        database.execute("DROP TABLE a")
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
        look(source)
        assert members(database, name) == ["a"]


def test_a_table_that_was_added_is_missed_when_it_is_taken_out_again(database: Database, tmp_path: Path) -> None:
    prepare_theirs(database)
    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    source = options(database, tmp_path, publication="theirs")
    prepare(source)
    database.execute("ALTER PUBLICATION theirs ADD TABLE later")
    prepare(source)
    database.execute("ALTER PUBLICATION theirs DROP TABLE later")
    with pytest.raises(GapError, match="table later was removed"):
        prepare(source)
    prepare(source.but(accept_publication=True))
    prepare(source)


def test_a_running_capture_follows_what_is_added_and_stops_when_it_is_taken_out(
    database: Database, tmp_path: Path
) -> None:
    prepare_theirs(database)
    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    spec = prepare(options(database, tmp_path, publication="theirs")).spec
    database.execute("ALTER PUBLICATION theirs ADD TABLE later")
    client = ensure_capture(spec, is_restart=False)  # looks when it connects
    try:
        assert len(details(tmp_path).publications[0]["tables"]) == 3
        database.execute("ALTER PUBLICATION theirs DROP TABLE later")
        with pytest.raises(GapError, match="table later was removed"):
            while True:
                client.wait(process.CHECK_INTERVAL_S)
    finally:
        client.close()


def test_our_own_changes_are_no_gap_and_those_of_others_to_ours_are(database: Database, tmp_path: Path) -> None:
    for table in ("a", "b"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    database.execute("CREATE TABLE keyless (id int)")
    both = options(database, tmp_path, tables=("a", "b", "keyless"))
    name = prepare(both).names[0]
    only = both.but(tables=("a", "keyless"))
    assert prepare(only).left_out == ("b",)
    prepare(only)
    database.execute("ALTER TABLE keyless ADD PRIMARY KEY (id)")
    prepare(only)
    assert members(database, name) == ["a", "keyless"]
    assert details(tmp_path).planned is None
    database.execute(f"ALTER PUBLICATION {name} DROP TABLE a")
    with pytest.raises(GapError, match="table a was removed"):
        prepare(only)
    assert members(database, name) == ["keyless"], "it is not repaired silently"
    prepare(only.but(accept_publication=True))
    assert members(database, name) == ["a", "keyless"]
    prepare(only)


def test_following_tables_does_not_hide_what_somebody_took_out(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    source = options(database, tmp_path, all_tables=True)
    name = prepare(source).names[0]
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    assert follow_tables(source)[0].tables == ("a", "b")
    database.execute("ALTER TABLE b DROP CONSTRAINT b_pkey")
    assert follow_tables(source)[0].tables == ("a",)
    client = ensure_capture(prepare(source).spec, is_restart=False)
    client.stop()
    client.close()
    database.execute(f'ALTER PUBLICATION "{name}" DROP TABLE a')
    with pytest.raises(GapError, match="table a was removed"):
        follow_tables(source)
    with pytest.raises(GapError, match="table a was removed"):
        follow_tables(source)


def test_a_start_that_is_refused_for_a_column_changes_no_publication(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY, price money)")
    source = options(database, tmp_path, tables=("a",))
    name = prepare(source).names[0]
    known = identity(tmp_path)
    with pytest.raises(SourceError, match="column price of table b cannot travel in binary form"):
        prepare(source.but(tables=("b",), binary=True))
    assert members(database, name) == ["a"]
    assert identity(tmp_path) == known
    prepare(source)
    assert identity(tmp_path) == known


@pytest.mark.parametrize("ours", [True, False])
def test_a_start_that_is_refused_for_a_column_accepts_no_change(database: Database, tmp_path: Path, ours: bool) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY, price money)")
    database.execute("CREATE PUBLICATION theirs FOR TABLE a, b")
    more: dict[str, Any] = {"tables": ("a", "b")} if ours else {"publication": "theirs"}
    source = options(database, tmp_path, **more)
    name = prepare(source).names[0]
    database.execute(f'ALTER PUBLICATION "{name}" DROP TABLE a')
    with pytest.raises(SourceError, match="column price of table b cannot travel in binary form"):
        prepare(source.but(accept_publication=True, binary=True))
    with pytest.raises(GapError, match="table a was removed"):
        prepare(source)


CRASH = """
import json, sys
from preparing import Wanted, prepare
prepare(Wanted(**json.loads(sys.argv[1]), state_dir=sys.argv[2]))
"""


def crash(source: Wanted) -> None:
    """Kill -9 of a start that has altered the publications, and not yet written down what they are now."""
    options = source.part(PostgresOptions).model_dump_json()
    command = [sys.executable, "-c", CRASH, options, str(source.state_dir)]
    run = subprocess.run(
        command,
        env={**os.environ, "PGCDC_FAILPOINTS": "prepare.altered=kill", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    assert run.returncode == -9


def test_a_crash_while_we_change_a_publication_neither_looks_like_a_gap_nor_hides_one(
    database: Database, tmp_path: Path
) -> None:
    for table in ("a", "b", "c"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    source = options(database, tmp_path, tables=("a", "b"))
    name = prepare(source).names[0]
    narrower = source.but(tables=("a",))
    crash(narrower)
    assert members(database, name) == ["a"] and len(details(tmp_path).publications[0]["tables"]) == 2
    database.execute(f"ALTER PUBLICATION {name} ADD TABLE c")
    prepare(narrower)
    prepare(source)
    crash(narrower)
    database.execute(f"ALTER PUBLICATION {name} DROP TABLE a")
    with pytest.raises(GapError, match="table a was removed"):
        prepare(narrower)


def test_the_capture_looks_again_later_while_somebody_changes_the_publications(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    spec = prepare(options(database, tmp_path, tables=("a",))).spec
    lock = Lock(StateDir(tmp_path / "state").identity_lock)
    assert lock.acquire() is not None
    client: ControlClient | None = None
    try:
        client = ensure_capture(spec, is_restart=False)
        assert client.status()["phase"] == "streaming"
        client.stop()
    finally:
        lock.release()
        if client is not None:
            client.close()


def test_two_pipelines_with_all_tables_do_not_share_a_publication(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    first = prepare(options(database, tmp_path / "one", all_tables=True))
    second = prepare(options(database, tmp_path / "two", all_tables=True, slot_name=f"{first.identity.stream}_2"))
    assert first.names == (first.identity.stream, f"{first.identity.stream}_inserts")
    assert second.names == (second.identity.stream, f"{second.identity.stream}_inserts")


@pytest.mark.parametrize("more", [{"all_tables": True}, {}])
def test_a_publication_of_another_slot_is_refused_and_nothing_is_left_behind(
    database: Database, tmp_path: Path, more: dict[str, Any]
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    prepare(options(database, tmp_path, all_tables=True, publication="shared"))
    other = options(database, tmp_path / "other", slot_name=f"s_{database.name}_2", publication="shared", **more)
    with pytest.raises(SourceError, match="belongs to the pipeline of slot"):
        prepare(other)
    assert not (tmp_path / "other").exists()
    assert database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [other.slot_name]) == []


def test_a_pipeline_stays_with_the_publications_it_has(database: Database, tmp_path: Path) -> None:
    """Older versions named them `all` with --all-tables."""
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    prepare(options(database, tmp_path, all_tables=True, publication="all"))
    assert prepare(options(database, tmp_path, all_tables=True)).names == ("all", "all_inserts")
    assert prepare(options(database, tmp_path, tables=("a",))).names == ("all", "all_inserts")
    with pytest.raises(GapError, match="belongs to publication all, not to other"):
        prepare(options(database, tmp_path, all_tables=True, publication="other"))
    assert database.query("SELECT 1 FROM pg_publication WHERE pubname = 'other'") == []


def prepare_together(*sources: Wanted) -> list[Identity | Exception]:
    """Prepare all of these at the same moment; what each of them gave or raised."""
    barrier = threading.Barrier(len(sources))

    def run(source: Wanted) -> Identity | Exception:
        barrier.wait()
        try:
            return prepare(source).identity
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(run, sources))


def test_first_starts_that_race_in_one_new_directory_agree(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    results = prepare_together(*[options(database, tmp_path / "new", all_tables=True)] * 4)
    assert len({str(result) for result in results}) == 1, results
    assert results[0] == identity(tmp_path / "new")


def test_a_first_start_that_is_refused_does_not_remove_what_another_one_made(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    for number in range(5):
        good = options(database, tmp_path / str(number), all_tables=True, slot_name=f"s_{database.name}_{number}")
        bad = good.but(all_tables=False, tables=("nothere",))
        results = prepare_together(bad, good, bad)
        assert results[1] == identity(tmp_path / str(number)), results
        assert all(isinstance(result, SourceError) for result in (results[0], results[2])), results


def test_a_run_is_locked_before_it_prepares_and_a_refused_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        {"all_tables": True, "state_dir": tmp_path / "deep" / "state"}, {"PGCDC_DB": "postgres://h/x"}, None
    )

    def refuse(*_: Any, **__: Any) -> None:
        with pytest.raises(StateError, match=f"in use by process {os.getpid()}"):
            Pipeline(config).run()
        assert not (config.state_dir / "run.json").exists(), "the status is of who has the lock"
        raise SourceError("refused")

    monkeypatch.setattr("pgcdc.source.postgres.setup.prepare.prepare", refuse)
    with pytest.raises(SourceError, match="refused"):
        Pipeline(config).run()
    assert list(tmp_path.iterdir()) == []


def test_columns_of_transforms_that_no_table_has_are_told_at_the_start(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE people (id int PRIMARY KEY, email text)")
    source = sources.postgres(
        database.url, all_tables=True, slot_name=f"s_{database.name}", state_dir=tmp_path / "state"
    )
    said: list[str] = []
    pipeline = Pipeline(
        source, [adapters.noop()], [transform.mask("Email"), transform.drop_columns("id")], say=said.append
    )

    def end() -> None:
        raise SourceError("far enough")

    monkeypatch.setattr(pipeline, "_run", end)
    with pytest.raises(SourceError, match="far enough"):
        pipeline.run()
    assert said[-1] == "warning: mask: no captured table has a column Email; did you mean email?"
    assert sum(one.startswith("warning") for one in said) == 1
