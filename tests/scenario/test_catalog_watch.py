"""What the catalog says and no row tells, on real servers: noticed, recorded once, at a place in the stream behind it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from capturing import Captured, told
from databases import Database
from listening import wait_until
from streams import SETTINGS

from pgcdc.core.errors import ConfigError
from pgcdc.core.relation import Column, Relation, ShapeChange
from pgcdc.event.shape import diff_shapes
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.postgres.database import connect
from pgcdc.source.postgres.setup.shapes import read_catalog


@pytest.fixture
def captured(database: Database, tmp_path: Path) -> Iterator[Captured]:
    one = Captured(database, tmp_path)
    yield one
    one.end()


def noticed(captured: Captured, count: int) -> list[ShapeChange]:
    """The history, once it has so many records. Somebody reads the stream."""
    wait_until(lambda: bool(captured.events()) and len(captured.history) >= count, 20, f"there are {count} records")
    assert len(captured.history) == count
    return captured.history


def kinds(change: ShapeChange) -> list[str]:
    return [one["type"] for one in diff_shapes(change)]


# What is done to table t (id, a, u), with no change of a row behind it, and what is told.
ALONE: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "renamed": ("ALTER TABLE t RENAME TO t2", [{"type": "table_renamed", "from": "public.t", "to": "public.t2"}]),
    "moved": ("ALTER TABLE t SET SCHEMA s", [{"type": "table_renamed", "from": "public.t", "to": "s.t"}]),
    "schema renamed": (
        "ALTER TABLE t SET SCHEMA s; ALTER SCHEMA s RENAME TO s2",
        [{"type": "table_renamed", "from": "public.t", "to": "s2.t"}],
    ),
    "added": ("ALTER TABLE t ADD c int", [{"type": "column_added", "column": "c", "new_type": "integer"}]),
    "added with a default": (
        "ALTER TABLE t ADD c text NOT NULL DEFAULT 'a\"{,}'",
        [{"type": "column_added", "column": "c", "new_type": "text", "default": 'a"{,}'}],
    ),
    "dropped": ("ALTER TABLE t DROP a", [{"type": "column_removed", "column": "a", "old_type": "text"}]),
    "column renamed": ("ALTER TABLE t RENAME a TO x", [{"type": "column_renamed", "from": "a", "to": "x"}]),
    "retyped": (
        "ALTER TABLE t ALTER a TYPE varchar(9)",
        [{"type": "column_type_changed", "column": "a", "old_type": "text", "new_type": "character varying(9)"}],
    ),
    "replaced": (
        "ALTER TABLE t DROP u; ALTER TABLE t ADD u uuid",
        [{"type": "column_replaced", "column": "u", "old_type": "uuid", "new_type": "uuid"}],
    ),
    "key dropped": (
        "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t DROP CONSTRAINT t_pkey",
        [
            {"type": "replica_identity_changed", "old": "default", "new": "full"},
            {"type": "primary_key_changed", "old": ["id"], "new": []},
        ],
    ),
    "key changed": (
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, u)",
        [{"type": "primary_key_changed", "old": ["id"], "new": ["id", "u"]}],
    ),
    "enum label": ("ALTER TYPE mood ADD VALUE 'bad'", [{"type": "types_changed", "types": ["public.mood"]}]),
}


@pytest.mark.parametrize(("statement", "expected"), ALONE.values(), ids=ALONE.keys())
def test_what_is_altered_is_noticed_though_no_row_follows(
    captured: Captured, statement: str, expected: list[dict[str, Any]]
) -> None:
    captured.execute(
        "CREATE SCHEMA s", "CREATE TYPE mood AS ENUM ('good')",
        "CREATE TABLE t (id int PRIMARY KEY, a text, m mood, u uuid NOT NULL DEFAULT gen_random_uuid())",
    )  # fmt: skip
    captured.start()
    captured.execute("INSERT INTO t VALUES (1, 'a')")
    assert told(captured.events()) == [1]
    captured.execute(*statement.split("; "))
    _, change = noticed(captured, 2)
    assert diff_shapes(change) == expected
    assert change.position.is_snapshot
    wait_until(lambda: len(captured.events()) > 1, 20, "the mark is visible")
    events = captured.events()
    assert told(events) == [1, [one["type"] for one in expected]], "the mark itself is no event"
    assert captured.events(schema_events="false") == events[:1]


TREE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
)
FULL = "CREATE TABLE t3 (id int PRIMARY KEY, v text); INSERT INTO t3 VALUES (21, 'x'); "
PARTITIONS: dict[str, tuple[str, tuple[int, int, int, int]]] = {  # added, removed, rewritten, attached
    "created": ("CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (20) TO (30)", (1, 0, 0, 0)),
    "attached": (FULL + "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)", (1, 0, 0, 1)),
    "attached in one statement": (
        f"DO $$ BEGIN {FULL}ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)@END $$", (1, 0, 0, 1),
    ),
    "attached empty": (
        "CREATE TABLE t3 (id int PRIMARY KEY, v text); ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)",
        (1, 0, 0, 0),
    ),
    "attached with its own partitions": (
        "CREATE TABLE t3 (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); "
        "CREATE TABLE t31 PARTITION OF t3 FOR VALUES FROM (20) TO (30); INSERT INTO t3 VALUES (21, 'x'); "
        "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)",
        (1, 0, 0, 1),
    ),
    "detached": ("ALTER TABLE t DETACH PARTITION t2", (0, 1, 0, 0)),
    "dropped": ("DROP TABLE t2", (0, 1, 0, 0)),
    "truncated": ("TRUNCATE t2", (0, 0, 1, 0)),
    "detached and attached": (
        "ALTER TABLE t DETACH PARTITION t2; ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
        (0, 0, 1, 0),
    ),
}  # fmt: skip


def test_a_partition_came_with_rows_also_after_a_drop_that_was_rolled_back(database: Database) -> None:
    """DDL writes the number of its command into the rows of the catalog, and that stays when it is rolled back."""
    with database.connect() as conn:
        for statement in TREE:
            conn.execute(statement)
        with conn.transaction():
            for statement in (FULL + "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)").split("; "):
                conn.execute(statement)
        with conn.transaction(force_rollback=True):
            conn.execute("DROP TABLE t3")
        ((oid, leaf),) = conn.execute("SELECT 't'::regclass::oid::int8, 't3'::regclass::oid::int8").fetchall()
        look = read_catalog(conn, [Relation(oid, "public", "t", "d", ())], [])
    assert look.entries[oid].facts["attached"] == [str(leaf)]


def split(statements: str) -> list[str]:
    return [one.replace("@", "; ") for one in statements.split("; ")] if "DO $$" not in statements else [
        statements.replace("@", "; ")
    ]  # fmt: skip


def check_partitions(captured: Captured, statements: str, expected: tuple[int, int, int, int]) -> None:
    captured.execute(*TREE)
    captured.start()
    captured.execute("INSERT INTO t VALUES (1), (11)")
    assert [one["channel"] for one in captured.events()] == ["pgcdc:t", "pgcdc:t"]
    captured.execute(*split(statements))
    _, change = noticed(captured, 2)
    (found,) = diff_shapes(change)
    assert found["type"] == "partitions_changed"
    assert tuple(len(found[name]) for name in ("added", "removed", "rewritten", "attached")) == expected
    assert change.before == change.after
    captured.execute("INSERT INTO t VALUES (2)")
    captured.events()
    assert len(captured.history) == 2


@pytest.mark.parametrize(("statements", "expected"), PARTITIONS.values(), ids=PARTITIONS.keys())
def test_partitions_that_come_go_or_are_rewritten_are_noticed(
    captured: Captured, statements: str, expected: tuple[int, int, int, int]
) -> None:
    check_partitions(captured, statements, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("statements", "expected"), PARTITIONS.values(), ids=PARTITIONS.keys())
def test_partitions_on_an_older_server(tmp_path: Path, statements: str, expected: tuple[int, int, int, int]) -> None:
    try:
        find_binaries(15)
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres.temporary(version=15, settings=SETTINGS) as server:
        captured = Captured(Database("postgres", server.url(), server), tmp_path)
        check_partitions(captured, statements, expected)
        captured.end()


def test_what_changes_no_row_and_no_shape_is_no_change(captured: Captured) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, a text)", "CREATE TABLE other (id int PRIMARY KEY)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)", "INSERT INTO other VALUES (2)")
    captured.events()
    with captured.database.connect() as conn:
        for statement in (
            "VACUUM FULL t", "ANALYZE t", "CREATE INDEX ON t (a)", "ALTER TABLE t ADD b text",
            "ALTER TABLE t DROP b",
        ):  # fmt: skip
            conn.execute(statement.encode())
    captured.execute("ALTER TABLE other ADD b text")  # what is noticed after it
    wait_until(
        lambda: captured.history[-1].after.name == "other" and len(captured.history) > 2, 20, "the other is noticed"
    )
    of_t = [kinds(change) for change in captured.history if change.after.name == "t"]
    assert of_t in ([[]], [[], ["column_added"], ["column_removed"]]), "unless the look fell between the two"


def test_what_was_altered_while_the_capture_was_down_is_noticed_once(captured: Captured) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)")
    captured.events()
    captured.end(signal.SIGKILL)
    captured.execute("ALTER TABLE t RENAME a TO b")
    captured.begin()
    history = noticed(captured, 2)
    wait_until(lambda: told(captured.events()) == [1, ["column_renamed"]], 20, "the mark is visible")
    events = captured.events()
    captured.end(signal.SIGKILL)
    subprocess.run(["rm", "-r", str(captured.state.spool)], check=True)
    captured.execute("ALTER TABLE t ADD c int")
    captured.begin()
    noticed(captured, 3)
    assert captured.history[:2] == history
    assert captured.events()[:2] == events, "a mark stands at the same position in every replay"


def test_rows_that_tell_it_first_leave_nothing_for_the_mark(captured: Captured) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)")
    captured.events()
    captured.end()
    captured.execute("ALTER TABLE t RENAME a TO b")
    captured.execute("INSERT INTO t SELECT g FROM generate_series(2, 2000) g")
    captured.begin()
    captured.execute("CREATE TABLE other (id int PRIMARY KEY)")
    assert [one for one in told(captured.events()) if isinstance(one, list)] == [["column_renamed"]]
    assert not captured.history[-1].position.is_snapshot
    assert not (captured.state.snapshot / "releases.jsonl").exists(), "no mark was made"


def test_a_mark_is_nothing_to_the_toast_cache(database: Database, tmp_path: Path) -> None:
    captured = Captured(database, tmp_path, toast="cache")
    try:
        captured.execute("CREATE TABLE t (id int PRIMARY KEY, v int, long text)")
        captured.execute("ALTER TABLE t ALTER long SET STORAGE EXTERNAL")
        captured.start()
        captured.execute("INSERT INTO t VALUES (1, 1, repeat('x', 9000))")
        captured.events()
        captured.execute("ALTER TABLE t RENAME v TO w")
        noticed(captured, 2)
        for statement in ("SET w = 2", "SET w = 3, long = repeat('y', 9000)", "SET w = 4"):
            captured.execute(f"UPDATE t {statement}")
            last = captured.events()[-1]["payload"]["row"]
        assert last == {"id": "1", "w": "4", "long": "y" * 9000}
    finally:
        captured.end()


def test_initial_rows_come_before_the_first_look(database: Database, tmp_path: Path) -> None:
    captured = Captured(database, tmp_path, snapshot_mode="initial")
    try:
        captured.execute(*TREE)
        captured.execute("INSERT INTO t VALUES (1), (11)")
        captured.start()
        wait_until(lambda: len(captured.events(schema_events="false")) == 4, 20, "the rows are there")
        captured.execute("TRUNCATE t1")
        _, change = noticed(captured, 2)
        assert kinds(change) == ["partitions_changed"]
        assert {one["channel"] for one in captured.events(schema_events="false")} == {"pgcdc:t", "pgcdc:_snapshot"}
    finally:
        captured.end()


def test_a_rename_with_more_in_the_same_script_is_a_rename(captured: Captured) -> None:
    captured.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1, '1')")
    captured.events()
    captured.execute(
        "ALTER TABLE t RENAME a TO b", "UPDATE t SET b = '2'", "ALTER TABLE t ALTER b TYPE int USING b::int"
    )
    _, renamed, retyped = noticed(captured, 3)
    assert diff_shapes(renamed) == [{"type": "column_renamed", "from": "a", "to": "b"}]
    assert diff_shapes(retyped) == [
        {"type": "column_type_changed", "column": "b", "old_type": "text", "new_type": "integer"}
    ]


def test_a_locked_table_is_looked_at_later_and_the_stream_goes_on(captured: Captured) -> None:
    for name in ("t", "u", "w"):
        captured.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    captured.start()
    captured.execute("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (2)", "INSERT INTO w VALUES (3)")
    captured.events()
    with captured.database.connect(autocommit=False) as conn:
        conn.execute("LOCK TABLE t")
        captured.execute("ALTER TABLE u ADD b text", "ALTER TABLE w ADD b text")
        time.sleep(2.5)  # the list of published tables opens all of them
        captured.execute("INSERT INTO u VALUES (4)")
        assert [one for one in told(captured.events()) if isinstance(one, int)] == [1, 2, 3, 4]
        conn.execute("ALTER TABLE t ADD c int")
    history = noticed(captured, 6)
    assert sorted(one.after.name for one in history if kinds(one) == ["column_added"]) == ["t", "u", "w"]


def test_what_the_catalog_says_of_values_rules_and_partitions(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    database.execute("INSERT INTO t VALUES (1)")
    wanted = {
        "b": ("box", "(1,1),(0,0)"), "i": ("int[]", "{1,NULL}"), "s": ("text", 'a"b{},\\ NULL'), "e": ("text", ""),
        "n": ("text", "NULL"), "x": ("text[]", '{"a b",c}'), "k": ("bool", "t"), "y": ("bytea", "\\x01ff"),
    }  # fmt: skip
    with database.connect() as plain:
        for name, (kind, text) in wanted.items():
            literal = text.replace("'", "''")
            plain.execute(f"ALTER TABLE t ADD {name} {kind} DEFAULT '{literal}'".encode())
    database.execute("CREATE PUBLICATION p FOR TABLE t (id, b, i, s, e, n, x, k, y) WHERE (id > 5)")
    with connect(database.url) as conn:
        rows = conn.execute(
            "SELECT attname::text, atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass "
            "AND attnum > 0 AND attname <> 'a' ORDER BY attnum"
        ).fetchall()
        oid, filenode = conn.execute("SELECT 't'::regclass::oid::int8, pg_relation_filenode('t')::int8").fetchall()[0]
        columns = tuple(Column(name, kind, typmod, name == "id") for name, kind, typmod in rows)
        shape = Relation(oid, "public", "t", "d", columns)
        found = read_catalog(conn, [shape], ["p"]).describe(shape)
        assert found is not None
        missing = {one["name"]: one["missing"] for one in found["columns"] if "missing" in one}
        assert missing == {name: text for name, (_, text) in wanted.items()}
        assert (found["natts"], found["filenode"], found["hidden"]) == (10, filenode, [2])
        names = [row[0] for row in rows]
        assert found["published"] == {"row_filter": "(id > 5)", "columns": names}
        assert json.loads(json.dumps(found)) == found


def test_the_watch_takes_no_more_than_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from pgcdc.source.postgres.setup import watch

    now = [100.0]
    monkeypatch.setattr("pgcdc.source.postgres.setup.watch.time.monotonic", lambda: now[0])
    looks: list[float] = []

    class Slow(watch.CatalogWatch):
        def _compare(self, sql: Any) -> None:
            looks.append(now[0])
            now[0] += 0.05
            if len(looks) % 2:
                raise psycopg.OperationalError("somebody has a lock")
            self._cost_s = 0.05

    class Sql:
        broken = False

        def transaction(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

        def execute(self, text: str) -> None:
            assert "lock_timeout" in text

    one = Slow((), SimpleNamespace(current={}), None)  # type: ignore[arg-type]
    while now[0] < 200:
        one.look(Sql())  # type: ignore[arg-type]
        now[0] += 0.5
    assert 0.05 * len(looks) <= 100 * watch.SHARE + 0.05
    assert len(looks) > 10
