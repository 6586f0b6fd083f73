"""The apply mode of pg_table where tables are not the common ones, or others work at the target, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from applying import Mirror, Source, content, cuts, two_databases
from running import run

from pgcdc.core.errors import SinkError
from pgcdc.core.state import StateDir
from pgcdc.event.shape import diff_shapes
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import connect
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.sink import PgTableSink
from pgcdc.sink.pg_table.target import Effect, Rejected
from pgcdc.sink.pg_table.writer import MOST_TABLES
from pgcdc.sink.runner import Runner


@pytest.fixture
def pair(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[Source, Mirror]]:
    with two_databases(postgres) as (source_url, target_url):
        source = Source(source_url, tmp_path / "state")
        mirror = Mirror(target_url, source.state)
        try:
            yield source, mirror
        finally:
            mirror.close()
            source.close()


def assert_equal(source: Source, mirror: Mirror, *tables: str) -> None:
    for table in tables:
        assert content(mirror.sql, ("public", table)) == content(source.sql, ("public", table))


# --- rows that are not there


def test_deletes_that_find_no_row_are_counted_and_said(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE t (id int PRIMARY KEY, a text)",
            "CREATE TABLE bag (a text)",
            "ALTER TABLE bag REPLICA IDENTITY FULL",
            "INSERT INTO t SELECT i, 'r' FROM generate_series(1, 9) i",
            "INSERT INTO bag VALUES ('x'), ('x'), ('y')",
        )
    )
    assert not mirror.applier.missed and not any("or delete" in one for one in mirror.said)
    mirror.sql.execute("DELETE FROM t WHERE id <= 3")
    mirror.sql.execute("DELETE FROM bag WHERE a = 'y'")
    mirror.apply(source.read("DELETE FROM t WHERE id IN (2, 3, 4)", "DELETE FROM bag"))
    assert mirror.applier.missed == {"t": 2, "bag": 1}
    assert any(
        one.startswith("table t: 2 rows to update or delete not found at the target (2 since") for one in mirror.said
    )
    assert any(one.startswith("table bag: 1 row ") and "pgcdc verify --repair" in one for one in mirror.said)
    mirror.apply(source.read("DELETE FROM t WHERE id = 1", "UPDATE t SET a = 'changed' WHERE id > 4"))
    assert mirror.applier.missed == {"t": 3, "bag": 1} and "(3 since" in mirror.said[-1]
    assert_equal(source, mirror, "t", "bag")


def test_deletes_of_a_table_that_is_not_there_are_counted(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    mirror.apply(source.read("DELETE FROM t"))
    assert mirror.applier.missed == {"t": 2}


def test_what_a_rollback_undid_is_not_counted_twice(pair: tuple[Source, Mirror]) -> None:
    """Rows that exchange a unique value are applied in halves: the first try, which missed a row, is rolled back."""
    source, mirror = pair
    tables = "CREATE TABLE t (id int PRIMARY KEY, a int, UNIQUE (a) DEFERRABLE)"
    mirror.apply(source.read(tables, "INSERT INTO t VALUES (1, 10), (2, 20), (3, 30)"))
    mirror.sql.execute("ALTER TABLE t ADD UNIQUE (a)")
    mirror.sql.execute("DELETE FROM t WHERE id = 3")
    mirror.apply(
        source.read(
            "DELETE FROM t WHERE id = 3",
            "UPDATE t SET a = 99 WHERE id = 1",
            "UPDATE t SET a = 10 WHERE id = 2",
            "UPDATE t SET a = 20 WHERE id = 1",
        )
    )
    assert mirror.applier.missed == {"t": 1}
    assert_equal(source, mirror, "t")


# --- keys


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rows_that_take_the_keys_of_others_are_all_there(pair: tuple[Source, Mirror], seed: int) -> None:
    """A deferrable key is checked at the end: until then two rows may have the same."""
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE s (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, a text)",
            "ALTER TABLE s REPLICA IDENTITY FULL",
            "INSERT INTO s SELECT i, 'r' || i FROM generate_series(1, 50) i",
        )
    )
    batch = source.read(
        "UPDATE s SET id = id + 1",
        "UPDATE s SET id = 100 - id",
        "DELETE FROM s WHERE id % 7 = 0",
        "UPDATE s SET id = id + 1000, a = a || 'z' WHERE id > 60",
        "BEGIN; UPDATE s SET id = 50 WHERE id = 51; DELETE FROM s WHERE id = 50 AND a = 'r49'; COMMIT",
    )
    for piece in cuts(batch, seed, 9):
        mirror.apply(piece)
    assert_equal(source, mirror, "s")
    mirror.apply(source.read("INSERT INTO s VALUES (500, 'a')", "UPDATE s SET id = id + 1"))
    assert_equal(source, mirror, "s")


def test_rows_of_the_same_content_keep_their_number_when_keys_shift(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE s (id int PRIMARY KEY DEFERRABLE, a text)",
            "ALTER TABLE s REPLICA IDENTITY FULL",
            "INSERT INTO s SELECT i, 'same' FROM generate_series(1, 9) i",
        )
    )
    mirror.apply(source.read("UPDATE s SET id = id + 1"))
    assert_equal(source, mirror, "s")


def test_an_identity_beside_the_key_follows_though_it_cannot_be_updated(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    table = "CREATE TABLE i (code text PRIMARY KEY, seq int GENERATED ALWAYS AS IDENTITY, v int)"
    mirror.sql.execute(table)
    mirror.apply(source.read(table, "INSERT INTO i (code, v) VALUES ('a', 1), ('b', 2), ('c', 3)"))
    mirror.apply(source.read("UPDATE i SET v = 5 WHERE code = 'a'", "UPDATE i SET seq = DEFAULT WHERE code = 'b'"))
    assert_equal(source, mirror, "i")
    mirror.apply(source.read("UPDATE i SET v = 6", "UPDATE i SET seq = DEFAULT WHERE code = 'c'"))
    assert_equal(source, mirror, "i")


def test_a_row_without_a_key_goes_though_its_table_has_a_new_column(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE k (a int, b text)",
            "ALTER TABLE k REPLICA IDENTITY FULL",
            "INSERT INTO k VALUES (1, 'x'), (2, 'y'), (3, 'z')",
        )
    )
    mirror.apply(source.read("ALTER TABLE k ADD c int", "DELETE FROM k WHERE a = 1"))
    assert_equal(source, mirror, "k")
    mirror.sql.execute("ALTER TABLE k DROP c")
    mirror.restart()
    mirror.apply(source.read("DELETE FROM k WHERE a = 2"))
    mirror.reload(source)
    assert_equal(source, mirror, "k")


def test_equal_keys_with_other_texts_are_one_row(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE n (id numeric PRIMARY KEY, a text)", "INSERT INTO n VALUES (1.0, 'a')"))
    batch = source.read("DELETE FROM n", "INSERT INTO n VALUES (1.00, 'b')")
    mirror.apply(batch)
    assert_equal(source, mirror, "n")


# --- tables


def test_tables_that_refer_to_each_other_are_emptied_where_foreign_keys_are_checked(
    pair: tuple[Source, Mirror],
) -> None:
    source, mirror = pair
    tables = "CREATE TABLE p (id int PRIMARY KEY); CREATE TABLE c (id int PRIMARY KEY, p int REFERENCES p)"
    mirror.sql.execute(tables)
    mirror.sql.execute("CREATE TABLE mine (c int REFERENCES c)")  # so TRUNCATE is refused
    mirror.sql.execute("SET session_replication_role = origin")
    mirror.apply(source.read(tables, "INSERT INTO p VALUES (1)", "INSERT INTO c VALUES (1, 1)"))
    assert mirror.deliver(source.read("TRUNCATE p, c")) == []
    assert_equal(source, mirror, "p", "c")


def test_a_table_that_takes_the_name_of_another_is_not_mixed_with_it(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE t (id int PRIMARY KEY)",
            "INSERT INTO t VALUES (1)",
            "CREATE TABLE t_new (id int PRIMARY KEY)",
            "INSERT INTO t_new VALUES (2)",
        )
    )
    batch = source.read(
        "ALTER TABLE t RENAME TO t_old", "ALTER TABLE t_new RENAME TO t", "INSERT INTO t VALUES (3)"
    )  # of t_old no event tells
    mirror.apply(batch)
    assert list(mirror.held.values()) == [
        "it was renamed from t_new, but the target still has a table with the new name"
    ]
    mirror.reload(source)
    assert_equal(source, mirror, "t")
    mirror.apply(source.read("INSERT INTO t_old VALUES (4)"))  # its name at the target is another table's by now
    assert list(mirror.held.values()) == ["it was renamed from t, a name that another table has now"]
    mirror.reload(source)
    assert_equal(source, mirror, "t", "t_old")


def test_a_table_that_is_not_ours_is_never_overwritten_by_a_rename(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"))
    mirror.sql.execute("CREATE TABLE mine (id int)")
    with pytest.raises(SinkError, match=r"t was renamed to mine at the source, .* another table with that name"):
        mirror.apply(source.read("ALTER TABLE t RENAME TO mine", "INSERT INTO mine VALUES (2)"))


def test_rows_of_a_table_that_was_dropped_and_made_again_go(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"))
    mirror.apply(source.read("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (2)"))
    assert list(mirror.held.values()) == ["it was dropped and created again"]
    mirror.reload(source)
    assert_equal(source, mirror, "t")


def test_what_somebody_makes_at_the_target_first_is_not_made_again(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read(
            "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", "CREATE TABLE u (id int)", "TRUNCATE u"
        )
    )
    with connect(mirror.url) as somebody:
        somebody.execute("ALTER TABLE t ADD c int")
        somebody.execute("CREATE TABLE u (id int)")
    mirror.apply(source.read("ALTER TABLE t ADD c int", "INSERT INTO t VALUES (2, 3)", "INSERT INTO u VALUES (1)"))
    assert_equal(source, mirror, "t", "u")


def test_very_many_tables_do_not_leave_very_many_staging_tables(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    names = [f"t{number}" for number in range(2 * MOST_TABLES + 3)]
    make = "CREATE TABLE {0} (id int PRIMARY KEY, {0} text); INSERT INTO {0} VALUES (1, 'a')"
    mirror.apply(source.read(*(make.format(name) for name in names)))
    mirror.apply(source.read(*(f"UPDATE {name} SET {name} = 'b'" for name in names)))
    for name in names[:: len(names) - 1]:
        assert_equal(source, mirror, name)
    count = "SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r'"
    assert mirror.rows(count)[0][0] <= MOST_TABLES


# --- adapters that begin at the same time


def sinks(url: str, folder: Path, count: int) -> list[Runner]:
    found = []
    for number in range(count):
        state = StateDir(folder / str(number))
        state.create()
        options = PgTableOptions(db=url, mode="apply", origin="none")
        name = f"sink{number}"
        found.append(run(PgTableSink(options), state.acks, name))
    return found


def test_adapters_that_begin_at_once_do_not_fail_over_tables_of_their_own(
    pair: tuple[Source, Mirror], tmp_path: Path
) -> None:
    source, mirror = pair
    faults: list[Exception] = []
    gate = threading.Barrier(4)

    def begin(sink: Runner) -> None:
        gate.wait()
        try:
            sink.open(source.start)
        except SinkError as error:
            faults.append(error)

    for number in range(5):
        mirror.sql.execute("DROP TABLE IF EXISTS pgcdc_positions")
        found = sinks(mirror.url, tmp_path / f"round{number}", 4)
        threads = [threading.Thread(target=begin, args=(sink,)) for sink in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for sink in found:
            sink.close()
    assert faults == []


def test_two_adapters_note_their_first_rejects_at_once(pair: tuple[Source, Mirror]) -> None:
    _, mirror = pair
    faults: list[Exception] = []

    def note() -> None:
        with connect(mirror.url) as other, other.transaction():
            other.execute("SET LOCAL application_name = 'second'")
            try:
                Rejected("public", ("b", "")).note(other, [Effect("t", "k", "1")])
            except psycopg.Error as error:
                faults.append(error)

    with connect(mirror.url) as first, first.transaction():
        Rejected("public", ("a", "")).note(first, [Effect("t", "k", "1")])
        thread = threading.Thread(target=note)
        thread.start()
        waiting = "SELECT FROM pg_stat_activity WHERE application_name = 'second' AND wait_event_type = 'Lock'"
        while mirror.sql.execute(waiting).fetchone() is None:
            pass
    thread.join()
    assert faults == []
    assert mirror.rows("SELECT count(*) FROM pgcdc_rejected") == [(2,)]


def test_updates_that_find_no_row_are_counted_and_make_it(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(
        source.read("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    )
    mirror.apply(source.read("UPDATE t SET a = 0", "DELETE FROM t WHERE id = 3", "INSERT INTO t VALUES (3, 5)"))
    assert not mirror.applier.missed
    mirror.sql.execute("DELETE FROM t WHERE id < 3")
    mirror.apply(
        source.read("UPDATE t SET a = 9 WHERE id = 2", "INSERT INTO t VALUES (4, 4)", "UPDATE t SET a = 5 WHERE id = 4")
    )
    assert mirror.applier.missed == {"t": 1}
    assert mirror.rows("SELECT * FROM t ORDER BY id") == [(2, 9), (3, 5), (4, 5)]


def test_a_column_that_somebody_made_at_the_target_is_not_dropped(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"))
    mirror.sql.execute("ALTER TABLE t ADD note text DEFAULT 'mine'")
    mirror.apply(source.read("ALTER TABLE t ADD note varchar(20) DEFAULT 'new'", "INSERT INTO t VALUES (2, 'x')"))
    assert list(mirror.held.values()) == ["the target has a column note that the source lacked"]
    mirror.reload(source)
    assert mirror.rows("SELECT id, note, pg_typeof(note)::text FROM t ORDER BY 1") == [
        (1, "new", "text"),
        (2, "x", "text"),
    ]


def test_a_rewrite_of_a_column_with_a_missing_value_is_noticed(pair: tuple[Source, Mirror]) -> None:
    source, mirror = pair
    mirror.apply(source.read("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)"))
    mirror.apply(source.read("ALTER TABLE t ADD v int DEFAULT 5", "INSERT INTO t VALUES (2, 2)"))
    change = source.described_again("t", "ALTER TABLE t ALTER v TYPE int USING v * 100")
    assert [one["type"] for one in diff_shapes(change)] == ["rewritten"]
