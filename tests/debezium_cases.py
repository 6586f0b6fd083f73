"""What Debezium and pgcdc are both shown: every type, every operation. Compared in test_envelopes.py."""

from __future__ import annotations

import nested_type_cases
import type_cases

__all__ = ["CHANGES", "PUBLICATION", "SETUP", "TYPES"]

PUBLICATION = "p"
_CASES = [*type_cases.CASES, *nested_type_cases.CASES]

# The embedded server has no contrib: Debezium knows these types by their names, and their text is what the real ones write.
_LIKE_TEXT = """
CREATE TYPE {0};
CREATE FUNCTION {0}in(cstring) RETURNS {0} AS 'textin' LANGUAGE internal IMMUTABLE STRICT;
CREATE FUNCTION {0}out({0}) RETURNS cstring AS 'textout' LANGUAGE internal IMMUTABLE STRICT;
CREATE TYPE {0} (INPUT = {0}in, OUTPUT = {0}out, INTERNALLENGTH = VARIABLE, STORAGE = extended)"""
_MORE: dict[str, tuple[str, ...]] = {
    "hstore": ("''", '\'"a"=>"1"\'', r"""'"a"=>"NULL", "b"=>NULL, "c\"d"=>"e\\f, \"g\"=>h"'"""),
    "ltree": ("'Top.Science'",),
    "time(3)": ("'12:34:56.789'", "'00:00:00'"),
    "time(0)": ("'23:59:59'",),
    "timestamp(3)": ("'2024-02-29 12:34:56.789'", "'1969-12-31 23:59:59.999'", "'infinity'"),
    "timestamptz(3)": ("'2024-02-29 12:34:56.789+00'", "'2024-02-29 12:34:56+00'"),
    "timestamptz(0)": ("'2024-02-29 12:34:56+00'",),
    "timetz(3)": ("'12:34:56.789+02'",),
    "interval(3)": ("'1 day 00:00:01.5'",),
    "bit": ("'1'", "'0'"),
    "bit(8)": ("'10000001'", "'00000000'"),
    "bit(70)": ("(SELECT repeat('10', 35)::bit(70))",),
    "varbit(1)": ("'1'", "''"),
    "varbit(20)": ("'101'", "'10000000000000000001'"),
    "numeric(5,0)": ("'12345'", "'-1'", "'128'", "'-128'", "'-129'", "'255'", "'256'"),
    "numeric(1000,100)": ("'" + "9" * 300 + ".5'", "'-" + "7" * 41 + "'"),
    "numeric(39,0)": ("'170141183460469231731687303715884105728'", "'-170141183460469231731687303715884105728'"),
    'text COLLATE "C"': ("'\u2028 \"quoted\" back\\slash / \u0001\u001f\u007f'",),
    "time[]": ("'{12:34:56,NULL}'",),
    "timetz[]": ("'{12:34:56+02}'",),
    "money[]": ("'{1.5}'",),
    "numeric[]": ("'{1.50,-2,NULL}'",),
    "oid[]": ("'{1,4294967295}'",),
    "name[]": ("'{a}'",),
    "char(3)[]": ("'{a,NULL}'",),
    "macaddr[]": ("'{08:00:2b:01:02:03}'",),
    "bit(3)[]": ("'{101}'",),
    "xml[]": ("ARRAY['<a/>'::text::xml]",),
}
TYPES: dict[str, list[str]] = {}
"""From a type to SQL literals of it."""
for _case in _CASES:
    _literals = TYPES.setdefault(_case.pg_type, [])
    if _case.sql_literal not in _literals:
        _literals.append(_case.sql_literal)
for _type, _more in _MORE.items():
    TYPES.setdefault(_type, []).extend(_more)


def _numbers(expression: str) -> str:
    return f"(SELECT array_agg({expression}) FROM generate_series(1, 3000) n)"


_MANY = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n)"

_LONG = {
    "body": ("text", _MANY), "data": ("bytea", f"{_MANY}::bytea"), "doc": ("jsonb", f"jsonb_build_object('a', {_MANY})"),
    "words": ("text[]", f"ARRAY[{_MANY}, 'x']"), "numbers": ("int4[]", _numbers("n")), "big": ("int8[]", _numbers("n")),
    "amount": ("numeric", "('1.' || repeat('1234567890', 400))::numeric"),
    "price": ("numeric(1000,900)", "('1.' || repeat('1234567890', 90))::numeric"),
    "amounts": ("numeric[]", _numbers("n")), "prices": ("numeric(10,2)[]", _numbers("n::numeric(10,2)")),
    "ratios": ("float8[]", _numbers("n")), "flags": ("bool[]", _numbers("n > 7")),
    "days": ("date[]", _numbers("'2024-01-01'::date + n")),
    "moments": ("timestamptz[]", _numbers("'2024-01-01'::timestamptz")), "ids": ("uuid[]", _numbers("md5(n::text)::uuid")),
    "pieces": ("bytea[]", _numbers("'\\x00ff'::bytea")), "docs": ("jsonb[]", _numbers("'{}'::jsonb")),
    "tags": ("hstore", f"('\"a\"=>\"' || {_MANY} || '\"')::hstore"), "path": ("ltree", f"{_MANY}::ltree"),
    "bits": ("varbit", "repeat('10', 9000)::varbit"), "search": ("tsvector", f"array_to_tsvector({_numbers('n::text')})"),
    "page": ("xml", f"('<a>' || {_MANY} || '</a>')::xml"), "place": ("vector", f"{_numbers('n::float4')}::vector"),
    "network": ("inet[]", _numbers("'10.0.0.1'::inet")), "shape": ("polygon", "(repeat('(0,0),', 500) || '(1,1)')::polygon"),
}  # fmt: skip
"""What is stored out of line: an update that leaves it alone does not send it."""

