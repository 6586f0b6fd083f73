"""What we ask of the source database, on real servers: a refusal is one line with advice and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from databases import Database
from typer.testing import CliRunner

from pgcdc.cli.source import slot_app
from pgcdc.core.errors import ConfigError, ConnectionLost, GapError, SourceError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import connect, quote_identifier, quote_literal, quote_qualified
from pgcdc.postgres.selection import Selection
from pgcdc.source.postgres.setup import publications, slots
from pgcdc.source.postgres.setup.fingerprint import Fingerprint, check_unchanged, read_fingerprint
from pgcdc.source.postgres.setup.publications import PublicationInfo
from pgcdc.source.postgres.setup.slots import (
    check_usable,
    create_slot,
    drop_slot,
    get_slot,
    list_slots,
)

Connection = psycopg.Connection[tuple[Any, ...]]
SECRET = "correct horse @ / battery"


@pytest.fixture
def conn(database: Database) -> Iterator[Connection]:
    with connect(database.url) as conn:
        yield conn


@pytest.fixture
def walsender(database: Database) -> Iterator[Connection]:
    with connect(database.url, replication=True) as conn:
        yield conn


@pytest.fixture(scope="module")
def narrow() -> Iterator[EmbeddedPostgres]:
    """PostgreSQL 16 with a password, one slot and one walsender."""
    limits = {"max_replication_slots": "1", "max_wal_senders": "1", "fsync": "off", "wal_keep_size": "0"}
    with EmbeddedPostgres.temporary(version=16, settings=limits, password=SECRET) as server:
        yield server


def scalar(conn: Connection, statement: str, params: Sequence[object] = ()) -> Any:
    row = conn.execute(statement.encode(), params or None).fetchone()
    assert row is not None
    return row[0]


def wait_until_free(conn: Connection) -> None:
    """A walsender that was closed needs a moment to go."""
    deadline = time.monotonic() + 10
    while scalar(conn, "SELECT count(*) FROM pg_stat_replication") and time.monotonic() < deadline:
        time.sleep(0.02)


def ensure(
    conn: Connection, name: str, tables: Sequence[str] | None, *, partition_root: bool = True, **more: Any
) -> tuple[PublicationInfo, ...]:
    selection = Selection(all_tables=tables is None, tables=tuple(tables or ()), partition_root=partition_root)
    return publications.ensure(conn, name, selection, **{"slot": "pgcdc", **more})


def use_existing(conn: Connection, name: str) -> PublicationInfo:
    return publications.use_existing(conn, name, slot="pgcdc")


# --- connections ---


@pytest.mark.parametrize("replication", [False, True])
def test_session_settings_win_over_role_database_and_environment(
    database: Database, monkeypatch: pytest.MonkeyPatch, replication: bool
) -> None:
    for setting in (
        "timezone = 'Asia/Tokyo'", "datestyle = 'German'", "intervalstyle = 'postgres'", "bytea_output = 'escape'",
        "extra_float_digits = 0", "client_encoding = 'LATIN1'", "statement_timeout = 5000", "lock_timeout = 5000",
        "idle_session_timeout = 5000", "transaction_timeout = 5000",
    ):  # fmt: skip
        database.execute(f"ALTER DATABASE {database.name} SET {setting}")
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    monkeypatch.setenv("PGDATESTYLE", "German")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with connect(database.url, replication=replication) as conn:
        for name, expected in {
            "TimeZone": "UTC", "DateStyle": "ISO, MDY", "IntervalStyle": "iso_8601", "extra_float_digits": "3",
            "bytea_output": "hex", "client_encoding": "UTF8", "statement_timeout": "0", "lock_timeout": "0",
            "idle_session_timeout": "0", "transaction_timeout": "0",
        }.items():  # fmt: skip
            assert scalar(conn, f"SHOW {name}") == expected, name
        assert scalar(conn, "SHOW application_name") == "pgcdc"
        assert conn.autocommit


def test_quoting_is_what_the_server_reads(conn: Connection, walsender: Connection) -> None:
    for text in ('a"b', "a'b", "a\\b", "Ünï.cödé", " ", "select"):
        assert scalar(conn, f"SELECT {quote_literal(text)}") == text
        assert conn.execute(f"SELECT 1 AS {quote_identifier(text)}".encode()).description[0].name == text  # type: ignore[index]
        conn.execute(f"CREATE SCHEMA {quote_identifier(text)}".encode())
        conn.execute(f"CREATE TABLE {quote_qualified(text, text)} ()".encode())
    create_slot(walsender, "quoted", temporary=True)
    # the replication grammar has a scanner of its own, whose literals are as in SQL
    literal = quote_literal("a'b")
    start = f"START_REPLICATION SLOT quoted LOGICAL 0/0 (proto_version {literal})"
    with pytest.raises(psycopg.Error, match="proto_version"):
        walsender.execute(start.encode())


def test_an_unknown_database_or_role_is_an_error_of_configuration(database: Database) -> None:
    with pytest.raises(SourceError, match='database "nope" does not exist') as caught:
        connect(database.server.url("nope"))
    assert not isinstance(caught.value, ConnectionLost)
    with pytest.raises(SourceError, match='role "nobody_here" does not exist'):
        connect(database.server.url(database.name, "nobody_here"))


def test_a_terminated_session_is_a_lost_connection(database: Database, conn: Connection) -> None:
    database.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
    with pytest.raises(ConnectionLost, match="cannot list the replication slots"):
        list_slots(conn)


# --- preflight ---


def test_preflight_describes_the_server(database: Database, conn: Connection) -> None:
    info = slots.check(database.url, "not_there")
    assert info.database == database.name
    assert info.version_num // 10000 == 18
    assert info.timeline == 1
    assert info.system_identifier == scalar(conn, "SELECT system_identifier::text FROM pg_control_system()")
    assert info.slot is None
    left = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'pgcdc preflight'"
    assert scalar(conn, left) == 0


def test_a_role_without_the_replication_right(database: Database) -> None:
    database.execute("DROP ROLE IF EXISTS clerk")
    database.execute("CREATE ROLE clerk LOGIN")
    url = database.server.url(database.name, "clerk")
    with pytest.raises(SourceError, match="role clerk lacks the REPLICATION right") as caught:
        slots.check(url, "s")
    assert 'ALTER ROLE "clerk" REPLICATION' in caught.value.advice
    with pytest.raises(SourceError, match=r"replication|WAL sender") as refused:
        connect(url, replication=True)
    assert not isinstance(refused.value, ConnectionLost)
    database.execute("ALTER ROLE clerk REPLICATION")
    assert slots.check(url, "s").user == "clerk"
    database.execute("DROP ROLE clerk")


def test_a_slot_of_another_plugin_or_database_is_refused(database: Database, conn: Connection) -> None:
    # the wheel has no test_decoding; the same plugin under its path is another plugin to the server, and to us
    scalar(conn, "SELECT pg_create_logical_replication_slot('foreign_slot', '$libdir/pgoutput')")
    with pytest.raises(SourceError, match=r"uses the plugin .*, not pgoutput"):
        slots.check(database.url, "foreign_slot")
    scalar(conn, "SELECT pg_create_logical_replication_slot('other_db', 'pgoutput')")
    with pytest.raises(SourceError, match=f"belongs to database {database.name}, not postgres"):
        slots.check(database.server.url(), "other_db")
    assert slots.check(database.url, "other_db").slot is not None
    scalar(conn, "SELECT pg_create_physical_replication_slot('standby')")
    try:
        with pytest.raises(SourceError, match="physical"):
            slots.check(database.url, "standby")
    finally:
        drop_slot(conn, "standby")


# --- slots ---


@pytest.mark.parametrize("temporary", [False, True])
def test_create_look_at_and_drop_a_slot(conn: Connection, walsender: Connection, temporary: bool) -> None:
    lsn = create_slot(walsender, "fresh", temporary=temporary)
    slot = get_slot(conn, "fresh")
    assert slot is not None
    assert slot in list_slots(conn)
    assert (slot.plugin, slot.slot_type, slot.temporary, slot.two_phase) == ("pgoutput", "logical", temporary, False)
    assert slot.confirmed_flush_lsn == lsn
    assert slot.restart_lsn is not None and slot.restart_lsn <= lsn
    assert slot.wal_status == "reserved"
    assert slot.active is temporary
    check_usable(slot, conn.info.dbname)
    conn.execute("SELECT pg_switch_wal()")
    later = get_slot(conn, "fresh")
    assert later is not None and later.lag_bytes is not None and later.retained_bytes is not None
    assert 0 < later.lag_bytes <= later.retained_bytes
    if temporary:
        with pytest.raises(SourceError, match=f"in use by process {walsender.info.backend_pid}"):
            drop_slot(conn, "fresh")
    else:
        drop_slot(conn, "fresh")
        with pytest.raises(SourceError, match="does not exist"):
            drop_slot(conn, "fresh")


def test_the_old_syntax_still_creates_a_slot(walsender: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "NEW_SYNTAX_SINCE", 990000)
    assert create_slot(walsender, "old_way", temporary=True) > 0


def test_a_slot_that_exists_is_not_created_again(walsender: Connection) -> None:
    create_slot(walsender, "twice")
    with pytest.raises(SourceError, match="slot twice exists already"):
        create_slot(walsender, "twice")


@pytest.mark.parametrize("name", ["", "Upper", "da-sh", "x" * 64, "ä", "a b"])
def test_names_that_a_slot_cannot_have(walsender: Connection, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a slot name"):
        create_slot(walsender, name)


def test_creating_a_slot_says_for_whom_it_waits(
    database: Database, conn: Connection, walsender: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_REPORT_EVERY_S", 0.2)
    database.execute("CREATE TABLE t (id int)")
    told: list[str] = []
    with database.connect(autocommit=False) as blocker:
        blocker.execute("INSERT INTO t VALUES (1) /* slow report */")

        def listen(text: str) -> None:
            told.append(text)
            if len(told) == 2:
                blocker.commit()

        assert create_slot(walsender, "patient", monitor=conn, say=listen) > 0
        pid = str(blocker.info.backend_pid)
    assert [pid in text.rpartition("processes")[2].replace(",", "").split() for text in told] == [True, True]


def test_a_role_without_rights_still_learns_the_pid_it_waits_for(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_REPORT_EVERY_S", 0.2)
    database.execute("DROP ROLE IF EXISTS plain")
    database.execute("CREATE ROLE plain LOGIN REPLICATION")
    database.execute("CREATE TABLE t (id int)")
    url = database.server.url(database.name, "plain")
    with database.connect(autocommit=False) as blocker, connect(url) as conn, connect(url, replication=True) as sender:
        blocker.execute("INSERT INTO t VALUES (1)")

        def listen(text: str) -> None:
            if "unknown" not in text:
                assert text.endswith(f"server processes {blocker.info.backend_pid}")
                blocker.commit()

        create_slot(sender, "patient", temporary=True, monitor=conn, say=listen)
    database.execute("DROP ROLE plain")


def test_giving_up_the_wait_leaves_no_slot(
    database: Database, conn: Connection, walsender: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_REPORT_EVERY_S", 0.2)
    database.execute("CREATE TABLE t (id int)")
    pid = walsender.info.backend_pid
    with database.connect(autocommit=False) as blocker:
        blocker.execute("INSERT INTO t VALUES (1)")

        def interrupt(_: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            create_slot(walsender, "impatient", monitor=conn, say=interrupt)
        deadline = time.monotonic() + 10
        while scalar(conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid]):
            assert time.monotonic() < deadline, "the walsender still waits"
            time.sleep(0.02)
        assert get_slot(conn, "impatient") is None


def test_a_walsender_that_is_ended_while_it_waits_is_a_lost_connection(
    database: Database, conn: Connection, walsender: Connection
) -> None:
    database.execute("CREATE TABLE t (id int)")
    with database.connect(autocommit=False) as blocker:
        blocker.execute("INSERT INTO t VALUES (1)")
        kill = "SELECT pg_terminate_backend(%s)"
        timer = threading.Timer(0.5, lambda: scalar(conn, kill, [walsender.info.backend_pid]))
        timer.start()
        with pytest.raises(ConnectionLost, match="while slot doomed was created"):
            create_slot(walsender, "doomed")
        timer.join()
    assert get_slot(conn, "doomed") is None


# --- publications ---


def test_a_missing_publication_names_the_command_that_creates_it(conn: Connection) -> None:
    with pytest.raises(SourceError, match="publication Shop does not exist") as caught:
        use_existing(conn, "Shop")
    assert 'CREATE PUBLICATION "Shop"' in caught.value.advice
    assert caught.value.exit_code == 2


def test_a_database_that_is_read_only_is_not_called_a_standby(conn: Connection) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    conn.execute("SET default_transaction_read_only = on")
    with pytest.raises(SourceError, match="this database is read-only") as caught:
        ensure(conn, "ours", ["a"])
    assert "default_transaction_read_only" in caught.value.advice


def test_a_publication_of_the_user_is_only_read(conn: Connection) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int)")
    conn.execute("CREATE PUBLICATION theirs FOR TABLE a, b WITH (publish = 'insert')")
    info = use_existing(conn, "theirs")
    assert (info.tables, info.found["publish"], info.inserts_only) == (("a", "b"), ["insert"], ("a", "b"))
    with pytest.raises(SourceError, match="is not managed by pgcdc") as caught:
        ensure(conn, "theirs", ["a"])
    assert "--publication theirs" in caught.value.advice
    assert use_existing(conn, "theirs") == info
    assert scalar(conn, "SELECT count(*) FROM pg_publication") == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [("ordres", "Did you mean orders?"), ("shop.orders", "Did you mean orders?"), ("ITEMS", 'Did you mean "Items"?'),
     ("zzz", "Check --tables")],
)  # fmt: skip
def test_a_missing_table_is_named_with_a_suggestion(conn: Connection, name: str, advice: str) -> None:
    conn.execute('CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE "Items" (id int PRIMARY KEY)')
    with pytest.raises(SourceError, match=f"table {name.lower()} does not exist") as caught:
        ensure(conn, "p", [name])
    assert advice in caught.value.advice
    assert scalar(conn, "SELECT count(*) FROM pg_publication") == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("v", "a view"), ("m", "a materialized view"), ("u", "an unlogged table"), ("s", "a sequence"),
     ("f", "a foreign table"), ("pg_catalog.pg_class", "a system table")],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused(conn: Connection, name: str, kind: str) -> None:
    conn.execute("""CREATE VIEW v AS SELECT 1; CREATE MATERIALIZED VIEW m AS SELECT 1; CREATE UNLOGGED TABLE u ();
                    CREATE SEQUENCE s; CREATE FOREIGN DATA WRAPPER w; CREATE SERVER x FOREIGN DATA WRAPPER w;
                    CREATE FOREIGN TABLE f () SERVER x""")
    with pytest.raises(SourceError, match=f"is {kind}, so its changes cannot be captured"):
        ensure(conn, "p", [name])


def test_tables_without_replica_identity_are_published_for_inserts_only(conn: Connection) -> None:
    conn.execute("""
        CREATE TABLE keyed (id int PRIMARY KEY);
        CREATE TABLE keyless (id int);
        CREATE TABLE whole (id int); ALTER TABLE whole REPLICA IDENTITY FULL;
        CREATE TABLE indexed (id int NOT NULL UNIQUE); ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_id_key;
        CREATE TABLE nothing (id int PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING;
        CREATE TABLE lazy (id int PRIMARY KEY DEFERRABLE);
        CREATE SCHEMA shop; CREATE TABLE shop."Big Orders" (id int PRIMARY KEY);
        CREATE TABLE pgcdc_heartbeat (id int PRIMARY KEY); CREATE UNLOGGED TABLE scratch (id int);
        CREATE VIEW v AS SELECT 1;
        CREATE TEMP TABLE temporary (id int)""")
    full, inserts = ensure(conn, "pgcdc", None)
    assert full.tables == ("indexed", "keyed", "whole", 'shop."Big Orders"')
    assert full.found["publish"] == ["insert", "update", "delete", "truncate"]
    assert inserts.tables == inserts.inserts_only == ("keyless", "lazy", "nothing")
    assert inserts.found["publish"] == ["insert", "truncate"]
    assert full.found["owner"] == inserts.found["owner"] == "pgcdc"
    assert not full.found["all_tables"] and full.found["via_root"]
    for table in ("keyed", "keyless", "whole", "indexed", "nothing", "lazy", 'shop."Big Orders"'):
        conn.execute(f"INSERT INTO {table} VALUES (1)".encode())
        conn.execute(f"UPDATE {table} SET id = 2".encode())  # what the application does still works
        conn.execute(f"DELETE FROM {table}".encode())


def test_a_table_that_gets_a_key_moves_and_nothing_is_altered_without_need(
    database: Database, conn: Connection
) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int)")
    _, inserts = ensure(conn, "ours", ["a", "b"])
    assert inserts.inserts_only == ("b",)
    before = scalar(conn, "SELECT array_agg(xmin::text || oid ORDER BY oid)::text FROM pg_publication_rel")
    assert ensure(conn, "ours", ["b", "public.a"])[1] == inserts
    assert scalar(conn, "SELECT array_agg(xmin::text || oid ORDER BY oid)::text FROM pg_publication_rel") == before
    conn.execute("ALTER TABLE b ADD PRIMARY KEY (id)")
    planned: list[Fingerprint] = []
    full, inserts = ensure(conn, "ours", ["a", "b"], before_commit=planned.append)
    assert planned == [read_fingerprint(conn, ["ours", "ours_inserts"])]
    assert (full.tables, inserts.tables, inserts.inserts_only) == (("a", "b"), (), ())
    conn.execute("ALTER TABLE a DROP CONSTRAINT a_pkey")
    full, inserts = ensure(conn, "ours", ["a"])
    assert (full.tables, inserts.tables) == ((), ("a",))


def test_a_publication_of_ours_belongs_to_one_slot(conn: Connection) -> None:
    """Two pipelines with other tables would take out what the other one needs."""
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    ensure(conn, "ours", ["a", "b"], slot="one")
    with pytest.raises(SourceError, match="publication ours belongs to the pipeline of slot one") as caught:
        ensure(conn, "ours", ["a"], slot="two")
    assert "--publication" in caught.value.advice and 'DROP PUBLICATION "ours"' in caught.value.advice
    with pytest.raises(SourceError, match="belongs to the pipeline of slot one"):
        publications.use_existing(conn, "ours_inserts", slot="two")
    publications.drop_ours(conn, ["ours", "ours_inserts"], slot="two")
    assert publications.use_existing(conn, "ours", slot="one").tables == ("a", "b")
    publications.drop_ours(conn, ["ours", "ours_inserts"], slot="one")
    assert scalar(conn, "SELECT count(*) FROM pg_publication") == 0


def test_both_publications_exist_before_they_are_needed(conn: Connection) -> None:
    """One created after the slot could not be used for what the slot still holds."""
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    assert [info.name for info in ensure(conn, "ours", None)] == ["ours", "ours_inserts"]
    assert scalar(conn, "SELECT count(*) FROM pg_publication") == 2


@pytest.mark.parametrize("by_root", [True, False])
def test_partitions_never_break_the_application(conn: Connection, walsender: Connection, by_root: bool) -> None:
    base = 'our "own", so to say\'s'
    conn.execute("""
        CREATE TABLE keyed (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE keyed_1 PARTITION OF keyed FOR VALUES FROM (0) TO (10);
        CREATE TABLE loose (id int) PARTITION BY RANGE (id); ALTER TABLE loose REPLICA IDENTITY FULL;
        CREATE TABLE loose_1 PARTITION OF loose FOR VALUES FROM (0) TO (10);
        CREATE TABLE loose_2 PARTITION OF loose FOR VALUES FROM (10) TO (20);
        ALTER TABLE loose_2 REPLICA IDENTITY FULL""")
    full, inserts = ensure(conn, base, None, partition_root=by_root)
    assert full.tables == (("keyed",) if by_root else ("keyed_1", "loose_2"))
    assert inserts.tables == (("loose",) if by_root else ("loose_1", "loose_2"))
    assert inserts.inserts_only == ("loose",)
    create_slot(walsender, "partitions")
    conn.execute("CREATE TABLE keyed_2 PARTITION OF keyed FOR VALUES FROM (10) TO (20)")
    conn.execute("CREATE TABLE loose_3 PARTITION OF loose FOR VALUES FROM (20) TO (30)")
    for table in ("keyed", "loose"):
        conn.execute(f"INSERT INTO {table} VALUES (1), (11)".encode())
        conn.execute(f"UPDATE {table} SET id = id + 1".encode())
    names = ",".join(quote_identifier(info.name) for info in (full, inserts))
    peek = (
        "SELECT data FROM pg_logical_slot_peek_binary_changes('partitions', NULL, NULL, 'proto_version', '1', %s, %s)"
    )
    tags = [data[:1] for (data,) in conn.execute(peek, ["publication_names", names])]
    assert tags.count(b"I") == 4
    # Two of keyed; and if partitions are tables that of loose_2: what either publication allows is sent.
    assert tags.count(b"U") == (2 if by_root else 3)
    conn.execute("INSERT INTO loose VALUES (21)")
    conn.execute("UPDATE loose SET id = 22 WHERE id = 21")
    assert use_existing(conn, base).tables == (("keyed",) if by_root else ("keyed_1", "keyed_2", "loose_2"))
    conn.execute("ALTER TABLE loose_1 REPLICA IDENTITY FULL; ALTER TABLE loose_3 REPLICA IDENTITY FULL")
    again = ensure(conn, base, None, partition_root=not by_root)
    assert again[1].inserts_only == (("loose",) if by_root else ()), "a slot goes on as it began"
    assert len(again[0].kept) == 2 and "as when the slot was created" in again[0].kept[0]
    assert not ensure(conn, base, None, partition_root=by_root)[0].kept


def test_tables_that_inherit_come_with_their_parent_and_are_judged_by_themselves(conn: Connection) -> None:
    conn.execute("CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (x int) INHERITS (parent)")
    full, inserts = ensure(conn, "ours", ["parent"])
    assert (full.tables, inserts.inserts_only) == (("parent",), ("child",))


def test_missing_rights_are_explained_with_the_sql_that_helps(database: Database, conn: Connection) -> None:
    conn.execute("DROP ROLE IF EXISTS reader")
    conn.execute("CREATE ROLE reader LOGIN REPLICATION")
    conn.execute("CREATE TABLE a (id int PRIMARY KEY)")
    with connect(database.server.url(database.name, "reader")) as theirs:
        with pytest.raises(SourceError, match="does not own a") as caught:
            ensure(theirs, "ours", ["a"])
        assert 'CREATE PUBLICATION "ours" WITH' in caught.value.advice
        assert 'ALTER PUBLICATION "ours" ADD TABLE ONLY "public"."a"' in caught.value.advice
        conn.execute("ALTER TABLE a OWNER TO reader")
        with pytest.raises(SourceError, match="permission denied for database") as caught:
            ensure(theirs, "ours", ["a"])
        assert f'GRANT CREATE ON DATABASE "{database.name}" TO "reader"' in caught.value.advice
        conn.execute(f"GRANT CREATE ON DATABASE {database.name} TO reader".encode())
        assert ensure(theirs, "ours", ["a"])[0].tables == ("a",)
    conn.execute("DROP OWNED BY reader CASCADE")
    conn.execute("DROP ROLE reader")


def test_a_publication_changed_under_us_is_a_gap(conn: Connection) -> None:
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    names = ["ours", "ours_inserts"]
    ensure(conn, "ours", ["a"])
    old = json.loads(json.dumps(read_fingerprint(conn, names)))

    def gap() -> str:
        with pytest.raises(GapError) as caught:
            check_unchanged(conn, old)
        return caught.value.message

    conn.execute("ALTER PUBLICATION ours ADD TABLE b")
    assert check_unchanged(conn, old) != old
    conn.execute("ALTER PUBLICATION ours SET (publish = 'insert, update')")
    assert "no longer publishes delete, truncate" in gap()
    with pytest.raises(SourceError, match="was changed"):  # nor is it repaired silently
        ensure(conn, "ours", ["a"])
    conn.execute("ALTER PUBLICATION ours SET (publish = 'insert, update, delete, truncate')")
    check_unchanged(conn, old)
    conn.execute("ALTER PUBLICATION ours SET (publish_via_partition_root = false)")
    assert "other table names" in gap()
    conn.execute("DROP PUBLICATION ours")
    assert "was dropped" in gap()
    ensure(conn, "ours", ["a"])
    assert "created again" in gap()


# --- the command ---


def test_the_slot_command_lists_shows_and_drops(database: Database, walsender: Connection) -> None:
    create_slot(walsender, "mine")
    run, env = CliRunner(), {"PGCDC_DB": database.url}
    listed = json.loads(run.invoke(slot_app, ["list", "--json"], env=env).stdout)
    assert "mine" in [slot["name"] for slot in listed]
    shown = run.invoke(slot_app, ["status", "mine", "--db", database.url])
    assert "wal_status\treserved" in shown.stdout
    status = json.loads(run.invoke(slot_app, ["status", "--slot-name", "mine", "--json"], env=env).stdout)
    assert status["plugin"] == "pgoutput" and "/" in status["confirmed_flush_lsn"] and status["active_pid"] is None
    refused = run.invoke(slot_app, ["drop", "--slot-name", "mine"], env=env)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    dropped = run.invoke(slot_app, ["drop", "--slot-name", "mine", "--yes"], env=env)
    assert (dropped.exit_code, dropped.stdout) == (0, "slot mine dropped\n")
    missing = run.invoke(slot_app, ["status", "mine"], env=env)
    assert missing.exit_code == 2
    assert missing.stderr == "error: slot mine does not exist. List them with: pgcdc slot list\n"


# --- a server with narrow limits; the last tests change it for good ---


def test_a_wrong_password_is_an_error_of_configuration_and_not_shown(narrow: EmbeddedPostgres) -> None:
    with pytest.raises(SourceError, match="password authentication failed") as caught:
        connect(f"postgresql://postgres:hush-hush@127.0.0.1:{narrow.port}/postgres")
    assert not isinstance(caught.value, ConnectionLost)
    assert "hush" not in repr(caught.value)
    with pytest.raises(SourceError, match="no password supplied"):
        connect(f"postgresql://postgres@127.0.0.1:{narrow.port}/postgres")
    with connect(narrow.url(), replication=True) as conn:
        assert SECRET not in str(conn)


def test_not_enough_walsenders(narrow: EmbeddedPostgres) -> None:
    with connect(narrow.url()) as conn:
        wait_until_free(conn)
        with connect(narrow.url(), replication=True):
            with pytest.raises(SourceError, match=r"all 1 walsenders .* \(max_wal_senders\)") as caught:
                slots.check(narrow.url(), "s")
            assert "ALTER SYSTEM SET max_wal_senders = 11" in caught.value.advice
            with pytest.raises(ConnectionLost, match="max_wal_senders"):
                connect(narrow.url(), replication=True)
        wait_until_free(conn)
        for _ in range(5):  # the check gives its own walsender back before it returns
            assert slots.check(narrow.url(), "s").version_num // 10000 == 16


def test_not_enough_slots(narrow: EmbeddedPostgres) -> None:
    with connect(narrow.url()) as conn:
        wait_until_free(conn)
        with connect(narrow.url(), replication=True) as walsender:
            create_slot(walsender, "only_one")
            with pytest.raises(SourceError, match="all replication slots of the server are in use") as caught:
                create_slot(walsender, "one_more")
            assert "max_replication_slots" in caught.value.advice
        wait_until_free(conn)
        with contextlib.closing(connect(narrow.url(), replication=True)) as reader:
            reader.pgconn.send_query(
                b"START_REPLICATION SLOT only_one LOGICAL 0/0 (proto_version '1', publication_names 'p')"
            )
            while not scalar(conn, "SELECT active FROM pg_replication_slots"):
                time.sleep(0.02)
            with pytest.raises(ConnectionLost, match="max_wal_senders"):  # it may be ours, of before a crash
                slots.check(narrow.url(), "only_one")
        wait_until_free(conn)
        with pytest.raises(SourceError, match=r"all 1 replication slots .* \(max_replication_slots\)"):
            slots.check(narrow.url(), "one_more")
        assert slots.check(narrow.url(), "only_one").slot is not None


def test_a_lost_slot_is_a_gap(narrow: EmbeddedPostgres) -> None:
    with connect(narrow.url()) as conn:
        if get_slot(conn, "only_one") is None:
            scalar(conn, "SELECT pg_create_logical_replication_slot('only_one', 'pgoutput')")
        conn.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
        scalar(conn, "SELECT pg_reload_conf()")
        for _ in range(4):
            conn.execute("CREATE TABLE IF NOT EXISTS t (id int)")
            conn.execute("INSERT INTO t SELECT generate_series(1, 10)")
            scalar(conn, "SELECT pg_switch_wal()")
        conn.execute("CHECKPOINT")
        slot = get_slot(conn, "only_one")
        assert slot is not None and slot.wal_status == "lost"
        with pytest.raises(GapError, match="slot only_one is lost"):
            slots.check(narrow.url(), "only_one")
        drop_slot(conn, "only_one")
        conn.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")


def test_wal_level_is_not_logical(narrow: EmbeddedPostgres) -> None:
    with connect(narrow.url()) as conn:
        conn.execute("ALTER SYSTEM SET wal_level = 'replica'")
        for slot in list_slots(conn):
            drop_slot(conn, slot.name)
    narrow.restart()
    with pytest.raises(SourceError, match="wal_level is replica, not logical") as caught:
        slots.check(narrow.url(), "s")
    assert "ALTER SYSTEM SET wal_level = logical" in caught.value.advice


def test_a_server_that_is_down_is_a_lost_connection(narrow: EmbeddedPostgres) -> None:
    narrow.stop()
    with pytest.raises(ConnectionLost, match="Connection refused"):
        connect(narrow.url())
    with pytest.raises(SourceError) as caught:
        slots.check(narrow.url(), "s")
    assert caught.value.exit_code == 2
    result = CliRunner().invoke(slot_app, ["list", "--db", narrow.url()])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot connect to 127.0.0.1:") and result.stderr.count("\n") == 1
    assert SECRET not in result.stderr
