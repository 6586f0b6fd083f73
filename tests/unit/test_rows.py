"""Row buffers: every case runs on both implementations, and random streams compare them with each other."""

from __future__ import annotations

import importlib
import os
import struct
import sys
from collections.abc import Callable
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import UNCHANGED, Value, encode_delete, encode_insert, encode_tuple, encode_update, in_stream

from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import OldKind, Op
from pgcdc.source.postgres.wire.rows import PythonRowBuffer, RowBuffer, decoder_name, new_row_buffer
from pgcdc.spool.schema import CHANGES

OID = 16384
LSN = 0x16_B374D848
BufferClass = Callable[..., RowBuffer]


def compiled_class() -> BufferClass:
    """The compiled class. Where it was not built: a skip on a laptop, a failure in CI."""
    try:
        module = importlib.import_module("pgcdc.source.postgres.wire._rows")
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the compiled decoder was not built: {error}")
        pytest.skip("the compiled decoder was not built")
    made: BufferClass = module.CompiledRowBuffer
    return made


@pytest.fixture(params=["python", "compiled"])
def buffer_class(request: pytest.FixtureRequest) -> BufferClass:
    return PythonRowBuffer if request.param == "python" else compiled_class()


@pytest.fixture
def buffer(buffer_class: BufferClass) -> RowBuffer:
    made = buffer_class()
    made.define(OID, relation=7, columns=3)
    return made


def take_checked(buffer: RowBuffer) -> pa.RecordBatch:
    batch = buffer.take()
    batch.validate(full=True)
    assert batch.schema.equals(CHANGES, check_metadata=True)
    return batch


def row(op: Op, **given: Any) -> dict[str, Any]:
    """One expected row: what is not given is what a change without it has."""
    nothing = {"ordinal": 1, "sub": 0, "relation": 7, "new": None, "old": None, "old_kind": 0, "unchanged": None}
    return nothing | {"op": int(op), "prefix": None} | given


DECODED: dict[str, tuple[bytes, dict[str, Any]]] = {
    "insert": (encode_insert(OID, ["1", "", None]), row(Op.INSERT, new=[b"1", b"", None])),
    "insert_of_bytes_that_are_not_text": (
        encode_insert(OID, [b"\0\xff", "é", "n"]),
        row(Op.INSERT, new=[b"\0\xff", b"\xc3\xa9", b"n"]),
    ),
    "update_without_old": (encode_update(OID, ["1", "2", "3"]), row(Op.UPDATE, new=[b"1", b"2", b"3"])),
    "update_with_old_key": (
        encode_update(OID, ["2", "x", None], ["1", None, None], "K"),
        row(Op.UPDATE, new=[b"2", b"x", None], old=[b"1", None, None], old_kind=int(OldKind.KEY)),
    ),
    "update_with_old_row": (
        encode_update(OID, ["2", "x", None], ["1", "y", None], "O"),
        row(Op.UPDATE, new=[b"2", b"x", None], old=[b"1", b"y", None], old_kind=int(OldKind.FULL)),
    ),
    "update_with_unchanged_toast": (
        encode_update(OID, ["1", UNCHANGED, UNCHANGED]),
        row(Op.UPDATE, new=[b"1", None, None], unchanged=[1, 2]),
    ),
    "unchanged_of_old_is_negative_and_comes_first": (
        encode_update(OID, ["1", "x", UNCHANGED], [UNCHANGED, "y", UNCHANGED]),
        row(
            Op.UPDATE,
            new=[b"1", b"x", None],
            old=[None, b"y", None],
            old_kind=int(OldKind.FULL),
            unchanged=[-1, -3, 2],
        ),
    ),
    "delete_by_key": (
        encode_delete(OID, ["1", None, None], "K"),
        row(Op.DELETE, old=[b"1", None, None], old_kind=int(OldKind.KEY)),
    ),
    "delete_of_full_row": (
        encode_delete(OID, ["1", "x", None], "O"),
        row(Op.DELETE, old=[b"1", b"x", None], old_kind=int(OldKind.FULL)),
    ),
}

HEAD = struct.pack("!I", OID)
GOOD = encode_insert(OID, ["1", "22", None])

DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "Row message at 16/B374D848: tag is truncated: needs 1 bytes, 0 are left"),
    "unknown_tag": (b"X" + HEAD, "Row message at 16/B374D848: tag is unknown: 'X'"),
    "invisible_tag": (b"\x07" + HEAD, "Row message at 16/B374D848: tag is unknown: 0x07"),
    "short_oid": (b"I\0\0", "Insert message at 16/B374D848: relation oid is truncated: needs 4 bytes, 2 are left"),
    "unknown_relation": (
        encode_insert(99, ["1"]),
        "Insert message at 16/B374D848: relation oid 99 was not described by a Relation message",
    ),
    "no_tuple_tag": (b"I" + HEAD, "Insert message at 16/B374D848: tuple tag is truncated: needs 1 bytes, 0 are left"),
    "insert_with_old": (b"I" + HEAD + b"O", "Insert message at 16/B374D848: tuple tag is 'O', not one of N"),
    "update_with_unknown": (b"U" + HEAD + b"x", "Update message at 16/B374D848: tuple tag is 'x', not one of KON"),
    "delete_with_new": (b"D" + HEAD + b"N", "Delete message at 16/B374D848: tuple tag is 'N', not one of KO"),
    "update_with_two_olds": (
        b"U" + HEAD + (b"K" + encode_tuple(["1", None, None])) * 2,
        "Update message at 16/B374D848: tuple tag is 'K', not one of N",
    ),
    "update_without_new": (
        b"U" + HEAD + b"K" + encode_tuple(["1", None, None]),
        "Update message at 16/B374D848: tuple tag is truncated: needs 1 bytes, 0 are left",
    ),
    "short_count": (
        b"I" + HEAD + b"N\0",
        "Insert message at 16/B374D848: new column count is truncated: needs 2 bytes, 1 are left",
    ),
    "other_count": (
        encode_insert(OID, ["1", "2"]),
        "Insert message at 16/B374D848: new column count is 2, but the relation has 3",
    ),
    "negative_count": (
        b"D" + HEAD + b"K\xff\xff",
        "Delete message at 16/B374D848: old column count is -1, but the relation has 3",
    ),
    "no_kind": (GOOD[:-1], "Insert message at 16/B374D848: new column 3 kind is truncated: needs 1 bytes, 0 are left"),
    "unknown_kind": (GOOD[:-1] + b"z", "Insert message at 16/B374D848: new column 3 kind is unknown: 'z'"),
    "binary": (
        GOOD[:-1] + b"b\0\0\0\0",
        "Insert message at 16/B374D848: new column 3 kind is 'b': binary values were not requested",
    ),
    "short_length": (
        GOOD[:-1] + b"t\0\0",
        "Insert message at 16/B374D848: new column 3 length is truncated: needs 4 bytes, 2 are left",
    ),
    "negative_length": (
        GOOD[:-1] + b"t\xff\xff\xff\xff",
        "Insert message at 16/B374D848: new column 3 length is negative: -1",
    ),
    "most_negative_length": (
        GOOD[:-1] + b"t\x80\0\0\0",
        "Insert message at 16/B374D848: new column 3 length is negative: -2147483648",
    ),
    "huge_length": (
        GOOD[:-1] + b"t\x7f\xff\xff\xffabc",
        "Insert message at 16/B374D848: new column 3 value is truncated: needs 2147483647 bytes, 3 are left",
    ),
    "damaged_new_after_good_old": (
        encode_update(OID, ["1", UNCHANGED, "3"], ["1", UNCHANGED, None])[:-1],
        "Update message at 16/B374D848: new column 3 value is truncated: needs 1 bytes, 0 are left",
    ),
    "trailing": (GOOD + b"xy", "Insert message at 16/B374D848: end is followed by 2 bytes"),
}


@pytest.mark.parametrize("case", DECODED)
@pytest.mark.parametrize("form", [bytes, memoryview, bytearray])
def test_a_message_becomes_a_row(buffer: RowBuffer, case: str, form: Callable[[bytes], bytes]) -> None:
    message, expected = DECODED[case]
    buffer.add(form(message), 1)
    assert buffer.rows == 1
    assert take_checked(buffer).to_pylist() == [expected]


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_message_is_an_error_that_names_the_field_and_leaves_nothing(buffer: RowBuffer, case: str) -> None:
    message, text = DAMAGED[case]
    kept, expected = DECODED["unchanged_of_old_is_negative_and_comes_first"]
    buffer.add(kept, 1)
    held = buffer.rows, buffer.nbytes
    with pytest.raises(DecodeError) as caught:
        buffer.add(message, 2, LSN)
    assert caught.value.message == text
    assert caught.value.advice
    assert (buffer.rows, buffer.nbytes) == held
    buffer.add(kept, 3)
    assert take_checked(buffer).to_pylist() == [expected, expected | {"ordinal": 3}]


