"""Tables that cannot be read now: what is missing of them is not forgotten, and the reason is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from databases import Database
from initials import Initial
from listening import wait_until
from snapshots import Backfill

from pgcdc.core.errors import SourceError
from pgcdc.source.postgres.snapshot.asking import check_readable
from pgcdc.source.postgres.snapshot.requests import KEPT_FINISHED, RequestQueue, SnapshotRequest


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """A role that may read what it is granted; the publication `mine` has a table t that it may read."""
    name = f"r_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN REPLICATION")
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute(f"GRANT SELECT ON t TO {name}")
    database.execute("CREATE PUBLICATION mine FOR TABLE t")
    yield name
    database.execute("DROP PUBLICATION mine")
    database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def options(database: Database, role: str) -> dict[str, Any]:
    url = database.url.replace("postgres@", f"{role}@")
    return {"url": url, "publication": "mine", "all_tables": "false", "snapshot_mode": "initial"}


def test_a_table_that_was_added_is_read_when_its_right_is_given(database: Database, tmp_path: Path, role: str) -> None:
    query = Backfill(database, tmp_path, **options(database, role))
    try:
        query.load()
        query.run()
        query.load()
        for name in ("u", "keyless"):
            database.execute(f"CREATE TABLE {name} (id int, v text)")
            database.execute(f"INSERT INTO {name} SELECT i, 'v' FROM generate_series(1, 10) i")
        database.execute("ALTER TABLE u ADD PRIMARY KEY (id)")
        database.execute(f"GRANT SELECT ON keyless TO {role}")
        database.execute("ALTER PUBLICATION mine ADD TABLE u, keyless")

        def failed() -> dict[str, str]:
            return {one["table"]: one["error"] for one in query.states().values() if one["status"] == "failed"}

        wait_until(lambda: len(failed()) == 2, 30, "both have failed")
        assert f'GRANT SELECT ON "public"."u" TO "{role}"' in failed()["u"] and "no primary key" in failed()["keyless"]
        query.kill()
        wait_until(lambda: len(failed()) == 2, 30, "both are known after a restart")
        database.execute(f"GRANT SELECT ON u TO {role}")
        query.pull_until(lambda: len(query.of("u")) == 10, 30)
        assert set(failed()) == {"keyless"} and [one["error"] for one in query.states().values()].count("") == 1
    finally:
        query.end()


def test_what_failed_and_is_missing_is_kept_and_tried_again(tmp_path: Path) -> None:
    queue = RequestQueue(tmp_path / "requests.json")
    queue.add(*(SnapshotRequest(kind, "t", kind, oid=1) for kind in ("added", "initial", "incremental", "always")))
    for name in ("added", "initial", "incremental", "always"):
        queue.fail(name, "no", for_good=name == "initial")
    assert [one.id for one in queue.entries() if not one.is_ended] == ["added"] and queue.next() is None
    for number in range(KEPT_FINISHED + 2):
        queue.add(SnapshotRequest(str(number), "t"))
        queue.end(str(number), "done")
    assert [one.id for one in queue.entries() if one.status == "failed"] == ["added", "initial"]
    again = RequestQueue(tmp_path / "requests.json")
    again.retry_all()
    state = again.next()
    assert state is not None and (state.id, state.status, state.error) == ("added", "queued", "no")
    delays = []
    for _ in range(12):
        state = again.fail("added", "no", for_good=False)
        delays.append(round(state.retry_at - state.finished))
    assert delays[:3] == [1, 2, 4] and delays[-1] == 300
    assert again.stop("added").is_ended and again.next() is None


def test_a_right_that_is_taken_away_meanwhile_is_said_and_costs_nothing(
    database: Database, tmp_path: Path, role: str
) -> None:
    database.execute("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) i")
    query = Initial(database, tmp_path, **options(database, role))
    try:
        query.load()
        wait_until(lambda: query.status()["status"] == "reading", 20, "the plan is made")
        database.execute(f"REVOKE SELECT ON t FROM {role}")
        with pytest.raises(SourceError, match="cannot be read: permission denied") as failed:
            query.run()
        assert f'GRANT SELECT ON "public"."t" TO "{role}"' in failed.value.advice
        assert "nothing is lost" in failed.value.advice
        query.end()
        database.execute(f"GRANT SELECT ON t TO {role}")
        query.load()
        query.run()
        assert len(query.events) >= 10
    finally:
        query.end()


def test_the_right_on_the_schema_is_named(database: Database, role: str) -> None:
    database.execute(f"REVOKE USAGE ON SCHEMA public FROM PUBLIC; REVOKE USAGE ON SCHEMA public FROM {role}")
    with (
        psycopg.connect(options(database, role)["url"], autocommit=True) as conn,
        pytest.raises(SourceError, match=f'GRANT USAGE ON SCHEMA "public" TO "{role}"'),
    ):
        check_readable(conn, ["mine"])
