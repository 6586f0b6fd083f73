"""What happens to a chunk between its reading and its release, in every order that there can be."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from databases import Database
from engine import Engine
from listening import wait_until
from snapshots import long_text

from pgcdc.core.position import Position
from pgcdc.core.relation import Op
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.source.postgres.snapshot import reader
from pgcdc.source.postgres.snapshot.asking import find_table
from pgcdc.source.postgres.snapshot.reader import ChunkOrder, ChunkRead, Reader

Make = Callable[..., Engine]


@pytest.fixture
def make(database: Database, tmp_path: Path) -> Iterator[Make]:
    made: list[Engine] = []

    def create(tables: str = "t", publication: str = "") -> Engine:
        made.append(Engine(database, tmp_path, tables, publication))
        return made[-1]

    yield create
    for one in made:
        one.close()


@pytest.fixture
def three(database: Database, make: Make) -> Engine:
    """t has the rows 1, 2 and 3; the value of `doc` is out of line."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n text, doc text)")
    database.execute("ALTER TABLE t ALTER doc SET STORAGE EXTERNAL")
    for one in (1, 2, 3):
        database.execute("INSERT INTO t VALUES (%s, %s, %s)", [one, f"old {one}", long_text(one)])
    return make()


def test_an_update_after_the_reading_is_in_the_row_with_its_long_value(database: Database, three: Engine) -> None:
    name = three.begin("t")
    database.execute("UPDATE t SET n = 'new' WHERE id = 2")
    three.finish(name)
    assert sorted(three.of(Op.SNAPSHOT)) == [
        ["1", "old 1", long_text(1)], ["2", "new", long_text(2)], ["3", "old 3", long_text(3)]
    ]  # fmt: skip
    assert [event[0] for event in three.events] == [
        "UPDATE", "SCHEMA_CHANGE", "SNAPSHOT_STARTED", *["SNAPSHOT"] * 3, "SNAPSHOT_COMPLETED"
    ]  # fmt: skip


def test_changes_before_the_reading_that_the_stream_tells_later_do_no_harm(database: Database, three: Engine) -> None:
    name = three.add("t")
    three.step()
    three.read()
    three.catch_up()
    database.execute("UPDATE t SET doc = 'a' WHERE id = 1")
    database.execute("UPDATE t SET n = 'b' WHERE id = 1")
    database.execute("DELETE FROM t WHERE id = 2")
    database.execute("UPDATE t SET n = 'c' WHERE id = 3")
    database.execute("INSERT INTO t VALUES (2, 'again', 'x')")
    three.step()  # the window opens before all of them, the chunk has all of them
    three.read()
    assert three.step() is None, "what the stream has not told yet must not be overtaken"
    three.finish(name)
    assert sorted(three.of(Op.SNAPSHOT)) == [["1", "b", "a"], ["2", "again", "x"], ["3", "c", long_text(3)]]


def test_a_row_that_is_deleted_after_the_reading_is_not_released(database: Database, three: Engine) -> None:
    name = three.begin("t")
    database.execute("DELETE FROM t WHERE id = 2")
    database.execute("INSERT INTO t VALUES (7, 'later', 'x')")
    three.finish(name)
    assert sorted(row[0] for row in three.of(Op.SNAPSHOT)) == ["1", "3"]
    assert three.queue[name].rows == 2


def test_after_a_truncate_only_what_came_later_is_released(database: Database, three: Engine) -> None:
    name = three.begin("t")
    database.execute("TRUNCATE t")
    database.execute("INSERT INTO t VALUES (2, 'later', 'x')")
    three.finish(name)
    assert three.of(Op.SNAPSHOT) == [["2", "later", "x"]]


def test_a_row_that_moves_out_of_the_chunk_is_read_under_its_new_key(database: Database, three: Engine) -> None:
    """Its long value is in no change: whoever has not got the row would never get it."""
    name = three.begin("t", chunk_size=1)
    three.catch_up()
    assert three.step() is not None  # row 1 is released, what comes next is behind it
    three.read()
    database.execute("UPDATE t SET id = 0 WHERE id = 3")
    three.finish(name)
    assert three.of(Op.SNAPSHOT) == [
        ["1", "old 1", long_text(1)], ["2", "old 2", long_text(2)], ["0", "old 3", long_text(3)]
    ]  # fmt: skip


