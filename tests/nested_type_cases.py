"""Values of types that hold others, as in type_cases.py; but hstore, which the embedded server has not: test_hstore.py."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from type_cases import Case

from pgcdc.postgres.types.column import Rejected, TypeOptions

__all__ = ["CASES"]

NAN, INFINITY = float("nan"), float("inf")
_TEXT = TypeOptions(arrays="string")
_ROW_TEXT = TypeOptions(composites="string")
_CLAMP, _TIME_TEXT = TypeOptions(out_of_range="clamp"), TypeOptions(out_of_range="string")

# Not the names of type_cases.py: one database has them all.
_TYPES = """
CREATE TYPE feeling AS ENUM ('ok', 'sad, very', 'NULL', '');
CREATE DOMAIN positive AS int4 CHECK (VALUE > 0);
CREATE DOMAIN amount AS numeric(8,2);
CREATE DOMAIN words AS text[];
CREATE DOMAIN matrix AS int4[][];
CREATE TYPE "Odd Pair" AS ("Left" text, "a,b" amount, at timestamptz);
CREATE TYPE deep AS (pair "Odd Pair", pairs "Odd Pair"[], moods feeling[], span int4range, grid int4[][], more words);
CREATE TYPE single AS (one text);
CREATE TYPE nothing AS ();
CREATE TYPE addressed AS (id int4, place inet);
CREATE TYPE textrange AS RANGE (subtype = text);
CREATE TYPE arrayrange AS RANGE (subtype = int4[]);
CREATE DOMAIN small_range AS int4range;
CREATE TABLE person (id int8, gone money, name varchar(10), born date);
ALTER TABLE person DROP COLUMN gone"""

_VECTOR = "CREATE EXTENSION vector"


def _group(
    line: str, pg_type: str, spark_type: str, values: dict[str, Any], setup: str = "", **more: Any
) -> list[Case]:
    """Cases of one line: SQL literals, in quotes if they do not call anything, and what becomes of them."""
    return [
        Case(
            pg_type,
            literal if "(SELECT" in literal else f"'{literal}'",
            spark_type,
            value,
            line=line,
            setup=setup,
            **more,
        )
        for literal, value in values.items()
    ]


def _arrays(pg_type: str, spark_type: str, values: dict[str, Any], setup: str = "", **more: Any) -> list[Case]:
    return _group("T[]", pg_type, spark_type, values, setup, **more)


def _range(lower: Any, upper: Any, included: str = "[)") -> dict[str, Any]:
    return {
        "lower": lower, "upper": upper, "lower_inclusive": included[0] == "[", "upper_inclusive": included[1] == "]",
        "empty": False,
    }  # fmt: skip


def _range_type(bound: str) -> str:
    return f"struct<lower:{bound},upper:{bound},lower_inclusive:boolean,upper_inclusive:boolean,empty:boolean>"


_EMPTY = {"lower": None, "upper": None, "lower_inclusive": False, "upper_inclusive": False, "empty": True}


def _point(x: float, y: float) -> dict[str, float]:
    return {"x": x, "y": y}


_POINT = "struct<x:double,y:double>"


def _interval(months: int, days: int, microseconds: int) -> dict[str, int]:
    return {"months": months, "days": days, "microseconds": microseconds}


_INTERVAL = "struct<months:int,days:int,microseconds:bigint>"
_PAIR = "struct<Left:string,a,b:decimal(8,2),at:timestamp>"


def _pair(left: str | None, amount: str | None, at: datetime | None = None) -> dict[str, Any]:
    return {"Left": left, "a,b": amount and Decimal(amount), "at": at}


_ARRAYS = [
    *_arrays("int4[]", "array<int>", {
        "{}": [], "{1}": [1], "{1,NULL,-3}": [1, None, -3], "{NULL}": [None], "{{1,2},{3,4}}": Rejected,
        "[0:1]={1,2}": Rejected,
        "[2:2]={7}": Rejected, "[1:2]={1,2}": [1, 2]}),
    *_arrays("int4[][]", "array<array<int>>", {
        "{{1,2},{3,4}}": [[1, 2], [3, 4]], "{{1},{NULL}}": [[1], [None]], "{}": [], "{1,2}": Rejected,
        "{{{1}}}": Rejected,
        "[1:1][0:0]={{7}}": Rejected}),
    *_arrays("int8[][][]", "array<array<array<bigint>>>", {
        "{{{1,2},{3,4}},{{5,6},{7,8}}}": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "{}": []}),
    *_arrays("int2[]", "array<smallint>", {"{-32768,32767}": [-32768, 32767]}),
    *_arrays("bool[]", "array<boolean>", {"{t,f,NULL}": [True, False, None]}),
    *_arrays("float4[]", "array<float>", {"{1.5,-0,Infinity}": [1.5, -0.0, INFINITY]}),
    *_arrays("float8[]", "array<double>", {"{0.1,1e-320,NaN}": [0.1, 1e-320, NAN]}),
    *_arrays("numeric(10,2)[]", "array<decimal(10,2)>", {"{1.5,NULL}": [Decimal("1.50"), None], "{1,NaN}": Rejected}),
    *_arrays("text[]", "array<string>", {
        "{}": [], r'{"",NULL,"NULL","null",nullx}': ["", None, "NULL", "null", "nullx"],
        r'{"a b","c\"d","e\\f","{x}","g,h"}':
        ["a b", 'c"d', "e\\f", "{x}", "g,h"], '{é,"€ 😀","(a)",[b],"tab\tx","line\nx"}': [
            "é", "€ 😀", "(a)", "[b]", "tab\tx", "line\nx"], '{{a},{b}}': Rejected}),
    *_arrays("varchar(3)[]", "array<string>", {"{abc}": ["abc"]}),
    *_arrays("bytea[]", "array<binary>", {r'{"\\x00ff",NULL,"\\x"}': [b"\0\xff", None, b""]}),
    *_arrays("date[]", "array<date>", {"{2024-02-29,NULL}": [date(2024, 2, 29), None],
        "{2024-02-29,infinity}": Rejected}),
    *_arrays("timestamp[]", "array<timestamp_ntz>", {'{"2024-02-29 12:34:56.5"}': [datetime(2024, 2, 29, 12, 34, 56,
        500000)]}),
    *_arrays("timestamptz[]", "array<timestamp>", {'{"2024-02-29 12:00+02"}': [datetime(2024, 2, 29, 10, tzinfo=UTC)]}),
    *_arrays("feeling[]", "array<string>", {'{ok,"sad, very","NULL","",NULL}': ["ok", "sad, very", "NULL", "", None]},
        _TYPES),
    *_arrays("positive[]", "array<int>", {"{1,NULL}": [1, None]}, _TYPES),
    *_arrays("amount[]", "array<decimal(8,2)>", {"{1.5}": [Decimal("1.50")]}, _TYPES),
    *_arrays("words[]", "array<array<string>>", {r'{"{a,\"b c\"}","{}",NULL}': [["a", "b c"], [], None]}, _TYPES),
    *_arrays("words", "array<string>", {"{a}": ["a"]}, _TYPES),
    *_arrays("matrix", "array<array<int>>", {"{{1},{2}}": [[1], [2]], "{1}": Rejected}, _TYPES),
    *_arrays('"Odd Pair"[]', f"array<{_PAIR}>", {r'{"(\"x,\"\"y\"\"\",1.5,)",NULL}': [_pair('x,"y"', "1.50"), None]},
        _TYPES),
    *_arrays("int4range[]", f"array<{_range_type('int')}>", {'{"[1,5)",empty,NULL}': [_range(1, 5), _EMPTY, None]}),
    *_arrays("int4multirange[]", f"array<array<{_range_type('int')}>>", {'{"{[1,5),[7,9)}","{}"}': [
        [_range(1, 5), _range(7, 9)], []]}),
    *_arrays("interval[]", f"array<{_INTERVAL}>", {'{"1 day -00:00:01",NULL}': [_interval(0, 1, -1_000_000), None]}),
    *_arrays("point[]", f"array<{_POINT}>", {'{"(0,1)",NULL}': [_point(0, 1), None]}),
    *_arrays("box[]", f"array<struct<upper_right:{_POINT},lower_left:{_POINT}>>", {
        "{(1,1),(0,0);NULL;(3,3),(2,2)}": [
            {"upper_right": _point(1, 1), "lower_left": _point(0, 0)}, None,
            {"upper_right": _point(3, 3), "lower_left": _point(2, 2)}], "{}": []}),
    *_arrays("vector(2)[]", "array<array<float>>", {'{"[1,2]",NULL}': [[1.0, 2.0], None]}, _VECTOR),
    *_arrays("int2vector[]", "array<array<smallint>>", {'{"1 2",3,"",NULL}': [[1, 2], [3], [], None]}),
    *_group("T[]", "inet[]", "array<string>", {"{10.0.0.1,::1,NULL}": ["10.0.0.1", "::1", None]}),
    *_group("T[]", "jsonb[]", "array<string>", {r'{"{\"a\": \"b c\"}",null}': ['{"a": "b c"}', None]}),
    *_group("T[]", "json[]", "array<string>", {r'{"[1, \"\\\\\"]"}': ['[1, "\\\\"]']}),
    *_group("T[]", "uuid[]", "array<string>", {
        "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]}),
    *_group("T[]", "tsvector[]", "array<string>", {"{\"''a b'':1\",NULL,x}": ["'a b':1", None, "'x'"]}),
    *_group("int2vector", "int2vector", "array<smallint>", {"1 -2 3": [1, -2, 3], "": [], "7": [7]}),
    *_group("oidvector", "oidvector", "array<bigint>", {"1 4294967295": [1, 2**32 - 1], "": []}),
]  # fmt: skip

_ROWS = [
    *_group("composite", '"Odd Pair"', _PAIR, {
        '("a ""b""",5,"2024-01-01 00:00+00")': _pair('a "b"', "5.00", datetime(2024, 1, 1, tzinfo=UTC)),
        "(,,)": _pair(None, None), '("",1,)': _pair("", "1.00"), r'("(\\""x, ",,)': _pair('(\\"x, ', None),
        "(a,NaN,)": Rejected, "(a,,infinity)": Rejected}, _TYPES),
    *_group("composite", "deep",
            f"struct<pair:{_PAIR},pairs:array<{_PAIR}>,moods:array<string>,span:{_range_type('int')},"
            "grid:array<array<int>>,more:array<string>>", {
        "(SELECT ROW(ROW('', 5, NULL), ARRAY[ROW('x,y', 1, NULL)::\"Odd Pair\", NULL], '{ok,\"sad, very\"}', '[1,4)', "
        "'{{1,2},{3,4}}', '{\"a b\"}')::deep)": {
            "pair": _pair("", "5.00"), "pairs": [_pair("x,y", "1.00"), None], "moods": ["ok", "sad, very"],
            "span": _range(1, 4), "grid": [[1, 2], [3, 4]], "more": ["a b"]},
        "(,,,,{1},)": Rejected}, _TYPES),
    *_group("composite", "single", "struct<one:string>", {"()": {"one": None}, '("")': {"one": ""},
        "(x)": {"one": "x"}}, _TYPES),
    *_group("composite", "person", "struct<id:bigint,name:string,born:date>", {
        '(1,"A B",2024-02-29)': {"id": 1, "name": "A B", "born": date(2024, 2, 29)}}, _TYPES),
    *_group("composite", "addressed", "struct<id:int,place:string>", {
        "(1,10.0.0.1/8)": {"id": 1, "place": "10.0.0.1/8"}}, _TYPES),
    *_group("composite without attributes", "nothing", "string", {"()": "()"}, _TYPES),
]  # fmt: skip

