"""Transforms of events as native Spark expressions.

Every function takes a DataFrame of events and gives one with the same columns. If it has the boolean column `_keep`, as in a
lane, filters note there what is left out, so that a chain is a row of projections; else they leave the rows out. Columns of
`row` and `old` are changed for rows of tables only: messages, markers and schema events have no table, and stay as they are.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pgcdc.core.errors import ConfigError
from pgcdc.event.edits import full_pattern
from pgcdc.event.masks import LOOKS, REDACTED, hmac_pads

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "KEEP",
    "dropped",
    "filtered",
    "has_row",
    "is_active",
    "is_routed",
    "masked",
    "renamed",
    "with_values",
]

KEEP = "_keep"
UNCHANGED = "unchanged_toast_columns"
_VALUES, _ROW, _OLD_VALUES = "_values", "_row", "_old_values"


def dropped(events: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Without these columns in `row` and `old`."""
    from pyspark.sql import functions as F

    return _with_columns(
        events,
        lambda values: F.map_filter(values, lambda name, _: ~name.isin(*columns)),
        lambda names: F.filter(names, lambda name: ~name.isin(*columns)),
    )


def renamed(events: DataFrame, fields: Mapping[str, str]) -> DataFrame:
    """With other names for columns of `row` and `old`. Two columns of the same name are an error."""
    from pyspark.sql import functions as F

    def rename(name: Column) -> Column:
        chosen = F.when(F.lit(False), name)
        for before, after in fields.items():
            chosen = chosen.when(name == before, F.lit(after))
        return chosen.otherwise(name)

    def rename_all(values: Column) -> Column:
        after = F.transform(F.map_keys(values), rename)
        clash = F.size(F.array_distinct(after)) < F.size(after)
        return F.when(clash, _clash()).otherwise(F.transform_keys(values, lambda name, _: rename(name)))

    def _clash() -> Column:
        place = F.concat_ws("", F.col("channel"), F.lit(" at "), F.col("position"))
        message = F.concat(
            F.lit("pgcdc.core.errors.TransformError: rename_fields gives two columns the name of one: an event of "),
            place,
        )
        advice = F.lit(". Drop the other column first, or choose another name")
        return F.raise_error(F.concat(message, advice)).cast("map<string,string>")

    return _with_columns(events, rename_all, lambda names: F.transform(names, rename))


def masked(events: DataFrame, columns: Sequence[str], mode: str, key: bytes | None = None) -> DataFrame:
    """With hidden values in `row` and `old`; NULL stays NULL. `hash` needs a key."""
    from pyspark.sql import functions as F

    def hide(value: Column) -> Column:
        if mode == "hash":
            assert key is not None
            return _hmac(value, key)
        if mode == "redact":
            return F.when(value.isNotNull(), F.lit(REDACTED))
        chosen = F.when(value.isNull(), F.lit(None).cast("string"))
        for look, zero in LOOKS:
            chosen = chosen.when(value.rlike(look), F.lit(zero))
        return chosen.otherwise(F.lit(""))

    def hide_all(values: Column) -> Column:
        return F.transform_values(values, lambda name, value: F.when(name.isin(*columns), hide(value)).otherwise(value))

    return _with_columns(events, hide_all, lambda names: names)


def filtered(events: DataFrame, operations: Sequence[str], where: str | None) -> DataFrame:
    """Only these operations (none: all), and of changes of rows only those for which the SQL condition is true."""
    from pyspark.sql import functions as F

    passes = F.col("operation").isin(*operations) if operations else F.lit(True)
    if where is not None:
        asked = is_active(events) & passes & has_row()  # what is left out already is not asked, and cannot fail
        passes = passes & F.when(asked, F.coalesce(F.expr(where), F.lit(False))).otherwise(F.lit(True))
    if KEEP in events.columns:
        return events.withColumn(KEEP, F.col(KEEP) & passes)
    return events.where(passes)


def with_values(events: DataFrame, expressions: Mapping[str, str]) -> DataFrame:
    """With values of `row` set by SQL expressions. All of them see the row as it was.

    What was sent of an old row (`old`, and the row of a DELETE) gets no further columns, so that "not sent" never looks like
    NULL. For the same reason a column that is unchanged TOAST stays so.
    """
    from pyspark.sql import functions as F

    columns = events.columns
    values = F.struct(*(_as_text(events, text).alias(str(number)) for number, text in enumerate(expressions.values())))
    active = is_active(events) & F.col("table").isNotNull()
    steps = events.withColumns({_VALUES: F.when(active & F.col("row").isNotNull(), values), _ROW: F.col("row")})
    changed = {
        "row": F.when(active, _set_values(F.col(_ROW), F.col(_VALUES), list(expressions))).otherwise(F.col(_ROW))
    }
    if "old" in columns:  # the same expressions once more, where `row` is the old row
        steps = steps.withColumn("row", F.col("old"))
        steps = steps.withColumn(_OLD_VALUES, F.when(active & F.col("old").isNotNull(), values))
        replaced = _replace_values(F.col("old"), F.col(_OLD_VALUES), list(expressions))
        changed["old"] = F.when(active, replaced).otherwise(F.col("old"))
    return steps.withColumns(changed).select(*columns)


