"""Binary values without a server: rows are rewritten whole, and damage is always a DecodeError."""

from __future__ import annotations

import contextlib
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import UNCHANGED, Value, encode_delete, encode_insert, encode_update

from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import Column
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo
from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder
from pgcdc.source.postgres.wire.rows import PythonRowBuffer

to_text, rewrite_row = BinaryDecoder().to_text, BinaryDecoder().rewrite_row

OID = 16384
LSN = 0x16_B374D848
INT4, TEXT, BOOL, MONEY = 23, 25, 16, 790
COLUMNS = [Column("id", INT4, -1, True), Column("name", TEXT, -1, False), Column("done", BOOL, -1, False)]
TEXT_ROW: list[Value] = ["7", "né", "t"]
OLD_ROW: list[Value] = ["-1", None, None]
BINARY_ROW: list[Value] = [struct.pack("!i", 7), "né", b"\1"]
BINARY_OLD_ROW: list[Value] = [struct.pack("!i", -1), None, None]


def as_binary(message: bytes) -> bytes:
    """The message with its values marked as binary: right only for values without the header's bytes in them."""
    for kind in (b"t\0\0\0\4", b"t\0\0\0\3", b"t\0\0\0\1"):
        message = message.replace(kind, b"b" + kind[1:])
    return message


ROWS = {
    "insert": (encode_insert(OID, BINARY_ROW), encode_insert(OID, TEXT_ROW)),
    "update": (encode_update(OID, BINARY_ROW), encode_update(OID, TEXT_ROW)),
    "update_with_key": (
        encode_update(OID, BINARY_ROW, BINARY_OLD_ROW, "K"),
        encode_update(OID, TEXT_ROW, OLD_ROW, "K"),
    ),
    "update_with_old": (
        encode_update(OID, BINARY_ROW, BINARY_OLD_ROW, "O"),
        encode_update(OID, TEXT_ROW, OLD_ROW, "O"),
    ),
    "update_with_unchanged": (
        encode_update(OID, [struct.pack("!i", 7), UNCHANGED, None]),
        encode_update(OID, ["7", UNCHANGED, None]),
    ),
    "delete": (encode_delete(OID, BINARY_OLD_ROW, "K"), encode_delete(OID, OLD_ROW, "K")),
}


@pytest.mark.parametrize("case", ROWS)
def test_binary_values_of_a_row_become_text(case: str) -> None:
    binary, text = ROWS[case]
    assert as_binary(binary) != binary
    assert rewrite_row(as_binary(binary), COLUMNS) == text
    assert rewrite_row(memoryview(as_binary(binary)), COLUMNS) == text


@pytest.mark.parametrize("case", ROWS)
def test_a_row_of_text_stays_as_it_is(case: str) -> None:
    _, text = ROWS[case]
    assert rewrite_row(text, COLUMNS) == text


@pytest.mark.parametrize("case", ROWS)
def test_damage_is_left_for_the_row_buffer(case: str) -> None:
    binary, text = ROWS[case]
    buffer = PythonRowBuffer()
    buffer.define(OID, 0, len(COLUMNS))
    damaged = [text[:end] for end in range(len(text))] + [text + b"!", b"X" + text[1:], text[:5] + b"?" + text[6:]]
    damaged += [text[:6] + b"\0\2" + text[8:], text[:8] + b"x" + text[9:], text[:8] + b"t\xff\xff\xff\xfe" + text[13:]]
    for message in damaged:
        assert rewrite_row(message, COLUMNS, LSN) == message
        with pytest.raises(DecodeError):
            buffer.add(message, 1, LSN)
    for end in range(len(binary)):
        with pytest.raises(DecodeError, match="is truncated"):
            buffer.add(rewrite_row(as_binary(binary)[:end], COLUMNS, LSN), 1, LSN)
    assert buffer.rows == 0


def test_a_damaged_value_is_named_with_its_place() -> None:
    row: list[Value] = [b"\0\0\0", "x", None]
    with pytest.raises(DecodeError) as raised:
        rewrite_row(as_binary(encode_insert(OID, row)), COLUMNS, LSN)
    place = "Insert message at 16/B374D848: new column 1 (id) value of type int4 has 3 bytes, not 4"
    assert raised.value.message == place
    assert "report it" in raised.value.advice


def test_a_type_that_cannot_be_converted_is_named_with_advice() -> None:
    columns = [Column("price", MONEY, -1, False)]
    with pytest.raises(DecodeError) as raised:
        rewrite_row(as_binary(encode_insert(OID, [b"\0\0\0\1"])), columns, LSN)
    assert "new column 1 (price) value of type money cannot be converted" in raised.value.message
    assert raised.value.advice == "Remove --binary"
    with pytest.raises(DecodeError, match=r"regclass.*Remove --binary"):
        to_text(2205, b"\0\0\0\1")
    with pytest.raises(DecodeError, match=r"oid 99999 is unknown.*Remove --binary"):
        to_text(99999, b"")


