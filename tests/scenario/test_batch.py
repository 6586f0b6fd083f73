"""`spark.read`: what its reader plans and reads, without Spark around it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from databases import Database
from pyspark.sql.types import StructType

from pgcdc.core.errors import ConfigError, ConversionError, PgcdcError, SourceError
from pgcdc.source.postgres.single_table import choose_count
from pgcdc.source.postgres.snapshot.held import hold_snapshot
from pgcdc.spark.source import ChangeSource
from pgcdc.spark.tables import BatchReader, RowsPartition

MB = 1 << 20
ORDERS = (
    "CREATE TABLE orders (id int PRIMARY KEY, total numeric(12,2), note text, at timestamptz, tags text[]); "
    "INSERT INTO orders SELECT n, n / 4.0, repeat('x', 400), '2026-01-01 00:00:00+00', ARRAY['a', NULL] "
    "FROM generate_series(1, 1000) n"
)


def open_reader(database: Database | str, table: str, schema: str = "", **options: str) -> BatchReader:
    """The reader, as Spark gets it in its driver."""
    url = {"url": database if isinstance(database, str) else database.url} if database else {}
    source = ChangeSource({**url, "table": table, "metadata": "false", **options})
    name, _, kind = schema.partition(" ")
    asked = StructType().add(name, kind) if schema else source.schema()
    assert isinstance(asked, StructType)
    return source.reader(asked)


def read(reader: BatchReader, partitions: list[RowsPartition] | None = None) -> list[dict[str, Any]]:
    """Everything, each partition by a reader of its own, as in an executor."""
    planned = reader.partitions() if partitions is None else partitions
    found: list[dict[str, Any]] = []
    for one in pickle.loads(pickle.dumps(planned)):
        for batch in pickle.loads(pickle.dumps(reader)).read(one):
            batch.validate(full=True)
            found += batch.to_pylist()
    return found


def test_rows_have_the_columns_of_the_table_in_their_types(database: Database) -> None:
    database.execute(ORDERS)
    reader = open_reader(database, "orders", partitions="3")
    planned = reader.partitions()
    assert len(planned) == 3 and len({one.part.held for one in planned}) == 1
    rows = read(reader, planned)
    assert sorted(row["id"] for row in rows) == list(range(1, 1001))
    assert next(row for row in rows if row["id"] == 7) == {
        "id": 7, "total": Decimal("1.75"), "note": "x" * 400, "at": datetime(2026, 1, 1, tzinfo=UTC), "tags": ["a", None],
    }  # fmt: skip


def test_all_tasks_read_the_moment_of_the_plan(database: Database) -> None:
    database.execute(ORDERS)
    reader = open_reader(database, "orders", partitions="4")
    planned = reader.partitions()
    first = read(reader, planned[:1])
    database.execute(
        "DELETE FROM orders WHERE id % 2 = 0; UPDATE orders SET total = -1; "
        "INSERT INTO orders SELECT n FROM generate_series(2000, 5000) n"
    )
    database.execute("VACUUM orders")
    rows = first + read(reader, planned[1:])
    assert sorted((row["id"], row["total"]) for row in rows) == [(n, Decimal(n) / 4) for n in range(1, 1001)]
    assert len(read(reader, planned)) == 1000, "it can be read again"
    assert len(read(open_reader(database, "orders", partitions="4"))) == 3501


def test_a_table_for_one_task_needs_no_snapshot(database: Database) -> None:
    database.execute("CREATE TABLE empty (id int); CREATE TABLE few AS SELECT 1 AS id")
    for table, count in (("empty", 0), ("few", 1)):
        (only,) = open_reader(database, table).partitions()
        assert only.part.held is None and len(read(open_reader(database, table), [only])) == count
    reader = open_reader(database, "few")
    planned = reader.partitions()
    database.execute("TRUNCATE few; INSERT INTO few VALUES (2), (3)")
    assert [row["id"] for row in read(reader, planned)] == [2, 3]


def test_partitions_of_a_table_are_shared_out_among_the_tasks(database: Database) -> None:
    parts = " ".join(f"CREATE TABLE p{n} PARTITION OF p FOR VALUES IN ({n});" for n in range(7))
    database.execute(f"CREATE TABLE p (id int, k int) PARTITION BY LIST (k); {parts}")
    for count in ("1", "3"):
        assert read(open_reader(database, "p", partitions=count)) == []
    database.execute("INSERT INTO p SELECT n, n % 7 FROM generate_series(1, 700) n")
    for tasks in (1, 3, 50):
        reader = open_reader(database, "p", partitions=str(tasks))
        planned = reader.partitions()
        assert len(planned) == min(tasks, 7) and sorted(row["id"] for row in read(reader, planned)) == list(
            range(1, 701)
        )
    database.execute("CREATE TABLE bare (id int) PARTITION BY LIST (id)")
    assert read(open_reader(database, "bare", partitions="2")) == []


def test_a_schema_reads_only_its_columns(database: Database) -> None:
    role = f"r_{database.name}"
    database.execute(
        "CREATE TABLE secrets (a int, b int, secret text, note text, PRIMARY KEY (a, b)); "
        "INSERT INTO secrets VALUES (1, 2, 'x', 'n'); "
        f"CREATE ROLE {role} LOGIN; GRANT SELECT (a, note) ON secrets TO {role}"
    )
    try:
        url = database.server.url(database.name, user=role)
        assert read(open_reader(url, "secrets", "note string")) == [{"note": "n"}]
        with pytest.raises(SourceError, match=r"cannot read table secrets: permission denied.* Run: GRANT SELECT ON"):
            read(open_reader(url, "secrets"))
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_metadata_makes_the_schema_that_of_the_stream(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, _op int); INSERT INTO t VALUES (1, 5)")
    assert read(open_reader(database, "t")) == [{"id": 1, "_op": 5}]
    database.execute("ALTER TABLE t DROP _op")
    source = ChangeSource({"url": database.url, "table": "t"})
    schema = source.schema()
    assert isinstance(schema, StructType)
    (row,) = read(source.reader(schema))
    assert row == {
        "id": 1, "_op": "SNAPSHOT", "_lsn": None, "_ordinal": None, "_xid": None, "_ts": None, "_before": None,
        "_unchanged_toast_columns": None,
    }  # fmt: skip


def test_generated_columns_are_read_and_children_are_not(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int, twice int GENERATED ALWAYS AS (id * 2) STORED); CREATE TABLE child () INHERITS (t); "
        "INSERT INTO t VALUES (1); INSERT INTO child VALUES (2)"
    )
    assert read(open_reader(database, "t")) == [{"id": 1, "twice": 2}]
    assert read(open_reader(database, "child")) == [{"id": 2, "twice": 4}]


def test_where_filters_in_the_database(database: Database) -> None:
    database.execute(ORDERS)
    assert len(read(open_reader(database, "orders", where="id < 10 OR id > 995 -- few", partitions="3"))) == 14
    for wrong in ("idd < 3", "id <", "id < 'x'", "1) OR (1", "true; DROP TABLE orders", "count(*) > 1"):
        with pytest.raises(ConfigError, match="option where is not a valid condition on table orders"):
            read(open_reader(database, "orders", where=wrong))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE orders", r'orders" does not exist\. It was dropped or altered meanwhile: load it again'),
        ("TRUNCATE orders", r"table orders was truncated or rewritten while it was read\. Load it again"),
        ("ALTER TABLE orders DROP note", r'column "note" does not exist\. It was dropped or altered meanwhile'),
        ("ALTER TABLE orders RENAME TO others; CREATE TABLE orders (id int)", "truncated or rewritten"),
    ],
)
def test_a_table_that_changes_in_the_middle_is_one_clear_line(database: Database, change: str, said: str) -> None:
    database.execute(ORDERS)
    reader = open_reader(database, "orders", partitions="2")
    planned = reader.partitions()
    read(reader, planned[:1])
    database.execute(change)
    with pytest.raises(SourceError, match=said) as error:
        read(reader, planned[1:])
    assert "\n" not in str(error.value)


def test_a_table_that_is_truncated_while_it_is_planned_is_noticed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(ORDERS)

    def truncate_and_hold(url: str, **more: Any) -> Any:
        held = hold_snapshot(url, **more)
        database.execute("TRUNCATE orders")
        return held

    monkeypatch.setattr("pgcdc.source.postgres.single_table.hold_snapshot", truncate_and_hold)
    with pytest.raises(SourceError, match="was truncated or altered while its reading was planned"):
        open_reader(database, "orders", partitions="2").partitions()


def test_a_value_without_a_place_is_named_with_its_key(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (a int, b text, at timestamptz, PRIMARY KEY (b, a)); "
        "INSERT INTO t SELECT n, 'k', '2026-01-01' FROM generate_series(1, 9) n; UPDATE t SET at = 'infinity' WHERE a = 5"
    )
    for schema in ("", "at timestamp"):
        with pytest.raises(ConversionError, match=r"column at of table t, key a=5, b=k: .*infinity"):
            read(open_reader(database, "t", schema))
    assert len(read(open_reader(database, "t", out_of_range="clamp"))) == 9


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda url: ChangeSource({"url": url}).reader(StructType()), "spark.read needs one table"),
        (lambda url: open_reader(url, "nowhere"), "table nowhere does not exist. Check option table"),
        (lambda url: open_reader(url, "a_view"), "a_view is a view"),
        (lambda url: open_reader(url, "t", "id string"), "the schema has id string, but in table t it is int"),
        (lambda url: open_reader(url, "t", slot="s"), "option slot is for spark.readStream, not for spark.read"),
        (lambda url: open_reader(url, "t", partitions="0"), "option partitions is '0'. Set it to a number"),
        (
            lambda url: open_reader(url, "t", snapshot_keep="-1"),
            "option snapshot_keep is '-1'. Set it to a time",
        ),
        (lambda url: ChangeSource({"table": "t", "where": "x"}).streamReader(StructType()), "where is for spark.read,"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    database: Database, make: Callable[[str], object], said: str
) -> None:
    database.execute("CREATE TABLE t (id int); CREATE VIEW a_view AS SELECT 1 AS id")
    with pytest.raises(PgcdcError) as error:
        make(database.url)
    assert said in str(error.value)


def test_no_password_travels_to_the_executors(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.execute("CREATE TABLE t AS SELECT 1 AS id")
    monkeypatch.setenv("PGCDC_DB", database.url.replace("postgres@", "postgres:hidden-secret@"))
    reader = open_reader("", "t")
    planned = reader.partitions()
    assert b"hidden-secret" not in pickle.dumps((reader, planned)) and read(reader, planned) == [{"id": 1}]
    monkeypatch.delenv("PGCDC_DB")
    with pytest.raises(ConfigError, match="no database is set on this host"):
        read(reader, planned)


@pytest.mark.parametrize(
    ("nbytes", "cores", "count"),
    [(0, 8, 1), (7 * MB, 8, 1), (20 * MB, 8, 2), (100 * MB, 2, 2), (100 * MB, 8, 8), (1000 * MB, 2, 16)],
)
def test_how_many_tasks_read(nbytes: int, cores: int, count: int) -> None:
    assert choose_count(nbytes, cores) == count
