"""Conditions in Spark SQL: events stay in blocks, and Spark gets only what the conditions read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from event_streams import spooled
from transform_cases import KEY, KEY_VARIABLE
from transforming import STREAM, batches, collect, projected

from pgcdc.core.errors import PgcdcError, TransformError
from pgcdc.event.edits import parse_chains
from pgcdc.event.forms import FORMS
from pgcdc.transform.program import AskProgram, BlockProgram, ColumnProgram, compile_chains
from pgcdc.transform.specs import Chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def where(condition: str, *operations: str) -> dict[str, Any]:
    return {"type": "filter", "where": condition, "operations": operations}


DROP: dict[str, Any] = {"type": "drop_columns", "columns": ["total"]}
RENAME: dict[str, Any] = {"type": "rename_fields", "fields": {"note": "text"}}
HASH: dict[str, Any] = {"type": "mask", "columns": ["note"], "mode": "hash"}
INSERTS: dict[str, Any] = {"type": "filter", "operations": ["INSERT", "DELETE"]}
CHAINS = {
    "a value": [where("cast(row['total'] AS double) > 2")],
    "a value by its dot": [where("cast(ROW.total AS double) > 5 OR Operation = 'DELETE'")],
    "a value that some tables lack": [where("row['line'] IS NULL")],
    "no value": [where("lsn = 120 AND table = 'items' OR position LIKE '%/0000000000002'")],
    "all but the row": [where("concat(id, channel, schema, source, ordinal, xid, created_at) LIKE '%sales%'")],
    "an old value": [where("old['note'] = 'old' OR old.id IS NULL")],
    "element_at": [where("element_at(row, 'id') = '2' OR element_at(unchanged_toast_columns, 1) = 'note'")],
    "the whole row": [where("size(row) = 3")],
    "a name that is computed": [where("row[concat('no', 'te')] IS NOT NULL")],
    "a function of names": [where("exists(map_keys(old), name -> name = 'note')")],
    "another query": [where("row['id'] = (SELECT '1')")],
    "NULL": [where("NULL")],
    "unchanged TOAST": [where("row['id'] IS NOT NULL AND array_contains(unchanged_toast_columns, 'note')")],
    "with operations": [where("row['id'] IS NOT NULL", "insert", "update")],
    "behind other steps": [DROP, RENAME, where("row['total'] IS NULL AND row['note'] IS NULL AND row['text'] != ''")],
    "behind a mask": [HASH, where("length(row['note']) = 64 OR operation = 'DELETE'")],
    "before a mask": [where("row['note'] = 'a@b.c'"), HASH, DROP, INSERTS],
    "two": [where("row['note'] RLIKE '@'"), HASH, DROP, where("row['note'] NOT LIKE '%@%' AND row['total'] IS NULL")],
    "behind an envelope": [DROP, {"type": "debezium"}, where("row['id'] = 2")],
    "before an envelope": [where("operation != 'INSERT'"), {"type": "cloudevents"}],
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_condition_keeps_the_same_events_as_on_whole_columns(spark: SparkSession, name: str) -> None:
    chains = [Chain(tuple(CHAINS[name]), routes, form) for routes in ((), ("orders",)) for form in FORMS]
    asked = compile_chains(chains)
    assert type(asked) is AskProgram
    whole = ColumnProgram(asked.chains, asked.distinct, asked.of_chain)
    made = list(zip(collect(spark, asked), collect(spark, whole), collect(spark, asked, 9), strict=True))
    for ours, theirs, small in made:
        texts = [[re.sub(r'"ts_[mun]s":[0-9]+', "", text) for text in one.texts()] for one in (ours, theirs, small)]
        assert texts[0] == texts[1] == texts[2]
        assert ours.positions().to_pylist() == theirs.positions().to_pylist()
        if ours.form == "tables":
            found = [[(run.relation.name, run.op.tolist()) for run in one.tables()] for one in (ours, theirs, small)]
            assert found[0] == found[1] == found[2]
    assert 0 < len(made[0][0]) < 7, "a condition that keeps some and leaves some out"


def test_spark_gets_only_what_a_condition_reads(spark: SparkSession) -> None:
    program = compile_chains([Chain((HASH, where("row['id'] = 1 OR Operation = 'DELETE'"), DROP)), Chain()])
    *lines, asking = parse_chains(program.source_options()["_chains"])
    assert (asking.asked, asking.forms, len(lines)) == (("operation", "table", "row"), (), 2)
    assert asking.steps[-1] == {"type": "keep_columns", "columns": ["id"]}
    assert "`event_2` struct<`operation`:string,`table`:string,`row`:map<string,string>>" in program.source_schema()
    with spooled(STREAM) as reader:
        given = projected(spark, reader, program)
        assert set(given.columns) == {"block", "is_last", "_lsn", "_ordinal", "_kept_0"}
        assert len(given.where("block IS NULL").collect()) == 7
    (whole,) = parse_chains(compile_chains([Chain((where("size(row) > 1"),))]).source_options()["_chains"])[1:]
    assert (whole.asked, whole.steps) == (("table", "row"), ())


def test_answers_in_another_order_are_refused(spark: SparkSession) -> None:
    program = compile_chains([Chain((where("row['id'] = 1"),))])
    assert isinstance(program, AskProgram)
    with spooled(STREAM) as reader:
        collected = projected(spark, reader, program).toArrow()
    program._open(collected)
    blocks, rows = (collected.filter(one) for one in (collected["block"].is_valid(), collected["block"].is_null()))
    for wrong in (rows.take(list(reversed(range(len(rows))))), rows.slice(1)):
        with pytest.raises(PgcdcError, match="or in another order"):
            program._open(pa.concat_tables([blocks, wrong]))


def test_a_rename_behind_a_condition_fails_only_for_what_is_left(spark: SparkSession) -> None:
    clash = {"type": "rename_fields", "fields": {"note": "total"}}
    program = compile_chains([Chain((where("table = 'items'"), clash))])
    assert isinstance(program, ColumnProgram)
    assert len(collect(spark, program)[0]) == 3
    with pytest.raises(TransformError, match="rename_fields gives two columns"):
        collect(spark, compile_chains([Chain((clash, where("table = 'items'")))]))


@pytest.mark.parametrize("rows", [0, 9], ids=["large", "small"])
def test_a_condition_that_fails_names_the_transform_and_the_event(spark: SparkSession, rows: int) -> None:
    failing = where("cast(row['note'] AS int) > 1")
    with pytest.raises(TransformError) as caught:
        collect(spark, compile_chains([Chain(), Chain((DROP, where("row['id'] = '2'"), failing))]), rows)
    # The events before are left out by the other condition, and not asked.
    assert "transform 3 (filter) failed at position 000000000000006E/0000000000003: cast(row" in str(caught.value)
    assert "CAST_INVALID_INPUT" in str(caught.value) and "try_cast" in str(caught.value)
    left = collect(
        spark, compile_chains([Chain((where("operation = 'INSERT'"), where("row['id'] = '9'"), failing))]), rows
    )
    assert [json.loads(text)["operation"] for text in left[0].texts()] == ["TRUNCATE"]


def test_conditions_and_blocks_travel_together_through_the_source(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    mask, asked = {**HASH, "key_file": str(tmp_path / "key")}, where("row['id'] = 1")
    chains = [Chain((mask, asked)), Chain((mask,)), Chain((asked, mask), form="tables"), Chain((asked, mask, DROP))]
    program = compile_chains(chains)
    assert len(parse_chains(program.source_options()["_chains"])) == 6, "two chains share a condition"
    with spooled(STREAM, folder=tmp_path / "spool"):
        some, whole, tables, fewer = batches(spark, chains, tmp_path / "spool", tmp_path / "checkpoint")
        (same,) = batches(spark, chains[1:2], tmp_path / "spool", tmp_path / "blocks")
    assert whole.events == same.events and type(compile_chains(chains[1:2])) is BlockProgram
    assert some.texts() == [whole.texts()[number] for number in (0, 1, 4)], "those of the id 1, and TRUNCATE"
    assert tables.texts() == some.texts() and fewer.positions() == some.positions()
