"""Every DDL at the source has a defined end at a keyed store, too: what a client of our own finds is what SQL finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from databases import Database
from ddl_cases import CASES, DML, PARTITIONED, SETUP, TREES
from mirroring import Mirror
from redising import Rows, rows_of_server
from targets.redis import RedisServer

from pgcdc.core.errors import SinkError
from pgcdc.core.settings import make_options
from pgcdc.sink.contract import Sink
from pgcdc.sink.redis import RedisOptions

KEYLESS = ("drop the key, rows found by all values", "a child table without a key")
_TABLES = """
SELECT n.nspname::text, c.relname::text, CASE c.relkind WHEN 'r' THEN 'ONLY ' ELSE '' END, ARRAY(
    SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY k (n, place)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.n
    WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
    ORDER BY k.place)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname !~ '^(pg_|info)'
"""


class RedisMirror(Mirror):
    """Rows of tables as keys."""

    def __init__(self, database: Database, server: RedisServer, folder: Path) -> None:
        super().__init__(database, "", folder)
        self.server, self.mode = server, "sync"

    def make_sink(self) -> Sink:
        return make_options(RedisOptions, {"url": self.server.url, "mode": self.mode}, "redis").make()

    def is_equal(self) -> bool:
        wanted: Rows = {}
        prefixes = set()
        with self.database.connect() as conn:
            for schema, table, only, key in conn.execute(_TABLES).fetchall():
                of_table = f'FROM {only}"{schema}"."{table}"'
                rows = conn.execute(f"SELECT * {of_table} LIMIT 0".encode()).description or ()
                texts = ", ".join(f'"{one.name}"::text' for one in rows)
                prefix = table if schema == "public" else f"{schema}.{table}"
                prefixes.add(prefix)
                for values in conn.execute(f"SELECT {texts} {of_table}".encode()):
                    row = dict(zip([one.name for one in rows], values, strict=True))
                    wanted[f"{prefix}:{':'.join(row[name] for name in key)}"] = row
        there = rows_of_server(self.server, "[^:]*")
        # Keys of a table that is gone stay.
        found = {key: row for key, row in there.items() if key.partition(":")[0] in prefixes}
        return wanted == found


@pytest.fixture
def mirror(database: Database, tmp_path: Path) -> Iterator[RedisMirror]:
    (tmp_path / "server").mkdir()
    server = RedisServer(tmp_path / "server")
    made = RedisMirror(database, server, tmp_path)
    try:
        yield made
    finally:
        made.end()
        server.kill()


def follow(mirror: RedisMirror, script: str, then: tuple[str, ...] = ()) -> None:
    mirror.start()
    mirror.settle()
    for statement in [*script.split("; "), *then]:
        try:
            mirror.run(statement)
        except psycopg.Error:
            assert statement in then  # the table has other columns or another name now
    mirror.settle(also=mirror.is_equal)
    assert mirror.dead_letters() == []


@pytest.mark.parametrize("case", [case for case in CASES if case not in KEYLESS])
def test_it_is_followed(mirror: RedisMirror, case: str) -> None:
    mirror.run(*SETUP)
    follow(mirror, CASES[case][1], DML)


@pytest.mark.parametrize("case", TREES)
def test_partitions_are_followed(mirror: RedisMirror, case: str) -> None:
    mirror.run(*PARTITIONED)
    follow(mirror, TREES[case][1])


def test_keys_of_a_table_that_was_made_again_are_no_longer_valid(mirror: RedisMirror) -> None:
    mirror.mode = "invalidate"
    mirror.run(*SETUP)
    client = mirror.server.client
    client.set("t:200", "cached")
    mirror.start()
    mirror.settle(also=lambda: client.get("t:200") is None)  # the last row of the initial snapshot
    client.set("t:5", "cached")
    mirror.run("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (7)")
    mirror.settle(also=lambda: client.get("t:5") is None)


def test_a_table_without_a_key_stops_it_with_advice(mirror: RedisMirror) -> None:
    mirror.run(*SETUP)
    mirror.start()
    mirror.settle()
    mirror.run(
        "ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t DROP CONSTRAINT t_pkey", "DELETE FROM t WHERE id = 1"
    )
    with pytest.raises(SinkError, match="rows of table t come without a key") as caught:
        mirror.settle()
    assert "Give it a primary key" in caught.value.advice
