"""What a change did, and what is known of the row before it."""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """What a change did: the byte that the wire uses for it."""

    INSERT = ord("I")
    UPDATE = ord("U")
    DELETE = ord("D")
    TRUNCATE = ord("T")
    MESSAGE = ord("M")
    SNAPSHOT = ord("S")
    """A row that was read from its table."""
    SNAPSHOT_STARTED = ord("s")
    """The reading of a table begins; not a row of it. Its values: see `stream.frame.SNAPSHOTS`."""
    SNAPSHOT_COMPLETED = ord("c")
    """The same, at its end."""
    NOTIFY = ord("N")
    """What somebody sent on a channel of the database; not a row."""
    VIEW_RESULT = ord("V")
    """A row of a view's result."""
    SENTINEL = ord("Z")
    """Made by us to see that changes arrive; not a row."""
    BEGIN = ord("B")
    """Made for a reader who asked for it; never stored."""
    COMMIT = ord("C")
    """The same."""
    SCHEMA_CHANGE = ord("R")
    """The same; the byte is that of the message that describes a relation."""


class OldKind(IntEnum):
    """What the old values of a change are."""

    NONE = 0
    KEY = ord("K")
    """Only the replica identity's columns; the others are null because they were not sent."""
    FULL = ord("O")
    """The whole old row: a null is a NULL."""
