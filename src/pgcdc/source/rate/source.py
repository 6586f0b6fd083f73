"""The source `rate`: made-up changes at a given rate, with no database. For trials, tests and benchmarks.

It behaves as a real one. Its log grows with the clock, whether anybody reads it or not. What is confirmed is gone: to ask
for it again is a gap. `rate.json` in the state directory stands for the server: when the log began, what was confirmed.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from pgcdc.core.errors import ConfigError, GapError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import SCHEMA_SUB, SNAPSHOT, Position
from pgcdc.core.shapes import ShapeChange, ShapeHistory, append_shapes, cut_tail
from pgcdc.core.state import Identity, StateDir, read_json, write_json_durably
from pgcdc.source.protocol import Settled
from pgcdc.source.rate.changes import FIRST_COMMIT, MadeUp
from pgcdc.source.rate.options import RateOptions
from pgcdc.spool.batch import CaptureBatch
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.writer import SpoolWriter

__all__ = ["SOURCE", "RateStream", "prepare_rate"]

BATCH_ROWS = 16_384
SERVER_FILE = "rate.json"


def prepare_rate(options: RateOptions, state: StateDir) -> Identity:
    """Make the state directory and begin the log, unless both are there."""
    options.check()
    state.create()
    known, asked = state.identity(), options.model_dump(mode="json")
    if known is not None:
        if known.asked != asked:
            changed = sorted(name for name in asked if (known.asked or {}).get(name) != asked[name])
            raise GapError(
                f"the made-up changes of {state.path} are others: {', '.join(changed)}",
                "Use the settings that it began with, or another --state-dir",
            )
        return known
    identity = Identity(
        system_identifier=f"rate-{secrets.token_hex(8)}", timeline=1, database="rate", slot="rate",
        instance=secrets.token_hex(4), publications=[], created_lsn=FIRST_COMMIT, asked=asked,
    )  # fmt: skip
    write_json_durably(state.path / SERVER_FILE, {"began_us": time.time_ns() // 1000, "confirmed": FIRST_COMMIT})
    Consumers(state.consumers_file).begin(FIRST_COMMIT)
    state.save_identity(identity)
    return identity


class RateSource:
    """Made-up changes, for the registry."""

    def open(
        self,
        options: dict[str, Any],
        publications: tuple[str, ...],
        state: StateDir,
        spool: SpoolWriter,
        consumers: Consumers,
    ) -> RateStream:
        return RateStream(RateOptions.model_validate(options), state, spool)


SOURCE = RateSource()


class RateStream:
    """The made-up log from a position on, as `source.protocol.ChangeStream` says."""

    def __init__(self, options: RateOptions, state: StateDir, spool: SpoolWriter) -> None:
        self._options = options
        self._server = state.path / SERVER_FILE
        known = read_json(self._server)
        if known is None:
            raise GapError("the made-up log is gone", "Begin with a new --state-dir")
        self._began_us: int = known["began_us"]
        self.confirmed: int = known["confirmed"]
        if spool.resume_lsn < self.confirmed:
            raise GapError(
                f"changes are wanted after {spool.resume_lsn}, and all up to {self.confirmed} are confirmed and gone",
                "Begin with a new --state-dir",
            )
        self._made_up = MadeUp(options, spool.relations)
        self.reached = spool.resume_lsn
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

    def settled(self) -> Settled:
        end = (
            Position.chunk_end(FIRST_COMMIT, self._options.rate_tables - 1)
            if self._options.rate_existing_rows
            else None
        )
        is_open = bool(self._tables_left)
        return Settled(is_open, None if is_open else str(end or Position.at(0, 0)), False)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        raise ConfigError("made-up tables have no snapshots beside the stream", "Use --rate-existing-rows")

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
