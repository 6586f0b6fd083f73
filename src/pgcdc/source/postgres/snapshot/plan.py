"""The plan of an initial snapshot: which parts of which tables are read in which snapshot, and what is published of them.

A log of JSON lines with checksums, durable line by line: a crash leaves what was done before it, and nothing by halves. What
it says is folded into `SnapshotPlan`. When the snapshot is complete it becomes one line, which stays: the changes that the
stream has to leave out (`window.leave_out`) are known by it. Tables are cut in the very snapshot in which they are read.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from pgcdc.core.errors import ConnectionLost, SourceError
from pgcdc.core.failpoint import hit
from pgcdc.core.relation import Relation
from pgcdc.core.state import append_lines, encode_line, explain_writing, read_lines, write_durably
from pgcdc.postgres.database import Connection, connect, explain_errors, explain_right, quote_literal
from pgcdc.source.postgres.setup.tables import PublishedTable, Table, read_published
from pgcdc.source.postgres.snapshot.chunks import Chunk, estimate_rows, plan_chunks, table_bytes
from pgcdc.source.postgres.snapshot.held import Hold, import_snapshot
from pgcdc.source.postgres.snapshot.releases import Staged
from pgcdc.source.postgres.snapshot.requests import SnapshotRequest

logger = logging.getLogger("pgcdc.capture")

PLAN_FILE = "initial.jsonl"
CHUNK_BYTES = int(os.environ.get("PGCDC_SNAPSHOT_CHUNK_BYTES", "") or 16 << 20)
"""Of a table, for one task. (The variable is for tests.)"""
MAX_CHUNKS = 10_000
LOCK_TIMEOUT = "2s"
NOTHING_LOST = "nothing is lost: start again after that"
SMALL_BYTES = 256 << 20
"""A table that is smaller is read by its key in any case: what a crash leaves of it can be read by key as well."""
CORRELATED = 0.5
"""Rows that stand in the table about in the order of the key can be read by it without jumping."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is read at a time."""

    id: str
    chunk: Chunk
    rows: int
    """An estimate."""


@dataclass(slots=True)
class PlannedTable:
    """One table, and how far it is."""

    published: PublishedTable
    hold: int
    """The number of its snapshot; 0: it has none, and needs one."""
    left: dict[str, Entry]
    """What is not published."""
    staged: dict[str, Staged] = field(default_factory=dict)
    """What was read of these, and can be published."""
    is_started: bool = False
    is_begun: bool = False
    """Whether something is published."""
    rows: int = 0
    """How many are published."""
    ended: str = ""
    """complete, moved (the rest is read incrementally) or gone (it was dropped)."""

    @property
    def oid(self) -> int:
        """The table's."""
        return self.published.relation.oid

    @property
    def estimated_rows(self) -> int:
        """About how many rows there are."""
        return self.rows + sum(entry.rows for entry in self.left.values())


@dataclass(frozen=True, slots=True)
class SkipRule:
    """A table was read in a younger snapshot than the slot's: what that one saw is not to come again from the stream."""

    oid: int
    visible: str
    """A pg_snapshot."""
    lsn: int
    """What it sees ends before."""


