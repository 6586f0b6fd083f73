"""`format("pgcdc")` in a user's own PySpark program, one Spark session for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from listening import wait_until
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.event.columns import EVENT_SCHEMA
from pgcdc.spool.consumers import Consumers
from pgcdc.transform import event_json

Start = Callable[..., StreamingQuery]


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


@pytest.fixture
def start(spark: SparkSession, database: Database, tmp_path: Path, state: StateDir) -> Iterator[Start]:
    """Starts a query on this test's slot; ends queries and capture afterwards."""
    queries: list[StreamingQuery] = []

    def run(
        sink: Callable[[DataFrame, int], None],
        *,
        checkpoint: str = "checkpoint",
        once: bool = False,
        schema: str = "",
        **more: str,
    ) -> StreamingQuery:
        options = {
            "url": database.url, "slot": f"s_{database.name}", "all_tables": "true", "state_dir": str(state.path),
            "snapshot_mode": "never", **more
        }  # fmt: skip
        reader = spark.readStream.format("pgcdc").options(**options)
        events = (reader.schema(schema) if schema else reader).load()
        writer = events.writeStream.option("checkpointLocation", str(tmp_path / checkpoint)).foreachBatch(sink)
        trigger = writer.trigger(availableNow=True) if once else writer
        queries.append(trigger.start())
        return queries[-1]

    yield run
    for query in queries:
        query.stop()
    end_capture(state)


def end_capture(state: StateDir) -> None:
    holder = Lock.holder(state.capture_lock)
    if holder:
        os.kill(holder["pid"], signal.SIGTERM)
        wait_until(lambda: Lock.holder(state.capture_lock) is None, 10, "the capture ends")


class Rows:
    """Collects the events of a query."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, events: DataFrame, _: int) -> None:
        self.seen += [row.asDict() for row in events.collect()]

    def ids(self) -> list[int]:
        return [int(row["row"]["id"]) for row in self.seen]


def test_a_query_starts_the_capture_by_itself_and_goes_on_from_its_checkpoint(database: Database, start: Start) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    rows = Rows()
    query = start(rows, once=True)
    query.awaitTermination()
    assert rows.seen == []
    database.execute("INSERT INTO t VALUES (1, 'a'), (2, NULL)")
    database.execute("UPDATE t SET id = 3 WHERE id = 2")
    database.execute("DELETE FROM t WHERE id = 1")
    start(rows, once=True).awaitTermination()
    got = [(row["operation"], row["row"], row["old"]) for row in rows.seen]
    assert got == [
        ("INSERT", {"id": "1", "v": "a"}, None),
        ("INSERT", {"id": "2", "v": None}, None),
        ("UPDATE", {"id": "3", "v": None}, {"id": "2"}),
        ("DELETE", {"id": "1"}, None),
    ]
    first = rows.seen[0]
    assert (first["channel"], first["schema"], first["table"]) == ("pgcdc:t", "public", "t")
    assert (first["lsn"], first["ordinal"]) == (Position.parse(first["position"]).commit, 1)
    assert [row["position"] for row in rows.seen] == sorted(row["position"] for row in rows.seen)
    start(rows, once=True).awaitTermination()
    assert len(rows.seen) == 4, "nothing comes twice"


def test_the_source_renders_the_same_json_as_the_spark_expression(database: Database, start: Start) -> None:
    database.execute('CREATE TABLE t (id int PRIMARY KEY, v text, "a ""b"".ü" text)')
    database.execute("CREATE SCHEMA s; CREATE TABLE s.u (id int PRIMARY KEY, v text)")
    database.execute("ALTER TABLE s.u REPLICA IDENTITY FULL; ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    start(Rows(), once=True, tx_markers="true").awaitTermination()
    odd = "".join(map(chr, range(1, 256))) + "\u2028\u2029\ufeff\U0001f418"
    with database.connect() as conn, conn.transaction():
        conn.execute("INSERT INTO t VALUES (1, %s, %s), (2, NULL, '')", [odd, odd])
        conn.execute("UPDATE t SET v = repeat('x', 10000) WHERE id = 1")
        conn.execute("UPDATE t SET id = 3 WHERE id = 1")
        conn.execute("INSERT INTO s.u VALUES (1, 'a')")
        conn.execute("UPDATE s.u SET v = 'b'")
    database.execute("DELETE FROM t WHERE id = 3; DELETE FROM s.u; TRUNCATE t, s.u")
    database.execute('ALTER TABLE t ADD "é ""q""" numeric(10,2); INSERT INTO t (id) VALUES (4)')
    texts: list[tuple[str, str, str]] = []

    def compare(events: DataFrame, _: int) -> None:
        both = event_json(events, transaction=True).select("json", "line", "_text")
        texts.extend((row.json, row.line, row._text) for row in both.collect())

    columns = f"{EVENT_SCHEMA}, json STRING, line STRING"
    start(compare, once=True, schema=columns, tx_markers="true", schema_events="true").awaitTermination()
    assert len(texts) == 18
    assert sum("SCHEMA_CHANGE" in text for text, _, _ in texts) == 1
    for json, line, expected in texts:
        assert json == expected
        assert line == f"{json}\n"


def test_a_schema_with_a_column_that_events_do_not_have_is_refused(start: Start) -> None:
    for schema, part in (("id STRING, price INT", "price int"), ("lsn STRING", "lsn string")):
        with pytest.raises(PySparkException, match=part):
            start(Rows(), schema=schema).awaitTermination()


