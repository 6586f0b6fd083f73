"""Values of every type, for the tests of the binary form, in the words of SQL; and how to fetch them in both forms."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import pq

__all__ = ["VALUES", "fetch_both"]


def fetch_both(
    conn: psycopg.Connection[tuple[object, ...]], query: str, params: Sequence[str] = ()
) -> list[tuple[int, bytes | None, bytes | None]]:
    """Type, text and binary form of each value in the rows of a query, which is run twice: once for each form."""
    given = [param.encode() for param in params]
    texts, binaries = (conn.pgconn.exec_params(query.encode(), given, result_format=form) for form in (0, 1))
    for result in (texts, binaries):
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
    return [
        (texts.ftype(column), texts.get_value(row, column), binaries.get_value(row, column))
        for row in range(texts.ntuples)
        for column in range(texts.nfields)
    ]


def _split(text: str, separator: str) -> list[str]:
    return text.strip("\n").replace("\n", separator).split(separator)


_QUOTED = [
    "",
    " ",
    "a",
    "NULL",
    "null",
    'q"q',
    "b\\b",
    "c,c",
    "d;d",
    "e{e",
    "f}f",
    "g(g",
    "h)h",
    "i[i",
    "j]j",
    "k'k",
    "é €😀",
]
_QUOTED += ["tab\t", "\nline", "cr\r", "\vvt", "ff\f", "a b", "\u00a0", "x" * 5000]

_NUMERICS = _split(
    """
0 0.0 0.000 -0 1 -1 10 100 1000 9999 10000 10001 100000000 12345678901234567890 1.5 -1.5 0.1 0.01 0.001 0.0001 0.00001
0.00000001 0.000000001 1.10 1.100000 123.4500 10000.0001 99999999.99999999 NaN Infinity -Infinity 1e100 1e-100 -1e-100
1e131071 1e-16383 -9.99e1000 100000000000000000000.00000000000000000001 0.00010000 0e-20 5000 50000000
""",
    " ",
)

_FLOATS = _split(
    """
0 -0 1 -1 0.1 0.5 1.5 100 1e5 123456 999999 1e6 1234567 1e14 1e15 1e16 1e20 1e21 1e22 1e23 9e22 1e-3 1e-4 1.5e-4 1e-5 1.5e-5
123456789012345 1234567890123456 999999999999999 9007199254740991 9007199254740992 9007199254740993 NaN Infinity -Infinity
3.14159 -2.5e-7 1e37 1.17549435e-38 1.4e-45 3.4028235e38 16777216 16777217 33554432 67108864 8388608.5
""",
    " ",
)
_FLOAT8S = _split(
    """
1e308 1.7976931348623157e308 2.2250738585072014e-308 5e-324 1e-320 -1e-310 1e100 0.30000000000000004 2e23 4e23 8e23 1e24 5e22
9.5367431640625e-07 4.35 1.7976931348623155e308 6e22 7e22 1.8014398509481984e16 3.6028797018963968e16 1e19 1.5e300
""",
    " ",
)

_DATES = _split(
    """
2000-01-01 1999-12-31 1970-01-01 2024-02-29 1900-02-28 1900-03-01 9999-12-31 10000-01-01 123456-07-08 5874897-12-31
0001-01-01 infinity -infinity 1582-10-15 1600-02-29 1200-12-31 4000-02-29
""",
    " ",
)
_DATES += ["0001-12-31 BC", "0044-03-15 BC", "4714-11-24 BC", "0401-02-29 BC", "0005-02-29 BC", "0001-01-01 BC"]
_CLOCKS = [
    "00:00",
    "23:59:59.999999",
    "12:34:56",
    "12:34:56.1",
    "12:34:56.120",
    "00:00:00.000001",
    "1:02:03.5",
    "24:00",
]
_TIMESTAMPS = [f"{date} 00:00" for date in _DATES[:8] if "inf" not in date]
_TIMESTAMPS += _split(
    """
infinity;-infinity;2024-01-02 03:04:05.6;1999-12-31 23:59:59.999999;0044-03-15 12:00:00.5 BC;4714-11-24 00:00:00 BC
294276-12-31 23:59:59.999999;10000-01-01 00:00:00.000001;0001-01-01 00:00:00;0001-12-31 23:59:59 BC;1970-01-01 00:00:00
""",
    ";",
)

_INTERVALS = _split(
    """
