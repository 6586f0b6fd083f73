"""Typed rows as JSON lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["row_lines"]


_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}


def row_lines(rows: DataFrame) -> DataFrame:
    """`position` and `line` (JSON with a newline, NULLs included) of each typed row: what sinks of lines take."""
    from pyspark.sql import functions as F

    position = F.concat(F.lpad(F.hex("_lsn"), 16, "0"), F.lit("/"), F.lpad(F.hex("_ordinal"), 12, "0"))
    line = F.concat(F.to_json(F.struct("*"), _OPTIONS), F.lit("\n"))
    return rows.select(position.alias("position"), line.alias("line"))
