"""The options of the Spark source: checked before anything starts, and never with a password in them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql.types import StructType

from pgcdc.capture.control import CaptureOptions
from pgcdc.core.errors import ConfigError
from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import Column, Relation, ShapeChange, append_shapes
from pgcdc.event.frame import EventOptions
from pgcdc.source.postgres.options import PostgresOptions, WireOptions
from pgcdc.spark.options import parse_options, write_options

URL = "postgresql://app@localhost/shop"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCDC_DB", raising=False)


def test_defaults() -> None:
    options = parse_options({"url": URL})
    source = cast(PostgresOptions, options.source)
    assert (options.consumer, options.max_batch_rows, options.spool) == ("default", 100_000, "")
    assert (source.db, source.slot_name, options.state_dir) == (URL, "pgcdc", Path(".pgcdc"))
    assert (source.publication, source.tables, source.all_tables) == (None, (), False)
    assert (options.spool_limit, source.start_from) == (1 << 30, None)
    assert (options.fail_fast, source.temporary_slot) == (False, False)


def test_every_option_arrives_where_it_belongs() -> None:
    options = parse_options(
        {
            "url": URL,
            "slot": "s",
            "publication": "p",
            "tables": " a, sales.b ,",
            "state_dir": "/state",
            "spool_limit": "2MB",
            "start_from": "slot",
            "consumer": "reports",
            "max_batch_rows": "5",
            "_spool": "/spool",
        }
    )
    source = cast(PostgresOptions, options.source)
    assert (source.slot_name, source.publication, source.tables) == ("s", "p", ("a", "sales.b"))
    assert (options.state_dir, options.spool_limit, source.start_from) == (Path("/state"), 2 << 20, "slot")
    assert (options.consumer, options.max_batch_rows, options.spool) == ("reports", 5, "/spool")


@pytest.mark.parametrize("key", ["max_batch_rows", "MAX_BATCH_ROWS", "Max-Batch-Rows"])
def test_keys_come_in_any_case_and_with_dashes(key: str) -> None:
    assert parse_options({key: "5"}).max_batch_rows == 5


@pytest.mark.parametrize("name", ["all_tables", "fail_fast", "temporary_slot"])
@pytest.mark.parametrize(("text", "expected"), [("true", True), ("TRUE", True), ("false", False), ("False", False)])
def test_flags_are_true_or_false(name: str, text: str, expected: bool) -> None:
    options = parse_options({name: text})
    assert {**options.source.model_dump(), **options.model_dump(exclude={"source"})}[name] is expected


@pytest.mark.parametrize("name", ["all_tables", "fail_fast", "temporary_slot"])
@pytest.mark.parametrize("text", ["", "yes", "1", "on"])
def test_flag_that_is_neither_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"option {name} is"):
        parse_options({name: text})


def test_unknown_option_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError, match="unknown option 'tabels'") as caught:
        parse_options({"url": URL, "tabels": "a"})
    assert "tables" in caught.value.advice


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:s3cret@localhost/shop",
        "postgres://app:s3cret@localhost/shop?sslmode=require",
        "postgresql://app@localhost/shop?password=s3cret",
        "host=localhost user=app password=s3cret dbname=shop",
        "host=localhost password='s3cret'",
    ],
)
def test_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="password") as caught:
        parse_options({"url": url})
    assert "s3cret" not in str(caught.value)
    assert "PGCDC_DB" in caught.value.advice


def test_password_may_come_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_DB", "postgresql://app:s3cret@localhost/shop")
    for raw, expected in (({}, "postgresql://app:s3cret@localhost/shop"), ({"url": URL}, URL)):
        source = parse_options(raw).source
        assert cast(PostgresOptions, source.resolved()).db == expected
        assert "s3cret" not in source.model_dump_json()


@pytest.mark.parametrize(
    ("name", "text"),
    [("max_batch_rows", "many"), ("max_batch_rows", "0"), ("max_batch_rows", "-1"), ("spool_limit", "lots")],
)
def test_number_that_is_none_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_options({name: text})


def test_a_pipeline_passes_everything_about_wire_and_events_on_to_its_source(tmp_path: Path) -> None:

    from pgcdc.config import Config

    changed = {
        "streaming": False, "two_phase": True, "origin": "none", "binary": True, "messages": True, "tx_metadata": True,
        "tx_markers": True, "schema_events": True, "sentinel_events": True, "invalid_utf8": "base64",
    }  # fmt: skip
    config = Config.model_validate({"db": "postgresql://h/x", "all_tables": True, "state_dir": tmp_path, **changed})
    options = parse_options(write_options(config))
    assert options.source.part(WireOptions) == config.part(WireOptions)
    assert options.source == config.source_options().but(db="")
    assert options.events == EventOptions(True, True, "base64", True, sentinels=True)


def test_no_secret_stands_in_what_spark_is_told_or_sends_to_executors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8: Spark keeps options and plans, and shows them."""
    from pgcdc.config import load_config
    from pgcdc.spark.source import ChangeReader

    url = "postgresql://app:hush-hush@localhost/shop"
    secrets = {"db": url, "dlq": "pg_table", "dlq_db": "postgresql://ops:quiet-now@localhost/ops"}
    config = load_config({**secrets, "tables": "orders", "state_dir": str(tmp_path)}, {}, None)
    told = write_options(config)
    assert "shop" not in str(told) and "hush-hush" not in str(told) and "quiet-now" not in str(told)
    monkeypatch.setenv("PGCDC_DB", url)
    options = parse_options(told)
    assert cast(PostgresOptions, options.source.resolved()).db == url and "hush-hush" not in repr(options)
    sent = pickle.dumps(ChangeReader(options, StructType()))
    assert b"hush-hush" not in sent and b"localhost/shop" not in sent


