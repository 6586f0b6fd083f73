"""A database whose changes are captured by a real process, and what a query would get of them. No Spark."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from databases import Database
from listening import wait_until
from preparing import Wanted, prepare
from pyspark.sql.types import StructType

from pgcdc.capture.control import ControlClient, ensure_capture
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeChange, ShapeHistory
from pgcdc.core.state import Lock, StateDir
from pgcdc.spark.options import parse_options
from pgcdc.spark.source import ChangeReader


class Captured:
    """A database whose changes are captured, and what a query would get of them."""

    def __init__(self, database: Database, folder: Path, **more: Any) -> None:
        self.database = database
        self.state = StateDir(folder / "state")
        self.slot = f"s_{database.name}"
        self._more = more
        self._client: ControlClient | None = None
        self._start: Position | None = None

    def prepare(self) -> None:
        source = Wanted(
            db=self.database.url, slot_name=self.slot, state_dir=str(self.state.path), all_tables=True, **self._more
        )
        self.spec = prepare(source).spec

    def start(self) -> None:
        self.prepare()
        self.begin()

    def begin(self) -> None:
        """Start the capture, or start it again."""
        self.join(ensure_capture(self.spec, is_restart=self._start is not None))

    def join(self, client: ControlClient) -> None:
        self._client = client
        initial, _ = client.join("test")
        self._start = self._start or initial

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        holder = Lock.holder(self.state.capture_lock)
        if holder:
            os.kill(holder["pid"], how)
            wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 10, "the capture ends")

    def execute(self, *statements: str) -> None:
        """In one transaction."""
        with self.database.connect(autocommit=False) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def events(self, **options: str) -> list[dict[str, Any]]:
        """Everything committed up to now."""
        assert self._client is not None and self._start is not None
        schema = StructType().add("position", "string").add("json", "string")
        raw = {"_spool": str(self.state.spool), "schema_events": "true", **options}
        reader = ChangeReader(parse_options(raw), schema)
        spool = reader._open().spool
        target = Position.end(self._client.target())
        while spool.end < target:
            self._client.wait(0.1, target)
            spool.refresh()
        found: list[dict[str, Any]] = []
        for partition in reader.partitions(self._start.to_offset(), spool.end.to_offset()):  # marks may stand behind it
            for batch in reader.read(partition):
                found += map(json.loads, batch.column("json").to_pylist())
        return found

    def schema_changes(self) -> list[list[dict[str, Any]]]:
        return [json.loads(one["payload"]["row"]["changes"]) for one in self.events() if is_schema(one)]

    @property
    def history(self) -> list[ShapeChange]:
        history = ShapeHistory(self.state.shapes_file)
        history.refresh()
        return history.changes


def is_schema(event: dict[str, Any]) -> bool:
    return bool(event["operation"] == "SCHEMA_CHANGE")


def told(events: list[dict[str, Any]]) -> list[Any]:
    """The ids of the rows, and between them what was told of the schema."""
    rows = [(one, one["payload"]["row"]) for one in events]
    return [[c["type"] for c in json.loads(row["changes"])] if is_schema(one) else int(row["id"]) for one, row in rows]
