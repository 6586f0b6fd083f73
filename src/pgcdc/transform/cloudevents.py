"""Events as CloudEvents 1.0 in structured JSON: the end of a chain of transforms. See docs/envelopes.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from pgcdc.transform.specs import CloudEventsSpec

__all__ = ["cloudevents"]

_TIMES = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'", "timeZone": "UTC"}
# An attribute without a value is left out; in `data`, which is ours, null is a value.
_ATTRIBUTES, _DATA = {**_TIMES, "ignoreNullFields": "true"}, {**_TIMES, "ignoreNullFields": "false"}


def cloudevents(df: DataFrame, spec: CloudEventsSpec) -> DataFrame:
    """The events with a column `_text`: the CloudEvent, with what the JSON event has as `payload` in its `data`."""
    return df.withColumn("_text", _document(spec.source, spec.type_prefix))


def _document(source: str, prefix: str) -> Column:
    from pyspark.sql import functions as F

    attributes = F.struct(
        F.lit("1.0").alias("specversion"),
        F.col("id"),
        F.lit(source).alias("source"),
        F.concat(F.lit(f"{prefix}."), F.lower("operation")).alias("type"),
        F.concat("schema", F.lit("."), "table").alias("subject"),
        F.col("created_at").alias("time"),
        F.col("position").alias("sequence"),
        F.col("channel"),
        F.when(F.col("xid") != 0, F.col("xid").cast("string")).alias("xid"),
        F.col("origin"),
        F.lit("application/json").alias("datacontenttype"),  # last: a string, behind which one brace is cut off
    )
    payload = [F.col("operation").alias("op"), F.col("table"), F.col("row"), F.col("old")]
    unchanged = F.col("unchanged_toast_columns")
    marked = [*payload, unchanged.alias("_unchanged_toast_columns")]
    data = F.when(unchanged.isNull(), F.to_json(F.struct(*payload), _DATA)).otherwise(
        F.to_json(F.struct(*marked), _DATA)
    )
    head = F.rtrim(F.to_json(attributes, _ATTRIBUTES), F.lit("}"))
    return F.concat(head, F.lit(',"data":'), data, F.lit("}"))