def _set_values(row: Column, values: Column, names: list[str]) -> Column:
    """The values at their names: in their places, or behind the others."""
    from pyspark.sql import functions as F

    unchanged = F.coalesce(F.col(UNCHANGED), F.array().cast("array<string>"))
    takes_more = F.col("operation") != "DELETE"
    is_new = [takes_more & ~F.map_contains_key(row, name) & ~F.array_contains(unchanged, name) for name in names]
    added = [
        F.when(one, F.create_map(F.lit(name), values[str(number)])).otherwise(F.create_map().cast("map<string,string>"))
        for number, (name, one) in enumerate(zip(names, is_new, strict=True))
    ]
    return F.map_concat(_replace_values(row, values, names), *added)


def _replace_values(row: Column, values: Column, names: list[str]) -> Column:
    from pyspark.sql import functions as F

    def choose(name: Column, value: Column) -> Column:
        chosen = F.when(F.lit(False), value)
        for number, wanted in enumerate(names):
            chosen = chosen.when(name == wanted, values[str(number)])
        return chosen.otherwise(value)

    return F.transform_values(row, choose)


def _as_text(events: DataFrame, expression: str) -> Column:
    """A value as events carry it: the text of PostgreSQL, as far as Spark's is another."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import BooleanType

    value = F.expr(expression)
    if isinstance(events.select(value).schema[0].dataType, BooleanType):
        return F.when(value, F.lit("t")).when(~value, F.lit("f"))
    return value.cast("string")


def is_routed(patterns: Iterable[str]) -> Column:
    """Whether an event's channel matches one of the patterns (shell style, with regard to case)."""
    from pyspark.sql import functions as F

    regexes = [fnmatch.translate(full_pattern(one)).removesuffix(r"\Z") for one in patterns]
    return F.coalesce(F.col("channel").rlike(r"\A(?:" + "|".join(regexes) + r")\z"), F.lit(False))


def is_active(events: DataFrame) -> Column:
    """Whether the chain still has the event."""
    from pyspark.sql import functions as F

    return F.col(KEEP) if KEEP in events.columns else F.lit(True)


def has_row() -> Column:
    """Whether the event is the change of a row of a table."""
    from pyspark.sql import functions as F

    return F.col("table").isNotNull() & F.col("row").isNotNull()


def _with_columns(
    events: DataFrame, of_row: Callable[[Column], Column], of_names: Callable[[Column], Column]
) -> DataFrame:
    """`row` and `old` changed by `of_row`, and the names of what was not sent by `of_names`."""
    from pyspark.sql import functions as F

    is_table = is_active(events) & F.col("table").isNotNull()
    present = events.columns
    changed: dict[str, Column] = {
        name: F.when(is_table, of_row(F.col(name))).otherwise(F.col(name)) for name in ("row", "old") if name in present
    }
    if UNCHANGED in present:
        names = of_names(F.col(UNCHANGED))
        changed[UNCHANGED] = F.when(is_table, F.when(F.size(names) > 0, names)).otherwise(F.col(UNCHANGED))
    return events.withColumns(changed)


def _hmac(value: Column, key: bytes) -> Column:
    """HMAC-SHA256 of a text in hexadecimal: two hashes, each behind a block that the key makes."""
    from pyspark.sql import functions as F

    inner, outer = (_secret(value, pad) for pad in hmac_pads(key))
    digest = F.unhex(F.sha2(F.concat(inner, value.cast("binary")), 256))
    return F.sha2(F.concat(outer, digest), 256)


def _secret(value: Column, secret: bytes) -> Column:
    """Bytes that no plan shows: they are inside of a Java object, and taken out when a row is hashed.

    A literal would stand in `explain`, in the event log and in the UI. That a value is asked for here keeps the optimizer
    from making a literal of it.
    """
    from pyspark.core.context import SparkContext
    from pyspark.sql import functions as F
    from pyspark.sql.classic.column import Column as ClassicColumn

    context = SparkContext._active_spark_context
    jvm = context._jvm if context is not None else None
    if jvm is None:
        raise ConfigError(
            "mask with mode hash needs a Spark session of this process", "Spark Connect has none: use redact"
        )
    catalyst, utilities = (
        jvm.org.apache.spark.sql.catalyst.expressions,
        jvm.org.apache.spark.sql.classic.ExpressionUtils,
    )
    # Plans print the holder's hash code: with random bytes behind the secret it says nothing of it.
    holder = jvm.javax.crypto.spec.SecretKeySpec(bytearray(secret + os.urandom(len(secret))), "pgcdc")
    kind = jvm.org.apache.spark.sql.types.ObjectType(holder.getClass())
    held = ClassicColumn(utilities.column(catalyst.Literal.create(holder, kind)))
    target = utilities.expression(F.when(value.isNotNull(), held)._jc)
    nothing = jvm.PythonUtils.toSeq(jvm.java.util.ArrayList())
    binary = getattr(getattr(jvm.org.apache.spark.sql.types, "BinaryType$"), "MODULE$")
    taken = catalyst.objects.Invoke(target, "getEncoded", binary, nothing, nothing, True, True, True)
    return F.substring(ClassicColumn(utilities.column(taken)), 1, len(secret))
