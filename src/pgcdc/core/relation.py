"""What a change did, the shape of its table at the time, and the durable history of shapes.

Every distinct shape gets a number in order of appearance. Each change names the shape in force at its position, so an
ALTER TABLE never affects how older changes are read.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from pgcdc.core.position import Position
from pgcdc.core.state import append_lines, decode_lines, read_lines


class Op(IntEnum):
    """What a change did: the byte that the wire protocol uses for it."""

    INSERT = ord("I")
    UPDATE = ord("U")
    DELETE = ord("D")
    TRUNCATE = ord("T")
    MESSAGE = ord("M")
    SNAPSHOT = ord("S")  # A row that was read from its table
    SNAPSHOT_STARTED = ord("s")  # Reading a table starts; not a row. Its values: see `stream.frame.SNAPSHOTS`
    SNAPSHOT_COMPLETED = ord("c")  # Reading a table has ended; not a row
    NOTIFY = ord("N")  # Sent by a client on a channel of the database; not a row
    VIEW_RESULT = ord("V")  # A row of a view's result
    SENTINEL = ord("Z")  # Written by us to check that changes arrive; not a row
    BEGIN = ord("B")  # Added for a reader that asks for it; never stored
    COMMIT = ord("C")  # Like BEGIN
    SCHEMA_CHANGE = ord("R")  # Like BEGIN. The byte is that of a Relation message. Only a mark is stored


class OldKind(IntEnum):
    """What the old values contain."""

    NONE = 0
    KEY = ord("K")  # Only the replica identity's columns; the others are null because they were not sent
    FULL = ord("O")  # The whole old row: a null is a NULL


@dataclass(frozen=True, slots=True)
class Column:
    """One published column, as the Relation message describes it."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool  # Part of the replica identity


@dataclass(frozen=True, slots=True)
class Relation:
    """One shape of one table."""

    oid: int
    namespace: str
    name: str
    replica_identity: str  # d (default), n (nothing), f (full) or i (index)
    columns: tuple[Column, ...]
    source: str = "postgres"  # The kind of source; only that source knows what the type numbers mean

    @property
    def channel(self) -> str:
        """The routing key of its events: `pgcdc:orders`, or `pgcdc:schema.orders` outside the schema public."""
        return f"pgcdc:{self.name}" if self.namespace == "public" else f"pgcdc:{self.namespace}.{self.name}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "columns": [astuple(one) for one in self.columns]}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Relation:
        return cls(**{**raw, "columns": tuple(Column(*one) for one in raw["columns"])})


