"""`pgcdc validate` against a real server: each check is reported, nothing is started, nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from typer.testing import CliRunner

from pgcdc.cli.main import app
from pgcdc.playground.postgres import EmbeddedPostgres


def validate(folder: Path, *flags: str, url: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The checks by name; the exit code is as expected, and folder and server are as they were."""
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(app, ["validate", "--json", *flags], env={"PGCDC_DB": url})
    assert result.exit_code == code, result.output
    assert sorted(folder.rglob("*")) == before
    answer = json.loads(result.stdout)
    assert answer["ok"] is (code == 0)
    return {one["name"]: one for one in answer["checks"]}


def left_behind(database: Database) -> list[tuple[Any, ...]]:
    return database.query(
        "SELECT pubname::text FROM pg_publication UNION ALL SELECT slot_name::text FROM pg_replication_slots "
        "WHERE database = current_database() UNION ALL SELECT relname::text FROM pg_class WHERE relname LIKE 'pgcdc%'"
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_everything_is_looked_at_and_nothing_is_left(database: Database, folder: Path) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE log (line text)")
    (folder / "pgcdc.yaml").write_text(
        f"slot_name: s_{database.name}\nall_tables: true\nincremental_snapshot: true\n"
        "adapters: [stdout, {name: audit, type: file, path: audit.jsonl, routes: [orders]}]\n"
    )
    checks = validate(folder, url=database.url)
    assert {one["status"] for one in checks.values()} == {"ok"}, checks
    assert list(checks) == [
        "configuration", "java", "state directory", "database", "slot", "tables", "rows", "adapter stdout", "adapter audit",
        "dead letters",
    ]  # fmt: skip
    assert checks["configuration"]["detail"] == "pgcdc.yaml"
    assert "will be created" in checks["slot"]["detail"] and "will be created" in checks["state directory"]["detail"]
    assert "orders" in checks["tables"]["detail"] and "only inserts of log" in checks["tables"]["detail"]
    assert checks["adapter audit"]["detail"] == "type file, path audit.jsonl, only pgcdc:orders"
    assert left_behind(database) == []


def test_each_failure_is_reported_beside_what_is_right(database: Database, folder: Path) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    (folder / "theirs").write_text("precious")
    (folder / "file").write_text("")
    flags = [
        "--slot-name",
        f"s_{database.name}",
        "--adapter",
        "file",
        "--file-path",
        "theirs",
        "--state-dir",
        "file/state",
    ]
    checks = validate(folder, *flags, "--tables", "ordres", url=database.url, code=2)
    failed = {name: f"{one['detail']}. {one['advice']}" for name, one in checks.items() if one["status"] == "failed"}
    assert set(failed) == {"state directory", "tables", "adapter file"}
    assert "table ordres does not exist. Did you mean orders?" in failed["tables"]
    assert "not writable" in failed["state directory"] and "theirs" in failed["adapter file"]
    assert checks["database"]["status"] == "ok"
    assert left_behind(database) == [] and (folder / "theirs").read_text() == "precious"


def test_rights_are_tried(database: Database, folder: Path) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    role = f"r_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    url = database.server.url(database.name, role)
    flags = ["--tables", "orders", "--slot-name", f"s_{database.name}"]
    try:
        checks = validate(folder, *flags, url=url, code=2)
        assert "REPLICATION" in checks["database"]["detail"]
        assert (checks["slot"]["status"], checks["tables"]["status"]) == ("skipped", "skipped")
        database.execute(f"ALTER ROLE {role} REPLICATION")
        checks = validate(folder, *flags, url=url, code=2)
        assert checks["tables"]["status"] == "failed" and "does not own orders" in checks["tables"]["detail"]
        database.execute("CREATE PUBLICATION theirs FOR TABLE orders")
        mine = ["--publication", "theirs", "--slot-name", f"s_{database.name}"]
        checks = validate(folder, *mine, url=url, code=2)
        assert checks["tables"]["status"] == "ok" and checks["rows"]["status"] == "failed"
        assert "GRANT SELECT" in checks["rows"]["advice"]
        database.execute(f"GRANT SELECT ON orders TO {role}")
        assert {one["status"] for one in validate(folder, *mine, url=url).values()} == {"ok"}
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_server_that_does_not_answer_and_a_wrong_file(folder: Path) -> None:
    url = "postgresql://app:s3cretpw@127.0.0.1:1/x"
    result = CliRunner().invoke(app, ["validate", "--all-tables"], env={"PGCDC_DB": url})
    lines = result.stdout.splitlines()
    assert result.exit_code == 2 and "s3cretpw" not in result.output
    assert any(line.startswith("failed   database") and "127.0.0.1:1" in line for line in lines), lines
    assert any(line.startswith("skipped  tables") for line in lines)
    assert "checks failed" in result.stderr
    (folder / "pgcdc.yaml").write_text("adapters:\n  - fiel\n")
    checks = validate(folder, url=url, code=2)
    assert list(checks) == ["configuration"]
    assert checks["configuration"]["detail"] == "pgcdc.yaml, line 2: adapters[0]: 'fiel' is unknown"


def test_slot_without_a_state_directory_and_typed_rows(database: Database, folder: Path) -> None:
    slot = f"s_{database.name}"
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total numeric)")
    typed = validate(folder, "--table", "orders", "--slot-name", slot, url=database.url)
    assert typed["typed rows"]["detail"] == "orders with 2 columns"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    checks = validate(folder, "--all-tables", "--slot-name", slot, url=database.url, code=2)
    assert "state directory" in checks["slot"]["detail"] and checks["tables"]["status"] == "skipped"


