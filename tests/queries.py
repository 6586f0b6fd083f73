"""A typed query without a JVM: calls the source as Spark does, offsets and all, so that tests of it are quick."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from databases import Database
from listening import wait_until
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from pgcdc.core.state import Lock, StateDir
from pgcdc.spark.source import ChangeSource

ROWS = 100_000


class Query:
    """One consumer: `load` as a user does, then `run` until everything committed by now is read."""

    def __init__(self, database: Database, folder: Path, **options: str) -> None:
        self.database = database
        self.state = StateDir(folder / "state")
        self.options = {
            "url": database.url, "slot": f"s_{database.name}", "state_dir": str(self.state.path),
            "snapshot_mode": "never", **options
        }  # fmt: skip
        self.offset: dict[str, Any] | None = None
        """What Spark would have in its checkpoint."""
        self.schema: StructType = StructType()
        self.batches: list[list[dict[str, Any]]] = []
        self.reader: Any = None

    def load(self, schema: StructType | None = None, **more: str) -> Query:
        """`spark.readStream....load()` and `start()`; goes on where it stopped."""
        self.close()
        source = ChangeSource({**self.options, **more})
        if schema is not None:
            self.schema = schema
        else:
            made = source.schema()
            assert isinstance(made, StructType)
            self.schema = made
        self.reader = source.streamReader(self.schema)
        if self.offset is None:
            self.offset = self.reader.initialOffset()
        return self

    def run(self, limit: int = ROWS, *, until: int = 1) -> list[dict[str, Any]]:
        """The rows of the batches up to the database's present."""
        self.reader.prepareForTriggerAvailableNow()
        found: list[dict[str, Any]] = []
        while (rows := self.step(limit)) is not None:
            found += rows
        return found

    def step(self, limit: int = ROWS) -> list[dict[str, Any]] | None:
        """One batch; None if there is none."""
        end = self.reader.latestOffset(self.offset, ReadMaxRows(limit))
        if end == self.offset:
            return None
        if self.batches:
            self.reader.commit(self.offset)  # only now, as Spark does: while the next batch is planned
        rows = self.replay(self.offset, end)
        self.offset = end
        self.batches.append(rows)
        return rows

    def replay(self, start: dict[str, Any] | None, end: dict[str, Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for partition in self.reader.partitions(start, end):
            for batch in self.reader.read(partition):
                rows += batch.to_pylist()
        return rows

    def close(self) -> None:
        if self.reader is not None:
            self.reader.stop()
            self.reader = None

    def end(self) -> None:
        """Also the capture."""
        self.close()
        holder = Lock.holder(self.state.capture_lock)
        if holder:
            os.kill(holder["pid"], signal.SIGTERM)
            wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 10, "the capture ends")
