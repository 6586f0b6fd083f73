"""The capture's batches as one ordered stream of typed messages. For programs that look at single changes: each message
is a Python object, whereas a batch is columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import islice
from typing import Any, ClassVar, Literal

from pgcdc.core.relation import Column, OldKind, Op
from pgcdc.core.relation import Relation as Shape
from pgcdc.spool.segment import CaptureBatch

SENTINEL_PREFIX = "pgcdc.sentinel"  # A logical message with this prefix is a Sentinel
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Unchanged(Enum):
    """Stands for a value that PostgreSQL did not send: TOAST that the update did not change."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED
Values = dict[str, str | Literal[Unchanged.UNCHANGED] | None]


@dataclass(frozen=True, slots=True)
class Message:
    """Fields of every message, taken from its transaction."""

    kind: ClassVar[str]
    lsn: int  # Where the transaction ends: pass it to `send_feedback` at its Commit
    time: datetime | None  # The commit time; None: a logical message outside transactions
    origin: str  # The server it was replicated from; empty: the change was made on this server


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """All messages up to its Commit belong to one transaction."""

    kind = "begin"
    xid: int


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Every message of the transaction has been returned."""

    kind = "commit"


@dataclass(frozen=True, slots=True)
class Relation(Message):
    """A table's shape: comes before its first change, and again before the first change in another shape."""

    kind = "relation"
    id: int  # Its oid
    namespace: str
    name: str
    columns: tuple[Column, ...]  # Each with name, type_oid, typmod and is_key


@dataclass(frozen=True, slots=True)
class Change(Message):
    """One row, or a TRUNCATE. Values are PostgreSQL's text; bytes that are not UTF-8 are surrogate escapes."""

    kind = "change"
    op: str  # INSERT, UPDATE, DELETE or TRUNCATE
    relation_id: int
    namespace: str
    table: str
    new: Values | None
    old: Values | None  # As far as PostgreSQL sent it, which depends on the table's replica identity
    number: int  # Its number in the transaction, from 1: (lsn, number) never changes


@dataclass(frozen=True, slots=True)
class LogicalMessage(Message):
    """A message written with `pg_logical_emit_message`."""

    kind = "message"
    prefix: str
    content: str


@dataclass(frozen=True, slots=True)
class Sentinel(Message):
    """A marker written to the stream: everything committed before it has already arrived."""

    kind = "sentinel"
    id: str


def typed_messages(batches: Iterable[CaptureBatch]) -> Iterator[Message]:
    """The messages of consecutive batches. A transaction in several batches has one Begin and one Commit."""
    told: dict[int, Shape] = {}  # The last shape returned for each table
    begun = 0  # The last transaction that was begun
    for batch in batches:
        rows = iter(batch.data.to_pylist())
        for owner in batch.transactions.to_pylist():
            time = _EPOCH + timedelta(microseconds=owner["commit_time"])
            common = owner["commit"], time if owner["xid"] else None, owner["origin"] or ""
            if owner["xid"] and owner["commit"] != begun:
                begun = owner["commit"]
                yield Begin(*common, owner["xid"])
            for row in islice(rows, owner["rows"]):
                if row["relation"] < 0:
                    yield _marker(common, row)
                    continue
                shape = batch.relations[row["relation"]]
                if told.get(shape.oid) != shape:
                    told[shape.oid] = shape
                    yield Relation(*common, shape.oid, shape.namespace, shape.name, shape.columns)
                new, old = _values(shape, row, "new"), _values(shape, row, "old")
                op = Op(row["op"]).name
                yield Change(*common, op, shape.oid, shape.namespace, shape.name, new, old, row["ordinal"])
            if owner["xid"] and owner["complete"]:
                yield Commit(*common)


def _marker(common: tuple[int, datetime | None, str], row: dict[str, Any]) -> Message:
    content = _text(row["new"][0])
    if row["op"] == Op.SENTINEL or row["prefix"] == SENTINEL_PREFIX:
        return Sentinel(*common, content)
    return LogicalMessage(*common, row["prefix"], content)


def _values(shape: Shape, row: dict[str, Any], side: str) -> Values | None:
    if row[side] is None:
        return None
    only_key = side == "old" and row["old_kind"] == OldKind.KEY
    unchanged = {mark if side == "new" else -1 - mark for mark in row["unchanged"] or ()}
    return {
        column.name: UNCHANGED if index in unchanged else None if value is None else _text(value)
        for index, (column, value) in enumerate(zip(shape.columns, row[side], strict=True))
        if column.is_key or not only_key
    }


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape")
