"""Folding the window into a chunk, transactions that a snapshot does not see, moved keys, and requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pgcdc.core.errors import ConfigError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, OldKind, Op, Relation, Relations
from pgcdc.source.postgres.snapshot.asking import describe, parse_signal
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SnapshotRequest
from pgcdc.source.postgres.snapshot.window import Chunk, MovedKeys, StreamedXids, Window, is_visible, key_moves, rows_of
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part

T = Relation(
    7, "public", "t", "d", (Column("doc", 25, -1, False), Column("a", 25, -1, True), Column("b", 25, -1, True))
)
OTHER = Relation(8, "public", "u", "d", (Column("a", 25, -1, True),))

Values = list[bytes | None]


def change(op: Op, new: Values | None = None, old: Values | None = None, unchanged: tuple[int, ...] = ()) -> dict:  # type: ignore[type-arg]
    kind = OldKind.KEY if old is not None else OldKind.NONE
    return {
        "ordinal": 1, "sub": 0, "op": int(op), "relation": 0, "new": new, "old": old, "old_kind": kind,
        "unchanged": list(unchanged) or None,
    }  # fmt: skip


def chunk(*rows: Values) -> Chunk:
    flat = [value for row in rows for value in row]
    return Chunk([pa.array(flat[:3], pa.binary()), pa.array(flat[3:], pa.binary())], 3, (2, 1))


def fold(read: Chunk, *changes: dict, narrow_first: bool = False) -> tuple[list[int], list[Values]] | None:  # type: ignore[type-arg]
    window = Window(7, ("b", "a"))
    if narrow_first:
        window.narrow(read.key_columns)
    for one in changes:
        window.see(pa.RecordBatch.from_pylist([one], schema=CHANGES), T)
    if not narrow_first:
        window.narrow(read.key_columns)
    found = window.fold(read)
    return None if found is None else (sorted(found[0].tolist()), found[1])


ROWS: tuple[Values, ...] = ([b"x", b"1", b"1"], [b"y", b"1", b"2"], [b"z", b"2", b"1"])


@pytest.mark.parametrize("narrow_first", [False, True])
def test_only_rows_of_the_chunk_are_touched(narrow_first: bool) -> None:
    read = chunk(*ROWS)
    changes = [
        change(Op.INSERT, [b"n", b"2", b"2"]),  # its columns are in the chunk, but not together
        change(Op.UPDATE, [None, b"1", b"2"], unchanged=(0,)),
        change(Op.DELETE, old=[None, b"2", b"1"]),
        change(Op.DELETE, old=[None, b"9", b"9"]),
    ]
    assert fold(read, *changes, narrow_first=narrow_first) == ([1, 2], [[b"y", b"1", b"2"]])
    assert fold(read, narrow_first=narrow_first) == ([], [])


def test_a_truncate_takes_all_rows_and_gives_none_back() -> None:
    assert fold(chunk(*ROWS), change(Op.TRUNCATE)) == ([0, 1, 2], [])
    again = change(Op.INSERT, [b"n", b"1", b"1"])
    assert fold(chunk(*ROWS), change(Op.TRUNCATE), again) == ([0, 1, 2], [[b"n", b"1", b"1"]])


def test_a_key_that_was_not_sent_makes_the_chunk_useless() -> None:
    assert fold(chunk(*ROWS), change(Op.DELETE, old=[None, b"1", None])) is None


def test_a_long_key_that_was_not_sent_again_stands_in_the_old_row() -> None:
    row = change(Op.UPDATE, [b"n", None, b"1"], old=[None, b"1", b"1"], unchanged=(1,))
    read = chunk(*ROWS)
    assert fold(read, row) == ([0], [[b"n", b"1", b"1"]])


def test_a_window_that_is_full_says_so() -> None:
    window = Window(7, ("b", "a"), limit_bytes=100)
    window.see(pa.RecordBatch.from_pylist([change(Op.INSERT, [b"x" * 200, b"1", b"1"])], schema=CHANGES), T)
    assert window.is_full
    window.narrow(chunk(*ROWS).key_columns)
    assert window.is_full, "what was left out does not come back"


def test_key_moves_are_those_with_values_that_were_not_sent() -> None:
    rows = [
        change(Op.UPDATE, [None, b"5", b"1"], old=[None, b"1", b"1"], unchanged=(0,)),
        change(Op.UPDATE, [b"n", b"6", b"1"], old=[None, b"2", b"1"]),
        change(Op.UPDATE, [None, b"7", b"1"], unchanged=(0,)),
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=CHANGES)
    assert key_moves(batch, T) == [((b"1", b"1"), (b"5", b"1"))]


def test_rows_of_a_table_come_in_their_order_and_shape() -> None:
    relations = Relations([T, OTHER, Relation(7, "public", "t", "d", T.columns[1:])])
    rows = [{**change(Op.INSERT, [b"%d" % n]), "relation": version} for n, version in enumerate([0, 1, 0, 2, 2, 0, -1])]
    data = pa.RecordBatch.from_pylist(rows, schema=CHANGES)
    none = pa.RecordBatch.from_pylist([], schema=TRANSACTIONS)
    batch = CaptureBatch(Part(7, 1, (1, 0), data), none, relations, Position.end(8), 8)
    found = [
        ([row[0] for row in part.column("new").to_pylist()], len(shape.columns)) for part, shape in rows_of(batch, [7])
    ]
    assert found == [([b"0", b"2"], 3), ([b"3", b"4"], 2), ([b"5"], 3)]


@pytest.mark.parametrize(
    ("xid", "snapshot", "unseen"),
    [
        (10, "8:12:10", True), (10, "8:12:9,11", False), (12, "8:12:", True), (13, "8:12:", True), (7, "8:12:", False),
        (3, f"8:{(1 << 32) + 5}:", False),  # after a wrap
        (6, f"8:{(1 << 32) + 5}:", True),
        (0xFFFFFFF0, f"8:{(1 << 32) + 5}:{0xFFFFFFF0}", True),
        (0xFFFFFFF0, f"8:{(1 << 32) + 5}:", False),
    ],
)  # fmt: skip
def test_transactions_that_a_snapshot_does_not_see(xid: int, snapshot: str, unseen: bool) -> None:
    xids = StreamedXids()
    xids.add(np.array([0, xid], np.int64))
    assert is_visible(xids.copy().astype(np.int64), snapshot).all() != unseen


def test_only_the_last_transactions_are_known() -> None:
    xids = StreamedXids(4)
    xids.add(np.array([1, 2, 3], np.int64))
    xids.add(np.array([4, 5], np.int64))
    assert sorted(xids.copy().tolist()) == [2, 3, 4, 5]
    xids.add(np.arange(10, 20))
    assert sorted(xids.copy().tolist()) == [16, 17, 18, 19]


def test_moved_keys_are_read_once_and_followed_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "moved.jsonl"
    moved = MovedKeys(path)
    moved.add([((b"1",), (b"5",)), ((b"2",), (b"6",))], ["id"], -1)
    assert moved.read(0, 10, ("id",)) == ((("5",), ("6",)), moved.nbytes)
    moved.add([((b"9",), (b"7",)), ((b"5",), (b"8",)), ((b"8",), (b"3",))], ["id"], 0)  # 9 was read before
    keys, done = moved.read(0, 10, ("id",))
    assert [key for (key,) in keys] == ["5", "6", "8", "3"]
    moved.move_on()
    moved.add([((b"3",), (b"4",))], ["id"], done)  # read by now
    assert moved.nbytes == done
    with open(path, "ab") as file:
        file.write(b'{"id": "ha')
    assert MovedKeys(path).nbytes == done


def test_requests_are_there_again_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    queue = RequestQueue(path)
    queue.add(SnapshotRequest("a", "t", low=("1",), chunk_delay_s=0.5), SnapshotRequest("b", "u", where="x > 1"))
    queue.begin("a", oid=7, estimated_rows=10)
    queue.advance("a", chunks=2, last_key=("k", "1"), rows=5)
    queue.heed(Position.at(8, 1), [SnapshotRequest("c", "t")], bad=1)
    queue.know([1, 2])
    again = RequestQueue(path)
    assert again.entries() == queue.entries() and again.heeded == Position.at(8, 1) and again.bad_signals == 1
    assert again.tables == frozenset({1, 2}) and again["a"].last_key == ("k", "1")
    assert describe(again["a"], 2.5)["seconds_left"] == 2.0 and describe(again["a"])["percent"] == 50.0
    following = again.next()
    assert following is not None and following.id == "a"
    again.pause()
    following = again.next()
    assert following is not None and following.id == "b"


def test_requests_that_cannot_be_are_refused_and_old_ones_forgotten(tmp_path: Path) -> None:
    queue = RequestQueue(tmp_path / "requests.json")
    for bad in (
        SnapshotRequest("a", "t", "odd"),
        SnapshotRequest("a", "t", "vanished"),
        SnapshotRequest("a", "t", chunk_size=-1),
    ):
        with pytest.raises(ConfigError):
            queue.add(bad)
    for number in range(30):
        queue.add(SnapshotRequest(str(number), "t"))
    with pytest.raises(ConfigError, match="already"):
        queue.add(SnapshotRequest("new", "t"), SnapshotRequest("3", "t"))
    for number in range(25):
        queue.end(str(number), "done")
    assert [one.id for one in queue.entries()] == [str(number) for number in range(5, 30)]


@pytest.mark.parametrize(
    ("signal", "payload"),
    [
        ("odd", None), ("execute-snapshot", None), ("execute-snapshot", "{"), ("execute-snapshot", "[]"),
        ("execute-snapshot", '{"table": 5}'), ("execute-snapshot", '{"tables": ["a", 1]}'),
        ("execute-snapshot", '{"table": "a b"}'), ("execute-snapshot", '{"table": "a", "where": 1}'),
    ],
)  # fmt: skip
def test_bad_signals(signal: str, payload: str | None) -> None:
    with pytest.raises(ConfigError):
        parse_signal(signal, payload)


def test_signals_name_tables_or_requests() -> None:
    requests, _ = parse_signal("execute-snapshot", '{"tables": ["a", "s.b"], "where": "n > 1"}')
    assert [(one.table, one.where, one.kind) for one in requests] == [
        ("a", "n > 1", "incremental"),
        ("s.b", "n > 1", "incremental"),
    ]
    assert parse_signal("stop-snapshot", '{"id": "x"}') == ([], "x") and parse_signal("pause-snapshot", None) == (
        [],
        "",
    )
