"""Polling in a process of its own: `SLOT CHANGES LIMIT BUDGET_S`. The URL is in PGCDC_DB. Prints one line of JSON.

What came before streaming: look at the next changes as text with pg_logical_slot_peek_changes, handle them, move the slot.
The text is not parsed here, only counted, and there is no pause between two looks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from usage import cpu_s, peak_rss_bytes
from workload import connect

CHANGE = "table "
"""How a row change begins in test_decoding's text; the others are BEGIN and COMMIT."""


def poll(slot: str, changes: int, limit: int, budget_s: float) -> dict[str, Any]:
    """Until every change was seen, or the time is over: each look reads the log from the slot's restart point."""
    peek = "SELECT lsn::text, data FROM pg_logical_slot_peek_changes(%s, NULL, %s, 'skip-empty-xacts', '1')"
    with connect(os.environ["PGCDC_DB"]) as conn:
        found = looks = 0
        wall, cpu = time.perf_counter(), cpu_s()
        while found < changes and time.perf_counter() < wall + budget_s:
            rows = conn.execute(peek, [slot, limit]).fetchall()
            if not rows:
                raise RuntimeError(f"nothing is left after {found} of {changes} changes")
            found += sum(data.startswith(CHANGE) for _, data in rows)
            looks += 1
            conn.execute("SELECT pg_replication_slot_advance(%s, %s)", [slot, rows[-1][0]])
        took_s, used_s = time.perf_counter() - wall, cpu_s() - cpu
    if found > changes:
        raise RuntimeError(f"{found} changes were seen, {changes} were made")
    return {"changes": found, "looks": looks, "took_s": took_s, "cpu_s": used_s, "peak_rss_bytes": peak_rss_bytes()}


if __name__ == "__main__":
    name, *amounts = sys.argv[1:]
    print(json.dumps(poll(name, int(amounts[0]), int(amounts[1]), float(amounts[2]))))
