"""The options of the Spark source: checked before anything starts, and never with a password in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import Column, Relation
from pgcdc.core.shapes import ShapeChange, append_shapes
from pgcdc.event.frame import EventOptions
from pgcdc.source.postgres.setup.prepare import DEFAULT_SPOOL_LIMIT_BYTES
from pgcdc.source.postgres.wire.protocol import WireOptions
from pgcdc.spark.options import DEFAULT_MAX_BATCH_ROWS, parse_options

URL = "postgresql://app@localhost/shop"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCDC_DB", raising=False)


def test_defaults() -> None:
    options = parse_options({"url": URL})
    assert (options.consumer, options.max_batch_rows, options.spool) == ("default", DEFAULT_MAX_BATCH_ROWS, "")
    source = options.source
    assert (source.url, source.slot, source.state_dir) == (URL, "pgcdc", ".pgcdc")
    assert (source.publication, source.tables, source.all_tables) == (None, (), False)
    assert (source.spool_limit_bytes, source.start_from) == (DEFAULT_SPOOL_LIMIT_BYTES, None)
    assert (source.fail_fast, source.temporary_slot) == (False, False)


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
    source = options.source
    assert (source.slot, source.publication, source.tables) == ("s", "p", ("a", "sales.b"))
    assert (source.state_dir, source.spool_limit_bytes, source.start_from) == ("/state", 2 << 20, "slot")
    assert (options.consumer, options.max_batch_rows, options.spool) == ("reports", 5, "/spool")


@pytest.mark.parametrize("key", ["max_batch_rows", "MAX_BATCH_ROWS", "Max-Batch-Rows"])
def test_keys_come_in_any_case_and_with_dashes(key: str) -> None:
    assert parse_options({key: "5"}).max_batch_rows == 5


@pytest.mark.parametrize("name", ["all_tables", "fail_fast", "temporary_slot"])
@pytest.mark.parametrize(("text", "expected"), [("true", True), ("TRUE", True), ("false", False), ("False", False)])
def test_flags_are_true_or_false(name: str, text: str, expected: bool) -> None:
    assert getattr(parse_options({name: text}).source, name) is expected


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
    assert parse_options({}).source.url == "postgresql://app:s3cret@localhost/shop"
    assert parse_options({"url": URL}).source.url == URL


@pytest.mark.parametrize(
    ("name", "text"),
    [("max_batch_rows", "many"), ("max_batch_rows", "0"), ("max_batch_rows", "-1"), ("spool_limit", "lots")],
)
def test_number_that_is_none_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_options({name: text})


def test_a_pipeline_passes_everything_about_wire_and_events_on_to_its_source(tmp_path: Path) -> None:
    from pgcdc.config import Config
    from pgcdc.config.spark import spark_options

    changed = {
        "streaming": False, "two_phase": True, "origin": "none", "binary": True, "messages": True, "tx_metadata": True,
        "tx_markers": True, "schema_events": True, "invalid_utf8": "base64",
    }  # fmt: skip
    config = Config.model_validate({"db": "postgresql://h/x", "all_tables": True, "state_dir": tmp_path, **changed})
    options = parse_options(spark_options(config))
    assert options.source.wire == config.source_options().wire == WireOptions(False, True, True, "none", True)
    assert options.events == EventOptions(True, True, "base64", True)


def test_a_pipeline_tells_what_changed_since_it_began_and_not_what_an_earlier_run_told(tmp_path: Path) -> None:
    from pgcdc.config import Config
    from pgcdc.run.pipeline import Pipeline

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
    pipeline._tables.begin()
    append_shapes(pipeline.state.shapes_file, changes[2:])
    for _ in range(2):
        pipeline._tables.tell_changes(None, [])
    assert said == ["table public.orders: column note (text) removed"]
