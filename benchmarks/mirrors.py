"""What targets take: a PostgreSQL that mirrors the source, one that gets events, a webhook, and three of them at once.

The yardsticks are PostgreSQL's own: a subscription that applies the same backlog, and COPY of the same rows.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from backlog import run_child
from psycopg import sql
from webhook import receiver, what_arrived
from workload import PUBLICATION, VALUES, Backlog, connect, copied_slot, start_server

from pgcdc.postgres.lsn import parse_lsn

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_append", "measure_apply", "measure_three"]


# --- sections


def measure_apply(bench: Bench) -> None:
    """A mirror in another PostgreSQL, against PostgreSQL's own subscription."""
    source, backlog = bench.url(), bench.backlog()
    found: dict[str, list[dict[str, Any]]] = {"subscription": [], "apply": []}
    with target_server() as target:
        ways = {"subscription": run_subscription, "apply": run_apply}
        for number in range(bench.scale.rounds):
            for name in ways if number % 2 == 0 else reversed(ways):
                found[name].append(ways[name](source, target, backlog, number))
                _tell(bench, f"round {number + 1}, {name}", found[name][-1])
    theirs, ours = _median(found["subscription"], "rate"), _median(found["apply"], "rate")
    cpu_us = _median(found["apply"], "cpu_s") * 1e6 / backlog.changes
    bench.add("apply.subscription", theirs / 1e3)
    bench.add("apply.rate", ours / theirs, f"{ours / 1e3:,.0f}k against {theirs / 1e3:,.0f}k changes/s")
    bench.add("apply.cpu", cpu_us)


def measure_append(bench: Bench) -> None:
    """Events as rows of a table, against COPY of the same rows."""
    source, backlog = bench.url(), bench.backlog()
    found: dict[str, list[dict[str, Any]]] = {"append": [], "copy": []}
    with target_server() as target:
        for number in range(bench.scale.rounds):
            found["append"].append(run_append(source, target, backlog, number))
            found["copy"].append(run_copy(target, backlog))
            for name, runs in found.items():
                _tell(bench, f"round {number + 1}, {name}", runs[-1])
    ours, theirs = _median(found["append"], "rate"), _median(found["copy"], "rate")
    note = f"{ours / 1e3:,.0f}k against {theirs / 1e3:,.0f}k rows/s"
    bench.add("append.rate", ours / theirs, note)


def measure_three(bench: Bench) -> None:
    """File, pg_table append and webhook on one slot."""
    source, backlog = bench.url(), bench.backlog()
    with target_server() as target, receiver() as (url, ours):
        found = run_three(source, target, url, backlog)
        _, arrived, wrong = what_arrived(url, ours)
        if (arrived, wrong) != (backlog.changes, 0):
            raise RuntimeError(
                f"the webhook got {arrived} events, {wrong} of them too late; {backlog.changes} were made"
            )
    _tell(bench, "three adapters", found)
    cpu_us = found["cpu_s"] * 1e6 / (3 * backlog.changes)
    note = f"{found['rate'] / 1e3:,.1f}k changes/s to each of file, pg_table append, webhook (100 events a request)"
    bench.add("three.rate", 3 * found["rate"] / 1e3, note)
    bench.add("three.cpu", cpu_us)


