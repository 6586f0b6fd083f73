"""`pgcdc listen` as a user runs it: start, look, stop, start again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import pgcdc
from databases import Database
from listening import Listener, check_equal, wait_until

from pgcdc.cli.status import read_status
from pgcdc.playground import shop


@pytest.fixture
def listener(database: Database, tmp_path: Path) -> Iterator[Listener]:
    one = Listener(database.url, tmp_path, slot=f"s_{database.name}")
    yield one
    one.kill_all()


def test_a_run_can_be_watched_is_locked_follows_new_tables_and_stops_in_order(
    listener: Listener, database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE TABLE keyless (v text)")
    listener.start("--adapter", "stdout", "--schema-events")
    assert "table keyless has no primary key" in listener.said()

    database.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    database.execute("INSERT INTO keyless VALUES ('x')")
    listener.wait_delivered()
    assert [event["payload"]["row"] for event in listener.events()] == [
        {"id": "1", "v": "a"},
        {"id": "2", "v": "b"},
        {"v": "x"},
    ]
    on_stdout = [json.loads(line) for line in listener.said().splitlines() if line.startswith("{")]
    assert on_stdout == listener.events(), "both adapters got the same events"

    report = json.loads(pgcdc("status", "--state-dir", str(listener.state.path), "--json").stdout)
    assert report["phase"] == "streaming" and report["capture"] == "streaming"
    assert report["slot"] == listener.slot and report["last_error"] is None
    assert report["lag_bytes"] >= 0 and report["lag_seconds"] >= 0
    assert report["fast_paths"] == "decoder compiled, small batches short ways through Spark", (
        "nothing falls back unnoticed"
    )
    assert "collected" in report["batch_ms"] and "written" in report["batch_ms"]
    assert "streaming" in pgcdc("status", "--state-dir", str(listener.state.path)).stdout

    second = pgcdc(
        "listen", "--all-tables", "--slot-name", listener.slot, "--state-dir", str(listener.state.path),
        env={"PGCDC_DB": listener.url},
    )  # fmt: skip
    assert second.returncode == 2 and "in use by process" in second.stderr

    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    wait_until(lambda: "new tables captured from now on: later" in listener.said(), 30, "the new table is seen")
    database.execute("INSERT INTO later VALUES (7)")
    listener.wait_delivered()
    assert listener.events()[-1]["channel"] == "pgcdc:later"

    capture = listener.capture_pid()
    assert capture is not None
    os.kill(capture, signal.SIGKILL)
    wait_until(lambda: "the capture runs again after" in listener.said(), 30, "it is said while nothing is delivered")
    ended = r"[\d-]+ [\d:]+ pgcdc: the capture process ended \(killed by signal 9\): starting it again\n"
    assert re.search(ended, listener.said())
    began = report["phase_since"]
    wait_until(lambda: read_status(listener.state.path)["capture_since"] > began, 10, "status knows since when")

    database.execute("ALTER TABLE later ADD note text; INSERT INTO later VALUES (8, 'x')")
    listener.wait_delivered()
    assert [event["channel"] for event in listener.events()[-2:]] == ["pgcdc:_schema", "pgcdc:later"]
    wait_until(lambda: "pgcdc: table public.later: column note (text) added" in listener.said(), 5, "it is told")

    begin = time.monotonic()
    assert listener.stop() == 0
    assert time.monotonic() - begin < 10
    assert "is delivered and confirmed" in listener.said()
    assert listener.capture_pid() is None
    slots = database.query(
        "SELECT active, confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s",
        [listener.slot],
    )
    assert slots == [(False, listener.delivered_lsn())]


@pytest.mark.timeout(900)
def test_signals_under_load_end_in_time_once_delivers_the_rest_and_an_idle_restart_adds_nothing(
    listener: Listener, database: Database
) -> None:
    with database.connect() as conn:
        shop.create_tables(conn)
        conn.execute("CREATE TABLE many (id int PRIMARY KEY)")
    listener.start()
    with database.connect() as conn:
        shop.add_first_rows(conn)
    traffic = shop.Traffic(database.url, seed=11, rate_per_s=100)
    traffic.start()
    lsn = listener.delivered_lsn()
    wait_until(lambda: listener.delivered_lsn() > lsn, 60, "events flow")
    assert listener.process is not None
    listener.process.send_signal(signal.SIGINT)
    assert listener.wait_exit(10) == 0, listener.said()
    listener.start(wait=False)
    wait_until(lambda: "pgcdc: starting Spark" in listener.said(), 60, "Spark starts")
    listener.process.send_signal(signal.SIGINT)
    assert listener.wait_exit(30) == 0 and "stopped before anything was read" in listener.said()

    listener.start()
    jvm = listener.jvm_pid()
    assert jvm is not None
    os.kill(jvm, signal.SIGKILL)
    assert listener.wait_exit(30) == 1
    _, _, after = listener.said().partition("pgcdc: ready: ")
    (error,) = after.splitlines()[1:]
    assert error[20:] == "error: the Spark JVM ended unexpectedly. Start pgcdc again: nothing is lost"
    assert b"Traceback" not in listener.log.read_bytes()

    listener.start()
    lsn = listener.delivered_lsn()
    wait_until(lambda: listener.delivered_lsn() > lsn, 60, "events flow")
    listener.process.send_signal(signal.SIGTERM)
    listener.process.send_signal(signal.SIGTERM)  # the second ends at once
    assert listener.wait_exit(10) in (0, 128 + signal.SIGTERM)

    traffic.stop()
    database.execute("INSERT INTO many SELECT generate_series(1, 5000)")
    run = once(listener)
    assert run.returncode == 0, run.stderr
    assert "is delivered and confirmed" in run.stderr
    check_equal(listener, "many")
    rows = [event["payload"]["row"] for event in listener.events() if event["channel"] == "pgcdc:many"]
    assert [int(row["id"]) for row in rows] == list(range(1, 5001))
    confirmed = "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    assert database.query(confirmed, [listener.slot]) == [(listener.delivered_lsn(),)]

    content = listener.output.read_bytes()
    assert once(listener).returncode == 0
    assert listener.output.read_bytes() == content

    # The ordinary way through Spark goes on with the same checkpoint, and the shorter ones after it.
    for number, more in enumerate(({"PGCDC_ORDINARY_SPARK": "1"}, {})):
        database.execute(f"INSERT INTO many VALUES ({6001 + number})")
        assert once(listener, **more).returncode == 0
        ids = [event["payload"]["row"]["id"] for event in listener.events() if event["channel"] == "pgcdc:many"]
        assert ids[5000:] == [str(6001 + one) for one in range(number + 1)]


def once(listener: Listener, **more: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "pgcdc", "listen", "--once", "--all-tables", "--slot-name", listener.slot),
        *("--state-dir", str(listener.state.path), "--adapter", "file", "--file-path", str(listener.output)),
        *("--snapshot-mode", "never"),
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PGCDC_DB": listener.url, **more},
    )


def test_a_trial_with_a_temporary_slot_leaves_nothing_behind(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    output = open(tmp_path / "out", "wb")  # noqa: SIM115
    log = open(tmp_path / "log", "wb")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "pgcdc", "listen", "--temporary-slot", "--all-tables", "--slot-name", f"s_{database.name}",
         "--no-warm-up", "--stdout-format", "pretty"],
        cwd=tmp_path, stdout=output, stderr=log, env={**os.environ, "PGCDC_DB": database.url},
    )  # fmt: skip
    try:
        wait_until(lambda: b"ready" in (tmp_path / "log").read_bytes(), 90, "ready")
        database.execute("INSERT INTO t VALUES (1)")
        wait_until(lambda: b" INSERT   t id=1\n" in (tmp_path / "out").read_bytes(), 60, "the event")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        output.close()
        log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out"]
    wait_until(
        lambda: not database.query("SELECT 1 FROM pg_replication_slots WHERE database = %s", [database.name]), 10, ""
    )
    assert database.query("SELECT 1 FROM pg_publication") == []
