"""The initial snapshot, in the capture process: has the entries of the plan read side by side, and publishes what was read.

The stream is not read before all rows are published (the slot keeps it meanwhile), so that rows and changes are in order
without any comparison. A snapshot can be lost before that: its holder was killed, the server was restarted, the time limit
was reached, or a table was truncated or rewritten. Then tables of which nothing is published yet are read in a new snapshot,
and the stream will leave out what that one saw (`window.leave_out`). The rest of a table that is published in part becomes a
request for an incremental snapshot. What is staged already is published in any case, whatever became of its snapshot.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError, StateError
from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relation
from pgcdc.core.state import StateDir
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.snapshot.asking import NoRight
from pgcdc.source.postgres.snapshot.held import Hold, hold_for_long, is_held, let_all_go, let_go
from pgcdc.source.postgres.snapshot.plan import (
    CHUNK_BYTES,
    NOTHING_LOST,
    Entry,
    PlannedTable,
    SkipRule,
    SnapshotPlan,
    TableLocked,
    plan_tables,
    published_names,
    requests_for_rest,
)  # fmt: skip
from pgcdc.source.postgres.snapshot.reader import Answer, Readers, StageOrder
from pgcdc.source.postgres.snapshot.releases import Releases, Staged, snapshot_mark
from pgcdc.source.postgres.snapshot.requests import RequestQueue

logger = logging.getLogger("pgcdc.capture")

STAGED_BYTES = 4 * CHUNK_BYTES
"""So much may wait on disk for a spool that is full, or a capture that is slower than its readers."""
READERS = max(1, min(4, os.cpu_count() or 1))
LOCKED_S = 2.0
"""How long to do other things when a table is locked."""
HELD_INTERVAL_S = 0.5
MAX_LOSSES = 3
"""A snapshot that is lost so often before one row of it is published will never be read."""
WARN_AFTER_S = 600.0

ReleaseRows = Callable[[Staged, Relation | None, dict[str, Any]], None]
"""Puts rows into the stream, durably, behind everything that is there; the last is a note for after a crash."""


class InitialSnapshot:
    """The one of a state directory, if it has one. Not thread-safe."""

    def __init__(
        self, options: PostgresOptions, publications: tuple[str, ...], state: StateDir, releases: Releases,
        queue: RequestQueue,
    ) -> None:  # fmt: skip
        """The log of releases may be one step ahead of the plan. `queue` has the requests for incremental snapshots."""
        self._options, self._publications = options, publications
        self._state, self._releases, self._queue = state, releases, queue
        self._plan = SnapshotPlan(state.snapshot)
        self.readers = Readers(options.db, publications, "pgcdc snapshot reader", READERS)
        self._due: dict[int, None] = {}
        """Tables of which there may be something to publish, in that order."""
        self._lost: dict[int, str] = {}
        """Tables that a task could not read, and why."""
        self._held: dict[int, bool] = {}
        self._held_due = self._plan_due = 0.0
        self._is_unsure = True
        """Whether a snapshot may have been lost since it was last asked."""
        self._spare: Hold | None = None
        """A snapshot that nothing is planned in yet."""
        self._losses = 0
        self._taken: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._rates: dict[int, tuple[float, int]] = {}
        self._warning = ""
        if self._plan.is_active:
            self._catch_up()
            self._due = dict.fromkeys(self._plan.unfinished)
            tables = self._plan.unfinished.values()
            releases.remove_unknown({one.file for table in tables for one in table.staged.values()})
        else:
            self._clean_up()

    @property
    def is_active(self) -> bool:
        """Whether there are rows to come before the stream."""
        return self._plan.is_active

    @property
    def holds_stream(self) -> bool:
        """Whether the stream is not to be read, now or at all."""
        rest = [one for one in self._queue.entries() if one.request.kind == "initial"]  # is read beside the stream
        has_rest = any(one.status in ("queued", "running") for one in rest)
        return self._plan.is_active or (self._options.is_snapshot_only and not has_rest)

    @property
    def end(self) -> Position | None:
        """The position behind its last row; that of nothing without one, None while it is under way."""
        if self._plan.is_active:
            return None
        return Position.parse(self._plan.completed["end"]) if self._plan.completed else Position.at(0, 0)

    @property
    def rules(self) -> list[SkipRule]:
        """What the stream has to leave out."""
        return self._plan.rules

    def _catch_up(self) -> None:
        """A crash came between the log of releases and the plan: what was released is published."""
        for release in self._releases.after(Position.at(0, 0)):
            note = release.note
            if "entry" in note:
                table = self._plan.table_of(note["entry"])
                if table is not None and note["entry"] in table.left:
                    self._plan.publish(note["entry"], release.staged.rows)
            marked = self._plan.tables.get(note.get("table", 0))
            if marked is not None and note["mark"] == "started" and not marked.is_started:
                self._plan.start_table(marked.oid)
            if marked is not None and note["mark"] == "completed" and not marked.ended:
                self._plan.end_table(marked.oid, "complete")

    # --- reading

    def look(self) -> None:
        """Take in what was read, order the next, and see which snapshots are still held."""
        while (found := self.readers.take()) is not None:
            order, answer = found
            assert isinstance(order, StageOrder)
            self._taken.discard(order.id)
            table = self._plan.unfinished.get(order.known.relation.oid)
            if table is not None and order.id in table.left:  # else it was planned in another way meanwhile
                self._note(table, order.id, answer)
        while self.readers.is_free and (work := next(self._waiting(), None)) is not None:
            table, entry = work
            self._taken.add(entry.id)
            snapshot = self._plan.holds[table.hold].name
            self.readers.start(StageOrder(entry.id, snapshot, table.published, entry.chunk, self._releases.folder))
        if (now := time.monotonic()) >= self._held_due:
            self._held_due = now + HELD_INTERVAL_S
            self._is_unsure = True
            self._held = {number: is_held(self._state.snapshot, one) for number, one in self._plan.holds.items()}
            needed = {table.hold for table in self._plan.unfinished.values() if table.left}
            if self._spare is not None:
                needed.add(self._spare.number)
            let_go(self._state.snapshot, *(self._plan.holds[one] for one in self._held if one not in needed))
            self._warn()

    def _note(self, table: PlannedTable, entry: str, answer: Answer) -> None:
        if isinstance(answer, Staged):
            self._plan.stage(entry, answer)
            self._attempts.pop(entry, None)
            self._due[table.oid] = None
        elif isinstance(answer, NoRight):
            raise SourceError(answer.message, f"{answer.advice} ({NOTHING_LOST})")
        elif isinstance(answer, ConnectionLost):  # after a moment that grows
            tries = self._attempts[entry] = self._attempts.get(entry, 0) + 1
            self._not_before[entry] = time.monotonic() + min(30.0, 0.1 * 2**tries)
            logger.warning("table %s: %s; it is tried again", table.published.title, answer.message)
        elif isinstance(answer, SourceError):
            self._lost.setdefault(table.oid, answer.message)
            self._is_unsure = True
        else:
            assert isinstance(answer, PgcdcError)
            raise answer

    def _waiting(self) -> Iterator[tuple[PlannedTable, Entry]]:
        """What is to be read next. Of tables with a key not too much waits to be published; others are staged whole."""
        now, tables = time.monotonic(), self._plan.unfinished.values()
        staged_bytes = sum(one.written[0] for table in tables if table.published.key for one in table.staged.values())
        for table in tables:
            is_enough = staged_bytes > STAGED_BYTES and table.published.key
            if table.oid in self._lost or not self._is_held(table) or is_enough:
                continue
            for entry in table.left.values():
                is_new = entry.id not in table.staged and entry.id not in self._taken
                if is_new and now >= self._not_before.get(entry.id, 0):
                    yield table, entry

    def _is_held(self, table: PlannedTable) -> bool:
        return self._held.get(table.hold, False)

    # --- publishing

    def step(self, release: ReleaseRows, end: Callable[[], object]) -> bool:
        """Do one thing, if there is one to do; True if there may be more at once."""
        try:
            if not self._plan.is_planned:
                return self._plan_all()
            self.look()
            while self._due:
                table = self._plan.unfinished.get(next(iter(self._due)))
                if table is not None and self._publish_of(table, release):
                    return True
                self._due.pop(next(iter(self._due)))
            if self._replace_lost():
                return True
        except TableLocked as error:
            self._plan_due = time.monotonic() + LOCKED_S
            logger.info("%s; it is tried again", error.message)
            return False
        if not self._plan.unfinished:
            self._plan.complete(str(end()))
            done = self._plan.completed or {}
            logger.info("the initial snapshot is complete: %d rows in %.1f s", done["rows"], done["seconds"])
            self._clean_up()
        return False

    def _publish_of(self, table: PlannedTable, release: ReleaseRows) -> bool:
        left, ready = table.left, table.staged
        # Rows without a key cannot be read in two snapshots: all or nothing.
        if not table.hold or (left and not ready) or (not table.published.key and len(ready) < len(left)):
            return False
        if not table.is_started:
            self._mark(table, Op.SNAPSHOT_STARTED, "started", release)
            self._plan.start_table(table.oid)
        elif ready:
            self._publish(table, next(iter(ready)), release)
        else:
            self._mark(table, Op.SNAPSHOT_COMPLETED, "completed", release)
            self._plan.end_table(table.oid, "complete")
            logger.info("table %s: %d rows", table.published.title, table.rows)
        return True

    def _publish(self, table: PlannedTable, entry: str, release: ReleaseRows) -> None:
        staged = table.staged[entry]
        if not (self._releases.folder / staged.file).exists():  # somebody has deleted it
            del table.staged[entry]
            self._is_unsure = True
            return
        if staged.rows:
            release(staged, table.published.relation, {"entry": entry})
        self._plan.publish(entry, staged.rows, staged.time_us)
        self._losses = 0
        self._rates.setdefault(table.oid, (time.monotonic(), table.rows))

    def _mark(self, table: PlannedTable, op: Op, what: str, release: ReleaseRows) -> None:
        name = f"initial-{format_lsn(self._plan.lsn)}"
        mark = snapshot_mark(op, name, "initial", table.published.relation, table.rows)
        release(self._releases.stage([mark]), None, {"table": table.oid, "mark": what})

    # --- snapshots

    def _plan_all(self) -> bool:
        if time.monotonic() < self._plan_due:
            return False
        held = (hold for hold in self._plan.holds.values() if is_held(self._state.snapshot, hold))
        self._plan_in(next(held, None) or self._hold(), None)
        return True

    def _hold(self) -> Hold:
        """A snapshot of now. What it sees is left out of the stream, for the tables that are planned in it."""
        number = max(self._plan.holds, default=0) + 1
        hold = hold_for_long(self._options.db, self._state, number, limit_s=self._options.snapshot_hold_limit)
        self._plan.hold(hold)
        self._held_due = 0.0
        return hold

    def _plan_in(self, hold: Hold, tables: dict[int, PlannedTable] | None) -> None:
        """Plan these tables (None: all) in a snapshot, if it is still held."""
        made = plan_tables(self._options.db, self._publications, hold, set(tables) if tables is not None else None)
        if made is None:
            return
        planned, others = made
        there = {one.relation.oid for one in [*(one for one, _ in planned), *others]}
        for oid, table in (tables or {}).items():
            if oid not in there:
                self._say_gone(table)
        self._plan.plan(hold.number, planned, others)
        self._held[hold.number] = True
        self._due |= dict.fromkeys(one.relation.oid for one, _ in planned)
        self._is_unsure = True

    def _say_gone(self, table: PlannedTable) -> None:
        logger.warning("table %s is gone: nothing is left to be read of it", table.published.title)
        self._plan.end_table(table.oid, "gone")

    def _replace_lost(self) -> bool:
        """See that the rest of every table whose snapshot was lost is read otherwise. True if there was one."""
        if not self._is_unsure or time.monotonic() < self._plan_due:
            return False
        lost = {
            table.oid: table
            for table in self._plan.unfinished.values()
            if not table.hold
            or (len(table.staged) < len(table.left) and (table.oid in self._lost or not self._is_held(table)))
        }
        if not lost:
            self._is_unsure = False
            return False
        partly = [table for table in lost.values() if table.is_begun]
        names = published_names(self._options.db, self._publications) if partly else {}
        for table in partly:
            if table.oid in names:
                self._move(table, names[table.oid])
            else:
                self._say_gone(table)
        self._begin_again({oid: table for oid, table in lost.items() if not table.is_begun})
        for oid in lost:
            self._lost.pop(oid, None)
        return True

    def _move(self, table: PlannedTable, name: str) -> None:
        """The rest of a table is read beside the stream."""
        if not table.published.key:  # it is published when all of it is staged: somebody has deleted what is missing
            raise StateError(
                f"rows of table {table.published.title} are missing in {self._releases.folder}",
                "Restore the state directory from a backup, or start over with a new slot and a new --state-dir",
            )
        known = {one.id for one in self._queue.entries()}  # by an attempt that was killed
        self._queue.add(*(one for one in requests_for_rest(table, name) if one.id not in known))
        self._plan.end_table(table.oid, "moved")
        logger.warning("the snapshot of table %s was lost: its rest is read by key", table.published.title)

    def _begin_again(self, tables: dict[int, PlannedTable]) -> None:
        if not tables:
            return
        names = ", ".join(sorted(table.published.title for table in tables.values()))
        why = next((self._lost[oid] for oid in tables if oid in self._lost), "the snapshot was lost")
        if self._losses >= MAX_LOSSES:
            raise SourceError(
                f"the rows of {names} cannot be read: {MAX_LOSSES} snapshots were lost before the first of them was "
                f"delivered (the last one: {why})",
                "Start again when the tables are left alone; a large table without a key needs more time: "
                "--snapshot-hold-limit",
            )
        if self._spare is None or not is_held(self._state.snapshot, self._spare):
            logger.warning("%s: %s; what is not published yet is read in a new snapshot", names, why)
            self._spare = self._hold()
        self._plan_in(self._spare, tables)
        self._losses += 1
        self._spare = None

    def close(self) -> None:
        """End the processes that read."""
        self.readers.close()

    def _clean_up(self) -> None:
        self.readers.close()
        let_all_go(self._state.snapshot)
        self._releases.remove_unknown(())

    # --- for people

    def status(self, server_lsn: int) -> dict[str, Any] | None:
        """Rows, percent, rate and time left of each table, and how long what is held."""
        if not self._plan.lsn:
            return None
        if self._plan.completed is not None:
            kept = ("rows", "seconds", "tables", "end", "time")
            return {"status": "complete", **{name: self._plan.completed[name] for name in kept}}
        return {
            "status": "reading" if self._plan.is_planned else "planning",
            "tables": [self._table_status(table) for table in self._plan.tables.values()],
            "held_seconds": round(self._held_s(), 1),
            "hold_limit_seconds": self._options.snapshot_hold_limit,
            "wal_held_bytes": max(0, server_lsn - self._plan.lsn),
            "warning": self._warning or None,
        }

    def _table_status(self, table: PlannedTable) -> dict[str, Any]:
        began, before = self._rates.get(table.oid, (time.monotonic(), table.rows))
        elapsed_s = time.monotonic() - began
        rate = (table.rows - before) / elapsed_s if elapsed_s > 1 else 0.0
        total = max(table.estimated_rows, table.rows)
        return {
            "table": table.published.title,
            "status": table.ended or ("reading" if table.is_started or table.rows else "waiting"),
            "rows": table.rows,
            "estimated_rows": total,
            "percent": round(100.0 if table.ended or not total else 100.0 * table.rows / total, 1),
            "rows_per_s": round(rate),
            "seconds_left": round((total - table.rows) / rate) if rate and not table.ended else None,
        }

    def _held_s(self) -> float:
        times = [hold.time for number, hold in self._plan.holds.items() if self._held.get(number)]
        return time.time() - min(times) if times else 0.0

    def _warn(self) -> None:
        """After ten minutes, and when half and nine tenths of the time are over."""
        limit_s, held_s = self._options.snapshot_hold_limit, self._held_s()
        passed = [after for after in sorted((WARN_AFTER_S, limit_s / 2, limit_s * 0.9)) if held_s >= after]
        if not passed:
            return
        text = (
            f"the initial snapshot has been held for more than {round(passed[-1] / 60)} minutes: VACUUM cannot clean up "
            f"behind it, and WAL is kept; it is given up after {round(limit_s / 60)} minutes (--snapshot-hold-limit)"
        )
        if text != self._warning:
            self._warning = text
            logger.warning("%s", text)
