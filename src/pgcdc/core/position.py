"""Positions: the place of a change in the stream.

A position is (commit, kind, ordinal, sub). `commit` numbers transactions in commit order. `kind` says whether the
change came with the stream or was read from a table; rows of a snapshot come after the commit they follow. `ordinal` is
the index of the change among the row changes of its transaction, from 1. `sub` orders everything that is not a row
change (messages, markers, schema events) after the row change `ordinal` it follows. A row change has sub 0, so
switching messages on changes no other position.

`Position.end(commit)` is the position after everything in that transaction: where a batch that ends at a commit ends,
and the only kind of position that is ever confirmed to a source.

Snapshot rows come in chunks. The ordinal of such a row packs the number of its chunk and its number within the chunk.
Only `Position.of_chunk`, `chunk` and `chunk_end` need to know how.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_POSITION = re.compile(r"([0-9A-F]{16})/([01])([0-9A-F]{12})(?:\.([0-9A-F]{8}))?")

ORDINAL_BITS = 48
LAST_ORDINAL = (1 << ORDINAL_BITS) - 1  # The ordinal of `Position.end`: greater than that of any change
LAST_SUB = (1 << 31) - 1  # The sub-ordinal of a transaction's COMMIT marker: greater than that of any message
SCHEMA_SUB = LAST_SUB - 1
"""The sub-ordinal of a schema change: directly before row change `ordinal + 1`, the first with the new shape."""
_CHUNK_BITS = 28
_CHUNK_END = (1 << _CHUNK_BITS) - 1
MAX_CHUNK_ROWS = _CHUNK_END - 1  # The largest number of rows of a snapshot chunk
LAST_CHUNK = LAST_ORDINAL >> _CHUNK_BITS  # The largest chunk number between two transactions


class Kind(IntEnum):
    """Where a change came from."""

    STREAM = 0
    SNAPSHOT = 1


STREAM, SNAPSHOT = Kind.STREAM, Kind.SNAPSHOT


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in the stream of changes; compares in stream order."""

    commit: int
    kind: Kind
    ordinal: int
    sub: int = 0

    @classmethod
    def at(cls, commit: int, ordinal: int, sub: int = 0) -> Position:
        """A place in a transaction of the stream."""
        return cls(commit, STREAM, ordinal, sub)

    @classmethod
    def end(cls, commit: int) -> Position:
        """The position after everything in a transaction."""
        return cls(commit, STREAM, LAST_ORDINAL)

    @classmethod
    def behind(cls, commit: int) -> Position:
        """The position after a transaction and all snapshot rows that follow it."""
        return cls(commit, SNAPSHOT, LAST_ORDINAL)

    @classmethod
    def of_chunk(cls, commit: int, chunk: int, row: int) -> Position:
        """The position of row `row` (from 1) of a snapshot chunk that follows a transaction."""
        return cls(commit, SNAPSHOT, (chunk << _CHUNK_BITS) | row)

    @classmethod
    def chunk_end(cls, commit: int, chunk: int) -> Position:
        """The position after the rows of a snapshot chunk."""
        return cls.of_chunk(commit, chunk, _CHUNK_END)

    @property
    def is_end(self) -> bool:
        """Whether this is the end of a transaction or snapshot chunk, rather than a place inside one."""
        return self.ordinal == LAST_ORDINAL or (self.is_snapshot and self.ordinal & _CHUNK_END == _CHUNK_END)

    @property
    def is_snapshot(self) -> bool:
        """Whether this is the position of a snapshot row."""
        return self.kind == SNAPSHOT

    @property
    def chunk(self) -> int:
        """The chunk number of a position in a snapshot."""
        return self.ordinal >> _CHUNK_BITS

    @property
    def confirmable(self) -> int:
        """The commit that may be confirmed when everything up to here is durable. Excludes the transaction that this
        position is inside."""
        return self.commit if self.is_end else 0

    @property
    def place(self) -> int:
        """Kind and ordinal as one number, for columns. Sorting by (commit, place) gives stream order, like the text
        form."""
        return (self.kind << ORDINAL_BITS) | self.ordinal

    def __str__(self) -> str:
        """The text that events carry as `position`. Fixed width, so it sorts in stream order."""
        text = f"{self.commit:016X}/{self.kind:X}{self.ordinal:012X}"
        return f"{text}.{self.sub:08X}" if self.sub else text

    @classmethod
    def parse(cls, text: str) -> Position:
        """Inverse of `str(position)`. Raises ValueError for anything else."""
        found = _POSITION.fullmatch(text)
        if found is None:
            raise ValueError(f"not a position: {text!r}")
        return cls(int(found[1], 16), Kind(int(found[2])), int(found[3], 16), int(found[4] or "0", 16))

    def to_offset(self) -> dict[str, Any]:
        """The JSON object that Spark keeps in its offset log."""
        return {"position": str(self)}

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Position:
        return cls.parse(offset["position"])
