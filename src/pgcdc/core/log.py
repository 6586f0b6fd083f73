"""What a running command says on stderr: lines for people, or one JSON object each (`--log-format json`)."""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import UTC, datetime
from typing import Literal

from pgcdc.core.errors import PgcdcError

__all__ = ["Format", "begin_log", "is_json", "say", "say_error"]

Format = Literal["text", "json"]

_ABOUT = {
    "adapter": re.compile(r"\badapter ([\w-]+)"),
    "table": re.compile(r'\btable ((?:[\w$.]|"[^"]*")+)'),
}
_format: Format | None = None  # None: a command that ends soon; its lines need no time


def begin_log(log_format: Format) -> None:
    """From now on lines have their time."""
    global _format
    _format = log_format


def is_json() -> bool:
    return _format == "json"


def say(text: str, *, adapter: str = "") -> None:
    """One line."""
    if is_json():
        level, message = ("warning", text.removeprefix("warning: ")) if text.startswith("warning: ") else ("info", text)
        _print_json(level, message, "", adapter)
    else:
        whose = f"adapter {adapter}: " if adapter else ""
        print(f"{_stamp()}pgcdc: {whose}{text}", file=sys.stderr, flush=True)


def say_error(error: PgcdcError) -> None:
    """What happened and what to do, in one line."""
    if is_json():
        _print_json("error", error.message, error.advice, "")
    else:
        print(_stamp() + " ".join(f"error: {error}".split()), file=sys.stderr, flush=True)


def _stamp() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S ") if _format == "text" else ""


def _print_json(level: str, message: str, advice: str, adapter: str) -> None:
    """Adapter and table are read from the text, where messages always name them."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": now, "level": level, "message": message}
    if advice:
        line["advice"] = advice
    for name, pattern in _ABOUT.items():
        found = pattern.search(message)
        if name == "adapter" and adapter:
            line[name] = adapter
        elif found:
            line[name] = found[1]
    print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)
