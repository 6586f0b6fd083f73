"""Executors write a large batch, in local mode: every event once and every key in order, whatever tasks die on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from spools import START_LSN, Change, write_spool

from pgcdc.core.errors import SinkUnavailable
from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import Column, Op, Relation
from pgcdc.event.events import KEYED_BLOCKS
from pgcdc.sink.contract import Receipt
from pgcdc.sink.folder import FolderPartWriter, FolderSink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions
from pgcdc.spark.parallel import LargeBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS = Relation(1, "public", "orders", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
ITEMS = Relation(2, "public", "items", "d", (Column("id", 23, -1, True),))
WIDER = Relation(2, "public", "items", "d", (Column("id", 23, -1, True), Column("more", 25, -1, False)))
START = Position.end(START_LSN)
KEYS = 200


def inserts(relation: Relation, count: int, note: bytes = b"x") -> list[Change]:
    return [(relation, Op.INSERT, [str(n % KEYS).encode(), note][: len(relation.columns)], None) for n in range(count)]


STREAM: list[list[Change]] = [
    inserts(ORDERS, 1000),
    [*inserts(ORDERS, 500), (ORDERS, Op.TRUNCATE, None, None), *inserts(ORDERS, 500)],
    [
        *inserts(ITEMS, 500),
        (ITEMS, Op.UPDATE, [b"777"], [b"1"]),
        (ITEMS, Op.UPDATE, [b"888"], [b"777"]),
        *inserts(ITEMS, 100),
    ],
    inserts(WIDER, 500),
    inserts(ORDERS, 1000, b"y" * 2000),
]
CUT = Position.at(START_LSN + 8 * 4, 0, SCHEMA_SUB)
"""Where items gets another column."""
SEGMENTS = 6
"""TRUNCATE, the updates of keys, and what is before and behind them; the last of it in two, for the new column."""


@pytest.fixture
def run(spark: SparkSession, tmp_path: Path) -> Callable[..., list[Runner]]:
    """Writes STREAM, as one batch, to sinks, and returns those that want it otherwise."""
    end = write_spool(tmp_path / "spool", STREAM)
    numbers = iter(range(100))

    def run(*members: Runner) -> list[Runner]:
        left: list[Runner] = []
        errors: list[BaseException] = []

        def write(frame: DataFrame, _: int) -> None:
            batch = LargeBatch(spark, frame, START, end, cuts=[CUT], events=4000)
            try:
                with ThreadPoolExecutor(len(members)) as pool:
                    left.extend(
                        one for one, done in zip(members, pool.map(batch.write, members), strict=True) if not done
                    )
            except BaseException as error:
                errors.append(error)
            finally:
                batch.close()

        source = spark.readStream.format("pgcdc").schema(KEYED_BLOCKS).option("_spool", str(tmp_path / "spool"))
        writer = source.load().writeStream.option("checkpointLocation", str(tmp_path / f"checkpoint-{next(numbers)}"))
        writer.trigger(availableNow=True).foreachBatch(write).start().awaitTermination()
        if errors:
            raise errors[0]
        return left

    return run


def delivery(tmp_path: Path, kind: Callable[..., FolderSink] = FolderSink, name: str = "a", **options: Any) -> Runner:
    (tmp_path / "acks").mkdir(exist_ok=True)
    made = Runner(kind(tmp_path / name), tmp_path / "acks", name, DeliveryOptions(backoff_base=0.01, **options))
    made.open(START)
    return made


def read(folder: Path) -> list[dict[str, Any]]:
    parts = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def check(events: Sequence[dict[str, Any]], *, after: Position = START) -> None:
    """Every event once, in order per key, nothing on the wrong side of a barrier, nothing left behind."""
    sizes = [len(transaction) for transaction in STREAM]
    expected = {
        str(position)
        for number, size in enumerate(sizes, 1)
        for ordinal in range(1, size + 1)
        if (position := Position.at(START_LSN + 8 * number, ordinal)) > after
    }
    positions = [event["position"] for event in events]
    assert len(positions) == len(expected)
    assert set(positions) == expected
    last: dict[tuple[str, str], str] = {}
    for event in events:
        key = (event["channel"], (event["payload"]["row"] or {}).get("id", ""))
        assert last.get(key, "") < event["position"]
        last[key] = event["position"]
    walls = [event["position"] for event in events if event["operation"] in ("TRUNCATE", "UPDATE")]
    for wall in [*walls, str(CUT)]:
        sides = [(position > wall) - (position < wall) for position in positions]
        assert sides == sorted(sides)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in (folder / "_pgcdc").iterdir()]


def test_several_sinks_at_different_places(run: Callable[..., list[Runner]], tmp_path: Path) -> None:
    first, second = delivery(tmp_path, name="first"), delivery(tmp_path, name="second")
    middle = Position.at(START_LSN + 16, 100)
    second.sink.commit_parts(START, middle, [])  # type: ignore[attr-defined]
    assert run(first, second) == []
    check(read(tmp_path / "first"))
    check(read(tmp_path / "second"), after=middle)
    stems = {path.name.rpartition("-")[0] for path in (tmp_path / "first").glob("*.jsonl")}
    assert len(stems) == SEGMENTS
    assert any(path.name.endswith("-00001.jsonl") for path in (tmp_path / "first").glob("*.jsonl"))
    for folder in ("first", "second"):
        assert hidden(tmp_path / folder) == ["owner"]
    assert run(first, second) == []  # once more, as after a crash before Spark's commit
    check(read(tmp_path / "first"))


def test_workers_that_are_killed_in_the_middle_of_a_part(run: Callable[..., list[Runner]], tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    class Dying:
        """Writes half of a part for others to find, then kill -9; each part once."""

        def __init__(self, inner: FolderPartWriter) -> None:
            self.inner, self.marks = inner, str(marks)

        def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
            batches = list(lines)

            def half() -> Iterator[pa.RecordBatch]:
                yield batches[0].slice(0, len(batches[0]) // 2 + 1)
                os.kill(os.getpid(), signal.SIGKILL)

            try:
                os.close(os.open(f"{self.marks}/{part}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return self.inner.write_part(part, batches)
            return self.inner.write_part(part, half())

    class DyingSink(FolderSink):
        def part_writer(self) -> Any:
            return Dying(super().part_writer())

    member = delivery(tmp_path, DyingSink)
    assert run(member) == []
    assert len(list(marks.iterdir())) == 2  # both parts died once
    check(read(tmp_path / "a"))
    assert hidden(tmp_path / "a") == ["owner"]


def test_commit_that_fails_is_tried_again_and_nothing_is_twice(
    run: Callable[..., list[Runner]], tmp_path: Path
) -> None:
    class Shaky(FolderSink):
        failures = 0

        def commit_parts(self, start: Position, end: Position, receipts: Sequence[Receipt]) -> None:
            self.failures += 1
            if self.failures % 2:
                raise SinkUnavailable("the disk is away")
            super().commit_parts(start, end, receipts)

    member = delivery(tmp_path, Shaky)
    assert run(member) == []
    assert member.sink.failures == 2 * SEGMENTS  # type: ignore[attr-defined]
    check(read(tmp_path / "a"))


@pytest.mark.slow
def test_part_that_hangs_is_cancelled_after_the_timeout(run: Callable[..., list[Runner]], tmp_path: Path) -> None:
    class Hanging:
        def __init__(self, inner: FolderPartWriter) -> None:
            self.inner = inner

        def write_part(self, part: int, lines: Iterable[pa.RecordBatch]) -> Receipt | None:
            import time

            while True:  # ends with its worker: Spark kills it
                time.sleep(0.1)

    class HangingSink(FolderSink):
        is_hanging = True

        def part_writer(self) -> Any:
            return Hanging(super().part_writer()) if self.is_hanging else super().part_writer()

    member = delivery(tmp_path, HangingSink, timeout=3.0)
    assert isinstance(member.sink, HangingSink)
    with pytest.raises(SinkUnavailable, match="did not finish within 3 s"):
        run(member)
    assert read(tmp_path / "a") == []
    member.sink.is_hanging = False
    member.options = DeliveryOptions()
    assert run(member) == []
    check(read(tmp_path / "a"))
