"""The database that a test gets from the fixture `database`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgcdc.playground.postgres import EmbeddedPostgres


@dataclass(frozen=True, slots=True)
class Database:
    """A database of one test."""

    name: str
    url: str
    server: EmbeddedPostgres

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url, autocommit=autocommit)

    def execute(self, statement: str, params: Sequence[object] | None = None) -> None:
        with self.connect() as conn:
            conn.execute(statement, params)

    def query(self, statement: str, params: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        with self.connect() as conn:
            return conn.execute(statement, params).fetchall()
