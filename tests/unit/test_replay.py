"""Dead letters are delivered again: in order, each marked when it is at its target, also by a run that goes on."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from letters import PIPELINE, PickyFile, at, letter
from running import FakeRunner, run
from sink_targets import END, START, Target, batch, fresh, opened

from pgcdc import adapters
from pgcdc.capture.control import ask
from pgcdc.cli.dlq import plan_destinations
from pgcdc.config import Config
from pgcdc.core import failpoint
from pgcdc.core.errors import ConfigError, PgcdcError, Reject, SinkError, SinkRejected, SinkUnavailable, StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.event.batch import Batch
from pgcdc.run.control import RunServer
from pgcdc.run.letter_service import LetterService, _Telling, ask_run
from pgcdc.run.member import Adapter, Member
from pgcdc.run.roster import Membership, Place, Roster
from pgcdc.sink.groups import read_records
from pgcdc.sink.letters.delivery import MAX_CHARS, MAX_LETTERS, Tally, as_batch, deliver_again, find_batches
from pgcdc.sink.letters.record import Query
from pgcdc.sink.letters.stores import FileDeadLetters
from pgcdc.sink.noop import NoopSink
from pgcdc.transform.specs import Chain, column_chain


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda point: monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(point))


@pytest.fixture
def store(tmp_path: Path) -> FileDeadLetters:
    made = FileDeadLetters(tmp_path / "letters.jsonl")
    made.pipeline = PIPELINE
    return made


def outcomes(store: FileDeadLetters) -> list[str | None]:
    return [one.outcome for one in store.find(Query())]


# --- one batch


def test_letters_come_in_batches_of_one_adapter_in_the_order_of_the_stream(store: FileDeadLetters) -> None:
    store.record([letter(number, adapter) for number in (3, 1, 2) for adapter in ("b", "a")])
    found = [[(one.adapter, one.position) for one in part] for part in find_batches(store, Query())]
    assert found == [[(adapter, one) for one in at(1, 2, 3)] for adapter in ("a", "b")]
    store.record([letter(number, "many") for number in range(1, MAX_LETTERS + 2)])
    assert [len(part) for part in find_batches(store, Query(adapter="many"))] == [MAX_LETTERS, 1]
    store.record([letter(number, "large", "x" * (MAX_CHARS // 2)) for number in (1, 2, 3)])
    assert [len(part) for part in find_batches(store, Query(adapter="large"))] == [2, 1]


def test_a_batch_has_the_lines_as_they_were(store: FileDeadLetters) -> None:
    made = as_batch([letter(1, event="a\nb"), letter(2, event="c")])
    assert made.events.select(["position", "line"]).to_pylist() == [
        {"position": position, "line": line} for position, line in zip(at(1, 1, 2), ["a\n", "b\n", "c\n"], strict=True)
    ]
    assert str(made.end) == at(2)[0]
    records = made.records()
    assert records.value.to_pylist() == ["a", "b", "c"]
    assert records.is_barrier.to_pylist() == [True] * 3  # in order, one after the other


def test_letters_carry_the_trace_of_their_events_in_any_envelope() -> None:
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=y"}
    events: list[dict[str, Any]] = [
        {"channel": "c", "operation": "INSERT", "payload": {"row": trace, "old": None}},
        {"specversion": "1.0", "data": {"op": "DELETE", "row": None, "before": trace}},
        {"before": None, "after": trace, "op": "c"},
        {"schema": {}, "payload": {"before": trace, "after": None, "op": "d"}},
        {"payload": {"row": {**trace, "traceparent": "not one"}}},
        {"payload": {"row": {**trace, "traceparent": 7}}},
        {"payload": None},
    ]
    lines = [*map(json.dumps, events), "no JSON"]
    found = read_records(as_batch([letter(number, event=line) for number, line in enumerate(lines, 1)]))
    assert [one.headers for one in found] == [trace] * 4 + [{}] * 4


def test_delivered_and_superseded_letters_are_marked_and_refused_ones_stay(store: FileDeadLetters) -> None:
    store.record([letter(number) for number in range(1, 5)])
    calls: list[list[str]] = []

    def redeliver(batch: Batch) -> Collection[str]:
        calls.append(batch.events.column("position").to_pylist())
        if at(2)[0] in calls[-1]:
            raise SinkRejected("no", "", [Reject(at(2)[0], "http_422", "still bad: password=geheim" + "x" * 5000)])
        return at(3)

    tally = deliver_again(store, list(store.find(Query())), redeliver)
    assert (tally.delivered, tally.superseded, tally.failed, tally.error) == (2, 1, 1, "")
    assert calls == [at(1, 2, 3, 4), at(1, 3, 4)]
    assert outcomes(store) == ["delivered", "failed", "superseded", "delivered"]
    waiting = list(store.find(Query(is_waiting=True)))
    assert [one.position for one in waiting] == at(2) and "still bad" in waiting[0].error
    assert waiting[0].attempts == letter(2).attempts + 1
    assert "geheim" not in waiting[0].error and len(waiting[0].error) <= 2000


def test_the_kind_of_an_error_stands_before_it_once(store: FileDeadLetters) -> None:
    store.record([letter(1)])
    kind = letter(1).error_kind
    for refused, error in ((kind, "still bad"), ("other", "other: still bad")):
        rejected = SinkRejected("no", "", [Reject(at(1)[0], refused, "still bad")])

        def redeliver(batch: Batch, error: SinkRejected = rejected) -> Collection[str]:
            raise error

        deliver_again(store, list(store.find(Query())), redeliver)
        (found,) = store.find(Query())
        assert (found.error_kind, found.error) == (kind, error)


@pytest.mark.parametrize("error", [SinkUnavailable("down"), SinkError("x"), SinkRejected("nameless")], ids=repr)
def test_target_that_cannot_be_reached_leaves_letters_as_they_are(store: FileDeadLetters, error: PgcdcError) -> None:
    store.record([letter(1)])

    def redeliver(batch: Batch) -> Collection[str]:
        raise error

    assert deliver_again(store, [letter(1)], redeliver).error
    assert outcomes(store) == [None]


def test_nothing_is_marked_before_it_is_delivered(store: FileDeadLetters, crash_at: Callable[[str], None]) -> None:
    store.record([letter(1)])
    crash_at("dlq.redelivered")
    with pytest.raises(RuntimeError):
        deliver_again(store, [letter(1)], lambda batch: ())
    assert outcomes(store) == [None]


# --- every sink


@pytest.fixture(params=["file", "stdout_to_file", "folder"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with fresh(request.param) as made:
        yield made


def test_every_sink_takes_events_of_the_past_again_and_its_ack_stays(target: Target) -> None:
    middle, past = Position.end(120), batch(START, Position.at(110, 2))
    with opened(target) as sink:
        sink.write(batch(START, middle).without(past.events.column("position").to_pylist()))
        before = target.lines()
        for _ in range(2):
            assert list(sink.redeliver(past)) == []
            assert sink.ack == middle == target.sink().ack
        again = past.events.column("line").to_pylist() * 2
        assert target.lines() == before + again
        sink.write(batch(middle, Position.end(130)))
    with opened(target) as sink:
        sink.write(batch(Position.end(130), END))
    assert target.lines() == before + again + batch(middle, END).events.column("line").to_pylist()


def test_noop_takes_them_too(tmp_path: Path) -> None:
    sink = run(NoopSink(), tmp_path, "noop")
    sink.open(START)
    assert list(sink.redeliver(batch(START, END))) == [] and sink.ack == START


# --- by a run


class _Outside:
    def join(self, lane: str, start: Position) -> None: ...
    def save(self, roster: Roster) -> None: ...
    def forget(self, lane: str) -> None: ...


class Running:
    """As much of a run as a replay needs: one adapter with its thread, in the main lane."""

    def __init__(self, folder: Path, **more: Any) -> None:
        raw = {"db": "postgresql://h/x", "tables": ["t"], "state_dir": folder / "state", **more}
        self.state = StateDir(folder / "state")
        self.state.create()
        self.office = LetterService(Config.model_validate(raw), self.state, lambda text: None, None)
        self.office.store.pipeline = PIPELINE
        self.sink = PickyFile(folder / "file.jsonl")
        self.delivery = self.office.run(adapters.file(folder / "file.jsonl"), self.state.acks)
        self.delivery.sink = self.sink
        self.member = Member(Adapter("file", self.delivery), Membership(Roster({"file": Place()}, 0), _Outside()))
        self.member.open(START)
        self.lanes: Any = SimpleNamespace(members=lambda: [self.member])
        self._server = RunServer(lambda request: self.office.answer(self.lanes, request))
        self._lock = Lock(self.state.run_lock)

    def __enter__(self) -> Running:
        assert self._lock.acquire() is not None
        self._lock.write({"pid": os.getpid(), "address": self._server.address})
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.office.close()
        self.member.close()
        self._lock.release()


def test_run_delivers_again_what_a_command_asks_for(tmp_path: Path) -> None:
    with Running(tmp_path) as run:
        rows = [f'{{"id":{number},"v":"{"bad" if number in (2, 4) else "good"}"}}' for number in range(1, 5)]
        events = as_batch([letter(number, event=row) for number, row in enumerate(rows, 1)])
        assert run.member.submit("main", Batch(START, Position.end(110), events.events)).result(10)
        store = run.office.store
        assert isinstance(store, FileDeadLetters) and [one.position for one in store.find(Query())] == at(2, 4)
        assert run.member.sink.dead_letters == 2
        again = ask_run(run.state, Query(PIPELINE, is_waiting=True))
        assert (again.delivered, again.failed) == (0, 2)
        (tmp_path / "mended").touch()
        done = ask_run(run.state, Query(PIPELINE, "file", is_waiting=True))
        assert (done.delivered, done.failed, done.error) == (2, 0, "")
        assert outcomes(store) == ["delivered"] * 2 and run.member.last_error is None
        assert [json.loads(one)["id"] for one in (tmp_path / "file.jsonl").read_text().splitlines()] == [1, 3, 2, 4]


RENAME = {"type": "rename_fields", "fields": {"id": "number"}}


def test_a_replay_knows_the_transforms_of_the_adapter_with_and_without_a_run(tmp_path: Path) -> None:
    membership = Membership(Roster({"file": Place()}, 0), _Outside())
    member = Member(Adapter("file", FakeRunner("file", START)), membership)
    assert member.sink.chain().steps == ()
    member.chain = Chain((RENAME,))  # as a reload does
    assert [step["fields"] for step in member.sink.chain().steps] == [RENAME["fields"]]
    member.close()
    path = tmp_path / "pgcdc.yaml"
    path.write_text(
        "db: postgresql://h/x\ntables: [t]\nadapters: [{name: f, type: file, path: a.jsonl}]\ntransforms:\n"
        "  global: [{type: rename_fields, fields: {id: number}}]\n"
        "  adapter: {f: [{type: drop_columns, columns: [note]}]}\n"
    )
    chain = plan_destinations({}, path, ["f"])["f"].chain
    assert [step["type"] for step in column_chain(chain).steps] == ["rename_fields", "drop_columns"]


def test_two_commands_at_the_same_time_deliver_a_letter_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(tmp_path) as run:
        assert isinstance(run.office.store, FileDeadLetters)
        run.office.store.record([letter(1)])
        entered, go_on, inner = threading.Semaphore(0), threading.Event(), run.sink.redeliver

        def redeliver(batch: Batch) -> Collection[str]:
            entered.release()
            assert go_on.wait(10)
            return inner(batch)

        monkeypatch.setattr(run.sink, "redeliver", redeliver)
        counts: list[int] = []
        query = Query(PIPELINE, is_waiting=True)
        both = [
            threading.Thread(target=lambda: counts.append(run.office.replay(run.lanes, query).delivered))
            for _ in range(2)
        ]
        both[0].start()
        assert entered.acquire(timeout=10)
        both[1].start()
        both[1].join(0.3)  # time enough to read the letters, if nothing holds it
        go_on.set()
        for one in both:
            one.join(10)
        assert sorted(counts) == [0, 1]
        assert (tmp_path / "file.jsonl").read_text().splitlines() == [letter(1).event]


def test_letters_of_an_adapter_that_the_run_does_not_have_stay(tmp_path: Path) -> None:
    with Running(tmp_path) as run:
        run.office.store.record([letter(1, "gone")])
        tally = ask_run(run.state, Query(PIPELINE, is_waiting=True))
        assert tally.delivered == 0 and "gone is not part of the running pipeline" in tally.error


def test_run_that_ends_meanwhile_is_said(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    with pytest.raises(StateError, match="pipeline ended"):
        ask_run(state, Query())


def test_run_that_has_no_lanes_yet_is_waited_for(tmp_path: Path) -> None:
    with Running(tmp_path) as run:
        run.office.store.record([letter(1, "gone")])
        lanes, run.lanes = run.lanes, None
        found: list[Tally] = []
        asking = threading.Thread(target=lambda: found.append(ask_run(run.state, Query(PIPELINE, is_waiting=True))))
        asking.start()
        asking.join(0.3)
        assert found == []
        run.lanes = lanes
        asking.join(10)
        assert "gone is not part of the running pipeline" in found[0].error


def test_replay_that_fails_is_said_by_the_command(tmp_path: Path) -> None:
    with Running(tmp_path, dlq="stderr") as run, pytest.raises(ConfigError, match="cannot be read back"):
        ask_run(run.state, Query(PIPELINE, is_waiting=True))


def test_answers_that_get_lost_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[dict[str, Any]] = []

    def ask_badly(lock: Path, request: dict[str, Any]) -> dict[str, Any]:
        found = ask(lock, request)
        if any("tally" in one for one in lost) and "tally" not in found:
            raise AssertionError(f"it was known how it ended, and is no longer: {found}")
        if not lost or ("tally" in found and len(lost) < 3):
            lost.append(found)
            return {}
        return found

    monkeypatch.setattr("pgcdc.run.letter_service.ask", ask_badly)
    with Running(tmp_path) as run:
        run.office.store.record([letter(1)])
        tally = ask_run(run.state, Query(PIPELINE, is_waiting=True))
        assert tally.delivered == 1 and len(lost) == 3
        assert len(run.office._replays) == 1


def test_a_run_knows_how_the_last_replays_ended_and_not_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.run.letter_service.KEPT_REPLAYS", 2)
    with Running(tmp_path) as run:
        for _ in range(5):
            ask_run(run.state, Query(PIPELINE, is_waiting=True))
        assert len(run.office._replays) == 3


def test_refusals_are_said_at_once_and_then_counted_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    hooks = _Telling(said.append)
    now = 100.0
    monkeypatch.setattr("pgcdc.run.letter_service.time.monotonic", lambda: now)
    hooks.on_dead_letters([letter(1)])
    hooks.on_dead_letters([letter(2)])
    assert len(said) == 1 and "refused 1 event" in said[0] and letter(1).id in said[0]
    now += 60
    hooks.on_dead_letters([letter(3)])
    assert len(said) == 2 and "refused 2 events" in said[1]
