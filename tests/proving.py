"""Proof that nothing is lost, repeated or old: writers that hammer tables of many kinds, and the fold of what was delivered.

hammer = Hammer(url, seed)              eight connections that insert, update, delete, move keys and roll back
fold(events)                            the tables that the events make, with everything wrong in it found
assert_equal(url, events)               the same against the database
Delivery(database, folder).deliver()    events in a file as `pgcdc listen` writes it, without a JVM
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import contents
import psycopg
import pyarrow as pa
from databases import Database
from killing import Killer
from listening import Listener, wait_until
from preparing import Wanted, prepare
from pyspark.sql.types import StringType, StructField, StructType
from queries import Query
from running import run

from pgcdc.capture.control import ControlClient
from pgcdc.capture.server import CaptureGone
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, read_json
from pgcdc.event.batch import Batch
from pgcdc.playground.proof import Tables
from pgcdc.sink.file import FileSink
from pgcdc.sink.runner import Runner

WRITERS = 8
BODY_BYTES = 9000
PARTITIONS = 3

KEYS: dict[str, tuple[str, ...]] = {
    "public.one": ("id",),
    "public.pair": ("region", "number"),
    "public.uu": ("id",),
    "public.parts": ("id", "part"),
    "public.big": ("id",),
    "public.log": (),
}
"""What `create_tables` makes; a partitioned table is captured as one."""

_CREATE = [
    "CREATE TABLE one (id int PRIMARY KEY, v int NOT NULL, note text)",
    "CREATE TABLE pair (region text, number int, v int NOT NULL, note text, PRIMARY KEY (region, number))",
    "CREATE TABLE uu (id uuid PRIMARY KEY, v int NOT NULL, note text)",
    "CREATE TABLE parts (id int, part int, v int NOT NULL, note text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
    *(f"CREATE TABLE parts_{number} PARTITION OF parts FOR VALUES IN ({number})" for number in range(PARTITIONS)),
    "CREATE TABLE big (id int PRIMARY KEY, v int NOT NULL, body text)",
    "ALTER TABLE big ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE log (at int, note text)",
]
_FILL = [
    "INSERT INTO one SELECT n, 0, 'first ' || n FROM generate_series(1, %(rows)s) n",
    "INSERT INTO pair SELECT chr(97 + n %% 8), n, 0, 'first' FROM generate_series(1, %(rows)s) n",
    "INSERT INTO uu SELECT md5(n::text)::uuid, 0, 'first' FROM generate_series(1, %(rows)s) n",
    f"INSERT INTO parts SELECT n, n %% {PARTITIONS}, 0, 'first' FROM generate_series(1, %(rows)s) n",
    "INSERT INTO big SELECT n, 0, substr(repeat(md5(n::text), 300), 1, %(bytes)s) FROM generate_series(1, %(wide)s) n",
    "INSERT INTO log SELECT n, 'first' FROM generate_series(1, %(rows)s) n",
]


def create_tables(conn: psycopg.Connection[Any], rows: int = 1000, wide: int = 100) -> None:
    """The tables, with rows in them; `wide` is how many have a value that is stored out of line."""
    for statement in _CREATE:
        conn.execute(statement.encode())
    for statement in _FILL:
        conn.execute(statement.encode(), {"rows": rows, "wide": wide, "bytes": BODY_BYTES})
    conn.execute("ANALYZE")


class Hammer:
    """Writers, each with a connection of its own, until `stop`. The same seed makes the same choices in each writer."""

    def __init__(
        self, url: str, seed: int, *, rows: int = 1000, wide: int = 100, writers: int = WRITERS, pause_s: float = 0.02
    ) -> None:
        self._url, self._rows, self._wide, self._pause_s = url, rows, wide, pause_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.commits = 0
        self.rollbacks = 0
        self.done: dict[str, int] = {}
        """How often each kind of change was made."""
        self._threads = [
            threading.Thread(target=self._run, args=(number, random.Random(seed * 1000 + number)), daemon=True)
            for number in range(writers)
        ]

    def start(self) -> Hammer:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def __enter__(self) -> Hammer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, number: int, choice: random.Random) -> None:
        while not self._stop.wait(self._pause_s):
            with contextlib.suppress(psycopg.Error), psycopg.connect(self._url) as conn:  # the server may be killed
                while not self._stop.wait(self._pause_s * choice.uniform(0.5, 1.5)):
                    self._transact(conn, choice)

    def _transact(self, conn: psycopg.Connection[Any], choice: random.Random) -> None:
        """One transaction of some changes; a part of them, or all, may be rolled back."""
        steps = [self._change(choice) for _ in range(choice.randint(1, 6))]
        back = choice.random()
        try:
            with conn.transaction():
                for number, (_, statement, values) in enumerate(steps):
                    if back < 0.15 and number == 0:
                        with conn.transaction(force_rollback=True):
                            conn.execute(statement, values)
                    else:
                        conn.execute(statement, values)
                if back > 0.9:
                    raise psycopg.Rollback()
        except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
            back = 1.0
        with self._lock:
            if back > 0.9:
                self.rollbacks += 1
                return
            self.commits += 1
            for kind, _, _ in steps:
                self.done[kind] = self.done.get(kind, 0) + 1

    def _change(self, choice: random.Random) -> tuple[str, bytes, dict[str, Any]]:
        table = choice.choice(list(_STATEMENTS))
        kind = choice.choices(list(_STATEMENTS[table]), [_WEIGHTS[one] for one in _STATEMENTS[table]])[0]
        limit = self._wide if table == "big" else self._rows
        values = {
            "n": choice.randint(1, limit * 3 // 2),
            "m": choice.randint(1, limit * 3 // 2),
            "part": choice.randrange(PARTITIONS),
            "note": f"{choice.getrandbits(64):x}",
        }
        return f"{kind} {table}", _STATEMENTS[table][kind].encode(), values


_WEIGHTS = {"insert": 4, "update": 5, "delete": 2, "move": 1, "body": 1}
_BODY = f"substr(repeat(md5(%(note)s), 300), 1, {BODY_BYTES})"
_STATEMENTS: dict[str, dict[str, str]] = {
    "one": {
        "insert": "INSERT INTO one VALUES (%(n)s, 0, %(note)s) ON CONFLICT DO NOTHING",
        "update": "UPDATE one SET v = v + 1, note = %(note)s WHERE id = %(n)s",
        "delete": "DELETE FROM one WHERE id = %(n)s",
        "move": "UPDATE one SET id = %(m)s WHERE id = %(n)s AND NOT EXISTS (SELECT FROM one WHERE id = %(m)s)",
    },
    "pair": {
        "insert": "INSERT INTO pair VALUES (chr(97 + %(n)s %% 8), %(n)s, 0, %(note)s) ON CONFLICT DO NOTHING",
        "update": "UPDATE pair SET v = v + 1, note = %(note)s WHERE number = %(n)s",
        "delete": "DELETE FROM pair WHERE region = chr(97 + %(n)s %% 8) AND number = %(n)s",
        "move": "UPDATE pair SET region = region || 'x' WHERE region = chr(97 + %(n)s %% 8) AND number = %(n)s",
    },
    "uu": {
        "insert": "INSERT INTO uu VALUES (md5(%(n)s::text)::uuid, 0, %(note)s) ON CONFLICT DO NOTHING",
        "update": "UPDATE uu SET v = v + 1, note = NULL WHERE id = md5(%(n)s::text)::uuid",
        "delete": "DELETE FROM uu WHERE id = md5(%(n)s::text)::uuid",
        "move": "UPDATE uu SET id = md5(%(note)s)::uuid WHERE id = md5(%(n)s::text)::uuid",
    },
    "parts": {
        "insert": "INSERT INTO parts VALUES (%(n)s, %(part)s, 0, %(note)s) ON CONFLICT DO NOTHING",
        "update": "UPDATE parts SET v = v + 1, note = %(note)s WHERE id = %(n)s",
        "delete": "DELETE FROM parts WHERE id = %(n)s AND part = %(part)s",
        "move": "UPDATE parts SET part = %(part)s WHERE id = %(n)s "
        "AND 1 = (SELECT count(*) FROM parts p WHERE p.id = %(n)s)",
    },
    "big": {
        "insert": f"INSERT INTO big VALUES (%(n)s, 0, {_BODY}) ON CONFLICT DO NOTHING",
        "update": "UPDATE big SET v = v + 1 WHERE id = %(n)s",
        "delete": "DELETE FROM big WHERE id = %(n)s",
        "move": "UPDATE big SET id = %(m)s WHERE id = %(n)s AND NOT EXISTS (SELECT FROM big WHERE id = %(m)s)",
        "body": f"UPDATE big SET body = {_BODY} WHERE id = %(n)s",
    },
    "log": {"insert": "INSERT INTO log VALUES (%(n)s, %(note)s)"},
}


# --- what was delivered


def fold(
    events: Iterable[Mapping[str, Any]],
    keys: Mapping[str, tuple[str, ...]] = KEYS,
    *,
    complete: bool = True,
    resynced: bool = False,
) -> Tables:
    """The tables that the events make. AssertionError for anything that is lost, repeated, old or out of order."""
    faults: list[str] = []
    ordered = contents.check_sequence(events, faults)
    try:
        tables = contents.fold_events(ordered, keys, strict=True, complete=complete, resynced=resynced)
    except ValueError as error:
        faults.append(str(error))
    assert not faults, "\n".join(faults[:20])
    return tables


def compare(url: str, folded: Tables, keys: Mapping[str, tuple[str, ...]] = KEYS, limit: int = 20) -> list[str]:
    """The first differences between the database and what was folded."""
    with psycopg.connect(url, autocommit=True) as conn:
        source = contents.read_tables(conn, keys)
    assert sum(len(rows) for rows in source.values()) > 0
    return contents.differences(source, folded)[:limit]


def assert_equal(
    url: str,
    events: Iterable[Mapping[str, Any]],
    keys: Mapping[str, tuple[str, ...]] = KEYS,
    *,
    complete: bool = True,
    resynced: bool = False,
) -> None:
    """What was delivered is what the database has: every row once, none lost, none older."""
    found = compare(url, fold(events, keys, complete=complete, resynced=resynced), keys)
    assert not found, "\n".join(found)


LINES = StructType([StructField("position", StringType()), StructField("line", StringType())])


class Delivery(Query):
    """`pgcdc listen --adapter file` in one process and without a JVM: the source's batches go to the file, with its ack."""

    def __init__(self, database: Database, folder: Path, **options: str) -> None:
        wanted = {} if "tables" in options else {"all_tables": "true"}
        super().__init__(database, folder, **{"consumer": "main", **wanted, **options})
        self.output = folder / "events.jsonl"

    def begin(self) -> None:
        """Make the slot, as the first start does, and read nothing."""
        tables = tuple(filter(None, self.options.get("tables", "").split(",")))
        url, slot, state_dir = (self.options[name] for name in ("url", "slot", "state_dir"))
        prepare(Wanted(db=url, slot_name=slot, tables=tables, all_tables=not tables, state_dir=state_dir))

    def deliver(self, until: Callable[[], bool] = lambda: True) -> None:
        """Everything that is committed by now, after `until` has come true; then nobody reads any more."""
        self.load(LINES)
        sink = run(FileSink(self.output), self.state.acks)
        assert self.offset is not None
        sink.open(Position.from_offset(self.offset))
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline
            self._deliver_batch(sink)
        self.reader.prepareForTriggerAvailableNow()
        while self._deliver_batch(sink):
            pass
        self.reader.commit(self.offset)
        sink.close()
        self.end()

    def _deliver_batch(self, sink: Runner) -> bool:
        assert self.offset is not None
        start = Position.from_offset(self.offset)
        rows = self.step()
        if rows is None:
            return False
        columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in ("position", "line")}
        sink.write(Batch(start, Position.from_offset(self.offset), pa.table(columns)))
        return True

    def forget(self) -> None:
        """Spark's checkpoint is gone, as a resync deletes it."""
        self.offset = None
        self.batches.clear()

    def events(self) -> list[dict[str, Any]]:
        """Those that the ack covers."""
        size = read_json(self.state.acks / "file.json")["detail"]["size"]
        return [json.loads(line) for line in self.output.read_bytes()[:size].splitlines()]


