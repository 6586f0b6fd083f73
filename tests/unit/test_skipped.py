"""Which changes of the stream a younger snapshot saw, and what is left of a batch without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pgcdc.core.position import Position
from pgcdc.core.relation import Column, OldKind, Op, Relation, Relations
from pgcdc.source.postgres.snapshot.requests import SkipRule
from pgcdc.source.postgres.snapshot.window import is_visible, leave_out
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part

WRAP = 1 << 32
SHAPES = [Relation(oid, "public", name, "d", (Column("id", 23, -1, True),)) for oid, name in ((1, "a"), (2, "b"))]


@pytest.mark.parametrize(
    ("xid", "snapshot", "seen"),
    [
        (99, "100:120:", True),
        (119, "100:120:", True),
        (120, "100:120:", False),
        (110, "100:120:110,115", False),
        (115, "100:120:110,115", False),
        (111, "100:120:110,115", True),
        (WRAP - 5, f"{WRAP + 3}:{WRAP + 8}:", True),
        (2, f"{WRAP + 3}:{WRAP + 8}:", True),
        (5, f"{WRAP + 3}:{WRAP + 8}:{WRAP + 5}", False),
        (9, f"{WRAP + 3}:{WRAP + 8}:", False),
        (3, f"{WRAP - 9}:{WRAP - 2}:", False),
    ],
)
def test_visibility_of_transactions_of_32_bits(xid: int, snapshot: str, seen: bool) -> None:
    assert is_visible(np.array([xid], np.int64), snapshot).tolist() == [seen]


def make(*transactions: tuple[int, int, list[int]]) -> CaptureBatch:
    """(lsn, xid, the table of each row)"""
    rows = [
        {"ordinal": number, "sub": 0, "op": int(Op.INSERT), "relation": table, "old_kind": OldKind.NONE}
        for _, _, tables in transactions
        for number, table in enumerate(tables, 1)
    ]
    data = pa.RecordBatch.from_pylist(rows, schema=CHANGES)
    owners = [
        {"commit": lsn, "kind": 0, "commit_time": 0, "xid": xid, "rows": len(tables), "complete": True}
        for lsn, xid, tables in transactions
    ]
    end = Position.end(transactions[-1][0])
    part = Part(len(rows), data.nbytes, (rows[-1]["ordinal"], 0), data)
    return CaptureBatch(
        part, pa.RecordBatch.from_pylist(owners, schema=TRANSACTIONS), Relations(SHAPES), end, end.commit
    )


def left(batch: CaptureBatch) -> list[tuple[int, int, int]]:
    """(lsn, ordinal, table) of the rows."""
    owners = batch.transactions
    lsns = np.repeat(owners.column("commit").to_numpy(), owners.column("rows").to_numpy())
    data = batch.data
    return list(
        zip(lsns.tolist(), data.column("ordinal").to_pylist(), data.column("relation").to_pylist(), strict=True)
    )


def test_only_rows_of_the_table_by_transactions_that_were_seen_are_left_out() -> None:
    batch = make((8, 10, [0, 1, 0]), (16, 11, [0]), (24, 12, [0, 1]), (32, 13, [0]))
    rule = SkipRule(1, "10:20:12", 24)
    found = leave_out(batch, [rule])
    assert left(found) == [(8, 2, 1), (24, 1, 0), (24, 2, 1), (32, 1, 0)], "the positions of the others are the same"
    assert found.transactions.column("commit").to_pylist() == [8, 24, 32] and found.end == batch.end
    assert left(leave_out(found, [rule])) == left(found)


def test_a_batch_of_which_nothing_is_left_only_moves_the_position() -> None:
    batch = make((8, 10, [0, 0]))
    batch = replace(batch, token=b"set")
    found = leave_out(batch, [SkipRule(1, "10:20:", 8)])
    assert found.token == b"set"
    assert found.part is None and found.end == batch.end and found.last_lsn == 8


def test_what_was_written_later_is_never_touched() -> None:
    batch = make((32, 10, [0]))
    assert leave_out(batch, [SkipRule(1, "10:20:", 24)]) is batch
    assert leave_out(batch, []) is batch