_DAYS = _range_type("date")
_RANGES = [
    *_group("range", "int4range", _range_type("int"), {
        "[1,5)": _range(1, 5), "empty": _EMPTY, "(,)": _range(None, None, "()"), "(,5]": _range(None, 6, "()"),
        "[-1,)": _range(-1, None)}),
    *_group("range", "int8range", _range_type("bigint"), {"[1,9223372036854775807)": _range(1, 2**63 - 1)}),
    *_group("range", "tsrange", _range_type("timestamp_ntz"), {
        "[2024-01-01,2024-01-02 03:04:05.6]": _range(datetime(2024, 1, 1), datetime(2024, 1, 2, 3, 4, 5, 600000), "[]"),
        "(-infinity,)": Rejected, "[0044-03-15 BC,)": Rejected}),
    *_group("range", "tstzrange", _range_type("timestamp"), {
        "(2024-01-01 00:00+02,)": _range(datetime(2023, 12, 31, 22, tzinfo=UTC), None, "()")}),
    *_group("range", "daterange", _DAYS, {"[2024-01-01,2024-01-31]": _range(date(2024, 1, 1), date(2024, 2, 1)),
        "[,infinity)": Rejected}),
    *_group("range", "textrange", _range_type("string"), {
        "(SELECT textrange('a\"b\\', 'x[ y', '[]'))": _range('a"b\\', "x[ y", "[]"),
        "(SELECT textrange('', NULL))": _range("", None)},
        _TYPES),
    *_group("range", "arrayrange", _range_type("array<int>"), {
        "(SELECT arrayrange('{1,2}', '{3}'))": _range([1, 2], [3]), "(SELECT arrayrange('{1}', '{{3}}'))": Rejected},
        _TYPES),
    *_group("range", "small_range", _range_type("int"), {"[1,4)": _range(1, 4)}, _TYPES),
    *_group("range", "numrange", _range_type("string"), {
        "[1.50,2.0]": _range("1.50", "2.0", "[]"), "[NaN,]": _range("NaN", None),
        "(-Infinity,Infinity]": _range("-Infinity", "Infinity", "(]")}),
    *_group("multirange", "int4multirange", f"array<{_range_type('int')}>", {
        "{}": [], "{[1,5),[7,9),[20,)}": [_range(1, 5), _range(7, 9), _range(20, None)]}),
    *_group("multirange", "datemultirange", f"array<{_DAYS}>", {
        "{[2024-01-01,2024-01-03)}": [_range(date(2024, 1, 1), date(2024, 1, 3))],
        "{(,2024-01-01),[2025-01-01,infinity)}": Rejected}),
    *_group("multirange", "tsmultirange", f"array<{_range_type('timestamp_ntz')}>", {
        '{["2024-01-01 01:00","2024-01-02 00:00"),(2025-01-01,]}': [
            _range(datetime(2024, 1, 1, 1), datetime(2024, 1, 2)), _range(datetime(2025, 1, 1), None, "()")]}),
    *_group("multirange", "textmultirange", f"array<{_range_type('string')}>", {
        "(SELECT textmultirange(textrange('a', 'b'), textrange('c,)', 'd\"')))": [_range("a", "b"), _range("c,)",
        'd"')]}, _TYPES),
]  # fmt: skip

