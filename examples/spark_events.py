"""Count changes per table and operation in a PySpark program of your own.

    export PGCDC_DB=postgresql://user:password@localhost:5432/shop
    .venv/bin/python examples/spark_events.py --tables orders            # until Ctrl-C
    .venv/bin/python examples/spark_events.py --tables orders --once     # everything committed up to now, then exit

The password stays in the variable: Spark keeps options in plans and logs, so the source refuses a URL with a password as an
option. Stop and start as often as you like: checkpoint and slot remember where the query was.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

import pgcdc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", required=True, help="orders,customers,sales.invoices")
    parser.add_argument("--work-dir", type=Path, default=Path("spark-events"), help="state directory and checkpoint")
    parser.add_argument("--once", action="store_true", help="deliver what is there, then exit")
    options = parser.parse_args()

    spark = pgcdc.session("spark_events")
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # instead of Spark's handler, which cancels the running batch
    events = (
        spark.readStream.format("pgcdc")
        .option("tables", options.tables)
        .option("slot", "spark_events")
        .option("state_dir", str(options.work_dir / "state"))
        .load()
    )
    counts = events.groupBy("schema", "table", "operation").count()
    writer = (
        counts.writeStream.outputMode("complete")
        .format("console")
        .option("checkpointLocation", str(options.work_dir / "checkpoint"))
    )
    query = writer.trigger(availableNow=True).start() if options.once else writer.start()
    while not stop.is_set() and not query.awaitTermination(1):
        pass
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
