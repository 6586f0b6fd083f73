"""Reading a table that is there: its rows, and the process that reads them in several ways."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from backlog import run_child
from workload import VALUES, connect

from pgcdc.playground.postgres import find_binaries

__all__ = ["JDBC_JAR", "Runs", "find_psql", "measure_reading"]

TABLE = "existing"
JDBC_JAR = Path("/usr/share/java/postgresql.jar")
"""Debian's libpostgresql-jdbc-java (`make test-servers`)."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Seconds, and CPU seconds on the client's side, of each way to read the table."""

    found: dict[str, list[tuple[float, float]]]

    def took_s(self, name: str) -> float:
        """The median."""
        return statistics.median(took for took, _ in self.found[name])

    def cpu_s(self, name: str) -> float:
        """The median, of all processes on the client's side."""
        return statistics.median(used for _, used in self.found[name])


def measure_reading(url: str, rows: int, rounds: int) -> Runs:
    """Make the table, read it in every way, and drop it."""
    with connect(url) as conn:
        conn.execute(f"CREATE TABLE {TABLE} (LIKE backlog INCLUDING ALL)".encode())
        conn.execute(f"INSERT INTO {TABLE} {VALUES.format(1, rows)}".encode())
        conn.execute(f"VACUUM (ANALYZE) {TABLE}".encode())
        conn.execute("CHECKPOINT")
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
    try:
        return Runs(run_child("snapshot_child.py", TABLE, str(rows), str(rounds), str(folder), url=url))
    finally:
        shutil.rmtree(folder)
        with connect(url) as conn:
            conn.execute(f"DROP TABLE {TABLE}".encode())


def find_psql() -> str:
    """The embedded server's, or the one on the path."""
    own = find_binaries() / "psql"
    return str(own) if own.exists() else shutil.which("psql") or "psql"
