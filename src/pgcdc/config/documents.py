"""Documents generated from the model: the effective settings, the file of `config init`, and the JSON schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from pgcdc.config.layers import Loaded, hide_secrets
from pgcdc.config.model import FIELDS, GROUPS, Config
from pgcdc.core.errors import ConfigError
from pgcdc.core.secrets import redact_text
from pgcdc.core.settings import setting_of, unit_of
from pgcdc.postgres.database import redact
from pgcdc.sink.spec import DeliveryOptions

# --- the effective settings without secrets, and where each was set


def effective(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    """Every setting that has a value, as JSON, with its origin. Ordered by group."""
    found = {}
    for name, _, _ in sorted(FIELDS, key=lambda one: GROUPS.index(one[2].group)):
        value, origin = _value(loaded, name)
        if value is not None and value != "":
            found[name] = value, origin
    return found


def _value(loaded: Loaded, name: str) -> tuple[Any, str]:
    config, origin = loaded.config, loaded.origin(name)
    raw = loaded.raw((name,)) if loaded.origins.get((name,)) == "" else None
    if name in ("db", "dlq_db"):
        url: str = getattr(config, name)
        return redact_text(raw) if isinstance(raw, str) else redact(url) if url else "", origin
    if name == "snapshot_mode":
        return config.effective_snapshot_mode, loaded.origin("snapshot_first") if config.snapshot_first else origin
    if name == "toast" and config.toast_cache:
        return "cache", loaded.origin("toast_cache")
    value = raw
    if "${" not in str(raw):  # the value of a variable may be a secret
        as_json: TypeAdapter[Any] = TypeAdapter(Any)
        value = as_json.dump_python(getattr(config, name), mode="json", by_alias=True, exclude_unset=True)
    return hide_secrets(name, value), origin


def show_yaml(loaded: Loaded) -> str:
    """The effective settings as YAML, each with its origin in a comment."""
    lines: list[str] = []
    group = ""
    for name, (value, origin) in effective(loaded).items():
        now = setting_of(name, Config.model_fields[name]).group
        if now != group:
            group = now
            lines += ["", f"# {group}"] if lines else [f"# {group}"]
        style = None if isinstance(value, (list, dict)) else False  # simple nested values fit on one line
        text = yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=style, allow_unicode=True, width=1000)
        first, *more = text.rstrip("\n").split("\n")
        lines += [f"# {origin}", first, *more] if more else [f"{first:<40}  # {origin}"]
    return "\n".join(lines) + "\n"


# --- the file of `pgcdc config init`

_HEAD = """\
## Configuration of a pgcdc pipeline. `pgcdc listen` reads pgcdc.yaml in its folder, or the file that --config names.
## A flag wins over a PGCDC_* variable, which wins over this file. To use a line that begins with "# ", take that away.
## `pgcdc config show` prints the effective settings and where each was set, `pgcdc validate` tries them. For editors:
## pgcdc config schema > pgcdc.schema.json
# yaml-language-server: $schema=pgcdc.schema.json
##
## ${NAME} in a text is the value of that variable, ${NAME:-text} the text if it is not set. Do not write a password here:
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
    """The text of the file: every setting with its description. Used unchanged, it only chooses where events go."""
    parts = [_HEAD]
    for group in GROUPS:
        parts.append(f"\n\n## --- {group}\n")
        if group in _GROUP_TEXT:
            parts.append(f"## {_GROUP_TEXT[group]}\n")
        for name, field, setting in FIELDS:
            if setting.group == group and not setting.is_hidden:
                mark = "" if name == "adapters" else "# "
                is_block = name == "transforms"
                line = _TRANSFORMS if is_block else f"{mark}{name}: {setting.example or _write(field)}\n"
                parts.append(f"\n## {field.description}\n{line}")
        if group == "Adapters":
            parts.append(
                "\n## Delivery settings, here of stdout; every other adapter has the same ones, with its name.\n"
            )
            for name, field in DeliveryOptions.model_fields.items():
                parts.append(f"# stdout_{name}: {_write(field)}  # {field.description}\n")
    return "".join(parts)


def _write(field: FieldInfo) -> str:
    unit, value = unit_of(field), field.default
    if unit is not None and value is not None:
        return unit.format(value)
    plain: Any = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True)
    return text.removesuffix("...\n").strip()


def write_template(path: Path) -> None:
    """Write the template to a new file. ConfigError if the file exists or cannot be created."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(make_template())
    except FileExistsError:
        raise ConfigError(f"{path} exists", "It was not changed; name another file with --config") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "Choose another place with --config") from None


# --- the JSON schema, which accepts `${NAME}` for any value

_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """The schema of `pgcdc.yaml`, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_clean(Config.model_json_schema(by_alias=True)),
        "title": "pgcdc",
        "description": "Configuration of a pgcdc pipeline (pgcdc.yaml)",
    }


def _clean(node: Any) -> Any:
    if isinstance(node, list):
        return [_clean(one) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _clean(one) for key, one in node.items() if key != "setting"}
    if isinstance(kept.get("properties"), dict):
        kept["properties"] = {name: _open(one) for name, one in kept["properties"].items()}
    return kept


def _open(field: dict[str, Any]) -> dict[str, Any]:
    """The same field, which also accepts a text with a variable."""
    if isinstance(field.get("anyOf"), list):
        takes_text = any(one.get("type") == "string" and not {"enum", "pattern"} & set(one) for one in field["anyOf"])
        return field if takes_text else {**field, "anyOf": [*field["anyOf"], _VARIABLE]}
    if field.get("type") in ("integer", "number", "boolean") or "enum" in field:
        about: dict[str, Any] = {key: field[key] for key in ("description", "title", "default") if key in field}
        return {**about, "anyOf": [{key: one for key, one in field.items() if key not in about}, _VARIABLE]}
    return field
