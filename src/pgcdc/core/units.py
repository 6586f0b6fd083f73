"""Durations and sizes: `100ms`, `30m`, `512MB`. The same in flags, variables, YAML, Python and Spark's options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_TIMES = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|[smhd]?)")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?")


def parse_seconds(text: str) -> float:
    """`100ms`, `90s`, `30m`, `6h`, `1d`, or a number of seconds. Raises ValueError for anything else."""
    found = _TIME.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"not a time: {text!r}")
    return float(found[1]) / 1000 if found[2] == "ms" else float(found[1]) * _TIMES[found[2] or "s"]


def parse_bytes(text: str) -> int:
    """`512MB`, `1 GiB`, `1048576`: a number of bytes. Raises ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"not a size: {text!r}")
    return int(float(found[1]) * (1 << 10 * " kmgt".index(found[2] or " ")))


def format_seconds(value: float) -> str:
    """The shortest text that `parse_seconds` reads as this value: `6h`, `100ms`, `90s`, `0`."""
    if not value:
        return "0"
    for unit, size in _TIMES.items():
        count = value * 1000 if unit == "ms" else value / size
        if count >= 1 and (round(count, 6).is_integer() or unit == "ms"):
            return f"{_plain(count)}{unit}"
    return f"{_plain(value * 1000)}ms"


def _plain(number: float) -> str:
    """Without an exponent, six digits behind the point."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def format_bytes(value: int) -> str:
    """The shortest text that `parse_bytes` reads as this value: `1GB`, `1000`."""
    for power in (4, 3, 2, 1):
        if value and value % (1 << 10 * power) == 0:
            return f"{value >> 10 * power}{' KMGT'[power]}B"
    return str(value)


@dataclass(frozen=True, slots=True)
class Unit:
    """In the metadata of a field: what its number counts, for help texts."""

    kind: Literal["seconds", "bytes"]
    metavar: str
    pattern: str

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        """For editors: the number with its limits, or a text with a unit."""
        return {"anyOf": [handler(core), {"type": "string", "pattern": self.pattern}]}

    def format(self, value: Any) -> str:
        """The value as people write it."""
        return format_seconds(value) if self.kind == "seconds" else format_bytes(value)


def _parse(parse: Callable[[str], float], wanted: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": f"not a {wanted}"}) from None


Seconds = Annotated[
    float,
    BeforeValidator(partial(_parse, parse_seconds, "time like 100ms, 30m or 6h")),
    Unit("seconds", "TIME", r"^\s*\d+(\.\d+)?\s*([mM]?[sS]|[mMhHdD])?\s*$"),
]
"""A duration: a number of seconds, or a text with a unit (ms, s, m, h, d)."""
Bytes = Annotated[
    int,
    BeforeValidator(partial(_parse, parse_bytes, "size like 512MB or 1GB")),
    Unit("bytes", "SIZE", r"^\s*\d+(\.\d+)?\s*[kKmMgGtT]?([iI]?[bB])?\s*$"),
]
"""A number of bytes, or a text with a unit (KB, MB, GB, TB: powers of 1024)."""
