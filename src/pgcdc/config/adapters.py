"""Adapters in the configuration, generated from the registry: flat keys, list entries, and the specs of both.

`adapters: [file]` with `file_path: events.jsonl` is the adapter `file` of the type `file`. A second adapter of that
type is a mapping in the list and does not use the flat keys: `{name: audit, type: file, path: audit.jsonl}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic.fields import FieldInfo

from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import (
    Conflict,
    KeyPath,
    Options,
    check_known,
    checked,
    refuse,
    setting_of,
    split_names,
    text_or_list,
    unit_of,
)
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, Priority, SinkOptions, with_source_db
from pgcdc.transform.specs import CloudEventsSpec, DebeziumSpec, TransformSpec

if TYPE_CHECKING:
    from pgcdc.config.model import Config

ADAPTER_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,62}$"

# --- settings about several adapters: a mapping in YAML, `name=value` in flags and variables


def _pairs(texts: Iterable[Any], example: str) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not equals or not name.strip() or not value.strip():
            raise refuse(f"{text!r} is not name=value", f"Write it like {example}")
        found.append((name.strip(), value.strip()))
    return found


def parse_routes(value: Any) -> Any:
    """`name=pattern,pattern`, repeatable; separated by `;` in a variable; a mapping in YAML."""
    if isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if not isinstance(value, (list, tuple)):
        return value
    found: dict[str, tuple[str, ...]] = {}
    for name, patterns in _pairs(value, "file=orders,sales.*"):
        found[name] = (*found.get(name, ()), *split_names(patterns))
    return found


def parse_priorities(value: Any) -> Any:
    """`name=priority`, separated by `,` in a variable; a mapping in YAML."""
    if not isinstance(value, (str, list, tuple)):
        return value
    texts = [value] if isinstance(value, str) else value
    split = [part for text in texts for part in (split_names(text) if isinstance(text, str) else (text,))]
    return dict(_pairs(split, "file=critical"))


def _pattern(text: str) -> str:
    if not text.strip():
        raise refuse("a pattern is empty", "Write a channel such as orders, or *")
    return text if ":" in text else f"pgcdc:{text}"


Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_pattern)], ...],
    Field(min_length=1),
    BeforeValidator(split_names),
    text_or_list(),
]  # Patterns of channels; a pattern without a colon means a table
Routes = Annotated[dict[str, Patterns], BeforeValidator(parse_routes)]
Priorities = Annotated[dict[str, Priority], BeforeValidator(parse_priorities)]

# --- the models, generated from the options of every type


class Entry(Options):
    """One adapter as a mapping: the keys that all types share."""

    type: str = Field(description="the type of the adapter")
    name: Annotated[str, Field(pattern=ADAPTER_NAME)] = Field(
        description="its name, in routes, metrics and the state directory"
    )
    transforms: tuple[TransformSpec, ...] = Field(default=(), description="its own transforms, after the global ones")
    routes: Patterns | None = Field(default=None, description="only channels that match one of these patterns")
    priority: Priority | None = Field(default=None, description="critical, normal (the default) or best-effort")


def _type_of(field: FieldInfo) -> Any:
    """The type of a field with its limits. Paths stay as written: a trailing slash can matter."""
    plain: Any = str | Path if field.annotation is Path else field.annotation
    return Annotated[(plain, *field.metadata)] if field.metadata else plain


def shown_default(field: FieldInfo) -> str:
    """` (default: 30s)` for the help; empty if there is no default or it is empty or off."""
    unit, value = unit_of(field), field.default
    if field.is_required() or value is None or value is False or value in ("", (), {}):
        return ""
    text = unit.format(value) if unit else f"{value:g}" if isinstance(value, float) else str(value)
    text = "yes" if value is True else ", ".join(map(str, value)) if isinstance(value, tuple) else text
    return f" (default: {text})"


def _make_models() -> tuple[dict[str, type[Entry]], type[Options], dict[str, tuple[str, str]]]:
    """The model of each type's mapping; the model of all flat keys; and the type and option of each flat key."""
    entries: dict[str, type[Entry]] = {}
    flat: dict[str, Any] = {}
    keys: dict[str, tuple[str, str]] = {}
    for kind, options in ADAPTERS.usable().items():
        if clash := {*Entry.model_fields, *DeliveryOptions.model_fields}.intersection(options.model_fields):
            raise ConfigError(
                f"adapter {kind} redefines options that all adapters have: {', '.join(clash)}", "Rename them"
            )
        own: dict[str, Any] = {"type": (Literal[kind], Field(description="the type of the adapter"))}
        for name, field in {**options.model_fields, **DeliveryOptions.model_fields}.items():
            said, text = setting_of(name, field), field.description or name
            more: Any = {"description": text, "json_schema_extra": {"setting": said}, "repr": field.repr}
            own[name] = _type_of(field), Field(... if field.is_required() else field.default, **more)
            metavar = "N" if field.annotation is int else "NUMBER" if field.annotation is float else name.upper()
            is_shared = name in DeliveryOptions.model_fields
            said = replace(said, group="Adapters", flag="", metavar=said.metavar or metavar, is_hidden=is_shared)
            more = {"json_schema_extra": {"setting": said}, "repr": field.repr}
            text = f"Adapter {kind}: {text}.{shown_default(field)}"
            flat[f"{kind}_{name}"] = _type_of(field) | None, Field(None, description=text, **more)
            keys[f"{kind}_{name}"] = kind, name
        title = kind.title().replace("_", "")
        entries[kind] = create_model(f"{title}Adapter", __base__=Entry, __doc__=options.__doc__, **own)
    return entries, create_model("AdapterKeys", __base__=Options, **flat), keys