SETUP = [
    *dict.fromkeys(case.setup for case in _CASES if case.setup),
    *(_LIKE_TEXT.format(name) for name in ("hstore", "ltree")),
    'CREATE SCHEMA "Odd schema"',
    "CREATE TABLE first (id int PRIMARY KEY, name text, at timestamptz)",
    "INSERT INTO first VALUES (1, 'one', '2024-01-01 00:00+00'), (2, NULL, NULL), (3, 'three', '2024-01-02 00:00+00')",
    "CREATE TABLE keyed (id int PRIMARY KEY, name text, price numeric(10,2), n int NOT NULL)",
    "CREATE TABLE whole (id int PRIMARY KEY, name text, price numeric(10,2), n int NOT NULL)",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "CREATE TABLE indexed (id int PRIMARY KEY, code text NOT NULL, n int)",
    "CREATE UNIQUE INDEX by_code ON indexed (code)",
    "ALTER TABLE indexed REPLICA IDENTITY USING INDEX by_code",
    "CREATE TABLE keyless (a int, b text)",
    'CREATE TABLE pairs (v text, b int, "A" text, PRIMARY KEY ("A", b))',
    'CREATE TABLE "Odd schema"."Odd name" ("Id" bigint PRIMARY KEY, "a ""b""" text)',
    f"CREATE TABLE long (id int PRIMARY KEY, n int, {', '.join(f'{name} {kind}' for name, (kind, _) in _LONG.items())})",
    *(f"ALTER TABLE long ALTER {name} SET STORAGE EXTERNAL" for name in _LONG),
    *(
        f"CREATE TABLE t_{number} (id int PRIMARY KEY, v {one}, w {one} NOT NULL)"
        for number, one in enumerate(TYPES)
    ),
    f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES",
]  # fmt: skip


def _typed() -> list[str]:
    """Every value, a NULL, and a delete, which sends nothing but the key."""
    found = []
    for number, literals in enumerate(TYPES.values()):
        rows = [f"({index}, {one}, {literals[0]})" for index, one in enumerate(literals)]
        rows.append(f"({len(rows)}, NULL, {literals[0]})")
        found += [f"INSERT INTO t_{number} VALUES {', '.join(rows)}", f"DELETE FROM t_{number} WHERE id = 0"]
    return found


CHANGES = [
    *(
        statement.format(table)
        for table in ("keyed", "whole")
        for statement in (
            "INSERT INTO {} VALUES (1, 'one', 1.50, 1), (2, NULL, NULL, 2), (3, 'three', -3, 3)",
            "UPDATE {} SET name = 'uno', price = NULL WHERE id = 1",
            "UPDATE {} SET id = 10 WHERE id = 1",
            "UPDATE {} SET id = 20, name = 'two' WHERE id = 2",
            "DELETE FROM {} WHERE id = 10",
            "TRUNCATE {}",
        )
    ),
    "INSERT INTO indexed VALUES (1, 'a', 1)", "UPDATE indexed SET n = 2", "UPDATE indexed SET code = 'b'",
    "DELETE FROM indexed",
    "INSERT INTO keyless VALUES (1, 'x')",
    "INSERT INTO pairs VALUES ('x', 1, 'one')", "DELETE FROM pairs",
    'INSERT INTO "Odd schema"."Odd name" VALUES (9223372036854775807, \'q"\')',
    "BEGIN", "INSERT INTO keyed VALUES (5, 'five', 5, 5)", "INSERT INTO whole VALUES (5, 'five', 5, 5)",
    "SELECT pg_logical_emit_message(true, 'audit', 'inside')", "UPDATE keyed SET n = 6 WHERE id = 5",
    "DELETE FROM whole WHERE id = 5", "COMMIT",
    "SELECT pg_logical_emit_message(false, 'audit', 'outside')",
    f"INSERT INTO long VALUES (1, 1, {', '.join(value for _, value in _LONG.values())})",
    "UPDATE long SET n = 2",
    "UPDATE long SET n = 3, body = 'short'",
    *_typed(),
]  # fmt: skip
"""Each in a transaction of its own, but for BEGIN and COMMIT. The last one is the sign that all was seen."""