def test_every_truncation_of_a_message_is_an_error(buffer: RowBuffer) -> None:
    message = encode_update(OID, ["1", UNCHANGED, "33"], ["1", None, "22"])
    for size in range(len(message)):
        with pytest.raises(DecodeError, match="is truncated"):
            buffer.add(memoryview(message)[:size], 1, LSN)
    assert buffer.rows == 0
    assert take_checked(buffer).num_rows == 0


def test_an_unknown_lsn_is_not_named(buffer: RowBuffer) -> None:
    with pytest.raises(DecodeError) as caught:
        buffer.add(GOOD + b"x", 1)
    assert caught.value.message == "Insert message: end is followed by 1 bytes"


def test_truncates_and_messages_stand_between_rows(buffer: RowBuffer) -> None:
    buffer.add(GOOD, 1)
    buffer.add_message("audit", b"", 1, 1)
    buffer.add_message("", b"\xff", 1, 2)
    buffer.add_truncate(OID, 2)
    assert take_checked(buffer).to_pylist() == [
        row(Op.INSERT, new=[b"1", b"22", None]),
        row(Op.MESSAGE, relation=-1, sub=1, new=[b""], prefix="audit"),
        row(Op.MESSAGE, relation=-1, sub=2, new=[b"\xff"], prefix=""),
        row(Op.TRUNCATE, ordinal=2),
    ]
    buffer.add(GOOD, 3)
    assert take_checked(buffer).column("prefix").to_pylist() == [None]


def test_truncating_an_unknown_table_is_an_error(buffer: RowBuffer) -> None:
    with pytest.raises(DecodeError) as caught:
        buffer.add_truncate(99, 1, LSN)
    assert caught.value.message == (
        "Truncate message at 16/B374D848: relation oid 99 was not described by a Relation message"
    )
    assert buffer.rows == 0


def test_a_new_definition_holds_from_there_on(buffer: RowBuffer) -> None:
    buffer.add(GOOD, 1)
    buffer.define(OID, relation=8, columns=1)
    buffer.add(encode_insert(OID, ["1"]), 2)
    assert take_checked(buffer).column("relation").to_pylist() == [7, 8]


def test_definitions_outlive_take(buffer: RowBuffer) -> None:
    buffer.add(GOOD, 1)
    assert take_checked(buffer).num_rows == 1
    assert (buffer.rows, buffer.nbytes) == (0, 0)
    buffer.add(GOOD, 1)
    assert take_checked(buffer).num_rows == 1


def test_a_taken_batch_does_not_change_with_later_rows(buffer: RowBuffer) -> None:
    buffer.add(GOOD, 1)
    batch = take_checked(buffer)
    before = batch.to_pylist()
    for ordinal in range(100):
        buffer.add(encode_insert(OID, ["zz", "zz", "zz"]), ordinal)
    assert batch.to_pylist() == before


def test_a_table_without_columns_has_empty_lists(buffer: RowBuffer) -> None:
    buffer.define(1, relation=0, columns=0)
    buffer.add(encode_insert(1, []), 1)
    assert take_checked(buffer).column("new").to_pylist() == [[]]


def test_many_tables_are_told_apart(buffer: RowBuffer) -> None:
    oids = [2**32 - 1, *range(300)]
    for relation, oid in enumerate(oids):
        buffer.define(oid, relation, 1)
    for ordinal, oid in enumerate(oids + oids):
        buffer.add(encode_insert(oid, ["x"]), ordinal)
    assert take_checked(buffer).column("relation").to_pylist() == [*range(301), *range(301)]


def test_a_wide_row_keeps_its_unchanged_columns(buffer: RowBuffer) -> None:
    buffer.define(OID, 0, 1600)
    values: list[Value] = ["x", UNCHANGED] * 800
    buffer.add(encode_update(OID, values, values), 1)
    new = list(range(1, 1600, 2))
    assert take_checked(buffer).column("unchanged").to_pylist() == [[-1 - index for index in new] + new]


def test_large_values_survive(buffer: RowBuffer) -> None:
    large = os.urandom(1 << 20)
    for ordinal in range(20):  # passes the size at which memory is given back
        buffer.add(encode_insert(OID, [large, None, large[:ordinal]]), ordinal)
    batch = take_checked(buffer)
    assert batch.column("new").to_pylist() == [[large, None, large[:ordinal]] for ordinal in range(20)]
    buffer.add(GOOD, 1)
    assert take_checked(buffer).column("new").to_pylist() == [[b"1", b"22", None]]


def test_bytes_held_follow_the_batch(buffer: RowBuffer) -> None:
    for ordinal in range(1000):
        buffer.add(
            encode_update(OID, [f"{ordinal:012}", "a few words of text", None], [None, "old text", None]), ordinal
        )
    held = buffer.nbytes
    assert 0.8 < held / take_checked(buffer).nbytes < 1.3


