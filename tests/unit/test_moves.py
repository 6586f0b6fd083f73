"""Adapters that come, go and move, and what is asked of lanes meanwhile, without Spark and without a capture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from running import FakeRunner, run
from spools import START_LSN, write_spool

from pgcdc import Pipeline, adapters, sources, transform
from pgcdc.capture.control import CaptureLink
from pgcdc.core.errors import ConnectionLost, GapError, PgcdcError, SinkUnavailable, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Op, Relation
from pgcdc.core.state import StateDir
from pgcdc.event.batch import Batch
from pgcdc.event.events import LINES
from pgcdc.run import transfer
from pgcdc.run.lane import Lane, LaneStopped
from pgcdc.run.member import Adapter, NotAMember
from pgcdc.run.query_watch import RECOVERED_S
from pgcdc.run.supervisor import Lanes
from pgcdc.sink.contract import Progress
from pgcdc.sink.spec import make_sink
from pgcdc.spool.consumers import MAIN
from pgcdc.spool.reader import SpoolReader
from pgcdc.transform.specs import Chain

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True),))


def at(number: int) -> Position:
    return Position.end(START_LSN + 8 * number)


class HeldSink(FakeRunner):
    """A sink that writes when it may."""

    def __init__(self, name: str, start: Position) -> None:
        super().__init__(name, start)
        self.opened = 0
        self.began, self.go = threading.Event(), threading.Event()

    def open(self, start: Position) -> None:
        self.opened += 1

    def write(self, batch: Batch) -> None:
        self.began.set()
        self.go.wait(10)
        self.ack = batch.end


class Capture:
    """The capture's side: all lanes begin where they want to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.starts: dict[str, Position] = {}

    def status(self) -> dict[str, Any]:
        return {"consumers": {}}

    last_status = status

    def join(self, lane: str, start: Position | None = None) -> tuple[Position, None]:
        if start is None and self.error is not None:
            raise self.error
        return self.starts.setdefault(lane, start or at(0)), None

    def forget(self, lane: str) -> None:
        self.starts.pop(lane, None)


@pytest.fixture
def capture() -> Capture:
    return Capture()


