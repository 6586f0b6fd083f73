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
from event_streams import SCHEMA, SEED, START, Transaction, spooled, streams
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F
from transform_cases import KEY, KEY_VARIABLE, simple_chains
from transforming import STREAM, batches, collect, projected

from pgcdc import transform
from pgcdc.core.errors import ConfigError, TransformError
from pgcdc.event.batch import Batch, split_forms
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, event_batch, open_blocks
from pgcdc.event.forms import Form
from pgcdc.spool.reader import SpoolReader
from pgcdc.transform.program import ColumnProgram, compile_chains
from pgcdc.transform.specs import Chain, Transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class InSpark(Chain):
    """A chain of which the source does nothing."""

    @property
    def parts(self) -> tuple[list[Transform], list[Transform], list[Transform]]:
        return [], list(self.transforms), []


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
    of_chain = compile_chains(chains).of_chain
    batches = split_forms(whole, [(number, "lines") for number in of_chain]) if pushed else [whole] * len(chains)
    return [one.events.column("line").to_pylist() for one in batches]


def by_spark(spark: SparkSession, reader: SpoolReader, chains: list[Chain]) -> list[list[str]]:
    program = compile_chains(chains)
    steps = tuple(InSpark(one.transforms, one.routes) for one in program.distinct)
    forced = ColumnProgram(tuple(chains), steps, program.of_chain)
    found = forced.collect(projected(spark, reader, forced), START, reader.end)
    return [one.events.column("line").to_pylist() for one in found]


def events_in(spark: SparkSession, reader: SpoolReader) -> DataFrame:
    more = [("shape", pa.string()), ("table_ordinal", pa.int64())]
    schema = pa.schema([*SCHEMA, *more])
    batch = event_batch(reader.slices(START, reader.end), reader.relations(), SEED, schema)
    rows = schema.empty_table() if batch is None else pa.Table.from_batches([batch])
    return spark.createDataFrame(rows)  # maps keep the order of their columns this way


@pytest.fixture(scope="module")
def events(spark: SparkSession) -> DataFrame:
    with spooled(STREAM) as reader:
        return events_in(spark, reader).coalesce(1)


