"""ALTER TABLE while changes are captured, on real servers: what is noticed, where, and what becomes of it. No Spark."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from capturing import Captured, is_schema, told
from databases import Database
from listening import wait_until
from streams import SETTINGS

from pgcdc.capture.control import ControlClient
from pgcdc.capture.process import CaptureProcess
from pgcdc.capture.server import CaptureGone
from pgcdc.cli.status import read_status
from pgcdc.core.errors import ConfigError, ConnectionLost
from pgcdc.core.relation import Column, Relation
from pgcdc.core.state import Lock
from pgcdc.event.shape import diff_shapes
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.postgres.database import connect
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, type_name
from pgcdc.source.postgres.setup import guard as capture_shapes
from pgcdc.source.postgres.setup.shapes import read_catalog

OLDER = [pytest.param(16, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)]


@pytest.fixture
def captured(database: Database, tmp_path: Path) -> Iterator[Captured]:
    one = Captured(database, tmp_path)
    yield one
    one.end()


@pytest.fixture(params=[18, *OLDER])
def captured_by(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Captured]:
    """On each version of the server."""
    if request.param == 18:
        yield request.getfixturevalue("captured")
        return
    try:
        find_binaries(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres.temporary(version=request.param, settings=SETTINGS) as server:
        one = Captured(Database("postgres", server.url(), server), tmp_path)
        yield one
        one.end()


# What is done to table t, which is told, and how.
ALTERATIONS: list[tuple[str, list[dict[str, Any]]]] = [
    ("ALTER TABLE t ADD note text", [{"type": "column_added", "column": "note", "new_type": "text"}]),
    (
        "ALTER TABLE t ADD mood mood, ADD n numeric(10,2)",
        [
            {"type": "column_added", "column": "mood", "new_type": "public.mood"},
            {"type": "column_added", "column": "n", "new_type": "numeric(10,2)"},
        ],
    ),
    ("ALTER TABLE t RENAME note TO remark", [{"type": "column_renamed", "from": "note", "to": "remark"}]),
    ("ALTER TABLE t RENAME n TO amount", [{"type": "column_renamed", "from": "n", "to": "amount"}]),
    (
        "ALTER TABLE t ALTER amount TYPE numeric(12,3)",
        [{"type": "column_type_changed", "column": "amount", "old_type": "numeric(10,2)", "new_type": "numeric(12,3)"}],
    ),
    (
        "ALTER TABLE t ALTER mood TYPE text",
        [{"type": "column_type_changed", "column": "mood", "old_type": "public.mood", "new_type": "text"}],
    ),
    (
        "ALTER TABLE t DROP mood, ADD mood text",
        [{"type": "column_replaced", "column": "mood", "old_type": "text", "new_type": "text"}],
    ),
    ("ALTER TABLE t DROP remark", [{"type": "column_removed", "column": "remark", "old_type": "text"}]),
    (
        "ALTER TABLE t REPLICA IDENTITY FULL",
        [{"type": "replica_identity_changed", "old": "default", "new": "full"}],
    ),
    (
        "ALTER TABLE t REPLICA IDENTITY DEFAULT",
        [{"type": "replica_identity_changed", "old": "full", "new": "default"}],
    ),
    (
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, region)",
        [{"type": "primary_key_changed", "old": ["id"], "new": ["id", "region"]}],
    ),
    ("ALTER TABLE t RENAME id TO nr", [{"type": "column_renamed", "from": "id", "to": "nr"}]),
    ("ALTER TABLE t RENAME TO u", [{"type": "table_renamed", "from": "public.t", "to": "public.u"}]),
    ("ALTER TABLE u SET SCHEMA s", [{"type": "table_renamed", "from": "public.u", "to": "s.u"}]),
    ("ALTER TABLE s.u SET SCHEMA public", [{"type": "table_renamed", "from": "s.u", "to": "public.u"}]),
    ("ALTER TABLE u RENAME TO t", [{"type": "table_renamed", "from": "public.u", "to": "public.t"}]),
    ("ALTER TABLE t RENAME nr TO id", [{"type": "column_renamed", "from": "nr", "to": "id"}]),
]


def test_each_kind_of_alter_table_is_told_directly_before_the_first_change_that_has_it(captured_by: Captured) -> None:
    captured = captured_by
    captured.execute(
        "CREATE SCHEMA s", "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE TABLE t (id int PRIMARY KEY, region int NOT NULL DEFAULT 1)",
    )  # fmt: skip
    captured.start()
    captured.execute("INSERT INTO t VALUES (0)")
    expected: list[Any] = []
    for number, (statement, changes) in enumerate(ALTERATIONS, 1):
        captured.execute(statement)
        moved = "s.u" if statement.endswith("SCHEMA s") else None
        table = moved or ("u" if captured.database.query("SELECT to_regclass('public.u')")[0][0] else "t")
        key = captured.database.query(
            f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum = 1"
        )
        captured.execute(f"INSERT INTO {table} ({key[0][0]}) VALUES ({number})")
        events = captured.events()  # so that the catalog is asked before the next statement
        assert is_schema(events[-2]), statement
        assert not is_schema(events[-1])
        expected.append(changes)
    assert captured.schema_changes() == expected
    assert [diff_shapes(change) for change in captured.history] == [[], *expected]
    assert all(change.details for change in captured.history)
    positions = [one["position"] for one in captured.events()]
    assert positions == sorted(set(positions))
    wait_until(
        lambda: read_status(captured.state.path)["schema_changes"] == len(ALTERATIONS), 5, "the status has the count"
    )


def test_alter_table_is_told_between_the_rows_of_its_transaction_and_not_if_it_is_rolled_back(
    captured: Captured,
) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")
    captured.start()
    captured.execute(
        "INSERT INTO t VALUES (1)", "INSERT INTO other VALUES (2)", "ALTER TABLE t ADD a text",
        "INSERT INTO other VALUES (3)", "INSERT INTO t VALUES (4)", "ALTER TABLE t DROP a", "ALTER TABLE t ADD b int",
        "INSERT INTO t VALUES (5)", "ALTER TABLE t DROP b", "INSERT INTO t VALUES (6)",
    )  # fmt: skip
    assert told(captured.events()) == [
        1, 2, 3, ["column_added"], 4, ["column_removed", "column_added"], 5, ["column_removed"], 6,
    ]  # fmt: skip
    of_t = [change for change in captured.history if change.after.name == "t"]
    assert [bool(change.details) for change in of_t] == [True, False, False, True], "the catalog knows only the last"
    with captured.database.connect(autocommit=False) as conn:
        conn.execute("INSERT INTO t VALUES (7)")
        with conn.transaction(force_rollback=True):
            conn.execute("ALTER TABLE t ADD a text")
            conn.execute("INSERT INTO t VALUES (8, 'x')")
        conn.execute("INSERT INTO t VALUES (9)")
    captured.execute("ALTER TABLE t ADD b text", "ALTER TABLE t DROP b")
    captured.execute("INSERT INTO t VALUES (10)")
    assert told(captured.events())[-3:] == [7, 9, 10], "nothing for what was rolled back, or had no rows"


def test_alter_table_in_a_streamed_transaction(captured_by: Captured) -> None:
    captured = captured_by
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    captured.execute(f"ALTER DATABASE {captured.database.name} SET logical_decoding_work_mem = '64kB'")
    captured.start()
    rows = "INSERT INTO t (id, v) SELECT g, repeat('x', 100) FROM generate_series({}, {}) g"
    with captured.database.connect(autocommit=False) as conn:
        conn.execute(rows.format(1, 3000).encode())
        conn.execute("ALTER TABLE t ADD a text")
        conn.execute(rows.format(3001, 6000).encode())
        with conn.transaction(force_rollback=True):
            conn.execute("ALTER TABLE t ADD b text")
            conn.execute(rows.format(6001, 9000).encode())
        conn.execute(rows.format(6001, 7000).encode())
    assert told(captured.events()) == [*range(1, 3001), ["column_added"], *range(3001, 7001)]
    slot = f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{captured.slot}'"
    wait_until(lambda: bool(captured.database.query(slot)[0][0]), 20, "the server says that it was streamed")


def test_alter_table_while_the_capture_is_down(captured: Captured) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, a text, z text)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)")
    assert told(captured.events()) == [1]
    captured.end()
    captured.execute("INSERT INTO t VALUES (2)")
    captured.execute("ALTER TABLE t RENAME a TO b")
    captured.execute("INSERT INTO t VALUES (3)")
    captured.execute("ALTER TABLE t ADD c text")
    captured.execute("INSERT INTO t VALUES (4)")
    captured.begin()
    # When the second shape was met, the table had one column more. The others were still the same, with their numbers.
    assert told(captured.events()) == [1, 2, ["column_renamed"], 3, ["column_added"], 4]
    captured.end()
    captured.execute("ALTER TABLE t RENAME b TO x")
    captured.execute("INSERT INTO t VALUES (5)")
    captured.execute("ALTER TABLE t RENAME x TO y")
    captured.begin()
    assert told(captured.events())[-2:] == [["column_renamed"], 5], "the number of x is proven: there is no other"
    assert (captured.history[-1].details or {})["is_proven"]


@pytest.mark.parametrize("point", ["shapes.before_append", "shapes.after_append"])
def test_kill_9_around_the_append_of_the_history_changes_nothing(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)")
    assert told(captured.events()) == [1]
    captured.end()
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("PGCDC_FAILPOINTS", f"{point}=kill")
    monkeypatch.setenv("PGCDC_FAILPOINT_ONCE", str(marks))
    captured.execute("INSERT INTO t VALUES (2)", "ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (3)")
    captured.execute("ALTER TABLE t ADD c text", "INSERT INTO t VALUES (4)")
    with pytest.raises((CaptureGone, ConnectionLost)):
        captured.begin()
        captured.events()
    assert [path.name for path in marks.iterdir()] == [f"{point}.hit"]
    wait_until(lambda: Lock.holder(captured.state.capture_lock) is None, 10, "it is dead")
    before = captured.history
    assert len(before) == (1 if point == "shapes.before_append" else 3)
    captured.execute("ALTER TABLE t DROP c")  # what the catalog says now is not what it said then
    captured.begin()
    events = captured.events()
    assert captured.history[: len(before)] == before, "what was written stands"
    assert told(events) == [1, 2, ["column_renamed"], 3, ["column_added"], 4]
    assert [bool(change.details) for change in captured.history] == [True, True, point == "shapes.after_append"]


def test_history_is_the_same_when_the_spool_is_lost_and_read_again(captured: Captured) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)", "ALTER TABLE t ADD a text", "INSERT INTO t VALUES (2)")
    captured.execute("ALTER TABLE t ADD b text", "INSERT INTO t VALUES (3)")
    events, history = captured.events(), captured.history
    captured.end(signal.SIGKILL)
    subprocess.run(["rm", "-r", str(captured.state.spool)], check=True)
    captured.execute("ALTER TABLE t RENAME b TO c")
    captured.begin()
    assert captured.events() == events
    assert captured.history == history


def test_a_connection_that_is_lost_while_the_catalog_is_asked_loses_nothing(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def ask(sql: Any, shapes: list[Relation], publications: Any) -> Any:
        asked.append([shape.name for shape in shapes])
        if len(asked) == 1:
            captured.database.execute("SELECT pg_terminate_backend(%s, 5000)", [sql.info.backend_pid])
        return read_catalog(sql, shapes, publications)

    monkeypatch.setattr(capture_shapes, "read_catalog", ask)
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    captured.prepare()
    process = CaptureProcess(captured.spec, captured.state)  # in this process, so that it can be told when to fail
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(process.run, lambda: None)
        try:
            captured.join(ControlClient(process.address))
            captured.execute("INSERT INTO t VALUES (1)")
            captured.execute("INSERT INTO t VALUES (2)")
            assert told(captured.events()) == [1, 2]
        finally:
            process.stop()
            running.result(10)
            process.close()
    assert asked == [["t"], ["t"]]
    assert [bool(change.details) for change in captured.history] == [True]


# --- the catalog


def test_what_the_catalog_says_of_a_shape(database: Database) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('good'); CREATE SCHEMA other; CREATE DOMAIN other.\"Pos\" AS int")
    database.execute(
        'CREATE TABLE t (gone int, id int, region text, mood mood[][], p other."Pos" NOT NULL, extra text, '
        "PRIMARY KEY (region, id) INCLUDE (extra))"
    )
    database.execute("ALTER TABLE t DROP gone")
    with connect(database.url) as conn:
        query = (
            "SELECT attname, atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 1"
        )
        columns = {name: (oid, typmod) for name, oid, typmod in conn.execute(query.encode()).fetchall()}
        oid = int(conn.execute("SELECT 't'::regclass::oid::int8").fetchall()[0][0])

        def shape(*names: str, keys: tuple[str, ...] = ("id", "region")) -> Relation:
            made = tuple(Column(name, *columns[name], name in keys) for name in names)
            return Relation(oid, "public", "t", "d", made)

        def describe(one: Relation) -> dict[str, Any] | None:
            return read_catalog(conn, [one], ()).describe(one)

        published = shape("id", "region", "mood", "p")
        found = describe(published)
        assert found is not None
        assert [one.pop("since").isdigit() for one in found["columns"]] == [True] * 4
        assert found["columns"] == [
            {"name": "id", "attnum": 2, "type": "integer", "ndims": 0, "not_null": True},
            {"name": "region", "attnum": 3, "type": "text", "ndims": 0, "not_null": True},
            {"name": "mood", "attnum": 4, "type": "public.mood[]", "ndims": 2, "not_null": False},
            {"name": "p", "attnum": 5, "type": 'other."Pos"', "ndims": 0, "not_null": True},
        ]
        assert found["primary_key"] == ["region", "id"]
        assert TypeCatalog.from_json(json.loads(json.dumps(found["types"]))).name(columns["p"][0]) == 'other."Pos"'
        plain = shape("id", "region")
        assert (describe(plain) or {"types": 0})["types"] is None
        columns["lost"], columns["mood"] = (25, -1), (25, -1)
        for moved_on in (shape("id", "region", "lost"), shape("id", "mood"), shape("id", "p", keys=("p",))):
            assert describe(moved_on) is None
        assert describe(shape("region", "id")) is None, "another order: one of them is another column"
        assert not read_catalog(conn, [], ()).entries


def test_names_of_types_are_those_of_the_server(database: Database) -> None:
    """Every built-in type, with every modifier that it takes."""
    with database.connect() as conn:
        conn.execute("SET search_path = ''")
        known = list(BUILT_IN.types)
        query = "SELECT oid::int8, format_type(oid, -1) FROM pg_type WHERE oid = ANY (%s::int8[]::oid[])"
        server = dict(conn.execute(query, [known]).fetchall())
        assert {oid: type_name(oid) for oid in server} == server
        modified = [
            "numeric(10,2)", "numeric(5)", "numeric(1000,1000)", "numeric(3,-2)[]", "varchar(20)", "char(3)",
            "char(3)[]", "bit(7)", "varbit(9)", "time(3)", "timetz(0)", "timestamp(6)", "timestamptz(2)[]",
            "interval(3)", "interval year", "interval year to month", "interval day to second(2)",
            "interval second(0)", "interval hour to minute", "interval day", "interval minute to second",
            "interval month", "interval day to hour",
        ]  # fmt: skip
        conn.execute(f"CREATE TABLE public.t ({', '.join(f'c{n} {one}' for n, one in enumerate(modified))})".encode())
        columns = conn.execute(
            "SELECT atttypid::int8, atttypmod, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = 'public.t'::regclass AND attnum > 0"
        ).fetchall()
    assert len(columns) == len(modified)
    for oid, typmod, text in columns:
        assert type_name(oid, typmod) == text