def test_a_row_that_moves_into_the_place_of_another_one(database: Database, three: Engine) -> None:
    name = three.begin("t")
    database.execute("DELETE FROM t WHERE id = 1")
    database.execute("UPDATE t SET id = 1 WHERE id = 2")
    database.execute("UPDATE t SET n = 'moved' WHERE id = 1")
    three.finish(name)
    assert sorted(three.of(Op.SNAPSHOT)) == [["1", "moved", long_text(2)], ["3", "old 3", long_text(3)]]


def test_a_table_that_is_altered_between_reading_and_release_is_read_again(database: Database, three: Engine) -> None:
    name = three.begin("t")
    database.execute("ALTER TABLE t ADD COLUMN more int DEFAULT 5")
    database.execute("UPDATE t SET n = 'new' WHERE id = 2")
    three.finish(name)
    assert sorted(three.of(Op.SNAPSHOT)) == [
        ["1", "old 1", long_text(1), "5"], ["2", "new", long_text(2), "5"], ["3", "old 3", long_text(3), "5"]
    ]  # fmt: skip


def test_a_table_that_is_altered_before_the_stream_has_come_there(database: Database, three: Engine) -> None:
    name = three.add("t")
    three.step()
    database.execute("UPDATE t SET n = 'a' WHERE id = 1")
    three.read()
    three.catch_up()
    database.execute("UPDATE t SET n = 'b' WHERE id = 1")
    database.execute("ALTER TABLE t DROP COLUMN n")
    three.step()
    three.finish(name)
    assert sorted(three.of(Op.SNAPSHOT)) == [[str(one), long_text(one)] for one in (1, 2, 3)]


def test_a_row_that_leaves_the_filter_is_not_released(database: Database, make: Make) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("INSERT INTO t VALUES (1, 10), (2, 20), (3, -1)")
    engine = make(publication="CREATE PUBLICATION p FOR TABLE t WHERE (n > 0)")
    name = engine.begin("t")
    database.execute("UPDATE t SET n = -5 WHERE id = 1")
    database.execute("UPDATE t SET n = 30 WHERE id = 3")
    engine.finish(name)
    assert engine.of(Op.SNAPSHOT) == [["2", "20"]]
    assert [event[0] for event in engine.events][:2] == ["DELETE", "INSERT"]