# --- how far a snapshot is


def capture_status(one: Listener) -> dict[str, Any]:
    """What the capture says now; what it said last, if it does not answer."""
    holder = Lock.holder(one.state.capture_lock)
    if holder and "address" in holder:
        with contextlib.suppress(CaptureGone), contextlib.closing(ControlClient(holder["address"])) as client:
            return client.status()
    return read_json(one.state.capture_status) or {}


def progress(one: Listener, kind: str) -> float | None:
    """Percent of the rows that the snapshots of a kind have to read; None if there is none. 100 only if all are done."""
    status = capture_status(one)
    found = [snapshot for snapshot in status.get("snapshots") or [] if snapshot["kind"] == kind]
    is_done = all(snapshot["status"] == "done" for snapshot in found)
    initial = status.get("initial_snapshot") if kind == "initial" else None
    if initial:
        found += [] if initial["status"] == "complete" else initial["tables"]
        is_done = is_done and initial["status"] == "complete"
    if not found and not initial:
        return None
    if is_done:
        return 100.0
    rows: int = sum(part["rows"] for part in found)
    total: int = sum(max(part["estimated_rows"], part["rows"]) for part in found)
    return min(99.9, 100 * rows / max(1, total))


def ask(one: Listener, **request: Any) -> dict[str, Any]:
    """A request about snapshots, to the capture that runs."""
    wait_until(lambda: "address" in (Lock.holder(one.state.capture_lock) or {}), 30, "a capture process")
    with contextlib.closing(ControlClient((Lock.holder(one.state.capture_lock) or {})["address"])) as client:
        return client.request({"do": "snapshot", **request})


