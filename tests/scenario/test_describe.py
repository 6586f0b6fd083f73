"""`pgcdc describe` and `pgcdc.describe`: a table as Spark will see it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from databases import Database
from typer.testing import CliRunner

import pgcdc
from pgcdc.cli.main import app
from pgcdc.postgres.database import connect
from pgcdc.source.postgres.setup.tables import TableColumn
from pgcdc.source.postgres.single_table import read_table_columns

_TABLES = """
CREATE SCHEMA sales;
CREATE DOMAIN price AS numeric(10,3);
CREATE TABLE sales."Orders" (
    id bigint, line int, gone int, total price NOT NULL, rate numeric, doc jsonb, at timestamptz, tags text[][],
    doubled numeric(12,3) GENERATED ALWAYS AS (total * 2) STORED,
    later int GENERATED ALWAYS AS (line + 1) VIRTUAL,
    PRIMARY KEY (id, line) INCLUDE (at));
ALTER TABLE sales."Orders" DROP COLUMN gone;
CREATE TABLE indexed (a int NOT NULL, b int NOT NULL, c int PRIMARY KEY);
CREATE UNIQUE INDEX by_ab ON indexed (a) INCLUDE (b);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX by_ab;
CREATE TABLE whole (a int, b int PRIMARY KEY);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE bare (a int);
CREATE TABLE deferred (a int PRIMARY KEY DEFERRABLE);
CREATE TABLE nothing_identified (a int PRIMARY KEY);
ALTER TABLE nothing_identified REPLICA IDENTITY NOTHING;
CREATE VIEW a_view AS SELECT 1;
"""


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["describe", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_columns_with_their_types_keys_and_rules(database: Database) -> None:
    database.execute(_TABLES)
    found = pgcdc.describe(database.url, 'sales."Orders"')
    rows = [(one.column, one.pg_type, one.nullable, one.key, one.exactness, one.rule) for one in found]
    assert [row for row in rows if row[0] != "tags"] == [
        ("id", "bigint", False, "primary", "exact", ""),
        ("line", "integer", False, "primary", "exact", ""),
        ("total", "price", False, "", "exact", ""),
        ("rate", "numeric", True, "", "text", "no precision is declared"),
        ("doc", "jsonb", True, "", "text", ""),
        ("at", "timestamp with time zone", True, "", "exact", ""),
        ("doubled", "numeric(12,3)", True, "", "exact", "in the stream only with --generated-columns"),
        ("later", "integer", True, "", "exact", "virtual: never in the stream"),
    ]
    assert {one.column: one.spark_type for one in found if one.column != "tags"} == {
        "id": "bigint", "line": "int", "total": "decimal(10,3)", "rate": "string", "doc": "string", "at": "timestamp",
        "doubled": "decimal(12,3)", "later": "int",
    }  # fmt: skip
    options = {"json": "variant", "numeric": "double", "out_of_range": "string", "arrays": "string"}
    other = {one.column: one.spark_type for one in pgcdc.describe(database.url, 'sales."Orders"', **options)}
    assert (other["total"], other["rate"], other["doc"], other["at"]) == ("double", "double", "variant", "string")


def test_live_columns_and_which_of_them_identify_a_row(database: Database) -> None:
    database.execute(_TABLES)
    with connect(database.url) as conn:
        keys = {
            table: [(one.name, one.is_key, one.is_primary_key) for one in read_table_columns(conn, table)]
            for table in ("indexed", "whole", "bare", "deferred", "nothing_identified")
        }
        columns = {one.name: one for one in read_table_columns(conn, 'sales."Orders"')}
    assert keys == {
        "indexed": [("a", True, False), ("b", False, False), ("c", False, True)],
        "whole": [("a", True, False), ("b", True, True)],
        "bare": [("a", False, False)],
        "deferred": [("a", False, True)],
        "nothing_identified": [("a", False, True)],
    }
    assert replace(columns["line"], since="") == TableColumn(
        "line", 23, -1, 0, 2, "integer", True, True, 1, False, "", True
    )
    assert (columns["tags"].ndims, columns["total"].number, columns["doubled"].generated) == (2, 4, "s")
    assert (columns["at"].is_key, columns["at"].is_primary_key) == (False, False)


def test_output_for_machines_and_for_programs_that_read_on(database: Database) -> None:
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY, doc json)")
    code, out, _ = run("--db", database.url, "--table", "orders", "--format", "json", "--json", "variant")
    assert code == 0
    assert json.loads(out)[0] == {
        "column": "id", "pg_type": "bigint", "spark_type": "bigint", "nullable": False, "key": "primary",
        "exactness": "exact", "rule": "",
    }  # fmt: skip
    assert json.loads(out)[1]["spark_type"] == "variant"
    code, out, _ = run("--db", database.url, "--table", "orders")
    assert (code, out.splitlines()) == (
        0,
        [
            "column\tpg_type\tspark_type\tnullable\tkey\texactness\trule",
            "id\tbigint\tbigint\tno\tprimary\texact\t",
            "doc\tjson\tstring\tyes\t\ttext\t",
        ],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "orderz"], "error: table orderz does not exist. Did you mean orders?"),
        (["--table", "elsewhere.orders"], "error: table elsewhere.orders does not exist. Did you mean orders?"),
        (["--table", "nothing.like_it"], "error: table nothing.like_it does not exist. Check --table: write table or"),
        (["--table", "seen"], "error: seen is a view, so its changes cannot be captured. Remove it from --table"),
        (["--table", "a b"], "error: 'a b' is not a table name."),
        ([], "error: no table is named. Use --table NAME"),
        (["--table", "orders", "--format", "xml"], "error: unknown --format xml. Use table or json"),
        (["--table", "orders", "--numeric", "int"], "error: numeric=int is not a valid choice. Use one of decimal"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(database: Database, arguments: list[str], message: str) -> None:
    database.execute("CREATE TABLE orders (id bigint)")
    database.execute("CREATE VIEW seen AS SELECT 1")
    code, out, err = run("--db", database.url, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
