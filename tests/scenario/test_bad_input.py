"""Bad input to `pgcdc listen`: a clear line with advice for each error, exit code 2, and nothing left behind."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import psutil
import pytest
from commands import pgcdc
from databases import Database

from pgcdc.playground.postgres import EmbeddedPostgres


def listen(folder: Path, *flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return pgcdc("listen", *flags, folder=folder, env=env)


def refused(folder: Path, *flags: str, env: dict[str, str] | None = None) -> str:
    """Run it; check the form of the refusal and that nothing is left; a line for each thing that is wrong."""
    before = {path for path in folder.rglob("*")}
    result = listen(folder, *flags, env=env)
    assert result.returncode == 2, result.stderr
    said = [line for line in result.stderr.splitlines() if "pgcdc: " not in line]
    lines = [
        line for line in said if not re.match(r" +(\d+ )?\| ", line)
    ]  # without the lines of the file that are shown
    assert lines and all(re.match(r"([\d-]{10} [\d:]{8} )?error: ", line) for line in lines), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert {path for path in folder.rglob("*")} == before, "no state directory, no half file"
    assert processes_in(folder) == []
    return "\n".join(lines)


def processes_in(folder: Path) -> list[str]:
    """Commands of processes that run in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def slots(database: Database) -> list[str]:
    return [
        row[0]
        for row in database.query("SELECT slot_name FROM pg_replication_slots WHERE database = %s", [database.name])
    ]


CONFIG_CASES = {
    "no database": ([], {}, "no database is set"),
    "no tables": (["--db", "postgres://127.0.0.1/x"], {}, "no tables are selected"),
    "unknown detector": (["--detector", "magic"], {}, "--detector"),
    "unknown adapter": (["--adapter", "carrier-pigeon"], {}, "--adapter"),
    "file without path": (["--db", "postgres://127.0.0.1/x", "--adapter", "file", "--all-tables"], {}, "--file-path"),
    "folder of the file missing": (
        ["--db", "postgres://127.0.0.1/x", "--adapter", "file", "--file-path", "no/such/x", "--all-tables"],
        {},
        "does not exist",
    ),
    "snapshot mode": (["--snapshot-mode", "sometimes"], {}, "--snapshot-mode"),
    "snapshot of a temporary slot": (
        ["--db", "postgres://127.0.0.1/x", "--all-tables", "--temporary-slot", "--snapshot-first"],
        {},
        "needs a persistent slot",
    ),
    "snapshot of an old slot": (
        ["--db", "postgres://127.0.0.1/x", "--all-tables", "--start-from", "slot", "--snapshot-mode", "always"],
        {},
        "needs a new slot",
    ),
    "two modes": (["--snapshot-first", "--snapshot-mode", "never"], {}, "--snapshot-first cannot be combined with"),
    "hold limit": (["--snapshot-hold-limit", "soon"], {}, "--snapshot-hold-limit"),
    "spool limit": (["--spool-limit", "lots"], {}, "--spool-limit"),
    "variable": ([], {"PGCDC_MAX_BATCH_ROWS": "many"}, "PGCDC_MAX_BATCH_ROWS"),
    "config file missing": (["--config", "nowhere.yaml"], {}, "nowhere.yaml"),
    "temporary slot to a file": (
        ["--db", "postgres://127.0.0.1/x", "--all-tables", "--temporary-slot", "--adapter", "file", "--file-path", "x"],
        {},
        "--temporary-slot",
    ),
    "bad url": (["--db", "postgres://u:secretpw@h:notaport/x", "--all-tables"], {}, "URL"),
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_wrong_configuration(tmp_path: Path, case: str) -> None:
    flags, env, expected = CONFIG_CASES[case]
    line = refused(tmp_path, *flags, env=env)
    assert expected in line
    assert "secretpw" not in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("db: postgres://h/x\n  slot_name: [\n", "line 2"),
        ("all_tables: true\nslotname: x\n", "line 2: slotname"),
        ("max_batch_rows: none\n", "line 1: max_batch_rows"),
        ("- a\n- b\n", "line 1"),
    ],
)
def test_wrong_yaml_names_line_and_key(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "pgcdc.yaml").write_text(text)
    assert expected in refused(tmp_path)


def test_unreadable_yaml(tmp_path: Path) -> None:
    (tmp_path / "pgcdc.yaml").mkdir()
    assert "cannot be read" in refused(tmp_path, "--config", "pgcdc.yaml")


def test_unknown_flag(tmp_path: Path) -> None:
    result = listen(tmp_path, "--no-such-flag")
    assert result.returncode == 2 and "--no-such-flag" in result.stderr


def test_unreachable_host(tmp_path: Path) -> None:
    assert "127.0.0.1" in refused(tmp_path, "--db", "postgres://127.0.0.1:1/x", "--all-tables")


def test_wrong_password_and_no_replication_right() -> None:
    with EmbeddedPostgres.temporary(password="right") as server:
        database = Database("postgres", server.url(), server)
        database.execute("CREATE ROLE app LOGIN PASSWORD 'apppw'")
        wrong = server.url().replace("right", "wrongpw")
        assert wrong != server.url()
        import tempfile

        with tempfile.TemporaryDirectory() as empty:
            line = refused(Path(empty), "--all-tables", env={"PGCDC_DB": wrong})
            assert "password" in line.lower() and "wrongpw" not in line
            app = server.url(user="app").replace("app@", "app:apppw@")
            assert "REPLICATION" in refused(Path(empty), "--all-tables", env={"PGCDC_DB": app})


