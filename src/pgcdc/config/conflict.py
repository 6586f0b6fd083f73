"""What does not fit together: an error that knows which key it is about, so that who reads files can say the line."""

from __future__ import annotations

from pgcdc.core.errors import ConfigError

__all__ = ["KeyPath", "Misfit", "name_key"]

KeyPath = tuple[str | int, ...]
"""The way to a value: `("adapters", 1, "path")`."""


class Misfit(ConfigError):
    """A value that is right by itself, and wrong with the others."""

    def __init__(self, path: KeyPath, message: str, advice: str) -> None:
        super().__init__(message, advice)
        self.path = path


def name_key(path: KeyPath) -> str:
    """The way to a value, as people write it: `adapters[1].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
