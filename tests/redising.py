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
from targets.redis import RedisServer

from pgcdc.core.position import Position
from pgcdc.core.settings import make_options
from pgcdc.event.batch import Batch
from pgcdc.playground.postgres import EmbeddedPostgres
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
