"""The plan of an initial snapshot: which parts of which tables are read in which snapshot, and what is published of them.

A log of JSON lines with checksums, durable line by line: a crash leaves what was done before it, and nothing by halves. What
it says is folded into `SnapshotPlan`. When the snapshot is complete it becomes one line, which stays: the changes that the
stream has to leave out (`window.leave_out`) are known by it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pgcdc.core.failpoint import hit
from pgcdc.core.journal import append_lines, encode_line, read_lines
from pgcdc.core.relation import Relation
from pgcdc.core.state import explain_writing, write_durably
from pgcdc.source.postgres.setup.published import PublishedTable
from pgcdc.source.postgres.snapshot.chunks import Chunk
from pgcdc.source.postgres.snapshot.held import Hold
from pgcdc.source.postgres.snapshot.releases import Staged

__all__ = ["PLAN_FILE", "Entry", "PlannedTable", "SkipRule", "SnapshotPlan", "begin_plan"]

PLAN_FILE = "initial.jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is read at a time."""

    id: str
    chunk: Chunk
    rows: int
    """An estimate."""
    nbytes: int
    """Of the table, about."""


@dataclass(slots=True)
class PlannedTable:
    """One table, and how far it is."""

    published: PublishedTable
    hold: int
    """The number of its snapshot; 0: it has none, and needs one."""
    entries: dict[str, Entry]
    done: dict[str, int] = field(default_factory=dict)
    """Rows of the entries that are published."""
    is_started: bool = False
    ended: str = ""
    """complete, moved (the rest is read incrementally) or gone (it was dropped)."""
    unpublished: dict[str, Entry] = field(default_factory=dict)
    """What is left of the entries."""
    staged: dict[str, Staged] = field(default_factory=dict)
    """What was read of these, and can be published."""
    rows: int = 0
    """How many are published."""

    def __post_init__(self) -> None:
        self.unpublished = {name: entry for name, entry in self.entries.items() if name not in self.done}
        self.rows = sum(self.done.values())

    @property
    def oid(self) -> int:
        """The table's."""
        return self.published.relation.oid

    @property
    def left(self) -> list[Entry]:
        """What is not published."""
        return list(self.unpublished.values())

    @property
    def estimated_rows(self) -> int:
        """About how many rows there are."""
        return self.rows + sum(entry.rows for entry in self.unpublished.values())

    def publish(self, entry: str, rows: int) -> None:
        """An entry is in the stream."""
        if entry not in self.done:
            self.done[entry] = rows
            self.rows += rows
            self.unpublished.pop(entry, None)
            self.staged.pop(entry, None)


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
        self._rules: list[SkipRule] = []
        self._made: list[SkipRule] | None = None
        for record in read_lines(self._log):
            self._fold(record)

    @property
    def is_active(self) -> bool:
        """Whether there is a snapshot to be finished."""
        return self.lsn > 0 and self.completed is None

    @property
    def rules(self) -> list[SkipRule]:
        """What the stream has to leave out."""
        if self._made is None:
            self._made = self._rules + [
                SkipRule(table.oid, hold.visible, hold.lsn)
                for table in self.tables.values()
                if (hold := self.holds.get(table.hold)) is not None and hold.visible is not None
            ]
        return self._made

    # --- what happens

    def hold(self, hold: Hold) -> None:
        """A snapshot is held."""
        self._append({"do": "hold", **_plain(hold)})

    def plan(
        self, hold: int, tables: Iterable[tuple[PublishedTable, list[Entry]]], others: Iterable[PublishedTable]
    ) -> None:
        """Tables are read in that snapshot, others in one that is still to be taken: not as was planned before."""
        planned = [{**_table_json(*one), "hold": hold} for one in tables]
        planned += [{**_table_json(one, []), "hold": 0} for one in others]
        self._append({"do": "plan", "tables": planned})

    def start_table(self, oid: int) -> None:
        """It was said that its rows begin."""
        self._append({"do": "started", "oid": oid})

    def stage(self, entry: str, staged: Staged) -> None:
        """The rows of an entry are durable: they are published, whatever becomes of their snapshot."""
        self._append({"do": "staged", "entry": entry, **asdict(staged)})

    def publish(self, entry: str, rows: int, time_us: int = 0) -> None:
        """An entry is in the stream; it was read at that time, if that is known."""
        self._append({"do": "done", "entry": entry, "rows": rows, "time_us": time_us})

    def end_table(self, oid: int, how: str) -> None:
        """Nothing more is read of it here."""
        self._append({"do": "ended", "oid": oid, "how": how})

    def complete(self, end: str) -> None:
        """All tables have ended; `end` is the position behind the last row. Only what is needed later is kept."""
        begun = self.begun_us / 1e6 or min((hold.time for hold in self.holds.values()), default=time.time())
        record = {
            "do": "complete",
            "lsn": self.lsn,
            "end": end,
            "time": time.time(),
            "seconds": round(max(0.0, time.time() - begun), 1),
            "rows": sum(table.rows for table in self.tables.values()),
            "tables": [
                {"table": table.published.title, "rows": table.rows, "status": table.ended}
                for table in self.tables.values()
            ],
            "rules": [_plain(rule) for rule in self.rules],
        }
        write_durably(self._log, encode_line(record))
        self.holds, self.tables, self.unfinished = {}, {}, {}
        self._fold(record)

    def _append(self, record: dict[str, Any]) -> None:
        append_lines(self._log, [record])
        hit(f"plan.{record['do']}")
        self._fold(record)

    def _fold(self, record: dict[str, Any]) -> None:
        what = record["do"]
        if what in ("hold", "plan", "complete"):
            self._made = None
        if what == "begin":
            self.lsn = record["lsn"]
        elif what == "hold":
            made = Hold(**{key: value for key, value in record.items() if key != "do"})
            self.holds[made.number] = made
        elif what == "plan":
            self.is_planned = True
            for raw in record["tables"]:
                table = _parse_table(raw)
                before = self.tables.get(table.oid)
                table.is_started = before is not None and before.is_started
                self.tables[table.oid] = self.unfinished[table.oid] = table
        elif what == "started":
            self.tables[record["oid"]].is_started = True
        elif what == "staged":
            staged = {name: record[name] for name in ("file", "rows", "time_us")}
            self.table_of(record["entry"]).staged[record["entry"]] = Staged(**staged, written=tuple(record["written"]))
        elif what == "done":
            self.table_of(record["entry"]).publish(record["entry"], record["rows"])
            times = (self.begun_us, record.get("time_us", 0))
            self.begun_us = min(filter(None, times), default=0)
        elif what == "ended":
            self.tables[record["oid"]].ended = record["how"]
            self.unfinished.pop(record["oid"], None)
        elif what == "complete":
            self.lsn = record["lsn"]
            self.completed = record
            self._rules = [SkipRule(**rule) for rule in record["rules"]]

    def table_of(self, entry: str) -> PlannedTable:
        """The table of an entry."""
        return self.tables[int(entry.partition("-")[0])]