def test_wal_level_not_logical_and_too_few_slots_and_walsenders(tmp_path: Path) -> None:
    with EmbeddedPostgres.temporary(settings={"wal_level": "replica"}) as server:
        assert "wal_level" in refused(tmp_path, "--all-tables", env={"PGCDC_DB": server.url()})
    with EmbeddedPostgres.temporary(settings={"max_replication_slots": "1"}) as server:
        database = Database("postgres", server.url(), server)
        database.execute("SELECT pg_create_physical_replication_slot('taken')")
        assert "max_replication_slots" in refused(tmp_path, "--all-tables", env={"PGCDC_DB": server.url()})
        assert database.query("SELECT 1 FROM pg_publication") == [], "no publication is left behind"


def test_things_that_do_not_exist_or_belong_to_others(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    env = {"PGCDC_DB": database.url}
    slot = f"s_{database.name}"
    assert "nothere" in refused(tmp_path, "--publication", "nothere", "--slot-name", slot, env=env)
    assert "orders" in refused(tmp_path, "--tables", "ordres", "--slot-name", slot, env=env)
    assert "slot" in refused(tmp_path, "--all-tables", "--slot-name", "Bad-Name", env=env)
    database.execute("SELECT pg_create_physical_replication_slot(%s)", [f"{slot}_phys"])
    try:
        assert "physical" in refused(tmp_path, "--all-tables", "--slot-name", f"{slot}_phys", env=env)
    finally:
        database.execute("SELECT pg_drop_replication_slot(%s)", [f"{slot}_phys"])
    assert slots(database) == []
    assert database.query("SELECT pubname FROM pg_publication") == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--row-filter", "orders=total >"], "syntax error"),
        (["--row-filter", "orders=total > 1"], "REPLICA IDENTITY FULL"),
        (["--row-filter", "total > 1"], "--row-filter"),
        (["--columns", "orders=total"], "Add id to --columns"),
        (["--columns", "orders=id,nope"], "nope"),
        (["--columns", "nothere=id"], "nothere, which is not captured"),
    ],
)
def test_wrong_row_filters_and_columns(database: Database, tmp_path: Path, flags: list[str], expected: str) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total int)")
    more = ["--tables", "orders", "--slot-name", f"s_{database.name}"]
    assert expected in refused(tmp_path, *flags, *more, env={"PGCDC_DB": database.url})
    assert slots(database) == []
    assert database.query("SELECT pubname FROM pg_publication") == []


@pytest.mark.parametrize("place", ["somebody_elses", "a_folder/../missing/x", "/proc/events.jsonl"])
def test_a_file_that_cannot_be_the_target_is_found_before_slot_and_publication(
    database: Database, tmp_path: Path, place: str
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "somebody_elses").write_text("precious")
    flags = ["--all-tables", "--slot-name", f"s_{database.name}", "--adapter", "file", "--file-path", place]
    line = refused(tmp_path, *flags, env={"PGCDC_DB": database.url})
    assert place.rpartition("/")[2] in line
    assert slots(database) == []
    assert database.query("SELECT pubname FROM pg_publication") == []
    assert (tmp_path / "somebody_elses").read_text() == "precious"


def test_slot_of_another_database_and_slot_in_use(
    database: Database, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    import pgcdc

    slot = f"s_{database.name}"
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    line = refused(tmp_path, "--all-tables", "--slot-name", slot, env={"PGCDC_DB": postgres.url()})
    assert database.name in line
    with pgcdc.open_capture(database.url, slot=slot, publication="p"):
        line = refused(tmp_path, "--all-tables", "--slot-name", slot, env={"PGCDC_DB": database.url})
        assert "in use" in line


def test_state_directory_not_writable(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    (tmp_path / "file").write_text("not a folder")
    slot = f"s_{database.name}"
    line = refused(
        tmp_path, "--all-tables", "--slot-name", slot, "--state-dir", "file/state", env={"PGCDC_DB": database.url}
    )
    assert "not writable" in line
    assert slots(database) == []


@pytest.mark.parametrize("version", ["", "11"])
def test_no_java_or_one_that_is_too_old(database: Database, tmp_path: Path, version: str) -> None:
    home = tmp_path / "java" / "bin"
    home.mkdir(parents=True)
    if version:
        (home / "java").write_text(f"#!/bin/sh\necho 'openjdk version \"{version}.0.1\"' >&2\n")
        (home / "java").chmod(0o755)
    env = {"PGCDC_DB": database.url, "JAVA_HOME": str(home.parent)}
    assert "Java 17" in refused(tmp_path, "--all-tables", "--slot-name", f"s_{database.name}", env=env)
    assert slots(database) == []


# --- the wire


def test_two_phase_on_a_slot_that_was_made_without_it(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute(f"SELECT pg_create_logical_replication_slot('s_{database.name}', 'pgoutput')")
    flags = ["--db", database.url, "--all-tables", "--slot-name", f"s_{database.name}", "--start-from", "slot"]
    assert "without two-phase decoding" in refused(tmp_path, *flags, "--two-phase")
    assert database.query("SELECT pubname FROM pg_publication") == []


def test_a_column_that_cannot_travel_in_binary_form(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, price money)")
    line = refused(tmp_path, "--db", database.url, "--all-tables", "--slot-name", f"s_{database.name}", "--binary")
    assert "column price of table t" in line and "--binary" in line
    assert slots(database) == []
    assert database.query("SELECT pubname FROM pg_publication") == []


def test_an_origin_that_is_not_known(tmp_path: Path, database: Database) -> None:
    assert "--origin" in refused(tmp_path, "--db", database.url, "--all-tables", "--origin", "some")
