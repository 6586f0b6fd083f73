"""Follow one table as typed rows, through every ALTER TABLE.

    export PGCDC_DB=postgresql://user:password@localhost:5432/shop
    .venv/bin/python examples/typed_table.py --table orders            # until Ctrl-C
    .venv/bin/python examples/typed_table.py --table orders --once     # everything committed up to now, then exit

When the table gets other columns, the query stops exactly there; this program loads the table again and goes on with them.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

import pgcdc


def show(batch: DataFrame, _: int) -> None:
    """What your own program would do with each batch."""
    if batch.count():
        batch.drop("_before", "_unchanged_toast_columns").orderBy("_lsn", "_ordinal").show(truncate=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, help="orders, or sales.invoices")
    parser.add_argument("--work-dir", type=Path, default=Path("typed-table"), help="state directory and checkpoint")
    parser.add_argument("--once", action="store_true", help="deliver what is there, then exit")
    options = parser.parse_args()

    spark = pgcdc.session("typed_table")
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # instead of Spark's handler, which cancels the running batch
    done = False
    while not done and not stop.is_set():
        rows = pgcdc.read_table(spark, options.table, slot="typed_table", state_dir=str(options.work_dir / "state"))
        rows.printSchema()
        writer = rows.writeStream.foreachBatch(show).option("checkpointLocation", str(options.work_dir / "checkpoint"))
        query = writer.trigger(availableNow=True).start() if options.once else writer.start()
        try:
            while not stop.is_set() and not done:
                done = bool(query.awaitTermination(1))
        except StreamingQueryException as error:
            if "SchemaChanged" not in str(error):
                raise
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
