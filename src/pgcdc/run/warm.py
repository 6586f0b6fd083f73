"""Warm up: one small batch through the same source, transforms and collection, so that the first real one is fast."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pgcdc.core.position import Position
from pgcdc.source.rate.changes import FIRST_COMMIT, MadeUp
from pgcdc.source.rate.options import RateOptions
from pgcdc.spark.session import with_settings
from pgcdc.spool.writer import SpoolWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pgcdc.transform.program import Program

BATCHES = 3
ROWS = 4
"""Of a batch: each kind of change."""


def warm_up(spark: SparkSession, program: Program) -> None:
    """Run a few micro-batches over a made-up spool, as a lane with this program would."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-warm-") as folder:
        spool = Path(folder) / "spool"
        _write_spool(spool)
        reader = spark.readStream.format("pgcdc").schema(program.source_schema()).options(**program.source_options())
        events = reader.option("_spool", str(spool)).option("max_batch_rows", str(ROWS)).load()
        writer = (
            program.project(events)
            .writeStream.option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
        )

        def collect(batch: DataFrame, _: int) -> None:
            program.collect(batch, Position.end(0), Position.end(0))

        with with_settings(spark, program.settings()):
            query = writer.foreachBatch(collect).start()
        query.awaitTermination()


def _write_spool(folder: Path) -> None:
    writer = SpoolWriter(folder, Position.end(FIRST_COMMIT))
    options = RateOptions(rate_tables=1, rate_transaction_rows=ROWS, rate_inserts=2, rate_updates=1, rate_deletes=1)
    changes = MadeUp(options, writer.relations)
    for commit in range(FIRST_COMMIT + 1, FIRST_COMMIT + 1 + BATCHES):
        writer.append(changes.transactions(commit, 1, 0))
    writer.close()
