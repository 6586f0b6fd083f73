"""Streamed transactions on real servers: positions and bytes are those of the same transactions sent whole."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from streams import SETTINGS, Change, Stream, changes_of, drain, new_stream, record

import pgcdc
from pgcdc.core.errors import ConfigError, PgcdcError, SourceError
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.source.postgres.options import WireOptions
from pgcdc.spool.segment import CaptureBatch


@pytest.fixture(scope="module", params=[18, 16, 15])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    try:
        find_binaries(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres.temporary(version=request.param, settings=SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def newest() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres.temporary(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def stream(server: EmbeddedPostgres) -> Iterator[Stream]:
    with new_stream(server) as stream:
        yield stream


@pytest.fixture
def stream18(newest: EmbeddedPostgres) -> Iterator[Stream]:
    with new_stream(newest) as stream:
        yield stream


def rows(count: int, first: int = 1, table: str = "t", columns: str = "id, v", more: str = "") -> str:
    """About 150 bytes a row: a thousand of them are streamed."""
    last = first + count - 1
    return f"INSERT INTO {table} ({columns}) SELECT g, repeat('x', 100){more} FROM generate_series({first}, {last}) g"


def prepare(stream: Stream, *more: str, publication: str = "FOR TABLE t") -> str:
    stream.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", *more, f"CREATE PUBLICATION p {publication}")
    return stream.slot()


def compare(stream: Stream, slot: str, *, streams: bool = True) -> list[Change]:
    """What both ways of sending give; it must be the same."""
    copy, third = stream.copy(slot), stream.copy(slot)
    whole = stream.read(slot, streaming=False)
    streamed = stream.read(copy)
    assert not whole.tags["S"]
    assert bool(streamed.tags["S"]) == streams
    assert streamed.changes == whole.changes
    small = stream.read(third, limit=97)  # in other cuts
    assert small.changes == streamed.changes
    return streamed.changes


def ids(changes: list[Change]) -> list[int]:
    return [int(one.row["id"] or 0) for one in changes if one.op != "M"]


# Every row is a subtransaction of its own; the outer block is rolled back with all of its inner ones.
EXCEPTIONS = """
DO $$ BEGIN
  FOR i IN 1..1500 LOOP
    BEGIN
      INSERT INTO t VALUES (i, repeat('x', 100));
      IF i % 3 = 0 THEN RAISE 'no'; END IF;
    EXCEPTION WHEN raise_exception THEN NULL; END;
  END LOOP;
  BEGIN
    FOR i IN 5000..6500 LOOP
      BEGIN INSERT INTO t VALUES (i, repeat('x', 100)); EXCEPTION WHEN raise_exception THEN NULL; END;
    END LOOP;
    RAISE 'all of them';
  EXCEPTION WHEN raise_exception THEN NULL; END;
  INSERT INTO t VALUES (9999, 'last');
