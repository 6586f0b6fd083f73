"""The types of single settings: what texts of flags and variables become, and what an editor is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pgcdc.core.errors import PgcdcError
from pgcdc.core.operation import Op
from pgcdc.postgres.database import parse_identifier, parse_url, split_table
from pgcdc.postgres.selection import split_outside_quotes
from pgcdc.sink.spec import Priority
from pgcdc.source.postgres.setup.slots import check_slot_name
from pgcdc.spark.options import parse_bytes, parse_seconds

__all__ = [
    "REFUSED",
    "UNKNOWN",
    "AdapterName",
    "Bytes",
    "DatabaseUrl",
    "Identifiers",
    "Names",
    "Operations",
    "Patterns",
    "Priorities",
    "Routes",
    "Rules",
    "Seconds",
    "Setting",
    "SlotName",
    "TableName",
    "TableNames",
    "is_switch",
    "parse_priorities",
    "parse_routes",
    "setting",
    "setting_of",
]

REFUSED = "pgcdc_refused"
"""The kind of an error that brings its advice along."""
UNKNOWN = "pgcdc_unknown"
"""The kind of an error about a name that is not one of those that are known."""

ADAPTER_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,62}$"
_PRIORITIES = ("critical", "normal", "best-effort")


@dataclass(frozen=True)
class Setting:
    """What a setting is for the command line and for documents."""

    group: str
    flag: str | None
    """Without the dashes; None: it has neither flag nor variable."""
    metavar: str = ""
    is_repeated: bool = False
    is_hidden: bool = False
    """Left out of --help: the same for every adapter, and described once."""
    example: str = ""
    """For the file of `pgcdc config init`, where the default would say little."""


def setting(
    default: Any,
    text: str,
    group: str,
    *,
    flag: str | None = "",
    metavar: str = "",
    is_repeated: bool = False,
    is_hidden: bool = False,
    example: str = "",
    **limits: Any,
) -> Any:
    """A field of the model. `flag` is made of the field's name if it is empty."""
    extra = Setting(group, flag, metavar, is_repeated, is_hidden, example)
    return Field(default, description=text, json_schema_extra={"setting": extra}, **limits)  # type: ignore[dict-item]


def setting_of(name: str, field: FieldInfo) -> Setting:
    """What `setting` said of a field."""
    extra: Any = field.json_schema_extra
    found: Setting = extra["setting"]
    flag = name.replace("_", "-") if found.flag == "" else found.flag
    return Setting(found.group, flag, found.metavar, found.is_repeated, found.is_hidden, found.example)


def is_switch(annotation: Any) -> bool:
    """Whether a field of this type is true or false."""
    return annotation is bool or bool in getattr(annotation, "__args__", ())


# --- checks of single values


def _checked(check: Callable[[str], object], text: str) -> str:
    try:
        check(text)
    except PgcdcError as error:
        raise PydanticCustomError(REFUSED, "{message}", {"message": error.message, "advice": error.advice}) from None
    return text


def _known(names: Iterable[str], text: str) -> str:
    known = list(names)
    if text not in known:
        raise PydanticCustomError(UNKNOWN, "{name} is not known", {"name": repr(text), "known": known})
    return text


def _split(value: Any) -> Any:
    return tuple(split_outside_quotes(value, ",")) if isinstance(value, str) else value


def _text_or_list(items: Mapping[str, Any] = {"type": "string"}) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": dict(items)}]})


DatabaseUrl = Annotated[str, AfterValidator(lambda url: _checked(parse_url, url) if url else url)]
SlotName = Annotated[str, AfterValidator(partial(_checked, check_slot_name))]
TableName = Annotated[str, AfterValidator(partial(_checked, split_table))]
AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split), _text_or_list()]
TableNames = Annotated[tuple[TableName, ...], BeforeValidator(_split), _text_or_list()]
Identifiers = Annotated[
    tuple[Annotated[str, AfterValidator(partial(_checked, parse_identifier))], ...],
    BeforeValidator(_split),
    _text_or_list(),
]

_OPERATIONS = [op.name for op in Op]
Operations = Annotated[
    tuple[
        Annotated[
            str,
            BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
            AfterValidator(partial(_known, _OPERATIONS)),
        ],
        ...,
    ],
    BeforeValidator(_split),
    _text_or_list({"enum": _OPERATIONS}),
]


def _parse(parse: Callable[[str], float], kind: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": f"not a {kind}"}) from None


Bytes = Annotated[
    int,
    BeforeValidator(partial(_parse, parse_bytes, "size like 512MB or 1GB")),
    WithJsonSchema({"type": ["integer", "string"]}),
]
Seconds = Annotated[
    float,
    BeforeValidator(partial(_parse, parse_seconds, "time like 30m or 6h")),
    WithJsonSchema({"type": ["number", "string"]}),
]


# --- what is said of several things at once: a mapping in YAML, `name=value` in flags and variables


def _parse_rules(value: Any) -> Any:
    """A mapping or list in YAML; `a=...; b=...` in a variable."""
    if isinstance(value, str):
        return tuple(split_outside_quotes(value, ";"))
    if isinstance(value, Mapping):
        return tuple(f"{key}={','.join(map(str, one)) if isinstance(one, list) else one}" for key, one in value.items())
    return value


Rules = Annotated[
    tuple[str, ...],
    BeforeValidator(_parse_rules),
    WithJsonSchema({
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
            }},
        ]
    }),
]  # fmt: skip


def _pairs(texts: Iterable[Any], example: str) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not equals or not name.strip() or not value.strip():
            raise PydanticCustomError(
                REFUSED, "{message}", {"message": f"{text!r} is not name=value", "advice": f"Write it like {example}"}
            )
        found.append((name.strip(), value.strip()))
    return found


def parse_routes(value: Any) -> Any:
    """`name=pattern,pattern` as often as wanted; `;` between them in a variable; a mapping in YAML."""
    if isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if isinstance(value, (list, tuple)):
        found: dict[str, tuple[str, ...]] = {}
        for name, patterns in _pairs(value, "file=orders,sales.*"):
            found[name] = (*found.get(name, ()), *_split(patterns))
        return found
    return value


def parse_priorities(value: Any) -> Any:
    """`name=priority`, with `,` between them in a variable; a mapping in YAML."""
    if isinstance(value, (str, list, tuple)):
        texts = [value] if isinstance(value, str) else value
        split = [part for text in texts for part in (_split(text) if isinstance(text, str) else (text,))]
        return dict(_pairs(split, "file=critical"))
    return value


def _pattern(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError(
            REFUSED, "{message}", {"message": "a pattern is empty", "advice": "Write orders, or *"}
        )
    return text if ":" in text else f"pgcdc:{text}"


Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_pattern)], ...], Field(min_length=1), BeforeValidator(_split), _text_or_list()
]
"""Patterns of channels; one without a colon means a table."""
Routes = Annotated[dict[str, Patterns], BeforeValidator(parse_routes)]
Priorities = Annotated[
    dict[str, Priority],
    BeforeValidator(parse_priorities),
    WithJsonSchema({"type": "object", "additionalProperties": {"enum": list(_PRIORITIES)}}),
]
