"""Typed tables as users run them: in a PySpark program, and by `pgcdc listen --table`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from listening import Listener, wait_until
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from typed_changes import change, to_frame

import pgcdc
from pgcdc import functions
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.transform.program import TypedProgram


@pytest.fixture
def options(database: Database, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What every query of the test says; the capture ends with the test."""
    state = StateDir(tmp_path / "state")
    never = {"snapshot_mode": "never"}
    yield {"url": database.url, "slot": f"s_{database.name}", "state_dir": str(state.path), **never}
    holder = Lock.holder(state.capture_lock)
    if holder:
        os.kill(holder["pid"], signal.SIGTERM)
        wait_until(lambda: Lock.holder(state.capture_lock) is None, 10, "the capture ends")


def run_once(rows: DataFrame, checkpoint: Path, seen: list[dict[str, Any]]) -> None:
    """Everything committed up to now."""

    def collect(batch: DataFrame, _: int) -> None:
        seen.extend(row.asDict(recursive=True) for row in batch.collect())

    writer = rows.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(collect)
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def test_a_program_reads_a_table_through_a_change_of_its_columns(
    database: Database, spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE TYPE pair AS (a int, b text);"
        "CREATE TABLE t (id bigint PRIMARY KEY, n numeric(10,2), m mood, tags text[], grid int[][], p pair, r int4range, "
        "at timestamptz, local timestamp, day date, doc jsonb, raw bytea, span interval, flag bool, f real)"
    )
    seen: list[dict[str, Any]] = []
    run_once(pgcdc.read_table(spark, "t", **options), tmp_path / "c", seen)
    database.execute(
        "INSERT INTO t VALUES (1, 1.5, 'happy', '{a,\"b c\",NULL}', '{{1,2},{3,4}}', '(7,\"x,y\")', '[1,5)', "
        "'2026-01-01 00:00:00+00', '2026-01-01 12:00:00.5', '0044-03-15', '{\"a\": [1]}', '\\x00ff', '1 mon 2 days 3.5 s', "
        "true, 0.1)"
    )
    database.execute("ALTER TABLE t ADD extra uuid; UPDATE t SET extra = '00000000-0000-0000-0000-000000000001'")
    with pytest.raises(StreamingQueryException, match="column extra is new"):
        run_once(pgcdc.read_table(spark, "t", **options), tmp_path / "c", seen)
    (first,) = seen
    assert first["n"] == Decimal("1.50") and first["m"] == "happy" and first["tags"] == ["a", "b c", None]
    assert first["grid"] == [[1, 2], [3, 4]] and first["p"] == {"a": 7, "b": "x,y"}
    assert first["r"] == {
        "lower": 1, "upper": 5, "lower_inclusive": True, "upper_inclusive": False, "empty": False
    }  # fmt: skip
    assert first["at"].astimezone(UTC) == datetime(2026, 1, 1, tzinfo=UTC)
    assert first["local"] == datetime(2026, 1, 1, 12, 0, 0, 500000)
    assert str(first["day"]) == "0044-03-15" and json.loads(first["doc"]) == {"a": [1]} and first["raw"] == b"\x00\xff"
    assert first["span"] == {"months": 1, "days": 2, "microseconds": 3_500_000} and first["flag"] is True
    run_once(pgcdc.read_table(spark, "t", **options), tmp_path / "c", seen)
    assert [(row["_op"], row.get("extra")) for row in seen] == [
        ("INSERT", None),
        ("UPDATE", "00000000-0000-0000-0000-000000000001"),
    ]


def test_lines_of_typed_rows_have_the_positions_of_the_events(spark: SparkSession) -> None:
    places = [Position.at(9, 1), Position.at(1 << 40, 1 << 33), Position.end(1 << 41)]
    places += [Position.of_chunk(1 << 41, chunk, row) for chunk in (1, 300) for row in (1, 2, 500)]
    rows = [change("INSERT", one.commit, {"id": 1}, ordinal=one.place, second=0) for one in places]
    program = TypedProgram()
    (batch,) = program.collect(program.project(to_frame(spark, rows)), Position.at(0, 0), Position.behind(1 << 41))
    found = batch.positions().to_pylist()
    assert sorted(found) == [str(one) for one in places]
    assert sorted(map(Position.parse, found)) == places
    assert len(batch.after(places[4])) == len(places) - 5


