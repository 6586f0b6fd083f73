"""A batch in its forms: lines, records, fields and changes of tables say the same, for every chain."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from event_streams import ITEMS, ORDERS, SCHEMA, SEED, START, Change, Transaction, spooled, streams
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transform_cases import KEY, KEY_VARIABLE, simple_chains
from wire import UNCHANGED

from pgcdc.core.errors import SinkError, TransformError
from pgcdc.core.position import SCHEMA_SUB, Kind, Position
from pgcdc.core.relation import Column, OldKind, Op, Relation, ShapeChange, ShapeHistory
from pgcdc.event.batch import Batch, Records, TableChanges, split_forms
from pgcdc.event.changes import keyed_changes, read_changes, source_table
from pgcdc.event.columns import ColumnReader
from pgcdc.event.edits import SimpleChain
from pgcdc.event.events import (
    block_schema,
    drop_unwanted,
    edit_columns,
    event_batch,
    events_of,
    pack_block,
    unpack_blocks,
)
from pgcdc.event.forms import FORMS, Form
from pgcdc.event.frame import EventOptions
from pgcdc.sink.stdout import Pretty
from pgcdc.spool.reader import SpoolReader
from pgcdc.transform.program import compile_chains
from pgcdc.transform.specs import Chain, column_chain, from_spec

WIDER = replace(ORDERS, columns=(*ORDERS.columns, Column("traceparent", 25, -1, False)))
STREAM = [
    Transaction(
        110,
        (
            Change(ORDERS, "INSERT", ("1", 'a"b', "2.50")),
            Change(ITEMS, "INSERT", ("1", "\n")),
            Change(ORDERS, "UPDATE", ("1", UNCHANGED, None), ("1", "old", "9"), "O"),
            Change(ORDERS, "UPDATE", ("2", "x", "7"), ("1", None, None), "K"),
            Change(ORDERS, "TRUNCATE"),
            Change(ORDERS, "TRUNCATE"),
            Change(ITEMS, "UPDATE", ("1", UNCHANGED), ("1", "\n"), "K"),
        ),
    ),
    Transaction(
        120,
        (
            Change(WIDER, "INSERT", ("3", "x", "7", "00-" + "a" * 32 + "-" + "b" * 16 + "-01")),
            Change(ORDERS, "DELETE", None, ("2", None, None), "K"),
            Change(ITEMS, "DELETE", None, ("1", "2"), "O"),
        ),
    ),
]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def forms_of(
    reader: SpoolReader,
    chain: Chain,
    *,
    blocks: int = 1,
) -> dict[Form, Batch]:
    """What sinks of one chain get, each in its form; the spool is read in so many blocks."""
    program = compile_chains([replace(chain, form=form) for form in FORMS])
    pushed: tuple[SimpleChain, ...] = program._pushed  # type: ignore[attr-defined]
    assert len(pushed) == 1
    slices, schema = reader.slices(START, reader.end), block_schema(pushed)
    size = max(1, len(slices) // blocks)
    packed: list[pa.RecordBatch] = []
    for begin in range(0, len(slices), size):
        batch = event_batch(slices[begin : begin + size], reader.relations(), SEED, schema, chains=pushed)
        if batch is not None:
            batch.validate(full=True)
            packed += pack_block(drop_unwanted(batch))
    rows = pa.Table.from_batches(packed) if packed else pa.table({"block": pa.array([], pa.binary()), "is_last": []})
    events, beside = unpack_blocks(rows, pushed)
    wanted = [(0, form) for form in FORMS]
    made = split_forms(Batch(START, reader.end, events), wanted, beside)
    return dict(zip(FORMS, made, strict=True))


def of_lines(batch: Batch) -> list[dict[str, Any]]:
    return [json.loads(line) for line in b"".join(batch.lines()).splitlines()]


def of_tables(batch: Batch) -> dict[int, dict[str, Any]]:
    """The payload of each event by its number in the batch, as a reader of columns sees it."""
    found: dict[int, dict[str, Any]] = {}
    for changes in batch.tables():
        names = [column.name for column in changes.relation.columns]
        assert len(names) == len(changes.new) == len(changes.old) == len(changes.unchanged)
        for place, row in enumerate(changes.rows.tolist()):
            assert row not in found
            found[row] = payload(changes, names, place)
    return found


def payload(changes: TableChanges, names: Sequence[str], row: int) -> dict[str, Any]:
    op, kind = Op(int(changes.op[row])), OldKind(int(changes.old_kind[row]))
    unchanged = [name for name, one in zip(names, changes.unchanged, strict=True) if one is not None and one[row]]
    not_sent = {name for name, one in zip(names, changes.old_unchanged, strict=True) if one is not None and one[row]}
    new = {name: values[row].as_py() for name, values in zip(names, changes.new, strict=True) if name not in unchanged}
    old = {name: values[row].as_py() for name, values in zip(names, changes.old, strict=True) if name not in not_sent}
    shape = changes.relation
    result: dict[str, Any] = {"op": op.name, "schema": shape.namespace, "table": shape.name, "kind": kind}
    if op is Op.TRUNCATE:
        assert len(changes) == 1, "a TRUNCATE stands alone"
        return result | {"row": None, "old": None}
    result |= {"row": old if op is Op.DELETE else new, "old": None if op is Op.DELETE or not kind else old}
    return result | ({"_unchanged_toast_columns": unchanged} if unchanged else {})


def same(found: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether the columns and the JSON say the same: of an old key, the line has only the columns of the key."""
    kind = found.pop("kind")
    if kind is OldKind.KEY:
        side = "row" if line["op"] == "DELETE" else "old"
        sent = line[side].keys() if line[side] is not None else ()
        found[side] = {name: found[side][name] for name in sent}
    return found == line


