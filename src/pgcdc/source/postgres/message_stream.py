"""The capture's batches as one ordered stream of typed messages. For programs that look at single changes: a message is a
Python object, where a batch is columns."""

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
    """Stands for a value that PostgreSQL did not send: TOAST that the update left as it was."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED
Values = dict[str, str | Literal[Unchanged.UNCHANGED] | None]


@dataclass(frozen=True, slots=True)
class Message:
    """What every message has, from its transaction."""

    kind: ClassVar[str]
    lsn: int  # Where the transaction ends: what `send_feedback` takes at its Commit
    time: datetime | None  # When it was committed; None: a logical message outside of transactions
    origin: str  # Where it was replicated from; empty: it was made at this server


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """All messages up to its Commit belong to one transaction."""

    kind = "begin"
    xid: int


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Everything of the transaction has been handed out."""

    kind = "commit"


@dataclass(frozen=True, slots=True)
class Relation(Message):
    """A table, before its first change and before the first change in another shape."""

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
    old: Values | None  # As far as PostgreSQL sent it: by the table's replica identity
    number: int  # In its transaction, from 1: (lsn, number) never changes


@dataclass(frozen=True, slots=True)
class LogicalMessage(Message):
    """What `pg_logical_emit_message` wrote."""

    kind = "message"
    prefix: str
    content: str


@dataclass(frozen=True, slots=True)
class Sentinel(Message):
    """A marker that somebody put into the stream: everything committed before it has come before it."""

    kind = "sentinel"
    id: str


def typed_messages(batches: Iterable[CaptureBatch]) -> Iterator[Message]:
    """The messages of consecutive batches. A transaction in several batches has one Begin and one Commit."""
    told: dict[int, Shape] = {}  # The shape of each table that was handed out last
    begun = 0  # The transaction that was begun last
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
