"""Transforms as configuration: one frozen model per `type` under `transforms:` in the YAML file.

Each model says what is wanted and nothing about how: `pgcdc.transform` has the function of the same name on DataFrames.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "CloudEventsSpec",
    "DebeziumSpec",
    "DropColumnsSpec",
    "FilterSpec",
    "MaskSpec",
    "PythonSpec",
    "RenameFieldsSpec",
    "SqlSpec",
    "TransformSpec",
]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DropColumnsSpec(_Spec):
    """Leave columns out of `row` and `old`."""

    type: Literal["drop_columns"] = "drop_columns"
    columns: tuple[str, ...] = Field(min_length=1)


class RenameFieldsSpec(_Spec):
    """Give columns of `row` and `old` other names."""

    type: Literal["rename_fields"] = "rename_fields"
    fields: dict[str, str] = Field(min_length=1, description="from: to")


class MaskSpec(_Spec):
    """Hide values in `row` and `old`. NULL stays NULL."""

    type: Literal["mask"] = "mask"
    columns: tuple[str, ...] = Field(min_length=1)
    mode: Literal["zero", "hash", "redact"] = "redact"
    key_env: str | None = Field(None, description="hash: the variable with the key")
    key_file: str | None = Field(None, description="hash: the file with the key")


class FilterSpec(_Spec):
    """Keep only some events. With both, an event must pass both."""

    type: Literal["filter"] = "filter"
    operations: tuple[str, ...] = ()
    where: str | None = Field(
        None, description="a Spark SQL condition on the event's columns, such as row['total'] > 100"
    )


class DebeziumSpec(_Spec):
    """The event as Debezium's PostgreSQL connector writes it."""

    type: Literal["debezium"] = "debezium"
    topic_prefix: str = "pgcdc"
    transaction: bool = Field(False, description="with the transaction block (provide.transaction.metadata)")


class CloudEventsSpec(_Spec):
    """The event as a CloudEvents 1.0 structured JSON document."""

    type: Literal["cloudevents"] = "cloudevents"
    source: str = "/pgcdc"
    type_prefix: str = "io.pgcdc"


class SqlSpec(_Spec):
    """Set values of `row` by Spark SQL expressions on the event's columns."""

    type: Literal["sql"] = "sql"
    set: dict[str, str] = Field(min_length=1, description="column: expression")


class PythonSpec(_Spec):
    """A Python function from event to event; None drops the event."""

    type: Literal["python"] = "python"
    function: str = Field(description="module:function", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


TransformSpec = Annotated[
    DropColumnsSpec | RenameFieldsSpec | MaskSpec | FilterSpec | DebeziumSpec | CloudEventsSpec | SqlSpec | PythonSpec,
    Field(discriminator="type"),
]
"""One entry of a list of transforms."""
