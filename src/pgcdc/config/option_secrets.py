"""Secrets among the options of adapters: they do not stand in a shared file, and are never shown.

A field that is `setting(..., secret=True)` holds one, or may (a URL); with `literal=False` the file may not have it in plain
text, only `${NAME}`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pgcdc.config.adapters import FLAT_KEYS
from pgcdc.core.secrets import literal_part
from pgcdc.core.settings import Conflict, KeyPath, Setting, setting_of
from pgcdc.sink.http import is_secret_header, parse_headers
from pgcdc.sink.registry import ADAPTERS
from pgcdc.sink.spec import hide_value

_BEFORE_VARIABLE = re.compile(r"^[A-Za-z-]{1,20} +(?=\S)|[\w.-]+=(?=[\"']?\$\{)")


def _secret(kind: str, field: str) -> Setting | None:
    """What is said of the field of an adapter, if it is a secret."""
    usable = ADAPTERS.usable()
    known = usable[kind].model_fields.get(field) if kind in usable else None
    found = setting_of(field, known) if known is not None else None
    return found if found is not None and found.secret else None


def _options(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Setting, Any]]:
    """Every secret option that is given: where, what is said of it, and its value."""
    for key, value in values.items():
        if key in FLAT_KEYS and (found := _secret(*FLAT_KEYS[key])):
            yield (key,), found, value
    items = values.get("adapters")
    for number, item in enumerate(items if isinstance(items, (list, tuple)) else ()):
        if isinstance(item, Mapping):
            kind = str(item.get("type", item.get("name")))
            for field, value in item.items():
                if isinstance(field, str) and (found := _secret(kind, field)):
                    yield ("adapters", number, field), found, value


def option_secrets(values: Mapping[str, Any]) -> set[str]:
    """Texts that must not be seen in a message."""
    found: set[str] = set()
    for _, said, value in _options(values):
        if isinstance(value, Mapping):
            found.update(one for key, one in value.items() if isinstance(one, str) and is_secret_header(str(key)))
        elif isinstance(value, str) and (not said.literal or "://" not in value or hide_value(value) != value):
            found.add(value)
    return found


def check_literals(raw: Mapping[str, Any]) -> None:
    """Raise Conflict for a secret that stands in the file itself. `raw` is what the file says, with its `${NAME}`."""
    for path, said, value in _options(raw):
        if said.literal:
            continue
        found = value
        if isinstance(value, str) and str(path[-1]).endswith("headers"):
            with contextlib.suppress(ValueError):  # which is told later
                found = parse_headers(value)
        texts = (
            [text for name, text in found.items() if is_secret_header(str(name))]
            if isinstance(found, Mapping)
            else [found]
        )
        is_header = isinstance(found, Mapping)
        if any(isinstance(text, str) and _has_literal(text, is_header=is_header) for text in texts):
            raise Conflict(
                path,
                "a secret stands in this file",
                f"Write ${{NAME}} for it and set that variable, or use {path[-1]}_file",
            )


def _has_literal(text: str, *, is_header: bool) -> bool:
    """Whether a part of a secret is written there.

    A header may name how it is meant: `Bearer ${TOKEN}`, `id=${ID}; key=${KEY}`.
    """
    if is_header and "${" in text:
        text = _BEFORE_VARIABLE.sub("", text)
    return bool(literal_part(text).strip(" ;,\"'"))


def hide_options(name: str, value: Any) -> Any:
    """A value of the configuration as it may be shown: `name` is its key."""
    if name == "adapters" and isinstance(value, list):
        return [_hide_item(item) if isinstance(item, dict) else item for item in value]
    return hide_value(value) if name in FLAT_KEYS and _secret(*FLAT_KEYS[name]) else value


def hide_option(kind: str, field: str, value: Any) -> Any:
    """The value of one option of an adapter of this type, as it may be shown."""
    return hide_value(value) if _secret(kind, field) else value


def _hide_item(item: dict[str, Any]) -> dict[str, Any]:
    kind = str(item.get("type", item.get("name")))
    return {field: hide_option(kind, field, value) for field, value in item.items()}
