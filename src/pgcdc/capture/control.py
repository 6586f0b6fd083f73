"""Starting a capture process, and the requests it answers.

`ensure_capture` starts the capture of a state directory or joins the running one; the lock file decides. `CaptureLink`
does the same again whenever the process has died.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from pgcdc.capture.server import CaptureGone, Channel, remove_socket
from pgcdc.core.counters import counters
from pgcdc.core.errors import PgcdcError, SourceError, StateError
from pgcdc.core.position import Position
from pgcdc.core.settings import Bytes, Options, setting
from pgcdc.core.state import Lock, StateDir, is_alive, open_log, read_json
from pgcdc.source.protocol import Settled, SourceOptions

START_TIMEOUT_S = 120.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0


class CaptureOptions(Options):
    """Settings of every capture, whatever its source."""

    fail_fast: bool = setting(False, "Exit 1 when the connection is lost, for supervisors.", "Database")
    state_dir: Path = setting(Path(".pgcdc"), "Spool, acks and checkpoints.", "Running", metavar="PATH")
    spool_limit: Bytes = setting(1 << 30, "Stop reading when this much is undelivered.", "Running", ge=1 << 20)


class CaptureSpec(CaptureOptions):
    """Everything a capture process needs to know. It arrives on its standard input."""

    kind: str  # The name of the source (`source.protocol.find_source`)
    source: dict[str, Any] = Field(repr=False)  # The options of the source; only the source reads them
    watch_pid: int  # The driver's pid; the capture ends when the driver does
    is_restart: bool = False  # The pipeline ran before: wait for an unreachable server instead of failing


def make_spec(source: SourceOptions, options: CaptureOptions, watch_pid: int) -> CaptureSpec:
    ours = options.part(CaptureOptions).but(state_dir=StateDir(options.state_dir).path).model_dump()
    return CaptureSpec(**ours, kind=source.kind, source=source.model_dump(mode="json"), watch_pid=watch_pid)


class CaptureRequests(abc.ABC):
    """Requests to a capture process, over any connection to it."""

    @abc.abstractmethod
    def request(self, content: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises the error that the other process reports."""

    def join(
        self, consumer: str, *, exclusive: bool = False, start: Position | None = None
    ) -> tuple[Position, Position]:
        """Register a consumer; returns the position where it starts and its last ack, both durable.

        `exclusive`: no other connection may read for this consumer until this one closes. `start`: where a new consumer
        starts; the default is everything still in the spool. GapError if `start` has been released.
        """
        where = {"at": str(start)} if start is not None else {}
        reply = self.request({"do": "join", "consumer": consumer, "exclusive": exclusive, **where})
        return Position.parse(reply["initial"]), Position.parse(reply["ack"])

    def forget(self, consumer: str) -> None:
        """Drop a consumer if it exists. The change is durable on return."""
        self.request({"do": "forget", "consumer": consumer, "missing_ok": True})

    def ack(self, consumer: str, position: Position) -> None:
        """Record that the consumer has made everything up to `position` durable."""
        self.request({"do": "ack", "consumer": consumer, "position": str(position)})

    def wait(self, timeout_s: float, until: Position | None = None) -> bool:
        """Wait until the spool has grown since the last call. The capture reads up to `until` even if the spool is
        full."""
        request = {"do": "wait", "timeout_s": timeout_s} | ({"until": str(until)} if until else {})
        return bool(self.request(request, timeout_s + 120)["moved"])

    def confirm(self) -> int:
        """Confirm to PostgreSQL what all consumers have acked; returns the LSN that was sent."""
        return int(self.request({"do": "confirm"})["lsn"])

    def target(self) -> int:
        """The server's current WAL flush LSN. Asking also makes the capture report its progress up to there sooner."""
        return int(self.request({"do": "target"})["lsn"])

    def settled(self) -> Settled:
        """The outcome of the requested rows."""
        reply = self.request({"do": "settled"})
        end, initial_end = (Position.parse(one) if one else None for one in (reply["end"], reply["initial_end"]))
        return Settled(end, initial_end, reply["only"])

    def clock(self) -> tuple[Position, int] | None:
        """A point in time, and the position up to which everything committed before it has been read. Also requests the
        next reading."""
        reply = self.request({"do": "clock"})
        return (Position.end(reply["lsn"]), reply["time_us"]) if reply["time_us"] else None

    def status(self) -> dict[str, Any]:
        """The status that `pgcdc status` shows."""
        return self.request({"do": "status"})

    def stop(self) -> None:
        self.request({"do": "stop"})


