"""The initial snapshot, step by step, without a server: what becomes of chunks when snapshots are lost and processes die."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from pgcdc.core.errors import ConnectionLost, SourceError, StateError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Op, Relation, Relations
from pgcdc.core.state import StateDir
from pgcdc.postgres.database import NoRight
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot import driver
from pgcdc.source.postgres.snapshot.chunks import Chunk
from pgcdc.source.postgres.snapshot.driver import MAX_LOSSES, Snapshots
from pgcdc.source.postgres.snapshot.held import Hold
from pgcdc.source.postgres.snapshot.reader import Answer, Order, StageOrder
from pgcdc.source.postgres.snapshot.releases import snapshot_rows, stage_rows
from pgcdc.source.postgres.snapshot.requests import RequestQueue, SkipRule

LSN = 0x800
KEYED, KEYLESS = 5, 6


@dataclass
class FakeReaders:
    """Reads when the test says so."""

    orders: list[Order] = field(default_factory=list)
    answers: list[tuple[Order, Answer]] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return len(self.orders) < 2

    def start(self, order: Order) -> None:
        self.orders.append(order)

    def take(self) -> tuple[Order, Answer] | None:
        return self.answers.pop(0) if self.answers else None

    def close(self) -> None:
        self.orders.clear()


class World:
    """A server with two tables of three chunks each (the second one is empty), and a process that can be killed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = StateDir(folder)
        self.end = Position.end(LSN)
        self.held, self.tables = {1}, {KEYED, KEYLESS}
        self.unreadable: set[int] = set()
        self.locked = False
        monkeypatch.setattr(driver, "Readers", lambda *_: FakeReaders())
        monkeypatch.setattr(driver, "is_held", lambda _, hold: hold.number in self.held)
        monkeypatch.setattr(driver, "hold_for_long", self._hold)
        monkeypatch.setattr(driver, "plan_tables", self._plan)
        monkeypatch.setattr(driver, "published_oids", lambda *_: self.tables)
        monkeypatch.setattr(driver, "HELD_INTERVAL_S", 0.0)
        monkeypatch.setattr(driver, "LOCKED_S", 0.0)
        monkeypatch.setattr(driver, "reconnect_delay_s", lambda _: 0.0)
        RequestQueue(self.state.requests_file).begin_initial(LSN, Hold(1, "name 1", "holder-1.json", 0.0))
        self.events: list[tuple[str, str]] = []
        """(operation, table) or (SNAPSHOT, value), as the stream has them."""
        self.restart()

    def restart(self) -> None:
        """The process dies; what was released before is visible, as the spool sees to it."""
        options = PostgresOptions(db="postgresql://nowhere")
        self.snapshots = Snapshots(options, ["p"], self.state, Position.end(LSN), "test")
        self.readers: Any = self.snapshots.readers
        for release in self.snapshots.releases.after(self.end):
            self._show(release)

    def _hold(self, url: str, state: StateDir, number: int, *, limit_s: float) -> Hold:
        self.held.add(number)
        return Hold(number, f"name {number}", f"holder-{number}.json", 0.0, visible=f"{number}:{number}:", lsn=LSN + 8)

    def _plan(self, url: str, publications: Any, snapshot: str, oids: set[int] | None) -> list[Any] | None:
        if self.locked:
            raise SourceError("locked") from psycopg.errors.LockNotAvailable()
        if int(snapshot.split()[1]) not in self.held:
            return None
        return [self._table(oid) for oid in sorted(self.tables) if oids is None or oid in oids]

    def _table(self, oid: int) -> tuple[PublishedTable, dict[str, Any] | None, tuple[list[Chunk], int] | None]:
        key = ("id",) if oid == KEYED else ()
        published = PublishedTable(
            Relation(oid, "public", f"t{oid}", "d", (Column("id", 23, -1, True),)), "r", key, None
        )
        bounds = [None, ("10",), ("20",), None]
        chunks = [Chunk("public", f"t{oid}", 7, key=key, low=a, high=b) for a, b in itertools.pairwise(bounds)]
        return published, None, None if oid in self.unreadable else (chunks, 20)

    def read(self, answer: Callable[[StageOrder], Answer] | None = None) -> bool:
        """A reader does what it was told to; False if there is nothing to do."""
        if not self.readers.orders:
            return False
        order = self.readers.orders.pop(0)
        values = [] if order.id.endswith("-1") else [f"{order.id}/{row}".encode() for row in range(2)]
        batches = [snapshot_rows(pa.array(values, pa.binary()), 1)] if values else []
        staged = answer(order) if answer else stage_rows(self.state.snapshot, batches, order.id)
        self.readers.answers.append((order, staged))
        return True

    def step(self, *, may_work: bool = True) -> bool:
        release = self.snapshots.step(self.end, may_work=may_work)
        if release is not None:
            self._show(release)
        return release is not None

    def _show(self, release: Any) -> None:
        for batch in self.snapshots.releases.batches(release, Relations()):
            for row in batch.data.to_pylist():
                is_mark = row["op"] != Op.SNAPSHOT
                self.events.append((Op(row["op"]).name, row["new"][3 if is_mark else 0].decode()))
        self.end = release.end

    def run(self, *, until: int = 10**6) -> None:
        """Steps until it is complete, or there are so many events."""
        for _ in range(200):
            if not self.snapshots.is_first or len(self.events) >= until:
                return
            self.read()
            self.step()
        raise AssertionError(self.snapshots.status(0))

    def rows(self) -> list[str]:
        return [text for op, text in self.events if op == "SNAPSHOT"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def of_table(oid: int, hold: int = 1) -> set[str]:
    return {f"{oid}-{hold}-{chunk}/{row}" for chunk in (0, 2) for row in (0, 1)}


def test_every_table_has_its_marks_around_its_rows(world: World) -> None:
    world.run()
    assert sorted(world.rows()) == sorted(of_table(KEYED) | of_table(KEYLESS))
    for oid in (KEYED, KEYLESS):
        mine = [op for op, text in world.events if text == f"t{oid}" or text.startswith(f"{oid}-")]
        assert mine == ["SNAPSHOT_STARTED", *["SNAPSHOT"] * 4, "SNAPSHOT_COMPLETED"]
    status = world.snapshots.status(0)
    assert status is not None and (status["status"], status["rows"]) == ("complete", 8)
    assert world.snapshots.initial_end == world.end and world.snapshots.rules == []


def test_a_table_without_a_key_waits_until_all_of_it_is_read(world: World) -> None:
    world.tables = {KEYLESS}
    for _ in range(2):
        world.step()
        world.read()
    world.step()
    assert world.events == [], "not by halves"
    world.run()
    assert set(world.rows()) == of_table(KEYLESS)


@pytest.mark.parametrize("dies_after", range(40))
def test_a_process_that_dies_at_any_step_goes_on_in_the_same_snapshot(world: World, dies_after: int) -> None:
    for number in range(60):
        if number == dies_after:
            world.restart()
        world.read() if number % 2 else world.step()
    world.run()
    assert sorted(world.rows()) == sorted(of_table(KEYED) | of_table(KEYLESS))
    assert [op for op, _ in world.events].count("SNAPSHOT_COMPLETED") == 2
    assert world.snapshots.queue.entries() == [] and not list(world.state.snapshot.glob("holder*"))


@pytest.mark.parametrize("lost_after", range(24))
@pytest.mark.parametrize("dies_too", [False, True])
def test_whenever_the_snapshot_is_lost_every_row_is_released_once_or_asked_for(
    world: World, lost_after: int, dies_too: bool
) -> None:
    for number in range(lost_after):
        world.read() if number % 2 else world.step()
    world.held.clear()
    if dies_too:
        world.restart()
    world.run()
    asked = [one.request for one in world.snapshots.queue.entries()]
    rows = world.rows()
    assert len(set(rows)) == len(rows)
    keyless = {row for row in rows if row.startswith(f"{KEYLESS}-")}
    assert keyless in (of_table(KEYLESS, 1), of_table(KEYLESS, 2)), "of one snapshot"
    keyed = {row for row in rows if row.startswith(f"{KEYED}-")}
    if asked:
        covered = {(one.low, one.high) for one in asked}
        missing = {chunk for chunk in ("0", "2") if not any(row.startswith(f"{KEYED}-1-{chunk}/") for row in keyed)}
        assert {one.oid for one in asked} == {KEYED} and keyed and keyed < of_table(KEYED, 1)
        assert ("0" not in missing or any(low is None for low, _ in covered)) and (
            "2" not in missing or any(high is None for _, high in covered)
        )
    else:
        assert keyed in (of_table(KEYED, 1), of_table(KEYED, 2))
    younger = {oid for oid in (KEYED, KEYLESS) if any(row.startswith(f"{oid}-2-") for row in rows)}
    assert {rule.oid for rule in world.snapshots.rules} == younger, "what the younger one saw is left out of the stream"


def test_a_table_that_was_truncated_is_read_in_a_younger_snapshot_and_the_other_goes_on(world: World) -> None:
    world.step()
    world.step()
    world.read(lambda order: SourceError("table t5 was truncated"))
    world.run()
    assert set(world.rows()) == of_table(KEYED, 2) | of_table(KEYLESS, 1)
    assert world.snapshots.rules == [SkipRule(KEYED, "2:2:", LSN + 8)]
    again = RequestQueue(world.state.requests_file).initial
    assert again.rules == world.snapshots.rules, "also when the stream is read again"


def test_a_table_that_cannot_be_read_in_the_new_snapshot_gets_one_that_is_younger(world: World) -> None:
    world.unreadable = {KEYED}
    world.step()
    world.step()
    world.unreadable = set()
    world.run()
    assert set(world.rows()) == of_table(KEYED, 3) | of_table(KEYLESS, 1)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_staged_rows_that_were_damaged_before_a_restart_are_not_released(world: World, damage: str) -> None:
    world.step()
    world.step()
    world.read()
    (path,) = world.state.snapshot.glob("*.arrow")
    data = bytearray(path.read_bytes())
    data[data.index(b"-1-0/0")] = ord("+")
    path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    world.restart()
    with pytest.raises(StateError, match=r"missing or damaged.*pgcdc resync"):
        world.run()
    assert world.rows() == []


def test_a_table_that_is_gone_ends_and_the_others_go_on(world: World) -> None:
    world.step()
    world.tables, world.held = {KEYLESS}, set()
    world.run()
    tables = (world.snapshots.status(0) or {})["tables"]
    assert {one["table"]: one["status"] for one in tables} == {"t5": "gone", "t6": "complete"}


def test_a_table_that_is_gone_when_its_snapshot_is_lost_halfway_leaves_no_request(world: World) -> None:
    world.run(until=2)
    assert world.rows()
    world.readers.close()
    world.tables, world.held = {KEYLESS}, set()
    world.run()
    tables = (world.snapshots.status(0) or {})["tables"]
    assert {one["table"]: one["status"] for one in tables} == {"t5": "gone", "t6": "complete"}
    assert world.snapshots.queue.entries() == []


def test_a_snapshot_that_is_lost_again_and_again_is_an_error(world: World) -> None:
    world.step()
    for _ in range(MAX_LOSSES):
        world.held.clear()
        world.step()
    world.held.clear()
    with pytest.raises(SourceError, match=r"3 snapshots were lost .* --snapshot-hold-limit"):
        world.step()


def test_a_locked_table_is_waited_for_in_the_same_snapshot(world: World) -> None:
    world.step()
    world.held.clear()
    world.locked = True
    for _ in range(MAX_LOSSES + 2):
        world.step()
    world.locked = False
    world.run()
    assert set(world.rows()) == of_table(KEYED, 2) | of_table(KEYLESS, 2)


def test_a_lost_connection_costs_time_and_a_missing_right_is_an_error(world: World) -> None:
    world.step()
    world.step()
    world.read(lambda order: ConnectionLost("gone"))
    world.step()
    assert len(world.readers.orders) == 2
    world.read(lambda order: NoRight("no", "Run: GRANT"))
    with pytest.raises(SourceError, match="nothing is lost"):
        world.step()


def test_rows_without_a_key_whose_files_somebody_deleted_are_not_read_in_two_snapshots(world: World) -> None:
    world.tables = {KEYLESS}
    world.run(until=2)
    assert len(world.rows()) > 0
    for path in world.state.snapshot.glob("*-2.*.arrow"):
        path.unlink()
    world.held.clear()
    world.restart()
    with pytest.raises(StateError, match="rows of table t6 are missing"):
        world.run()


def test_while_the_spool_is_full_chunks_are_read_and_nothing_is_released(world: World) -> None:
    world.step()
    for _ in range(6):
        world.step(may_work=False)
        world.read()
    assert world.events == []
    world.run()
    assert len(world.rows()) == 8
