"""Incremental snapshots in tests: ask for them, read events without a JVM, and fold these to what a target has."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
from databases import Database
from listening import wait_until
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType
from queries import Query

from pgcdc.core.errors import ConnectionLost
from pgcdc.core.position import Position
from pgcdc.core.state import Lock

_TEXTS = MapType(StringType(), StringType())
_EVENTS = StructType(
    [StructField(name, StringType()) for name in ("position", "operation", "table", "channel")]
    + [StructField(name, _TEXTS) for name in ("row", "old")]
    + [StructField("unchanged_toast_columns", ArrayType(StringType()))]
)
LONG = 5_000
"""Bytes that PostgreSQL stores out of line if they do not compress."""


def long_text(seed: int) -> str:
    return random.Random(seed).randbytes(LONG // 2).hex()


def _patiently(ask: Callable[[], Any]) -> Any:
    """Ask again while the server is being restarted."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return ask()
        except ConnectionLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Backfill(Query):
    """A query of events, with requests for snapshots, and what it has delivered so far."""

    def __init__(self, database: Database, folder: Path, **options: str) -> None:
        super().__init__(database, folder, **({"all_tables": "true"} | options))
        self.events: list[dict[str, Any]] = []

    def load(self, schema: StructType | None = None, **more: str) -> Backfill:
        super().load(schema or _EVENTS, **more)
        return self

    def ask(self, **content: Any) -> dict[str, Any]:
        """One request at the control socket; a capture that was killed is started again, as a query does."""
        feed = self.reader._open()
        content = {"do": "snapshot", **content}
        found: dict[str, Any] = _patiently(lambda: feed.request(content))
        return found

    def add(self, table: str, **content: Any) -> str:
        return str(self.ask(action="add", table=table, **content)["id"])

    def states(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in self.ask(action="list")["snapshots"]}

    def pull(self) -> None:
        """Everything that is committed by now."""
        target = _patiently(self.reader._open().target)
        while self.offset is None or Position.from_offset(self.offset).commit < target:
            self.events += self.step() or []

    def drain(self) -> None:
        """The same when nothing happens any more, and what was released since."""
        # Writers may not have waited for their flush: the next commit that does takes them with it.
        self.database.execute("SELECT pg_logical_emit_message(true, 'flush', '')")
        self.pull()
        while (rows := self.step()) is not None:
            self.events += rows

    def pull_until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Deliver until something is so."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.states()
            self.pull()

    def complete(self, *names: str, timeout_s: float = 60) -> None:
        """Deliver until these snapshots are done."""

        def is_done() -> bool:
            states = self.states()
            failed = [states[name] for name in names if states[name]["status"] in ("failed", "stopped")]
            assert not failed, failed
            return all(states[name]["status"] == "done" for name in names)

        self.pull_until(is_done, timeout_s)

    def kill(self) -> None:
        """kill -9 of the capture; the next who needs it starts it again."""
        holder = Lock.holder(self.state.capture_lock)
        assert holder is not None and "pid" in holder
        os.kill(holder["pid"], signal.SIGKILL)
        wait_until(lambda: Lock.holder(self.state.capture_lock) is None, 10, "the capture is gone")

    def of(self, table: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["table"] == table]

    def marks(self) -> list[str]:
        found = [event for event in self.events if event["channel"] == "pgcdc:_snapshot"]
        return [f"{event['operation']} {dict(event['row'])['table']}" for event in found]


