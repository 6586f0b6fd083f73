"""Types that hold others: what they say about themselves, which value a refusal names, and that noise is refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nested_text import write_array, write_hstore, write_interval, write_multirange, write_range, write_row
from pyspark.sql.pandas.types import to_arrow_type

from pgcdc.postgres.types.catalog import BUILT_IN, TypeCatalog, TypeInfo
from pgcdc.postgres.types.column import ColumnType, Exactness, Rejected, TypeOptions
from pgcdc.postgres.types.geometry import split_numbers
from pgcdc.postgres.types.mapping import map_type
from pgcdc.spark.tables import spark_type

_OIDS = {info.name: info.oid for info in BUILT_IN.types.values()}
_PAIR, _PAIRS, _HSTORE, _VECTOR, _OUTER, _WORDS = range(90_001, 90_007)
_OWN = (
    TypeInfo(
        _PAIR, "pair", "record_out", "record_send", kind="composite", attributes=(23, 1009), attribute_names=("n",
        "words"),
        attribute_typmods=(-1, -1), attribute_ndims=(0, 1),
    ),
    TypeInfo(_PAIRS, "_pair", "array_out", "array_send", _PAIR, "array"),
    TypeInfo(_HSTORE, "hstore", "hstore:hstore_out", "hstore:hstore_send"),
    TypeInfo(_VECTOR, "vector", "vector:vector_out", "vector:vector_send"),
    TypeInfo(
        _OUTER, "outer", "record_out", "record_send", kind="composite", attributes=(_PAIRS, 869),
        attribute_names=("pairs", "at"), attribute_typmods=(-1, -1), attribute_ndims=(1, 0),
    ),
)  # fmt: skip
CATALOG = TypeCatalog({**BUILT_IN.types, **{info.oid: info for info in _OWN}})
_OIDS |= {info.name: info.oid for info in _OWN}

_NAMES = (
    "_int4", "_text", "_timestamptz", "_bytea", "_box", "_numeric", "_jsonb", "_bool", "_interval", "_int2vector",
    "int2vector",
    "oidvector", "pair", "_pair", "outer", "int4range", "tstzrange", "numrange", "daterange", "_int4range",
    "int4multirange",
    "datemultirange", "hstore", "interval", "point", "line", "lseg", "box", "path", "polygon", "circle", "vector",
    "_point",
)  # fmt: skip


_OTHER = TypeOptions(out_of_range="clamp", numeric="double")


def type_of(name: str, ndims: int = 0, options: TypeOptions = TypeOptions(), typmod: int = -1) -> ColumnType:  # noqa: B008
    return map_type(CATALOG, _OIDS[name], typmod, ndims, options)


def convert(kind: ColumnType, values: Sequence[bytes | None]) -> list[Any]:
    """Of a slice of a larger array, whose other values are noise; what comes out is of the type that was said."""
    given = pa.array([b"noise", *values, b"noise"], pa.binary()).slice(1, len(values))
    found = kind.convert(given)
    assert found.type.equals(kind.arrow, check_metadata=True)
    found.validate(full=True)
    listed: list[Any] = found.to_pylist()
    assert [one is None for one in listed] == [one is None for one in values]
    return listed


@pytest.mark.parametrize("name", _NAMES)
def test_arrow_type_is_what_spark_wants_and_types_travel(name: str) -> None:
    for ndims, options in ((0, TypeOptions()), (3, _OTHER)):
        kind = type_of(name, ndims, options)
        assert to_arrow_type(spark_type(kind.arrow), timezone="UTC").equals(kind.arrow, check_metadata=True)
        assert pickle.loads(pickle.dumps(kind)) == kind
        for nothing in ([], [None], [None] * 9):
            assert convert(kind, nothing) == nothing


@pytest.mark.parametrize(
    ("name", "ndims", "good", "bad", "reason"),
    [
        ("_int4", 0, b"{1,NULL}", b"{1,2,x}", "an element: x is not"),
        ("_int4", 2, b"{{1},{2}}", b"{{1},{x}}", "an element: x is not"),
        ("_int4", 3, b"{{{1},{2}}}", b"{{{1},{x}}}", "an element: x is not"),
        ("_date", 0, b"{2024-01-01}", b"{2024-01-01,infinity}", "an element: infinity is outside"),
        ("int2vector", 0, b"1 2", b"1 99999", "an element: 99999 is not"),
        ("int2vector", 0, b"", b"1  2", "it is not a list of numbers"),
        ("pair", 0, b"(1,{a})", b"(x,{a})", 'attribute "n": x is not'),
        ("pair", 0, b"(,)", b'(1,"{a")', 'attribute "words": the array has no end'),
        ("_pair", 0, b'{"(1,{a})",NULL}', b'{"(1,{a})","(1)"}', "an element: a row of 1 attribute, but its type has 2"),
        ("int4range", 0, b"[1,5)", b"[1,x)", "a bound: x is not"),
        ("daterange", 0, b"empty", b"[2024-01-01,infinity)", "a bound: infinity is outside"),
        ("int4multirange", 0, b"{[1,2),[3,4)}", b"{[1,2),[3,x)}", "a bound: x is not"),
        ("hstore", 0, b'"a"=>"b"', b'"a"=>"\xff"', "a key or value: .* is not valid UTF-8"),
        ("point", 0, b"(1,2)", b"(1,x)", "a number of the point: x is not"),
        ("point", 0, b"(1,2)", b"(1,2", "it is not a point"),
        ("point", 0, b"(1,2)", b'("1,2)', "it is not a point"),
        ("vector", 0, b"[1]", b"[1,\\]", "it is not a vector"),
        ("box", 0, b"(1,1),(0,0)", b"(1,1),(0,x)", "a number of the box: x is not"),
        ("path", 0, b"[(1,2),(3,4)]", b"[(1,2),(3,x)]", "a number of the path: x is not"),
        ("path", 0, b"((1,2))", b"((1,2)]", "it is not a path"),
        ("polygon", 0, b"((1,2),(3,4))", b"((1,2),(x,4))", "a number of the polygon: x is not"),
        ("polygon", 0, b"((1,2))", b"[(1,2)]", "it is not a polygon"),
        ("vector", 0, b"[1,2,3]", b"[1,2,x]", "a number of the vector: x is not"),
        ("vector", 0, b"[1]", b"[]", "it is not a vector"),
        ("interval", 0, b"P1D", b"1 day", "it is not an interval"),
    ],
)
def test_the_value_that_is_refused_is_named(name: str, ndims: int, good: bytes, bad: bytes, reason: str) -> None:
    kind = type_of(name, ndims)
    empty: bytes | None = {"_int4": b"{}", "_pair": b"{}", "int4multirange": b"{}", "hstore": b""}.get(name)
    values = [None, good, empty, good, good, None, empty, bad, good, bad]
    with pytest.raises(Rejected, match=reason) as refused:
        convert(kind, values)
    assert refused.value.index == 7
    convert(kind, values[:7])


def test_an_attribute_of_an_element_of_an_attribute_is_named_with_its_whole_path() -> None:
    with pytest.raises(Rejected) as refused:
        convert(type_of("outer"), [None, rb'("{""(1,{a})"",""(x,{a})""}",10.0.0.1)'])
    assert refused.value.index == 1
    assert refused.value.reason == 'attribute "pairs": an element: attribute "n": x is not a value of Spark\'s int'


def test_what_is_as_faithful_as_what_it_holds() -> None:
    assert type_of("_int4").exactness is Exactness.EXACT
    assert type_of("_inet").exactness is Exactness.TEXT
    assert type_of("_numeric", options=_OTHER).exactness is Exactness.CONVERTED
    assert (type_of("pair").exactness, type_of("outer").exactness) == (Exactness.EXACT, Exactness.TEXT)
    clamped = type_of("daterange", options=_OTHER)
    assert (clamped.exactness, clamped.rule) == (Exactness.CONVERTED, "clamped to the years 1 to 9999")


def test_a_row_says_the_rule_of_each_attribute() -> None:
    kind = type_of("outer")
    with_rule = dataclasses.replace(
        CATALOG.types[_OUTER], attributes=(1182, 1700), attribute_names=("days", "sum"), attribute_ndims=(1, 0)
    )
    catalog = TypeCatalog({**CATALOG.types, _OUTER: with_rule})
    kind = map_type(catalog, _OUTER, -1, 0, TypeOptions(out_of_range="clamp"))
    assert kind.rule == "days: clamped to the years 1 to 9999; sum: no precision is declared"


def test_modifier_of_an_array_is_that_of_its_elements() -> None:
    kind = type_of("_numeric", 2, typmod=(10 << 16 | 2) + 4)
    assert spark_type(kind.arrow).simpleString() == "array<array<decimal(10,2)>>"


def test_more_dimensions_than_there_can_be() -> None:
    assert spark_type(type_of("_int4", 9).arrow).simpleString() == "array<" * 6 + "int" + ">" * 6


_float = st.floats(width=32).map(lambda one: repr(one).replace("inf", "Infinity").replace("nan", "NaN").encode())


@given(st.lists(st.one_of(st.none(), st.lists(_float, min_size=1, max_size=5)), max_size=6))
def test_numbers_are_taken_out_of_their_brackets(values: list[list[bytes] | None]) -> None:
    texts = [None if one is None else b"[%b]" % b",".join(one) for one in values]
    given = pa.array([b"[7]", None, *texts, b"[8,9]"], pa.binary()).slice(2, len(texts))
    offsets, numbers = split_numbers(given, type_of("text"), "vector", r"\[.*\]")
    numbers.validate(full=True)
    found = [one.encode() for one in numbers.to_pylist()]
    assert [found[a:b] for a, b in pairwise(offsets)] == [one or [] for one in values]


def hide(valid: bytes, ends: list[int], data: bytes) -> pa.Array:
    buffers = [pa.py_buffer(valid), pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)


def test_bytes_under_a_null_are_nobodys() -> None:
    """Arrow allows any bytes where a value is NULL."""
    points = type_of("point").convert(hide(b"\x05", [0, 5, 10, 15], b"(1,2){x,(](3,4)"))
    assert points.to_pylist() == [{"x": 1, "y": 2}, None, {"x": 3, "y": 4}]
    arrays = type_of("_int4").convert(hide(b"\x02", [0, 5, 10], b"{,x{{{1,2}"))
    assert arrays.to_pylist() == [None, [1, 2]]


_awkward = st.text('"\\{}[](),; NULLé', max_size=5)
_words = st.lists(st.one_of(st.none(), _awkward), max_size=4)


def _encoded(words: list[str | None]) -> list[bytes | None]:
    return [None if one is None else one.encode() for one in words]


@given(
    st.lists(
        st.one_of(
            st.none(), st.lists(st.one_of(st.none(), st.tuples(st.none() | st.integers(-99, 99), _words)), max_size=3)
        )
    )
)
def test_values_in_values_in_values(values: list[Any]) -> None:
    """Arrays of rows with arrays: each level quotes the level below."""
    texts = []
    for array in values:
        rows = [
            row and write_row([None if row[0] is None else b"%d" % row[0], write_array(_encoded(row[1]))])
            for row in array or []
        ]
        texts.append(None if array is None else write_array(rows))
    expected = [
        array and [None if row is None else {"n": row[0], "words": row[1]} for row in array] for array in values
    ]
    assert convert(type_of("_pair"), texts) == expected


_pieces = [
    b"{", b"}", b"[", b"]", b"(", b")", b"<", b">", b",", b";", b'"', b'""', b"\\", b"\\x", b"=>", b", ",
    b"NULL", b"a", b"1", b"-2.5",
    b" ",
    b"empty", b"P1D", b"T", b"2024-01-01", b"infinity", b" 00:00:00+00", b" BC", b"NaN", b"1e999",
    b"\0", b"\xff", b"\n", "é".encode(),
]  # fmt: skip
_noise = st.one_of(st.lists(st.sampled_from(_pieces), max_size=10).map(b"".join), st.binary(max_size=10))
_good = st.one_of(
    st.lists(st.one_of(st.none(), _noise), max_size=3).map(write_array),
    st.lists(st.one_of(st.none(), _noise), min_size=2, max_size=2).map(write_row),
    st.tuples(_noise, _noise).map(lambda one: write_range((*one, True, False))),
    st.tuples(_noise, _noise).map(lambda one: write_multirange([(*one, True, False)])),
    st.dictionaries(_noise, _noise, max_size=2).map(write_hstore),
    st.tuples(_noise, _noise).map(lambda one: b"(%b,%b)" % one),
    st.integers(-99, 99).map(lambda one: write_interval(one, -one, one)),
)


@pytest.mark.parametrize("name", _NAMES)
@settings(max_examples=40)
@given(values=st.lists(st.one_of(st.none(), _noise, _good), min_size=1, max_size=3), ndims=st.integers(0, 2))
def test_noise_is_refused_or_read_but_raises_nothing_else(name: str, values: list[bytes | None], ndims: int) -> None:
    for options in (TypeOptions(), _OTHER):
        try:
            convert(type_of(name, ndims, options), values)
        except Rejected as refused:
            assert 0 <= refused.index < len(values)
            assert values[refused.index] is not None
