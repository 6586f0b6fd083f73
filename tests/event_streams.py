"""Streams of changes for tests of events, and the events that an obvious implementation makes of them."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import strategies as st
from wire import (
    UNCHANGED,
    Value,
    encode_begin,
    encode_commit,
    encode_delete,
    encode_insert,
    encode_origin,
    encode_relation,
    encode_truncate,
    encode_update,
)

from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation
from pgcdc.event.lines import IdSeed
from pgcdc.source.postgres.wire.assemble import Assembler
from pgcdc.spool.reader import SpoolReader
from pgcdc.spool.writer import SpoolWriter

START = Position.end(100)
NOON = 1_700_000_000_123_456
SEED = IdSeed.of("7300000000000000001", "orders")

TEXT_MAP = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("channel", pa.string()),
        ("operation", pa.string()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("row", TEXT_MAP),
        ("old", TEXT_MAP),
        ("unchanged_toast_columns", pa.list_(pa.string())),
        ("source", pa.string()),
        ("created_at", pa.timestamp("us", "UTC")),
        ("position", pa.string()),
        ("lsn", pa.int64()),
        ("ordinal", pa.int64()),
        ("xid", pa.int64()),
        ("origin", pa.string()),
    ]
)

ORDERS = Relation(
    1,
    "public",
    "orders",
    "d",
    (Column("id", 23, -1, True), Column("note", 25, -1, False), Column("total", 1700, -1, False)),
)
ITEMS = Relation(2, "sales", "items", "d", (Column("order", 23, -1, True), Column("line", 23, -1, True)))
EMPTY = Relation(3, "public", "empty", "n", ())

I64 = npt.NDArray[np.int64]
Operation = Literal["INSERT", "UPDATE", "DELETE", "TRUNCATE"]


@dataclass(frozen=True)
class Change:
    """One row change, as a person would write it down."""

    relation: Relation
    operation: Operation
    new: tuple[Value, ...] | None = None
    old: tuple[Value, ...] | None = None
    old_kind: Literal["K", "O"] = "K"

    def encode(self) -> bytes:
        oid = self.relation.oid
        if self.operation == "INSERT":
            return encode_insert(oid, self.new or ())
        if self.operation == "UPDATE":
            return encode_update(oid, self.new or (), self.old, self.old_kind)
        if self.operation == "DELETE":
            return encode_delete(oid, self.old or (), self.old_kind)
        return encode_truncate([oid])


@dataclass(frozen=True)
class Transaction:
    lsn: int
    changes: tuple[Change, ...]
    commit_time: int = NOON
    xid: int = 7
    origin: str | None = None

    def encode(self) -> Iterator[bytes]:
        yield encode_begin(self.lsn - 1, self.commit_time, self.xid)
        if self.origin is not None:
            yield encode_origin(1, self.origin)
        described: dict[int, Relation] = {}
        for change in self.changes:
            if described.get(change.relation.oid) != change.relation:
                described[change.relation.oid] = change.relation
                yield encode_relation(change.relation)
            yield change.encode()
        yield encode_commit(self.lsn - 1, self.lsn, self.commit_time)


# --- the obvious implementation


def expected_id(seed: IdSeed, position: Position, commit_time: int) -> str:
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    x = mix((position.commit * 0x9E3779B97F4A7C15 + position.kind + seed.high) & mask)
    x = mix((x + (position.ordinal << 16) + position.sub + (position.sub >> 16) * 0x9E3779B97F4A7C15) & mask)
    y = mix((x + seed.low) & mask)
    number = max(commit_time, 0) // 1000 << 80 | 7 << 76 | (x >> 52) << 64 | 2 << 62 | y >> 2
    return str(uuid.UUID(int=number))


def expected_map(relation: Relation, values: tuple[Value, ...] | None, only_key: bool) -> list[tuple[str, Any]] | None:
    if values is None:
        return None
    return [
        (column.name, value.decode() if isinstance(value, bytes) else value)
        for column, value in zip(relation.columns, values, strict=True)
        if value is not UNCHANGED and (column.is_key or not only_key)
    ]


def expected_events(transactions: list[Transaction], seed: IdSeed = SEED) -> list[dict[str, Any]]:
    events = []
    for transaction in transactions:
        for ordinal, change in enumerate(transaction.changes, 1):
            relation, position = change.relation, Position.at(transaction.lsn, ordinal)
            old = expected_map(relation, change.old, change.old_kind == "K")
            is_delete = change.operation == "DELETE"
            names = [c.name for c, value in zip(relation.columns, change.new or (), strict=False) if value is UNCHANGED]
            events.append(
                {
                    "id": expected_id(seed, position, transaction.commit_time),
                    "channel": relation.channel,
                    "operation": change.operation,
                    "schema": relation.namespace,
                    "table": relation.name,
                    "row": old if is_delete else expected_map(relation, change.new, only_key=False),
                    "old": None if is_delete else old,
                    "unchanged_toast_columns": names or None,
                    "source": "wal_replication",
                    "created_at": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=transaction.commit_time),
                    "position": str(position),
                    "lsn": transaction.lsn,
                    "ordinal": ordinal,
                    "xid": transaction.xid,
                    "origin": transaction.origin,
                }
            )
    return events


# --- through the spool


@contextmanager
def spooled(
    transactions: list[Transaction], seal_rows: int = 65_536, drain: int = 1, folder: Path | None = None
) -> Iterator[SpoolReader]:
    """A spool with these transactions; `drain` of them share a segment, and `seal_rows` cuts large ones."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        writer = SpoolWriter(place, START)
        assembler = Assembler(writer.relations, start_lsn=START.commit, seal_rows=seal_rows)
        for number, transaction in enumerate(transactions, 1):
            for message in transaction.encode():
                assembler.feed(message, transaction.lsn)
            while batch := assembler.pop(drain=number % drain == 0 or number == len(transactions)):
                writer.append(batch)
        reader = SpoolReader(place)
        reader.refresh()
        yield reader
        writer.close()


