"""Draining a backlog: pg_recvlogical, the capture, and the way through Spark to a file, on copies of one slot."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from usage import PeakMemory
from workload import PUBLICATION, Backlog, copied_slot

from pgcdc.playground.postgres import find_binaries

__all__ = [
    "Contender",
    "Unavailable",
    "our_contenders",
    "quick_contenders",
    "recvlogical",
    "run_child",
    "run_contenders",
    "run_recvlogical",
    "through_envelopes",
    "through_transforms",
    "typed",
]

HERE = Path(__file__).parent


class Unavailable(Exception):
    """A peer that cannot run here, and why."""


@dataclass(slots=True)
class Contender:
    """One way to read the backlog, and what each of its runs said.

    A run gives `took_s`, `cpu_s` and `peak_rss_bytes`, and `changes` if it did not get through all of them.
    """

    key: str
    name: str
    run: Callable[[str, str, Backlog], dict[str, Any]]
    plugin: str = "pgoutput"
    is_peer: bool = False
    """Of somebody else: it may be missing or fail, which is then said in the table."""
    note: str = ""
    reason: str = ""
    """Why it did not run."""
    runs: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        """The median over the runs."""
        return float(statistics.median(run[key] for run in self.runs))

    def worst(self, key: str) -> float:
        """The largest over the runs."""
        return float(max(run[key] for run in self.runs))


def our_contenders() -> list[Contender]:
    """The capture alone, and the whole pipeline."""
    return [
        Contender("arrow", "capture to Arrow", _run_arrow),
        Contender("spark", "through Spark to a file", _run_spark),
    ]


SIMPLE: list[dict[str, Any]] = [
    {"type": "drop_columns", "columns": ["flag"]},
    {"type": "rename_fields", "fields": {"short": "title"}},
    {"type": "mask", "columns": ["title"], "mode": "hash"},
    {"type": "mask", "columns": ["amount"], "mode": "redact"},
    {"type": "filter", "operations": ["INSERT", "UPDATE", "DELETE"]},
]
"""Built-in transforms together. They leave no event out, so that as many arrive as without them."""
WHERE: dict[str, Any] = {"type": "filter", "where": "operation = 'DELETE' OR row['id'] IS NOT NULL"}


def through_transforms() -> list[Contender]:
    """The way to a file without transforms, with those that the source does, with a condition in SQL, and with both."""
    return [
        Contender("spark", "through Spark to a file", _run_spark),
        Contender("simple", "the same with five transforms", _run_with(SIMPLE)),
        Contender("where", "the same with a condition in SQL", _run_with([WHERE])),
        Contender("both", "the same with the five and the condition", _run_with([*SIMPLE, WHERE])),
    ]


def through_envelopes() -> list[Contender]:
    """The way to a file with the plain event, and in envelopes."""
    return [
        Contender("spark", "through Spark to a file", _run_spark),
        Contender("debezium", "the same in Debezium's envelope", _run_with([{"type": "debezium"}])),
        Contender("cloudevents", "the same as CloudEvents", _run_with([{"type": "cloudevents"}])),
    ]


def quick_contenders() -> list[Contender]:
    """The core ones, for `make bench-quick`."""
    return [recvlogical(), *our_contenders(), through_transforms()[2], through_envelopes()[1]]


def _run_with(transforms: list[dict[str, Any]]) -> Callable[[str, str, Backlog], dict[str, Any]]:
    return lambda url, slot, backlog: _run_through_spark(
        "spark_child.py", "lines", url, slot, backlog, json.dumps({"transforms": {"global": transforms}})
    )


def typed() -> Contender:
    """Typed rows of one table through Spark, to a sink that does nothing."""
    return Contender("typed", "typed rows through Spark to a no-op sink", _run_typed)


def recvlogical() -> Contender:
    """The yardstick: the client of PostgreSQL itself, which throws away what it gets."""
    return Contender("recvlogical", "pg_recvlogical > /dev/null", _run_recvlogical)


def run_contenders(
    url: str, backlog: Backlog, contenders: Sequence[Contender], rounds: int, say: Callable[[str], None]
) -> dict[str, Contender]:
    """All contenders in every round, every other round backwards: what disturbs the machine disturbs all of them."""
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender.reason:
                continue
            try:
                slot_name = f"bench_{contender.key}_{number}"
                with copied_slot(url, backlog.slot, slot_name, contender.plugin) as slot:
                    result = {"changes": backlog.changes, **contender.run(url, slot, backlog)}
            except (Unavailable, RuntimeError, psycopg.Error) as error:
                if not contender.is_peer:
                    raise
                contender.reason = str(error).splitlines()[0]
                say(f"round {number + 1} of {rounds}, {contender.name}: skipped, {contender.reason}")
                continue
            result["rate"] = result["changes"] / result["took_s"]
            contender.runs.append(result)
            told = f"{result['took_s']:.2f} s, {result['rate']:,.0f} changes/s"
            say(f"round {number + 1} of {rounds}, {contender.name}: {told}")
    return {contender.key: contender for contender in contenders}


def run_recvlogical(url: str, slot: str, backlog: Backlog, *options: str) -> dict[str, Any]:
    """`pg_recvlogical` until the end of the backlog; `options` are the plugin's."""
    command: list[str | Path] = [find_binaries() / "pg_recvlogical", "-d", url, "--slot", slot, "--start", "--no-loop"]
    command += ["--endpos", backlog.end_lsn, "-f", "-"]
    for option in options:
        command += ["-o", option]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PGSSLMODE": "disable"})
    with PeakMemory(process.pid) as memory:
        _, status, used = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"pg_recvlogical ended with code {process.returncode}")
    return {"took_s": took_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_rss_bytes": memory.peak_bytes}


def _run_recvlogical(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    return run_recvlogical(url, slot, backlog, "proto_version=1", f"publication_names={PUBLICATION}")


def _run_arrow(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    result = run_child("capture_child.py", "drain", slot, str(backlog.changes), url=url)
    _check_count(result["rows"], backlog)
    return result


def _run_spark(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    return _run_through_spark("spark_child.py", "lines", url, slot, backlog)


def _run_typed(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    return _run_through_spark("typed_child.py", "rows", url, slot, backlog)


def _run_through_spark(script: str, counted: str, url: str, slot: str, backlog: Backlog, *more: str) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="pgcdc-bench-")
    try:
        result = run_child(script, slot, str(backlog.changes), folder, *more, url=url, tree=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _check_count(result[counted], backlog)
    return result


def run_child(script: str, *arguments: str, url: str, tree: bool = False) -> dict[str, Any]:
    """Run one of our scripts and return what it printed; its last line is JSON.

    With `tree`, the peak of its memory is that of the whole tree of processes, seen from here.
    """
    environment = {**os.environ, "PGCDC_DB": url, "PGSSLMODE": "disable", "PGCDC_MASK_KEY": "a key for measurements"}
    command = [sys.executable, str(HERE / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    if tree:
        with PeakMemory(process.pid, tree=True) as memory:
            said, _ = process.communicate()
    else:
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{script} ended with code {process.returncode}")
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer | ({"peak_rss_bytes": memory.peak_bytes} if tree else {})


def _check_count(found: int, backlog: Backlog) -> None:
    if found != backlog.changes:
        raise RuntimeError(f"{found} changes arrived, {backlog.changes} were made")
