"""One huge transaction: what the capture, and the driver with its workers, hold in memory of it."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from backlog import run_child
from workload import connect, copied_slot, drop_slot, new_slot

__all__ = ["drop_large", "prepare_large", "run_capture", "run_pipeline"]


def prepare_large(url: str, rows: int) -> str:
    """A slot, and behind it one transaction of so many rows."""
    slot = f"bench_large_{rows}"
    with connect(url) as conn:
        conn.execute("TRUNCATE large")
        new_slot(conn, slot)
        conn.execute(
            "INSERT INTO large SELECT k, 'row number ' || k, timestamptz '2026-01-01' + k * interval '1 second' "
            "FROM generate_series(1, %s) k",
            [rows],
        )
        conn.execute("CHECKPOINT")
    return slot


def drop_large(url: str, slot: str) -> None:
    """Let the server forget it."""
    with connect(url) as conn:
        drop_slot(conn, slot)
        conn.execute("TRUNCATE large")
        conn.execute("CHECKPOINT")


def run_capture(url: str, slot: str, rows: int) -> dict[str, Any]:
    """Read it with `open_capture`."""
    with copied_slot(url, slot, f"{slot}_arrow") as copy:
        result = run_child("capture_child.py", "drain", copy, str(rows), url=url)
    if result["rows"] != rows:
        raise RuntimeError(f"{result['rows']} rows arrived, {rows} were inserted")
    return result


def run_pipeline(url: str, slot: str, rows: int) -> dict[str, Any]:
    """Read it through Spark into a file."""
    folder = tempfile.mkdtemp(prefix="pgcdc-bench-")
    try:
        with copied_slot(url, slot, f"{slot}_spark") as copy:
            result = run_child("spark_child.py", copy, str(rows), folder, url=url, tree=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if result["lines"] != rows:
        raise RuntimeError(f"{result['lines']} lines were written, {rows} rows were inserted")
    return result
