"""What a run says while it goes on: how far snapshots are, what becomes of tables, and what is confirmed at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import GapError, PgcdcError
from pgcdc.core.position import Position
from pgcdc.core.shapes import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.event.shape_diff import describe_change
from pgcdc.postgres.database import connect, explain_errors
from pgcdc.run.settings import PipelineSettings
from pgcdc.source.postgres.setup.prepare import Prepared, follow_tables
from pgcdc.source.postgres.setup.published import read_published
from pgcdc.source.postgres.setup.slots import get_slot
from pgcdc.source.postgres.snapshot.held import ALONE_S
from pgcdc.transform.check import missing_columns
from pgcdc.transform.program import Chain

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

__all__ = ["RequestWatch", "SnapshotWatch", "TableWatch", "describe_stop", "has_confirmed"]

INTERVAL_S = 1.0
TABLES_INTERVAL_S = 10.0


class SnapshotWatch:
    """Looks at the capture's status once a second, until there is nothing more to see."""

    def __init__(self, say: Callable[[str], None], *, is_all: bool) -> None:
        """`is_all`: the rows are all that is wanted (`initial_only`)."""
        self._say = say
        self._is_all = is_all
        self._began = time.time()
        self._due = 0.0
        self._seen = ""
        self._settled: Position | None = None
        """Where the last of the rows stands, also of those that were read beside the stream."""
        self._warned: str | None = None
        self.show: Callable[[dict[str, Any]], None] | None = None
        """Gets the status every second while rows are read, and once when the snapshot is complete."""

    def follow(self, read_status: Callable[[], dict[str, Any]], lanes: Lanes, *, at_once: bool = False) -> bool:
        """Look, if it is time to (or `at_once`). True: all that was wanted is delivered."""
        now = time.monotonic()
        if (now < self._due and not at_once) or (self._seen == "complete" and not self._is_all):
            return False
        self._due = now + INTERVAL_S
        capture = read_status()
        if "initial_snapshot" not in capture:  # the capture has not said anything yet
            return False
        status: dict[str, Any] = capture["initial_snapshot"] or {"status": "complete", "end": None}
        if status["status"] == "reading" or (self._seen != "complete" and status.get("time", 0) > self._began):
            self._tell(status)
        self._seen = status["status"]
        if not self._is_all or self._seen != "complete":
            return False
        if self._settled is None and capture.get("settled"):
            self._settled = Position.parse(capture["settled"])
        if self._settled is None or lanes.place < self._settled:
            return False
        self._say("the rows are delivered. The slot stays: start again without initial_only to go on with the changes")
        return True

    def _tell(self, status: dict[str, Any]) -> None:
        if self.show is not None:
            self.show(status)
        warning = status.get("warning")
        if warning and warning != self._warned:
            self._warned = warning
            self._say(warning)


