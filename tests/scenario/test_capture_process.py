"""The life of a capture process beside its stream: waiting, ending, its status, and who is told what. No Spark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from databases import Database
from listening import wait_until
from preparing import Ready, Wanted, prepare

from pgcdc.capture.control import CaptureLink, CaptureSpec, ControlClient, ensure_capture
from pgcdc.cli.status import read_status
from pgcdc.core.errors import ConnectionLost, SourceError
from pgcdc.core.moment import show_time
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import connect
from pgcdc.source.postgres.setup.guard import Guard
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.reader import SpoolReader


@pytest.fixture
def prepared(database: Database, tmp_path: Path) -> Iterator[Ready]:
    """A database with one table, ready to be captured; what captures it is ended afterwards."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    yield prepare(
        Wanted(db=database.url, slot_name=f"s_{database.name}", all_tables=True, state_dir=str(tmp_path / "state"))
    )
    end_capture(StateDir(tmp_path / "state"))


def end_capture(state: StateDir) -> None:
    holder = Lock.holder(state.capture_lock)
    if holder:
        os.kill(holder["pid"], signal.SIGTERM)
        wait_until(lambda: Lock.holder(state.capture_lock) is None, 10, "the capture ends")


def test_an_idle_wait_ends_in_time(prepared: Ready) -> None:
    with closing(ensure_capture(prepared.spec, is_restart=False)) as client:
        client.wait(5)  # what came with the start
        took = []
        for _ in range(5):
            begin = time.monotonic()
            client.wait(0.1)
            took.append(time.monotonic() - begin)
    assert 0.09 < min(took) < 0.25, took


def hold_slot(database: Database, prepared: Ready) -> psycopg.Connection[Any]:
    """A walsender that looks like our own of before a crash, and does not go."""
    conn = psycopg.connect(
        database.url, autocommit=True, replication="database", application_name=f"pgcdc {prepared.identity.instance}"
    )
    names = ",".join(prepared.names)
    conn.pgconn.exec_(
        f"START_REPLICATION SLOT {prepared.identity.stream} LOGICAL 0/0 "
        f"(proto_version '1', publication_names '{names}')".encode()
    )
    return conn


def phase_of(state: StateDir) -> str | None:
    holder = Lock.holder(state.capture_lock)
    if not holder or "address" not in holder:
        return None
    with closing(ControlClient(holder["address"])) as client:
        phase: str = client.status()["phase"]
    return phase


@pytest.mark.parametrize("how", ["signal", "request", "driver"])
def test_a_capture_that_waits_for_its_slot_still_ends_when_it_is_told_to(
    database: Database, prepared: Ready, tmp_path: Path, how: str
) -> None:
    state = StateDir(tmp_path / "state")
    with (
        closing(hold_slot(database, prepared)),
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as driver,
        ThreadPoolExecutor(1) as pool,
    ):
        starting = pool.submit(start_once, prepared.spec.but(watch_pid=driver.pid))
        wait_until(lambda: phase_of(state) == "waiting for the slot", 20, "it waits for the slot")
        holder = Lock.holder(state.capture_lock)
        assert holder is not None and not starting.done()
        if how == "signal":
            os.kill(holder["pid"], signal.SIGTERM)
        elif how == "request":
            with closing(ControlClient(holder["address"])) as client:
                client.stop()
        else:
            driver.kill()
            driver.wait()
        assert starting.result(timeout=5) == 0
        driver.kill()


def test_who_waits_for_the_slot_says_so_and_when_it_is_free(database: Database, prepared: Ready) -> None:
    said: list[str] = []
    with closing(hold_slot(database, prepared)) as held, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(CaptureLink, prepared.spec, is_restart=False, say=said.append)
        wait_until(lambda: bool(said) or starting.done(), 30, "it is said before the capture runs")
        held.close()
        link = starting.result(timeout=30)
    assert ["waiting for the slot: an earlier connection" in said[0], "the slot is free" in said[1]] == [True, True], (
        said
    )
    link.stop()
    link.close()


def start_once(spec: CaptureSpec) -> int:
    """The exit code of one capture process."""
    return subprocess.run(
        [sys.executable, "-m", "pgcdc.capture.process"],
        input=spec.model_dump_json(),
        text=True,
        timeout=90,
        check=False,
        capture_output=True,
    ).returncode


def test_a_connection_that_ends_while_the_slot_is_looked_at_is_a_lost_connection(
    database: Database, prepared: Ready, tmp_path: Path
) -> None:
    state = StateDir(tmp_path / "state")
    guard = Guard(state, prepared.identity, Consumers(state.consumers_file), temporary=False)
    with connect(database.url) as sql:
        guard.check(sql)
        assert guard.is_held_by_us(sql), "nobody holds it"
        with closing(hold_slot(database, prepared)):
            assert guard.is_held_by_us(sql)
        database.execute("SELECT pg_terminate_backend(%s)", [sql.info.backend_pid])
        with pytest.raises(ConnectionLost, match="terminating connection"):
            guard.is_held_by_us(sql)


