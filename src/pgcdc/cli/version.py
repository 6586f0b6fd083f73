"""`pgcdc version`: what is installed, and which decoder is in use."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed

from pgcdc.core.compiled import has_compiled

__all__ = ["version"]


def version() -> None:
    """Versions of pgcdc and what it stands on, and which decoder is in use."""
    print(f"pgcdc {installed('pgcdc')}")
    decoder = "compiled" if has_compiled("source.postgres.wire._rows") else "python"
    print(f"decoder {decoder}")
    print(f"python {platform.python_version()}, pyspark {installed('pyspark')}, pyarrow {installed('pyarrow')}")
