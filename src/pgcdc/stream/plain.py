"""Programs of lanes whose sinks want every event as it is: rows travel in blocks, or typed rows as lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from pgcdc.errors import ConfigError
from pgcdc.stream.events import BLOCKS, LINES, unpack_blocks
from pgcdc.transform.program import Chain
from pgcdc.transform.row_json import row_lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BlockProgram", "TypedProgram", "plain_program"]


class BlockProgram:
    """No transform wants the columns of an event: the executors render the JSON, and rows travel in blocks."""

    chains: tuple[Chain, ...] = (Chain(),)

    def source_options(self) -> dict[str, str]:
        """None."""
        return {}

    def source_schema(self) -> str:
        """Blocks."""
        return BLOCKS

    def records_per_batch(self) -> int:
        """One block at a time through the JVM."""
        return 1

    def project(self, events: DataFrame) -> DataFrame:
        """As they are."""
        return events

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        """The events."""
        return [unpack_blocks(batch.toArrow())]


class TypedProgram:
    """Rows of one table with their own columns, as lines (`transform.row_json`)."""

    chains: tuple[Chain, ...] = (Chain(),)

    def source_options(self) -> dict[str, str]:
        """None."""
        return {}

    def source_schema(self) -> str:
        """None: the table says which columns there are."""
        return ""

    def records_per_batch(self) -> int:
        """Many: they are short."""
        return 10_000

    def project(self, events: DataFrame) -> DataFrame:
        """As lines."""
        return row_lines(events)

    def collect(self, batch: DataFrame) -> list[pa.Table]:
        """The lines."""
        return [batch.toArrow().cast(LINES)]


def plain_program(chains: Sequence[Chain]) -> BlockProgram:
    """The program of chains that change nothing."""
    if any(chain != Chain() for chain in chains):
        raise ConfigError("transforms and routes are not there yet", "Leave them out")
    return BlockProgram()
