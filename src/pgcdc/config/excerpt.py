"""The line of a file that an error is about, and a caret below it. A value that may be a secret is not shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

MAX_SHOWN = 120
_KEY = re.compile(r"""([\w-]+)["']?\s*:(?!//)""")


def show_line(text: str, line: int, column: int, may_show: Callable[[str], bool]) -> str:
    """`line` and `column` from 0. `may_show` says of a key whether its values are harmless. Empty: nothing may be shown."""
    lines = text.splitlines()
    shown = lines[line] if line < len(lines) else ""
    keys, above = list(_KEY.finditer(shown)), [key for one in _above(lines, line) for key in _KEY.findall(one)]
    is_open = all(map(may_show, above))
    if not keys and not (above and is_open):
        return ""
    hidden = [key for key in keys if not is_open or not may_show(key[1])]
    if hidden and shown[hidden[0].end() :].strip():
        shown = f"{shown[: hidden[0].end()]} ***"
    shown = shown.replace("\t", "→")[:MAX_SHOWN].rstrip()
    number = f"{line + 1:>5} | "
    return f"{number}{shown}\n{' ' * (len(number) - 2)}| {' ' * min(column, len(shown))}^"


def _above(lines: list[str], line: int) -> Iterator[str]:
    """The lines with the keys that a line stands below: of those above it, each that is indented less than all before."""
    indent = _indent(lines[line]) if line < len(lines) else 0
    for one in reversed(lines[:line]):
        if one.strip() and _indent(one) < indent:
            indent = _indent(one)
            yield one


def _indent(line: str) -> int:
    """An item of a list may stand right below its key."""
    text = line.lstrip()
    return len(line) - len(text) + text.startswith("-")