def test_without_a_connection_the_lag_grows_and_is_not_zero(tmp_path: Path) -> None:
    with EmbeddedPostgres.temporary() as server:
        database = Database("postgres", server.url(), server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        source = Wanted(db=server.url(), slot_name="s1", all_tables=True, state_dir=str(tmp_path / "state"))
        said: list[str] = []
        client = CaptureLink(prepare(source).spec, is_restart=False, say=said.append)
        try:
            assert client.status()["lag_seconds"] == 0
            server.stop(timeout_s=20)
            wait_until(lambda: client.status()["phase"] == "reconnecting", 10, "the loss is noticed")
            first = client.status()["lag_seconds"]
            wait_until(lambda: client.status()["lag_seconds"] > first + 0.2, 5, "the lag grows")
            moment = show_time()
            server.restart()
            wait_until(lambda: client.status()["phase"] == "streaming", 60, "connected again")
            assert client.status()["lag_seconds"] == 0
            client.keep()
            lost, back = said
            assert lost.endswith("; reconnecting") and re.fullmatch(r"connected to the server again after \d+ s", back)
            assert read_status(tmp_path / "state")["capture_since"] >= moment
        finally:
            end_capture(StateDir(tmp_path / "state"))
            client.close()
        assert read_status(tmp_path / "state")["lag_seconds"] is None, "nobody knows"


def test_a_link_starts_the_capture_again_and_tells_it_what_it_must_know(prepared: Ready) -> None:
    told: list[int] = []

    def tell(client: ControlClient) -> None:
        told.append(client.status()["pid"])
        if len(told) == 1:
            kill(told[0])  # it dies again, while it is told

    said: list[str] = []
    link = CaptureLink(prepared.spec, is_restart=False, on_restart=tell, say=said.append)
    first = link.status()["pid"]
    assert told == []
    kill(first)
    second = link.status()["pid"]
    assert len(told) == 2 and told[-1] == second and len({first, *told}) == 3
    assert "the capture process ended (killed by signal 9): starting it again" in said[0]
    assert "the capture runs again after" in said[1] and len(said) == 4
    link.keep()
    assert link.status()["pid"] == second
    kill(second)

    def is_again() -> bool:
        link.keep()
        return len(said) == 6

    wait_until(is_again, 10, "it is started again also while nobody asks it anything")
    link.stop()
    link.close()


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10, "it is dead")


def test_a_capture_that_dies_again_and_again_is_not_hidden(prepared: Ready) -> None:
    link = CaptureLink(prepared.spec, is_restart=False)

    with pytest.raises(SourceError, match=r"ended 5 times within 60 s"):
        while True:
            kill(link.status()["pid"])
    link.close()


def test_a_full_spool_is_read_up_to_what_a_planned_batch_needs(
    database: Database, prepared: Ready, tmp_path: Path
) -> None:
    """Nothing is acknowledged, and so nothing released, before the batch is complete: pausing would wait for ever."""
    database.execute("ALTER TABLE t ADD v text")
    reader = SpoolReader(tmp_path / "state" / "spool")
    with closing(ensure_capture(prepared.spec.but(spool_limit=1 << 20), is_restart=False)) as client:
        client.join("one")

        def fill(number: int) -> int:
            database.execute(
                "INSERT INTO t SELECT g, repeat(md5(g::text), 20) FROM generate_series(%s::int, %s::int) g",
                [number * 1000, number * 1000 + 999],
            )
            return int(database.query("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn")[0][0])

        def is_paused() -> bool:
            client.wait(0.02)
            return bool(client.status()["phase"].startswith("paused"))

        for number in range(3):
            fill(number)
        wait_until(is_paused, 20, "the spool is full")
        needed = fill(3)
        database.execute("INSERT INTO t VALUES (-1)")

        def arrives() -> bool:
            client.wait(0.05, until=Position.end(needed))
            reader.refresh()
            return reader.end >= Position.end(needed)

        wait_until(arrives, 20, "what is needed")
        wait_until(is_paused, 20, "and no more")
        fill(4)
        client.wait(0.5)
        assert sum(record.rows for record in reader.records) <= 4001


def test_no_capture_is_started_for_a_driver_that_is_gone(prepared: Ready) -> None:
    """An orphaned source would start one after the other: each ends at once."""
    with subprocess.Popen([sys.executable, "-c", ""]) as driver:
        driver.wait()
    begin = time.monotonic()
    with pytest.raises(SourceError, match="has ended"):
        ensure_capture(prepared.spec.but(watch_pid=driver.pid), is_restart=True)
    assert time.monotonic() - begin < 5
