"""Transforms as configuration: one frozen model for each `type` under `transforms:` in the YAML file.

A model describes one transform; calling it with a DataFrame of events returns the transformed DataFrame. `event.edits`
and `event.envelopes` implement simple steps, `transform.steps` those that need Spark, and `transform.program` chooses
between them for the sinks of a pipeline.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from pgcdc.core.errors import ConfigError
from pgcdc.core.relation import Op, Relation
from pgcdc.event.edits import SimpleChain, full_pattern, read_key
from pgcdc.event.forms import Form

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Transform(BaseModel):
    """One step. Called with a DataFrame of events, it returns another one with the same columns."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: str
    is_envelope: ClassVar[bool] = False  # Whether it changes the form of the whole event

    @property
    def is_simple(self) -> bool:
        """Whether the source can apply it to whole columns, before rendering (`event.edits`)."""
        return not self.sql

    @property
    def sql(self) -> tuple[str, ...]:
        return ()

    @property
    def taken(self) -> dict[str, str]:
        """The columns that no event has after this step, with their new names; empty: dropped."""
        return {}

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that events should have at this step."""
        return tuple(self.taken)

    @property
    def added(self) -> tuple[str, ...]:
        """The columns that events may have after this step, whatever they had before."""
        return tuple(name for name in self.taken.values() if name)

    @property
    def step(self) -> dict[str, Any]:
        """The step for `event.edits`, as JSON. Never contains a key."""
        return self.model_dump(mode="json")

    @property
    def worker_step(self) -> dict[str, Any]:
        """The step for `transform.steps` in Spark's workers, with the function, and with the key, which is read
        here."""
        return self.step

    def check(self) -> None:
        """Raise ConfigError for problems that can be found without Spark: a missing key or function."""
        return None

    def __call__(self, events: DataFrame) -> DataFrame:
        """The events after this step; after an envelope also with the column `_text`."""
        from pgcdc.transform import steps

        return (
            steps.with_event_text(events, self.step)
            if self.is_envelope
            else steps.run_native(events, [self.worker_step])
        )


class DropColumnsSpec(Transform):
    """Leave columns out of `row` and `old`."""

    type: Literal["drop_columns"] = "drop_columns"
    columns: tuple[str, ...] = Field(min_length=1)

    @property
    def taken(self) -> dict[str, str]:
        return dict.fromkeys(self.columns, "")


class RenameFieldsSpec(Transform):
    """Give columns of `row` and `old` other names."""

    type: Literal["rename_fields"] = "rename_fields"
    fields: dict[str, str] = Field(min_length=1, description="from: to")

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        names = list(fields.values())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two fields would be named {twice}")
        if not all(names):
            raise ValueError("a field would have an empty name")
        return fields

    @property
    def taken(self) -> dict[str, str]:
        return self.fields


class MaskSpec(Transform):
    """Hide values in `row` and `old`. NULL stays NULL."""

    type: Literal["mask"] = "mask"
    columns: tuple[str, ...] = Field(min_length=1)
    mode: Literal["zero", "hash", "redact"] = "redact"
    key_env: str | None = Field(None, description="hash: the variable that contains the key")
    key_file: str | None = Field(None, description="hash: the file that contains the key")
    _secret: bytes | None = PrivateAttr(None)
    """The key, if given in Python instead of by the name of a variable or file."""

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.mode != "hash" and (self.key_env or self.key_file):
            raise ValueError(f"mode {self.mode} needs no key; remove key_env and key_file, or write mode: hash")
        if self.key_env and self.key_file:
            raise ValueError("key_env and key_file cannot be combined; remove one of them")
        return self

    @property
    def is_simple(self) -> bool:
        return self._secret is None

    @property
    def named(self) -> tuple[str, ...]:
        return self.columns

    @property
    def worker_step(self) -> dict[str, Any]:
        return {**self.step, "key": self._key()} if self.mode == "hash" else self.step

    def _key(self) -> bytes:
        return self._secret if self._secret is not None else read_key(self.key_env, self.key_file)

    def check(self) -> None:
        if self.mode == "hash":
            self._key()


class FilterSpec(Transform):
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
                hint = f"did you mean {close[0]}?" if close else f"known operations: {', '.join(known)}"
                raise ValueError(f"unknown operation {given}; {hint}")
        return tuple(given.upper() for given in operations)

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not self.operations and not (self.where or "").strip():
            raise ValueError("a filter needs operations, where, or both")
        return self

    @property
    def sql(self) -> tuple[str, ...]:
        return () if self.where is None else (self.where,)

    def __call__(self, events: DataFrame) -> DataFrame:
        from pgcdc.transform.steps import filtered

        return filtered(events, self.operations, self.where)


class DebeziumSpec(Transform):
    """The event as Debezium's PostgreSQL connector writes it."""

    is_envelope = True
    type: Literal["debezium"] = "debezium"
    topic_prefix: str = "pgcdc"
    transaction: bool = Field(False, description="with the transaction block (provide.transaction.metadata)")


