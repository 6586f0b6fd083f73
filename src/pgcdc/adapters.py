"""Adapters for pipelines in Python: each function says where events go and how they are transformed on the way.

    from pgcdc import adapters

    adapters.file("audit.jsonl", name="audit", routes=["orders"], priority="best-effort")

A function accepts the options of its type (`SinkOptions`); the first option may be positional. Every function also accepts
`name` (required when two adapters have the same type), `transforms` (applied after those of the pipeline), `routes`
(channel patterns; none: everything), `priority`, and the settings of `DeliveryOptions`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from typing import Any, get_args

from pgcdc.config.adapters import ADAPTER_NAME
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import make_options
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, Priority, SinkOptions

__all__ = sorted(ADAPTERS)  # noqa: PLE0605 - also those of other packages

_ADVICE = "See the documentation of the adapter"
_COMMON: dict[str, Any] = {"transforms": (), "routes": (), "priority": "normal"}


def _make(kind: str, model: type[SinkOptions], *first: Any, name: str = "", **given: Any) -> AdapterSpec:
    name = name or kind
    transforms, routes, priority = (given.pop(key, default) for key, default in _COMMON.items())
    fields = list(model.model_fields)
    if len(first) > min(1, len(fields)) or (first and fields[0] in given):
        raise TypeError(f"adapters.{kind}() takes only its first option without a name, and only once")
    given |= dict(zip(fields, first, strict=False))
    options = {key: value for key, value in given.items() if key in fields}
    delivery = {key: value for key, value in given.items() if key not in fields}
    if not re.fullmatch(ADAPTER_NAME, name) or name == "main":
        raise ConfigError(
            f"{name!r} is not a valid adapter name", "Use letters, digits, _ and -; the name main is reserved"
        )
    if priority not in get_args(Priority):
        raise ConfigError(f"adapter {name}: unknown priority {priority!r}", "Use critical, normal or best-effort")
    return AdapterSpec(
        name,
        kind,
        make_options(model, options, f"adapter {name}", _ADVICE),
        make_options(DeliveryOptions, delivery, f"adapter {name}", _ADVICE),
        tuple(transforms),
        (routes,) if isinstance(routes, str) else tuple(routes),
        priority,
    )


def _signature(kind: str, model: type[SinkOptions]) -> inspect.Signature:
    """The signature that `help()` and editors show."""
    own = {name: Parameter.empty if one.is_required() else one.default for name, one in model.model_fields.items()}
    delivery = {name: one.default for name, one in DeliveryOptions.model_fields.items()}
    parameters = [
        Parameter(
            name, Parameter.POSITIONAL_OR_KEYWORD if not number and own else Parameter.KEYWORD_ONLY, default=default
        )
        for number, (name, default) in enumerate((own | {"name": kind} | _COMMON | delivery).items())
    ]
    return inspect.Signature(parameters, return_annotation=AdapterSpec)


def __getattr__(name: str) -> Callable[..., AdapterSpec]:
    if name.startswith("_") or name not in ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    model = ADAPTERS.find(name)
    made: Any = partial(_make, name, model)
    made.__name__, made.__doc__, made.__signature__ = name, model.__doc__, _signature(name, model)
    return made  # type: ignore[no-any-return]


def __dir__() -> Sequence[str]:
    return __all__
