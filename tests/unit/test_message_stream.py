"""Typed messages over batches: their order, what they say, and that the cuts of batches do not show."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from pgcdc.core.position import Position
from pgcdc.core.relation import Column, OldKind, Op, Relations
from pgcdc.core.relation import Relation as Shape
from pgcdc.messages import UNCHANGED, Begin, Change, Commit, LogicalMessage, Message, Relation, Sentinel
from pgcdc.source.postgres.message_stream import typed_messages
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part

ID, BODY = Column("id", 20, -1, True), Column("body", 25, -1, False)
NOTES = Shape(16384, "public", "notes", "d", (ID, BODY))
LONGER = dataclasses.replace(NOTES, columns=(ID, BODY, Column("n", 23, -1, False)))
OTHER = Shape(16390, "sales", "other", "f", (ID,))
TIME = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
RELATIONS = Relations([NOTES, LONGER, OTHER])
Row = dict[str, Any]


def row(op: Op, relation: int, new: Any = None, old: Any = None, **more: Any) -> Row:
    return {"sub": 0, "op": int(op), "relation": relation, "new": new, "old": old, "old_kind": OldKind.NONE, **more}


def batch(*transactions: tuple[int, list[Row], dict[str, Any]]) -> CaptureBatch:
    rows = [{"ordinal": number, **one} for _, of, _ in transactions for number, one in enumerate(of, 1)]
    plain = {"kind": 0, "commit_time": int(TIME.timestamp() * 1e6), "complete": True}
    owners = [
        {**plain, "commit": lsn, "xid": lsn * 10, "rows": len(of), "origin": None, **more}
        for lsn, of, more in transactions
    ]
    data = pa.RecordBatch.from_pylist(rows, schema=CHANGES)
    last = transactions[-1][0]
    owned = pa.RecordBatch.from_pylist(owners, schema=TRANSACTIONS)
    return CaptureBatch(Part.of(data), owned, RELATIONS, Position.end(last), last)


def common(lsn: int, origin: str = "") -> tuple[int, datetime, str]:
    return lsn, TIME, origin


def insert(key: bytes) -> Row:
    return row(Op.INSERT, 0, [key, None])


def inserted(lsn: int, key: str, number: int) -> Change:
    return Change(*common(lsn), "INSERT", 16384, "public", "notes", {"id": key, "body": None}, None, number)


def test_a_transaction_is_begin_relation_changes_commit() -> None:
    found = list(typed_messages([batch((100, [insert(b"1"), insert(b"2")], {}), (108, [insert(b"3")], {}))]))
    assert found == [
        Begin(*common(100), 1000),
        Relation(*common(100), 16384, "public", "notes", (ID, BODY)),
        inserted(100, "1", 1),
        inserted(100, "2", 2),
        Commit(*common(100)),
        Begin(*common(108), 1080),
        inserted(108, "3", 1),
        Commit(*common(108)),
    ]
    assert [one.kind for one in found[:5]] == ["begin", "relation", "change", "change", "commit"]


def test_a_transaction_in_several_batches_has_one_begin_and_one_commit() -> None:
    parts = [batch((100, [insert(b"1")], {"complete": False})), batch((100, [insert(b"2")], {}))]
    kinds = [one.kind for one in typed_messages(parts)]
    assert kinds == ["begin", "relation", "change", "change", "commit"]


def test_a_relation_comes_before_the_first_change_in_each_shape() -> None:
    rows = [insert(b"1"), row(Op.INSERT, 1, [b"2", None, b"3"]), row(Op.DELETE, 2, None, [b"4"]), insert(b"5")]
    found = [one for one in typed_messages([batch((100, rows, {})), batch((108, [insert(b"6")], {}))])]
    told = [(one.name, len(one.columns)) for one in found if isinstance(one, Relation)]
    assert told == [("notes", 2), ("notes", 3), ("other", 1), ("notes", 2)]


def test_values_say_what_was_sent_and_what_was_not() -> None:
    rows = [
        row(Op.UPDATE, 0, [b"2", None], [b"1", None], old_kind=OldKind.KEY, unchanged=[1]),
        row(Op.UPDATE, 0, [b"2", b"new"], [b"2", None], old_kind=OldKind.FULL, unchanged=[-2]),
        row(Op.DELETE, 0, None, [b"2", b"\xff"], old_kind=OldKind.FULL),
        row(Op.TRUNCATE, 0),
    ]
    changes = [one for one in typed_messages([batch((100, rows, {"origin": "east"}))]) if isinstance(one, Change)]
    assert [(one.op, one.new, one.old) for one in changes] == [
        ("UPDATE", {"id": "2", "body": UNCHANGED}, {"id": "1"}),
        ("UPDATE", {"id": "2", "body": "new"}, {"id": "2", "body": UNCHANGED}),
        ("DELETE", None, {"id": "2", "body": b"\xff".decode(errors="surrogateescape")}),
        ("TRUNCATE", None, None),
    ]
    assert {one.origin for one in changes} == {"east"}


def test_messages_and_sentinels_stand_where_they_were_written() -> None:
    def written(prefix: str | None, content: bytes, op: Op = Op.MESSAGE) -> Row:
        return row(op, -1, [content], prefix=prefix)

    rows = [insert(b"1"), written("audit", b"seen"), written("pgcdc.sentinel", b"5f0c")]
    alone = [written("pgcdc.sentinel", b"6a1d")]
    ours = [row(Op.SENTINEL, -1, [b"7b2e", b"2026-11-18T12:00:00.000Z"])]
    found = list(typed_messages([batch((100, rows, {}), (104, alone, {"xid": 0}), (108, ours, {"xid": 0}))]))
    assert found[3:] == [
        LogicalMessage(*common(100), "audit", "seen"),
        Sentinel(*common(100), "5f0c"),
        Commit(*common(100)),
        Sentinel(104, None, "", "6a1d"),
        Sentinel(108, None, "", "7b2e"),
    ]


def test_an_idle_batch_has_no_messages_and_a_message_cannot_be_changed() -> None:
    assert list(typed_messages([CaptureBatch.advance(100, RELATIONS)])) == []
    message: Message = Commit(*common(100))
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.lsn = 1  # type: ignore[misc]
    assert not hasattr(message, "__dict__")
