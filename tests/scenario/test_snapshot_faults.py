"""What a review of snapshots found, so that it stays away: rows hidden, moved, renamed, counted twice, not waited for."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from databases import Database
from initials import Initial, fill
from listening import wait_until
from queries import Query
from snapshots import Backfill, long_text

from pgcdc.capture.control import forget_consumer
from pgcdc.core.errors import GapError, SourceError


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_SNAPSHOT_CHUNK_BYTES", "65536")


def test_rows_that_a_policy_hides_are_an_error_and_never_deleted(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "x")
    role = f"r_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'x'")
    try:
        database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 10)")
        database.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (id <= 3)")
        database.execute(f"GRANT SELECT ON t TO {role}; CREATE PUBLICATION mine FOR TABLE t")
        url = urlsplit(database.url)
        mine = url._replace(netloc=f"{role}@{url.netloc.rpartition('@')[2]}").geturl()
        query = Backfill(database, tmp_path, url=mine, publication="mine", all_tables="false")
        try:
            query.load()
            with pytest.raises(SourceError, match="BYPASSRLS"):
                query.add("t")
        finally:
            query.end()
    finally:
        database.execute(f"DROP PUBLICATION IF EXISTS mine; DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_row_that_moved_before_the_rest_was_asked_for_keeps_its_long_value(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, long text)")
    with database.connect() as conn, conn.cursor() as cursor:
        cursor.execute("ALTER TABLE t ALTER long SET STORAGE EXTERNAL")
        with cursor.copy("COPY t FROM STDIN") as copy:
            for number in range(600):
                copy.write_row([number, "v", long_text(number)])
    database.execute("ANALYZE t")
    query = Initial(database, tmp_path, all_tables="true")
    try:
        query.load()
        query.step_until(20)
        query.kill_capture()  # nothing is published while we choose a row
        have = query.staged()
        unread = [one for name, one in query.chunks().items() if name not in have]
        read = [one for name, one in query.chunks().items() if name in have]
        assert unread and read, "the snapshot must be in the middle of the table"
        goal = int(read[0]["high"][0]) - 1 if read[0]["high"] else int(read[0]["low"][0])
        database.execute(f"DELETE FROM t WHERE id = {goal}")
        database.execute(f"UPDATE t SET id = {goal} WHERE id = {int(unread[0]['low'][0])}")
        query.lose_snapshot()
        query.run()
        query.check_equal({"public.t": ["id"]}, strict=False)
    finally:
        query.end()


@pytest.mark.parametrize("mode", ["initial_only", "initial"])
def test_a_run_once_waits_for_the_rest_of_a_lost_snapshot(database: Database, tmp_path: Path, mode: str) -> None:
    fill(database, "t", 12_000)
    query = Initial(database, tmp_path, all_tables="true", snapshot_mode=mode)
    try:
        query.load()
        query.step_until(20)
        query.lose_snapshot()
        database.execute("ALTER TABLE t RENAME TO t_now")  # requests know their table, whatever it is called
        query.run()
        rows = {event["payload"]["row"]["id"] for event in query.events if event["operation"] == "SNAPSHOT"}
        assert len(rows) == 12_000
        assert {one["status"] for one in query.capture_status()["snapshots"]} == {"done"}
    finally:
        query.end()


def test_a_z_set_does_not_count_rows_twice_on_an_idle_database(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("INSERT INTO t SELECT generate_series(1, 10)")
    query = Query(database, tmp_path, table="t", changelog="zset", snapshot_mode="initial")
    try:
        rows = query.load().run()
        assert sorted(row["id"] for row in rows if row["_weight"] == 1) == list(range(1, 11))
        query.reader._open().request({"do": "snapshot", "action": "add", "table": "t"})
        with pytest.raises(GapError, match="was read again"):
            query.run()
    finally:
        query.end()


def test_a_consumer_that_comes_when_the_last_is_forgotten_begins_where_rows_are_kept(
    database: Database, tmp_path: Path
) -> None:
    fill(database, "t", 24_000)
    query = Initial(database, tmp_path, all_tables="true")
    query.load()
    query.step_until(40)
    for _ in range(3):
        query.step()

    line = (query.state.snapshot / "releases.jsonl").read_text().partition(" ")[2].partition("\n")[0]
    first = json.loads(line)["staged"]["file"]

    def is_released() -> bool:
        acked = query.capture_status()["consumers"]
        return bool(acked) and not (query.state.snapshot / first).exists()

    wait_until(is_released, 20, "the first rows are let go")
    query.end()
    forget_consumer(query.state, "c1")
    other = Initial(database, tmp_path, all_tables="true", consumer="c2")
    try:
        other.load()
        other.run()
        rows = {event["payload"]["row"]["id"] for event in other.events if event["operation"] == "SNAPSHOT"}
        assert 0 < len(rows) < 24_000
    finally:
        other.end()
