"""`pgcdc snapshot`: what its flags mean, and how it asks for incremental snapshots, with and without a capture that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_loop import Loop
from typer.testing import CliRunner

from pgcdc.cli.main import app
from pgcdc.cli.report import CopyProgress, describe_rows, describe_seconds
from pgcdc.cli.status import read_status
from pgcdc.core.errors import ConfigError
from pgcdc.core.state import Identity, Lock, StateDir, write_json
from pgcdc.source.postgres.snapshot.requests import RequestQueue

DB = "postgresql://u@h/shop"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "state")
    made.create()
    made.save_identity(Identity("postgres", "7", "shop", "s1", "i", 800))
    return made


@pytest.fixture
def capture(state: StateDir) -> Iterator[Loop]:
    """A capture that runs."""
    loop, lock = Loop(), Lock(state.capture_lock)
    assert lock.acquire() is not None
    lock.write({"pid": 1, "address": loop.server.address})
    yield loop
    lock.release()
    loop.stop()


def run(*flags: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["snapshot", *flags], env={"PGCDC_DB": ""})
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no table is named"),
        (("--table", "t"), "no database is set"),
        (("--table", "t", "--all-tables"), "--table and --all-tables cannot be combined"),
        (("--all-tables", "--where", "true"), "--where applies to one table"),
        (("--incremental", "--list"), "--incremental and --list cannot be combined"),
        (("--pause", "a", "--stop", "a"), "--pause and --stop cannot be combined"),
        (("--table", "t", "--chunk-size", "5"), "need --incremental"),
        (("--incremental", "--table", "t", "--to", "parquet:x"), "--to cannot be combined with --incremental"),
        (("--list", "--all-tables"), "--all-tables cannot be combined with --list"),
        (("--incremental",), "no table is named"),
        (("--incremental", "--tables", "a,b", "--where", "true"), "--where applies to one table"),
        (("--incremental", "--table", "t", "--chunk-delay", "soon"), "--chunk-delay soon is not a time"),
        (("--db", DB, "--table", "t", "--partitions", "2"), "--partitions needs --to parquet:DIR"),
        (("--db", DB, "--table", "t", "--out-of-range", "clamp"), "--out-of-range needs --to parquet:DIR"),
        (("--db", DB, "--table", "t", "--to", "parquet:x", "--drop-columns", "a"), "copies whole tables"),
        (("--db", DB, "--table", "t", "--adapter", "file"), "adapter file needs a path"),
        (("--db", DB, "--table", "t", "--adapter", "kafka"), "'kafka' is unknown"),
        (("--db", DB, "--table", "t", "--to", "csv:x"), "unknown --to csv:x"),
        (("--db", DB, "--table", "t", "--to", "parquet:s3://x/y"), "is not a folder on this host"),
        (
            ("--db", DB, "--table", "t", "--to", "parquet:x", "--adapter", "stdout"),
            "--to and --adapter cannot be combined",
        ),
        (
            ("--db", DB, "--table", "t", "--to", "parquet:x", "--partitions", "0"),
            "--partitions must be at least 1, got 0",
        ),
        (("--db", DB, "--table", "t", "--invalid-utf8", "drop"), "--invalid-utf8"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: tuple[str, ...], said: str) -> None:
    assert said in " ".join(run(*flags, code=2).split())


def test_requests_wait_in_the_queue_while_no_capture_runs(state: StateDir) -> None:
    flags = ("--state-dir", str(state.path))
    output = run(
        "--incremental", "--table", "Orders", "--tables", 'sales.items,"We ird"', "--chunk-size", "500", "--chunk-delay",
        "100ms", *flags,
    )  # fmt: skip
    entries = RequestQueue(state.requests_file).entries()
    assert [one.request.table for one in entries] == ["orders", "sales.items", '"We ird"']
    assert {(one.request.chunk_size, one.request.chunk_delay_s, one.request.kind) for one in entries} == {
        (500, 0.1, "incremental")
    }
    assert [line.split("\t")[0] for line in output.splitlines()] == [one.id for one in entries]
    assert "starts when the pipeline runs" in output
    name = entries[1].id
    for action, status in (("pause", "paused"), ("resume", "queued"), ("stop", "stopped")):
        run(f"--{action}", name, *flags)
        assert RequestQueue(state.requests_file)[name].status == status
    assert "snapshot 'unknown' does not exist" in run("--pause", "unknown", *flags, code=2)
    listed = json.loads(run("--list", "--json", *flags))
    assert [(one["id"], one["status"]) for one in listed] == [
        (entries[0].id, "queued"),
        (name, "stopped"),
        (entries[2].id, "queued"),
    ]
    assert f"{name}\tsales.items\tincremental\tstopped" in run("--list", *flags)
    assert Lock.holder(state.capture_lock) is None
    assert [one["id"] for one in read_status(state.path)["snapshots"]] == [one.id for one in entries]


def test_a_capture_that_runs_is_asked(state: StateDir, capture: Loop) -> None:
    described = {"id": "x1", "table": "t", "kind": "incremental", "status": "running", "rows": 1200, "rate": 50.4}
    capture.replies["snapshot"] = {"id": "x1", "snapshots": [{**described, "percent": 12.3, "seconds_left": 200}]}
    flags = ("--state-dir", str(state.path))
    assert "queued" in run("--incremental", "--table", "t", "--where", "id > 5", *flags)
    asked = capture.requests.pop()
    assert {name: asked[name] for name in ("do", "action", "table", "where", "kind")} == {
        "do": "snapshot", "action": "add", "table": "t", "where": "id > 5", "kind": "incremental",
    }  # fmt: skip
    run("--pause", "x1", *flags)
    assert capture.requests.pop() == {"do": "snapshot", "action": "pause", "id": "x1"}
    assert "x1\tt\tincremental\trunning\t1,200\t-\t12 %\t50\t3 min 20 s" in run("--list", *flags)
    assert not state.requests_file.exists()


def test_what_the_capture_refuses_takes_back_what_was_asked_with_it(
    state: StateDir, capture: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = capture._answer

    def refuse_second(request: dict[str, Any]) -> dict[str, Any] | None:
        answer(request)
        if request.get("table") == "b":
            raise ConfigError("table b has no key", "Add a primary key")
        return {"snapshots": []}

    monkeypatch.setattr(capture.server, "_answer", refuse_second)
    assert "table b has no key" in run("--incremental", "--tables", "a,b", "--state-dir", str(state.path), code=2)
    asked = [(one["action"], one.get("id")) for one in capture.requests]
    assert asked[0][0] == "add" and asked[-1] == ("stop", asked[0][1])


def test_a_folder_that_is_no_state_directory_is_refused(tmp_path: Path) -> None:
    for flags in (("--list",), ("--stop", "x"), ("--incremental", "--table", "t")):
        assert "is not a state directory" in " ".join(run(*flags, "--state-dir", str(tmp_path), code=2).split())


# --- what is shown


def test_status_shows_initial_and_incremental_snapshots(state: StateDir, capture: Loop) -> None:
    initial = {
        "status": "reading",
        "tables": [{"table": "orders", "status": "reading", "rows": 500, "estimated_rows": 1000, "percent": 50.0,
                    "rows_per_s": 100, "seconds_left": 5}],
    }  # fmt: skip
    running = {"id": "x1", "table": "items", "kind": "incremental", "status": "failed", "rows": 7, "error": "dropped"}
    write_json(
        state.capture_status,
        {"phase": "streaming", "initial_snapshot": initial, "snapshots": [running], "bad_signals": 3},
    )
    result = CliRunner().invoke(app, ["status", "--state-dir", str(state.path)])
    assert "-\torders\tinitial\treading\t500\t1,000\t50 %\t100\t5 s" in result.output
    assert "x1\titems\tincremental\tfailed\t7\t-\t-\t-\t-\tdropped" in result.output
    assert re.search(r"bad signals +3 *\n", result.output)
    assert [one["table"] for one in read_status(state.path)["snapshots"]] == ["orders", "items"]
    assert read_status(state.path)["bad_signals"] == 3
    write_json(state.capture_status, {"initial_snapshot": {**initial, "status": "complete"}, "snapshots": []})
    assert "orders" not in CliRunner().invoke(app, ["status", "--state-dir", str(state.path)]).output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_times_for_people(seconds: float | None, text: str) -> None:
    assert describe_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rows", "estimated", "seconds", "text"),
    [
        (120_000, 1_000_000, 2, "120,000 of about 1,000,000 rows (12 %), 60,000 rows/s, 15 s left"),
        (0, 10, 2, "0 of about 10 rows (0 %), 0 rows/s, - left"),
        (11, 10, 1, "11 rows, 11 rows/s"),
        (5, 0, 0, "5 rows, 0 rows/s"),
    ],
)
def test_rows_for_people(rows: int, estimated: int, seconds: float, text: str) -> None:
    assert describe_rows(rows, estimated, seconds) == text


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    progress = CopyProgress(interval_s=3600)
    progress("t", 0, 100, False)
    progress("t", 5, 100, False)
    progress("t", 100, 100, True)
    assert capsys.readouterr().err == "pgcdc: table t: 100 rows read in less than 1 s\n"
    progress = CopyProgress(interval_s=0)
    progress("t", 0, 100, False)
    progress("t", 50, 100, False)
    assert capsys.readouterr().err.startswith("pgcdc: table t: 50 of about 100 rows (50 %), ")


def test_source_without_such_snapshots_refuses_them_also_while_nothing_runs(state: StateDir) -> None:
    state.save_identity(Identity("rate", "rate-1", "rate", "rate", "i", 8))
    flags = ("--state-dir", str(state.path), "--db", DB)
    said = run("--incremental", "--table", "t", *flags, code=2)
    assert "generated tables have no incremental snapshots" in said and "--rate-existing-rows" in said
    assert "generated tables have no incremental snapshots" in run("--pause", "a", *flags, code=2)
    assert json.loads(run("--list", "--json", *flags)) == []
    assert RequestQueue(state.requests_file).entries() == []
