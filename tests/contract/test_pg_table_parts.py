"""The contract for pg_table as executors write to it: the stories about batches that come again, and crashes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sink_targets import END, START, WHOLE, batch, opened, up_to
from targets.pg_table import PgAppendInTwoParts, PgApplyInTwoParts

from pgcdc.core.errors import SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import FailpointError
from pgcdc.core.position import Position
from pgcdc.sink.base import ParallelSink
from pgcdc.sink.pg_table.parts import url_variable
from pgcdc.sink.pg_table.sink import PgTableSink

InParts = PgAppendInTwoParts | PgApplyInTwoParts


@pytest.fixture(params=[PgAppendInTwoParts, PgApplyInTwoParts], ids=["append", "apply"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InParts]:
    made = request.param(tmp_path)
    yield made
    made.close()


def test_batches_that_come_again_and_crashes(target: InParts, crash_at: Callable[[str], None]) -> None:
    with opened(target) as sink:
        sink.write(batch(START, Position.end(110)))
        crash_at(target.before_ack)
        with pytest.raises(FailpointError):
            sink.write(batch(Position.end(110), Position.end(130)))
    assert target.lines() == up_to(Position.end(110))
    with opened(target) as sink:
        assert sink.ack == Position.end(110)
        sink.write(batch(Position.end(110), Position(120, 2)))
        sink.write(batch(Position(120, 2), END))
        assert target.lines() == WHOLE
    with opened(target) as sink:
        sink.write(batch(START, END))
        sink.write(batch(Position.end(110), Position.end(130)))
    assert target.lines() == WHOLE


def test_parts_that_begin_before_the_ack_are_refused_and_staged_tables_go(target: InParts) -> None:
    with opened(target) as sink:
        assert isinstance(sink, ParallelSink)
        writer = sink.part_writer()
        receipt = writer.write_part(0, batch(START, Position.end(120)).events.to_batches())
        assert receipt is not None
        sink.write(batch(START, Position.end(110)))
        with pytest.raises(SinkUnavailable, match="begin at"):
            sink.commit_parts(START, Position.end(120), [receipt])
        sink.discard_parts()
        staged = "SELECT relname FROM pg_class WHERE relname LIKE 'pgcdc_stage%' AND relnamespace = "
        assert target.query(f"{staged}'{target.schema}'::regnamespace") == []
    assert target.lines() == up_to(Position.end(110))


def test_rows_that_the_target_lost_in_a_crash_are_missed(tmp_path: Path) -> None:
    target = PgAppendInTwoParts(tmp_path)
    with opened(target) as sink:
        assert isinstance(sink, ParallelSink)
        receipt = sink.part_writer().write_part(0, batch(START, END).events.to_batches())
        assert receipt is not None
        ((stage,),) = target.query(
            f"SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relname LIKE 'pgcdc_stage%' "
            f"AND relnamespace = '{target.schema}'::regnamespace"
        )
        target.query(f"TRUNCATE {stage}")  # as crash recovery does it with an unlogged table
        with pytest.raises(SinkUnavailable, match=f"of {len(WHOLE)} rows .* 0 are there"):
            sink.commit_parts(START, END, [receipt])
        assert sink.ack == START
    assert target.lines() == []
    target.close()


def test_executor_without_the_url_leaves_the_batch_to_the_driver(
    target: InParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(target) as sink:
        monkeypatch.delenv(url_variable("pg_table"))
        assert isinstance(sink, ParallelSink)
        receipt = sink.part_writer().write_part(0, batch(START, END).events.to_batches())
        assert receipt == {"part": 0, "missing": url_variable("pg_table")}
        with pytest.raises(SinkRejected, match="lack the variable"):
            sink.commit_parts(START, END, [receipt])
        assert isinstance(sink, PgTableSink) and not sink.takes_executors
        assert sink.ack == START


def test_part_writer_holds_no_secret(target: InParts) -> None:
    with opened(target) as sink:
        assert isinstance(sink, ParallelSink)
        writer = sink.part_writer()
        assert target.secret.encode() not in pickle.dumps(writer)
        assert target.secret not in repr(writer) + repr(sink)
        sink.discard_parts()