def test_more_than_the_offsets_can_count_is_an_error_before_it_is_held(buffer_class: BufferClass) -> None:
    buffer = buffer_class(2 * len(GOOD) + 2)
    buffer.define(OID, 7, 3)
    buffer.add(GOOD, 1)
    buffer.add(GOOD, 2)
    with pytest.raises(DecodeError) as caught:
        buffer.add(GOOD, 3, LSN)
    assert caught.value.message == (
        f"Insert message at 16/B374D848: size {len(GOOD)} does not fit: "
        f"{2 * len(GOOD)} of {2 * len(GOOD) + 2} bytes are held and not taken"
    )
    with pytest.raises(DecodeError, match="Message message: size 3 does not fit"):
        buffer.add_message("p", b"c", 3, 1)
    assert take_checked(buffer).num_rows == 2
    buffer.add(GOOD, 3)


def test_the_compiled_decoder_is_used_where_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCDC_PURE_PYTHON", raising=False)
    compiled = compiled_class()
    assert decoder_name() == "compiled"
    assert type(new_row_buffer()) is compiled


def test_the_environment_can_ask_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_PURE_PYTHON", "1")
    assert decoder_name() == "python"
    assert type(new_row_buffer()) is PythonRowBuffer


def test_python_is_used_where_nothing_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCDC_PURE_PYTHON", raising=False)
    monkeypatch.setitem(sys.modules, "pgcdc.source.postgres.wire._rows", None)
    assert decoder_name() == "python"
    assert type(new_row_buffer()) is PythonRowBuffer


# Streamed rows.


def test_streamed_rows_say_of_which_subtransaction_they_are(buffer: RowBuffer) -> None:
    for number, xid in enumerate([5, 5, 6, 5]):
        buffer.add(in_stream(xid, encode_insert(OID, [str(number), None, None])), number, LSN, True)
    buffer.add_truncate(OID, 5, LSN, 9)
    buffer.add_message("p", b"m", 5, 1, LSN, 9)
    assert buffer.runs().tolist() == [[0, 5], [2, 6], [3, 5], [4, 9]]
    assert take_checked(buffer).column("new").to_pylist()[:2] == [[b"0", None, None], [b"1", None, None]]
    assert buffer.runs().tolist() == []


def test_streamed_row_without_an_xid_is_an_error(buffer: RowBuffer) -> None:
    insert = encode_insert(OID, ["1", None, None])
    with pytest.raises(DecodeError, match=r"Insert message at 16/B374D848: xid is 0"):
        buffer.add(in_stream(0, insert), 1, LSN, True)
    with pytest.raises(DecodeError, match="xid is truncated: needs 4 bytes, 3 are left"):
        buffer.add(insert[:4], 1, LSN, True)
    assert (buffer.rows, buffer.runs().tolist()) == (0, [])


def test_add_says_when_the_buffer_is_full(buffer: RowBuffer) -> None:
    insert = encode_insert(OID, ["1", None, None])
    buffer.limit(2, 10_000)
    assert [buffer.add(insert, 1), buffer.add(insert, 2)] == [False, True]
    buffer.take()
    buffer.limit(100, 3 * (len(insert) + 32 + 8))
    assert [buffer.add(insert, n) for n in (1, 2, 3)] == [False, False, True]


def test_a_forgotten_definition_is_unknown(buffer: RowBuffer) -> None:
    buffer.forget()
    with pytest.raises(DecodeError, match="was not described"):
        buffer.add(encode_insert(OID, ["1", None, None]), 1)


# Random streams.

VALUES = st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=20))
KINDS: st.SearchStrategy[Literal["K", "O"]] = st.sampled_from(("K", "O"))


@st.composite
def tuples(draw: st.DrawFn, columns: int) -> list[Value]:
    return draw(st.lists(VALUES, min_size=columns, max_size=columns))


@st.composite
def row_messages(draw: st.DrawFn) -> bytes:
    # Mostly of a table that is defined with these columns, and sometimes not.
    oid = draw(st.sampled_from([1, 2, 2, 3, 3, 3]))
    columns = draw(st.one_of(st.just(oid), st.just(oid), st.integers(0, 4)))
    new, old, kind = draw(tuples(columns)), draw(tuples(columns)), draw(KINDS)
    return draw(
        st.sampled_from(
            [
                encode_insert(oid, new),
                encode_update(oid, new),
                encode_update(oid, new, old, kind),
                encode_delete(oid, old, kind),
            ]
        )
    )


