"""What the configuration says of adapters, made from the registry: flat keys, entries of the list, and what both become.

`adapters: [file]` with `file_path: events.jsonl` is the adapter `file` of the type `file`. A further one of a type is a
mapping in the list, which stands for itself: `{name: audit, type: file, path: audit.jsonl}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pgcdc.config.fields import AdapterName, Patterns
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import UNKNOWN, Conflict, KeyPath, Options, checked, setting, setting_of, unit_of
from pgcdc.sink.registry import ADAPTERS
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions, Priority, SinkOptions
from pgcdc.transform.specs import CloudEventsSpec, DebeziumSpec, TransformSpec

if TYPE_CHECKING:
    from pgcdc.config.model import Config

__all__ = [
    "ALIASES",
    "ENTRIES",
    "ENTRY_ALIASES",
    "FLAT_KEYS",
    "AdapterItem",
    "AdapterKeys",
    "Entry",
    "adapter_specs",
    "option_path",
]


class Entry(Options):
    """One adapter as a mapping: what all types have."""

    name: AdapterName = Field(description="its name: in routes, metrics and the state directory")
    transforms: tuple[TransformSpec, ...] = Field(default=(), description="its own transforms, behind the global ones")
    routes: Patterns | None = Field(default=None, description="only channels that match one of these patterns")
    priority: Priority | None = Field(default=None, description="critical, normal (the default) or best-effort")


def _type_of(field: FieldInfo) -> Any:
    """The type of a field with its limits. A path stays as it is written: a slash at its end may mean something."""
    plain: Any = str | Path if field.annotation is Path else field.annotation
    return Annotated[(plain, *field.metadata)] if field.metadata else plain


def _copy(field: FieldInfo) -> tuple[Any, Any]:
    """The same field for another model."""
    return _type_of(field), Field(... if field.is_required() else field.default, description=field.description)


def _make_entries() -> dict[str, type[Entry]]:
    entries: dict[str, type[Entry]] = {}
    for kind, options in ADAPTERS.usable().items():
        own = {"type", *Entry.model_fields, *DeliveryOptions.model_fields}
        if clash := own.intersection(options.model_fields):
            raise ConfigError(
                f"adapter {kind} has options of all adapters: {', '.join(clash)}", "Give them other names"
            )
        fields: dict[str, Any] = {"type": (Literal[kind], Field(description="the type of the adapter"))}
        for name, field in {**options.model_fields, **DeliveryOptions.model_fields}.items():
            fields[name] = _copy(field)
        title = kind.title().replace("_", "")
        entries[kind] = create_model(f"{title}Adapter", __base__=Entry, __doc__=options.__doc__, **fields)
    return entries


def _make_flat() -> tuple[type[Options], dict[str, tuple[str, str]]]:
    fields: dict[str, Any] = {}
    keys: dict[str, tuple[str, str]] = {}
    for kind, options in ADAPTERS.usable().items():
        for name, field in {**options.model_fields, **DeliveryOptions.model_fields}.items():
            shared = name in DeliveryOptions.model_fields
            unit = unit_of(field)
            plain = unit.format(field.default) if unit else field.default
            plain = f"{plain:g}" if isinstance(plain, float) else plain
            default = "" if field.is_required() or plain is None else f" (default: {plain})"
            text = f"Adapter {kind}: {field.description or name}.{default}"
            metavar = "N" if field.annotation is int else "NUMBER" if field.annotation is float else name.upper()
            own = setting_of(name, field)
            keys[f"{kind}_{name}"] = kind, name
            fields[f"{kind}_{name}"] = (
                _type_of(field) | None,
                setting(None, text, "Adapters", metavar=own.metavar or metavar, is_hidden=shared, aliases=own.aliases),
            )
    return create_model("AdapterKeys", __base__=Options, **fields), keys


ENTRY_ALIASES = {
    alias: name for name, info in DeliveryOptions.model_fields.items() for alias in setting_of(name, info).aliases
}
"""Other names of the keys of a mapping: those of the manual."""
ALIASES = {f"{kind}_{alias}": f"{kind}_{name}" for kind in ADAPTERS for alias, name in ENTRY_ALIASES.items()}
"""The same for flat keys, variables and flags."""
ENTRIES = _make_entries()
"""The model of a mapping in `adapters`, by type."""
_FLAT, FLAT_KEYS = _make_flat()
"""Flat keys: the adapter's type and its field."""


def _known_type(name: str) -> str:
    if name in ADAPTERS and name not in ENTRIES:
        return checked(ADAPTERS.find, name)
    if name not in ADAPTERS:
        raise PydanticCustomError(UNKNOWN, "{name} is not known", {"name": repr(name), "known": list(ADAPTERS)})
    return name


