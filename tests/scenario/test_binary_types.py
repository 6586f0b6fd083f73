"""The binary form of every type against the server: what comes out is what the server itself writes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from datetime import date, datetime

import pytest
from binary_values import VALUES, fetch_both
from databases import Database
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import Column, Relation
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import Connection, connect
from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog
from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder, unsupported
from pgcdc.source.postgres.wire.messages import parse_pgoutput

to_text = BinaryDecoder().to_text


@pytest.fixture(scope="module")
def conn(postgres: EmbeddedPostgres) -> Iterator[Connection]:
    """A session with the settings of the capture."""
    with connect(postgres.url()) as made:
        yield made


def cast_both(conn: Connection, type_name: str, values: list[str]) -> list[tuple[int, bytes, bytes]]:
    """Type, text and binary form of each value, from one query."""
    array = "{" + ",".join('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values) + "}"
    query = f"SELECT v::{type_name} FROM unnest($1::text[]) WITH ORDINALITY AS u(v, n) ORDER BY n"
    return [
        (oid, text, raw) for oid, text, raw in fetch_both(conn, query, [array]) if text is not None and raw is not None
    ]


def check_bulk(conn: Connection, type_name: str, values: list[str]) -> None:
    rows = cast_both(conn, type_name, values)
    assert len(rows) == len(values)
    assert [to_text(oid, raw) for oid, _, raw in rows] == [text for _, text, _ in rows]


_VECTORS = {"int2vector", "oidvector"}
"""What array_agg takes for arrays themselves."""


@pytest.mark.parametrize("type_name", VALUES)
def test_text_is_what_the_server_writes(conn: Connection, type_name: str) -> None:
    check_bulk(conn, type_name, VALUES[type_name])


@pytest.mark.parametrize("type_name", [name for name in VALUES if not name.endswith("[]") and name not in _VECTORS])
def test_text_in_an_array_and_in_a_row_is_what_the_server_writes(conn: Connection, type_name: str) -> None:
    values = VALUES[type_name]
    array = "{" + ",".join('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values) + "}"
    plain = type_name.partition("(")[0]
    query = f"""
        SELECT array_agg(v::{plain}), ROW(array_agg(v::{plain}), min(v), NULL::int4, ''::text),
               array_agg(ROW(v::{plain}, NULL::text, 7)), ROW(ROW(array_agg(v)), 1.50, true)
        FROM unnest($1::text[]) WITH ORDINALITY AS u(v, n)"""
    for oid, text, raw in fetch_both(conn, query, [array]):
        assert raw is not None
        assert to_text(oid, raw) == text


def test_built_in_types_are_those_of_the_server(conn: Connection) -> None:
    served = TypeCatalog.load(conn).types
    assert {oid: served.get(oid) for oid in BUILT_IN.types} == BUILT_IN.types


def test_no_type_of_the_server_is_forgotten(conn: Connection) -> None:
    """What a table's column can have is known, but for the statistics that only the catalog has."""
    query = """
        SELECT t.oid::int8, t.typname::text FROM pg_type t LEFT JOIN pg_type e ON e.typarray = t.oid
        WHERE t.typtype IN ('b', 'r', 'm') AND t.oid < 10000 AND e.typtype IS DISTINCT FROM 'c'"""
    forgotten = {name for oid, name in conn.execute(query).fetchall() if oid not in BUILT_IN.types}
    assert forgotten == {
        "pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "gtsvector", "_gtsvector", "_cstring",
        "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary",
    }  # fmt: skip


def test_every_built_in_type_is_converted_or_refused(conn: Connection) -> None:
    refused = {BUILT_IN.name(oid).lstrip("_") for oid in unsupported(BUILT_IN, BUILT_IN.types)}
    assert {name for name in refused if not name.startswith("reg")} == {"money", "aclitem"}
    assert "regclass" in refused and "refcursor" not in refused
    tested = {oid for name in VALUES for oid, _, _ in fetch_both(conn, f"SELECT NULL::{name}")}
    scalar = {oid for oid, info in BUILT_IN.types.items() if info.output != "array_out"}
    untested = {BUILT_IN.name(oid) for oid in scalar - tested} - refused
    assert untested == {"record", "xml"}  # rows are tested above; the embedded server has no XML


