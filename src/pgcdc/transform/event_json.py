"""The JSON event as native Spark expressions over the columns of an event: what comes last after transforms.

Without transforms the source renders the same text itself (`event.lines`), which is cheaper.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

__all__ = ["event_json"]

_OPTIONS = {"ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'", "timeZone": "UTC"}


def event_json(*, transaction: bool = False) -> Column:
    """The event of one row as JSON text; `_unchanged_toast_columns` is there only if there are any."""
    payload = [F.col("operation").alias("op"), F.col("table"), F.col("row"), F.col("old")]
    unchanged = F.col("unchanged_toast_columns")
    marked = [*payload, unchanged.alias("_unchanged_toast_columns")]
    return F.when(unchanged.isNull(), _event(payload, transaction)).otherwise(_event(marked, transaction))


def _event(payload: list[Column], transaction: bool) -> Column:
    fields = [
        F.col("id"),
        F.col("channel"),
        F.col("operation"),
        F.struct(*payload).alias("payload"),
        F.col("source"),
        F.col("created_at"),
        F.col("position"),
    ]
    if transaction:
        block = F.struct(F.col("xid"), F.col("created_at").alias("commit_time"), F.col("ordinal").alias("seq"))
        fields.append(F.when(F.col("xid") != 0, block).alias("transaction"))  # a message may stand alone
    return F.to_json(F.struct(*fields), _OPTIONS)