@dataclass(slots=True)
class Relations:
    """Every shape seen, by version number. The same shape always gets the same number."""

    shapes: list[Relation] = field(default_factory=list)
    _versions: dict[Relation, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._versions = {shape: version for version, shape in enumerate(self.shapes)}

    def intern(self, relation: Relation) -> int:
        """The version number of this shape; a new shape gets a new one."""
        version = self._versions.get(relation)
        if version is None:
            version = len(self.shapes)
            self.shapes.append(relation)
            self._versions[relation] = version
        return version

    def __getitem__(self, version: int) -> Relation:
        return self.shapes[version]

    def __len__(self) -> int:
        return len(self.shapes)


# --- the history of shapes. It outlives the spool: the capture appends to it before the first change with a new shape
# becomes visible, so a query always finds the shape in force at its position, even after a restart.


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """From this position on, changes of one table have another shape, or the same shape with different catalog details.
    Also recorded when a table is first seen."""

    position: (
        Position  # (lsn, ordinal - 1, SCHEMA_SUB), for a first change (or mark) in the new shape at (lsn, ordinal)
    )
    after: Relation
    before: Relation | None = None  # None: first record of the table
    details: dict[str, Any] | None = None
    """The catalog's description of `after`: present if the table still had that shape when the capture saw it, or if it
    is proven."""
    before_details: dict[str, Any] | None = None
    """The `details` from the record of `before`, so that this record alone shows what changed."""

    def concerns(self, namespace: str, name: str) -> bool:
        """Whether the table has this name, or had it until this position."""
        return any(
            (one.namespace, one.name) == (namespace, name) for one in (self.before, self.after) if one is not None
        )

    def to_json(self) -> dict[str, Any]:
        before = self.before.to_json() if self.before else None
        return {
            "position": str(self.position), "before": before, "after": self.after.to_json(), "details": self.details,
            "before_details": self.before_details,
        }  # fmt: skip

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ShapeChange:
        before = Relation.from_json(raw["before"]) if raw["before"] else None
        after = Relation.from_json(raw["after"])
        return cls(Position.parse(raw["position"]), after, before, raw["details"], raw["before_details"])


def append_shapes(path: Path, changes: Iterable[ShapeChange]) -> None:
    """Append to the history. On return the records survive a crash of the machine."""
    append_lines(path, (change.to_json() for change in changes))


class GrowingLines:
    """Follows an append-only file of lines (`core.state`) as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The records appended since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                found = list(decode_lines(file.read()))
        except FileNotFoundError:
            return []
        self._offset += sum(size for _, size in found)
        return [record for record, _ in found]


class ShapeHistory:
    """Follows the file as it grows."""

    def __init__(self, path: Path) -> None:
        self._lines = GrowingLines(path)
        self.changes: list[ShapeChange] = []  # In the order of their positions
        self._owners: dict[tuple[str, str], set[int]] = {}  # Tables that have or had a name

    def refresh(self) -> list[ShapeChange]:
        """Read the records appended since the last call and return them."""
        fresh = [ShapeChange.from_json(record) for record in self._lines.read()]
        for change in fresh:
            # A spool that is read again may contain shapes that an older version of pgcdc did not record.
            bisect.insort(self.changes, change, key=_position)
            self._owners.setdefault((change.after.namespace, change.after.name), set()).add(change.after.oid)
        return fresh

    def at(self, position: Position) -> ShapeChange | None:
        """The record at exactly this position."""
        found = bisect.bisect_left(self.changes, position, key=_position)
        return self.changes[found] if found < len(self.changes) and self.changes[found].position == position else None

    def between(self, start: Position, end: Position) -> list[ShapeChange]:
        """Changes of any table in (start, end]."""
        first, last = (bisect.bisect_right(self.changes, limit, key=_position) for limit in (start, end))
        return self.changes[first:last]

    def of(self, namespace: str, name: str) -> Iterator[ShapeChange]:
        """Changes of one table, oldest first."""
        return (change for change in self.changes if change.concerns(namespace, name))

    def others(self, oid: int, position: Position) -> list[Relation]:
        """The shapes of the other tables at `position`."""
        last = {one.after.oid: one.after for one in self.changes if one.position <= position}
        return [one for number, one in last.items() if number != oid]

    def is_taken(self, table: Relation, position: Position) -> bool:
        """Whether another table has this name at `position`."""
        return any(one.channel == table.channel for one in self.others(table.oid, position))

    def is_shared(self, table: Relation) -> bool:
        """Whether other tables have, or once had, this name."""
        return len(self._owners.get((table.namespace, table.name), ())) > 1

    def is_misnamed(self, table: Relation, position: Position) -> bool:
        """Whether the name that a change at `position` carries belongs to another table by then."""
        last = self.in_force(table.namespace, table.name, position)
        return last is not None and last.after.channel == table.channel and last.after.oid != table.oid

    def takes_name(self, change: ShapeChange) -> bool:
        """Whether another table had the name that this table takes over here."""
        named = self.of(change.after.namespace, change.after.name)
        return any(one.after.oid != change.after.oid for one in named if one.position < change.position)

    def in_force(self, namespace: str, name: str, position: Position) -> ShapeChange | None:
        """The table's shape for changes directly after `position`; None if the table was not seen before."""
        earlier = [change for change in self.of(namespace, name) if change.position <= position]
        return earlier[-1] if earlier else None

    def reachable(self, position: Position) -> list[ShapeChange]:
        """For every table: the record of the shape in force at `position`, and every later change of shape."""
        last: dict[int, ShapeChange] = {}
        later = []
        for change in self.changes:
            if change.position > position:
                later.append(change)
            else:
                last[change.after.oid] = change
        return [*last.values(), *later]

    def next(self, namespace: str, name: str, position: Position) -> ShapeChange | None:
        """The next change of the table's shape after `position`."""
        return next((change for change in self.of(namespace, name) if change.position > position), None)


def cut_tail(path: Path) -> None:
    """Cut off a half-written last line, which describes a shape that never became visible. The writer calls this when
    it starts."""
    read_lines(path)


def _position(change: ShapeChange) -> Position:
    return change.position