@settings(max_examples=150)
@given(streams(), simple_chains(), st.integers(1, 7), st.integers(1, 3))
@example(STREAM, Chain(), 100, 2)
@example(STREAM, Chain(({"type": "drop_columns", "columns": ["note"]},)), 2, 3)
@example(STREAM, Chain(({"type": "mask", "columns": ["note", "line"], "mode": "hash"},), ("sales.*", "orders")), 2, 1)
def test_forms_agree(transactions: list[Transaction], chain: Chain, seal_rows: int, blocks: int) -> None:
    with spooled(transactions, seal_rows, 2) as reader:
        try:
            forms = forms_of(reader, chain, blocks=blocks)
        except TransformError:
            return
    lines, records, tables = forms["lines"], forms["records"], forms["tables"]
    events = of_lines(lines)
    assert len(events) == len(lines) == len(records) == len(tables)
    assert lines.positions().to_pylist() == [one["position"] for one in events]
    assert records.positions() == lines.positions() == tables.positions()

    found = records.records()
    assert [json.loads(text) for text in found.value.to_pylist()] == events
    for name in ("id", "channel", "operation", "position"):
        assert getattr(found, name).to_pylist() == [one[name] for one in events]
    assert (
        records.texts()
        == tables.texts()
        == forms["fields"].texts()
        == [line.decode() for line in b"".join(lines.lines()).splitlines()]
    )
    assert b"".join(records.lines()) == b"".join(tables.lines()) == b"".join(lines.lines())

    changes = of_tables(tables)
    assert sorted(changes) == list(range(len(events)))
    for row, event in enumerate(events):
        assert same(changes[row], event["payload"]), (changes[row], event["payload"])
    for text, event in zip(Pretty(is_terminal=False).write(tables), events, strict=True):
        time, table = event["created_at"].replace("T", " ")[:23], event["channel"].removeprefix("pgcdc:")
        assert text.startswith(f"{time} {event['operation']:<8} {table}") and text.count("\n") == 1
        assert all(f" {name}" in text for name in event["payload"]["row"] or ())
    by_table: dict[int, list[int]] = {}
    for run in tables.tables():
        by_table.setdefault(run.relation.oid, []).extend(run.rows.tolist())
    assert all(rows == sorted(rows) for rows in by_table.values()), "a table's changes keep their order"