def test_every_setting_of_a_pipeline_survives_spark(tmp_path: Path) -> None:
    from pgcdc.config import load_config

    given = {
        "row_filters": ["orders=note <> 'a;b,c'"], "columns": ['orders=id,"Total; Sum"'], "tables": ['sales."Or,ders"', "b"],
        "snapshot_hold_limit": "90m", "snapshot_chunk_delay": "250ms", "spool_limit": "3MB", "slot_name": "s2",
        "incremental_snapshot": True, "signal_table": "ops.signals", "toast": "cache", "toast_cache_max_entries": 7,
    }  # fmt: skip
    config = load_config({**given, "db": "postgresql://h/x", "state_dir": str(tmp_path)}, {}, None)
    options = parse_options(write_options(config))
    assert options.source == config.source_options().but(db="")
    assert options.part(CaptureOptions) == config.part(CaptureOptions)


def test_other_words_for_a_setting_reach_the_queries_of_a_pipeline_and_are_still_no_options(tmp_path: Path) -> None:
    from pgcdc.config import load_config

    given = {"toast_cache": True, "toast_cache_max_entries": 7, "snapshot_first": True, "persistent_slot": True}
    config = load_config(
        {**given, "all_tables": True, "db": "postgresql://h/x", "state_dir": str(tmp_path)}, {}, None
    )  # fmt: skip
    source = cast(PostgresOptions, parse_options(write_options(config)).source)
    assert (source.effective_toast, source.toast_cache_max_entries) == ("cache", 7)
    assert source.effective_snapshot_mode == "initial"
    for name in given.keys() - {"toast_cache_max_entries"}:
        with pytest.raises(ConfigError, match=f"unknown option '{name}'"):
            parse_options({name: "true"})


def test_a_pipeline_tells_what_changed_since_it_began_and_not_what_an_earlier_run_told(tmp_path: Path) -> None:
    from pgcdc.config import Config
    from pgcdc.core.state import Identity
    from pgcdc.run.pipeline import Pipeline
    from pgcdc.source.protocol import Prepared

    said: list[str] = []
    raw = {"db": "postgresql://h/x", "all_tables": True, "state_dir": tmp_path}
    pipeline = Pipeline(Config.model_validate(raw), say=said.append)
    before = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True),))
    after = replace(before, columns=(*before.columns, Column("note", 25, -1, False)))
    steps = [(None, before), (before, after), (after, before)]
    changes = [
        ShapeChange(Position.at(110 + number, 0, SCHEMA_SUB), new, old) for number, (old, new) in enumerate(steps)
    ]
    append_shapes(pipeline.state.shapes_file, changes[:2])
    pipeline._tables.begin(Prepared(Identity("postgres", "1", "db", "s", "i", 8)), [])
    append_shapes(pipeline.state.shapes_file, changes[2:])
    for _ in range(2):
        pipeline._tables.tell_changes([])
    assert said == ["table public.orders: column note (text) removed"]