class ControlClient(Channel, CaptureRequests):
    """One connection to the capture process."""

    who = "the capture process"
    pid = 0


class CaptureLink(CaptureRequests):
    """The capture of a state directory, restarted when it dies. Thread-safe."""

    def __init__(
        self,
        spec: CaptureSpec,
        *,
        is_restart: bool,
        on_restart: Callable[[ControlClient], object] = lambda client: None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`on_restart` makes the first request to a new process. `say` receives messages for people; without it the
        capture pushes none and no status (`last_status`)."""
        self._spec = spec
        self._on_restart = on_restart
        self._is_told = True
        self._restarts: list[float] = []
        self._lock = threading.RLock()
        self._say = say
        self._status: dict[str, Any] = {}
        self._client = ensure_capture(spec, is_restart=is_restart, say=say)
        self._follow()

    def request(self, content: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """Ask the capture; restart it and ask again if it has died."""
        with self._lock:
            while True:
                try:
                    if not self._is_told:
                        self._on_restart(self._client)
                        self._is_told = True
                    return self._client.request(content, timeout_s)
                except CaptureGone:
                    self._restart()

    def last_status(self) -> dict[str, Any]:
        """The last status the capture pushed, at most a second old while it runs. Returns immediately; thread-safe."""
        if self._lock.acquire(blocking=False):  # otherwise another thread is using it or restarting it
            try:
                self._look()
            finally:
                self._lock.release()
        return self._status

    def _look(self) -> None:
        client = self._client
        client.take_pushed()
        if client.pushed is not self._status and client.pushed:
            self._status = client.pushed
            counters.take(f"capture {self._status['pid']}", self._status["counters"])
        said, client.said = client.said, []
        if self._say is not None:
            for text in said:
                self._say(text)

    def _follow(self) -> None:
        if self._say is not None:
            self._client.request({"do": "follow"})

    def keep(self) -> None:
        """Start or join the next process if this one was killed. Why one failed is for who reads from it."""
        with self._lock:
            self._look()
            if self._client.is_cut:
                self.request({"do": "status"})

    def stop(self) -> None:
        """Ask the process to end, if one runs."""
        with contextlib.suppress(PgcdcError):
            self._client.stop()

    def close(self) -> None:
        """Close the connection; the capture may continue for others."""
        self._client.close()

    def _restart(self) -> None:
        """Start a new capture; raises if it keeps dying."""
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < RESTART_WINDOW_S] + [now]
        if len(self._restarts) > MAX_RESTARTS:
            raise SourceError(
                f"the capture process ended {MAX_RESTARTS} times within {RESTART_WINDOW_S:.0f} s",
                f"See {self._spec.state_dir / 'capture.log'}",
            )
        self._look()  # it may have reported why it ended
        self._client.close()
        say = self._say or (lambda text: None)
        say(f"the capture process ended{_how_it_ended(self._client.pid)}: starting it again")
        self._client = ensure_capture(self._spec, is_restart=True, say=say)
        self._is_told = False
        self._follow()
        say(f"the capture runs again after {time.monotonic() - now:.1f} s")


def ask(lock: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the process that holds a lock; returns its answer, or None if nobody holds it."""
    holder = Lock.holder(lock)
    if holder and "address" in holder:
        with contextlib.suppress(CaptureGone), contextlib.closing(Channel(holder["address"])) as channel:
            return channel.request(request, 10.0)
    return {}


def forget_consumer(state: StateDir, name: str, timeout_s: float = 30.0) -> None:
    """Forget a consumer, through the capture if one runs. Waits for a capture that is starting: it has already read the
    consumers."""

    def forget() -> dict[str, Any]:
        from pgcdc.spool.consumers import Consumers  # imports Arrow, which reading settings does not need

        Consumers(state.consumers_file).forget(name)
        return {}

    ask_or_do(state, {"do": "forget", "consumer": name}, forget, timeout_s)


def ask_or_do(
    state: StateDir, request: dict[str, Any], do: Callable[[], dict[str, Any]], timeout_s: float = 30.0
) -> dict[str, Any]:
    """Let the capture do it if one runs or is starting; otherwise call `do` here, while holding the lock."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        holder = Lock.holder(state.capture_lock)
        if holder and "address" in holder:
            with contextlib.suppress(CaptureGone), contextlib.closing(ControlClient(holder["address"])) as client:
                return client.request(request)
        lock = Lock(state.capture_lock)
        if holder is None and (previous := lock.acquire()) is not None:
            try:
                remove_socket(previous)
                return do()
            finally:
                lock.release()
        time.sleep(0.02)
    raise StateError("the capture process is starting and does not answer", "Try again in a moment")


def ensure_capture(spec: CaptureSpec, *, is_restart: bool, say: Callable[[str], None] | None = None) -> ControlClient:
    """A connection to the capture of this state directory; starts one if none runs."""
    state = StateDir(spec.state_dir)
    deadline = time.monotonic() + START_TIMEOUT_S
    started = 0
    while time.monotonic() < deadline:
        holder = Lock.holder(state.capture_lock)
        if holder is None:
            _raise_failure(state, started)
            if not is_alive(spec.watch_pid):  # a new capture would end immediately, again and again
                raise SourceError(f"the driver (process {spec.watch_pid}) has ended, so its capture ended too")
            started = _start(spec.but(is_restart=is_restart), state, say)
        elif "address" in holder:
            with contextlib.suppress(CaptureGone):
                client = ControlClient(holder["address"])
                client.pid = client.status()["pid"]  # a killed process still accepts connections for a moment
                return client
        time.sleep(0.02)
    raise SourceError("the capture process did not start in time", f"See {state.path / 'capture.log'}")


def _raise_failure(state: StateDir, pid: int) -> None:
    """Raise the error of a process that failed right after its start, since another one would fail the same way."""
    status: dict[str, Any] = read_json(state.capture_status) or {} if pid else {}
    if status.get("pid") == pid and status.get("phase") == "failed" and status.get("last_error"):
        raise PgcdcError.from_json(status["last_error"])


def _start(spec: CaptureSpec, state: StateDir, say: Callable[[str], None] | None) -> int:
    """Start a capture process and wait for the line it prints on stdout. Returns its pid."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with open_log(state.path / "capture.log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pgcdc.capture.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(spec.model_dump_json().encode())
        process.stdin.close()
    reply: dict[str, Any] = {}
    while (line := process.stdout.readline()) and "say" in (reply := json.loads(line)):
        if say is not None:
            say(reply["say"])
    process.stdout.close()
    _REAP[:] = [one for one in [*_REAP, process] if one.poll() is None]
    if "error" in reply:
        raise PgcdcError.from_json(reply["error"])
    if not line:
        code = process.wait()
        raise SourceError(f"the capture process ended at once with code {code}", f"See {state.path / 'capture.log'}")
    return process.pid


def _how_it_ended(pid: int) -> str:
    """Of a process that we have started; another one's end is not known."""
    for one in _REAP:
        if one.pid == pid:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = one.wait(1.0)
                return f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"
    return ""


_REAP: list[subprocess.Popen[bytes]] = []  # Our child processes, kept so that `poll` can reap them
