"""The capture on a real server: what it delivers, what it confirms, and where it refuses to go on. No Spark."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from databases import Database
from listening import wait_until
from preparing import Ready, Wanted, prepare

import pgcdc
from pgcdc.capture.control import CaptureSpec, ControlClient, ensure_capture
from pgcdc.capture.server import CaptureGone
from pgcdc.core.errors import ConfigError, ConnectionLost, GapError, PgcdcError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Op
from pgcdc.core.state import Lock, StateDir
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.lsn import format_lsn
from pgcdc.spool.reader import SpoolReader, read_slice


def options(database: Database, folder: Path, **more: Any) -> Wanted:
    return Wanted(
        **{
            "db": database.url,
            "slot_name": f"s_{database.name}",
            "all_tables": True,
            "state_dir": str(folder / "state"),
            **more,
        }
    )


Starter = Callable[..., tuple[ControlClient, Ready]]


@pytest.fixture
def start(database: Database, tmp_path: Path) -> Iterator[Starter]:
    """Starts (or joins) the capture of this test's state directory; ends it afterwards."""
    clients: list[ControlClient] = []

    def run(**more: Any) -> tuple[ControlClient, Ready]:
        prepared = prepare(options(database, tmp_path, **more))
        clients.append(ensure_capture(prepared.spec, is_restart=False))
        return clients[-1], prepared

    yield run
    state = StateDir(tmp_path / "state")
    holder = Lock.holder(state.capture_lock)
    if holder:
        os.kill(holder["pid"], signal.SIGTERM)
        wait_until(lambda: Lock.holder(state.capture_lock) is None, 10, "the capture ends")
    for client in clients:
        client.close()


def rows_in(folder: Path, after: Position | None = None) -> list[tuple[int, list[bytes | None] | None]]:
    """(operation, new values) of everything in the spool."""
    reader = SpoolReader(folder / "state" / "spool")
    reader.refresh()
    found: list[tuple[int, list[bytes | None] | None]] = []
    for piece in reader.slices(after or reader.base, reader.end):
        table, _ = read_slice(piece)
        found += zip(table.column("op").to_pylist(), table.column("new").to_pylist(), strict=True)
    return found


def wait_rows(client: ControlClient, folder: Path, count: int, timeout_s: float = 20.0) -> None:
    def arrived() -> bool:
        client.wait(0.05)
        return len(rows_in(folder)) >= count

    wait_until(arrived, timeout_s, f"{count} rows in the spool")


def confirmed(database: Database, slot: str) -> int:
    rows = database.query(
        "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s", [slot]
    )
    return int(rows[0][0])


def wal_end(database: Database) -> int:
    return int(database.query("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn")[0][0])