def test_python_transforms_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "mine_for_validate.py").write_text("def change(event):\n    return event\n")
    checks = {}
    for name in ("mine_for_validate:change", "mine_for_validate:chnge", "not_there:f"):
        (folder / "pgcdc.yaml").write_text(f"transforms: {{global: [{{type: python, function: '{name}'}}]}}\n")
        result = CliRunner().invoke(
            app, ["validate", "--json", "--all-tables"], env={"PGCDC_DB": "postgresql://127.0.0.1:1/x"}
        )
        checks[name] = next(one for one in json.loads(result.stdout)["checks"] if one["name"] == "transform")
    assert [one["status"] for one in checks.values()] == ["ok", "failed", "failed"]
    assert "has no function chnge" in checks["mine_for_validate:chnge"]["detail"]


def test_as_a_program_it_starts_no_other(database: Database, folder: Path, postgres: EmbeddedPostgres) -> None:
    """No Java but `java -version`, no capture: the process ends by itself and leaves no session behind."""
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    done = subprocess.run(
        [sys.executable, "-m", "pgcdc", "validate", "--all-tables", "--slot-name", f"s_{database.name}"],
        env={**os.environ, "PGCDC_DB": database.url}, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "pgcdc: ready to listen\n"
    assert list(folder.iterdir()) == []
    sessions = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pgcdc%%' AND datname = %s"
    assert database.query(sessions, [database.name]) == []
    assert left_behind(database) == []


def test_columns_that_no_table_has_are_a_failed_check(database: Database, folder: Path) -> None:
    database.execute("CREATE TABLE people (id int PRIMARY KEY, email text)")
    (folder / "pgcdc.yaml").write_text(
        f"slot_name: s_{database.name}\nall_tables: true\nadapters: [stdout]\n"
        "transforms: {global: [{type: mask, columns: [emial]}, {type: drop_columns, columns: [id]}]}\n"
    )
    checks = validate(folder, url=database.url, code=2)
    assert [name for name, one in checks.items() if one["status"] == "failed"] == ["columns"]
    assert checks["columns"]["detail"] == "mask: no captured table has a column emial; did you mean email?"
    assert left_behind(database) == []
