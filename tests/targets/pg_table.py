"""PostgreSQL as a target: events as rows of a table, and applied to a table like the source's."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from pgcdc.position import Position
from pgcdc.sink.base import Batch, Sink
from pgcdc.sink.pg_table.parts import export_url
from pgcdc.sink.pg_table.sink import PgTableSink
from targets.base import SERVERS, BaseTarget
from targets.events import event, to_line

_NUMBERS = itertools.count(1)
_RUN = uuid.uuid4().hex[:8]


class PgAppendTarget(BaseTarget):
    """A table of events, in a database of its own that is reached with a password."""

    type, before_ack = "pg_table", "pg_table.before_ack"
    kill_points: Sequence[str] = ("pg_table.before_ack", "pg_table.committed", "pg_table.after_ack")
    can_break = True
    secret = "correct-horse-battery"

    def __init__(self, folder: Path) -> None:
        self.acks = folder / "acks"
        self.acks.mkdir()
        self._database = f"target_{_RUN}_{next(_NUMBERS)}"
        self._admin = psycopg.connect(SERVERS.postgres.url(), autocommit=True)
        self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._database)))

    @property
    def url(self) -> str:
        """With a password that the server does not ask for."""
        return SERVERS.postgres.url(self._database).replace("postgres@", f"postgres:{self.secret}@", 1)

    def options(self) -> Mapping[str, Any]:
        return {"db": self.url}

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as conn:
            done = conn.execute(statement.encode())
            return done.fetchall() if done.description else []

    def lines(self) -> list[str]:
        return self._lines("position")

    def arrived(self) -> list[str]:
        return self._lines("ctid")

    def _lines(self, order: str) -> list[str]:
        if self.query("SELECT to_regclass('public.pgcdc_events')") == [(None,)]:
            return []
        rows = self.query(
            "SELECT id::text, channel, operation, payload, source, "
            "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'), position "
            f"FROM pgcdc_events ORDER BY {order}"
        )
        names = ("id", "channel", "operation", "payload", "source", "created_at", "position")
        return [to_line(_ordered(dict(zip(names, row, strict=True)))) for row in rows]

    def break_target(self) -> None:
        self._admin.execute(
            sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false").format(sql.Identifier(self._database))
        )
        self._admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self._database,)
        )

    def heal_target(self) -> None:
        self._admin.execute(
            sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS true").format(sql.Identifier(self._database))
        )

    def bad_line(self, position: Position) -> str | None:
        """A NUL has no place in jsonb."""
        return to_line(event(position, text="\0"))

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        gone = SERVERS.postgres.url("no_such_database")
        return [
            ({"db": self.url, "mode": "upsert"}, "mode"),
            ({"db": self.url, "colour": "red"}, "colour is not known"),
            ({"db": ""}, "needs a database"),
            ({"db": self.url, "db_file": "/run/secrets/db"}, "db and db_file are given"),
            ({"db_file": "/no/such/file"}, "cannot be read"),
            ({"db": "postgresql://u:p@ss@host:x/db"}, "cannot be read"),
            ({"db": self.url, "table": "a.b.c"}, "not a table name"),
            ({"db": self.url, "evolve": "add"}, "is for --pg-table-mode apply"),
            ({"db": gone}, "does not exist"),
        ]

    def close(self) -> None:
        self._admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self._database)))
        self._admin.close()


class PgAppendInTwoParts(PgAppendTarget):
    """The same, written as executors do: each batch in two parts, with a task that ran twice."""

    def sink(self) -> Sink:
        export_url(self.name or self.type, self.url)
        return InTwoParts(self.spec().options, self.acks, self.name or self.type)  # type: ignore[arg-type]


class InTwoParts(PgTableSink):
    """A sink whose `write` goes the way of executors."""

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        self.discard_parts()
        start = self.ack
        events, writer = batch.after(start).events, self.part_writer()
        half = events.num_rows // 2
        parts: list[pa.Table] = [events.slice(0, half), events.slice(half)]
        if half:
            writer.write_part(0, parts[0].to_batches())  # an attempt that was lost
        receipts = [writer.write_part(number, one.to_batches()) for number, one in enumerate(parts) if one.num_rows]
        self.commit_parts(start, batch.end, [receipt for receipt in receipts if receipt])
        self.discard_parts()


def _ordered(found: dict[str, Any]) -> dict[str, Any]:
    """jsonb sorts its keys: here they are as they were."""
    payload = found["payload"]
    row = payload["row"]
    if row is not None:
        payload["row"] = {key: row[key] for key in ("id", "position", "text") if key in row}
    found["payload"] = {key: payload[key] for key in ("op", "table", "row", "old")}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]