def test_open_capture_gives_batches_that_end_at_commits_and_remembers_what_was_confirmed(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute(f"SELECT pg_create_logical_replication_slot('s_{database.name}', 'pgoutput')")
    for number in range(3):
        database.execute("INSERT INTO t VALUES (%s, 'x'), (%s, 'y')", [number, number + 100])
    with pgcdc.open_capture(database.url, slot=f"s_{database.name}", publication="p") as capture:
        first = capture.receive_batch(limit=2, timeout_s=10)
        assert first is not None and first.rows == 2 and first.end == Position.end(first.last_lsn)
        capture.send_feedback(first.last_lsn)
        second = capture.receive_batch(limit=2, timeout_s=10)
        assert second is not None and second.last_lsn > first.last_lsn
        with pytest.raises(ValueError, match="never handed out"):
            capture.send_feedback(second.last_lsn + 1_000_000)
    with pgcdc.open_capture(database.url, slot=f"s_{database.name}", publication="p") as capture:
        again = capture.receive_batch(timeout_s=10)
        assert again is not None
        assert again.data.column("new").to_pylist()[0] == [b"1", b"x"]


def test_a_huge_transaction_comes_in_parts_and_only_the_last_part_may_be_confirmed(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute(f"SELECT pg_create_logical_replication_slot('s_{database.name}', 'pgoutput')")
    database.execute("INSERT INTO t VALUES (0)")
    database.execute("INSERT INTO t SELECT generate_series(1, 2500)")
    with pgcdc.open_capture(database.url, slot=f"s_{database.name}", publication="p") as capture:
        batches: list[pgcdc.CaptureBatch] = []
        while sum(batch.rows for batch in batches) < 2501:
            batch = capture.receive_batch(limit=1000, timeout_s=10)
            assert batch is not None
            batches.append(batch)
        huge = [batch for batch in batches if batch.end.commit == batches[-1].end.commit]
        assert [batch.end.is_end for batch in huge] == [False] * (len(huge) - 1) + [True]
        assert len(huge) > 1
        assert {batch.last_lsn for batch in huge[:-1]} == {batches[0].last_lsn}
        ids = [int(row[0]) for batch in batches for row in batch.data.column("new").to_pylist()]
        assert ids == list(range(2501))


def test_every_operation_and_origin_and_message_arrives_with_the_servers_own_bytes(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, flag boolean, price numeric(10,2), at timestamptz, raw bytea)"
    )
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t, other")
    database.execute(f"SELECT pg_create_logical_replication_slot('s_{database.name}', 'pgoutput')")
    database.execute(f"ALTER DATABASE {database.name} SET TimeZone = 'Asia/Tokyo'")
    database.execute(f"ALTER DATABASE {database.name} SET bytea_output = 'escape'")
    with database.connect(autocommit=False) as conn:
        conn.execute("INSERT INTO t VALUES (1, true, 1.5, '2024-01-01 00:00:00+00', '\\x00ff')")
        conn.execute("SELECT pg_logical_emit_message(true, 'note', 'hello')")
        conn.execute("UPDATE t SET id = 2")
        conn.execute("DELETE FROM t")
        conn.execute("TRUNCATE t, other")
        conn.commit()
    capture = pgcdc.open_capture(database.url, slot=f"s_{database.name}", publication="p", messages=True)
    with capture:
        batch = capture.receive_batch(timeout_s=10)
        assert batch is not None
        rows = batch.data.to_pylist()
    assert [row["op"] for row in rows] == [Op.INSERT, Op.MESSAGE, Op.UPDATE, Op.DELETE, Op.TRUNCATE, Op.TRUNCATE]
    assert [(row["ordinal"], row["sub"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert rows[0]["new"] == [b"1", b"t", b"1.50", b"2024-01-01 00:00:00+00", b"\\x00ff"]
    assert rows[1]["prefix"] == "note" and rows[1]["new"] == [b"hello"]
    assert rows[2]["old"] == [b"1", None, None, None, None]


def test_the_capture_process_fills_the_spool_and_confirms_only_what_is_acked(
    database: Database, tmp_path: Path, start: Starter
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    client, prepared = start()
    initial, _ = client.join("one")
    client.join("two")
    database.execute("INSERT INTO t SELECT generate_series(1, 10)")
    wait_rows(client, tmp_path, 10)
    reader = SpoolReader(tmp_path / "state" / "spool")
    reader.refresh()
    client.ack("one", reader.end)
    assert client.confirm() == initial.commit  # the other consumer has acked nothing
    assert confirmed(database, prepared.identity.stream) == initial.commit
    client.ack("two", reader.end)
    lsn = client.confirm()
    assert lsn == reader.end.commit
    wait_until(lambda: confirmed(database, prepared.identity.stream) == lsn, 10, "the server has it")
    assert not list((tmp_path / "state" / "spool").glob("seg-*.arrow")), "delivered segments are released"


def test_idle_and_unpublished_traffic_moves_the_confirmed_position(
    database: Database, tmp_path: Path, start: Starter
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    client, prepared = start(all_tables=False, tables=("t",))
    client.join("one")
    database.execute("CREATE TABLE unpublished (v text)")
    database.execute("INSERT INTO unpublished SELECT repeat('x', 1000) FROM generate_series(1, 500)")
    target = wal_end(database)
    reader = SpoolReader(tmp_path / "state" / "spool")

    def follows() -> bool:
        client.wait(0.1)
        reader.refresh()
        client.ack("one", reader.end)
        return confirmed(database, prepared.identity.stream) >= target

    wait_until(follows, 60, "confirmed_flush_lsn follows the WAL end")
    assert rows_in(tmp_path) == []


def test_at_the_spool_limit_reading_stops_and_status_updates_go_on(
    database: Database, tmp_path: Path, start: Starter
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute(f"ALTER DATABASE {database.name} SET wal_sender_timeout = '2s'")
    client, prepared = start(spool_limit=1 << 20)
    client.join("one")
    for number in range(30):
        database.execute(
            "INSERT INTO t SELECT g, repeat(md5(g::text), 10) FROM generate_series(%s::int, %s::int) g",
            [number * 1000, number * 1000 + 999],
        )
        client.wait(0.01)
    wait_until(lambda: client.status()["phase"].startswith("paused"), 20, "the capture pauses")
    held = client.status()["spool_bytes"]
    assert held < 8 << 20
    pid = walsender_pid(database, prepared.identity.stream)
    time.sleep(3)  # longer than wal_sender_timeout: the pause must not look like death to the server
    assert walsender_pid(database, prepared.identity.stream) == pid
    reader = SpoolReader(tmp_path / "state" / "spool")

    def drained() -> bool:
        reader.refresh()
        client.ack("one", reader.end)
        client.confirm()
        client.wait(0.05)
        return rows_seen(reader) == 30_000

    wait_until(drained, 30, "everything arrives once there is room")


def rows_seen(reader: SpoolReader) -> int:
    return sum(record.rows for record in reader.records)


def walsender_pid(database: Database, slot: str) -> int | None:
    rows = database.query("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", [slot])
    pid: int | None = rows[0][0]
    return pid


def test_a_killed_capture_goes_on_where_its_spool_ends(database: Database, tmp_path: Path, start: Starter) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    client, prepared = start()
    client.join("one")
    database.execute("INSERT INTO t SELECT generate_series(1, 100)")
    wait_rows(client, tmp_path, 100)
    os.kill(client.status()["pid"], signal.SIGKILL)
    database.execute("INSERT INTO t SELECT generate_series(101, 200)")
    with pytest.raises(CaptureGone):
        while True:
            client.wait(0.1)
    second = ensure_capture(prepared.spec, is_restart=True)
    wait_rows(second, tmp_path, 200)
    assert [int(new[0]) for _, new in rows_in(tmp_path) if new and new[0]] == list(range(1, 201))
    second.close()


def test_a_killed_walsender_is_reconnected(database: Database, tmp_path: Path, start: Starter) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    client, prepared = start()
    client.join("one")
    database.execute("INSERT INTO t VALUES (1)")
    wait_rows(client, tmp_path, 1)
    database.execute("SELECT pg_terminate_backend(%s)", [walsender_pid(database, prepared.identity.stream)])
    database.execute("INSERT INTO t VALUES (2)")
    wait_rows(client, tmp_path, 2)
    assert [new for _, new in rows_in(tmp_path)] == [[b"1"], [b"2"]]


def test_fail_fast_ends_the_capture_when_the_connection_is_lost(
    database: Database, tmp_path: Path, start: Starter
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    client, prepared = start(fail_fast=True)
    database.execute("SELECT pg_terminate_backend(%s)", [walsender_pid(database, prepared.identity.stream)])
    with pytest.raises(ConnectionLost):
        while True:
            client.wait(0.2)


def test_two_captures_of_one_state_directory_are_one_and_another_reader_is_refused(
    database: Database, tmp_path: Path, start: Starter
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    first, prepared = start()
    second = ensure_capture(prepared.spec, is_restart=False)
    assert second.status()["pid"] == first.status()["pid"]
    second.close()
    with pytest.raises(SourceError, match="in use"):
        prepare(options(database, tmp_path / "elsewhere", start_from="slot"))
    assert not (tmp_path / "elsewhere").exists(), "nothing is left behind"
    with pytest.raises(SourceError, match="in use"):
        pgcdc.open_capture(database.url, slot=prepared.identity.stream, publication=prepared.identity.stream)


class Test_a_gap_is_never_crossed:
    @pytest.fixture
    def ran(self, database: Database, tmp_path: Path) -> CaptureSpec:
        """A pipeline that ran before: slot, publications and state directory exist."""
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        return prepare(options(database, tmp_path)).spec

    def again(self, database: Database, tmp_path: Path, **more: Any) -> Ready:
        return prepare(options(database, tmp_path, **more))

    def test_slot_dropped(self, database: Database, tmp_path: Path, ran: CaptureSpec) -> None:
        database.execute("SELECT pg_drop_replication_slot(%s)", [ran.source["slot_name"]])
        with pytest.raises(GapError, match="does not exist: somebody dropped it"):
            self.again(database, tmp_path)

    def test_slot_recreated(self, database: Database, tmp_path: Path, ran: CaptureSpec) -> None:
        database.execute("SELECT pg_drop_replication_slot(%s)", [ran.source["slot_name"]])
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [ran.source["slot_name"]])
        with pytest.raises(GapError, match="recreated, or somebody else advanced"):
            self.again(database, tmp_path)

    def test_slot_advanced_by_somebody_else(self, database: Database, tmp_path: Path, ran: CaptureSpec) -> None:
        database.execute("INSERT INTO t VALUES (1)")
        database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [ran.source["slot_name"]])
        with pytest.raises(GapError, match="recreated, or somebody else advanced"):
            self.again(database, tmp_path)

    def test_publication_recreated(self, database: Database, tmp_path: Path, ran: CaptureSpec) -> None:
        database.execute(f"DROP PUBLICATION {ran.source['slot_name']}")
        with pytest.raises(GapError):
            self.again(database, tmp_path)

    def test_state_directory_of_another_slot(self, database: Database, tmp_path: Path, ran: CaptureSpec) -> None:
        with pytest.raises(GapError, match="belongs to slot"):
            self.again(database, tmp_path, slot_name=f"{ran.source['slot_name']}_b")
        assert (
            database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [f"{ran.source['slot_name']}_b"])
            == []
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"system": "1"}, "another server"),
            ({"details": {"timeline": 9}}, "timeline"),
            ({"database": "elsewhere"}, "database"),
        ],
    )
    def test_another_server(
        self, database: Database, tmp_path: Path, ran: CaptureSpec, change: dict[str, Any], message: str
    ) -> None:
        from dataclasses import replace

        state = StateDir(tmp_path / "state")
        identity = state.identity()
        assert identity is not None
        details = {**identity.details, **change.get("details", {})}
        state.save_identity(replace(identity, **{**change, "details": details}))
        with pytest.raises(GapError, match=message):
            self.again(database, tmp_path)

    def test_state_directory_lost(self, database: Database, tmp_path: Path, ran: CaptureSpec) -> None:
        with pytest.raises(GapError, match="--start-from slot"):
            self.again(database, tmp_path / "new")
        assert self.again(database, tmp_path / "new", start_from="slot").identity.created > 0

    def test_slot_dropped_while_running(
        self, database: Database, tmp_path: Path, ran: CaptureSpec, start: Starter
    ) -> None:
        client, prepared = start()
        database.execute("SELECT pg_terminate_backend(%s)", [walsender_pid(database, prepared.identity.stream)])
        wait_until(lambda: drop_slot(database, prepared.identity.stream), 10, "the slot is dropped")
        with pytest.raises(PgcdcError) as caught:
            while True:
                client.wait(0.2)
        assert isinstance(caught.value, GapError), caught.value

    def test_publication_dropped_while_running(
        self, database: Database, tmp_path: Path, ran: CaptureSpec, start: Starter
    ) -> None:
        client, _ = start()
        client.join("one")
        database.execute(f"DROP PUBLICATION {ran.source['slot_name']}")
        database.execute("INSERT INTO t VALUES (7)")
        with pytest.raises(GapError):
            while True:
                client.wait(0.2)


def drop_slot(database: Database, slot: str) -> bool:
    """Between our capture's connections: it reconnects within 100 ms."""
    try:
        database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    except psycopg.errors.ObjectInUse:
        database.execute("SELECT pg_terminate_backend(%s)", [walsender_pid(database, slot)])
        return False
    return True


def test_a_publication_younger_than_the_slot_stops_the_capture(database: Database) -> None:
    """PostgreSQL 18 only warns and leaves rows out; older servers end the stream."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute(f"SELECT pg_create_logical_replication_slot('s_{database.name}', 'pgoutput')")
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("CREATE PUBLICATION late FOR TABLE t")
    database.execute("INSERT INTO t VALUES (2)")
    before = confirmed(database, f"s_{database.name}")
    with (
        closing(pgcdc.open_capture(database.url, slot=f"s_{database.name}", publication="late")) as capture,
        pytest.raises(GapError),
    ):
        for _ in range(50):
            batch = capture.receive_batch(timeout_s=0.2)
            if batch is not None:
                capture.send_feedback(batch.last_lsn)
    assert confirmed(database, f"s_{database.name}") == before, format_lsn(before)


def test_a_restart_and_a_fast_shutdown_of_the_server_are_not_blocked_and_lose_nothing(tmp_path: Path) -> None:
    with EmbeddedPostgres.temporary() as server:
        database = Database("postgres", server.url(), server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        prepared = prepare(options(database, tmp_path))
        client = ensure_capture(prepared.spec, is_restart=False)
        try:
            client.join("one")
            database.execute("INSERT INTO t SELECT generate_series(1, 1000)")
            wait_rows(client, tmp_path, 1000)  # received and not confirmed: this is what blocks others
            begin = time.monotonic()
            server.stop(timeout_s=20)
            assert time.monotonic() - begin < 15
            server.restart()
            database.execute("INSERT INTO t SELECT generate_series(1001, 2000)")
            wait_rows(client, tmp_path, 2000, timeout_s=60)
            assert [int(new[0]) for _, new in rows_in(tmp_path) if new and new[0]] == list(range(1, 2001))
        finally:
            pid = client.status()["pid"]
            client.stop()
            wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 10, "the end")
            client.close()


def test_a_refused_start_does_not_touch_the_publication_of_a_running_pipeline(
    database: Database, tmp_path: Path, start: Starter
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    _, prepared = start(all_tables=False, tables=("a", "b"))
    with pytest.raises(PgcdcError):
        prepare(options(database, tmp_path / "elsewhere", all_tables=False, tables=("a",)))
    tables = database.query(
        "SELECT tablename FROM pg_publication_tables WHERE pubname = %s", [prepared.identity.stream]
    )
    assert sorted(tables) == [("a",), ("b",)]


def test_a_table_that_is_left_out_on_purpose_is_said(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    prepare(options(database, tmp_path, all_tables=False, tables=("a", "b")))
    assert prepare(options(database, tmp_path, all_tables=False, tables=("a",))).left_out == ("b",)


def test_a_second_reader_of_one_consumer_is_refused(database: Database, tmp_path: Path, start: Starter) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    first, prepared = start()
    second = ensure_capture(prepared.spec, is_restart=False)
    first.join("one", exclusive=True)
    second.join("one")  # to look at it is fine
    with pytest.raises(ConfigError, match="another query already reads"):
        second.join("one", exclusive=True)
    first.close()
    wait_until(lambda: can_join(second), 10, "the name is free again")
    second.close()


def can_join(client: ControlClient) -> bool:
    try:
        client.join("one", exclusive=True)
    except ConfigError:
        return False
    return True


# --- messages, memory, reconnects


def test_a_confirmed_message_does_not_take_the_transaction_around_it_along(database: Database) -> None:
    """Its record ends where the commit's begins: a confirmation one byte further would make the server skip the commit."""
    slot = f"s_{database.name}"
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    database.execute(
        "INSERT INTO t SELECT generate_series(1, 20000); SELECT pg_logical_emit_message(false, 'alone', 'x')"
    )

    def slot_is(condition: str) -> bool:
        return bool(database.query(f"SELECT FROM pg_replication_slots WHERE slot_name = '{slot}' AND {condition}"))

    def read(operation: Op, count: int) -> None:
        """Read until this many of them have come, and confirm that."""
        found: list[int] = []
        with pgcdc.open_capture(database.url, slot=slot, publication="p", messages=True) as capture:
            while found.count(operation) < count:
                # In small batches: else a slow reader gets the message and the transaction in one.
                batch = capture.receive_batch(limit=100 if operation is Op.MESSAGE else 65_536, timeout_s=10)
                assert batch is not None
                found += batch.data.column("op").to_pylist()
                capture.send_feedback(batch.last_lsn)
            confirmed = f"confirmed_flush_lsn = '{format_lsn(capture.confirmed_lsn)}'"
            wait_until(lambda: slot_is(confirmed), 10, "the server knows")
        assert set(found) == {operation}
        wait_until(lambda: slot_is("NOT active"), 10, "the slot is free")

    read(Op.MESSAGE, 1)
    read(Op.INSERT, 20000)


def test_large_rows_are_handed_out_before_more_is_read(database: Database) -> None:
    slot = f"s_{database.name}"
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION p FOR TABLE t")
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    for number in range(60):
        database.execute("INSERT INTO t VALUES (%s, repeat('x', 1000000))", [number])
    most, count = 0, 0
    with pgcdc.open_capture(database.url, slot=slot, publication="p") as capture:
        while count < 60:
            batch = capture.receive_batch(timeout_s=10)
            assert batch is not None
            count += batch.rows
            most = max(most, len(capture._assembler._outbox._ready))
    assert most <= 4, "of about 4 MB each"


def test_a_batch_that_comes_out_at_a_lost_connection_can_be_confirmed(database: Database) -> None:
    slot = f"s_{database.name}"
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    with pgcdc.open_capture(database.url, slot=slot, publication="p") as capture:
        database.execute("INSERT INTO t VALUES (1)")
        wait_until(
            lambda: capture.poll(drain=False) is None and capture.last_lsn > 0 and not capture._assembler.is_drained,
            10,
            "the row",
        )
        database.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", [slot]
        )
        batch = None
        deadline = time.monotonic() + 20
        while batch is None and time.monotonic() < deadline:
            batch = capture.receive_batch(timeout_s=0)
        assert batch is not None and batch.rows == 1
        capture.send_feedback(batch.last_lsn)
