"""Envelopes: in C and in Python the same, valid JSON, behind every edit; values one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from event_streams import ORDERS, SEED, START, Change, Transaction, expected_events, spooled, streams
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transform_cases import KEY, KEY_VARIABLE, simple_chains
from wire import UNCHANGED

from pgcdc.core.errors import TransformError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, ShapeChange
from pgcdc.event import lines
from pgcdc.event.debezium_values import write_value
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, event_batch
from pgcdc.event.frame import EventOptions
from pgcdc.event.shape import Described, Family, ValueType
from pgcdc.spool.reader import SpoolReader
from pgcdc.transform.program import BlockProgram, compile_chains
from pgcdc.transform.specs import Chain

DEBEZIUM = {"type": "debezium", "topic_prefix": "shop", "transaction": True}
CLOUDEVENTS = {"type": "cloudevents"}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def documents(reader: SpoolReader, chain: Chain, described: Described = Described()) -> list[Any]:  # noqa: B008
    program = compile_chains([chain])
    assert isinstance(program, BlockProgram), "the source renders envelopes"
    pushed = parse_chains(program.source_options()["_chains"])
    slices = reader.slices(START, reader.end)
    options = EventOptions(described=described)
    schema = block_schema(pushed)
    batch = event_batch(slices, reader.relations(), SEED, schema, options, chains=pushed) if slices else None
    return [] if batch is None else [line and json.loads(line) for line in batch.column("line_0").to_pylist()]


@settings(max_examples=60)
@given(streams(), simple_chains())
def test_the_compiled_renderer_writes_what_the_other_one_does(transactions: list[Transaction], chain: Chain) -> None:
    with spooled(transactions) as reader:
        for envelope in (DEBEZIUM, CLOUDEVENTS):
            enclosed = replace(chain, transforms=(*chain.transforms, envelope))
            try:
                found = documents(reader, enclosed)
            except TransformError:
                return
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lines, "_renderer", lambda: lines.render_python)
                again = documents(reader, enclosed)
            assert [without_times(one) for one in found] == [without_times(one) for one in again]
            assert len(found) == len(expected_events(transactions))


def without_times(document: Any) -> Any:
    return document and {name: value for name, value in document.items() if not name.startswith("ts_")}


TYPED = replace(
    ORDERS,
    columns=(
        *ORDERS.columns, Column("paid", 16, -1, False), Column("at", 1184, -1, False), Column("blob", 17, -1, False)
    ),
)  # fmt: skip
DETAILS = {
    "columns": [{"name": column.name, "not_null": column.name == "total"} for column in TYPED.columns],
    "primary_key": ["id"],
    "types": None,
}
CHANGES = (
    Change(TYPED, "INSERT", ("1", "a", "2.50", "t", "2026-11-16 00:46:06.5+00", "\\x00ff")),
    Change(TYPED, "UPDATE", ("2", UNCHANGED, None, "f", None, UNCHANGED), ("1", None, None, None, None, None), "K"),
    Change(TYPED, "DELETE", None, ("2", None, None, None, None, None), "K"),
    Change(TYPED, "TRUNCATE"),
)


def typed_documents(*steps: dict[str, Any]) -> list[Any]:
    described = Described("shop", (ShapeChange(Position.end(8), TYPED, details=DETAILS),))
    with spooled([Transaction(110, CHANGES)]) as reader:
        return documents(reader, Chain((*steps, DEBEZIUM)), described)


def test_values_have_types_and_what_was_not_sent_is_said() -> None:
    insert, update, delete, truncate = typed_documents()
    assert insert["after"] == {
        "id": 1, "note": "a", "total": {"scale": 1, "value": "GQ=="}, "paid": True, "at": "2026-11-16T00:46:06.500000Z",
        "blob": "AP8=",
    }  # fmt: skip
    zero = {"scale": 0, "value": "AA=="}
    assert update["before"] == {"id": 1, "note": None, "total": zero, "paid": None, "at": None, "blob": None}
    assert update["after"]["note"] == "__debezium_unavailable_value", "unchanged TOAST is not NULL"
    assert update["after"]["blob"] == "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
    assert (delete["before"]["id"], delete["before"]["total"], delete["after"]) == (2, zero, None)
    assert (truncate["before"], truncate["after"], truncate["op"]) == (None, None, "t")
    assert insert["source"]["db"] == "shop" and insert["transaction"]["total_order"] == 1


_decimals = st.decimals(-(10**20), 10**20, allow_nan=False).map(lambda one: f"{one:f}")
_moments = st.datetimes().map(
    lambda one: f"{one.isoformat(' ').rstrip('0') if one.microsecond else one.isoformat(' ')}+00"
)


@settings(max_examples=100)
@given(st.lists(st.tuples(_decimals, _moments | st.sampled_from(["infinity", "0044-03-15 00:00:00+00 BC", "x"]))))
@example(
    [("0", "2026-11-16 00:46:06+00"), ("-0.10", "2026-11-16 00:46:06.5+00"), ("-128", "infinity"), ("100.00", "x")]
)
def test_frequent_types_are_written_in_c_as_in_python(rows: list[tuple[str, str]]) -> None:
    table = replace(
        ORDERS, columns=(*TYPED.columns[:3], Column("price", 1700, (10 << 16 | 2) + 4, False), TYPED.columns[4])
    )
    changes = tuple(Change(table, "INSERT", ("1", "", total, f"{float(total):.2f}", at)) for total, at in rows)
    with spooled([Transaction(110, changes)]) as reader:
        found = documents(reader, Chain((DEBEZIUM,)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lines, "_renderer", lambda: lines.render_python)
            again = documents(reader, Chain((DEBEZIUM,)))
    assert [one["after"] for one in found] == [one["after"] for one in again]


def test_edits_come_before_the_envelope() -> None:
    steps: list[dict[str, Any]] = [
        {"type": "drop_columns", "columns": ["at", "blob"]},
        {"type": "rename_fields", "fields": {"note": "label"}},
        {"type": "mask", "columns": ["id"], "mode": "redact"},
        {"type": "mask", "columns": ["total", "paid"], "mode": "zero"},
    ]
    insert, update, *_ = typed_documents(*steps)
    hidden = {"id": "***REDACTED***", "label": "a", "total": {"scale": 0, "value": "AA=="}, "paid": False}
    assert insert["after"] == hidden, "a zero keeps its type, other masks make text"
    assert update["before"] == {**hidden, "label": None, "paid": None}


VALUES: dict[ValueType, dict[str, Any]] = {
    ValueType(Family.DOUBLE): {
        "1.5": 1.5, "-1e+30": -1e30, "NaN": "NaN", "-Infinity": "-Infinity", "nan": "nan", "": "", "No": "No",
    },
    ValueType(Family.SPARSEVEC): {
        "{1:1.5,3:-2e-05}/5": {"dimensions": 5, "vector": [[1, 1.5], [3, -2e-05]]}, "{}/3": {"dimensions": 3, "vector": []},
        **{odd: odd for odd in ("", "{}", "{}/", "{1:2}/z", "{x}/y", "{1:x}/2")},
    },
    ValueType(Family.TIMESTAMP): {"1969-12-31 23:59:59.5": -500_000, "0001-01-01 00:00:00 BC": -62_167_219_200_000_000},
    ValueType(Family.INTEGER, is_array=True): {
        "{1,NULL}": [1, None], "[0:1]={1,2}": [1, 2], "{}": [], "{{1},{2}}": "{{1},{2}}",
    },
}  # fmt: skip


def test_a_value_that_is_not_of_its_type_becomes_a_string() -> None:
    for code, values in VALUES.items():
        for text, expected in values.items():
            assert json.loads(write_value(text, code)) == expected, text
    for family in Family:
        if family not in (Family.OTHER, Family.INTEGER, Family.BOOLEAN):
            for is_array in (False, True):
                assert json.loads(write_value('a "b"', ValueType(family, is_array))) == 'a "b"', family
    assert json.loads(write_value("1969-12-31 23:59:59.5", ValueType(Family.TIMESTAMP, digits=3))) == -500