def test_an_older_server_writes_the_same_except_for_what_it_does_not_have() -> None:
    extremes = "2147483647 mons 2147483647 days 9223372036854775807 microseconds"
    with EmbeddedPostgres.temporary(version=16) as server, connect(server.url()) as conn:
        catalog = TypeCatalog.load(conn)
        assert {oid: catalog.types.get(oid) for oid in BUILT_IN.types} == BUILT_IN.types
        decoder = BinaryDecoder(catalog)
        for name, values in VALUES.items():
            known = [value for value in values if not (name == "interval" and "infinity" in value)]
            rows = cast_both(conn, name, [*known, extremes] if name == "interval" else known)
            assert [decoder.to_text(oid, raw) for oid, _, raw in rows] == [text for _, text, _ in rows], name


# Random values, in bulk.

_bulk = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@_bulk
@given(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=300))
def test_random_doubles(conn: Connection, raws: list[bytes]) -> None:
    numbers = [struct.unpack("!d", raw)[0] for raw in raws]
    check_bulk(conn, "float8", [repr(number) for number in numbers])


@_bulk
@given(st.lists(st.floats(width=64), min_size=1, max_size=300))
def test_simple_doubles(conn: Connection, numbers: list[float]) -> None:
    check_bulk(conn, "float8", [repr(number) for number in numbers])


@_bulk
@given(st.lists(st.floats(width=32), min_size=1, max_size=300), st.lists(st.binary(min_size=4, max_size=4)))
def test_random_floats(conn: Connection, numbers: list[float], raws: list[bytes]) -> None:
    numbers += [struct.unpack("!f", raw)[0] for raw in raws]
    check_bulk(conn, "float4", [repr(number) for number in numbers])


def test_powers_of_two_and_ten_and_what_is_between_floats(conn: Connection) -> None:
    """Where intervals are uneven, and where the shortest decimal would lie exactly between two floats."""
    doubles = [2.0**power for power in range(-1074, 1024)] + [float(f"1e{power}") for power in range(-323, 309)]
    doubles += [float(f"{digit}e{power}") for digit in range(1, 100) for power in range(15, 30)]
    floats = [2.0**power for power in range(-149, 128)] + [
        float(f"{m}e{power}") for m in range(1, 200) for power in range(5, 20)
    ]
    check_bulk(conn, "float8", [repr(number) for number in doubles])
    check_bulk(conn, "float4", [repr(number) for number in floats])


_words = st.lists(st.sampled_from(["0", "0", "0", "1", "ffff", "a0b"]), min_size=8, max_size=8)


@_bulk
@given(st.lists(st.tuples(_words, st.integers(0, 128)), min_size=1, max_size=200))
def test_random_addresses(conn: Connection, addresses: list[tuple[list[str], int]]) -> None:
    check_bulk(conn, "inet", [f"{':'.join(words)}/{bits}" for words, bits in addresses])


_digits = st.text("0123456789", min_size=1, max_size=40)


@_bulk
@given(
    st.lists(st.tuples(st.sampled_from(["", "-"]), _digits, _digits, st.integers(-60, 60)), min_size=1, max_size=200)
)
def test_random_numerics(conn: Connection, parts: list[tuple[str, str, str, int]]) -> None:
    check_bulk(conn, "numeric", [f"{sign}{whole}.{rest}e{power}" for sign, whole, rest, power in parts])