def test_char_of_older_servers_is_its_byte() -> None:
    older = BinaryDecoder(TypeCatalog(BUILT_IN.types, 140000))
    assert [older.to_text(18, byte) for byte in (b"\0", b"a", b"\xe9")] == [b"", b"a", b"\xe9"]
    assert to_text(18, b"\xe9") == b"\\351"


# Bytes that a server with these extensions sent, and what it wrote.
_RECORDED: list[tuple[str, str, bytes, bytes]] = [
    ("xml_out", "xml_send", b'<?xml version="1.1"?>\n<a>\xc3\xa9</a>', b'<?xml version="1.1"?>\n<a>\xc3\xa9</a>'),
    ("hstore:hstore_out", "hstore:hstore_send", b"\0\0\0\0", b""),
    (
        "hstore:hstore_out",
        "hstore:hstore_send",
        b'\0\0\0\3\0\0\0\1a\0\0\0\0011\0\0\0\2\xc3\xa9\0\0\0\0\0\0\0\6q"\\\\ b\xff\xff\xff\xff',
        b'"a"=>"1", "\xc3\xa9"=>"", "q\\"\\\\\\\\ b"=>NULL',
    ),
    ("ltree:ltree_out", "ltree:ltree_send", b"\1a.b.c", b"a.b.c"),
    ("ltree:ltree_out", "ltree:ltree_send", b"\1", b""),
    ("ltree:lquery_out", "ltree:lquery_send", b"\1*.a|b{1,2}.!c@*", b"*.a|b{1,2}.!c@*"),
    ("ltree:ltxtq_out", "ltree:ltxtq_send", b"\1a & !b* | c@ & d", b"a & !b* | c@ & d"),
]


@pytest.mark.parametrize(("output", "send", "raw", "text"), _RECORDED)
def test_recorded_values_of_extensions(output: str, send: str, raw: bytes, text: bytes) -> None:
    decoder = BinaryDecoder(TypeCatalog({1: TypeInfo(1, "recorded", output, send)}))
    assert decoder.to_text(1, raw) == text


_MINUS_ONE = b"\xff\xff\xff\xff"
_DAMAGED: list[tuple[int, bytes, str]] = [
    (INT4, b"\0" * 5, "int4 has 5 bytes, not 4"),
    (1700, struct.pack("!HhHHH", 1, 0, 0, 0, 1) + b"!", "numeric is followed by 1 bytes"),
    (1700, struct.pack("!HhHHH", 1, 0, 0, 0, 10000), "above 9999"),
    (1700, struct.pack("!HhHH", 0, 0, 0x1234, 0), "unknown sign: 0x1234"),
    (1700, struct.pack("!HhHHH", 2, 0, 0, 0, 1), "truncated: needs 4 bytes at 8, 2 are left"),
    (3614, _MINUS_ONE, "tsvector claims -1 items"),
    (3614, struct.pack("!i", 1) + b"abc", "without its NUL"),
    (3614, struct.pack("!i", 1) + b"a\0\0\0!", "followed by 1 bytes"),
    (3615, _MINUS_ONE, "tsquery claims -1 items"),
    (3615, struct.pack("!i", 1) + b"\2\1", "operator without operands"),
    (3615, struct.pack("!i", 2) + b"\1\0\0a\0" * 2, "operands without an operator"),
    (604, _MINUS_ONE, "polygon claims -1 items"),
    (604, struct.pack("!i", 2**31 - 1), "polygon claims 2147483647 items"),
    (602, b"\2" + struct.pack("!i", 0), "neither open nor closed"),
    (1562, struct.pack("!i", 9) + b"\0", "claims 9 bits in 1 bytes"),
    (869, b"\2\x21\0\4\0\0\0\0", "33 bits"),
    (869, b"\2\x20\0\4\0\0\0\0!", "followed by 1 bytes"),
    (1083, struct.pack("!q", -1), "not a time of day"),
    (3802, b"\2{}", "version 1 but 2"),
    (1007, struct.pack("!iiI", 7, 0, INT4), "claims 7 dimensions"),
    (1007, struct.pack("!iiIii", 1, 0, INT4, -1, 1), "claims -1 elements"),
    (1007, struct.pack("!iiIii", 1, 0, INT4, 2**31 - 1, 1), "truncated"),
    (1007, struct.pack("!iiIiii", 1, 0, INT4, 1, 1, -2), "part of -2 bytes"),
    (1007, struct.pack("!iiIiii", 1, 0, INT4, 1, 1, -1) + b"!", "followed by 1 bytes"),
    (2249, _MINUS_ONE, "record claims -1 items"),
    (2249, struct.pack("!iIi", 1, INT4, -1) + b"!", "followed by 1 bytes"),
    (3904, b"\1!", "followed by 1 bytes"),
    (3904, b"\2" + _MINUS_ONE, "bound that is NULL"),
    (4451, struct.pack("!ii", 1, -1) + b"!", "range that is NULL"),
    (2970, struct.pack("!iqq", 1, 1, 1), "claims 1 transactions"),
]


