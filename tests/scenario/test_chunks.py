"""A table is cut into chunks so that every row is in exactly one of them, and rows that are gone are noticed."""

from __future__ import annotations

from collections import Counter

import pytest
from databases import Database
from pydantic import TypeAdapter

from pgcdc.core.errors import ConnectionLost, SourceError
from pgcdc.postgres.database import Connection, connect
from pgcdc.source.postgres.setup.tables import Table, find_table, read_tables
from pgcdc.source.postgres.snapshot.chunks import Chunk, check_partitions, lock_chunks, plan_chunks, table_bytes
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement

TABLES = {
    "many": "CREATE TABLE many (id int PRIMARY KEY, v text); "
    "INSERT INTO many SELECT n, repeat('x', n % 200) FROM generate_series(1, 20000) n",
    "holes": "CREATE TABLE holes (id int PRIMARY KEY, v text); "
    "INSERT INTO holes SELECT n, repeat('x', 500) FROM generate_series(1, 3000) n; "
    "DELETE FROM holes WHERE id NOT BETWEEN 1000 AND 1100 AND id <> 2999; UPDATE holes SET v = 'y' WHERE id % 2 = 0",
    "one": "CREATE TABLE one (id int); INSERT INTO one VALUES (1)",
    "none": "CREATE TABLE none (id int PRIMARY KEY)",
    "wide": "CREATE TABLE wide (id int PRIMARY KEY, v text); ALTER TABLE wide ALTER v SET STORAGE EXTERNAL; "
    "INSERT INTO wide SELECT n, repeat('x', 100000) FROM generate_series(1, 50) n",
    "composite": "CREATE TABLE composite (a text COLLATE pg_unicode_fast, b char(4), c numeric, d timestamptz, "
    "PRIMARY KEY (a, b, c, d)); INSERT INTO composite SELECT chr(65 + n % 26 * 9) || '''\\' || n % 7, ' b', "
    "CASE WHEN n % 50 = 0 THEN 'NaN' ELSE n / 3.0 END, "
    "CASE WHEN n % 9 = 0 THEN 'infinity' ELSE timestamptz '2026-01-01' + n * interval '1 s' END "
    "FROM generate_series(1, 5000) n ON CONFLICT DO NOTHING",
    "parts": "CREATE TABLE parts (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id); "
    "CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM (0) TO (5000); "
    'CREATE TABLE "Parts B" (v text, gone int, id int NOT NULL); ALTER TABLE "Parts B" DROP gone; '
    'ALTER TABLE parts ATTACH PARTITION "Parts B" FOR VALUES FROM (5000) TO (6000); '
    "CREATE TABLE parts_c PARTITION OF parts DEFAULT PARTITION BY LIST (id); "
    "CREATE TABLE parts_d PARTITION OF parts_c DEFAULT; INSERT INTO parts SELECT n, 'v' FROM generate_series(1, 9000) n",
    "parent": "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent); "
    "INSERT INTO parent VALUES (1), (2); INSERT INTO child VALUES (3)",
}


def table_named(conn: Connection, name: str) -> Table:
    return find_table(read_tables(conn), name)


def rows_of(conn: Connection, chunk: Chunk, columns: list[str]) -> list[tuple[bytes | None, ...]]:
    found: list[tuple[bytes | None, ...]] = []
    for values in copy_rows(conn, copy_statement(columns, chunk.source, chunk.conditions), len(columns)):
        flat = values.to_pylist()
        found += [tuple(flat[first : first + len(columns)]) for first in range(0, len(flat), len(columns))]
    return found


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_in_exactly_one_chunk(database: Database, name: str) -> None:
    database.execute(TABLES[name])
    with connect(database.url) as conn:
        table = table_named(conn, name)
        columns = ["a", "b", "c", "d"] if name == "composite" else ["id"]
        all_rows = rows_of(conn, Chunk("public", name, is_root=name == "parts"), columns)
        only = "" if name == "parts" else "ONLY "  # what inherits is a table of its own
        assert conn.execute(f"SELECT count(*) FROM {only}{name}".encode()).fetchone() == (len(set(all_rows)),)
        in_a_file = TypeAdapter(list[Chunk])
        for analyzed in (False, True):
            if analyzed:
                conn.execute("ANALYZE")
            for by_key in (False, True):
                for chunks in [plan_chunks(conn, table, count=count, by_key=by_key) for count in (1, 2, 3, 7, 40)]:
                    assert in_a_file.validate_json(in_a_file.dump_json(chunks)) == chunks
                    found = Counter(row for chunk in chunks for row in rows_of(conn, chunk, columns))
                    assert found == Counter(all_rows)