class SnapshotKiller(Killer):
    """Kills parts of a pipeline when its snapshot is so far, while the tables are written to."""

    def __init__(self, one: Listener, server: Any, hammer: Hammer, seed: int, kind: str) -> None:
        super().__init__(one, server, hammer, seed)
        self._kind = kind

    def kill_at(self, percent: float, target: str) -> None:
        """Wait for the progress, kill, and see that both sides go on."""
        at = self.wait_for(lambda now: now >= percent, f"{percent:g} percent of the snapshot")
        assert at < 100, f"the snapshot was complete before the kill at {percent:g} percent: use more rows"
        commits, place = self.traffic.commits, self.one.ack()
        assert place is not None
        self.assert_in_flight()
        print(f"kill of {target} at {at:.0f} percent, {commits} commits, sink at {place}")
        getattr(self, f"kill_{target}")()
        wait_until(lambda: self.traffic.commits > commits + 5, 60, "traffic goes on after the kill")
        wait_until(
            lambda: (self.one.ack() or place) > place,
            180,
            f"delivery goes on after the kill ({self.one.said()[-500:]})",
        )

    def wait_for(self, is_reached: Callable[[float], bool], what: str, timeout_s: float = 300.0) -> float:
        """Until the progress is so far; what it is then."""
        seen = 0.0

        def look() -> bool:
            nonlocal seen
            assert self.one.process is not None
            assert self.one.process.poll() is None, self.one.said()
            now = progress(self.one, self._kind)
            seen = seen if now is None else now
            return now is not None and is_reached(now)

        wait_until(look, timeout_s, what)
        return seen

    def assert_in_flight(self) -> None:
        """There are commits that the sink does not have."""
        commits = self.traffic.commits
        wait_until(lambda: self.traffic.commits > commits, 10, "writers are at work")
        with psycopg.connect(self.one.url, autocommit=True) as conn:
            row = conn.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None and int(row[0]) > self.one.delivered_lsn()