0;1 year;-1 year;1 mon;-13 mons;14 mons;1 day;-1 day;1 year 2 mons 3 days 04:05:06.789;-1 year -2 mons +3 days -04:05:06.789
-00:00:00.000001;00:00:00.1;-00:00:01;-00:01;-01:00;1 day -00:00:01;-1 day 00:00:01;1000000 hours;-1000000:59:59.999999
178000000 years;-178000000 years;infinity;-infinity;2147483647 days;-2147483648 days;1 mon -1 day;00:00:59.999999
9223372036854775807 microseconds;-9223372036854775808 microseconds;2147483647 mons;-2147483648 mons;100 hours 1 sec
""",
    ";",
)

_IPV6 = _split(
    """
:: ::1 ::2 1:: 1::1 ::1.2.3.4 ::ffff:1.2.3.4 ::ffff:0:1.2.3.4 2001:db8::1 2001:db8:0:1:0:0:0:1 1:0:0:2:0:0:0:3
1:0:0:2:3:0:0:4 1:2:3:4:5:6:7:8 1:2:3:0:5:6:7:8 fe80::1 ::ffff:0:0 0:0:0:0:0:1:2:3 ::1:0 ::ffff ::fffe:1.2.3.4 ::0.0.1.1
ffff:: 1:2:3:4:5:6:0:0 0:1:2:3:4:5:6:7 0:0:2:3:4:5:6:7
""",
    " ",
)

_TSVECTORS = [
    "", "a", "a b c", "'quo''ted' 'back\\\\slash' 'sp ace'", "a:1 b:2A c:3B,4C d:5D,16383", "'é':1 '😀'", "''''''", "'a:1'",
    " ".join(f"w{number}:{number}" for number in range(1, 300)),
]  # fmt: skip
_TSQUERIES = _split(
    """
