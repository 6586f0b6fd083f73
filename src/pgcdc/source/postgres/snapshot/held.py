"""A snapshot that many sessions read in, held by a small process of its own.

An exported snapshot can be imported only while the transaction that exported it is open, and nothing of ours lives long
enough in Spark's driver: its Python planner is one of a pool of workers that end after a minute without work, and Spark
tells nobody when the tasks of a batch read have ended. So `hold_snapshot` forks a process for it (or where it must not
fork, because there are threads, starts this module as a program, which takes a quarter of a second longer). That
process ends with the driver, or when nobody has read in the snapshot for a while: it holds back VACUUM until then. It
holds no lock, so that no ALTER TABLE waits for it; readers lock and compare (`chunks.lock_chunks`).

It learns who reads from the names of the server's sessions, so that readers on other hosts count, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import psycopg

from pgcdc.core.errors import PgcdcError, SourceError
from pgcdc.postgres.database import Connection, connect, explain_errors, quote_literal

__all__ = ["HeldSnapshot", "hold_snapshot", "main", "read_in_snapshot", "start_holder"]

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """What readers need to know. Picklable: it travels to the executors."""

    snapshot: str
    """Its name on the server."""
    session: str
    """The application_name of its readers."""
    keep_s: float

    def to_text(self) -> str:
        """As an option of a source."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> HeldSnapshot:
        """The snapshot behind `to_text()`."""
        return cls(**json.loads(text))


def hold_snapshot(url: str, *, watch_pid: int, keep_s: float) -> HeldSnapshot:
    """Export a snapshot of now. It is held until `watch_pid` ends, or nobody has read in it for `keep_s`."""
    spec = {"url": url, "watch_pid": watch_pid, "keep_s": keep_s}
    if threading.active_count() == 1:
        return HeldSnapshot(**_fork_holder(spec))
    return HeldSnapshot(**start_holder("pgcdc.source.postgres.snapshot.held", spec))


def start_holder(module: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Start a process that holds a snapshot and tell it what (on its standard input: no secret is among its arguments).

    Returns its one line, in which it says that it does; raises what it failed with.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(spec).encode())
    process.stdin.close()
    with process.stdout as answers:
        line = answers.readline()
    _STARTED[:] = [one for one in [*_STARTED, process] if one.poll() is None]
    return _understand(line)


def _fork_holder(spec: dict[str, Any]) -> dict[str, Any]:
    """The same by a fork: everything is imported already. Only for a process with one thread."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:  # of a child that ends at once: nobody has to wait for it
                os.setsid()
                _leave_all_files_but(writable)
                _hold_and_say(spec, writable)
        finally:
            os._exit(0)  # what the objects of this process hold belongs to the other one: nothing is cleaned up
    os.close(writable)
    os.waitpid(child, 0)
    with open(readable, "rb") as answers:
        return _understand(answers.readline())


def _leave_all_files_but(keep: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))


def _understand(line: bytes) -> dict[str, Any]:
    if not line:
        raise SourceError("the process that holds the snapshot ended at once", "Try again")
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise PgcdcError.from_json(reply["error"])
    return reply


_STARTED: list[subprocess.Popen[bytes]] = []
"""Processes that we started: kept, so that `poll` collects them when they end."""


@contextmanager
def read_in_snapshot(url: str, held: HeldSnapshot | None) -> Iterator[Connection]:
    """A connection in a transaction that only reads: in the snapshot, or without one in a snapshot of its own."""
    with connect(url, application_name=held.session if held else "pgcdc") as conn:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if held is not None:
            try:
                conn.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(held.snapshot)}".encode())
            except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.ObjectNotInPrerequisiteState):
                raise SourceError(
                    "the snapshot of this DataFrame is not held any more",
                    f"Load it again. A DataFrame can be read again within {held.keep_s:g} s after its last read "
                    "(option snapshot_keep), or from Spark's memory after .cache()",
                ) from None
        yield conn


def main() -> int:
    """Export a snapshot, say so in one line on standard output, and hold it."""
    return _hold_and_say(json.loads(sys.stdin.read()), 1)


def _hold_and_say(spec: dict[str, Any], output: int) -> int:
    session = f"pgcdc read {uuid.uuid4().hex[:12]}"
    try:
        with (
            explain_errors("export a snapshot"),
            connect(spec["url"], application_name="pgcdc snapshot", may_retry=False) as conn,
        ):
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            row = conn.execute("SELECT pg_export_snapshot()").fetchone()
            assert row is not None
            _say(output, {"snapshot": row[0], "session": session, "keep_s": spec["keep_s"]})
            output = -1  # nobody listens any more
            _hold(conn, session, spec["watch_pid"], spec["keep_s"])
    except PgcdcError as error:
        _say(output, {"error": error.to_json()})
        return error.exit_code
    return 0


def _hold(conn: Connection, session: str, watch_pid: int, keep_s: float) -> None:
    used = time.monotonic()
    while psutil.pid_exists(watch_pid) and time.monotonic() - used < keep_s:
        time.sleep(POLL_S)
        conn.execute("SELECT pg_stat_clear_snapshot()")  # what the next statement shows is kept for the transaction
        row = conn.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [session]).fetchone()
        if row is not None and row[0]:
            used = time.monotonic()


def _say(output: int, reply: dict[str, object]) -> None:
    """The one line."""
    if output >= 0:
        os.write(output, json.dumps(reply).encode() + b"\n")
        os.close(output)


if __name__ == "__main__":
    sys.exit(main())
