"""The types of single settings: what texts of flags and variables become, and what an editor is told of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from pgcdc.core.relation import Op
from pgcdc.core.settings import check_known, refuse, split_names, text_or_list
from pgcdc.sink.spec import Priority

ADAPTER_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,62}$"
_PRIORITIES = ("critical", "normal", "best-effort")


AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME)]
_OPERATIONS = [op.name for op in Op]
Operations = Annotated[
    tuple[
        Annotated[
            str,
            BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
            AfterValidator(partial(check_known, _OPERATIONS)),
        ],
        ...,
    ],
    BeforeValidator(split_names),
    text_or_list({"enum": _OPERATIONS}),
]


# --- what is said of several things at once: a mapping in YAML, `name=value` in flags and variables


def _pairs(texts: Iterable[Any], example: str) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not equals or not name.strip() or not value.strip():
            raise refuse(f"{text!r} is not name=value", f"Write it like {example}")
        found.append((name.strip(), value.strip()))
    return found


def parse_routes(value: Any) -> Any:
    """`name=pattern,pattern` as often as wanted; `;` between them in a variable; a mapping in YAML."""
    if isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if isinstance(value, (list, tuple)):
        found: dict[str, tuple[str, ...]] = {}
        for name, patterns in _pairs(value, "file=orders,sales.*"):
            found[name] = (*found.get(name, ()), *split_names(patterns))
        return found
    return value


def parse_priorities(value: Any) -> Any:
    """`name=priority`, with `,` between them in a variable; a mapping in YAML."""
    if isinstance(value, (str, list, tuple)):
        texts = [value] if isinstance(value, str) else value
        split = [part for text in texts for part in (split_names(text) if isinstance(text, str) else (text,))]
        return dict(_pairs(split, "file=critical"))
    return value


def _pattern(text: str) -> str:
    if not text.strip():
        raise refuse("a pattern is empty", "Write orders, or *")
    return text if ":" in text else f"pgcdc:{text}"


Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_pattern)], ...],
    Field(min_length=1),
    BeforeValidator(split_names),
    text_or_list(),
]
"""Patterns of channels; one without a colon means a table."""
Routes = Annotated[dict[str, Patterns], BeforeValidator(parse_routes)]
Priorities = Annotated[
    dict[str, Priority],
    BeforeValidator(parse_priorities),
    WithJsonSchema({"type": "object", "additionalProperties": {"enum": list(_PRIORITIES)}}),
]
