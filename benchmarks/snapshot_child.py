"""Ways to read a table, taking turns in one warm Spark: `TABLE ROWS ROUNDS FOLDER`, the URL in PGCDC_DB. Prints JSON.

`psql` is the yardstick. Ours and Spark's JDBC reader read the same two ctid ranges, to a no-op sink and to Parquet. A time
is that of load and action: schema, planning, starting tasks, reading, and for Parquet its commit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshot import JDBC_JAR, find_psql
from usage import cpu_of_tree, cpu_since
from workload import connect

import pgcdc
from pgcdc.postgres.database import parse_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASKS = 2
FETCH_ROWS = 10_000


def main() -> None:
    """Every way once to warm up, then `ROUNDS` times; of each run its seconds and CPU seconds."""
    table, rows, rounds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    url = os.environ["PGCDC_DB"]
    more: dict[str, Any] = {"spark__jars": str(JDBC_JAR)} if JDBC_JAR.exists() else {}
    spark = pgcdc.session(log_file=folder / "spark.log", **more)
    ours = pgcdc.read_snapshot(spark, table, partitions=str(TASKS))
    assert ours.count() == rows and ours.rdd.getNumPartitions() == TASKS
    ways: dict[str, Callable[[], None]] = {
        "psql": lambda: run_psql(url, table),
        "ours": lambda: to_nothing(pgcdc.read_snapshot(spark, table, partitions=str(TASKS))),
        "ours_parquet": lambda: to_parquet(pgcdc.read_snapshot(spark, table, partitions=str(TASKS)), folder / "ours"),
    }
    if JDBC_JAR.exists():
        ways["jdbc"] = lambda: to_nothing(read_jdbc(spark, url, table))
        ways["jdbc_parquet"] = lambda: to_parquet(read_jdbc(spark, url, table), folder / "jdbc")
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            before, began = cpu_of_tree(os.getpid()), time.monotonic()
            run()
            took_s = time.monotonic() - began
            used_s = sum(cpu_since(before, cpu_of_tree(os.getpid())).values())
            if number:
                runs[name].append((took_s, used_s))
    spark.stop()
    print(json.dumps(runs))


def run_psql(url: str, table: str) -> None:
    """COPY to /dev/null."""
    subprocess.run([find_psql(), url, "-c", f"COPY {table} TO STDOUT"], stdout=subprocess.DEVNULL, check=True)


def read_jdbc(spark: SparkSession, url: str, table: str) -> DataFrame:
    """The table by Spark's JDBC reader, cut as ours is."""
    with connect(url) as conn:
        row = conn.execute(f"SELECT pg_relation_size('{table}') / 8192 / {TASKS}".encode()).fetchone()
    assert row is not None
    middle = f"'({row[0]},0)'::tid"
    params = parse_url(url)
    target = f"jdbc:postgresql://{params['host']}:{params['port']}/{params['dbname']}"
    properties = {"user": params["user"], "fetchsize": str(FETCH_ROWS), "driver": "org.postgresql.Driver"}
    predicates = [f"ctid < {middle}", f"ctid >= {middle}"]
    return spark.read.jdbc(target, table, predicates=predicates, properties=properties)


def to_nothing(rows: DataFrame) -> None:
    """Every row reaches the executors' JVM."""
    rows.write.format("noop").mode("overwrite").save()


def to_parquet(rows: DataFrame, folder: Path) -> None:
    """Written, and removed again."""
    rows.write.mode("overwrite").parquet(str(folder))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
