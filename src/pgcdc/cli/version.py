"""`pgcdc version`: what is installed, and which decoder is in use."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed

__all__ = ["version"]


def version() -> None:
    """Versions of pgcdc and what it stands on, and which decoder is in use."""
    from pgcdc.source.postgres.wire.rows import decoder_name

    print(f"pgcdc {installed('pgcdc')}")
    print(f"decoder {decoder_name()}")
    print(f"python {platform.python_version()}, pyspark {installed('pyspark')}, pyarrow {installed('pyarrow')}")
