"""Row filters, column lists, schemas and generated columns of our publications, on real servers. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from databases import Database
from listening import wait_until
from preparing import Wanted, follow_tables, prepare

from pgcdc.capture.control import ensure_capture
from pgcdc.core.errors import GapError, SourceError
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.source.postgres.setup.publications import check_version
from pgcdc.spool.reader import SpoolReader, read_slice


def options(database: Database, folder: Path, **more: Any) -> Wanted:
    base = {"db": database.url, "slot_name": f"s_{database.name}", "state_dir": str(folder / "state")}
    return Wanted(**{**base, **more})


def members(database: Database, name: str) -> dict[str, tuple[list[str], str | None]]:
    """Columns and filter of each published table."""
    rows = database.query(
        "SELECT tablename::text, attnames::text[], rowfilter FROM pg_publication_tables WHERE pubname = %s", [name]
    )
    return {table: (columns, row_filter) for table, columns, row_filter in rows}


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total int, note text)")
    database.execute("CREATE TABLE items (id int PRIMARY KEY, sku text)")
    database.execute("CREATE TABLE log (at int, text text)")
    return database


def received(database: Database, source: Wanted, count: int) -> list[list[bytes | None]]:
    """What arrives in the spool."""
    with closing(ensure_capture(prepare(source).spec, is_restart=False)) as client:
        client.join("one")
        reader = SpoolReader(Path(source.state_dir) / "spool")
        found: list[list[bytes | None]] = []

        def arrived() -> bool:
            nonlocal found
            client.wait(0.05)
            reader.refresh()
            pieces = reader.slices(reader.base, reader.end)
            found = [new for piece in pieces for new in read_slice(piece)[0].column("new").to_pylist()]
            return len(found) >= count

        wait_until(arrived, 20, f"{count} rows")
        client.stop()
    return found


def test_only_the_rows_and_columns_that_are_wanted_arrive(shop: Database, tmp_path: Path) -> None:
    source = options(
        shop, tmp_path, tables=("orders", "log"),
        row_filters=("orders=id > 10", "log=text LIKE 'a%' OR text = '%'"), columns=("orders=id, note",),
    )  # fmt: skip
    name = prepare(source).names[0]
    assert members(shop, name)["orders"] == (["id", "note"], "(id > 10)")
    shop.execute("INSERT INTO orders VALUES (1, 1, 'no'), (11, 2, 'yes')")
    shop.execute("INSERT INTO log VALUES (1, 'abc'), (2, 'bcd'), (3, '%')")
    shop.execute("UPDATE orders SET note = 'changed'")  # what the application does still works
    assert received(shop, source, 4) == [[b"11", b"yes"], [b"1", b"abc"], [b"3", b"%"], [b"11", b"changed"]]


def test_changed_rules_are_altered_by_us_said_and_no_gap(shop: Database, tmp_path: Path) -> None:
    source = options(shop, tmp_path, all_tables=True, row_filters=("orders=id > 10",))
    first = prepare(source)
    assert first.changed == []
    name = first.names[0]
    before = shop.query("SELECT array_agg(oid ORDER BY oid) FROM pg_publication_rel")
    assert prepare(source.but(row_filters=("orders=((id)>10)",))).changed == [], "it means the same"
    assert shop.query("SELECT array_agg(oid ORDER BY oid) FROM pg_publication_rel") == before
    changed = prepare(source.but(row_filters=("orders=id > 20",), columns=("items=id",)))
    assert sorted(changed.changed) == [
        "the row filter or columns of table items changed",
        "the row filter or columns of table orders changed",
    ]
    assert members(shop, name)["orders"][1] == "(id > 20)" and members(shop, name)["items"][0] == ["id"]
    assert prepare(source.but(row_filters=())).changed and members(shop, name)["orders"][1] is None
    assert prepare(source.but(row_filters=())).changed == []
    shop.execute(f"ALTER PUBLICATION {name} SET TABLE orders WHERE (id > 3), items")
    with pytest.raises(GapError, match="another row filter or column list for table orders"):
        prepare(source.but(row_filters=()))


REFUSED = {
    "not sql": ({"row_filters": ("orders=id >",)}, "syntax error", "--row-filter"),
    "unknown column in a filter": ({"row_filters": ("orders=nope > 1",)}, "nope", "--row-filter"),
    "not a condition": ({"row_filters": ("orders=id + 1",)}, "boolean", "--row-filter"),
    "a function of the user": ({"row_filters": ("orders=pg_sleep(1) IS NULL",)}, "orders", "--row-filter"),
    "more than an expression": ({"row_filters": ("orders=id > 1), ONLY items WHERE (id > 1",)}, "more than one", ""),
    "a second statement": ({"row_filters": ("orders=id > 1); DROP TABLE items; --",)}, "orders", "--row-filter"),
    "not in the replica identity": ({"row_filters": ("orders=total > 1",)}, "uses total", "REPLICA IDENTITY FULL"),
    "unknown column": ({"columns": ("orders=id,nope",)}, "nope", "--columns"),
    "without the key": ({"columns": ("orders=total",)}, "leave out id", "Add id to --columns"),
    "a table that is not captured": ({"columns": ("other=id",)}, "table other, which is not captured", "--columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_rule_is_refused_with_advice_and_nothing_is_left_behind(
    shop: Database, tmp_path: Path, case: str
) -> None:
    more, message, advice = REFUSED[case]
    with pytest.raises(SourceError, match=message) as caught:
        prepare(options(shop, tmp_path, all_tables=True, **more))
    assert caught.value.exit_code == 2 and advice in caught.value.advice, caught.value
    assert "\n" not in str(caught.value)
    assert shop.query("SELECT pubname FROM pg_publication") == []
    assert shop.query("SELECT slot_name FROM pg_replication_slots WHERE database = %s", [shop.name]) == []
    assert shop.query("SELECT count(*) FROM items") == [(0,)]
    assert list(tmp_path.iterdir()) == []


def test_rules_that_fit_to_a_full_identity_or_to_inserts_are_fine(shop: Database, tmp_path: Path) -> None:
    shop.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    source = options(
        shop, tmp_path, all_tables=True, row_filters=("orders=total > 1", "log=at > 1"), columns=("log=text",)
    )
    prepare(source)
    shop.execute("INSERT INTO orders VALUES (1, 2, 'x')")
    shop.execute("UPDATE orders SET total = 3")
    with pytest.raises(SourceError, match="leave out total, note"):
        prepare(source.but(columns=("orders=id",)))


def test_a_filtered_table_that_gets_a_key_stays_for_inserts_until_the_next_start(
    shop: Database, tmp_path: Path
) -> None:
    """At once, the application's UPDATE would fail: the filter uses a column that is not in the key."""
    source = options(shop, tmp_path, all_tables=True, row_filters=("log=text <> ''",))
    full, inserts = prepare(source).names
    shop.execute("ALTER TABLE log ADD PRIMARY KEY (at)")
    shop.execute("CREATE TABLE later (id int PRIMARY KEY)")
    follow_tables(source)
    assert "later" in members(shop, full) and list(members(shop, inserts)) == ["log"]
    shop.execute("INSERT INTO log VALUES (1, 'x')")
    shop.execute("UPDATE log SET text = 'y'")
    with pytest.raises(SourceError, match="the row filter of table log uses text"):
        prepare(source)
    prepare(source.but(row_filters=("log=at > 0",)))
    assert members(shop, full)["log"][1] == "(at > 0)" and members(shop, inserts) == {}


