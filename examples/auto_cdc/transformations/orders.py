"""Two copies of a table by AUTO CDC: `orders` as it is, `orders_history` with every version of every row.

How to run it, and what it needs: docs/functions.md.
"""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from pgcdc import functions as C

spark = SparkSession.active()


def read_changes() -> DataFrame:
    """The changes of `public.orders`; with ORDERS_FILES those that are recorded in a folder of Parquet files."""
    files = os.environ.get("ORDERS_FILES")
    if files:
        return spark.readStream.schema(spark.read.parquet(files).schema).parquet(files)
    import pgcdc

    pgcdc.register(spark)
    options = {"table": "public.orders", "slot": "orders_auto_cdc", "state_dir": "orders_auto_cdc"}
    return spark.readStream.format("pgcdc").options(**options).load()


# Spark lets no function of a pipeline look at the columns of a DataFrame, which these functions do: so it is made here.
CHANGES = C.without_metadata(C.with_sequence(C.split_key_updates(read_changes(), ["id"])), keep=["_op"])


@dp.temporary_view
def order_changes() -> DataFrame:
    """A row without a key, such as a TRUNCATE, is refused by AUTO CDC: the pipeline stops, and the copies need a refresh."""
    return CHANGES


for table, scd_type in (("orders", "1"), ("orders_history", "2")):
    dp.create_streaming_table(table)
    dp.create_auto_cdc_flow(
        target=table,
        source="order_changes",
        keys=["id"],
        sequence_by="_sequence",
        apply_as_deletes="_op = 'DELETE'",
        except_column_list=["_op", "_sequence"],
        stored_as_scd_type=scd_type,
    )
