"""The JSON event, written last: native Spark expressions, no Python call per row."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

__all__ = ["event_json", "event_lines"]

_OPTIONS = {"ignoreNullFields": "false", "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'", "timeZone": "UTC"}


def event_json() -> Column:
    """The event of one row as JSON text; `_unchanged_toast_columns` is there only if there are any."""
    payload = [F.col("operation").alias("op"), F.col("table"), F.col("row"), F.col("old")]
    unchanged = F.col("unchanged_toast_columns")
    marked = [*payload, unchanged.alias("_unchanged_toast_columns")]
    return F.when(unchanged.isNull(), _event(payload)).otherwise(_event(marked))


def _event(payload: list[Column]) -> Column:
    fields = [
        F.col("id"),
        F.col("channel"),
        F.col("operation"),
        F.struct(*payload).alias("payload"),
        F.col("source"),
        F.col("created_at"),
        F.col("position"),
    ]
    return F.to_json(F.struct(*fields), _OPTIONS)


def event_lines(events: DataFrame) -> DataFrame:
    """What sinks of lines take: `position` and `line`, the JSON event with its newline."""
    return events.select("position", F.concat(event_json(), F.lit("\n")).alias("line"))