def _kind_of_item(value: Any) -> str | None:
    """Which of the forms below it is: a name, or a mapping of a type (which may be its name)."""
    if isinstance(value, Entry):
        return str(value.type)  # type: ignore[attr-defined]  # of the models made here
    if not isinstance(value, Mapping):
        return _PLAIN
    name, found = value.get("name"), value.get("type")
    if "type" not in value and isinstance(name, str) and name in ADAPTERS:
        found = name
    return found if isinstance(found, str) else None


def _infer_type(value: Any) -> Any:
    """`{name: file, path: ...}`: the name is that of a type."""
    return {**value, "type": _kind_of_item(value)} if isinstance(value, Mapping) else value


_PLAIN = "a name"
if TYPE_CHECKING:
    AdapterKeys: TypeAlias = Options
    AdapterItem: TypeAlias = str | Entry
else:
    AdapterKeys = _FLAT
    _NAME = Annotated[
        str, AfterValidator(_known_type), WithJsonSchema({"type": "string", "enum": [*ADAPTERS]}), Tag(_PLAIN)
    ]
    _MAPPINGS = [Annotated[entry, BeforeValidator(_infer_type), Tag(kind)] for kind, entry in ENTRIES.items()]
    AdapterItem = Annotated[Union[(_NAME, *_MAPPINGS)], Discriminator(_kind_of_item)]


# --- what the pipeline is told


def adapter_specs(config: Config) -> tuple[AdapterSpec, ...]:
    """The adapters with all that concerns them. Raises Conflict if one lacks what it needs."""
    return tuple(_spec(config, number, item) for number, item in enumerate(config.adapters))


def option_path(config: Config, number: int, name: str) -> KeyPath:
    """Where an option of the adapter with this number in the list stands."""
    item = config.adapters[number]
    return (f"{item}_{name}",) if isinstance(item, str) else ("adapters", number, name)


def _spec(config: Config, number: int, item: AdapterItem) -> AdapterSpec:
    type_ = item if isinstance(item, str) else str(item.type)  # type: ignore[attr-defined]  # of the models made here
    kind = ADAPTERS.find(type_)
    name = item if isinstance(item, str) else item.name
    given: dict[str, Any] = {}
    for field in (*kind.model_fields, *DeliveryOptions.model_fields):
        value = getattr(config, f"{item}_{field}") if isinstance(item, str) else getattr(item, field)
        if value is not None:
            given[field] = value
    for field, info in kind.model_fields.items():
        is_said = given.get(field) or given.get(f"{field}_file")
        if not is_said and setting_of(field, info).cascade == "db":
            given[field] = config.db  # the database URL cascade: what is not said otherwise is the source's
        if field not in given and info.is_required():
            key = f"{type_}_{field}"
            flag = key.replace("_", "-")
            advice = f"Add --{flag} {field.upper()}; in the YAML file, {key}: {field.upper()}"
            raise Conflict(("adapters", number), f"adapter {name} needs a {field}", advice)
    options = {field: value for field, value in given.items() if field in kind.model_fields}
    delivery = {field: value for field, value in given.items() if field in DeliveryOptions.model_fields}
    try:
        made = kind.model_validate(options)
    except ValidationError as error:  # options that do not go together
        first = error.errors(include_url=False, include_input=False)[0]
        where = option_path(config, number, str(first["loc"][0])) if first["loc"] else ("adapters", number)
        reason = first["msg"].removeprefix("Value error, ")
        raise Conflict(where, f"adapter {name}: {reason}", _say_keys(type_, kind, item, reason)) from None
    own: tuple[Any, ...] = config.transforms.adapter.get(name, ())
    routes, priority = config.routes.get(name), config.adapter_priority.get(name)
    if isinstance(item, Entry):
        own, routes, priority = own or item.transforms, routes or item.routes, priority or item.priority
    return AdapterSpec(
        name=name,
        type=type_,
        options=made,
        delivery=DeliveryOptions.model_validate(delivery),
        transforms=(*own, *_envelopes(config)),
        routes=routes or (),
        priority=priority or "normal",
    )


def _say_keys(type_: str, kind: type[SinkOptions], item: AdapterItem, reason: str) -> str:
    """Where the options stand that a message names."""
    named = [field for field in re.findall(r"\w+", reason) if field in kind.model_fields]
    if not named:
        return f"See the adapter {type_}"
    if isinstance(item, Entry):
        return f"They are keys of its mapping: {', '.join(dict.fromkeys(named))}"
    keys = [f"{type_}_{field}" for field in dict.fromkeys(named)]
    flags = ", ".join(f"--{key.replace('_', '-')}" for key in keys)
    return f"The flags are {flags}; in the YAML file, {', '.join(keys)}"


def _envelopes(config: Config) -> tuple[Any, ...]:
    """What the flags say of the form of events: always last, since nothing can be behind it."""
    debezium = (DebeziumSpec.model_validate({}),) if config.debezium_envelope else ()
    return (*debezium, CloudEventsSpec.model_validate({})) if config.cloudevents_envelope else debezium
