"""Typed changes made by hand: DataFrames and files with the columns that `option("table", ...)` gives."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "name": pa.string()}
START = datetime(2026, 1, 1, 12, tzinfo=UTC)

Change = dict[str, Any]


def change(op: str, lsn: int, row: Mapping[str, Any] = {}, *, ordinal: int = 1, **more: Any) -> Change:
    """One change. The commit time is START plus `second` (by default the lsn) seconds."""
    second = more.pop("second", lsn)
    meta = {"_op": op, "_lsn": lsn, "_ordinal": ordinal, "_ts": START + timedelta(seconds=second)}
    if op != "HEARTBEAT":
        meta["_xid"] = lsn + 700
    if op == "DELETE":
        meta["_before"] = dict(row)
    return {**row, **meta, **{f"_{name}": value for name, value in more.items()}}


def schema(columns: Mapping[str, pa.DataType] = COLUMNS, *, zset: bool = False) -> pa.Schema:
    """The Arrow schema of a typed table."""
    fields = [
        *columns.items(),
        ("_op", pa.string()),
        ("_lsn", pa.int64()),
        ("_ordinal", pa.int64()),
        ("_xid", pa.int64()),
        ("_ts", pa.timestamp("us", "UTC")),
        ("_before", pa.struct(list(columns.items()))),
        ("_unchanged_toast_columns", pa.list_(pa.string())),
    ]
    if zset:
        fields.append(("_weight", pa.int32()))
    return pa.schema(fields)


def to_frame(
    spark: SparkSession,
    changes: Sequence[Change],
    columns: Mapping[str, pa.DataType] = COLUMNS,
    *,
    zset: bool = False,
) -> DataFrame:
    """A batch DataFrame of these changes."""
    return spark.createDataFrame(pa.Table.from_pylist(list(changes), schema(columns, zset=zset)))


def to_stream(
    spark: SparkSession,
    folder: Path,
    batches: Sequence[Sequence[Change]],
    columns: Mapping[str, pa.DataType] = COLUMNS,
    *,
    zset: bool = False,
) -> DataFrame:
    """A streaming DataFrame that gives each list of changes in a micro-batch of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, changes in enumerate(batches, 1):
        path = folder / f"{number:04}.parquet"
        pq.write_table(pa.Table.from_pylist(list(changes), schema(columns, zset=zset)), path)
        os.utime(path, (number, number))  # the source reads files in the order of their times
    shape = spark.read.parquet(str(folder)).schema
    return spark.readStream.schema(shape).option("maxFilesPerTrigger", 1).parquet(str(folder))


def run_stream(df: DataFrame, name: str, mode: str = "append") -> list[Any]:
    """Run a stream to the end of what is there; its result."""
    query = df.writeStream.format("memory").queryName(name).outputMode(mode).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
        return df.sparkSession.table(name).collect()
    finally:
        query.stop()
