"""pgcdc: every change of a database, delivered anywhere, exactly once, on Spark.

import pgcdc
spark = pgcdc.session()
events = spark.readStream.format("pgcdc").option("tables", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgcdc.errors import (
    ConfigError,
    ConnectionLost,
    ConversionError,
    DecodeError,
    GapError,
    PgcdcError,
    SchemaChanged,
    SinkError,
    SourceError,
    SpoolError,
    StateError,
    TransformError,
)
from pgcdc.position import Position

if TYPE_CHECKING:
    from pgcdc import adapters, functions, sources, transform
    from pgcdc.capture.batch import CaptureBatch
    from pgcdc.capture.stream import Capture, open_capture
    from pgcdc.pipeline import Pipeline
    from pgcdc.stream.session import register, session
    from pgcdc.stream.tables import read_snapshot, read_table, read_tables
    from pgcdc.types.describe import describe

__all__ = [
    "Capture",
    "CaptureBatch",
    "ConfigError",
    "ConnectionLost",
    "ConversionError",
    "DecodeError",
    "GapError",
    "PgcdcError",
    "Pipeline",
    "Position",
    "SchemaChanged",
    "SinkError",
    "SourceError",
    "SpoolError",
    "StateError",
    "TransformError",
    "adapters",
    "describe",
    "functions",
    "open_capture",
    "read_snapshot",
    "read_table",
    "read_tables",
    "register",
    "session",
    "sources",
    "transform",
]

_LAZY = {
    "Capture": "pgcdc.capture.stream",
    "CaptureBatch": "pgcdc.capture.batch",
    "Pipeline": "pgcdc.pipeline",
    "describe": "pgcdc.types.describe",
    "open_capture": "pgcdc.capture.stream",
    "read_snapshot": "pgcdc.stream.tables",
    "read_table": "pgcdc.stream.tables",
    "read_tables": "pgcdc.stream.tables",
    "register": "pgcdc.stream.session",
    "session": "pgcdc.stream.session",
}


def __getattr__(name: str) -> Any:
    """Import what needs Spark or a driver only when it is asked for."""
    from importlib import import_module

    if name in ("adapters", "functions", "sources", "transform"):
        return import_module(f"pgcdc.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'pgcdc' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
