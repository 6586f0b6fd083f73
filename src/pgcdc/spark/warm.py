"""Warm up: one small batch through the same source, transforms and collection, so that the first real one is fast."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pgcdc.core.operation import OldKind, Op
from pgcdc.core.position import STREAM, Position
from pgcdc.core.relation import Column, Relation
from pgcdc.spark.session import with_settings
from pgcdc.spool.batch import CaptureBatch, Part
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.writer import SpoolWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pgcdc.transform.program import Program

__all__ = ["warm_up"]

BATCHES = 3


def warm_up(spark: SparkSession, program: Program) -> None:
    """Run a few micro-batches over a made-up spool, as a lane with this program would."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-warm-") as folder:
        spool = Path(folder) / "spool"
        _write_spool(spool)
        reader = spark.readStream.format("pgcdc").schema(program.source_schema()).options(**program.source_options())
        events = reader.option("_spool", str(spool)).option("max_batch_rows", "3").load()
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
    writer = SpoolWriter(folder, Position.end(1))
    key, value = Column("id", 23, -1, True), Column("value", 25, -1, False)
    version = writer.relations.intern(Relation(1, "public", "warm", "d", (key, value)))
    for number in range(2, 2 + BATCHES):
        rows = pa.RecordBatch.from_pylist([_row(n, op, version) for n, op in enumerate(_OPS, 1)], schema=CHANGES)
        transaction = {
            "commit": number, "kind": STREAM, "commit_time": 0, "xid": 1, "rows": len(_OPS), "complete": True,
            "origin": None,
        }  # fmt: skip
        transactions = pa.RecordBatch.from_pylist([transaction], schema=TRANSACTIONS)
        part = Part(rows.num_rows, rows.nbytes, (len(_OPS), 0), rows)
        writer.append(CaptureBatch(part, transactions, writer.relations, Position.end(number), number))
    writer.close()


_OPS = (Op.INSERT, Op.UPDATE, Op.DELETE)


def _row(ordinal: int, op: Op, version: int) -> dict[str, object]:
    is_delete = op is Op.DELETE
    return {
        "ordinal": ordinal,
        "sub": 0,
        "op": int(op),
        "relation": version,
        "new": None if is_delete else [b"1", None],
        "old": [b"1", None] if is_delete else None,
        "old_kind": int(OldKind.KEY) if is_delete else 0,
        "unchanged": [1] if op is Op.UPDATE else None,
        "prefix": None,
    }
