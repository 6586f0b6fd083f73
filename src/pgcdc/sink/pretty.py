"""Events for people: one paragraph each, with colours if the terminal has them.

A value may hold anything, also what a terminal would take for a command: control characters are written as escapes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

__all__ = ["Pretty"]

MAX_VALUE = 200
"""Characters of one value that are shown."""

_STYLES = {
    "INSERT": "green",
    "UPDATE": "yellow",
    "DELETE": "red",
    "TRUNCATE": "bold red",
    "SNAPSHOT": "cyan",
    "other": "magenta",
    "quiet": "dim",
    "name": "bold",
}
_PLAIN = re.compile(r"[^\s\"'=,→…]+")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Pretty:
    """Writes events as text. Colours are used on a terminal that has them, unless NO_COLOR is set."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._codes = _find_codes(is_terminal)

    def write(self, line: str) -> str:
        """The text of one line of JSON, which ends with a newline."""
        try:
            event = orjson.loads(line)
            return f"{' '.join(self._parts(event))}\n"
        except (ValueError, KeyError, TypeError, AttributeError):  # of another form: an envelope, or a typed row
            return _escape(line.rstrip("\n")) + "\n"

    def _parts(self, event: Mapping[str, Any]) -> Iterator[str]:
        operation, payload = event["operation"], event["payload"]
        channel = event["channel"].removeprefix("pgcdc:")
        time = event["created_at"].replace("T", " ")[:23]
        yield self._paint("quiet", _escape(time))
        yield self._paint(operation if operation in _STYLES else "other", f"{_escape(operation):<8}")
        yield self._paint("name", _escape(channel))
        row, old = payload["row"] or {}, payload["old"] or {}
        for name, value in row.items():
            shown = f"{_escape(name)}={self._value(value)}"
            if operation == "UPDATE" and name in old:
                if old[name] == value:
                    shown = self._paint("quiet", f"{_escape(name)}={_value(value)}")
                else:
                    shown = f"{self._paint('name', _escape(name))}: {self._value(old[name])} → {self._value(value)}"
            yield shown
        for name in payload.get("_unchanged_toast_columns", ()):
            yield self._paint("quiet", f"{_escape(name)} as before")
        for name, value in payload.items():
            if name not in ("op", "table", "row", "old", "_unchanged_toast_columns") and value is not None:
                yield f"{_escape(name)}={self._value(value)}"

    def _value(self, value: Any) -> str:
        return self._paint("quiet", "NULL") if value is None else _value(value)

    def _paint(self, style: str, text: str) -> str:
        if self._codes is None:
            return text
        before, after = self._codes[style]
        return f"{before}{text}{after}"


def _value(value: Any) -> str:
    """A value in one piece: quoted where its end could not be seen otherwise."""
    if value is None:
        return "NULL"
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    if len(text) > MAX_VALUE:
        return f"{_value(text[:MAX_VALUE])}… ({len(text)} characters)"
    if isinstance(value, str) and not _PLAIN.fullmatch(text):
        text = orjson.dumps(text).decode()
    return _escape(text)


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _find_codes(is_terminal: bool) -> dict[str, tuple[str, str]] | None:
    """What to write before and after a text, by style. Made once: rich itself is too slow for every event."""
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    console = Console(file=io.StringIO(), force_terminal=True if is_terminal else None)
    if not console.color_system or console.no_color:
        return None
    codes = {}
    for name, style in _STYLES.items():
        before, _, after = Style.parse(style).render("\0", color_system=ColorSystem.STANDARD).partition("\0")
        codes[name] = before, after
    return codes
