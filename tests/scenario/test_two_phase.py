"""Two-phase commits on real servers: nothing before COMMIT PREPARED, and nothing lost between, whatever ends first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from listening import wait_until
from preparing import Wanted, prepare
from streams import SETTINGS, Change, Stream, drain, new_stream, record

import pgcdc
from pgcdc.capture.control import ControlClient, ensure_capture
from pgcdc.core.errors import ConfigError, GapError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.spool.reader import SpoolReader, read_slice


@pytest.fixture(scope="module", params=[18, 15])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    try:
        find_binaries(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres.temporary(version=request.param, settings=SETTINGS) as server:
        yield server


@pytest.fixture
def stream(server: EmbeddedPostgres) -> Iterator[Stream]:
    with new_stream(server) as stream:
        stream.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE t")
        yield stream


def rows(count: int, first: int = 1) -> str:
    return f"INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series({first}, {first + count - 1}) g"


def ids(changes: list[Change]) -> list[int]:
    return [int(one.row["id"] or 0) for one in changes]


def end_of(stream: Stream) -> int:
    return stream.wal_end()


SMALL_AND_LARGE = pytest.mark.parametrize("count", [3, 2000], ids=["whole", "streamed"])


@SMALL_AND_LARGE
def test_prepared_rows_come_at_commit_prepared_and_rolled_back_ones_never(stream: Stream, count: int) -> None:
    slot = stream.slot(two_phase=True)
    messages: list[tuple[int, bytes]] = []
    with stream.open(slot, two_phase=True) as capture:
        record(capture, messages)
        stream.execute("BEGIN", rows(count), "PREPARE TRANSACTION 'a'")
        stream.execute("BEGIN", rows(count, 10_001), "PREPARE TRANSACTION 'b'")
        stream.execute("INSERT INTO t VALUES (-1, 'x')")
        assert ids(drain(capture, end_of(stream))) == [-1]
        stream.execute("ROLLBACK PREPARED 'b'", "INSERT INTO t VALUES (-2, 'x')", "COMMIT PREPARED 'a'")
        found = drain(capture, end_of(stream))
        assert ids(found) == [-2, *range(1, count + 1)]
        assert [one.ordinal for one in found[1:]] == list(range(1, count + 1))
        assert len({one.lsn for one in found}) == 2
    tags = {message[:1] for _, message in messages}
    assert {b"p" if count > 3 else b"P", b"K", b"r"} <= tags


@SMALL_AND_LARGE
def test_positions_are_those_of_the_same_slot_without_two_phase_decoding_but_for_the_way(
    stream: Stream, count: int
) -> None:
    plain, phased = stream.slot(), stream.slot(two_phase=True)
    stream.execute(
        "BEGIN", rows(count), "SAVEPOINT a", rows(count, 10_001), "SAVEPOINT b", rows(count, 20_001), "ROLLBACK TO a",
        rows(count, 30_001), "SAVEPOINT c", "RELEASE c", rows(count, 40_001), "PREPARE TRANSACTION 'a'",
        "INSERT INTO t VALUES (-1, 'between')", "COMMIT PREPARED 'a'", "INSERT INTO t VALUES (-2, 'after')",
    )  # fmt: skip
    whole = stream.read(plain, streaming=False)
    read = stream.read(phased, two_phase=True)
    assert read.changes == whole.changes
    assert not set("PpK") & set(whole.tags)
    assert {"K"} <= set(read.tags)


@SMALL_AND_LARGE
def test_confirmation_never_passes_an_open_prepare(stream: Stream, count: int) -> None:
    slot = stream.slot(two_phase=True)
    with stream.open(slot, two_phase=True) as capture:
        stream.execute("INSERT INTO t VALUES (-1, 'x')")
        before = end_of(stream)
        stream.execute("BEGIN", rows(count), "PREPARE TRANSACTION 'a'")
        prepared = end_of(stream)
        stream.execute("INSERT INTO t VALUES (-2, 'x')")
        assert ids(drain(capture, end_of(stream), feedback=True)) == [-1, -2]
        assert capture.confirmed_lsn < prepared
        wait_until(lambda: stream.confirmed(slot) == capture.confirmed_lsn, 10, "the server has heard it")
        held = stream.confirmed(slot)
        assert before <= held < prepared
        stream.execute("COMMIT PREPARED 'a'")
        target = end_of(stream)
        assert ids(drain(capture, target, feedback=True)) == list(range(1, count + 1))
        capture.send_feedback(capture.handed_out_lsn)
        wait_until(lambda: stream.confirmed(slot) >= target, 10, "the server has heard it")


def test_an_idle_two_phase_slot_follows_the_server(stream: Stream) -> None:
    slot = stream.slot(two_phase=True)
    with stream.open(slot, two_phase=True) as capture:
        stream.execute("CREATE TABLE other (id int)", "INSERT INTO other VALUES (1)")
        target = end_of(stream)
        assert drain(capture, target, feedback=True) == []
        wait_until(lambda: stream.confirmed(slot) >= target, 10, "the server has heard it")


@SMALL_AND_LARGE
def test_a_reconnect_between_prepare_and_commit_loses_and_repeats_nothing(
    stream: Stream, count: int, tmp_path: Path
) -> None:
    slot = stream.slot(two_phase=True)
    kill = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'"
    with stream.open(slot, two_phase=True, spill_dir=tmp_path) as capture:
        stream.execute("BEGIN", rows(count), "PREPARE TRANSACTION 'a'", "INSERT INTO t VALUES (-1, 'x')")
        assert ids(drain(capture, end_of(stream), feedback=True)) == [-1]
        for number in range(3):
            stream.execute(kill, f"INSERT INTO t VALUES ({-10 - number}, 'x')")
            assert ids(drain(capture, end_of(stream), feedback=True)) == [-10 - number]
        stream.execute(kill, "COMMIT PREPARED 'a'")
        found = drain(capture, end_of(stream), feedback=True)
        assert ids(found) == list(range(1, count + 1))
        assert [one.ordinal for one in found] == list(range(1, count + 1))


@SMALL_AND_LARGE
def test_a_crash_between_prepare_and_commit_loses_nothing(stream: Stream, count: int) -> None:
    slot = stream.slot(two_phase=True)
    stream.execute("BEGIN", rows(count), "PREPARE TRANSACTION 'a'", "INSERT INTO t VALUES (-1, 'x')")
    assert ids(stream.read(slot, two_phase=True, feedback=True).changes) == [-1]
    stream.execute("COMMIT PREPARED 'a'", "INSERT INTO t VALUES (-2, 'x')")
    again = stream.read(slot, two_phase=True).changes
    # Without a state of its own, the library sees again what was not confirmed because of the PREPARE.
    assert ids(again) == [-1, *range(1, count + 1), -2]


def test_a_capture_process_that_is_killed_between_prepare_and_commit_goes_on(stream: Stream, tmp_path: Path) -> None:
    slot = stream.slot(two_phase=True)
    options = Wanted(
        db=stream.url, slot_name=slot, publication="p", state_dir=str(tmp_path / "state"), start_from="slot"
    )
    state = StateDir(tmp_path / "state")

    def delivered() -> list[int]:
        reader = SpoolReader(state.spool)
        reader.refresh()
        tables = [read_slice(piece)[0] for piece in reader.slices(reader.base, reader.end)]
        return [int(new[0]) for table in tables for new in table.column("new").to_pylist()]

    def start() -> ControlClient:
        client = ensure_capture(prepare(options).spec, is_restart=False)
        client.join("one")
        return client

    def wait_rows(client: ControlClient, expected: list[int]) -> None:
        def arrived() -> bool:
            client.wait(0.05)
            return delivered()[-len(expected) :] == expected

        wait_until(arrived, 20, f"{expected} in the spool")

    client = start()
    stream.execute("BEGIN", rows(3), "PREPARE TRANSACTION 'a'", "INSERT INTO t VALUES (-1, 'x')")
    wait_rows(client, [-1])
    client.ack("one", Position.end(reader_end(state)))
    wait_until(lambda: client.status()["confirmed_lsn"] != "0/0", 10, "the ack is known")
    confirmed = stream.confirmed(slot)
    holder = Lock.holder(state.capture_lock)
    assert holder is not None
    os.kill(holder["pid"], signal.SIGKILL)
    wait_until(lambda: Lock.holder(state.capture_lock) is None, 10, "the capture is gone")
    client.close()

    client = start()
    stream.execute("INSERT INTO t VALUES (-2, 'x')")
    wait_rows(client, [-2])
    assert stream.confirmed(slot) == confirmed
    stream.execute("COMMIT PREPARED 'a'")
    wait_rows(client, [-2, 1, 2, 3])
    assert delivered().count(-1) <= 1
    client.ack("one", Position.end(reader_end(state)))
    end = reader_end(state)
    wait_until(lambda: stream.confirmed(slot) >= end, 10, "everything is confirmed")
    holder = Lock.holder(state.capture_lock)
    assert holder is not None
    os.kill(holder["pid"], signal.SIGTERM)
    wait_until(lambda: Lock.holder(state.capture_lock) is None, 10, "the capture ends")
    client.close()


def reader_end(state: StateDir) -> int:
    reader = SpoolReader(state.spool)
    reader.refresh()
    return reader.end.commit


def test_a_slot_that_was_made_without_it_is_refused(stream: Stream) -> None:
    slot = stream.slot()
    stream.execute("INSERT INTO t VALUES (1, 'x')")
    with pytest.raises(SourceError, match=r"without two-phase decoding \(pg_replication_slots.two_phase\)") as caught:
        stream.open(slot, two_phase=True)
    assert "new slot" in (caught.value.advice or "")
    assert stream.query(f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{slot}'") == [(False,)]
    assert ids(stream.read(slot).changes) == [1]


def test_a_slot_that_was_made_with_it_is_read_that_way_whatever_is_asked_for(stream: Stream) -> None:
    slot = stream.slot(two_phase=True)
    stream.execute("BEGIN", rows(3), "PREPARE TRANSACTION 'a'", "INSERT INTO t VALUES (-1, 'x')")
    for streaming in (True, False):
        assert ids(stream.read(slot, streaming=streaming, feedback=True).changes) == [-1]
    stream.execute("COMMIT PREPARED 'a'")
    assert ids(stream.read(slot, streaming=False).changes) == [-1, 1, 2, 3]


def test_a_temporary_slot_may_be_two_phase(stream: Stream) -> None:
    options: dict[str, Any] = {"slot": f"{stream.name}_temporary", "publication": "p", "temporary": True}
    with pgcdc.open_capture(stream.url, two_phase=True, **options) as capture:
        stream.execute("BEGIN", rows(3), "PREPARE TRANSACTION 'a'", "COMMIT PREPARED 'a'")
        assert ids(drain(capture, end_of(stream))) == [1, 2, 3]


def test_a_slot_that_somebody_moved_past_a_prepare_is_a_gap(stream: Stream) -> None:
    slot = stream.slot(two_phase=True)
    stream.execute("BEGIN", rows(3), "PREPARE TRANSACTION 'a'")
    stream.execute(f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())", "COMMIT PREPARED 'a'")
    with pytest.raises(GapError, match=r"'a' was committed at .* but its changes were never sent"):
        stream.read(slot)