_INTERVALS = _group("interval", "interval", _INTERVAL, {
    "0": _interval(0, 0, 0), "1 year 2 mons 3 days 04:05:06.789": _interval(14, 3, 14_706_789_000),
    "-1 year": _interval(-12, 0, 0),
    "1 year -2 mons": _interval(10, 0, 0), "-13 mons +1 day -00:00:00.5": _interval(-13, 1, -500_000),
    "-00:00:00.000001": _interval(0, 0, -1), "1 day -00:00:01": _interval(0, 1, -1_000_000),
    "1000000 hours": _interval(0, 0, 3600 * 10**12),
    "-1000000:59:59.999999": _interval(0, 0, -3_600_003_599_999_999), "2147483647 mons": _interval(2**31 - 1, 0, 0),
    "-2147483648 mons": _interval(-(2**31), 0, 0), "2147483647 days": _interval(0, 2**31 - 1, 0),
    "-2147483648 days": _interval(0, -(2**31), 0), "9223372036854775807 microseconds": _interval(0, 0, 2**63 - 1),
    "-9223372036854775808 microseconds": _interval(0, 0, -(2**63)), "90 seconds": _interval(0, 0, 90_000_000),
    "infinity": Rejected, "-infinity": Rejected})  # fmt: skip

_GEOMETRY = [
    *_group("point", "point", _POINT, {
        "(1.5,-2.25)": _point(1.5, -2.25), "(-0,1e300)": _point(-0.0, 1e300), "(Infinity,NaN)": _point(INFINITY, NAN),
        "(0.1,5e-324)": _point(0.1, 5e-324)}),
    *_group("line", "line", "struct<a:double,b:double,c:double>", {"{1,-2,0.5}": {"a": 1.0, "b": -2.0, "c": 0.5}}),
    *_group("lseg", "lseg", f"struct<start:{_POINT},end:{_POINT}>", {
        "[(0,1),(2,-3.5)]": {"start": _point(0, 1), "end": _point(2, -3.5)}}),
    *_group("box", "box", f"struct<upper_right:{_POINT},lower_left:{_POINT}>", {
        "(0,5),(-1.5,1e-7)": {"upper_right": _point(0, 5), "lower_left": _point(-1.5, 1e-7)},
        "(0,0),(1,1)": {"upper_right": _point(1, 1), "lower_left": _point(0, 0)}}),
    *_group("path", "path", f"struct<closed:boolean,points:array<{_POINT}>>", {
        "[(0,0)]": {"closed": False, "points": [_point(0, 0)]}, "((0,0),(1,1.5))": {
            "closed": True, "points": [_point(0, 0), _point(1, 1.5)]}, "((0,1))": {"closed": True,
            "points": [_point(0, 1)]}}),
    *_group("polygon", "polygon", f"array<{_POINT}>", {
        "((0,0))": [_point(0, 0)], "((0,0),(1,1),(2,0.1))": [_point(0, 0), _point(1, 1), _point(2, 0.1)]}),
    *_group("circle", "circle", f"struct<center:{_POINT},radius:double>", {
        "<(1.5,-1),1e10>": {"center": _point(1.5, -1), "radius": 1e10}, "<(0,0),Infinity>": {"center": _point(0, 0),
        "radius": INFINITY}}),
    *_group("vector", "vector(3)", "array<float>", {"[1,2.5,-0]": [1.0, 2.5, -0.0]}, _VECTOR),
    *_group("vector", "vector", "array<float>", {
        "[3.4028235e38]": [3.4028234663852886e38], "[0.1,1e-10]": [0.10000000149011612, 1.000000013351432e-10]},
        _VECTOR),
    *_group("halfvec", "halfvec", "array<float>", {"[1,0.1,65504,6e-8]": [1.0, 0.0999755859375, 65504.0,
        5.960464477539063e-08]}, _VECTOR),
]  # fmt: skip

