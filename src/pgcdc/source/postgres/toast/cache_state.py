"""What the TOAST cache knows of itself: the entries of a table between two evictions of it, and the state of the whole."""

from __future__ import annotations

import marshal
import struct
from dataclasses import dataclass, field

__all__ = ["Generation", "State"]

_ID = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Generation:
    """The entries of one table between two evictions of all of it."""

    number: int
    shape: str
    """Of the relation: another shape is another generation."""
    stamp: str
    stamp_lsn: int
    """What the catalog said about the table, and an LSN at which it did."""
    first_lsn: int
    """The first change that was stored."""
    is_proven: bool = False
    """The stream has shown that nothing happened between `first_lsn` and `stamp_lsn` that it does not tell."""

    @property
    def prefix(self) -> bytes:
        """Of the keys of its entries."""
        return _ID.pack(self.number)

    def encode(self) -> bytes:
        """For the store."""
        fields = (self.number, self.shape, self.stamp, self.stamp_lsn, self.first_lsn, self.is_proven)
        return marshal.dumps(fields)


@dataclass(slots=True)
class State:
    """What is known of the whole table; kept in it at each commit."""

    position: int = 0
    """END lsn of the last transaction that is in the table completely."""
    next_id: int = 1
    epoch: int = 1
    records: int = 0
    """How many records of that epoch's log the table has taken in."""
    floor_lsn: int = 0
    """Before this nothing can be taken back any more."""
    live: dict[bytes, int] = field(default_factory=dict)
    """Entries of each generation, by its prefix."""
    garbage: dict[bytes, int] = field(default_factory=dict)
    """Generations that are gone, and since which lsn."""
