"""Envelopes: Debezium's against what its own engine wrote for the same changes, CloudEvents against the official SDK."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from databases import Database, drop_database
from debezium_cases import TYPES
from debezium_documents import CHAINS, Document, EventQuery, differences, make_changes, set_up
from debezium_engine import engine, is_installed

from pgcdc.event.columns import read_shape
from pgcdc.event.debezium_values import write_key
from pgcdc.event.events import render_columns
from pgcdc.playground.postgres import EmbeddedPostgres

RECORDED = Path(__file__).parents[1] / "fixtures" / "debezium.jsonl.gz"


@pytest.fixture(scope="module")
def shop(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop")
        try:
            yield Database("shop", postgres.url("shop"), postgres)
        finally:
            drop_database(admin, "shop")


@pytest.fixture(scope="module")
def query(shop: Database, tmp_path_factory: pytest.TempPathFactory) -> EventQuery:
    """Snapshot and changes, as a query has them."""
    query = EventQuery(shop, tmp_path_factory.mktemp("debezium"), snapshot_mode="initial")
    try:
        set_up(shop)
        query.begin()
        query.run()
        make_changes(shop)
        query.run()
    finally:
        query.end()
    return query


@pytest.fixture
def events(query: EventQuery) -> list[dict[str, Any]]:
    return query.rows()


def documents_of(events: list[dict[str, Any]]) -> list[Document]:
    found = []
    for event in events:
        if event["line_0"] is not None:
            document = json.loads(event["line_0"])
            key = write_key(event["row"], read_shape(event["shape"])[0]) if event["table"] else None
            is_message = event["operation"] == "MESSAGE"
            found.append(({"prefix": event["row"]["prefix"]} if is_message else key and json.loads(key), document))
    return found


def test_documents_are_those_of_debezium(events: list[dict[str, Any]]) -> None:
    recorded = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).split(b"\n") if line]
    theirs = [(one["key"], one["value"]) for one in recorded if one["value"] is not None]
    assert differences(theirs, documents_of(events), same_server=False) == []


def test_documents_of_columns_are_those_of_the_source(query: EventQuery) -> None:
    """What a query of one's own makes of the columns of events, as `transform.debezium_envelope` does; all types."""
    for number, name in enumerate(("line_0", "line_1")):
        for events in query.events:
            found = render_columns(events, CHAINS[number].steps).to_pylist()
            for line, again in zip(events.column(name).to_pylist(), found, strict=True):
                assert (line is None) == (again is None)
                assert line is None or again is None or without_now(line) == without_now(again)


def without_now(text: str) -> str:
    """Without when a document was made; a message outside of a transaction has no other time."""
    own = r'"ts_ms":[0-9]+,"ts_us":[0-9]+,"ts_ns":[0-9]+}$'
    return re.sub(r'"ts_..":[0-9]+' if text.startswith('{"op":"m"') else own, "", text.removesuffix("\n"))


def test_events_that_debezium_has_not_have_no_document(events: list[dict[str, Any]]) -> None:
    found = {event["line_0"] for event in events if event["operation"].startswith("SNAPSHOT_")}
    assert found == {None}


def test_cloudevents_are_valid(events: list[dict[str, Any]]) -> None:
    assert {row["operation"] for row in events} >= {"INSERT", "UPDATE", "DELETE", "TRUNCATE", "SNAPSHOT", "MESSAGE"}
    for row in events:
        event = JSONFormat().read(CloudEvent, row["line_1"])  # refuses names, types and values that are not allowed
        assert (event.get_specversion(), event.get_datacontenttype()) == ("1.0", "application/json")
        assert (event.get_id(), event.get_source()) == (row["id"], "/shop")
        assert event.get_type() == f"com.example.{row['operation'].lower()}"
        assert event.get_subject() == (f"{row['schema']}.{row['table']}" if row["table"] else None)
        attributes = json.loads(row["line_1"])
        assert ("time" in attributes) == (row["created_at"] is not None)
        if row["created_at"] is not None:
            assert event.get_time() == row["created_at"]
        assert event.get_extension("sequence") == row["position"]
        assert event.get_extension("channel") == row["channel"]
        assert event.get_extension("xid") == (str(row["xid"]) if row["xid"] else None)
        unchanged = row["unchanged_toast_columns"]
        assert event.get_data() == {
            "op": row["operation"],
            "schema": row["schema"],
            "table": row["table"],
            "row": row["row"],
            "old": row["old"],
            **({"_unchanged_toast_columns": unchanged} if unchanged else {}),
        }


@pytest.mark.slow
def test_documents_are_those_of_the_engine(database: Database, tmp_path: Path) -> None:
    """Both read the same changes, each through a slot of its own, so that also xids and times are the same."""
    if not is_installed():
        pytest.skip("Debezium's engine is missing: pip install -e '.[bench-peers]'")
    query = EventQuery(database, tmp_path, snapshot_mode="initial")
    try:
        set_up(database)
        query.begin()
        query.run()
        with engine(database.url, tmp_path, f"dbz_{database.name}", f"public.t_{len(TYPES) - 1}") as records:
            make_changes(database)
            theirs = [(one["key"], one["value"]) for one in records() if not one["topic"].endswith(".transaction")]
        query.run()
    finally:
        query.end()
    assert differences([one for one in theirs if one[1]], documents_of(query.rows()), same_server=True) == []