_OPTIONS = [
    *_group("arrays=array", "text[]", "array<string>", {"{a}": ["a"], "[0:0]={a}": Rejected}),
    *_group("arrays=string", "int4[]", "string", {"{{1,2},{3,4}}": "{{1,2},{3,4}}", "[0:1]={1,2}": "[0:1]={1,2}"},
        options=_TEXT),
    *_group("arrays=string", "text[]", "string", {'{"a b"}': '{"a b"}'}, options=_TEXT),
    *_group("arrays=string", "int2vector", "string", {"1 2": "1 2"}, options=_TEXT),
    *_group("composites=struct", '"Odd Pair"', _PAIR, {"(a,1,)": _pair("a", "1.00"), "(a,NaN,)": Rejected}, _TYPES),
    *_group("composites=string", '"Odd Pair"', "string", {"(a,1,)": "(a,1.00,)"}, _TYPES, options=_ROW_TEXT),
    *_group("out_of_range=string", "interval", "string", {"infinity": "infinity", "1 day 00:00:01": "P1DT1S"},
        options=_TIME_TEXT),
    *_group("out_of_range=clamp", "date[]", "array<date>", {"{infinity,NULL}": [date.max, None]}, options=_CLAMP),
    *_group("out_of_range=string", "date[]", "array<string>", {"{infinity,NULL}": ["infinity", None]},
        options=_TIME_TEXT),
    *_group("out_of_range=clamp", "daterange", _DAYS, {
        "[2024-01-01,infinity)": _range(date(2024, 1, 1), date.max), "(,0044-03-15 BC)": _range(None, date.min,
        "()")}, options=_CLAMP),
]  # fmt: skip

CASES: list[Case] = [*_ARRAYS, *_ROWS, *_RANGES, *_INTERVALS, *_GEOMETRY, *_OPTIONS]
