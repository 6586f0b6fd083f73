"""What a table looks like, as numbers beside its events; and which change of its table a change is."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pgcdc.core.relation import Column, Op, Relation
from pgcdc.event.events import events_of
from pgcdc.event.frame import EventOptions, make_frame
from pgcdc.event.lines import IdSeed
from pgcdc.event.shape import Family, TableShape, ValueType, column_types
from pgcdc.spool.schema import CHANGES, TRANSACTIONS

ORDERS = Relation(
    1, "public", "orders", "d",
    (Column("id", 23, -1, True), Column("total", 1700, (10 << 16 | 2) + 4, False), Column("at", 1114, 3, False),
     Column("tags", 1009, -1, False), Column("mood", 16400, -1, False)),
)  # fmt: skip
ITEMS = Relation(2, "public", "items", "f", (Column("id", 23, -1, True),))
MOOD = [16400, "public.mood", "enum_out", "enum_send", 0, "enum", ",", -1, 0, [], [], [], []]
DETAILS = {
    "columns": [{"name": column.name, "not_null": column.name == "total"} for column in ORDERS.columns],
    "primary_key": ["id"],
    "types": {"server_version": 180000, "types": [MOOD]},
}


def test_types_are_codes_with_modifiers() -> None:
    assert column_types(ORDERS, DETAILS) == [
        ValueType(Family.INTEGER), ValueType(Family.NUMERIC, is_required=True), ValueType(Family.TIMESTAMP, digits=3),
        ValueType(Family.TEXT, is_array=True), ValueType(Family.TEXT),
    ]  # fmt: skip
    assert TableShape(ORDERS, DETAILS).key == ["id"]


def test_without_the_catalog_types_of_the_database_are_not_known_nor_the_key_of_a_whole_row() -> None:
    assert column_types(ORDERS, None)[-1].family is Family.OTHER
    assert (TableShape(ORDERS).key, TableShape(ITEMS).key) == (["id"], [])


def _events(rows: list[tuple[int, int, int, int]]) -> list[int | None]:
    """`table_ordinal` of changes given as (lsn, ordinal, sub, relation)."""
    changes = [
        {"ordinal": ordinal, "sub": sub, "op": int(Op.MESSAGE if sub else Op.INSERT), "relation": relation,
         "new": [b"x"] if sub else [b"1"] * len((ORDERS, ITEMS)[relation].columns), "old": None, "old_kind": 0,
         "unchanged": None, "prefix": "p" if sub else None}
        for _, ordinal, sub, relation in rows
    ]  # fmt: skip
    owners = [
        {"commit": lsn, "kind": 0, "commit_time": 0, "xid": 7, "rows": 1, "complete": True, "origin": None}
        for lsn, _, _, _ in rows
    ]
    frame = make_frame(
        pa.RecordBatch.from_pylist(changes, CHANGES), pa.RecordBatch.from_pylist(owners, TRANSACTIONS), [ORDERS, ITEMS],
        EventOptions(),
    )  # fmt: skip
    schema = pa.schema([("table_ordinal", pa.int64())])
    found: list[int | None] = events_of(frame, IdSeed.of("1", "s"), schema, EventOptions()).column(0).to_pylist()
    return found


def test_changes_are_numbered_by_table_and_transaction() -> None:
    rows = [(8, 1, 0, 0), (8, 2, 0, 1), (8, 2, 1, -1), (8, 3, 0, 0), (16, 1, 0, 0), (16, 2, 0, 0)]
    assert _events(rows) == [1, 1, None, 2, 1, 2]


def test_a_transaction_without_its_beginning_is_not_numbered() -> None:
    assert _events([(8, 5, 0, 0), (8, 6, 0, 0), (16, 1, 0, 0)]) == [None, None, 1]
    assert np.isnan(np.array(_events([(8, 2, 0, 1)]), float)).all()