class SnapshotPlan:
    """What the log says. The capture process owns it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / PLAN_FILE
        self.lsn = 0
        """Where the slot began: rows of the snapshot stand behind it. 0: there is no initial snapshot."""
        self.holds: dict[int, Hold] = {}
        self.tables: dict[int, PlannedTable] = {}
        self.unfinished: dict[int, PlannedTable] = {}
        """Those that have not ended."""
        self.begun_us = 0
        """When the first of the rows that are published were read; 0: nobody knows."""
        self.is_planned = False
        self.completed: dict[str, Any] | None = None
        """What there was to say at the end: rows, seconds, tables."""
        self.rules: list[SkipRule] = []
        """What the stream has to leave out."""
        for record in read_lines(self._log):
            self._fold(record)

    @property
    def is_active(self) -> bool:
        """Whether there is a snapshot to be finished."""
        return self.lsn > 0 and self.completed is None

    # --- what happens

    def hold(self, hold: Hold) -> None:
        """A snapshot is held."""
        self._append("hold", hold=asdict(hold))

    def plan(
        self, hold: int, tables: Iterable[tuple[PublishedTable, list[Entry]]], others: Iterable[PublishedTable]
    ) -> None:
        """Tables are read in that snapshot, others in one that is still to be taken: not as was planned before."""
        planned = [(hold, one, entries) for one, entries in tables] + [(0, one, []) for one in others]
        self._append("plan", tables=[_table_json(*one) for one in planned])

    def start_table(self, oid: int) -> None:
        """It was said that its rows begin."""
        self._append("started", oid=oid)

    def stage(self, entry: str, staged: Staged) -> None:
        """The rows of an entry are durable: they are published, whatever becomes of their snapshot."""
        self._append("staged", entry=entry, staged=asdict(staged))

    def publish(self, entry: str, rows: int, time_us: int = 0) -> None:
        """An entry is in the stream; it was read at that time, if that is known."""
        self._append("done", entry=entry, rows=rows, time_us=time_us)

    def end_table(self, oid: int, how: str) -> None:
        """Nothing more is read of it here."""
        self._append("ended", oid=oid, how=how)

    def complete(self, end: str) -> None:
        """All tables have ended; `end` is the position behind the last row. Only what is needed later is kept."""
        begun = self.begun_us / 1e6 or min((hold.time for hold in self.holds.values()), default=time.time())
        tables = self.tables.values()
        record = {
            "do": "complete",
            "lsn": self.lsn,
            "end": end,
            "time": time.time(),
            "seconds": round(max(0.0, time.time() - begun), 1),
            "rows": sum(table.rows for table in tables),
            "tables": [{"table": one.published.title, "rows": one.rows, "status": one.ended} for one in tables],
            "rules": [asdict(rule) for rule in self.rules],
        }
        write_durably(self._log, encode_line(record))
        self._fold(record)

    def _append(self, do: str, **what: Any) -> None:
        record = {"do": do, **what}
        append_lines(self._log, [record])
        hit(f"plan.{do}")
        self._fold(record)

    def _fold(self, record: dict[str, Any]) -> None:
        what = record["do"]
        table = self.tables.get(record["oid"]) if "oid" in record else None
        if "entry" in record:
            table = self.table_of(record["entry"])
        if what == "begin":
            self.lsn = record["lsn"]
        elif what == "hold":
            made = Hold(**record["hold"])
            self.holds[made.number] = made
        elif what == "plan":
            self.is_planned = True
            for raw in record["tables"]:
                self._fold_table(_parse_table(raw))
        elif what == "complete":
            self.lsn, self.completed = record["lsn"], record
            self.holds, self.tables, self.unfinished = {}, {}, {}
            self.rules = [SkipRule(**rule) for rule in record["rules"]]
        elif table is None:
            return
        elif what == "started":
            table.is_started = True
        elif what == "staged":
            table.staged[record["entry"]] = Staged.from_json(record["staged"])
        elif what == "done" and table.left.pop(record["entry"], None) is not None:
            table.staged.pop(record["entry"], None)
            table.is_begun = True
            table.rows += record["rows"]
            self.begun_us = min(filter(None, (self.begun_us, record["time_us"])), default=0)
        elif what == "ended":
            table.ended = record["how"]
            self.unfinished.pop(table.oid, None)

    def _fold_table(self, table: PlannedTable) -> None:
        before = self.tables.get(table.oid)
        table.is_started = before is not None and before.is_started
        self.tables[table.oid] = self.unfinished[table.oid] = table
        hold = self.holds.get(table.hold)
        self.rules = [rule for rule in self.rules if rule.oid != table.oid]
        if hold is not None and hold.visible is not None:
            self.rules.append(SkipRule(table.oid, hold.visible, hold.lsn))

    def table_of(self, entry: str) -> PlannedTable | None:
        """The table of an entry."""
        return self.tables.get(int(entry.partition("-")[0]))


def begin_plan(folder: Path, lsn: int, hold: Hold | None) -> None:
    """A slot that begins at `lsn` gets an initial snapshot; without a hold, in a younger snapshot than the slot's."""
    records: list[dict[str, Any]] = [
        {"do": "begin", "lsn": lsn},
        *([{"do": "hold", "hold": asdict(hold)}] if hold else []),
    ]
    with explain_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / PLAN_FILE, b"".join(map(encode_line, records)))


def _table_json(hold: int, published: PublishedTable, entries: list[Entry]) -> dict[str, Any]:
    relation = published.relation.to_json()
    plain = {name: getattr(published, name) for name in ("kind", "key", "row_filter")}
    return {"hold": hold, "relation": relation, **plain, "entries": [asdict(one) for one in entries]}


def _parse_table(raw: dict[str, Any]) -> PlannedTable:
    published = PublishedTable(Relation.from_json(raw["relation"]), raw["kind"], tuple(raw["key"]), raw["row_filter"])
    entries = [Entry(one["id"], Chunk.from_json(one["chunk"]), one["rows"]) for one in raw["entries"]]
    return PlannedTable(published, raw["hold"], {entry.id: entry for entry in entries})


# --- how tables are cut


class TableLocked(SourceError):
    """Somebody has locked a table: what was asked for can be done later."""


@contextmanager
def _look(url: str, action: str) -> Iterator[Connection]:
    """Who plans is the capture's loop, which has more to do: it must not wait for locks. TableLocked: try again."""
    try:
        with explain_errors(action), connect(url, application_name="pgcdc snapshot reader") as conn:
            conn.execute(f"SET lock_timeout = {quote_literal(LOCK_TIMEOUT)}".encode())
            yield conn
    except SourceError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise TableLocked(error.message, error.advice) from error.__cause__
        raise


