"""Sentinels: their place in the stream, who sees them, and the wait for adapters that have them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pgcdc.cli.main import app
from pgcdc.core.errors import ConfigError, ConnectionLost, PgcdcError, StateError
from pgcdc.core.position import Position
from pgcdc.core.relation import Column, Op, Relation
from pgcdc.core.state import Lock, StateDir, write_json
from pgcdc.event.edits import SimpleChain
from pgcdc.event.events import block_schema, event_batch
from pgcdc.event.forms import find_barriers, form_column
from pgcdc.event.frame import EventOptions, load_frame
from pgcdc.event.lines import IdSeed
from pgcdc.run import sentinel as run_sentinel
from pgcdc.run.sentinel import Sentinel, wait_for
from pgcdc.source.postgres.snapshot import sentinels as module
from pgcdc.source.postgres.snapshot.marks import Marks
from pgcdc.source.postgres.snapshot.releases import Releases, marker, number_rows, snapshot_rows
from pgcdc.source.postgres.snapshot.sentinels import KEPT, Sentinels
from pgcdc.source.rate.options import RateOptions
from pgcdc.source.rate.source import FIRST_COMMIT, RateSource
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.index import Token
from pgcdc.spool.reader import SpoolReader
from pgcdc.spool.writer import SpoolWriter

BASE = Position.end(0x100)
ITEMS = Relation(16384, "public", "items", "d", (Column("id", 20, -1, True),))
SQL: Any = SimpleNamespace(closed=False)


class Capture:
    """Sentinels over a log of releases, and a WAL that stands somewhere."""

    def __init__(self, folder: Path) -> None:
        self.wal = 0x200
        self.releases = Releases(folder, BASE)
        self.marks = Marks(self.releases)
        self.sentinels = Sentinels(self.marks)


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    one = Capture(tmp_path)
    monkeypatch.setattr(module, "wal_place", lambda sql: one.wal)
    return one


def test_a_sentinel_stands_behind_what_was_written_when_it_was_asked_for(capture: Capture) -> None:
    assert capture.sentinels.ask("a", SQL) is None
    assert capture.marks.target_lsn == 0x200
    assert capture.marks.step(Position.end(0x1FF), may_work=True) is None
    assert capture.sentinels.ask("a", SQL) is None
    release = capture.marks.step(Position.end(0x208), may_work=True)
    assert release is not None and capture.sentinels.ask("a", SQL) == release.end == Position.chunk_end(0x208, 0)
    assert capture.marks.step(release.end, may_work=True) is None, "asked again, it is not released again"


def test_a_sentinel_cannot_be_asked_for_without_the_server(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for sql in (None, SimpleNamespace(closed=True)):
        with pytest.raises(ConnectionLost, match="no connection"):
            capture.sentinels.ask("a", sql)  # type: ignore[arg-type]

    def fail(sql: object) -> int:
        raise psycopg.OperationalError("terminating connection")

    monkeypatch.setattr(module, "wal_place", fail)
    with pytest.raises(ConnectionLost, match="terminating connection"):
        capture.sentinels.ask("a", SQL)
    assert capture.marks.target_lsn == 0, "it is not known: the next request asks again"


def test_the_last_hundred_are_remembered(capture: Capture) -> None:
    for number in range(KEPT + 1):
        capture.sentinels.ask(str(number), SQL)
    end = Position.end(0x200)
    while (release := capture.marks.step(end, may_work=True)) is not None:
        end = release.end
    assert end.chunk == KEPT, "every one of them is in the stream"
    assert capture.sentinels.ask("1", SQL) == Position.chunk_end(0x200, 1)
    assert capture.sentinels.ask("0", SQL) is None, "forgotten, so this is a new one"


# --- who sees them


def spooled(folder: Path) -> SpoolReader:
    """A row, a sentinel, and another row."""
    writer = SpoolWriter(folder, BASE)
    ordinal = 0
    values = [snapshot_rows(pa.array([key], pa.binary()), 1) for key in (b"1", b"2")]
    for rows in (values[0], marker(Op.SENTINEL, "5f0c", "2026-11-18T00:00:00.000Z"), values[1]):
        end = Position.chunk_end(0x100, 0) if rows is values[1] else None
        writer.append(number_rows(rows, 0x100, ordinal, ITEMS, writer.relations, time_us=1, end=end))
        ordinal += rows.num_rows
    writer.close()
    reader = SpoolReader(folder)
    reader.refresh()
    return reader


def column(reader: SpoolReader, name: str, options: EventOptions, *chains: SimpleChain) -> list[Any]:
    schema = block_schema(chains) if chains else pa.schema([(name, pa.string())])
    slices = reader.slices(BASE, reader.end)
    batch = event_batch(slices, reader.relations(), IdSeed(1, 2), schema, options, (), chains)
    assert batch is not None
    found: list[Any] = batch.column(name).to_pylist()
    return found


def test_only_who_asks_for_sentinels_gets_events_of_them(tmp_path: Path) -> None:
    reader = spooled(tmp_path)
    plain, asked = (column(reader, "json", EventOptions(sentinels=wanted)) for wanted in (False, True))
    assert [json.loads(one)["payload"]["row"]["id"] for one in plain] == ["1", "2"]
    assert [asked[0], asked[2]] == plain, "it moves no other event"
    event = json.loads(asked[1])
    assert (event["channel"], event["operation"]) == ("pgcdc:_sentinel", "SENTINEL")
    row = {"id": "5f0c", "asked_at": "2026-11-18T00:00:00.000Z"}
    assert event["payload"] == {"op": "SENTINEL", "schema": None, "table": None, "row": row, "old": None}


def test_targets_of_tables_never_get_one(tmp_path: Path) -> None:
    reader, options = spooled(tmp_path), EventOptions(sentinels=True)
    found = column(reader, form_column(0, "tables"), options, SimpleChain((), (), ("tables",)))
    assert [one and one["new"] for one in found] == [["1"], None, ["2"]]


def test_executors_write_everything_before_it_first(tmp_path: Path) -> None:
    reader = spooled(tmp_path)
    frame = load_frame(reader.slices(BASE, reader.end), reader.relations(), EventOptions(sentinels=True))
    assert frame is not None and np.flatnonzero(find_barriers(frame)).tolist() == [1]


def test_a_batch_of_nothing_but_a_sentinel_is_empty(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, BASE)
    rows = marker(Op.SENTINEL, "5f0c", "")
    writer.append(number_rows(rows, 0x100, 0, None, writer.relations, time_us=1, end=Position.chunk_end(0x100, 0)))
    writer.close()
    reader = SpoolReader(tmp_path)
    reader.refresh()
    assert reader.slices(BASE, reader.end)
    assert load_frame(reader.slices(BASE, reader.end), [], EventOptions()) is None


def test_made_up_changes_know_where_now_is(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    source = RateSource(RateOptions(rate_rows_per_second=1e6, rate_transactions=3, rate_existing_rows=2))
    source.prepare(state, consumer="main")
    spool = SpoolWriter(state.spool, Position.end(FIRST_COMMIT))
    stream = source.open(Token(FIRST_COMMIT, b""), state, spool, Consumers(state.consumers_file))
    assert stream.answer({"do": "sentinel", "id": "a"}) == {"position": None}, "existing rows come first"
    while stream.poll(may_read=True, drain=True) is not None or stream.reached < FIRST_COMMIT + 3:
        pass
    assert stream.answer({"do": "sentinel", "id": "a"}) == {"position": str(Position.end(FIRST_COMMIT + 3))}
    with pytest.raises(ConfigError, match="no incremental snapshots"):
        stream.answer({"do": "snapshot", "action": "list"})
    stream.close()


# --- the wait


class Running:
    """A run and its capture, as requests find them."""

    def __init__(self, state: StateDir) -> None:
        self.position: Position | None = Position.chunk_end(0x200, 0)
        self.acks: dict[str, Position | None] = {"file": Position.end(0x200), "redis": None}
        self.is_capturing, self.is_running, self.is_answering = True, True, True
        self.trouble: PgcdcError | None = None
        self.asked: list[str] = []
        self._state = state

    def ask(self, lock: Path, request: dict[str, Any]) -> dict[str, Any]:
        if lock == self._state.run_lock:
            if not self.is_answering:
                return {}
            lanes = [
                {"adapter": name, "ack": str(ack) if ack else None, "lag_bytes": 48 if ack else None,
                 "last_error": "no route to host" if name == "file" else None}
                for name, ack in self.acks.items()
            ]  # fmt: skip
            return {"adapters": list(self.acks), "lanes": lanes, "phase": "streaming"} if self.is_running else {}
        self.asked.append(request["id"])
        if self.trouble is not None:
            raise self.trouble
        return {"position": self.position and str(self.position)} if self.is_capturing else {}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    one = Running(StateDir(tmp_path))
    monkeypatch.setattr(run_sentinel, "ask", one.ask)
    monkeypatch.setattr(Lock, "holder", lambda path: {} if one.is_running else None)
    return one


def test_an_adapter_has_it_when_its_ack_has_passed_it(tmp_path: Path, running: Running) -> None:
    assert running.position is not None
    sentinel = Sentinel(StateDir(tmp_path))
    with pytest.raises(PgcdcError) as late:
        sentinel.wait(0.05)
    assert "adapter file lacks them (48 bytes behind, last error: no route to host)" in str(late.value)
    assert "adapter redis lacks them (not open yet)" in str(late.value) and late.value.exit_code == 1
    running.acks["file"] = running.position
    with pytest.raises(PgcdcError) as late:
        sentinel.wait(0.05)
    assert "adapter file" not in str(late.value) and "adapter redis" in str(late.value)
    running.acks["redis"] = Position.end(0x208)
    assert sentinel.wait(5) == max(sentinel.took_s.values())
    assert len(set(running.asked)) == 1
    assert wait_for(StateDir(tmp_path), ["redis"], 5) == running.position


def test_only_the_named_adapters_are_waited_for(tmp_path: Path, running: Running) -> None:
    running.acks["redis"] = running.position
    assert Sentinel(StateDir(tmp_path), ["redis"]).wait(5) >= 0
    with pytest.raises(ConfigError, match=r"adapter 'reddis' does not exist.*file, redis"):
        Sentinel(StateDir(tmp_path), ["reddis"])


def test_a_capture_without_its_server_is_asked_until_the_time_is_up(tmp_path: Path, running: Running) -> None:
    running.position = None
    sentinel = Sentinel(StateDir(tmp_path))
    with pytest.raises(PgcdcError, match=r"the stream has not reached them yet\. See pgcdc status"):
        sentinel.wait(0.05)
    running.trouble = ConnectionLost("there is no connection to the server")
    with pytest.raises(PgcdcError, match=r"not reached them yet\. there is no connection to the server"):
        sentinel.wait(0.05)
    running.trouble, running.is_capturing = None, False
    with pytest.raises(PgcdcError, match="not reached them yet"):
        sentinel.wait(0.05)
    with pytest.raises(StateError, match="the pipeline does not read the stream yet: streaming"):
        Sentinel(StateDir(tmp_path))
    running.is_capturing, running.position = True, Position.end(0x200)
    running.acks["redis"] = running.position
    assert sentinel.wait(5) > 0 and len(set(running.asked)) == 2


def test_a_run_that_is_just_starting_has_not_delivered_anything(tmp_path: Path, running: Running) -> None:
    running.acks = dict.fromkeys(running.acks, running.position)
    sentinel = Sentinel(StateDir(tmp_path))
    running.is_answering = False  # another one holds the lock, and has no socket yet
    with pytest.raises(PgcdcError, match=r"adapter file lacks them \(not open yet\); adapter redis"):
        sentinel.wait(0.05)
    with pytest.raises(StateError, match="does not read the stream yet: starting"):
        Sentinel(StateDir(tmp_path))
    running.is_answering = True
    assert sentinel.wait(5) > 0


def test_a_run_that_ends_ends_the_wait_with_its_reason(tmp_path: Path, running: Running) -> None:
    state = StateDir(tmp_path)
    sentinel = Sentinel(state)
    running.is_running = False
    with pytest.raises(StateError, match=r"no pipeline runs in .*pgcdc listen"):
        sentinel.wait(5)
    write_json(state.run_status, {"last_error": PgcdcError("the disk is full", "Make room").to_json()})
    with pytest.raises(StateError, match=r"Its last error: the disk is full\. Make room"):
        Sentinel(state)


# --- the command


def test_the_command_says_how_long_each_adapter_took(tmp_path: Path, running: Running) -> None:
    def run(*flags: str) -> Any:
        return CliRunner().invoke(app, ["sentinel", "--state-dir", str(tmp_path), *flags])

    assert run().output.strip() == running.asked[-1]
    running.acks["file"] = running.position
    late = run("--wait", "--timeout", "50ms")
    assert late.exit_code == 1 and late.stdout.startswith("file ") and "adapter redis lacks them" in late.stderr
    one = run("--wait", "--adapter", "file")
    assert one.exit_code == 0 and "these targets have everything that was committed before" in one.output
    running.acks["redis"] = running.position
    said = run("--wait", "--json")
    report = json.loads(said.stdout)
    assert (report["id"], report["position"]) == (running.asked[-1], str(running.position))
    assert report["adapters"].keys() == {"file", "redis"} and report["seconds"] == max(report["adapters"].values())
    assert "all targets have everything" in run("--wait").output
    for flags, text in ((["--adapter", "file"], "Add --wait"), (["--wait", "--timeout", "soon"], "--timeout soon")):
        refused = run(*flags)
        assert refused.exit_code == 2 and text in refused.stderr