class CloudEventsSpec(Transform):
    """The event as a CloudEvents 1.0 structured JSON document."""

    is_envelope = True
    type: Literal["cloudevents"] = "cloudevents"
    source: str = "/pgcdc"
    type_prefix: str = "io.pgcdc"


class SqlSpec(Transform):
    """Set values of `row` by Spark SQL expressions on the event's columns."""

    type: Literal["sql"] = "sql"
    set: dict[str, str] = Field(min_length=1, description="column: expression")

    @property
    def sql(self) -> tuple[str, ...]:
        return tuple(self.set.values())

    @property
    def added(self) -> tuple[str, ...]:
        return tuple(self.set)

    def __call__(self, events: DataFrame) -> DataFrame:
        from pgcdc.transform.steps import with_values

        return with_values(events, self.set)


class PythonSpec(Transform):
    """A Python function from event to event; None drops the event."""

    type: Literal["python"] = "python"
    function: str = Field(description="module:function", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    _call: Any = PrivateAttr(None)  # The function, if given in Python instead of by name

    @property
    def is_simple(self) -> bool:
        return False

    @property
    def worker_step(self) -> dict[str, Any]:
        return {**self.step, "call": self._call}

    def check(self) -> None:
        from pgcdc.transform.steps import load_function

        if self._call is None:
            load_function(self.function)


TransformSpec = Annotated[
    DropColumnsSpec | RenameFieldsSpec | MaskSpec | FilterSpec | DebeziumSpec | CloudEventsSpec | SqlSpec | PythonSpec,
    Field(discriminator="type"),
]  # One entry of a list of transforms
_ADAPTER: TypeAdapter[Any] = TypeAdapter(TransformSpec)


def from_spec(spec: Any) -> Transform:
    """The transform for a YAML-style mapping; a transform is returned unchanged. Raises ConfigError."""
    if isinstance(spec, Mapping):
        try:
            spec = _ADAPTER.validate_python(dict(spec))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(one) for one in first["loc"])
            raise ConfigError(
                f"transform {spec.get('type', '')}: {place}: {first['msg']}", "See docs/transforms.md"
            ) from error
    if not isinstance(spec, Transform):
        raise ConfigError(
            f"{spec!r} is not a transform", "Make one with pgcdc.transform, such as transform.drop_columns('a')"
        )
    spec.check()
    return spec


# --- chains


