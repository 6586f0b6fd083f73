"""The plan of an initial snapshot: what a crash leaves of it, and what is asked for when a snapshot is lost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pgcdc.cli.report import SnapshotProgress
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation
from pgcdc.core.state import StateDir
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.chunks import Chunk
from pgcdc.source.postgres.snapshot.driver import Snapshots
from pgcdc.source.postgres.snapshot.held import Hold
from pgcdc.source.postgres.snapshot.releases import Releases, stage_rows
from pgcdc.source.postgres.snapshot.requests import InitialPlan, PlannedTable, RequestQueue, SkipRule, requests_for_rest
from pgcdc.spool.schema import CHANGES

SLOTS = Hold(1, "00000003-1", "holder-1-a.json", 100.0)
YOUNGER = Hold(2, "00000003-2", "holder-2-b.json", 200.0, visible="10:20:12", lsn=0x900)


def table(oid: int, hold: int = 1, count: int = 3) -> PlannedTable:
    columns = (Column("id", 23, -1, True), Column("v", 25, -1, False))
    published = PublishedTable(Relation(oid, "public", f"t{oid}", "d", columns), "r", ("id",), "id > 0")
    bounds = [None, *((str(10 * number),) for number in range(1, count)), None]
    chunks = {
        f"{oid}-{hold}-{n}": Chunk("public", f"t{oid}", 7, key=("id",), low=low, high=high)
        for n, (low, high) in enumerate(itertools.pairwise(bounds))
    }
    return PlannedTable(published, hold, chunks, 30)


def begin(state: StateDir, *tables: PlannedTable) -> RequestQueue:
    """An initial snapshot in which these tables are planned."""
    queue = RequestQueue(state.requests_file)
    queue.begin_initial(0x800, SLOTS)
    queue.initial.holds[2] = YOUNGER
    queue.initial.tables = {one.oid: one for one in tables}
    queue.save()
    return queue


def open_snapshots(state: StateDir) -> Snapshots:
    return Snapshots(PostgresOptions(), (), state, Position.end(0x800), "test")


def test_a_plan_is_there_again_after_a_crash(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    RequestQueue(state.requests_file).begin_initial(0x800, SLOTS)
    fresh = RequestQueue(state.requests_file).initial
    assert fresh.is_active and fresh.tables is None and fresh.holds == {1: SLOTS}
    unreadable = PlannedTable(table(7).published, 1, None)
    queue = begin(state, table(5), table(6, 2), unreadable)
    again = RequestQueue(state.requests_file).initial
    assert again == queue.initial and again.tables is not None and again.tables[7].chunks is None


def test_the_folder_and_the_log_of_releases_say_how_far_the_plan_is(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    begin(state, table(5))
    first = open_snapshots(state)
    (five,) = first.queue.initial.unfinished
    row = pa.RecordBatch.from_pylist([{"ordinal": 0, "sub": 0, "op": 1, "relation": 0, "old_kind": 0}], schema=CHANGES)
    five.staged = {name: stage_rows(state.snapshot, [row], name) for name in ("5-1-0", "5-1-1")}
    end = Position.end(0x800)
    for _ in range(2):  # its start, and one chunk
        release = first._release_first(five, end)
        assert release is not None
        end = release.end
    first.releases.forget(end)  # everybody has it: the log has to stay all the same
    first.close()
    second = open_snapshots(state)
    (again,) = second.queue.initial.unfinished
    assert again.is_started and again.rows == 1 and list(again.chunks or ()) == ["5-1-1", "5-1-2"]
    assert again.staged["5-1-1"].written == five.staged["5-1-1"].written and list(again.staged) == ["5-1-1"]
    second.close()


def test_a_table_that_is_read_in_a_younger_snapshot_has_a_rule_for_ever(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    queue = begin(state, table(5), table(6, 2))
    rule = SkipRule(6, "10:20:12", 0x900)
    assert queue.initial.rules == [rule]
    queue.initial.complete(Position.end(0x800))
    queue.save()
    again = RequestQueue(state.requests_file).initial
    assert again.rules == [rule] and not again.is_active and again.completed is not None and again.lsn == 0x800


def test_rows_that_were_staged_and_are_not_wanted_go_with_the_end_of_the_snapshot(tmp_path: Path) -> None:
    """A table was dropped, say, while its rows waited: they would keep the disk until the capture is started again."""
    state = StateDir(tmp_path)
    queue = begin(state, gone := table(5))
    gone.ended = "gone"
    queue.save()
    snapshots = open_snapshots(state)
    released = snapshots.releases.add(Position.end(0x800), snapshots.releases.stage([]), None)
    snapshots.releases.stage([])
    assert snapshots.step(released.end, may_work=True) is None and not snapshots.is_first
    assert [one.name for one in state.snapshot.glob("*.arrow*")] == [released.staged.file]
    snapshots.close()


def test_the_log_of_releases_is_kept_only_while_the_snapshot_is_under_way(tmp_path: Path) -> None:
    releases = Releases(tmp_path, Position.end(0x800), keeps_log=True)
    end = releases.add(Position.end(0x800), releases.stage([]), None, {"initial": 5, "what": "started"}).end
    releases.forget(end)
    assert Releases(tmp_path, end, keeps_log=True).found == [({"initial": 5, "what": "started"}, 0)]
    Releases(tmp_path, end)
    assert not (tmp_path / "releases.jsonl").exists()


def test_without_a_plan_there_is_no_snapshot() -> None:
    assert not InitialPlan().is_active


def test_the_rest_is_asked_for_by_ranges_of_the_key(tmp_path: Path) -> None:
    planned = table(5, count=6)
    for name in ("5-1-0", "5-1-3"):
        assert planned.chunks is not None
        del planned.chunks[name]
    first, second = requests_for_rest(planned)
    assert (first.low, first.high, first.table, first.kind) == (("10",), ("30",), "t5", "initial")
    assert (second.low, second.high) == (("40",), None) and first.id != second.id
    queue = begin(StateDir(tmp_path), planned)
    queue.move_rest(planned)
    again = RequestQueue(StateDir(tmp_path).requests_file)
    assert [one.request for one in again.entries()] == [first, second] and again.initial.unfinished == []


def test_a_table_that_was_cut_otherwise_is_asked_for_whole() -> None:
    planned = PlannedTable(table(5).published, 1, {"5-1-0": Chunk("public", "t5", 7, first_block=4)})
    (one,) = requests_for_rest(planned)
    assert (one.low, one.high) == (None, None)


@pytest.mark.parametrize(
    ("given", "how", "mode"),
    [
        (None, {}, "initial"),
        (None, {"temporary_slot": True}, "never"),
        (None, {"start_from": "slot"}, "never"),
        ("never", {"start_from": "slot"}, "never"),
        ("always", {}, "always"),
    ],
)
def test_the_default_is_initial_where_it_can_be(given: str | None, how: dict[str, Any], mode: str) -> None:
    options = PostgresOptions.model_validate({"snapshot_mode": given, **how})
    assert options.effective_snapshot_mode == mode


def test_progress_is_said_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SnapshotProgress()
    reading = {
        "table": "orders", "status": "reading", "rows": 1500, "estimated_rows": 6000, "percent": 25.0, "rows_per_s": 500,
        "seconds_left": 9,
    }  # fmt: skip
    waiting = {**reading, "table": "items", "status": "waiting"}
    for _ in range(3):
        progress.show({"status": "reading", "tables": [reading, waiting]})
    progress.show({"status": "complete", "rows": 6000, "seconds": 12.0, "tables": [{**reading, "status": "moved"}]})
    assert capsys.readouterr().err.replace("pgcdc: ", "").splitlines() == [
        "initial snapshot: 0 of 2 tables read; orders: 1,500 of about 6,000 rows (25 %), 500 rows/s, 9 s left",
        "initial snapshot: 6,000 rows of 1 table read in 12.0 s; the rest of orders is read beside the stream",
    ]