def published_names(url: str, publications: Sequence[str]) -> dict[int, str]:
    """The published tables, as they are called now. TableLocked: try again."""
    with _look(url, "look at the published tables") as conn:
        return {one.relation.oid: one.title for one in read_published(conn, publications)}


def plan_tables(
    url: str, publications: Sequence[str], hold: Hold, oids: set[int] | None = None
) -> tuple[list[tuple[PublishedTable, list[Entry]]], list[PublishedTable]] | None:
    """The entries of these tables (None: all) in a snapshot, and the tables that cannot be read in it.

    None: the snapshot was lost. A table that was truncated or altered since cannot be read in it; one
    that is in neither list is gone. TableLocked: try again.
    """
    with _look(url, "plan the initial snapshot") as conn:
        now = {one.relation.oid: one for one in read_published(conn, publications)}
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if not import_snapshot(conn, hold.name):
            return None
        then = {one.relation.oid: one for one in read_published(conn, publications)}
        planned: list[tuple[PublishedTable, list[Entry]]] = []
        others: list[PublishedTable] = []
        for oid, table in now.items():
            if oids is not None and oid not in oids:
                continue
            is_same = oid in then and then[oid].relation == table.relation and not _is_rewritten(conn, oid)
            entries = _try_to_cut(conn, table, hold) if is_same else None
            if entries is None:
                others.append(table)
            else:
                planned.append((table, entries))
    return planned, others


def _try_to_cut(conn: Connection, table: PublishedTable, hold: Hold) -> list[Entry] | None:
    """The entries; None if the table was changed just now."""
    try:
        with conn.transaction():
            return _cut(conn, table, hold)
    except ConnectionLost:
        raise
    except SourceError as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise
        if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            refused = explain_right(table.title, table.sql, conn.info.user, error.__cause__)
            raise SourceError(refused.message, f"{refused.advice} ({NOTHING_LOST})") from error.__cause__
        logger.warning("table %s: %s", table.title, error.message)
        return None


def _is_rewritten(conn: Connection, oid: int) -> bool:
    """Whether the table (or a partition of it) has another file now than in the snapshot, which would not see its rows."""
    row = conn.execute(_REWRITTEN, [oid, oid]).fetchone()
    return bool(row and row[0])


# The catalog is that of the snapshot; the function looks at what is now.
_REWRITTEN = """
SELECT bool_or(c.relfilenode::int8 IS DISTINCT FROM pg_relation_filenode(c.oid)::int8)
FROM pg_class c WHERE c.relkind = 'r' AND (c.oid = %s OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::oid)))
"""


def _cut(conn: Connection, published: PublishedTable, hold: Hold) -> list[Entry]:
    if not published.columns:
        return []
    one = published.relation
    table = Table(one.oid, one.namespace, one.name, published.kind, "p", False, True, True, False, ())
    nbytes = table_bytes(conn, table)
    count = max(1, min(MAX_CHUNKS, math.ceil(nbytes / CHUNK_BYTES)))
    chunks = plan_chunks(conn, table, count=count, by_key=_by_key(conn, published, nbytes))
    rows = estimate_rows(conn, table) // max(1, len(chunks))
    return [Entry(f"{one.oid}-{hold.number}-{number}", chunk, rows) for number, chunk in enumerate(chunks)]


def _by_key(conn: Connection, published: PublishedTable, nbytes: int) -> bool:
    relation = published.relation
    if published.kind != "r" or not published.key or relation.replica_identity not in "df":
        return False
    if nbytes < SMALL_BYTES:
        return True
    row = conn.execute(
        "SELECT abs(correlation) >= %s FROM pg_stats WHERE schemaname = %s AND tablename = %s AND attname = %s",
        [CORRELATED, relation.namespace, relation.name, published.key[0]],
    ).fetchone()
    return bool(row and row[0])


def requests_for_rest(table: PlannedTable, title: str) -> list[SnapshotRequest]:
    """What is left of a table whose snapshot was lost, to be read incrementally: by ranges of the key, if it was cut so.

    `title` is what it is called now. Asked again after a crash, the requests have the same ids.
    """
    published, left = table.published, list(table.left.values())
    if any(entry.chunk.key != published.key or published.kind != "r" for entry in left):
        return [SnapshotRequest(f"initial-{left[0].id}", title, "initial", oid=table.oid)]
    ranges: list[tuple[str, Chunk, Chunk]] = []
    for entry in left:
        if ranges and ranges[-1][2].high is not None and ranges[-1][2].high == entry.chunk.low:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], entry.chunk)
        else:
            ranges.append((entry.id, entry.chunk, entry.chunk))
    return [
        SnapshotRequest(f"initial-{name}", title, "initial", low=first.low, high=last.high, oid=table.oid)
        for name, first, last in ranges
    ]