@dataclass(frozen=True)
class Chain:
    """What one sink receives: channel patterns (none: all channels), transforms in order (`transform.specs`), and the
    form."""

    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()
    form: Form = "lines"

    @property
    def is_simple(self) -> bool:
        """Whether the source can do all of it."""
        return all(one.is_simple for one in self.transforms)

    @property
    def only_asks(self) -> bool:
        """Whether the source can do everything except conditions, so that Spark only decides which events to keep.

        False if a rename follows a condition: the rename could fail for events that the condition drops.
        """
        hard = [number for number, one in enumerate(self.transforms) if not one.is_simple]
        behind = self.transforms[hard[0] :] if hard else ()
        return all(self.transforms[number].type == "filter" for number in hard) and not any(
            one.type == "rename_fields" for one in behind
        )

    @property
    def parts(self) -> tuple[list[Transform], list[Transform], list[Transform]]:
        """The source's steps; the steps from the first to the last Spark step; and the steps after.

        An envelope comes last. Only filters may follow it, and they see the event as it was before.
        """
        steps = [one for one in self.transforms if not one.is_envelope]
        hard = [number for number, one in enumerate(steps) if not one.is_simple] or [len(steps)]
        first, last = hard[0], min(hard[-1] + 1, len(steps))
        return steps[:first], steps[first:last], [*steps[last:], *(one for one in self.transforms if one.is_envelope)]

    def made(self) -> Chain:
        """The same chain with its transforms created. ConfigError: they are invalid, or in an invalid order."""
        for pattern in self.routes:
            if not pattern or re.search(r"\s", pattern):
                raise ConfigError(
                    f"route {pattern!r} is not a channel pattern", "Write names such as orders, sales.* or pgcdc:_txn"
                )
        transforms = tuple(map(from_spec, self.transforms))
        closed, gone = "", dict[str, str]()
        for one in transforms:
            _check_names(one, gone)
            if closed and one.type != "filter":
                raise ConfigError(
                    f"transform {one.type} comes after {closed}, which turns events into text",
                    f"Move {closed} to the end, or set it for single adapters; only filters may follow it",
                )
            closed = one.type if one.is_envelope else closed
        return Chain(transforms, tuple(map(full_pattern, self.routes)))


def column_chain(chain: Chain) -> SimpleChain:
    """How a chain changes the columns of tables, as far as the configuration shows. Excludes what SQL and Python
    add."""
    steps = list(map(from_spec, chain.transforms))
    known = [one.step for one in steps if one.type in ("drop_columns", "rename_fields", "mask")]
    routes = tuple(map(full_pattern, chain.routes))
    is_partial = not all(one.is_simple for one in steps)
    filters = [set(one.step["operations"]) for one in steps if one.type == "filter"] if is_partial else []
    hides = any(not {"TRUNCATE", "SNAPSHOT"} <= one for one in filters)
    return SimpleChain(routes, tuple(known), is_partial=is_partial, hides_reloads=hides)


def _check_names(one: Transform, gone: dict[str, str]) -> None:
    """Check a transform's column names. `gone`: columns that no event has at this step, and their new names ("":
    dropped)."""
    for name in one.named:
        if gone.get(name):
            raise ConfigError(
                f"{one.type} names the column {name}, which an earlier rename_fields calls {gone[name]}",
                f"Write {gone[name]}, or put {one.type} first",
            )
        if name in gone and one.type != "drop_columns":  # dropping a column twice does no harm
            raise ConfigError(
                f"{one.type} names the column {name}, which an earlier drop_columns removes", "Remove it here"
            )
    if one.type == "python":  # it may add any column
        gone.clear()
    gone.update(one.taken)
    for name in one.added:
        gone.pop(name, None)


def missing_columns(chains: Sequence[Chain], tables: Sequence[Relation]) -> list[str]:
    """A line for each column that drop_columns, mask or rename_fields names and no table has: usually a typo.

    Checks all captured tables, even for a chain with routes: its transforms may be meant for others.
    """
    captured = {column.name for one in tables for column in one.columns}
    found: dict[str, None] = {}
    for chain in chains if captured else ():  # otherwise there is nothing to compare with yet
        known = set(captured)
        for one in map(from_spec, chain.transforms):
            if one.type == "python":  # it may add any column
                break
            for name in one.named:
                if name not in known:
                    same = sorted(other for other in known if other.lower() == name.lower())
                    near = [*same, *difflib.get_close_matches(name, sorted(known), n=1)]
                    hint = f"; did you mean {near[0]}?" if near else ""
                    found[f"{one.type}: no captured table has a column {name}{hint}"] = None
            known.update(one.added)
    return list(found)
