"""Typed rows of a table on a real server: what they look like, and what happens when the table changes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from pyspark.sql.types import IntegerType, StringType, StructType
from queries import Query

from pgcdc.core.errors import ConfigError, ConversionError, GapError, SchemaChanged, SourceError
from pgcdc.core.position import Position

Rows = list[dict[str, Any]]
Ask = Callable[..., Query]


@pytest.fixture
def ask(database: Database, tmp_path: Path) -> Iterator[Ask]:
    """Makes queries on this test's slot, and ends them."""
    queries: list[Query] = []

    def make(table: str = "t", **options: str) -> Query:
        queries.append(Query(database, tmp_path, table=table, **options))
        return queries[-1]

    yield make
    for query in queries:
        query.close()
    if queries:
        queries[0].end()


def short(rows: Rows, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


def test_rows_have_the_columns_of_the_table_and_say_what_happened(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id bigint PRIMARY KEY, price numeric(12,2), tags text[], at timestamptz)")
    query = ask().load()
    assert query.schema.simpleString() == (
        "struct<id:bigint,price:decimal(12,2),tags:array<string>,at:timestamp,_op:string,_lsn:bigint,_ordinal:bigint,"
        "_xid:bigint,_ts:timestamp,_before:struct<id:bigint,price:decimal(12,2),tags:array<string>,at:timestamp>,"
        "_unchanged_toast_columns:array<string>>"
    )
    with database.connect() as conn, conn.transaction():
        conn.execute(
            "INSERT INTO t VALUES (1, 9.90, '{a,NULL}', '2026-01-02 03:04:05.678901+00'), (2, NULL, NULL, NULL)"
        )
        conn.execute("UPDATE t SET price = 10 WHERE id = 1")
        conn.execute("UPDATE t SET id = 3 WHERE id = 2")
    database.execute("DELETE FROM t WHERE id = 3; TRUNCATE t")
    rows = query.run()
    assert short(rows, "_op", "id", "price", "tags", "at") == [
        ("INSERT", 1, Decimal("9.90"), ["a", None], datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)),
        ("INSERT", 2, None, None, None),
        ("UPDATE", 1, Decimal("10.00"), ["a", None], datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)),
        ("UPDATE", 3, None, None, None),
        ("DELETE", 3, None, None, None),
        ("TRUNCATE", None, None, None, None),
    ]
    nothing = {"price": None, "tags": None, "at": None}
    assert [row["_before"] for row in rows] == [None, None, None, {"id": 2, **nothing}, {"id": 3, **nothing}, None]
    assert [row["_ordinal"] for row in rows] == [1, 2, 3, 4, 1, 2]
    assert [row["_lsn"] for row in rows] == sorted(row["_lsn"] for row in rows)
    assert len({row["_xid"] for row in rows}) == 2
    assert abs(rows[0]["_ts"] - datetime.now(UTC)) < timedelta(minutes=5)
    assert query.run() == []


