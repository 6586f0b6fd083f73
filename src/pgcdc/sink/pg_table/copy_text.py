"""Values and rows in the text format of COPY: the form in which rows are folded and written."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["NULL", "read_value", "write_row", "write_value"]

NULL = b"\\N"

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\b": "\\b", "\f": "\\f"})
_ESCAPED = re.compile(rb"\\(.)", re.S)
_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r", b"b": b"\b", b"f": b"\f"}


def write_value(value: str | None) -> bytes:
    """A value; None is NULL."""
    return NULL if value is None else value.translate(_ESCAPES).encode()


def write_row(values: Iterable[str | None]) -> bytes:
    """A row, without the newline at its end."""
    return b"\t".join(map(write_value, values))


def read_value(text: bytes) -> str | None:
    """The value behind `write_value`."""
    if text == NULL:
        return None
    if b"\\" in text:
        text = _ESCAPED.sub(lambda match: _LETTERS.get(match[1], match[1]), text)
    return text.decode()
