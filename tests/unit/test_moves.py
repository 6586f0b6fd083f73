"""Adapters that come, go and move, and what is asked of lanes meanwhile, without Spark and without a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from spools import START_LSN, write_spool

from pgcdc import Pipeline, adapters, sources, transform
from pgcdc.capture.consumers import MAIN
from pgcdc.capture.control import CaptureLink
from pgcdc.errors import ConnectionLost, GapError, PgcdcError, SourceError
from pgcdc.position import Position
from pgcdc.relation import Column, Relation
from pgcdc.sink.ack import AckFile
from pgcdc.sink.base import Batch
from pgcdc.spool.schema import Op
from pgcdc.state import StateDir
from pgcdc.stream.events import LINES
from pgcdc.stream.lane import LaneStopped
from pgcdc.stream.lanes import Lanes, Watched
from pgcdc.stream.member import Adapter, NotAMember

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True),))


def at(number: int) -> Position:
    return Position.end(START_LSN + 8 * number)


class HeldSink:
    """A sink that writes when it may."""

    def __init__(self, name: str, start: Position) -> None:
        self.name, self.ack = name, start
        self.opened = 0
        self.is_busy = False
        self.began, self.go = threading.Event(), threading.Event()

    def check(self) -> None:
        pass

    def open(self, start: Position) -> None:
        self.opened += 1

    def write(self, batch: Batch) -> None:
        self.began.set()
        self.go.wait(10)
        self.ack = batch.end

    def close(self) -> None:
        pass


class Capture:
    """The capture's side: all lanes begin where they want to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.starts: dict[str, Position] = {}

    def call(self, what: Callable[[Any], Any]) -> Any:
        return what(self)

    def status(self) -> dict[str, Any]:
        return {"consumers": {}}

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
    made = Lanes(state, cast(CaptureLink, capture), lambda text: None, options={})
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
    assert not moves.membership.may_rejoin("b", at(9), at(0))
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
    with pytest.raises(PgcdcError, match="still at a write"):
        moves.add(Adapter("b", new))
    old.go.set()
    write.result(10)
    AckFile(StateDir(tmp_path).acks, "b").save(at(2), {})
    moves.main.next_start = at(3)
    with pytest.raises(GapError, match="the others were served"):
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
    sink_of(lanes, "b").is_busy = True
    moves.skip_ahead(5)
    assert moves.membership["b"].lane == lane
    sink_of(lanes, "b").is_busy = False
    moves.skip_ahead(5)
    assert moves.membership["b"].dropped == 10


def test_a_reload_does_not_forget_why_a_query_failed(lanes: Lanes) -> None:
    main = lanes.main
    failed: Any = SimpleNamespace(isActive=False, exception=lambda: GapError("gone"), stop=lambda: None)
    main.query, main.error = failed, GapError("gone")
    watched = lanes._watched[MAIN] = Watched()
    watched.failures = 3
    with pytest.raises(PgcdcError, match="has just failed"):
        lanes._restart(main)
    assert main.query is failed
    main.error = LaneStopped("as it was told to")
    lanes._restart(main)
    assert main.query is None
    assert lanes._watched[MAIN].failures == 3


def ask_elsewhere(lanes: Lanes, do: Callable[[], None]) -> list[BaseException]:
    """What somebody is told who asks in another thread."""
    lanes._watcher = threading.get_ident()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            do()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        lanes._answer()
        thread.join(0.01)
    return errors


def test_who_asks_is_told_of_any_error_and_the_run_goes_on(lanes: Lanes) -> None:
    def fail() -> None:
        raise KeyError("maybe")

    assert [repr(error) for error in ask_elsewhere(lanes, lambda: lanes.ask(fail))] == ["KeyError('maybe')"]


def test_an_adapter_that_comes_during_a_reload_has_the_new_transforms(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources.postgres("postgresql://h/x", tables=["a"], state_dir=tmp_path)
    pipeline = Pipeline(source, [adapters.noop(name="a"), adapters.noop(name="b")])
    pipeline._lanes, pipeline._is_open, pipeline._spark = lanes, True, cast(Any, object())
    made, go_on = threading.Event(), threading.Event()
    make = pipeline._make_adapters

    def slowly(specs: Any) -> list[Adapter]:
        found = make(specs)
        made.set()
        assert go_on.wait(10)
        return found

    monkeypatch.setattr(pipeline, "_make_adapters", slowly)
    lanes._watcher = threading.get_ident()
    thread = threading.Thread(target=pipeline.add_adapter, args=[adapters.noop(name="c")])
    thread.start()
    assert made.wait(10)
    mask = transform.mask("email")
    pipeline.reload([mask], {})
    go_on.set()
    while thread.is_alive():
        lanes._answer()
        thread.join(0.01)
    assert [one.chain.transforms for one in lanes.members()] == [(mask,)] * 3
    assert pipeline.status()["adapters"] == ["a", "b", "c"]
