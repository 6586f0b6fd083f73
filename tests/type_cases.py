"""Values of every type: what SQL writes, and what Spark gets.

Every line of docs/types.md has at least one case here (or, for types that hold others, in nested_type_cases.py), and each
is sent through a real stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from pgcdc.postgres.types.column import Rejected, TypeOptions

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One value of one type."""

    pg_type: str
    """As in CREATE TABLE: `numeric(12,2)`."""
    sql_literal: str
    """An SQL expression for the value: `'1.5'`, or `NULL`."""
    spark_type: str
    """Spark's simpleString: `decimal(12,2)`."""
    expected: Any
    """The Python value, as pyarrow's to_pylist gives it; or an exception type (Rejected), if the value is refused."""
    options: TypeOptions = TypeOptions()  # noqa: RUF009 - frozen
    line: str = ""
    """The first cell of the line in docs/types.md that this is a case of (backticks are left out); empty: `pg_type`."""
    setup: str = ""
    """SQL that makes the type, if the database does not have it: run once per distinct text, before the tables."""


NAN, INFINITY = float("nan"), float("inf")
FIRST, LAST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)  # of a clamped timestamptz
_DOUBLE, _NUMERIC_TEXT = TypeOptions(numeric="double"), TypeOptions(numeric="string")
_VARIANT = TypeOptions(json="variant")
_CLAMP, _TIME_TEXT = TypeOptions(out_of_range="clamp"), TypeOptions(out_of_range="string")

# The embedded server has no libxml, so that only a cast that looks at nothing makes a value.
_XML = "UPDATE pg_cast SET castmethod = 'b', castfunc = 0 WHERE castsource = 'text'::regtype AND casttarget = 'xml'::regtype"
_CITEXT = """
CREATE TYPE citext;
CREATE FUNCTION citextin(cstring) RETURNS citext AS 'textin' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION citextout(citext) RETURNS cstring AS 'textout' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION citextsend(citext) RETURNS bytea AS 'textsend' LANGUAGE internal STABLE STRICT;
CREATE TYPE citext (INPUT = citextin, OUTPUT = citextout, SEND = citextsend, INTERNALLENGTH = VARIABLE)"""
_OTHER = """
CREATE TYPE ticket;
CREATE FUNCTION ticketin(cstring) RETURNS ticket AS 'uuid_in' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION ticketout(ticket) RETURNS cstring AS 'uuid_out' LANGUAGE internal IMMUTABLE STRICT;
CREATE TYPE ticket (INPUT = ticketin, OUTPUT = ticketout, INTERNALLENGTH = 16)"""


def _group(
    line: str, pg_type: str, spark_type: str, values: dict[str, Any], setup: str = "", **more: Any
) -> list[Case]:
    """Cases of one line: SQL literals and what becomes of them."""
    return [
        Case(pg_type, f"'{literal}'", spark_type, value, line=line, setup=setup, **more)
        for literal, value in values.items()
    ]


def _texts(line: str, pg_type: str, *literals: str, setup: str = "", **more: Any) -> list[Case]:
    """Cases of what stays as it was written."""
    return _group(line, pg_type, "string", {literal: literal for literal in literals}, setup, **more)


def _moment(text: str, zone: Any = None) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone)


_DAYS = {
    "2024-02-29": date(2024, 2, 29),
    "0001-01-01": date.min,
    "9999-12-31": date.max,
    "1582-10-10": date(1582, 10, 10),
}
_MOMENTS = ("2024-02-29 12:34:56", "2024-02-29 12:34:56.1", "1969-12-31 23:59:59.999999", "0001-01-01 00:00:00",
            "9999-12-31 23:59:59.999999")  # fmt: skip
_OUTSIDE = ("infinity", "-infinity", "0044-03-15 BC", "10000-01-01")
_TOO_LONG = "9" * 39

