"""The capture process: one source, one spool, and one thread whose loop also serves the control socket.

It reads its specification from stdin, which keeps secrets out of the process arguments, answers with one line on
stdout, and ends when the driver does.
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
from types import FrameType
from typing import Any

from pgcdc.capture.control import CaptureSpec
from pgcdc.capture.server import ControlServer, remove_socket
from pgcdc.core.counters import CHANGES_CAPTURED, CONNECTIONS_LOST, counters
from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError, StateError, reconnect_delay_s
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir, is_alive, write_json
from pgcdc.source.protocol import ChangeStream, Settled, make_source
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.writer import SpoolWriter

logger = logging.getLogger("pgcdc.capture")

CONFIRM_INTERVAL_S = 1.0
ROUNDS_PER_TURN = 16
WAITING = "waiting for the slot"  # A phase of a stream that is not connected
LINGER_S = 60.0  # How long a capture keeps running after its last query: long enough to start the next one


class CaptureProcess:
    """The loop. `run` returns when asked to stop, or raises the error that stopped it."""

    def __init__(self, spec: CaptureSpec, state: StateDir) -> None:
        self._spec = spec
        self._state = state
        # If this process is killed, nobody must read the previous process's status.
        state.capture_status.unlink(missing_ok=True)
        self._consumers = Consumers(state.consumers_file)
        self._spool = SpoolWriter(state.spool, self._consumers.base, self._consumers.token)
        source = make_source(spec.source, spec.kind)
        token = self._spool.token_at(self._spool.resume_lsn)
        self._stream: ChangeStream = source.open(token, state, self._spool, self._consumers)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stream.fileno(), selectors.EVENT_READ, None)
        self._server = ControlServer(self._selector, self._answer)
        self._released = self._consumers.base
        self._stopping = False
        self._failed_attempts = 0
        self._reconnect_at = 0.0
        self._lost_at: float | None = None  # When the connection ended; None before the first one and while connected
        self._phase = self._shown_phase = "starting"
        self._since = time.time()  # Of the shown phase
        self._is_announced = False
        self._last_error: dict[str, str] | None = None

    @property
    def address(self) -> str:
        """The control socket."""
        return self._server.address

    def stop(self, *_: int | FrameType | None) -> None:
        """Stop the loop at its next iteration (a signal handler)."""
        self._stopping = True

    def run(self, announce: Any) -> None:
        """Connect, announce the address, and work until asked to stop."""
        if not self._spec.is_restart:
            self._connect_first()
        announce()
        self._is_announced = True
        confirm_due = 0.0
        alone_since = time.monotonic()
        while not self._should_end():
            now = time.monotonic()
            if self._server.has_clients:
                alone_since = now
            elif now - alone_since > LINGER_S:
                logger.info("no query was connected for %.0f s: the capture ends", LINGER_S)
                break
            try:
                if not self._stream.is_connected and now >= self._reconnect_at:
                    self._connect()
                busy = self._read_stream()
                due_s = self._stream.tend(self._server.needed.commit, may_work=not self._is_full())
                if now >= confirm_due or self._server.confirm_requested:
                    self._confirm()
                    confirm_due = now + CONFIRM_INTERVAL_S
                    self._server.push({"status": self._status()})
            except ConnectionLost as error:
                self._lose(error)
                busy, due_s = False, 0.5
            self._wait(0.0 if busy or not self._stream.is_drained else due_s)
        self._phase = "stopped"
        self._confirm()

    def close(self, error: PgcdcError | None = None) -> None:
        """Close everything, and leave a last status with the reason for others to read."""
        if error is not None:
            self._phase, self._last_error = "failed", error.to_json()
        status = self._status()
        self._server.push({"status": status})
        with contextlib.suppress(StateError):  # the disk may be full, and that must not hide the reason
            write_json(self._state.capture_status, status)
        self._server.close(error)
        self._stream.close()
        self._spool.close()
        self._selector.close()

    # --- the stream

    def _connect_first(self) -> None:
        """The first connection: errors are raised immediately, except while a previous connection of ours is still
        closing."""
        while not self._should_end():
            try:
                self._connect()
            except ConnectionLost as error:
                raise SourceError(error.message, error.advice) from error
            if self._stream.is_connected:
                return
            self._wait(0.1)

    def _should_end(self) -> bool:
        if not self._stopping and not is_alive(self._spec.watch_pid):
            logger.info("the driver has ended: the capture ends too")
            self._stopping = True
        return self._stopping

    def _connect(self) -> None:
        before = self._phase
        self._reconnect_at = time.monotonic() + self._stream.connect()
        self._phase = self._stream.phase
        if self._phase == WAITING and before != WAITING:
            self._tell(
                f"{WAITING}: an earlier connection of ours still holds it, until the server notices that it is gone"
            )
        if self._stream.is_connected:
            if self._lost_at is not None:
                self._tell(f"connected to the server again after {time.time() - self._lost_at:.0f} s")
            elif before == WAITING:
                self._tell("the slot is free")
            self._failed_attempts, self._lost_at, self._last_error = 0, None, None

    def _lose(self, error: ConnectionLost) -> None:
        """Close the connection and schedule the next attempt."""
        if self._stream.is_connected:
            self._lost_at = time.time()
        self._stream.lose()
        if self._spec.fail_fast or not self._stream.can_reconnect:
            raise error
        delay_s = reconnect_delay_s(self._failed_attempts)
        if not self._failed_attempts:
            counters.add(CONNECTIONS_LOST)
            self._tell(f"{error.message}; reconnecting")
        self._failed_attempts += 1
        self._reconnect_at = time.monotonic() + delay_s
        self._phase, self._last_error = "reconnecting", error.to_json()
        logger.warning("%s; next attempt in %.1f s", error, delay_s)

    def _tell(self, text: str) -> None:
        """Say something to people: to whoever started us until we are announced, then to followers."""
        if self._is_announced:
            self._server.push({"say": [text]})
        else:
            _say({"say": text}, is_last=False)

    def _read_stream(self) -> bool:
        """Move available changes into the spool; True if there may be more. Reads nothing while the spool is full."""
        for _ in range(ROUNDS_PER_TURN):
            batch = self._stream.poll(may_read=not self._is_full(), drain=self._server.has_waiters)
            if batch is None:
                return not self._stream.is_drained
            self._spool.append(batch)
            counters.add(CHANGES_CAPTURED, batch.rows)
            self._server.wake()
        return True

    def _is_full(self) -> bool:
        """Whether the spool is at its limit. A batch that was planned before a restart is still read to its end:
        nothing can be released before it completes."""
        end = self._spool.end
        return self._spool.bytes_held >= self._spec.spool_limit and end.is_end and end >= self._server.needed

    def _wait(self, timeout_s: float) -> None:
        """Answer clients with a request or an expired wait. `timeout_s` is the time until other work is due."""
        for key, _ in self._selector.select(min(timeout_s, self._server.due_s())):
            if key.data is not None:
                key.data(key)
        self._server.expire()

    # --- confirmation

    def _confirm(self) -> None:
        """Confirm to the source what every consumer has made durable, and release those segments."""
        # While the spool is being read again, an ack may be ahead of it; the rest is confirmed later.
        commit = min(self._consumers.confirmable(self._spool.token_at), self._stream.reached)
        # A source that resumes by token keeps everything after the last durable token.
        self._stream.confirm(self._consumers.token if self._spool.has_tokens else Token(commit, b""))
        base = min(self._consumers.base, Position.behind(commit))
        if base > self._released:
            self._spool.release(base)
            self._stream.release(base)
            self._released = base
        self._server.confirmed(self._stream.confirmed)

    # --- the queries

    def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Answer one request; None if the answer comes later (the server keeps track of waiters)."""
        match request["do"]:
            case "join":
                start = Position.parse(request["at"]) if "at" in request else None
                consumer = self._consumers.join(request["consumer"], start)
                return {"initial": str(consumer.initial), "ack": str(consumer.ack)}
            case "ack":
                self._consumers.ack(request["consumer"], Position.parse(request["position"]))
            case "forget":
                if request["consumer"] in self._consumers or not request.get("missing_ok"):
                    self._consumers.forget(request["consumer"])
            case "target":
                return {"lsn": self._ask_target()}
            case "clock":
                return self._read_clock()
            case "settled":
                end, initial_end, only = self._settled()
                return {"end": end and str(end), "initial_end": initial_end and str(initial_end), "only": only}
            case "snapshot" | "sentinel":
                return self._stream.answer(request)
            case "status":
                return self._status()
            case "stop":
                self._stopping = True
            case other:
                raise ValueError(other)
        return {}

    def _ask_target(self) -> int:
        """Where a run that delivers "everything up to now" ends."""
        was_connected = self._stream.is_connected
        try:
            return self._stream.target()
        except ConnectionLost as error:
            if was_connected:
                self._lose(error)
            raise

    def _settled(self) -> Settled:
        return self._stream.settled(self._spool.end if self._spool.end.is_end else None)

    def _read_clock(self) -> dict[str, Any]:
        """The last clock reading that the stream has reached."""
        commit = time_us = 0
        try:
            commit, time_us = self._stream.clock()
        except ConnectionLost as error:
            self._lose(error)
        return {"lsn": commit, "time_us": time_us}

    def _status(self) -> dict[str, Any]:
        phase = "paused: the spool is full" if self._phase == "streaming" and self._is_full() else self._phase
        if phase != self._shown_phase:
            self._shown_phase, self._since = phase, time.time()
        return {
            **self._stream.status(self._stream.confirmed),
            "lag_seconds": self._lag_seconds(),
            "pid": os.getpid(),
            "time": time.time(),
            "phase": phase,
            "phase_since": self._since,
            "source": self._spec.kind,
            "spool_bytes": self._spool.bytes_held,
            "rows": counters.get(CHANGES_CAPTURED),
            "counters": counters.to_json(),
            "settled": (end := self._settled().end) and str(end),
            "consumers": self._consumers.to_json()["consumers"],
            "last_error": self._last_error,
        }

    def _lag_seconds(self) -> float | None:
        """Age of the oldest unconfirmed change. While disconnected, assumes one was written when the connection
        ended."""
        if oldest_us := self._spool.oldest_commit_us:
            return max(0.0, time.time() - oldest_us / 1e6)
        if self._stream.is_connected:
            return 0.0
        return None if self._lost_at is None else max(0.0, time.time() - self._lost_at)


def main() -> int:
    """Run one capture process; the exit code is the error's."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    spec = CaptureSpec.model_validate_json(sys.stdin.read())
    state = StateDir(spec.state_dir)
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the driver decides when to end
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
            process.close()  # clients that still need the capture restart it, a few times
        return 1
    finally:
        lock.release()
    return 0


def _say(content: dict[str, Any], *, is_last: bool = True) -> None:
    """Print one line for the process that started us; it may no longer be reading."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
        if is_last:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
