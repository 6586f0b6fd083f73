"""Options of adapters as they may be shown: without secrets."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pgcdc.core.secrets import literal_part, redact_text
from pgcdc.core.settings import setting_of
from pgcdc.sink.webhook.options import redact_url

__all__ = ["describe_options", "hide_value"]

LONG_WORD = 16
"""In the path of a URL: as `redact_url` has it."""


def describe_options(options: BaseModel) -> str:
    """The options of an adapter for people, `, path a.jsonl, max_files 3`: without secrets, and without defaults."""
    said = ""
    for field, value in options:
        info = type(options).model_fields[field]
        if value == info.default:
            continue
        shown = hide_value(value) if setting_of(field, info).secret else value
        if isinstance(shown, tuple):
            shown = shlex.join(map(str, shown))
        if isinstance(shown, (str, int, float, Path)) and shown != "":
            said += f", {field} {shown}"
    return redact_text(said)


def hide_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "***" if isinstance(one, str) and "${" not in one else one for key, one in value.items()}
    if not isinstance(value, str) or not value:
        return value
    if "${" in value:
        return _hide_between(value)
    if value.startswith(("http://", "https://")):
        return redact_url(value)
    return redact_text(value) if "://" in value else "***"


def _hide_between(text: str) -> str:
    """A text with variables; of a URL's query and long words only those are shown."""
    if not literal_part(text).startswith(("http://", "https://", "/", "?")):
        return text
    before, mark, query = text.partition("?")
    path = "/".join("***" if len(literal_part(word)) >= LONG_WORD else word for word in before.split("/"))
    return path + (mark and ("?***" if literal_part(query) else f"?{query}"))
