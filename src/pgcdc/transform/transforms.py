"""The transforms that people name: each function here returns a `Transform`, which takes and gives a DataFrame of events.

    from pgcdc import transform
    events.transform(transform.drop_columns("password")).transform(transform.mask("email", mode="hash", key_env="MASK_KEY"))

They are the same that `transforms:` of the configuration names (`transform.specs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from pgcdc.core.errors import ConfigError
from pgcdc.event import masks
from pgcdc.transform import expressions
from pgcdc.transform.shape import edit_shape
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
    from pyspark.sql import DataFrame

    from pgcdc.transform.python_function import EventFunction

__all__ = [
    "Transform",
    "cloudevents_envelope",
    "debezium_envelope",
    "drop_columns",
    "filter",
    "from_spec",
    "mask",
    "python",
    "rename_fields",
    "sql",
]

TEXT = "_text"
"""The whole event as text, which an envelope sets; else the event is written as JSON at the end."""
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

    def __call__(self, events: DataFrame) -> DataFrame:
        """The events after this step."""
        spec = self.spec
        if isinstance(spec, DropColumnsSpec):
            return edit_shape(expressions.dropped(events, spec.columns), drop=spec.columns)
        if isinstance(spec, RenameFieldsSpec):
            return edit_shape(expressions.renamed(events, spec.fields), rename=spec.fields)
        if isinstance(spec, MaskSpec):
            masked = expressions.masked(events, spec.columns, spec.mode, self._key)
            return masked if spec.mode == "zero" else edit_shape(masked, as_text=spec.columns)
        if isinstance(spec, FilterSpec):
            return expressions.filtered(events, spec.operations, spec.where)
        if isinstance(spec, SqlSpec):
            return expressions.with_values(events, spec.set)
        if isinstance(spec, PythonSpec):
            from pgcdc.transform.python_function import with_function

            return with_function(events, spec.function, self.function)
        return self._envelope(events, spec)

    @cached_property
    def _key(self) -> bytes | None:
        if self.spec.mode != "hash":
            return None
        return self.secret if self.secret is not None else masks.read_key(self.spec.key_env, self.spec.key_file)

    @cached_property
    def _envelope(self) -> Callable[[DataFrame, Any], DataFrame]:
        """`debezium(events, spec)` of `transform/debezium.py`, `cloudevents(events, spec)` of `transform/cloudevents.py`."""
        if self.name == "debezium":
            from pgcdc.transform.debezium import debezium

            return debezium
        from pgcdc.transform.cloudevents import cloudevents

        return cloudevents

    def check(self) -> None:
        """Raise ConfigError for what can be known without Spark: a missing key, a function that is not there."""
        if isinstance(self.spec, MaskSpec):
            _ = self._key
        if isinstance(self.spec, PythonSpec) and self.function is None:
            from pgcdc.transform.python_function import load_function

            load_function(self.spec.function)
        if self.is_envelope:
            _ = self._envelope


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
    """The event as Debezium's PostgreSQL connector writes it; see docs/envelopes.md."""
    return from_spec({"type": "debezium", **options})


def cloudevents_envelope(**options: Any) -> Transform:
    """The event as a CloudEvents 1.0 document; see docs/envelopes.md."""
    return from_spec({"type": "cloudevents", **options})


def _validated(raw: Mapping[str, Any]) -> Any:
    try:
        return _ADAPTER.validate_python(dict(raw))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(one) for one in first["loc"])
        raise ConfigError(
            f"transform {raw.get('type', '')}: {place}: {first['msg']}", "See docs/transforms.md"
        ) from error