@settings(
    max_examples=2,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(streams(), st.lists(simple_chains(), min_size=3, max_size=3, unique_by=repr))
def test_steps_in_spark_and_at_the_source_write_the_same_bytes(
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


def test_columns_are_dropped_renamed_and_hidden_in_a_dataframe(spark: SparkSession, events: DataFrame) -> None:
    """The same functions on a DataFrame: columns of their own stay, and what is not a row passes."""
    found = values(
        events.withColumn("mine", F.lit(7))
        .transform(transform.drop_columns("total"))
        .transform(transform.rename_fields(note="text", order="number"))
        .transform(transform.mask("text"))
        .transform(transform.filter(operations=["UPDATE", "TRUNCATE", "DELETE"])),
        "operation", "row", "old", "unchanged_toast_columns", "mine",
    )  # fmt: skip
    assert found == [
        ("UPDATE", {"id": "1"}, {"id": "1", "text": "***REDACTED***"}, ["text"], 7),
        ("UPDATE", {"id": "2", "text": "***REDACTED***"}, {"id": "1"}, None, 7),
        ("TRUNCATE", None, None, None, 7),
        ("DELETE", {"id": "2"}, None, None, 7),
        ("DELETE", {"number": "1", "line": "2"}, None, None, 7),
    ]
    few = events.select("table", "operation", "row", "position")
    assert values(transform.drop_columns("note", "line")(few), "row")[0] == {"id": "1", "total": "2.50"}


def test_envelopes_are_columns_of_a_dataframe(spark: SparkSession, events: DataFrame) -> None:
    edited = events.transform(transform.rename_fields(id="number")).transform(transform.mask("total"))
    made = edited.transform(transform.debezium_envelope(topic_prefix="shop", transaction=True))
    found = [(json.loads(text), key and json.loads(key)) for text, key in
             values(made.transform(transform.debezium_key), "_text", "_key")]  # fmt: skip
    assert [one["op"] for one, _ in found] == ["c", "u", "u", "c", "t", "d", "d"]
    assert found[0][0]["after"] == {"number": 1, "note": "a@b.c", "total": "***REDACTED***"}
    assert found[1][0]["after"] == {"number": 1, "note": "__debezium_unavailable_value", "total": None}
    assert found[2][0]["before"] == {"number": 1, "note": None, "total": None}
    assert found[3][0]["transaction"]["data_collection_order"] == 1 and found[3][0]["source"]["name"] == "shop"
    assert [key for _, key in found] == [
        {"number": 1}, {"number": 1}, {"number": 2}, {"order": 1, "line": "2026-11-16 00:46:06+00"}, None,
        {"number": 2}, {"order": 1, "line": 2},
    ]  # fmt: skip
    cloud = values(edited.transform(transform.cloudevents_envelope(source="/shop")), "_text", "id")
    assert [json.loads(text)["id"] for text, _ in cloud] == [one for _, one in cloud]
    assert json.loads(cloud[0][0])["data"]["row"] == {"number": "1", "note": "a@b.c", "total": "***REDACTED***"}
    with pytest.raises(ConfigError, match="needs the column table_ordinal"):
        transform.debezium_envelope(transaction=True)(events.drop("table_ordinal"))


def test_the_json_of_a_dataframe_is_that_of_the_source(spark: SparkSession, events: DataFrame) -> None:
    with spooled(STREAM) as reader:
        (expected,) = by_source(reader, [Chain()])
    assert [f"{text}\n" for text in values(transform.event_json(events), "_text")] == expected


def test_a_function_may_take_columns_out_of_one_side_and_put_them_in_another_order(spark: SparkSession) -> None:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["operation"] == "UPDATE":
            event["row"].pop("total", None)
            event["row"] = dict(reversed(list(event["row"].items())))
        return event | {"channel": "pgcdc:mine"}

    forms: list[Form] = ["lines", "tables"]
    steps = (transform.python(change), transform.drop_columns("x"))
    lines, tables = collect(spark, compile_chains([Chain(steps, ("orders",), form) for form in forms]))
    events = [json.loads(text) for text in lines.texts()]
    assert {one["channel"] for one in events} == {"pgcdc:mine"}
    update, moved = events[1]["payload"], events[2]["payload"]
    assert (update["row"], update["old"]) == ({"id": "1"}, {"id": "1", "note": "old", "total": "9"})
    assert update["_unchanged_toast_columns"] == ["note"]
    assert (list(moved["row"]), moved["old"]) == (["note", "id"], {"id": "1"})
    runs = list(tables.tables())
    assert [sorted(column.name for column in run.relation.columns) for run in runs][:2] == [
        ["id", "note", "total"], ["id", "note"],
    ]  # fmt: skip


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


@pytest.mark.parametrize("rows", [0, 7], ids=["large", "small"])
def test_a_function_that_fails_names_the_event(spark: SparkSession, rows: int) -> None:
    program = compile_chains([Chain((transform.python(lambda event: event["nothing"]),))])
    with pytest.raises(TransformError, match="at position 000000000000006E/0000000000001: KeyError: 'nothing'"):
        collect(spark, program, rows)


@pytest.mark.parametrize(
    ("chain", "jobs"),
    [
        (Chain((transform.filter(where="operation = 'INSERT'"),)), 0),
        (Chain((transform.filter(where="operation = 'nothing'"),)), 0),
        (Chain((transform.sql(n="row['id'] || current_timezone()"),)), 0),
        (
            Chain(
                (transform.filter(where="true"), transform.python(lambda event: event), transform.filter(where="true"))
            ),
            1,
        ),
    ],
    ids=["where", "nothing", "sql", "python"],
)
def test_few_rows_go_through_the_plan_without_a_job_and_come_out_the_same(
    spark: SparkSession, chain: Chain, jobs: int
) -> None:
    program, scheduler = compile_chains([chain]), spark.sparkContext._jsc.sc().dagScheduler()
    (expected,) = collect(spark, program)
    before = scheduler.numTotalJobs()
    (found,) = collect(spark, program, rows=7)
    assert scheduler.numTotalJobs() - before == jobs
    assert found.events.equals(expected.events)


@pytest.mark.parametrize("rows", [0, 7], ids=["large", "small"])
def test_an_error_in_sql_stops_with_the_transform_and_the_position(spark: SparkSession, rows: int) -> None:
    specs = ({"type": "drop_columns", "columns": ["x"]}, {"type": "sql", "set": {"n": "cast(row['note'] AS int)"}})
    program = compile_chains([Chain(({"type": "filter", "operations": ["UPDATE"]}, *specs))])
    with pytest.raises(TransformError) as caught:
        collect(spark, program, rows)
    # The first UPDATE fails by its old row: the new one has no note. INSERTs before it are not asked.
    assert "transform 3 (sql) failed at position 000000000000006E/0000000000002" in str(caught.value)
    assert "CAST_INVALID_INPUT" in str(caught.value) and "try_cast" in str(caught.value)
    rename = {"type": "rename_fields", "fields": {"note": "total"}}
    renamed = compile_chains([Chain(({"type": "sql", "set": {"n": "1"}}, rename, *specs))])
    with pytest.raises(TransformError, match=r"rename_fields gives two columns of table public.orders the name total"):
        collect(spark, renamed)


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


@pytest.mark.parametrize(
    "hard",
    [transform.sql(size="length(row['note'])"), transform.filter(where="cast(row['total'] AS double) > 2")],
    ids=lambda one: one.type,
)
def test_executors_get_the_same_lines_in_keyed_blocks(spark: SparkSession, hard: Transform) -> None:
    chains = [Chain((hard, transform.mask("note"))), Chain(routes=("sales.*",))]
    program = compile_chains(chains, keyed=True)
    with spooled(STREAM) as reader:
        frame = projected(spark, reader, program)
        expected = program.collect(frame, START, reader.end)
        for chain, batch in zip(chains, expected, strict=True):
            column = program.line_column(chain)
            found = pa.Table.from_batches(open_blocks(program.keyed_blocks(frame, column).toArrow().to_batches()))
            assert found.column("position").to_pylist() == batch.positions().to_pylist()
            assert found.column(column).to_pylist() == batch.events.column("line").to_pylist()
            assert found.column("key_hash").null_count == 0 and found.column("is_barrier").null_count == 0


def run(spark: SparkSession, chains: list[Chain], folder: Path, checkpoint: Path) -> list[pa.Table]:
    return [one.events for one in batches(spark, chains, folder, checkpoint)]


def test_the_key_of_a_hash_stands_in_no_plan_and_no_page_of_the_ui(spark: SparkSession, events: DataFrame) -> None:
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
    assert "call(" in text  # the function with the key is in the plan, and not what is in it
    for secret in (KEY, KEY.encode().hex().upper()):
        assert secret not in text and secret.lower() not in text
    assert KEY not in repr(transform.mask("note", mode="hash", key=KEY))


BAD = {
    "sql that does not parse": ({"type": "filter", "where": "row['a'] >"}, "transform 1 .filter."),
    "unknown function": ({"type": "sql", "set": {"a": "frobnicate(row['a'])"}}, "frobnicate"),
    "unknown column": ({"type": "sql", "set": {"a": "upper(nam)"}}, "nam"),
    "no condition": ({"type": "filter", "where": "upper(channel)"}, "is string, not a condition"),
    "a list": ({"type": "sql", "set": {"a": "split(channel, ':')"}}, "array<string>, not one value"),
    "a different value each time": ({"type": "sql", "set": {"a": "rand()"}}, "a different value each time"),
    "other events": (
        {"type": "sql", "set": {"a": "sum(lsn) OVER (PARTITION BY channel)"}},
        "uses more than one event",
    ),
    "an aggregate": ({"type": "sql", "set": {"a": "max(channel)"}}, "uses more than one event"),
    "a list that is read": (
        {"type": "filter", "where": "row['id'] IN (SELECT v.a FROM VALUES ('1') AS v(a))"},
        "joins the events with another table",
    ),
    "another table": (
        {"type": "sql", "set": {"a": "EXISTS (SELECT 1 FROM VALUES ('1') AS v(a) WHERE v.a = row['id'])"}},
        "joins the events with another table",
    ),
    "several rows": ({"type": "sql", "set": {"a": "explode(map_keys(row))"}}, "explode|generator"),
    "unknown module": ({"type": "python", "function": "no_such_module:f"}, "module no_such_module does not exist"),
    "unknown function of a module": ({"type": "python", "function": "json:nothing"}, "has no function nothing"),
    "unknown operation": ({"type": "filter", "operations": ["UPSERT"]}, "unknown operation UPSERT"),
    "an empty filter": ({"type": "filter"}, "needs operations"),
    "unknown type": ({"type": "drop"}, "drop"),
    "two of one name": ({"type": "rename_fields", "fields": {"a": "c", "b": "c"}}, "two fields would be named c"),
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
    with pytest.raises(ConfigError, match="not a channel pattern"):
        transform.check_chains(spark, [Chain(routes=("a b",))])
