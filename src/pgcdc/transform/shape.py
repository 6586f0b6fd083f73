"""The column `shape` after transforms of `row`: whoever drops, renames or replaces columns says so here as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pgcdc.event.shape import Family

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["edit_shape"]


def edit_shape(
    df: DataFrame, *, drop: Sequence[str] = (), rename: Mapping[str, str] = {}, as_text: Sequence[str] = ()
) -> DataFrame:
    """The same events; if they have the column `shape`, it knows that these columns are gone, renamed, or text now.

    Without it an envelope still writes a document, but a dropped column shows up as null in a key-only old row, and a
    renamed one becomes a string.
    """
    from pyspark.sql import functions as F

    if "shape" not in df.columns:
        return df
    shape = F.col("shape")
    names, codes = shape["names"], shape["codes"]

    def code_of(code: Column, place: Column) -> Column:
        name = F.get(names, place)
        for columns, family in ((as_text, Family.TEXT), (drop, Family.OTHER)):
            if columns:
                code = F.when(name.isin(*columns), F.lit(int(family))).otherwise(code)
        return code

    if drop or as_text:
        shape = shape.withField("codes", F.transform(codes, code_of))
    if rename:
        for field in ("names", "key"):
            shape = shape.withField(field, F.transform(F.col("shape")[field], lambda name: _renamed(name, rename)))
    return df.withColumn("shape", shape)


def _renamed(name: Column, rename: Mapping[str, str]) -> Column:
    from pyspark.sql import functions as F

    changed = name
    for old, new in rename.items():
        changed = F.when(name == old, F.lit(new)).otherwise(changed)
    return changed
