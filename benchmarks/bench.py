"""One run of the benchmarks: how much is measured, its servers, and what it has found."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pyspark
from backlog import Contender
from figures import Figure
from peers import debezium_version
from workload import Backlog, connect, drop_slot, prepare_backlog, start_server

from pgcdc.core.compiled import has_short_ways, load_compiled
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.spark.quick import is_prefetching

__all__ = [
    "MB",
    "RATE_PER_S",
    "SMALL",
    "Bench",
    "Scale",
    "cpu_us",
    "describe",
    "describe_machine",
    "missing_fast_paths",
    "percentiles",
    "prepare",
]

RATE_PER_S = 50
MB = 1 << 20
COMPILED = ("source.postgres.wire._rows", "source.postgres.snapshot._copy", "event._lines")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    changes: int = 1_000_000
    rounds: int = 3
    decoded_rows: int = 200_000
    large_rows: tuple[int, int] = (1_000_000, 10_000_000)
    toast_keys: int = 1_000_000
    warm_s: float = 15
    latency_s: float = 60
    starts: int = 3
    settle_s: float = 15
    rest_s: float = 75  # Spark ends Python workers that were idle for a minute
    idle_s: float = 30
    reloads: int = 100
    existing_rows: tuple[int, int] = (250_000, 1_000_000)
    posted: int = 20_000


SMALL = Scale(
    changes=50_000, rounds=1, decoded_rows=50_000, large_rows=(100_000, 300_000), toast_keys=50_000, warm_s=5,
    latency_s=10, starts=1, settle_s=5, idle_s=10, existing_rows=(20_000, 100_000), reloads=10, posted=4_000,
)  # fmt: skip
"""To try the benchmarks themselves."""


@dataclass(slots=True)
class Bench:
    """One run: its servers, which start when first needed, and what it has found."""

    scale: Scale
    say: Callable[[str], None]
    figures: list[Figure] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _servers: dict[int, EmbeddedPostgres] = field(default_factory=dict)
    _backlogs: dict[int, Backlog] = field(default_factory=dict)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, key: str, value: float, note: str = "") -> None:
        """A figure of the table in `bars.py`."""
        self.figures.append(Figure(key, value, note))

    def skip(self, key: str, reason: str) -> None:
        """A figure that cannot be measured here."""
        self.figures.append(Figure(key, None, reason))

    def url(self, version: int = 18) -> str:
        """Where the server of this version is."""
        if version not in self._servers:
            self._servers[version] = self._stack.enter_context(start_server(version))
        return self._servers[version].url()

    def backlog(self, version: int = 18) -> Backlog:
        """The backlog on that server, made once."""
        if version not in self._backlogs:
            self.say(f"making {self.scale.changes:,} changes on PostgreSQL {version}")
            made = prepare_backlog(self.url(version), self.scale.changes)
            size = f"{made.changes:,} changes in {made.transactions:,} transactions"
            self.say(f"backlog: {size}, {made.wal_bytes / 1e6:,.0f} MB of WAL")
            self._backlogs[version] = made
        return self._backlogs[version]

    def forget_backlog(self, version: int = 18) -> None:
        """Let the server remove its WAL."""
        made = self._backlogs.pop(version)
        with connect(self.url(version)) as conn:
            drop_slot(conn, made.slot)
            conn.execute("TRUNCATE backlog")
            conn.execute("DROP PROCEDURE fill_backlog")


def missing_fast_paths() -> list[str]:
    """Quick ways that are not in use: figures without them would be of something else."""
    missing = [f"pgcdc.{name} is not compiled" for name in COMPILED if load_compiled(name) is None]
    if not has_short_ways(pyspark.__version__) or not is_prefetching():
        missing.append(f"small batches do not take the short ways through PySpark {pyspark.__version__}")
    return missing


def prepare() -> None:
    """What all figures need: the quick ways, or it ends with code 1, and the archive of Spark's classes, which the first
    `pgcdc listen` would make and be measured with."""
    if missing := missing_fast_paths():
        sys.exit(f"Fast paths are not in use: {'; '.join(missing)}. Run `make install`.")
    subprocess.run([sys.executable, "-m", "pgcdc.run.warm"], check=True)


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p95 and p99."""
    p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
    return p50, p95, p99


def describe(one: Contender) -> str:
    return f"{one.median('rate') / 1e3:,.0f}k changes/s, {cpu_us(one):.2f} µs CPU a change"


def cpu_us(one: Contender) -> float:
    """Microseconds of CPU for each change, of all its processes on the client's side."""
    return one.median("cpu_s") * 1e6 / one.median("changes")


def describe_machine() -> dict[str, str]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    postgres = subprocess.run([find_binaries() / "postgres", "--version"], capture_output=True, text=True, check=True)
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    return {
        "CPU": f"{cpu}, {os.cpu_count()} cores",
        "Memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GB",
        "System": f"{platform.system()} {platform.release()}",
        "Load before the run": f"{os.getloadavg()[0]:.2f} (1 minute average)",
        "Python": platform.python_version(),
        "Java": java[0] if java else "unknown",
        "PySpark": pyspark.__version__,
        "PostgreSQL": postgres.stdout.strip().rpartition(" ")[2],
        "Debezium engine": debezium_version() or "not installed",
    }
