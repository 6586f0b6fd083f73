"""Transforms as configuration: one frozen model per `type` under `transforms:` in the YAML file.

Each model says what is wanted and nothing about how: `pgcdc.transform` has the function of the same name on DataFrames.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pgcdc.core.relation import Op


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

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        names = list(fields.values())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two fields get the name {twice}")
        if not all(names):
            raise ValueError("a field gets an empty name")
        return fields


class MaskSpec(_Spec):
    """Hide values in `row` and `old`. NULL stays NULL."""

    type: Literal["mask"] = "mask"
    columns: tuple[str, ...] = Field(min_length=1)
    mode: Literal["zero", "hash", "redact"] = "redact"
    key_env: str | None = Field(None, description="hash: the variable with the key")
    key_file: str | None = Field(None, description="hash: the file with the key")

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.mode != "hash" and (self.key_env or self.key_file):
            raise ValueError(f"mode {self.mode} needs no key; leave key_env and key_file out, or write mode: hash")
        if self.key_env and self.key_file:
            raise ValueError("give key_env or key_file, not both")
        return self


class FilterSpec(_Spec):
    """Keep only some events. With both, an event must pass both."""

    type: Literal["filter"] = "filter"
    operations: tuple[str, ...] = ()
    where: str | None = Field(
        None, description="a Spark SQL condition on changes of rows, such as cast(row['total'] AS decimal(12,2)) > 100"
    )

    @field_validator("operations")
    @classmethod
    def _check_operations(cls, operations: tuple[str, ...]) -> tuple[str, ...]:
        known = [op.name for op in Op]
        for given in operations:
            if given.upper() not in known:
                close = difflib.get_close_matches(given.upper(), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise ValueError(f"unknown operation {given}; {hint}")
        return tuple(given.upper() for given in operations)

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not self.operations and not (self.where or "").strip():
            raise ValueError("a filter needs operations, where, or both")
        return self


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
