"""What was written is what `read_back` gives: for every target that can be read back, also while its writer goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from sink_targets import END, START, TARGETS, Target, batch, batch_of, fresh, opened, to_line
from targets.events import STREAM, event
from targets.pg_table import ITEMS

from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.event.shape import TableShape
from pgcdc.sink import row_store
from pgcdc.sink.contract import Progress, SinkContext

COLUMNS = ("id", "text", "never_there")
ALL = sorted(
    (row["id"], row["text"], None) for row in (event(one)["payload"]["row"] for one in STREAM)
)  # each has a key of its own


def read(target: Target) -> list[tuple[str | None, ...]]:
    """By another process: a sink that was never opened."""
    name = target.name or target.type
    shapes = ShapeHistory(target.acks.parent / "shapes.jsonl")
    context = SinkContext(name, START, Progress(target.acks, name), shapes, lambda text: None)
    found = target.make().read_back(context, TableShape(ITEMS), COLUMNS)
    rows = [row for one in found for row in zip(*(column.to_pylist() for column in one.columns), strict=True)]
    return sorted(rows, key=str)


@pytest.fixture(params=[name for name in TARGETS if name.startswith(("file", "folder", "redis", "pg_apply"))])
def readable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(row_store, "BUFFERED_ROWS", 3)
    with fresh(request.param) as made:
        assert made.make().reads_back
        yield made


def test_no_target_that_reads_back_is_left_out() -> None:
    known = {"file", "folder", "redis", "pg_table"}
    for name in TARGETS:
        with fresh(name) as made:
            assert not made.make().reads_back or made.type in known, name


def test_what_was_written_is_read_back_also_while_it_is_open(readable: Target) -> None:
    with opened(readable) as sink:
        assert read(readable) == []
        sink.write(batch(START, Position.end(120)))
        early = [row for row in ALL if int(row[0] or 0) < 120 * 10_000_000 + 10_000_000]
        assert read(readable) == early
        sink.write(batch(Position.end(120), END))
        assert read(readable) == ALL
        last = Position.end(160)
        changes = [
            event(Position.at(155, 1), int(ALL[0][0] or 0), "DELETE"),
            event(Position.at(155, 2), int(ALL[1][0] or 0), "UPDATE", 'other "text"\n'),
            event(Position.at(155, 3), 7, "INSERT", None),
        ]
        sink.write(batch_of(END, last, [to_line(one) for one in changes]))
        wanted = [("7", None, None), (ALL[1][0], 'other "text"\n', None), *ALL[2:]]
        assert read(readable) == sorted(wanted, key=str)
        sink.write(batch_of(last, Position.end(170), []))  # the writer was not disturbed
    assert read(readable) == sorted(wanted, key=str)


def test_truncate_empties_the_table(readable: Target) -> None:
    with opened(readable) as sink:
        sink.write(batch(START, END))
        gone = event(Position.at(155, 1), 1, "TRUNCATE")
        gone["payload"]["row"] = None
        sink.write(batch_of(END, Position.end(160), [to_line(gone)]))
        assert read(readable) == []


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_value_that_an_update_left_alone_is_the_one_before(name: str) -> None:
    with fresh(name) as target, opened(target) as sink:
        insert = event(Position.at(110, 1), 1, "INSERT", "long" * 1000)
        update = event(Position.at(110, 2), 1, "UPDATE")
        del update["payload"]["row"]["text"]
        update["payload"]["_unchanged_toast_columns"] = ["text"]
        moved = json.loads(json.dumps(update))
        moved["payload"] |= {"row": {"id": "2", "position": ""}, "old": {"id": "1"}}
        sink.write(batch_of(START, Position.at(110, 2), [to_line(insert), to_line(update)]))
        assert read(target) == [("1", "long" * 1000, None)]
        moved["position"] = str(Position.at(120, 1))
        sink.write(batch_of(Position.at(110, 2), END, [to_line(moved)]))
        assert read(target) == [("2", "long" * 1000, None)]


def test_parts_that_are_acknowledged_and_not_shown_yet_are_read_where_they_are(crash_at: Callable[[str], None]) -> None:
    with fresh("folder") as target:
        sink = target.sink()
        sink.open(START)
        crash_at("folder.before_shown@1")
        with pytest.raises(FailpointError):
            sink.write(batch(START, END))
        assert read(target) == ALL
        assert target.lines() == []  # its writer will show them
        sink.write(batch_of(END, Position.end(160), []))
        assert read(target) == ALL and len(target.lines()) == len(ALL)
