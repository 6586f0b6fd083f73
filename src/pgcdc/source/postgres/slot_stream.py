"""The changes of a slot: from its replication stream and its tables to batches for the spool. One object without
threads: it uses the replication socket, an ordinary connection that notices a server shutdown, and the processes that
read snapshots. Output is in spool order: changes of the stream, with snapshot rows between them where they were
released."""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from pgcdc.core.errors import ConnectionLost, GapError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import StateDir
from pgcdc.postgres.database import connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.options import PostgresOptions, WireOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.guard import Clock, Guard, ShapeObserver, lost_on_error
from pgcdc.source.postgres.setup.watch import CatalogWatch
from pgcdc.source.postgres.snapshot.asking import Signals, note_tables
from pgcdc.source.postgres.snapshot.driver import Snapshots
from pgcdc.source.postgres.snapshot.marks import Marks
from pgcdc.source.postgres.snapshot.sentinels import Sentinels
from pgcdc.source.postgres.snapshot.window import leave_out
from pgcdc.source.postgres.toast.resolver import ToastStep
from pgcdc.source.postgres.wire.replication import SlotBusy
from pgcdc.source.postgres.wire.stream import STATUS_INTERVAL_S, Capture
from pgcdc.source.protocol import Settled
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.segment import CaptureBatch, split_batch
from pgcdc.spool.writer import SpoolWriter

logger = logging.getLogger("pgcdc.capture")

CHECK_INTERVAL_S = 10.0
TARGET_POLL_S = 0.05


