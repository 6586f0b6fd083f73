"""The capture process: one per slot, from PostgreSQL to the spool.

One thread, one loop: the replication socket, an ordinary connection that notices a shutdown of the server, the control
socket of the queries, and the life of the driver. It starts with its specification on standard input (so that no secret is
among the process arguments), answers one line on standard output, and ends when the driver does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

from psycopg import Connection, Error

from pgcdc.capture.server import ControlServer, remove_socket
from pgcdc.capture.spec import CaptureSpec
from pgcdc.core.counters import CHANGES_CAPTURED, CONNECTIONS_LOST, counters
from pgcdc.core.errors import ConnectionLost, GapError, PgcdcError, SourceError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir, is_alive, write_json
from pgcdc.postgres.database import connect
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.options import PostgresOptions, WireOptions
from pgcdc.source.postgres.setup.clock import Clock
from pgcdc.source.postgres.setup.guard import Guard, connection_ended
from pgcdc.source.postgres.setup.shapes import ShapeObserver
from pgcdc.source.postgres.snapshot.incremental import IncrementalSnapshots
from pgcdc.source.postgres.snapshot.initial import InitialSnapshot
from pgcdc.source.postgres.snapshot.planning import note_tables
from pgcdc.source.postgres.snapshot.releases import Release, Releases
from pgcdc.source.postgres.snapshot.signals import Signals
from pgcdc.source.postgres.snapshot.window import leave_out
from pgcdc.source.postgres.toast.resolver import ToastStep
from pgcdc.source.postgres.wire.replication import SlotBusy
from pgcdc.source.postgres.wire.stream import STATUS_INTERVAL_S, Capture, reconnect_delay_s
from pgcdc.spool.batch import CaptureBatch, split_batch
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.writer import SpoolWriter

__all__ = ["main"]

logger = logging.getLogger("pgcdc.capture")

CONFIRM_INTERVAL_S = 1.0
CHECK_INTERVAL_S = 10.0
TARGET_POLL_S = 0.05
ROUNDS_PER_TURN = 16
LINGER_S = 60.0
"""How long a capture goes on after its last query has ended: long enough to start the next one."""


class CaptureProcess:
    """The loop. `run` returns when asked to stop, or raises what made it stop."""

    def __init__(self, spec: CaptureSpec, state: StateDir) -> None:
        self._spec = spec
        options = self._options = PostgresOptions.model_validate(spec.source)
        self._state = state
        identity = state.identity()
        if identity is None:
            raise GapError("the state directory has no identity", "Start pgcdc again: it prepares slot and directory")
        self._identity = identity
        state.capture_status.unlink(
            missing_ok=True
        )  # of the process before: it would not be true if this one is killed
        self._consumers = Consumers(state.consumers_file)
        self._selector = selectors.DefaultSelector()
        self._spool = SpoolWriter(state.spool, self._consumers.base)
        self._releases = Releases(state.snapshot, self._consumers.base)
        self._to_replay = deque(self._releases.after(self._spool.end))
        self._snapshots = IncrementalSnapshots(
            options.db, spec.publications, state, self._releases, f"pgcdc {identity.instance} chunks",
            chunk_size=options.snapshot_chunk_size, chunk_delay_s=options.snapshot_chunk_delay,
        )  # fmt: skip
        self._signals = Signals(self._snapshots.queue, options.signal_table)
        self._selector.register(self._snapshots.reader.fileno(), selectors.EVENT_READ, None)
        self._initial = InitialSnapshot(
            options, spec.publications, state, self._releases.after(Position.at(0, 0)), self._snapshots.queue
        )
        self._selector.register(self._initial.readers.fileno(), selectors.EVENT_READ, None)
        self._skip_rules = self._initial.rules
        self._shapes = ShapeObserver(state.shapes_file, self._spool.state)
        self._unspooled: CaptureBatch | None = None
        """Read, but the connection was lost while the catalog was asked about its shapes."""
        self._toast = ToastStep(options, spec.publications, state, resume=self._spool.state, instance=identity.instance)
        self._server = ControlServer(self._selector, self._answer)
        self._guard = Guard(state, identity, self._consumers, temporary=options.temporary_slot)
        self._capture = Capture(
            options.db,
            slot=options.slot_name,
            publications=spec.publications,
            start_lsn=self._spool.resume_lsn,
            confirmed_lsn=self._consumers.confirmed_lsn,
            relations=self._spool.relations,
            spill_dir=state.spool,
            application_name=f"pgcdc {identity.instance}",
            temporary=options.temporary_slot,
            options=options,
            on_notice=lambda text: logger.warning("the server says: %s", text),
            check=self._guard.check_server,
        )
        self._released = self._consumers.base
        self._clock = Clock()
        self._sql: Connection | None = None
        self._stream_registered = False
        self._stopping = False
        self._failed_attempts = 0
        self._busy_since: float | None = None
        self._reconnect_at = 0.0
        self._lost_at: float | None = None
        """When the connection ended; None before the first one, and while there is one."""
        self._phase = "starting"
        self._last_error: dict[str, str] | None = None
        self._target_lsn = 0
        self._rows = 0
        self._last_commit_us = 0

    @property
    def address(self) -> str:
        """The control socket."""
        return self._server.address

    def stop(self, *_: int | FrameType | None) -> None:
        """End the loop at the next turn (a signal handler)."""
        self._stopping = True

    def run(self, announce: Any) -> None:
        """Connect, say that we are there, and work until told to stop."""
        if not self._spec.is_restart:
            self._connect_first()
        announce()
        confirm_due = check_due = target_due = 0.0
        alone_since = time.monotonic()
        while not self._should_end():
            now = time.monotonic()
            if self._server.has_clients:
                alone_since = now
            elif now - alone_since > LINGER_S:
                logger.info("nobody has been connected for %.0f s: ending", LINGER_S)
                break
            try:
                if self._capture.is_connected:
                    if self._waiting_for_target() and now >= target_due:
                        self._capture.ask_for_progress()
                        target_due = now + TARGET_POLL_S
                elif now >= self._reconnect_at and not self._is_waiting_for_rows:
                    self._connect()
                if now >= check_due and (self._capture.is_connected or self._is_waiting_for_rows):
                    self._check_slot()
                    check_due = now + CHECK_INTERVAL_S
                busy = self._publish_rows() or self._read_stream()
                self._work_on_snapshots()
                if now >= confirm_due or self._server.confirm_requested:
                    self._confirm()
                    confirm_due = now + CONFIRM_INTERVAL_S
                    self._server.push({"status": self._status()})
                status_due_s = self._capture.keep_alive()
            except ConnectionLost as error:
                self._lose(error)
                busy, status_due_s = False, 1.0
            rest_s = TARGET_POLL_S if self._waiting_for_target() or self._initial.is_active else 0.5
            self._wait(0.0 if busy else min(status_due_s, rest_s, max(self._snapshots.due_s(), 0.01)))
        self._phase = "stopped"
        self._confirm()

    def close(self, error: PgcdcError | None = None) -> None:
        """Close everything; leave the last status, with the reason, where others find it."""
        if error is not None:
            self._phase, self._last_error = "failed", error.to_json()
        status = self._status()
        self._server.push({"status": status})
        with contextlib.suppress(StateError):  # the disk may be full: that must not hide the reason
            write_json(self._state.capture_status, status)
        self._server.close(error)
        self._snapshots.close()
        self._initial.close()
        self._capture.close()
        if self._sql is not None:
            self._sql.close()
        self._toast.close()
        self._spool.close()
        self._selector.close()

    # --- the stream

    def _connect_first(self) -> None:
        """The first connection: what fails now is told at once, but our own dying walsender is waited for."""
        while not self._should_end():
            try:
                self._connect()
            except ConnectionLost as error:
                raise SourceError(error.message, error.advice) from error
            if self._capture.is_connected or self._is_waiting_for_rows:
                return
            self._wait(0.1)

    def _should_end(self) -> bool:
        if not self._stopping and not is_alive(self._spec.watch_pid):
            logger.info("the driver is gone: ending")
            self._stopping = True
        return self._stopping

    def _connect(self) -> None:
        if self._sql is None or self._sql.closed:
            self._sql = connect(self._options.db, application_name=f"pgcdc {self._identity.instance}")
            self._selector.register(self._sql.fileno(), selectors.EVENT_READ, self._watch_sql)
        if not self._options.temporary_slot:
            self._check_slot()
        self._toast.look(self._sql)
        if self._initial.holds_stream:
            self._failed_attempts, self._phase, self._last_error = 0, "initial snapshot", None
            return
        try:
            self._capture.connect()
        except SlotBusy as error:
            self._wait_for_slot(error)
            return
        if self._options.temporary_slot and self._consumers.confirmed_lsn == 0:
            self._consumers.begin(self._capture.confirmed_lsn)
        logger.info("reading slot %s after %s", self._options.slot_name, format_lsn(self._capture.last_lsn))
        self._failed_attempts, self._busy_since, self._lost_at = 0, None, None
        self._phase, self._last_error = "streaming", None

    def _wait_for_slot(self, error: SlotBusy) -> None:
        """A slot that is still held by our own walsender (we crashed) is free at the latest after wal_sender_timeout."""
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        assert self._sql is not None
        ours = self._guard.is_held_by_us(self._sql)
        if not ours or now - self._busy_since > self._guard.wal_sender_timeout_s + 5:
            raise error
        self._phase = "waiting for the slot"
        self._reconnect_at = now + 0.2

    def _lose(self, error: ConnectionLost) -> None:
        """Close at once (an unflushed client blocks a fast shutdown) and plan the next attempt."""
        if self._stream_registered:
            self._unregister_stream()
        if self._capture.is_connected:
            self._lost_at = time.time()
        self._snapshots.lose()
        self._capture.disconnect()
        self._drop_sql()
        if self._spec.fail_fast or self._options.temporary_slot:
            raise error
        delay_s = reconnect_delay_s(self._failed_attempts)
        if not self._failed_attempts:
            counters.add(CONNECTIONS_LOST)
            self._server.push({"say": [f"{error.message}; connecting again"]})
        self._failed_attempts += 1
        self._reconnect_at = time.monotonic() + delay_s
        self._phase, self._last_error = "reconnecting", error.to_json()
        logger.warning("%s; next attempt in %.1f s", error, delay_s)

    def _drop_sql(self) -> None:
        if self._sql is not None:
            if not self._sql.closed:
                self._selector.unregister(self._sql.fileno())
                self._sql.close()
            else:
                self._forget_closed()
            self._sql = None

    def _forget_closed(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data == self._watch_sql:
                self._selector.unregister(key.fileobj)

    def _watch_sql(self, _: selectors.SelectorKey) -> None:
        """The ordinary connection spoke without being asked: the server is shutting down, or it is gone."""
        assert self._sql is not None
        try:
            self._sql.pgconn.consume_input()
        except Error as error:
            raise connection_ended(error) from error

    def _read_stream(self) -> bool:
        """Move what is here into the spool; True if there may be more at once. At the spool's limit nothing is read."""
        paused = self._is_full()
        if not self._capture.is_connected or paused:
            if self._stream_registered:
                self._unregister_stream()
            if paused and self._phase == "streaming":
                self._phase = "paused: the spool is full"
            return False
        if not self._stream_registered:
            self._selector.register(self._capture.fileno(), selectors.EVENT_READ, None)
            self._registered_fd = self._capture.fileno()
            self._stream_registered = True
            if self._phase.startswith("paused"):
                self._phase = "streaming"
        for _ in range(ROUNDS_PER_TURN):
            hit("capture.before_poll")
            batch = self._unspooled or self._capture.poll(drain=self._server.has_waiters)
            if batch is None:
                return not self._capture.is_drained
            self._unspooled = batch
            self._take(batch)
            self._unspooled = None
            if self._is_full():
                break
        return True

    def _take(self, batch: CaptureBatch) -> None:
        """One batch of the stream, with what was released between its transactions. ConnectionLost: it may come again."""
        if self._skip_rules:
            batch = self._unspooled = leave_out(batch, self._skip_rules)
        while self._to_replay and self._to_replay[0].commit < batch.end.commit:
            release = self._to_replay[0]
            before, batch = split_batch(batch, release.commit)
            if before is not None:
                self._append(before)
            self._publish(release)
            self._to_replay.popleft()
            self._unspooled = batch
        self._append(batch)

    @property
    def _is_waiting_for_rows(self) -> bool:
        """Whether the initial snapshot comes first, and is under way."""
        return self._initial.holds_stream and self._sql is not None

    def _publish_rows(self) -> bool:
        """Rows of the initial snapshot, which come before the stream; True if there may be more at once."""
        self._publish_due()
        if not self._initial.is_active or not self._is_waiting_for_rows:
            return False
        if self._to_replay or self._is_full():
            self._initial.look()
            return False
        more = self._initial.step(self._release, lambda: self._spool.end)
        self._skip_rules = self._initial.rules
        return more

    def _work_on_snapshots(self) -> None:
        """Make visible what was released, and go on with tables that are read beside the stream."""
        self._publish_due()
        is_ready = self._capture.is_connected and self._unspooled is None and not self._to_replay
        release = self._snapshots.step(self._spool.end, may_work=is_ready and not self._is_full())
        if release is not None:
            self._to_replay.append(release)
            self._publish_due()
        # What somebody waits for, or was put behind an idle position: do not wait for the next report of progress.
        replayed = self._to_replay[-1].commit if self._to_replay else 0
        wanted = max(self._snapshots.target_lsn, self._server.needed.commit, replayed)
        self._target_lsn = self._capture.target_lsn = max(self._target_lsn, wanted)

    def _publish_due(self) -> None:
        """What was released behind the very end of the spool needs no batch of the stream to come first."""
        while self._to_replay and self._sql is not None and self._to_replay[0].follows(self._spool.end):
            self._publish(self._to_replay[0])
            self._to_replay.popleft()

    def _release(self, file: Path, **what: Any) -> None:
        """Put rows behind everything that is here: durable when this returns, visible at the next turn."""
        self._to_replay.append(self._releases.add(self._spool.end, file, **what))

    def _publish(self, release: Release) -> None:
        """Make rows of a snapshot visible in their place."""
        for batch in self._releases.batches(release, self._spool.relations):
            self._append(batch)

    def _append(self, batch: CaptureBatch) -> None:
        assert self._sql is not None
        self._shapes.observe(batch, self._sql)
        for piece in self._toast.resolve(batch, self._sql):
            if not piece.end.is_snapshot:
                self._signals.see(piece)
                self._snapshots.see(piece)
            self._spool.append(piece)
        self._rows += batch.rows
        counters.add(CHANGES_CAPTURED, batch.rows)
        if batch.rows:
            self._last_commit_us = batch.transactions.column("commit_time")[-1].as_py()
        self._server.wake()

    def _is_full(self) -> bool:
        """At the limit; but a batch that was planned before a restart is read to its end: nothing is released without it."""
        end = self._spool.end
        return self._spool.bytes_held >= self._spec.spool_limit and end.is_end and end >= self._server.needed

    def _unregister_stream(self) -> None:
        self._selector.unregister(self._registered_fd)
        self._stream_registered = False

    def _wait(self, timeout_s: float) -> None:
        """Serve who speaks, and who has waited long enough; `timeout_s` is for everything else that is due."""
        for key, _ in self._selector.select(min(timeout_s, self._server.due_s())):
            if key.data is not None:
                try:
                    key.data(key)
                except ConnectionLost as error:
                    self._lose(error)
        self._server.expire()

    def _waiting_for_target(self) -> bool:
        return self._target_lsn > self._capture.handed_out_lsn

    # --- confirmation

    def _confirm(self) -> None:
        """Confirm what every consumer has made durable, and let go of its segments."""
        self._toast.make_durable()
        # An ack may be ahead of a spool that is read again from the slot: the rest follows when it has come.
        lsn = min(self._consumers.confirmable(), self._capture.handed_out_lsn)
        if lsn > self._capture.confirmed_lsn:
            hit("capture.before_confirm")
            self._capture.send_feedback(lsn)
            hit("capture.after_confirm")
            self._toast.release(lsn)
        base = min(self._consumers.base, Position.behind(lsn))
        if base > self._released:
            self._spool.release(base)
            self._releases.forget(base)
            self._released = base
        self._server.confirmed(self._confirmed_lsn())

    def _confirmed_lsn(self) -> int:
        """What the server was told. Less than what is acknowledged while a prepared transaction is undecided."""
        acked, told = self._consumers.confirmed_lsn, self._capture.confirmed_lsn
        return min(acked, told) if self._capture.is_connected and told else acked

    def _check_slot(self) -> None:
        """Stop if slot or publication are not as we left them."""
        assert self._sql is not None
        self._guard.check(self._sql)
        note_tables(
            self._snapshots.queue, self._sql, self._spec.publications, is_wanted=self._options.reads_added_tables
        )
        self._capture.status_interval_s = min(STATUS_INTERVAL_S, self._guard.wal_sender_timeout_s / 4)

    # --- the queries

    def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Answer one request; None if the answer comes later (the server keeps the waiters)."""
        what = request["do"]
        if what == "join":
            name = request["consumer"]
            known = name in self._consumers
            if "at" in request:
                consumer = self._consumers.join_at(name, Position.parse(request["at"]))
            else:
                consumer = self._consumers.join(name, self._consumers.base)
            return {"initial": str(consumer.initial), "ack": str(consumer.ack), "is_new": not known}
        if what == "ack":
            self._consumers.ack(request["consumer"], Position.parse(request["position"]))
            return {"end": str(self._spool.end)}
        if what == "forget":
            if request["consumer"] in self._consumers or not request.get("missing_ok"):
                self._consumers.forget(request["consumer"])
            return {}
        if what == "target":
            return {"lsn": self._set_target()}
        if what == "clock":
            return self._read_clock()
        if what == "settled":
            return {"end": self._settled(), "initial_end": self._initial.end, "only": self._options.is_snapshot_only}
        if what == "snapshot":
            return self._snapshots.answer(request, self._sql)
        if what == "status":
            return self._status()
        if what == "stop":
            self._stopping = True
            return {}
        raise ValueError(what)

    def _set_target(self) -> int:
        """The WAL flush position of now: what a run that delivers "everything up to now" has to reach."""
        if self._sql is None:
            raise ConnectionLost("the server is not connected")
        try:
            row = self._sql.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        except Error as error:
            lost = connection_ended(error)
            self._lose(lost)
            raise lost from error
        assert row is not None
        self._target_lsn = self._capture.target_lsn = max(self._target_lsn, int(row[0]))
        return self._target_lsn

    def _settled(self) -> str | None:
        """Where the spool ends, if nothing that was asked of snapshots is still to come."""
        is_open = self._initial.is_active or self._to_replay or self._unspooled or self._snapshots.is_pending
        return None if is_open or not self._spool.end.is_end else str(self._spool.end)

    def _read_clock(self) -> dict[str, Any]:
        """The last reading that is reached; the next one is on its way."""
        self._clock.see(self._capture.handed_out_lsn)
        if self._sql is not None:
            try:
                asked = self._clock.ask(self._sql)
            except Error as error:
                self._lose(connection_ended(error))
                asked = None
            if asked is not None:
                self._target_lsn = self._capture.target_lsn = max(self._target_lsn, asked)
        lsn, time_us = self._clock.reached or (0, 0)
        return {"lsn": lsn, "time_us": time_us}

    def _status(self) -> dict[str, Any]:
        server_lsn = max(self._guard.server_lsn, self._capture.wal_end)
        return {
            "lag_seconds": self._lag_seconds(),
            "pid": os.getpid(),
            "time": time.time(),
            "phase": self._phase,
            "slot": self._options.slot_name,
            "wire": self._options.part(WireOptions).model_dump(),
            "received_lsn": format_lsn(self._capture.last_lsn),
            "confirmed_lsn": format_lsn(self._confirmed_lsn()),
            "server_lsn": format_lsn(server_lsn),
            "lag_bytes": max(0, server_lsn - self._confirmed_lsn()),
            "spool_bytes": self._spool.bytes_held,
            "rows": self._rows,
            "counters": counters.to_json(),
            "schema_changes": self._shapes.changes,
            **self._toast.status(),
            "snapshots": self._snapshots.status(),
            "settled": self._settled(),
            "bad_signals": self._snapshots.queue.bad_signals,
            "last_commit_time": self._last_commit_us / 1e6,
            "consumers": self._consumers.to_json()["consumers"],
            "initial_snapshot": self._initial.status(server_lsn),
            "last_error": self._last_error,
        }

    def _lag_seconds(self) -> float | None:
        """Age of the oldest change that is not confirmed. Without a connection it may have been written at its end."""
        if oldest_us := self._spool.oldest_commit_us:
            return max(0.0, time.time() - oldest_us / 1e6)
        if self._capture.is_connected:
            return 0.0
        return None if self._lost_at is None else max(0.0, time.time() - self._lost_at)


def main() -> int:
    """Run one capture process; the exit code is the error's."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    spec = CaptureSpec.from_json(sys.stdin.read())
    state = StateDir(Path(spec.state_dir))
    lock = Lock(state.capture_lock)
    previous = lock.acquire()
    if previous is None:
        _say({"busy": True})
        return 0
    remove_socket(previous)
    process: CaptureProcess | None = None
    try:
        process = CaptureProcess(spec, state)
        signal.signal(signal.SIGTERM, process.stop)
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches the whole terminal; the driver tells us when to end
        lock.write({"pid": os.getpid(), "address": process.address})
        process.run(lambda: _say({"ready": True}))
        process.close()
    except PgcdcError as error:
        logger.error("%s", error)
        if process is not None:
            process.close(error)
        _say({"error": error.to_json()})
        return error.exit_code
    except Exception:
        logger.exception("this is a bug in pgcdc")
        if process is not None:
            process.close()  # whoever needs the capture starts it again, a few times
        return 1
    finally:
        lock.release()
    return 0


def _say(content: dict[str, Any]) -> None:
    """One line to whoever started us; they may have stopped listening."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
