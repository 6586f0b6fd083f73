"""What a lane asks of Spark for its sinks: every batch is read once and collected once, whatever its sinks want of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Chain", "Program"]


@dataclass(frozen=True)
class Chain:
    """What one sink wants: channel patterns (none: all channels), then transforms in order (`transform.specs`)."""

    transforms: tuple[Any, ...] = ()
    routes: tuple[str, ...] = ()


class Program(Protocol):
    """Chains, made ready for one lane."""

    chains: Sequence[Chain]

    def source_options(self) -> dict[str, str]:
        """Options of the Spark source that the query needs (never a secret: they stand in Spark's plans)."""

    def source_schema(self) -> str:
        """The columns to read, as Spark DDL."""

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        """For each chain its events in stream order (`stream.events.LINES`). Runs one Spark job."""
