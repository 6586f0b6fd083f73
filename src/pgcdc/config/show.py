"""The configuration as it holds, without secrets, and who said each part of it: for people and for machines."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from pgcdc.config.layers import Loaded
from pgcdc.config.model import GROUPS, Config
from pgcdc.config.option_secrets import hide_options
from pgcdc.core.secrets import redact_text
from pgcdc.core.settings import setting_of
from pgcdc.postgres.database import redact


def effective(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    """For each setting that has a value: the value, as JSON has it, and its origin. In the order of the groups."""
    fields = [(name, setting_of(name, field)) for name, field in Config.model_fields.items()]
    found = {}
    for name, _ in sorted(fields, key=lambda one: GROUPS.index(one[1].group)):
        value, origin = _value(loaded, name)
        if value is not None and value != "":
            found[name] = value, origin
    return found


def _value(loaded: Loaded, name: str) -> tuple[Any, str]:
    config, origin = loaded.config, loaded.origin(name)
    raw = loaded.raw((name,)) if loaded.origins.get((name,)) == "" else None
    if name in ("db", "dlq_db"):
        if isinstance(raw, str):
            return redact_text(raw), origin
        url: str = getattr(config, name)
        return redact(url) if url else "", origin
    if name == "snapshot_mode":
        return config.effective_snapshot_mode, loaded.origin("snapshot_first") if config.snapshot_first else origin
    if name == "toast" and config.toast_cache:
        return "cache", loaded.origin("toast_cache")
    if _has_variable(raw):  # what a variable holds may be a secret
        return _hidden(hide_options(name, raw)), origin
    return _hidden(hide_options(name, _plain(getattr(config, name)))), origin


def _has_variable(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_variable, parts)) or (isinstance(value, str) and "${" in value)


def _plain(value: Any) -> Any:
    """As JSON has it; of mappings only what was said."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_hidden(one) for one in value]
    return redact_text(value) if isinstance(value, str) else value


def show_yaml(loaded: Loaded) -> str:
    """The same as YAML that could be read again, with the origin of each value behind it."""
    lines: list[str] = []
    group = ""
    for name, (value, origin) in effective(loaded).items():
        now = setting_of(name, Config.model_fields[name]).group
        if now != group:
            group = now
            lines += ["", f"# {group}"] if lines else [f"# {group}"]
        style = None if isinstance(value, (list, dict)) else False  # nested ones in one line, if they are simple
        text = yaml.safe_dump({name: value}, sort_keys=False, default_flow_style=style, allow_unicode=True, width=1000)
        first, *more = text.rstrip("\n").split("\n")
        lines += [f"# {origin}", first, *more] if more else [f"{first:<40}  # {origin}"]
    return "\n".join(lines) + "\n"
