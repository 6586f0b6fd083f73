"""The functions on typed changes, on batch DataFrames and on streams."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType
from typed_changes import COLUMNS, Change, change, run_stream, to_frame, to_stream

from pgcdc import ConfigError, Position
from pgcdc import functions as C

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def one(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name}


HISTORY = [
    change("INSERT", 10, one(1, "a")),
    change("INSERT", 10, one(2, "b"), ordinal=2),
    change("INSERT", 10, one(3, "gone"), ordinal=3),
    change("TRUNCATE", 20),
    change("INSERT", 30, one(1, "c")),
    change("INSERT", 30, one(2, "d"), ordinal=2),
    change("UPDATE", 40, one(2, "e")),
    change("UPDATE", 40, one(2, "f"), ordinal=2, unchanged_toast_columns=["name"]),
    change("UPDATE", 50, one(5, "c"), before={"id": 1}),
    change("INSERT", 60, one(6, "g")),
    change("DELETE", 60, {"id": 6}, ordinal=2),
    change("HEARTBEAT", 70),
]


def contents(df: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """The rows, sorted."""
    rows = [tuple(row) for row in df.select(*columns).collect()]
    return sorted(rows, key=lambda row: [(value is not None, value) for value in row])


# --- rows and positions


def test_sequence_orders_changes_and_has_no_ties(spark: SparkSession) -> None:
    df = C.with_sequence(to_frame(spark, HISTORY[::-1]))
    assert df.columns[-1] == "_sequence"
    found = [(row["_lsn"], row["_ordinal"]) for row in df.orderBy("_sequence").collect()]
    assert found == [(one["_lsn"], one["_ordinal"]) for one in HISTORY]
    assert df.select(C.sequence().alias("s")).distinct().count() == len(HISTORY)


def test_sequence_of_a_z_set_puts_the_old_row_first(spark: SparkSession) -> None:
    pair = [change("UPDATE", 10, one(1, "new"), weight=1), change("UPDATE", 10, one(1, "old"), weight=-1)]
    df = C.with_sequence(to_frame(spark, pair, zset=True), "seq").orderBy("seq")
    assert [row["name"] for row in df.collect()] == ["old", "new"]


def test_only_inserts(spark: SparkSession) -> None:
    assert contents(C.only_inserts(to_frame(spark, HISTORY)), "id", "name") == [
        (1, "a"), (1, "c"), (2, "b"), (2, "d"), (3, "gone"), (6, "g"),
    ]  # fmt: skip


def test_as_of_includes_the_position_and_nothing_after_it(spark: SparkSession) -> None:
    df = to_frame(spark, HISTORY).cache()
    cases: list[tuple[Position | str, int]] = [
        ("0/A", 3),  # the transaction that ends there, whole
        ("0/9", 0),
        ("0/B", 3),
        (Position.at(10, 1), 1),
        (Position.at(10, 1, 5), 1),  # a message after the first change
        (str(Position.at(40, 1)), 7),
        (Position.end(40), 8),
        ("FFFFFFFF/FFFFFFFF", len(HISTORY)),
    ]
    assert [C.as_of(df, position).count() for position, _ in cases] == [count for _, count in cases]
    df.unpersist()


def test_without_metadata(spark: SparkSession) -> None:
    df = to_frame(spark, HISTORY)
    assert C.without_metadata(df).columns == ["id", "name"]
    assert C.without_metadata(C.with_sequence(df), keep=["_op"]).columns == ["id", "name", "_op", "_sequence"]


# --- keys


def test_key_update_becomes_a_delete_and_an_insert_and_the_rest_stays(spark: SparkSession) -> None:
    df = to_frame(spark, HISTORY)
    split = C.split_key_updates(df, "id")
    assert split.columns == df.columns
    assert [field.dataType for field in split.schema] == [field.dataType for field in df.schema]
    untouched = [row for row in df.collect() if row["_lsn"] != 50]
    assert [row for row in split.collect() if row["_lsn"] != 50] == untouched
    first, second = split.filter("_lsn = 50").collect()
    assert (first["_op"], first["id"], first["name"], first["_before"]["id"]) == ("DELETE", 1, None, 1)
    assert (second["_op"], second["id"], second["name"], second["_before"]) == ("INSERT", 5, "c", None)
    assert first["_ts"] == second["_ts"]
    assert first["_xid"] == second["_xid"]


def test_updates_that_only_look_like_key_updates_stay(spark: SparkSession) -> None:
    same_key = change("UPDATE", 10, one(1, "b"), before=one(1, "a"))  # REPLICA IDENTITY FULL
    other_key = change("UPDATE", 20, one(2, "b"), before={"id": 1})  # of the key `name` nothing was sent
    df = to_frame(spark, [same_key, other_key])
    assert contents(C.split_key_updates(df, ["id"]), "_op", "id") == [("DELETE", 1), ("INSERT", 2), ("UPDATE", 1)]
    assert contents(C.split_key_updates(df.filter("_lsn = 20"), ["name"]), "_op") == [("UPDATE",)]


def test_one_changed_column_of_a_key_is_enough(spark: SparkSession) -> None:
    columns = {"a": pa.int32(), "b": pa.int32()}
    old = {"a": 1, "b": 2}
    updates = [change("UPDATE", 10, {"a": 1, "b": 3}, before=old), change("UPDATE", 20, {"a": 3, "b": 2}, before=old)]
    split = C.split_key_updates(to_frame(spark, updates, columns), ["a", "b"])
    assert contents(split, "_lsn", "_op", "a", "b") == [
        (10, "DELETE", 1, 2), (10, "INSERT", 1, 3), (20, "DELETE", 1, 2), (20, "INSERT", 3, 2),
    ]  # fmt: skip


def test_names_with_dots_and_backticks_are_columns_like_others(spark: SparkSession) -> None:
    columns = {"a.b": pa.int32(), "c`d": pa.string()}
    df = to_frame(spark, [change("UPDATE", 10, {"a.b": 2, "c`d": "x"}, before={"a.b": 1})], columns)
    assert [row["a.b"] for row in C.split_key_updates(df, ["a.b"]).collect()] == [1, 2]
    assert [tuple(row)[:2] for row in C.latest_per_key(df, ["a.b"]).collect()] == [(2, "x")]
    zset = to_frame(spark, [change("INSERT", 10, {"a.b": 2, "c`d": "x"}, weight=1)], columns, zset=True)
    assert [tuple(row) for row in C.current_state(zset).collect()] == [(2, "x")]


def test_latest_per_key_knows_deletes_truncates_and_key_updates(spark: SparkSession) -> None:
    latest = C.latest_per_key(to_frame(spark, HISTORY), "id")
    assert contents(latest, "id", "name", "_lsn", "_ordinal") == [(2, "f", 40, 2), (5, "c", 50, 1)]
    assert latest.columns == to_frame(spark, HISTORY).columns
    assert contents(latest.filter("id = 2"), "_unchanged_toast_columns") == [(["name"],)]


def test_latest_per_key_with_deletes_is_what_a_keyed_copy_has_to_do(spark: SparkSession) -> None:
    latest = C.latest_per_key(to_frame(spark, HISTORY), ["id"], keep_deletes=True)
    assert contents(latest, "id", "_op") == [
        (None, "TRUNCATE"), (1, "DELETE"), (2, "UPDATE"), (5, "INSERT"), (6, "DELETE"),
    ]  # fmt: skip


def test_latest_per_key_reads_its_input_once(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_frame(spark, HISTORY).write.parquet(str(tmp_path / "changes"))
    C.latest_per_key(spark.read.parquet(str(tmp_path / "changes")), "id").explain()
    assert capsys.readouterr().out.count("FileScan") == 1


def test_delete_without_its_key_is_an_error(spark: SparkSession) -> None:
    df = to_frame(spark, [change("INSERT", 10, one(1, "a")), change("DELETE", 20, {"id": 1})])
    with pytest.raises(Exception, match=r"a DELETE has no value of the key 'name'.*REPLICA IDENTITY FULL"):
        C.latest_per_key(df, "name").collect()


# --- Z-sets


def test_current_state_keeps_duplicates(spark: SparkSession) -> None:
    rows = [
        change("INSERT", 10, one(1, "a"), weight=1),
        change("INSERT", 20, one(1, "a"), weight=1),
        change("INSERT", 30, {"id": None, "name": None}, weight=1),
        change("INSERT", 40, one(2, "b"), weight=1),
        change("UPDATE", 50, one(2, "b"), weight=-1),
        change("UPDATE", 50, one(2, "c"), weight=1),
        change("DELETE", 60, one(2, "c"), weight=-1),
        change("HEARTBEAT", 70),
    ]
    state = C.current_state(to_frame(spark, rows, zset=True))
    assert state.columns == ["id", "name"]
    assert contents(state, "id", "name") == [(None, None), (1, "a"), (1, "a")]
    after = [*rows, change("TRUNCATE", 80), change("INSERT", 80, one(3, "d"), ordinal=2, weight=1)]
    assert contents(C.current_state(to_frame(spark, after, zset=True)), "id", "name") == [(3, "d")]


def test_current_state_compares_maps_and_refuses_variants(spark: SparkSession) -> None:
    columns = {"id": pa.int64(), "tags": pa.map_(pa.string(), pa.string())}
    rows = [
        change("INSERT", 10, {"id": 1, "tags": [("a", "1"), ("b", "2")]}, weight=1),
        change("DELETE", 20, {"id": 1, "tags": [("b", "2"), ("a", "1")]}, weight=-1),
        change("INSERT", 30, {"id": 2, "tags": [("a", "1")]}, weight=1),
    ]
    df = to_frame(spark, rows, columns, zset=True)
    assert [row["tags"] for row in C.current_state(df).collect()] == [{"a": "1"}]
    with pytest.raises(ConfigError, match=r"cannot compare column 'doc', which is or contains a VARIANT.*json.*drop"):
        C.current_state(df.withColumn("doc", F.array(F.parse_json(F.lit("{}")))))


# --- any history


def play(seed: int) -> tuple[list[Change], list[Change], list[tuple[int, list[tuple[int, int, str]]]]]:
    """A random history of a table with the key (part, id): as changes, as a Z-set, and the table after some transactions."""
    rnd = random.Random(seed)
    full = rnd.random() < 0.5
    table: dict[tuple[int, int], str] = {}
    changes: list[Change] = []
    zset: list[Change] = []
    states = []
    for lsn in range(1, 301):
        for ordinal in range(1, rnd.randint(1, 4) + 1):
            op = rnd.choices(["INSERT", "UPDATE", "KEY", "DELETE", "TRUNCATE"], [50, 20, 20, 10, 0.5])[0]
            free = (rnd.randrange(30), rnd.randrange(5))
            if op == "TRUNCATE":
                table.clear()
                changes.append(change(op, lsn, ordinal=ordinal))
                zset.append(change(op, lsn, ordinal=ordinal))
                continue
            if op in ("INSERT", "KEY") and free in table:
                continue
            if op == "INSERT":
                table[free] = name = str(rnd.randrange(4))
                row = {"part": free[0], "id": free[1], "name": name}
                changes.append(change(op, lsn, row, ordinal=ordinal))
                zset.append(change(op, lsn, row, weight=1, ordinal=ordinal))
                continue
            if not table:
                continue
            key = rnd.choice(sorted(table))
            old = {"part": key[0], "id": key[1], "name": table.pop(key)}
            sent = old if full else {"part": key[0], "id": key[1]}
            if op == "DELETE":
                changes.append(change(op, lsn, sent, ordinal=ordinal))
                zset.append(change(op, lsn, old, weight=-1, ordinal=ordinal))
                continue
            key = free if op == "KEY" else key
            table[key] = str(rnd.randrange(4))
            new = {"part": key[0], "id": key[1], "name": table[key]}
            before = sent if full or op == "KEY" else None
            changes.append(change("UPDATE", lsn, new, before=before, ordinal=ordinal))
            zset.append(change("UPDATE", lsn, old, weight=-1, ordinal=ordinal))
            zset.append(change("UPDATE", lsn, new, weight=1, ordinal=ordinal))
        if lsn in (100, 300):
            states.append((lsn, sorted((*key, name) for key, name in table.items())))
    for rows in (changes, zset):
        rnd.shuffle(rows)
    return changes, zset, states


@settings(max_examples=2)
@given(seed=st.integers(0, 1 << 32))
def test_any_history_folds_to_the_table(spark: SparkSession, seed: int) -> None:
    columns = {"part": pa.int32(), "id": pa.int32(), "name": pa.string()}
    changes, zset, states = play(seed)
    df, weighted = to_frame(spark, changes, columns), to_frame(spark, zset, columns, zset=True)
    for lsn, table in states:
        until = Position.end(lsn)
        assert contents(C.latest_per_key(C.as_of(df, until), ["part", "id"]), *columns) == table
        assert contents(C.current_state(C.as_of(weighted, until)), *columns) == table
    names = C.current_state(weighted.drop("part", "id"))
    assert Counter(row["name"] for row in names.collect()) == Counter(name for *_, name in states[-1][1])


# --- streams


def test_stream_of_key_updates(spark: SparkSession, tmp_path: Path) -> None:
    stream = to_stream(spark, tmp_path, [HISTORY[:6], HISTORY[6:]])
    rows = run_stream(C.with_sequence(C.split_key_updates(C.as_of(stream, "0/32"), "id")), "key_updates")
    assert len(rows) == 10
    assert [(row["_op"], row["id"]) for row in rows[-2:]] == [("DELETE", 1), ("INSERT", 5)]


def test_stream_of_a_z_set_gives_the_current_state(spark: SparkSession, tmp_path: Path) -> None:
    columns = {**COLUMNS, "tags": pa.map_(pa.string(), pa.string())}
    old, new = {**one(1, "a"), "tags": [("k", "v")]}, {**one(1, "b"), "tags": [("k", "v")]}
    batches = [
        [change("INSERT", 10, old, weight=1), change("INSERT", 11, old, weight=1)],
        [change("UPDATE", 20, old, weight=-1), change("UPDATE", 20, new, weight=1), change("HEARTBEAT", 21)],
    ]
    state = C.current_state(to_stream(spark, tmp_path / "files", batches, columns, zset=True))
    rows = run_stream(state, "current", "complete")
    assert sorted((row["id"], row["name"], row["tags"]["k"]) for row in rows) == [(1, "a", "v"), (1, "b", "v")]


def test_stream_of_a_z_set_stops_at_a_truncate(spark: SparkSession, tmp_path: Path) -> None:
    batches = [[change("INSERT", 10, one(1, "a"), weight=1)], [change("TRUNCATE", 20)]]
    state = C.current_state(to_stream(spark, tmp_path, batches, zset=True))
    with pytest.raises(StreamingQueryException, match=f"truncated at {Position.at(20, 1)}.*new checkpoint"):
        run_stream(state, "truncated", "complete")


IDLE = [
    [change("INSERT", 1, one(1, "a"), second=10), change("INSERT", 2, one(2, "b"), second=20)],
    [change("HEARTBEAT", 3, second=300)],
    [change("HEARTBEAT", 4, second=310)],
]


def test_heartbeats_close_the_windows_of_an_idle_table(spark: SparkSession, tmp_path: Path) -> None:
    marked = C.with_watermark(to_stream(spark, tmp_path, IDLE), "1 minute")
    # A filter on a column that HEARTBEAT rows do not have must not stop them, either.
    counts = marked.filter("name = 'a'").groupBy(F.window("_ts", "1 minute")).count()
    assert [row["count"] for row in run_stream(counts, "closed")] == [1]


@pytest.mark.parametrize("nullable", [True, False])
def test_heartbeats_reach_the_watermark_in_the_optimized_plan(
    spark: SparkSession, tmp_path: Path, nullable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = to_stream(spark, tmp_path, IDLE)
    shape = StructType([StructField(field.name, field.dataType, nullable) for field in stream.schema])
    stream = spark.readStream.schema(shape).parquet(str(tmp_path))
    C.with_watermark(stream, "1 minute").filter("name = 'a'").select("_ts").explain(extended=True)
    plan = capsys.readouterr().out.partition("== Optimized Logical Plan ==")[2].partition("== Physical Plan ==")[0]
    above, below = plan.split("EventTimeWatermark")
    assert "HEARTBEAT" in above
    assert "name" in above
    assert "Filter" not in below


def test_watermark_survives_the_split_of_key_updates(spark: SparkSession, tmp_path: Path) -> None:
    marked = C.with_watermark(to_stream(spark, tmp_path, IDLE), "1 minute")
    counts = C.split_key_updates(marked, "id").groupBy(F.window("_ts", "1 minute")).count()
    assert [row["count"] for row in run_stream(counts, "split_and_closed")] == [2]


# --- errors


def test_errors_name_the_function_and_the_nearest_column(spark: SparkSession, tmp_path: Path) -> None:
    df = to_frame(spark, HISTORY)
    zset = to_frame(spark, [], zset=True)
    stream = to_stream(spark, tmp_path, [HISTORY])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: C.latest_per_key(df, "nmae"), "latest_per_key: the table has no column 'nmae'. Did you mean name?"),
        (lambda: C.latest_per_key(df, "xyz"), "latest_per_key: the table has no column 'xyz'. Known: id, name"),
        (lambda: C.latest_per_key(df, []), "latest_per_key needs at least one key. Known: id, name"),
        (lambda: C.latest_per_key(df, "_op"), "latest_per_key: the table has no column '_op'."),
        (lambda: C.latest_per_key(stream, "id"), "latest_per_key cannot read a stream. Call it in foreachBatch"),
        (lambda: C.latest_per_key(zset, "id"), "latest_per_key cannot read a Z-set. Use current_state"),
        (lambda: C.split_key_updates(zset, "id"), "split_key_updates cannot read a Z-set."),
        (lambda: C.split_key_updates(df.drop("_before"), "id"), "split_key_updates needs the column _before"),
        (
            lambda: C.split_key_updates(df.withColumn("key", F.lit(1)), "key"),
            "split_key_updates: _before has no field 'key'",
        ),
        (lambda: C.current_state(df), "current_state needs the column _weight, which the DataFrame lacks. Read the"),
        (lambda: C.with_sequence(df.withColumnRenamed("_lsn", "_lsn2")), "Did you mean _lsn2?"),
        (lambda: C.only_inserts(spark.range(1)), "Read the table with option('table', ...)"),
        (lambda: C.with_watermark(df.drop("_ts"), "1 minute"), "with_watermark needs the column _ts"),
        (lambda: C.as_of(df, "yesterday"), "as_of: 'yesterday' is not a position. Use a pgcdc.Position"),
        (lambda: C.as_of(df, 12), "as_of: 12 is not a position."),  # type: ignore[arg-type]
        (lambda: C.without_metadata(df, keep=["_opp"]), "'_opp' is not a metadata column. Did you mean _op?"),
    ]
    for call, expected in cases:
        with pytest.raises(ConfigError) as caught:
            call()
        assert expected in str(caught.value)


# --- documentation


def test_examples_of_the_page_print_what_it_says(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "functions.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", page, re.MULTILINE | re.DOTALL)
    names = {"spark": spark}
    exec(blocks[0][0], names)
    examples = [(code, output) for code, output in blocks if output]
    assert len(examples) >= len(C.__all__) - 3  # METADATA, sequence and with_watermark, which needs a database
    for code, output in examples:
        capsys.readouterr()
        exec(code, names)
        assert capsys.readouterr().out.strip() == output.strip()
    assert [name for name in C.__all__ if f"`{name}`" not in page] == []