ENTRY_ALIASES = {
    alias: name for name, info in DeliveryOptions.model_fields.items() for alias in setting_of(name, info).aliases
}  # The manual's names for keys of a mapping
ALIASES = {f"{kind}_{alias}": f"{kind}_{name}" for kind in ADAPTERS for alias, name in ENTRY_ALIASES.items()}
"""The same for flat keys and variables. Flags have their aliases already."""
ENTRIES, _FLAT, FLAT_KEYS = _make_models()


def rename_key(path: KeyPath, name: str) -> str:
    """Our name for a key that appears in the file below `path`."""
    if not path:
        name = name.replace("-", "_")
        return ALIASES.get(name, name)
    return ENTRY_ALIASES.get(name, name) if path[0] == "adapters" and len(path) == 2 else name


def _known_type(name: str) -> str:
    return name if name in ENTRIES else checked(ADAPTERS.find, check_known(ADAPTERS, name))


def kind_of(item: Any) -> str | None:
    """The type of an item of `adapters`, raw or a model. If a mapping has no type, its name may be the type."""
    if isinstance(item, str):
        return item
    if isinstance(item, Entry):
        return item.type
    name = item.get("name") if isinstance(item, Mapping) else None
    found = item.get("type", name if name in (*ADAPTERS,) else None) if isinstance(item, Mapping) else None
    return found if isinstance(found, str) else None


_PLAIN = "a name"
if TYPE_CHECKING:
    AdapterKeys: TypeAlias = Options
    AdapterItem: TypeAlias = str | Entry
else:
    AdapterKeys = _FLAT
    _NAME = Annotated[
        str, AfterValidator(_known_type), WithJsonSchema({"type": "string", "enum": [*ADAPTERS]}), Tag(_PLAIN)
    ]
    _INFER = BeforeValidator(lambda value: {**value, "type": kind_of(value)} if isinstance(value, Mapping) else value)
    _MAPPINGS = [Annotated[entry, _INFER, Tag(kind)] for kind, entry in ENTRIES.items()]
    _TAG = Discriminator(lambda value: kind_of(value) if isinstance(value, (Entry, Mapping)) else _PLAIN)
    AdapterItem = Annotated[Union[(_NAME, *_MAPPINGS)], _TAG]


# --- the adapters of a pipeline


def adapter_specs(config: Config) -> tuple[AdapterSpec, ...]:
    """Every adapter with its options and delivery settings. Conflict: an option is missing or invalid."""
    return tuple(_spec(config, number, item) for number, item in enumerate(config.adapters))


def option_path(config: Config, number: int, name: str) -> KeyPath:
    """The path of an option of the adapter at this index of the list."""
    item = config.adapters[number]
    return (f"{item}_{name}",) if isinstance(item, str) else ("adapters", number, name)


def _spec(config: Config, number: int, item: AdapterItem) -> AdapterSpec:
    name, type_ = (item, item) if isinstance(item, str) else (item.name, item.type)
    own: tuple[Any, ...] = config.transforms.adapter.get(name, ())
    routes, priority = config.routes.get(name), config.adapter_priority.get(name)
    if isinstance(item, Entry):
        own, routes, priority = own or item.transforms, routes or item.routes, priority or item.priority
    # an envelope from the flags comes last, since nothing can follow it
    forms = ((config.debezium_envelope, DebeziumSpec), (config.cloudevents_envelope, CloudEventsSpec))
    spec = AdapterSpec(
        name=name,
        type=type_,
        options=_options(config, number, name, ADAPTERS.find(type_)),
        delivery=DeliveryOptions.model_validate(_given(config, item, DeliveryOptions)),
        transforms=(*own, *(form.model_validate({}) for is_wanted, form in forms if is_wanted)),
        routes=routes or (),
        priority=priority or "normal",
    )
    return with_source_db(spec, config.db)  # type: ignore[no-any-return]


def _given(config: Config, item: AdapterItem, model: type[BaseModel]) -> dict[str, Any]:
    """The values set for an adapter that this model has fields for."""
    owner, prefix = (config, f"{item}_") if isinstance(item, str) else (item, "")
    found = {field: getattr(owner, prefix + field) for field in model.model_fields}
    return {field: value for field, value in found.items() if value is not None}


def _options(config: Config, number: int, name: str, kind: type[SinkOptions]) -> SinkOptions:
    """The options of one adapter. Conflict: an option is missing, or options contradict each other."""
    item = config.adapters[number]
    try:
        return kind.model_validate(_given(config, item, kind))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "missing":
        key, value = f"{item}_{field}", field.upper()
        advice = f"Add --{key.replace('_', '-')} {value}, or {key}: {value} in the YAML file"
        raise Conflict(("adapters", number), f"adapter {name} needs a {field}", advice)
    reason = first["msg"].removeprefix("Value error, ")
    keys = list(dict.fromkeys(one for one in re.findall(r"\w+", reason) if one in kind.model_fields))
    advice = f"They are keys of its mapping: {', '.join(keys)}"
    if isinstance(item, str):
        keys = [f"{item}_{key}" for key in keys]
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in keys)
        advice = f"The flags are {flags}; in the YAML file: {', '.join(keys)}"
    where = option_path(config, number, field) if field else ("adapters", number)
    raise Conflict(where, f"adapter {name}: {reason}", advice if keys else "See the documentation of the adapter")
