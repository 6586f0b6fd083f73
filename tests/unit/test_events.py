"""Events: made from column buffers, and the same as an obvious implementation makes from the changes one by one."""

from __future__ import annotations

import base64
import json
import random
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from event_streams import (
    EMPTY,
    I64,
    ITEMS,
    NOON,
    ORDERS,
    SCHEMA,
    SEED,
    START,
    Change,
    Transaction,
    expected_events,
    expected_id,
    spooled,
    streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import (
    UNCHANGED,
    encode_begin,
    encode_commit,
    encode_message,
    encode_relation,
)

from pgcdc.core.errors import DecodeError
from pgcdc.core.position import LAST_SUB, Kind, Position
from pgcdc.core.relation import Column, Relation
from pgcdc.event import lines
from pgcdc.event.columns import EVENT_SCHEMA
from pgcdc.event.edits import SimpleChain
from pgcdc.event.events import PIECE_BYTES, block_schema, event_batch, pack_block, unpack_blocks
from pgcdc.event.frame import EventOptions
from pgcdc.event.lines import IdSeed, event_ids, position_texts
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.spool.reader import SpoolReader
from pgcdc.spool.writer import SpoolWriter


def events_of(
    reader: SpoolReader, start: Position = START, end: Position | None = None, seed: IdSeed = SEED
) -> list[dict[str, Any]]:
    """All events in (start, end], as one batch."""
    slices = reader.slices(start, end or reader.end)
    batch = event_batch(slices, reader.relations(), seed, SCHEMA) if slices else None
    if batch is None:
        return []
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    return list(batch.to_pylist())


def event_of(*changes: Change, **options: Any) -> dict[str, Any]:
    """The event of the last one of these changes."""
    with spooled([Transaction(110, changes, **options)]) as reader:
        return events_of(reader)[-1]


SHAPES: dict[str, tuple[Change, dict[str, Any]]] = {
    "insert_has_the_new_row": (
        Change(ORDERS, "INSERT", ("1", "", None)),
        {"operation": "INSERT", "row": [("id", "1"), ("note", ""), ("total", None)], "old": None},
    ),
    "update_without_old_values_has_none": (
        Change(ORDERS, "UPDATE", ("1", "x", "2.50")),
        {"operation": "UPDATE", "row": [("id", "1"), ("note", "x"), ("total", "2.50")], "old": None},
    ),
    "update_of_the_key_has_the_old_key_alone": (
        Change(ORDERS, "UPDATE", ("2", "x", None), ("1", None, None), "K"),
        {"row": [("id", "2"), ("note", "x"), ("total", None)], "old": [("id", "1")]},
    ),
    "update_with_full_identity_has_the_whole_old_row_with_its_nulls": (
        Change(ORDERS, "UPDATE", ("1", "x", None), ("1", None, "9"), "O"),
        {"old": [("id", "1"), ("note", None), ("total", "9")]},
    ),
    "delete_by_key_has_the_key_as_its_row": (
        Change(ORDERS, "DELETE", None, ("1", None, None), "K"),
        {"operation": "DELETE", "row": [("id", "1")], "old": None},
    ),
    "delete_with_full_identity_has_the_whole_row": (
        Change(ORDERS, "DELETE", None, ("1", None, "9"), "O"),
        {"row": [("id", "1"), ("note", None), ("total", "9")], "old": None},
    ),
    "truncate_has_neither": (
        Change(ORDERS, "TRUNCATE"),
        {"operation": "TRUNCATE", "row": None, "old": None, "unchanged_toast_columns": None},
    ),
    "unchanged_toast_is_absent_and_listed_not_null": (
        Change(ORDERS, "UPDATE", ("1", UNCHANGED, None)),
        {"row": [("id", "1"), ("total", None)], "unchanged_toast_columns": ["note"]},
    ),
    "several_unchanged_in_column_order": (
        Change(ORDERS, "UPDATE", ("1", UNCHANGED, UNCHANGED)),
        {"row": [("id", "1")], "unchanged_toast_columns": ["note", "total"]},
    ),
    "unchanged_in_the_old_row_only_is_absent_there": (
        Change(ORDERS, "UPDATE", ("1", "x", "2"), ("1", UNCHANGED, "1"), "O"),
        {"old": [("id", "1"), ("total", "1")], "unchanged_toast_columns": None},
    ),
    "table_outside_of_public_has_its_schema_in_the_channel": (
        Change(ITEMS, "INSERT", ("1", "2")),
        {"channel": "pgcdc:sales.items", "schema": "sales", "table": "items"},
    ),
    "table_in_public_has_not": (
        Change(ORDERS, "INSERT", ("1", "2", "3")),
        {"channel": "pgcdc:orders", "schema": "public", "table": "orders"},
    ),
    "table_without_columns_has_an_empty_row": (Change(EMPTY, "INSERT", ()), {"row": [], "old": None}),
    "text_is_as_the_server_wrote_it": (
        Change(ORDERS, "INSERT", ("1", 'ä🐘\n"\\', "")),
        {"row": [("id", "1"), ("note", 'ä🐘\n"\\'), ("total", "")]},
    ),
}


@pytest.mark.parametrize(("change", "expected"), SHAPES.values(), ids=SHAPES.keys())
def test_event_of_a_change(change: Change, expected: dict[str, Any]) -> None:
    found = event_of(change)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(("change", "expected"), SHAPES.values(), ids=SHAPES.keys())
def test_neighbours_do_not_change_an_event(change: Change, expected: dict[str, Any]) -> None:
    every = [one for one, _ in SHAPES.values()]
    found = event_of(*every, change)
    assert {key: found[key] for key in expected} == expected


def test_event_carries_its_transaction() -> None:
    found = event_of(SHAPES["truncate_has_neither"][0], commit_time=NOON, xid=4_294_967_295, origin="berlin")
    assert (found["xid"], found["origin"], found["lsn"], found["ordinal"]) == (4_294_967_295, "berlin", 110, 1)
    assert found["created_at"] == datetime(2023, 11, 14, 22, 13, 20, 123_456, tzinfo=UTC)
    assert (found["position"], found["source"]) == ("000000000000006E/0000000000001", "wal_replication")


def test_each_change_is_read_with_the_shape_of_its_time() -> None:
    wider = Relation(1, "public", "orders", "d", (*ORDERS.columns, Column("paid", 16, -1, False)))
    renamed = Relation(1, "archive", "orders_2025", "d", (Column("id", 23, -1, True),))
    changes = (
        Change(ORDERS, "INSERT", ("1", "a", "1")),
        Change(wider, "INSERT", ("2", "b", "2", "t")),
        Change(renamed, "DELETE", None, ("2",)),
        Change(ORDERS, "INSERT", ("3", "c", "3")),
    )
    with spooled([Transaction(110, changes)]) as reader:
        found = events_of(reader)
    assert [(one["channel"], [name for name, _ in one["row"]]) for one in found] == [
        ("pgcdc:orders", ["id", "note", "total"]),
        ("pgcdc:orders", ["id", "note", "total", "paid"]),
        ("pgcdc:archive.orders_2025", ["id"]),
        ("pgcdc:orders", ["id", "note", "total"]),
    ]


@pytest.mark.parametrize(
    "change",
    [
        Change(ORDERS, "INSERT", ("1", b"\xff\xfe", None)),
        Change(ORDERS, "UPDATE", ("1", "x", None), ("1", b"\xc3", None), "O"),
        Change(ORDERS, "DELETE", None, (b"\x80", None, None), "K"),
    ],
)
def test_value_that_is_not_utf8_is_a_decode_error(change: Change) -> None:
    with pytest.raises(DecodeError, match="not valid UTF-8") as caught:
        event_of(Change(ORDERS, "INSERT", ("1", "fine", None)), change)
    assert caught.value.advice


def test_range_without_changes_has_no_events() -> None:
    with spooled([Transaction(110, (Change(ORDERS, "TRUNCATE"),))]) as reader:
        assert events_of(reader, Position.end(110)) == []
        assert events_of(reader, START, Position.end(105)) == []


def test_schema_has_the_columns_that_spark_is_told() -> None:
    assert [column.split()[0] for column in EVENT_SCHEMA.split(", ")] == SCHEMA.names


# --- against the obvious implementation


@settings(max_examples=50)
@given(streams(), st.integers(1, 7), st.integers(1, 3))
def test_events_are_those_of_the_obvious_implementation(
    transactions: list[Transaction], seal_rows: int, drain: int
) -> None:
    with spooled(transactions, seal_rows, drain) as reader:
        assert events_of(reader) == expected_events(transactions)


@settings(max_examples=40)
@given(streams(), st.integers(1, 7), st.integers(1, 3), st.data())
def test_any_cuts_give_the_same_events_once(
    transactions: list[Transaction], seal_rows: int, drain: int, data: st.DataObject
) -> None:
    expected = expected_events(transactions)
    with spooled(transactions, seal_rows, drain) as reader:
        places = [START, reader.end, *(Position.end(one.lsn) for one in transactions)]
        places += [Position.parse(event["position"]) for event in expected]
        cuts = sorted({START, reader.end, *data.draw(st.lists(st.sampled_from(places), max_size=5))})
        cuts = [cut for cut in cuts if cut <= reader.end]
        pieces = [events_of(reader, start, end) for start, end in pairwise(cuts)]
    assert [event for piece in pieces for event in piece] == expected


# --- as JSON

LINES = pa.schema([("position", pa.string()), ("line", pa.string())])


def lines_of(reader: SpoolReader, options: EventOptions = EventOptions(), column: str = "line") -> list[str]:  # noqa: B008
    schema = pa.schema([("position", pa.string()), (column, pa.string())])
    slices = reader.slices(START, reader.end)
    batch = event_batch(slices, reader.relations(), SEED, schema, options) if slices else None
    if batch is None:
        return []
    batch.validate(full=True)
    return list(batch.column(column).to_pylist())


def expected_object(event: dict[str, Any]) -> dict[str, Any]:
    payload = {"op": event["operation"], "schema": event["schema"], "table": event["table"]}
    payload |= {side: None if event[side] is None else dict(event[side]) for side in ("row", "old")}
    if event["unchanged_toast_columns"]:
        payload["_unchanged_toast_columns"] = event["unchanged_toast_columns"]
    return {
        "id": event["id"],
        "channel": event["channel"],
        "operation": event["operation"],
        "payload": payload,
        "source": event["source"],
        "created_at": event["created_at"].strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "position": event["position"],
    }


@settings(max_examples=100)
@given(streams(), st.integers(1, 7), st.integers(1, 3))
def test_json_is_that_of_the_events(transactions: list[Transaction], seal_rows: int, drain: int) -> None:
    with spooled(transactions, seal_rows, drain) as reader:
        texts = lines_of(reader)
        assert [line + "\n" for line in lines_of(reader, column="json")] == texts
    found = [json.loads(line) for line in texts]
    assert found == [expected_object(event) for event in expected_events(transactions)]
    assert [list(one) for one in found] == [list(expected_object(event)) for event in expected_events(transactions)]
    assert all(line.endswith("}\n") and line.count("\n") == 1 for line in texts)


@settings(max_examples=100)
@given(streams(), st.integers(1, 7), st.booleans(), st.booleans())
def test_compiled_and_python_renderer_write_the_same_bytes(
    transactions: list[Transaction], seal_rows: int, transaction: bool, markers: bool
) -> None:
    options = EventOptions(transaction, markers)
    with spooled(transactions, seal_rows, 2) as reader, pytest.MonkeyPatch.context() as patch:
        compiled = lines_of(reader, options)
        patch.setattr(lines, "_renderer", lambda: lines.render_python)
        assert lines_of(reader, options) == compiled


@pytest.mark.parametrize("sizes", [[1], [10, 0, 3], [100_000], [9_000_000, 1, 5_000_000]])
def test_blocks_bring_events_through_spark_in_pieces_of_bounded_size(sizes: list[int]) -> None:
    noise = random.Random(7).randbytes(max(sizes)).hex()  # compresses to half at best
    batches = [
        pa.RecordBatch.from_pydict(
            {"position": [f"{number}-{row}" for row in range(2)], "line": [noise[:size], "x"]}, LINES
        )
        for number, size in enumerate(sizes)
    ]
    pieces = [piece for batch in batches for piece in pack_block(batch)]
    assert all(piece.num_rows == 1 and piece.nbytes <= PIECE_BYTES + 64 for piece in pieces)
    assert (len(pieces) == len(sizes)) == (max(sizes) < PIECE_BYTES)
    assert unpack_blocks(pa.Table.from_batches(pieces))[0] == pa.Table.from_batches(batches, LINES)


def test_everything_json_forbids_is_escaped_and_nothing_else() -> None:
    text = "".join(map(chr, range(1, 128))) + "äß€🐘\u2028"
    with spooled([Transaction(110, (Change(ORDERS, "INSERT", ("1", text, None)),))]) as reader:
        (line,) = lines_of(reader)
    assert json.loads(line)["payload"]["row"]["note"] == text
    assert r"\u001F" in line and r"\n" in line and "/" in line and "\x7f" in line and "€🐘\u2028" in line


# --- transactions and messages


def test_transaction_is_named_in_the_json_when_asked_for() -> None:
    changes = (Change(ORDERS, "INSERT", ("1", "a", None)), Change(ORDERS, "TRUNCATE"))
    with spooled([Transaction(110, changes, xid=4_000_000_000)]) as reader:
        found = [json.loads(line) for line in lines_of(reader, EventOptions(transaction=True))]
    block = {"xid": 4_000_000_000, "commit_time": "2023-11-14T22:13:20.123456Z"}
    assert [one["transaction"] for one in found] == [block | {"seq": 1}, block | {"seq": 2}]
    assert list(found[0])[-1] == "transaction"


def test_markers_stand_around_each_transaction_and_move_nothing() -> None:
    change = Change(ORDERS, "INSERT", ("1", "a", None))
    transactions = [Transaction(110, (change,) * 3, xid=5), Transaction(120, ()), Transaction(130, (change,), xid=6)]
    with spooled(transactions) as reader:
        plain = [json.loads(line) for line in lines_of(reader, EventOptions(transaction=True))]
        found = [json.loads(line) for line in lines_of(reader, EventOptions(transaction=True, markers=True))]
    assert [one["operation"] for one in found] == ["BEGIN", *["INSERT"] * 3, "COMMIT", "BEGIN", "INSERT", "COMMIT"]
    marks = [one for one in found if one["operation"] in ("BEGIN", "COMMIT")]
    assert {one["channel"] for one in marks} == {"pgcdc:_txn"}
    assert [(one["transaction"]["xid"], one["transaction"]["seq"]) for one in marks] == [(5, 0), (5, 3), (6, 0), (6, 1)]
    assert marks[0]["payload"] == {"op": "BEGIN", "schema": None, "table": None, "row": None, "old": None}
    assert [one for one in found if one not in marks] == plain
    assert [one["position"] for one in found] == sorted(one["position"] for one in found)
    assert len({one["id"] for one in found}) == len(found)


@settings(max_examples=40)
@given(streams(), st.integers(1, 3), st.data())
def test_any_cuts_give_the_same_markers_once(
    transactions: list[Transaction], seal_rows: int, data: st.DataObject
) -> None:
    options = EventOptions(transaction=True, markers=True)
    with spooled(transactions, seal_rows) as reader:
        expected = lines_of(reader, options)
        places = [START, reader.end, *(Position.parse(json.loads(line)["position"]) for line in expected)]
        cuts = sorted({START, reader.end, *data.draw(st.lists(st.sampled_from(places), max_size=5))})
        found: list[str] = []
        for start, end in pairwise(cut for cut in cuts if cut <= reader.end):
            slices = reader.slices(start, end)
            batch = event_batch(slices, reader.relations(), SEED, LINES, options) if slices else None
            found += batch.column("line").to_pylist() if batch is not None else []
    assert found == expected


@contextmanager
def with_messages(seal_rows: int = 65_536) -> Iterator[SpoolReader]:
    """A transaction with messages before, between and after its rows, and a message that stands alone."""
    insert = Change(ORDERS, "INSERT", ("1", "a", None)).encode()
    stream = [
        encode_begin(109, NOON, 7),
        encode_relation(ORDERS),
        encode_message("audit", b"before", 101),
        insert,
        encode_message("audit", b"caf\xc3\xa9", 102),
        encode_message("raw", b"\xff\x00", 103),
        insert,
        encode_commit(109, 110, NOON),
        encode_message("alone", b"", 115, transactional=False),
    ]
    with tempfile.TemporaryDirectory() as folder:
        writer = SpoolWriter(Path(folder), START)
        assembler = Assembler(writer.relations, start_lsn=START.commit, seal_rows=seal_rows)
        for message in stream:
            assembler.feed(message, 100)
            while batch := assembler.pop():
                writer.append(batch)
        reader = SpoolReader(Path(folder))
        reader.refresh()
        yield reader
        writer.close()


@pytest.mark.parametrize("seal_rows", [1, 65_536])
def test_messages_are_events_with_prefix_and_content(seal_rows: int) -> None:
    with with_messages(seal_rows) as reader:
        options = EventOptions(transaction=True, markers=True, invalid_text="base64")
        found = [json.loads(line) for line in lines_of(reader, options)]
    assert [one["operation"] for one in found] == [
        "BEGIN", "MESSAGE", "INSERT", "MESSAGE", "MESSAGE", "INSERT", "COMMIT", "MESSAGE",
    ]  # fmt: skip
    messages = [one for one in found if one["operation"] == "MESSAGE"]
    assert {one["channel"] for one in messages} == {"pgcdc:_messages"}
    assert [one["payload"]["row"] for one in messages] == [
        {"prefix": "audit", "content": "before"},
        {"prefix": "audit", "content": "café"},
        {"prefix": "raw", "content": "base64:/wA="},
        {"prefix": "alone", "content": ""},
    ]
    assert [one["position"].partition("/")[2] for one in messages] == [
        "0000000000000.00000001", "0000000000001.00000001", "0000000000001.00000002", "0000000000000.00000001",
    ]  # fmt: skip
    assert (messages[3]["created_at"], messages[3]["transaction"]) == (None, None)
    assert [one["position"] for one in found] == sorted(one["position"] for one in found)


def test_messages_and_marks_are_whole_documents_of_debezium() -> None:
    chain = SimpleChain((), ({"type": "debezium", "topic_prefix": "shop", "transaction": False},))
    with with_messages() as reader:
        slices, options = reader.slices(START, reader.end), EventOptions(markers=True, invalid_text="base64")
        batch = event_batch(slices, reader.relations(), SEED, block_schema([chain]), options, chains=[chain])
    assert batch is not None
    found = [json.loads(line) for line in batch.column("line_0").to_pylist()]
    contents = [base64.b64decode(one["message"]["content"]).decode() for one in found if one.get("op") == "m"]
    assert contents == ["before", "café", "base64:/wA=", ""]
    assert [one["status"] for one in found if "status" in one] == ["BEGIN", "END"]


def test_messages_are_events_in_columns_too() -> None:
    with with_messages() as reader:
        slices = reader.slices(START, reader.end)
        batch = event_batch(slices, reader.relations(), SEED, SCHEMA, EventOptions(invalid_text="replace"))
    assert batch is not None
    batch.validate(full=True)
    found = [one for one in batch.to_pylist() if one["operation"] == "MESSAGE"]
    assert found[2]["row"] == [("prefix", "raw"), ("content", "\ufffd\0")]
    assert {(one["schema"], one["table"]) for one in found} == {(None, None)}
    assert found[3]["created_at"] is None


# --- bytes that are not UTF-8


@pytest.mark.parametrize(("policy", "text"), [("replace", "x\ufffdy"), ("base64", "base64:eP95")])
def test_bytes_that_are_not_utf8_become_what_was_chosen(policy: str, text: str) -> None:
    changes = (Change(ORDERS, "INSERT", ("1", b"x\xffy", None)), Change(ORDERS, "INSERT", ("2", "fine", "1")))
    with spooled([Transaction(110, changes)]) as reader:
        found = [json.loads(line) for line in lines_of(reader, EventOptions(invalid_text=policy))]
    assert [one["payload"]["row"] for one in found] == [
        {"id": "1", "note": text, "total": None},
        {"id": "2", "note": "fine", "total": "1"},
    ]


def test_bytes_that_are_not_utf8_outside_of_a_cut_do_not_matter() -> None:
    bad, good = Change(ORDERS, "INSERT", ("1", b"\xff", None)), Change(ORDERS, "INSERT", ("2", "fine", None))
    with spooled(
        [Transaction(110, (bad,)), Transaction(120, (good, bad)), Transaction(130, (bad,))], drain=3
    ) as reader:
        assert [one["row"][1] for one in events_of(reader, Position.end(110), Position.at(120, 1))] == [
            ("note", "fine")
        ]
        with pytest.raises(DecodeError, match=r"at 0000000000000078/0000000000002"):
            events_of(reader, Position.end(110), Position.end(120))
        slices = reader.slices(Position.at(120, 1), Position.end(120))
        batch = event_batch(slices, reader.relations(), SEED, LINES, EventOptions(invalid_text="replace"))
        assert batch is not None and [
            json.loads(line)["payload"]["row"]["note"] for line in batch.column("line").to_pylist()
        ] == ["\ufffd"]


def test_error_about_bytes_that_are_not_utf8_names_the_place() -> None:
    changes = (Change(ITEMS, "INSERT", ("1", "2")), Change(ORDERS, "INSERT", ("1", b"\xff", None)))
    with spooled([Transaction(110, changes)]) as reader, pytest.raises(DecodeError) as caught:
        lines_of(reader)
    assert "column note of table public.orders at 000000000000006E/0000000000002" in caught.value.message
    assert "--invalid-utf8" in str(caught.value.advice)


# --- ids and positions


def arrays(positions: list[Position]) -> tuple[I64, npt.NDArray[np.uint8], I64, I64]:
    """Commit, kind, ordinal and sub as columns."""
    rows = np.array([(one.commit, one.kind, one.ordinal, one.sub) for one in positions], np.int64)
    return rows[:, 0].copy(), rows[:, 1].astype(np.uint8), rows[:, 2].copy(), rows[:, 3].copy()


def ids_of(positions: list[Position], commit_time: int = NOON, seed: IdSeed = SEED) -> list[str]:
    return list(event_ids(seed, *arrays(positions), np.full(len(positions), commit_time)).to_pylist())


somewhere = st.builds(
    Position, st.integers(0, 2**63 - 1), st.sampled_from(Kind), st.integers(0, 2**48 - 1), st.integers(0, LAST_SUB)
)


@given(somewhere, st.integers(0, (2**48 - 1) * 1000))
def test_id_is_a_uuid_of_version_7_with_the_commit_time(position: Position, commit_time: int) -> None:
    (text,) = ids_of([position], commit_time)
    made = uuid.UUID(text)
    assert (made.version, made.variant, str(made)) == (7, uuid.RFC_4122, text)
    assert made.int >> 80 == commit_time // 1000
    assert text == expected_id(SEED, position, commit_time)


def test_a_message_far_behind_a_change_shares_no_id_with_the_next_change() -> None:
    a, b = ids_of([Position.at(5, 1, 2**16), Position.at(5, 2)])
    assert a != b


def test_a_row_of_a_snapshot_shares_no_id_with_the_change_of_that_number() -> None:
    a, b = ids_of([Position.at(5, 1), Position.of_chunk(5, 0, 1)])
    assert a != b


def test_id_stays_the_same_in_all_versions_of_pgcdc() -> None:
    assert ids_of([Position.at(0x16_B374D848, 7), Position.at(0x16_B374D848, 7, 1)]) == PINNED_IDS


PINNED_IDS = ["018bcfe5-687b-7320-be28-01618b236a8d", "018bcfe5-687b-77ae-9950-498e2b46663f"]


def test_other_slot_or_server_has_other_ids() -> None:
    seeds = [IdSeed.of(server, slot) for server in ("1", "2") for slot in ("a", "b")]
    assert len({ids_of([Position.at(110, 1)], seed=seed)[0] for seed in seeds}) == 4
    assert IdSeed.of("1", "a") == IdSeed.of("1", "a")


def test_commit_before_1970_has_an_id_too() -> None:
    assert uuid.UUID(ids_of([Position.at(110, 1)], -5_000_000)[0]).int >> 80 == 0


def test_ids_of_many_messages_after_one_change_do_not_collide() -> None:
    count = 200_000
    ordinal = np.concatenate([np.ones(count, np.int64), np.arange(1, count + 1)])
    sub = np.concatenate([np.arange(1, count + 1), np.zeros(count, np.int64)])
    ids = event_ids(
        SEED, np.full(2 * count, 110), np.zeros(2 * count, np.uint8), ordinal, sub, np.full(2 * count, NOON)
    )
    assert len(ids.unique()) == 2 * count


def test_ids_of_many_changes_at_one_time_do_not_collide() -> None:
    count = 200_000
    number = np.arange(count, dtype=np.int64)
    lsn, ordinal = 0x1_0000_0000 + number // 100 * 8, number % 100 // 2 + 1
    sub = number % 2
    ids = event_ids(SEED, lsn, np.zeros(count, np.uint8), ordinal, sub, np.full(count, NOON))
    assert len(ids.unique()) == count
    # Not even in the 62 bits after the variant: the others are only 12, and shared with nothing but the time.
    assert len(pc.utf8_slice_codeunits(ids, 19).unique()) == count


@given(st.lists(somewhere, min_size=1, max_size=5), st.booleans())
def test_position_text_is_that_of_the_position(positions: list[Position], rows_only: bool) -> None:
    if rows_only:
        positions = [Position(one.commit, one.kind, one.ordinal) for one in positions]
    assert position_texts(*arrays(positions)).to_pylist() == [str(one) for one in positions]
