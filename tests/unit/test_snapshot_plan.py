"""The plan of an initial snapshot: what a crash leaves of it, and what is asked for when a snapshot is lost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from pgcdc.cli.report import SnapshotProgress
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Relation
from pgcdc.core.state import StateDir
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.chunks import Chunk
from pgcdc.source.postgres.snapshot.held import Hold
from pgcdc.source.postgres.snapshot.initial import InitialSnapshot
from pgcdc.source.postgres.snapshot.plan import (
    PLAN_FILE,
    Entry,
    PlannedTable,
    SkipRule,
    SnapshotPlan,
    begin_plan,
    requests_for_rest,
)  # fmt: skip
from pgcdc.source.postgres.snapshot.releases import Releases
from pgcdc.source.postgres.snapshot.requests import RequestQueue

SLOTS = Hold(1, "00000003-1", "holder-1-a.json", 100.0)
YOUNGER = Hold(2, "00000003-2", "holder-2-b.json", 200.0, visible="10:20:12", lsn=0x900)


def table(oid: int, *, key: tuple[str, ...] = ("id",)) -> PublishedTable:
    columns = (Column("id", 23, -1, True), Column("v", 25, -1, False))
    return PublishedTable(Relation(oid, "public", f"t{oid}", "d", columns), "r", key, "id > 0")


def entries(oid: int, hold: int, count: int = 3) -> list[Entry]:
    bounds = [None, *((str(10 * number),) for number in range(1, count)), None]
    return [
        Entry(f"{oid}-{hold}-{n}", Chunk("public", f"t{oid}", 7, key=("id",), low=low, high=high), 10)
        for n, (low, high) in enumerate(itertools.pairwise(bounds))
    ]


def test_every_step_survives_a_crash_and_half_a_step_does_not(tmp_path: Path) -> None:
    begin_plan(tmp_path, 0x800, SLOTS)
    plan = SnapshotPlan(tmp_path)
    assert plan.is_active and not plan.is_planned and plan.holds == {1: SLOTS}
    plan.plan(1, [(table(5), entries(5, 1)), (table(6), entries(6, 1))], [table(7)])
    plan.start_table(5)
    plan.publish("5-1-1", 12)
    with open(tmp_path / PLAN_FILE, "ab") as log:
        log.write(b'0000 {"do": "complete"')
    again = SnapshotPlan(tmp_path)
    assert again.tables == plan.tables and again.is_planned and again.is_active
    five = again.tables[5]
    assert five.is_started and list(five.left) == ["5-1-0", "5-1-2"]
    assert (five.rows, five.estimated_rows) == (12, 32) and five.published == table(5)
    assert again.tables[7].hold == 0 and again.rules == []


def test_a_table_that_is_read_in_a_younger_snapshot_has_a_rule_for_ever(tmp_path: Path) -> None:
    begin_plan(tmp_path, 0x800, SLOTS)
    plan = SnapshotPlan(tmp_path)
    plan.plan(1, [(table(5), entries(5, 1)), (table(6), entries(6, 1))], [])
    plan.start_table(6)
    plan.hold(YOUNGER)
    plan.plan(2, [(table(6), entries(6, 2))], [])
    rule = SkipRule(6, "10:20:12", 0x900)
    assert plan.rules == [rule] and plan.tables[6].is_started and plan.tables[5].hold == 1
    plan.complete("end")
    for one in (plan, SnapshotPlan(tmp_path)):
        assert one.rules == [rule] and not one.is_active and one.completed is not None and one.lsn == 0x800
    assert len((tmp_path / PLAN_FILE).read_bytes().splitlines()) == 1


def test_rows_that_were_staged_and_are_not_wanted_go_with_the_end_of_the_snapshot(tmp_path: Path) -> None:
    """A table was dropped, say, while its rows waited: they would keep the disk until the capture is started again."""
    state = StateDir(tmp_path)
    begin_plan(state.snapshot, 0x800, SLOTS)
    plan = SnapshotPlan(state.snapshot)
    plan.plan(1, [(table(5), entries(5, 1))], [])
    plan.end_table(5, "gone")
    releases = Releases(state.snapshot, Position.end(0x800))
    snapshot = InitialSnapshot(PostgresOptions(), (), state, releases, RequestQueue(tmp_path / "requests.json"))
    released = releases.add(Position.end(0x800), releases.stage([]), None)
    releases.stage([])
    assert not snapshot.step(lambda *_: None, lambda: "end") and not snapshot.is_active
    assert [one.name for one in state.snapshot.glob("*.arrow*")] == [released.staged.file]
    snapshot.close()


def test_without_a_plan_there_is_no_snapshot(tmp_path: Path) -> None:
    assert not SnapshotPlan(tmp_path).is_active


def test_the_rest_is_asked_for_by_ranges_of_the_key() -> None:
    planned = PlannedTable(table(5), 1, {one.id: one for one in entries(5, 1, 6) if one.id not in ("5-1-0", "5-1-3")})
    first, second = requests_for_rest(planned, "t5")
    assert (first.low, first.high, first.table, first.kind) == (("10",), ("30",), "t5", "initial")
    assert (second.low, second.high) == (("40",), None) and first.id != second.id
    assert requests_for_rest(planned, "t5")[0].id == first.id, "the same after a crash"


def test_a_table_that_was_cut_otherwise_is_asked_for_whole() -> None:
    blocks = Entry("5-1-0", Chunk("public", "t5", 7, first_block=4), 10)
    (one,) = requests_for_rest(PlannedTable(table(5), 1, {blocks.id: blocks}), "t5")
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
        "initial snapshot: 0 of 2 tables are complete; orders: 1,500 of about 6,000 rows (25 %), 500 rows/s, 9 s left",
        "initial snapshot: 6,000 rows of 1 tables in 12.0 s; the rest of orders is read while changes come",
    ]
