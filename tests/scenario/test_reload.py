"""`pgcdc reload`, SIGHUP and a broken file: transforms and routes change at a boundary, or not at all."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import pgcdc
from databases import Database
from listening import Listener, wait_until

from pgcdc.capture.control import ask


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return tmp_path / "pgcdc.yaml"


@pytest.fixture
def listener(database: Database, tmp_path: Path, settings: Path) -> Iterator[Listener]:
    one = Listener(database.url, tmp_path, "--all-tables", "--config", str(settings), slot=f"s_{database.name}")
    yield one
    one.kill_all()


def configure(path: Path, *steps: dict[str, Any], **more: Any) -> None:
    state_dir = str(path.parent / "state")
    path.write_text(yaml.safe_dump({"state_dir": state_dir, "transforms": {"global": list(steps)}, **more}))


def reload(listener: Listener) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pgcdc", "reload", "--config", str(listener.folder / "pgcdc.yaml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def status(listener: Listener) -> dict[str, Any]:
    return ask(listener.state.run_lock, {"do": "status"})


def rows(listener: Listener) -> list[dict[str, Any]]:
    return [event["payload"]["row"] for event in listener.events()]


def test_transforms_and_routes_change_while_it_runs_and_a_wrong_file_changes_nothing(
    database: Database, listener: Listener, settings: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE TABLE u (id int PRIMARY KEY)")
    configure(settings, {"type": "drop_columns", "columns": ["v"]})
    none = reload(listener)
    assert none.returncode == 2 and "no pipeline runs in" in none.stderr
    configure(settings, {"type": "drop_columns", "columns": ["v"]})
    listener.start()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    listener.wait_delivered()
    assert rows(listener) == [{"id": "1"}]
    of_file = ("--config", str(settings))
    assert pgcdc("status", *of_file).stdout.startswith("phase                        streaming")
    assert "all targets have everything" in pgcdc("sentinel", "--wait", *of_file).stdout
    assert pgcdc("consumer", "list", *of_file).stdout.startswith("main\t")

    configure(settings, {"type": "mask", "columns": ["v"]}, routes={"file": ["t"]}, max_batch_rows=7)
    done = reload(listener)
    assert (done.returncode, done.stderr) == (0, "") and "reloaded" in done.stdout
    assert re.search(r"[\d-]+ [\d:]+ pgcdc: the configuration was reloaded", listener.said())
    assert status(listener)["last_reload_at"]
    assert "these need a restart: max_batch_rows" in listener.said()
    database.execute("INSERT INTO t VALUES (2, 'a'); INSERT INTO u VALUES (1)")
    listener.wait_delivered()
    assert rows(listener)[1:] == [{"id": "2", "v": "***REDACTED***"}]

    configure(settings, {"type": "maks", "columns": ["v"]})
    refused = reload(listener)
    assert refused.returncode == 2 and f"{settings}, line" in refused.stderr and "mask" in refused.stderr
    configure(settings, {"type": "sql", "set": {"v": "nonsense("}})
    assert "nonsense(" in reload(listener).stderr
    assert (status(listener)["reloads"], status(listener)["reload_errors"]) == (1, 2)
    database.execute("INSERT INTO t VALUES (3, 'a')")
    listener.wait_delivered()
    assert rows(listener)[2:] == [{"id": "3", "v": "***REDACTED***"}], "the previous configuration stays in effect"

    for operation in ("INSERT", "UPDATE"):
        configure(settings, {"type": "filter", "where": f"operation = '{operation}'"})
        wait_until(lambda: reload(listener).returncode == 0, 60, "the query runs, and takes the file")
        assert listener.said().count("Restart pgcdc to run SQL and Python transforms faster") == 1

    configure(settings)
    assert listener.process is not None
    listener.process.send_signal(signal.SIGHUP)
    wait_until(lambda: status(listener)["reloads"] == 4, 30, "the signal is heeded")
    assert status(listener)["last_reload_error"] is None
    database.execute("INSERT INTO t VALUES (4, 'a'); INSERT INTO u VALUES (2)")
    listener.wait_delivered()
    assert rows(listener)[3:] == [{"id": "4", "v": "a"}, {"id": "2"}]
    assert listener.stop() == 0
