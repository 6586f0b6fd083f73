"""Checks users' SQL before anything runs: whether it is valid, and what it reads of an event."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import ConfigError
from pgcdc.event.columns import EVENT_COLUMNS, EVENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc.transform.specs import Transform

_SIDES = ("row", "old")


def check_sql(spark: SparkSession, what: str, transform: Transform) -> None:
    """Raise ConfigError for invalid SQL of a transform. Reads no data and runs no job."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, BooleanType, MapType, NullType, StructType

    if not transform.sql:
        return
    events = spark.createDataFrame([], EVENT_SCHEMA)
    advice = f"Write Spark SQL on the columns of an event: {', '.join(events.columns)}; a value is row['name']"
    for text in transform.sql:
        try:
            chosen = events.select(F.when(F.lit(True), F.expr(text)).alias("value"))
            kind = chosen.schema[0].dataType
            plan = chosen._jdf.queryExecution().analyzed()
        except PySparkException as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(f"{what}: {text}: {reason}", advice) from error
        if transform.type == "filter" and not isinstance(kind, BooleanType | NullType):
            raise ConfigError(f"{what}: {text} is {kind.simpleString()}, not a condition", "Write a comparison")
        if isinstance(kind, ArrayType | MapType | StructType):
            raise ConfigError(
                f"{what}: {text} is {kind.simpleString()}, not one value", "Convert it to text with to_json(...)"
            )
        if not plan.deterministic():
            raise ConfigError(
                f"{what}: {text} gives a different value each time",
                "Remove it: a repeated batch must give the same events",
            )
        other = re.search(r"^[+:\- ]*(Aggregate|Window|Generate)\b", plan.toString(), re.MULTILINE)
        if other is not None:
            raise ConfigError(f"{what}: {text} uses more than one event", "Use columns of one event only")
        if plan.subqueriesAll().nonEmpty() and _joins(plan):
            raise ConfigError(
                f"{what}: {text} joins the events with another table",
                "A join would lose their order. A subquery may return a single value, the same for every event; "
                "compare with a list by IN ('a', 'b')",
            )


def _joins(plan: Any) -> bool:
    """Whether Spark makes a join of a subquery: of `IN`, and of one that refers to the event."""
    left = _items(plan.expressions())
    while left:
        one = left.pop()
        if _kind(one) == "InSubquery":
            return True
        if _kind(one) in ("Exists", "ScalarSubquery", "LateralSubquery") and one.outerAttrs().nonEmpty():
            return True
        left += _items(one.children())
    return False


def find_read(expressions: Sequence[str]) -> tuple[set[str], list[str] | None]:
    """The columns of events that SQL expressions read, and the values of `row` and `old`; None: all of them."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    try:
        events = SparkSession.active().createDataFrame([], EVENT_SCHEMA)
        plan = events.select(*map(F.expr, expressions))._jdf.queryExecution().analyzed()
    except PySparkException:  # no Spark here, or one that does not know a function
        return set(EVENT_COLUMNS), None
    if plan.subqueriesAll().nonEmpty():
        return set(EVENT_COLUMNS), None
    columns, values, is_whole = set[str](), set[str](), False
    left = _items(plan.expressions())
    while left:
        one = left.pop()
        children = _items(one.children())
        if (
            _kind(one) in ("GetMapValue", "ElementAt")
            and _kind(children[1]) == "Literal"
            and _name(children[0]) in _SIDES
        ):
            columns.add(_name(children[0]))
            values.add(str(children[1].value()))
            continue
        if name := _name(one):
            columns.add(name)
            is_whole = is_whole or name in (*_SIDES, "unchanged_toast_columns")
        left += children
    return columns, None if is_whole else sorted(values)


def _items(sequence: Any) -> list[Any]:
    """The items of a Scala sequence."""
    return [sequence.apply(number) for number in range(sequence.size())]


def _kind(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _name(expression: Any) -> str:
    """The name of a column; "" if it is something else."""
    return expression.name().lower() if _kind(expression) == "AttributeReference" else ""
