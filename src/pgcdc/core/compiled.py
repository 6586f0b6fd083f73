"""Compiled modules, each of which has one in Python beside it that does the same. There is none where no compiler was at
hand when the package was built; PGCDC_PURE_PYTHON=1 does without them on purpose."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType


def load_compiled(name: str) -> ModuleType | None:
    """The compiled module `pgcdc.<name>`, or None. Asked anew each time: tests switch between both."""
    if os.environ.get("PGCDC_PURE_PYTHON") == "1":
        return None
    try:
        return importlib.import_module(f"pgcdc.{name}")
    except ImportError:
        return None


def has_compiled(name: str) -> bool:
    """Whether `load_compiled` would find it; without loading it and all that it needs."""
    return os.environ.get("PGCDC_PURE_PYTHON") != "1" and importlib.util.find_spec(f"pgcdc.{name}") is not None
