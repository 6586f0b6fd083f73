"""Changes of tables, made by hand: for tests of what sinks do with `batch.tables()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pgcdc.core.relation import Column, OldKind, Op, Relation
from pgcdc.event.batch import TableChanges

Row = Mapping[str, str | None]


@dataclass(frozen=True)
class Change:
    """One change. A column that `new` or `old` does not have is unchanged TOAST, or was not sent."""

    op: Op
    new: Row | None = None
    old: Row | None = None
    old_kind: OldKind = OldKind.NONE


def relation(columns: Sequence[str], key: Sequence[str], identity: str = "d") -> Relation:
    return Relation(1, "public", "t", identity, tuple(Column(name, 25, -1, name in key) for name in columns))


def table_changes(shape: Relation, changes: Sequence[Change], details: Mapping[str, Any] | None = None) -> TableChanges:
    names = [column.name for column in shape.columns]
    sides = {}
    for side in ("new", "old"):
        rows = [getattr(one, side) or {} for one in changes]
        sides[side] = [pa.array([row.get(name) for row in rows], pa.string()) for name in names]
    marks = [
        np.array([one.new is not None and one.op != Op.DELETE and name not in one.new for one in changes], np.bool_)
        for name in names
    ]
    old_kinds = [one.old_kind or (OldKind.KEY if one.old else OldKind.NONE) for one in changes]
    return TableChanges(
        shape,
        details,
        np.array([one.op for one in changes], np.uint8),
        np.arange(len(changes)),
        sides["new"],
        sides["old"],
        np.array(old_kinds, np.uint8),
        [mark if mark.any() else None for mark in marks],
        [None] * len(names),
    )