@pytest.mark.parametrize(("oid", "data", "problem"), _DAMAGED)
def test_a_damaged_value_says_what_is_wrong(oid: int, data: bytes, problem: str) -> None:
    with pytest.raises(DecodeError, match=problem):
        to_text(oid, data)


# Any bytes at all.

_ALL_TYPES = sorted(BUILT_IN.types)
_EXTENSIONS = {
    90_001: ("hstore:hstore_out", "hstore:hstore_send"),
    90_002: ("vector:vector_out", "vector:vector_send"),
    90_003: ("vector:halfvec_out", "vector:halfvec_send"),
    90_004: ("vector:sparsevec_out", "vector:sparsevec_send"),
    90_005: ("ltree:ltree_out", "ltree:ltree_send"),
}
_DECODER = BinaryDecoder(
    TypeCatalog({**BUILT_IN.types, **{oid: TypeInfo(oid, f"t{oid}", *pair) for oid, pair in _EXTENSIONS.items()}})
)

_counts = st.sampled_from([0, 1, 2, 6, 8, 16, 255, 2**15, 2**31 - 1, 2**32 - 1])
_pieces = st.one_of(
    st.binary(max_size=6),
    _counts.map(lambda number: struct.pack("!I", number)),
    _counts.map(lambda number: struct.pack("!H", number & 0xFFFF)),
    st.sampled_from(_ALL_TYPES).map(lambda number: struct.pack("!I", number)),
)
_bytes = st.one_of(st.binary(max_size=64), st.lists(_pieces, max_size=16).map(b"".join))


@pytest.mark.parametrize("oid", [*_ALL_TYPES, *_EXTENSIONS])
@settings(max_examples=60)
@given(data=_bytes)
def test_any_bytes_give_text_or_a_decode_error(oid: int, data: bytes) -> None:
    try:
        assert isinstance(_DECODER.to_text(oid, data), bytes)
    except DecodeError as error:
        assert str(oid) in str(error) or BUILT_IN.name(oid) in str(error)


@given(st.binary(max_size=80), st.integers(0, 60), st.binary(max_size=4))
def test_any_bytes_in_a_row_give_a_row_or_a_decode_error(data: bytes, at: int, patch: bytes) -> None:
    row = as_binary(ROWS["update_with_old"][0])
    for message in (data, row[:at] + patch + row[at + len(patch) :]):
        with contextlib.suppress(DecodeError):
            rewrite_row(message, COLUMNS)


def test_deep_nesting_is_a_decode_error_and_not_a_crash() -> None:
    value = struct.pack("!i", 0)
    for _ in range(5000):
        value = struct.pack("!iIi", 1, 2249, len(value)) + value
    with pytest.raises(DecodeError, match="nested too deeply"):
        to_text(2249, value)
    with pytest.raises(DecodeError, match=r"Insert message.*nested too deeply"):
        message = encode_insert(OID, [value])
        rewrite_row(message[:8] + b"b" + message[9:], [Column("row", 2249, -1, False)])


def test_large_values_take_no_quadratic_time() -> None:
    started = time.process_time()
    lexeme = b"\1\0\0a\0"
    count = 100_000
    left_deep = struct.pack("!i", 2 * count + 1) + b"\2\2" * count + lexeme * (count + 1)
    right_deep = struct.pack("!i", 2 * count + 1) + (b"\2\2" + lexeme) * count + lexeme
    negations = struct.pack("!i", count + 1) + b"\2\1" * count + lexeme
    assert to_text(3615, left_deep) == to_text(3615, right_deep) == b" & ".join([b"'a'"] * (count + 1))
    assert to_text(3615, negations) == b"!" * count + b"'a'"
    assert to_text(1562, struct.pack("!i", 8 * count) + b"\xaa" * count) == b"10101010" * count
    whole = b"1" + b"0" * (4 * 32767)
    assert to_text(1700, struct.pack("!HhHHH", 1, 32767, 0, 0, 1)) == whole
    assert time.process_time() - started < 10