def test_a_filter_that_is_widened_while_the_stream_is_behind(database: Database, make: Make) -> None:
    """Row 1 left the old filter, which the stream tells as a DELETE, and is in the new one."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("INSERT INTO t VALUES (1, 10), (2, 20)")
    engine = make(publication="CREATE PUBLICATION p FOR TABLE t WHERE (n > 0)")
    name = engine.add("t")
    engine.step()
    engine.read()
    engine.catch_up()
    database.execute("UPDATE t SET n = -5 WHERE id = 1")
    database.execute("ALTER PUBLICATION p SET TABLE t WHERE (n > -10)")
    engine.step()
    engine.finish(name)
    assert sorted(engine.of(Op.SNAPSHOT)) == [["1", "-5"], ["2", "20"]]


def test_a_chunk_is_dropped_with_the_connection_of_the_stream(database: Database, three: Engine) -> None:
    name = three.begin("t")
    three.engine.lose()
    database.execute("UPDATE t SET n = 'new' WHERE id = 1")
    three.catch_up()
    assert three.step() is None and not three.of(Op.SNAPSHOT)
    three.finish(name)
    assert len(three.of(Op.SNAPSHOT)) == 3 and three.queue[name].chunks == 1


def test_a_lost_connection_of_the_reader_only_costs_time(database: Database, three: Engine) -> None:
    name = three.begin("t", chunk_size=2)
    with database.connect() as conn:
        conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgcdc test'")
    three.finish(name)
    assert len(three.of(Op.SNAPSHOT)) == 3 and three.status(name) == "done"


def test_paused_meanwhile_a_chunk_is_read_again_later(database: Database, three: Engine) -> None:
    name = three.begin("t")
    three.queue.pause(name)
    three.catch_up()
    assert three.step() is None
    database.execute("UPDATE t SET n = 'new' WHERE id = 1")
    three.catch_up()
    assert three.step() is None and not three.snapshots.readers.orders
    three.queue.resume(name)
    three.finish(name)
    assert sorted(three.of(Op.SNAPSHOT))[0] == ["1", "new", long_text(1)]
    assert [event[0] for event in three.events].count("SNAPSHOT_STARTED") == 1


def test_a_table_that_is_dropped_fails_its_request_only(database: Database, three: Engine) -> None:
    name = three.begin("t", chunk_size=1)
    three.catch_up()
    three.step()
    three.read()
    database.execute("DROP TABLE t")
    three.finish(name)
    assert three.status(name) == "failed" and "no longer captured" in three.queue[name].error


def test_a_table_that_is_renamed_is_still_the_same(database: Database, three: Engine) -> None:
    name = three.begin("t", chunk_size=1)
    database.execute("ALTER TABLE t RENAME TO u")
    three.finish(name)
    assert three.status(name) == "done" and len(three.of(Op.SNAPSHOT)) == 3


def test_nothing_is_released_inside_of_a_transaction(database: Database, three: Engine) -> None:
    name = three.begin("t")
    three.catch_up()
    end, three.end = three.end, Position.at(three.end.commit + 800, 5)
    assert three.step() is None
    three.end = end
    assert three.step() is not None and three.status(name) == "done"


def test_a_commit_that_was_streamed_but_is_not_visible_is_waited_for(tmp_path: Path) -> None:
    settings = {"fsync": "off", "synchronous_standby_names": "nobody", "synchronous_commit": "local"}
    with EmbeddedPostgres.temporary(settings=settings) as server:
        database = Database("postgres", server.url(), server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY, n text)")
        database.execute("INSERT INTO t VALUES (1, 'old')")
        engine = Engine(database, tmp_path, "t")

        def hang() -> None:
            with database.connect() as conn:
                conn.execute("SET synchronous_commit = on")
                conn.execute("UPDATE t SET n = 'new' WHERE id = 1")

        writer = threading.Thread(target=hang)
        writer.start()
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: bool(database.query(waiting)), 10, "the commit waits")
        engine.catch_up()
        assert [event[:2] for event in engine.events] == [("UPDATE", ["1", "new"])]
        assert database.query("SELECT n FROM t") == [("old",)]
        name = engine.begin("t")
        engine.catch_up()
        assert engine.step() is None and not engine.of(Op.SNAPSHOT)
        database.execute(f"SELECT pg_cancel_backend(pid) FROM ({waiting}) w")
        writer.join(10)
        engine.finish(name)
        assert engine.of(Op.SNAPSHOT) == [["1", "new"]]
        engine.close()


def test_keys_that_a_sink_has_and_the_table_not_are_deleted(database: Database, three: Engine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(json.dumps([str(one)]) + "\n" for one in (1, 2, 7, 8, 9)))
    name = three.begin("t", kind="vanished", keys_file=str(keys))
    database.execute("INSERT INTO t VALUES (8, 'now it is there', 'x')")
    database.execute("UPDATE t SET id = 9 WHERE id = 3")
    database.execute("DELETE FROM t WHERE id = 2")
    three.finish(name)
    assert [old[0] for op, _, old in three.events if op == "DELETE"] == ["2", "7"]
    assert three.queue[name].rows == 1 and three.status(name) == "done"


def test_a_bad_file_of_keys_fails_its_request(database: Database, three: Engine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text('["1", "2"]\n')
    name = three.add("t", kind="vanished", keys_file=str(keys))
    three.finish(name)
    assert three.status(name) == "failed" and "not a key of 1 texts" in three.queue[name].error


KEYS = {
    "composite": ("a int, b text, PRIMARY KEY (b, a)", "SELECT n % 7, 'k' || n / 3 FROM generate_series(1, 60) n"),
    "quotes": ("k text PRIMARY KEY", r"""SELECT n || $$'";\ --$$ || chr(10) || chr(9) FROM generate_series(1, 40) n"""),
    "collated": (
        'k text COLLATE "pg_unicode_fast" PRIMARY KEY',
        "SELECT chr(c) || n FROM unnest(array[65, 97, 228, 95, 32, 8364]) c, generate_series(1, 9) n",
    ),
    "numbers": ("k numeric PRIMARY KEY", "SELECT n / 3.0 FROM generate_series(-20, 20) n UNION SELECT 'NaN'"),
    "floats": ("k float8 PRIMARY KEY", "SELECT n / 3.0 FROM generate_series(-20, 20) n UNION SELECT '-Infinity'"),
    "blanks": ("k char(6) PRIMARY KEY", "SELECT 'x' || n FROM generate_series(1, 40) n"),
    "uuid": ("k uuid PRIMARY KEY", "SELECT md5(n::text)::uuid FROM generate_series(1, 40) n"),
    "times": ("k timestamptz PRIMARY KEY", "SELECT now() + n * interval '1 week' FROM generate_series(1, 40) n"),
    "bytes": ("k bytea PRIMARY KEY", r"SELECT decode(lpad(to_hex(n), 4, '0'), 'hex') FROM generate_series(1, 40) n"),
    "domain": ("k positive PRIMARY KEY", "SELECT n FROM generate_series(1, 40) n"),
    "enum": (
        "k mood, n int, PRIMARY KEY (k, n)",
        "SELECT m, n FROM unnest(enum_range(NULL::mood)) m, generate_series(1, 19) n",
    ),
}


