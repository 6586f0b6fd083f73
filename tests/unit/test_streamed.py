"""Streamed transactions: in whatever order they come, the batches are those of the same transactions sent whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import (
    encode_begin,
    encode_commit,
    encode_insert,
    encode_message,
    encode_origin,
    encode_relation,
    encode_stream_abort,
    encode_stream_commit,
    encode_stream_start,
    encode_stream_stop,
    encode_truncate,
    encode_type,
    encode_update,
    in_stream,
)

from pgcdc.core.errors import DecodeError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation, Relations
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder
from pgcdc.spool.segment import CaptureBatch

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
WIDER = Relation(1, "public", "orders", "d", (*ORDERS.columns, Column("total", 1700, -1, False)))
ITEMS = Relation(2, "public", "items", "d", (Column("id", 23, -1, True),))
NOON = 1_700_000_000_000_000


pytestmark = pytest.mark.usefixtures("decoder")


def assembler(**options: Any) -> Assembler:
    made = Assembler(Relations(), start_lsn=100, **options)
    made.begin(parallel=True)
    return made


def feed(made: Assembler, *messages: bytes) -> None:
    for message in messages:
        made.feed(message, 77)


def insert(number: int = 1, note: str = "x") -> bytes:
    return encode_insert(ORDERS.oid, [str(number), note])


def block(xid: int, *changes: bytes, first: bool = True, sub: int | None = None) -> list[bytes]:
    """A block of one (sub)transaction."""
    inside = [in_stream(sub or xid, change) for change in changes]
    return [encode_stream_start(xid, first), *inside, encode_stream_stop()]


def commit(xid: int, end_lsn: int) -> bytes:
    return encode_stream_commit(xid, end_lsn - 5, end_lsn, NOON)


def abort(xid: int, subxid: int | None = None) -> bytes:
    return encode_stream_abort(xid, subxid or xid, (90, NOON))


def whole(end_lsn: int, *changes: bytes, xid: int = 7) -> list[bytes]:
    return [encode_begin(end_lsn - 5, NOON, xid), *changes, encode_commit(end_lsn - 5, end_lsn, NOON)]


def pop_all(made: Assembler) -> list[CaptureBatch]:
    return list(iter(made.pop, None))


def changes_of(batches: Sequence[CaptureBatch]) -> list[tuple[Any, ...]]:
    """(lsn, xid, ordinal, sub, op, new values, columns of its relation) of every change: whatever the cuts."""
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        rows = iter(batch.data.to_pylist())
        for one in batch.transactions.to_pylist():
            for _ in range(one["rows"]):
                row = next(rows)
                shape = batch.relations[row["relation"]].columns if row["relation"] >= 0 else None
                found.append(
                    (
                        one["commit"],
                        one["xid"],
                        row["ordinal"],
                        row["sub"],
                        chr(row["op"]),
                        row["new"],
                        shape,
                        row["prefix"],
                    )
                )
        assert next(rows, None) is None
    return found


def values(batches: Sequence[CaptureBatch]) -> list[tuple[int, int, bytes]]:
    """(lsn, ordinal, first value) of every change."""
    return [(one[0], one[2], one[5][0]) for one in changes_of(batches)]


# --- what is handed out, and when


def test_a_streamed_transaction_is_handed_out_at_its_commit() -> None:
    made = assembler()
    feed(made, *block(7, encode_relation(ORDERS), insert(1)), *block(7, insert(2), first=False))
    assert (made.pop(), made.is_drained) == (None, True)
    feed(made, commit(7, 110))
    (batch,) = pop_all(made)
    assert values([batch]) == [(110, 1, b"1"), (110, 2, b"2")]
    assert (batch.end, batch.last_lsn, made.last_lsn) == (Position.end(110), 110, 110)
    assert batch.transactions.to_pylist() == [
        {"commit": 110, "kind": 0, "commit_time": NOON, "xid": 7, "rows": 2, "complete": True, "origin": None}
    ]


def test_interleaved_transactions_are_kept_apart() -> None:
    made = assembler()
    feed(made, *block(7, encode_relation(ORDERS), insert(1)), *block(8, encode_relation(ORDERS), insert(10)))
    feed(made, *whole(110, encode_relation(ORDERS), insert(100), xid=9))
    feed(made, *block(7, insert(2), first=False), *block(8, insert(11), first=False))
    feed(made, commit(8, 120), *whole(130, insert(101), xid=9), commit(7, 140))
    assert values(pop_all(made)) == [
        (110, 1, b"100"), (120, 1, b"10"), (120, 2, b"11"), (130, 1, b"101"), (140, 1, b"1"), (140, 2, b"2"),
    ]  # fmt: skip


def test_an_aborted_transaction_leaves_nothing(tmp_path: Path) -> None:
    made = assembler(seal_rows=2, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *block(7, encode_relation(ORDERS), *[insert(n) for n in range(5)]))
    assert list(tmp_path.iterdir())
    feed(made, abort(7))
    assert (pop_all(made), list(tmp_path.iterdir()), made.last_lsn) == ([], [], 100)
    with pytest.raises(DecodeError, match="which was not streamed"):
        feed(made, commit(7, 110))


def test_an_aborted_subtransaction_drops_only_its_own_changes_and_no_number_is_missing() -> None:
    made = assembler()
    feed(made, *block(7, encode_relation(ORDERS), insert(1)))
    feed(made, *block(7, insert(2), encode_message("p", b"gone"), first=False, sub=8))
    feed(made, *block(7, insert(3), first=False, sub=9), abort(7, 8))
    feed(made, *block(7, encode_relation(ORDERS), encode_message("p", b"m"), insert(4), first=False), commit(7, 110))
    found = changes_of(pop_all(made))
    assert [(one[2], one[3], one[5][0]) for one in found] == [(1, 0, b"1"), (2, 0, b"3"), (2, 1, b"m"), (3, 0, b"4")]


def test_a_message_behind_an_aborted_row_follows_the_row_before() -> None:
    made = assembler(seal_rows=1)
    feed(made, *block(7, encode_relation(ORDERS), insert(1), encode_message("p", b"a")))
    feed(made, *block(7, insert(2), first=False, sub=8))
    feed(made, *block(7, encode_message("p", b"b"), insert(3), first=False), abort(7, 8), commit(7, 110))
    found = changes_of(pop_all(made))
    assert [(one[2], one[3]) for one in found] == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_an_aborted_subtransaction_of_a_transaction_that_never_came_is_nothing() -> None:
    made = assembler()
    feed(made, abort(7, 8), *block(7, encode_relation(ORDERS), insert(1)), commit(7, 110))
    assert values(pop_all(made)) == [(110, 1, b"1")]


@pytest.mark.parametrize("seal_rows", [1, 100])
def test_a_transaction_of_which_only_aborted_changes_came_gives_no_batch(tmp_path: Path, seal_rows: int) -> None:
    made = assembler(seal_rows=seal_rows, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *block(7, encode_relation(ORDERS), insert(1), insert(2), sub=8), abort(7, 8), *block(7, first=False))
    feed(made, commit(7, 110))
    assert (pop_all(made), made.last_lsn, made.is_drained) == ([], 110, True)
    assert not list(tmp_path.iterdir())


def test_the_last_part_with_rows_completes_the_transaction() -> None:
    made = assembler(seal_rows=2)
    feed(made, *block(7, encode_relation(ORDERS), *[insert(n) for n in range(3)]))
    feed(made, *block(7, *[insert(n) for n in range(5)], first=False, sub=8), abort(7, 8), commit(7, 110))
    parts = pop_all(made)
    assert [(part.rows, part.end, part.last_lsn) for part in parts] == [
        (2, Position.at(110, 2), 100), (1, Position.end(110), 110),
    ]  # fmt: skip
    assert [part.transactions.column("complete")[0].as_py() for part in parts] == [False, True]


def test_truncates_types_and_origin_come_in_blocks_too() -> None:
    made = assembler()
    inside = [
        encode_type(99, "public", "mood"),
        encode_relation(ORDERS),
        encode_relation(ITEMS),
        encode_truncate([1, 2]),
    ]
    start, *rest = block(7, *inside, insert(1))
    feed(made, start, encode_origin(5, "berlin"), *rest, commit(7, 110))
    (batch,) = pop_all(made)
    assert [(one[2], one[4]) for one in changes_of([batch])] == [(1, "T"), (2, "T"), (3, "I")]
    assert batch.transactions.column("origin").to_pylist() == ["berlin"]


def test_committed_rows_before_a_stream_commit_come_first() -> None:
    made = assembler()
    feed(made, encode_relation(ORDERS), *block(7, encode_relation(ORDERS), insert(1)), *whole(110, insert(2), xid=8))
    feed(made, commit(7, 120))
    batches = pop_all(made)
    assert [batch.last_lsn for batch in batches] == [110, 120]


# --- relations


def test_each_change_has_the_shape_of_its_own_transaction() -> None:
    made = assembler()
    feed(made, encode_relation(ORDERS), *whole(105, insert(0), xid=6))
    feed(made, *block(7, encode_relation(ORDERS), insert(1)))
    feed(made, *block(7, encode_relation(WIDER), encode_insert(1, ["2", "x", "9"]), first=False))
    feed(made, *whole(110, insert(3), xid=8))  # still sees the old shape
    feed(made, commit(7, 120))
    feed(made, *whole(130, encode_insert(1, ["4", "x", "9"]), xid=9))  # the server took the new shape as known
    found = changes_of(pop_all(made))
    assert [(one[0], len(one[5]), len(one[6])) for one in found] == [
        (105, 2, 2), (110, 2, 2), (120, 2, 2), (120, 3, 3), (130, 3, 3),
    ]  # fmt: skip


def test_a_shape_told_since_then_stays_when_an_older_stream_commits() -> None:
    made = assembler()
    feed(made, *block(7, encode_relation(ORDERS), insert(1)))
    feed(made, *whole(110, encode_relation(WIDER), encode_insert(1, ["2", "x", "9"]), xid=8))
    feed(made, commit(7, 120), *whole(130, encode_insert(1, ["3", "x", "9"]), xid=9))
    assert [len(one[5]) for one in changes_of(pop_all(made))] == [3, 2, 3]


def test_shapes_of_an_aborted_stream_are_not_known_to_others() -> None:
    made = assembler()
    feed(
        made, *block(7, encode_relation(WIDER), encode_insert(1, ["2", "x", "9"])), abort(7), encode_begin(105, NOON, 8)
    )
    with pytest.raises(DecodeError, match="was not described"):
        feed(made, encode_insert(1, ["2", "x", "9"]))


def test_after_an_abort_the_stream_must_describe_its_tables_again() -> None:
    made = assembler()
    feed(made, *block(7, encode_relation(WIDER), encode_insert(1, ["2", "x", "9"]), sub=8), abort(7, 8))
    feed(made, encode_stream_start(7, False))
    with pytest.raises(DecodeError, match="was not described"):
        feed(made, in_stream(7, encode_insert(1, ["2", "x", "9"])))


def test_a_stream_does_not_know_the_shapes_of_others() -> None:
    made = assembler()
    feed(made, encode_relation(ORDERS), encode_stream_start(7))
    with pytest.raises(DecodeError, match="was not described"):
        feed(made, in_stream(7, insert(1)))


# --- memory (invariant 9)


def test_many_open_streams_together_are_bounded(tmp_path: Path) -> None:
    made = assembler(seal_bytes=10_000, spill_bytes=20_000, spill_dir=tmp_path)
    xids = range(10, 60)
    for xid in xids:
        feed(made, *block(xid, encode_relation(ORDERS), *[insert(n, "x" * 100) for n in range(20)]))
    for _ in range(3):
        for xid in xids:
            feed(made, *block(xid, *[insert(n, "x" * 100) for n in range(20)], first=False))
    streams = made._streams._open.values()
    buffered = sum(one.rows.nbytes for one in streams if one.rows is not None)
    held = sum(part.part.nbytes for one in streams for part in one.parts if part.part.path is None)
    assert buffered <= 20_000
    assert held <= 20_000
    assert len(list(tmp_path.iterdir())) > 50
    for number, xid in enumerate(xids):
        feed(made, commit(xid, 110 + number))
    found = changes_of(pop_all(made))
    assert [one[1] for one in found] == [xid for xid in xids for _ in range(80)]
    assert [one[2] for one in found] == list(range(1, 81)) * len(xids)


def test_a_stream_gives_the_memory_of_a_full_buffer_back() -> None:
    made = assembler(seal_rows=3)
    feed(made, encode_stream_start(7), in_stream(7, encode_relation(ORDERS)), in_stream(7, insert(1)))
    before = made._streams._open[7].rows
    feed(made, in_stream(7, insert(2)), in_stream(7, insert(3)), in_stream(7, insert(4)), encode_stream_stop())
    assert made._streams._open[7].rows is not before
    feed(made, commit(7, 110))
    assert [one[1] for one in values(pop_all(made))] == [1, 2, 3, 4]


def test_many_subtransactions_of_a_part_are_remembered_on_disk(tmp_path: Path) -> None:
    made = assembler(seal_rows=200, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *block(7, encode_relation(ORDERS)))
    inside = [in_stream(1000 + n, insert(n)) for n in range(500)]
    feed(made, encode_stream_start(7, False), *inside, encode_stream_stop())
    assert len(list(tmp_path.glob("*.xids"))) == 3
    feed(made, *[abort(7, 1000 + n) for n in range(0, 500, 2)], commit(7, 110))
    found = values(pop_all(made))
    assert found == [(110, n + 1, str(2 * n + 1).encode()) for n in range(250)]
    assert not list(tmp_path.iterdir())


def test_parts_without_aborted_changes_are_handed_out_as_they_lie_on_disk(tmp_path: Path) -> None:
    made = assembler(seal_rows=2, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *block(7, encode_relation(ORDERS), *[insert(n) for n in range(6)]), commit(7, 110))
    assert all(batch.part is not None and batch.part.path is not None for batch in pop_all(made))


# --- the connection


def test_progress_is_not_held_back_by_streams_between_their_blocks() -> None:
    made = assembler()
    feed(made, encode_stream_start(7), in_stream(7, encode_relation(ORDERS)), in_stream(7, insert(1)))
    assert made.advance(150) is None
    feed(made, encode_stream_stop())
    batch = made.advance(150)
    assert batch is not None
    assert (batch.last_lsn, made.confirmable(150)) == (150, 150)


def test_abandon_drops_every_stream(tmp_path: Path) -> None:
    made = assembler(seal_rows=2, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *block(7, encode_relation(ORDERS), *[insert(n) for n in range(5)]))
    feed(
        made,
        encode_stream_start(8),
        in_stream(8, encode_relation(ORDERS)),
        *[in_stream(8, insert(n)) for n in range(5)],
    )
    made.abandon()
    made.begin(parallel=True)
    assert not list(tmp_path.iterdir())
    assert made.last_lsn == 100
    feed(made, *block(7, encode_relation(ORDERS), *[insert(n) for n in range(3)]), commit(7, 110))
    assert values(pop_all(made)) == [(110, 1, b"0"), (110, 2, b"1"), (110, 3, b"2")]


# --- binary values


def test_binary_rows_are_rewritten_by_the_shape_in_force_with_their_xid_kept() -> None:
    made = assembler()
    made.begin(parallel=True, decoder=BinaryDecoder())
    row = encode_insert(2, ["5"]).replace(b"t\0\0\0\0015", b"b\0\0\0\4\0\0\0\5")
    feed(made, *whole(105, encode_relation(ITEMS), row, xid=6))
    feed(made, *block(7, encode_relation(ITEMS), row, sub=8), *block(7, row, first=False, sub=9), abort(7, 8))
    feed(made, commit(7, 110))
    assert values(pop_all(made)) == [(105, 1, b"5"), (110, 1, b"5")]


def test_binary_rows_of_an_unknown_table_are_refused() -> None:
    made = assembler()
    made.begin(parallel=True, decoder=BinaryDecoder())
    for damaged in (insert(1), insert(1)[:3], b"I"):
        with pytest.raises(DecodeError):
            feed(made, *whole(105, damaged))
        made.abandon()


# --- what is not as the protocol says


DESCRIBED = block(7, encode_relation(ORDERS))
NOT_IN_ORDER: dict[str, tuple[list[bytes], str]] = {
    "start_inside_of_a_block": (
        [encode_stream_start(7), encode_stream_start(8)],
        "Stream Start inside of transaction 7",
    ),
    "start_inside_of_a_transaction": (
        [encode_begin(5), encode_stream_start(8)],
        "Stream Start inside of transaction 1",
    ),
    "first_block_twice": ([*block(7), encode_stream_start(7)], "begins a second time"),
    "block_without_a_first": ([encode_stream_start(7, False)], "continues, but has not begun"),
    "stop_outside": ([encode_stream_stop()], "message Stream Stop outside"),
    "stop_of_a_whole_transaction": ([encode_begin(5), encode_stream_stop()], "message Stream Stop outside"),
    "begin_inside_of_a_block": ([encode_stream_start(7), encode_begin(5)], "Begin inside of transaction 7"),
    "commit_inside_of_a_block": ([encode_stream_start(7), encode_commit(105, 110)], "message Commit outside"),
    "stream_commit_inside": ([encode_stream_start(7), commit(7, 110)], "Stream Commit inside of transaction 7"),
    "stream_commit_of_another": ([*block(7), commit(8, 110)], "Stream Commit of transaction 8, which was not streamed"),
    "abort_of_another": ([*block(7), abort(8)], "Stream Abort of transaction 8, which was not streamed"),
    "abort_inside": ([encode_stream_start(7), abort(8, 9)], "Stream Abort inside of transaction 7"),
    "abort_that_is_not_parallel": ([*block(7), encode_stream_abort(7, 7)], "abort LSN is truncated"),
    "row_without_xid": ([*DESCRIBED, encode_stream_start(7, False), insert(1)], "."),
    "row_of_no_transaction": ([*DESCRIBED, encode_stream_start(7, False), in_stream(0, insert(1))], "xid is 0"),
    "row_between_blocks": ([*DESCRIBED, in_stream(7, insert(1))], "message I outside"),
    "message_that_is_not_of_it": (
        [encode_stream_start(7), in_stream(7, encode_message("p", b"", transactional=False))],
        "a non-transactional Message inside",
    ),
    "commit_that_goes_back": ([*block(7), commit(7, 100)], "ends at 0/64, not after 0/64"),
    "commit_at_no_lsn": ([*block(7), encode_stream_commit(7, 1, 2**63)], "not an LSN"),
}


@pytest.mark.parametrize(("messages", "named"), NOT_IN_ORDER.values(), ids=NOT_IN_ORDER.keys())
def test_stream_that_is_not_as_the_protocol_says_is_a_decode_error(messages: list[bytes], named: str) -> None:
    with pytest.raises(DecodeError, match=named) as caught:
        feed(assembler(), *messages)
    assert caught.value.advice


# --- the same transactions, streamed and whole


@dataclass
class Played:
    """One transaction while it runs: its open subtransactions, and all changes so far with their xids."""

    xid: int
    stack: list[list[int]]
    """xids that a rollback to this depth would undo."""
    changes: list[tuple[int, bytes]] = field(default_factory=list)
    sent: int = 0
    """0: nothing; else one more than how many of `changes` were streamed."""
    known: bool = False
    streamed: set[int] = field(default_factory=set)


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(
            ["row", "row", "row", "update", "message", "truncate", "savepoint", "release", "rollback", "send", "end"]
        ),
    ),
    max_size=60,
)


def play(script: list[tuple[int, str]]) -> tuple[list[bytes], list[bytes]]:
    """The same three sessions, told by a server that streams and by one that does not."""
    streamed: list[bytes] = []
    plain: list[bytes] = [encode_relation(ORDERS), encode_relation(ITEMS)]
    running: dict[int, Played] = {}
    next_xid, lsn = 10, 100

    def send(one: Played) -> None:
        streamed.append(encode_stream_start(one.xid, not one.sent))
        if not one.known:
            streamed.extend(in_stream(one.xid, encode_relation(shape)) for shape in (ORDERS, ITEMS))
            one.known = True
        for xid, change in one.changes[max(one.sent - 1, 0) :]:
            streamed.append(in_stream(xid, change))
            one.streamed.add(xid)
        one.sent = len(one.changes) + 1
        streamed.append(encode_stream_stop())

    for number, (session, step) in enumerate([*script, (0, "end"), (1, "end"), (2, "end")]):
        if session not in running:
            next_xid += 1
            running[session] = Played(next_xid, [[next_xid]])
        one = running[session]
        new = [str(number), "x"]
        if step in ("row", "update", "message", "truncate"):
            change = {
                "row": encode_insert(1, new),
                "update": encode_update(1, new, new),
                "message": encode_message("p", str(number).encode()),
                "truncate": encode_truncate([1, 2]),
            }[step]
            one.changes.append((one.stack[-1][-1], change))
        elif step == "savepoint":
            next_xid += 1
            one.stack.append([next_xid])
        elif step == "release" and len(one.stack) > 1:
            inner = one.stack.pop()
            one.stack[-1][:0] = inner  # rolled back with it, but new changes are the outer one's
        elif step == "rollback" and len(one.stack) > 1:
            gone = one.stack.pop()
            for xid in gone:
                if xid in one.streamed:
                    streamed.append(abort(one.xid, xid))
                    one.known = False
            kept = [change for change in one.changes if change[0] not in gone]
            one.sent = min(one.sent, 1 + sum(change[0] in one.streamed for change in kept)) if one.sent else 0
            one.changes = kept
        elif step == "send":
            send(one)
        elif step == "end":
            del running[session]
            lsn += 10
            plain += whole(lsn, *[change for _, change in one.changes], xid=one.xid)
            if one.sent:
                send(one)
                streamed.append(commit(one.xid, lsn))
            else:
                relations = [encode_relation(ORDERS), encode_relation(ITEMS)]
                streamed += whole(lsn, *relations, *[change for _, change in one.changes], xid=one.xid)
    return streamed, plain


@settings(max_examples=150)
@given(steps, st.integers(1, 8), st.sampled_from([0, 200, 10**6]))
def test_streamed_and_whole_transactions_give_the_same_changes(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[int, str]], seal_rows: int, spill_bytes: int
) -> None:
    streamed, plain = play(script)
    folder = tmp_path_factory.mktemp("pending")
    one = assembler(seal_rows=seal_rows, spill_bytes=spill_bytes, spill_dir=folder)
    other = assembler()
    feed(one, *streamed)
    feed(other, *plain)
    batches = pop_all(one)
    assert changes_of(batches) == changes_of(pop_all(other))
    seen = 100
    for batch in batches:
        complete = batch.transactions.column("complete").to_pylist()[-1]
        assert batch.last_lsn == (batch.end.commit if complete else seen)
        assert batch.end.is_end == complete
        seen = batch.last_lsn
