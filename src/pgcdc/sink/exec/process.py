"""One process of a command: its pipes, its environment without secrets, and its end together with all that it started.

A command gets a session of its own, so that everything it starts can be ended with it: first it is asked (SIGTERM), then it
is killed. Its error output goes to ours, line by line, with the name of the adapter.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO
from urllib.parse import quote

import psutil

from pgcdc.core.errors import SinkError

GRACE_S = 2.0
"""How long a command may take to end when it is asked to."""
MAX_ERROR_LINE = 4096
SAME_START_S = 0.1
UNLIKELY_CHARS = 16
"""A secret of so many characters is in no other text by chance."""
PART_CHARS = 8
"""Less than that is not looked for in other texts."""
_OF_LIBPQ = ("PGPASSWORD", "PGSSLPASSWORD")

_alive: set[Process] = set()
_lock = threading.Lock()


class Process:
    """A command that runs. Its standard input is written without blocking."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        say: Callable[[str], None],
        *,
        reads: bool,
        counts: bool = False,
    ) -> None:
        """`reads`: its output is for us; else it goes where ours goes. SinkError: there is no such command.

        `counts`: when it has ended, `left` says how much it has not read. Then its end does not break the pipe.
        """
        self._say = say
        self.left = 0
        """Bytes that it was given and has not read when it ended."""
        self._reader, writer = os.pipe()
        self.last_words: deque[str] = deque(maxlen=1)
        """The last line of its error output."""
        try:
            self._popen = subprocess.Popen(
                words,
                stdin=self._reader,
                stdout=subprocess.PIPE if reads else None,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            os.close(self._reader)
            os.close(writer)
            raise SinkError(
                f"the command of adapter {name} cannot be started: {words[0]}: {error.strerror}",
                "Correct its command or argv; nothing is lost",
            ) from error
        if not counts:
            self._close_reader()
        self.pid = self._popen.pid
        self._input: IO[bytes] | None = os.fdopen(writer, "wb", 0)
        self._output: IO[bytes] | None = self._popen.stdout
        os.set_blocking(writer, False)
        if self._output is not None:
            os.set_blocking(self._output.fileno(), False)
        self._is_reaped = False
        self._ending = threading.Lock()
        self._errors = threading.Thread(target=self._pass_errors, name=f"stderr-{name}", daemon=True)
        self._errors.start()
        with _lock:
            _alive.add(self)

    @property
    def started_at(self) -> float:
        """When it was started, as the system says: a process with the same number and another time is another one."""
        try:
            return psutil.Process(self.pid).create_time()
        except psutil.Error:  # it has ended already
            return 0.0

    # --- talking to it

    def exchange(self, data: memoryview, timeout_s: float) -> tuple[int, bytes]:
        """Wait until it takes some of `data`, says something, or the time is over. How much it took, and what it said.

        BrokenPipeError: it reads no more. `b""` with its output closed: see `has_output`.
        """
        poll = select.poll()
        if data and self._input is not None:
            poll.register(self._input, select.POLLOUT)
        if self._output is not None:
            poll.register(self._output, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0, timeout_s) * 1000)}
        taken = 0
        # First: what it said must not get lost by an error.
        if self._input is not None and self._input.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                taken = os.write(self._input.fileno(), data[: 1 << 16])
        said = b""
        if self._output is not None and self._output.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._output.fileno(), 1 << 16)
                if not said:
                    self._output.close()
                    self._output = None
        return taken, said

    @property
    def unread(self) -> int:
        """How many bytes it has been given, and has not read."""
        return _count_bytes(self._input.fileno()) if self._input is not None else 0

    @property
    def has_output(self) -> bool:
        """Whether its output can still say something."""
        return self._output is not None

    def close_input(self) -> None:
        """No more events: a command that reads to the end of its input ends now."""
        if self._input is not None:
            self._input.close()
            self._input = None

    # --- its end

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status when it has ended within this time, negative for a signal; None if it has not.

        What it left running is ended first, while its number still cannot be anybody else's.
        """
        deadline, pause_s = time.monotonic() + timeout_s, 0.0005
        while not self.has_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, pause_s))
            pause_s = min(2 * pause_s, 0.01)
        return self._finish()

    def end(self, grace_s: float) -> int:
        """End it and everything that it started."""
        self.close_input()
        if not self.has_ended:
            _end_members(self.pid, grace_s)
        while not self.has_ended:  # nothing outlives SIGKILL, but it takes a moment
            time.sleep(0.002)
        return self._finish()

    def kill(self) -> None:
        """End it at once, from any thread."""
        if not self._is_reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Whether it has. Nobody takes note of it here, which would give its number back."""
        if self._is_reaped:
            return True
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _finish(self) -> int:
        with self._ending:
            if not self._is_reaped:
                _end_members(self.pid, GRACE_S)  # its own end means that it is done
                self._popen.wait()
                self._is_reaped = True
                if self._reader >= 0:
                    self.left = _count_bytes(self._reader)
                    self._close_reader()
                with _lock:
                    _alive.discard(self)
        self.close_input()
        if self._output is not None:
            self._output.close()
            self._output = None
        self._errors.join(0.2)  # somebody who left the session may have it open
        return self._popen.returncode

    def _close_reader(self) -> None:
        os.close(self._reader)
        self._reader = -1

    def _pass_errors(self) -> None:
        assert self._popen.stderr is not None
        with contextlib.suppress(OSError, ValueError), self._popen.stderr as errors:
            while raw := errors.readline(MAX_ERROR_LINE):
                text = raw.decode(errors="replace").rstrip()
                if text:
                    self.last_words.append(text)
                    self._say(text)


