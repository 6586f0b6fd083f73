"""Random histories of tables of all kinds, for tests that compare a target with its source."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from psycopg import sql

TABLES = (
    """CREATE TYPE mood AS ENUM ('fine', 'so, so')""",
    """CREATE DOMAIN cents AS int CHECK (VALUE > -1000000)""",
    """CREATE TABLE orders (id int PRIMARY KEY, note text, total numeric, at timestamptz, raw bytea, tags text[], doc jsonb,
       ok boolean, how mood, price cents, span interval, during tstzrange, f float8)""",
    """CREATE SCHEMA "Weird Schema" """,
    """CREATE TABLE "Weird Schema"."Ta""b.le %s" ("v%" varchar(40), k2 int, "Key One" text, big text, js json,
       PRIMARY KEY ("Key One", k2))""",
    """ALTER TABLE "Weird Schema"."Ta""b.le %s" ALTER big SET STORAGE EXTERNAL""",
    """CREATE TABLE bag (a int, b text, j json, f float8, big text)""",
    """ALTER TABLE bag REPLICA IDENTITY FULL, ALTER big SET STORAGE EXTERNAL""",
    """CREATE TABLE fullpk (n int, id bigint PRIMARY KEY, body text)""",
    """ALTER TABLE fullpk REPLICA IDENTITY FULL, ALTER body SET STORAGE EXTERNAL""",
    """CREATE TABLE byindex (code text NOT NULL, region text NOT NULL, n int, body text, PRIMARY KEY (n))""",
    """CREATE UNIQUE INDEX byindex_code ON byindex (region, code)""",
    """ALTER TABLE byindex REPLICA IDENTITY USING INDEX byindex_code, ALTER body SET STORAGE EXTERNAL""",
    """CREATE TABLE numbers (k numeric PRIMARY KEY, v text)""",
)
NAMES = (
    ("public", "orders"), ("Weird Schema", 'Ta"b.le %s'), ("public", "bag"), ("public", "fullpk"),
    ("public", "byindex"), ("public", "numbers"),
)  # fmt: skip

_NASTY = "\\\t\n\r\b\f\x01\x7f'\"%,{}() aé€𝄞.N"


class History:
    """Statements, transaction by transaction. `kinds` counts what was done."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._columns = {"orders": ["note"], "fullpk": ["n"]}
        self._number = 0

    def transactions(self, count: int) -> Iterator[list[str]]:
        """Each is to be run as a whole."""
        yield list(TABLES)
        for _ in range(count):
            if self._chance.random() < 0.12:
                yield [self._alter()]
            statements = [self._change() for _ in range(self._chance.randint(1, 8))]
            if self._chance.random() < 0.1:
                statements = ["SAVEPOINT s", *statements, "ROLLBACK TO s"]
            yield statements
        # Shapes are followed with the next row.
        yield ["INSERT INTO orders (id) VALUES (999)", "INSERT INTO fullpk (id) VALUES (999)"]

    def _text(self) -> str | None:
        kind = self._chance.random()
        if kind < 0.1:
            return None
        if kind < 0.2:
            return ""
        if kind < 0.6:
            return "".join(self._chance.choices(_NASTY, k=self._chance.randint(1, 6)))
        return self._chance.choice(["plain", "\\N", "\\.", "null", "NULL", "{}", "a\\tb"])

    def _long(self) -> str:
        """Long enough for TOAST."""
        return "".join(self._chance.choices(string.ascii_letters + "\\\n", k=3000))

    def _change(self) -> str:
        number = self._chance.random()
        if number < 0.03:
            tables = self._chance.choice(["orders", "bag", "numbers, fullpk", '"Weird Schema"."Ta""b.le %s"'])
            return f"TRUNCATE {tables}"
        table = self._chance.choice([self._orders, self._weird, self._bag, self._full, self._index, self._numbers])
        return table()

    def _quote(self, value: object) -> str:
        if value is None:
            return "NULL"
        return sql.Literal(value).as_string(None)

    def _pick(self) -> int:
        return self._chance.randint(1, 12)

    def _orders(self) -> str:
        key, what = self._pick(), self._chance.random()
        if what < 0.4:
            values = ", ".join([
                str(key), self._quote(self._text()),
                self._chance.choice(["1.50", "'NaN'", "NULL", "'Infinity'", "-0.000001", "12345678901234567890.123"]),
                self._chance.choice(["'infinity'", "'-infinity'", "NULL", "'2026-01-01 10:00.5+02'", "'0044-03-15 BC'"]),
                self._chance.choice(["'\\x00ff'", "'\\x'", "NULL", "'\\x5c0a09'"]),
                self._chance.choice(["ARRAY['a,b', NULL, '\"', '\\']", "'{}'", "NULL", "ARRAY[[E'\\n'], ['NULL']]"]),
                self._chance.choice(["'{\"a\": [1, null, \"\\\\u00e9\\\\n\"]}'", "'null'", "NULL", "'\"\\\\t\"'"]),
                self._chance.choice(["true", "false", "NULL"]), self._chance.choice(["'fine'", "'so, so'", "NULL"]),
                self._chance.choice(["-5", "NULL"]), self._chance.choice(["'1 year -3 days 4:05:06.7'", "NULL"]),
                self._chance.choice(["'[2026-01-01,)'", "'empty'", "NULL"]),
                self._chance.choice(["'NaN'", "'-0'", "0.1", "1e300", "NULL"]),
            ])  # fmt: skip
            columns = "id, total, at, raw, tags, doc, ok, how, price, span, during, f"
            columns = f"id, {self._columns['orders'][0]}, {columns[4:]}"
            return f"INSERT INTO orders ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING"
        if what < 0.7:
            note = self._columns["orders"][0]
            return f"UPDATE orders SET {note} = {self._quote(self._text())}, total = total + 1 WHERE id = {key}"
        if what < 0.85:
            free = f"NOT EXISTS (SELECT FROM orders WHERE id = {key + 100})"
            return f"UPDATE orders SET id = {key + 100} WHERE id = {key} AND {free}"
        return f"DELETE FROM orders WHERE id IN ({key}, {key + 100})"

    def _weird(self) -> str:
        table, what = '"Weird Schema"."Ta""b.le %s"', self._chance.random()
        one, two = self._chance.choice(["x", "\t", "y\\"]), self._chance.randint(1, 3)
        where = f'WHERE "Key One" = {self._quote(one)} AND k2 = {two}'
        if what < 0.35:
            big = self._quote(self._long() if self._chance.random() < 0.7 else self._text())
            values = f"{self._quote(self._text())}, {two}, {self._quote(one)}, {big}, '{{\"a\":  1}}'"
            return f"INSERT INTO {table} VALUES ({values}) ON CONFLICT DO NOTHING"
        if what < 0.65:
            return f'UPDATE {table} SET "v%" = {self._quote(self._text())} {where}'
        if what < 0.85:
            free = f"NOT EXISTS (SELECT FROM {table} WHERE k2 = {two + 10})"
            return f"UPDATE {table} SET k2 = k2 + 10, \"v%\" = 'moved' {where} AND {free}"
        return f"DELETE FROM {table} {where}" if what < 0.95 else f"DELETE FROM {table} WHERE k2 > 10"

    def _bag(self) -> str:
        a, what = self._chance.randint(1, 3), self._chance.random()
        if what < 0.5:
            big = self._quote(self._chance.choice(["x", None, self._long()]))
            row = f"{a}, {self._quote(self._chance.choice(['x', None, '']))}, '{{\"k\":1 }}', 'NaN', {big}"
            copies = self._chance.randint(1, 3)
            return f"INSERT INTO bag SELECT {row} FROM generate_series(1, {copies})"
        some = f"ctid = (SELECT ctid FROM bag WHERE a = {a} LIMIT 1)"
        if what < 0.8:
            return f"UPDATE bag SET b = {self._quote(self._text())} WHERE {some}"
        return f"DELETE FROM bag WHERE {some}"

    def _full(self) -> str:
        key, what, n = self._pick(), self._chance.random(), self._columns["fullpk"][0]
        if what < 0.4:
            values = f"1, {key}, {self._quote(self._long())}"
            return f"INSERT INTO fullpk ({n}, id, body) VALUES ({values}) ON CONFLICT DO NOTHING"
        if what < 0.7:
            return f"UPDATE fullpk SET {n} = {n} + 1 WHERE id = {key}"
        if what < 0.85:
            free = f"NOT EXISTS (SELECT FROM fullpk WHERE id = {key + 100})"
            return f"UPDATE fullpk SET id = id + 100 WHERE id = {key} AND {free}"
        return f"DELETE FROM fullpk WHERE id IN ({key}, {key + 100})"

    def _index(self) -> str:
        key, what = self._pick(), self._chance.random()
        if what < 0.4:
            self._number += 1
            values = f"'c{key}', 'r', {self._number}, {self._quote(self._long())}"
            return f"INSERT INTO byindex (code, region, n, body) VALUES ({values}) ON CONFLICT DO NOTHING"
        if what < 0.6:
            self._number += 1
            return f"UPDATE byindex SET n = {self._number} WHERE code = 'c{key}'"
        if what < 0.8:
            return (
                f"UPDATE byindex SET code = 'm' || code WHERE code = 'c{key}' "
                f"AND NOT EXISTS (SELECT FROM byindex WHERE code = 'mc{key}')"
            )
        return f"DELETE FROM byindex WHERE code IN ('c{key}', 'mc{key}')"

    def _numbers(self) -> str:
        key, what = self._chance.choice(["1.0", "1.00", "2", "2.000", "'NaN'"]), self._chance.random()
        if what < 0.4:
            return f"INSERT INTO numbers VALUES ({key}, {self._quote(self._text())}) ON CONFLICT DO NOTHING"
        if what < 0.7:
            return f"UPDATE numbers SET k = {key}, v = 'same' WHERE k = {key}"
        return f"DELETE FROM numbers WHERE k = {key}"

    def _alter(self) -> str:
        self._number += 1
        table = self._chance.choice(["orders", "fullpk"])
        column = self._columns[table][0]
        what = self._chance.random()
        if what < 0.35:
            return f"ALTER TABLE {table} ADD COLUMN more{self._number} int"
        if what < 0.7:
            self._columns[table][0] = f"{table}_{self._number}"
            return f"ALTER TABLE {table} RENAME COLUMN {column} TO {table}_{self._number}"
        if table == "fullpk":
            kind = self._chance.choice(["bigint", "numeric", "int"])
            return f"ALTER TABLE fullpk ALTER COLUMN {column} TYPE {kind}"
        return "ALTER TABLE orders ALTER COLUMN price TYPE int"
