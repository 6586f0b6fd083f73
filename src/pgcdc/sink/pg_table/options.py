"""What the adapter `pg_table` is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from pgcdc.capture.selection import split_outside_quotes

__all__ = ["NO_ORIGIN", "PgTableOptions"]

NO_ORIGIN = "none"


def _split_rules(value: Any) -> Any:
    """`a=b, c.*=d.*` in a flag or variable; a list of such, or a mapping, in YAML."""
    if isinstance(value, str):
        return tuple(split_outside_quotes(value, ","))
    if isinstance(value, Mapping):
        return tuple(f"{source}={target}" for source, target in value.items())
    return value


TableRules = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_rules),
    WithJsonSchema({
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ]
    }),
]  # fmt: skip


class PgTableOptions(BaseModel):
    """Events as rows of a table in PostgreSQL, or applied to tables like those of the source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    db: str = Field(
        default="",
        repr=False,
        description="database URL of the target (default: the source's); better in PGCDC_PG_TABLE_DB",
        json_schema_extra={"cascade": "db", "secret": True},
    )
    db_file: str | None = Field(default=None, description="the file that holds the target's database URL")
    mode: Literal["append", "apply"] = Field(
        default="append", description="append: a row per event; apply: the tables of the source, kept equal"
    )
    table: str = Field(default="pgcdc_events", min_length=1, description="append: the table that gets the events")
    target_schema: str | None = Field(
        default=None, min_length=1, description="apply: all tables go to this schema (default: as in the source)"
    )
    tables: TableRules = Field(
        default=(), description="apply: other names for tables, public.orders=mirror.orders2,sales.*=archive.*"
    )
    create: bool = Field(default=True, description="create tables that are missing")
    evolve: Literal["full", "add", "none"] = Field(
        default="full", description="apply: follow changes of tables: full, add (new columns only) or none"
    )
    origin: str = Field(
        default="",
        max_length=512,
        description="name of the replication origin; none: without (default: pgcdc_ADAPTER)",
    )
    triggers: Literal["off", "on"] = Field(
        default="off", description="whether triggers and foreign keys of the target fire"
    )
