"""Writes what is made from the options of adapters: the settings on the page of each, and the types of their functions.

    python tools/adapter_reference.py [--stub]

Run it when an adapter or one of its settings is new or changed; a test says if a page was forgotten. The types
(`adapters.pyi`) are not kept in git: `setup.py` and `make lint` make them with --stub.
"""

from __future__ import annotations

import sys
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from pgcdc.core.settings import is_switch, unit_of
from pgcdc.sink.spec import DeliveryOptions, SinkOptions, own_adapters

ROOT = Path(__file__).parents[1]
PAGES, STUB = ROOT / "docs" / "adapters", ROOT / "src" / "pgcdc" / "adapters.pyi"
BEGIN, END = "<!-- settings: made by tools/adapter_reference.py -->\n", "<!-- end of settings -->\n"
_HEAD = """
| flag | variable | key | default | meaning |
| --- | --- | --- | --- | --- |
"""


def make_page(kind: str, model: type[SinkOptions]) -> str:
    """docs/adapters/KIND.md with its table of settings: between the marks, or at the end of a new page."""
    text = (PAGES / f"{kind}.md").read_text()
    before, _, rest = text.partition(BEGIN) if BEGIN in text else (f"{text}\n## Reference\n\n", "", "")
    rows = [_row(kind, name, field) for name, field in model.model_fields.items()]
    table = "".join([_HEAD, *rows]) if rows else "\nIt has no settings of its own.\n"
    more = "\n[Every adapter](../configuration.md#adapters) also accepts the delivery settings.\n\n"
    return f"{before}{BEGIN}{table}{more}{END}{rest.partition(END)[2]}"


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
        "# made by tools/adapter_reference.py from the options of adapters\n",
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
    STUB.write_text(make_stub())
    for kind, model in own_adapters().items() if "--stub" not in sys.argv else ():
        (PAGES / f"{kind}.md").write_text(make_page(kind, model))
