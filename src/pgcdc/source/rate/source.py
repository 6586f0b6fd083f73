"""The source `rate`: made-up changes at a given rate, with no database. For trials, tests and benchmarks.

It behaves as a real one. Its log grows with the clock, whether anybody reads it or not. What is confirmed is gone: to ask
for it again is a gap. `rate.json` in the state directory stands for the server: when the log began, what was confirmed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pgcdc.core.errors import ConfigError, GapError, PgcdcError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import SCHEMA_SUB, SNAPSHOT, Position
from pgcdc.core.relation import Column, Relation, Relations, ShapeChange, ShapeHistory, append_shapes, cut_tail
from pgcdc.core.state import Identity, StateDir, read_json, write_json_durably
from pgcdc.event.typed import TypedColumn
from pgcdc.postgres.database import name_table, split_table
from pgcdc.postgres.types.catalog import BUILT_IN
from pgcdc.postgres.types.column import TypeOptions
from pgcdc.postgres.types.mapping import map_type
from pgcdc.source.protocol import ColumnDescription, Finding, Prepared, Settled, SourceOptions, TableRows
from pgcdc.source.rate.changes import FIRST_COMMIT, INT8, TEXT, MadeUp
from pgcdc.source.rate.options import RateOptions
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.segment import CaptureBatch
from pgcdc.spool.writer import SpoolWriter

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 16_384
SERVER_FILE = "rate.json"
_NO_REQUESTS = ("made-up tables have no snapshots beside the stream", "Use --rate-existing-rows")


def _check_same(options: RateOptions, known: Identity) -> None:
    asked, before = options.model_dump(mode="json"), known.details
    changed = sorted(name for name in asked if before.get(name) != asked[name])
    if changed or known.kind != options.kind:
        raise GapError(
            f"the changes of this state directory are others: {', '.join(changed) or known.kind}",
            "Use the settings that it began with, or another --state-dir",
        )


class RateSource:
    """Made-up changes, as `source.protocol.Source` says."""

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
            yield Finding("source", "ok", f"{self.options.rate_rows_per_second:g} made-up changes a second")
        except PgcdcError as error:
            yield Finding("source", "failed", error.message, error.advice)

    def tables(self, state: StateDir) -> list[Relation]:
        return MadeUp(self.options, Relations()).tables

    def captured(self, identity: Identity) -> list[Relation]:
        return MadeUp(self.options, Relations()).tables

    def prepare(
        self,
        state: StateDir,
        *,
        consumer: str,
        say: Callable[[str], object] = lambda text: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Prepared:
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

    def follow_tables(self, state: StateDir) -> frozenset[str]:
        return frozenset()

    def has_confirmed(self, commit: int) -> bool:
        return True

    def join(self, identity: Identity, status: Mapping[str, Any], *, is_typed: bool) -> None:
        _check_same(self.options, identity)

    def open(self, token: Token, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> RateStream:
        return RateStream(self.options, token, state, spool)

    def of_table(self, table: str, identity: Identity | None) -> RateSource:
        return self

    def describe(
        self, table: str, types: TypeOptions, spark_name: Callable[[pa.DataType], str]
    ) -> list[ColumnDescription]:
        kinds = {INT8: "bigint", TEXT: "text"}
        return [
            ColumnDescription(
                one.name,
                kinds[one.type_oid],
                spark_name(kind.arrow),
                not one.is_key,
                "primary" if one.is_key else "",
                kind.exactness.value,
                kind.rule,
            )
            for one in self._find(split_table(table)).columns
            for kind in [_typed(one, types).type]
        ]

    def typed_columns(
        self,
        state: StateDir,
        table: tuple[str, str],
        types: TypeOptions,
        *,
        change: ShapeChange | None,
        noted: list[tuple[str, int, int]] | None,
        zset: bool,
    ) -> tuple[TypedColumn, ...]:
        if zset:
            raise ConfigError("made-up changes have no old rows, which a Z-set needs", "Leave option changelog out")
        return tuple(_typed(column, types) for column in self._find(table).columns)

    def check_captured(self, identity: Identity, table: str, *, zset: bool) -> None:
        self._find(split_table(table))

    def snapshot(self, table: str, types: TypeOptions) -> TableRows:
        raise ConfigError("made-up tables are a stream and nothing else", "Use spark.readStream")

    def _find(self, name: tuple[str, str]) -> Relation:
        tables = MadeUp(self.options, Relations()).tables
        for one in tables:
            if (one.namespace, one.name) == name:
                return one
        raise ConfigError(
            f"there is no made-up table {name_table(*name)}", f"They are rate_1 to {tables[-1].name}: see rate_tables"
        )


def _typed(column: Column, types: TypeOptions) -> TypedColumn:
    made = map_type(BUILT_IN, column.type_oid, column.typmod, 0, types)
    return TypedColumn(column.name, column.type_oid, column.typmod, made)


SOURCE = RateSource


class RateStream:
    """The made-up log from a position on, as `source.protocol.ChangeStream` says."""

    def __init__(self, options: RateOptions, token: Token, state: StateDir, spool: SpoolWriter) -> None:
        self._options = options
        self._server = state.path / SERVER_FILE
        known = read_json(self._server)
        if known is None:
            raise GapError("the made-up log is gone", "Begin with a new --state-dir")
        self._began_us: int = known["began_us"]
        self.confirmed: int = known["confirmed"]
        first = int(token.value or FIRST_COMMIT)
        if first < self.confirmed:
            raise GapError(
                f"changes are wanted after {first}, and all up to {self.confirmed} are confirmed and gone",
                "Begin with a new --state-dir",
            )
        self._made_up = MadeUp(options, spool.relations)
        self.reached = max(first, spool.resume_lsn)  # what lies between is left out
        self._tables_left = [
            table
            for table in range(options.rate_tables if options.rate_existing_rows else 0)
            if spool.end < Position.chunk_end(FIRST_COMMIT, table)
        ]
        self._note_shapes(state)
        self._wake, self._waker = os.pipe()
        self.phase = "starting"
        self.is_connected = False
        self.can_reconnect = True
        self.is_drained = True

    def _note_shapes(self, state: StateDir) -> None:
        """Which shape the tables have, from the beginning on."""
        cut_tail(state.shapes_file)
        history = ShapeHistory(state.shapes_file)
        history.refresh()
        place = Position(FIRST_COMMIT, SNAPSHOT, 0, SCHEMA_SUB)
        known = {change.after for change in history.changes}
        append_shapes(
            state.shapes_file, [ShapeChange(place, table) for table in self._made_up.tables if table not in known]
        )

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
        """Until the next transaction."""
        if self._options.rate_transactions and self.reached >= FIRST_COMMIT + self._options.rate_transactions:
            return 0.5
        return min(0.5, max(0.005, self._options.rate_transaction_rows / self._options.rate_rows_per_second))

    def target(self) -> int:
        return self._now()

    def clock(self) -> tuple[int, int]:
        now_us = time.time_ns() // 1000
        return (self.reached, now_us) if self.reached >= self._now() else (0, 0)

    def confirm(self, commit: int) -> None:
        if commit > self.confirmed:
            hit("capture.before_confirm")
            write_json_durably(self._server, {"began_us": self._began_us, "confirmed": commit})
            self.confirmed = commit
            hit("capture.after_confirm")

    def release(self, base: Position) -> None:
        """There is nothing to let go of."""

    def settled(self, end: Position | None) -> Settled:
        if self._tables_left:
            return Settled(None, None)
        has_rows, last = self._options.rate_existing_rows, self._options.rate_tables - 1
        return Settled(end, Position.chunk_end(FIRST_COMMIT, last) if has_rows else Position.at(0, 0))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        raise ConfigError(*_NO_REQUESTS)

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
