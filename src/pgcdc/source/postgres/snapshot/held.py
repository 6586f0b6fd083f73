"""Snapshots that many sessions read in, each held by a small process of its own.

An exported snapshot can be imported only while the transaction that exported it is open. So some process has to keep it
open and outlive the planner and the readers. It holds back VACUUM for that time, but holds no lock: no ALTER TABLE
waits for it, and readers lock and compare (`chunks.lock_chunks`). There are two kinds:

- For a DataFrame (`hold_snapshot`): Spark's driver has no Python process that lives long enough, because its planner
  comes from a pool and ends after a minute. The snapshot is held until the driver ends, or nobody has read in it for a
  while. Readers are recognised by the names of the server's sessions, so readers on other hosts count.
- For an initial snapshot (`hold_for_long`): driver and capture may crash meanwhile. The snapshot that a new slot
  exports is usable only while the slot's connection stays idle, so it is imported and exported again. It is held until
  its file is gone (the rows are stored), the time limit is over, or no capture has run for some minutes. The file is
  locked as long as the process lives, so anybody can check whether it does.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg

from pgcdc.core.errors import PgcdcError, SourceError
from pgcdc.core.state import Lock, StateDir
from pgcdc.postgres.database import Connection, connect, explain_errors, quote_literal

ALONE_S = 300.0  # How long the snapshot is held for the next start while no capture runs
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """What readers of a DataFrame need. Picklable: it is sent to the executors."""

    snapshot: str  # Its name on the server
    session: str  # The application_name of its readers
    keep_s: float

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> HeldSnapshot:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Hold:
    """A snapshot that is held for an initial snapshot."""

    number: int
    name: str  # Its name on the server
    file: str  # The file of its process, in the plan's folder: the process ends when it is gone
    time: float
    visible: str | None = None  # What it sees, as pg_snapshot; None for the slot's own, where the stream begins
    lsn: int = 0  # Everything that it sees was written before


def hold_snapshot(url: str, *, watch_pid: int, keep_s: float) -> HeldSnapshot:
    """Export a new snapshot, held until `watch_pid` ends or nobody has read in it for `keep_s`."""
    session = f"pgcdc read {uuid.uuid4().hex[:12]}"
    spec = {"url": url, "watch_pid": watch_pid, "keep_s": keep_s, "session": session}
    found = _start(spec)
    return HeldSnapshot(found["name"], session, keep_s)


def hold_for_long(url: str, state: StateDir, number: int, *, limit_s: float, exported: str | None = None) -> Hold:
    """Hold a snapshot for an initial snapshot: the exported one with this name, or a new one."""
    state.snapshot.mkdir(parents=True, exist_ok=True)
    file = f"holder-{number}-{secrets.token_hex(4)}.json"  # never reuse a name: its process may still be ending
    spec = {
        "url": url, "path": str(state.snapshot / file), "capture_lock": str(state.capture_lock), "limit_s": limit_s,
        "alone_s": float(os.environ.get("PGCDC_SNAPSHOT_ALONE_S", ALONE_S)), "exported": exported,
    }  # fmt: skip
    found = _start(spec)
    visible = None if exported else found["visible"]
    return Hold(number, found["name"], file, time.time(), visible, found["lsn"])


def is_held(folder: Path, hold: Hold) -> bool:
    """Whether its process is alive. It ends a moment after the server does."""
    return Lock.holder(folder / hold.file) is not None


def let_go(folder: Path, kept: Collection[str] = ()) -> None:
    """End every process of this folder except those whose files are `kept`."""
    for path in folder.glob("holder-*.json"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


@contextmanager
def read_in_snapshot(url: str, held: HeldSnapshot | None) -> Iterator[Connection]:
    """A connection in a read-only transaction: in the held snapshot, or with a snapshot of its own."""
    with connect(url, application_name=held.session if held else "pgcdc") as conn:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if held is not None and not import_snapshot(conn, held.snapshot):
            raise SourceError(
                "the snapshot of this DataFrame is no longer held",
                f"Load it again. A DataFrame can be read again within {held.keep_s:g} s after its last read "
                "(option snapshot_keep), or from Spark's memory after .cache()",
            )
        yield conn


def import_snapshot(conn: Connection, name: str) -> bool:
    """Read in a snapshot from now on, in a new transaction. False if it is no longer held."""
    try:
        conn.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(name)}".encode())
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.ObjectNotInPrerequisiteState):
        return False
    return True


# --- starting the process


def _start(spec: dict[str, Any]) -> dict[str, Any]:
    """Start the process with its specification on stdin, so that no secret is among its arguments. Returns its one line
    of output, or raises its error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pgcdc.source.postgres.snapshot.held"],
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
    if not line:
        raise SourceError("the process that holds the snapshot ended at once", "Try again")
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise PgcdcError.from_json(reply["error"])
    return reply


_STARTED: list[subprocess.Popen[bytes]] = []  # Our child processes, kept so that `poll` reaps them when they end


# --- in the process


def main() -> int:
    """Export a snapshot, report it in one line on stdout, and hold it."""
    spec = json.loads(sys.stdin.read())
    path = Path(spec["path"]) if "path" in spec else None
    may_retry = path is not None and not spec["exported"]
    try:
        with (
            explain_errors("hold a snapshot"),
            connect(spec["url"], application_name="pgcdc snapshot", may_retry=may_retry) as conn,
        ):
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if spec.get("exported"):
                conn.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(spec['exported'])}".encode())
            row = conn.execute("SELECT pg_export_snapshot(), txid_current_snapshot()::text").fetchone()
            assert row is not None
            said: dict[str, Any] = {"name": row[0], "visible": row[1]}
            goes_on = _while_it_is_read(conn, spec)
            if path is not None:
                # Read after the snapshot was taken: everything it sees was written before.
                after = conn.execute("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::int8").fetchone()
                assert after is not None
                said["lsn"] = after[0]
                lock = Lock(path)  # held as long as this process lives
                if lock.acquire() is None:
                    raise SourceError("another process holds a snapshot for this state directory")
                lock.write({"pid": os.getpid()})
                goes_on = _while_it_is_needed(conn, spec, path)
            _say(said)
            while goes_on():
                time.sleep(POLL_S)
    except PgcdcError as error:
        _say({"error": error.to_json()})
        return error.exit_code
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return 0


def _say(reply: dict[str, Any]) -> None:
    if not sys.stdout.closed:
        print(json.dumps(reply))
        sys.stdout.close()


def _while_it_is_read(conn: Connection, spec: dict[str, Any]) -> Callable[[], bool]:
    used = time.monotonic()

    def goes_on() -> bool:
        nonlocal used
        # otherwise the transaction keeps the statistics that it read first
        conn.execute("SELECT pg_stat_clear_snapshot()")
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        row = conn.execute(query, [spec["session"]]).fetchone()
        if row is not None and row[0]:
            used = time.monotonic()
        return psutil.pid_exists(spec["watch_pid"]) and time.monotonic() - used < spec["keep_s"]

    return goes_on


def _while_it_is_needed(conn: Connection, spec: dict[str, Any], path: Path) -> Callable[[], bool]:
    capture_lock = Path(spec["capture_lock"])
    began = seen = time.monotonic()

    def goes_on() -> bool:
        nonlocal seen
        now = time.monotonic()
        if Lock.holder(capture_lock) is not None:
            seen = now
        conn.execute("SELECT 1")  # raises when the server is gone
        return path.exists() and now - began <= spec["limit_s"] and now - seen <= spec["alone_s"]

    return goes_on


if __name__ == "__main__":
    sys.exit(main())
