"""Folding events into tables, and comparing them with a source."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc.playground.contents import Tables, differences, fold_events
from pgcdc.playground.shop import fold

KEYS = {"public.t": ("id",), "public.pair": ("a", "b"), "billing.t": ("id",)}


def event(operation: str, row: dict[str, str | None], *, channel: str = "pgcdc:t", **payload: Any) -> dict[str, Any]:
    table = channel.removeprefix("pgcdc:")
    return {
        "channel": channel,
        "operation": operation,
        "position": "0/0",
        "payload": {"op": operation, "table": table, "row": row, "old": None, **payload},
    }


def test_insert_update_delete() -> None:
    events = [
        event("INSERT", {"id": "1", "v": "a"}),
        event("INSERT", {"id": "2", "v": "b"}),
        event("UPDATE", {"id": "1", "v": None}),
        event("DELETE", {"id": "2"}),
    ]
    assert fold_events(events, KEYS, strict=True) == {"public.t": {("1",): {"id": "1", "v": None}}}


def test_channel_names_the_schema_outside_public() -> None:
    events = [event("INSERT", {"id": "1"}), event("INSERT", {"id": "1"}, channel="pgcdc:billing.t")]
    assert fold_events(events, KEYS).keys() == {"public.t", "billing.t"}


def test_unchanged_columns_keep_their_value() -> None:
    events = [
        event("INSERT", {"id": "1", "v": "a", "big": "B"}),
        event("UPDATE", {"id": "1", "v": "b"}, _unchanged_toast_columns=["big"]),
    ]
    assert fold_events(events, KEYS)["public.t"][("1",)] == {"id": "1", "v": "b", "big": "B"}


def test_unchanged_columns_follow_a_changed_key() -> None:
    events = [
        event("INSERT", {"id": "1", "big": "B"}),
        event("UPDATE", {"id": "2"}, old={"id": "1"}, _unchanged_toast_columns=["big"]),
    ]
    assert fold_events(events, KEYS, strict=True) == {"public.t": {("2",): {"id": "2", "big": "B"}}}


def test_unchanged_column_of_an_unknown_row_is_absent_and_reported() -> None:
    folded = fold_events([event("UPDATE", {"id": "1"}, _unchanged_toast_columns=["big"])], KEYS)
    assert folded["public.t"][("1",)] == {"id": "1"}
    source: Tables = {"public.t": {("1",): {"id": "1", "big": "B"}}}
    assert differences(source, folded) == ["public.t ('1',): column big missing in the output"]


def test_full_identity_old_row_supplies_unchanged_values() -> None:
    update = event("UPDATE", {"id": "1"}, old={"id": "1", "big": "B"}, _unchanged_toast_columns=["big"])
    assert fold_events([update], KEYS)["public.t"][("1",)] == {"id": "1", "big": "B"}


def test_one_column_of_a_composite_key_changes() -> None:
    events = [
        event("INSERT", {"a": "1", "b": "1"}, channel="pgcdc:pair"),
        event("UPDATE", {"a": "2", "b": "1"}, old={"a": "1", "b": "1"}, channel="pgcdc:pair"),
    ]
    assert fold_events(events, KEYS, strict=True)["public.pair"].keys() == {("2", "1")}


def test_truncate_empties_its_table_only() -> None:
    events = [
        event("INSERT", {"id": "1"}),
        event("INSERT", {"id": "1"}, channel="pgcdc:billing.t"),
        {"channel": "pgcdc:t", "operation": "TRUNCATE", "payload": {"op": "TRUNCATE", "table": "t"}},
    ]
    assert fold_events(events, KEYS) == {"public.t": {}, "billing.t": {("1",): {"id": "1"}}}


def test_other_events_are_ignored() -> None:
    assert fold([{"channel": "pgcdc:_message", "operation": "MESSAGE", "payload": {}}]) == {}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event("INSERT", {"id": "1"})] * 2, "INSERT at 0/0: row .* exists"),
        ([event("UPDATE", {"id": "1"})], "UPDATE at 0/0: row .* does not exist"),
        ([event("DELETE", {"id": "1"})], "DELETE at 0/0: row .* does not exist"),
    ],
)
def test_strict_finds_lost_and_repeated_changes(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold_events(events, KEYS, strict=True)
    fold_events(events, KEYS)


def test_unknown_table_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"public\.nobody_knows"):
        fold_events([event("INSERT", {"id": "1"}, channel="pgcdc:nobody_knows")], KEYS)


def test_differences_are_readable_lines() -> None:
    source: Tables = {"public.t": {("1",): {"id": "1", "v": "a"}, ("2",): {"id": "2", "v": "b"}}}
    folded: Tables = {"public.t": {("1",): {"id": "1", "v": "x" * 200}, ("3",): {"id": "3", "v": None}}}
    assert differences(source, source) == []
    first, second, third = differences(source, folded)
    assert first.startswith("public.t ('1',): column v is 'a' in the source, 'xxx")
    assert len(first) < 200
    assert second == "public.t ('2',): missing in the output"
    assert third == "public.t ('3',): only in the output"


def test_a_table_that_one_side_lacks_is_empty() -> None:
    assert differences({"public.t": {}}, {}) == []
