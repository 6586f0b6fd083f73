"""Nested values written as PostgreSQL writes them: what the tests of `types.split` take apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["write_array", "write_hstore", "write_interval", "write_multirange", "write_range", "write_row"]

_BLANKS = b" \t\n\r\v\f"
Leaf = bytes | None
Range = tuple[Leaf, Leaf, bool, bool] | None
"""Bounds and which of them are part of it; None is empty."""


def write_array(value: Any, delimiter: bytes = b",") -> bytes:
    """Lists of lists of leaves."""
    if value is None:
        return b"NULL"
    if isinstance(value, bytes):
        special = b'"\\{}' + delimiter + _BLANKS
        if value and value.upper() != b"NULL" and not any(byte in special for byte in value):
            return value
        return b'"%b"' % value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return b"{%b}" % delimiter.join(write_array(one, delimiter) for one in value)


def _double(value: Leaf, special: bytes) -> bytes:
    if value is None:
        return b""
    if value and not any(byte in special + _BLANKS for byte in value):
        return value
    return b'"%b"' % value.replace(b"\\", b"\\\\").replace(b'"', b'""')


def write_row(attributes: Sequence[Leaf]) -> bytes:
    """The attributes of a row."""
    return b"(%b)" % b",".join(_double(one, b'"\\(),') for one in attributes)


def write_range(value: Range) -> bytes:
    """A range."""
    if value is None:
        return b"empty"
    lower, upper, lower_inclusive, upper_inclusive = value
    bounds = b",".join(_double(one, b'"\\()[],') for one in (lower, upper))
    return (b"[" if lower_inclusive else b"(") + bounds + (b"]" if upper_inclusive else b")")


def write_multirange(value: Sequence[Range]) -> bytes:
    """Ranges that are not empty."""
    return b"{%b}" % b",".join(map(write_range, value))


def write_hstore(value: Mapping[bytes, Leaf]) -> bytes:
    """Keys and values in the order of hstore."""
    pairs = sorted(value.items(), key=lambda pair: (len(pair[0]), pair[0]))
    return b", ".join(_quote(key) + b"=>" + (b"NULL" if one is None else _quote(one)) for key, one in pairs)


def _quote(text: bytes) -> bytes:
    return b'"%b"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def write_interval(months: int, days: int, microseconds: int) -> bytes:
    """An interval in the style iso_8601."""
    if not (months or days or microseconds):
        return b"PT0S"
    years, months = _divide(months, 12)
    seconds, fraction = _divide(microseconds, 1_000_000)
    minutes, seconds = _divide(seconds, 60)
    hours, minutes = _divide(minutes, 60)
    text = "P" + "".join(f"{one}{unit}" for one, unit in ((years, "Y"), (months, "M"), (days, "D")) if one)
    if microseconds:
        text += "T" + "".join(f"{one}{unit}" for one, unit in ((hours, "H"), (minutes, "M")) if one)
    if seconds or fraction:
        sign = "-" if microseconds < 0 else ""
        shown = f".{abs(fraction):06d}".rstrip("0") if fraction else ""
        text += f"{sign}{abs(seconds)}{shown}S"
    return text.encode()


def _divide(number: int, by: int) -> tuple[int, int]:
    quotient, rest = divmod(abs(number), by)
    return (quotient, rest) if number >= 0 else (-quotient, -rest)
