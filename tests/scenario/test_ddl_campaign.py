"""A few scripts of the campaign (`make campaign-ddl`), and what it has found: whatever the source does, the mirror ends up
equal."""

from __future__ import annotations

import pytest
from campaign_ddl import run_script
from ddl_scripts import Group, write_script

from pgcdc.playground.postgres import EmbeddedPostgres

# Quick ones: no new table, which is looked for every ten seconds. Multiples of three have kills.
SEEDS = (122, 125, 157, 188, 211, 214, 220, 233, 241, 245, 132, 138, 159, 201, 246)

ROOT = (
    "CREATE TABLE p (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
    "CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (10)",
)
TABLE = ("CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 9) g")
BEGUN = Group((), then="settle")
FOUND: dict[str, tuple[Group, ...]] = {
    "a renamed root, whose new name the server does not send": (
        Group((*ROOT, "INSERT INTO p VALUES (1)")),
        BEGUN,
        Group(("INSERT INTO p VALUES (2)", "ALTER TABLE p RENAME TO q"), then="look"),
        Group(("INSERT INTO q VALUES (3)", "UPDATE q SET a = 'new'")),
    ),
    "partitions with rows of a root that had none": (
        Group(ROOT),
        BEGUN,
        Group((
            "CREATE TABLE p1 (LIKE p INCLUDING ALL)", "INSERT INTO p1 VALUES (11)",
            "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (10) TO (20)",
        )),
    ),
    "rows that were changed while there was no key": (
        Group(TABLE),
        BEGUN,
        Group(("ALTER TABLE t DROP CONSTRAINT t_pkey",), then="follow"),
        Group(("UPDATE t SET id = id + 100", "ALTER TABLE t ADD PRIMARY KEY (id)"), then="follow"),
    ),
    "made again without a row": (
        Group(TABLE),
        BEGUN,
        Group(("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)"), then="follow"),
    ),
    "made again with other types": (
        Group(TABLE),
        BEGUN,
        Group((
            "DROP TABLE t", "CREATE TABLE t (id text PRIMARY KEY, a int)", "INSERT INTO t VALUES ('k', 1)",
        ), then="follow"),
    ),
    "a new key, and the column of the old one is dropped": (
        Group(TABLE),
        BEGUN,
        Group((
            "ALTER TABLE t ADD COLUMN sid bigserial", "ALTER TABLE t DROP CONSTRAINT t_pkey",
            "ALTER TABLE t ADD PRIMARY KEY (sid)", "ALTER TABLE t DROP COLUMN id",
        ), how="whole"),
    ),
    "rewritten before a shape that no look has seen": (
        Group(TABLE),
        BEGUN,
        Group((
            "ALTER TABLE t ADD COLUMN n int", "ALTER TABLE t ADD COLUMN b int", "UPDATE t SET b = id",
        ), then="look"),
        Group((
            "ALTER TABLE t ALTER b TYPE int USING b * 2", "ALTER TABLE t RENAME a TO a2", "UPDATE t SET n = 1 WHERE id < 4",
            "ALTER TABLE t DROP COLUMN n",
        ), how="whole"),
    ),
    "a table without a key under the name of one that had a key": (
        Group((*TABLE, "CREATE TABLE bag (a int)", "ALTER TABLE bag REPLICA IDENTITY FULL", "INSERT INTO bag VALUES (1)")),
        BEGUN,
        Group(("ALTER TABLE t RENAME TO t2", "ALTER TABLE bag RENAME TO t", "INSERT INTO t VALUES (2)")),
    ),
    "a type that is gone when the catalog is asked": (
        Group(("CREATE TYPE mood AS ENUM ('fine')", *TABLE)),
        BEGUN,
        Group((
            "CREATE TABLE e (id int PRIMARY KEY, m mood)",
        ), then="follow"),
        Group((
            "INSERT INTO e VALUES (1, 'fine')", "ALTER TABLE e ALTER m TYPE text", "ALTER TABLE e RENAME m TO m2",
        ), how="whole"),
    ),
    "a partition that came, got rows and went between two looks": (
        Group((*ROOT, "INSERT INTO p VALUES (1)")),
        BEGUN,
        Group((
            "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (10) TO (20)", "INSERT INTO p VALUES (11), (12)",
            "DROP TABLE p1",
            "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (20) TO (30)", "INSERT INTO p VALUES (21), (22)", "TRUNCATE p2",
        )),
    ),
    "a partition that one transaction makes, fills and truncates": (
        Group((*ROOT, "INSERT INTO p VALUES (1)")),
        BEGUN,
        Group((
            "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id)",
            "CREATE TABLE leaf PARTITION OF p1 FOR VALUES FROM (10) TO (20)", "INSERT INTO p VALUES (11), (12)",
            "TRUNCATE p1",
        ), how="whole"),
    ),
    "a key that was dropped, which the stream does not say of a full identity": (
        Group((*TABLE, "ALTER TABLE t REPLICA IDENTITY FULL")),
        BEGUN,
        Group(("ALTER TABLE t DROP CONSTRAINT t_pkey", "UPDATE t SET id = 5 WHERE id > 5", "INSERT INTO t VALUES (5, 'y')")),
    ),
    "the same, and a row that tells another shape": (
        Group((*TABLE, "ALTER TABLE t REPLICA IDENTITY FULL")),
        BEGUN,
        Group((
            "ALTER TABLE t DROP CONSTRAINT t_pkey", "UPDATE t SET id = 5 WHERE id > 5", "ALTER TABLE t ADD COLUMN b int",
            "INSERT INTO t VALUES (5, 'y')",
        )),
    ),
    "a name of an index that the other schema has": (
        Group((
            *TABLE, "CREATE SCHEMA s", "CREATE TABLE s.t (id int CONSTRAINT own PRIMARY KEY)", "INSERT INTO s.t VALUES (1)",
        )),
        BEGUN,
        Group((
            "ALTER TABLE s.t RENAME TO u", "INSERT INTO s.u VALUES (2)", "ALTER TABLE s.u SET SCHEMA public",
        ), then="look"),
    ),
    "names that went round": (
        Group((*TABLE, "CREATE TABLE u (id uuid PRIMARY KEY)", "INSERT INTO u VALUES (gen_random_uuid())")),
        BEGUN,
        Group((
            "ALTER TABLE t RENAME TO t2", "INSERT INTO t2 VALUES (20)",
            "ALTER TABLE u RENAME TO swapping", "ALTER TABLE t2 RENAME TO u", "ALTER TABLE swapping RENAME TO t2",
            "INSERT INTO u VALUES (21)", "INSERT INTO t2 VALUES (gen_random_uuid())", "ALTER TABLE t2 RENAME TO t3",
        )),
    ),
    "a table that never had a row takes the name of another one": (
        Group((*TABLE, "CREATE TABLE u (k int PRIMARY KEY)")),
        BEGUN,
        Group((
            "ALTER TABLE t RENAME TO swapping", "ALTER TABLE u RENAME TO t", "ALTER TABLE swapping RENAME TO u",
        ), how="whole"),
    ),
    "the last column dropped and added, a row, and another column": (
        Group(TABLE),
        BEGUN,
        Group((
            "ALTER TABLE t DROP COLUMN a", "ALTER TABLE t ADD COLUMN a text", "INSERT INTO t VALUES (20, 'y')",
            "ALTER TABLE t ADD COLUMN b int",
        )),
    ),
    "the last column dropped and added, a row, and another name for it": (
        Group(TABLE),
        BEGUN,
        Group((
            "ALTER TABLE t DROP COLUMN a", "ALTER TABLE t ADD COLUMN a text", "UPDATE t SET a = 'y'",
            "ALTER TABLE t RENAME COLUMN a TO b", "INSERT INTO t VALUES (20, 'z')",
        ), how="whole"),
    ),
    "the same, and another type that needs no rewrite": (
        Group(("CREATE TABLE t (id int PRIMARY KEY, a varchar(40))", TABLE[1])),
        BEGUN,
        Group((
            "ALTER TABLE t DROP COLUMN a", "ALTER TABLE t ADD COLUMN a varchar(40)", "UPDATE t SET a = 'y'",
            "ALTER TABLE t ALTER COLUMN a TYPE text", "INSERT INTO t VALUES (20, 'z')",
        ), how="whole"),
    ),
    "the columns move up, and a new one takes the place and name of the last": (
        Group(("CREATE TABLE t (id int PRIMARY KEY, a text, b text)", TABLE[1])),
        BEGUN,
        Group((
            "ALTER TABLE t DROP COLUMN a", "ALTER TABLE t RENAME COLUMN b TO a", "ALTER TABLE t ADD COLUMN b text",
            "UPDATE t SET a = 'y', b = 'z'",
        ), how="whole"),
    ),
    "the same, and the new one is gone before the next look": (
        Group(("CREATE TABLE t (id int PRIMARY KEY, a text, b text)", TABLE[1])),
        BEGUN,
        Group((
            "ALTER TABLE t DROP COLUMN a", "ALTER TABLE t RENAME COLUMN b TO a", "ALTER TABLE t ADD COLUMN b text",
            "UPDATE t SET a = 'y', b = 'z'", "ALTER TABLE t DROP COLUMN b",
        ), how="whole"),
    ),
    "a column has the name of the next one for a moment, and the last one goes": (
        Group(("CREATE TABLE t (id int PRIMARY KEY, a text, c int)", "INSERT INTO t VALUES (1, 'x', 1), (2, 'x', 2)")),
        BEGUN,
        Group((
            "ALTER TABLE t DROP COLUMN c", "ALTER TABLE t RENAME COLUMN a TO b", "UPDATE t SET b = 'y'",
            "ALTER TABLE t DROP COLUMN b", "ALTER TABLE t ADD COLUMN b text",
        ), how="whole"),
    ),
    "a label of an enum gets another name": (
        Group((
            "CREATE TYPE mood AS ENUM ('fine')", "CREATE TABLE t (id int PRIMARY KEY, m mood, moods mood[])",
            "INSERT INTO t VALUES (1, 'fine', '{fine}')",
        )),
        BEGUN,
        Group(("ALTER TYPE mood RENAME VALUE 'fine' TO 'good'",)),
    ),
    "a composite type gets an attribute, and loses one": (
        Group((
            "CREATE TYPE pair AS (x int, y text)", "CREATE TABLE t (id int PRIMARY KEY, p pair)",
            "CREATE TABLE s (id int PRIMARY KEY, p t[])", "INSERT INTO t VALUES (1, '(1,a)')",
            "INSERT INTO s VALUES (1, ARRAY[(1, (1, 'a'))::t])",
        )),
        BEGUN,
        Group(("ALTER TYPE pair ADD ATTRIBUTE z int",), then="look"),
        Group(("ALTER TABLE t ADD COLUMN n int", "ALTER TYPE pair DROP ATTRIBUTE z")),
    ),
    "a root and a table exchange names, and a row of the root comes before the server says so": (
        Group((*ROOT, "INSERT INTO p VALUES (1)", *TABLE)),
        BEGUN,
        Group((
            "ALTER TABLE t RENAME TO swapping", "ALTER TABLE p RENAME TO t", "ALTER TABLE swapping RENAME TO p",
            "INSERT INTO p VALUES (10)", "INSERT INTO t VALUES (2)",
        )),
    ),
    "a table that has its name again, and another one had it meanwhile": (
        Group((*ROOT, "INSERT INTO p VALUES (1)")),
        BEGUN,
        Group((
            "ALTER TABLE p RENAME TO q", "CREATE TABLE p (k int PRIMARY KEY)",
        ), then="follow"),
        Group((
            "INSERT INTO p VALUES (1)", "DROP TABLE p", "ALTER TABLE q RENAME TO p", "INSERT INTO p VALUES (2)",
        ), how="whole"),
        Group(("INSERT INTO p VALUES (3)",), then="look"),
    ),
    "a partition whose DETACH CONCURRENTLY does not come to its end": (
        Group((*ROOT, "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (10) TO (20)", "INSERT INTO p VALUES (1), (11)")),
        BEGUN,
        Group(("INSERT INTO p VALUES (2)",), how="held"),
        Group(("INSERT INTO p VALUES (12)", "ALTER TABLE p DETACH PARTITION p1 CONCURRENTLY -- refused")),
        Group(("INSERT INTO p VALUES (3)",)),
    ),
    "a table that leaves its schema under the name of another one there": (
        Group((
            "CREATE SCHEMA s", "CREATE TABLE s.a (k int PRIMARY KEY)", "CREATE TABLE s.b (k int PRIMARY KEY)",
            "INSERT INTO s.a VALUES (1)", "INSERT INTO s.b VALUES (2)",
        )),
        BEGUN,
        Group((
            "ALTER TABLE s.b RENAME TO c", "ALTER TABLE s.a RENAME TO b", "ALTER TABLE s.b SET SCHEMA public",
            "ALTER TABLE s.c RENAME TO b", "INSERT INTO public.b VALUES (3)", "INSERT INTO s.b VALUES (4)",
        ), how="whole"),
    ),
    "made again with another type in a part of the key": (
        Group(("CREATE TABLE t (id text, n int, PRIMARY KEY (id, n))", "INSERT INTO t VALUES ('a', 1)")),
        BEGUN,
        Group((
            "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x')",
        ), then="follow"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_script_ends_equal(postgres: EmbeddedPostgres, seed: int) -> None:
    outcome = run_script(postgres.url(), postgres.version, seed, write_script(seed))
    assert outcome.verdict == "equal", outcome.told
    assert bool(outcome.kills) == (seed % 3 == 0)


@pytest.mark.parametrize("case", FOUND)
def test_what_the_campaign_has_found_ends_equal(postgres: EmbeddedPostgres, case: str) -> None:
    outcome = run_script(postgres.url(), postgres.version, 0, FOUND[case])
    refused = sum(one.endswith("-- refused") for group in FOUND[case] for one in group.statements)
    assert (outcome.verdict, outcome.refused) == ("equal", refused), outcome.told
