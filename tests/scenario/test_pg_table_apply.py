"""The apply mode of pg_table against real servers: whatever happens at the source, the target has the same rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from applying import Mirror, Source, as_letters, content, cuts, two_databases
from databases import Database
from histories import NAMES, History
from running import run

from pgcdc.cli.config import run_checks
from pgcdc.config.layers import load_config
from pgcdc.core.errors import ConfigError, ReloadNeeded, SinkError
from pgcdc.core.state import Identity, StateDir
from pgcdc.event.batch import Batch
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.run.pipeline import Pipeline
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.sink import PgTableSink
from pgcdc.source.protocol import Finding

REWRITTEN = "its rows were rewritten by ALTER TABLE (a computed default, a type change)"


@pytest.fixture(scope="module", params=[18, pytest.param(16, marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    if request.param == 18:
        yield request.getfixturevalue("postgres")
        return
    settings = {"fsync": "off", "full_page_writes": "off"}
    with EmbeddedPostgres.temporary(version=request.param, settings=settings) as server:
        yield server


@pytest.fixture
def pair(server: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[Source, Mirror]]:
    with two_databases(server) as (source_url, target_url):
        source = Source(source_url, tmp_path / "state")
        mirror = Mirror(target_url, source.state)
        try:
            yield source, mirror
        finally:
            mirror.close()
            source.close()


def columns_of(source: Source, table: tuple[str, str]) -> list[str]:
    rows = source.sql.execute(
        "SELECT column_name::text FROM information_schema.columns WHERE table_schema = %s AND table_name = %s", table
    )
    return sorted(name for (name,) in rows)


def assert_equal(source: Source, mirror: Mirror, table: tuple[str, str]) -> None:
    """Row by row, as PostgreSQL writes them; columns that the source dropped stay at the target."""
    columns = columns_of(source, table)
    assert content(mirror.sql, table, columns) == content(source.sql, table, columns)


def together(batches: list[Batch]) -> Batch:
    shapes = {number: shape for one in batches for number, shape in one.shapes.items()}
    return Batch(batches[0].start, batches[-1].end, pa.concat_tables([one.events for one in batches]), shapes)


@pytest.mark.parametrize("seed", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in range(2, 40))])
def test_any_history_in_any_cuts_leaves_the_rows_of_the_source(pair: tuple[Source, Mirror], seed: int) -> None:
    follow_history(*pair, seed)


def test_any_history_is_followed_by_an_older_server(tmp_path: Path) -> None:
    with (
        EmbeddedPostgres.temporary(version=16, settings={"fsync": "off", "full_page_writes": "off"}) as server,
        two_databases(server) as (source_url, target_url),
    ):
        source = Source(source_url, tmp_path / "state")
        mirror = Mirror(target_url, source.state)
        follow_history(source, mirror, 1)
        mirror.close()
        source.close()


def follow_history(source: Source, mirror: Mirror, seed: int) -> None:
    chance = random.Random(seed)
    batches = []
    for statements in History(seed).transactions(60):
        with source.sql.transaction():
            source.run(*statements)
        batches.append(source.read())
    batch = together(batches)
    ack = batch.start
    for piece in cuts(batch, seed, 12):
        if chance.random() < 0.3:  # as a crash before the commit leaves it
            with suppress(ReloadNeeded), mirror.sql.transaction(force_rollback=True):
                mirror.applier.apply(mirror.without_held(piece.after(ack)))
            mirror.close()
            mirror.restart()
        # It comes again from the beginning, and the sink skips what it has.
        is_due = [one <= str(piece.end) for one in batch.positions().to_pylist()]
        rest = replace(batch, end=piece.end, events=batch.events.filter(pa.array(is_due))).after(ack)
        mirror.apply(rest)
        ack = rest.end
    mirror.reload(source)
    for table in NAMES:
        assert_equal(source, mirror, table)


# --- single cases


def test_an_unchanged_long_value_stays_also_when_the_key_moves(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE docs (id int PRIMARY KEY, n int, body text)",
            "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
            "INSERT INTO docs SELECT i, 0, repeat(md5(i::text), 200) FROM generate_series(1, 4) i",
        )
    )
    batch = source.read(
        "UPDATE docs SET n = 1 WHERE id = 1", "UPDATE docs SET id = 20 WHERE id = 2", "DELETE FROM docs WHERE id = 3"
    )
    assert "_unchanged_toast_columns" in batch.texts()[0]
    mirror.apply(batch)
    assert_equal(source, mirror, ("public", "docs"))


def test_columns_of_the_target_alone_stay_when_the_key_moves(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')"))
    mirror.sql.execute(
        "ALTER TABLE t ADD COLUMN mine text DEFAULT 'kept', ADD COLUMN twice int GENERATED ALWAYS AS (id * 2) STORED"
    )
    mirror.sql.execute("UPDATE t SET mine = 'own' || id")
    mirror.restart()
    mirror.apply(source.read("UPDATE t SET id = 10, a = 'c' WHERE id = 1", "UPDATE t SET a = 'd' WHERE id = 2"))
    assert mirror.rows("SELECT * FROM t ORDER BY id") == [(2, "d", "own2", 4), (10, "c", "own1", 20)]


def test_values_that_two_rows_exchange_and_foreign_keys_are_applied_in_order(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    tables = (
        "CREATE TABLE parent (id int PRIMARY KEY, email text UNIQUE)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)",
    )
    for table in tables:
        mirror.sql.execute(table.encode())
    mirror.sql.execute("SET session_replication_role = origin")
    batch = source.read(
        *tables,
        "INSERT INTO parent VALUES (1, 'a'), (2, 'b')",
        "INSERT INTO child VALUES (1, 1), (2, 2)",
        "UPDATE parent SET email = 'x' WHERE id = 1",
        "UPDATE parent SET email = 'a' WHERE id = 2",
        "UPDATE parent SET email = 'b' WHERE id = 1",
        "INSERT INTO parent VALUES (3, 'c')",
        "INSERT INTO child VALUES (3, 3)",
        "DELETE FROM child WHERE id = 2",
        "DELETE FROM parent WHERE id = 2",
    )
    for piece in cuts(batch, 5, 3):
        mirror.apply(piece)
    assert_equal(source, mirror, ("public", "parent"))
    assert_equal(source, mirror, ("public", "child"))
    mirror.apply(source.read("TRUNCATE parent, child"))
    assert mirror.rows("SELECT count(*) FROM parent") == [(0,)]


def test_a_table_that_others_refer_to_is_emptied_too(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"))
    mirror.sql.execute("CREATE TABLE refers (id int REFERENCES t)")
    mirror.apply(source.read("TRUNCATE t", "INSERT INTO t VALUES (2)"))
    assert mirror.rows("SELECT * FROM t") == [(2,)]


def test_inserts_of_rows_that_are_there_replace_them(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    batch = source.read(
        "CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t SELECT i, 'new' FROM generate_series(1, 9) i"
    )
    mirror.sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    mirror.sql.execute("INSERT INTO t VALUES (3, 'old')")
    mirror.apply(batch)
    assert_equal(source, mirror, ("public", "t"))


def test_names_are_mapped_and_types_that_the_target_lacks_are_text(server: EmbeddedPostgres, tmp_path: Path) -> None:
    with two_databases(server) as (source_url, target_url):
        source = Source(source_url, tmp_path / "state")
        mirror = Mirror(
            target_url, source.state, tables=("public.orders=mirror.orders2", "sales.*=archive.*"), target_schema="rest"
        )
        mirror.apply(
            source.read(
                "CREATE TYPE mood AS ENUM ('fine')", "CREATE DOMAIN cents AS numeric(8,2)", "CREATE SCHEMA sales",
                "CREATE TABLE orders (id int PRIMARY KEY, how mood, price cents, tags mood[], v varchar(7))",
                "CREATE TABLE sales.items (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)",
                "INSERT INTO orders VALUES (1, 'fine', 2.5, '{fine}', 'x')", "INSERT INTO sales.items VALUES (1)",
                "INSERT INTO other VALUES (1)",
            )
        )  # fmt: skip
        assert mirror.rows("SELECT how, price::text, tags, v FROM mirror.orders2") == [("fine", "2.50", "{fine}", "x")]
        types = mirror.rows(
            "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = 'mirror.orders2'::regclass AND attnum > 0 ORDER BY attnum"
        )
        assert types == [
            ("id", "integer"), ("how", "text"), ("price", "numeric(8,2)"), ("tags", "text"), ("v", "character varying(7)"),
        ]  # fmt: skip
        assert mirror.rows("SELECT * FROM archive.items, rest.other") == [(1, 1)]
        assert "table mirror.orders2 created (how, tags as text: the target does not have the type)" in mirror.said
        mirror.close()
        source.close()


def test_alterations_are_followed(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE t (id int PRIMARY KEY, a int, b text, c numeric)", "INSERT INTO t VALUES (1, 5, 'x', 1.5)"
        )
    )
    mirror.sql.execute("ALTER TABLE t ALTER b SET NOT NULL")
    mirror.apply(source.read("ALTER TABLE t RENAME a TO renamed", "INSERT INTO t VALUES (2, 6, 'y', 2)"))
    mirror.apply(
        source.read(
            "ALTER TABLE t DROP b, ADD d date, ALTER c TYPE int", "INSERT INTO t VALUES (3, 7, 3, '2026-01-01')"
        )
    )
    mirror.apply(source.read("ALTER TABLE t RENAME TO t2", "INSERT INTO t2 VALUES (4, 8, 4, NULL)"))
    assert list(mirror.held.values()) == [REWRITTEN]
    mirror.reload(source)
    assert_equal(source, mirror, ("public", "t2"))
    assert mirror.rows("SELECT b, pg_typeof(c)::text FROM t2 ORDER BY id") == [(None, "integer")] * 4
    assert mirror.rows("SELECT to_regclass('t')") == [(None,)]


@pytest.mark.parametrize("evolve", ["add", "none"])
def test_a_target_is_altered_no_more_than_is_allowed(server: EmbeddedPostgres, tmp_path: Path, evolve: str) -> None:
    with two_databases(server) as (source_url, target_url):
        source = Source(source_url, tmp_path / "state")
        mirror = Mirror(target_url, source.state, evolve=evolve)
        mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 5)"))
        batch = source.read("ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (2, 6)")
        if evolve == "none":
            with pytest.raises(
                SinkError, match=r'table t at the target has no column b.*Run there: ALTER TABLE "public"."t" ADD'
            ):
                mirror.apply(batch)
        else:
            mirror.apply(batch)
            assert mirror.rows("SELECT id, a, b FROM t ORDER BY id") == [(1, 5, None), (2, None, 6)]
        mirror.close()
        source.close()


def test_a_table_that_is_missing_is_not_made_unless_it_may_be(server: EmbeddedPostgres, tmp_path: Path) -> None:
    with two_databases(server) as (source_url, target_url):
        source = Source(source_url, tmp_path / "state")
        mirror = Mirror(target_url, source.state, create=False)
        batch = source.read("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 5)")
        with pytest.raises(SinkError, match=r'CREATE TABLE "public"."t" .*integer.* PRIMARY KEY'):
            mirror.apply(batch)
        mirror.close()
        source.close()


def test_what_somebody_does_to_the_target_is_noticed(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 5)"))
    mirror.sql.execute("ALTER TABLE t RENAME a TO b")
    mirror.apply(source.read("INSERT INTO t VALUES (2, 6)"))
    assert list(mirror.held.values()) == ["the target has no column a, so its rows lack those values"]
    mirror.reload(source)
    assert mirror.rows("SELECT * FROM t ORDER BY id") == [(1, None, 5), (2, None, 6)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_table_that_somebody_dropped_is_not_made_again_without_its_rows(
    pair: tuple[Source, Mirror], is_restarted: bool
) -> None:
    source, mirror = pair
    batch = source.read("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 5)")
    with mirror.sql.transaction(force_rollback=True):  # what is rolled back was never there
        mirror.applier.apply(batch)
    mirror.begin()
    mirror.apply(batch)
    mirror.apply(source.read("INSERT INTO t VALUES (2, 6)"))
    if is_restarted:
        mirror.close()
        mirror.restart()
    mirror.sql.execute("DROP TABLE t")
    later = source.read("INSERT INTO t VALUES (3, 7)")
    mirror.apply(later)
    assert list(mirror.held.values()) == ["it was dropped at the target"]
    mirror.reload(source)
    assert mirror.rows("SELECT * FROM t ORDER BY id") == [(1, 5), (2, 6), (3, 7)]


def test_a_name_that_is_free_by_right_is_taken_again(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"))
    mirror.apply(source.read("ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (2)"))
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (3)"))
    mirror.apply(source.read("INSERT INTO t VALUES (4)"))
    mirror.sql.execute("DROP TABLE t")
    mirror.apply(source.read("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (5)"))
    mirror.reload(source)
    assert mirror.rows("SELECT id FROM t") == [(5,)] and mirror.rows("SELECT id FROM u ORDER BY 1") == [(1,), (2,)]


# --- rows that the target refuses


def rejected(mirror: Mirror) -> list[str]:
    return [key for (key,) in mirror.rows("SELECT key FROM pgcdc_rejected ORDER BY position, key")]


def test_a_refused_row_is_named_and_all_others_are_applied(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.sql.execute("CREATE TABLE t (id int PRIMARY KEY, a smallint CHECK (a <> 13), b text NOT NULL)")
    batch = source.read(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b text)",
        "INSERT INTO t SELECT i, i, 'x' FROM generate_series(1, 300) i",
        "INSERT INTO t VALUES (1000, 70000, 'x'), (1001, 1, NULL)",
    )
    faults = mirror.deliver(batch)
    assert [(kind, text) for _, kind, text in faults] == [
        ("check_violation", 'table t: new row for relation "t" violates check constraint "t_a_check"'),
        ("numeric_value_out_of_range",
         'table t, column a: value "70000" is out of range for type smallint. Change the type of the column at the '
         "target; if a transform masks it, to text"),
        ("not_null_violation", 'table t, column b: null value in column "b" of relation "t" violates not-null constraint'),
    ]  # fmt: skip
    assert mirror.rows("SELECT count(*), count(*) FILTER (WHERE id = 13) FROM t") == [(299, 0)]
    assert rejected(mirror) == ['["13"]', '["1000"]', '["1001"]']


def test_a_dead_letter_is_never_put_over_a_newer_row(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text CHECK (a <> 'bad'))")
    batch = source.read(
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "INSERT INTO t VALUES (1, 'bad'), (2, 'bad'), (3, 'bad'), (4, 'bad'), (5, 'good')",
        "UPDATE t SET a = 'newer' WHERE id = 1",
    )
    faults = mirror.deliver(batch)
    assert len(faults) == 4
    mirror.restart()
    mirror.apply(source.read("DELETE FROM t WHERE id = 2"))
    with mirror.sql.transaction(force_rollback=True):  # what is rolled back supersedes nothing
        mirror.applier.apply(source.read("UPDATE t SET a = 'lost' WHERE id = 3"))
    mirror.begin()
    again = as_letters(batch.only([at for at, _, _ in faults]))
    mirror.sql.execute("ALTER TABLE t DROP CONSTRAINT t_a_check")
    assert rejected(mirror) == ['["3"]', '["4"]']
    assert mirror.redeliver(again) == {faults[0][0], faults[1][0]}
    assert rejected(mirror) == []
    assert mirror.rows("SELECT * FROM t ORDER BY id") == [(1, "newer"), (3, "bad"), (4, "bad"), (5, "good")]
    assert mirror.redeliver(again) == {at for at, _, _ in faults}
    assert mirror.rows("SELECT count(*) FROM t") == [(4,)]


def test_a_newer_dead_letter_supersedes_an_older_one_and_a_truncate_all(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text CHECK (a NOT LIKE 'bad%'))")
    batch = source.read(
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "INSERT INTO t VALUES (1, 'bad')",
        "UPDATE t SET a = 'bad2' WHERE id = 1",
        "INSERT INTO t VALUES (2, 'bad')",
    )
    faults = mirror.deliver(batch)
    mirror.sql.execute("ALTER TABLE t DROP CONSTRAINT t_a_check")
    single = [as_letters(batch.slice(number, number + 1)) for number in range(3)]
    assert mirror.redeliver(single[1]) == set()
    assert mirror.redeliver(single[0]) == {faults[0][0]}
    assert mirror.rows("SELECT * FROM t") == [(1, "bad2")]
    mirror.apply(source.read("TRUNCATE t"))
    assert mirror.redeliver(single[2]) == {faults[2][0]}
    assert mirror.rows("SELECT * FROM t") == []


def test_a_dead_letter_finds_its_table_under_another_name(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text CONSTRAINT good CHECK (a <> 'bad'), b int)")
    batch = source.read(
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int)", "INSERT INTO t VALUES (1, 'bad'), (2, 'bad'), (3, 'bad')"
    )
    assert len(mirror.deliver(batch)) == 3
    mirror.apply(source.read("ALTER TABLE t RENAME TO u", "UPDATE u SET a = 'newer' WHERE id = 1"))
    mirror.sql.execute("ALTER TABLE u DROP CONSTRAINT good")
    dead = [as_letters(batch.slice(number, number + 1)) for number in range(3)]
    assert mirror.redeliver(dead[0]) and not mirror.redeliver(dead[1])
    assert mirror.rows("SELECT id, a FROM u ORDER BY id") == [(1, "newer"), (2, "bad")]
    assert mirror.rows("SELECT to_regclass('t')") == [(None,)]
    mirror.apply(source.read("ALTER TABLE u RENAME b TO c", "UPDATE u SET c = 1 WHERE id = 1"))
    with pytest.raises(psycopg.DataError, match="has the column b, which the table no longer has"):
        mirror.redeliver(dead[2])
    mirror.apply(
        source.read("ALTER TABLE u DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (a, id)", "UPDATE u SET c = 2 WHERE id = 1")
    )
    assert mirror.redeliver(dead[2])  # by another key nobody knows what is newer


def test_a_key_that_a_refused_row_left_is_free_after_its_replay(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text CHECK (a <> 'bad'))")
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'a')"))
    batch = source.read("UPDATE t SET id = 2, a = 'bad' WHERE id = 1")
    assert len(mirror.deliver(batch)) == 1
    mirror.apply(source.read("UPDATE t SET a = 'newer' WHERE id = 2"))
    assert mirror.rows("SELECT * FROM t ORDER BY id") == [(1, "a"), (2, "newer")]
    assert len(mirror.redeliver(as_letters(batch.first(1)))) == 1
    assert_equal(source, mirror, ("public", "t"))


def test_an_update_without_its_long_value_is_refused_where_the_row_is_missing(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    source.read(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, body text)", "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO docs SELECT i, 0, repeat(md5(i::text), 200) FROM generate_series(1, 2) i",
    )  # fmt: skip
    mirror.sql.execute("CREATE TABLE docs (id int PRIMARY KEY, n int, body text)")
    mirror.sql.execute("INSERT INTO docs VALUES (2, 0, 'there')")
    faults = mirror.deliver(source.read("UPDATE docs SET n = 1", "UPDATE docs SET n = 2 WHERE id = 2"))
    assert [kind for _, kind, _ in faults] == ["missing_row"]
    assert "--toast cache" in faults[0][2]
    assert mirror.rows("SELECT * FROM docs") == [(2, 2, "there")]


def test_an_update_without_its_long_value_is_refused_behind_a_refused_change_of_the_row(
    pair: tuple[Source, Mirror],
) -> None:
    """The target has an older long value: keeping it would be wrong, and nobody would see it."""
    source, mirror = pair
    mirror.sql.execute("CREATE TABLE docs (id int PRIMARY KEY, n int CONSTRAINT taste CHECK (n <> 13), body text)")
    mirror.apply(
        source.read(
            "CREATE TABLE docs (id int PRIMARY KEY, n int, body text)", "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
            "INSERT INTO docs SELECT i, 0, repeat(md5(i::text), 200) FROM generate_series(1, 3) i",
        )
    )  # fmt: skip
    assert mirror.deliver(source.read("UPDATE docs SET n = 1 WHERE id = 1")) == []
    first = source.read("UPDATE docs SET n = 13, body = repeat('new', 3000) WHERE id IN (1, 2)")
    faults = mirror.deliver(first)
    assert [kind for _, kind, _ in faults] == ["check_violation", "check_violation"]
    second = source.read(
        "UPDATE docs SET n = 2 WHERE id = 1",
        "UPDATE docs SET n = 3, body = repeat('newest', 3000) WHERE id = 2",
        "UPDATE docs SET n = 4 WHERE id IN (2, 3)",
    )
    faults += mirror.deliver(second)
    assert faults[2][1] == "missing_value" and "dead letter" in faults[2][2] and len(faults) == 3
    assert rejected(mirror) == ['["1"]', '["1"]']
    rows = mirror.rows("SELECT id, n, left(body, 6) = 'newest' FROM docs ORDER BY id")
    assert rows == [(1, 1, False), (2, 4, True), (3, 4, False)]
    third = source.read("UPDATE docs SET n = 5 WHERE id = 1")
    assert [kind for _, kind, _ in mirror.deliver(third)] == ["missing_value"]
    mirror.sql.execute("ALTER TABLE docs DROP CONSTRAINT taste")
    letters = [as_letters(first.first(1)), as_letters(second.first(1)), as_letters(third.first(1))]
    with pytest.raises(psycopg.DataError, match="replay both in order"):
        mirror.redeliver(letters[2])
    assert [mirror.redeliver(one) for one in letters] == [set(), set(), set()]
    assert rejected(mirror) == []
    assert_equal(source, mirror, ("public", "docs"))


# --- loops


def test_a_table_that_would_feed_itself_is_refused(database: Database, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.create()
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    ((system,),) = database.query("SELECT system_identifier::text FROM pg_control_system()")
    state.save_identity(Identity("postgres", system, database.name, "s", "i", 0, {"publications": [{"name": "p"}]}))

    def check(schema: str | None = None) -> None:
        options = PgTableOptions(db=database.url, mode="apply", target_schema=schema)
        acks = state.path / "acks"
        run(PgTableSink(options), acks, "mirror").check()

    with pytest.raises(SinkError, match="would write the rows of t to a table that this pipeline captures"):
        check()
    check("mirror")


def test_a_table_that_would_feed_itself_is_refused_before_anything_is_made(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    given = {"db": database.url, "tables": ["t"], "adapters": ["pg_table"], "pg_table_mode": "apply",
             "slot_name": f"s_{database.name}", "state_dir": str(tmp_path / "state")}  # fmt: skip

    def look(**more: str) -> Finding:
        config = load_config({**given, **more}, {}, None)
        return next(one for one in run_checks(config) if one.name == "adapter pg_table")

    found = look()
    assert (
        found.status == "failed" and "would write the rows of t to a table that this pipeline captures" in found.detail
    )
    assert look(pg_table_target_schema="mirror").status == "ok"
    with pytest.raises(ConfigError, match="would write the rows of t to a table that this pipeline captures"):
        Pipeline(load_config(given, {}, None)).run()
    assert not (tmp_path / "state").exists()
    assert database.query("SELECT pubname FROM pg_publication") == []
    assert database.query("SELECT FROM pg_replication_slots WHERE database = current_database()") == []


# --- transforms


def changed(batch: Batch, *changes: tuple[str, str]) -> Batch:
    """The batch with other texts in its lines: as a transform would have written them."""
    lines = batch.texts()
    for before, after in changes:
        lines = [line.replace(before, after) for line in lines]
    return Batch(batch.start, batch.end, pa.table({"position": batch.positions(), "line": pa.array(lines)}))


def test_columns_follow_what_transforms_left(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    batch = source.read("CREATE TABLE t (id int PRIMARY KEY, a int, b text)", "INSERT INTO t VALUES (1, 5, 'x')")
    mirror.apply(changed(batch, ('"a":"5"', '"renamed":"5"'), ('"b":"x"', '"b":"x","added":"y"')))
    assert mirror.rows("SELECT id, renamed, b, added FROM t") == [(1, "5", "x", "y")]
    batch = changed(source.read("INSERT INTO t VALUES (2, 6, 'x')"), ('"a":"6"', '"renamed":"6"'))
    faults = mirror.deliver(changed(batch, ('"id":"2"', '"id":"***"')))
    assert [kind for _, kind, _ in faults] == ["invalid_text_representation"]
    assert "column id" in faults[0][2] and "masks it, to text" in faults[0][2]


def test_a_key_that_transforms_renamed_is_the_one_of_the_target(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    batch = source.read(
        "CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 5)", "UPDATE t SET a = 6"
    )
    batch = changed(batch, ('"id":"1"', '"number":"1"'))
    with pytest.raises(SinkError, match='rows of table t lack "id", the key by which rows are found'):
        mirror.apply(batch)
    mirror.sql.execute("CREATE TABLE t (number int PRIMARY KEY, a int)")
    mirror.begin()
    mirror.apply(batch)
    assert mirror.rows("SELECT * FROM t") == [(1, 6)]


def test_other_envelopes_are_refused(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    batch = source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    for line, what in (
        ('{"schema":null,"payload":{"before":null,"after":{"id":1},"op":"c"}}\n', "Debezium's"),
        ('{"specversion":"1.0","id":"1","data":{}}\n', "another"),
    ):
        other = pa.table({"position": batch.positions(), "line": pa.array([line])})
        with pytest.raises(SinkError, match=f"a line has {what} envelope.*use the mode append"):
            mirror.apply(Batch(batch.start, batch.end, other))


def test_a_target_that_cannot_be_written_to_is_not_a_reject(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    batch = source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    mirror.sql.execute("SET default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        mirror.deliver(batch)
