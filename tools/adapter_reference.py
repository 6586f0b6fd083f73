"""Writes what is made from the options of adapters: their reference page, and the types of their functions in Python.

    python tools/adapter_reference.py

Run it when an adapter or one of its settings is new or changed; a test says if it was forgotten.
"""

from __future__ import annotations

import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from pgcdc.core.settings import is_switch, unit_of
from pgcdc.sink.registry import own_adapters
from pgcdc.sink.spec import DeliveryOptions

ROOT = Path(__file__).parents[1]
PAGE, STUB = ROOT / "docs" / "adapters" / "README.md", ROOT / "src" / "pgcdc" / "adapters.pyi"
GENERATED = "made by tools/adapter_reference.py from the options of adapters: change those, and run it again"


_HEAD = f"""<!-- {GENERATED} -->
# Adapters

Where events go. All of them keep the same contract ([how to write a sink](../contract.md)) and are called in the same way
([delivery](../delivery.md)).

| adapter | where events go |
| --- | --- |
"""
_SETTINGS = """
## Settings

A further adapter of a type is a mapping in [`adapters`](../configuration.md#adapters), with these keys without the type in
front of them. In Python they are keywords: `adapters.file("events.jsonl", max_size="100MB")`.
"""
_TABLE = """
### {}

| flag | variable | key | default | meaning |
| --- | --- | --- | --- | --- |
"""
_DELIVERY = """
### Every adapter

With the adapter's name in front: `--file-timeout`, `PGCDC_FILE_TIMEOUT`, `file_timeout`. [Delivery](../delivery.md)
explains them.

| key | default | meaning |
| --- | --- | --- |
"""


def make_page() -> str:
    """docs/adapters/README.md."""
    kinds = own_adapters()
    parts = [_HEAD, *map(_index, kinds, kinds.values()), _SETTINGS]
    for kind, model in kinds.items():
        if model.model_fields:
            parts.append(
                f"\n### {kind}\n\n| flag | variable | key | default | meaning |\n| --- | --- | --- | --- | --- |\n"
            )
            parts += [_row(kind, name, field) for name, field in model.model_fields.items()]
    parts.append(_DELIVERY)
    for name, field in DeliveryOptions.model_fields.items():
        parts.append(f"| `{name}` | {_default(field)} | {_meaning(field)} |\n")
    return "".join(parts)


def _index(kind: str, model: type) -> str:
    more = [f"[{page.stem}]({page.name})" for page in sorted(PAGE.parent.glob(f"{kind}_*.md"))]
    return f"| {', '.join([f'[{kind}]({kind}.md)', *more])} | {_sentence(model)} |\n"


def _sentence(model: type) -> str:
    return " ".join((model.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")


def _row(kind: str, name: str, field: FieldInfo) -> str:
    key = f"{kind}_{name}"
    flag = f"--{key}".replace("_", "-")
    flags = f"`{flag}`, `--no-{flag[2:]}`" if field.default is True else f"`{flag}`"
    return f"| {flags} | `PGCDC_{key.upper()}` | `{key}` | {_default(field)} | {_meaning(field)} |\n"


def _default(field: FieldInfo) -> str:
    unit, value = unit_of(field), field.default
    if field.is_required():
        return "needed"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, "", (), {}):
        return ""
    shown = unit.format(value) if unit else f"{value:g}" if isinstance(value, float) else value
    return f"`{shown}`"


def _meaning(field: FieldInfo) -> str:
    return (field.description or "").replace("|", "\\|")


def make_stub() -> str:
    """src/pgcdc/adapters.pyi."""
    delivery = "".join(f"    {name}: {_type(one)}\n" for name, one in DeliveryOptions.model_fields.items())
    parts = [
        f"# {GENERATED}\n",
        "from collections.abc import Callable, Mapping, Sequence\nfrom os import PathLike\n",
        "from typing import Any, Literal, TypedDict, Unpack\n\n",
        "from pgcdc.sink.spec import AdapterSpec, Priority\n\n",
        f"class Delivery(TypedDict, total=False):\n{delivery}\n",
    ]
    for kind, model in own_adapters().items():
        own = [(name, f"{name}: {_type(field)}", field.is_required()) for name, field in model.model_fields.items()]
        given = [text if is_needed else f"{text} = ..." for _, text, is_needed in own]
        common = ["name: str = ...", "transforms: Sequence[Any] = ...", "routes: str | Sequence[str] = ..."]
        common += ["priority: Priority = ...", "**delivery: Unpack[Delivery]"]
        lines = "".join(f"    {one},\n" for one in (*given[:1], "*", *given[1:], *common))
        doc = textwrap.indent(f'"""{_sentence(model)}."""', "    ")
        parts.append(f"def {kind}(\n{lines}) -> AdapterSpec:\n{doc}\n\n")
    parts.append("def __getattr__(name: str) -> Callable[..., AdapterSpec]: ...\n")
    return "".join(parts)


def _type(field: FieldInfo) -> str:
    """What may be given in Python; validators take a text for most things."""
    if unit_of(field) is not None:
        return f"{'int' if field.annotation is int else 'float'} | str"
    takes_more = any(isinstance(one, BeforeValidator) for one in field.metadata)
    return _name(field.annotation, takes_more)


def _name(kind: Any, takes_more: bool) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"Literal[{', '.join(repr(one).replace(chr(39), chr(34)) for one in args)}]"
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(one for arg in args for one in _name(arg, takes_more).split(" | "))
        return " | ".join(names)
    if origin is tuple:
        return "str | Sequence[str]"
    if origin is dict:
        return "str | Mapping[str, str]"
    if kind is str and takes_more:
        return "str | PathLike[str]"
    if hasattr(kind, "__metadata__"):
        return _name(args[0], any(isinstance(one, BeforeValidator) for one in kind.__metadata__))
    return "None" if kind is types.NoneType else "bool" if is_switch(kind) else str(kind.__name__)


if __name__ == "__main__":
    PAGE.write_text(make_page())
    STUB.write_text(make_stub())