@st.composite
def damaged_messages(draw: st.DrawFn) -> bytes:
    message = draw(row_messages())
    at = draw(st.integers(0, len(message) - 1))
    how = draw(st.sampled_from(["cut", "extend", "replace", "insert", "drop"]))
    if how == "cut":
        return message[:at]
    if how == "extend":
        return message + draw(st.binary(min_size=1, max_size=5))
    if how == "drop":
        return message[:at] + message[at + 1 :]
    # Bytes that mean something here are found sooner than by chance.
    byte = draw(st.one_of(st.sampled_from(list(b"IUDNKOtnub\x00\x7f\x80\xff")), st.integers(0, 255)))
    return message[:at] + bytes([byte]) + message[at + (how == "replace") :]


XIDS = st.integers(0, 3)


@st.composite
def streamed_messages(draw: st.DrawFn) -> bytes:
    return in_stream(draw(XIDS), draw(st.one_of(row_messages(), row_messages(), damaged_messages())) or b"I")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), row_messages(), st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1)),
        st.tuples(st.just("add"), damaged_messages(), st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1)),
        st.tuples(st.just("add"), streamed_messages(), st.just(1), st.just(5), st.just(True)),
        st.tuples(st.just("add_truncate"), st.integers(1, 4), st.integers(0, 2**48), st.just(5), XIDS),
        st.tuples(
            st.just("add_message"),
            st.text(max_size=5),
            st.binary(max_size=9),
            st.just(1),
            st.integers(0, 40000),
            st.just(5),
            XIDS,
        ),
        st.tuples(st.just("limit"), st.integers(0, 9), st.integers(0, 300)),
        st.tuples(st.just("runs")),
        st.tuples(st.just("forget")),
        st.tuples(st.just("define"), st.integers(1, 4), st.integers(0, 99), st.integers(0, 4)),
        st.tuples(st.just("take")),
    ),
    max_size=30,
)


def run_step(buffer: RowBuffer, name: str, *arguments: Any) -> Any:
    """What a step gave: a batch, nothing, or the text of a DecodeError, which must not have changed what is held."""
    before = buffer.rows, buffer.nbytes
    try:
        given = take_checked(buffer) if name == "take" else getattr(buffer, name)(*arguments)
        return given.tolist() if name == "runs" else given
    except DecodeError as error:
        assert (buffer.rows, buffer.nbytes) == before
        return str(error)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_both_decoders_give_the_same_batches_and_the_same_errors(steps: list[tuple[Any, ...]]) -> None:
    limit = 250  # small enough to be met
    python, compiled = PythonRowBuffer(limit), compiled_class()(limit)
    start = [("define", oid, oid, oid) for oid in (1, 2, 3)]
    for step in [*start, *steps, ("take",)]:
        expected = run_step(python, *step)
        got = run_step(compiled, *step)
        assert got == expected, step
        assert (compiled.rows, compiled.nbytes) == (python.rows, python.nbytes)
        assert compiled.runs().tolist() == python.runs().tolist()


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, list[Value] | None, list[Value] | None, str]:
    op, kind = draw(st.sampled_from("IUVD")), draw(KINDS)  # V: an update with its old row
    new = None if op == "D" else draw(tuples(3))
    old = draw(tuples(3)) if op in "VD" else None
    return op, new, old, kind


def plain(values: list[Value] | None) -> list[Any] | None:
    return None if values is None else [value if isinstance(value, bytes) else None for value in values]


@pytest.mark.parametrize("implementation", ["python", "compiled"])
@settings(max_examples=100, deadline=None)
@given(stream=st.lists(changes(), max_size=20))
def test_what_the_server_encodes_is_what_the_batch_holds(implementation: str, stream: list[Any]) -> None:
    buffer = PythonRowBuffer() if implementation == "python" else compiled_class()()
    buffer.define(OID, 7, 3)
    expected = []
    for ordinal, (op, new, old, kind) in enumerate(stream, 1):
        if op == "I":
            message = encode_insert(OID, new)
        elif op == "D":
            message = encode_delete(OID, old, kind)
        else:
            message = encode_update(OID, new, old, kind)
        buffer.add(message, ordinal)
        unchanged = [-1 - index for index, value in enumerate(old or []) if value is UNCHANGED]
        unchanged += [index for index, value in enumerate(new or []) if value is UNCHANGED]
        expected.append(
            row(
                Op(message[0]),
                ordinal=ordinal,
                new=plain(new),
                old=plain(old),
                old_kind=0 if old is None else ord(kind),
                unchanged=unchanged or None,
            )
        )
    assert take_checked(buffer).to_pylist() == expected