class PostgresStream:
    """The changes of one slot; implements `source.protocol.ChangeStream`."""

    def __init__(self, options: PostgresOptions, state: StateDir, spool: SpoolWriter, consumers: Consumers) -> None:
        identity = state.identity()
        if identity is None:
            raise GapError(
                "the state directory has no identity", "Start pgcdc again: it prepares the slot and the directory"
            )
        self._options = options
        publications = self._publications = SlotDetails.of(identity).names
        self._consumers = consumers
        self._relations = spool.relations
        self._end = spool.end  # The end of the returned batches, the same as in the spool
        self._name = f"pgcdc {identity.instance}"
        self._selector = selectors.DefaultSelector()
        self._snapshots = Snapshots(options, publications, state, consumers.base, f"{self._name} chunks")
        self._releases, self._beside = self._snapshots.releases, self._snapshots.beside
        self._marks = Marks(self._releases)
        self._sentinels = Sentinels(self._marks)
        self._to_replay = deque(self._releases.after(spool.end))
        self._reloads = self._snapshots.reloads
        self._signals = Signals(self._snapshots.queue, options.signal_table)
        for readers in (self._snapshots.readers, self._reloads.readers):
            self._selector.register(readers.fileno(), selectors.EVENT_READ)
        self._shapes = ShapeObserver(state.shapes_file, spool.state, publications)
        self._watch = CatalogWatch(publications, self._shapes, self._marks)
        self._reloads.shape_of, self._reloads.is_taken = self._shapes.current.get, self._shapes.is_taken
        self._toast = ToastStep(options, publications, state, resume=spool.state, instance=identity.instance)
        self._guard = Guard(state, identity, consumers, temporary=options.temporary_slot)
        self._capture = Capture(
            options.db, slot=options.slot_name, publications=publications, start_lsn=spool.resume_lsn,
            confirmed_lsn=consumers.confirmed_lsn, relations=spool.relations, spill_dir=state.spool,
            application_name=self._name, temporary=options.temporary_slot, options=options,
            on_notice=lambda text: logger.warning("the server reports: %s", text), check=self._guard.check_server,
        )  # fmt: skip
        self._shapes.on_mark = self._capture.rename
        self._watch.leaves = self._capture.leaves
        self._clock = Clock()
        self._sql: Connection | None = None
        self._sql_fd = self._stream_fd = -1
        self._pieces: Iterator[CaptureBatch] | None = None  # The batches being returned
        self._unspooled: CaptureBatch | None = None
        """A batch that was read but not returned: the connection was lost while its shapes were looked up in the
        catalog."""
        self._busy_since: float | None = None
        self._target_lsn, self._check_due, self._target_due = 0, 0.0, 0.0
        self.phase = "starting"
        self.is_drained = True
        self.can_reconnect = not options.temporary_slot

    # --- the connection

    @property
    def is_connected(self) -> bool:
        return self._capture.is_connected or self._is_waiting_for_rows

    @property
    def _is_waiting_for_rows(self) -> bool:
        """Whether the initial snapshot comes first and is still running."""
        return self._snapshots.holds_stream and self._sql is not None

    def fileno(self) -> int:
        return self._selector.fileno()  # of epoll and kqueue

    def connect(self) -> float:
        if self._sql is None or self._sql.closed:
            self._sql = connect(self._options.db, application_name=self._name)
            self._sql_fd = self._sql.fileno()
            self._selector.register(self._sql_fd, selectors.EVENT_READ, self._watch_sql)
        if not self._options.temporary_slot:
            self._check_slot()
        self._toast.look(self._sql)
        if self._snapshots.holds_stream:
            self.phase = "initial snapshot"
            return 0.0
        try:
            self._capture.connect()
        except SlotBusy as error:
            return self._wait_for_slot(error)
        if self._options.temporary_slot and self._consumers.confirmed_lsn == 0:
            self._consumers.begin(self._capture.confirmed_lsn)
        logger.info("reading slot %s after %s", self._options.slot_name, format_lsn(self._capture.last_lsn))
        self._busy_since, self.phase = None, "streaming"
        return 0.0

    def _wait_for_slot(self, error: SlotBusy) -> float:
        """A slot still held by our own walsender (we crashed) becomes free after wal_sender_timeout at the latest."""
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        assert self._sql is not None
        ours = self._guard.is_held_by_us(self._sql)
        if not ours or now - self._busy_since > self._guard.wal_sender_timeout_s + 5:
            raise error
        self.phase = "waiting for the slot"
        return 0.2

    def lose(self) -> None:
        """Close immediately: an unflushed client blocks a fast shutdown of the server."""
        self._pieces = None
        self._unregister_stream()
        self._beside.lose()
        self._reloads.lose()
        self._capture.disconnect()
        if self._sql is not None:
            self._selector.unregister(self._sql_fd)
            self._sql.close()
            self._sql = None

    def close(self) -> None:
        self._snapshots.close()
        self._capture.close()
        if self._sql is not None:
            self._sql.close()
        self._toast.close()
        self._selector.close()

    def _watch_sql(self) -> None:
        """Unexpected input on the ordinary connection means that the server is shutting down or gone."""
        assert self._sql is not None
        with lost_on_error():
            self._sql.pgconn.consume_input()

    def _listen(self, may_read: bool) -> None:
        """Watch the sockets; the stream's only while it is being read."""
        if not self._capture.is_connected or not may_read:
            self._unregister_stream()
        elif self._stream_fd < 0:
            self._stream_fd = self._capture.fileno()
            self._selector.register(self._stream_fd, selectors.EVENT_READ)
        for key, _ in self._selector.select(0):
            if key.data is not None:
                key.data()

    def _unregister_stream(self) -> None:
        if self._stream_fd >= 0:
            self._selector.unregister(self._stream_fd)
            self._stream_fd = -1

    # --- changes, and snapshot rows between them

    @property
    def reached(self) -> int:
        return self._capture.handed_out_lsn

    def poll(self, *, may_read: bool, drain: bool) -> CaptureBatch | None:
        self._listen(may_read)
        while self._pieces is not None or self._begin(may_read, drain):
            assert self._pieces is not None
            try:
                piece = next(self._pieces, None)
            except BaseException:
                self._pieces = None
                raise
            if piece is None:
                self._pieces = None
                continue
            if not piece.end.is_snapshot:
                self._signals.see(piece)
                self._beside.see(piece)
                self._reloads.see(piece)
            self._end = max(self._end, piece.end)
            return piece
        return None

    def _begin(self, may_read: bool, drain: bool) -> bool:
        """Choose what comes next; False if nothing is available."""
        if self._to_replay and self._sql is not None and self._to_replay[0].follows(self._end):
            # A release directly after the spool's end needs no batch of the stream first.
            self._pieces = self._released()
            return True
        self.is_drained = True
        if not self._capture.is_connected or not may_read:
            return False
        hit("capture.before_poll")
        batch = self._unspooled or self._capture.poll(drain=drain)
        if batch is None:
            self.is_drained = self._capture.is_drained
            return False
        self.is_drained = False
        if self._snapshots.rules:
            batch = leave_out(batch, self._snapshots.rules)
        self._unspooled = batch
        if self._to_replay and self._to_replay[0].commit < batch.end.commit:
            self._pieces = self._split(batch)
        else:
            self._pieces = self._whole(batch)
        return True

    def _split(self, batch: CaptureBatch) -> Iterator[CaptureBatch]:
        """The part of a batch before the next release, then the release. The rest follows later."""
        before, rest = split_batch(batch, self._to_replay[0].commit)
        if before is not None:
            yield from self._finish(before)
        yield from self._released()
        self._unspooled = rest

    def _whole(self, batch: CaptureBatch) -> Iterator[CaptureBatch]:
        yield from self._finish(batch)
        self._unspooled = None

    def _released(self) -> Iterator[CaptureBatch]:
        release = self._to_replay[0]
        for batch in self._releases.batches(release, self._relations):
            yield from self._finish(batch, is_addressed=bool(release.adapters))
        self._to_replay.popleft()
        self._reloads.released(release)

    def _finish(self, batch: CaptureBatch, *, is_addressed: bool = False) -> Iterator[CaptureBatch]:
        """The batch for the spool. On ConnectionLost it may be passed again. Rows for some adapters only are not part
        of the stream's state: they have their long values, and a cache must not see older ones."""
        assert self._sql is not None
        self._shapes.observe(batch, self._sql)
        if is_addressed:
            yield batch
        else:
            yield from self._toast.resolve(batch, self._sql)

    # --- work besides the changes

    def tend(self, needed: int, *, may_work: bool) -> float:
        now = time.monotonic()
        if self._capture.is_connected and self._is_behind_target and now >= self._target_due:
            self._capture.ask_for_progress()
            self._target_due = now + TARGET_POLL_S
        if now >= self._check_due and self.is_connected:
            self._check_slot()
            self._check_due = now + CHECK_INTERVAL_S
        if self._sql is not None and self._capture.is_connected and not self._snapshots.is_first:
            self._watch.look(self._sql)
        is_idle = self._pieces is None and self._unspooled is None and not self._to_replay
        can_work = self._capture.is_connected or (self._snapshots.is_first and self._sql is not None)
        is_due = can_work and is_idle and may_work
        release = self._snapshots.step(self._end, may_work=is_due)
        if release is None and not self._snapshots.is_first:
            release = self._marks.step(self._end, may_work=is_due)
        if release is not None:
            self._to_replay.append(release)
            self.is_drained = False
        # Somebody is waiting for it, or it was placed after an idle position: do not wait for the next progress report.
        replayed = self._to_replay[-1].commit if self._to_replay else 0
        self._aim_at(max(self._beside.target_lsn, self._reloads.target_lsn, self._marks.target_lsn, needed, replayed))
        rest_s = TARGET_POLL_S if self._is_behind_target or self._snapshots.is_first else 0.5
        due_s = min(self._beside.due_s(), self._reloads.due_s())
        return min(self._capture.keep_alive(), rest_s, max(due_s, 0.01))

    def _check_slot(self) -> None:
        assert self._sql is not None
        self._guard.check(self._sql)
        reads_added = self._options.effective_snapshot_mode in ("initial", "always")
        note_tables(self._snapshots.queue, self._sql, self._publications, is_wanted=reads_added)
        self._capture.status_interval_s = min(STATUS_INTERVAL_S, self._guard.wal_sender_timeout_s / 4)

    @property
    def _is_behind_target(self) -> bool:
        return self._target_lsn > self._capture.handed_out_lsn

    def _aim_at(self, lsn: int) -> None:
        """Report progress up to here without waiting for the interval."""
        self._target_lsn = self._capture.target_lsn = max(self._target_lsn, lsn)

    def target(self) -> int:
        """The current WAL flush position."""
        if self._sql is None:
            raise ConnectionLost("there is no connection to the server")
        with lost_on_error():
            row = self._sql.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        self._aim_at(int(row[0]))
        return self._target_lsn

    def clock(self) -> tuple[int, int]:
        """The last reading that was reached. Also requests the next one."""
        self._clock.see(self._capture.handed_out_lsn)
        if self._sql is not None:
            with lost_on_error():
                asked = self._clock.ask(self._sql)
            if asked is not None:
                self._aim_at(asked)
        return self._clock.reached or (0, 0)

    # --- confirmation

    @property
    def confirmed(self) -> int:
        """Less than the acknowledged position while the outcome of a prepared transaction is open."""
        acked, told = self._consumers.confirmed_lsn, self._capture.confirmed_lsn
        return min(acked, told) if self._capture.is_connected and told else acked

    def confirm(self, token: Token) -> None:
        self._toast.make_durable()
        if token.commit > self._capture.confirmed_lsn:
            hit("capture.before_confirm")
            self._capture.send_feedback(token.commit)
            hit("capture.after_confirm")
            self._toast.release(token.commit)

    def release(self, base: Position) -> None:
        self._releases.forget(base)

    # --- for the queries

    def settled(self, end: Position | None) -> Settled:
        is_open = self._snapshots.is_first or self._to_replay or self._pieces or self._unspooled
        is_pending = is_open or self._beside.is_pending
        return Settled(None if is_pending else end, self._snapshots.initial_end, self._options.is_snapshot_only)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "sentinel":
            if self._sql is not None and not self._sentinels.has(request["id"]):
                self._watch.look(self._sql, at_once=True)  # earlier DDL then precedes it
            position = self._sentinels.ask(request["id"], self._sql)
            return {"position": position and str(position)}
        return self._snapshots.answer(request, self._sql)

    def status(self, confirmed: int) -> dict[str, Any]:
        server_lsn = max(self._guard.server_lsn, self._capture.wal_end)
        return {
            "slot": self._options.slot_name,
            "wire": self._options.part(WireOptions).model_dump(),
            "received_lsn": format_lsn(self._capture.last_lsn),
            "confirmed_lsn": format_lsn(confirmed),
            "server_lsn": format_lsn(server_lsn),
            "lag_bytes": max(0, server_lsn - confirmed),
            "schema_changes": self._shapes.changes,
            **self._toast.status(),
            "snapshots": self._beside.status(),
            "bad_signals": self._snapshots.queue.bad_signals,
            "initial_snapshot": self._snapshots.status(server_lsn),
        }