@pytest.fixture
def lanes(tmp_path: Path, capture: Capture) -> Lanes:
    """Adapters a and b, both in main."""
    state = StateDir(tmp_path)
    for folder in (state.acks, state.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    source = sources.postgres("postgresql://h/x", tables=["a"], state_dir=tmp_path)
    made = Lanes(source, state, cast(CaptureLink, capture), lambda text: None, {})
    made.open([Adapter(name, HeldSink(name, at(0))) for name in "ab"])
    return made


def sink_of(lanes: Lanes, name: str) -> HeldSink:
    return cast(HeldSink, lanes._moves.members[name].sink)


def test_main_looks_at_its_neighbours_while_one_is_removed(lanes: Lanes) -> None:
    moves = lanes._moves
    member = moves.members["b"]
    moves.leave(member, at(0), None)
    moves.membership.remove("b")  # the first step of a removal, in another thread
    assert moves.side_lanes == []
    moves.begin_batch(at(0))
    assert member.reached == at(0)
    assert not moves.membership.rejoin("b", at(9), at(0))
    assert [one["adapter"] for one in lanes.status()] == ["a"]


def test_an_adapter_comes_back_when_its_last_write_has_ended_and_its_target_is_left_alone(
    lanes: Lanes, tmp_path: Path
) -> None:
    moves, old = lanes._moves, sink_of(lanes, "b")
    member = moves.members["b"]
    write = member.submit(MAIN, Batch(at(0), at(2), LINES.empty_table()))
    assert old.began.wait(10)
    moves.remove("b", 1.0)
    with pytest.raises(NotAMember):
        member.submit(MAIN, Batch(at(2), at(3), LINES.empty_table())).result(10)
    new = HeldSink("b", at(2))
    with pytest.raises(PgcdcError, match="has not finished a write"):
        moves.add(Adapter("b", new))
    old.go.set()
    write.result(10)
    Progress(StateDir(tmp_path).acks, "b").save(at(2), {})
    moves.main.next_start = at(3)
    with pytest.raises(GapError, match="the others continued"):
        moves.add(Adapter("b", new))
    assert new.opened == 0 and "b" not in moves.membership
    moves.main.next_start = at(2)
    moves.add(Adapter("b", new))
    assert new.opened == 1 and "b" in moves.membership


def test_an_adapter_whose_lane_cannot_be_opened_is_in_later_or_not_at_all(lanes: Lanes, capture: Capture) -> None:
    moves = lanes._moves
    capture.error = SourceError("no")
    with pytest.raises(SourceError):
        moves.add(Adapter("c", HeldSink("c", at(0))))
    assert "c" not in moves.membership and "c" not in moves.members
    capture.error = ConnectionLost("not now")
    moves.add(Adapter("c", HeldSink("c", at(0))))
    lane = moves.membership["c"].lane
    assert lane not in moves.lanes and moves.members["c"].last_error is capture.error
    capture.error = None
    moves.open_missing()
    assert lane in moves.lanes


def test_a_sink_at_a_write_that_was_given_up_does_not_skip(lanes: Lanes, tmp_path: Path) -> None:
    moves = lanes._moves
    write_spool(StateDir(tmp_path).spool, [[(ORDERS, Op.INSERT, [b"1"], None)]] * 10)
    moves.leave(moves.members["b"], at(0), None)
    lane = moves.membership["b"].lane
    sink_of(lanes, "b").attempts.is_busy = True
    moves.skip_ahead(5)
    assert moves.membership["b"].lane == lane
    sink_of(lanes, "b").attempts.is_busy = False
    moves.skip_ahead(5)
    assert moves.membership["b"].dropped == 10


def test_skipping_looks_at_an_adapter_that_left_later_and_is_further_behind(lanes: Lanes, tmp_path: Path) -> None:
    moves = lanes._moves
    write_spool(StateDir(tmp_path).spool, [[(ORDERS, Op.INSERT, [b"1"], None)]] * 10)
    moves.leave(moves.members["b"], at(0), None)
    sink_of(lanes, "b").ack = at(6)
    moves.skip_ahead(8)
    moves.leave(moves.members["a"], at(1), None)
    sink_of(lanes, "a").ack = at(1)
    moves.skip_ahead(8)
    assert [moves.membership[name].dropped for name in "ab"] == [9, 0]


def test_looking_for_adapters_far_behind_reads_the_index_once(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = lanes._moves
    made: list[SpoolReader] = []

    def make(folder: Path) -> SpoolReader:
        made.append(SpoolReader(folder))
        return made[-1]

    monkeypatch.setattr(transfer, "SpoolReader", make)
    write_spool(StateDir(tmp_path).spool, [[(ORDERS, Op.INSERT, [b"1"], None)]] * 10)
    moves.skip_ahead(10)
    assert not made  # nobody is in a lane of its own
    moves.leave(moves.members["b"], at(0), None)
    for number in range(5):
        sink_of(lanes, "b").ack = at(number)
        moves.skip_ahead(10)
    assert len(made) == 1 and len(made[0].records) == 6


def test_closing_waits_for_what_was_asked(lanes: Lanes) -> None:
    closing = threading.Thread(target=lanes.close)

    def add() -> None:
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        lanes.add_adapter(Adapter("c", HeldSink("c", at(0))))

    lanes.ask(add)
    closing.join(10)
    assert not closing.is_alive() and lanes._moves.members["c"]._is_closed
    with pytest.raises(PgcdcError, match="has stopped"):
        lanes.ask(lambda: None)


class MovesMeanwhile:
    """The boundary of a lane at which a batch ends while somebody waits for its end."""

    def __init__(self, lane: Lane, move: Callable[[], None]) -> None:
        self._boundary, self._move = lane.boundary, [move]

    def acquire(self, **how: Any) -> bool:
        if self._move:
            self._move.pop()()
        return self._boundary.acquire(**how)

    def release(self) -> None:
        self._boundary.release()


def test_an_adapter_that_leaves_while_it_waits_to_be_removed_leaves_no_lane(lanes: Lanes) -> None:
    moves = lanes._moves
    moves.main.boundary = cast(Any, MovesMeanwhile(moves.main, lambda: moves.leave(moves.members["b"], at(0), None)))
    moves.remove("b", 1.0)
    assert set(moves.lanes) == {MAIN} and "b" not in moves.membership
    assert [lane.is_abandoned for lane in moves.left_over] == [True]


def test_an_adapter_that_comes_back_while_it_waits_to_be_removed_leaves_main(lanes: Lanes) -> None:
    moves = lanes._moves
    moves.leave(moves.members["b"], at(0), None)
    lane = moves.lanes[moves.membership["b"].lane]
    moves.main.program = cast(Any, SimpleNamespace(chains=[Chain()]))
    member = moves.members["b"]
    member.is_open = True
    lane.boundary = cast(Any, MovesMeanwhile(lane, lambda: moves.begin_batch(at(0))))
    moves.remove("b", 1.0)
    assert set(moves.lanes) == {MAIN} and "b" not in moves.membership
    assert moves.left_over == [lane]


def test_a_reload_does_not_forget_why_a_query_failed(lanes: Lanes) -> None:
    main = lanes.main
    failed: Any = SimpleNamespace(isActive=False, exception=lambda: GapError("gone"), stop=lambda: None)
    main.query, main.error = failed, GapError("gone")
    lanes.watch(main).failures = 3
    with pytest.raises(PgcdcError, match="has just failed"):
        lanes._restart(main)
    assert main.query is failed
    main.error = LaneStopped("as it was told to")
    lanes._restart(main)
    assert main.query is None
    assert lanes.watch(main).failures == 3


def test_who_asks_waits_for_the_look_and_is_told_of_any_error(lanes: Lanes) -> None:
    errors: list[BaseException] = []

    def fail() -> None:
        raise KeyError("maybe")

    def ask() -> None:
        try:
            lanes.ask(fail)
        except BaseException as error:
            errors.append(error)

    def ask_elsewhere() -> threading.Thread:
        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    with lanes._looking:
        thread = ask_elsewhere()
        thread.join(0.05)
        assert thread.is_alive() and not errors
    thread.join(10)
    assert [repr(error) for error in errors] == ["KeyError('maybe')"]
    lanes.stop()
    ask_elsewhere().join(10)
    assert str(errors[-1]).startswith("the pipeline has stopped")


def test_an_adapter_that_comes_during_a_reload_has_the_new_transforms(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources.postgres("postgresql://h/x", tables=["a"], state_dir=tmp_path)
    pipeline = Pipeline(source, [adapters.noop(name="a"), adapters.noop(name="b")])
    pipeline._lanes, pipeline._spark = lanes, cast(Any, object())
    made, go_on = threading.Event(), threading.Event()
    make = pipeline._make_adapters

    def slowly(specs: Any) -> list[Adapter]:
        found = make(specs)
        made.set()
        assert go_on.wait(10)
        return found

    monkeypatch.setattr(pipeline, "_make_adapters", slowly)
    thread = threading.Thread(target=pipeline.add_adapter, args=[adapters.noop(name="c")])
    thread.start()
    assert made.wait(10)
    mask = transform.mask("email")
    pipeline.reload([mask], {})
    go_on.set()
    thread.join(10)
    assert [one.chain.transforms for one in lanes.members()] == [(mask,)] * 3
    assert pipeline.status()["adapters"] == ["a", "b", "c"]


def test_an_adapter_that_comes_back_begins_with_what_its_last_write_has_done(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That write ends when the new sink has been looked at, and before it is taken in."""
    source = sources.postgres("postgresql://h/x", tables=["a"], state_dir=tmp_path)
    target = adapters.file(str(tmp_path / "b.jsonl"), name="c")
    pipeline = Pipeline(source, [adapters.noop(name="a"), adapters.noop(name="b")])
    pipeline._lanes, pipeline._spark = lanes, cast(Any, object())
    acks = StateDir(tmp_path).acks
    old = run(make_sink(target), acks, "c")
    old.open(at(0))
    ask = lanes.ask

    def late(do: Callable[[], None]) -> None:
        if old.ack == at(0):
            positions = [str(Position.at(START_LSN + 8, 0))]
            old.write(Batch(at(0), at(2), pa.table({"position": positions, "line": ["x\n"]}, schema=LINES)))
        ask(do)

    monkeypatch.setattr(lanes, "ask", late)
    lanes.main.next_start = at(2)
    pipeline.add_adapter(target)
    assert (tmp_path / "b.jsonl").read_text() == "x\n"
    assert lanes._moves.members["c"].reached == at(2)


def test_a_reload_with_a_lane_that_is_not_there_yet_changes_all(lanes: Lanes, capture: Capture) -> None:
    capture.error = ConnectionLost("not now")
    with pytest.raises(ConnectionLost):
        lanes._moves.leave(lanes._moves.members["b"], at(0), None)
    chain = Chain((transform.mask("email"),))
    lanes.reload({"a": chain, "b": chain})
    assert [one.chain for one in lanes.members()] == [chain, chain]


def test_an_ack_that_did_not_arrive_is_told_again(
    lanes: Lanes, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(lanes.main, at(3))
    acks: list[Position] = []

    def lost(lane: str, position: Position) -> None:
        raise ConnectionLost("the capture has died")

    monkeypatch.setattr(capture, "ack", lost, raising=False)
    with pytest.raises(ConnectionLost):
        lanes.acknowledge()
    monkeypatch.setattr(capture, "ack", lambda lane, position: acks.append(position))
    lanes.acknowledge()
    lanes.acknowledge()
    assert acks == [at(3)]


def test_an_error_is_forgotten_when_it_is_over(lanes: Lanes, capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "ack", lambda lane, position: None, raising=False)
    watch = lanes.watch(lanes.main)

    def error() -> str | None:
        return lanes.last_error["message"] if lanes.last_error else None

    watch.recover(SinkUnavailable("the disk is full"))
    assert error() == "the disk is full"
    commit(lanes.main, at(1))
    lanes.acknowledge()
    assert error() is None
    watch.recover(SinkUnavailable("the disk is full"))
    lanes.main.query = cast(Any, SimpleNamespace(isActive=True))
    watch._began = time.monotonic()
    watch.look()
    assert error() == "the disk is full"
    watch._began = time.monotonic() - RECOVERED_S  # and nothing to do since
    with lanes.main.boundary:  # it is at a batch, maybe the one that failed
        watch.look()
    assert error() == "the disk is full"
    watch.look()
    assert error() is None
    capture.error = ConnectionLost("not now")
    lanes._moves.add(Adapter("c", HeldSink("c", at(0))))
    assert lanes.status()[2]["last_error"] == "not now"
    capture.error = None
    lanes._moves.open_missing()
    lanes._moves.members["c"].open(at(0))
    assert lanes.status()[2]["last_error"] is None


@pytest.mark.parametrize("owns_spark", [True, False])
def test_a_run_that_failed_leaves_no_query_in_a_spark_of_somebody_else(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owns_spark: bool
) -> None:
    done: list[str] = []
    pipeline = Pipeline(sources.postgres("postgresql://h/x", tables=["a"], state_dir=tmp_path), [adapters.noop()])
    monkeypatch.setattr("pgcdc.run.driver.stop_within", lambda *_: done.append("spark"))
    pipeline._lanes, pipeline._spark, pipeline._owns_spark = lanes, cast(Any, object()), owns_spark
    pipeline._link = cast(Any, SimpleNamespace(stop=lambda: done.append("capture"), close=lambda: None))
    lanes.main.query = cast(Any, SimpleNamespace(stop=lambda: done.append("query")))
    pipeline._close()
    assert done == (["capture", "spark"] if owns_spark else ["query", "capture"])


def test_what_is_said_of_an_adapter_that_moves(lanes: Lanes, tmp_path: Path) -> None:
    moves, said = lanes._moves, cast(list[str], [])
    moves._say = said.append
    failing = moves.members["b"]
    failing.sink.attempts.failing = SinkUnavailable("the disk is full")
    moves.leave(failing, at(0), None)
    assert lanes.status()[1]["last_error"] == "the disk is full"
    moves.leave(moves.members["a"], at(0), None)
    assert [text.split(":")[0] for text in said] == ["adapter b failed (the disk is full)", "adapter a is slow"]


def commit(lane: Lane, end: Position) -> None:
    """What Spark leaves behind one batch."""
    for folder in ("offsets", "commits"):
        path = lane.checkpoint.folder / folder / str(lane._last_batch + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1\n{}\n")
    lane.checkpoint.note(lane._last_batch + 1, end)
    lane._last_batch += 1
