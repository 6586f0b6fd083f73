"""How the way to a value is written."""

from __future__ import annotations

from pgcdc.core.settings import KeyPath

__all__ = ["name_key"]


def name_key(path: KeyPath) -> str:
    """The way to a value, as people write it: `adapters[1].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
