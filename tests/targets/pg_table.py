"""PostgreSQL as a target: events as rows of a table, and applied to a table like the source's.

All targets share one database, each with a schema of its own.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from pgcdc.core.position import SCHEMA_SUB, Position
from pgcdc.core.relation import Column, Relation, ShapeChange, append_shapes
from pgcdc.sink.pg_table.sink import Appender
from targets.base import SERVERS, BaseTarget
from targets.events import event, to_line

_NUMBERS = itertools.count(1)
_DATABASE = f"targets_{uuid.uuid4().hex[:8]}"
ITEMS = Relation(
    1, "public", "items", "d",
    (Column("id", 20, -1, True), Column("position", 25, -1, False), Column("text", 25, -1, False)),
)  # fmt: skip


class _PgTarget(BaseTarget):
    is_reference = True
    type, before_ack = "pg_table", "pg_table.before_ack"
    kill_points: Sequence[str] = ("pg_table.before_ack", "pg_table.committed", "sink.after_ack")
    can_break, large = True, 5_000
    secret = "correct-horse-battery"

    def __init__(self, folder: Path) -> None:
        self.acks = folder / "acks"
        self.acks.mkdir()
        self.schema = f"s{next(_NUMBERS)}"
        with psycopg.connect(SERVERS.postgres.url(), autocommit=True) as admin:
            if not admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", (_DATABASE,)).fetchone():
                admin.execute(f"CREATE DATABASE {_DATABASE}".encode())
        self.query(f"CREATE SCHEMA {self.schema}")

    @property
    def url(self) -> str:
        """With a password that the server does not ask for."""
        return SERVERS.postgres.url(_DATABASE).replace("postgres@", f"postgres:{self.secret}@", 1)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as conn:
            done = conn.execute(statement.encode())
            return done.fetchall() if done.description else []

    def break_target(self) -> None:
        with psycopg.connect(SERVERS.postgres.url(), autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {_DATABASE} WITH ALLOW_CONNECTIONS false".encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (_DATABASE,))

    def heal_target(self) -> None:
        with psycopg.connect(SERVERS.postgres.url(), autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {_DATABASE} WITH ALLOW_CONNECTIONS true".encode())

    def bad_line(self, position: Position) -> str | None:
        return to_line(event(position, text="refused"))

    def close(self) -> None:
        self.query(f"DROP SCHEMA {self.schema} CASCADE")


class PgAppendTarget(_PgTarget):
    """A table of events."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table = f"{self.schema}.events"
        with psycopg.connect(self.url, autocommit=True) as conn:
            (create,) = Appender(self.table).missing(conn)
            conn.execute(create.encode())
        self.query(
            f"ALTER TABLE {self.table} ADD CONSTRAINT taste CHECK (payload #>> '{{row,text}}' IS DISTINCT FROM 'refused')"
        )

    def options(self) -> Mapping[str, Any]:
        return {"db": self.url, "table": self.table}

    def lines(self) -> list[str]:
        return self._lines('"position"')

    def arrived(self) -> list[str]:
        return self._lines("ctid")

    def _lines(self, order: str) -> list[str]:
        names = ("id", "channel", "operation", "payload", "source", "created_at", "position")
        rows = self.query(
            "SELECT id::text, channel, operation, payload, source, to_char(created_at AT TIME ZONE 'UTC', "
            f'\'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\'), position FROM {self.table} ORDER BY {order}'
        )
        return [to_line(_ordered(dict(zip(names, row, strict=True)))) for row in rows]

    def accept_bad(self) -> None:
        self.query(f"ALTER TABLE {self.table} DROP CONSTRAINT taste")

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        gone = SERVERS.postgres.url("no_such_database")
        return [
            ({"db": self.url, "mode": "upsert"}, "mode"),
            ({"db": self.url, "colour": "red"}, "unknown key colour"),
            ({"db": ""}, "needs a database"),
            ({"db": self.url, "db_file": "/run/secrets/db"}, "db and db_file cannot be combined"),
            ({"db_file": "/no/such/file"}, "cannot be read"),
            ({"db": "postgresql://u:p@ss@host:x/db"}, "cannot be read"),
            ({"db": self.url, "table": "a.b.c"}, "not a table name"),
            ({"db": self.url, "evolve": "add"}, "needs --pg-table-mode apply"),
            ({"db": gone}, "does not exist"),
        ]


class PgApplyTarget(_PgTarget):
    """The table `items`, kept equal."""

    keeps_history = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        append_shapes(folder / "shapes.jsonl", [ShapeChange(Position.at(100, 0, SCHEMA_SUB), ITEMS)])
        self.table = f"{self.schema}.items"
        self.query(
            f"CREATE TABLE {self.table} (id bigint PRIMARY KEY, position text, text text, "
            "CONSTRAINT taste CHECK (text IS DISTINCT FROM 'refused'))"
        )

    def options(self) -> Mapping[str, Any]:
        return {"db": self.url, "mode": "apply", "target_schema": self.schema, "origin": "none"}

    def lines(self) -> list[str]:
        rows = self.query(f'SELECT id, "position", text FROM {self.table} ORDER BY "position" COLLATE "C"')
        return [to_line(event(Position.parse(position), key=key, text=text)) for key, position, text in rows]

    def accept_bad(self) -> None:
        self.query(f"ALTER TABLE {self.table} DROP CONSTRAINT taste")

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        given = {"db": self.url, "mode": "apply"}
        return [
            ({**given, "table": "events"}, "needs --pg-table-mode append"),
            ({**given, "evolve": "sometimes"}, "evolve"),
            ({**given, "tables": ["orders"]}, "orders"),
        ]


def _ordered(found: dict[str, Any]) -> dict[str, Any]:
    """jsonb sorts its keys: here they are as they were."""
    payload = found["payload"]
    row = {key: payload["row"][key] for key in ("id", "position", "text") if key in payload["row"]}
    return {**found, "payload": {"op": payload["op"], "table": payload["table"], "row": row, "old": payload["old"]}}


TARGETS = {"pg_append": PgAppendTarget, "pg_apply": PgApplyTarget}
