"""Unchanged TOAST values: what the cache costs the capture, on a backlog in which every second change needs it."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from backlog import run_child
from workload import connect, copied_slot, drop_slot, new_slot

__all__ = ["drop_toast", "prepare_toast", "run_toast"]

SLOT = "bench_toast"
ROWS_PER_TRANSACTION = 1000
# A row is TOASTed when it is longer than 2 kB, or has out-of-line values already. So rows are made long before the slot,
# with a column that compresses to nothing; behind it their values stay out of line and can be short: it is the cost for each
# row that counts.
_TABLE = """
CREATE TABLE toasted (id int PRIMARY KEY, n int, body text STORAGE EXTERNAL, pad text STORAGE MAIN)
    WITH (toast_tuple_target = 128, fillfactor = 50)
"""
_FILL = """
CREATE PROCEDURE fill_toasted(total int, step int) LANGUAGE plpgsql AS $$
BEGIN
    FOR k IN 1..total BY step LOOP
        UPDATE toasted SET pad = '', body = repeat(md5(id::text), 6) WHERE id BETWEEN k AND k + step - 1;
        COMMIT;
    END LOOP;
    FOR k IN 0..total - 1 BY step LOOP  -- 7919 is a prime number: every row once, scattered
        UPDATE toasted SET n = n + 1
            WHERE id IN (SELECT j::bigint * 7919 % total + 1 FROM generate_series(k, k + step - 1) j);
        COMMIT;
    END LOOP;
END $$
"""


def prepare_toast(url: str, keys: int) -> None:
    """A slot, and behind it for every key one change that sets its value and one that leaves it alone."""
    with connect(url) as conn:
        conn.execute("SET synchronous_commit = off")
        conn.execute(_TABLE)
        conn.execute("CREATE PUBLICATION bench_toast FOR TABLE toasted")
        conn.execute(
            "INSERT INTO toasted SELECT k, 0, repeat(md5(k::text), 7), repeat('p', 2100) FROM generate_series(1, %s) k",
            [keys],
        )
        conn.execute(_FILL)
        new_slot(conn, SLOT)
        conn.execute("CALL fill_toasted(%s, %s)", [keys, ROWS_PER_TRANSACTION])
        conn.execute("CHECKPOINT")


def run_toast(url: str, mode: str, keys: int, number: int) -> dict[str, Any]:
    """Read the backlog into a spool, as the capture process does, with one mode."""
    folder = tempfile.mkdtemp(prefix="pgcdc-bench-")
    try:
        with copied_slot(url, SLOT, f"{SLOT}_{mode}_{number}") as slot:
            return run_child("toast_child.py", slot, str(2 * keys), mode, str(keys * 3 // 2), folder, url=url)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drop_toast(url: str) -> None:
    """Let the server forget it."""
    with connect(url) as conn:
        drop_slot(conn, SLOT)
        conn.execute("DROP TABLE toasted")
        conn.execute("DROP PUBLICATION bench_toast")
        conn.execute("DROP PROCEDURE fill_toasted")
        conn.execute("CHECKPOINT")