# --- any stream

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
names = st.text("abcé", min_size=1, max_size=3)


@st.composite
def relations(draw: st.DrawFn, oid: int) -> Relation:
    columns = draw(st.lists(names, max_size=4, unique=True))
    return Relation(
        oid,
        draw(st.sampled_from(["public", "sales"])),
        draw(names),
        "d",
        tuple(Column(name, 25, -1, draw(st.booleans())) for name in columns),
    )


@st.composite
def changes(draw: st.DrawFn, shapes: list[Relation]) -> Change:
    relation = draw(st.sampled_from(shapes))
    count = len(relation.columns)
    values = st.lists(st.none() | texts, min_size=count, max_size=count).map(tuple)
    partly = st.lists(st.none() | texts | st.just(UNCHANGED), min_size=count, max_size=count).map(tuple)
    operation: Operation = draw(st.sampled_from(["INSERT", "UPDATE", "DELETE", "TRUNCATE"]))
    kind: Literal["K", "O"] = draw(st.sampled_from(["K", "O"]))
    if operation == "INSERT":
        return Change(relation, operation, draw(values))
    if operation == "UPDATE":
        return Change(relation, operation, draw(partly), draw(st.none() | partly), kind)
    if operation == "DELETE":
        return Change(relation, operation, None, draw(values), kind)
    return Change(relation, operation)


@st.composite
def streams(draw: st.DrawFn) -> list[Transaction]:
    # Two oids for three shapes: one of the tables was altered.
    shapes = [draw(relations(oid)) for oid in (1, 1, 2)]
    transactions, lsn = [], START.commit
    for _ in range(draw(st.integers(1, 4))):
        lsn += draw(st.integers(1, 3))
        content = tuple(draw(st.lists(changes(shapes), max_size=6)))
        time_us = draw(st.integers(0, 4_102_444_800_000_000))
        transactions.append(Transaction(lsn, content, time_us, draw(st.integers(1, 99)), draw(st.none() | names)))
    return transactions
