"""The shop's traffic, checked against PostgreSQL's own stream with a reader that shares no code with the capture."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from contents import differences, fold_events, read_tables
from databases import Database
from listening import wait_until

from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.playground.shop import KEYS, Traffic, add_first_rows, create_tables

OPERATIONS = {b"I": "INSERT", b"U": "UPDATE", b"D": "DELETE"}


class Reader:
    """The least that turns pgoutput messages of the shop into events."""

    def __init__(self) -> None:
        self.relations: dict[int, tuple[str, list[str]]] = {}  # channel, columns

    def events(self, message: bytes) -> Iterator[dict[str, Any]]:
        tag, self.rest = message[:1], message[1:]
        if tag == b"R":
            self._relation()
        elif tag in OPERATIONS:
            channel, columns = self.relations[self._number("!I")]
            old = None
            if self.rest[:1] in b"KO":
                kind = self._take(1)
                old, _ = self._tuple(columns)
                if kind == b"K":
                    old = {name: value for name, value in old.items() if value is not None}
            row, unchanged = old or {}, list[str]()
            if tag != b"D":
                self._take(1)
                row, unchanged = self._tuple(columns)
            payload = {"row": row, "old": old, "_unchanged_toast_columns": unchanged}
            yield {"channel": channel, "operation": OPERATIONS[tag], "payload": payload}

    def _relation(self) -> None:
        oid, schema, table = self._number("!I"), self._string(), self._string()
        self._take(1)
        columns = []
        for _ in range(self._number("!H")):
            self._take(1)
            columns.append(self._string())
            self._take(8)
        channel = f"pgcdc:{table}" if schema == "public" else f"pgcdc:{schema}.{table}"
        self.relations[oid] = (channel, columns)

    def _tuple(self, columns: list[str]) -> tuple[dict[str, str | None], list[str]]:
        row: dict[str, str | None] = {}
        unchanged = []
        assert self._number("!H") == len(columns)
        for column in columns:
            kind = self._take(1)
            if kind == b"t":
                row[column] = self._take(self._number("!I")).decode()
            elif kind == b"n":
                row[column] = None
            else:
                unchanged.append(column)
        return row, unchanged

    def _take(self, size: int) -> bytes:
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _string(self) -> str:
        taken, _, self.rest = self.rest.partition(b"\0")
        return taken.decode()


@pytest.fixture
def slot(database: Database) -> str:
    database.execute("CREATE PUBLICATION shop FOR ALL TABLES")
    name = f"shop_{database.name}"
    database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    with database.connect() as conn:
        create_tables(conn)
        add_first_rows(conn)
    return name


def read_stream(database: Database, slot: str) -> list[dict[str, Any]]:
    reader = Reader()
    with database.connect() as conn:
        for setting in ("TimeZone=UTC", "DateStyle=ISO", "IntervalStyle=iso_8601", "extra_float_digits=3"):
            conn.execute(f"SET {setting.replace('=', ' = ')}")
        messages = conn.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'shop')",
            (slot,),
        ).fetchall()
    return [event for (message,) in messages for event in reader.events(message)]


def test_stream_has_every_kind_of_change_and_the_counters_agree(database: Database, slot: str) -> None:
    traffic = Traffic(database.url, seed=7, rate_per_s=400)
    assert len(read_stream(database, slot)) == 80  # the first rows, consumed here
    traffic.start()
    wait_until(lambda: traffic.commits >= 1200, 60, "commits")
    traffic.stop()
    events = read_stream(database, slot)
    assert len(events) == traffic.changes
    seen = {(event["channel"], event["operation"]) for event in events}
    assert {("pgcdc:documents", op) for op in OPERATIONS.values()} <= seen
    assert {("pgcdc:billing.invoices", op) for op in OPERATIONS.values()} <= seen
    updates = [event["payload"] for event in events if event["operation"] == "UPDATE"]
    assert any(update["_unchanged_toast_columns"] for update in updates)
    assert any(update["_unchanged_toast_columns"] and update["old"] for update in updates)


def test_folded_stream_equals_the_tables(database: Database, slot: str) -> None:
    traffic = Traffic(database.url, seed=8, rate_per_s=400)
    traffic.start()
    wait_until(lambda: traffic.commits > 600, 60, "commits")
    traffic.stop()
    with database.connect() as conn:
        source = read_tables(conn, KEYS)
    folded = fold_events(read_stream(database, slot), KEYS, strict=True)
    assert differences(source, folded) == []
    assert all(source.values())


def test_traffic_survives_a_killed_server() -> None:
    with EmbeddedPostgres.temporary(settings={"fsync": "off"}) as server:
        with Database("postgres", server.url(), server).connect() as conn:
            create_tables(conn)
            add_first_rows(conn)
        traffic = Traffic(server.url(), seed=1, rate_per_s=200)
        traffic.start()
        wait_until(lambda: traffic.commits > 20, 30, "commits")
        server.kill()
        before = traffic.commits
        server.restart()
        wait_until(lambda: traffic.commits > before, 30, "commits after the restart")
        traffic.stop()


def test_an_error_of_the_traffic_is_raised_by_stop(database: Database) -> None:
    traffic = Traffic(database.url, seed=1, rate_per_s=100)  # no schema
    traffic.start()
    wait_until(lambda: not traffic.is_running, 30, "the traffic has failed")
    with pytest.raises(Exception, match="does not exist"):
        traffic.stop()