def test_keys_of_any_kind(database: Database, make: Make) -> None:
    database.execute("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    database.execute("CREATE TYPE mood AS ENUM ('zz', 'a''b', 'mm')")
    for what, (columns, rows) in KEYS.items():
        database.execute(f"CREATE TABLE {what} ({columns})")
        database.execute(f"INSERT INTO {what} {rows}")
    engine = make(", ".join(KEYS))
    for what in KEYS:
        engine.events.clear()
        name = engine.add(what, chunk_size=9)
        engine.finish(name)
        assert engine.status(name) == "done", engine.queue[name].error
        found = [tuple(row) for row in engine.of(Op.SNAPSHOT)]
        count = database.query(f"SELECT count(*) FROM {what}")[0][0]
        assert len(found) == len(set(found)) == count and engine.queue[name].chunks > 4, what


def test_partitions_through_their_root_and_an_identity_index(database: Database, make: Make) -> None:
    database.execute("CREATE TABLE t (id int, region text, n int, PRIMARY KEY (region, id)) PARTITION BY LIST (region)")
    database.execute("CREATE TABLE t_eu PARTITION OF t FOR VALUES IN ('eu')")
    database.execute("CREATE TABLE t_us PARTITION OF t FOR VALUES IN ('us')")
    database.execute("INSERT INTO t SELECT n, 'eu', 0 FROM generate_series(1, 20) n")
    database.execute("CREATE TABLE i (a int, code text NOT NULL UNIQUE, n int)")
    database.execute("ALTER TABLE i REPLICA IDENTITY USING INDEX i_code_key")
    database.execute("INSERT INTO i SELECT n, 'c' || n, 0 FROM generate_series(1, 20) n")
    engine = make(publication="CREATE PUBLICATION p FOR TABLE t, i WITH (publish_via_partition_root)")
    first = engine.begin("t", chunk_size=15)
    database.execute("UPDATE t SET region = 'us' WHERE id = 3")
    database.execute("UPDATE t SET n = 1 WHERE id = 4")
    engine.finish(first)
    second = engine.begin("i", chunk_size=15)
    database.execute("UPDATE i SET code = 'changed' WHERE a = 1")
    database.execute("UPDATE i SET n = 1 WHERE a = 2")
    database.execute("DELETE FROM i WHERE a = 10")
    engine.finish(second)
    rows = engine.of(Op.SNAPSHOT)
    assert {engine.status(first), engine.status(second)} == {"done"}
    assert ["4", "eu", "1"] in rows and ["2", "c2", "1"] in rows and ["3", "eu", "0"] not in rows
    assert [row for row in rows if row[0] == "10" and row[1].startswith("c")] == []


@pytest.mark.parametrize("rows", [999, 1000, 1001, 4000])
def test_every_chunk_is_read_in_a_snapshot_of_its_own(
    database: Database, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Also if the limit of bytes is met by the very last piece of what was asked for."""
    monkeypatch.setattr(reader, "CHUNK_BYTES", 10_000)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    database.execute("INSERT INTO t SELECT n, 1 FROM generate_series(1, %s) AS n", [rows])
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    reads = Reader(database.url, ["p"], "test")
    with database.connect() as conn:
        known = find_table(conn, ["p"], "t")
    found: list[ChunkRead] = []
    for _ in range(3):
        read = reads.read(ChunkOrder("t", known=known, limit=1000))
        assert isinstance(read, ChunkRead)
        found += [read] if read.nbytes >= 10_000 else []
        database.execute("INSERT INTO t VALUES ((SELECT max(id) + 1 FROM t), 2)")
    assert len({one.snapshot for one in found}) == 3
    reads.close()