def begin_plan(folder: Path, lsn: int, hold: Hold | None) -> None:
    """A slot that begins at `lsn` gets an initial snapshot; without a hold, in a younger snapshot than the slot's."""
    records = [{"do": "begin", "lsn": lsn}, *([{"do": "hold", **_plain(hold)}] if hold else [])]
    with explain_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / PLAN_FILE, b"".join(map(encode_line, records)))


def _table_json(published: PublishedTable, entries: list[Entry]) -> dict[str, Any]:
    return {
        "relation": published.relation.to_json(),
        "kind": published.kind,
        "key": list(published.key),
        "row_filter": published.row_filter,
        "entries": [
            {"id": one.id, "chunk": one.chunk.to_json(), "rows": one.rows, "nbytes": one.nbytes} for one in entries
        ],
    }


def _parse_table(raw: dict[str, Any]) -> PlannedTable:
    published = PublishedTable(Relation.from_json(raw["relation"]), raw["kind"], tuple(raw["key"]), raw["row_filter"])
    entries = [Entry(one["id"], Chunk.from_json(one["chunk"]), one["rows"], one["nbytes"]) for one in raw["entries"]]
    return PlannedTable(published, raw["hold"], {entry.id: entry for entry in entries})


def _plain(one: Hold | SkipRule) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}
