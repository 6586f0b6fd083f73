"""Transforms of events: functions on DataFrames, also used in chains for the sinks of a pipeline (`transform.specs`).

from pgcdc import transform

events.transform(transform.drop_columns("password")).transform(transform.mask("email", mode="hash", key_env="MASK_KEY"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import ConfigError
from pgcdc.event.columns import EVENT_SCHEMA, SHAPE_SCHEMA
from pgcdc.event.envelopes import write_keys
from pgcdc.transform.specs import Chain, MaskSpec, PythonSpec, Transform, from_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pgcdc.transform.steps import EventFunction

__all__ = [
    "EVENT_SCHEMA",
    "SHAPE_SCHEMA",
    "Transform",
    "check_chains",
    "check_specs",
    "cloudevents_envelope",
    "debezium_envelope",
    "debezium_key",
    "drop_columns",
    "event_json",
    "filter",
    "from_spec",
    "mask",
    "python",
    "rename_fields",
    "sql",
]

KEY = "_key"  # An added column with the key that Debezium gives its message


def check_specs(spark: SparkSession | None, specs: Sequence[Any]) -> None:
    """Raise ConfigError for the first spec that cannot work. Checks SQL only with Spark. Reads no data and runs no
    job."""
    for number, spec in enumerate(specs, 1):
        try:
            made = from_spec(spec)
        except ConfigError as error:
            raise ConfigError(f"transform {number}: {error.message}", error.advice) from error
        if spark is not None:
            from pgcdc.transform.expressions import check_sql

            check_sql(spark, f"transform {number} ({made.type})", made)


def check_chains(spark: SparkSession | None, chains: Sequence[Chain]) -> None:
    """Raise ConfigError for chains that cannot work. Checks SQL only with Spark. Reads no data and runs no job."""
    for chain in chains:
        chain.made()
        check_specs(spark, chain.transforms)


def drop_columns(*columns: str) -> Transform:
    """Remove columns from `row`, `old` and `unchanged_toast_columns`."""
    return from_spec({"type": "drop_columns", "columns": columns})


def rename_fields(fields: Mapping[str, str] | None = None, /, **more: str) -> Transform:
    """Rename columns of `row` and `old`: `rename_fields(id="order_id")` or `rename_fields({"id": "order_id"})`."""
    return from_spec({"type": "rename_fields", "fields": {**(fields or {}), **more}})


def mask(
    *columns: str,
    mode: str = "redact",
    key: str | bytes | None = None,
    key_env: str | None = None,
    key_file: str | None = None,
) -> Transform:
    """Hide values of `row` and `old`: `redact`, `zero`, or `hash` (HMAC-SHA256) with a key, which no plan of Spark
    shows."""
    spec = {"type": "mask", "columns": columns, "mode": mode, "key_env": key_env, "key_file": key_file}
    if key is None:
        return from_spec(spec)
    if mode != "hash" or key_env or key_file:
        raise ConfigError(
            "mask got a key that its mode does not use", "Set one of key, key_env and key_file, with mode hash"
        )
    made = MaskSpec.model_validate(spec)
    made._secret = key.encode() if isinstance(key, str) else key
    return made


def filter(*, operations: tuple[str, ...] | list[str] = (), where: str | None = None) -> Transform:
    """Keep only these operations, and only row changes for which the Spark SQL condition is true."""
    return from_spec({"type": "filter", "operations": operations, "where": where})


def sql(values: Mapping[str, str] | None = None, /, **more: str) -> Transform:
    """Set values of `row` by Spark SQL: `sql(total="cast(row['net'] AS decimal(12,2)) * 1.19")`."""
    return from_spec({"type": "sql", "set": {**(values or {}), **more}})


def python(function: str | EventFunction) -> Transform:
    """Call a function with each event (a dict). It returns the event, changed or not, or None to drop it."""
    if isinstance(function, str):
        return from_spec({"type": "python", "function": function})
    name = f"{function.__module__}:{function.__name__}".replace("<lambda>", "function")
    made = PythonSpec.model_construct(function=name)
    made._call = function
    return made


def debezium_envelope(**options: Any) -> Transform:
    """The event as Debezium's PostgreSQL connector writes it, in the column `_text`; see docs/envelopes.md."""
    return from_spec({"type": "debezium", **options})


def cloudevents_envelope(**options: Any) -> Transform:
    """The event as a CloudEvents 1.0 document, in the column `_text`; see docs/envelopes.md."""
    return from_spec({"type": "cloudevents", **options})


def event_json(events: DataFrame, *, transaction: bool = False) -> DataFrame:
    """The events with their JSON, as `pgcdc listen` writes it, in the column `_text`."""
    from pgcdc.transform.steps import with_event_text

    return with_event_text(events, transaction=transaction)


def debezium_key(events: DataFrame) -> DataFrame:
    """The events with Debezium's message key in the column `_key`; NULL for tables without a key."""
    from pgcdc.transform.steps import need_columns, with_text

    need_columns(events, "shape")
    return with_text(events, KEY, write_keys)
