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
    from pgcdc import adapters, functions, messages, sources, transform
    from pgcdc.run.pipeline import Pipeline
    from pgcdc.sink.contract import Sink, SinkContext
    from pgcdc.sink.spec import SinkOptions
    from pgcdc.source.postgres.wire.stream import Capture, open_capture
    from pgcdc.sources import describe
    from pgcdc.spark.session import register, session
    from pgcdc.spark.tables import read_snapshot, read_table, read_tables
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
    "messages",
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
    "pgcdc": ("adapters", "functions", "messages", "sources", "transform"),
    "pgcdc.run.pipeline": ("Pipeline",),
    "pgcdc.sink.contract": ("Sink", "SinkContext"),
    "pgcdc.sink.spec": ("SinkOptions",),
    "pgcdc.source.postgres.wire.stream": ("Capture", "open_capture"),
    "pgcdc.sources": ("describe",),
    "pgcdc.spark.session": ("register", "session"),
    "pgcdc.spark.tables": ("read_snapshot", "read_table", "read_tables"),
    "pgcdc.spool.segment": ("CaptureBatch",),
}


def __getattr__(name: str) -> Any:
    """Import Spark and drivers lazily, so that `import pgcdc` works without them."""
    from importlib import import_module

    module = next((module for module, names in _LAZY.items() if name in names), "")
    if not module:
        raise AttributeError(f"module 'pgcdc' has no attribute {name!r}")
    return import_module(f"pgcdc.{name}") if module == "pgcdc" else getattr(import_module(module), name)
