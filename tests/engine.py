"""The engine of incremental snapshots, step by step: the test decides what the stream has told at which moment."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import psycopg
from databases import Database

from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relations
from pgcdc.core.state import StateDir
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.slots import create_slot
from pgcdc.source.postgres.snapshot.driver import Snapshots
from pgcdc.source.postgres.snapshot.releases import Release
from pgcdc.source.postgres.snapshot.requests import SnapshotRequest, new_id
from pgcdc.source.postgres.wire.stream import Capture


class Engine:
    """An engine with a real stream that is read only when the test says so."""

    def __init__(self, database: Database, folder: Path, tables: str, publication: str = "") -> None:
        self.database = database
        slot = f"e_{database.name}"
        with psycopg.connect(database.url, autocommit=True) as conn:
            conn.execute(publication or f"CREATE PUBLICATION p FOR TABLE {tables}")
        with psycopg.connect(f"{database.url}?replication=database", autocommit=True) as conn:
            lsn = create_slot(conn, slot)
        self.state = StateDir(folder / "engine")
        self.state.create()
        options = PostgresOptions(db=database.url)
        self.snapshots = Snapshots(options, ["p"], self.state, Position.end(lsn), "pgcdc test")
        self.queue, self.releases, self.engine = self.snapshots.queue, self.snapshots.releases, self.snapshots.beside
        self.capture = Capture(
            database.url, slot=slot, publications=["p"], start_lsn=lsn, confirmed_lsn=lsn, relations=Relations()
        )
        self.capture.connect()
        self.end = Position.end(lsn)
        self.events: list[tuple[str, Any, Any]] = []
        """(operation, new, old) of changes and releases, in the order of their places."""

    def close(self) -> None:
        self.snapshots.close()
        self.capture.close()

    def add(self, table: str, **more: Any) -> str:
        request = SnapshotRequest(new_id(), table, **more)
        self.queue.add(request)
        return request.id

    def status(self, name: str) -> str:
        return self.queue[name].status

    def step(self) -> Release | None:
        """One turn of the loop; a release becomes visible at once."""
        release = self.snapshots.step(self.end, may_work=True)
        if release is not None:
            for batch in self.releases.batches(release, Relations()):
                self._note(batch.data.to_pylist())
            self.end = release.end
        return release

    def read(self) -> None:
        """Let the reader read what it was told to, and take it."""
        assert self.snapshots.readers.orders
        assert select.select([self.snapshots.readers], [], [], 30)[0], "the chunk is read"
        self.snapshots.step(self.end, may_work=False)

    def catch_up(self) -> None:
        """Read the stream up to now, as the capture process does."""
        row = self.database.query("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0]
        with self.database.connect() as conn:  # so that everything before is flushed
            conn.execute("SELECT pg_logical_emit_message(true, 'flush', '')")
        self.capture.target_lsn = int(row[0])
        deadline = time.monotonic() + 30
        while self.end.commit < int(row[0]):
            assert time.monotonic() < deadline
            batch = self.capture.receive_batch(timeout_s=0.05)
            self.capture.ask_for_progress()
            if batch is not None:
                self.engine.see(batch)
                self._note(batch.data.to_pylist())
                self.end = max(self.end, batch.end)

    def begin(self, table: str, **more: Any) -> str:
        """A request whose first chunk is read, but not released: the window is open."""
        name = self.add(table, **more)
        self.step()
        self.read()  # the look
        self.catch_up()
        self.step()
        self.read()
        return name

    def finish(self, name: str) -> None:
        """Until nothing more happens to it."""
        deadline = time.monotonic() + 60
        while not self.queue[name].is_ended:
            assert time.monotonic() < deadline, self.engine.status()
            if self.snapshots.readers.orders:
                self.read()
            self.catch_up()
            self.step()
            if not self.snapshots.readers.orders:
                time.sleep(min(0.02, self.engine.due_s()))

    def of(self, operation: Op) -> list[Any]:
        return [new if new is not None else old for op, new, old in self.events if op == operation.name]

    def _note(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            new, old = (
                [one.decode() if one is not None else None for one in values] if values is not None else None
                for values in (row["new"], row["old"])
            )
            self.events.append((Op(row["op"]).name, new, old))
