"""Sources for pipelines in Python.

from pgcdc import sources
sources.postgres("postgresql://app@localhost/shop", tables=["orders"], slot_name="shop")
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pgcdc.config import Config
from pgcdc.config.explain import explain
from pgcdc.config.yaml_file import name_key, value_at
from pgcdc.core.errors import ConfigError, ConfigErrors
from pgcdc.postgres.types.column import TypeOptions

if TYPE_CHECKING:
    from pgcdc.source.postgres.single_table import ColumnDescription

__all__ = ["describe", "postgres"]

_ELSEWHERE = {"adapters", "transforms", "routes", "adapter_priority"}


def postgres(url: str = "", **settings: Any) -> Config:
    """A PostgreSQL database and how to capture it: the settings of `pgcdc listen`, with underscores.

    Without `url`, the variable PGCDC_DB provides it. ConfigError: a setting is unknown, or not valid for this source.
    """
    for name in settings.keys() & _ELSEWHERE:
        raise ConfigError(f"{name} is not a setting of a source", "Pass it to the pipeline or to its adapters")
    values = {"db": os.environ.get("PGCDC_DB", ""), **settings, **({"db": url} if url else {})}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigErrors.of(list(explain(error, name_key, partial(value_at, values)))) from None
    config.check()
    return config


def describe(
    url: str,
    table: str,
    *,
    json: str = "string",
    numeric: str = "decimal",
    out_of_range: str = "error",
    arrays: str = "array",
    composites: str = "struct",
) -> list[ColumnDescription]:
    """The columns of a table, and their Spark types with these options (docs/types.md)."""
    from pgcdc.postgres.types.mapping import check_options
    from pgcdc.source.postgres.single_table import describe_table
    from pgcdc.spark.tables import spark_name

    types = check_options(TypeOptions(json, numeric, out_of_range, arrays, composites))
    return describe_table(url, table, types, spark_name)
