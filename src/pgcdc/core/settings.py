"""Settings: fields of frozen models, defined in the layer that uses them, with text, default, limits and group.

Flags, `PGCDC_*` variables, keys of `pgcdc.yaml`, options of the Spark source, the JSON schema and the reference pages
are all generated from these models. A setting is defined nowhere else.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pgcdc.core.errors import ConfigError, PgcdcError

REFUSED = "pgcdc_refused"  # The type of a pydantic error that carries its own advice

_O = TypeVar("_O", bound=BaseModel)


@dataclass(frozen=True)
class Setting:
    """A setting's metadata for the command line and documents."""

    group: str = ""
    flag: str | None = ""  # Without dashes. Empty: derived from the field's name. None: neither flag nor variable
    aliases: tuple[str, ...] = ()  # Other accepted names: those of the manual, with underscores
    metavar: str = ""
    is_repeated: bool = False
    is_hidden: bool = False  # Left out of --help: the same for every adapter, and described once
    example: str = ""  # For the file of `pgcdc config init`, if the default explains little
    secret: bool = False  # It holds or may hold a secret (a URL): never shown
    literal: bool = True  # Whether the YAML file may contain the secret itself, rather than `${NAME}`
    cascade: str = ""  # `db`: defaults to the source's database URL


def setting(default: Any, text: str, group: str = "", **more: Any) -> Any:
    """A model field; `...` as the default makes it required. `more` are fields of `Setting` and limits."""
    limits = {name: value for name, value in more.items() if name not in Setting.__dataclass_fields__}
    extra = Setting(group, **{name: value for name, value in more.items() if name not in limits})
    if extra.secret:
        limits.setdefault("repr", False)
    return Field(default, description=text, json_schema_extra={"setting": extra}, **limits)  # type: ignore[dict-item]


def setting_of(name: str, field: FieldInfo) -> Setting:
    """The metadata of a field made by `setting`."""
    extra: Any = field.json_schema_extra
    found: Setting = extra["setting"] if isinstance(extra, dict) and "setting" in extra else Setting()
    metavar = found.metavar or next((one.metavar for one in field.metadata if isinstance(one, Unit)), "")
    return replace(found, flag=name.replace("_", "-") if found.flag == "" else found.flag, metavar=metavar)


def unit_of(field: FieldInfo) -> Unit | None:
    """The unit of a numeric field, if it has one."""
    return next((one for one in field.metadata if isinstance(one, Unit)), None)


def is_switch(annotation: Any) -> bool:
    return annotation is bool or bool in getattr(annotation, "__args__", ())


class Options(BaseModel):
    """Settings that belong together. Numbers must be finite and never true or false; errors do not repeat the given
    value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and not is_switch(cls.model_fields[info.field_name].annotation):
            raise PydanticCustomError("not_a_switch", "expected a number or text, got true or false")
        return value

    def conflicts(self) -> Iterator[Conflict]:
        """Settings that are valid alone but contradict each other."""
        return iter(())

    def check(self) -> None:
        """Raise the first conflict."""
        for conflict in self.conflicts():
            raise conflict

    def but(self, **changes: Any) -> Self:
        """A copy with some values changed. The new values must be valid: they are not checked."""
        return self.model_copy(update=changes)

    def part(self, model: type[_O]) -> _O:
        """These settings as another model. Its other fields keep their defaults."""
        names = model.model_fields.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        return model.model_construct(_fields_set=self.model_fields_set.intersection(names), **given)

    def is_given(self, name: str) -> bool:
        """Whether it is set to something other than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


KeyPath = tuple[str | int, ...]  # The path to a value: `("adapters", 1, "path")`


class Conflict(ConfigError):
    """A value that is valid alone but contradicts other settings. It knows the value's path, so the message can name
    the line."""

    def __init__(self, path: KeyPath, message: str, advice: str) -> None:
        super().__init__(message, advice)
        self.path = path


def conflicts_of(path: KeyPath, check: Callable[[], object]) -> Iterator[Conflict]:
    """Report a ConfigError from another module's check as a conflict about this key."""
    try:
        check()
    except Conflict as conflict:
        yield conflict if conflict.path else Conflict(path, conflict.message, conflict.advice)
    except ConfigError as error:
        yield Conflict(path, error.message, error.advice)