@_bulk
@given(
    st.lists(st.dates(), min_size=1, max_size=100),
    st.lists(st.integers(-(2**31) + 1, 2**31 - 1), max_size=100),
    st.lists(st.datetimes(min_value=datetime(1, 1, 1)), max_size=100),
    st.lists(st.integers(-210_866_803_200, 9_224_318_015_999), max_size=100),
)
def test_random_dates_and_timestamps(
    conn: Connection, dates: list[date], days: list[int], times: list[datetime], seconds: list[int]
) -> None:
    check_bulk(conn, "date", [str(one) for one in dates])
    check_bulk(conn, "timestamp", [str(one) for one in times])
    check_bulk(conn, "timestamptz", [f"{one}+00" for one in times])
    far = fetch_both(
        conn,
        "SELECT to_timestamp(s::float8), (to_timestamp(s::float8) AT TIME ZONE 'UTC')::date FROM unnest($1::int8[]) s",
        ["{" + ",".join(map(str, seconds)) + "}"],
    )
    far += fetch_both(
        conn,
        "SELECT '2000-01-01'::date + greatest(least(d, 2145031948), -2451545) FROM unnest($1::int4[]) d",
        ["{" + ",".join(map(str, days)) + "}"],
    )
    assert [to_text(oid, raw or b"") for oid, _, raw in far] == [text for _, text, _ in far]


_i32 = st.integers(-(2**31), 2**31 - 1)
_small = st.integers(-100, 100)


@_bulk
@given(
    st.lists(
        st.tuples(st.one_of(_small, _i32), st.one_of(_small, _i32), st.one_of(_small, st.integers(-(2**62), 2**62))),
        min_size=1,
        max_size=200,
    )
)
def test_random_intervals(conn: Connection, parts: list[tuple[int, int, int]]) -> None:
    check_bulk(conn, "interval", [f"{months} mons {days} days {micros} microseconds" for months, days, micros in parts])


_texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
_awkward = st.text("\"\\{}(),; \t\nNULnul'", max_size=5)


@_bulk
@given(st.lists(st.lists(st.one_of(st.none(), _texts, _awkward), max_size=8), min_size=1, max_size=30))
def test_random_arrays_rows_and_words(conn: Connection, arrays: list[list[str | None]]) -> None:
    for texts in arrays:
        params = [text for text in texts if text is not None]
        slots = iter(range(1, len(params) + 1))
        items = [f"${next(slots)}::text" if text is not None else "NULL::text" for text in texts]
        array = f"ARRAY[{','.join(items)}]::text[]"
        query = f"SELECT {array}, ROW({','.join(items)}), ROW({array}, ARRAY[{array}]), ARRAY[ROW({array})]"
        query += f", array_to_tsvector(array_remove(array_remove({array}, NULL), ''))"
        for oid, text, raw in fetch_both(conn, query, params):
            assert to_text(oid, raw or b"") == text


@_bulk
@given(st.data())
def test_random_searches(conn: Connection, data: st.DataObject) -> None:
    lexeme = st.sampled_from(["a", "b:*", "c:AB", "'d e'"])
    query = st.recursive(
        lexeme,
        lambda inner: st.one_of(
            inner.map(lambda one: f"!({one})"),
            st.tuples(inner, st.sampled_from(["&", "|", "<->", "<2>"]), inner).map(
                lambda three: "({}) {} ({})".format(*three)
            ),
        ),
        max_leaves=12,
    )
    check_bulk(conn, "tsquery", data.draw(st.lists(query, min_size=1, max_size=30)))


# Types of the database.

_SCHEMA = """
CREATE SCHEMA "Odd.Schema";
CREATE TYPE mood AS ENUM ('ok', 'sad, very', 'NULL', '');
CREATE DOMAIN positive AS int4 CHECK (VALUE > 0);
CREATE DOMAIN nested_domain AS positive;
CREATE DOMAIN words AS text[];
CREATE DOMAIN boxes AS box[];
CREATE TYPE "Odd.Schema"."Pair" AS (left_ text, right_ nested_domain, at timestamptz);
CREATE TYPE deep AS (pair "Odd.Schema"."Pair", pairs "Odd.Schema"."Pair"[], feeling mood);
CREATE TYPE textrange AS RANGE (subtype = text);
CREATE TYPE moodrange AS RANGE (subtype = mood);
CREATE DOMAIN small_range AS int4range;
CREATE TYPE citext;
CREATE FUNCTION citextin(cstring) RETURNS citext AS 'textin' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION citextout(citext) RETURNS cstring AS 'textout' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION citextsend(citext) RETURNS bytea AS 'textsend' LANGUAGE internal STABLE STRICT;
CREATE TYPE citext (INPUT = citextin, OUTPUT = citextout, SEND = citextsend, INTERNALLENGTH = VARIABLE, DELIMITER = '|');
CREATE TABLE shop (id int4, mood mood, price money);
ALTER TABLE shop DROP COLUMN price;
CREATE EXTENSION vector;
"""

