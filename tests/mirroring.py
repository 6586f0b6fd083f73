"""A mirror without a JVM: the real capture process, the reader of the Spark source, and pg_table behind its runner. What
lanes do between them is done step by step, so that a script of DDL takes a second and a test can kill what it likes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
from databases import Database, drop_database
from listening import wait_until
from psycopg import sql
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import BinaryType, BooleanType, StructField, StructType

from pgcdc.core.errors import ConnectionLost
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.event.batch import Batch, split_forms
from pgcdc.event.events import block_schema, drop_unwanted, event_batch
from pgcdc.event.frame import EventOptions
from pgcdc.run.member import WriteFuture
from pgcdc.run.table_reloads import TableReloads
from pgcdc.sink.contract import Sink
from pgcdc.sink.letters.stores import FileDeadLetters
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.source.protocol import make_source
from pgcdc.spark.source import ChangeSource
from pgcdc.spool.consumers import MAIN
from pgcdc.transform.program import compile_chains
from pgcdc.transform.specs import Chain, column_chain

NAME = "copy"


class Mirror:
    """Tables of a database, kept equal in another one."""

    def __init__(
        self, database: Database, target: str, folder: Path, *, chain: Chain | None = None, **options: str
    ) -> None:
        self.database, self.target, self.folder = database, target, folder
        self.state = StateDir(folder / "state")
        self.chain = chain or Chain(form="tables")
        program = compile_chains([self.chain])
        self._chain = program.source_options()
        self.options = {
            "url": database.url, "slot": f"s_{database.name}", "state_dir": str(self.state.path), "all_tables": "true",
            "consumer": MAIN,
            **self._chain, **options,
        }  # fmt: skip
        self.said: list[str] = []
        self.program = program
        self.reader: Any = None
        self.runner: Any = None
        self.sink_options: dict[str, Any] = {}
        self.delivery: dict[str, Any] = {}
        self._tables_due = 0.0

    def start(self) -> Mirror:
        source = ChangeSource({**self.options})
        blocks = [StructField("block", BinaryType()), StructField("is_last", BooleanType())]
        self.reader = source.streamReader(StructType(blocks))
        self.source = make_source(self.reader._options.source)
        feed = self.reader._open()
        initial, acked = feed.claim()
        sink = self.make_sink()
        letters = FileDeadLetters(self.state.letters_file)
        self.runner = Runner(
            sink,
            self.state.acks,
            NAME,
            DeliveryOptions(max_retries=0, **self.delivery),
            dead_letters=letters,
            say=self.said.append,
        )
        self.runner.chain = lambda: column_chain(self.chain)
        self.runner.open(acked or initial)
        feed.last_status = self._status
        member = SimpleNamespace(name=NAME, sink=self.runner, submit_other=_done)
        lanes: Any = SimpleNamespace(members=lambda: [member])
        self._reloads = TableReloads(feed, lanes, self.said.append)
        self._reloads._is_due = lambda: True  # type: ignore[assignment]
        return self

    def _status(self) -> dict[str, Any]:
        try:
            return {"snapshots": self.snapshots()}
        except ConnectionLost:
            return {}

    def make_sink(self) -> Sink:
        return PgTableOptions(db=self.target, mode="apply", **self.sink_options).make()

    def step(self) -> bool:
        """One batch; False if there is none."""
        self._reloads.follow()
        self.follow_tables()
        start = max(self.reader._open().claim()[1], self.runner.ack).to_offset()
        end = self.reader.latestOffset(start, ReadMaxRows(100_000))
        if end == start:
            return False
        self.runner.write(self.read(start, end))
        self.reader._open().acknowledge(Position.from_offset(end))
        self.reader._feed.spool.forget(Position.from_offset(end))
        return True

    def read(self, start: dict[str, Any], end: dict[str, Any]) -> Batch:
        chain = self.program._pushed[0]  # type: ignore[attr-defined]
        schema, made = block_schema([chain]), []
        for partition in self.reader.partitions(start, end):
            options = EventOptions(described=partition.described, addressed=True)
            for piece in partition.slices:
                found = event_batch([piece], partition.relations, partition.seed, schema, options, [], [chain])
                if found is not None and (found := drop_unwanted(found)).num_rows:
                    made.append(found)
        first, last = Position.from_offset(start), Position.from_offset(end)
        events = pa.Table.from_batches([one.replace_schema_metadata() for one in made], schema)
        return split_forms(Batch(first, last, events), [(0, "tables")], [one.schema.metadata for one in made])[0]

    def follow_tables(self) -> None:
        """As the driver does: capture tables that were created meanwhile."""
        if time.monotonic() >= self._tables_due:
            self._tables_due = time.monotonic() + 0.5
            self.source.follow_tables(self.state)

    def identity(self) -> Identity:
        found = self.state.identity()
        assert found is not None
        return found

    def request(self, content: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.reader._open().request(content)
        return found

    def settle(self, timeout_s: float = 60.0, also: Callable[[], bool] = lambda: True) -> None:
        """Until everything committed by now is there, and nothing is left to be read again."""
        deadline = time.monotonic() + timeout_s
        target = 0
        while True:
            assert time.monotonic() < deadline, (self.runner.progress.holds, self.said[-5:], self.snapshots())
            try:
                target = target or self.reader._open().target()
                self.step()
            except ConnectionLost:
                continue
            if self.runner.ack.commit >= target and self.is_quiet() and also():
                return

    def settle_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Deliver until something is so."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            with suppress(ConnectionLost):
                self.step()

    def capture_pid(self) -> int | None:
        return (Lock.holder(self.state.capture_lock) or {}).get("pid")

    def is_quiet(self) -> bool:
        going = [one for one in self.snapshots() if one["status"] not in ("done", "stopped")]
        return not going and not self.runner.progress.holds

    def snapshots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.request({"do": "snapshot", "action": "list"})["snapshots"]
        return found

    def run(self, *statements: str) -> None:
        with self.database.connect() as conn:
            for statement in statements:
                conn.execute(statement)

    def dead_letters(self) -> list[str]:
        return self.state.letters_file.read_text().splitlines() if self.state.letters_file.exists() else []

    def kill_capture(self) -> None:
        holder = Lock.holder(self.state.capture_lock)
        if holder and "pid" in holder:
            os.kill(holder["pid"], signal.SIGKILL)
            wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 10, "the capture is gone")

    def restart(self) -> None:
        """As after kill -9 of the driver: what is on disk counts."""
        self.runner.close()
        self.reader.stop()
        self.start()

    def end(self) -> None:
        if self.runner is not None:
            self.runner.close()
        if self.reader is not None:
            self.reader.stop()
        if (pid := self.capture_pid()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 10, "the capture ends")


@contextmanager
def mirror_of(database: Database, folder: Path, chain: Chain | None = None) -> Iterator[Mirror]:
    """A mirror in a database of its own on the same server, gone afterwards."""
    name = f"{database.name}_copy"
    with psycopg.connect(database.server.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        made = Mirror(database, database.server.url(name), folder, chain=chain)
        try:
            yield made
        finally:
            made.end()
            drop_database(admin, name)


def _done(do: Callable[[], object]) -> WriteFuture:
    do()
    future = WriteFuture()
    future.set_result(True)
    return future


_COLUMNS = """
SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
AND a.attgenerated = '' ORDER BY a.attname
"""


_OWN = "SELECT relkind::text FROM pg_class WHERE oid = %s::regclass"


def compare(source: str, target: str, tables: Sequence[str]) -> list[str]:
    """What is different, by plain SQL on both sides: an independent oracle. Columns are those of the source, as text."""
    found = []
    settings = "-c TimeZone=UTC -c DateStyle=ISO -c IntervalStyle=iso_8601 -c extra_float_digits=3 -c bytea_output=hex"
    with psycopg.connect(source, options=settings) as here, psycopg.connect(target, options=settings) as there:
        for table in tables:
            columns = [name for (name,) in here.execute(_COLUMNS, (table,))]
            # Rows of inheriting tables are theirs.
            only = "ONLY " if here.execute(_OWN, (table,)).fetchone() == ("r",) else ""
            try:
                known = {name for (name,) in there.execute(_COLUMNS, (table,))}
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                there.rollback()
                if here.execute(f"SELECT count(*) FROM {only}{table}".encode()).fetchone() != (0,):
                    found.append(f"{table}: not at the target")
                continue
            if missing := [name for name in columns if name not in known]:
                found.append(f"{table}: no column {missing}")
                continue
            listed = ", ".join(f'"{name}"::text' for name in columns) or "NULL"
            query = f"SELECT row_text, count(*) FROM (SELECT ROW({listed})::text AS row_text FROM %s) x GROUP BY 1"
            wanted: dict[str, int] = dict(here.execute((query % f"{only}{table}").encode()).fetchall())
            has: dict[str, int] = dict(there.execute((query % table).encode()).fetchall())
            missing_rows = {row: count for row, count in wanted.items() if has.get(row) != count}
            extra = {row: count for row, count in has.items() if wanted.get(row) != count}
            if missing_rows or extra:
                found.append(
                    f"{table} {columns}: {len(missing_rows)} not there {_some(missing_rows)}, "
                    f"{len(extra)} too many {_some(extra)}"
                )
    return found


def _some(rows: dict[str, int]) -> list[str]:
    return [f"{count} x {row[:200]}" for row, count in list(rows.items())[:3]]
