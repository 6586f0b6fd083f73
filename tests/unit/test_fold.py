"""Folding events into tables, and comparing them with a source."""

from __future__ import annotations

from typing import Any

import pytest
from contents import check_sequence, differences, fold_events

from pgcdc.playground.proof import Tables

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
    assert fold_events([{"channel": "pgcdc:_message", "operation": "MESSAGE", "payload": {}}], KEYS) == {}


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


def mark(kind: str) -> dict[str, Any]:
    row = {"snapshot": "s", "kind": kind, "schema": "public", "table": "t", "rows": "0"}
    return {"channel": "pgcdc:_snapshot", "operation": "SNAPSHOT_STARTED", "payload": {"row": row}}


ROW: dict[str, str | None] = {"id": "1", "v": "a"}
NEWER: dict[str, str | None] = {"id": "1", "v": "b"}
GONE = event("DELETE", {"id": "1"})


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event("SNAPSHOT", ROW)] * 2, "came twice in one snapshot"),
        ([mark("initial"), event("SNAPSHOT", ROW), event("SNAPSHOT", ROW)], "came twice in one snapshot"),
        ([event("SNAPSHOT", ROW), event("INSERT", ROW)], "INSERT .* exists"),
        ([event("INSERT", NEWER), mark("incremental"), event("SNAPSHOT", ROW)], "has 'a' in column v, but .* 'b'"),
        ([event("INSERT", ROW), GONE, mark("incremental"), event("SNAPSHOT", ROW)], "is gone, and comes back"),
        ([event("INSERT", ROW), event("INSERT", {"id": "2"}), event("UPDATE", {"id": "2"}, old={"id": "1"})],
         "becomes .*'2'.*, which exists"),
    ],
)  # fmt: skip
def test_strict_finds_rows_of_snapshots_that_are_repeated_old_or_gone(events: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold_events(events, KEYS, strict=True)
    fold_events(events, KEYS)


def test_strict_takes_what_snapshots_may_do() -> None:
    again = [
        mark("initial"),
        event("SNAPSHOT", ROW),
        event("UPDATE", NEWER),
        mark("incremental"),
        event("SNAPSHOT", NEWER),
    ]
    vanished = {**event("DELETE", {"id": "7"}), "position": "0000000000000100/1000000000001"}
    assert fold_events([*again, vanished], KEYS, strict=True) == {"public.t": {("1",): NEWER}}
    unknown = [event("UPDATE", NEWER), GONE, GONE, mark("incremental"), event("SNAPSHOT", ROW)]
    assert fold_events(unknown, KEYS, strict=True, complete=False) == {"public.t": {("1",): ROW}}


def test_after_a_resync_rows_of_before_may_be_anything_until_they_are_told_of() -> None:
    before = [event("INSERT", {"id": number, "v": "a"}) for number in "1234"]
    after = [
        mark("initial"),
        event("SNAPSHOT", NEWER),
        event("INSERT", {"id": "2", "v": "b"}),
        event("DELETE", {"id": "3"}),
    ]
    folded = fold_events([*before, *after], KEYS, strict=True, resynced=True)["public.t"]
    assert {key: row["v"] for key, row in folded.items()} == {("1",): "b", ("2",): "b", ("4",): "a"}
    with pytest.raises(ValueError, match="exists"):
        fold_events([*before, *after, event("INSERT", NEWER)], KEYS, strict=True, resynced=True)
    with pytest.raises(ValueError, match="but the stream had"):
        fold_events([*before, *after], KEYS, strict=True)


def test_rows_of_a_table_without_a_key_are_counted() -> None:
    keys = {"public.t": ()}
    twice = fold_events([event("INSERT", ROW), event("SNAPSHOT", ROW), event("INSERT", NEWER)], keys, strict=True)
    once = fold_events([event("INSERT", ROW), event("INSERT", NEWER)], keys, strict=True)
    assert len(twice["public.t"]) == 3
    assert differences(twice, once) == ["public.t ('1', 'a', '1'): missing in the output"]
    assert fold_events([event("INSERT", ROW), event("TRUNCATE", {})], keys) == {"public.t": {}}


def test_sequence_finds_events_that_come_twice_or_out_of_order() -> None:
    faults: list[str] = []
    ids = ["00000000-0000-7000-8000-00000000000" + digit for digit in "121"]
    events = [{"id": one, "position": place} for one, place in zip(ids, ["1", "3", "2"], strict=True)]
    assert list(check_sequence(events, faults)) == events
    assert faults == [f"event {ids[0]} at 2 came twice", f"event {ids[0]} at 2 came after 3"]


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
