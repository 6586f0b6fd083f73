"""Transforms in a real Spark: to the bytes what the source makes, secrets that no plan shows, and errors that say where."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from event_streams import ITEMS, ORDERS, SCHEMA, SEED, START, Change, Transaction, spooled, streams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transform_cases import KEY, KEY_VARIABLE, simple_chains
from wire import UNCHANGED

from pgcdc import transform
from pgcdc.core.errors import ConfigError, TransformError
from pgcdc.event.batch import Batch
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, event_batch
from pgcdc.event.forms import Form
from pgcdc.spark.session import with_settings
from pgcdc.spool.reader import SpoolReader
from pgcdc.transform.columns import ColumnProgram
from pgcdc.transform.program import Chain, Steps, compile_chains, split_forms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ODD = '\n"\\\u2028🐘'
STREAM = [
    Transaction(
        110,
        (
            Change(ORDERS, "INSERT", ("1", "a@b.c", "2.50")),
            Change(ORDERS, "UPDATE", ("1", UNCHANGED, None), ("1", "old", "9"), "O"),
            Change(ORDERS, "UPDATE", ("2", ODD, "7"), ("1", None, None), "K"),
            Change(ITEMS, "INSERT", ("1", "2026-11-16 00:46:06+00")),
            Change(ORDERS, "TRUNCATE"),
        ),
    ),
    Transaction(
        120, (Change(ORDERS, "DELETE", None, ("2", None, None), "K"), Change(ITEMS, "DELETE", None, ("1", "2"), "O"))
    ),
]


class AsExpressions(Steps):
    """A chain of which the source does nothing."""

    is_simple = property(lambda self: False)
    is_rendered = property(lambda self: False)


@pytest.fixture(autouse=True, scope="module")
def _key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        yield


def by_source(reader: SpoolReader, chains: list[Chain]) -> list[list[str]]:
    pushed = parse_chains(compile_chains(chains).source_options().get("_chains", ""))
    slices, schema = reader.slices(START, reader.end), block_schema(pushed)
    batch = event_batch(slices, reader.relations(), SEED, schema, chains=pushed) if slices else None
    if batch is None:
        return [[] for _ in chains]
    table = pa.Table.from_batches([batch])
    whole = Batch(START, reader.end, table)
    of_chain = compile_chains(chains).of_chain  # type: ignore[attr-defined]
    batches = split_forms(whole, [(number, "lines") for number in of_chain]) if pushed else [whole] * len(chains)
    return [one.events.column("line").to_pylist() for one in batches]


def by_spark(spark: SparkSession, reader: SpoolReader, chains: list[Chain]) -> list[list[str]]:
    program = compile_chains(chains)
    steps = tuple(AsExpressions(one.routes, one.transforms) for one in program.distinct)  # type: ignore[attr-defined]
    forced = ColumnProgram(tuple(chains), steps, program.of_chain, transaction=False)  # type: ignore[attr-defined]
    return [
        one.events.column("line").to_pylist() for one in forced.collect(events_in(spark, reader), START, reader.end)
    ]


def events_in(spark: SparkSession, reader: SpoolReader) -> DataFrame:
    batch = event_batch(reader.slices(START, reader.end), reader.relations(), SEED, SCHEMA)
    rows = SCHEMA.empty_table() if batch is None else pa.Table.from_batches([batch])
    return spark.createDataFrame(rows)  # maps keep the order of their columns this way


@pytest.fixture(scope="module")
def events(spark: SparkSession) -> DataFrame:
    with spooled(STREAM) as reader:
        return events_in(spark, reader).coalesce(1)


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(streams(), st.lists(simple_chains(), min_size=3, max_size=3, unique_by=repr))
def test_spark_expressions_and_the_source_write_the_same_bytes(
    spark: SparkSession, transactions: list[Transaction], chains: list[Chain]
) -> None:
    with spooled(
        [*STREAM, *(Transaction(one.lsn + 100, one.changes, one.commit_time) for one in transactions)]
    ) as reader:
        possible = []
        for chain in chains:
            with contextlib.suppress(TransformError):
                by_source(reader, [chain])
                possible.append(chain)
        possible += [chain for chain in FIXED if chain not in possible]
        assert by_spark(spark, reader, possible) == by_source(reader, possible)


FIXED = [
    Chain(
        (
            {"type": "drop_columns", "columns": ["id"]},
            {"type": "rename_fields", "fields": {"note": "total", "total": "id"}},
            {"type": "mask", "columns": ["id", "line"], "mode": "zero"},
            {"type": "mask", "columns": ["total"], "mode": "hash"},
            {"type": "mask", "columns": ["order"]},
        )
    ),
    Chain(({"type": "filter", "operations": ["insert", "Delete"]},), ("sales.*", "orders")),
    Chain(({"type": "drop_columns", "columns": ["note"]},)),  # of which one event has only the name: unchanged TOAST
]


def values(frame: DataFrame, *columns: str) -> list[Any]:
    return [tuple(row) if len(columns) > 1 else row[0] for row in frame.select(*columns).collect()]


def test_sql_sets_values_of_rows_and_of_what_old_has(events: DataFrame) -> None:
    made = transform.sql(
        {"total": "cast(row['total'] AS decimal(10,2)) * 2", "note": "upper(row['note'])", "big": "row['id'] > 1"}
    )
    found = values(made(events), "operation", "row", "old", "unchanged_toast_columns")
    assert found[0][1] == {"id": "1", "note": "A@B.C", "total": "5.00", "big": "f"}
    assert found[1][1:] == (
        {"id": "1", "total": None, "big": "f"},
        {"id": "1", "note": "OLD", "total": "18.00"},
        ["note"],
    )
    assert found[2][2] == {"id": "1"}, "what was not sent of the old row is not set"
    assert found[4] == ("TRUNCATE", None, None, None)
    assert found[5][1] == {"id": "2"}


def test_filters_ask_rows_and_let_the_rest_pass(events: DataFrame) -> None:
    by_value = transform.filter(where="cast(row['total'] AS decimal(10,2)) > 5")
    assert values(by_value(events), "operation") == ["UPDATE", "TRUNCATE"]
    both = transform.filter(operations=["UPDATE"], where="row['note'] IS NOT NULL")
    assert [row["id"] for row in values(both(events), "row")] == ["2"]


def test_a_python_function_sees_each_event_once_and_may_drop_it(events: DataFrame) -> None:
    def double(event: dict[str, Any]) -> dict[str, Any] | None:
        if event["operation"] == "DELETE":
            return None
        if event["row"] is not None:
            event["row"]["twice"] = event["row"]["id"] * 2 if "id" in event["row"] else None
        return event | {"channel": event["channel"].upper()}

    found = values(transform.python(double)(events), "channel", "row", "position", "created_at")
    assert [row and row.get("twice") for _, row, _, _ in found] == ["11", "11", "22", None, None]
    assert {channel for channel, *_ in found} == {"PGCDC:ORDERS", "PGCDC:SALES.ITEMS"}
    kept = values(events.where("operation != 'DELETE'"), "position", "created_at")
    assert [(place, at) for _, _, place, at in found] == kept


def test_a_function_that_fails_names_the_event(events: DataFrame) -> None:
    program = compile_chains([Chain((transform.python(lambda event: event["nothing"]),))])
    with pytest.raises(TransformError, match="at position 000000000000006E/0000000000001: KeyError: 'nothing'"):
        program.collect(events, START, START)


def test_an_error_in_sql_stops_with_the_transform_and_the_position(events: DataFrame) -> None:
    specs = ({"type": "drop_columns", "columns": ["x"]}, {"type": "sql", "set": {"n": "cast(row['note'] AS int)"}})
    program = compile_chains([Chain(({"type": "filter", "operations": ["UPDATE"]}, *specs))])
    with pytest.raises(TransformError) as caught:
        program.collect(events, START, START)
    # The first UPDATE fails by its old row: the new one has no note. INSERTs before it are not asked.
    assert "transform 3 (sql) failed at position 000000000000006E/0000000000002" in str(caught.value)
    assert "CAST_INVALID_INPUT" in str(caught.value) and "try_cast" in str(caught.value)
    renamed = compile_chains([Chain(({"type": "rename_fields", "fields": {"note": "total"}}, *specs))])
    with pytest.raises(
        TransformError, match=r"rename_fields gives two columns the name of one.*000000000000006E/0000000000001"
    ):
        renamed.collect(events, START, START)


def test_a_program_of_all_kinds_collects_once_and_gives_each_chain_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """Through the source: chains that it renders, one that also asks Spark, and one that only Spark can do."""
    (tmp_path / "key").write_text(KEY)
    simple = {"type": "mask", "columns": ["note"], "mode": "hash", "key_file": str(tmp_path / "key")}
    chains = [
        Chain(),
        Chain((simple, {"type": "filter", "where": "row['note'] LIKE '%0%' OR operation = 'DELETE'"}), ("orders",)),
        Chain((simple, {"type": "sql", "set": {"note": "left(row['note'], 4)"}}), ("ord*",)),
        Chain(routes=("sales.*",)),
        Chain(),
    ]
    folder = tmp_path / "spool"
    with spooled(STREAM, folder=folder):
        tables = run(spark, chains, folder, tmp_path / "columns")
        blocks = run(spark, [chains[0], chains[3], Chain((simple,))], folder, tmp_path / "blocks")
    assert [one.num_rows for one in tables] == [7, 4, 5, 2, 7]
    assert tables[0] == tables[4] == blocks[0] and tables[3] == blocks[1]
    assert all(one.schema.names == ["position", "line"] for one in tables)
    hashed = [json.loads(line)["payload"]["row"] for line in blocks[2].column("line").to_pylist()]
    assert len(hashed[0]["note"]) == 64
    cut = [json.loads(line)["payload"]["row"] for line in tables[2].column("line").to_pylist()]
    assert cut[0] == {**hashed[0], "note": hashed[0]["note"][:4]}
    for checkpoint in (tmp_path / "columns", tmp_path / "blocks"):
        for file in checkpoint.rglob("*"):
            assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_records_and_tables_are_made_of_what_spark_returns(spark: SparkSession, tmp_path: Path) -> None:
    steps = (
        {"type": "drop_columns", "columns": ["total"]},
        {"type": "sql", "set": {"size": "length(row['note'])"}},
        {"type": "mask", "columns": ["note"]},
    )
    forms: list[Form] = ["lines", "records", "tables"]
    folder = tmp_path / "spool"
    with spooled(STREAM, folder=folder):
        lines, records, tables = batches(spark, [Chain(steps, ("orders",), form) for form in forms], folder, tmp_path)
    texts = lines.texts()
    assert len(texts) == 5 and records.texts() == texts
    assert records.records().key.to_pylist() == ['["1"]', '["1"]', '["2"]', None, '["2"]']
    insert, *_ = tables.tables()
    assert [column.name for column in insert.relation.columns] == ["id", "note", "size"]
    assert [one[0].as_py() for one in insert.new] == ["1", "***REDACTED***", "5"]
    assert sorted(row for run in tables.tables() for row in run.rows.tolist()) == list(range(5))


def run(spark: SparkSession, chains: list[Chain], folder: Path, checkpoint: Path) -> list[pa.Table]:
    return [one.events for one in batches(spark, chains, folder, checkpoint)]


def batches(spark: SparkSession, chains: list[Chain], folder: Path, checkpoint: Path) -> list[Batch]:
    """What a lane does."""
    program = compile_chains(chains)
    options = {"_spool": str(folder), **program.source_options()}
    assert KEY not in str(options)
    source = spark.readStream.format("pgcdc").options(**options).schema(program.source_schema()).load()
    found: list[Batch] = []

    def collect(batch: DataFrame, _: int) -> None:
        found[:] = program.collect(batch, START, START)

    with with_settings(spark, program.settings()):
        writer = program.project(source).writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(collect)
        writer.trigger(availableNow=True).start().awaitTermination()
    return found


def test_the_key_of_a_hash_stands_in_no_plan_and_no_page_of_the_ui(spark: SparkSession, events: DataFrame) -> None:
    pads = [one.hex().upper() for one in transform_pads()]
    frame = transform.mask("note", mode="hash", key=KEY)(events)
    frame.write.format("noop").mode("overwrite").save()
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        frame.explain(True)
        frame.explain("codegen")
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    shown.write(executions.toString())
    for number in range(executions.size()):
        shown.write(executions.apply(number).physicalPlanDescription())
    text = shown.getvalue()
    assert "SecretKeySpec" in text
    for secret in (KEY, KEY.encode().hex().upper(), *pads):
        assert secret not in text and secret.lower() not in text
    assert KEY not in repr(transform.mask("note", mode="hash", key=KEY))


def transform_pads() -> tuple[bytes, bytes]:
    from pgcdc.event.masks import hmac_pads

    return hmac_pads(KEY.encode())


BAD = {
    "sql that does not parse": ({"type": "filter", "where": "row['a'] >"}, "transform 1 .filter."),
    "unknown function": ({"type": "sql", "set": {"a": "frobnicate(row['a'])"}}, "frobnicate"),
    "unknown column": ({"type": "sql", "set": {"a": "upper(nam)"}}, "nam"),
    "no condition": ({"type": "filter", "where": "upper(channel)"}, "is string, not a condition"),
    "a list": ({"type": "sql", "set": {"a": "split(channel, ':')"}}, "array<string>, not one value"),
    "another value each time": ({"type": "sql", "set": {"a": "rand()"}}, "another value each time"),
    "other events": (
        {"type": "sql", "set": {"a": "sum(lsn) OVER (PARTITION BY channel)"}},
        "looks at more than one event",
    ),
    "an aggregate": ({"type": "sql", "set": {"a": "max(channel)"}}, "looks at more than one event"),
    "several rows": ({"type": "sql", "set": {"a": "explode(map_keys(row))"}}, "explode|generator"),
    "unknown module": ({"type": "python", "function": "no_such_module:f"}, "there is no module no_such_module"),
    "unknown function of a module": ({"type": "python", "function": "json:nothing"}, "has no function nothing"),
    "unknown operation": ({"type": "filter", "operations": ["UPSERT"]}, "unknown operation UPSERT"),
    "an empty filter": ({"type": "filter"}, "needs operations"),
    "unknown type": ({"type": "drop"}, "drop"),
    "two of one name": ({"type": "rename_fields", "fields": {"a": "c", "b": "c"}}, "two fields get the name c"),
    "a key without use": ({"type": "mask", "columns": ["a"], "key_env": "A"}, "needs no key"),
}


def test_bad_transforms_are_found_before_the_start(spark: SparkSession) -> None:
    for name, (spec, message) in BAD.items():
        with pytest.raises(ConfigError) as caught:
            transform.check_specs(spark, [spec])
            pytest.fail(f"{name} was not found")
        assert re.search(message, str(caught.value)), (name, str(caught.value))
        assert caught.value.advice, name
    good = [{"type": "sql", "set": {"a": "upper(row['a'])"}}, {"type": "filter", "where": "operation = 'INSERT'"}]
    transform.check_specs(spark, good)
    transform.check_chains(None, [Chain((good[0],), ("orders",))])
    with pytest.raises(ConfigError, match="no channel pattern"):
        transform.check_chains(spark, [Chain(routes=("a b",))])
