"""What a change of a table's shape was: columns that came, went, or are called or typed otherwise. Pure.

The answer depends on the record in the history alone, so that it is the same at every replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pgcdc.core.relation import Column, Relation
from pgcdc.core.shapes import ShapeChange
from pgcdc.postgres.types.names import type_name

__all__ = ["describe_change", "diff_shapes", "event_values"]

IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}


@dataclass(frozen=True, slots=True)
class _Side:
    """A shape, and what the catalog said about it."""

    shape: Relation
    details: dict[str, Any] | None

    @property
    def table(self) -> str:
        return f"{self.shape.namespace}.{self.shape.name}"

    @property
    def attnums(self) -> dict[str, int] | None:
        """By name. A number is never given to another column of the table."""
        if self.details is None:
            return None
        return {column["name"]: column["attnum"] for column in self.details["columns"]}

    @property
    def primary_key(self) -> list[str] | None:
        return None if self.details is None else self.details["primary_key"]

    @property
    def keys(self) -> list[str]:
        return [column.name for column in self.shape.columns if column.is_key]

    def type_of(self, column: Column) -> str:
        for described in self.details["columns"] if self.details else ():
            if described["name"] == column.name:
                return str(described["type"])
        return type_name(column.type_oid, column.typmod)


def diff_shapes(change: ShapeChange) -> list[dict[str, Any]]:
    """What is different, one by one; nothing for a table that was first seen. Never empty if there was a shape before.

    A column is known again by its number in the catalog. Where that is not known for both shapes, by its name, and then
    a rename is told as a removal and an addition: order and type never prove one (docs/decisions/0010-shapes.md).
    """
    if change.before is None:
        return []
    before, after = _Side(change.before, change.before_details), _Side(change.after, change.details)
    found = [] if before.table == after.table else [{"type": "table_renamed", "from": before.table, "to": after.table}]
    return [*found, *_diff_columns(before, after), *_diff_keys(before, after)]


def _diff_columns(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    olds, news = _by_identity(before, after)
    for identity, old in olds.items():
        if identity not in news:
            yield {"type": "column_removed", "column": old.name, "old_type": before.type_of(old)}
    for identity, new in news.items():
        if identity not in olds:
            continue
        old = olds[identity]
        if old.name != new.name:
            yield {"type": "column_renamed", "from": old.name, "to": new.name}
        if (old.type_oid, old.typmod) != (new.type_oid, new.typmod):
            types = {"old_type": before.type_of(old), "new_type": after.type_of(new)}
            yield {"type": "column_type_changed", "column": new.name, **types}
    for identity, new in news.items():
        if identity not in olds:
            yield {"type": "column_added", "column": new.name, "new_type": after.type_of(new)}
    if [one for one in olds if one in news] != [one for one in news if one in olds]:
        yield {"type": "columns_reordered", "columns": [column.name for column in after.shape.columns]}


def _by_identity(before: _Side, after: _Side) -> tuple[dict[int | str, Column], dict[int | str, Column]]:
    """The columns of both shapes by what makes them the same one."""
    if before.attnums is None or after.attnums is None:
        return {one.name: one for one in before.shape.columns}, {one.name: one for one in after.shape.columns}
    return (
        {before.attnums[one.name]: one for one in before.shape.columns},
        {after.attnums[one.name]: one for one in after.shape.columns},
    )


def _diff_keys(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    old, new = before.shape.replica_identity, after.shape.replica_identity
    if old != new:
        yield {
            "type": "replica_identity_changed",
            "old": IDENTITIES.get(old, old), "new": IDENTITIES.get(new, new),
        }  # fmt: skip
    keys = before.primary_key, after.primary_key
    if keys[0] is not None and keys[1] is not None and not _same_columns(before, keys[0], after, keys[1]):
        yield {"type": "primary_key_changed", "old": keys[0], "new": keys[1]}
        if old == "d":
            return  # what identifies a row now follows from it
    if old == new != "f" and not _same_columns(before, before.keys, after, after.keys):  # of a full one all columns are
        yield {"type": "key_columns_changed", "old": before.keys, "new": after.keys}


def _same_columns(before: _Side, olds: list[str], after: _Side, news: list[str]) -> bool:
    """Whether these are the same columns in the same order, as far as their numbers are known under other names."""
    if before.attnums is None or after.attnums is None:
        return olds == news
    return [before.attnums.get(name, name) for name in olds] == [after.attnums.get(name, name) for name in news]


def event_values(change: ShapeChange) -> list[bytes]:
    """The values of a SCHEMA_CHANGE event: schema, table, changes and columns."""
    after = _Side(change.after, change.details)
    columns = [{"name": one.name, "type": after.type_of(one), "key": one.is_key} for one in change.after.columns]
    texts = (change.after.namespace, change.after.name, _to_json(diff_shapes(change)), _to_json(columns))
    return [text.encode() for text in texts]


def _to_json(value: list[dict[str, Any]]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def describe_change(change: ShapeChange) -> list[str]:
    """For people: `table public.orders: column note (text) added`, a line for each difference."""
    table = f"{change.after.namespace}.{change.after.name}"
    return [f"table {table}: {_say(one)}" for one in diff_shapes(change)]


def _say(one: dict[str, Any]) -> str:
    kind = one["type"]
    if kind == "table_renamed":
        return f"renamed from {one['from']}"
    if kind == "column_added":
        return f"column {one['column']} ({one['new_type']}) added"
    if kind == "column_removed":
        return f"column {one['column']} ({one['old_type']}) removed"
    if kind == "column_renamed":
        return f"column {one['from']} renamed to {one['to']}"
    if kind == "column_type_changed":
        return f"column {one['column']} changed from {one['old_type']} to {one['new_type']}"
    if kind == "columns_reordered":
        return f"columns in another order: {', '.join(one['columns'])}"
    what = {"replica_identity_changed": "replica identity", "primary_key_changed": "primary key"}.get(kind, "key")
    old, new = (value if isinstance(value, str) else f"({', '.join(value)})" for value in (one["old"], one["new"]))
    return f"{what} changed from {old} to {new}"