END $$
"""

SAVEPOINTS: dict[str, list[str]] = {
    "exception_blocks": [EXCEPTIONS],
    "rolled_back": [rows(1000), "SAVEPOINT a", rows(1000, 2001), "ROLLBACK TO a", rows(1000, 3001)],
    "released": [rows(1000), "SAVEPOINT a", rows(1000, 2001), "RELEASE a", rows(1000, 3001)],
    "inner_released_outer_rolled_back": [
        rows(500), "SAVEPOINT a", rows(800, 2001), "SAVEPOINT b", rows(800, 3001), "RELEASE b", rows(800, 4001),
        "ROLLBACK TO a", rows(500, 5001),
    ],
    "inner_rolled_back_outer_released": [
        rows(500), "SAVEPOINT a", rows(800, 2001), "SAVEPOINT b", rows(800, 3001), "ROLLBACK TO b", rows(800, 4001),
        "RELEASE a", rows(500, 5001),
    ],
    "four_deep": [
        rows(500), "SAVEPOINT a", rows(500, 2001), "SAVEPOINT b", rows(500, 3001), "SAVEPOINT c", rows(500, 4001),
        "SAVEPOINT d", rows(500, 5001), "ROLLBACK TO c", rows(500, 6001), "ROLLBACK TO b", rows(500, 7001), "RELEASE a",
        rows(100, 8001),
    ],
    "the_same_again": [
        "SAVEPOINT a", rows(900), "ROLLBACK TO a", rows(900), "ROLLBACK TO a", rows(900), "ROLLBACK TO a", rows(900),
    ],
    "everything_rolled_back": ["SAVEPOINT a", rows(1500), "ROLLBACK TO a"],
    "messages_between": [
        "SELECT pg_logical_emit_message(true, 'p', 'first')", rows(900), "SELECT pg_logical_emit_message(true, 'p', 'a')",
        "SAVEPOINT a", rows(900, 2001), "SELECT pg_logical_emit_message(true, 'p', 'gone')", "ROLLBACK TO a",
        "SELECT pg_logical_emit_message(true, 'p', 'b')", "SELECT pg_logical_emit_message(true, 'p', 'c')",
        rows(900, 3001), "SELECT pg_logical_emit_message(true, 'p', 'last')",
    ],
    "ddl": [
        rows(900), "ALTER TABLE t ADD n int DEFAULT 5", rows(900, 2001), "SAVEPOINT a", "ALTER TABLE t ADD gone text",
        rows(900, 3001), "ROLLBACK TO a", rows(900, 4001), "ALTER TABLE t DROP n", rows(900, 5001),
    ],
    "ddl_in_a_savepoint": [
        "SAVEPOINT a", "ALTER TABLE t ADD n int DEFAULT 5", rows(900), "ROLLBACK TO a", rows(900),
        "ALTER TABLE t RENAME v TO w", rows(900, 2001, columns="id, w"),
    ],
    "truncate_and_again": [
        rows(900), "TRUNCATE t", rows(900), "SAVEPOINT a", "TRUNCATE t", rows(900, 2001), "ROLLBACK TO a", rows(900, 3001),
    ],
    "updates_and_deletes": [
        rows(900), "UPDATE t SET v = v || 'y' WHERE id % 2 = 0", "UPDATE t SET id = -id WHERE id % 3 = 0",
        "SAVEPOINT a", "DELETE FROM t WHERE id > 0", "ROLLBACK TO a", "DELETE FROM t WHERE id < 0",
    ],
}  # fmt: skip


@pytest.mark.parametrize("statements", SAVEPOINTS.values(), ids=SAVEPOINTS.keys())
def test_positions_and_bytes_are_the_same_whether_streamed_or_not(stream: Stream, statements: list[str]) -> None:
    slot = prepare(stream)
    stream.execute("INSERT INTO t VALUES (-10, 'before')", "BEGIN", *statements, "COMMIT")
    stream.execute("DELETE FROM t WHERE id = -10")
    found = compare(stream, slot)
    numbers = [one.ordinal for one in found if one.lsn == found[1].lsn and one.op != "M"]
    assert numbers == list(range(1, len(numbers) + 1))


def test_three_sessions_that_are_streamed_at_the_same_time_are_kept_apart(stream: Stream) -> None:
    slot = prepare(stream, "CREATE TABLE u (id int PRIMARY KEY, v text)", publication="FOR TABLE t, u")
    sessions = [stream.connect(autocommit=False) for _ in range(3)]
    for turn in range(6):
        for number, session in enumerate(sessions):
            first = 100_000 * (number + 1) + 1000 * turn
            if turn % 2:
                session.execute("SAVEPOINT a")
            session.execute(rows(700, first, table="tu"[turn % 2]).encode())
            if turn % 2 and number < 2:
                session.execute("ROLLBACK TO a")
            stream.execute(f"INSERT INTO t VALUES ({turn * 10 + number}, 'between')")
    sessions[1].commit()
    sessions[2].rollback()
    sessions[0].commit()
    stream.execute("ALTER TABLE u ADD n int DEFAULT 3", rows(10, 1, table="u"))
    for session in sessions:
        session.close()
    found = compare(stream, slot)
    by_session = [[number for number in ids(found) if number // 100_000 == one] for one in (1, 2, 3)]
    assert [len(numbers) for numbers in by_session] == [2100, 2100, 0]
    assert len({one.lsn for one in found}) == 6 * 3 + 2 + 1


def test_every_change_streamed_by_itself_gives_the_same(stream18: Stream) -> None:
    slot = prepare(stream18)
    stream18.execute(f"ALTER DATABASE {stream18.name} SET debug_logical_replication_streaming = 'immediate'")
    stream18.execute("BEGIN", rows(20), "SAVEPOINT a", rows(20, 101), "ROLLBACK TO a", rows(20, 201), "COMMIT")
    assert len(compare(stream18, slot)) == 40


def test_a_stream_that_ends_with_a_rollback_leaves_nothing(stream: Stream, tmp_path: Path) -> None:
    slot = prepare(stream)
    messages: list[tuple[int, bytes]] = []
    with stream.connect(autocommit=False) as session, stream.open(slot, spill_dir=tmp_path) as capture:
        record(capture, messages)
        session.execute(rows(2000).encode())
        stream.execute("INSERT INTO t VALUES (-1, 'between')")
        assert ids(drain(capture, stream.wal_end())) == [-1]
        session.rollback()
        stream.execute("INSERT INTO t VALUES (1, 'after')")
        assert ids(drain(capture, stream.wal_end())) == [1]
    assert {b"S", b"A"} < {message[:1] for _, message in messages}
    assert not list(tmp_path.iterdir())


def test_truncates_with_cascades_are_one_event_each_in_the_servers_order(stream: Stream) -> None:
    more = (
        "CREATE TABLE child (id int PRIMARY KEY, t int REFERENCES t, v text)",
        "CREATE TABLE grandchild (id int PRIMARY KEY, c int REFERENCES child)",
    )
    slot = prepare(stream, *more, publication="FOR TABLE t, child, grandchild")
    stream.execute("BEGIN", rows(900), "TRUNCATE t CASCADE", rows(900), "COMMIT", "TRUNCATE t RESTART IDENTITY CASCADE")
    found = [one for one in compare(stream, slot) if one.op == "T"]
    assert [one.table for one in found] == ["t", "child", "grandchild"] * 2
    assert [one.ordinal for one in found] == [901, 902, 903, 1, 2, 3]


@pytest.mark.parametrize("via_root", [True, False])
def test_partitions_come_as_root_or_as_leaf_also_when_attached_and_detached(stream: Stream, via_root: bool) -> None:
    stream.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10000)",
        "CREATE TABLE t2 (note int, id int PRIMARY KEY, v text)",
        "ALTER TABLE t2 DROP note",
        f"CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root = {via_root})",
    )
    slot = stream.slot()
    stream.execute(
        "BEGIN", rows(900), "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10000) TO (20000)", rows(900, 10_001),
        "UPDATE t SET id = id + 15000 WHERE id <= 10", "COMMIT",
        "ALTER TABLE t DETACH PARTITION t1", "INSERT INTO t1 VALUES (5000, 'of nobody')", rows(10, 12_000),
        "TRUNCATE t",
    )  # fmt: skip
    found = compare(stream, slot)
    assert {one.table for one in found} == ({"t"} if via_root else {"t1", "t2"})
    folded = fold(found)
    assert folded == {} if via_root else all(table == "t1" for table, _ in folded)
    assert all(one.columns == ("id", "v") for one in found)


IDENTITIES = {
    "FULL": ("O", ["id", "v", "n"]),
    "DEFAULT": ("K", ["id"]),
    "USING INDEX other": ("K", ["n"]),
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_replica_identities_give_the_old_values_that_they_have(stream: Stream, identity: str) -> None:
    slot = prepare(
        stream, "ALTER TABLE t ADD n int NOT NULL DEFAULT 0", "CREATE UNIQUE INDEX other ON t (n)",
        f"ALTER TABLE t REPLICA IDENTITY {identity}",
    )  # fmt: skip
    stream.execute(
        "BEGIN", rows(900, columns="id, v, n", more=", g + 7"), "UPDATE t SET id = id + 10000, n = n + 10000",
        "DELETE FROM t", "COMMIT",
    )  # fmt: skip
    kind, known = IDENTITIES[identity]
    found = compare(stream, slot)
    for one in found[900:]:
        assert chr(one.old_kind) == kind
        old = dict(zip(one.columns, one.old or [], strict=True))
        assert [name for name, value in old.items() if value is not None] == known


def test_a_table_without_identity_gives_inserts(stream: Stream) -> None:
    slot = prepare(
        stream, "ALTER TABLE t REPLICA IDENTITY NOTHING", publication="FOR TABLE t WITH (publish = 'insert')"
    )
    stream.execute("BEGIN", rows(900), "UPDATE t SET v = 'y'", "DELETE FROM t", "COMMIT")
    assert {one.op for one in compare(stream, slot)} == {"I"}


def test_unchanged_toast_is_marked_in_a_stream_too(stream: Stream) -> None:
    slot = prepare(stream, "ALTER TABLE t ADD big text", "ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    stream.execute(
        "BEGIN", rows(100, columns="id, v, big", more=", repeat('z', 5000)"), "UPDATE t SET v = 'y'", "COMMIT"
    )
    found = compare(stream, slot)
    assert [one.unchanged for one in found] == [None] * 100 + [[2]] * 100


def test_generated_columns_are_decoded_where_they_are_published(stream18: Stream) -> None:
    stream18.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, d int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_generated_columns = stored)",
    )
    slot = stream18.slot()
    stream18.execute("BEGIN", rows(900), "COMMIT")
    found = compare(stream18, slot)
    assert all(int(one.row["d"] or 0) == 2 * int(one.row["id"] or 0) for one in found)


def test_messages_outside_of_transactions_stand_between_streams(stream: Stream) -> None:
    slot = prepare(stream)
    with stream.connect(autocommit=False) as session:
        session.execute(rows(900).encode())
        session.execute("SELECT pg_logical_emit_message(false, 'own', 'at once')")
        stream.execute("SELECT pg_logical_emit_message(false, 'other', 'at once')", "INSERT INTO t VALUES (-1, 'x')")
        session.execute(rows(900, 1001).encode())
        session.execute("SELECT pg_logical_emit_message(true, 'own', 'at the commit')")
    found = compare(stream, slot)
    assert [(one.prefix, one.ordinal, one.sub) for one in found if one.op == "M"] == [
        ("own", 0, 1), ("other", 0, 1), ("own", 1800, 1),
    ]  # fmt: skip


MESSAGE_ROLLED_BACK = [
    rows(900), "SAVEPOINT a", "SELECT pg_logical_emit_message(true, 'p', 'gone')", rows(1500, 2001), "ROLLBACK TO a",
    rows(900, 4001), "SELECT pg_logical_emit_message(true, 'p', 'kept')",
]  # fmt: skip


def test_message_that_was_rolled_back_to_a_savepoint_is_not_delivered(stream: Stream) -> None:
    """The server names the outer transaction for a message in a stream: with messages, nothing is streamed by default."""
    slot = prepare(stream)
    stream.execute("BEGIN", *MESSAGE_ROLLED_BACK, "COMMIT")
    forced = stream.read(stream.copy(slot))
    assert forced.tags["S"] and len([one for one in forced.changes if one.op == "M"]) == 2
    found = stream.read(slot, streaming=None)
    assert not found.tags["S"] and [one.new for one in found.changes if one.op == "M"] == [[b"kept"]]


def test_more_than_32767_messages_follow_one_row(stream18: Stream) -> None:
    slot = prepare(stream18)
    stream18.execute(
        "BEGIN", "INSERT INTO t VALUES (1, 'x')",
        "SELECT pg_logical_emit_message(true, 'p', g::text) FROM generate_series(1, 40000) g",
        "INSERT INTO t VALUES (2, 'x')", "COMMIT",
    )  # fmt: skip
    found = compare(stream18, slot)
    assert (found[40_000].ordinal, found[40_000].sub, found[40_001].ordinal) == (1, 40_000, 2)


# --- origins


def replicate(stream: Stream, *statements: str) -> None:
    """Statements of a session that applies what comes from elsewhere."""
    with stream.connect() as conn:
        name = f"berlin_{stream.name}"
        conn.execute("SELECT pg_replication_origin_create(%s)", [name])
        try:
            conn.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
            for statement in statements:
                conn.execute(statement.encode())
            conn.execute("SELECT pg_replication_origin_session_reset()")
        finally:
            conn.execute("SELECT pg_replication_origin_drop(%s)", [name])


def test_origin_none_leaves_out_what_came_from_elsewhere_streamed_or_not(stream: Stream) -> None:
    slot = prepare(stream)
    copy = stream.copy(slot)
    replicate(stream, "INSERT INTO t VALUES (-1, 'theirs')", "BEGIN", rows(900), "COMMIT")
    stream.execute("INSERT INTO t VALUES (-2, 'ours')", "BEGIN", rows(900, 2001), "COMMIT")
    if stream.server.version < 16:
        with pytest.raises(SourceError, match="the option origin needs PostgreSQL 16, but this server is 15"):
            stream.read(slot, origin="none")
        assert len(stream.read(slot).changes) == 1802
        return
    for name, streaming in ((slot, False), (copy, True)):
        assert ids(stream.read(name, streaming=streaming, origin="none").changes) == [-2, *range(2001, 2901)]


def test_the_origin_of_a_streamed_transaction_is_that_of_the_whole_one(stream: Stream) -> None:
    slot = prepare(stream)
    replicate(stream, "INSERT INTO t VALUES (-1, 'theirs')", "BEGIN", rows(900), "COMMIT")
    found = compare(stream, slot)
    assert {one.origin for one in found} == {f"berlin_{stream.name}"}


# --- the connection


def test_what_was_streamed_and_not_committed_comes_again_after_a_reconnect(stream: Stream, tmp_path: Path) -> None:
    slot = prepare(stream)
    with stream.connect(autocommit=False) as session, stream.open(slot, spill_dir=tmp_path) as capture:
        messages: list[tuple[int, bytes]] = []
        record(capture, messages)
        session.execute(rows(2000).encode())
        stream.execute("INSERT INTO t VALUES (-1, 'x')")
        first = drain(capture, stream.wal_end(), feedback=True)
        assert ids(first) == [-1]
        assert any(message[:1] == b"S" for _, message in messages)
        # The open transaction held nothing back: all of this is confirmed.
        target = stream.wal_end()
        drain(capture, target, feedback=True)
        assert stream.confirmed(slot) >= target or capture.confirmed_lsn >= target
        stream.execute(f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'")
        session.execute(rows(500, 3001).encode())
        session.commit()
        later = drain(capture, stream.wal_end(), feedback=True)
        assert ids(later) == [*range(1, 2001), *range(3001, 3501)]
        assert [one.ordinal for one in later] == list(range(1, 2501))


def test_a_small_limit_cuts_a_streamed_transaction_and_only_its_end_may_be_confirmed(stream18: Stream) -> None:
    slot = prepare(stream18)
    stream18.execute("INSERT INTO t VALUES (-1, 'x')")
    stream18.execute("BEGIN", rows(3000), "SAVEPOINT a", rows(900, 5001), "ROLLBACK TO a", rows(100, 6001), "COMMIT")
    with stream18.open(slot) as capture:
        batches: list[CaptureBatch] = []
        while sum(batch.rows for batch in batches) < 3101:
            batch = capture.receive_batch(limit=500, timeout_s=10)
            assert batch is not None
            batches.append(batch)
    first, *parts = [batch for batch in batches if batch.rows]
    assert len(parts) > 5
    assert [part.end.is_end for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.last_lsn for part in parts[:-1]} == {first.last_lsn}
    for part in parts[:-1]:
        last = changes_of(part)[-1]
        assert (part.end.commit, part.end.ordinal, part.end.sub) == (last.lsn, last.ordinal, last.sub)


# --- options


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("proto_version '9'", "proto_version=9"),
        ("no_such_option 'x'", "no_such_option"),
        ("streaming 'sideways'", "streaming"),
    ],
)
def test_an_option_that_the_server_refuses_is_a_source_error_and_nothing_is_lost(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, given: str, named: str
) -> None:
    slot = prepare(stream)
    stream.execute("INSERT INTO t VALUES (1, 'x')")
    with monkeypatch.context() as patch:
        options = [given, "publication_names 'p'"]
        if not given.startswith("proto"):
            options.append("proto_version '1'")
        patch.setattr("pgcdc.source.postgres.wire.stream.plugin_options", lambda *_: options)
        with pytest.raises(SourceError, match=named) as caught:
            stream.open(slot)
    assert "upgrade the server" in (caught.value.advice or "")
    assert ids(stream.read(slot).changes) == [1]


def test_options_that_a_version_does_not_have_are_refused_before_the_stream_starts() -> None:
    with pytest.raises(SourceError, match="PostgreSQL 11 is too old"):
        WireOptions().check_server(110005)
    for options, version, named in [
        (WireOptions(messages=True), 130000, "messages needs PostgreSQL 14"),
        (WireOptions(binary=True), 130000, "binary needs PostgreSQL 14"),
        (WireOptions(two_phase=True), 140000, "two_phase needs PostgreSQL 15"),
        (WireOptions(origin="none"), 150000, "origin needs PostgreSQL 16"),
    ]:
        with pytest.raises(SourceError, match=named):
            options.check_server(version)
        options.check_server(version + 10000)
    with pytest.raises(PgcdcError, match="open_capture: origin: Input should be 'any' or 'none'"):
        pgcdc.open_capture("postgresql://localhost/none", slot="s", publication="p", origin="some")


# --- random traffic


def fold(changes: list[Change]) -> dict[tuple[str, bytes], dict[str, bytes | None]]:
    """The tables after these changes, by table and id."""
    tables: dict[tuple[str, bytes], dict[str, bytes | None]] = {}
    for one in changes:
        if one.op == "T":
            tables = {key: row for key, row in tables.items() if key[0] != one.table}
        elif one.op in "IU":
            if one.old is not None:
                old = dict(zip(one.columns, one.old, strict=True))
                tables.pop((one.table, old["id"] or b""), None)
            tables[one.table, one.row["id"] or b""] = one.row
        elif one.op == "D":
            del tables[one.table, one.row["id"] or b""]
    return tables


def work(stream: Stream, seed: int, number: int, errors: list[BaseException]) -> None:
    """One session: transactions of all sizes, with savepoints, aborts and messages."""
    chance = random.Random(seed * 100 + number)
    try:
        with stream.connect(autocommit=False) as conn:
            for turn in range(12):
                depth = 0
                for step in range(chance.randint(1, 8)):
                    first = number * 1_000_000 + turn * 50_000 + step * 2000
                    what = chance.choice(
                        ["many", "few", "update", "delete", "savepoint", "rollback", "release", "message"]
                    )
                    if what == "savepoint":
                        depth += 1
                        conn.execute(f"SAVEPOINT s{depth}".encode())
                    elif what in ("rollback", "release") and depth:
                        target = chance.randint(1, depth)
                        verb = "ROLLBACK TO" if what == "rollback" else "RELEASE"
                        conn.execute(f"{verb} s{target}".encode())
                        depth = target if what == "rollback" else target - 1
                    elif what == "many":
                        conn.execute(rows(chance.randint(300, 1500), first).encode())
                    elif what == "few":
                        conn.execute(rows(3, first).encode())
                    elif what == "update":
                        conn.execute("UPDATE t SET v = v || 'u' WHERE id / 1000000 = %s AND id %% 7 = 0", [number])
                    elif what == "delete":
                        conn.execute("DELETE FROM t WHERE id / 1000000 = %s AND id %% 11 = 0", [number])
                    else:  # never within a savepoint: see the test of a message that is rolled back
                        within = not depth and bool(chance.getrandbits(1))
                        conn.execute("SELECT pg_logical_emit_message(%s, 'p', 'm')", [within])
                if chance.random() < 0.25:
                    conn.rollback()
                else:
                    conn.commit()
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_sessions_folded_are_the_table(stream: Stream, seed: int) -> None:
    slot = prepare(stream)
    errors: list[BaseException] = []
    sessions = [threading.Thread(target=work, args=(stream, seed, number, errors)) for number in range(1, 5)]
    for session in sessions:
        session.start()
    for session in sessions:
        session.join()
    assert errors == []
    found = compare(stream, slot)
    expected = {
        ("t", str(key).encode()): {"id": str(key).encode(), "v": v.encode()}
        for key, v in stream.query("SELECT * FROM t")
    }
    assert fold(found) == expected