;a;!a;!!a;a & b;a | b;a & b | c;a & (b | c);(a | b) & (c | d);!(a & b);!(a | b);!a & !b;a <-> b;a <2> b;a <0> b;a <-> b <-> c
a <-> (b <-> c);(a <-> b) <3> c;a <-> (b & c);(a | b) <-> c;!(a <-> b);a <-> !b;!(!a);a:*;a:ABCD;a:*A;'x''y':B
'back\\\\slash';a & b & c & d;a | (b | (c | d));a & (b & c);'sp ace' <16384> b;!a <-> b;(a & b) | (c <-> (d | !e)) & f:*AB
'é':C
""",
    ";",
)

_POINTS = ["(0,0)", "(-0,0)", "(1.5,-2.25)", "(1e300,1e-300)", "(Infinity,NaN)", "(1e15,123456)", "(0.1,1e23)"]

VALUES: dict[str, list[str]] = {
    "bool": ["t", "f"],
    "bytea": ["", "\\x00", "\\xdeadbeef", "\\x" + "ff00" * 3000],
    '"char"': ["", "a", '"', "\\", " ", "\\200", "\\377", "\\001"],
    "name": [text for text in _QUOTED if len(text) < 60],
    "int2": ["0", "-1", "32767", "-32768"],
    "int4": ["0", "-1", "2147483647", "-2147483648"],
    "int8": ["0", "-1", "9223372036854775807", "-9223372036854775808"],
    "int2vector": ["", "1", "1 -2 3"],
    "oidvector": ["", "1", "1 2 4294967295"],
    "oid": ["0", "1", "4294967295"],
    "xid": ["0", "3", "4294967295"],
    "cid": ["0", "4294967295"],
    "xid8": ["0", "18446744073709551615"],
    "tid": ["(0,0)", "(4294967295,65535)", "(7,1)"],
    "float4": [number for number in _FLOATS if number not in {"1e-320"}],
    "float8": [*_FLOATS, *_FLOAT8S],
    "numeric": _NUMERICS,
    "numeric(20,5)": ["0", "1.5", "-123456789.12345", "99999.99999"],
    "text": _QUOTED,
    "varchar": _QUOTED,
    "varchar(3)": ["", "abc", "é"],
    "bpchar": _QUOTED,
    "char(5)": ["", "ab", "abcde", "é"],
    "refcursor": ["", "cursor 1"],
    "json": ["{}", '{"a": [1, 2.50, null,  "x"]}', ' "é\\u0041" '],
    "jsonb": ["{}", '{"b": [1, 2.50, null, "x"], "a": {}}', '"é\\u0041"', "1e400", "[]", "null"],
    "jsonpath": ["$", '$.a[*] ? (@.b > 1 && @.c like_regex "x")', "strict $.**{1 to 3}"],
    "date": _DATES,
    "time": _CLOCKS,
    "time(2)": ["12:34:56.789"],
    "timetz": ["00:00+00", "12:34:56.5+05:30", "12:34:56-03:30", "24:00-15:59:59", "01:00+15:59", "1:2:3+00:00:01"],
    "timestamp": _TIMESTAMPS,
    "timestamp(3)": ["2024-01-02 03:04:05.6789"],
    "timestamptz": [*_TIMESTAMPS, "2024-07-01 12:00+05:30"],
    "interval": _INTERVALS,
    "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "inet": [
        *_IPV6, "0.0.0.0", "1.2.3.4", "1.2.3.4/32", "10.1.2.3/8", "0.0.0.0/0", "2001:db8::1/64", "::/0", "::1/128",
        "::1.2.3.4/96",
    ],
    "cidr": ["0.0.0.0/0", "10/8", "1.2.3.4/32", "192.168.1.0/24", "2001:db8::/32", "::/0", "::1/128", "::ffff:1.2.3.0/120"],
    "macaddr": ["00:00:00:00:00:00", "08:00:2b:01:02:ff"],
    "macaddr8": ["00:00:00:00:00:00:00:00", "08:00:2b:01:02:03:04:ff"],
    "bit": ["0", "1"],
    "bit(9)": ["101010101", "000000001"],
    "varbit": ["", "1", "10101010", "101010101", "0" * 1000],
    "point": _POINTS,
    "line": ["{1,2,3}", "{-1,0,0}", "{0.1,-0.5,1e20}"],
    "lseg": ["[(0,0),(1,1)]", "[(-1.5,1e30),(0.1,-0)]"],
    "box": ["(1,1),(0,0)", "(0,5),(-1.5,1e-7)"],
    "path": ["[(0,0)]", "((0,0))", "[(0,0),(1,1.5)]", "((0,0),(1,1),(2,0))"],
    "polygon": ["((0,0))", "((0,0),(1,1),(2,0.1))"],
    "circle": ["<(0,0),0>", "<(1.5,-1),1e10>", "<(0,0),Infinity>"],
    "tsvector": _TSVECTORS,
    "tsquery": _TSQUERIES,
    "pg_lsn": ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF", "A/0"],
    "txid_snapshot": ["1:1:", "10:20:10,14,15"],
    "pg_snapshot": ["1:1:", "10:20:10,14,15"],
    "int4range": ["empty", "(,)", "[1,5)", "(,5]", "[-1,)"],
    "int8range": ["empty", "[1,9223372036854775807)"],
    "numrange": ["empty", "[1.50,2.0]", "(1,2)", "[NaN,]", "(-Infinity,Infinity]"],
    "tsrange": ["empty", "[2024-01-01,2024-01-02 03:04:05.6)", "(-infinity,infinity)", "[0044-03-15 BC,]"],
    "tstzrange": ["[2024-01-01 00:00+02,)"],
    "daterange": ["[2024-01-01,2024-02-01)", "[0044-03-15 BC,10000-01-01)", "(,infinity]"],
    "int4multirange": ["{}", "{[1,5)}", "{[1,5),[7,9),[20,)}"],
    "int8multirange": ["{(,1),(5,)}"],
    "nummultirange": ["{[1.5,2.50),(3,4]}"],
    "tsmultirange": ["{[2024-01-01,2024-01-02),[2025-01-01 12:00,)}"],
    "tstzmultirange": ["{[2024-01-01 00:00+00,2024-01-02 00:00+00)}"],
    "datemultirange": ["{[2024-01-01,2024-01-03)}"],
    "int4[]": [
        "{}", "{1}", "{1,NULL,-3}", "{{1,2},{3,4}}", "{{{1},{2}},{{3},{NULL}}}", "[0:1]={1,2}", "[-5:-4][2:3]={{1,2},{3,4}}",
        "{{{{{{1,2}}}}}}", "[1:1][0:0]={{7}}", "{NULL}", "[2147483646:2147483646]={1}",
    ],
    "text[]": ["{}", '{"",NULL,"NULL","null","nulL",nullx}', '{{a,"b c"},{"d\\"e","f\\\\g"}}', '[5:6]={"{x}","a,é"}'],
    "int2vector[]": ['{"1 2",3,NULL,""}'],
    "box[]": ["{(1,1),(0,0)}", "{(1,1),(0,0);NULL;(2,2),(1,1)}", "{}"],
    "point[]": ['{"(0,0)",NULL}'],
    "tsvector[]": ["{\"'a b':1\",NULL,x}"],
    "bytea[]": ['{"\\\\x00",NULL}'],
    "timestamptz[]": ['{"2024-01-01 00:00+00",infinity}'],
    "int4range[]": ['{"[1,5)",empty,NULL}'],
    "int4multirange[]": ['{"{[1,5),[7,9)}","{}"}'],
    "jsonb[]": ['{"{\\"a\\": 1}",null}'],
    '"char"[]': ['{a,"",NULL,"\\\\200"}'],
}  # fmt: skip
