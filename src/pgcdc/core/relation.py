"""What a table looked like when a change was made.

Relations are versioned: every distinct shape gets a number in the order of appearance, and each change names the number
of the shape in force at its position, so that ALTER TABLE never changes how an older change is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One published column, as the Relation message describes it."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool
    """Part of the replica identity."""


@dataclass(frozen=True, slots=True)
class Relation:
    """One shape of one table."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    """d (default), n (nothing), f (full) or i (index)."""
    columns: tuple[Column, ...]
    source: str = "postgres"
    """The kind of source that it is of: what the numbers of types mean, only that source knows."""

    @property
    def channel(self) -> str:
        """The routing key of its events: `pgcdc:orders`, or `pgcdc:schema.orders` outside public."""
        return f"pgcdc:{self.name}" if self.namespace == "public" else f"pgcdc:{self.namespace}.{self.name}"

    def to_json(self) -> dict[str, Any]:
        """The form in which relations stand beside the segments."""
        return {
            "oid": self.oid,
            "namespace": self.namespace,
            "name": self.name,
            "replica_identity": self.replica_identity,
            "source": self.source,
            "columns": [[c.name, c.type_oid, c.typmod, c.is_key] for c in self.columns],
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Relation:
        """The relation behind `to_json()`."""
        columns = tuple(Column(name, oid, typmod, key) for name, oid, typmod, key in raw["columns"])
        return cls(raw["oid"], raw["namespace"], raw["name"], raw["replica_identity"], columns, raw["source"])


@dataclass(slots=True)
class Relations:
    """Every shape seen, by version number; the same shape always gets the same number."""

    shapes: list[Relation] = field(default_factory=list)
    _versions: dict[Relation, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._versions = {shape: version for version, shape in enumerate(self.shapes)}

    def intern(self, relation: Relation) -> int:
        """The version number of this shape: a new one if it was never seen."""
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
