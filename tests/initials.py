"""A query with an initial snapshot, without a JVM, and what to compare with it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import contents
import psycopg
import pytest
from databases import Database
from listening import wait_until
from pyspark.sql.types import StringType, StructField, StructType
from queries import ROWS, Query

from pgcdc.core.state import Lock

EVENTS = StructType([StructField(name, StringType()) for name in ("position", "json")])
WRITERS = 8


class Initial(Query):
    """All events of a new slot, existing rows first."""

    def __init__(self, database: Database, folder: Path, **options: str) -> None:
        super().__init__(database, folder, **{"snapshot_mode": "initial", "consumer": "c1", **options})
        self._tickets = folder / "tickets"
        self._tickets.mkdir(exist_ok=True)

    def load(self, schema: StructType | None = None, **more: str) -> Initial:
        """Nothing is read of tables before `step_until` or `run` let it be."""
        points = os.environ.get("PGCDC_FAILPOINTS", "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PGCDC_FAILPOINTS", f"{points},reader.ordered=wait")
            patch.setenv("PGCDC_FAILPOINT_TICKETS", str(self._tickets))
            super().load(schema or EVENTS, **more)
            self.reader._open()
        return self

    def run(self, limit: int = ROWS, *, until: int = 1) -> list[dict[str, Any]]:
        self.read_all()
        return super().run(limit, until=until)

    def read_some(self) -> None:
        """Have one more chunk read, if none is to be read yet."""
        if self._tickets.is_dir() and not any(self._tickets.iterdir()):
            (self._tickets / secrets.token_hex(4)).touch()

    def read_all(self) -> None:
        """Have everything read from now on."""
        shutil.rmtree(self._tickets, ignore_errors=True)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Everything that came so far."""
        return [json.loads(row["json"]) for batch in self.batches for row in batch]

    def capture_status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.reader._open().status()
        return status

    def status(self) -> dict[str, Any]:
        """What the capture says about the snapshot."""
        status: dict[str, Any] = self.capture_status()["initial_snapshot"]
        return status

    def percent(self) -> float:
        """How much of the snapshot is published."""
        status = self.status()
        if status["status"] != "reading":
            return 100.0 if status["status"] == "complete" else 0.0
        total = sum(one["estimated_rows"] for one in status["tables"])
        return float(100.0 * sum(one["rows"] for one in status["tables"]) / max(total, 1))

    def step_until(self, percent: float) -> None:
        """Chunks and batches until so much of the snapshot is published."""

        def is_there() -> bool:
            self.read_some()
            self.step()
            return self.percent() >= percent

        wait_until(is_there, 30, f"{percent} % of the snapshot")

    def chunks(self) -> dict[str, dict[str, Any]]:
        """The chunks of the plan."""
        plan = json.loads(self.state.requests_file.read_text())["initial"]
        return {name: one for table in (plan["tables"] or {}).values() for name, one in (table["chunks"] or {}).items()}

    def staged(self) -> set[str]:
        """The chunks that were read, be they released or not."""
        log = self.state.snapshot / "releases.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        released = {json.loads(line.partition(" ")[2])["note"].get("what") for line in lines}
        files = {path.name.partition(".")[0] for path in self.state.snapshot.glob("*.arrow")}
        return (released | files) & self.chunks().keys()

    def kill_capture(self) -> None:
        holder = Lock.holder(self.state.capture_lock)
        assert holder is not None
        os.kill(holder["pid"], signal.SIGKILL)
        wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 10, "the capture is gone")

    def lose_snapshot(self) -> None:
        """The holder ends, as if it was killed."""
        for path in self.state.snapshot.glob("holder-*.json"):
            holder = Lock.holder(path)
            if holder:
                os.kill(holder["pid"], signal.SIGKILL)
                wait_until(lambda path=path: Lock.holder(path) is None, 10, "the holder is gone")  # type: ignore[misc]

    def check_equal(self, keys: Mapping[str, Sequence[str]], *, strict: bool = True) -> None:
        """What came, folded, is what the database has: nothing is missing, nothing came twice."""
        positions = [event["position"] for event in self.events]
        assert positions == sorted(set(positions))
        assert len({event["id"] for event in self.events}) == len(positions)
        with self.database.connect() as conn:
            source = contents.read_tables(conn, keys)
        mine = [event for event in self.events if f"public.{event['channel'][6:]}" in keys]
        found = contents.differences(source, contents.fold_events(mine, keys, strict=strict))
        assert found == [], found[:5]

    def log(self) -> str:
        return (self.state.path / "capture.log").read_text()


@contextlib.contextmanager
def writers(database: Database, table: str, seed: int, ids: int) -> Iterator[list[int]]:
    """Eight of them insert, update, delete and change keys, each its own rows; yields a list that grows with commits."""
    ended = threading.Event()
    commits: list[int] = []
    errors: list[BaseException] = []

    def write(number: int) -> None:
        choose = random.Random(seed * 100 + number)
        fresh = ids * 10 + number
        try:
            with psycopg.connect(database.url) as conn:
                while not ended.is_set():
                    for _ in range(choose.randint(1, 4)):
                        one = choose.randrange(ids // WRITERS) * WRITERS + number
                        fresh += WRITERS
                        statement, values = choose.choice(
                            [
                                ("INSERT INTO {} VALUES (%s, %s, repeat(%s, 3000))", (fresh, "new", str(fresh))),
                                ("UPDATE {} SET v = %s WHERE id = %s", (str(fresh), one)),
                                ("UPDATE {} SET long = repeat(%s, 2500) WHERE id = %s", (str(fresh), one)),
                                ("DELETE FROM {} WHERE id = %s", (one,)),
                                ("UPDATE {} SET id = %s WHERE id = %s", (fresh, one)),
                            ]
                        )
                        conn.execute(statement.format(table).encode(), values)
                    conn.rollback() if choose.random() < 0.1 else conn.commit()
                    commits.append(number)
                    ended.wait(0.02)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield commits
    finally:
        ended.set()
        for thread in threads:
            thread.join(20)
    assert not errors, errors


def fill(database: Database, table: str, rows: int) -> None:
    """A table for the writers."""
    database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text, long text)")
    database.execute(
        f"INSERT INTO {table} SELECT i, 'v' || i, repeat('x', i % 40) FROM generate_series(0, {rows - 1}) i"
    )
