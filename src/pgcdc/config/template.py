"""The file of `pgcdc config init`: every setting with what it does, made from the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from pgcdc.config.model import GROUPS, Config
from pgcdc.core.errors import ConfigError
from pgcdc.core.settings import setting_of, unit_of
from pgcdc.sink.spec import DeliveryOptions

_HEAD = """\
## Configuration of a pgcdc pipeline. `pgcdc listen` reads pgcdc.yaml in its folder, or the file that --config names.
## A flag wins over a PGCDC_* variable, which wins over this file. To use a line that begins with "# ", take that away.
## `pgcdc config show` prints what holds and why, `pgcdc validate` tries it. For editors:
## pgcdc config schema > pgcdc.schema.json
# yaml-language-server: $schema=pgcdc.schema.json
##
## ${NAME} in a text is the value of that variable, ${NAME:-text} the text if it is not set. A password does not stand here:
## put the URL into PGCDC_DB, or write ${NAME} for the password, or use password_file.
"""

_GROUP_TEXT = {
    "Tables": "One of tables, schemas, all_tables and publication is needed.",
    "Adapters": "A second adapter of a type has a mapping: {name: audit, type: file, path: audit.jsonl}.",
}

_TRANSFORMS = """\
# transforms:
#   global:
#     - type: drop_columns
#       columns: [password]
#   adapter:
#     stdout:
#       - type: mask
#         columns: [email]
#         mode: redact
"""


def make_template() -> str:
    """The text of the file. As it is, it says nothing but where events go."""
    fields = [(name, field, setting_of(name, field)) for name, field in Config.model_fields.items()]
    parts = [_HEAD]
    for group in GROUPS:
        parts.append(f"\n\n## --- {group}\n")
        if group in _GROUP_TEXT:
            parts.append(f"## {_GROUP_TEXT[group]}\n")
        for name, field, setting in fields:
            if setting.group != group or setting.is_hidden:
                continue
            parts.append(f"\n## {field.description}\n")
            if name == "transforms":
                parts.append(_TRANSFORMS)
                continue
            mark = "" if name == "adapters" else "# "
            parts.append(f"{mark}{name}: {setting.example or _write(field)}\n")
        if group == "Adapters":
            parts.append(_delivery())
    return "".join(parts)


def _delivery() -> str:
    lines = ["\n## How an adapter is called, here stdout; the same for every other, with its name.\n"]
    for name, field in DeliveryOptions.model_fields.items():
        lines.append(f"# stdout_{name}: {_write(field)}  # {field.description}\n")
    return "".join(lines)


def _write(field: FieldInfo) -> str:
    unit, value = unit_of(field), field.default
    if unit is not None and value is not None:
        return unit.format(value)
    plain: Any = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True)
    return text.removesuffix("...\n").strip()


def write_template(path: Path) -> None:
    """Write it to a file that does not exist yet. ConfigError if it does, or cannot be made."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(make_template())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigError(f"{path} exists", "It is left as it is; give another name with --config") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "Choose another place with --config") from None
