"""Order by key with concurrency: what a sink that sends groups side by side may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import run
from targets.events import END, START, STREAM, batch, batch_of, event, to_line

from pgcdc.core.errors import Reject, SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.sink.groups import GroupSink, Record, Round, read_records, segments

MEGABYTE = 1_000_000


def item(number: int, lane: int | None, size: int = 1) -> Record:
    """An event; without a lane a barrier."""
    value = b"x" * size
    return Record(f"{number:06}", str(number), "c", "INSERT", None, value, {}, lane or 0, is_barrier=lane is None)


class Target:
    """Takes groups after a while, unless an event of it is bad."""

    def __init__(self, bad: set[str] = set(), error: SinkError | None = None, names: bool = False) -> None:
        self.bad, self.error, self.names = bad, error, names
        self.arrived: list[Record] = []
        self.groups: list[int] = []

    async def send(self, group: Sequence[Record]) -> None:
        self.groups.append(len(group))
        await asyncio.sleep(hash(group[0].id) % 7 / 1e5)
        wrong = [record.position for record in group if record.position in self.bad]
        if wrong:
            rejects = [Reject(one, "bad", "no") for one in wrong] if self.names else []
            raise self.error or SinkRejected("it refuses an event", "Look", rejects, kind="bad", text="no")
        self.arrived += group


def deliver(records: Sequence[Record], target: Target, workers: int, group_events: int) -> tuple[Round, set[str]]:
    delivered: set[str] = set()
    one = Round(target.send, workers, group_events, MEGABYTE, delivered.update)
    asyncio.run(one.run(records))
    return one, delivered


def check_order(records: Sequence[Record], arrived: Sequence[Record]) -> None:
    """Each lane in order, and nothing crosses a barrier."""
    place = {record.position: number for number, record in enumerate(arrived)}
    last: dict[int, int] = {}
    barrier, highest = -1, -1
    for record in records:
        if record.position not in place:
            continue
        now = place[record.position]
        if record.is_barrier:
            assert now > highest
            barrier = now
        else:
            assert now > barrier and now > last.get(record.lane, -1)
            last[record.lane] = now
        highest = max(highest, now)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 5, None]), max_size=40),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 2, 10]),
    st.sets(st.integers(0, 39), max_size=4),
    st.booleans(),
)
def test_rounds_keep_order_and_dead_letters_come_before_what_is_behind_them(
    stream: list[int | None], workers: int, group_events: int, bad: set[int], names: bool
) -> None:
    records = [item(number, lane) for number, lane in enumerate(stream)]
    wrong = {f"{number:06}" for number in bad if number < len(records)}
    target, delivered, letters = Target(wrong, names=names), set[str](), set[str]()
    for _ in range(len(wrong) + 1):
        left = [record for record in records if record.position not in delivered | letters]
        one = Round(target.send, workers, group_events, MEGABYTE, delivered.update)
        asyncio.run(one.run(left))
        found = {reject.position for reject in one.rejects}
        for position in found:  # nothing that must wait for it has overtaken it
            refused = records[int(position)]
            behind = records[int(position) + 1 :]
            held = [each for each in behind if each.is_barrier or refused.is_barrier or each.lane == refused.lane]
            assert not any(record.position in delivered for record in held)
        letters |= found
        if not found:
            break
    assert letters == wrong
    assert {record.position for record in target.arrived} == {record.position for record in records} - wrong
    assert len(target.arrived) == len(records) - len(wrong)
    check_order(records, target.arrived)


def test_workers_are_busy_at_the_same_time_and_barriers_hold_them() -> None:
    records = [item(number, number) for number in range(20)] + [item(20, None)] + [item(21, 7)]
    queues = list(segments(records, 4))
    assert [sum(map(len, one)) for one in queues] == [20, 1, 1]
    assert len(queues[0]) == 4
    assert [list(map(len, one)) for one in segments(records, 1)] == [[22]]


def test_bad_event_of_a_group_is_found_by_halves() -> None:
    target = Target({"000013"})
    one, delivered = deliver([item(number, number) for number in range(64)], target, 1, 64)
    with pytest.raises(SinkRejected, match=r"it refuses an event \(the event at 000013\)") as caught:
        one.finish()
    assert caught.value.rejects == (Reject("000013", "bad", "no"),) and caught.value.advice == "Look"
    assert len(delivered) == 63 and len(target.groups) <= 13


def test_named_event_of_a_group_is_left_out_and_the_others_are_sent_again() -> None:
    target = Target({"000013"}, names=True)
    one, delivered = deliver([item(number, number % 60) for number in range(64)], target, 1, 64)
    assert [reject.position for reject in one.rejects] == ["000013"]
    assert len(delivered) == 63 and target.groups == [64, 63]


def test_what_may_pass_ends_the_round_and_names_its_events() -> None:
    later = SinkUnavailable("no", "Wait", retry_in_s=7, positions=["000002"])
    one, delivered = deliver([item(number, number) for number in range(9)], Target({"000002"}, later), 1, 1)
    with pytest.raises(SinkUnavailable, match="no") as caught:
        one.finish()
    assert (caught.value.retry_in_s, caught.value.positions, len(delivered)) == (7, ("000002",), 2)


def test_what_concerns_all_is_said_first_and_a_failure_of_all_names_nobody() -> None:
    async def send(group: Sequence[Record]) -> None:
        await asyncio.sleep(0)  # until all are under way
        raise {
            "0": SinkUnavailable("a", positions=[group[0].position]),
            "1": SinkUnavailable("b", retry_in_s=5),
            "2": SinkRejected("c"),
            "3": SinkError("d"),
        }[group[0].id]

    def end_of(*numbers: int) -> SinkError:
        one = Round(send, 4, 1, MEGABYTE, lambda positions: None)
        asyncio.run(one.run([item(number, number) for number in numbers]))
        with pytest.raises(SinkError) as caught:
            one.finish()
        return caught.value

    later = end_of(0, 1)
    assert isinstance(later, SinkUnavailable) and (later.message, later.positions) == ("b", ())
    assert isinstance(end_of(0, 1, 2), SinkRejected)
    assert type(end_of(0, 1, 2, 3)) is SinkError


def test_group_does_not_grow_without_end() -> None:
    target = Target()
    deliver([item(number, 1, size=MEGABYTE // 3) for number in range(5)], target, 1, 100)
    assert target.groups == [2, 2, 1]
    target = Target()
    deliver([item(number, 1, size=MEGABYTE * 2) for number in range(2)], target, 1, 100)
    assert target.groups == [1, 1]


def test_error_of_one_worker_ends_the_others_before_it_is_raised() -> None:
    running, gate = 0, asyncio.Event()

    async def send(group: Sequence[Record]) -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0)
        if group[0].id == "0":
            running -= 1
            asyncio.get_running_loop().call_later(0.05, gate.set)
            raise RuntimeError("a defect")
        await gate.wait()
        running -= 1

    one = Round(send, 8, 1, MEGABYTE, lambda positions: None)
    with pytest.raises(RuntimeError, match="a defect"):
        asyncio.run(one.run([item(number, number) for number in range(50)]))
    assert running == 0


# --- the sink


class Listed(GroupSink):
    """Keeps what it is sent."""

    concurrency = 4

    def __init__(self) -> None:
        self.sent: list[Record] = []
        self.most = self.under_way = 0
        self.is_connected = True

    async def send(self, group: Sequence[Record]) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        self.under_way -= 1
        self.sent += group

    async def disconnect(self) -> None:
        self.is_connected = False


class InOrder(Listed):
    """All events in the order of the stream."""

    order = "stream"
    group_events = 3


def write(sink: GroupSink, folder: Path, *batches: Batch) -> None:
    runner = run(sink, folder)
    runner.open(START)
    for one in batches:
        runner.write(one)
    assert runner.ack == END
    runner.close()


def test_sink_implements_only_how_a_group_is_sent(tmp_path: Path) -> None:
    sink = Listed()
    write(sink, tmp_path, batch(START, END))
    assert sorted(record.position for record in sink.sent) == [str(one) for one in STREAM]
    assert sink.most == 4 and not sink.is_connected


def test_order_of_the_stream_is_declared_on_the_class(tmp_path: Path) -> None:
    sink = InOrder()
    write(sink, tmp_path, batch(START, END))
    assert [record.position for record in sink.sent] == [str(one) for one in STREAM]
    assert sink.most == 1


def test_refused_event_holds_everything_behind_it_in_the_order_of_the_stream() -> None:
    records = read_records(batch(START, END), "stream")
    target = Target({str(STREAM[5])})
    one, _ = deliver(records, target, 1, 1)
    assert [record.position for record in target.arrived] == [str(one) for one in STREAM[:5]] and one.rejects


def test_record_has_what_is_known_of_an_event() -> None:
    text = to_line(event(STREAM[0], key=7))
    given = batch_of(START, END, [text])
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=y"}
    table = given.events
    for name, value in trace.items():
        table = table.set_column(table.column_names.index(name), name, pa.array([value]))
    (found,) = read_records(Batch(START, END, table))
    assert (found.position, found.channel, found.operation, found.key) == (
        str(STREAM[0]), "pgcdc:items", "INSERT", '["7"]',
    )  # fmt: skip
    assert found.value == text.rstrip("\n").encode() and found.headers == trace


def test_typed_rows_have_their_position_as_id_and_stay_in_order() -> None:
    first, second = str(Position.at(10, 1)), str(Position.at(10, 2))
    lines: dict[str, Any] = {"position": [first, first, second], "line": ['{"a":1}\n', '{"a":2}\n', '{"a":3}\n']}
    found = read_records(Batch(START, END, pa.table(lines)))
    assert [record.id for record in found] == [first, f"{first}.1", second]
    assert [record.value for record in found] == [b'{"a":1}', b'{"a":2}', b'{"a":3}']
    assert len({record.lane for record in found}) == 1 and not any(record.is_barrier for record in found)
