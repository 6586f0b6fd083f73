"""Finds the transform and the event that made a Spark job fail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgcdc.core.errors import PgcdcError, TransformError
from pgcdc.transform.specs import Chain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def explain_failure(batch: DataFrame, error: Exception, chains: Sequence[Chain]) -> Exception:
    """The error of the transform that failed in a job over a batch; if none did, the same error."""
    text = str(error)
    ours = re.search(r"pgcdc\.core\.errors\.(\w+): ([^\n]*)", text)
    if ours is not None:
        return PgcdcError.from_json({"kind": ours[1], "message": ours[2].rstrip(" ;"), "advice": ""})
    for chain in chains:
        for number, one in enumerate(chain.transforms, 1):
            written = next((sql for sql in one.sql if " ".join(sql.split()) in " ".join(text.split())), None)
            if written is not None:
                place = _find_failing(batch)
                where = f" at position {place}" if place else ""
                return TransformError(
                    f"transform {number} ({one.type}) failed{where}: {written}: {_reason(text)}",
                    "Correct the expression: try_cast gives NULL for what cannot be cast",
                )
    return error


def _reason(text: str) -> str:
    """Spark's first sentence without its advice."""
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    return re.split(r" (?:Use|If necessary) ", first)[0].rstrip(". ")


def _find_failing(projected: DataFrame) -> str | None:
    """The position of the first failing event, found by bisection: Spark's errors do not name it."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    def fails(low: str, high: str) -> bool:
        chosen = projected.where((F.col("position") >= low) & (F.col("position") <= high))
        try:
            chosen.write.format("noop").mode("overwrite").save()
        except PySparkException:
            return True
        return False

    try:
        places = [row.position for row in projected.select("position").collect()]
        if not places:
            return None
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            if fails(places[low], places[middle]):
                high = middle
            else:
                low = middle + 1
        return str(places[low]) if fails(places[low], places[low]) else None
    except PySparkException:
        return None