def fold(events: Sequence[dict[str, Any]], table: str, key: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What a target has that takes every event as it comes. Positions must grow: nothing twice, nothing out of order."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    last = ""
    for event in events:
        assert event["position"] > last, (event["position"], last)
        last = event["position"]
        if event["table"] != table:
            continue
        operation, row, old = event["operation"], dict(event["row"] or ()), dict(event["old"] or ())
        if operation == "TRUNCATE":
            rows.clear()
            continue
        new_key = tuple(row[name] for name in key)
        if operation == "DELETE":
            rows.pop(new_key, None)
            continue
        old_key = tuple(old.get(name, row[name]) for name in key)
        before = rows.pop(old_key, {}) if operation == "UPDATE" else {}
        for name in event["unchanged_toast_columns"] or ():
            assert operation != "SNAPSHOT", "a row of a snapshot is whole"
            row[name] = before.get(name, "(never seen)")
        rows[new_key] = row
    return rows


def contents(database: Database, table: str, key: Sequence[str], where: str = "true") -> dict[tuple[Any, ...], Any]:
    """The table, in the texts of the stream."""
    with psycopg.connect(database.url, autocommit=True) as conn:
        conn.execute("SET extra_float_digits = 3; SET TimeZone = 'UTC'; SET IntervalStyle = 'iso_8601'")
        cursor = conn.execute(f"SELECT * FROM {table} WHERE {where}".encode())
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        texts = ", ".join(f"format('%s', \"{name}\")" for name in names)
        nulls = ", ".join(f'"{name}" IS NULL' for name in names)
        found = conn.execute(f"SELECT {texts}, {nulls} FROM {table} WHERE {where}".encode()).fetchall()
    rows: dict[tuple[Any, ...], Any] = {}
    for one in found:
        row = {name: None if one[len(names) + at] else one[at] for at, name in enumerate(names)}
        rows[tuple(row[name] for name in key)] = row
    return rows


class Writers:
    """Connections that insert, update, delete and move rows of `t (id, n, note, doc)` as fast as they may."""

    def __init__(
        self, database: Database, seed: int, *, count: int = 8, rows: int = 400, pause_s: float = 0.004
    ) -> None:
        self._database, self._rows, self._pause_s = database, rows, pause_s
        self._ended = threading.Event()
        self.commits = 0
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed * 100 + one,)) for one in range(count)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30)
        assert not self.errors, self.errors

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._ended.is_set():
            try:
                with self._database.connect() as conn:
                    if chance.random() < 0.3:
                        conn.execute("SET synchronous_commit = off")
                    while not self._ended.wait(self._pause_s):
                        try:
                            with conn.transaction():
                                for _ in range(chance.choice((1, 1, 3))):
                                    self._change(conn, chance)
                                if chance.random() < 0.05:
                                    raise psycopg.Rollback
                        except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                            continue
                        with self._lock:
                            self.commits += 1
            except psycopg.OperationalError:
                time.sleep(0.05)  # the server is being restarted
            except BaseException as error:
                self.errors.append(error)
                return

    def _change(self, conn: psycopg.Connection[Any], chance: random.Random) -> None:
        one, other = chance.randrange(self._rows), chance.randrange(self._rows)
        doc = long_text(chance.randrange(1 << 30))
        action = chance.choice(("insert", "update", "update", "toast", "delete", "move", "move"))
        if action == "insert":
            conn.execute("INSERT INTO t VALUES (%s, %s, 'new', %s) ON CONFLICT DO NOTHING", [one, other, doc])
        elif action == "update":
            conn.execute("UPDATE t SET n = n + 1, note = %s WHERE id = %s", [f"u{other}", one])
        elif action == "toast":
            conn.execute("UPDATE t SET doc = %s WHERE id = %s", [doc, one])
        elif action == "delete":
            conn.execute("DELETE FROM t WHERE id = %s", [one])
        else:
            conn.execute("UPDATE t SET id = %s WHERE id = %s", [other, one])


def make_table(database: Database, rows: int = 400) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, n int, note text, doc text)")
    with database.connect() as conn, conn.cursor() as cursor:
        cursor.execute("ALTER TABLE t ALTER doc SET STORAGE EXTERNAL")
        with cursor.copy("COPY t FROM STDIN") as copy:
            for one in range(rows):
                copy.write_row([one, 0, f"row {one}", long_text(one)])
