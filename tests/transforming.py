"""Chains of transforms on a small stream, as a lane runs them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
from event_streams import ITEMS, ORDERS, SEED, START, Change, Transaction, spooled
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from transform_cases import KEY
from wire import UNCHANGED

from pgcdc.event.batch import Batch
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import columns_for, event_batch, rows_for
from pgcdc.spark.quick import Collector
from pgcdc.spark.session import with_settings
from pgcdc.spool.reader import SpoolReader
from pgcdc.transform.program import Program, compile_chains
from pgcdc.transform.specs import Chain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ODD = '\n"\\\u2028🐘'
STREAM = [
    Transaction(
        110,
        (
            Change(ORDERS, "INSERT", ("1", "a@b.c", "2.50")),
            Change(ORDERS, "UPDATE", ("1", UNCHANGED, None), ("1", "old", "9"), "O"),
            Change(ORDERS, "UPDATE", ("2", ODD, "7"), ("1", None, None), "K"),
            Change(ITEMS, "INSERT", ("1", "2026-11-16 00:46:06+00")),
            Change(ORDERS, "TRUNCATE"),
        ),
    ),
    Transaction(
        120, (Change(ORDERS, "DELETE", None, ("2", None, None), "K"), Change(ITEMS, "DELETE", None, ("1", "2"), "O"))
    ),
]


def projected(spark: SparkSession, reader: SpoolReader, program: Program) -> DataFrame:
    """What the source gives to a program, behind what Spark does."""
    schema = cast(StructType, StructType.fromDDL(program.source_schema()))
    chains = parse_chains(program.source_options()["_chains"])
    arrow = to_arrow_schema(schema, timezone="UTC")
    slices = reader.slices(START, reader.end)
    columns = columns_for(arrow, chains)
    batch = event_batch(slices, reader.relations(), SEED, columns, chains=chains) if slices else None
    rows = arrow.empty_table() if batch is None else pa.Table.from_batches(rows_for(arrow, batch))
    return program.project(spark.createDataFrame(rows, schema).coalesce(1))


def collect(spark: SparkSession, program: Program, rows: int = 0) -> list[Batch]:
    with spooled(STREAM) as reader:
        frame = projected(spark, reader, program)
        return program.collect(frame, START, START, partial(Collector(frame).to_arrow, rows=rows))


def batches(spark: SparkSession, chains: list[Chain], folder: Path, checkpoint: Path) -> list[Batch]:
    """What a lane does."""
    program = compile_chains(chains)
    options = {"_spool": str(folder), **program.source_options()}
    assert KEY not in str(options)
    source = spark.readStream.format("pgcdc").options(**options).schema(program.source_schema()).load()
    found: list[Batch] = []

    def collect(batch: DataFrame, _: int) -> None:
        found[:] = program.collect(batch, START, START)

    with with_settings(spark, program.settings()):
        writer = program.project(source).writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(collect)
        writer.trigger(availableNow=True).start().awaitTermination()
    return found
