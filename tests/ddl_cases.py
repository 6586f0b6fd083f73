"""DDL at the source, and how a copy follows it: exactly, or by a reload. A semicolon and a space divide statements."""

from __future__ import annotations

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, a text, b int, c numeric(10,2))",
    "INSERT INTO t SELECT g, 'a' || g, g, g / 3.0 FROM generate_series(1, 200) g",
    "CREATE TABLE other (id int PRIMARY KEY, v text)",
    "INSERT INTO other SELECT g, 'v' FROM generate_series(1, 20) g",
)
DML = (
    "INSERT INTO t (id) VALUES (1001)",
    "UPDATE t SET id = id + 2000 WHERE id = 5",
    "DELETE FROM t WHERE id = 7",
)
EXACT, RELOAD = "exact", "reload"
EITHER = "either"  # It depends on whether the catalog is read in time
CASES: dict[str, tuple[str, str]] = {
    "add a column": (EXACT, "ALTER TABLE t ADD COLUMN n int"),
    "add a column with a constant": (EXACT, "ALTER TABLE t ADD COLUMN lvl int NOT NULL DEFAULT 7"),
    "add a column with a quoted text": (EXACT, "ALTER TABLE t ADD COLUMN x text DEFAULT 'it''s {\"1\",2}'"),
    "add a column with now()": (EXACT, "ALTER TABLE t ADD COLUMN x timestamptz DEFAULT now()"),
    "add a column with an array": (EXACT, "ALTER TABLE t ADD COLUMN x int[] DEFAULT '{1,NULL,3}'"),
    "add a column, another default": (
        EXACT, "ALTER TABLE t ADD COLUMN x int DEFAULT 1; ALTER TABLE t ALTER COLUMN x SET DEFAULT 2"
    ),
    "add a column, no default": (
        EXACT, "ALTER TABLE t ADD COLUMN x int DEFAULT 1; ALTER TABLE t ALTER COLUMN x DROP DEFAULT"
    ),
    "volatile default": (RELOAD, "ALTER TABLE t ADD COLUMN x double precision DEFAULT random()"),
    "serial": (RELOAD, "ALTER TABLE t ADD COLUMN x bigserial"),
    "identity": (RELOAD, "ALTER TABLE t ADD COLUMN x int GENERATED ALWAYS AS IDENTITY"),
    "drop a column": (EXACT, "ALTER TABLE t DROP COLUMN b"),
    "rename a column": (EXACT, "ALTER TABLE t RENAME COLUMN b TO b2"),
    "exchange two columns": (
        EXACT,
        "ALTER TABLE t RENAME COLUMN a TO tmp; ALTER TABLE t RENAME COLUMN b TO a; ALTER TABLE t RENAME COLUMN tmp TO b",
    ),
    "rename, update, retype": (
        RELOAD,
        "ALTER TABLE t RENAME COLUMN a TO a2; UPDATE t SET a2 = 'x' WHERE id < 50; ALTER TABLE t ALTER COLUMN b TYPE bigint",
    ),
    "wider type": (RELOAD, "ALTER TABLE t ALTER COLUMN b TYPE bigint"),
    "type without a rewrite": (EXACT, "ALTER TABLE t ALTER COLUMN c TYPE numeric(12,2)"),
    "type with USING": (RELOAD, "ALTER TABLE t ALTER COLUMN b TYPE int USING b * 2"),
    "incompatible type": (RELOAD, "ALTER TABLE t ALTER COLUMN a TYPE int USING length(a)"),
    "drop and add, same name": (RELOAD, "ALTER TABLE t DROP COLUMN c; ALTER TABLE t ADD COLUMN c numeric(10,2)"),
    "drop and add, other type": (EXACT, "ALTER TABLE t DROP COLUMN a; ALTER TABLE t ADD COLUMN a int"),
    "drop and add with a constant": (EXACT, "ALTER TABLE t DROP COLUMN a; ALTER TABLE t ADD COLUMN a int DEFAULT 3"),
    "another key": (EXACT, "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (b)"),
    "key from a new column": (
        RELOAD,
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD COLUMN sid bigserial; ALTER TABLE t ADD PRIMARY KEY (sid)",
    ),
    "key of two columns": (EXACT, "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (id, b)"),
    "rename the table": (EXACT, "ALTER TABLE t RENAME TO t2"),
    "move the table": (EXACT, "CREATE SCHEMA s2; ALTER TABLE t SET SCHEMA s2"),
    "replica identity full": (EXACT, "ALTER TABLE t REPLICA IDENTITY FULL"),
    "vacuum full": (EXACT, "VACUUM FULL t"),
    "cluster": (EXACT, "CLUSTER t USING t_pkey"),
    "truncate": (EXACT, "TRUNCATE t"),
    "drop and make again": (
        RELOAD, "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, z text); INSERT INTO t VALUES (1, 'z')"
    ),
    "drop the key, rows found by all values": (
        EXACT, "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t DROP CONSTRAINT t_pkey; UPDATE t SET a = 'x' WHERE id = 9"
    ),
    "identity by an index": (
        EXACT,
        "ALTER TABLE t ALTER COLUMN b SET NOT NULL; CREATE UNIQUE INDEX ti ON t (b); "
        "ALTER TABLE t REPLICA IDENTITY USING INDEX ti",
    ),
    "column order changed": (
        EITHER,
        "ALTER TABLE t ADD COLUMN a2 text; UPDATE t SET a2 = a; ALTER TABLE t DROP COLUMN a; "
        "ALTER TABLE t RENAME COLUMN a2 TO a",
    ),
    "truncate with others": (EXACT, "TRUNCATE t, other CASCADE"),
    "enum with a new value": (
        EXACT,
        "CREATE TYPE mood AS ENUM ('a'); ALTER TABLE t ADD COLUMN m mood DEFAULT 'a'; ALTER TYPE mood ADD VALUE 'b'; "
        "UPDATE t SET m = 'b' WHERE id < 9",
    ),
    "a child table": (
        EXACT, "CREATE TABLE kid (k int PRIMARY KEY) INHERITS (other); INSERT INTO kid VALUES (99, 'kid', 1)"
    ),
    "a child table without a key": (
        RELOAD, "CREATE TABLE kid (k int) INHERITS (other); INSERT INTO kid VALUES (99, 'kid', 1)"
    ),
    "exchange two tables": (
        RELOAD, "ALTER TABLE t RENAME TO tmp; ALTER TABLE other RENAME TO t; ALTER TABLE tmp RENAME TO other"
    ),
}  # fmt: skip