def test_a_refused_table_leaves_nothing_behind(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    listener = Listener(database.url, tmp_path, "--table", "t", "--changelog", "zset", slot=f"s_{database.name}")
    listener.start(wait=False)
    assert listener.wait_exit() == 2
    assert "REPLICA IDENTITY FULL" in listener.said()
    assert database.query("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    assert database.query("SELECT pubname FROM pg_publication") == []


def test_several_tables_come_from_one_slot(
    database: Database, spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE SCHEMA s; CREATE TABLE s.b (k text PRIMARY KEY)")
    streams = pgcdc.read_tables(spark, ["a", "s.b"], **options)
    seen: dict[str, list[dict[str, Any]]] = {"a": [], "s.b": []}
    for name, stream in streams.items():
        run_once(stream, tmp_path / name, seen[name])
    database.execute("INSERT INTO a VALUES (1); INSERT INTO s.b VALUES ('x'); INSERT INTO a VALUES (2)")
    for name, stream in streams.items():
        run_once(stream, tmp_path / name, seen[name])
    assert [row["id"] for row in seen["a"]] == [1, 2] and [row["k"] for row in seen["s.b"]] == ["x"]
    slots = database.query("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")
    assert slots == [(1,)]


def test_windows_close_while_the_database_is_idle(
    database: Database, spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    rows = pgcdc.read_table(spark, "t", heartbeats="true", heartbeat_interval="1", **options)
    windows = functions.with_watermark(rows, "0 seconds").groupBy(F.window("_ts", "1 second")).count()
    closed: list[tuple[datetime, int]] = []

    def collect(batch: DataFrame, _: int) -> None:
        closed.extend((row["window"]["end"].astimezone(UTC), row["count"]) for row in batch.collect())

    writer = windows.writeStream.outputMode("append").foreachBatch(collect)
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()
    try:
        wait_until(lambda: query.lastProgress is not None, 60, "the query has begun")
        database.execute("INSERT INTO t SELECT generate_series(1, 3)")
        wait_until(lambda: bool(closed), 60, "the window of the last change is closed")
    finally:
        query.stop()
    ((end, count),) = closed
    assert count == 3 and abs(end - datetime.now(UTC)) < timedelta(minutes=2)


def read_lines(listener: Listener) -> list[dict[str, Any]]:
    return [json.loads(line) for line in listener.output.read_text().splitlines()]


def test_listen_follows_a_change_of_the_columns_by_itself(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, price numeric(8,2))")
    listener = Listener(database.url, tmp_path, "--table", "t", slot=f"s_{database.name}")
    try:
        listener.start()
        database.execute("INSERT INTO t VALUES (1, 9.5)")
        with database.connect() as conn, conn.transaction():
            conn.execute("INSERT INTO t VALUES (2, 1)")
            conn.execute("ALTER TABLE t ADD tags text[]")
            conn.execute("INSERT INTO t VALUES (3, 2, '{x}')")
        database.execute("ALTER TABLE t DROP price; INSERT INTO t VALUES (4, '{}')")
        wait_until(lambda: len(read_lines(listener)) >= 4, 90, "all four rows are in the file")
        assert listener.stop() == 0
    finally:
        listener.kill_all()
    own = [{name: value for name, value in line.items() if not name.startswith("_")} for line in read_lines(listener)]
    assert own == [
        {"id": 1, "price": 9.5},
        {"id": 2, "price": 1.0},
        {"id": 3, "price": 2.0, "tags": ["x"]},
        {"id": 4, "tags": []},
    ]
    assert [line["_op"] for line in read_lines(listener)] == ["INSERT"] * 4
    assert "column tags is new" in listener.said() and "column price is missing" in listener.said()
