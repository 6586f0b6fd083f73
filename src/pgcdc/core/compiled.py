"""Loads compiled modules; each has a Python twin with the same behaviour.

A module is missing if there was no compiler at build time. PGCDC_PURE_PYTHON=1 turns them all off.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType


def load_compiled(name: str) -> ModuleType | None:
    """The compiled module `pgcdc.<name>`, or None. Looked up on every call, because tests switch between both."""
    if os.environ.get("PGCDC_PURE_PYTHON") == "1":
        return None
    try:
        return importlib.import_module(f"pgcdc.{name}")
    except ImportError:
        return None


def has_compiled(name: str) -> bool:
    """Whether `load_compiled` would find the module. Loads nothing."""
    return os.environ.get("PGCDC_PURE_PYTHON") != "1" and importlib.util.find_spec(f"pgcdc.{name}") is not None


def describe_ways(is_short: bool | None = None) -> dict[str, str]:
    """Which fast paths are in use. Loads nothing. `is_short`: whether small batches take the shorter paths in this run;
    None: whether they probably would."""
    if is_short is None:
        found = importlib.util.find_spec("pyspark")
        folders = (found and found.submodule_search_locations) or ()
        has_reader = any(Path(one, "sql", "datasource_internal.py").exists() for one in folders)
        is_short = has_reader and has_short_ways(find_version("pyspark"))
    return {
        "decoder": "compiled" if has_compiled("source.postgres.wire._rows") else "python",
        "small batches": f"{'short' if is_short else 'ordinary'} ways through Spark",
    }


def find_version(package: str) -> str:
    """The version of a package that is installed, or only on the path, like the Python folder of Spark."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        with contextlib.suppress(ImportError):
            return str(getattr(importlib.import_module(package), "__version__", "unknown"))
        return "unknown"


def has_short_ways(spark: str) -> bool:
    """Whether small batches take the shorter paths of `spark.quick` with this version of PySpark: only versions that they
    were tested with. (The variable turns them off.)"""
    return spark.startswith("4.3.") and not os.environ.get("PGCDC_ORDINARY_SPARK")