def test_the_whole_old_row_is_there_if_the_server_sends_it(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t REPLICA IDENTITY FULL")
    query = ask().load()
    database.execute("INSERT INTO t VALUES (1, 'a'); UPDATE t SET v = NULL; DELETE FROM t")
    rows = query.run()
    assert short(rows, "_op", "id", "v", "_before") == [
        ("INSERT", 1, "a", None),
        ("UPDATE", 1, None, {"id": 1, "v": "a"}),
        ("DELETE", 1, None, {"id": 1, "v": None}),
    ]


def test_a_query_may_ask_for_some_columns_only(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, bad numeric(5,2), v text)")
    text, number = StringType(), IntegerType()
    query = ask().load(StructType().add("_op", text).add("v", text).add("_before", StructType().add("id", number)))
    database.execute("INSERT INTO t VALUES (1, 'NaN', 'a'); UPDATE t SET id = 2")
    assert query.run() == [
        {"_op": "INSERT", "v": "a", "_before": None},
        {"_op": "UPDATE", "v": "a", "_before": {"id": 1}},
    ]
    database.execute("ALTER TABLE t ADD w int; INSERT INTO t VALUES (5, 1, 'b', 7)")
    assert short(query.run(), "v") == [("b",)], "a column that was not asked for may come"
    before = StructType().add("v", number)
    for name, kind, part in (("v", number, "v int"), ("w", text, "w string"), ("_before", before, "v int")):
        with pytest.raises(ConfigError, match=part):
            query.load(StructType().add(name, kind))


def test_a_value_without_a_place_stops_the_query_and_is_named(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (a int, b text, price numeric(5,2), PRIMARY KEY (a, b))")
    query = ask().load()
    database.execute(
        "INSERT INTO t VALUES (1, 'x', 1); INSERT INTO t VALUES (2, 'y', 'NaN'); DELETE FROM t WHERE a = 2"
    )
    with pytest.raises(ConversionError) as failed:
        query.run()
    text = str(failed.value)
    for part in ("column price", "table t", "a=2, b=y", "decimal(5,2)", "numeric"):
        assert part in text
    assert re.search(r"at [0-9A-F]{16}/0{12}2", text)
    rows = query.load(numeric="string").run()
    assert short(rows, "_op", "price") == [("INSERT", "1.00"), ("INSERT", "NaN"), ("DELETE", None)], "nothing is lost"


# --- Z-sets


def test_a_z_set_takes_old_rows_back(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t REPLICA IDENTITY FULL")
    query = ask(changelog="zset").load()
    assert query.schema.fieldNames() == [
        "id", "v", "_op", "_lsn", "_ordinal", "_xid", "_ts", "_weight", "_unchanged_toast_columns"
    ]  # fmt: skip
    database.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b'); UPDATE t SET v = v || '!'; DELETE FROM t WHERE id = 2")
    rows = query.run()
    assert short(rows, "_op", "id", "v", "_weight") == [
        ("INSERT", 1, "a", 1),
        ("INSERT", 2, "b", 1),
        ("UPDATE", 1, "a", -1),
        ("UPDATE", 1, "a!", 1),
        ("UPDATE", 2, "b", -1),
        ("UPDATE", 2, "b!", 1),
        ("DELETE", 2, "b!", -1),
    ]
    assert [row["_ordinal"] for row in rows] == [1, 2, 3, 3, 4, 4, 5] or len({row["_lsn"] for row in rows}) > 1


def test_a_z_set_keeps_a_toasted_value_that_an_update_left_alone(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int, v text); ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    query = ask(changelog="zset").load()
    database.execute("INSERT INTO t VALUES (1, 1, repeat('x', 5000)); UPDATE t SET n = 2")
    rows = query.run()
    assert [(row["_weight"], row["n"], len(row["v"])) for row in rows] == [(1, 1, 5000), (-1, 1, 5000), (1, 2, 5000)]


def test_a_z_set_is_refused_without_old_rows(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with pytest.raises(SourceError, match="REPLICA IDENTITY FULL"):
        ask(changelog="zset").load()
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    query = ask(changelog="zset").load()
    database.execute("INSERT INTO t VALUES (1)")
    assert len(query.run()) == 1
    database.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT; DELETE FROM t")
    with pytest.raises(ConversionError, match="has no old row"):
        query.run()


def test_a_z_set_cannot_take_back_what_a_truncate_removed(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY FULL")
    query = ask(changelog="zset").load()
    database.execute("INSERT INTO t VALUES (1); TRUNCATE t; INSERT INTO t VALUES (2)")
    with pytest.raises(GapError, match="truncated"):
        query.run()
    rows = query.load(truncate="mark").run()
    assert short(rows, "_op", "id", "_weight") == [("INSERT", 1, 1), ("TRUNCATE", None, None), ("INSERT", 2, 1)]


# --- the table changes


def test_a_query_stops_where_the_table_gets_other_columns_and_goes_on_there(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)")
    query = ask(tables="t,u").load()
    with database.connect() as conn, conn.transaction():
        conn.execute("INSERT INTO t VALUES (1, 'a'); INSERT INTO u VALUES (1)")
        conn.execute("ALTER TABLE t ADD w int DEFAULT 7")
        conn.execute("INSERT INTO t VALUES (2, 'b', 8); INSERT INTO u VALUES (2)")
        conn.execute("ALTER TABLE t DROP v; ALTER TABLE t ALTER w TYPE bigint")
        conn.execute("INSERT INTO t VALUES (3, 9)")
    seen = []
    for expected in ("column w is new", "column v is missing; column w has another type"):
        with pytest.raises(SchemaChanged) as stopped:
            query.run()
        assert expected in str(stopped.value) and "schema_change" in stopped.value.advice
        assert not Position.from_offset(query.offset or {}).is_end, "it stands inside of the transaction"
        seen += [row for batch in query.batches for row in batch]
        query.batches.clear()
        query.load()
    seen += query.run()
    assert [(row["id"], row.get("v"), row.get("w")) for row in seen] == [(1, "a", None), (2, "b", 8), (3, None, 9)]
    assert query.schema.simpleString().startswith("struct<id:int,w:bigint,_op")
    assert len({row["_xid"] for row in seen}) == 1


def test_a_query_may_go_on_with_the_columns_that_it_has(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, n int)")
    query = ask(schema_change="ignore").load()
    database.execute("INSERT INTO t VALUES (1, 'a', 1)")
    database.execute("ALTER TABLE t ADD w int; ALTER TABLE t DROP v; ALTER TABLE t ALTER n TYPE bigint")
    database.execute("INSERT INTO t VALUES (2, 5, 6)")
    assert short(query.run(), "id", "v", "n") == [(1, "a", 1), (2, None, 5)]
    database.execute("INSERT INTO t VALUES (3, 5000000000, 6)")
    with pytest.raises(ConversionError, match="column n of table t"):
        query.run()


def test_a_renamed_table_stops_the_query_and_is_read_under_its_new_name(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    query = ask(schema_change="ignore").load()
    database.execute("INSERT INTO t VALUES (1)")
    assert len(query.run()) == 1
    database.execute("ALTER TABLE t RENAME TO t2; INSERT INTO t2 VALUES (2)")
    with pytest.raises(SchemaChanged, match="t2"):
        query.run()
    with pytest.raises(SourceError, match="renamed to t2"):
        query.load()
    assert short(query.load(table="t2").run(), "id") == [(2,)]


def test_a_backlog_is_read_with_the_columns_of_its_time(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    first = ask().load()
    first.end()  # the slot keeps what follows
    database.execute("INSERT INTO t VALUES (1); ALTER TABLE t ADD v text; INSERT INTO t VALUES (2, 'a')")
    database.execute("ALTER TABLE t RENAME v TO w; INSERT INTO t VALUES (3, 'b')")
    seen: Rows = []
    for _ in range(5):
        try:
            first.load()
            first.run()
            break
        except SchemaChanged:
            continue
    seen = [row for batch in first.batches for row in batch]
    assert [(row["id"], row.get("v"), row.get("w")) for row in seen] == [
        (1, None, None),
        (2, "a", None),
        (3, None, "b"),
    ]


def test_a_planned_batch_is_read_again_the_same_after_a_crash(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    query = ask().load()
    start = query.offset
    database.execute(
        "INSERT INTO t SELECT generate_series(1, 50); ALTER TABLE t ADD v text; INSERT INTO t VALUES (51, 'a')"
    )
    with pytest.raises(SchemaChanged):
        query.run(limit=10)
    once = [row for batch in query.batches for row in batch]
    assert [row["id"] for row in once] == list(range(1, 51))
    end, query.offset = query.offset, start
    assert end is not None
    query.end()
    query.load(_start=str(Position.from_offset(start or {})))
    assert query.replay(start, end) == once
    query.reader.prepareForTriggerAvailableNow()
    beyond = query.reader._target.to_offset()
    with pytest.raises(SchemaChanged, match="column v is new"):
        query.replay(end, beyond)  # whatever was planned, a row with other columns is not read


def test_a_new_consumer_begins_with_the_columns_of_its_first_change(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    first = ask().load()
    database.execute("INSERT INTO t VALUES (1)")
    assert first.run()
    database.execute("ALTER TABLE t ADD v text")
    database.execute("INSERT INTO t VALUES (2, 'a')")
    second = ask(consumer="second").load()
    assert "v" not in second.schema.fieldNames()
    with pytest.raises(SchemaChanged):
        second.run()
    assert short(second.load().run(), "id", "v") == [(2, "a")]
    assert [row["id"] for batch in second.batches for row in batch] == [1, 2]


def test_a_partitioned_table_is_read_by_its_root_or_refused(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE p (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    database.execute("CREATE TABLE p2 (v text, id int NOT NULL, PRIMARY KEY (id))")  # other order
    database.execute("ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (10) TO (20)")
    with pytest.raises(SourceError, match="carry the names of its partitions"):
        ask("p", partition_root="false").load()
    database.execute("CREATE PUBLICATION leaves FOR TABLE p")
    with pytest.raises(ConfigError, match="publish_via_partition_root"):
        ask("p", publication="leaves").load()
    database.execute("ALTER PUBLICATION leaves SET (publish_via_partition_root = true)")
    query = ask("p", publication="leaves", accept_publication="true").load()
    database.execute("INSERT INTO p VALUES (1, 'a'), (11, 'b')")
    assert short(query.run(), "id", "v") == [(1, "a"), (11, "b")]
    database.execute("CREATE TABLE p3 PARTITION OF p FOR VALUES FROM (20) TO (30); INSERT INTO p VALUES (21, 'c')")
    database.execute("ALTER TABLE p DETACH PARTITION p1; DROP TABLE p1")
    database.execute("ALTER TABLE p ADD w int; INSERT INTO p VALUES (12, 'd', 1)")
    with pytest.raises(SchemaChanged, match="column w is new"):
        query.run()
    assert short(query.load().run(), "id", "v", "w") == [(12, "d", 1)]
    assert [row["id"] for batch in query.batches for row in batch] == [1, 11, 21, 12]


def test_a_partitioned_table_is_one_table_by_default(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE p (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    query = ask("p").load()
    database.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)")
    database.execute("INSERT INTO p VALUES (1, 'a'), (11, 'b'); UPDATE p SET id = 12 WHERE id = 1")
    assert [row["id"] for row in query.run()] == [1, 11, 1, 12]


def test_tables_that_change_places_are_not_taken_for_renamed_ones(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE n (id int PRIMARY KEY)")
    query = ask(publication="pair")
    database.execute("CREATE PUBLICATION pair FOR TABLE t, n")
    query.load()
    database.execute("INSERT INTO t VALUES (1); INSERT INTO n VALUES (10); INSERT INTO t VALUES (2)")
    database.execute("BEGIN; ALTER TABLE t RENAME TO o; ALTER TABLE n RENAME TO t; COMMIT; INSERT INTO o VALUES (3)")
    with pytest.raises(SchemaChanged, match="t is o"):
        query.run()
    assert [row["id"] for batch in query.batches for row in batch] == [1, 2], "nothing of the other table"


def test_a_renamed_column_stops_also_a_query_that_ignores_changes(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, f real)")
    query = ask(schema_change="ignore").load()
    database.execute("INSERT INTO t VALUES (1, 'a', 1)")
    assert len(query.run()) == 1
    database.execute("ALTER TABLE t RENAME v TO w")
    database.execute("INSERT INTO t VALUES (2, 'b', 1)")
    with pytest.raises(SchemaChanged, match="column v is missing"):
        query.run()
    assert short(query.load().run(), "w") == [("b",)]
    database.execute("ALTER TABLE t ALTER f TYPE double precision")
    database.execute("INSERT INTO t VALUES (3, 'c', 1.23456789012345)")
    with pytest.raises(SchemaChanged, match="column f has another type"):
        query.run()


def test_an_altered_composite_is_refused_and_read_after_a_load(database: Database, ask: Ask) -> None:
    database.execute("CREATE TYPE c AS (x int, y int); CREATE TABLE t (id int PRIMARY KEY, p c)")
    query = ask().load()
    database.execute("INSERT INTO t VALUES (1, '(1,2)')")
    assert short(query.run(), "p") == [({"x": 1, "y": 2},)]
    database.execute("ALTER TYPE c ADD ATTRIBUTE z int")
    database.execute("INSERT INTO t VALUES (2, '(1,2,3)')")
    with pytest.raises(ConversionError, match="composites=string"):
        query.run()
    assert short(query.load().run(), "p") == [({"x": 1, "y": 2, "z": 3},)]


def test_an_older_checkpoint_is_said_to_be_one(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    ask(consumer="keeps everything").load()
    query = ask().load()
    start = query.offset
    database.execute("INSERT INTO t VALUES (1); ALTER TABLE t ADD v text; INSERT INTO t VALUES (2, 'a')")
    with pytest.raises(SchemaChanged):
        query.run()
    query.load().run()
    query.offset = start
    with pytest.raises(SchemaChanged, match="the checkpoint is older"):
        query.load().run()


# --- what is refused


def test_tables_that_cannot_be_read_in_this_form(database: Database, ask: Ask) -> None:
    database.execute(
        'CREATE TABLE t (id int PRIMARY KEY, _op text); CREATE TABLE u (id int PRIMARY KEY, a int, "A" int)'
    )
    with pytest.raises(ConfigError, match="a column _op"):
        ask().load()
    ask().load(StructType().add("id", IntegerType()))
    with pytest.raises(ConfigError, match="NOT NULL"):
        ask().load(StructType().add("id", IntegerType(), nullable=False))
    with pytest.raises(ConfigError, match="Z-set cannot continue"):
        ask(changelog="zset", schema_change="ignore").load()
    with pytest.raises(ConfigError, match="differ only in case"):
        ask("u").load()
    with pytest.raises(SourceError, match="does not exist"):
        ask("nowhere").load()
    for option, value in (("changelog", "x"), ("numeric", "x"), ("schema_change", "x"), ("heartbeat_interval", "nan")):
        with pytest.raises(ConfigError, match=option):
            ask("u", **{option: value}).load()


def test_a_query_that_joins_a_capture_gets_what_it_asks_for_or_is_refused(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    first = ask(tables="t").load()
    with pytest.raises(ConfigError, match="not captured by slot"):
        ask("u", consumer="second").load()
    for options, part in (
        ({"tables": "t,u"}, "running with tables"),
        ({"tables": "t", "row_filters": "t=id > 5"}, "other tables, rows or columns"),
        ({"publication": "somebody_s"}, "publication=somebody_s"),
        ({"slot": "another"}, "slot=another"),
        ({"two_phase": "true"}, "two_phase=True"),
    ):
        with pytest.raises(ConfigError, match=part):
            ask("t", consumer="second", **options).load()
    ask("t", consumer="third", tables="public.t").load()
    ask("t", consumer="fourth").load()
    first.end()
    with pytest.raises(ConfigError, match="for default, fourth, third"):
        ask("u", consumer="second", tables="u").load()
    assert ask("u", consumer="second", tables="t,u").load().run() == []


def test_a_z_set_of_a_table_of_which_only_inserts_are_published_is_refused(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int)")
    ask(consumer="plain").load()
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    with pytest.raises(SourceError, match="captures only inserts"):
        ask(changelog="zset").load()


def test_no_password_is_in_what_spark_sends_to_the_executors(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    query = ask()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGCDC_DB", database.url.replace("postgres@", "postgres:s3cret@"))
        del query.options["url"]
        query.load()
        reader = query.reader
        reader.stop()
        reader._feed = None
        assert b"s3cret" not in pickle.dumps(reader)


# --- time


def test_an_idle_database_still_moves_time(database: Database, ask: Ask) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    query = ask(tables="t,u", heartbeats="true", heartbeat_interval="0.2").load()
    database.execute("INSERT INTO t VALUES (1)")
    times: list[datetime] = []
    committed = None
    for _ in range(400):
        for row in query.step() or []:
            if row["_op"] == "HEARTBEAT":
                assert row["id"] is None
                times.append(row["_ts"])
            else:
                committed = row["_ts"]
        if len(times) >= 3:
            break
    assert committed is not None and len(times) >= 3
    assert times == sorted(times) and times[-1] > committed
    assert times[-1] - times[0] >= timedelta(seconds=0.4)
    for offset in (query.offset,):
        assert offset is not None and offset["time"] > 0
    before = query.offset
    rows = query.replay(before, {**(before or {}), "time": (before or {})["time"] + 1})
    assert [row["_op"] for row in rows] == ["HEARTBEAT"], "a heartbeat is in the offset: it replays the same"
