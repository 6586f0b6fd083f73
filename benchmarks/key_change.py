"""A mirror whose table gets another key: how long until it is equal again, of the time that a fresh snapshot of it takes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from workload import connect, start_server

from pgcdc.core.state import StateDir
from pgcdc.sink.contract import Progress

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_key_change"]

SLOT, TIMEOUT_S = "bench_key", 600.0
TABLE = "CREATE TABLE keyed (id bigint PRIMARY KEY, name text, price numeric(12,2), at timestamptz, ok bool)"
ROWS = (
    "INSERT INTO keyed SELECT n, md5(n::text), n / 7.0, 'epoch'::timestamptz + n * interval '1 s', n % 3 = 0 "
    "FROM generate_series(1, {}) n"
)
ALTERED = (
    "ALTER TABLE keyed DROP CONSTRAINT keyed_pkey",
    "ALTER TABLE keyed ADD COLUMN sid bigserial",
    "ALTER TABLE keyed ADD PRIMARY KEY (sid)",
    "UPDATE keyed SET name = 'new' WHERE id % 10000 = 0",
    "DELETE FROM keyed WHERE id % 10000 = 1",
)
CHECKSUM = "SELECT count(*), sum(hashtextextended(ROW(sid, id, name, price, at, ok)::text, 0)) FROM keyed"


def measure_key_change(bench: Bench) -> None:
    """A primary key from a new bigserial column, with updates and deletes behind it, at a mirror of 1,000,000 rows."""
    source, rows = bench.url(), bench.scale.existing_rows[1]
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
    with start_server() as server:
        target = server.url()
        with connect(source) as conn:
            conn.execute(TABLE)
            conn.execute(ROWS.format(rows))
            conn.execute("VACUUM ANALYZE keyed")
        try:
            fresh, again = _run(source, target, folder, rows)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with connect(source) as conn:
                conn.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [SLOT]
                )
                conn.execute(f"DROP PUBLICATION IF EXISTS {SLOT}, {SLOT}_inserts")
                conn.execute("DROP TABLE keyed")
    note = f"{rows:,} rows: {again:.1f} s against {fresh:.1f} s; from the end of the DDL to an equal checksum"
    bench.add("key-change.time", again / fresh, note)


def _run(source: str, target: str, folder: Path, rows: int) -> tuple[float, float]:
    state = StateDir(folder / "state")
    command = [
        *(sys.executable, "-m", "pgcdc", "listen", "--slot-name", SLOT, "--state-dir", str(state.path)),
        *("--tables", "keyed", "--adapter", "pg_table", "--pg-table-mode", "apply"),
    ]
    environment = {**os.environ, "PGCDC_DB": source, "PGCDC_PG_TABLE_DB": target}
    log = folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stderr=out, env=environment)
    try:
        _wait(lambda: "ready" in log.read_text(), process)
        began = time.monotonic()  # rows are read before that already, while Spark starts
        _wait(lambda: _count(target) == rows, process)
        fresh = time.monotonic() - began
        with connect(source) as conn:
            for statement in ALTERED:
                conn.execute(statement)
        began = time.monotonic()
        _wait(lambda: bool(Progress(state.acks, "pg_table").holds), process)
        _wait(lambda: not Progress(state.acks, "pg_table").holds, process)
        _wait(lambda: _checksum(source) == _checksum(target), process)
        again = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        if process.wait(60):
            raise RuntimeError(log.read_text())
    finally:
        process.kill()
        process.wait()
    return fresh, again


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("pgcdc listen ended, or was too slow")
        time.sleep(0.1)


def _count(url: str) -> int:
    with connect(url) as conn:
        try:
            row = conn.execute("SELECT count(*) FROM keyed").fetchone()
        except psycopg.errors.UndefinedTable:
            return 0
    return int(row[0]) if row else 0


def _checksum(url: str) -> object:
    with connect(url) as conn:
        return conn.execute(CHECKSUM).fetchone()
