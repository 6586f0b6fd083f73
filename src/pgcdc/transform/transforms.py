"""The transforms that people name: each function here returns a `Transform`, which takes and gives a DataFrame of events.

    from pgcdc import transform
    events.transform(transform.drop_columns("password")).transform(transform.mask("email", mode="hash", key_env="MASK_KEY"))

They are the same that `transforms:` of the configuration names (`transform.specs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from pgcdc.core.errors import ConfigError
from pgcdc.event import masks
from pgcdc.event.debezium_values import write_key
from pgcdc.event.texts import quote_json
from pgcdc.transform.specs import (
    CloudEventsSpec,
    DebeziumSpec,
    DropColumnsSpec,
    FilterSpec,
    MaskSpec,
    PythonSpec,
    RenameFieldsSpec,
    SqlSpec,
    TransformSpec,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from pgcdc.transform.steps import EventFunction

TEXT, KEY = "_text", "_key"
"""Columns that are added: the whole event as text, and what Debezium makes the key of its message."""
_ADAPTER: TypeAdapter[Any] = TypeAdapter(TransformSpec)


@dataclass(frozen=True)
class Transform:
    """One step: called with a DataFrame of events it returns another one with the same columns."""

    spec: Any
    """A model of `transform.specs`."""
    secret: bytes | None = field(default=None, repr=False)
    """The key of a hash, if it was given here and not by the name of a variable or file."""
    function: EventFunction | None = None
    """A Python function that was given here and not by its name."""

    @property
    def name(self) -> str:
        """The type, as the configuration calls it."""
        return str(self.spec.type)

    @property
    def is_simple(self) -> bool:
        """Whether the source can do it on whole columns, before there is an event (`event.edits`)."""
        if isinstance(self.spec, FilterSpec):
            return self.spec.where is None
        return self.is_envelope or (
            self.secret is None and isinstance(self.spec, DropColumnsSpec | RenameFieldsSpec | MaskSpec)
        )

    @property
    def is_envelope(self) -> bool:
        """Whether it gives the whole event another form."""
        return isinstance(self.spec, DebeziumSpec | CloudEventsSpec)

    @property
    def sql(self) -> tuple[str, ...]:
        """The Spark SQL that the user wrote."""
        if isinstance(self.spec, FilterSpec):
            return () if self.spec.where is None else (self.spec.where,)
        return tuple(self.spec.set.values()) if isinstance(self.spec, SqlSpec) else ()

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that events should have at this step."""
        if isinstance(self.spec, RenameFieldsSpec):
            return tuple(self.spec.fields)
        return self.spec.columns if isinstance(self.spec, DropColumnsSpec | MaskSpec) else ()

    @property
    def step(self) -> dict[str, Any]:
        """What `event.edits` does, as JSON: never with a key."""
        step: dict[str, Any] = self.spec.model_dump(mode="json")
        return step

    @property
    def worker_step(self) -> dict[str, Any]:
        """What `transform.steps` does in Spark's workers: with a key that was read here, and with the function."""
        if isinstance(self.spec, PythonSpec):
            return {"type": "python", "function": self.spec.function, "call": self.function}
        return {**self.step, **({} if (key := self._key()) is None else {"key": key})}

    def _key(self) -> bytes | None:
        if not isinstance(self.spec, MaskSpec) or self.spec.mode != "hash":
            return None
        return self.secret if self.secret is not None else masks.read_key(self.spec.key_env, self.spec.key_file)

    def __call__(self, events: DataFrame) -> DataFrame:
        """The events after this step; behind an envelope with the column `_text` besides."""
        from pgcdc.transform import steps

        if isinstance(self.spec, FilterSpec):
            return steps.filtered(events, self.spec.operations, self.spec.where)
        if isinstance(self.spec, SqlSpec):
            return steps.with_values(events, self.spec.set)
        if not self.is_envelope:
            return steps.run_native(events, [self.worker_step])
        if isinstance(self.spec, DebeziumSpec):
            _need_columns(events, "shape", *(["table_ordinal"] if self.spec.transaction else []))
        return _with_text(events, [self.step])

    def check(self) -> None:
        """Raise ConfigError for what can be known without Spark: a missing key, a function that is not there."""
        self._key()
        if isinstance(self.spec, PythonSpec) and self.function is None:
            from pgcdc.transform.steps import load_function

            load_function(self.spec.function)


def from_spec(spec: Any) -> Transform:
    """The transform behind a spec: a model, a mapping as in YAML, or a transform already. Raises ConfigError."""
    if isinstance(spec, Transform):
        return spec
    if isinstance(spec, Mapping):
        spec = _validated(spec)
    if not isinstance(spec, BaseModel):
        raise ConfigError(
            f"{spec!r} is no transform", "Make one with pgcdc.transform, such as transform.drop_columns('a')"
        )
    made = Transform(spec)
    made.check()
    return made


