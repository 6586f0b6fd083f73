"""The process that holds the snapshot of an initial snapshot. It outlives driver and capture, so that both may crash.

The snapshot that a new slot exports can be used only while the slot's connection stays idle. So the holder imports it, and
exports it again from a transaction of its own. Any number of sessions may read in it then, until the holder ends: when its
file is gone (the rows are there), when the time limit is over (VACUUM is held back all the while), when nobody has run the
capture for some minutes, or with the server.

It has its file locked as long as it lives, so that everybody can see whether it does.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import psycopg

from pgcdc.core.errors import PgcdcError, SourceError
from pgcdc.core.state import Lock, StateDir
from pgcdc.postgres.database import Connection, connect, explain_errors, quote_literal
from pgcdc.source.postgres.snapshot.held import start_holder
from pgcdc.source.postgres.snapshot.plan import Hold

__all__ = ["DEFAULT_HOLD_LIMIT_S", "hold_for_long", "is_held", "let_all_go", "let_go", "main"]

DEFAULT_HOLD_LIMIT_S = 6 * 3600.0
ALONE_S = 300.0
"""How long the snapshot is held while no capture runs: for the next start."""
POLL_S = 1.0


def hold_for_long(url: str, state: StateDir, number: int, *, limit_s: float, exported: str | None = None) -> Hold:
    """Start a process that holds a snapshot: the one that was exported under this name, or a new one."""
    state.snapshot.mkdir(parents=True, exist_ok=True)
    file = f"holder-{number}-{secrets.token_hex(4)}.json"  # never the name of another, who may still be ending
    spec = {
        "url": url, "number": number, "path": str(state.snapshot / file), "capture_lock": str(state.capture_lock),
        "limit_s": limit_s, "alone_s": float(os.environ.get("PGCDC_SNAPSHOT_ALONE_S", ALONE_S)), "exported": exported,
    }  # fmt: skip
    return Hold(**start_holder("pgcdc.source.postgres.snapshot.holder", spec))


def is_held(folder: Path, hold: Hold) -> bool:
    """Whether its holder lives. It ends a moment after the server did."""
    return Lock.holder(folder / hold.file) is not None


def let_go(folder: Path, *holds: Hold) -> None:
    """End these holders."""
    for hold in holds:
        (folder / hold.file).unlink(missing_ok=True)


def let_all_go(folder: Path) -> None:
    """End every holder that was ever started for this folder."""
    for path in folder.glob("holder-*.json"):
        path.unlink(missing_ok=True)


def main() -> int:
    """Take the snapshot, say so in one line, and hold it."""
    spec = json.loads(sys.stdin.read())
    path = Path(spec["path"])
    lock = Lock(path)
    try:
        with (
            explain_errors("hold a snapshot"),
            connect(spec["url"], application_name="pgcdc snapshot", may_retry=not spec["exported"]) as conn,
        ):
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            hold = _take(conn, spec, path)
            if lock.acquire() is None:
                raise SourceError("another process holds a snapshot for this state directory")
            lock.write({"pid": os.getpid(), "snapshot": hold["name"]})
            print(json.dumps(hold), flush=True)
            sys.stdout.close()
            _hold(conn, spec, path)
    except PgcdcError as error:
        if not sys.stdout.closed:
            print(json.dumps({"error": error.to_json()}), flush=True)
        return error.exit_code
    finally:
        path.unlink(missing_ok=True)
    return 0


def _take(conn: Connection, spec: dict[str, Any], path: Path) -> dict[str, Any]:
    if spec["exported"]:
        conn.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(spec['exported'])}".encode())
    row = conn.execute("SELECT pg_export_snapshot(), txid_current_snapshot()::text").fetchone()
    # Read behind the snapshot: what it sees was written before.
    after = conn.execute("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::int8").fetchone()
    assert row is not None and after is not None
    return {
        "number": spec["number"], "name": row[0], "file": path.name, "time": time.time(),
        "visible": None if spec["exported"] else row[1], "lsn": after[0],
    }  # fmt: skip


def _hold(conn: Connection, spec: dict[str, Any], path: Path) -> None:
    began = seen = time.monotonic()
    capture_lock = Path(spec["capture_lock"])
    while path.exists():
        now = time.monotonic()
        if Lock.holder(capture_lock) is not None:
            seen = now
        if now - began > spec["limit_s"] or now - seen > spec["alone_s"]:
            return
        time.sleep(POLL_S)
        try:
            conn.execute("SELECT 1")
        except psycopg.Error:
            return


if __name__ == "__main__":
    sys.exit(main())