def _median(runs: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def _tell(bench: Bench, what: str, run: dict[str, Any]) -> None:
    bench.say(f"{what}: {run['took_s']:.2f} s, {run['rate']:,.0f} changes/s")


# --- runs


@contextlib.contextmanager
def target_server() -> Iterator[str]:
    """A server beside the source's, with the same tables and the rows that are older than the backlog."""
    with start_server() as server:
        with connect(server.url()) as conn:
            _fill(conn)
        yield server.url()


def _fill(conn: psycopg.Connection[Any]) -> None:
    _forget(conn)
    conn.execute("TRUNCATE backlog")
    conn.execute(sql.SQL("INSERT INTO backlog " + VALUES).format(-1000, 0))
    conn.execute("CHECKPOINT")


def _forget(conn: psycopg.Connection[Any]) -> None:
    """What an earlier run has left: its place belongs to its pipeline."""
    conn.execute("DROP TABLE IF EXISTS pgcdc_events, pgcdc_positions, pgcdc_rejected")


def run_subscription(source: str, target: str, backlog: Backlog, number: int) -> dict[str, Any]:
    """PostgreSQL's own apply worker: from when it is switched on until it has applied the last commit."""
    with copied_slot(source, backlog.slot, f"bench_subscription_{number}") as slot, connect(target) as conn:
        _fill(conn)
        # The user that runs the server of the benchmark may do everything, and there is no password to hide.
        conn.execute(
            sql.SQL(
                "CREATE SUBSCRIPTION bench CONNECTION {} PUBLICATION {} WITH (create_slot = false, slot_name = {}, "
                "copy_data = false, enabled = false, streaming = on)"
            ).format(sql.Literal(source), sql.Identifier(PUBLICATION), sql.Literal(slot))
        )
        try:
            name = "pg_" + str(_one(conn, "SELECT oid FROM pg_subscription WHERE subname = 'bench'"))
            end = parse_lsn(backlog.end_lsn)
            began = time.perf_counter()
            conn.execute("ALTER SUBSCRIPTION bench ENABLE")
            while int(_one(conn, "SELECT coalesce(pg_replication_origin_progress(%s, false) - '0/0', 0)", name)) < end:
                time.sleep(0.01)
            took_s = time.perf_counter() - began
        finally:
            conn.execute("ALTER SUBSCRIPTION bench DISABLE")
            conn.execute("ALTER SUBSCRIPTION bench SET (slot_name = NONE)")
            conn.execute("DROP SUBSCRIPTION bench")
    _check_equal(source, target)
    return {"took_s": took_s, "rate": backlog.changes / took_s}


def run_apply(source: str, target: str, backlog: Backlog, number: int) -> dict[str, Any]:
    """The same by `pg_table` in the mode `apply`: from START_REPLICATION until its transaction has committed the last."""
    with connect(target) as conn:
        _fill(conn)
    result = _run(source, backlog, f"bench_apply_{number}", _pg_table(target, mode="apply"))
    _check_equal(source, target)
    return result


def run_append(source: str, target: str, backlog: Backlog, number: int) -> dict[str, Any]:
    """Every event as a row of a table."""
    with connect(target) as conn:
        _forget(conn)
    result = _run(source, backlog, f"bench_append_{number}", _pg_table(target, mode="append"))
    with connect(target) as conn:
        _check_count(conn, "pgcdc_events", backlog)
    return result


def run_copy(target: str, backlog: Backlog) -> dict[str, Any]:
    """COPY FROM a file of the rows that `run_append` has left, into a table with the same columns and indexes."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-") as folder, connect(target) as conn:
        path = Path(folder) / "rows"
        with open(path, "wb") as file, conn.cursor().copy("COPY pgcdc_events TO STDOUT") as copy:
            for piece in copy:
                file.write(piece)
        conn.execute("DROP TABLE IF EXISTS copied")
        conn.execute("CREATE TABLE copied (LIKE pgcdc_events INCLUDING ALL)")
        conn.execute("CHECKPOINT")
        began = time.perf_counter()
        with open(path, "rb") as file, conn.cursor().copy("COPY copied FROM STDIN") as copy:
            while piece := file.read(1 << 20):
                copy.write(piece)
        took_s = time.perf_counter() - began
        _check_count(conn, "copied", backlog)
    return {"took_s": took_s, "rate": backlog.changes / took_s}


def run_three(source: str, target: str, url: str, backlog: Backlog) -> dict[str, Any]:
    """File, `pg_table append` and a webhook (100 events a request) on one slot."""
    with connect(target) as conn:
        _forget(conn)
    settings = {
        **_pg_table(target, mode="append"),
        "adapters": ["file", "pg_table", "webhook"],
        "webhook_url": url,
        "webhook_batch_size": 100,
        "webhook_allow_private": True,
    }
    result = _run(source, backlog, "bench_three", settings)
    if result["lines"] != backlog.changes:
        raise RuntimeError(f"{result['lines']} lines were written, {backlog.changes} changes were made")
    with connect(target) as conn:
        _check_count(conn, "pgcdc_events", backlog)
    return result


def _pg_table(target: str, mode: str) -> dict[str, Any]:
    return {"adapters": ["pg_table"], "pg_table_db": target, "pg_table_mode": mode}


def _run(source: str, backlog: Backlog, slot_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="pgcdc-bench-")
    try:
        with copied_slot(source, backlog.slot, slot_name) as slot:
            more = json.dumps({**settings, "end": backlog.end_lsn})
            result = run_child("spark_child.py", slot, str(backlog.changes), folder, more, url=source)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result | {"rate": backlog.changes / result["took_s"]}


def _check_equal(source: str, target: str) -> None:
    """Every row of the mirror is that of the source."""
    query = "SELECT count(*), md5(string_agg(md5(b::text), '' ORDER BY id)) FROM backlog b"
    with connect(source) as one, connect(target) as other:
        if one.execute(query).fetchone() != other.execute(query).fetchone():
            raise RuntimeError("the target's table is not the source's")


def _check_count(conn: psycopg.Connection[Any], table: str, backlog: Backlog) -> None:
    found = _one(conn, f"SELECT count(*) FROM {table}")
    if found != backlog.changes:
        raise RuntimeError(f"{found} rows in {table}, {backlog.changes} changes were made")


def _one(conn: psycopg.Connection[Any], query: str, *values: object) -> Any:
    row = conn.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]