CASES: list[Case] = [
    *_group("boolean", "boolean", "boolean", {"t": True, "f": False}),
    *_group("smallint", "smallint", "smallint", {"-32768": -32768, "32767": 32767}),
    *_group("integer", "integer", "int", {"-2147483648": -(2**31), "2147483647": 2**31 - 1}),
    *_group("bigint", "bigint", "bigint", {"-9223372036854775808": -(2**63), "9223372036854775807": 2**63 - 1}),
    *_group("oid", "oid", "bigint", {"0": 0, "4294967295": 2**32 - 1}),
    *_group("xid", "xid", "bigint", {"4294967295": 2**32 - 1}),
    *_group("cid", "cid", "bigint", {"4294967295": 2**32 - 1}),
    *_group("real", "real", "float", {
        "1.5": 1.5, "0.1": 0.10000000149011612, "1.4e-45": 1.401298464324817e-45, "3.4028235e38": 3.4028234663852886e38,
        "NaN": NAN, "-Infinity": -INFINITY}),
    *_group("double precision", "double precision", "double", {
        "0.1": 0.1, "-0": -0.0, "5e-324": 5e-324, "1.7976931348623157e308": 1.7976931348623157e308,
        "0.30000000000000004": 0.1 + 0.2, "NaN": NAN, "Infinity": INFINITY}),
    *_group("numeric(p,s)", "numeric(12,2)", "decimal(12,2)", {
        "1.5": Decimal("1.50"), "-9999999999.99": Decimal("-9999999999.99"), "0": Decimal("0.00"), "NaN": Rejected}),
    *_group("numeric(p,s)", "numeric(38,10)", "decimal(38,10)", {
        "1234567890123456789012345678.0123456789": Decimal("1234567890123456789012345678.0123456789")}),
    *_group("numeric(p,s)", "numeric(3,-2)", "decimal(5,0)", {"12345": Decimal(12300), "-99900": Decimal(-99900)}),
    *_group("numeric(p,s)", "numeric(2,4)", "decimal(4,4)", {"0.0099": Decimal("0.0099"), "-0.001": Decimal("-0.0010")}),
    *_texts("numeric(p,s), more than 38 digits", "numeric(40,1)", _TOO_LONG + ".5", "NaN"),
    *_texts("numeric(p,s), more than 38 digits", "numeric(30,-9)", "1" + "0" * 38),
    *_texts("numeric", "numeric", "1.50", "0.000", "-" + _TOO_LONG + ".001", "NaN", "Infinity", "-Infinity"),
    *_group("money", "money", "string", {"1234.5": "$1,234.50", "-0.01": "-$0.01"}),
    *_texts("text", "text", "", " é €😀\n\t", "NULL", "\\x00"),
    *_texts("varchar(n)", "varchar(5)", "a b ", ""),
    *_group("char(n)", "char(5)", "string", {"ab": "ab   ", "": "     ", "é": "é    "}),
    *_texts("name", "name", "Odd name"),
    *_group('"char"', '"char"', "string", {"x": "x", "": "", "\\351": "\\351"}),
    *_texts("citext", "citext", "Cased", setup=_CITEXT),
    Case("xml", "'<a b=\"1\">é</a>'::text::xml", "string", '<a b="1">é</a>', line="xml", setup=_XML),
    *_texts("enum", "mood", "ok", "sad, very", "", setup="CREATE TYPE mood AS ENUM ('ok', 'sad, very', '')"),
    *_group("uuid", "uuid", "string", {
        "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}),
    *_group("bytea", "bytea", "binary", {"\\x": b"", "\\x00ff5c78": b"\0\xff\\x", "\\x5c": b"\\"}),
    *_group("date", "date", "date", {**_DAYS, **dict.fromkeys(_OUTSIDE, Rejected)}),
    *_group("timestamp", "timestamp", "timestamp_ntz", {
        **{text: _moment(text) for text in _MOMENTS}, **dict.fromkeys(_OUTSIDE, Rejected)}),
    *_group("timestamp", "timestamp(0)", "timestamp_ntz", {"2024-01-01 00:00:00.6": datetime(2024, 1, 1, 0, 0, 1)}),
    *_group("timestamptz", "timestamptz", "timestamp", {
        **{f"{text}+00": _moment(text, UTC) for text in _MOMENTS},
        "2024-07-01 02:00:00.25+05:30": datetime(2024, 6, 30, 20, 30, 0, 250000, UTC), **dict.fromkeys(_OUTSIDE, Rejected)}),
    *_texts("time", "time", "00:00:00", "12:34:56.000001", "24:00:00"),
    *_texts("timetz", "timetz", "12:34:56.5+05:30", "24:00:00-15:59:59"),
    *_texts("json", "json", '{"b": 1.50, "a":  [1e400, null], "b": "\\u0000"}', "null"),
    *_group("jsonb", "jsonb", "string", {'{"b":1.50,"a":[null],"b":"2"}': '{"a": [null], "b": "2"}', "1e3": "1000"}),
    *_texts("jsonpath", "jsonpath", '$."a"[*]?(@ > 5)'),
    *_texts("inet", "inet", "192.168.0.1", "192.168.0.1/24", "::1"),
    *_texts("cidr", "cidr", "192.168.0.0/24"),
    *_texts("macaddr", "macaddr", "08:00:2b:01:02:03"),
    *_texts("macaddr8", "macaddr8", "08:00:2b:01:02:03:04:05"),
    *_texts("bit(n)", "bit(3)", "101"),
    *_texts("varbit", "varbit", "10110", ""),
    *_group("tsvector", "tsvector", "string", {"fat:3A cat:1,2": "\'cat\':1,2 \'fat\':3A"}),
    *_group("tsquery", "tsquery", "string", {"fat & !cat:*": "\'fat\' & !\'cat\':*"}),
    *_texts("pg_lsn", "pg_lsn", "16/B374D848"),
    *_texts("xid8", "xid8", "18446744073709551615"),
    *_texts("tid", "tid", "(4294967295,65535)"),
    *_texts("pg_snapshot", "pg_snapshot", "10:20:10,14,15"),
    *_texts("txid_snapshot", "txid_snapshot", "10:20:10,14,15"),
    *_texts("refcursor", "refcursor", "some cursor"),
    *_texts("aclitem", "aclitem", "postgres=r/postgres"),
    *_texts("regclass", "regclass", "pg_class"),
    *_texts("regcollation", "regcollation", '"C"'),
    *_texts("regconfig", "regconfig", "english"),
    *_texts("regdictionary", "regdictionary", "simple"),
    *_texts("regnamespace", "regnamespace", "public"),
    *_texts("regoper", "regoper", "||/"),
    *_texts("regoperator", "regoperator", "+(integer,integer)"),
    *_texts("regproc", "regproc", "now"),
    *_texts("regprocedure", "regprocedure", "abs(integer)"),
    *_texts("regrole", "regrole", "pg_monitor"),
    *_texts("regtype", "regtype", "integer[]"),
    *_texts("sparsevec", "sparsevec", "{1:1.5,3:2}/5", setup="CREATE EXTENSION vector"),
    *_group("domain", "price", "decimal(10,3)", {"1.5": Decimal("1.500"), "NaN": Rejected},
            setup="CREATE DOMAIN price AS numeric(10,3)"),
    *_group("domain", "cheap", "decimal(6,1)", {"1.5": Decimal("1.5")},
            setup="CREATE DOMAIN low AS numeric(6,1); CREATE DOMAIN cheap AS low CHECK (VALUE < 10)"),
    *_group("domain", "day", "date", {"2024-02-29": date(2024, 2, 29)}, setup="CREATE DOMAIN day AS date"),
    *_texts("any other type", "ticket", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", setup=_OTHER),
    *_group("numeric=decimal", "numeric(5,1)", "decimal(5,1)", {"1.5": Decimal("1.5"), "NaN": Rejected}),
    *_texts("numeric=string", "numeric(12,2)", "1.50", "NaN", options=_NUMERIC_TEXT),
    *_texts("numeric=string", "numeric", "1.500", options=_NUMERIC_TEXT),
    *_group("numeric=double", "numeric(12,2)", "double", {"1.5": 1.5, "NaN": NAN}, options=_DOUBLE),
    *_group("numeric=double", "numeric", "double", {
        "0.1": 0.1, "1e-400": 0.0, "9007199254740993": 9007199254740992.0, "Infinity": INFINITY, "-Infinity": -INFINITY,
        "1.7976931348623157e308": 1.7976931348623157e308, "1e309": Rejected, "-1e309": Rejected}, options=_DOUBLE),
    *_texts("json=string", "jsonb", "[1, 2]"),
    *_group("json=variant", "json", "variant", {
        '{"b": 1.50, "a": [1, null, true, "é"], "b": -2.5}': {"a": [1, None, True, "é"], "b": Decimal("-2.5")},
        "null": None, '"x"': "x", "1e3": 1000.0, "5e-324": 5e-324, "[1e-7]": [1e-7],
        "12345678901234567890": Decimal("12345678901234567890"),
        "9007199254740993": 9007199254740993, "1e400": Rejected, "0.1234567890123456789e1": Rejected,
        '["\\ud800"]': Rejected, f"[{_TOO_LONG}]": Rejected, '"1e400"': "1e400"}, options=_VARIANT),
    *_group("json=variant", "jsonb", "variant", {
        '{"a": {"b": []}}': {"a": {"b": []}}, "1e300": 1e300, "1e400": Rejected, "0.10": Decimal("0.10")}, options=_VARIANT),
    *_group("out_of_range=error", "date", "date", {"9999-12-31": date.max, "infinity": Rejected}),
    *_group("out_of_range=clamp", "date", "date", {
        **_DAYS, "infinity": date.max, "-infinity": date.min, "0044-03-15 BC": date.min, "10000-01-01": date.max,
        "4713-01-01 BC": date.min, "5874897-12-31": date.max}, options=_CLAMP),
    *_group("out_of_range=clamp", "timestamp", "timestamp_ntz", {
        "infinity": datetime.max, "-infinity": datetime.min, "0044-03-15 12:00:00.5 BC": datetime.min,
        "294276-12-31 23:59:59": datetime.max, "2024-01-01": datetime(2024, 1, 1)}, options=_CLAMP),
    *_group("out_of_range=clamp", "timestamptz", "timestamp", {
        "infinity": LAST, "0044-03-15 12:00 BC": FIRST, "10000-01-01 01:00+00": LAST,
        "10000-01-01 01:00+02": datetime(9999, 12, 31, 23, tzinfo=UTC),
        }, options=_CLAMP),
    *_texts("out_of_range=string", "date", "2024-02-29", "infinity", "0044-03-15 BC", "10000-01-01", options=_TIME_TEXT),
    *_texts("out_of_range=string", "timestamp", "2024-02-29 12:34:56.5", "-infinity", options=_TIME_TEXT),
    *_texts("out_of_range=string", "timestamptz", "2024-02-29 12:34:56+00", "0044-03-15 00:00:00+00 BC", options=_TIME_TEXT),
]  # fmt: skip
