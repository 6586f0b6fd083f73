"""Rendered events as changes of tables again: dead letters, which keep only the event. Each is parsed by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa

from pgcdc.core.errors import SinkError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, OldKind, Op, Relation, ShapeChange, ShapeHistory
from pgcdc.event.batch import Batch
from pgcdc.event.edits import TEXT_OID, SimpleChain
from pgcdc.event.forms import TABLE
from pgcdc.event.shape import TableShape

TableName = tuple[str, str]
_ROWS = (Op.INSERT, Op.SNAPSHOT, Op.UPDATE, Op.DELETE)


def read_changes(batch: Batch, shapes: ShapeHistory, chain: SimpleChain | None = None) -> Batch:
    """The same batch, of lines or records, in the form of tables. SinkError: a line is no event of ours.

    `chain` is what the adapter's transforms do to columns now: an event may be older than it.
    """
    known = _Shapes(shapes, chain or SimpleChain((), ()))
    columns: dict[str, list[Any]] = {name: [] for name in ("position", *(field.name for field in TABLE))}
    for position, text in zip(batch.positions().to_pylist(), batch.texts(), strict=True):
        event = _parse(text)
        operation, payload = event["operation"], event["payload"]
        if operation not in Op.__members__:
            raise _other_operation(operation, position)
        op = Op[operation]
        if op not in (*_ROWS, Op.TRUNCATE):
            continue  # not a row of a table
        row, old = payload["row"], payload["old"]
        if row is None and op is not Op.TRUNCATE:
            raise _other_operation(operation, position)
        if op is Op.DELETE:
            row, old = None, row
        lacks = payload.get("_unchanged_toast_columns", ())
        table = source_name(event["channel"], payload["table"])
        brought = [*(row or ()), *lacks, *(old or ())]
        number, names = known.of(table, position, brought, is_part=row is None)
        identity = known.made[number].relation.replica_identity
        is_full = old is not None and (identity == "f" or len(old) == len(names))
        values = {
            "position": position, "id": event.get("id"), "op": op, "relation": number,
            "new": None if row is None else [row.get(name) for name in names],
            "old": None if old is None else [old.get(name) for name in names],
            "old_kind": OldKind.NONE if old is None else OldKind.FULL if is_full else OldKind.KEY,
            "unchanged": [names.index(name) for name in lacks], "ordinal": 0, "commit_time": 0, "xid": 0,
        }  # fmt: skip
        for name, value in values.items():
            columns[name].append(value)
    arrays = {"position": pa.array(columns["position"], pa.string())}
    arrays |= {field.name: pa.array(columns[field.name], field.type) for field in TABLE}
    return replace(batch, events=pa.table(arrays), shapes=known.made)


def source_name(channel: str, table: str) -> TableName:
    """The table behind the channel of an event and `payload.table`. Names may have dots: only both together tell."""
    full = channel.partition(":")[2]
    return ("public", table) if full == table else (full[: -len(table) - 1], table)


class _Shapes:
    """Tables as their events have them: columns of the history behind the chain, and as text what else was added."""

    def __init__(self, history: ShapeHistory, chain: SimpleChain) -> None:
        self._history, self._chain = history, chain
        self._numbers: dict[tuple[Relation | None, TableName, tuple[str, ...]], int] = {}
        self._last: dict[TableName, tuple[Relation | None, int, tuple[str, ...]]] = {}
        self._tables: list[TableName] = []
        self.made: dict[int, TableShape] = {}

    def of(
        self, table: TableName, position: str, names: Iterable[str], *, is_part: bool
    ) -> tuple[int, tuple[str, ...]]:
        """The number of an event's shape, and the names of its columns. `is_part`: others may be left out."""
        change = self._history.in_force(*table, Position.parse(position))
        brought = dict.fromkeys(names)
        described = self._describe(change, brought) if change else None
        shape = described.relation if described else None
        known = [column.name for column in shape.columns if column.name in brought] if shape else []
        found = tuple(dict.fromkeys([*known, *brought]))
        last = self._last.get(table)
        if is_part and last is not None and last[0] == shape and set(found) <= set(last[2]):
            return last[1], last[2]
        place = shape, table, found
        if place not in self._numbers:
            self._numbers[place] = len(self.made)
            self.made[len(self.made)] = self._make(table, found, described)
        self._last[table] = shape, self._numbers[place], found
        return self._numbers[place], found

    def _describe(self, change: ShapeChange, names: Collection[str]) -> TableShape:
        """The table behind the chain; as it was before it, if that alone has its key among these columns."""
        behind, before = TableShape(*self._chain.describe(change.after, change.details)), change.after
        keys = [{one.name for one in shape.columns if one.is_key} for shape in (behind.relation, before)]
        is_older = not keys[0] <= set(names) and keys[1] <= set(names)
        return TableShape(before, change.details) if is_older else behind

    def _make(self, table: TableName, names: tuple[str, ...], described: TableShape | None) -> TableShape:
        if described is None:
            if table not in self._tables:
                self._tables.append(table)
            oid, columns, identity = -1 - self._tables.index(table), {}, "n"  # type: int, dict[str, Column], str
        else:
            shape = described.relation
            oid, identity = shape.oid, shape.replica_identity
            columns = {column.name: column for column in shape.columns}
            if any(column.is_key and column.name not in names for column in shape.columns):
                columns = {name: replace(column, is_key=False) for name, column in columns.items()}
                identity = "n"  # what is left of a key tells no rows apart
        made = tuple(columns.get(name) or Column(name, TEXT_OID, -1, False) for name in names)
        return TableShape(Relation(oid, *table, identity, made), described.details if described else None)


def _parse(text: str) -> dict[str, Any]:
    try:
        event = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SinkError(f"a line is not JSON: {error}", "A transform made it: only events can be applied") from None
    if isinstance(event, dict) and {"channel", "operation", "payload"} <= event.keys():
        return event
    inner = event.get("payload", event) if isinstance(event, dict) else event
    what = "Debezium's" if isinstance(inner, dict) and "op" in inner and "before" in inner else "another"
    raise SinkError(
        f"a line has {what} envelope, and cannot be applied to a table",
        "Take the transform debezium or cloudevents out of this adapter's, or use the mode append",
    )


def _other_operation(operation: object, position: str) -> SinkError:
    return SinkError(
        f"the operation {operation} at {position} cannot be applied to a table",
        "A transform made it: INSERT, UPDATE, DELETE, TRUNCATE and SNAPSHOT can be applied",
    )
