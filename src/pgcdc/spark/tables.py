"""Typed tables for Spark users: `read_table` and `read_tables` for their changes, `read_snapshot` for their rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pgcdc.core.errors import ConfigError
from pgcdc.postgres.database import name_table, split_table
from pgcdc.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["read_snapshot", "read_table", "read_tables"]


def read_table(spark: SparkSession, table: str, **options: str) -> DataFrame:
    """A streaming DataFrame of one table: its own columns, in Spark's types.

    `options` are those of `format("pgcdc")`, as in docs/tables.md; `slot`, `state_dir` and `consumer` say whose it is.
    """
    register(spark)
    return spark.readStream.format("pgcdc").options(**options).option("table", table).load()


def read_snapshot(spark: SparkSession, table: str, **options: str) -> DataFrame:
    """A DataFrame of the rows that a table has, all of one moment. Options: see docs/snapshots.md."""
    register(spark)
    return spark.read.format("pgcdc").options(**{"metadata": "false", **options}).option("table", table).load()


def read_tables(spark: SparkSession, tables: Iterable[str], **options: str) -> dict[str, DataFrame]:
    """One typed streaming DataFrame for each table, all from one slot. Every one is a consumer of its own.

    The consumers are named after the tables (`shop.orders`), behind the option `consumer` if it is given
    (`report:shop.orders`).
    """
    if isinstance(tables, str):
        raise ConfigError("read_tables takes a list of tables, not a text", f"Write [{tables!r}], or use read_table")
    names = list(tables)
    titles = [name_table(*split_table(name)) for name in names]
    if not names or len(set(titles)) != len(titles):
        raise ConfigError("read_tables needs every table once", "Give a list of different tables")
    given = dict(options)
    prefix = given.pop("consumer", "")
    if not any(given.get(name) for name in ("tables", "schemas", "all_tables", "publication")):
        given["tables"] = ",".join(names)
    return {
        name: read_table(spark, name, consumer=f"{prefix}:{title}" if prefix else title, **given)
        for name, title in zip(names, titles, strict=True)
    }
