"""How much of `src/pgcdc` the tests run, processes that they start included."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_coverage"]

ROOT = Path(__file__).parent.parent
_STARTS_SPARK = re.compile(r"\b(spark|listener|Listener|SparkSession)\b")
_SETTINGS = """\
[run]
source = {source}
data_file = {folder}/data
parallel = true
patch = subprocess
sigterm = true
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
    : \\.\\.\\.$
"""


def measure_coverage(bench: Bench) -> None:
    """Lines of the package that tests run: all tests but the slow ones and those that start Spark."""
    scenarios = [path for path in sorted((ROOT / "tests" / "scenario").glob("test_*.py")) if not _starts_spark(path)]
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-") as folder:
        settings = Path(folder, "coveragerc")
        settings.write_text(_SETTINGS.format(source=ROOT / "src" / "pgcdc", folder=folder))
        coverage = [sys.executable, "-m", "coverage"]
        found = subprocess.run(
            [
                *coverage, "run", f"--rcfile={settings}", "-m", "pytest", "-q", "-m", "not slow", "-n", "2", "--dist",
                "loadfile", "tests/unit", "tests/contract", *map(str, scenarios),
            ],
            cwd=ROOT, env={**os.environ, "COVERAGE_RCFILE": str(settings)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        tests = found.stdout.strip().rpartition("\n")[2].strip("= ")
        if not re.search(r"\d+ passed", tests):
            raise RuntimeError(f"no test ran under coverage: {tests or found.stderr[-300:]}")
        for verb in (["combine", "-q"], ["json", "-q", "-o", f"{folder}/json"]):
            subprocess.run([*coverage, verb[0], f"--rcfile={settings}", *verb[1:]], cwd=ROOT, check=True)
        covered = json.loads(Path(folder, "json").read_text())["totals"]["percent_covered"]
    bench.add("coverage.lines", covered, f"without the tests that start Spark, so it is a lower bound; {tests}")


def _starts_spark(path: Path) -> bool:
    return bool(_STARTS_SPARK.search(path.read_text()))
