"""The source `rate` through the capture process, with no database: replays, kills, gaps and the end of a run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from listening import wait_until
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from pgcdc.capture.control import CaptureOptions, CaptureSpec, ControlClient, ensure_capture, make_spec
from pgcdc.config import load_config
from pgcdc.core.errors import ConfigError, GapError
from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relations
from pgcdc.core.state import Lock, StateDir, read_json
from pgcdc.source.protocol import find_source, source_names
from pgcdc.source.rate.options import RateOptions
from pgcdc.source.rate.source import FIRST_COMMIT, SERVER_FILE, MadeUp, RateSource
from pgcdc.spark.options import parse_options
from pgcdc.spark.source import ChangeReader
from pgcdc.spool.reader import SpoolReader, read_slice

Rows = dict[tuple[int, bytes], list[bytes]]
"""By table and key."""


class Reader:
    """A consumer that folds what it reads, as a sink would: durable is what it has acknowledged."""

    def __init__(self, folder: Path, options: RateOptions) -> None:
        self.state = StateDir(folder)
        self.options = options
        RateSource(options).prepare(self.state, consumer="test")
        self.rows: Rows = {}
        self.seen: set[Position] = set()
        self.ack = Position.at(0, 0)

    @property
    def spec(self) -> CaptureSpec:
        return make_spec(self.options, CaptureOptions(state_dir=self.state.path), os.getpid())

    @contextlib.contextmanager
    def connected(self) -> Iterator[ControlClient]:
        client = ensure_capture(self.spec, is_restart=True)
        try:
            yield client
        finally:
            client.close()

    def pid(self) -> int:
        return int((Lock.holder(self.state.capture_lock) or {})["pid"])

    def read(self, client: ControlClient, until: int = 0) -> None:
        """Take what is there (up to a commit), exactly once, and acknowledge it."""
        self.ack = max(self.ack, client.join("main")[1])
        spool = SpoolReader(self.state.spool)
        spool.refresh()
        while spool.end.commit < until:
            client.wait(0.2, Position.end(until))
            spool.refresh()
        for piece in spool.slices(self.ack, spool.end):
            changes, owners = read_slice(piece)
            for change, owner in zip(changes.to_pylist(), owners.to_pylist(), strict=True):
                place = Position(owner["commit"], owner["kind"], change["ordinal"], change["sub"])
                assert place not in self.seen, f"{place} came twice"
                self.seen.add(place)
                fold(self.rows, change)
        self.ack = spool.end
        client.ack("main", self.ack)


def fold(rows: Rows, change: dict[str, object]) -> None:
    """Apply one change, and check that it can be: an INSERT is of a new row, the others of one that is there."""
    values = change["new"] or change["old"]
    assert isinstance(values, list) and isinstance(change["relation"], int)
    key = (change["relation"], values[0])
    assert (key in rows) == (change["op"] in (Op.UPDATE, Op.DELETE)), change
    if change["op"] == Op.DELETE:
        del rows[key]
    else:
        rows[key] = values


def kill_rounds(tmp_path: Path, rounds: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    options = RateOptions(rate_rows_per_second=2000, rate_seed=seed, rate_existing_rows=40, rate_transaction_rows=7)
    torn = Reader(tmp_path / "torn", options)
    for number in range(rounds):
        with torn.connected() as client:
            torn.read(client)
            client.confirm()
            pid, before = torn.pid(), torn.ack.commit
            behind = before + chance.randrange(20, 200)

            def in_flight(client: ControlClient = client, behind: int = behind) -> bool:
                spool = SpoolReader(torn.state.spool)
                spool.refresh()
                client.wait(0.01)
                return spool.end.commit > behind

            wait_until(in_flight, 60, "changes that nobody has acknowledged")
            os.kill(pid, signal.SIGKILL)
        assert torn.ack.commit == before, f"round {number}: nothing was in flight"
    with torn.connected() as client:
        last = client.target()
        torn.read(client, until=last)
        client.stop()
    assert torn.ack.commit >= last
    made_up, expected, places = MadeUp(options, Relations()), Rows(), set()
    batches = [made_up.existing(table, 0) for table in range(options.rate_tables)]
    batches.append(made_up.transactions(FIRST_COMMIT + 1, torn.ack.commit - FIRST_COMMIT, 0))
    for batch in batches:
        owners = batch.transactions.to_pylist()
        of_row = [owner for owner in owners for _ in range(owner["rows"])]
        for change, owner in zip(batch.data.to_pylist(), of_row, strict=True):
            places.add(Position(owner["commit"], owner["kind"], change["ordinal"]))
            fold(expected, change)
    assert places == torn.seen and expected == torn.rows


def test_a_capture_that_is_killed_three_times_loses_and_repeats_nothing(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 3)


@pytest.mark.slow
def test_a_capture_that_is_killed_twenty_times_loses_and_repeats_nothing(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 20)


def test_what_is_confirmed_is_gone_and_what_is_not_comes_again(tmp_path: Path) -> None:
    reader = Reader(tmp_path, RateOptions(rate_rows_per_second=10_000, rate_transactions=50))
    with reader.connected() as client:
        reader.read(client, until=FIRST_COMMIT + 50)
        assert client.target() == FIRST_COMMIT + 50 and client.confirm() == FIRST_COMMIT + 50
        client.stop()
    assert len(reader.seen) == 250 and read_json(reader.state.path / SERVER_FILE)["confirmed"] == FIRST_COMMIT + 50
    wait_until(lambda: Lock.holder(reader.state.capture_lock) is None, 20, "the capture has ended")
    for file in [*reader.state.spool.iterdir(), reader.state.consumers_file]:
        file.unlink()
    with pytest.raises(GapError, match="confirmed and gone"):
        ensure_capture(reader.spec, is_restart=False)


def test_an_ack_inside_of_a_batch_goes_on_with_the_token_before_it(tmp_path: Path) -> None:
    reader = Reader(tmp_path, RateOptions(rate_rows_per_second=100_000, rate_transactions=5000))
    last = FIRST_COMMIT + 5000
    with reader.connected() as client:
        client.join("main")
        spool = SpoolReader(reader.state.spool)

        def is_read() -> bool:
            client.wait(0.1)
            spool.refresh()
            return spool.end.commit >= last

        wait_until(is_read, 60, "all changes")
        inside = last - 1
        client.ack("main", Position.end(inside))
        assert client.confirm() < inside, "nothing is given up behind the last token that is covered"
        os.kill(reader.pid(), signal.SIGKILL)
    known = read_json(reader.state.consumers_file)
    assert known["confirmed_lsn"] == inside and known["token"][0] < inside
    wait_until(lambda: Lock.holder(reader.state.capture_lock) is None, 20, "the capture has ended")
    for file in reader.state.spool.iterdir():
        file.unlink()
    with reader.connected() as client:
        reader.read(client, until=last)
        client.stop()
    assert {place.commit for place in reader.seen} == {last}


def test_a_query_names_the_detector_and_its_events_their_source(tmp_path: Path) -> None:
    raw = {"detector": "rate", "state_dir": str(tmp_path / "state"), "rate_transactions": "20"}
    raw["rate_rows_per_second"] = "10000"
    fields = [StructField(name, StringType()) for name in ("source", "channel", "json")]
    reader = ChangeReader(parse_options(raw), StructType(fields))
    try:
        start, last = reader.initialOffset(), Position.end(FIRST_COMMIT + 20)
        end = start
        while Position.from_offset(end) < last:
            end = reader.latestOffset(end, ReadMaxRows(10**6))
        rows = [row for one in reader.partitions(start, end) for batch in reader.read(one) for row in batch.to_pylist()]
    finally:
        reader._open().stop()
        reader.stop()
    assert len(rows) == 100 and {row["source"] for row in rows} == {"rate"}
    assert {row["channel"] for row in rows} == {"pgcdc:rate_1", "pgcdc:rate_2", "pgcdc:rate_3"}
    assert all(json.loads(row["json"])["source"] == "rate" for row in rows)
    with pytest.raises(ConfigError, match="unknown option 'slot'"):
        parse_options({**raw, "slot": "s"})


def test_other_settings_are_another_log(tmp_path: Path) -> None:
    Reader(tmp_path, RateOptions())
    with pytest.raises(GapError, match="other settings: rate_seed"):
        Reader(tmp_path, RateOptions(rate_seed=2))


def test_an_unknown_source_is_refused_with_the_list_and_what_is_nearest() -> None:
    assert source_names() == ["postgres", "rate"]
    with pytest.raises(ConfigError, match="source 'rat' does not exist") as caught:
        find_source("rat")
    assert caught.value.advice == "Did you mean rate? Known sources: postgres, rate"
    with pytest.raises(ConfigError, match="detector") as wrong:
        load_config({"detector": "rat"}, {}, None)
    assert wrong.value.advice == "Did you mean rate? Known detectors: wal, rate"


def test_settings_of_made_up_changes_need_no_database() -> None:
    config = load_config({"detector": "rate", "rate_seed": "7"}, {}, None)
    assert config.source == RateOptions(rate_seed=7)
    with pytest.raises(ConfigError, match="would leave no rows"):
        load_config({"detector": "rate", "rate_deletes": "6"}, {}, None)


OWN_PROGRAM = """
import sys, time
import pgcdc

spark = pgcdc.session("own")
events = spark.readStream.format("pgcdc").option("detector", "rate").option("state_dir", sys.argv[1] + "/state").load()
batches = []

def write(batch, number):
    batches.append(number)
    while True:  # what stops it comes in the middle of a job
        batch.count()

query = events.writeStream.option("checkpointLocation", sys.argv[1] + "/checkpoint").foreachBatch(write).start()
while not batches:
    time.sleep(0.1)
time.sleep(1)
query.stop()
print("exception:", query.exception())
spark.stop()
"""


def test_a_query_of_ones_own_that_is_stopped_inside_of_a_batch_ends_without_an_error_of_spark(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWN_PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "exception: None" in done.stdout, done.stderr
    assert "StackOverflowError" not in done.stderr