_USER_VALUES = [
    "'sad, very'::mood", "''::mood", "ARRAY['ok','sad, very','NULL','',NULL]::mood[]", "7::positive", "7::nested_domain",
    "ARRAY[1,NULL]::positive[]", "'{a,\"b c\"}'::words", "'{(1,1),(0,0);(2,2),(0,0)}'::boxes", "'{\"{a}\",\"{}\"}'::words[]",
    """ROW('a "b"', 5, '2024-01-01 00:00+00')::"Odd.Schema"."Pair" """, """ROW(NULL, NULL, NULL)::"Odd.Schema"."Pair" """,
    "ROW(ROW('', 5, NULL), ARRAY[ROW('x,y', 1, NULL)::\"Odd.Schema\".\"Pair\", NULL], 'NULL')::deep",
    "ARRAY[ROW(ROW('(', 5, NULL), NULL, 'sad, very')::deep]", "textrange('a\"b', 'x[y', '[]')", "textrange('', NULL)",
    "moodrange('ok', 'sad, very')", "textmultirange(textrange('a', 'b'), textrange('c,', 'd'))", "'[1,4)'::small_range",
    "ARRAY['[1,4)']::small_range[]", "'Cased'::citext", "'{Ab|NULL|\"c|d\"|e,f}'::citext[]",
    "ROW(1, 'ok')::shop", "ARRAY[ROW(1, NULL)::shop]",
    "'[1,2.5,-0,1e-10,3.4e38,123456.789]'::vector", "'[1,0.1,65504,6e-8]'::halfvec",
    "'{1:1.5,3:2,1000:1e-7}/1000'::sparsevec", "'{}/5'::sparsevec", "ARRAY['[1,2]'::vector, NULL]", "NULL::mood",
]  # fmt: skip


def test_types_of_the_database_and_of_extensions(database: Database) -> None:
    database.execute(_SCHEMA)
    with connect(database.url) as conn:
        decoder = BinaryDecoder(TypeCatalog.load(conn))
        for value in _USER_VALUES:
            for oid, text, raw in fetch_both(conn, f"SELECT {value}"):
                assert (None if raw is None else decoder.to_text(oid, raw)) == text, value


def test_a_type_that_is_created_later_is_found_by_reading_the_catalog_again(database: Database) -> None:
    with connect(database.url) as conn:
        readings = []

        def reload() -> TypeCatalog:
            readings.append(1)
            return TypeCatalog.load(conn)

        decoder = BinaryDecoder(TypeCatalog.load(conn), reload)
        conn.execute("CREATE TYPE mood AS ENUM ('ok')")
        for _ in range(2):
            ((oid, text, raw),) = fetch_both(conn, "SELECT 'ok'::mood")
            assert decoder.to_text(oid, raw or b"") == text
        assert readings == [1]
        with pytest.raises(DecodeError, match=r"oid 4000000000 is unknown.*Remove --binary"):
            decoder.to_text(4_000_000_000, b"")


_UNSUPPORTED = """
CREATE TYPE cost AS (amount money, at date);
CREATE DOMAIN fee AS money;
CREATE TYPE grants AS (list aclitem[]);
CREATE TYPE opaque;
CREATE FUNCTION opaque_in(cstring) RETURNS opaque AS 'byteain' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION opaque_out(opaque) RETURNS cstring AS 'byteaout' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION opaque_send(opaque) RETURNS bytea AS 'textsend' LANGUAGE internal STABLE STRICT;
CREATE TYPE opaque (INPUT = opaque_in, OUTPUT = opaque_out, SEND = opaque_send);
"""


