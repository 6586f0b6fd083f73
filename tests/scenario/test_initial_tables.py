"""The initial snapshot of tables of every kind, and who may have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from initials import Initial
from listening import wait_until
from preparing import Wanted, prepare
from queries import Query
from type_cases import CASES

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.core.state import StateDir

PAIR = ["id", "region"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_SNAPSHOT_CHUNK_BYTES", "65536")


@pytest.fixture
def begin(database: Database, tmp_path: Path) -> Iterator[Callable[..., Initial]]:
    made: list[Initial] = []

    def make(**options: str) -> Initial:
        made.append(Initial(database, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def rows(query: Initial, table: str) -> list[dict[str, Any]]:
    return [event["payload"]["row"] for event in query.events if event["channel"] == f"pgcdc:{table}"]


def test_tables_of_every_kind(database: Database, begin: Callable[..., Initial]) -> None:
    for statement in (
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "CREATE TABLE one (id int PRIMARY KEY, v text)",
        "INSERT INTO one VALUES (1, E'tab\\tline\\nback\\\\slash \\u00fc')",
        'CREATE TABLE "Odd ""Name" (a text, "B c" int, v text, PRIMARY KEY ("B c", a))',
        """INSERT INTO "Odd ""Name" SELECT 'a' || i % 7, i, repeat('x', 100) FROM generate_series(1, 3000) i""",
        "CREATE TABLE wide (id int PRIMARY KEY, v text)",
        "INSERT INTO wide SELECT i, repeat(md5(i::text), 4000) FROM generate_series(1, 20) i",
        "CREATE TABLE keyless (v text)",
        "INSERT INTO keyless SELECT 'same' FROM generate_series(1, 3000)",
        "CREATE TABLE parts (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        "CREATE TABLE parts_eu PARTITION OF parts FOR VALUES IN ('eu')",
        "CREATE TABLE parts_us PARTITION OF parts FOR VALUES IN ('us')",
        "INSERT INTO parts SELECT i, CASE WHEN i % 3 = 0 THEN 'eu' ELSE 'us' END FROM generate_series(1, 3000) i",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (extra int, PRIMARY KEY (id)) INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2, 3)",
        "CREATE TABLE computed (id int PRIMARY KEY, double int GENERATED ALWAYS AS (id * 2) STORED)",
        "INSERT INTO computed VALUES (4)",
    ):
        database.execute(statement)
    query = begin(all_tables="true").load()
    query.run()
    keys = {f"public.{name}": ["id"] for name in ("empty", "one", "wide", "computed", "child")}
    query.check_equal({**keys, "public.parts": PAIR, 'public.Odd "Name': ["a", "B c"]})
    assert rows(query, "keyless") == [{"v": "same"}] * 3000 and rows(query, "parent") == [{"id": "1"}]
    marks = [event for event in query.events if event["channel"] == "pgcdc:_snapshot"]
    counts = {one["payload"]["row"]["table"]: one["payload"]["row"]["rows"] for one in marks}
    assert counts["empty"] == "0" and len(marks) == 2 * len(counts) == 18


def test_through_the_root_with_row_filters_and_columns_of_the_publication(
    database: Database, begin: Callable[..., Initial]
) -> None:
    for statement in (
        "CREATE TABLE parts (id int PRIMARY KEY, v text, hidden text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (1000)",
        "CREATE TABLE parts_high (hidden text, id int NOT NULL, v text)",  # in another order
        "ALTER TABLE parts ATTACH PARTITION parts_high FOR VALUES FROM (1000) TO (9000)",
        "INSERT INTO parts SELECT i, 'v' || i, 'secret' FROM generate_series(0, 2999) i",
        "CREATE TABLE t (id int PRIMARY KEY, v text, hidden text)",
        "INSERT INTO t SELECT i, 'v', 'secret' FROM generate_series(0, 999) i",
        "CREATE PUBLICATION mine FOR TABLE parts (id, v) WHERE (id >= 10), t (id, v) WHERE (id % 2 = 0) "
        "WITH (publish_via_partition_root = true)",
    ):
        database.execute(statement)
    query = begin(publication="mine").load()
    database.execute("INSERT INTO parts VALUES (3000, 'later', 'secret'), (5, 'left out', 'x') ON CONFLICT DO NOTHING")
    query.run()
    found = rows(query, "parts")
    assert sorted(int(row["id"]) for row in found) == list(range(10, 3001)) and set(found[0]) == {"id", "v"}
    assert all(row["v"] in (f"v{row['id']}", "later") for row in found)
    assert sorted(int(row["id"]) for row in rows(query, "t")) == list(range(0, 1000, 2))


def test_values_are_those_of_the_stream(database: Database, begin: Callable[..., Initial]) -> None:
    cases = [case for case in CASES if not case.setup]
    columns = ", ".join(f"c{number} {case.pg_type}" for number, case in enumerate(cases))
    database.execute(f"CREATE TABLE types (id int PRIMARY KEY, {columns})")
    values = ", ".join(f"{case.sql_literal}::{case.pg_type}" for case in cases)
    database.execute(f"INSERT INTO types VALUES (1, {values})")
    query = begin(tables="types").load()
    database.execute(f"INSERT INTO types VALUES (2, {values})")
    query.run()
    first, second = rows(query, "types")
    assert len(first) > 100
    assert {**first, "id": ""} == {**second, "id": ""}


def test_a_short_idle_timeout_does_not_end_it(database: Database, begin: Callable[..., Initial]) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET idle_in_transaction_session_timeout = '200ms'")
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    query = begin(tables="t").load()
    age = "SELECT max(now() - xact_start) > '1s' FROM pg_stat_activity WHERE application_name = 'pgcdc snapshot'"
    wait_until(lambda: bool(database.query(age)[0][0]), 10, "longer than the timeout")
    query.run()
    assert rows(query, "t") == [{"id": "1"}] and "lost" not in query.log() and "new snapshot" not in query.log()


@pytest.mark.parametrize("with_policy", [False, True])
def test_without_the_right_to_read_nothing_is_begun(database: Database, tmp_path: Path, with_policy: bool) -> None:
    role = f"role_{database.name}_{int(with_policy)}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT ALL ON SCHEMA public TO {role}")
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION mine FOR TABLE a, b")
    database.execute(f"GRANT SELECT ON a TO {role}")
    if with_policy:
        database.execute(f"GRANT SELECT ON b TO {role}; ALTER TABLE b ENABLE ROW LEVEL SECURITY")
    url = database.url.replace("postgres@", f"{role}@")
    source = Wanted(
        db=url, slot_name="refused", publication="mine", state_dir=str(tmp_path / "new"), snapshot_mode="initial"
    )
    try:
        advice = "BYPASSRLS" if with_policy else f'GRANT SELECT ON "public"."b" TO "{role}"'
        with pytest.raises(SourceError, match="rows of table b cannot be read") as caught:
            prepare(source)
        assert advice in caught.value.advice and "--snapshot-mode never" in caught.value.advice
        assert not (tmp_path / "new").exists()
        assert database.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'refused'") == [(0,)]
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.slow
def test_always_asks_for_every_table_with_a_key_at_every_start(
    database: Database, begin: Callable[..., Initial]
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE keyless (id int)")
    query = begin(all_tables="true", snapshot_mode="always").load()
    query.run()
    assert rows(query, "t") == [{"id": "1"}] and query.capture_status()["snapshots"] == []
    for _ in range(2):
        query.end()
        query.load().run()
    asked = query.capture_status()["snapshots"]
    assert [(one["table"], one["kind"], one["status"]) for one in asked] == [("t", "always", "done")] * 2
    assert rows(query, "t") == [{"id": "1"}] * 3


def test_initial_only_ends_with_the_rows_and_keeps_the_slot(database: Database, begin: Callable[..., Initial]) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    query = begin(tables="t", snapshot_mode="initial_only").load()
    database.execute("INSERT INTO t VALUES (2)")
    query.run()
    assert rows(query, "t") == [{"id": "1"}]
    assert query.run() == [] and query.capture_status()["phase"] == "initial snapshot"
    query.end()
    query.load(snapshot_mode="never").run()
    assert rows(query, "t") == [{"id": "1"}, {"id": "2"}]


def test_typed_rows_and_weights(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v numeric(9, 2)); ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("INSERT INTO t SELECT i, i / 4.0 FROM generate_series(1, 3000) i")
    query = Query(database, tmp_path, table="t", changelog="zset", snapshot_mode="initial", consumer="typed")
    try:
        query.load()
        database.execute("UPDATE t SET v = 0 WHERE id = 1; DELETE FROM t WHERE id = 2")
        found = query.run()
        weights: dict[tuple[int, Any], int] = {}
        for row in found:
            weights[row["id"], row["v"]] = weights.get((row["id"], row["v"]), 0) + row["_weight"]
        assert sorted(one for one, weight in weights.items() if weight) == database.query("SELECT * FROM t ORDER BY 1")
        assert {row["_op"] for row in found} == {"SNAPSHOT", "UPDATE", "DELETE"}
        assert StateDir(query.state.path).identity().created == found[0]["_lsn"]  # type: ignore[union-attr]
    finally:
        query.end()


def test_without_a_table_there_is_nothing_to_wait_for(database: Database, begin: Callable[..., Initial]) -> None:
    query = begin(all_tables="true").load()
    assert query.run() == [] and query.status()["status"] == "complete"
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")


REFUSED = {
    "temporary": ({"temporary_slot": "true", "snapshot_mode": "initial"}, "needs a persistent slot"),
    "old slot": ({"start_from": "slot", "snapshot_mode": "initial"}, "needs a new slot"),
    "unknown": ({"snapshot_mode": "sometimes"}, "snapshot_mode is 'sometimes'"),
    "limit": ({"snapshot_hold_limit": "soon"}, "snapshot_hold_limit is 'soon'"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_is_refused(options: dict[str, str], message: str) -> None:
    from pgcdc.spark.options import parse_options

    with pytest.raises(ConfigError, match=message):
        parse_options({"url": "postgresql://localhost/x", "tables": "t", **options})
