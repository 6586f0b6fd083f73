"""The source `rate`: made-up changes at a given rate, without a database. For trials, tests and benchmarks. It behaves
like a real source. Its log grows with the clock, whether anybody reads it or not. Confirmed changes are gone:
requesting them again is a gap. `rate.json` in the state directory plays the server: it records when the log began, and
what was confirmed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConfigError, GapError, PgcdcError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import SCHEMA_SUB, SNAPSHOT, STREAM, Position
from pgcdc.core.relation import (
    Column,
    OldKind,
    Op,
    Relation,
    Relations,
    ShapeChange,
    ShapeHistory,
    append_shapes,
    cut_tail,
)
from pgcdc.core.state import Identity, StateDir, read_json, write_json_durably
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.database import name_table, split_table
from pgcdc.postgres.types.catalog import BUILT_IN
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.protocol import ColumnsQuery, Finding, Prepared, Settled, SourceOptions, TableRows
from pgcdc.source.rate.options import RateOptions
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part
from pgcdc.spool.writer import SpoolWriter

I64 = npt.NDArray[np.int64]

FIRST_COMMIT = 1  # Where the log begins: the existing rows follow it, and the first transaction is the next commit
INT8, TEXT = 20, 25  # PostgreSQL's numbers for these types
BATCH_ROWS = 16_384
SERVER_FILE = "rate.json"
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456", np.uint8)
_NO_REQUESTS = ("generated tables have no incremental snapshots", "Use --rate-existing-rows")


def _check_same(options: RateOptions, known: Identity) -> None:
    asked, before = options.model_dump(mode="json"), known.details
    changed = sorted(name for name in asked if before.get(name) != asked[name])
    if changed or known.kind != options.kind:
        raise GapError(
            f"this state directory was created with other settings: {', '.join(changed) or known.kind}",
            "Use its original settings, or another --state-dir",
        )


class RateSource:
    """Made-up changes; implements `source.protocol.Source`."""

    options_type: ClassVar[type[SourceOptions]] = RateOptions
    no_requests: ClassVar[tuple[str, str] | None] = _NO_REQUESTS

    def __init__(self, options: SourceOptions) -> None:
        assert isinstance(options, RateOptions)
        self.options: RateOptions = options

    def check(self, state: StateDir, consumer: str) -> Iterator[Finding]:
        try:
            self.options.check()
            if (known := state.identity()) is not None:
                _check_same(self.options, known)
            yield Finding("source", "ok", f"{self.options.rate_rows_per_second:g} generated changes a second")
        except PgcdcError as error:
            yield Finding("source", "failed", error.message, error.advice)

    def tables(self, state: StateDir | None = None) -> list[Relation]:
        return MadeUp(self.options, Relations()).tables

    def captured(self, identity: Identity) -> list[Relation]:
        return self.tables()

    def prepare(self, state: StateDir, *, consumer: str, say: Callable[[str], object] = lambda text: None) -> Prepared:
        self.options.check()
        state.create()
        identity = state.identity()
        if identity is not None:
            _check_same(self.options, identity)
            return Prepared(identity)
        identity = Identity(
            kind=self.options.kind, system=f"rate-{secrets.token_hex(8)}", database="rate", stream="rate",
            instance=secrets.token_hex(4), created=FIRST_COMMIT, details=self.options.model_dump(mode="json"),
        )  # fmt: skip
        write_json_durably(state.path / SERVER_FILE, {"began_us": time.time_ns() // 1000, "confirmed": FIRST_COMMIT})
        Consumers(state.consumers_file).begin(FIRST_COMMIT)
        state.save_identity(identity)
        return Prepared(identity)

    def follow_tables(self, state: StateDir) -> tuple[frozenset[str], tuple[str, ...]]:
        return frozenset(), ()

    def has_confirmed(self, commit: int) -> bool:
        return True

    def join(self, identity: Identity, status: Mapping[str, Any], *, is_typed: bool) -> None:
        _check_same(self.options, identity)

    def open(self, token: Token, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> RateStream:
        return RateStream(self.options, token, state, spool)

    def of_table(self, table: str, identity: Identity | None) -> RateSource:
        return self

    def typed_columns(self, state: StateDir, wanted: ColumnsQuery) -> tuple[TypedColumn, ...]:
        if wanted.zset:
            raise ConfigError("generated changes have no old rows, which a Z-set needs", "Remove option changelog")
        return tuple(_typed(column, wanted.types) for column in self._find(wanted.table).columns)

    def check_captured(self, identity: Identity, table: str, *, zset: bool) -> None:
        self._find(split_table(table))

    def snapshot(self, table: str, types: TypeOptions) -> TableRows:
        raise ConfigError("generated tables can only be read as a stream", "Use spark.readStream")

    def _find(self, name: tuple[str, str]) -> Relation:
        for one in self.tables():
            if (one.namespace, one.name) == name:
                return one
        raise ConfigError(
            f"generated table {name_table(*name)} does not exist",
            f"Existing ones are rate_1 to rate_{self.options.rate_tables}: see rate_tables",
        )


def _typed(column: Column, types: TypeOptions) -> TypedColumn:
    made = map_type(BUILT_IN, column.type_oid, column.typmod, 0, types)
    return TypedColumn(column.name, column.type_oid, column.typmod, made)


class RateStream:
    """The made-up log after a position; implements `source.protocol.ChangeStream`."""

    def __init__(self, options: RateOptions, token: Token, state: StateDir, spool: SpoolWriter) -> None:
        self._options = options
        self._server = state.path / SERVER_FILE
        known = read_json(self._server)
        if known is None:
            raise GapError("the log of generated changes is gone", "Start with a new --state-dir")
        self._began_us: int = known["began_us"]
        self.confirmed: int = known["confirmed"]
        first = int(token.value or FIRST_COMMIT)
        if first < self.confirmed:
            raise GapError(
                f"changes are requested after {first}, but all up to {self.confirmed} are confirmed and gone",
                "Start with a new --state-dir",
            )
        self._made_up = MadeUp(options, spool.relations)
        self.reached = max(first, spool.resume_lsn)  # transactions in between are omitted
        self._tables_left = [
            table
            for table in range(options.rate_tables if options.rate_existing_rows else 0)
            if spool.end < Position.chunk_end(FIRST_COMMIT, table)
        ]
        cut_tail(state.shapes_file)
        history = ShapeHistory(state.shapes_file)
        history.refresh()
        place = Position(FIRST_COMMIT, SNAPSHOT, 0, SCHEMA_SUB)  # their shapes are known from the start
        missing = self._made_up.tables[len(history.changes) :]
        append_shapes(state.shapes_file, [ShapeChange(place, table) for table in missing])
        self._wake, self._waker = os.pipe()
        self.phase, self.is_connected, self.can_reconnect, self.is_drained = "starting", False, True, True

    def fileno(self) -> int:
        """Never readable: the clock alone brings changes."""
        return self._wake

    def connect(self) -> float:
        self.is_connected, self.phase = True, "streaming"
        return 0.0

    def lose(self) -> None:
        self.is_connected = False

    def _now(self) -> int:
        return self._made_up.last_commit(time.time_ns() // 1000, self._began_us)

    def poll(self, *, may_read: bool, drain: bool) -> CaptureBatch | None:
        self.is_drained = True
        if not may_read:
            return None
        hit("capture.before_poll")
        if self._tables_left:
            self.is_drained = False
            return self._made_up.existing(self._tables_left.pop(0), self._began_us)
        most = max(1, BATCH_ROWS // self._options.rate_transaction_rows)
        behind = self._now() - self.reached
        if behind <= 0:
            return None
        count = min(most, behind)
        batch = self._made_up.transactions(self.reached + 1, count, self._began_us)
        self.reached += count
        self.is_drained = count == behind
        return batch

    def tend(self, needed: int, *, may_work: bool) -> float:
        """The seconds until the next transaction."""
        if self._options.rate_transactions and self.reached >= FIRST_COMMIT + self._options.rate_transactions:
            return 0.5
        return min(0.5, max(0.005, self._options.rate_transaction_rows / self._options.rate_rows_per_second))

    def target(self) -> int:
        return self._now()

    def clock(self) -> tuple[int, int]:
        now_us = time.time_ns() // 1000
        return (self.reached, now_us) if self.reached >= self._now() else (0, 0)

    def confirm(self, token: Token) -> None:
        if token.commit > self.confirmed:
            hit("capture.before_confirm")
            write_json_durably(self._server, {"began_us": self._began_us, "confirmed": token.commit})
            self.confirmed = token.commit
            hit("capture.after_confirm")

    def release(self, base: Position) -> None:
        """Nothing to release."""

    def settled(self, end: Position | None) -> Settled:
        if self._tables_left:
            return Settled(None, None)
        has_rows, last = self._options.rate_existing_rows, self._options.rate_tables - 1
        return Settled(end, Position.chunk_end(FIRST_COMMIT, last) if has_rows else Position.at(0, 0))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] != "sentinel":
            raise ConfigError(*_NO_REQUESTS)
        existing = self.settled(None).initial_end
        return {"position": existing and str(max(existing, Position.end(self._now())))}

    def status(self, confirmed: int) -> dict[str, Any]:
        now = self._now()
        return {
            "slot": "rate",
            "received_lsn": f"0/{self.reached:X}",
            "confirmed_lsn": f"0/{confirmed:X}",
            "server_lsn": f"0/{now:X}",
            "lag_bytes": now - confirmed,
            "schema_changes": 0,
            "snapshots": [],
            "bad_signals": 0,
            "initial_snapshot": None,
        }

    def close(self) -> None:
        os.close(self._wake)
        os.close(self._waker)


# --- the changes
#
# Each change is a function of the settings and its number, so every replay is the same. Changes are numbered across all
# tables, and assigned to them in turn. The changes of a table come in cycles: first its INSERTs, then UPDATEs of
# existing rows, then DELETEs of rows of the previous cycle. So no state has to be kept.


class MadeUp:
    """The changes for these settings. The tables are added to `relations`."""

    def __init__(self, options: RateOptions, relations: Relations) -> None:
        self._options = options
        self._relations = relations
        columns = (Column("id", INT8, -1, True), Column("number", INT8, -1, False), Column("note", TEXT, -1, False))
        self.tables = [
            Relation(number, "public", f"rate_{number}", "d", columns, "rate")
            for number in range(1, options.rate_tables + 1)
        ]
        self._versions = np.array([relations.intern(table) for table in self.tables], np.int32)
        ops = (
            [Op.INSERT] * options.rate_inserts + [Op.UPDATE] * options.rate_updates + [Op.DELETE] * options.rate_deletes
        )
        self._cycle = np.array(ops, np.uint8)

    def transactions(self, first: int, count: int, began_us: int) -> CaptureBatch:
        """`count` transactions, starting with the commit `first`."""
        each, rows = self._options.rate_transaction_rows, self._options.rate_transaction_rows * count
        numbers: I64 = (first - FIRST_COMMIT - 1) * each + np.arange(rows)
        ordinals = np.tile(np.arange(1, each + 1), count)
        commits = np.arange(first, first + count)
        owners = _owners(commits, STREAM, self.commit_time(commits, began_us), np.full(count, each))
        table, key, op = self._choose(numbers)
        data = self._changes(ordinals, op, table, key, numbers)
        last = first + count - 1
        return CaptureBatch(Part.of(data), owners, self._relations, Position.end(last), last, token=b"%d" % last)

    def existing(self, table: int, began_us: int) -> CaptureBatch:
        """The rows that a table (counted from 0) has before the first transaction."""
        count = self._options.rate_existing_rows
        ordinals = Position.of_chunk(FIRST_COMMIT, table, 1).ordinal + np.arange(count)
        key: I64 = np.arange(1, count + 1)
        data = self._changes(ordinals, np.full(count, Op.SNAPSHOT, np.uint8), np.full(count, table), key, -key)
        owners = _owners(np.array([FIRST_COMMIT]), SNAPSHOT, np.array([began_us]), np.array([count]))
        end = Position.chunk_end(FIRST_COMMIT, table)
        return CaptureBatch(Part.of(data), owners, self._relations, end, FIRST_COMMIT)

    def commit_time(self, commits: I64, began_us: int) -> I64:
        """When a transaction commits, in microseconds since 1970."""
        a_transaction_s = self._options.rate_transaction_rows / self._options.rate_rows_per_second
        times: I64 = (began_us + (commits - FIRST_COMMIT) * a_transaction_s * 1e6).astype(np.int64)
        return times

    def last_commit(self, now_us: int, began_us: int) -> int:
        """The last transaction committed by now."""
        options = self._options
        count = int(max(0, now_us - began_us) / 1e6 * options.rate_rows_per_second / options.rate_transaction_rows)
        return FIRST_COMMIT + (min(count, options.rate_transactions) if options.rate_transactions else count)

    def _choose(self, numbers: I64) -> tuple[I64, I64, npt.NDArray[np.uint8]]:
        """Table, key and operation of each change."""
        options = self._options
        table, of_table = numbers % options.rate_tables, numbers // options.rate_tables
        cycle, place = of_table // len(self._cycle), of_table % len(self._cycle)
        op = self._cycle[place]
        kept = options.rate_inserts - options.rate_deletes  # rows of a cycle that are never deleted: the last ones
        pick = _mix(numbers, options.rate_seed) % (np.maximum(cycle, 1) * kept)
        updated = pick // kept * options.rate_inserts + options.rate_deletes + pick % kept
        deleted = (cycle - 1) * options.rate_inserts + place - options.rate_inserts - options.rate_updates
        slot = np.where(
            op == Op.INSERT, cycle * options.rate_inserts + place, np.where(op == Op.UPDATE, updated, deleted)
        )
        # The first cycle has no previous one: instead of deleting, it updates its first row again.
        is_early = (op == Op.DELETE) & (cycle == 0)
        op = np.where(is_early, np.uint8(Op.UPDATE), op).astype(np.uint8)
        slot = np.where(is_early, options.rate_deletes, slot)
        return table, options.rate_existing_rows + 1 + slot, op

    def _changes(self, ordinals: I64, op: npt.NDArray[np.uint8], table: I64, key: I64, numbers: I64) -> pa.RecordBatch:
        count = len(op)
        is_delete = op == Op.DELETE
        ids = pa.array(key).cast(pa.string()).cast(pa.binary())
        values = [ids, pa.array(numbers).cast(pa.string()).cast(pa.binary()), self._notes(numbers)]
        order = (np.arange(3)[None, :] * count + np.flatnonzero(~is_delete)[:, None]).ravel()
        flat = pa.concat_arrays([*values, pa.nulls(1, pa.binary())])
        deleted = np.flatnonzero(is_delete)
        keys = np.stack([deleted, np.full(len(deleted), 3 * count), np.full(len(deleted), 3 * count)], 1).ravel()
        columns = {
            "ordinal": pa.array(ordinals, pa.int64()),
            "sub": pa.array(np.zeros(count), pa.int32()),
            "op": pa.array(op),
            "relation": pa.array(self._versions[table]),
            "new": _lists(flat.take(pa.array(order)), ~is_delete),
            "old": _lists(flat.take(pa.array(keys)), is_delete),
            "old_kind": pa.array(np.where(is_delete, OldKind.KEY, OldKind.NONE), pa.uint8()),
            "unchanged": pa.nulls(count, CHANGES.field("unchanged").type),
            "prefix": pa.nulls(count, pa.string()),
        }
        return pa.RecordBatch.from_arrays([columns[field.name] for field in CHANGES], schema=CHANGES)

    def _notes(self, numbers: I64) -> pa.Array:
        """Letters derived from the number and the seed."""
        width = self._options.rate_row_width
        step = _mix(numbers, self._options.rate_seed + 1)[:, None] >> (np.arange(width)[None, :] % 50)
        letters = np.ascontiguousarray(_LETTERS[step % len(_LETTERS)])
        offsets = pa.py_buffer(np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(width))
        return pa.BinaryArray.from_buffers(pa.binary(), len(numbers), [None, offsets, pa.py_buffer(letters)])


def _mix(numbers: I64, seed: int) -> I64:
    """A pseudo-random, non-negative number for each number."""
    x = numbers.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def _lists(flat: pa.Array, is_there: npt.NDArray[np.bool_]) -> pa.Array:
    offsets = np.append(0, np.cumsum(is_there * 3)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pc.invert(pa.array(is_there)))


def _owners(commits: I64, kind: int, times: I64, rows: I64) -> pa.RecordBatch:
    count = len(commits)
    columns = {
        "commit": pa.array(commits),
        "kind": pa.array(np.full(count, kind), pa.uint8()),
        "commit_time": pa.array(times),
        "xid": pa.array(commits if kind == STREAM else np.zeros(count, np.int64)),
        "rows": pa.array(rows),
        "complete": pa.array(np.ones(count, np.bool_)),
        "origin": pa.nulls(count, pa.string()),
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in TRANSACTIONS], schema=TRANSACTIONS
    )
