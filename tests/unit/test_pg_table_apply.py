"""What pg_table's apply mode does without a server: names, lines, the fold."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from event_streams import SEED, START, Transaction, spooled, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc.config import load_config
from pgcdc.core.errors import ConfigError, SinkError
from pgcdc.core.position import Position
from pgcdc.event.events import LINES, event_batch
from pgcdc.sink.pg_table import lines
from pgcdc.sink.pg_table.copy_text import read_value, write_row, write_value
from pgcdc.sink.pg_table.fold import Bag, Keyed, Move, Patch
from pgcdc.sink.pg_table.mapping import TargetNames, find_loops, source_name

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
nasty = st.text('\\\t\n\r\b\f\x01"/Nnu.', max_size=6)


# --- names


def test_tables_are_renamed_by_rules_for_tables_then_schemas_then_the_one_schema() -> None:
    names = TargetNames(("public.orders=mirror.orders2", "sales.*=archive.*", '"We.ird"."a=b"=plain'), "rest")
    assert names(("public", "orders")) == ("mirror", "orders2")
    assert names(("sales", "items")) == ("archive", "items")
    assert names(("public", "other")) == ("rest", "other")
    assert names(("We.ird", "a=b")) == ("rest", "plain")
    assert TargetNames()(("sales", "items")) == ("sales", "items")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (("orders",), "is not source=target"),
        (("sales.*=orders",), "names a table on one side"),
        (("orders=a", "public.orders=b"), "two rules for public.orders"),
        (("orders=a", "items=a"), "orders and items would both go to a"),
        (("or ders=a",), "is not a table name"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetNames(rules)


def test_tables_that_would_feed_themselves_are_found() -> None:
    tables = [("public", "a"), ("public", "b"), ("mirror", "a")]
    assert find_loops(TargetNames(), tables) == sorted(tables)
    assert find_loops(TargetNames(schema="mirror"), tables) == [("mirror", "a"), ("public", "a")]
    assert find_loops(TargetNames(schema="mirror"), tables[:2]) == []


@pytest.mark.parametrize("envelope", ["debezium_envelope", "cloudevents_envelope"])
def test_an_envelope_is_refused_before_anything_starts(envelope: str) -> None:
    values = {"db": "postgresql:///x", "all_tables": True, "adapters": ["pg_table"], envelope: True}
    with pytest.raises(
        ConfigError, match=r"adapter pg_table applies pgcdc's own events .* or use --pg-table-mode append"
    ):
        load_config(values | {"pg_table_mode": "apply"}, {}, None)
    load_config(values | {"pg_table_mode": "append"}, {}, None)


def test_a_channel_and_a_table_name_a_table_whatever_dots_they_have() -> None:
    assert source_name("pgcdc:orders", "orders") == ("public", "orders")
    assert source_name("pgcdc:a.b", "a.b") == ("public", "a.b")
    assert source_name("pgcdc:a.b", "b") == ("a", "b")
    assert source_name("pgcdc:a.b.c", "b.c") == ("a", "b.c")


# --- lines


@given(st.lists(st.none() | texts | nasty, min_size=1, max_size=4))
def test_values_survive_the_text_of_copy(values: list[str | None]) -> None:
    row = write_row(values)
    assert b"\n" not in row
    assert [read_value(text) for text in row.split(b"\t")] == values


@settings(max_examples=20)
@given(streams())
def test_the_scanner_in_c_and_the_one_in_python_see_the_same_events(transactions: list[Transaction]) -> None:
    with spooled(transactions) as reader:
        pieces = reader.slices(START, Position.end(transactions[-1].lsn))
        batch = event_batch(pieces, reader.relations(), SEED, LINES) if pieces else None
    if batch is not None:
        _compare("".join(batch.column("line").to_pylist()).encode())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["INSERT", "UPDATE", "DELETE", "TRUNCATE"]),
            st.none() | st.dictionaries(texts, st.none() | texts | nasty, max_size=4),
            st.none() | st.dictionaries(texts, st.none() | texts, max_size=2),
            st.booleans(),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_any_line_is_scanned_the_same_way(events: list[tuple[Any, ...]]) -> None:
    text = "".join(_line(*event) for event in events)
    _compare(text.encode())


def _line(operation: str, row: Any, old: Any, is_ascii: bool, has_toast: bool) -> str:
    payload: dict[str, Any] = {"op": operation, "table": 'ta"b\\le', "row": row, "old": old}
    if has_toast:
        payload["_unchanged_toast_columns"] = ["a"]
    event = {
        "id": "1", "channel": 'pgcdc:ta"b\\le', "operation": operation, "payload": payload, "source": "wal_replication",
        "position": "0000000000000010/0000000000001",
    }  # fmt: skip
    return json.dumps(event, ensure_ascii=is_ascii, separators=(",", ":")) + "\n"


def _compare(text: bytes) -> None:
    from pgcdc.sink.pg_table._scan import scan

    found, expected = scan(text, {}), lines.scan_python(text, {})
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert (one[0] is None) == (two[0] is None)
        assert one[1:] == two[1:]
        if one[0] is not None and two[0] is not None:
            assert lines.parse_head(one[0]) == lines.parse_head(two[0])


_BEGIN = b'{"id":"1","channel":"a","operation":"INSERT","payload":{"op":"INSERT","table":"a","row":'


@pytest.mark.parametrize(
    "line",
    [
        b"{}", b"[]", b"1", b'{"id":"1"}', b'{"id":"\\', _BEGIN, _BEGIN + b'{"a"', _BEGIN + b'{"a":1},"old":null}}',
        _BEGIN + b'{"a":"\\uD800"},"old":null}}', _BEGIN + b'{"a":"\\u0000"},"old":null}}', _BEGIN + b'{"a":"\\u00',
    ],
)  # fmt: skip
def test_what_is_no_event_of_ours_is_handed_on_as_it_is(line: bytes) -> None:
    from pgcdc.sink.pg_table._scan import scan

    assert scan(line + b"\n", {}) == [(None, None, line, None, None)]


def test_lines_of_others_are_refused() -> None:
    with pytest.raises(SinkError, match="a line is not JSON"):
        lines.parse_line(b"{")
    with pytest.raises(SinkError, match="Debezium's envelope"):
        lines.parse_line(b'{"payload":{"before":null,"op":"c"}}')


# --- the fold


def row(**values: str | None) -> tuple[tuple[str, ...], bytes]:
    return tuple(values), write_row(values.values())


def test_the_last_row_of_a_key_counts() -> None:
    fold = Keyed(("id",))
    fold.insert(*row(id="1", a="x"))
    fold.insert(*row(id="2", a="x"))
    fold.update(*row(id="1", a="y"))
    fold.update(*row(id="3", a="z"))
    fold.delete(*row(id="2"))
    assert fold.rows == {b"1": row(id="1", a="y"), b"2": None, b"3": row(id="3", a="z")}
    assert fold.stale == {b"2", b"3"}


def test_a_key_is_found_wherever_its_columns_stand() -> None:
    fold = Keyed(("b", "a"))
    assert fold.key_of(*row(a="1", c="2", b="3")) == b"3\t1"
    assert fold.key_of(*row(b="3", a="1", c="2")) == b"3\t1"
    assert fold.key_of(*row(b="\t", a="1")) == b"\\t\t1"
    assert Keyed(("a",)).key_of(*row(a="1")) == b"1"
    with pytest.raises(KeyError, match="a"):
        fold.key_of(*row(b="3", c="1"))


def test_a_value_that_did_not_come_is_taken_from_the_row_before_or_left_to_the_target() -> None:
    fold = Keyed(("id",))
    fold.insert(*row(id="1", a="long", b="x"))
    assert fold.update(*row(id="1", b="y"), unchanged=("a",)) is None
    assert fold.rows[b"1"] == row(id="1", a="long", b="y")
    fold.update(*row(id="2", b="y"), unchanged=("a",))
    assert fold.rows[b"2"] == Patch(row(id="2", b="y")) and type(fold.rows[b"2"]) is Patch
    fold.update(*row(id="2", b="z"), unchanged=("a",))
    assert type(fold.rows[b"2"]) is Patch and fold.rows[b"2"] == row(id="2", b="z")
    fold.update(*row(id="2", a="short", b="z"))
    assert type(fold.rows[b"2"]) is tuple


def test_a_key_that_moves_leaves_its_old_place() -> None:
    fold = Keyed(("id",))
    fold.insert(*row(id="1", a="long", b="x"))
    assert fold.update(*row(id="2", b="y"), *row(id="1"), unchanged=("a",)) is None
    assert fold.rows == {b"1": None, b"2": row(id="2", a="long", b="y")}
    assert fold.update(*row(id="9", b="y"), *row(id="8"), unchanged=("a",)) == Move(
        {"id": "8"}, row(id="9", b="y"), True
    )
    assert b"9" not in fold.rows
    kept = Keyed(("id",), lambda columns: True)
    assert kept.update(*row(id="9", b="y"), *row(id="8")) == Move({"id": "8"}, row(id="9", b="y"), False)


def test_rows_without_a_key_are_counted() -> None:
    bag = Bag()
    for _ in range(3):
        bag.insert(*row(a="1"))
    bag.delete(*row(a="1"))
    bag.delete(*row(a="2"))
    bag.insert(*row(a="2"))
    assert bag.inserted == [row(a="2"), row(a="1"), row(a="1")] and bag.deleted == [row(a="2")]
    bag.update(*row(a="3"), *row(a="1"))
    assert sorted(bag.inserted) == [row(a="1"), row(a="2"), row(a="3")]
    with pytest.raises(KeyError):
        bag.update(*row(a="3"))


def test_events_are_read_whatever_the_chunks_are() -> None:
    text = [_line("INSERT", {"id": str(number)}, None, True, number % 2 == 0) for number in range(10)]
    table = pa.table({"line": pa.chunked_array([text[:3], [], text[3:]], pa.string())})
    events = list(lines.parse_events(table.slice(1)))
    assert [event["payload"]["row"]["id"] for event in events] == [str(number) for number in range(1, 10)]
    assert sum(len(piece) for piece in lines.scan_lines(table.slice(1))) == 9
    assert write_value(None) == b"\\N"
