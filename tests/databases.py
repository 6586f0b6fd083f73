"""The database that a test gets from the fixture `database`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql

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


def drop_slots(admin: psycopg.Connection[Any], database: str, timeout_s: float = 20.0) -> None:
    """Slots belong to the whole server: one left behind would block DROP DATABASE and keep WAL."""
    deadline = time.monotonic() + timeout_s
    while True:
        slots = admin.execute(
            "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s", (database,)
        ).fetchall()
        if not slots:
            return
        for name, active_pid in slots:
            if active_pid is not None:
                admin.execute("SELECT pg_terminate_backend(%s)", (active_pid,))
                continue
            try:
                admin.execute("SELECT pg_drop_replication_slot(%s)", (name,))
            except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                continue  # somebody reconnected, or a temporary slot went with its session
        if time.monotonic() > deadline:
            pytest.fail(f"replication slots still in use: {slots}")
        time.sleep(0.05)


def drop_database(admin: psycopg.Connection[Any], name: str, timeout_s: float = 20.0) -> None:
    """Drop a database with its slots. A walsender that just lost its client may hold a temporary slot a moment longer."""
    deadline = time.monotonic() + timeout_s
    while True:
        drop_slots(admin, name, timeout_s)
        try:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            return
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