def _count_bytes(descriptor: int) -> int:
    """What is in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


# --- processes that nobody waits for


def end_all() -> None:
    """Kill what is left of all commands: for the end of this process, when nothing can be waited for."""
    with _lock:
        left = list(_alive)
    for process in left:
        process.kill()


atexit.register(end_all)


def end_leftover(pid: int, started_at: float, grace_s: float) -> bool:
    """End a command of an earlier run that was killed, if it still runs. Whether it did."""
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - started_at) > SAME_START_S or not _runs(process):
            return False
    except psutil.Error:
        return False
    _end_members(pid, grace_s)
    return True


def _end_members(group: int, grace_s: float) -> None:
    """End everybody in a process group: ask, then kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = _members(group)
        for member in members:
            with contextlib.suppress(psutil.Error):  # psutil knows when a number is another one's by now
                member.send_signal(number)
        deadline = time.monotonic() + grace_s
        while any(map(_runs, members)) and time.monotonic() < deadline:
            time.sleep(0.005)


def _members(group: int) -> list[psutil.Process]:
    """Everybody in a process group who runs."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and _runs(process := psutil.Process(pid)):
                found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    """Whether it does. One that has ended may stay a zombie for long: whose child it is, is not for us to say."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


# --- its environment


def clean_environment(
    environ: Mapping[str, str], keep: Collection[str] = (), known: Collection[str] = ()
) -> dict[str, str]:
    """The environment without secrets of pgcdc: its variables, and whatever holds a password of it or one of `known`."""
    secrets = _passwords(environ) | {one for one in known if one}
    return {
        name: value
        for name, value in environ.items()
        if name in keep
        or not (name.startswith("PGCDC_") or name in _OF_LIBPQ or any(_holds(value, secret) for secret in secrets))
    }


def _passwords(environ: Mapping[str, str]) -> set[str]:
    from psycopg import Error
    from psycopg.conninfo import conninfo_to_dict

    found = {environ.get(name) for name in _OF_LIBPQ}
    with contextlib.suppress(Error):
        known = conninfo_to_dict(environ.get("PGCDC_DB", ""))
        found |= {str(known.get("password") or ""), str(known.get("sslpassword") or "")}
    return {one for one in found if one}


def _holds(value: str, secret: str) -> bool:
    """Whether a variable is the secret, has it in it (a URL, DSN or header), or is a part of it (`${FIRST}${SECOND}`).

    A short one is part of many other words: it counts only at the places of passwords.
    """
    if value == secret or (len(value) >= PART_CHARS and "://" not in secret and value in secret):
        return True
    forms = {secret, quote(secret, safe="")}
    if any(f":{form}@" in value or f"password={form}" in value for form in forms):
        return True
    if len(secret) >= UNLIKELY_CHARS:
        return any(form in value for form in forms)
    if len(secret) < PART_CHARS:
        return False
    either = "|".join(map(re.escape, forms))
    return re.search(rf"(?:^|[:=\s\"',;&])(?:{either})(?:$|[@\s\"',;&])", value) is not None
