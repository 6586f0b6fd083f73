"""Tables as the catalog describes them, and as the stream does: the same, so that rows of both are alike."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
import pytest
from databases import Database

from pgcdc.core.relation import Relation
from pgcdc.postgres.database import connect
from pgcdc.source.postgres.setup.slots import create_slot
from pgcdc.source.postgres.setup.tables import PublishedTable, read_published
from pgcdc.source.postgres.snapshot.asking import note_tables
from pgcdc.source.postgres.snapshot.requests import RequestQueue
from pgcdc.source.postgres.wire.stream import open_capture

TABLES = {
    "a primary key": ("CREATE TABLE t (b text, a int PRIMARY KEY)", "t"),
    "a key of two columns in another order": ("CREATE TABLE t (a int, x int, b text, PRIMARY KEY (b, a))", "t"),
    "no key": ("CREATE TABLE t (a int, b text)", "t"),
    "a full identity": ("CREATE TABLE t (a int PRIMARY KEY, b text); ALTER TABLE t REPLICA IDENTITY FULL", "t"),
    "an identity index": (
        "CREATE TABLE t (a int, b text NOT NULL UNIQUE); ALTER TABLE t REPLICA IDENTITY USING INDEX t_b_key",
        "t",
    ),
    "no identity": ("CREATE TABLE t (a int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY NOTHING", "t"),
    "a deferrable key": ("CREATE TABLE t (a int PRIMARY KEY DEFERRABLE, b int)", "t"),
    "an index with more columns": ("CREATE TABLE t (a int, b int, PRIMARY KEY (a) INCLUDE (b))", "t"),
    "dropped columns": ("CREATE TABLE t (x int, a int PRIMARY KEY, y int, b text); ALTER TABLE t DROP x, DROP y", "t"),
    "modifiers": ("CREATE TABLE t (a char(3) PRIMARY KEY, b numeric(10, 2), c varchar(7)[], d timestamp(3))", "t"),
    "types of its own": (
        "CREATE TYPE m AS ENUM ('x'); CREATE DOMAIN d AS int; CREATE TYPE c AS (p int);"
        "CREATE TABLE t (a d PRIMARY KEY, b m, c c, e m[])",
        "t",
    ),
    "a generated column": ("CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)", "t"),
    "some columns": ("CREATE TABLE t (a int PRIMARY KEY, b text, c int)", "t (c, a)"),
    "odd names": ('CREATE SCHEMA "S x"; CREATE TABLE "S x"."T""y" ("A b" int PRIMARY KEY, "ü" int)', '"S x"."T""y"'),
    "leaves": (
        "CREATE TABLE t (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "t",
    ),
    "a root": (
        "CREATE TABLE t (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);"
        "CREATE TABLE t1 (b text, a int PRIMARY KEY);"
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (0) TO (10)",
        "t WITH (publish_via_partition_root)",
    ),
}


KEYS: dict[str, tuple[str, ...]] = {
    "a primary key": ("a",),
    "a key of two columns in another order": ("b", "a"),
    "no key": (),
    "a full identity": ("a",),
    "an identity index": ("b",),
    "no identity": (),
    "a deferrable key": (),
    "an index with more columns": ("a",),
}


def of_stream(database: Database, slot: str, publications: Sequence[str]) -> list[Relation]:
    with open_capture(database.url, slot=slot, publication=publications) as capture:
        while (batch := capture.receive_batch(timeout_s=10)) is not None:
            if batch.rows:
                return [batch.relations[one] for one in batch.data.column("relation").unique().to_pylist()]
    raise AssertionError("no rows")


@pytest.mark.parametrize("what", list(TABLES))
def test_the_catalog_describes_a_table_as_the_stream_does(database: Database, what: str) -> None:
    statements, published = TABLES[what]
    with database.connect() as conn:
        conn.execute(statements)
        operations = "publish = 'insert'"
        options = f"{published[:-1]}, {operations})" if published.endswith(")") and "WITH" in published else None
        conn.execute(f"CREATE PUBLICATION p FOR TABLE {options or f'{published} WITH ({operations})'}".encode())
    slot = f"p_{database.name}"
    with psycopg.connect(f"{database.url}?replication=database", autocommit=True) as replication:
        create_slot(replication, slot)
    with connect(database.url) as conn:
        (table,) = read_published(conn, ["p"])
        first = next(one for one in table.relation.columns if one.is_key) if table.key else table.relation.columns[0]
        value = "'x'" if first.type_oid in (25, 1042) else "1"
        name = first.name.replace('"', '""')
        more = ', "b") VALUES (%s, 2)' if len(table.key) == 2 else ") VALUES (%s)"
        conn.execute(f'INSERT INTO {table.sql} ("{name}"{more % value}'.encode())
        assert of_stream(database, slot, ["p"]) == [table.relation]
        assert isinstance(table, PublishedTable) and table.key == KEYS.get(what, table.key)


def test_tables_that_the_publication_gains_are_asked_for_once(
    database: Database, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("added") / "requests.json"
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE a")
    with connect(database.url) as sql:
        assert note_tables(RequestQueue(path), sql, ["p"], is_wanted=True) == []
        database.execute("ALTER PUBLICATION p ADD TABLE b")
        assert note_tables(RequestQueue(path), sql, ["p"], is_wanted=True) == ["b"]
        assert note_tables(RequestQueue(path), sql, ["p"], is_wanted=True) == []
        database.execute("ALTER PUBLICATION p DROP TABLE b")
        assert note_tables(RequestQueue(path), sql, ["p"], is_wanted=True) == []
        database.execute("ALTER PUBLICATION p ADD TABLE b")
        assert note_tables(RequestQueue(path), sql, ["p"], is_wanted=False) == []
    assert [(one.request.table, one.request.kind) for one in RequestQueue(path).entries()] == [("b", "added")]
