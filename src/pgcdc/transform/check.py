"""What is wrong with transforms is said before anything starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import ConfigError
from pgcdc.core.relation import Relation
from pgcdc.event.columns import EVENT_SCHEMA
from pgcdc.transform.program import Chain, compile_chains
from pgcdc.transform.transforms import Transform, from_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def check_specs(spark: SparkSession | None, specs: Sequence[Any]) -> None:
    """Raise ConfigError for the first spec that cannot work: with Spark also for wrong SQL, else what can be known without.

    Nothing is read and no job runs.
    """
    made = [_named(number, spec) for number, spec in enumerate(specs, 1)]
    if spark is None or not any(one.sql for one in made):
        return
    events = spark.createDataFrame([], EVENT_SCHEMA)
    for number, one in enumerate(made, 1):
        for text in one.sql:
            _check_sql(events, f"transform {number} ({one.name})", text, is_condition=one.name == "filter")


def check_chains(spark: SparkSession | None, chains: Sequence[Chain]) -> None:
    """The same for what whole chains are: also routes, and what may follow an envelope."""
    compile_chains(chains)
    for chain in chains:
        check_specs(spark, chain.transforms)


def missing_columns(chains: Sequence[Chain], tables: Sequence[Relation]) -> list[str]:
    """A line for each column that drop_columns, mask or rename_fields names and none of the tables has: a slip, mostly.

    Tables are those that are captured, also for a chain with routes: its transforms may be there for others.
    """
    known = frozenset(column.name for one in tables for column in one.columns)
    if not known:  # nothing is there yet to compare with
        return []
    return list(dict.fromkeys(line for chain in chains for line in _missing(chain, set(known))))


def _missing(chain: Chain, known: set[str]) -> Iterator[str]:
    for one in map(from_spec, chain.transforms):
        if one.name == "python":  # it may add what it likes
            return
        for name in one.named:
            if name not in known:
                hint = _nearest(name, known)
                yield f"{one.name}: no captured table has a column {name}" + (f"; did you mean {hint}?" if hint else "")
        if one.name == "sql":
            known |= set(one.spec.set)
        elif one.name == "rename_fields":
            known |= set(one.spec.fields.values())


def _nearest(name: str, known: set[str]) -> str:
    same = sorted(one for one in known if one.lower() == name.lower())
    return next(iter([*same, *difflib.get_close_matches(name, sorted(known), n=1)]), "")


def _named(number: int, spec: Any) -> Transform:
    try:
        return from_spec(spec)
    except ConfigError as error:
        raise ConfigError(f"transform {number}: {error.message}", error.advice) from error


def _check_sql(events: DataFrame, what: str, text: str, *, is_condition: bool) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, BooleanType, MapType, NullType, StructType

    try:
        chosen = events.select(F.when(F.lit(True), F.expr(text)).alias("value"))
        kind = chosen.schema[0].dataType
        plan = chosen._jdf.queryExecution().analyzed()
    except PySparkException as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"{what}: {text}: {reason}", _advice(events)) from error
    if is_condition and not isinstance(kind, BooleanType | NullType):
        raise ConfigError(f"{what}: {text} is {kind.simpleString()}, not a condition", "Compare it with something")
    if isinstance(kind, ArrayType | MapType | StructType):
        raise ConfigError(
            f"{what}: {text} is {kind.simpleString()}, not one value", "Make text of it with to_json(...)"
        )
    if not plan.deterministic():
        raise ConfigError(f"{what}: {text} is another value each time", "A batch that comes again must be the same")
    other = re.search(r"^[+:\- ]*(Aggregate|Window|Generate)\b", plan.toString(), re.MULTILINE)
    if other is not None:
        raise ConfigError(f"{what}: {text} looks at more than one event", "Use columns of one event only")


def _advice(events: DataFrame) -> str:
    return f"Write Spark SQL on the columns of an event: {', '.join(events.columns)}; a value is row['name']"
