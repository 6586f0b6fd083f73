"""What is measured: a backlog of mixed changes behind a slot, and a steady trickle of single-row commits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgcdc.playground.postgres import EmbeddedPostgres

__all__ = [
    "PUBLICATION",
    "VALUES",
    "Backlog",
    "Writer",
    "connect",
    "copied_slot",
    "drop_slot",
    "insert_row",
    "new_slot",
    "prepare_backlog",
    "start_server",
    "wait_for_reader",
]

PUBLICATION = "bench"
BACKLOG_SLOT = "bench_backlog"

_SETTINGS = {
    "autovacuum": "off",  # it would run in some of the measurements and not in others
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
    "shared_buffers": "256MB",
}
_TABLE = """
CREATE TABLE {} (
    id int PRIMARY KEY, big bigint, amount numeric(12,2), short text, long text, at timestamptz, flag boolean,
    ratio double precision, day date, doc jsonb)
"""
# Ten text columns, for the decoder alone; three columns without a key, for one huge transaction of inserts.
_TEXTS = "CREATE TABLE texts (" + ", ".join(f"t{n} text" for n in range(10)) + ")"
_LARGE = "CREATE TABLE large (id int, name text, at timestamptz)"
VALUES = """
SELECT k, k * 1000003::bigint, (k % 9999999) / 100.0, 'item ' || k % 1000, left(md5(k::text) || md5((k + 1)::text), 60),
    timestamptz '2026-01-01' + k * interval '1.000037 second', k % 3 = 0, k / 7.0::float8, date '2020-01-01' + k % 2000,
    jsonb_build_object('k', k, 'tag', 'a' || k % 50)
FROM generate_series({}, {}) k
"""
# Totals are exact: after each transaction 75% of all changes are inserts and 20% updates. Rows before id 1 stand there
# before the slot, so that an update or delete always finds its row: ids that are a multiple of 15 are deleted once,
# four others of each 15 are updated once.
_FILL = """
CREATE PROCEDURE fill_backlog(total int) LANGUAGE plpgsql AS $$
DECLARE
    done int := 0; target int; i int := 0; u int := 0; d int := 0; new_i int; new_u int; new_d int;
BEGIN
    PERFORM setseed(0.42);
    WHILE done < total LOOP
        target := least(total, done + 1 + floor(random() * 1000)::int);
        new_i := target * 75 / 100; new_u := target * 20 / 100; new_d := target - new_i - new_u;
        INSERT INTO backlog {values};
        UPDATE backlog SET amount = amount + 1, short = 'changed ' || id % 1000, at = at + interval '1 hour', flag = NOT flag
            WHERE id = ANY (ARRAY(SELECT n / 4 * 15 + n % 4 * 3 + 1 - 990 FROM generate_series(u, new_u - 1) n));
        DELETE FROM backlog WHERE id = ANY (ARRAY(SELECT n * 15 - 990 FROM generate_series(d, new_d - 1) n));
        COMMIT;
        done := target; i := new_i; u := new_u; d := new_d;
    END LOOP;
END $$
"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What stands behind the slot that the contenders get copies of."""

    slot: str
    changes: int
    transactions: int
    end_lsn: str
    wal_bytes: int


def start_server(version: int = 18) -> EmbeddedPostgres:
    """A server of our own with the tables and the publication."""
    server = EmbeddedPostgres.temporary(version=version, settings=_SETTINGS)
    with connect(server.url()) as conn:
        for table in ("backlog", "trickle"):
            conn.execute(sql.SQL(_TABLE).format(sql.Identifier(table)))
        conn.execute("CREATE TABLE waiting (LIKE trickle INCLUDING ALL)")
        conn.execute(_TEXTS.encode())
        conn.execute(_LARGE)
        conn.execute("CREATE PUBLICATION bench FOR TABLE backlog, trickle, waiting, texts, large")
    return server


def connect(url: str) -> psycopg.Connection[Any]:
    """An ordinary connection, one transaction per statement."""
    return psycopg.connect(url, autocommit=True)


def prepare_backlog(url: str, changes: int) -> Backlog:
    """Create the slot, then exactly `changes` changes behind it."""
    with connect(url) as conn:
        conn.execute("SET synchronous_commit = off")
        conn.execute(sql.SQL("INSERT INTO backlog " + VALUES).format(-1000, 0))
        conn.execute(_FILL.replace("{values}", VALUES.format("i + 1", "new_i")).encode())
        new_slot(conn, BACKLOG_SLOT)
        begin = _one(conn, "SELECT pg_current_wal_insert_lsn()::text")
        first = _one(conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        conn.execute("CALL fill_backlog(%s)", [changes])
        # The END of the last commit: with a later one pg_recvlogical would wait for a keepalive, and we would not.
        end = _one(conn, "SELECT pg_current_wal_insert_lsn()::text")
        last = _one(conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        conn.execute("CHECKPOINT")  # flushes, and writes what is dirty now and not during a measurement
        held = _one(conn, "SELECT pg_wal_lsn_diff(%s, %s)::bigint", end, begin)
    return Backlog(BACKLOG_SLOT, changes, last - first, end, held)


def new_slot(conn: psycopg.Connection[Any], name: str) -> None:
    """A persistent slot that begins now."""
    conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])


@contextlib.contextmanager
def copied_slot(url: str, source: str, name: str, plugin: str = "pgoutput") -> Iterator[str]:
    """A copy of a slot at the same position, if wanted with another plugin; dropped at the end."""
    with connect(url) as conn:
        conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s, false, %s)", [source, name, plugin])
        try:
            yield name
        finally:
            drop_slot(conn, name)


def drop_slot(conn: psycopg.Connection[Any], name: str) -> None:
    """Drop a slot whose reader has just gone: its walsender may need a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [name])
            return
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _one(conn: psycopg.Connection[Any], query: str, *values: object) -> Any:
    row = conn.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]


class Writer:
    """Single-row commits at a steady rate from a thread of its own; never in a burst to catch up."""

    def __init__(self, url: str, rate_per_s: float) -> None:
        self.commits = 0
        self._url = url
        self._interval_s = 1 / rate_per_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with connect(self._url) as conn:
            begin = conn.execute("SELECT coalesce(max(id), 0) FROM trickle").fetchone()
            number = begin[0] if begin else 0
            due = time.monotonic()
            while not self._stopping.wait(max(0.0, due - time.monotonic())):
                number += 1
                insert_row(conn, "trickle", number)
                self.commits += 1
                due = max(due + self._interval_s, time.monotonic())


def insert_row(conn: psycopg.Connection[Any], table: str, number: int) -> None:
    """One row, one commit."""
    conn.execute(f"INSERT INTO {table} {VALUES.format(number, number)}".encode())


def wait_for_reader(url: str, slot: str, timeout_s: float = 120.0) -> float:
    """When the server accepted the connection that reads the slot: a little before START_REPLICATION."""
    deadline = time.monotonic() + timeout_s
    with connect(url) as conn:
        while time.monotonic() < deadline:
            row = conn.execute(
                "SELECT extract(epoch FROM a.backend_start)::float8 FROM pg_replication_slots s "
                "JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = %s",
                [slot],
            ).fetchone()
            if row is not None:
                return float(row[0])
            time.sleep(0.01)
    raise RuntimeError(f"nobody began to read slot {slot} within {timeout_s:g} s")
