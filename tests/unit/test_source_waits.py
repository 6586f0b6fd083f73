"""A source that plans a batch of before a restart waits for all of it, and says what it waits for."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql.types import StructType

from pgcdc.core.position import Position
from pgcdc.core.relation import Relations
from pgcdc.spark.capture_client import StaticFeed
from pgcdc.spark.options import parse_options
from pgcdc.spark.source import ChangeReader
from pgcdc.spool.segment import CaptureBatch
from pgcdc.spool.writer import SpoolWriter


class SlowFeed(StaticFeed):
    """The spool grows by one step with every wait, and only because somebody needs it."""

    def __init__(self, spool: Path, writer: SpoolWriter) -> None:
        super().__init__(spool)
        self._writer = writer
        self.asked: list[Position | None] = []

    def wait(self, timeout_s: float, until: Position | None = None) -> bool:
        self.asked.append(until)
        if until is not None:
            self._writer.append(CaptureBatch.advance(self._writer.end.commit + 10, Relations()))
        return True


def test_the_end_of_a_planned_batch_is_asked_for_until_it_is_there(tmp_path: Path) -> None:
    begin, end = Position.end(100), Position.end(125)
    feed = SlowFeed(tmp_path, SpoolWriter(tmp_path, begin))
    reader = ChangeReader(parse_options({"_spool": str(tmp_path)}), StructType())
    reader._feed = feed
    assert reader.partitions(begin.to_offset(), end.to_offset()) == []
    assert feed.asked == [end, end, end]
