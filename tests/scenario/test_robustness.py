"""What real databases have: wide rows, huge values, odd names, old encodings, and settings of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from databases import Database, drop_database
from psycopg import sql

import pgcdc
from pgcdc.core.errors import DecodeError
from pgcdc.core.position import Position
from pgcdc.event.events import LINES, event_batch
from pgcdc.event.frame import EventOptions
from pgcdc.event.lines import IdSeed
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.spool.reader import SpoolReader
from pgcdc.spool.writer import SpoolWriter

SEED = IdSeed.of("1", "s")


class Reader:
    """A slot, and the events behind it as the source would give them."""

    def __init__(self, url: str, slot: str, folder: Path) -> None:
        self._url, self._slot, self._folder = url, slot, folder
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("CREATE PUBLICATION p FOR ALL TABLES")
            conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])

    def events(self, options: EventOptions = EventOptions(), **more: Any) -> list[dict[str, Any]]:  # noqa: B008
        """Everything committed up to now, through capture, spool and renderer."""
        with psycopg.connect(self._url, autocommit=True) as conn:
            row = conn.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        writer = SpoolWriter(self._folder / "spool", Position.end(1))
        with pgcdc.open_capture(self._url, slot=self._slot, publication="p", spill_dir=self._folder, **more) as capture:
            capture.target_lsn = int(row[0])
            while capture.handed_out_lsn < capture.target_lsn:
                capture.ask_for_progress()
                batch = capture.receive_batch(timeout_s=0.5)
                if batch is not None:
                    writer.relations = batch.relations
                    writer.append(batch)
        writer.close()
        reader = SpoolReader(self._folder / "spool")
        reader.refresh()
        slices = reader.slices(Position.end(1), reader.end)
        found = event_batch(slices, reader.relations(), SEED, LINES, options) if slices else None
        return [json.loads(line) for line in found.column("line").to_pylist()] if found is not None else []


@pytest.fixture
def reader(database: Database, tmp_path: Path) -> Reader:
    return Reader(database.url, f"s_{database.name}", tmp_path)


def test_a_row_of_1600_columns(database: Database, reader: Reader) -> None:
    names = [f"c{number}" for number in range(1600)]
    database.execute(f"CREATE TABLE wide ({', '.join(f'{name} smallint' for name in names)}, PRIMARY KEY (c0))")
    database.execute(f"INSERT INTO wide VALUES ({', '.join(str(number) for number in range(1600))})")
    database.execute("UPDATE wide SET c0 = -1, c1599 = NULL")
    insert, update = reader.events()
    assert insert["payload"]["row"] == {name: str(number) for number, name in enumerate(names)}
    assert (update["payload"]["old"], update["payload"]["row"]["c1599"]) == ({"c0": "0"}, None)


def test_a_value_of_200_million_bytes(database: Database, reader: Reader) -> None:
    database.execute("CREATE TABLE big (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO big VALUES (1, repeat('0123456789', 20000000)), (2, 'small')")
    first, second = reader.events()
    assert len(first["payload"]["row"]["v"]) == 200_000_000
    assert first["payload"]["row"]["v"].strip("0123456789") == ""
    assert second["payload"]["row"] == {"id": "2", "v": "small"}


def test_names_with_quotes_dots_spaces_and_letters_of_all_kinds(database: Database, reader: Reader) -> None:
    names = ['a "quoted" one', "with.dot", "tab\tand\\slash", "größe 🐘", "SELECT", "x" * 63]
    for name in names:
        with database.connect() as conn:
            conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
            table = sql.Identifier(name, name)
            conn.execute(sql.SQL("CREATE TABLE {} ({} int PRIMARY KEY)").format(table, sql.Identifier(name)))
            conn.execute(sql.SQL("INSERT INTO {} VALUES (1)").format(table))
    found = reader.events()
    assert [one["payload"]["table"] for one in found] == names
    assert [one["payload"]["row"] for one in found] == [{name: "1"} for name in names]
    assert [one["channel"] for one in found] == [f"pgcdc:{name}.{name}" for name in names]


def test_settings_of_role_and_database_do_not_change_the_text(database: Database, reader: Reader) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, span interval, f float8, b bytea, d date)")
    other = {
        "datestyle": "'SQL, DMY'", "timezone": "'Asia/Kolkata'", "intervalstyle": "'sql_standard'",
        "extra_float_digits": "-3", "bytea_output": "'escape'", "client_encoding": "'LATIN1'",
    }  # fmt: skip
    for name, value in other.items():
        database.execute(f'ALTER DATABASE "{database.name}" SET {name} = {value}')
        database.execute(f'ALTER ROLE postgres IN DATABASE "{database.name}" SET {name} = {value}')
    database.execute(
        "INSERT INTO t VALUES (1, '2026-02-03 04:05:06Z', '1 day 2 hours', 0.1::float8 + 0.2, 'ä', '2026-02-03')"
    )
    (event,) = reader.events()
    assert event["payload"]["row"] == {
        "id": "1", "at": "2026-02-03 04:05:06+00", "span": "P1DT2H", "f": "0.30000000000000004", "b": "\\xc3a4",
        "d": "2026-02-03",
    }  # fmt: skip


# --- encodings


def encoded(postgres: EmbeddedPostgres, encoding: str, folder: Path) -> Iterator[tuple[str, Reader]]:
    name = f"e_{encoding.lower()}"
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
        try:
            url = postgres.url(name)
            yield url, Reader(url, name, folder)
        finally:
            drop_database(admin, name)


@pytest.fixture
def latin1(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[str, Reader]]:
    yield from encoded(postgres, "LATIN1", tmp_path)


@pytest.fixture
def sql_ascii(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[tuple[str, Reader]]:
    yield from encoded(postgres, "SQL_ASCII", tmp_path)


def test_a_latin1_database_comes_as_utf8(latin1: tuple[str, Reader]) -> None:
    url, reader = latin1
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("CREATE TABLE größe (id int PRIMARY KEY, straße text)")
        conn.execute("INSERT INTO größe VALUES (1, 'Żółw is not in it, but ÄÖÜß is')".replace("Żółw", "Zolw"))
    (event,) = reader.events()
    assert event["payload"]["table"] == "größe"
    assert event["payload"]["row"]["straße"] == "Zolw is not in it, but ÄÖÜß is"


@pytest.mark.parametrize(("policy", "text"), [("replace", "caf\ufffd"), ("base64", "base64:Y2Fm6Q==")])
def test_bytes_of_an_sql_ascii_database_become_what_was_chosen(
    sql_ascii: tuple[str, Reader], policy: str, text: str
) -> None:
    url, reader = sql_ascii
    with psycopg.connect(url, autocommit=True, client_encoding="SQL_ASCII") as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        conn.pgconn.exec_(b"INSERT INTO t VALUES (1, 'caf\xe9'), (2, 'caf\xc3\xa9')")
    found = reader.events(EventOptions(invalid_text=policy))
    assert [one["payload"]["row"]["v"] for one in found] == [text, "café"]


def test_bytes_of_an_sql_ascii_database_are_an_error_with_advice_by_default(sql_ascii: tuple[str, Reader]) -> None:
    url, reader = sql_ascii
    with psycopg.connect(url, autocommit=True, client_encoding="SQL_ASCII") as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        conn.pgconn.exec_(b"INSERT INTO t VALUES (1, 'caf\xe9')")
    with pytest.raises(DecodeError, match=r"column v of table public\.t") as caught:
        reader.events()
    assert "--invalid-utf8" in str(caught.value.advice)


def test_names_of_an_sql_ascii_database_that_are_not_utf8_are_an_error_with_advice(
    sql_ascii: tuple[str, Reader],
) -> None:
    url, reader = sql_ascii
    with psycopg.connect(url, autocommit=True, client_encoding="SQL_ASCII") as conn:
        conn.pgconn.exec_(b'CREATE TABLE "gr\xf6sse" (id int PRIMARY KEY)')
        conn.pgconn.exec_(b'INSERT INTO "gr\xf6sse" VALUES (1)')
    with pytest.raises(DecodeError, match="name is not UTF-8") as caught:
        reader.events()
    assert caught.value.advice


def test_all_ways_of_the_wire_give_the_same_events(database: Database, reader: Reader) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('ok', 'sad')")
    database.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n numeric, m mood, a int[], j jsonb)")
    database.execute(
        "INSERT INTO t SELECT g, now(), g / 7.0, 'sad', ARRAY[g, NULL], '{\"a\": 1}' FROM generate_series(1, 300) g"
    )
    expected = reader.events()
    assert len(expected) == 300
    ways: list[dict[str, Any]] = [{"streaming": False}, {"binary": True}, {"messages": True}]
    for options in ways:
        for stale in (reader._folder / "spool").iterdir():
            stale.unlink()
        assert reader.events(**options) == expected
