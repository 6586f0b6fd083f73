"""Compiled modules; each has a Python twin that does the same. They are missing if no compiler was available at build time;
PGCDC_PURE_PYTHON=1 turns them off."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType


def load_compiled(name: str) -> ModuleType | None:
    """The compiled module `pgcdc.<name>`, or None. Looked up at each call: tests switch between both."""
    if os.environ.get("PGCDC_PURE_PYTHON") == "1":
        return None
    try:
        return importlib.import_module(f"pgcdc.{name}")
    except ImportError:
        return None


def has_compiled(name: str) -> bool:
    """Whether `load_compiled` would find it, without loading anything."""
    return os.environ.get("PGCDC_PURE_PYTHON") != "1" and importlib.util.find_spec(f"pgcdc.{name}") is not None
