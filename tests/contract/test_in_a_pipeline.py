"""The contract of sinks, in a real pipeline: all of them at once, each with its target."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from databases import Database
from laning import Run
from listening import wait_until
from sink_targets import REFERENCES, TARGETS, Target, fresh

from pgcdc.core.errors import SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.run.member import Adapter
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FIRST = {kind.type: name for name, kind in reversed(TARGETS.items()) if kind.is_made_by_options}
NAMES = sorted({*REFERENCES, *_FIRST.values()})
"""The references, and one target of every other type."""
ROWS = 100_000


class Gate:
    """Stands before the `write` of a sink: lets through, refuses, or takes its time."""

    def __init__(self, sink: Any) -> None:
        self.is_shut = False
        self.pause_s = 0.0
        self.parts = 0
        """What executors wrote."""
        self._is_driver = False
        self.in_flight = threading.Event()
        self._write, self._commit = sink.write, getattr(sink, "commit_parts", None)
        sink.write = self._pass
        if self._commit is not None:
            sink.commit_parts = self._pass_parts

    def _pass(self, batch: Batch) -> None:
        if self.is_shut:
            raise SinkUnavailable("the gate is shut", "Open it")
        if self.pause_s and batch.events.num_rows:
            self.in_flight.set()
            time.sleep(self.pause_s)
        self._is_driver = True
        try:
            self._write(batch)
        finally:
            self._is_driver = False

    def _pass_parts(self, start: Position, end: Position, receipts: Sequence[dict[str, Any]]) -> None:
        assert self._commit is not None
        self._commit(start, end, receipts)
        self.parts += 0 if self._is_driver else len(receipts)


class All(Run):
    """A pipeline with a sink for each target."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, targets: dict[str, Target]) -> None:
        super().__init__(spark, url, folder, list(targets))
        self.targets = targets
        self.gates: dict[str, Gate] = {}

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        made = []
        for one in specs:
            target = self.targets[one.name]
            target.acks, target.name = self.state.acks, one.name
            delivery = target.sink(DeliveryOptions(max_retries=0, cb_max_failures=0, timeout=120.0))
            self.gates[one.name] = Gate(delivery.sink)
            delivery.check()
            made.append(Adapter(one.name, delivery, self._chains.of(one), one.priority))
        return made

    def wait_for_all(self, last: Position, names: Sequence[str] = NAMES, timeout_s: float = 180.0) -> None:
        def behind() -> list[str]:
            return [name for name in names if (self.seen.ack(name) or Position.end(0)) < last]

        try:
            wait_until(lambda: not behind(), timeout_s, f"everybody has everything up to {last}")
        except TimeoutError as error:
            acks = {name: str(self.seen.ack(name)) for name in behind()}
            raise TimeoutError(f"{error}: {acks}, {self.lines[-5:]}") from None


class Source:
    """Fills the table `items`. What a row says of its position is a number that counts up."""

    def __init__(self, url: str) -> None:
        self._conn = psycopg.connect(url, autocommit=True)
        self._conn.execute("CREATE TABLE items (id bigint PRIMARY KEY, position text, text text)")
        self.rows = 0

    def insert(self, count: int, transactions: int = 1) -> Position:
        """Rows in so many transactions of the same size, and one more row; behind what a sink must be that has them."""
        self._insert(count, transactions)
        row = self._conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        self._insert(1)  # others write to this server, too: whoever has this has all that was before
        return Position.at(int(row[0]) + 1, 0)

    def _insert(self, count: int, transactions: int = 1) -> None:
        for _ in range(transactions):
            first, self.rows = self.rows + 1, self.rows + count // transactions
            self._conn.execute(
                "INSERT INTO items SELECT n, '0000000000000001/' || lpad(upper(to_hex(n)), 13, '0'), 'ä🐘 ' || n "
                "FROM generate_series(%s::int, %s::int) AS n",
                [first, self.rows],
            )

    def close(self) -> None:
        self._conn.close()


@pytest.fixture
def source(database: Database) -> Iterator[Source]:
    one = Source(database.url)
    yield one
    one.close()


@pytest.fixture
def start(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[Callable[..., All]]:
    runs: list[All] = []
    with contextlib.ExitStack() as stack:
        targets = {name: stack.enter_context(fresh(name)) for name in NAMES}

        def begin(*, expects_many: bool = False) -> All:
            for target in targets.values():
                if expects_many:
                    target.expect_many()
            runs.append(All(spark, database.url, tmp_path, targets))
            runs[-1].begin()
            wait_until(lambda: runs[-1].said("ready:"), 180, "the pipeline is ready")
            return runs[-1]

        yield begin
        for run in runs:
            for gate in run.gates.values():
                gate.is_shut, gate.pause_s = False, 0.0
            run.stop()
            with contextlib.suppress(Exception):
                run.wait(30)


def check_all(targets: dict[str, Target], rows: int) -> None:
    """Every row is at every target, once: nothing has crashed."""
    expected = [str(Position.at(1, number)) for number in range(1, rows + 1)]
    for name, target in targets.items():
        if target.keeps:
            wait_until(lambda target=target: len(target.lines()) >= rows, 30, f"{name} has {rows} rows")  # type: ignore[misc]
            got = [json.loads(line)["payload"]["row"]["position"] for line in target.lines()]
            twice = [one for one, count in Counter(got).items() if count > 1]
            assert sorted(got) == expected, f"{name}: {len(got)} of {rows}, twice: {twice[:5]}"


def test_every_sink_moves_to_a_lane_of_its_own_and_back_and_stops_in_the_middle_of_traffic(
    start: Callable[..., All], source: Source
) -> None:
    run = start()
    targets = run.targets
    movers = [name for name in NAMES if name != "noop"]  # one stays, and goes on
    run.wait_for_all(source.insert(30, 3))
    for name in movers:
        run.gates[name].is_shut = True
    run.wait_for_all(source.insert(20, 2), ["noop"])
    wait_until(lambda: all(map(run.seen.is_out, movers)), 180, f"all leave: {run.seen.lanes()}")
    run.wait_for_all(source.insert(20, 2), ["noop"])
    for name in movers:
        run.gates[name].is_shut = False
    last = source.insert(20, 2)
    run.wait_for_all(last)
    wait_until(lambda: not any(map(run.seen.is_out, movers)), 180, f"all come back: {run.seen.lanes()}")
    run.wait_for_all(source.insert(10))
    check_all(targets, source.rows)

    for gate in run.gates.values():
        gate.pause_s = 0.5
        gate.in_flight.clear()
    last = source.insert(20, 4)
    for name, gate in run.gates.items():
        assert gate.in_flight.wait(30), f"{name} is not in the middle of a write"
    run.end()
    again = start()
    again.wait_for_all(max(last, source.insert(5)))
    again.end()
    check_all(targets, source.rows)  # each once: a stop is no crash


@pytest.mark.slow
def test_a_hundred_thousand_rows_at_once(start: Callable[..., All], source: Source, spark: SparkSession) -> None:
    run = start(expects_many=True)
    run.wait_for_all(source.insert(5))
    run.wait_for_all(source.insert(ROWS), timeout_s=200)
    run.wait_for_all(source.insert(5))
    run.end()
    check_all(run.targets, source.rows)
    for name, gate in run.gates.items():
        if run.targets[name].make().takes_executors:
            assert gate.parts, f"executors have not written to {name}"