def drop_columns(*columns: str) -> Transform:
    """Leave columns out of `row` and `old`, and out of `unchanged_toast_columns`."""
    return Transform(_validated({"type": "drop_columns", "columns": columns}))


def rename_fields(fields: Mapping[str, str] | None = None, /, **more: str) -> Transform:
    """Give columns of `row` and `old` other names: `rename_fields(id="order_id")` or `rename_fields({"id": "order_id"})`."""
    return Transform(_validated({"type": "rename_fields", "fields": {**(fields or {}), **more}}))


def mask(
    *columns: str,
    mode: str = "redact",
    key: str | bytes | None = None,
    key_env: str | None = None,
    key_file: str | None = None,
) -> Transform:
    """Hide values of `row` and `old`: `redact`, `zero`, or `hash` (HMAC-SHA256) with a key, which no plan of Spark shows."""
    raw = {"type": "mask", "columns": columns, "mode": mode, "key_env": key_env, "key_file": key_file}
    spec = _validated(raw)
    if key is not None and (mode != "hash" or key_env or key_file):
        raise ConfigError(
            "mask got a key that it does not use", "Give one of key, key_env and key_file, with mode hash"
        )
    secret = key.encode() if isinstance(key, str) else key
    made = Transform(spec, secret)
    made.check()
    return made


def filter(*, operations: tuple[str, ...] | list[str] = (), where: str | None = None) -> Transform:
    """Keep only these operations, and of changes of rows only those for which the Spark SQL condition is true."""
    return Transform(_validated({"type": "filter", "operations": operations, "where": where}))


def sql(values: Mapping[str, str] | None = None, /, **more: str) -> Transform:
    """Set values of `row` by Spark SQL: `sql(total="cast(row['net'] AS decimal(12,2)) * 1.19")`."""
    return Transform(_validated({"type": "sql", "set": {**(values or {}), **more}}))


def python(function: str | EventFunction) -> Transform:
    """Call a function with each event (a dict); it returns the event, changed or not, or None to leave it out."""
    if isinstance(function, str):
        made = Transform(_validated({"type": "python", "function": function}))
        made.check()
        return made
    name = f"{function.__module__}:{function.__name__}".replace("<lambda>", "function")
    return Transform(PythonSpec.model_construct(type="python", function=name), function=function)


def debezium_envelope(**options: Any) -> Transform:
    """The event as Debezium's PostgreSQL connector writes it, in the column `_text`; see docs/envelopes.md."""
    return from_spec({"type": "debezium", **options})


def cloudevents_envelope(**options: Any) -> Transform:
    """The event as a CloudEvents 1.0 document, in the column `_text`; see docs/envelopes.md."""
    return from_spec({"type": "cloudevents", **options})


def event_json(events: DataFrame, *, transaction: bool = False) -> DataFrame:
    """The events with their JSON, as `pgcdc listen` writes it, in the column `_text`."""
    return _with_text(events, [], transaction=transaction)


def debezium_key(events: DataFrame) -> DataFrame:
    """The events with what Debezium makes the key of the message in the column `_key`; NULL for tables without a key."""
    from pgcdc.transform.steps import with_text

    _need_columns(events, "shape")
    return with_text(events, KEY, _write_keys)


def _with_text(events: DataFrame, specs: list[dict[str, Any]], *, transaction: bool = False) -> DataFrame:
    from pgcdc.event.events import render_columns
    from pgcdc.transform.steps import with_text

    return with_text(events, TEXT, partial(render_columns, steps=specs, transaction=transaction))


def _write_keys(events: pa.RecordBatch) -> pa.Array:
    import pyarrow as pa

    from pgcdc.event.columns import read_shape

    columns = (events.column(name).to_pylist() for name in ("operation", "row", "shape"))
    found: list[str | None] = []
    for operation, pairs, text in zip(*columns, strict=True):
        row = None if pairs is None else dict(pairs)
        if operation == "MESSAGE" and row is not None:
            found.append(f'{{"prefix":{quote_json(row["prefix"])}}}')
        else:
            shape = None if text is None else read_shape(text)[0]
            found.append(write_key(row, shape) if shape is not None and shape.relation.oid else None)
    return pa.array(found, pa.string())


def _need_columns(events: DataFrame, *needed: str) -> None:
    missing = [name for name in needed if name not in events.columns]
    if missing:
        raise ConfigError(
            f"Debezium's documents need the column {missing[0]} of events",
            "Ask for it when the stream is loaded: .schema(EVENT_SCHEMA + SHAPE_SCHEMA), both of pgcdc.transform",
        )


def _validated(raw: Mapping[str, Any]) -> Any:
    try:
        return _ADAPTER.validate_python(dict(raw))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(one) for one in first["loc"])
        raise ConfigError(
            f"transform {raw.get('type', '')}: {place}: {first['msg']}", "See docs/transforms.md"
        ) from error
