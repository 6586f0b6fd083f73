"""The model of lanes: whatever fails, moves and crashes, every sink has every event once, in order, or counted as skipped.

The machine plays Spark (a planned batch is the same after any restart), the capture (what all consumers have acknowledged is
gone) and the sinks. What it tests is `stream/membership.py`: the decisions and the order of the durable steps.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from running import FakeRunner

from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.event.events import LINES
from pgcdc.run.lane import Lane, _look_at
from pgcdc.run.member import Adapter, Member, NotAMember, WriteFuture
from pgcdc.run.roster import Membership, Place, Roster, Write, WriteState, judge
from pgcdc.spark.session import QueryFailed
from pgcdc.spool.consumers import MAIN, is_side_lane

NAMES = ("a", "b", "c")
LATE = 1e9


def at(number: int) -> Position:
    """Behind event `number`."""
    return Position.end(8 * number)


def number_of(position: Position) -> int:
    return position.commit // 8


class Crash(Exception):
    """Kill -9 of the driver."""


class StepFailed(Exception):
    """A durable step did not happen (the disk is full, the capture does not answer), and the driver goes on."""


@dataclass
class Sink:
    """A target and its ack: both survive a crash."""

    ack: int | None = None
    events: list[int] = field(default_factory=list)
    began: int = 0
    writers: int = 0


@dataclass
class Checkpoint:
    """Of one query: what Spark has planned and committed. Survives a crash."""

    initial: int
    planned: int | None = None
    committed: int | None = None

    @property
    def place(self) -> int:
        return self.initial if self.committed is None else self.committed


@dataclass
class Running:
    """A query, gone after a crash."""

    next_start: int
    returned: int | None = None
    """The end of a batch that every member has, which Spark has not committed yet."""


@dataclass
class Consumer:
    initial: int
    ack: int


class World:
    """What is durable, and `Outside` for the core. A crash comes before or after the effect of a step."""

    def __init__(self) -> None:
        self.roster = Roster().to_json()
        self.consumers = {MAIN: Consumer(0, 0)}
        self.checkpoints = {MAIN: Checkpoint(0)}
        self.sinks = {name: Sink() for name in NAMES}
        self.base = 0
        self.crash_in: int | None = None
        self.crash_late = False
        self.is_crash = True

    def save(self, roster: Roster) -> None:
        def apply() -> None:
            self.roster = roster.to_json()

        self._step(apply)

    def join(self, lane: str, position: Position) -> None:
        def apply() -> None:
            start = number_of(position)
            if lane not in self.consumers:
                assert start >= self.base, f"{lane} wants what is behind {start}, but {self.base} is confirmed"
                self.consumers[lane] = Consumer(start, start)

        self._step(apply)

    def forget(self, lane: str) -> None:
        def apply() -> None:
            self.consumers.pop(lane, None)
            self.checkpoints.pop(lane, None)

        self._step(apply)

    def _step(self, apply: Callable[[], None]) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
        is_due = self.crash_in == 0
        if is_due:
            self.crash_in = None
        if not is_due or (self.crash_late and self.is_crash):
            apply()
        if is_due:
            raise Crash if self.is_crash else StepFailed


OUTCOMES = st.sampled_from(["ok", "ok", "ok", "failed", "slow"])


class LaneModel(RuleBasedStateMachine):
    @initialize(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def begin(self, names: set[str]) -> None:
        self.world = World()
        self.newest = 0
        self.wanted = sorted(names)
        self.skipped: dict[str, set[int]] = {name: set() for name in NAMES}
        self.counted = dict.fromkeys(NAMES, 0)
        self.adding: str | None = None
        self.start_again()

    # --- start and crash

    def start_again(self) -> None:
        """Everything that is not durable is gone, also the writes that ran."""
        world = self.world
        if self.adding in world.roster["adapters"]:  # else nobody was told that it is there
            self.wanted = sorted({*self.wanted, str(self.adding)})
        self.adding = None
        while True:
            self.writes: dict[str, tuple[int, int]] = {}
            self.left_over: list[str] = []
            self.half_made: set[str] = set()
            for sink in world.sinks.values():
                sink.writers = 0
            self.core = Membership(Roster.from_json(world.roster), world)
            try:
                self.core.recover(self.wanted)
                self.queries: dict[str, Running] = {}
                self.open_query(MAIN)
                for name in self.wanted:
                    self.open_query(self.core[name].lane)
                    self.open_sink(name)
                for consumer in [*world.consumers]:
                    self.core.let_go(consumer)
                break
            except (Crash, StepFailed):
                continue

    def open_query(self, lane: str) -> None:
        consumer = self.world.consumers[lane]
        checkpoint = self.world.checkpoints.setdefault(lane, Checkpoint(consumer.initial))
        self.queries[lane] = Running(checkpoint.place)

    def open_sink(self, name: str) -> None:
        """A sink joins a lane only where it stands; a new one begins there."""
        sink, start = self.world.sinks[name], self.queries[self.core[name].lane].next_start
        if sink.ack is None:
            sink.ack = sink.began = start
        assert number_of(self.core.reached(name, at(sink.ack))) >= start, f"{name} has a gap before {start}"

    @contextmanager
    def crashing(self) -> Iterator[None]:
        try:
            yield
        except Crash:
            self.start_again()
        except StepFailed:
            self.adding = None
            self.half_made |= {one for one in self.world.consumers if is_side_lane(one) and not self.core.members(one)}

    @rule(steps=st.integers(1, 3), late=st.booleans(), is_crash=st.booleans())
    def arm(self, steps: int, late: bool, is_crash: bool) -> None:
        """The driver dies at one of the next durable steps, or the step fails."""
        self.world.crash_in, self.world.crash_late, self.world.is_crash = steps, late, is_crash

    @rule()
    def crash(self) -> None:
        self.start_again()

    # --- the stream

    @rule(count=st.integers(1, 5))
    def produce(self, count: int) -> None:
        self.newest += count

    @rule(data=st.data(), size=st.integers(1, 4), fails=st.booleans())
    def deliver(self, data: st.DataObject, size: int, fails: bool) -> None:
        """One batch: planned anew, or the one that was planned before. `fails`: for another reason, after all moves."""
        lane = data.draw(st.sampled_from(sorted(self.queries)))
        query, checkpoint = self.queries[lane], self.world.checkpoints[lane]
        if query.returned is not None:
            return
        if checkpoint.planned in (None, checkpoint.committed):
            if checkpoint.place >= self.newest:
                return
            checkpoint.planned = min(self.newest, checkpoint.place + size)
        assert checkpoint.planned is not None
        start, end = checkpoint.place, checkpoint.planned
        assert start >= self.world.base, f"{lane} reads what is gone"
        with self.crashing():
            members = self.core.members(lane)
            states = {name: self.write(name, lane, start, end, data.draw(OUTCOMES)) for name in members}
            verdict = judge({name: Write(state) for name, state in states.items()}, LATE)
            if verdict.wait_s:
                return  # nobody has it: the batch waits
            for name in verdict.leave:
                new = self.core.leave(name, at(start))
                assert new not in {*self.queries, *self.left_over}, "two queries would have one checkpoint"
                self.open_query(new)
            if fails or any(states[name] is not WriteState.DONE for name in members if name not in verdict.leave):
                query.next_start = checkpoint.place  # the query starts again from its checkpoint
                return
            query.returned = query.next_start = end

    def write(self, name: str, lane: str, start: int, end: int, outcome: str) -> WriteState:
        sink = self.world.sinks[name]
        assert sink.ack is not None
        reached = number_of(self.core.reached(name, at(sink.ack)))
        assert reached >= start, f"{name} is at {reached} and gets what is behind {start}"
        if reached >= end:
            return WriteState.DONE
        if not self.core.begin_write(name, lane):
            return WriteState.RUNNING
        assert sink.writers == 0, f"{name} has two writers"
        if outcome == "slow":
            sink.writers += 1
            self.writes[name] = (reached, end)
            return WriteState.RUNNING
        if outcome == "ok":
            self.apply(sink, reached, end)
        self.core.end_write(name)
        return WriteState.DONE if outcome == "ok" else WriteState.FAILED

    @staticmethod
    def apply(sink: Sink, reached: int, end: int) -> None:
        sink.events += range(reached + 1, end + 1)
        sink.ack = end

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), is_ok=st.booleans())
    def finish_write(self, data: st.DataObject, is_ok: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.writes)))
        reached, end = self.writes.pop(name)
        sink = self.world.sinks[name]
        if is_ok:
            self.apply(sink, reached, end)
        sink.writers -= 1
        self.core.end_write(name)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.queries)))
        query = self.queries[lane]
        if query.returned is not None:
            self.world.checkpoints[lane].committed = query.returned
            query.returned = None

    @rule(data=st.data())
    def restart_query(self, data: st.DataObject) -> None:
        """It failed, or is started with another program: what was not committed comes again."""
        lane = data.draw(st.sampled_from(sorted(self.queries)))
        self.open_query(lane)

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.queries)))
        self.world.consumers[lane].ack = self.world.checkpoints[lane].place

    @rule()
    def confirm(self) -> None:
        self.world.base = max(self.world.base, min(one.ack for one in self.world.consumers.values()))

    # --- moves

    def apart(self) -> list[str]:
        return [name for name in self.wanted if self.core[name].lane != MAIN]

    @precondition(lambda self: self.apart())
    @rule(data=st.data())
    def rejoin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.apart()))
        ack, start = self.world.sinks[name].ack, self.queries[MAIN].next_start
        assert ack is not None
        with self.crashing():
            left = self.core[name].lane
            if self.core.rejoin(name, at(ack), at(start)):
                self.abandon(left)

    @precondition(lambda self: self.apart())
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.apart()))
        ack = self.world.sinks[name].ack
        assert ack is not None
        reached = number_of(self.core.reached(name, at(ack)))
        if name in self.writes or reached >= self.newest:
            return
        missing = range(reached + 1, self.newest + 1)
        with self.crashing():
            old = self.core[name].lane
            new = self.core.skip(name, at(self.newest), len(missing))
            self.abandon(old)
            self.open_query(new)
        if self.core[name].floor == at(self.newest):  # whatever crashed: it is counted if it holds
            self.skipped[name] |= set(missing)
            self.counted[name] += len(missing)

    def abandon(self, lane: str) -> None:
        """Its query takes no batch any more; it is forgotten later."""
        if lane != MAIN:
            del self.queries[lane]
            self.left_over.append(lane)

    @precondition(lambda self: self.left_over)
    @rule(data=st.data())
    def write_late(self, data: st.DataObject) -> None:
        """A lane that was left still has a batch in hand, and is refused."""
        for name in self.wanted:
            assert not self.core.begin_write(name, data.draw(st.sampled_from(self.left_over))), f"{name} was elsewhere"

    @precondition(lambda self: self.left_over)
    @rule()
    def let_go(self) -> None:
        with self.crashing():
            self.core.let_go(self.left_over[0])
            self.left_over.pop(0)

    @precondition(lambda self: len(self.wanted) < len(NAMES))
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(NAMES) - set(self.wanted))))
        if name in self.writes:
            return
        sink = self.world.sinks[name]
        start = self.queries[MAIN].next_start
        if sink.ack is not None and sink.ack < start:
            return  # refused: it was left out, and would miss something
        self.adding = name
        with self.crashing():
            self.open_query(self.core.add(name, at(start)))
            self.open_sink(name)
            self.wanted, self.adding = sorted([*self.wanted, name]), None

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.wanted))
        if self.core[name].floor > at(self.world.sinks[name].ack or 0) or name in self.writes:
            return
        before = self.wanted
        self.wanted = [one for one in self.wanted if one != name]
        with self.crashing():
            left = self.core[name].lane
            self.core.remove(name)
            self.abandon(left)
        if name in self.core:  # it could not be written down: it stays
            self.wanted = before
        else:
            self.counted[name] = 0

    # --- what must hold

    @invariant()
    def every_sink_has_every_event_once_in_order(self) -> None:
        for name, sink in self.world.sinks.items():
            if sink.ack is not None:
                expected = [one for one in range(sink.began + 1, sink.ack + 1) if one not in self.skipped[name]]
                assert sink.events == expected, name

    @invariant()
    def nothing_is_confirmed_that_somebody_needs(self) -> None:
        for lane in self.queries:
            assert self.world.base <= self.world.checkpoints[lane].place
        for name in self.wanted:
            ack = self.world.sinks[name].ack
            assert ack is not None
            assert at(self.world.base) <= self.core.reached(name, at(ack)), name

    @invariant()
    def what_is_dropped_is_counted(self) -> None:
        for name in self.wanted:
            assert self.core[name].dropped == self.counted[name]

    @invariant()
    def every_lane_has_its_consumer_and_every_consumer_a_lane(self) -> None:
        for name in self.wanted:
            assert self.core[name].lane in self.world.consumers
        unknown = {one for one in self.world.consumers if is_side_lane(one) and not self.core.members(one)}
        assert unknown <= {*self.left_over, *self.half_made}

    def teardown(self) -> None:
        """When nothing fails any more, everything arrives, everybody is in main, and everything is confirmed."""
        if not hasattr(self, "core"):
            return
        self.world.crash_in = None
        self.start_again()
        for lane in [*self.queries]:
            query, checkpoint = self.queries[lane], self.world.checkpoints[lane]
            while checkpoint.place < self.newest:
                end = self.newest if checkpoint.planned in (None, checkpoint.committed) else checkpoint.planned
                assert end is not None
                for name in self.core.members(lane):
                    assert self.write(name, lane, checkpoint.place, end, "ok") is WriteState.DONE
                checkpoint.planned = checkpoint.committed = query.next_start = end
            self.world.consumers[lane].ack = checkpoint.place
        for name in self.apart():
            ack = self.world.sinks[name].ack
            assert ack is not None
            left = self.core[name].lane
            assert self.core.rejoin(name, at(ack), at(self.newest))
            self.abandon(left)
        for lane in [*self.world.consumers]:
            self.core.let_go(lane)
        self.confirm()
        assert self.world.base == self.newest
        assert set(self.world.consumers) == {MAIN}
        for name in self.wanted:
            assert self.core.reached(name, at(self.world.sinks[name].ack or 0)) >= at(self.newest)


TestLaneModel = LaneModel.TestCase
TestLaneModel.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def write(state: str, ended: float = 0.0, priority: str = "normal", grace_s: float = 0.0) -> Write:
    return Write(WriteState(state), priority, ended, grace_s)


@pytest.mark.parametrize(
    ("writes", "wait_s", "leave"),
    [
        pytest.param({"a": write("done", 9.0)}, 0, (), id="all have it"),
        pytest.param({"a": write("running")}, math.inf, (), id="nobody else waits for it"),
        pytest.param({"a": write("failed", 5.0), "b": write("running")}, math.inf, (), id="nobody has it yet"),
        pytest.param({"a": write("failed", 5.0), "b": write("failed", 5.0)}, 0, (), id="nobody has it: all try again"),
        pytest.param({"a": write("done", 5.0), "b": write("failed", 5.0)}, 0, ("b",), id="failed"),
        pytest.param({"a": write("done", 9.5), "b": write("running")}, 0.5, (), id="slow, but not for long"),
        pytest.param({"a": write("done", 8.9), "b": write("running")}, 0, ("b",), id="slow"),
        pytest.param({"a": write("done", 5.0), "b": write("done", 9.5), "c": write("running")}, 0.5, (), id="the last"),
        pytest.param({"a": write("done", 7.0), "b": write("running", grace_s=5.0)}, 3.0, (), id="large"),
        pytest.param({"a": write("done", 4.0), "b": write("running", grace_s=5.0)}, 0, ("b",), id="large and slow"),
        pytest.param(
            {"a": write("done", 9.7), "b": write("running", priority="best-effort")}, 0, ("b",), id="best effort"
        ),
        pytest.param(
            {"a": write("done", 1.0), "b": write("running", priority="critical")}, math.inf, (), id="critical, slow"
        ),
        pytest.param(
            {"a": write("done", 1.0), "b": write("failed", 1.0, "critical")}, 0, ("b",), id="critical, failed"
        ),
        pytest.param(
            {"a": write("done", 9.5), "b": write("failed", 9.5), "c": write("running")}, 0.5, (), id="leave together"
        ),
    ],
)
def test_who_leaves_a_lane(writes: dict[str, Write], wait_s: float, leave: tuple[str, ...]) -> None:
    verdict = judge(writes, 10.0)
    assert verdict.wait_s == pytest.approx(wait_s)
    assert verdict.leave == leave


def test_the_roster_is_the_same_after_a_restart_and_a_damaged_one_is_refused() -> None:
    places = {"a": Place(), "b": Place("main~b~3", at(7), at(5), 2)}
    raw = json.loads(json.dumps(Roster(places, 3).to_json()))
    assert Roster.from_json(raw) == Roster(places, 3)
    assert Roster.from_json(None) == Roster()
    damages: list[dict[str, object]] = [{"version": 2}, {"adapters": {"a": {}}}, {"number": "x"}, {"adapters": 1}]
    for damage in damages:
        with pytest.raises(StateError, match=r"lanes\.json is damaged"):
            Roster.from_json(raw | damage)


class SlowSink(FakeRunner):
    """Counts who writes at the same time."""

    def __init__(self) -> None:
        super().__init__("slow", at(0))
        self.writers = self.most = 0
        self.written: list[tuple[int, int]] = []
        self.began, self.go = threading.Event(), threading.Event()

    def write(self, batch: Batch) -> None:
        self.writers += 1
        self.most = max(self.most, self.writers)
        self.began.set()
        self.go.wait(10)
        self.written.append((number_of(batch.start), number_of(batch.end)))
        self.ack = batch.end
        self.writers -= 1


def test_a_member_has_one_writer_and_refuses_a_lane_that_it_has_left() -> None:
    world = World()
    core = Membership(Roster(), world)
    core.recover(["slow"])
    sink = SlowSink()
    member = Member(Adapter("slow", sink), core)
    empty = LINES.empty_table()
    first = member.submit(MAIN, Batch(at(0), at(2), empty))
    assert sink.began.wait(10)
    lane = core.leave("slow", at(0))
    stale = member.submit(MAIN, Batch(at(2), at(3), empty))
    again = member.submit(lane, Batch(at(0), at(4), empty))
    assert member.is_busy
    assert not core.rejoin("slow", at(9), at(0)), "it is being written to"
    sink.go.set()
    first.result(10)
    again.result(10)
    with pytest.raises(NotAMember):
        stale.result(10)
    assert sink.most == 1
    assert sink.written == [(0, 2), (2, 4)], "what it has is not written again"
    member.close()


def test_a_sink_that_refuses_parts_gets_the_batch_like_the_others_and_is_not_done_before(tmp_path: Path) -> None:
    world = World()
    core = Membership(Roster(), world)
    core.recover(["slow"])
    sink = SlowSink()
    sink.go.set()
    member = Member(Adapter("slow", sink), core)
    refused = WriteFuture()
    refused.set_result(False)
    assert _look_at(member, refused, 0.0).state is WriteState.RUNNING
    lane = Lane(MAIN, tmp_path, at(0), lambda: [member])
    batch = Batch(at(0), at(2), LINES.empty_table())
    lane._follow(at(0), {"slow": refused}, [member], lambda one: one.submit(MAIN, batch))
    assert sink.written == [(0, 2)]
    member.close()


def test_what_an_adapter_raises_is_told_with_its_name_and_without_secrets(tmp_path: Path) -> None:
    """Spark itself would only say that its Python callback failed."""
    core = Membership(Roster(), World())
    core.recover(["slow"])
    member = Member(Adapter("slow", SlowSink()), core)
    failed = WriteFuture()
    failed.set_exception(ValueError("boom at postgres://me:hush@host/db\nand more"))
    lane = Lane(MAIN, tmp_path, at(0), lambda: [member])
    with pytest.raises(QueryFailed) as raised:
        lane._follow(at(0), {"slow": failed}, [member], lambda one: failed)
    assert raised.value.message == "adapter slow failed: ValueError: boom at postgres://me:***@host/db"
    assert isinstance(raised.value.__cause__, ValueError)
    member.close()