class RequestWatch:
    """Says what became of requests for rows: one line for each that failed or is complete."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = time.time()
        self._due = 0.0
        self._told: set[str] = set()

    def follow(self, read_status: Callable[[], dict[str, Any]], *, at_once: bool = False) -> None:
        """Look, if it is time to (or `at_once`)."""
        now = time.monotonic()
        if now < self._due and not at_once:
            return
        self._due = now + INTERVAL_S
        for one in read_status().get("snapshots", []):
            # What ended before us was told by the run that it ended in.
            if one["status"] in ("done", "failed") and one["id"] not in self._told and one["finished"] >= self._began:
                self._told.add(one["id"])
                self._say(_describe_end(one))


def _describe_end(one: dict[str, Any]) -> str:
    if one["status"] == "failed":
        return f"snapshot {one['id']} of table {one['table']} failed: {one['error']}"
    if one["kind"] == "vanished":
        return (
            f"snapshot {one['id']} of table {one['table']} is complete: {one['rows']:,} rows that vanished are deleted"
        )
    return f"snapshot {one['id']} of table {one['table']} is complete: {one['rows']:,} rows"


class TableWatch:
    """Says what is new; everything is looked at in the pipeline's thread."""

    def __init__(self, config: PipelineSettings, shapes_file: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._shapes = ShapeHistory(shapes_file)
        self._due = time.monotonic() + TABLES_INTERVAL_S

    def begin(self) -> None:
        """What an earlier run has told is not told again."""
        self._shapes.refresh()

    def tell_prepared(self, prepared: Prepared, chains: Sequence[Chain]) -> None:
        """What the preparation has changed, and what is captured only in part."""
        for change in prepared.changed:
            self._say(f"{change}; this holds for what is written from now on")
        for table in prepared.left_out:
            self._say(f"table {table} is not captured any more: it was left out of --tables")
        for table in prepared.inserts_only:
            self._say(
                f"table {table} has no primary key or other replica identity: only its inserts and truncates are captured"
            )
        self.tell_missing(prepared, chains)

    def follow(self, prepared: Prepared) -> Prepared:
        """With --all-tables or --schemas: publish tables that were created meanwhile, and say so."""
        now = time.monotonic()
        if not (self._config.all_tables or self._config.schemas) or now < self._due:
            return prepared
        self._due = now + TABLES_INTERVAL_S
        try:
            infos = follow_tables(self._config.source_options(), StateDir(self._config.state_dir))
        except GapError:
            raise
        except PgcdcError as error:
            self._say(f"new tables cannot be published: {error}")
            return prepared
        known = {table for info in prepared.publications for table in info.tables}
        added = sorted({table for info in infos for table in info.tables} - known)
        if not added:
            return prepared
        self._say(f"new tables are captured from now on: {', '.join(added)}")
        return replace(prepared, publications=infos)

    def tell_changes(self, prepared: Prepared | None, chains: Sequence[Chain]) -> None:
        """Tables that were altered; and what transforms do not find any more: a column that was renamed is not masked."""
        changes = self._shapes.refresh()
        for change in changes:
            for line in describe_change(change):
                self._say(line)
        if any(change.before is not None for change in changes):
            self.tell_missing(prepared, chains)

    def tell_missing(self, prepared: Prepared | None, chains: Sequence[Chain]) -> None:
        """Columns that no table has are no error: the table may come later. But a mask that hides nothing has to be told."""
        if prepared is None or not any(chain.transforms for chain in chains):
            return
        names = [one["name"] for one in prepared.identity.publications]
        with contextlib.suppress(PgcdcError), explain_errors("look at the columns"):
            with connect(self._config.db, may_retry=False) as sql:
                tables = [one.relation for one in read_published(sql, names)]
            for line in missing_columns(chains, tables):
                self._say(f"warning: {line}")


def has_confirmed(url: str, slot_name: str, lsn: int) -> bool:
    """Whether the server has taken a confirmation; it may need a moment."""
    deadline = time.monotonic() + 5
    with contextlib.suppress(PgcdcError), connect(url, may_retry=False) as sql:
        while time.monotonic() < deadline:
            slot = get_slot(sql, slot_name)
            if slot is not None and (slot.confirmed_flush_lsn or 0) >= lsn:
                return True
            time.sleep(0.02)
    return False


def describe_stop(status: dict[str, Any], confirmed: str) -> str:
    """The last line of a run: what is delivered, and which snapshots are not at their end."""
    initial = status.get("initial_snapshot")
    if initial and initial["status"] != "complete":
        text = "stopped in the initial snapshot"
        if tables := initial["tables"]:
            rows, total = (sum(one[name] for one in tables) for name in ("rows", "estimated_rows"))
            text += f": {rows:,} of about {total:,} rows are read"
        if initial["held_seconds"]:
            text += f"; the snapshot is held for {ALONE_S / 60:.0f} minutes, and a later start goes on as well"
        else:
            text += "; the next start goes on"
    else:
        text = f"stopped: {confirmed}"
    left = sum(one["status"] in ("queued", "running") for one in status.get("snapshots", []))
    if left:
        text += f"; {left} incremental snapshot{'s go' if left > 1 else ' goes'} on at the next start"
    return text
