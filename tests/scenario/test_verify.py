"""`pgcdc verify` between two real servers' databases: what is equal, and each kind of difference that somebody plants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from applying import two_databases
from verifying import ITEMS, ROWS, adapter, mirrored

from pgcdc.core.errors import ConfigError, GapError, PgcdcError, StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock
from pgcdc.playground.postgres import EmbeddedPostgres, find_binaries
from pgcdc.run.verify import comparing, job
from pgcdc.run.verify.job import Verify, VerifyOptions
from pgcdc.run.verify.sides import SqlSide


def test_equal_tables_are_equal(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, _):
        report = flow.verify()
        (one,) = report.tables
        assert (report.exit_code, report.verdict, one.outcome, one.method) == (0, "equal", "equal", "ranges")
        assert (one.rows, one.equal, one.ranges) == (1000, 1000, 1)
        assert not (flow.state.path / "verify.json").exists()


def test_missing_extra_and_different_rows_are_found_with_their_keys(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, mirror):
        flow.deliver("DELETE FROM items WHERE id = 500")
        mirror.execute("DELETE FROM items WHERE id IN (3, 999)")
        mirror.execute("UPDATE items SET price = price + 1 WHERE id = 7")
        mirror.execute("UPDATE items SET name = NULL WHERE id = 8")
        mirror.execute("INSERT INTO items (id, name) VALUES (500, 'a lost delete'), (-1, 'of somebody')")
        report = flow.verify()
        (one,) = report.tables
        assert report.exit_code == 1
        assert (one.missing, one.extra, one.different, one.unsettled, one.equal) == (2, 2, 2, 0, 995)
        assert {name: sorted(keys) for name, keys in one.keys.items()} == {
            "missing": [["3"], ["999"]],
            "extra": [["-1"], ["500"]],
            "different": [["7"], ["8"]],
        }
        assert flow.check(keys=1)["mirror/items"].keys["missing"] == [["3"]]


TYPES = """CREATE TABLE "Odd ""Types" ("Id" uuid DEFAULT gen_random_uuid(), n int, b bool, c char(5), num numeric, f float8,
r real, at timestamptz, d date, iv interval, raw bytea, arr text[], js jsonb, "per%cent" text, PRIMARY KEY ("Id", n))"""
VALUES = """INSERT INTO "Odd ""Types" (n, b, c, num, f, r, at, d, iv, raw, arr, js, "per%cent") SELECT n, n % 2 = 0, 'c',
(n || '.00')::numeric, n / 3.0, n / 7.0, 'epoch'::timestamptz + n * interval '1 hour', 'epoch'::date + n,
n * interval '1 min',
decode('00ff' || lpad(n::text, 4, '0'), 'hex'), ARRAY['a"b', NULL, '', 'ä,{}'], jsonb_build_object('n', n),
CASE n % 3 WHEN 0 THEN NULL WHEN 1 THEN '' ELSE E'quo''te "\\\\\\t\\n,()' END FROM generate_series(1, 200) n"""


def test_values_of_all_kinds_are_equal_and_their_differences_found(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, TYPES, VALUES) as (flow, mirror):
        one = flow.check()['mirror/"Odd ""Types"']
        assert (one.outcome, one.rows, one.method) == ("equal", 200, "ranges")
        changes = [
            "num = round(num, 1)", "b = NOT b", "c = 'd'", "f = f + 1e-12", "r = r + 1e-3", "at = at + interval '1us'",
            "iv = iv + interval '1s'", "raw = raw || '\\x00'", "arr = arr || NULL::text", "js = '{}'",
            "\"per%cent\" = NULL", "d = d + 1",
        ]  # fmt: skip
        for number, change in enumerate(changes, 1):
            mirror.execute(f'UPDATE "Odd ""Types" SET {change} WHERE n = {number * 3 + 1}'.encode())
        one = flow.check()['mirror/"Odd ""Types"']
        assert (one.different, one.missing, one.extra) == (len(changes), 0, 0)
        found = sorted(int(key[1]) for key in one.keys["different"])
        assert found == [number * 3 + 1 for number in range(1, len(changes) + 1)]


WORDS = """INSERT INTO words SELECT chr(97 + n % 26) || upper(chr(97 + n % 7)) || n, 'é-' || n % 3, n
FROM generate_series(1, 3000) n"""


@pytest.fixture(scope="module")
def older() -> Iterator[EmbeddedPostgres]:
    """PostgreSQL 15, with the collations of ICU."""
    try:
        find_binaries(15)
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres.temporary(version=15, settings={"fsync": "off"}) as server:
        yield server


@pytest.mark.parametrize(
    ("here", "there", "method"),
    [
        ('text COLLATE "C"', 'text COLLATE "POSIX"', "ranges"),
        ('text COLLATE "en-x-icu"', 'text COLLATE "C"', "buckets"),
        ("text", "varchar(40)", "buckets"),
        ('char(9) COLLATE "C"', 'char(9) COLLATE "C"', "ranges"),
    ],
)
def test_text_keys_whose_order_may_differ_are_compared_by_buckets(
    postgres: EmbeddedPostgres, older: EmbeddedPostgres, tmp_path: Path, here: str, there: str, method: str
) -> None:
    create = 'CREATE TABLE words (w {}, lang text COLLATE "C", n int, PRIMARY KEY (w, lang))'
    with mirrored(postgres, tmp_path, source=older) as (flow, mirror):
        mirror.execute(create.format(there).encode())
        flow.deliver(create.format(here), WORDS)
        one = flow.check()["mirror/words"]
        assert (one.outcome, one.rows, one.method) == ("equal", 3000, method)
        mirror.execute("DELETE FROM words WHERE n = 17")
        mirror.execute("UPDATE words SET n = 0 WHERE n IN (18, 19)")
        mirror.execute("INSERT INTO words VALUES ('100%', 'x', 1)")
        one = flow.check()["mirror/words"]
        assert (one.missing, one.different, one.extra) == (1, 2, 1)
        assert [key[0].rstrip() for key in one.keys["extra"]] == ["100%"]


def test_keys_that_are_equal_and_written_differently_are_different(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    create, rows = "CREATE TABLE sizes (id numeric PRIMARY KEY, n int)", "INSERT INTO sizes VALUES (1.0, 1), (2.0, 2)"
    with mirrored(postgres, tmp_path, create, rows) as (flow, mirror):
        assert flow.check()["mirror/sizes"].outcome == "equal"
        mirror.execute("UPDATE sizes SET id = 1.00 WHERE id = 1")
        assert flow.check()["mirror/sizes"].keys == {"missing": [["1.0"]], "extra": [["1.00"]]}


def test_servers_that_hash_differently_use_md5(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "must_use_md5", lambda *servers: True)
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, mirror):
        assert flow.check()["mirror/items"].outcome == "equal"
        mirror.execute("UPDATE items SET name = 'ä' WHERE id = 5")
        assert flow.check()["mirror/items"].keys == {"different": [["5"]]}


def test_many_ranges_and_a_difference_in_each_place(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "RANGE_ROWS", 100)
    monkeypatch.setattr(comparing, "GROUP_RANGES", 3)
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, mirror):
        assert (flow.check()["mirror/items"].ranges, flow.check()["mirror/items"].rows) == (11, 1000)
        mirror.execute("DELETE FROM items WHERE id IN (1, 100, 101, 1000)")
        mirror.execute("INSERT INTO items (id) VALUES (0), (1001)")
        one = flow.check()["mirror/items"]
        assert sorted(one.keys["missing"]) == [["1"], ["100"], ["1000"], ["101"]]
        assert sorted(one.keys["extra"]) == [["0"], ["1001"]]


def test_tables_without_a_key_are_compared_as_counted_rows(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    create = ("CREATE TABLE log (a int, b text)", "ALTER TABLE log REPLICA IDENTITY FULL")
    rows = "INSERT INTO log SELECT n % 5, NULL FROM generate_series(1, 50) n"
    with mirrored(postgres, tmp_path, *create, rows) as (flow, mirror):
        one = flow.check()["mirror/log"]
        assert (one.outcome, one.rows) == ("equal", 50)
        assert one.notes == ["the table has no key: its rows are counted, not compared one by one"]
        mirror.execute("DELETE FROM log WHERE ctid = (SELECT min(ctid) FROM log WHERE a = 3)")
        mirror.execute("INSERT INTO log VALUES (9, 'x')")
        one = flow.check()["mirror/log"]
        assert (one.different, one.extra, one.outcome) == (1, 1, "different")


def test_transforms_routes_and_names_of_a_pipeline_hold(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    create = "CREATE TABLE people (id int PRIMARY KEY, email text, secret text, plan text, total numeric(9,2))"
    rows = "INSERT INTO people SELECT n, 'p' || n || '@x', 's', NULLIF(n % 3, 0), n FROM generate_series(1, 300) n"
    transforms = [
        {"type": "drop_columns", "columns": ["secret"]},
        {"type": "rename_fields", "fields": {"id": "person", "plan": "tariff"}},
        {"type": "mask", "columns": ["email"], "mode": "redact"},
    ]
    file = adapter("file", path=str(tmp_path / "events.jsonl"), routes=["people"])
    options: dict[str, Any] = {"transforms": transforms, "specs": [file], "tables": "public.people=crm.persons"}
    with mirrored(postgres, tmp_path, create, ITEMS, rows, ROWS, **options) as (flow, mirror):
        found = flow.check()
        assert {name: (one.outcome, one.rows, one.method) for name, one in found.items()} == {
            "mirror/items": ("equal", 1000, "ranges"),
            "mirror/people": ("equal", 300, "reading"),
            "file/people": ("equal", 300, "reading"),
        }
        mirror.execute("UPDATE crm.persons SET email = 'in clear' WHERE person = 5")
        mirror.execute("UPDATE crm.persons SET tariff = '' WHERE person = 6")
        mirror.execute("DELETE FROM crm.persons WHERE person = 7")
        one = flow.check(adapters=("mirror",), tables=("people",))["mirror/people"]
        assert (sorted(one.keys["different"]), one.keys["missing"]) == ([["5"], ["6"]], [["7"]])


def test_a_masked_or_dropped_key_means_counted_rows(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASK", "correct-horse-battery")
    file = adapter(
        "file",
        path=str(tmp_path / "e.jsonl"),
        transforms=[{"type": "mask", "columns": ["id"], "mode": "hash", "key_env": "MASK"}],
    )
    with mirrored(postgres, tmp_path, ITEMS, ROWS, specs=[file]) as (flow, _):
        one = flow.check(adapters=("file",))["file/items"]
        assert (one.outcome, one.rows) == ("equal", 1000)
        assert one.notes == [
            "the table has a key that transforms drop or mask: its rows are counted, not compared one by one"
        ]


def test_more_and_fewer_columns_and_a_missing_table_are_said(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, mirror):
        mirror.execute("ALTER TABLE items ADD COLUMN ours int, DROP COLUMN at")
        one = flow.check()["mirror/items"]
        assert one.different == 1000 and one.notes == [
            "table items at the target has no column at, so NULL is compared there",
            "table items at the target also has ours: not compared",
        ]
        mirror.execute("DROP TABLE items")
        one = flow.check()["mirror/items"]
        assert (one.missing, one.notes) == (1000, ["table items at the target does not exist"])


def test_a_table_or_column_that_comes_with_the_next_rows_is_no_difference(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    with mirrored(postgres, tmp_path) as (flow, _):
        flow.run(ITEMS, ROWS)
        assert (flow.check()["mirror/items"].outcome, flow.check()["mirror/items"].notes) == ("equal", [])
        flow.run("ALTER TABLE items ADD COLUMN more int", "UPDATE items SET more = 1 WHERE id < 5")
        assert (flow.check()["mirror/items"].outcome, flow.check()["mirror/items"].notes) == ("equal", [])


def test_dead_letters_are_named_as_the_reason(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, mirror):
        mirror.execute("ALTER TABLE items ADD CHECK (price < 1000)")
        flow.deliver("UPDATE items SET price = 5000 WHERE id IN (1, 2)")
        mirror.execute("DELETE FROM items WHERE id = 3")
        one = flow.check()["mirror/items"]
        assert (one.different, one.missing, one.dead_letters, one.explained) == (2, 1, 2, 2)


def test_what_cannot_be_compared_is_said_and_counted(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    sql = {"type": "sql", "set": {"name": "upper(row['name'])"}}
    some = {"type": "filter", "operations": ["INSERT"]}
    specs = [
        adapter("file", "inserts", path=str(tmp_path / "i.jsonl"), transforms=[some]),
        adapter("file", "boxed", path=str(tmp_path / "b.jsonl"), transforms=[{"type": "cloudevents"}]),
        adapter("noop"),
    ]
    with mirrored(postgres, tmp_path, ITEMS, ROWS, specs=specs) as (flow, _):
        report = flow.verify()
        reasons = {one.adapter: one.reason for one in report.tables}
        assert report.exit_code == 3 and report.left_out == ["adapter noop (type noop) cannot be read back"]
        assert reasons["mirror"] == ""
        assert "a filter removes operations" in reasons["inserts"] and "another form" in reasons["boxed"]
        flow.chains = flow.chains.having([replace(flow.chains.specs[0], transforms=(sql,))])
        assert "only Spark can run it" in flow.verify().tables[0].reason


def test_partitions_as_one_table_row_filters_and_column_lists_of_a_publication_hold(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    publication = (
        "CREATE PUBLICATION p FOR TABLE items (id, name) WHERE (id > 500), parts WITH (publish_via_partition_root)"
    )
    parts = "CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)"
    made = [f"CREATE TABLE parts_{n} PARTITION OF parts FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(9)]
    rows = "INSERT INTO parts SELECT n, n FROM generate_series(0, 89) n"
    with mirrored(postgres, tmp_path, "DROP PUBLICATION p", ITEMS, parts, *made, publication, ROWS, rows) as (
        flow,
        mirror,
    ):
        found = flow.check()
        assert {name: (one.outcome, one.rows) for name, one in found.items()} == {
            "mirror/items": ("equal", 500),
            "mirror/parts": ("equal", 90),
        }
        mirror.execute("UPDATE items SET name = '' WHERE id = 501")
        mirror.execute("DELETE FROM parts WHERE id = 55")
        mirror.execute("INSERT INTO items (id) VALUES (500)")
        found = flow.check()
        assert found["mirror/items"].keys == {"different": [["501"]], "extra": [["500"]]}
        assert found["mirror/parts"].keys == {"missing": [["55"]]}


# --- bad input


def test_wrong_names_and_targets_are_refused(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, specs=[adapter("noop")]) as (flow, _):
        for options, text in (
            ({"tables": ("nothing",)}, "table nothing is not captured"),
            ({"adapters": ("mirrow",)}, "adapter mirrow does not exist"),
            ({"adapters": ("noop",)}, "cannot be read back.*pg_table in mode apply, file, redis in mode sync"),
        ):
            with pytest.raises(PgcdcError, match=text):
                flow.verify(**options)
        with two_databases(postgres) as (other, _), pytest.raises(GapError, match="belongs to"):
            Verify(flow.config.but(db=other), flow.chains, VerifyOptions()).run()
        moved = [replace(flow.chains.specs[0], options=flow.chains.specs[0].options.but(target_schema="elsewhere"))]
        with pytest.raises(StateError, match="another target"):
            Verify(flow.config, flow.chains.having(moved), VerifyOptions()).run()
        with pytest.raises(StateError, match="is not a state directory"):
            Verify(flow.config.but(state_dir=tmp_path / "none"), flow.chains).run()


def test_without_a_pipeline_it_compares_only_if_told_to(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, _):
        flow.run("DELETE FROM items WHERE id = 1")
        flow.lock.release()
        for options, text in (({}, "is not running.*--at-rest"), ({"repair": True, "at_rest": True}, "only a running")):
            with pytest.raises(StateError, match=text):
                flow.verify(**options)
        report = flow.verify(at_rest=True)
        assert (report.tables[0].keys, report.position) == ({"extra": [["1"]]}, str(flow.runners[0].ack))


def test_two_at_once_are_refused(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS) as (flow, _):
        lock = Lock(flow.state.path / "verify.lock")
        assert lock.acquire() is not None
        lock.write({"pid": 4711})
        with pytest.raises(StateError, match=r"another verify .* is running \(process 4711\)"):
            flow.verify()
        lock.release()
        assert flow.verify().exit_code == 0


def test_an_interrupted_comparison_goes_on_where_it_was(
    postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "RANGE_ROWS", 100)
    monkeypatch.setattr(comparing, "GROUP_RANGES", 2)
    with mirrored(postgres, tmp_path, ITEMS, ROWS, "ANALYZE items") as (flow, mirror):
        mirror.execute("DELETE FROM items WHERE id IN (50, 950)")
        seen, wait = list[str](), flow.wait

        def interrupted(*given: Any) -> Position:
            if flow.barriers == 5:
                raise KeyboardInterrupt
            return wait(*given)

        monkeypatch.setattr(flow, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            flow.verify()
        monkeypatch.setattr(flow, "wait", wait)
        monkeypatch.setattr(SqlSide, "range_sum", _noting(seen, SqlSide.range_sum))
        flow.shown.clear()
        one = flow.check()["mirror/items"]
        assert (one.rows, one.ranges, sorted(one.keys["missing"])) == (1000, 11, [["50"], ["950"]])
        assert 0 < len(seen) < 20
        rows = [count for _, count, _, _ in flow.shown]
        assert 0 < rows[0] < 1000 and rows == sorted(rows)
        name = "mirror/items"
        assert flow.shown[-2:] == [(name, 1000, 1000, False), (name, 1000, 1000, True)]
        seen.clear()
        assert flow.check(resume=False)["mirror/items"].missing == 2 and len(seen) == 22


def _noting(seen: list[str], call: Any) -> Any:
    def noted(side: SqlSide, part: Any) -> Any:
        seen.append(str(part))
        return call(side, part)

    return noted


def test_the_source_is_not_read_faster_than_allowed(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with mirrored(postgres, tmp_path, ITEMS, ROWS) as (flow, _):
        begun = time.monotonic()
        assert flow.verify(rate=2000.0).exit_code == 0
        assert 0.4 < time.monotonic() - begun < 5
