"""`pgcdc snapshot`: tables as they are now, whole and of one moment, or nothing at all."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from databases import Database
from listening import wait_until
from pyspark.sql import SparkSession

from pgcdc import adapters
from pgcdc.core.errors import ConfigError, PgcdcError, SinkError, SourceError
from pgcdc.postgres.selection import Selection
from pgcdc.run import copy_source
from pgcdc.run.copy import MANIFEST, _partial_folder, copy_to_adapters, copy_to_parquet
from pgcdc.run.copy_source import Progress, Wanted
from pgcdc.spark.archive import SWITCH
from pgcdc.spark.session import find_archive

Event = dict[str, Any]


class At:
    """Does something when the turn of a table comes, and counts."""

    def __init__(self, table: str = "", do: Callable[[], object] = lambda: None) -> None:
        self._table = table
        self._do = do
        self.ended: list[int] = []
        self.estimated: list[int] = []

    def __call__(self, table: str, rows: int, estimated_rows: int, is_complete: bool) -> None:
        if is_complete:
            self.ended.append(rows)
        elif not rows:
            self.estimated.append(estimated_rows)
            if table == self._table:
                self._do()


def want(url: str, *tables: str, where: str = "", **more: Any) -> Wanted:
    return Wanted(url, Selection(tables=tables, **more), where=where)


def copy(database: Database, path: Path, *tables: str, progress: Progress | None = None, **more: Any) -> list[Event]:
    """The events of a copy to a file."""
    copy_to_adapters(want(database.url, *tables, **more), [adapters.file(str(path))], progress=progress or At())
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(events: list[Event], table: str) -> list[dict[str, str | None]]:
    return [one["payload"]["row"] for one in events if one["channel"] == f"pgcdc:{table}"]


def traces(database: Database) -> list[str]:
    """What a copy leaves behind on the server; a backend whose client has gone may take a moment to end."""
    found: list[str] = []

    def is_clean() -> bool:
        found[:] = [str(name) for (name,) in database.query(_TRACES)]
        return not found

    with contextlib.suppress(TimeoutError):
        wait_until(is_clean, 5, "")
    return found


_TRACES = """
SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()
UNION ALL SELECT pubname::text FROM pg_publication
UNION ALL SELECT application_name FROM pg_stat_activity
          WHERE datname = current_database() AND application_name LIKE 'pgcdc%'
