"""`spark.read.format("pgcdc")` as users run it, in a PySpark program."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from databases import Database
from listening import wait_until
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import pgcdc


class Mover:
    """Moves amounts between rows, so that only a read of one moment finds their sum unchanged."""

    def __init__(self, database: Database) -> None:
        self.moves = 0
        self._database = database
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Mover:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with self._database.connect() as conn:
            while not self._stopping.wait(0.005):  # Spark needs the machine, too
                conn.execute(
                    "UPDATE accounts SET amount = amount + CASE id WHEN %s THEN 1 ELSE -1 END WHERE id IN (%s, %s)",
                    [self.moves % 999 + 1, self.moves % 999 + 1, 20000 - self.moves % 999],
                )
                self.moves += 1


@pytest.fixture
def accounts(database: Database) -> Iterator[Database]:
    database.execute(
        "CREATE TABLE accounts (id int PRIMARY KEY, amount int, note text); "
        "INSERT INTO accounts SELECT n, 100, repeat('n', n % 300) FROM generate_series(1, 20000) n"
    )
    yield database


def test_a_read_is_of_one_moment_however_many_tasks_and_actions(accounts: Database, spark: SparkSession) -> None:
    with Mover(accounts) as mover:
        wait_until(lambda: mover.moves > 10, 20, "amounts move")
        rows = pgcdc.read_snapshot(spark, "accounts", url=accounts.url, partitions="5")
        assert rows.columns == ["id", "amount", "note"]
        assert rows.rdd.getNumPartitions() == 5
        sums = rows.agg(F.sum("amount"), F.count("*"), F.sum("id"), F.sum(F.col("id") * F.col("amount")))
        moves = mover.moves
        first = tuple(sums.collect()[0])
        assert first[:3] == (2_000_000, 20_000, 200_010_000)
        wait_until(lambda: mover.moves > moves + 50, 20, "amounts go on moving")
        assert tuple(sums.collect()[0]) == first, "the same DataFrame is the same moment"


def test_filters_of_two_queries_on_one_dataframe_do_not_mix(accounts: Database, spark: SparkSession) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        rows = spark.read.format("pgcdc").option("url", accounts.url).option("table", "accounts").load()
        assert rows.where("_op = 'SNAPSHOT' AND id = 1").count() == 1
        both = rows.where("id = 1").union(rows.where("id = 2")).select("id")
        assert sorted(row.id for row in both.collect()) == [1, 2] and rows.count() == 20_000
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/Los_Angeles"])
def test_clamped_infinities_can_be_collected(
    database: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date, at timestamp, moment timestamptz, days date[]); INSERT INTO t "
        "SELECT n, one::date, one::timestamp, one::timestamptz, ARRAY[one::date] "
        "FROM unnest('{-infinity,infinity}'::text[]) WITH ORDINALITY AS _(one, n)"
    )
    monkeypatch.setenv("TZ", zone)  # collect() writes a timestamptz as the local time of the process
    time.tzset()
    try:
        rows = pgcdc.read_snapshot(spark, "t", url=database.url, out_of_range="clamp").orderBy("id").collect()
        assert [(one.day.year, one.at.year, one.moment.year, one.days[0].year) for one in rows] == [
            (1,) * 4,
            (9999,) * 4,
        ]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_schema_prunes_and_errors_are_one_clear_line(accounts: Database, spark: SparkSession) -> None:
    reader = spark.read.format("pgcdc").option("url", accounts.url).option("where", "id <= 3")
    pruned = reader.schema("amount int").option("table", "accounts").load()
    assert [row.asDict() for row in pruned.collect()] == [{"amount": 100}] * 3
    rows = pgcdc.read_snapshot(spark, "accounts", url=accounts.url, partitions="2")
    assert rows.count() == 20_000
    accounts.execute("DROP TABLE accounts")
    with pytest.raises(PySparkException, match=r'"public\.accounts" does not exist\. It was dropped or altered'):
        rows.count()
    with pytest.raises(PySparkException, match=r"table accounts does not exist\. Check option table"):
        pgcdc.read_snapshot(spark, "accounts", url=accounts.url)
