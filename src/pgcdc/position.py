"""Where a change stands in the stream.

A position is (lsn, ordinal, sub): the END lsn of the transaction, the change's index among the row changes of that
transaction (from 1), and a sub-ordinal for what is not a row change (messages, markers, schema events), which stands
after the row change `ordinal` it follows. A row change has sub 0, so switching messages on moves no other position.

`Position.end(lsn)` is the position after everything of the transaction that ends at `lsn`: what a batch that ends at a
commit ends with, and the only kind of position that is ever confirmed to PostgreSQL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["LAST_ORDINAL", "LAST_SUB", "SCHEMA_SUB", "Position", "format_lsn", "parse_lsn"]

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_POSITION = re.compile(r"([0-9A-F]{16})/([0-9A-F]{12})(?:\.([0-9A-F]{8}))?")

LAST_ORDINAL = (1 << 48) - 1
"""The ordinal of `Position.end`: greater than any change's."""
LAST_SUB = (1 << 31) - 1
"""The sub-ordinal of a transaction's COMMIT marker: greater than any message's."""
SCHEMA_SUB = LAST_SUB - 1
"""The sub-ordinal of a schema change: it stands directly before the row change `ordinal + 1`, the first in the new shape."""


def format_lsn(lsn: int) -> str:
    """An LSN as PostgreSQL writes it: `16/B374D848`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """The number behind PostgreSQL's notation. Raises ValueError for anything else."""
    found = _LSN.fullmatch(text)
    if found is None:
        raise ValueError(f"not an LSN: {text!r}")
    return (int(found[1], 16) << 32) | int(found[2], 16)


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in the stream of changes; compares in stream order."""

    lsn: int
    ordinal: int
    sub: int = 0

    @classmethod
    def end(cls, lsn: int) -> Position:
        """The position after everything of the transaction that ends at `lsn`."""
        return cls(lsn, LAST_ORDINAL)

    @property
    def is_end(self) -> bool:
        """Whether this is the end of a transaction rather than a place inside one."""
        return self.ordinal == LAST_ORDINAL

    @property
    def confirmable_lsn(self) -> int:
        """What may be confirmed when all up to here is durable: never the lsn of a transaction we are still inside of."""
        return self.lsn if self.is_end else 0

    def __str__(self) -> str:
        """Fixed width, so that text order is stream order: what events carry as `position`."""
        text = f"{self.lsn:016X}/{self.ordinal:012X}"
        return f"{text}.{self.sub:08X}" if self.sub else text

    @classmethod
    def parse(cls, text: str) -> Position:
        """The position behind `str(position)`. Raises ValueError for anything else."""
        found = _POSITION.fullmatch(text)
        if found is None:
            raise ValueError(f"not a position: {text!r}")
        return cls(int(found[1], 16), int(found[2], 16), int(found[3] or "0", 16))

    def to_offset(self) -> dict[str, Any]:
        """The JSON object that Spark keeps in its offset log."""
        offset: dict[str, Any] = {"lsn": format_lsn(self.lsn)}
        if not self.is_end:
            offset["ordinal"] = self.ordinal
            if self.sub:
                offset["sub"] = self.sub
        return offset

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Position:
        """The position behind `to_offset()`."""
        return cls(parse_lsn(offset["lsn"]), int(offset.get("ordinal", LAST_ORDINAL)), int(offset.get("sub", 0)))