def test_available_now_delivers_everything_committed_before_it_in_bounded_batches(
    database: Database, start: Start
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    start(Rows(), once=True).awaitTermination()
    for begin in range(0, 1000, 100):
        database.execute("INSERT INTO t SELECT generate_series(%s::int, %s::int)", [begin, begin + 99])
    sizes: list[int] = []
    rows = Rows()

    def sink(events: DataFrame, batch: int) -> None:
        before = len(rows.seen)
        rows(events, batch)
        sizes.append(len(rows.seen) - before)

    start(sink, once=True, max_batch_rows="300").awaitTermination()
    assert rows.ids() == list(range(1000))


def test_a_running_query_survives_a_kill_of_the_capture(database: Database, start: Start, state: StateDir) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    rows = Rows()
    query = start(rows)
    wait_until(lambda: bool(Lock.holder(state.capture_lock)), 60, "the capture runs")
    database.execute("INSERT INTO t SELECT generate_series(1, 50)")
    wait_until(lambda: len(rows.seen) == 50, 60, "the first rows")
    holder = Lock.holder(state.capture_lock)
    assert holder is not None
    os.kill(holder["pid"], signal.SIGKILL)
    database.execute("INSERT INTO t SELECT generate_series(51, 100)")
    wait_until(lambda: len(rows.seen) >= 100, 60, "the rows after the kill")
    assert rows.ids() == list(range(1, 101))
    assert query.isActive


def test_two_consumers_share_a_slot_and_the_slower_one_holds_confirmation(
    database: Database, start: Start, state: StateDir
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    one, two = Rows(), Rows()
    start(one, consumer="one", checkpoint="c1", once=True).awaitTermination()
    start(two, consumer="two", checkpoint="c2", once=True).awaitTermination()
    database.execute("INSERT INTO t VALUES (1)")
    start(one, consumer="one", checkpoint="c1", once=True).awaitTermination()
    database.execute("INSERT INTO t VALUES (2)")
    start(one, consumer="one", checkpoint="c1", once=True).awaitTermination()
    assert (one.ids(), two.ids()) == ([1, 2], [])
    consumers = Consumers(state.consumers_file)
    assert consumers.confirmed_lsn <= consumers["two"].ack.commit
    start(two, consumer="two", checkpoint="c2", once=True).awaitTermination()
    assert two.ids() == [1, 2]


def test_a_lost_checkpoint_is_refused_until_the_consumer_is_forgotten(
    database: Database, start: Start, state: StateDir
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    rows = Rows()
    for number in range(3):  # Spark tells the source what it has committed when it plans the next batch
        database.execute("INSERT INTO t VALUES (%s)", [number])
        start(rows, once=True).awaitTermination()
    end_capture(state)
    assert Consumers(state.consumers_file)["default"].ack > Consumers(state.consumers_file)["default"].initial
    with pytest.raises(PySparkException, match=r"another query.*option\('consumer', ...\).*consumer forget default"):
        start(rows, checkpoint="another", once=True).awaitTermination()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "postgres://u:secret@127.0.0.1/x"}, "contains a password"),
        ({"tabels": "t"}, "unknown option 'tabels'"),
        ({"max_batch_rows": "0"}, "max_batch_rows"),
        ({"all_tables": "perhaps"}, "true or false"),
    ],
)
def test_wrong_options_are_refused_with_advice(start: Start, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message):
        start(Rows(), once=True, **options).awaitTermination()


def test_a_table_that_does_not_exist_is_named(database: Database, start: Start, state: StateDir) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    with pytest.raises(PySparkException, match="ordres"):
        start(Rows(), once=True, tables="ordres", all_tables="false").awaitTermination()
    assert not state.path.exists()


def test_prepared_transactions_messages_and_markers_in_binary_form(database: Database, start: Start) -> None:
    options = {
        "two_phase": "true",
        "messages": "true",
        "tx_markers": "true",
        "binary": "true",
        "max_batch_rows": "4000",
    }
    database.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamptz)")
    rows = Rows()
    start(rows, once=True, **options).awaitTermination()
    with database.connect() as conn:
        conn.execute("BEGIN; INSERT INTO t VALUES (1, '2026-01-02 03:04:05Z')")
        conn.execute("SELECT pg_logical_emit_message(true, 'audit', 'inside')")
        conn.execute("PREPARE TRANSACTION 'one'")
    start(rows, once=True, **options).awaitTermination()
    assert rows.seen == [], "nothing is delivered before COMMIT PREPARED"
    database.execute("INSERT INTO t SELECT g, NULL FROM generate_series(2, 10001) g")
    database.execute("COMMIT PREPARED 'one'")
    start(rows, once=True, **options).awaitTermination()
    start(rows, once=True, **options).awaitTermination()
    seen = [(row["operation"], (row["row"] or {}).get("id") or (row["row"] or {}).get("content")) for row in rows.seen]
    assert seen == [
        ("BEGIN", None), *(("INSERT", str(number)) for number in range(2, 10002)), ("COMMIT", None),
        ("BEGIN", None), ("INSERT", "1"), ("MESSAGE", "inside"), ("COMMIT", None),
    ]  # fmt: skip
    assert rows.seen[-3]["row"] == {"id": "1", "at": "2026-01-02 03:04:05+00"}
    assert [row["position"] for row in rows.seen] == sorted(row["position"] for row in rows.seen)
