"""Two-phase commits: nothing is handed out before COMMIT PREPARED, and confirmation never passes an open PREPARE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streams import changes_of, load_messages
from wire import (
    encode_begin,
    encode_begin_prepare,
    encode_commit,
    encode_commit_prepared,
    encode_insert,
    encode_message,
    encode_prepare,
    encode_relation,
    encode_rollback_prepared,
    encode_stream_abort,
    encode_stream_start,
    encode_stream_stop,
    in_stream,
)

from pgcdc.core.errors import DecodeError, GapError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation, Relations
from pgcdc.source.postgres.wire.assemble import Assembler

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True),))
NOON = 1_700_000_000_000_000
SHAPE = encode_relation(ORDERS)
STREAMS = Path(__file__).parents[1] / "fixtures" / "streams"


def assembler(start_lsn: int = 100, **options: Any) -> Assembler:
    made = Assembler(Relations(), start_lsn=start_lsn, **options)
    made.begin(parallel=True, two_phase=True)
    feed(made, SHAPE)
    return made


def feed(made: Assembler, *messages: bytes) -> None:
    for message in messages:
        made.feed(message, 77)


def insert(number: int) -> bytes:
    return encode_insert(1, [str(number)])


def prepared(prepare_lsn: int, *changes: bytes, xid: int = 7, gid: str = "g") -> list[bytes]:
    where = (xid, gid, prepare_lsn, prepare_lsn + 5)
    return [encode_begin_prepare(*where, NOON), *changes, encode_prepare(*where, NOON)]


def streamed(prepare_lsn: int, *changes: bytes, xid: int = 7, gid: str = "g") -> list[bytes]:
    inside = [in_stream(xid, change) for change in (SHAPE, *changes)]
    stop = encode_stream_stop()
    return [
        encode_stream_start(xid),
        *inside,
        stop,
        encode_prepare(xid, gid, prepare_lsn, prepare_lsn + 5, streamed=True),
    ]


def commit(end_lsn: int, xid: int = 7, gid: str = "g") -> bytes:
    return encode_commit_prepared(xid, gid, end_lsn - 5, end_lsn, NOON)


def rollback(end_lsn: int, xid: int = 7, gid: str = "g") -> bytes:
    return encode_rollback_prepared(xid, gid, 0, end_lsn)


def whole(end_lsn: int, *changes: bytes, xid: int = 9) -> list[bytes]:
    return [encode_begin(end_lsn - 5, NOON, xid), *changes, encode_commit(end_lsn - 5, end_lsn, NOON)]


def taken(made: Assembler) -> list[tuple[int, int, bytes]]:
    """(lsn, ordinal, first value) of everything handed out now."""
    found = []
    for batch in iter(made.pop, None):
        rows = iter(batch.data.to_pylist())
        for one in batch.transactions.to_pylist():
            found += [
                (one["commit"], row["ordinal"], row["new"][0]) for row, _ in zip(rows, range(one["rows"]), strict=False)
            ]
    return found


BOTH = pytest.mark.parametrize("prepare", [prepared, streamed], ids=["whole", "streamed"])


@BOTH
def test_prepared_changes_are_handed_out_at_commit_prepared_with_its_end_lsn(prepare: Any) -> None:
    made = assembler()
    feed(made, *prepare(110, insert(1), insert(2)))
    assert (made.pop(), made.is_drained) == (None, True)
    feed(made, *whole(130, insert(3)), commit(140))
    batches = list(iter(made.pop, None))
    assert [(batch.end, batch.last_lsn, batch.rows) for batch in batches] == [
        (Position.end(130), 130, 1), (Position.end(140), 140, 2),
    ]  # fmt: skip
    assert batches[1].transactions.to_pylist() == [
        {"commit": 140, "kind": 0, "commit_time": NOON, "xid": 7, "rows": 2, "complete": True, "origin": None}
    ]


@BOTH
def test_rolled_back_changes_are_gone(prepare: Any, tmp_path: Path) -> None:
    made = assembler(seal_rows=1, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *prepare(110, insert(1), insert(2)), rollback(120))
    assert (taken(made), list(tmp_path.iterdir())) == ([], [])


def test_committed_rows_before_a_prepare_are_not_held_back() -> None:
    made = assembler()
    feed(made, *whole(105, insert(0)), *prepared(110, insert(1)))
    assert taken(made) == [(105, 1, b"0")]
    feed(made, commit(120))
    assert taken(made) == [(120, 1, b"1")]


def test_subtransactions_that_were_rolled_back_before_the_prepare_are_left_out() -> None:
    made = assembler()
    feed(made, encode_stream_start(7), in_stream(7, SHAPE), in_stream(7, insert(1)), in_stream(8, insert(2)))
    feed(made, in_stream(7, insert(3)), encode_stream_stop(), encode_stream_abort(7, 8, (105, NOON)))
    feed(made, encode_prepare(7, "g", 110, 115, streamed=True), commit(120))
    assert taken(made) == [(120, 1, b"1"), (120, 2, b"3")]


# --- confirmation


@BOTH
def test_confirmation_waits_before_an_open_prepare(prepare: Any) -> None:
    made = assembler()
    feed(made, *whole(105, insert(0)), *prepare(110, insert(1)), *whole(130, insert(2)))
    taken(made)
    assert [made.confirmable(lsn) for lsn in (105, 130)] == [105, 110]
    made.see(150)
    assert made.advance(150) is not None
    assert made.confirmable(150) == 110


def test_confirmation_waits_until_the_prepared_changes_are_durable() -> None:
    made = assembler()
    feed(made, *prepared(110, insert(1)), *whole(130, insert(2)), commit(140))
    assert made.confirmable(130) == 110  # the commit was read, but its rows are on their way
    assert made.confirmable(140) == 140
    assert made.confirmable(140) == 140


def test_the_first_of_several_prepares_counts() -> None:
    made = assembler()
    feed(made, *prepared(110, xid=7, gid="a"), *prepared(120, xid=8, gid="b"), *whole(130, insert(2)))
    assert made.confirmable(130) == 110
    feed(made, rollback(140, 7, "a"))
    assert made.confirmable(140) == 120
    feed(made, commit(150, 8, "b"))
    assert made.confirmable(150) == 150


def test_without_two_phase_nothing_is_held_back() -> None:
    made = Assembler(Relations(), start_lsn=100)
    made.begin()
    assert made.confirmable(100) == 100


def test_a_new_connection_confirms_nothing_before_it_was_told_of_the_prepares_again() -> None:
    made = assembler(start_lsn=200)  # a process that starts again: what it has goes up to 200, the slot stands at 110
    assert made.confirmable(200) == 0
    feed(made, *whole(105, insert(0)))
    assert made.confirmable(200) == 105
    feed(made, *prepared(110, insert(1)), *whole(130, insert(2)))
    made.see(210)
    assert made.confirmable(200) == 110
    assert taken(made) == []  # it has all of that
    feed(made, commit(220))
    assert taken(made) == [(220, 1, b"1")]
    assert made.confirmable(220) == 220


def test_prepares_are_remembered_across_a_reconnect() -> None:
    made = assembler()
    feed(made, *prepared(110, insert(1)), *whole(130, insert(2)))
    taken(made)
    made.abandon()
    made.begin(parallel=True, two_phase=True)
    made.see(135)
    assert made.confirmable(130) == 110
    feed(made, SHAPE, *prepared(110, insert(1)), *whole(130, insert(2)), commit(140))
    assert taken(made) == [(140, 1, b"1")]
    assert made.confirmable(140) == 140


def test_what_comes_again_is_left_out_whatever_it_is() -> None:
    made = assembler(start_lsn=200)
    note = encode_message("p", b"m", 125, transactional=False)
    feed(made, *prepared(110, insert(1)), commit(120), note, *whole(200, insert(2)), commit(150, 8, "of before"))
    assert (taken(made), made.last_lsn, made.is_drained) == ([], 200, True)
    feed(made, *whole(210, insert(3)))
    assert taken(made) == [(210, 1, b"3")]


def test_a_commit_whose_changes_never_came_is_a_gap() -> None:
    made = assembler()
    with pytest.raises(GapError, match="'g' was committed at 0/78, but its changes were never sent") as caught:
        feed(made, commit(120))
    assert caught.value.advice


def test_a_rollback_whose_changes_never_came_is_none() -> None:
    made = assembler()
    feed(made, rollback(120), *whole(130, insert(1)))
    assert taken(made) == [(130, 1, b"1")]


def test_abandon_drops_prepared_changes(tmp_path: Path) -> None:
    made = assembler(seal_rows=1, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *prepared(110, insert(1)), *streamed(120, insert(2), xid=8, gid="h"))
    assert list(tmp_path.iterdir())
    made.abandon()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("release", ["15.18", "15.20"])
def test_relations_of_a_streamed_prepare_are_known_afterwards_described_again_or_not(release: str) -> None:
    """15.20 no longer describes them again before ordinary changes; both recordings are of real servers."""
    messages = load_messages(STREAMS / f"{release}-stream-prepare.txt")
    made = Assembler(Relations(), start_lsn=1)
    made.begin(two_phase=True)
    for lsn, message in messages:
        made.feed(message, lsn)
    changes = [change for batch in iter(made.pop, None) for change in changes_of(batch)]
    assert [(one.table, one.row["v"]) for one in changes] == [("t", b"ordinary"), ("t", b"streamed")]
    behind = "".join(chr(message[0]) for _, message in messages).partition("p")[2]
    assert behind == {"15.18": "BRICK", "15.20": "BICK"}[release]


NOT_IN_ORDER: dict[str, tuple[list[bytes], str]] = {
    "begin_inside": ([encode_begin(5), encode_begin_prepare(7, "g", 1, 2)], "Begin Prepare inside of transaction 1"),
    "prepare_outside": ([encode_prepare(7, "g", 110, 115)], "message Prepare outside"),
    "prepare_of_another": (
        [encode_begin_prepare(7, "g", 110, 115), encode_prepare(7, "h", 110, 115)],
        "Prepare of 'h' inside of transaction 7",
    ),
    "prepare_of_a_plain_one": ([encode_begin(5), encode_prepare(1, "h", 110, 115)], "Prepare of 'h'"),
    "commit_of_a_prepared_one": (
        [encode_begin_prepare(7, "g", 110, 115), encode_commit(105, 110)],
        "Commit of the prepared transaction 7",
    ),
    "prepared_twice": ([*prepared(110), *prepared(120)], "'g' is prepared a second time"),
    "stream_prepare_of_none": ([encode_prepare(7, "g", 1, 2, streamed=True)], "Stream Prepare of transaction 7"),
    "commit_prepared_inside": ([*prepared(110), encode_begin(5), commit(120)], "Commit Prepared inside"),
    "rollback_prepared_inside": ([*prepared(110), encode_begin(5), rollback(120)], "Rollback Prepared inside"),
    "commit_that_goes_back": ([*whole(130), *prepared(110), commit(120)], "not after"),
}


@pytest.mark.parametrize(("messages", "named"), NOT_IN_ORDER.values(), ids=NOT_IN_ORDER.keys())
def test_stream_that_is_not_as_the_protocol_says_is_a_decode_error(messages: list[bytes], named: str) -> None:
    with pytest.raises(DecodeError, match=named):
        feed(assembler(), *messages)
