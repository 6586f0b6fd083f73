"""What a run reports while it continues: the progress of snapshots, changes of tables, and what was confirmed at the
end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import GapError, PgcdcError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.core.wording import counted
from pgcdc.event.shape import describe_change
from pgcdc.source.postgres.snapshot.held import ALONE_S
from pgcdc.source.protocol import Prepared, Source
from pgcdc.transform.specs import Chain, missing_columns

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

INTERVAL_S = 1.0
TABLES_INTERVAL_S = 10.0


class Every:
    """True at most once per interval; the first time after `first_s`."""

    def __init__(self, interval_s: float, first_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._due = time.monotonic() + first_s

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._interval_s
        return True


class SnapshotWatch:
    """Reads the capture's status once a second, and reports the progress of initial and requested snapshots."""

    def __init__(self, say: Callable[[str], None], *, is_all: bool) -> None:
        """`is_all`: only the rows of the initial snapshot are wanted (`initial_only`)."""
        self._say = say
        self._is_all = is_all
        self._began = time.time()
        self._is_due = Every(INTERVAL_S)
        self._seen = ""
        self._settled: Position | None = None
        """The position of the last row, including rows read beside the stream; the stream continues after it."""
        self._warned: str | None = None
        self._told: set[str] = set()
        self.show: Callable[[dict[str, Any]], None] | None = None
        """Receives the status every second while rows are read, and once when the initial snapshot is complete."""

    def follow(
        self, read_status: Callable[[], dict[str, Any]], lanes: Lanes | None = None, *, at_once: bool = False
    ) -> bool:
        """Check if it is due (or `at_once`); with `lanes` also the initial snapshot. True: everything is delivered."""
        if not (at_once or self._is_due()):
            return False
        status = read_status()
        self._tell_requests(status.get("snapshots", []))
        # Without this key the capture has not reported yet.
        if lanes is None or "initial_snapshot" not in status or (self._seen == "complete" and not self._is_all):
            return False
        initial: dict[str, Any] = status["initial_snapshot"] or {"status": "complete", "end": None}
        if initial["status"] == "reading" or (self._seen != "complete" and initial.get("time", 0) > self._began):
            self._tell(initial)
        self._seen = initial["status"]
        if self._seen == "complete" and self._settled is None and (settled := status.get("settled")):
            self._settled = Position.parse(settled)
        if not self._is_all or self._settled is None or lanes.place < self._settled:
            return False
        self._say(
            "the existing rows are delivered. The slot remains: start again without initial_only to deliver changes"
        )
        return True

    def _tell(self, status: dict[str, Any]) -> None:
        if self.show is not None:
            self.show(status)
        warning = status.get("warning")
        if warning and warning != self._warned:
            self._warned = warning
            self._say(warning)

    def _tell_requests(self, requests: Sequence[dict[str, Any]]) -> None:
        """Report each request that failed or completed, on one line. Those that ended before this run were already
        reported."""
        for one in requests:
            if one["status"] in ("done", "failed") and one["id"] not in self._told and one["finished"] >= self._began:
                self._told.add(one["id"])
                self._say(_describe_end(one))


def _describe_end(one: dict[str, Any]) -> str:
    if one["status"] == "failed":
        return f"snapshot {one['id']} of table {one['table']} failed: {one['error']}"
    what = "deleted that the source no longer has" if one["kind"] == "vanished" else "read"
    return f"snapshot {one['id']} of table {one['table']} is complete: {counted(one['rows'], 'row')} {what}"


class TableWatch:
    """Reports changes of tables; runs in the pipeline's thread."""

    def __init__(self, source: Source, state: StateDir, say: Callable[[str], None]) -> None:
        self._source = source
        self._state = state
        self._say = say
        self._known: frozenset[str] = frozenset()
        self._noted: tuple[str, ...] = ()
        self._shapes = ShapeHistory(state.shapes_file)
        self._is_due = Every(TABLES_INTERVAL_S, TABLES_INTERVAL_S)

    def begin(self, prepared: Prepared, chains: Sequence[Chain]) -> None:
        """Report what the preparation changed. Shapes that an earlier run reported are not repeated."""
        for note in prepared.notes:
            self._say(note)
        self.tell_missing(chains)
        self._known, self._noted = prepared.tables, prepared.notes
        self._shapes.refresh()

    def follow(self) -> None:
        """Capture newly created tables if all are wanted, and report them."""
        if not self._is_due():
            return
        try:
            tables, notes = self._source.follow_tables(self._state)
        except GapError:
            raise
        except PgcdcError as error:
            self._say(f"new tables cannot be published: {error}")
            return
        if added := sorted(tables - self._known):
            self._say(f"new tables captured from now on: {', '.join(added)}")
            self._known = tables
        for note in notes:
            if note not in self._noted:
                self._say(f"warning: {note}")
        self._noted = notes

    def tell_changes(self, chains: Sequence[Chain]) -> None:
        """Report altered tables, and columns that transforms no longer find: a renamed column is not masked."""
        changes = self._shapes.refresh()
        for change in changes:
            for line in describe_change(change):
                self._say(line)
        if any(change.before is not None for change in changes):
            self.tell_missing(chains)

    def tell_missing(self, chains: Sequence[Chain]) -> None:
        """Report columns in transforms that no table has. That is not an error, since the table may come later. But a
        mask that hides nothing must be reported."""
        identity = self._state.identity()
        if identity is None or not any(chain.transforms for chain in chains):
            return
        with contextlib.suppress(PgcdcError):
            for line in missing_columns(chains, self._source.captured(identity)):
                self._say(f"warning: {line}")


def describe_stop(status: dict[str, Any], confirmed: str) -> str:
    """The last line of a run: what was delivered, and which snapshots are incomplete."""
    initial = status.get("initial_snapshot")
    if initial and initial["status"] != "complete":
        text = "stopped during the initial snapshot"
        if tables := initial["tables"]:
            rows, total = (sum(one[name] for one in tables) for name in ("rows", "estimated_rows"))
            text += f": {rows:,} of about {total:,} rows read"
        if initial["held_seconds"]:
            text += f"; the snapshot is held for {ALONE_S / 60:.0f} minutes, so that a start until then resumes it"
        else:
            text += "; the next start resumes it"
    else:
        text = f"stopped: {confirmed}"
    left = sum(one["status"] in ("queued", "running") for one in status.get("snapshots", []))
    if left:
        text += f"; {left} incremental snapshot{'s go' if left > 1 else ' goes'} on at the next start"
    return text