# With tables of their own, and run once for each kind of copy.
MORE_SETUP = (
    *SETUP,
    "CREATE TABLE bag (k int)",
    "CREATE TABLE kid (LIKE other INCLUDING ALL)",
    "INSERT INTO kid VALUES (500, 'kid')",
)
MORE: dict[str, tuple[str, str]] = {
    "generated column": (
        EXACT, "ALTER TABLE t ADD COLUMN g int GENERATED ALWAYS AS (b * 2) STORED; UPDATE t SET b = 1 WHERE id < 9"
    ),
    "drop expression": (
        RELOAD,
        "ALTER TABLE t ADD COLUMN g int GENERATED ALWAYS AS (b * 2) STORED; ALTER TABLE t ALTER COLUMN g DROP EXPRESSION; "
        "UPDATE t SET g = 1 WHERE id < 9",
    ),
    "a key where there was none": (EITHER, "ALTER TABLE bag ADD PRIMARY KEY (k); INSERT INTO bag VALUES (1), (2)"),
    "replica identity nothing": (
        EXACT,
        "ALTER TABLE t REPLICA IDENTITY NOTHING; INSERT INTO t VALUES (900, 'x'); ALTER TABLE t REPLICA IDENTITY DEFAULT; "
        "UPDATE t SET a = 'y' WHERE id > 190",
    ),
    "reindex": (EXACT, "REINDEX TABLE t"),
    "vacuum full after a default": (RELOAD, "ALTER TABLE t ADD COLUMN x int DEFAULT 7; VACUUM FULL t"),
    "inherit": (
        EXACT,
        "ALTER TABLE kid INHERIT other; INSERT INTO kid VALUES (501, 'kid'); ALTER TABLE kid NO INHERIT other; "
        "UPDATE kid SET v = 'own'",
    ),
}  # fmt: skip


PARTITIONED = (
    "CREATE TABLE p (id int, day int, v text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
    *(f"CREATE TABLE p{n} PARTITION OF p FOR VALUES FROM ({n * 10}) TO ({n * 10 + 10})" for n in range(3)),
    "INSERT INTO p SELECT g, g % 30, 'v' || g FROM generate_series(1, 300) g",
    "CREATE TABLE ready (id int, day int, v text, PRIMARY KEY (id, day))",
    "INSERT INTO ready SELECT g, 35, 'ready' FROM generate_series(1, 50) g",
)
TREES: dict[str, tuple[str, str]] = {
    "a new partition": (
        EXACT, "CREATE TABLE p9 PARTITION OF p FOR VALUES FROM (90) TO (99); INSERT INTO p VALUES (1, 95, 'new')"
    ),
    "attach rows": (RELOAD, "ALTER TABLE p ATTACH PARTITION ready FOR VALUES FROM (30) TO (40)"),
    "attach an empty one": (
        EXACT,
        "TRUNCATE ready; ALTER TABLE p ATTACH PARTITION ready FOR VALUES FROM (30) TO (40); "
        "INSERT INTO p VALUES (1, 35, 'x')",
    ),
    "detach": (RELOAD, "ALTER TABLE p DETACH PARTITION p1"),
    "drop a partition": (RELOAD, "DROP TABLE p1"),
    "truncate a partition": (RELOAD, "TRUNCATE p1"),
    "truncate all": (EITHER, "TRUNCATE p"),
    "vacuum full of a partition": (RELOAD, "VACUUM FULL p1"),
    "move rows": (EXACT, "UPDATE p SET day = day + 10 WHERE day < 20"),
    "add a column": (EXACT, "ALTER TABLE p ADD COLUMN x int DEFAULT 4"),
    "attach and add a column": (
        RELOAD,
        "ALTER TABLE ready ADD COLUMN x int DEFAULT 1; ALTER TABLE p ADD COLUMN x int DEFAULT 4; "
        "ALTER TABLE p ATTACH PARTITION ready FOR VALUES FROM (30) TO (40)",
    ),
}  # fmt: skip
