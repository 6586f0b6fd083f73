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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workload import PUBLICATION, Backlog, copied_slot

from pgcdc.playground.postgres import find_binaries

__all__ = ["Contender", "run_child", "run_contenders"]

HERE = Path(__file__).parent


@dataclass(slots=True)
class Contender:
    """One way to read the backlog, and what each of its runs said."""

    name: str
    run: Callable[[str, str, Backlog], dict[str, Any]]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        """The median over the runs."""
        return float(statistics.median(run[key] for run in self.runs))

    def worst(self, key: str) -> float:
        """The largest over the runs."""
        return float(max(run[key] for run in self.runs))


def run_contenders(url: str, backlog: Backlog, rounds: int, say: Callable[[str], None]) -> dict[str, Contender]:
    """All contenders in every round, every other round backwards: what disturbs the machine disturbs all of them."""
    contenders = {
        "recvlogical": Contender("pg_recvlogical > /dev/null", _run_recvlogical),
        "arrow": Contender("capture to Arrow", _run_arrow),
        "spark": Contender("through Spark to a file", _run_spark),
    }
    for number in range(rounds):
        in_turn = list(contenders.items())
        for key, contender in in_turn if number % 2 == 0 else reversed(in_turn):
            with copied_slot(url, backlog.slot, f"bench_{key}_{number}") as slot:
                result = contender.run(url, slot, backlog)
            contender.runs.append(result)
            rate = backlog.changes / result["took_s"]
            say(f"round {number + 1}, {contender.name}: {result['took_s']:.2f} s, {rate:,.0f} changes/s")
    return contenders


def _run_recvlogical(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    command: list[str | Path] = [find_binaries() / "pg_recvlogical", "-d", url, "--slot", slot, "--start", "--no-loop"]
    command += [
        "--endpos",
        backlog.end_lsn,
        "-f",
        "-",
        "-o",
        "proto_version=1",
        "-o",
        f"publication_names={PUBLICATION}",
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PGSSLMODE": "disable"})
    _, status, used = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"pg_recvlogical ended with code {process.returncode}")
    return {"took_s": took_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_rss_bytes": used.ru_maxrss * 1024}


def _run_arrow(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    result = run_child("capture_child.py", "drain", slot, str(backlog.changes), url=url)
    _check_count(result["rows"], backlog)
    return result


def _run_spark(url: str, slot: str, backlog: Backlog) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="pgcdc-bench-")
    try:
        result = run_child("spark_child.py", slot, str(backlog.changes), folder, url=url)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _check_count(result["lines"], backlog)
    return result


def run_child(script: str, *arguments: str, url: str) -> dict[str, Any]:
    """Run one of our scripts and return what it printed; its last line is JSON."""
    environment = {**os.environ, "PGCDC_DB": url, "PGSSLMODE": "disable"}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} ended with code {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _check_count(found: int, backlog: Backlog) -> None:
    if found != backlog.changes:
        raise RuntimeError(f"{found} changes arrived, {backlog.changes} were made")
