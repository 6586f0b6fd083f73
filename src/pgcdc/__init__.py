"""pgcdc: every change of a database, delivered anywhere, exactly once, on Spark.

import pgcdc
spark = pgcdc.session()
events = spark.readStream.format("pgcdc").option("tables", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import (
    ConfigError,
    ConnectionLost,
    ConversionError,
    DecodeError,
    GapError,
    PgcdcError,
    Reject,
    SchemaChanged,
    SinkError,
    SinkRejected,
    SinkUnavailable,
    SourceError,
    SpoolError,
    StateError,
    TransformError,
)
from pgcdc.core.position import Position

if TYPE_CHECKING:
    from pgcdc import adapters, functions, sources, transform
    from pgcdc.run.pipeline import Pipeline
    from pgcdc.sink.contract import Sink, SinkContext
    from pgcdc.sink.spec import SinkOptions
    from pgcdc.source.postgres.wire.stream import Capture, open_capture
    from pgcdc.spark.session import register, session
    from pgcdc.spark.tables import describe, read_snapshot, read_table, read_tables
    from pgcdc.spool.segment import CaptureBatch

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
    "Reject",
    "SchemaChanged",
    "Sink",
    "SinkContext",
    "SinkError",
    "SinkOptions",
    "SinkRejected",
    "SinkUnavailable",
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
    "Capture": "pgcdc.source.postgres.wire.stream",
    "CaptureBatch": "pgcdc.spool.segment",
    "Pipeline": "pgcdc.run.pipeline",
    "Sink": "pgcdc.sink.contract",
    "SinkContext": "pgcdc.sink.contract",
    "SinkOptions": "pgcdc.sink.spec",
    "describe": "pgcdc.spark.tables",
    "open_capture": "pgcdc.source.postgres.wire.stream",
    "read_snapshot": "pgcdc.spark.tables",
    "read_table": "pgcdc.spark.tables",
    "read_tables": "pgcdc.spark.tables",
    "register": "pgcdc.spark.session",
    "session": "pgcdc.spark.session",
}


def __getattr__(name: str) -> Any:
    """Import what needs Spark or a driver only when it is asked for."""
    from importlib import import_module

    if name in ("adapters", "functions", "sources", "transform"):
        return import_module(f"pgcdc.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'pgcdc' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
