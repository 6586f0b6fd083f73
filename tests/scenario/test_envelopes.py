"""Envelopes: Debezium's against what its own engine wrote for the same changes, CloudEvents against the official SDK."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from databases import Database, drop_database
from debezium_cases import TYPES
from debezium_documents import Document, EventQuery, differences, make_changes, set_up
from debezium_engine import PREFIX, engine, is_installed
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pgcdc.core.errors import ConfigError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.transform.cloudevents import cloudevents
from pgcdc.transform.debezium import debezium, debezium_key
from pgcdc.transform.debezium_values import _double, _sparse
from pgcdc.transform.shape import edit_shape
from pgcdc.transform.specs import CloudEventsSpec, DebeziumSpec

RECORDED = Path(__file__).parents[1] / "fixtures" / "debezium.jsonl.gz"
SPEC = DebeziumSpec(topic_prefix=PREFIX, transaction=True)


@pytest.fixture(scope="module")
def shop(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop")
        try:
            yield Database("shop", postgres.url("shop"), postgres)
        finally:
            drop_database(admin, "shop")


@pytest.fixture(scope="module")
def events(shop: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Snapshot and changes, as a query has them."""
    query = EventQuery(shop, tmp_path_factory.mktemp("debezium"), snapshot_mode="initial")
    try:
        set_up(shop)
        query.begin(spark)
        query.run()
        make_changes(shop)
        query.run()
    finally:
        query.end()
    made: DataFrame = query.collect(spark).cache()
    return made


def documents_of(events: DataFrame) -> list[Document]:
    rows = debezium_key(debezium(events, SPEC)).select("_text", "_key").where("_text IS NOT NULL").toArrow().to_pylist()
    return [(row["_key"] and json.loads(row["_key"]), json.loads(row["_text"])) for row in rows]


def with_row(events: DataFrame, expression: str) -> DataFrame:
    return events.withColumn("row", F.expr(expression))


def test_documents_are_those_of_debezium(events: DataFrame) -> None:
    recorded = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).split(b"\n") if line]
    theirs = [(one["key"], one["value"]) for one in recorded if one["value"] is not None]
    assert differences(theirs, documents_of(events), same_server=False) == []


def test_events_that_debezium_has_not_have_no_document(events: DataFrame) -> None:
    rows = debezium(events.where("operation LIKE 'SNAPSHOT_%'"), SPEC).select("_text").collect()
    assert rows and {row["_text"] for row in rows} == {None}


def test_edited_shapes(events: DataFrame) -> None:
    renamed = "transform_keys(map_filter(row, (k, v) -> k <> 'n'), (k, v) -> if(k = 'name', 'label', k))"
    masked = with_row(events.where("table = 'keyed'"), f"transform_values({renamed}, (k, v) -> if(k = 'id', '***', v))")
    edited = edit_shape(masked, drop=["n"], rename={"name": "label"}, as_text=["id"])
    found = [json.loads(one["_text"]) for one in debezium(edited, SPEC).select("_text").collect()]
    assert found[0]["after"] == {"id": "***", "price": "AJY=", "label": "one"}
    assert found[6]["before"] == {"id": "***", "price": None, "label": None}


def test_a_value_that_is_not_of_its_type_becomes_a_string(events: DataFrame) -> None:
    odd = "transform_values(row, (k, v) -> if(k = 'id', v, 'a \"b\"'))"
    rows = with_row(events.where("table LIKE 't~_%' ESCAPE '~' AND operation = 'INSERT'"), odd)
    texts = debezium(rows, SPEC).select("_text").collect()
    assert len(texts) > 400
    found = [json.loads(one["_text"]) for one in texts]
    odd_ones = {repr(one["after"].get(name)) for one in found for name in ("v", "w")} - {repr('a "b"'), "None"}
    assert odd_ones == set()


def test_without_shapes_the_advice_says_how_to_get_them(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="need the column shape"):
        debezium(spark.sql("SELECT 1 AS id"), SPEC)


def test_cloudevents_are_valid(events: DataFrame) -> None:
    spec = CloudEventsSpec(source="/shop", type_prefix="com.example")
    rows = cloudevents(events, spec).toArrow().to_pylist()
    assert {row["operation"] for row in rows} >= {"INSERT", "UPDATE", "DELETE", "TRUNCATE", "SNAPSHOT", "MESSAGE"}
    for row in rows:
        event = JSONFormat().read(CloudEvent, row["_text"])  # refuses names, types and values that are not allowed
        assert (event.get_specversion(), event.get_datacontenttype()) == ("1.0", "application/json")
        assert (event.get_id(), event.get_source()) == (row["id"], "/shop")
        assert event.get_type() == f"com.example.{row['operation'].lower()}"
        assert event.get_subject() == (f"{row['schema']}.{row['table']}" if row["table"] else None)
        attributes = json.loads(row["_text"])
        assert ("time" in attributes) == (row["created_at"] is not None)
        if row["created_at"] is not None:
            assert event.get_time() == row["created_at"]
        assert event.get_extension("sequence") == row["position"]
        assert event.get_extension("channel") == row["channel"]
        assert event.get_extension("xid") == (str(row["xid"]) if row["xid"] else None)
        unchanged = row["unchanged_toast_columns"]
        assert event.get_data() == {
            "op": row["operation"],
            "table": row["table"],
            "row": row["row"] and dict(row["row"]),
            "old": row["old"] and dict(row["old"]),
            **({"_unchanged_toast_columns": unchanged} if unchanged else {}),
        }


@pytest.mark.slow
def test_documents_are_those_of_the_engine(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    """Both read the same changes, each through a slot of its own, so that also xids and times are the same."""
    if not is_installed():
        pytest.skip("Debezium's engine is missing: pip install -e '.[bench-peers]'")
    query = EventQuery(database, tmp_path, snapshot_mode="initial")
    try:
        set_up(database)
        query.begin(spark)
        query.run()
        with engine(database.url, tmp_path, f"dbz_{database.name}", f"public.t_{len(TYPES) - 1}") as records:
            make_changes(database)
            theirs = [(one["key"], one["value"]) for one in records() if not one["topic"].endswith(".transaction")]
        query.run()
    finally:
        query.end()
    assert differences([one for one in theirs if one[1]], documents_of(query.collect(spark)), same_server=True) == []


def test_a_sparse_vector_is_json_or_left_to_be_text(spark: SparkSession) -> None:
    for text, expected in (
        ("{1:1.5,3:-2e-05}/5", {"dimensions": 5, "vector": [[1, 1.5], [3, -2e-05]]}),
        ("{}/3", {"dimensions": 3, "vector": []}),
        *((odd, None) for odd in ("", "{}", "{}/", "{1:2}/z", "{x}/y", "{1:x}/2")),
    ):
        (made,) = spark.sql(f"SELECT {_sparse('x')} FROM VALUES ('{text}') AS t(x)").collect()
        assert (made[0] and json.loads(made[0])) == expected, text


def test_a_number_is_json_or_left_to_be_text(spark: SparkSession) -> None:
    for text, expected in (
        ("1.5", 1.5), ("-1e+30", -1e30), ("NaN", "NaN"), ("-Infinity", "-Infinity"),
        *((odd, None) for odd in ("", "No", 'It is "so"', "nan", "inf", "infinity")),
    ):  # fmt: skip
        (made,) = spark.sql(f"SELECT {_double('x', 'DOUBLE')} FROM VALUES ('{text}') AS t(x)").collect()
        assert (made[0] and json.loads(made[0])) == expected, text