"""


# --- events


def test_rows_are_events_with_the_bytes_of_the_stream_between_marks(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, ok bool, code char(4), n numeric(8,2), note text, b bytea, at timestamptz, "
        "doubled int GENERATED ALWAYS AS (id * 2) STORED); "
        "INSERT INTO t VALUES (1, true, 'a', 1.5, E'tab\\t \"line\\n\\\\ \\u00e9', '\\xdeadbeef', "
        "'2026-01-02 03:04:05+02'), (2, false, NULL, NULL, NULL, NULL, NULL)"
    )
    events = copy(database, tmp_path / "e.jsonl", "t")
    assert [one["operation"] for one in events] == ["SNAPSHOT_STARTED", "SNAPSHOT", "SNAPSHOT", "SNAPSHOT_COMPLETED"]
    first = events[1]
    assert list(first) == ["id", "channel", "operation", "payload", "source", "created_at", "position"]
    assert (first["channel"], first["source"]) == ("pgcdc:t", "wal_replication")
    assert first["payload"] == {
        "op": "SNAPSHOT",
        "schema": "public",
        "table": "t",
        "row": {
            "id": "1", "ok": "t", "code": "a   ", "n": "1.50", "note": 'tab\t "line\n\\ é', "b": "\\xdeadbeef",
            "at": "2026-01-02 01:04:05+00",
        },
        "old": None,
    }  # fmt: skip
    assert rows_of(events, "t")[1]["note"] is None
    mark = events[-1]["payload"]["row"]
    assert {**mark, "snapshot": ""} == {
        "snapshot": "",
        "kind": "one-off",
        "schema": "public",
        "table": "t",
        "rows": "2",
    }
    assert (events[0]["channel"], events[-1]["channel"]) == ("pgcdc:_snapshot", "pgcdc:_snapshot")
    positions = [one["position"] for one in events]
    assert positions == sorted(set(positions)) and len({one["id"] for one in events}) == 4
    assert os.listdir(tmp_path) == ["e.jsonl"] and traces(database) == []


def test_all_tables_are_of_one_moment(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, amount int); INSERT INTO a SELECT n, 100 FROM generate_series(1, 5000) n; "
        "CREATE TABLE b (LIKE a INCLUDING ALL); INSERT INTO b SELECT * FROM a; ANALYZE a, b"
    )
    move = "UPDATE a SET amount = amount - 7; UPDATE b SET amount = amount + 7; INSERT INTO b VALUES (9999, 1); "
    progress = At("b", lambda: database.execute(f"{move} DELETE FROM b WHERE id = 1; ALTER TABLE b ADD later int"))
    events = copy(database, tmp_path / "e", all_tables=True, progress=progress)
    assert len(rows_of(events, "b")) == 5000 and progress.ended == [5000, 5000] and progress.estimated == [5000, 5000]
    assert {row["amount"] for row in [*rows_of(events, "a"), *rows_of(events, "b")]} == {"100"}


def test_condition_partitions_empty_tables_and_names(database: Database, tmp_path: Path) -> None:
    database.execute(
        'CREATE TABLE p (id int, region text) PARTITION BY LIST (region); CREATE SCHEMA "S x"; '
        "CREATE TABLE p_eu PARTITION OF p FOR VALUES IN ('eu'); CREATE TABLE p_us PARTITION OF p FOR VALUES IN ('us'); "
        "INSERT INTO p SELECT n, CASE WHEN n % 2 = 0 THEN 'eu' ELSE 'us' END FROM generate_series(1, 100) n; "
        'CREATE TABLE "S x"."We""ird" (id int); CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent); '
        "INSERT INTO child VALUES (5); CREATE TABLE nothing ()"
    )
    events = copy(database, tmp_path / "1", "p", where="id <= 10 -- and no more")
    assert sorted(int(row["id"] or 0) for row in rows_of(events, "p")) == list(range(1, 11))
    events = copy(database, tmp_path / "2", all_tables=True)
    assert len(rows_of(events, "p")) == 100 and rows_of(events, "parent") == [] and rows_of(events, "child")
    marks = [
        (one["row"]["schema"], one["row"]["table"])
        for one in (event["payload"] for event in events)
        if not one["table"]
    ]
    assert (
        marks.count(("S x", 'We"ird')) == 2 and ("public", "p_eu") not in marks and ("public", "nothing") not in marks
    )
    with pytest.raises(SourceError, match="nothing has no columns"):
        copy(database, tmp_path / "3", "nothing")
    assert len(copy(database, tmp_path / "4", schemas=('"S x"',))) == 2


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({}, "no table is named"),
        ({"tables": ("t", "nowhere")}, "table nowhere does not exist"),
        ({"tables": ("a_view",)}, "a_view is a view"),
        ({"tables": ("t",), "where": "total >"}, "--where is not a valid condition on table t: syntax error"),
        ({"tables": ("t",), "where": "true); DROP TABLE t; --"}, "--where is not a valid condition on table t"),
        ({"tables": ("t",), "where": "nothing = 1"}, 'column "nothing" does not exist'),
        ({"tables": ("t", "u"), "where": "true"}, "--where applies to one table"),
        ({"all_tables": True, "schemas": ("public",)}, "--schemas and --all-tables cannot be combined"),
        ({"schemas": ("none",)}, "there are no tables to copy"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_made(
    database: Database, tmp_path: Path, wanted: dict[str, Any], said: str
) -> None:
    database.execute("CREATE TABLE t (id int); CREATE TABLE u (id int); CREATE VIEW a_view AS SELECT 1 AS id")
    with pytest.raises(PgcdcError) as error:
        copy(database, tmp_path / "e", *wanted.pop("tables", ()), **wanted)
    assert said in str(error.value) and os.listdir(tmp_path) == [] and traces(database) == []


def test_every_table_without_the_right_to_read_is_named(database: Database, tmp_path: Path) -> None:
    role = f"reader_{database.name}"
    database.execute(f"CREATE TABLE a (id int); CREATE TABLE b (id int); CREATE TABLE c (id int); CREATE ROLE {role} LOGIN; GRANT SELECT ON b TO {role}")  # fmt: skip  # noqa: E501
    try:
        wanted, target = want(database.url.replace("postgres@", f"{role}@"), all_tables=True), str(tmp_path / "e")
        with pytest.raises(SourceError, match=f'tables a, c.*GRANT SELECT ON "public"."a", "public"."c" TO "{role}"'):
            copy_to_adapters(wanted, [adapters.file(target)], progress=At())
        database.execute(f"CREATE SCHEMA s; CREATE TABLE s.d (id int); GRANT SELECT ON s.d TO {role}")
        with pytest.raises(
            SourceError, match=f'has no USAGE right on schema "s".*GRANT USAGE ON SCHEMA "s" TO "{role}"'
        ):
            copy_to_adapters(want(wanted.url, "s.d"), [adapters.file(target)], progress=At())
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE b", "table b was dropped or altered before it was read"),
        ("TRUNCATE b", "table b was truncated or rewritten"),
        ("ALTER TABLE b ALTER id TYPE bigint", "table b was truncated or rewritten"),
        ("ALTER TABLE b DROP id", "table b was dropped or altered before it was read"),
    ],
)
def test_a_table_that_is_gone_before_its_turn_ends_the_copy_and_nothing_is_there(
    database: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    database.execute(
        "CREATE TABLE a (id int); CREATE TABLE b (id int, c int); INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)"
    )
    targets = [adapters.stdout(), adapters.file(str(tmp_path / "e"))]
    with pytest.raises(SourceError, match=said) as error:
        copy_to_adapters(want(database.url, "a", "b"), targets, progress=At("b", lambda: database.execute(change)))
    assert "Run it again. The copy is incomplete: a is complete, b is not" in str(error.value)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    completed = [one["payload"]["row"]["table"] for one in lines if one["operation"] == "SNAPSHOT_COMPLETED"]
    assert completed == ["a"] and os.listdir(tmp_path) == [] and traces(database) == []


def test_a_table_that_is_truncated_while_the_snapshot_is_taken_is_looked_at_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)")
    export, again = copy_source._export, iter([True, False])

    def truncate_first(*args: Any) -> Any:
        if next(again):
            database.execute("TRUNCATE t; INSERT INTO t VALUES (2)")
        return export(*args)

    monkeypatch.setattr(copy_source, "_export", truncate_first)
    assert rows_of(copy(database, tmp_path / "e", "t"), "t") == [{"id": "2"}]


def test_a_full_disk_leaves_nothing(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t AS SELECT n, repeat('x', 1000) AS x FROM generate_series(1, 20000) n")
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    target = adapters.file(str(tmp_path / "e"), max_retries=0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
        with pytest.raises(SinkError, match=r"cannot be written"):
            copy_to_adapters(want(database.url, "t"), [target], progress=At())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == [] and traces(database) == []


def test_a_target_that_is_there_is_not_touched(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)")
    file = tmp_path / "e"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        copy(database, file, "t")
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["e"]
    with pytest.raises(ConfigError, match=r"does not exist"):
        copy(database, tmp_path / "no" / "e", "t")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        copy(database, tmp_path / "pipe", "t")
    file.write_text("")
    assert len(copy(database, file, "t")) == 2
    appeared = At("t", lambda: (tmp_path / "late").write_text("theirs"))
    with pytest.raises(ConfigError, match="exists and is not empty"):
        copy(database, tmp_path / "late", "t", progress=appeared)
    assert (tmp_path / "late").read_text() == "theirs"


def test_two_runs_do_not_write_the_same_target(tmp_path: Path) -> None:
    with _partial_folder(tmp_path / "x") as partial:
        with pytest.raises(ConfigError, match="another run writes to"), _partial_folder(tmp_path / "x"):
            pass
        assert partial.exists()
    assert os.listdir(tmp_path) == ["x"]


# --- the command


def start(database: Database, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pgcdc", "snapshot", *flags],
        env={**os.environ, "PGCDC_DB": database.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_that_is_ended_leaves_nothing_and_what_a_killed_one_leaves_is_cleared(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t AS SELECT n AS id FROM generate_series(1, 9) n")
    target = tmp_path / "e.jsonl"
    flags = ("--table", "t", "--adapter", "file", "--file-path", str(target))
    for number, code, left in ((signal.SIGTERM, 130, []), (signal.SIGKILL, -9, ["e.jsonl.partial"])):
        process = start(database, *flags, "--where", "id < 5 OR pg_sleep(600) IS NOT NULL")
        wait_until(lambda: bool(os.listdir(tmp_path)), 20, "it writes")
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert (process.returncode, os.listdir(tmp_path)) == (code, left), said
        assert number == signal.SIGKILL or "stopped: the copy is incomplete" in said
        with database.connect() as conn:  # the server notices a client that is gone at its next word, here after 10 min
            conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgcdc%'")
    process = start(database, *flags)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0 and "table t: 9 rows read in" in said and "copy complete: 9 rows" in said
    assert os.listdir(tmp_path) == ["e.jsonl"] and len(target.read_text().splitlines()) == 11


def test_a_copy_has_the_transforms_masks_routes_and_rows_of_the_pipeline(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, name text, mail text, region text); CREATE TABLE other (id int); "
        "INSERT INTO people VALUES (1, 'Ada', 'ada@example.org', 'eu'), (2, 'Bob', 'bob@example.org', 'us')"
    )
    out, all_of_it = tmp_path / "people.jsonl", tmp_path / "all.jsonl"
    (tmp_path / "c.yaml").write_text(
        "tables: [people, other]\nrow_filters: {people: \"region = 'eu'\"}\nadapters:\n"
        f"  - {{type: file, name: a, path: {out}, routes: [pgcdc:people], "
        "transforms: [{type: rename_fields, fields: {name: who}}]}\n"
        f"  - {{type: file, name: b, path: {all_of_it}}}\n"
        "transforms:\n  global: [{type: mask, columns: [mail], mode: redact}]\n"
    )
    process = start(database, "--config", str(tmp_path / "c.yaml"))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    (event,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert event["payload"]["row"]["who"] == "Ada" and "ada@" not in out.read_text() + all_of_it.read_text()
    events = [json.loads(line) for line in all_of_it.read_text().splitlines()]
    assert [row["name"] for row in rows_of(events, "people")] == ["Ada"], "the row filter of the pipeline"
    assert len(events) == 1 + 4 and traces(database) == []


def test_a_copy_goes_to_tables_of_another_database(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE SCHEMA mirror; CREATE TABLE t (id int PRIMARY KEY, n numeric(8,2), note text, at timestamptz); "
        "INSERT INTO t SELECT i, i / 3.0, 'note ' || i, now() FROM generate_series(1, 3000) i"
    )
    target = adapters.pg_table(database.url, mode="apply", target_schema="mirror")
    assert copy_to_adapters(want(database.url, "t"), [target], progress=At()) == 3000
    differs = "(TABLE t EXCEPT TABLE mirror.t) UNION ALL (TABLE mirror.t EXCEPT TABLE t)"
    assert database.query(f"SELECT count(*) FROM ({differs}) d")[0][0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "count", "last"),
    [
        ("{type: sql, set: {v: \"concat(row['v'], row['id'])\"}}", 10, "a10"),
        ("{type: filter, where: \"row['id'] > 7\"}", 3, "a"),
    ],
    ids=["sql", "where"],
)
def test_a_transform_in_sql_makes_a_copy_start_spark(
    database: Database, tmp_path: Path, step: str, count: int, last: str
) -> None:
    database.execute("CREATE TABLE t AS SELECT i AS id, 'a' AS v FROM generate_series(1, 10) i")
    (tmp_path / "c.yaml").write_text(
        f"adapters: [{{type: file, name: f, path: {tmp_path / 'e'}}}]\ntransforms:\n  global: [{step}]\n"
    )
    process = start(database, "--table", "t", "--config", str(tmp_path / "c.yaml"))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and "starting Spark" in said, said
    events = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    assert rows_of(events, "t")[-1] == {"id": "10", "v": last} and len(events) == count + 2


def test_a_reader_that_goes_away_ends_the_copy_quietly(database: Database) -> None:
    database.execute("CREATE TABLE t AS SELECT n AS id, repeat('x', 100) AS x FROM generate_series(1, 9000) n")
    process = start(database, "--table", "t")
    assert process.stdout is not None and process.stderr is not None
    assert json.loads(process.stdout.readline())["operation"] == "SNAPSHOT_STARTED"
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(20) == 141 and "complete" not in said and "rror" not in said


# --- Parquet


def test_parquet_has_typed_columns_of_all_tables_in_one_moment(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, amount numeric(12,2), at timestamptz, tags text[], twice int GENERATED ALWAYS "
        "AS (id * 2) STORED); CREATE SCHEMA s; "
        "INSERT INTO a SELECT n, n * 1.5, '2026-01-02 03:04:05+00', '{x,y}' FROM generate_series(1, 5000) n; "
        'CREATE TABLE s."a/b %2F" (id int); INSERT INTO s."a/b %2F" VALUES (7); CREATE TABLE empty (id int)'
    )
    target = tmp_path / "a folder %20"
    progress = At("empty", lambda: database.execute('UPDATE s."a/b %2F" SET id = 8; INSERT INTO empty VALUES (1)'))
    rows = copy_to_parquet(
        want(database.url, all_tables=True), target, partitions=3, types={}, progress=progress, spark=spark
    )
    assert rows == 5001 and progress.ended == [5000, 0, 1]
    manifest = json.loads((target / MANIFEST).read_text())
    folders = {one["table"]: (target / one["folder"], one["rows"]) for one in manifest["tables"]}
    assert {name: rows for name, (_, rows) in folders.items()} == {"a": 5000, "empty": 0, "a/b %2F": 1}
    table = pq.read_table(folders["a"][0])
    assert len(list(folders["a"][0].glob("*.parquet"))) == 3
    assert table.num_rows == 5000 and sum(table.column("twice").to_pylist()) == 5000 * 5001
    assert [str(field.type) for field in table.schema][:2] == ["int32", "decimal128(12, 2)"]
    assert table.column("tags")[0].as_py() == ["x", "y"]
    assert pq.read_table(folders["a/b %2F"][0]).to_pylist() == [{"id": 7}]
    assert pq.read_table(folders["empty"][0]).column_names == ["id"]
    assert os.listdir(tmp_path) == [target.name] and traces(database) == []
    with pytest.raises(ConfigError, match="is not empty"):
        copy_to_parquet(want(database.url, "a"), target, types={}, progress=At(), spark=spark)


@pytest.mark.parametrize("change", ["TRUNCATE b", "DROP TABLE b"])
def test_parquet_of_a_table_that_is_gone_before_its_turn_is_not_there(
    database: Database, tmp_path: Path, spark: SparkSession, change: str
) -> None:
    database.execute("CREATE TABLE a AS SELECT 1 AS id; CREATE TABLE b AS SELECT 1 AS id")
    progress = At("b", lambda: database.execute(change))
    with pytest.raises(SourceError, match=r"table b .*(truncated|does not exist)"):
        copy_to_parquet(want(database.url, "a", "b"), tmp_path / "x", types={}, progress=progress, spark=spark)
    assert progress.ended == [1] and os.listdir(tmp_path) == [] and traces(database) == []


@pytest.mark.slow
def test_the_command_makes_parquet_with_a_spark_of_its_own(
    database: Database, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", "")
    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.setenv(SWITCH, str(tmp_path_factory.mktemp("classes")))
    archive = find_archive()
    assert archive is not None
    archive.fail("tried an hour ago")
    database.execute(
        'CREATE TABLE t (id int, at timestamptz, "A" int, a int); '
        "INSERT INTO t SELECT n, '9999-01-01 00:00:00+00', n, -n FROM generate_series(1, 1000) n"
    )
    process = start(
        database, "--table", "t", "--where", "id <= 500", "--partitions", "2", "--to", f"parquet:{tmp_path / 'out'}"
    )
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0 and "complete: 500 rows" in said and "tried an hour ago" in said, said
    table = pq.read_table(tmp_path / "out" / "t")
    assert table.num_rows == 500 and table.column("at")[0].as_py().year == 9999
    assert os.listdir(tmp_path) == ["out"] and traces(database) == []
