"""Envelope and pgoutput messages: what they decode to, and what damaged ones say."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import (
    encode_begin,
    encode_commit,
    encode_insert,
    encode_keepalive,
    encode_message,
    encode_origin,
    encode_relation,
    encode_truncate,
    encode_type,
)

from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import Column, Relation
from pgcdc.source.postgres.wire.messages import (
    Begin,
    Commit,
    Keepalive,
    Message,
    Origin,
    Truncate,
    Type,
    encode_status_update,
    parse_begin,
    parse_commit,
    parse_keepalive,
    parse_message,
    parse_origin,
    parse_pgoutput,
    parse_relation,
    parse_truncate,
    parse_type,
)

LSN = 0x16_B374D848
NOW = 1_700_000_000_123_456  # microseconds since 1970
ORDERS = Relation(
    16384,
    "public",
    "orders",
    "d",
    (Column("id", 20, -1, True), Column("naïve", 1043, 24, False)),
)
CATALOG = Relation(1259, "pg_catalog", "pg_class", "n", ())

PARSED: dict[str, tuple[bytes, Any]] = {
    "begin": (encode_begin(LSN, NOW, 2**32 - 1), Begin(LSN, NOW, 2**32 - 1)),
    "commit": (encode_commit(LSN, LSN + 48, NOW, flags=3), Commit(3, LSN, LSN + 48, NOW)),
    "before_2000": (encode_begin(LSN, 1, 1), Begin(LSN, 1, 1)),
    "origin": (encode_origin(2**64 - 1, "elsewhere"), Origin(2**64 - 1, "elsewhere")),
    "relation": (encode_relation(ORDERS), ORDERS),
    "relation_of_pg_catalog": (encode_relation(CATALOG), CATALOG),
    "type": (encode_type(16400, "public", "mood"), Type(16400, "public", "mood")),
    "truncate": (encode_truncate([1, 2**32 - 1]), Truncate((1, 2**32 - 1), False, False)),
    "truncate_cascade": (encode_truncate([1], cascade=True), Truncate((1,), True, False)),
    "truncate_restart": (encode_truncate([1], restart_identity=True), Truncate((1,), False, True)),
    "message": (encode_message("audit", b"\0\xff", LSN), Message(True, LSN, "audit", b"\0\xff")),
    "message_outside_of_transactions": (encode_message("", b"", LSN, False), Message(False, LSN, "", b"")),
}

BODIES = {  # the bytes of the documentation, not of our own encoder
    "begin": (b"B" + bytes(7) + b"\x10" + bytes(8) + b"\0\0\x02\xda", Begin(16, 946_684_800_000_000, 730)),
    "commit": (
        b"C\0" + bytes(7) + b"\x10" + bytes(7) + b"\x20" + bytes(7) + b"\x01",
        Commit(0, 16, 32, 946_684_800_000_001),
    ),
    "relation": (
        b"R\0\0\x40\0s\0t\0f\0\x01\x01id\0\0\0\0\x17\xff\xff\xff\xff",
        Relation(16384, "s", "t", "f", (Column("id", 23, -1, True),)),
    ),
    "truncate": (b"T\0\0\0\x01\x03\0\0\x40\0", Truncate((16384,), True, True)),
    "message": (b"M\x01" + bytes(7) + b"\x10p\0\0\0\0\x02hi", Message(True, 16, "p", b"hi")),
}

DAMAGED: dict[str, tuple[Callable[[bytes, int], Any], bytes, str]] = {
    "keepalive_as_data": (
        parse_keepalive,
        b"w" + bytes(30),
        "Keepalive message at 16/B374D848: tag is 'w', not 'k'",
    ),
    "short_keepalive": (
        parse_keepalive,
        encode_keepalive(1)[:-1],
        "Keepalive message at 16/B374D848: reply requested is truncated: needs 1 bytes, 0 are left",
    ),
    "long_keepalive": (
        parse_keepalive,
        encode_keepalive(1) + b"x",
        "Keepalive message at 16/B374D848: end is followed by 1 bytes",
    ),
    "no_message": (parse_pgoutput, b"", "pgoutput message at 16/B374D848: tag is truncated: needs 1 bytes, 0 are left"),
    "unknown_message": (parse_pgoutput, b"\x80", "pgoutput message at 16/B374D848: tag is unknown: 0x80"),
    "row_change": (parse_pgoutput, encode_insert(1, []), "pgoutput message at 16/B374D848: tag is unknown: 'I'"),
    "empty_begin": (parse_begin, b"", "Begin message at 16/B374D848: tag is truncated: needs 1 bytes, 0 are left"),
    "commit_as_begin": (parse_begin, encode_commit(1, 2), "Begin message at 16/B374D848: tag is 'C', not 'B'"),
    "short_xid": (
        parse_begin,
        encode_begin(1)[:-1],
        "Begin message at 16/B374D848: xid is truncated: needs 4 bytes, 3 are left",
    ),
    "long_commit": (
        parse_commit,
        encode_commit(1, 2) + b"xx",
        "Commit message at 16/B374D848: end is followed by 2 bytes",
    ),
    "no_nul": (parse_origin, encode_origin(1, "a")[:-1], "Origin message at 16/B374D848: name has no NUL terminator"),
    "latin1": (
        parse_type,
        b"Y\0\0\0\x01s\0\xe9\0",
        "Type message at 16/B374D848: name is not UTF-8: b'\\xe9'",
    ),
    "replica_identity": (
        parse_relation,
        encode_relation(CATALOG).replace(b"\0n", b"\0x"),
        "Relation message at 16/B374D848: replica identity is unknown: 'x'",
    ),
    "negative_columns": (
        parse_relation,
        encode_relation(CATALOG)[:-2] + b"\xff\xff",
        "Relation message at 16/B374D848: column count is negative: -1",
    ),
    "missing_column": (
        parse_relation,
        encode_relation(CATALOG)[:-2] + b"\x7f\xff",
        "Relation message at 16/B374D848: column 1 flags is truncated: needs 1 bytes, 0 are left",
    ),
    "short_type_modifier": (
        parse_relation,
        encode_relation(ORDERS)[:-1],
        "Relation message at 16/B374D848: column 2 type modifier is truncated: needs 4 bytes, 3 are left",
    ),
    "negative_relations": (
        parse_truncate,
        b"T\x80\0\0\0\0",
        "Truncate message at 16/B374D848: relation count is negative: -2147483648",
    ),
    "missing_relation": (
        parse_truncate,
        b"T\x7f\xff\xff\xff\0" + bytes(4),
        "Truncate message at 16/B374D848: relation 2 oid is truncated: needs 4 bytes, 0 are left",
    ),
    "negative_content": (
        parse_message,
        b"M\0" + bytes(8) + b"p\0\xff\xff\xff\xff",
        "Message message at 16/B374D848: content length is negative: -1",
    ),
    "short_content": (
        parse_message,
        encode_message("p", b"hello")[:-2],
        "Message message at 16/B374D848: content is truncated: needs 5 bytes, 3 are left",
    ),
}


@pytest.mark.parametrize("form", [bytes, memoryview])
@pytest.mark.parametrize("case", PARSED)
def test_a_message_is_parsed(case: str, form: Callable[[bytes], bytes]) -> None:
    encoded, expected = PARSED[case]
    assert parse_pgoutput(form(encoded), LSN) == expected


@pytest.mark.parametrize("case", BODIES)
def test_the_documented_bytes_are_parsed(case: str) -> None:
    encoded, expected = BODIES[case]
    assert parse_pgoutput(encoded) == expected


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_message_is_an_error_that_names_type_field_and_lsn(case: str) -> None:
    parse, encoded, text = DAMAGED[case]
    with pytest.raises(DecodeError) as caught:
        parse(encoded, LSN)
    assert caught.value.message == text
    assert caught.value.advice


@pytest.mark.parametrize("case", PARSED)
def test_every_truncation_of_a_message_is_an_error(case: str) -> None:
    encoded, _ = PARSED[case]
    for size in range(len(encoded)):
        with pytest.raises(DecodeError):
            parse_pgoutput(encoded[:size])


def test_an_unknown_lsn_is_not_named() -> None:
    with pytest.raises(DecodeError) as caught:
        parse_pgoutput(b"Z")
    assert caught.value.message == "pgoutput message: tag is unknown: 'Z'"


@pytest.mark.parametrize("asked", [False, True])
def test_keepalive(asked: bool) -> None:
    assert parse_keepalive(encode_keepalive(LSN, NOW, asked)) == Keepalive(LSN, NOW, asked)


def test_a_status_update_has_the_bytes_of_the_protocol() -> None:
    encoded = encode_status_update(3, 2, 1, 7, True)
    assert encoded == b"r" + struct.pack("!QQQqB", 3, 2, 1, 7, 1)
    assert len(encoded) == 34


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_bytes_raise_anything_but_a_decode_error(data: st.DataObject) -> None:
    encoded = bytearray(data.draw(st.sampled_from([encoded for encoded, _ in PARSED.values()])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded)))
        encoded[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    for parse in (parse_pgoutput, parse_keepalive):
        try:
            parse(bytes(encoded), LSN)
        except DecodeError as error:
            assert "16/B374D848" in error.message


IDENTIFIERS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=10)
COLUMNS = st.builds(Column, IDENTIFIERS, st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1), st.booleans())


@settings(max_examples=100, deadline=None)
@given(
    relation=st.builds(
        Relation,
        st.integers(0, 2**32 - 1),
        IDENTIFIERS,
        IDENTIFIERS,
        st.sampled_from("dnfi"),
        st.lists(COLUMNS, max_size=5).map(tuple),
    )
)
def test_any_relation_survives_the_wire(relation: Relation) -> None:
    assert parse_relation(encode_relation(relation)) == relation