def test_a_filter_of_a_partitioned_table_needs_its_root(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    with pytest.raises(SourceError, match="PostgreSQL refuses the row filter or columns of table p") as caught:
        prepare(options(database, tmp_path, tables=("p",), row_filters=("p=id > 1",), partition_root=False))
    assert "Name its partitions" in caught.value.advice
    prepare(options(database, tmp_path / "leaf", slot_name="leaf", tables=("p1",), row_filters=("p1=id > 1",)))
    by_root = options(database, tmp_path, tables=("p",), row_filters=("p=id > 1",), columns=("p=id",))
    assert members(database, prepare(by_root).names[0]) == {"p": (["id"], "(id > 1)")}
    database.execute("INSERT INTO p VALUES (1, 'a'), (2, 'b'); UPDATE p SET v = 'c'")
    database.execute("ALTER TABLE p1 REPLICA IDENTITY FULL")
    with pytest.raises(SourceError, match="leave out v"):  # of the partition: PostgreSQL would refuse its updates
        prepare(options(database, tmp_path / "full", slot_name="other", tables=("p",), columns=("p=id",)))


def test_schemas_stand_for_their_tables_and_those_to_come(database: Database, tmp_path: Path) -> None:
    database.execute('CREATE SCHEMA sales; CREATE SCHEMA "Shop"; CREATE SCHEMA other')
    for table in ("sales.a", '"Shop".b', "other.c", "d"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    database.execute("CREATE TABLE sales.keyless (id int)")
    source = options(database, tmp_path, schemas=("sales", '"Shop"'))
    full, inserts = prepare(source).names
    assert (sorted(members(database, full)), sorted(members(database, inserts))) == (["a", "b"], ["keyless"])
    database.execute("INSERT INTO sales.keyless VALUES (1)")
    database.execute("UPDATE sales.keyless SET id = 2")
    database.execute("CREATE TABLE sales.later (id int PRIMARY KEY); CREATE TABLE other.later2 (id int PRIMARY KEY)")
    assert "sales.later" in follow_tables(source)[0].tables
    assert sorted(members(database, full)) == ["a", "b", "later"]
    with pytest.raises(SourceError, match="schema nothere does not exist") as caught:
        prepare(source.but(schemas=("nothere",)))
    assert "sales" in caught.value.advice
    assert prepare(source.but(schemas=("sales",))).left_out == ('"Shop".b',)


def test_generated_columns_are_published_on_request(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    source = options(database, tmp_path, tables=("t",))
    name = prepare(source).names[0]
    assert members(database, name)["t"][0] == ["id"]
    with_them = source.but(generated_columns=True)
    assert any("generated columns: stored" in change for change in prepare(with_them).changed)
    assert prepare(with_them).changed == []
    database.execute("INSERT INTO t VALUES (4)")
    assert received(database, with_them, 1) == [[b"4", b"8"]]
    database.execute(f"ALTER PUBLICATION {name} SET (publish_generated_columns = none)")
    with pytest.raises(GapError, match="no longer publishes generated columns"):
        prepare(with_them)


def test_older_servers_refuse_in_words(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="need PostgreSQL 15, but this is 14"):
        check_version(140010, has_rules=True, generated_columns=False)
    check_version(140010, has_rules=False, generated_columns=False)
    with EmbeddedPostgres.temporary(version=16, settings={"fsync": "off"}) as server:
        database = Database("postgres", server.url(), server)
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        source = options(database, tmp_path, tables=("t",))
        with pytest.raises(SourceError, match="since PostgreSQL 18, but this is 16"):
            prepare(source.but(generated_columns=True))
        assert database.query("SELECT 1 FROM pg_publication") == []
        name = prepare(source.but(row_filters=("t=id > 1",))).names[0]
        assert prepare(source.but(row_filters=("t=id > 2",))).changed
        assert members(database, name)["t"][1] == "(id > 2)"


@pytest.fixture(autouse=True)
def no_capture_is_left(tmp_path: Path) -> Iterator[None]:
    from pgcdc.core.state import Lock, StateDir

    yield
    lock = StateDir(tmp_path / "state").capture_lock
    wait_until(lambda: Lock.holder(lock) is None, 10, "the capture ends")
