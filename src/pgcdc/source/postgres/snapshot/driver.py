"""All snapshots of a pipeline, in the loop of its capture process: every method returns quickly, the readers do the
slow work.

There is one file of state (`requests.py`), one set of readers, and one log of releases. Rows are read in one of three
ways:

- *First*, here: the tables of the initial snapshot, in a snapshot that is held for them, several chunks in parallel.
  The stream is not read before all of them are released (the slot keeps it), so rows and changes are in order without
  any comparison.
- *Beside* the stream (`beside.py`): every other request, by key, each chunk in its own snapshot.
- As a *reload* (`reload.py`): a whole table in one snapshot, for adapters that replace their copy of it.

A held snapshot can be lost: its holder was killed, the server restarted, the time limit was reached, or a table was
truncated or rewritten. Staged rows are released all the same. Tables of which nothing is released yet are read in a new
snapshot, and the stream omits what that snapshot saw (`window.leave_out`). The remainder of a partly released table
becomes requests: it is read beside the stream.

Things become durable in this order: the rows; the log of releases with a note (which chunk of which table, or how far a
request is); for requests, their file. After a crash before the log, the chunk is read again, unless its file is
complete. After a later crash, the note shows what was done.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError, StateError, reconnect_delay_s
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.relation import Op
from pgcdc.core.state import StateDir
from pgcdc.core.wording import counted
from pgcdc.postgres.database import Connection, NoRight, explain_errors
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.snapshot.asking import change_queue, check_table, find_table, make_request
from pgcdc.source.postgres.snapshot.beside import BesideStream
from pgcdc.source.postgres.snapshot.chunks import CHUNK_BYTES, plan_tables, published_oids
from pgcdc.source.postgres.snapshot.held import hold_for_long, is_held, let_go
from pgcdc.source.postgres.snapshot.reader import Answer, Readers, StageOrder
from pgcdc.source.postgres.snapshot.releases import Release, Releases, Staged, find_staged, schema_mark, snapshot_mark
from pgcdc.source.postgres.snapshot.reload import Reloads
from pgcdc.source.postgres.snapshot.requests import PlannedTable, RequestQueue, SkipRule

logger = logging.getLogger("pgcdc.capture")

READERS = max(1, min(4, os.cpu_count() or 1))
# How much may wait on disk while the spool is full or the capture is slower than its readers
STAGED_BYTES = 4 * CHUNK_BYTES
LOCKED_S = 2.0  # How long to do other work when a table is locked
HELD_INTERVAL_S = 0.5
MAX_LOSSES = 3  # A snapshot lost this often before its first release will never be read successfully
WARN_AFTER_S = 600.0


class Snapshots:
    """The snapshots of one state directory. Not thread-safe."""

    def __init__(
        self, options: PostgresOptions, publications: Sequence[str], state: StateDir, base: Position, name: str
    ) -> None:
        """Nothing up to `base` is needed again; `name` is that of the readers' sessions."""
        self._options, self._publications, self._state = options, tuple(publications), state
        self._folder = state.snapshot
        self.queue = RequestQueue(state.requests_file)
        self.releases = Releases(self._folder, base, keeps_log=self.queue.initial.is_active)
        self.readers = Readers(options.db, publications, name, READERS)
        self.beside = BesideStream(options, self._folder, self.queue, self.releases, self.readers)
        table_reader = Readers(options.db, publications, name, 1)
        self.reloads = Reloads(self._folder, self.queue, self.releases, table_reader, self.beside.xids)
        self._held: set[int] = set()
        self._changed: dict[int, str] = {}  # Tables unreadable in their snapshot, and why
        self._losses, self._failures = 0, 0
        self._held_due = self._read_due = self._plan_due = 0.0
        self._paces: dict[int, tuple[float, int]] = {}  # When a table's first rows were released, and how many
        self._warning = ""
        self.rules: list[SkipRule] = []  # What the stream must omit
        self._recover()

    def _recover(self) -> None:
        """Restore released and staged rows that a crash kept out of the state file."""
        plan = self.queue.initial
        for note, rows in self.releases.found:
            if "initial" in note:
                plan.note(note["initial"], note["what"], rows)
        if not plan.is_active:
            self._clean_up()
            return
        found = find_staged(self._folder)
        for table in plan.unfinished:
            table.staged = {name: found[name] for name in table.chunks or () if name in found}
        self.releases.remove_unknown({one.file for table in plan.unfinished for one in table.staged.values()})

    # --- for the stream

    @property
    def is_first(self) -> bool:
        """Whether the initial snapshot's rows still come before the stream."""
        return self.queue.initial.is_active

    @property
    def holds_stream(self) -> bool:
        """Whether the stream must not be read, for now or at all."""
        rest = [one for one in self.queue.entries() if one.request.kind == "initial"]  # is read beside the stream
        has_rest = any(one.status in ("queued", "running") for one in rest)
        return self.is_first or (self._options.is_snapshot_only and not has_rest)

    @property
    def initial_end(self) -> Position | None:
        """The end of the initial snapshot's rows; position zero if there was none, None while it is running."""
        if self.is_first:
            return None
        done = self.queue.initial.completed
        return Position.parse(done["end"]) if done else Position.at(0, 0)

    def step(self, end: Position, *, may_work: bool) -> Release | None:
        """Continue. `end` is the spool's end; if it `may_work`, everything read is in the spool. A returned release is
        durable; it must become visible before anything else."""
        if not self.is_first:
            return self.reloads.step(end, may_work=may_work) or self.beside.step(end, may_work=may_work)
        try:
            while (taken := self.readers.take()) is not None:
                order, answer = taken
                assert isinstance(order, StageOrder)
                self._note_staged(order, answer)
            return self._step_first(end, may_work)
        except NoRight as error:
            raise SourceError(error.message, f"{error.advice} (nothing is lost: start again afterwards)") from None

    def close(self) -> None:
        self.readers.close()
        self.reloads.close()

    # --- first: tables of the initial snapshot

    def _step_first(self, end: Position, may_work: bool) -> Release | None:
        plan = self.queue.initial
        self._look_at_holds()
        while self.readers.is_free and (work := next(self._unread(), None)) is not None:
            table, chunk = work
            snapshot, cut = plan.holds[table.hold].name, (table.chunks or {})[chunk]
            self.readers.start(StageOrder(chunk, snapshot, table.published, cut, self._folder))
        if not may_work:
            return None
        for table in plan.unfinished:
            # Rows without a key cannot be read in two snapshots: all or nothing.
            is_ready = table.is_whole or (table.staged and table.published.key)
            if is_ready and (release := self._release_first(table, end)) is not None:
                return release
        if time.monotonic() >= self._plan_due:
            self._plan_lost()
        if plan.tables is not None and not plan.unfinished:
            done = plan.complete(end)
            self.queue.save()
            logger.info(
                "the initial snapshot is complete: %s read in %.1f s", counted(done["rows"], "row"), done["seconds"]
            )
            self._clean_up()
        return None

    def _unread(self) -> Iterator[tuple[PlannedTable, str]]:
        """What to read next. Tables with a key stage a limited amount; others are staged completely."""
        tables = self.queue.initial.unfinished
        staged_bytes = sum(one.written[0] for table in tables if table.published.key for one in table.staged.values())
        taken = {order.id for order in self.readers.orders if isinstance(order, StageOrder)}
        for table in tables:
            is_enough = staged_bytes > STAGED_BYTES and table.published.key
            if is_enough or self._is_lost(table) or time.monotonic() < self._read_due:
                continue
            yield from ((table, one) for one in table.chunks or () if one not in table.staged and one not in taken)

    def _note_staged(self, order: StageOrder, answer: Answer) -> None:
        table = (self.queue.initial.tables or {}).get(order.known.relation.oid)
        if table is None or order.id not in (table.chunks or ()):  # its plan has changed meanwhile
            return
        if isinstance(answer, Staged):
            hit("driver.staged")
            table.staged[order.id] = answer
            self._failures = 0
        elif isinstance(answer, ConnectionLost):
            logger.warning("table %s: %s; retrying", table.published.title, answer.message)
            self._read_due = time.monotonic() + reconnect_delay_s(self._failures)
            self._failures += 1
        elif isinstance(answer, SourceError) and not isinstance(answer, NoRight):
            self._changed.setdefault(table.oid, answer.message)
        else:
            assert isinstance(answer, PgcdcError)
            raise answer

    def _release_first(self, table: PlannedTable, end: Position) -> Release | None:
        """A table's next release: its start, rows, or its end. None: nothing to release yet."""
        if table.details is not None and not table.is_described:
            # Before any row, so that a later ALTER TABLE is not mistaken for the shape in which the rows were read.
            mark = self.releases.stage([schema_mark(table.details)])
            return self._put(table, "described", mark, end)
        if not table.is_started:
            return self._put(table, "started", self._mark(table, Op.SNAPSHOT_STARTED), end)
        for name, staged in list(table.staged.items()):
            self._losses = 0
            if staged.rows:
                release = self._put(table, name, staged, end)
                self._paces.setdefault(table.oid, (time.monotonic(), table.rows))
                return release
            self.queue.initial.note(table.oid, name, 0)  # its file stays, to mark the chunk as read
        if table.chunks:
            return None
        logger.info("table %s: %s read", table.published.title, counted(table.rows, "row"))
        return self._put(table, "complete", self._mark(table, Op.SNAPSHOT_COMPLETED), end)

    def _mark(self, table: PlannedTable, op: Op) -> Staged:
        name = f"initial-{format_lsn(self.queue.initial.lsn)}"
        return self.releases.stage([snapshot_mark(op, name, "initial", table.published.relation, table.rows)])

    def _put(self, table: PlannedTable, what: str, staged: Staged, end: Position) -> Release:
        """Release it into the stream, with a note for recovery after a crash."""
        release = self.releases.add(end, staged, table.published.relation, {"initial": table.oid, "what": what})
        self.queue.initial.note(table.oid, what, staged.rows)
        return release

    # --- held and lost snapshots

    def _look_at_holds(self) -> None:
        """Check the held snapshots, and let unneeded ones go. Keep the youngest: tables may still be planned in it."""
        if (now := time.monotonic()) < self._held_due:
            return
        self._held_due = now + HELD_INTERVAL_S
        plan = self.queue.initial
        self._held = {number for number, one in plan.holds.items() if is_held(self._folder, one)}
        needed = {max(plan.holds, default=0), *(table.hold for table in plan.unfinished if table.chunks)}
        let_go(self._folder, {one.file for number, one in plan.holds.items() if number in needed})
        self._warn()

    def _is_lost(self, table: PlannedTable) -> bool:
        return table.chunks is None or table.oid in self._changed or table.hold not in self._held

    def _plan_lost(self) -> None:
        """Plan what is unplanned, and find another way to read the remainder of tables whose snapshot was lost."""
        plan = self.queue.initial
        lost = [table for table in plan.unfinished if not table.is_whole and self._is_lost(table)]
        partly = [table for table in lost if table.rows]
        there = published_oids(self._options.db, self._publications) if partly else set()
        for table in partly:
            if table.oid in there:
                self._move(table)
            else:
                self._end_gone(table)
        again = {table.oid: table for table in lost if not table.rows}
        try:
            if plan.tables is None:
                self._plan(0, None)
            elif again:
                self._plan_again(again)
        except SourceError as error:
            if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise
            logger.info("%s; retrying", error.message)
            self._plan_due = time.monotonic() + LOCKED_S

    def _move(self, table: PlannedTable) -> None:
        if not table.published.key:  # it is only released once completely staged, so somebody deleted the missing part
            raise StateError(
                f"rows of table {table.published.title} are missing in {self._folder}",
                "Restore the state directory from a backup, or start over with a new slot and a new --state-dir",
            )
        self.queue.move_rest(table)
        hit("driver.moved")
        logger.warning("the snapshot of table %s was lost: reading the remaining rows by key", table.published.title)

    def _end_gone(self, table: PlannedTable) -> None:
        logger.warning("table %s was dropped: its remaining rows are not read", table.published.title)
        table.ended = "gone"
        self.queue.save()

    def _plan_again(self, tables: dict[int, PlannedTable]) -> None:
        names = ", ".join(sorted(table.published.title for table in tables.values()))
        why = next((self._changed[oid] for oid in tables if oid in self._changed), "the snapshot was lost")
        if self._losses >= MAX_LOSSES:
            raise SourceError(
                f"the rows of {names} cannot be read: {MAX_LOSSES} snapshots were lost before their first row "
                f"was delivered (last reason: {why})",
                "Start again when the tables are not being altered; a large table without a key needs more "
                "time: --snapshot-hold-limit",
            )
        self._plan(max(table.hold for table in tables.values()), tables)
        self._losses += 1
        logger.warning("%s: %s; reading the rest in a new snapshot", names, why)

    def _plan(self, last: int, tables: dict[int, PlannedTable] | None) -> None:
        """Plan these tables (None: all) in a snapshot after number `last`: a held one, or else a new one. The stream
        then omits what that snapshot saw."""
        plan = self.queue.initial
        hold = next((one for one in plan.holds.values() if one.number > last and is_held(self._folder, one)), None)
        if hold is None:
            number, limit_s = max(plan.holds, default=0) + 1, self._options.snapshot_hold_limit
            hold = plan.holds[number] = hold_for_long(self._options.db, self._state, number, limit_s=limit_s)
            self.queue.save()
        found = plan_tables(self._options.db, self._publications, hold.name, None if tables is None else set(tables))
        if found is None:
            return
        plan.tables = plan.tables or {}
        for published, details, made in found:
            table = PlannedTable(published, hold.number, None, details=details)
            if made is not None:
                table.chunks = {f"{table.oid}-{hold.number}-{number}": chunk for number, chunk in enumerate(made[0])}
                table.estimated_rows = made[1]
            table.is_started = tables is not None and tables[table.oid].is_started
            self._changed.pop(table.oid, None)
            plan.tables[table.oid] = table
        for oid, gone in (tables or {}).items():
            if plan.tables[oid] is gone:
                self._end_gone(gone)
        self._held.add(hold.number)
        self.queue.save()
        hit("driver.planned")

    def _clean_up(self) -> None:
        """Let go of everything: no snapshot is needed any longer."""
        self.rules = self.queue.initial.rules
        self.readers.close()
        let_go(self._folder)
        self.releases.keeps_log = False
        self.releases.remove_unknown(())

    # --- control requests and status

    def answer(self, content: dict[str, Any], sql: Connection | None) -> dict[str, Any]:
        """Handle a control request: `action` is add, pause, resume, stop or list. The table is checked first, so that a
        refusal is immediate. Returns everything known under `snapshots`."""
        if content["action"] == "add":
            request = make_request(content)
            request.check()
            if sql is None or sql.closed:
                raise ConnectionLost("there is no connection to the server")
            with explain_errors("read the table"):
                needs_key = request.kind != "reload"
                table = find_table(sql, self._publications, request.table, request.oid, needs_key=needs_key)
                check_table(sql, table, request.where)
            content = {**content, "id": request.id, "oid": request.oid if needs_key else table.relation.oid}
        return change_queue(self.queue, content) | {"snapshots": self.beside.status()}

    def status(self, server_lsn: int) -> dict[str, Any] | None:
        """Rows, percent, rate and remaining time for each table of the initial snapshot, and for how long a snapshot
        has been held."""
        plan = self.queue.initial
        if plan.completed is not None:
            kept = ("rows", "seconds", "tables", "end", "time")
            return {"status": "complete", **{name: plan.completed[name] for name in kept}}
        if not plan.lsn:
            return None
        return {
            "status": "reading" if plan.tables is not None else "planning",
            "tables": [self._table_status(table) for table in (plan.tables or {}).values()],
            "held_seconds": round(self._held_s(), 1),
            "hold_limit_seconds": self._options.snapshot_hold_limit,
            "wal_held_bytes": max(0, server_lsn - plan.lsn),
            "warning": self._warning or None,
        }

    def _table_status(self, table: PlannedTable) -> dict[str, Any]:
        began, before = self._paces.get(table.oid, (time.monotonic(), table.rows))
        elapsed_s = time.monotonic() - began
        rate = (table.rows - before) / elapsed_s if elapsed_s > 1 else 0.0
        total = max(table.estimated_rows, table.rows)
        return {
            "table": table.published.title,
            "status": table.ended or ("reading" if table.is_started else "waiting"),
            "rows": table.rows,
            "estimated_rows": total,
            "percent": round(100.0 if table.ended or not total else 100.0 * table.rows / total, 1),
            "rows_per_s": round(rate),
            "seconds_left": round((total - table.rows) / rate) if rate and not table.ended else None,
        }

    def _held_s(self) -> float:
        times = [hold.time for number, hold in self.queue.initial.holds.items() if number in self._held]
        return time.time() - min(times) if times else 0.0

    def _warn(self) -> None:
        """Warn after ten minutes, and at half and nine tenths of the time limit."""
        limit_s, held_s = self._options.snapshot_hold_limit, self._held_s()
        passed = [after for after in sorted((WARN_AFTER_S, limit_s / 2, limit_s * 0.9)) if held_s >= after]
        if not passed:
            return
        text = (
            f"the initial snapshot has been held for more than {round(passed[-1] / 60)} minutes: VACUUM "
            f"cannot clean up behind it, and WAL is kept; it is abandoned after {round(limit_s / 60)} minutes "
            "(--snapshot-hold-limit)"
        )
        if text != self._warning:
            self._warning = text
            logger.warning("%s", text)
