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

    @property
    def chains(self) -> Sequence[Chain]:
        """One for each sink that asked."""

    def source_options(self) -> dict[str, str]:
        """Options of the Spark source that the query needs (never a secret: they stand in Spark's plans)."""

    def source_schema(self) -> str:
        """The columns to read, as Spark DDL; "": those that the source has."""

    def records_per_batch(self) -> int:
        """What the query needs as `spark.sql.execution.arrow.maxRecordsPerBatch`."""

    def project(self, events: DataFrame) -> DataFrame:
        """What the source gives, as it is collected. Meant for the streaming DataFrame, where it is planned once."""

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        """For each chain its events in stream order (`stream.events.LINES`), of a batch behind `project`.

        Runs one Spark job.
        """