@settings(max_examples=60)
@given(streams(), simple_chains())
@example(STREAM, Chain())
def test_what_is_made_of_columns_behind_spark_is_the_same(transactions: list[Transaction], chain: Chain) -> None:
    """A chain at the source, behind Spark, and half of it here and there: the same bytes."""
    more = [("key_hash", pa.int64()), ("is_barrier", pa.bool_()), ("shape", pa.string())]
    steps = SimpleChain((), tuple(from_spec(one).step for one in chain.transforms), tuple(FORMS))
    with spooled(transactions) as reader:
        try:
            native = forms_of(reader, replace(chain, routes=()))
        except TransformError:
            return
        slices = reader.slices(START, reader.end)
        base = event_batch(slices, reader.relations(), SEED, pa.schema([*SCHEMA, *more])) if slices else None
    if base is None:
        return
    for first in (0, len(steps.steps) // 2, len(steps.steps)):
        try:
            edited = edit_columns(base, steps.steps[:first])
        except TransformError:  # of an event that a later filter leaves out: the whole chain never looks at it
            assert any(step["type"] == "filter" for step in steps.steps[first:])
            continue
        found = dict(zip(edited.type.names, edited.flatten(), strict=True))
        columns = [found.get(name, base.column(name)) for name in base.schema.names]
        behind = pa.RecordBatch.from_arrays(columns, base.schema.names).filter(edited.is_valid())
        rest = replace(steps, steps=steps.steps[first:], _fates={})
        frame, given = ColumnReader().read(behind)
        made = events_of(frame, None, block_schema([rest]), EventOptions(), [rest], given)
        made.validate(full=True)
        events = Batch(START, native["lines"].end, pa.Table.from_batches([made.replace_schema_metadata()]))
        forms = split_forms(events, [(0, form) for form in FORMS], [made.schema.metadata])
        again = dict(zip(FORMS, forms, strict=True))
        assert again["lines"].texts() == native["lines"].texts() == again["tables"].texts()
        records, expected = again["records"].records(), native["records"].records()
        for name in Records.__slots__:
            assert getattr(records, name).to_pylist() == getattr(expected, name).to_pylist(), name
        payloads, lines = of_tables(again["tables"]), of_lines(native["lines"])
        assert len(payloads) == len(lines)
        for row, line in enumerate(lines):
            assert same(payloads[row], line["payload"]), (payloads[row], line)


def test_a_record_has_the_key_of_its_row_and_says_what_waits() -> None:
    with spooled(STREAM) as reader:
        records = forms_of(reader, Chain())["records"].records()
    assert records.key.to_pylist() == [
        '["1"]', '["1","\\n"]', '["1"]', '["2"]', None, None, '["1","\\n"]', '["3"]', '["2"]', '["1","2"]'
    ]  # fmt: skip
    # A changed key, TRUNCATE, an old key that had to be sent, and the first change in another shape of its table.
    expected = [False, False, False, True, True, True, True, True, True, False]
    assert records.is_barrier.to_pylist() == expected
    assert [one is not None for one in records.traceparent.to_pylist()] == [number == 7 for number in range(10)]
    hashes = records.key_hash.to_pylist()
    assert hashes[0] == hashes[2] and hashes[3] == hashes[8] and hashes[1] != hashes[9]


def test_a_key_is_shown_as_the_chain_shows_it() -> None:
    with spooled(STREAM[:1]) as reader:
        dropped = forms_of(reader, Chain(({"type": "drop_columns", "columns": ["order"]},)))["records"].records()
        hidden = forms_of(reader, Chain(({"type": "mask", "columns": ["id"]},)))["records"].records()
    assert dropped.key.to_pylist()[:2] == ['["1"]', None], "a part of a key tells no rows apart"
    assert hidden.key.to_pylist()[0] == '["***REDACTED***"]'


def test_what_is_no_trace_is_left_out() -> None:
    changes = [Change(WIDER, "INSERT", ("1", "", "", text)) for text in ("00-x\r\nEvil: 1", "", "00-" + "g" * 32)]
    with spooled([Transaction(110, tuple(changes))]) as reader:
        records = forms_of(reader, Chain())["records"].records()
    assert records.traceparent.to_pylist() == [None] * 3


def test_runs_end_at_truncate_and_where_the_shape_changes() -> None:
    with spooled(STREAM) as reader:
        runs = list(forms_of(reader, Chain())["tables"].tables())
    assert [(run.relation.name, run.rows.tolist()) for run in runs] == [
        ("orders", [0, 2, 3]), ("items", [1, 6, 9]), ("orders", [4]), ("orders", [5]), ("orders", [7]), ("orders", [8])
    ]  # fmt: skip
    assert [len(run.relation.columns) for run in runs] == [3, 2, 3, 3, 4, 3]
    update = runs[0]
    assert update.new[1].to_pylist() == ['a"b', None, "x"]
    unchanged = update.unchanged[1]
    assert unchanged is not None and unchanged.tolist() == [False, True, False], "unchanged TOAST is not NULL"
    assert update.unchanged[2] is None


def test_shapes_of_tables_stand_behind_the_edits() -> None:
    details = {
        "columns": [
            {"name": name, "attnum": number, "type": "t", "not_null": True} for number, name in enumerate("ab")
        ],
        "primary_key": ["a"],
        "types": None,
    }
    table = Relation(9, "public", "t", "d", (Column("a", 23, 4, True), Column("b", 23, 4, False)))
    steps = ({"type": "rename_fields", "fields": {"a": "x"}}, {"type": "mask", "columns": ["b"], "mode": "redact"})
    relation, after = SimpleChain((), steps).describe(table, details)
    assert relation.columns == (Column("x", 23, 4, True), Column("b", 25, -1, False))
    assert after is not None and after["primary_key"] == ["x"]
    assert [(one["name"], one["type"]) for one in after["columns"]] == [("x", "t"), ("b", "text")]
    zero = ({"type": "mask", "columns": ["b"], "mode": "zero"},)
    assert SimpleChain((), zero).describe(table, details) == (table, details), "a zero has the type of its column"
    without = ({"type": "drop_columns", "columns": ["a"]},)
    relation, after = SimpleChain((), without).describe(table, details)
    assert relation.replica_identity == "n" and relation.columns == (Column("b", 23, 4, False),)
    assert after is not None and after["primary_key"] == []


def batch_of(*positions: str) -> Batch:
    lines = [f'{{"n":{number}}}\n' for number in range(len(positions))]
    return Batch(START, Position.end(900), pa.table({"position": list(positions), "line": lines}))


def place(number: int) -> str:
    return str(replace(Position.end(0), ordinal=number))


@given(st.lists(st.integers(1, 6)), st.integers(-1, 12), st.integers(-1, 12))
def test_a_slice_cuts_no_position_and_parts_cover_the_whole(numbers: list[int], begin: int, end: int) -> None:
    batch = replace(batch_of(*(place(number) for number in sorted(numbers))), start=Position.parse(place(0)))
    end = max(begin, end)
    parts = [batch.slice(0, begin), batch.slice(begin, end), batch.slice(end, len(batch))]
    assert [text for part in parts for text in part.texts()] == batch.texts()
    assert all(a.end == b.start for a, b in itertools.pairwise(parts) if len(b) or len(a))
    for part in parts:
        assert all(str(part.start) < one <= str(part.end) for one in part.positions().to_pylist())
    chosen = {place(number) for number in numbers[:2]}
    assert sorted(batch.without(chosen).texts() + batch.only(chosen).texts()) == sorted(batch.texts())


# --- rendered events as changes again


def history(*shapes: Any) -> ShapeHistory:
    made = ShapeHistory(Path("none"))
    made.changes = [
        ShapeChange(Position(number, Kind.STREAM, 0, SCHEMA_SUB), shape) for number, shape in enumerate(shapes, 1)
    ]
    return made


@settings(max_examples=20)
@given(streams())
def test_letters_say_what_the_changes_said(transactions: list[Transaction]) -> None:
    with spooled(transactions) as reader:
        forms = forms_of(reader, Chain())
        again = read_changes(forms["lines"], history(*reader.relations()))
    expected, found = of_tables(forms["tables"]), of_tables(again)
    assert again.form == "tables" and again.positions().to_pylist() == forms["tables"].positions().to_pylist()
    for number, one in expected.items():
        assert found[number]["op"] == one["op"]
        assert one["op"] == "DELETE" or found[number]["row"] == one["row"]


def test_a_row_an_old_key_and_unchanged_values_come_back() -> None:
    stream = [
        Transaction(
            110,
            (
                Change(ORDERS, "INSERT", ("1", 'a"b', "2.50")),
                Change(ORDERS, "UPDATE", ("1", UNCHANGED, None)),
                Change(ORDERS, "UPDATE", ("2", "x", "7"), ("1", None, None), "K"),
                Change(ITEMS, "INSERT", ("1", "x")),
                Change(ORDERS, "DELETE", None, ("2", None, None), "K"),
                Change(ORDERS, "TRUNCATE"),
            ),
        )
    ]
    with spooled(stream) as reader:
        forms = forms_of(reader, Chain())
    again = read_changes(forms["lines"], history(ORDERS, ITEMS))
    runs = [run for run in again.tables() if run.relation.name == ORDERS.name]
    assert [len(run) for run in runs] == [4, 1]  # a delete has the shape of the other changes
    run = runs[0]
    assert run.relation == ORDERS
    assert run.new[0].to_pylist() == ["1", "1", "2", None]
    assert run.unchanged[1] is not None and run.unchanged[1].tolist() == [False, True, False, False]
    assert run.old[0].to_pylist() == [None, None, "1", "2"]
    assert run.old_kind.tolist() == [0, 0, OldKind.KEY, OldKind.KEY]


def lines(*texts: str) -> Batch:
    positions = [str(Position(120, Kind.STREAM, number)) for number, _ in enumerate(texts)]
    return Batch(START, Position.end(120), pa.table({"position": positions, "line": list(texts)}))


EVENT = '{"channel":"pgcdc:orders","operation":"%s","payload":{"op":"X","table":"orders","row":%s,"old":null}}'


def test_a_key_of_which_a_column_is_gone_is_none_and_what_was_added_is_text() -> None:
    (run,) = read_changes(lines(EVENT % ("INSERT", '{"added":"1"}')), history(ORDERS)).tables()
    assert run.relation.replica_identity == "n" and not any(column.is_key for column in run.relation.columns)
    assert [(column.name, column.type_oid) for column in run.relation.columns] == [("added", 25)]


RENAMED = Chain(({"type": "rename_fields", "fields": {"id": "number"}}, {"type": "drop_columns", "columns": ["note"]}))


@pytest.mark.parametrize("row", ['{"number":"1"}', '{"id":"1"}'], ids=["of_this_chain", "of_an_earlier_one"])
def test_letters_are_keyed_by_a_column_that_their_chain_renames(row: str) -> None:
    made = history(ORDERS)
    made.changes = [replace(one, details={"primary_key": ["id"], "columns": []}) for one in made.changes]
    letters = read_changes(lines(EVENT % ("INSERT", row), EVENT % ("DELETE", row)), made, column_chain(RENAMED))
    assert [(one.op, one.key) for one in keyed_changes(letters)] == [(Op.INSERT, ("1",)), (Op.DELETE, ("1",))]


def test_letters_in_which_a_key_has_another_name_say_so_and_id_column_names_it() -> None:
    letters = read_changes(lines(EVENT % ("INSERT", '{"number":"1"}')), history(ORDERS))
    shape = letters.shapes[0]
    keyed = replace(letters, shapes={0: replace(shape, details={"primary_key": ["id"]})})
    with pytest.raises(SinkError, match="lack id of its key: a transform drops or renames it") as caught:
        list(keyed_changes(keyed))
    assert "id_column" in caught.value.advice and "Give it a primary key" not in caught.value.advice
    assert [one.key for one in keyed_changes(keyed, "number")] == [("1",)]
    with pytest.raises(SinkError, match="have no key") as caught:
        list(keyed_changes(letters))
    assert "no transform drops" in caught.value.advice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a line is not JSON"),
        ('{"payload":{"before":null,"op":"c"}}', "Debezium's envelope"),
        ("[]", "another envelope"),
        (EVENT % ("VANISH", "{}"), "operation VANISH at .* cannot be applied"),
        (EVENT % ("INSERT", "null"), "operation INSERT at .* cannot be applied"),
    ],
)
def test_what_is_no_event_of_ours_is_refused(text: str, message: str) -> None:
    with pytest.raises(SinkError, match=message):
        read_changes(lines(text), history(ORDERS))


def test_what_is_not_a_row_is_left_out() -> None:
    assert len(read_changes(lines(EVENT % ("MESSAGE", "null")), history(ORDERS))) == 0


def test_a_channel_and_a_table_name_a_table_whatever_dots_they_have() -> None:
    assert source_table("pgcdc:orders", "orders") == ("public", "orders")
    assert source_table("pgcdc:a.b", "a.b") == ("public", "a.b")
    assert source_table("pgcdc:a.b", "b") == ("a", "b")
    assert source_table("pgcdc:a.b.c", "b.c") == ("a", "b.c")
