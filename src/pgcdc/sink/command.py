"""One process of a command: its unfinished input, and ending it with everything it started.

A command gets its own session, so that all its processes can be ended: first SIGTERM, then SIGKILL. Its stderr goes to
ours, line by line, prefixed with the adapter's name.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import termios
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

import orjson
import psutil

from pgcdc.core.errors import SinkError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.secrets import clean_environment, redact_text
from pgcdc.event.batch import Batch
from pgcdc.sink.contract import SinkContext

LOOK_S = 0.2  # How often to check a silent command
READ_PAUSE_S = 0.001  # How often to check whether it has read everything
MAX_LINE_BYTES = 1 << 20
MARK = "_PGCDC_COMMAND_OF"  # The variable that identifies commands of a killed pipeline


class Command:
    """A process and its unfinished input, which is written without blocking.

    With answers by line, any line acknowledges the oldest open event; a JSON object with an `id` acknowledges the event
    with that id.
    """

    def __init__(self, words: Sequence[str], context: SinkContext, *, keep_env: Collection[str], by_line: bool) -> None:
        """`by_line`: it prints a line per event; otherwise its output goes to ours. SinkError: the command does not
        exist."""
        self._by_line, self._say = by_line, context.say
        self._reader, self._writer = os.pipe()  # ours stays open, to see what the command did not read
        environment = clean_environment(os.environ, keep_env)
        try:
            self._popen = subprocess.Popen(
                words,
                stdin=self._reader,
                stdout=subprocess.PIPE if self._by_line else None,
                stderr=subprocess.PIPE,
                env={**environment, MARK: context.progress.owner},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._close_pipe()
            raise SinkError(
                f"adapter {context.name} cannot start its command: {words[0]}: {error.strerror}",
                "Correct its command or argv; nothing is lost",
            ) from error
        self.pid, self._output = self._popen.pid, self._popen.stdout
        mark_leader(self.pid)
        _alive[self.pid] = self
        for descriptor in (self._writer, *([self._output.fileno()] if self._output else [])):
            os.set_blocking(descriptor, False)
        self._last_words = ""
        self._errors = threading.Thread(target=self._pass_errors, name=f"stderr-{context.name}", daemon=True)
        self._errors.start()
        self.pieces: deque[memoryview] = deque()  # Still to be written
        self._sent = self._given = self._numbered = 0
        self._given_to = ""
        self._open: OrderedDict[int, tuple[str, str]] = OrderedDict()  # Unanswered events: position and id by number
        self._numbers: dict[str, int] = {}  # By id; typed rows have none
        self._left: Counter[str] = Counter()  # Unanswered events per position
        self._said = b""

    # --- communication

    def give(self, batch: Batch) -> None:
        """Queue the part of a batch that it has not been given. Queues all events of a position together."""
        batch = batch.after(Position.parse(self._given_to)) if self._given_to else batch
        if not len(batch):
            return
        self._given_to = batch.positions()[-1].as_py()
        if not self._by_line:
            self.pieces.extend(batch.lines())
            return
        self.pieces.append(memoryview(b"".join(batch.lines())))
        records = batch.records()
        for position, name in zip(records.position.to_pylist(), records.id.to_pylist(), strict=True):
            self._open[self._numbered] = position, name
            if not name.startswith(position):
                self._numbers[name] = self._numbered
            self._numbered += 1
            self._left[position] += 1

    def run(self, end: str, deadline: float, delivered: Callable[[list[str]], None]) -> bool:
        """Run until everything up to `end` is done or the deadline passes; returns whether it is done. SinkError for
        invalid answers."""
        while self._is_behind(end):
            had_ended = self.has_ended
            wait_s = LOOK_S if self._by_line or self.pieces else READ_PAUSE_S
            said = self.exchange(0 if had_ended else wait_s)
            if said:
                delivered(self._hear(said))
            if (had_ended and not said) or self.is_mute or time.monotonic() > deadline:
                return not self._is_behind(end)
        return True

    def _is_behind(self, end: str) -> bool:
        if self._by_line:
            return bool(self._open) and self.first_open <= end
        return bool(self.pieces) or self.unread > 0 or self.has_ended

    def exchange(self, timeout_s: float) -> bytes:
        """Wait until the command reads or prints something, or the timeout. Returns what it printed."""
        poll = select.poll()
        if self.pieces:
            poll.register(self._writer, select.POLLOUT)
        if self._output is not None:
            poll.register(self._output, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}
        if self._writer in ready:
            self._send()
        said = b""
        if self._output is not None and self._output.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._output.fileno(), 1 << 16)
                if not said:
                    self._output.close()
                    self._output = None
        return said

    def _send(self) -> None:
        piece = self.pieces.popleft()
        with contextlib.suppress(BlockingIOError):
            taken = os.write(self._writer, piece[: 1 << 16])
            self._sent += taken
            self._given += bytes(piece[:taken]).count(b"\n") if self._by_line else 0
            piece = piece[taken:]
            hit("exec.half_sent")
        if piece:
            self.pieces.appendleft(piece)

    @property
    def unread(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self._reader, termios.FIONREAD, count)
        return count[0]

    @property
    def progress(self) -> int:
        """Grows with every event that it acknowledges, or with every byte that it reads."""
        return -len(self._open) if self._by_line else self._sent - self.unread

    @property
    def is_mute(self) -> bool:
        """Whether it can no longer acknowledge anything."""
        return self._by_line and self._output is None

    @property
    def first_open(self) -> str:
        """The position of the oldest unacknowledged event."""
        return next(iter(self._open.values()), ("", ""))[0]

    def _hear(self, said: bytes) -> list[str]:
        """The positions that these answers complete."""
        *lines, self._said = (self._said + said).split(b"\n")
        if len(self._said) > MAX_LINE_BYTES:
            raise SinkError(
                f"the command printed {len(self._said)} bytes without a newline",
                "With ack: line it must print one line for each event that it has processed",
            )
        return [position for position in map(self._acknowledge, lines) if position not in self._left]

    def _acknowledge(self, line: bytes) -> str:
        """The position of the event that this line acknowledges."""
        number = next(iter(self._open), -1)
        if self._numbers and line.startswith(b"{"):
            with contextlib.suppress(ValueError):
                wanted = orjson.loads(line).get("id")
                number = number if wanted is None else self._numbers.get(str(wanted), -1)
        if number not in self._open or number >= self._given:
            raise SinkError(
                "the command printed a line that matches no event of its input, or the same one twice",
                "With ack: line it must print exactly one line for each event that it has processed; other "
                "output belongs on standard error. If its output is meant for something else, use ack: exit",
            )
        position, name = self._open.pop(number)
        self._numbers.pop(name, None)
        self._left[position] -= 1
        if not self._left[position]:
            del self._left[position]
        return position

    # --- ending it

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended. Does not reap it: until `finish` has ended its group, no other process may get
        its pid."""
        with contextlib.suppress(ChildProcessError):  # `finish` has reaped it
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def wait(self, timeout_s: float) -> bool:
        deadline, pause_s = time.monotonic() + timeout_s, 0.0005
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        return self.has_ended

    def close_input(self) -> None:
        """Close its input: a command that reads to the end ends now."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def finish(self, patience_s: float, grace_s: float) -> int:
        """End the command and everything it started, after giving it time to end on its own. Returns its status,
        negative for a signal."""
        if _alive.pop(self.pid, None) is not None:
            self.close_input()
            self.wait(patience_s)
            end_group(self.pid, grace_s)
            self._popen.wait()  # nothing outlives SIGKILL
            self._close_pipe()
            if self._output is not None:
                self._output.close()
            self._errors.join(0.2)  # a process that left the session may keep it open
        return self._popen.returncode

    def kill(self) -> None:
        """Kill the process group; thread-safe."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close_pipe(self) -> None:
        self.close_input()
        os.close(self._reader)

    def _pass_errors(self) -> None:
        assert self._popen.stderr is not None
        with contextlib.suppress(OSError, ValueError), self._popen.stderr as errors:
            while raw := errors.readline(4096):
                if text := raw.decode(errors="replace").rstrip():
                    self._last_words = text
                    self._say(text)

    @property
    def last_words(self) -> str:
        return redact_text(self._last_words[:200])


# --- processes


_alive: dict[int, Command] = {}


@atexit.register
def end_all() -> None:
    """Kill all remaining commands, without waiting: for the end of this process."""
    for command in list(_alive.values()):
        command.kill()


def end_group(group: int, grace_s: float) -> None:
    """End a process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        if _has_members(group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        while _has_members(group) and time.monotonic() < deadline:
            time.sleep(0.005)


def _has_members(group: int) -> bool:
    """Whether a process of the group is running. Zombies do not count: as children of another process they may stay for
    long."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def mark_leader(pid: int) -> None:
    """Mark a command, to tell it from processes it starts. They inherit MARK, but not this flag, which means nothing to
    ordinary processes."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # it has ended, or the system has no such flag; then it is never found
        policy = os.sched_getscheduler(pid) | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(pid, policy, os.sched_getparam(pid))


def find_marked(owner: str) -> list[int]:
    """Commands of an earlier run that was killed, each the leader of its group. Does not find daemons that a command
    left in sessions of their own."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, AttributeError, psutil.Error):
            is_command = os.getpgid(pid) == pid and os.sched_getscheduler(pid) & os.SCHED_RESET_ON_FORK
            if is_command and psutil.Process(pid).environ().get(MARK) == owner:
                found.append(pid)
    return found
