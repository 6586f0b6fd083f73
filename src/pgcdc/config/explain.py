"""What pydantic says of a wrong value, as one line: place, key, reason, value, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pgcdc.config.adapters import ENTRIES
from pgcdc.config.manual import advise, advise_detector
from pgcdc.config.model import Config, Transforms
from pgcdc.config.rules import suggest
from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import describe_value
from pgcdc.core.settings import REFUSED, UNKNOWN, KeyPath
from pgcdc.transform.specs import TransformSpec

__all__ = ["explain"]

_TRANSFORMS: dict[str, type[BaseModel]] = {
    model.model_fields["type"].default: model for model in get_args(get_args(TransformSpec)[0])
}


def explain(
    error: ValidationError,
    place: Callable[[KeyPath], str],
    raw: Callable[[KeyPath], Any],
    known: Collection[KeyPath] = (),
) -> Iterator[ConfigError]:
    """All that is wrong, once for each place: what is misspelt first, since it is why another key is missing.

    `known` are places of which something is said already.
    """
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    misspelt = {_path(one["loc"], raw)[:-1] for one in found if one["type"] == "extra_forbidden"}
    seen: set[KeyPath] = set(known)
    for one in found:
        path = _path(one["loc"], raw)
        is_said = any(path[: len(other)] == other or other[: len(path)] == path for other in seen)
        if not is_said and not (one["type"] == "missing" and path[:-1] in misspelt):
            yield _explain(one, path, place, raw)
        seen.add(path)


def _explain(first: Any, path: KeyPath, place: Callable[[KeyPath], str], raw: Callable[[KeyPath], Any]) -> ConfigError:
    kind, context, loc = first["type"], first.get("ctx", {}), first["loc"]
    if kind == "extra_forbidden":
        return _unknown_key(loc, path, place)
    if kind == "missing":
        return ConfigError(f"{place(path[:-1])}: {path[-1]} is missing", f"Add {path[-1]}: ...")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_type(path, context, place, raw)
    value = raw(path)
    shown = describe_value(str(path[0]), value)
    where = place(path)
    if kind == REFUSED:
        return ConfigError(f"{where}: {context['message']}", context["advice"] or _help(path))
    if kind == UNKNOWN:
        return ConfigError(
            f"{where}: {context['name']} is not known", suggest(_inner(context["name"]), context["known"])
        )
    reason = str(first["msg"]).removeprefix("Value error, ")
    if kind == "value_error" and "; " in reason:  # what is wrong; what to do
        reason, _, advice = reason.partition("; ")
        return ConfigError(f"{where}: {reason}", advice[:1].upper() + advice[1:])
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        later = advise_detector(str(value), ", ".join(known)) if path == ("detector",) else ""
        advice = later or (suggest(str(value), known, _help(path)) if isinstance(value, str) else _help(path))
        return ConfigError(f"{where}: {reason}{shown}", advice)
    return ConfigError(f"{where}: {reason}{shown}", _help(path))


def _inner(quoted: str) -> str:
    return quoted.strip("'\"")


def _path(loc: tuple[str | int, ...], raw: Callable[[KeyPath], Any]) -> KeyPath:
    """The way in the file: pydantic's without what it says of unions, which have a place for each of their parts."""
    path: KeyPath = loc[:1]
    for number, part in enumerate(loc[1:], 1):
        is_last = number == len(loc) - 1
        value = raw(path)
        if isinstance(value, dict):
            if part in value or (is_last and isinstance(part, str)):
                path = (*path, part)
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            path = (*path, part)
    return path


def _help(path: KeyPath) -> str:
    field = Config.model_fields.get(str(path[0]))
    text = field.description if field is not None else ""
    return f"{path[0]}: {text}" if text else "See docs/configuration.md"


def _unknown_key(loc: tuple[str | int, ...], path: KeyPath, place: Callable[[KeyPath], str]) -> ConfigError:
    name = str(loc[-1])
    if len(loc) == 1:
        known = list(Config.model_fields)
        advice = advise(name) or suggest(
            name, known, "The keys stand in docs/configuration.md, or: pgcdc config schema"
        )
        return ConfigError(f"{place(path)}: this key is not known", advice)
    model: type[BaseModel] = {**_TRANSFORMS, **ENTRIES}.get(str(loc[-2]), Transforms)
    known = [field.alias or key for key, field in model.model_fields.items()]
    return ConfigError(f"{place(path)}: this key is not known", suggest(name, known))


def _unknown_type(
    path: KeyPath, context: dict[str, Any], place: Callable[[KeyPath], str], raw: Callable[[KeyPath], Any]
) -> ConfigError:
    """A mapping in a list whose `type` is missing or unknown."""
    known = list(ENTRIES if path[0] == "adapters" and len(path) <= 2 else _TRANSFORMS)
    value = raw(path)
    given = value.get("type") if isinstance(value, dict) else None
    if given is None:
        return ConfigError(f"{place(path)}: type is missing", f"Give one of: {', '.join(known)}")
    where = place((*path, "type"))
    return ConfigError(f"{where}: {str(given)!r:.60} is not known", suggest(str(given), known))
