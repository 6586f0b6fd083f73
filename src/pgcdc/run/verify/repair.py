"""`pgcdc verify --repair`: repairs differences through the running capture, then compares them again.

The capture reads the keys that differ again, and sends each row, or its deletion, through the transforms to that
adapter alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pgcdc.core.errors import StateError
from pgcdc.core.state import Lock, StateDir
from pgcdc.core.wording import counted
from pgcdc.run.control import ask_snapshots, list_snapshots
from pgcdc.run.verify.comparing import Comparison
from pgcdc.run.verify.report import Notebook
from pgcdc.source.postgres.snapshot.requests import new_id

POLL_S = 0.5
ENDED = ("done", "failed", "stopped")


def repair(state: StateDir, comparisons: Sequence[Comparison], notebook: Notebook, say: Callable[[str], None]) -> None:
    """Request everything that differs, wait for it, and compare it again."""
    asked: dict[str, Comparison] = {}
    for one in comparisons:
        result = one.result
        if not result.wrong:
            continue
        if not one.has_key:
            result.notes.append(
                f"without a key, a table is repaired as a whole: pgcdc resync --table {result.table} "
                f"--adapter {result.adapter}"
            )
            continue
        name = f"repair-{new_id()}"
        path = state.snapshot_keys / f"{name}.jsonl"
        notebook.copy_keys(one.name, path)
        request = {"id": name, "table": result.table, "kind": "repair", "keys_file": str(path)}
        ask_snapshots(state, {"action": "add", **request, "adapters": [result.adapter]})
        say(f"table {result.table}: sending {counted(result.wrong, 'row')} again to adapter {result.adapter}")
        asked[name] = one
    for name, error in _wait(state, list(asked)).items():
        if error:
            asked[name].result.notes.append(f"not repaired: {error}")
        asked[name].look_again()


def _wait(state: StateDir, names: Sequence[str]) -> dict[str, str]:
    """Wait until these requests have ended. Returns the error of each, or an empty text."""
    ended: dict[str, str] = {}
    while True:  # only the latest ended requests are known
        found = [one for one in list_snapshots(state) if one["id"] in names and one["status"] in ENDED]
        ended |= {one["id"]: one.get("error") or "" for one in found}
        if len(ended) == len(names):
            return ended
        if Lock.holder(state.run_lock) is None:
            raise StateError("the pipeline ended before the repair was complete", "Start it: it resumes the repair")
        time.sleep(POLL_S)