def test_chunks_are_about_as_large_as_asked_for(database: Database) -> None:
    database.execute(TABLES["many"])
    with connect(database.url) as conn:
        table = table_named(conn, "many")
        for by_key in (False, True):
            chunks = plan_chunks(conn, table, count=4, by_key=by_key)
            assert len(chunks) == 4
            assert all(3000 < len(rows_of(conn, chunk, ["id"])) < 7000 for chunk in chunks)
        assert table_bytes(conn, table) > 20000 * 100


def test_rows_behind_the_planned_ones_are_in_the_last_chunk(database: Database) -> None:
    database.execute(TABLES["many"])
    with connect(database.url) as conn:
        table = table_named(conn, "many")
        plans = [plan_chunks(conn, table, count=3, by_key=by_key) for by_key in (False, True)]
        conn.execute("INSERT INTO many SELECT n, repeat('x', 500) FROM generate_series(-5000, 0) n")
        for chunks in plans:
            found = [row for chunk in chunks for row in rows_of(conn, chunk, ["id"])]
            assert len(found) == len(set(found)) == 25001


def test_without_a_right_on_a_partition_the_root_is_read(database: Database) -> None:
    database.execute(TABLES["parts"])
    role = f"r_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN; GRANT SELECT ON parts, parts_a, parts_c TO {role}")
    try:
        with connect(database.server.url(database.name, user=role)) as conn:
            (chunk,) = plan_chunks(conn, table_named(conn, "parts"), count=4)
            assert chunk.is_root and len(rows_of(conn, chunk, ["id"])) == 9000
            conn.execute("BEGIN")
            lock_chunks(conn, [chunk])
            conn.execute("ROLLBACK")
            database.execute("TRUNCATE parts_a")
            conn.execute("BEGIN")
            with pytest.raises(SourceError, match="table parts was truncated or rewritten"):
                lock_chunks(conn, [chunk])
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("statement", ["TRUNCATE many", "VACUUM FULL many", "ALTER TABLE many ALTER id TYPE bigint"])
def test_a_table_that_was_rewritten_is_noticed(database: Database, statement: str) -> None:
    database.execute(TABLES["many"])
    with connect(database.url) as conn:
        chunks = plan_chunks(conn, table_named(conn, "many"), count=2)
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        lock_chunks(conn, chunks)
        conn.execute("ROLLBACK")
        database.execute(statement)
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        with pytest.raises(
            SourceError, match=r"table many was truncated or rewritten while it was read\. Load it again"
        ):
            lock_chunks(conn, chunks)
        conn.execute("ROLLBACK")


def test_a_locked_chunk_cannot_be_truncated(database: Database) -> None:
    database.execute(TABLES["many"])
    with connect(database.url) as conn, database.connect() as other:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        lock_chunks(conn, plan_chunks(conn, table_named(conn, "many"), count=2))
        other.execute("SET lock_timeout = '100ms'")
        with pytest.raises(Exception, match="lock timeout"):
            other.execute("TRUNCATE many")


def test_before_tid_range_scans_keys_are_used_and_a_table_without_one_is_one_chunk(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(TABLES["many"] + "; CREATE TABLE keyless AS SELECT * FROM many")
    monkeypatch.setattr("pgcdc.source.postgres.snapshot.chunks.TID_RANGE_SCAN", 10**9)
    with connect(database.url) as conn:
        by_key = plan_chunks(conn, table_named(conn, "many"), count=3)
        assert len(by_key) == 3 and all(chunk.key == ("id",) and chunk.first_block is None for chunk in by_key)
        (whole,) = plan_chunks(conn, table_named(conn, "keyless"), count=3)
        assert whole.conditions == []


def test_a_partition_that_a_query_of_its_root_left_out_is_noticed(database: Database) -> None:
    """ATTACH commits beside a reader, who may see its rows before it hears of the partition."""
    database.execute(TABLES["parts"] + "; CREATE TABLE late (LIKE parts INCLUDING ALL)")
    with connect(database.url) as conn:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        lock_chunks(conn, [Chunk("public", "parts", is_root=True)])
        leaves = "SELECT relid::oid::int8::text FROM pg_partition_tree('parts') WHERE isleaf"
        details = {"leaves": {oid: 0 for (oid,) in conn.execute(leaves).fetchall()}}
        check_partitions(conn, details)
        check_partitions(conn, {})
        (late,) = conn.execute("SELECT 'late'::regclass::oid::int8::text").fetchone() or ("",)
        with pytest.raises(ConnectionLost, match="attached"):
            check_partitions(conn, {"leaves": {**details["leaves"], late: 0}})
