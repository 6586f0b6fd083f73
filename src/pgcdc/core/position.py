"""Where a change stands in the stream.

A position is (lsn, ordinal, sub): the END lsn of the transaction, the change's index among the row changes of that
transaction (from 1), and a sub-ordinal for what is not a row change (messages, markers, schema events), which stands
after the row change `ordinal` it follows. A row change has sub 0, so switching messages on moves no other position.

`Position.end(lsn)` is the position after everything of the transaction that ends at `lsn`: what a batch that ends at a
commit ends with, and the only kind of position that is ever confirmed to PostgreSQL.

Rows that come from a table instead of the stream (snapshots) stand between two transactions. PostgreSQL's LSNs are
multiples of 8, so `lsn + 1` is free: such rows have it, and the number of their chunk in the upper bits of the ordinal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CHUNK_BITS",
    "CHUNK_ROWS",
    "LAST_CHUNK",
    "LAST_ORDINAL",
    "LAST_SUB",
    "SCHEMA_SUB",
    "Position",
    "format_lsn",
    "parse_lsn",
    "stream_lsn",
]

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_POSITION = re.compile(r"([0-9A-F]{16})/([0-9A-F]{12})(?:\.([0-9A-F]{8}))?")

LAST_ORDINAL = (1 << 48) - 1
"""The ordinal of `Position.end`: greater than any change's."""
LAST_SUB = (1 << 31) - 1
"""The sub-ordinal of a transaction's COMMIT marker: greater than any message's."""
SCHEMA_SUB = LAST_SUB - 1
"""The sub-ordinal of a schema change: it stands directly before the row change `ordinal + 1`, the first in the new shape."""
CHUNK_BITS = 28
"""Of the ordinal of a row of a snapshot: below are the rows of its chunk, above the number of the chunk."""
CHUNK_ROWS = (1 << CHUNK_BITS) - 1
"""A chunk of a snapshot has fewer rows than this: it is the ordinal of its end, counted within the chunk."""
LAST_CHUNK = LAST_ORDINAL >> CHUNK_BITS
"""The number of the last chunk that has a place between two transactions."""


def stream_lsn(lsn: int) -> int:
    """Where the stream stands at `lsn`: of what was put behind a transaction, the END of that transaction."""
    return lsn & ~7


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

    @classmethod
    def chunk_end(cls, lsn: int, chunk: int) -> Position:
        """The position after the rows of a chunk of a snapshot; `lsn` is one of a snapshot."""
        return cls(lsn, (chunk << CHUNK_BITS) | CHUNK_ROWS)

    @property
    def is_end(self) -> bool:
        """Whether this is the end of a transaction, or of a chunk of a snapshot, rather than a place inside one."""
        return self.ordinal == LAST_ORDINAL or (self.is_snapshot and self.ordinal & CHUNK_ROWS == CHUNK_ROWS)

    @property
    def is_snapshot(self) -> bool:
        """Whether this is a place in rows that come from a table, behind the transaction that ends at `stream_lsn(lsn)`."""
        return self.lsn & 7 != 0

    @property
    def chunk(self) -> int:
        """Of a place in a snapshot: the number of the chunk."""
        return self.ordinal >> CHUNK_BITS

    @property
    def confirmable_lsn(self) -> int:
        """What may be confirmed when all up to here is durable: never the lsn of a transaction we are still inside of."""
        return stream_lsn(self.lsn) if self.is_end else 0

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
        if self.ordinal != LAST_ORDINAL:
            offset["ordinal"] = self.ordinal
            if self.sub:
                offset["sub"] = self.sub
        return offset

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Position:
        """The position behind `to_offset()`."""
        return cls(parse_lsn(offset["lsn"]), int(offset.get("ordinal", LAST_ORDINAL)), int(offset.get("sub", 0)))
