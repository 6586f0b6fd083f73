"""From messages to batches: what is handed out is committed, complete, and confirmed only at an END lsn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import (
    encode_begin,
    encode_commit,
    encode_delete,
    encode_insert,
    encode_message,
    encode_origin,
    encode_relation,
    encode_truncate,
    encode_type,
    encode_update,
)

from pgcdc.core.errors import DecodeError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Op, Relation, Relations
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.spool.schema import CHANGES
from pgcdc.spool.segment import CaptureBatch

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
ITEMS = Relation(2, "public", "items", "d", (Column("id", 23, -1, True),))
NOON = 1_700_000_000_000_000


pytestmark = pytest.mark.usefixtures("decoder")


def assembler(**options: Any) -> Assembler:
    """One that was told both tables, as at the start of a connection."""
    made = Assembler(Relations(), start_lsn=100, **options)
    describe(made)
    return made


def describe(made: Assembler) -> None:
    made.feed(encode_relation(ORDERS), 0)
    made.feed(encode_relation(ITEMS), 0)


def insert(number: int = 1, note: str = "x") -> bytes:
    return encode_insert(ORDERS.oid, [str(number), note])


def transaction(end_lsn: int, *changes: bytes, xid: int = 7) -> list[bytes]:
    return [encode_begin(end_lsn - 5, NOON, xid), *changes, encode_commit(end_lsn - 5, end_lsn, NOON)]


def feed(made: Assembler, *messages: bytes) -> None:
    for message in messages:
        made.feed(message, 77)


def pop_all(made: Assembler) -> list[CaptureBatch]:
    return list(iter(made.pop, None))


def positions(batch: CaptureBatch) -> list[tuple[int, int]]:
    return list(zip(batch.data.column("ordinal").to_pylist(), batch.data.column("sub").to_pylist(), strict=True))


# --- commits


def test_nothing_is_handed_out_before_its_commit() -> None:
    made = assembler()
    feed(made, encode_begin(105, NOON, 7), insert())
    assert made.pop() is None
    assert (made.is_drained, made.last_lsn) == (True, 100)


def test_commit_publishes_with_its_end_lsn_and_ordinals_from_1() -> None:
    made = assembler()
    feed(made, *transaction(110, insert(1), encode_update(1, ["1", "y"]), encode_delete(1, ["1", None])))
    batch = made.pop()
    assert batch is not None
    assert (batch.end, batch.last_lsn, batch.rows) == (Position.end(110), 110, 3)
    assert positions(batch) == [(1, 0), (2, 0), (3, 0)]
    assert batch.data.column("op").to_pylist() == [Op.INSERT, Op.UPDATE, Op.DELETE]
    assert batch.data.schema == CHANGES
    assert batch.transactions.to_pylist() == [
        {"commit": 110, "kind": 0, "commit_time": NOON, "xid": 7, "rows": 3, "complete": True, "origin": None}
    ]
    assert (made.pop(), made.is_drained, made.last_lsn) == (None, True, 110)


def test_small_transactions_share_a_batch_and_each_counts_from_1() -> None:
    made = assembler()
    feed(made, *transaction(110, insert(), insert(), xid=7), *transaction(120, insert(), xid=8))
    (batch,) = pop_all(made)
    assert positions(batch) == [(1, 0), (2, 0), (1, 0)]
    assert [(one["commit"], one["xid"], one["rows"]) for one in batch.transactions.to_pylist()] == [
        (110, 7, 2),
        (120, 8, 1),
    ]
    assert (batch.end, batch.last_lsn) == (Position.end(120), 120)


def test_committed_rows_wait_for_more_unless_drained() -> None:
    made = assembler()
    feed(made, *transaction(110, insert()))
    assert made.pop(drain=False) is None
    assert made.pop(drain=True) is not None


def test_draining_inside_of_a_transaction_gives_only_what_is_committed() -> None:
    made = assembler()
    feed(made, *transaction(110, insert(1)), encode_begin(115, NOON, 8), insert(2))
    (batch,) = pop_all(made)
    assert (batch.end, batch.rows) == (Position.end(110), 1)
    feed(made, insert(3), encode_commit(115, 120, NOON))
    later = pop_all(made)
    assert [one for batch in later for one in positions(batch)] == [(1, 0), (2, 0)]
    assert later[-1].end == Position.end(120)


def test_truncate_has_one_ordinal_for_each_table() -> None:
    made = assembler()
    feed(made, *transaction(110, insert(), encode_truncate([1, 2]), insert()))
    (batch,) = pop_all(made)
    assert positions(batch) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert batch.data.column("op").to_pylist() == [Op.INSERT, Op.TRUNCATE, Op.TRUNCATE, Op.INSERT]
    assert batch.data.column("relation").to_pylist() == [0, 0, 1, 0]


def test_messages_use_the_sub_ordinal_and_move_no_row() -> None:
    rows = [insert(1), encode_truncate([1]), insert(2)]
    notes = [encode_message("p", b"m")] * 2
    plain, noted = assembler(), assembler()
    feed(plain, *transaction(110, *rows))
    feed(noted, *transaction(110, *notes, rows[0], *notes, rows[1], *notes, rows[2]))
    (without,), (with_notes,) = pop_all(plain), pop_all(noted)
    assert positions(with_notes) == [
        (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0),
    ]  # fmt: skip
    assert [one for one in positions(with_notes) if not one[1]] == positions(without)
    assert with_notes.data.column("prefix").to_pylist()[:3] == ["p", "p", None]
    assert with_notes.data.column("new").to_pylist()[0] == [b"m"]


def test_message_outside_of_a_transaction_stands_alone_at_its_lsn() -> None:
    made = assembler()
    feed(made, *transaction(110, insert()), encode_message("p", b"m", 118, transactional=False))
    (batch,) = pop_all(made)
    assert [(one["commit"], one["rows"]) for one in batch.transactions.to_pylist()] == [(110, 1), (118, 1)]
    assert positions(batch) == [(1, 0), (0, 1)]
    assert (batch.end, batch.last_lsn, made.last_lsn) == (Position.end(118), 118, 118)


def test_empty_transaction_gives_no_batch_but_moves_last_lsn() -> None:
    made = assembler()
    feed(made, *transaction(110))
    assert (made.pop(), made.last_lsn, made.is_drained) == (None, 110, True)


def test_origin_belongs_to_its_transaction_alone() -> None:
    made = assembler()
    feed(made, *transaction(110, encode_origin(5, "berlin"), insert()), *transaction(120, insert()))
    (batch,) = pop_all(made)
    assert batch.transactions.column("origin").to_pylist() == ["berlin", None]


def test_altered_table_is_a_new_version_from_there_on() -> None:
    made = assembler()
    wider = Relation(1, "public", "orders", "d", (*ORDERS.columns, Column("total", 1700, -1, False)))
    changed = encode_insert(1, ["2", "x", "9.99"])
    feed(made, encode_type(99, "public", "mood"))
    feed(made, *transaction(110, insert(), encode_relation(wider), changed, encode_relation(ORDERS), insert()))
    (batch,) = pop_all(made)
    assert batch.data.column("relation").to_pylist() == [0, 2, 0]
    assert batch.relations.shapes == [ORDERS, ITEMS, wider]


# --- huge transactions


def test_huge_transaction_comes_in_parts_only_after_its_commit() -> None:
    made = assembler(seal_rows=3)
    feed(made, *transaction(110, insert()))
    feed(made, encode_begin(115, NOON, 8), *[insert(n) for n in range(8)])
    assert [batch.end for batch in pop_all(made)] == [Position.end(110)]
    feed(made, encode_commit(115, 120, NOON))
    parts = pop_all(made)
    assert [one for part in parts for one in positions(part)] == [(n, 0) for n in range(1, 9)]
    assert [part.end for part in parts[:-1]] == [Position.at(120, *positions(part)[-1]) for part in parts[:-1]]
    assert parts[-1].end == Position.end(120)
    assert [part.last_lsn for part in parts] == [*[110] * (len(parts) - 1), 120]
    assert [part.transactions.column("complete").to_pylist() for part in parts] == [
        *[[False]] * (len(parts) - 1),
        [True],
    ]
    assert {part.transactions.column("commit")[0].as_py() for part in parts} == {120}


def test_parts_never_confirm_their_transaction_even_while_others_wait() -> None:
    made = assembler(seal_rows=2)
    for end in (110, 120, 130):
        feed(made, *transaction(end, *[insert(n) for n in range(5)]))
    seen = 100
    for batch in pop_all(made):
        complete = batch.transactions.column("complete").to_pylist()[-1]
        assert batch.last_lsn == (batch.end.commit if complete else seen)
        assert batch.end.is_end == complete
        seen = batch.last_lsn
    assert seen == 130


def test_transaction_that_ends_exactly_with_a_sealed_part_has_no_empty_one() -> None:
    made = assembler(seal_rows=2)
    feed(made, *transaction(110, *[insert(n) for n in range(4)]))
    parts = pop_all(made)
    assert [part.rows for part in parts] == [2, 2]
    assert [part.end for part in parts] == [Position.at(110, 2), Position.end(110)]


def test_part_that_ends_with_a_message_ends_at_its_sub_ordinal() -> None:
    made = assembler(seal_rows=3)
    note = encode_message("p", b"m")
    feed(made, *transaction(110, insert(1)))
    feed(made, encode_begin(115, NOON, 8), insert(1), note, note)
    pop_all(made)  # the drain takes what is open aside
    feed(made, insert(2), encode_commit(115, 120, NOON))
    first, second = pop_all(made)
    assert (first.end, positions(first)) == (Position.at(120, 1, 2), [(1, 0), (1, 1), (1, 2)])
    assert (second.end, positions(second)) == (Position.end(120), [(2, 0)])


def test_large_transaction_is_sealed_by_bytes(tmp_path: Path) -> None:
    made = assembler(seal_bytes=1000)
    feed(made, *transaction(110, *[insert(n, "x" * 600) for n in range(6)]))
    assert [part.rows for part in pop_all(made)] == [2, 2, 2]


def test_what_is_over_the_spill_limit_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    made = assembler(seal_bytes=1000, spill_bytes=2500, spill_dir=tmp_path)
    feed(made, *transaction(110, *[insert(n, "x" * 600) for n in range(9)]))
    parts = pop_all(made)
    files = [part.part.path for part in parts if part.part is not None and part.part.path is not None]
    assert 0 < len(files) < len(parts)
    assert sorted(files) == sorted(tmp_path.iterdir())
    held = sum(part.part.nbytes for part in parts if part.part is not None and part.part.path is None)
    assert held <= 2500 + 1500  # and the part that is sealed by the commit
    assert [one for part in parts for one in positions(part)] == [(n, 0) for n in range(1, 10)]
    assert [row for part in parts for row in part.data.column("new").to_pylist()] == [
        [str(n).encode(), b"x" * 600] for n in range(9)
    ]


def test_without_a_folder_nothing_is_spilled() -> None:
    made = assembler(seal_bytes=1000, spill_bytes=0)
    feed(made, *transaction(110, *[insert(n, "x" * 600) for n in range(6)]))
    assert all(part.part is not None and part.part.path is None for part in pop_all(made))


# --- the connection ends


def test_abandon_drops_only_the_open_transaction(tmp_path: Path) -> None:
    made = assembler(seal_rows=2, spill_bytes=0, spill_dir=tmp_path)
    feed(made, *transaction(110, insert(1)))
    feed(made, encode_begin(115, NOON, 8), *[insert(n) for n in range(5)])
    assert list(tmp_path.iterdir())
    made.abandon()
    assert not list(tmp_path.iterdir())
    assert made.last_lsn == 110
    describe(made)
    feed(made, *transaction(120, insert(1), insert(2), insert(3)))
    batches = pop_all(made)
    assert [(one["commit"], one["rows"]) for batch in batches for one in batch.transactions.to_pylist()] == [
        (110, 1), (120, 2), (120, 1),
    ]  # fmt: skip
    assert [one for batch in batches for one in positions(batch)] == [(1, 0), (1, 0), (2, 0), (3, 0)]


def test_abandon_keeps_what_was_committed_and_not_handed_out() -> None:
    made = assembler(seal_rows=2)
    feed(made, *transaction(110, *[insert(n) for n in range(5)]), *transaction(120, insert()))
    made.abandon()
    made.abandon()
    assert not made.is_drained
    assert [batch.end for batch in pop_all(made)] == [
        Position.at(110, 2),
        Position.at(110, 4),
        Position.end(110),
        Position.end(120),
    ]


def test_new_connection_must_describe_its_relations_again() -> None:
    made = assembler()
    made.abandon()
    feed(made, encode_begin(105, NOON, 7))
    with pytest.raises(DecodeError, match="was not described"):
        feed(made, insert())


# --- keepalives (invariant 2)


def test_idle_progress_moves_the_position_without_rows() -> None:
    made = assembler()
    batch = made.advance(150)
    assert batch is not None
    assert (batch.end, batch.last_lsn, batch.rows, batch.data.num_rows) == (Position.end(150), 150, 0, 0)
    assert made.last_lsn == 150


@pytest.mark.parametrize("lsn", [0, 99, 100])
def test_progress_never_goes_back_or_stands_still(lsn: int) -> None:
    made = assembler()
    assert made.advance(lsn) is None
    assert made.last_lsn == 100


def test_progress_is_refused_inside_of_a_transaction() -> None:
    made = assembler()
    feed(made, encode_begin(105, NOON, 7))
    assert made.advance(150) is None
    feed(made, insert(), encode_commit(105, 110, NOON))
    pop_all(made)
    assert made.advance(150) is not None


def test_progress_is_refused_while_committed_rows_are_not_handed_out() -> None:
    made = assembler(seal_rows=2)
    feed(made, *transaction(110, *[insert(n) for n in range(3)]), *transaction(120, insert()))
    for _ in range(3):
        assert made.advance(150) is None
        assert made.last_lsn == 120
        assert made.pop() is not None
    assert made.pop() is None
    assert made.advance(150) is not None


# --- what is not as the protocol says


NOT_IN_ORDER: dict[str, tuple[list[bytes], str]] = {
    "begin_inside": ([encode_begin(5), encode_begin(6)], "Begin inside of transaction 1 at 0/4D"),
    "row_outside": ([insert()], "message I outside of a transaction at 0/4D"),
    "commit_outside": ([encode_commit(5, 6)], "message Commit outside of a transaction"),
    "truncate_outside": ([encode_truncate([1])], "message Truncate outside of a transaction"),
    "origin_outside": ([encode_origin(1, "x")], "message Origin outside of a transaction"),
    "message_outside": ([encode_message("p", b"")], "message Message outside of a transaction"),
    "message_that_is_not_of_it": (
        [encode_begin(5), encode_message("p", b"", transactional=False)],
        "non-transactional Message .* at 0/4D",
    ),
    "unknown_tag": ([encode_begin(5), b"Z123"], "tag is unknown: 'Z'"),
    "empty_message": ([b""], "tag is truncated"),
    "unknown_table": ([encode_begin(5), encode_insert(9, ["1"])], "9 was not described"),
    "truncate_of_an_unknown_table": (
        [encode_begin(5), encode_truncate([1, 9])],
        "at 0/4D: relation oid 9 was not described",
    ),
    "truncated_commit": ([encode_begin(5), encode_commit(5, 6)[:-1]], "commit time is truncated"),
    "column_too_many": ([encode_begin(5), encode_insert(1, ["1", "2", "3"])], "column count is 3"),
}


@pytest.mark.parametrize(("messages", "named"), NOT_IN_ORDER.values(), ids=NOT_IN_ORDER.keys())
def test_stream_that_is_not_as_the_protocol_says_is_a_decode_error(messages: list[bytes], named: str) -> None:
    with pytest.raises(DecodeError, match=named) as caught:
        feed(assembler(), *messages)
    assert caught.value.advice


# --- both decoders


def shown(batch: CaptureBatch) -> dict[str, Any]:
    return {
        "rows": batch.data.to_pylist(),
        "transactions": batch.transactions.to_pylist(),
        "end": batch.end,
        "last_lsn": batch.last_lsn,
    }


values = st.none() | st.binary(max_size=6)
order = st.tuples(values, values)
changes = st.one_of(
    st.builds(lambda new: encode_insert(1, new), order),
    st.builds(lambda new, old: encode_update(1, new, old), order, order),
    st.builds(lambda old: encode_delete(1, old, "O"), order),
    st.just(encode_truncate([1, 2])),
    st.builds(
        encode_message,
        st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=3),
        st.binary(max_size=4),
    ),
)


class DecoderSwitch:
    """Switches the decoder by its variable, and back."""

    def __enter__(self) -> Callable[[str], None]:
        self._patch = pytest.MonkeyPatch()
        return lambda value: self._patch.setenv("PGCDC_PURE_PYTHON", value)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@settings(max_examples=40)
@given(st.lists(st.lists(changes, max_size=6), max_size=5), st.integers(1, 6), st.integers(0, 30))
def test_both_decoders_give_the_same_batches(contents: list[list[bytes]], seal_rows: int, abandon_at: int) -> None:
    def run() -> list[dict[str, Any]]:
        made = assembler(seal_rows=seal_rows)
        batches = []
        count = 0
        for number, content in enumerate(contents):
            messages = transaction(110 + 10 * number, *content)
            for message in messages:
                made.feed(message, 77)
                count += 1
                if count == abandon_at:
                    made.abandon()
                    describe(made)
                    if message is not messages[-1]:
                        break
            batches += [shown(batch) for batch in iter(lambda: made.pop(drain=False), None)]
        return batches + [shown(batch) for batch in pop_all(made)]

    with DecoderSwitch() as use:
        use("1")
        expected = run()
        use("0")
        assert run() == expected
