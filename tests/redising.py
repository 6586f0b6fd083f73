"""For tests of the adapter redis: a source whose stream it gets, and what SQL and a client of our own say. No Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from applying import Source, two_databases
from databases import Database
from mirroring import Mirror
from targets.redis import RedisServer

from pgcdc.core.position import Position
from pgcdc.core.settings import make_options
from pgcdc.event.batch import Batch
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.sink.contract import Sink
from pgcdc.sink.letters.record import DeadLetters
from pgcdc.sink.redis import RedisOptions
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import DeliveryOptions

QUICK = DeliveryOptions(max_retries=3, backoff_base=0.01, backoff_cap=0.05, cb_max_failures=0, timeout=20.0)
START = Position.end(1000)
Rows = dict[str, dict[str, str | None]]


@contextmanager
def source_and_server(postgres: EmbeddedPostgres, folder: Path, *settings: str) -> Iterator[tuple[Source, RedisServer]]:
    (folder / "server").mkdir()
    server = RedisServer(folder / "server", *settings)
    try:
        with two_databases(postgres) as (url, _):
            source = Source(url, folder / "state")
            try:
                yield source, server
            finally:
                source.close()
    finally:
        server.kill()


def runner(source: Source, server: RedisServer, letters: DeadLetters | None = None, **options: Any) -> Runner:
    """A new process's sink, opened."""
    given = make_options(RedisOptions, {"url": server.url, "mode": "sync", **options}, "redis")
    made = Runner(given.make(), source.state.acks, "redis", QUICK, None, letters)
    made.open(source.start)
    return made


def rows_of_sql(source: Source, table: str, key: list[str], prefix: str = "") -> Rows:
    """What the server must have, by SQL."""
    names = source.sql.execute(f"SELECT * FROM {table} LIMIT 0".encode()).description
    assert names is not None
    texts = ", ".join(f'"{one.name}"::text' for one in names)
    found = source.sql.execute(f"SELECT {texts} FROM {table}".encode()).fetchall()
    made: Rows = {}
    for values in found:
        row = dict(zip([one.name for one in names], values, strict=True))
        parts = [re.sub("[%:]", lambda one: f"%{ord(one[0]):02X}", row[name]) for name in key]
        made[f"{prefix}{table}:{':'.join(parts)}"] = row
    return made


def rows_of_server(server: RedisServer, pattern: str) -> Rows:
    client = server.client
    keys = list(client.scan_iter(pattern, 1000))
    values = client.mget(keys) if keys else []
    return {key: json.loads(value) for key, value in zip(keys, values, strict=True)}


def deliver(url: str, acks: str, batches: list[Batch], tell: Connection) -> None:
    """In the process that is killed."""
    delivery = DeliveryOptions(max_retries=200, backoff_base=0.01, backoff_cap=0.05, cb_max_failures=0, timeout=60.0)
    runner = Runner(RedisOptions(url=url, mode="sync").make(), Path(acks), "redis", delivery, say=lambda text: None)
    runner.open(START)
    for batch in batches:
        tell.send(("writing", str(batch.end)))
        runner.write(batch)
        tell.send(("written", str(batch.end)))


# --- tables, kept as keys

_COLUMNS = """
SELECT attname::text FROM pg_attribute
WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
"""
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
                names = [name for (name,) in conn.execute(_COLUMNS, (f'"{schema}"."{table}"',))]
                texts = ", ".join(f'"{name}"::text' for name in names)
                prefix = table if schema == "public" else f"{schema}.{table}"
                prefixes.add(prefix)
                for values in conn.execute(f"SELECT {texts} {of_table}".encode()):
                    row = dict(zip(names, values, strict=True))
                    wanted[f"{prefix}:{':'.join(row[name] for name in key)}"] = row
        there = rows_of_server(self.server, "[^:]*")
        # Keys of a table that is gone stay.
        found = {key: row for key, row in there.items() if key.partition(":")[0] in prefixes}
        return wanted == found


@contextmanager
def redis_mirror_of(database: Database, folder: Path) -> Iterator[RedisMirror]:
    """A mirror at a server of its own."""
    (folder / "server").mkdir()
    server = RedisServer(folder / "server")
    made = RedisMirror(database, server, folder)
    try:
        yield made
    finally:
        made.end()
        server.kill()