def make_options(model: type[_O], values: Mapping[str, Any], what: str, advice: str = "") -> _O:
    """Build the model from these values. ConfigError for an unknown or invalid one."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{what}: unknown key {key}", f"Known keys: {', '.join(model.model_fields)}") from None
        reason = first["msg"].removeprefix("Value error, ")
        own = first.get("ctx", {}).get("advice", "") if first["type"] == REFUSED else ""
        raise ConfigError(f"{what}: {f'{key}: ' if key else ''}{reason}", own or advice) from None


# --- types of fields


def refuse(message: str, advice: str) -> PydanticCustomError:
    """A validator error that carries advice."""
    return PydanticCustomError(REFUSED, "{message}", {"message": message, "advice": advice})


def checked(check: Callable[[str], object], text: str) -> str:
    """Validate a text with another module's check, and return it."""
    try:
        check(text)
    except PgcdcError as error:
        raise refuse(error.message, error.advice) from None
    return text


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`Did you mean ...?` if a known name is close; otherwise all known names, or `otherwise`."""
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1) or [one for one in names if name and name in one][:1]
    return f"Did you mean {close[0]}?" if close else otherwise or f"Known: {', '.join(names) or 'none'}"


def check_known(names: Iterable[str], text: str) -> str:
    """Check that a text is one of these names, and return it."""
    known = list(names)
    if text not in known:
        raise refuse(f"{text!r} is unknown", suggest(text, known))
    return text


def split_outside_quotes(text: str, separator: str) -> list[str]:
    """Split at separators outside '...' and "..."; drops empty parts."""
    parts = re.findall(rf"""(?:[^'"{separator}]|'[^']*'?|"[^"]*"?)+""", text)
    return [part.strip() for part in parts if part.strip()]


def split_names(value: Any) -> Any:
    """Accepts `a,b` (flag or variable) or a list (YAML)."""
    return tuple(split_outside_quotes(value, ",")) if isinstance(value, str) else value


def text_or_list(items: Mapping[str, Any] = {"type": "string"}) -> WithJsonSchema:
    """JSON schema for editors: a text, or a list of such items."""
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": dict(items)}]})


def _split_rules(separator: str, value: Any) -> Any:
    if isinstance(value, str):
        return tuple(split_outside_quotes(value, separator))
    if isinstance(value, Mapping):
        return tuple(f"{key}={','.join(map(str, one)) if isinstance(one, list) else one}" for key, one in value.items())
    return value


PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A path, kept as written: a trailing slash means a folder."""
Names = Annotated[tuple[str, ...], BeforeValidator(split_names), text_or_list()]  # `a,b`, or a list
Rules = Annotated[
    tuple[str, ...],
    BeforeValidator(partial(_split_rules, ";")),
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
"""A mapping or list in YAML; `a=...; b=...` in a variable; a repeated flag."""


# --- durations and sizes (`100ms`, `30m`, `512MB`): same syntax in flags, variables, YAML, Python and Spark options

_TIMES = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|[smhd]?)")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?")


def parse_seconds(text: str) -> float:
    """Parse `100ms`, `90s`, `30m`, `6h`, `1d`, or a number of seconds. Raises ValueError for anything else."""
    found = _TIME.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"not a time: {text!r}")
    return float(found[1]) / 1000 if found[2] == "ms" else float(found[1]) * _TIMES[found[2] or "s"]


def parse_bytes(text: str) -> int:
    """Parse `512MB`, `1 GiB` or `1048576` into bytes. Raises ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"not a size: {text!r}")
    return int(float(found[1]) * (1 << 10 * " kmgt".index(found[2] or " ")))


def format_seconds(value: float) -> str:
    """The shortest text that `parse_seconds` reads back as this value: `6h`, `100ms`, `90s`, `0`."""
    if not value:
        return "0"
    for unit, size in _TIMES.items():
        count = value * 1000 if unit == "ms" else value / size
        if count >= 1 and (round(count, 6).is_integer() or unit == "ms"):
            return f"{_plain(count)}{unit}"
    return f"{_plain(value * 1000)}ms"


def _plain(number: float) -> str:
    """Six digits after the point, without an exponent."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def format_bytes(value: int) -> str:
    """The shortest text that `parse_bytes` reads back as this value: `1GB`, `1000`."""
    for power in (4, 3, 2, 1):
        if value and value % (1 << 10 * power) == 0:
            return f"{value >> 10 * power}{' KMGT'[power]}B"
    return str(value)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a field's number, for help texts."""

    kind: Literal["seconds", "bytes"]
    metavar: str
    pattern: str

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        """JSON schema for editors: the number with its limits, or a text with a unit."""
        return {"anyOf": [handler(core), {"type": "string", "pattern": self.pattern}]}

    def format(self, value: Any) -> str:
        return format_seconds(value) if self.kind == "seconds" else format_bytes(value)


def _parse(parse: Callable[[str], float], wanted: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": f"not a {wanted}"}) from None


Seconds = Annotated[
    float,
    BeforeValidator(partial(_parse, parse_seconds, "time like 100ms, 30m or 6h")),
    Unit("seconds", "TIME", r"^\s*\d+(\.\d+)?\s*([mM]?[sS]|[mMhHdD])?\s*$"),
]
"""A duration: a number of seconds, or a text with a unit (ms, s, m, h, d)."""
Bytes = Annotated[
    int,
    BeforeValidator(partial(_parse, parse_bytes, "size like 512MB or 1GB")),
    Unit("bytes", "SIZE", r"^\s*\d+(\.\d+)?\s*[kKmMgGtT]?([iI]?[bB])?\s*$"),
]
"""A number of bytes, or a text with a unit (KB, MB, GB, TB: powers of 1024)."""