def test_unsupported_types_are_named_with_their_reason(database: Database) -> None:
    database.execute(_UNSUPPORTED)
    names = ["int4", "cost[]", "fee", "grants", "opaque", "regclass", "aclitem", "aclitem[]", "text", "money", "money"]
    with connect(database.url) as conn:
        catalog = TypeCatalog.load(conn)
        oids = [conn.execute("SELECT %s::regtype::oid::int8", [name]).fetchall()[0][0] for name in names]
        found = unsupported(catalog, [*oids, 4_000_000_000])
    assert [(catalog.name(oid), reason) for oid, reason in found.items()] == [
        ("public._cost", "how money is written depends on the server's locale (lc_monetary)"),
        ("public.fee", "how money is written depends on the server's locale (lc_monetary)"),
        ("public.grants", "the server has no binary form of aclitem"),
        ("public.opaque", "the binary form of public.opaque is unknown"),
        ("regclass", "regclass is sent as a number and written as a name, which only the server knows"),
        ("_aclitem", "the server has no binary form of aclitem"),
        ("money", "how money is written depends on the server's locale (lc_monetary)"),
        ("with oid 4000000000", "the type with oid 4000000000 is unknown"),
    ]


# Through pgoutput.

_ROWS = """
CREATE TYPE mood AS ENUM ('ok', 'sad, very');
CREATE DOMAIN positive AS numeric(10, 2);
CREATE TYPE pair AS (a text, b positive);
CREATE TABLE things (
    id int8 PRIMARY KEY, name text, feeling mood, price positive, both_ pair, pairs pair[], at timestamptz, span interval,
    tags text[], doc jsonb, ratio float8, grants aclitem, large text);
ALTER TABLE things ALTER large SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
CREATE PUBLICATION things FOR TABLE things;
"""

_CHANGES = """
INSERT INTO things VALUES (1, 'a "b"', 'sad, very', 1.5, ROW('x,y', 2), ARRAY[ROW('', NULL)::pair, NULL],
    '2024-01-02 03:04:05.6+00', '1 year -2 days 03:00', '{a,NULL,"c d"}', '{"a": 1.50}',
    1e23, 'postgres=r/postgres', repeat('x', 10000));
INSERT INTO things (id) VALUES (2);
UPDATE things SET name = NULL, at = 'infinity' WHERE id = 1;
ALTER TABLE things REPLICA IDENTITY DEFAULT;
UPDATE things SET ratio = -0.0 WHERE id = 1;
UPDATE things SET id = 3 WHERE id = 1;
DELETE FROM things WHERE id = 3;
"""


def test_rows_of_pgoutput_are_the_same_with_and_without_binary(database: Database) -> None:
    with connect(database.url) as conn:
        conn.execute(_ROWS)
        conn.execute("SELECT pg_create_logical_replication_slot('both', 'pgoutput')")
        for change in _CHANGES.strip().split(";\n"):
            conn.execute(change.encode())
        peek = """SELECT data FROM pg_logical_slot_peek_binary_changes('both', NULL, NULL,
            'proto_version', '1', 'publication_names', 'things', 'binary', %s)"""
        texts, binaries = ([row[0] for row in conn.execute(peek, [form]).fetchall()] for form in ("false", "true"))
        decoder = BinaryDecoder(TypeCatalog.load(conn))
    columns: Sequence[Column] = ()
    operations = ""
    assert len(texts) == len(binaries)
    for text, binary in zip(texts, binaries, strict=True):
        parsed = None if text[:1] in b"IUD" else parse_pgoutput(text)
        if isinstance(parsed, Relation):
            columns = parsed.columns
        if parsed is None:
            operations += chr(text[0])
            assert decoder.rewrite_row(binary, columns) == text
            assert binary != text
    assert operations == "IIUUUD"
