"""COPY gives exactly the bytes that the stream gives for the same rows, and the server's errors as they are."""

from __future__ import annotations

from collections.abc import Iterator

import nested_type_cases
import psycopg
import pytest
from databases import Database
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.types.json import Json
from streams import Stream, drain, new_stream
from type_cases import CASES

from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import Connection, connect, quote_identifier
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement

Row = list[bytes | None]


@pytest.fixture(scope="module")
def stream(postgres: EmbeddedPostgres) -> Iterator[Stream]:
    with new_stream(postgres) as one:
        one.execute("CREATE PUBLICATION p FOR ALL TABLES")
        yield one


@pytest.fixture(scope="module")
def conn(stream: Stream) -> Iterator[Connection]:
    with connect(stream.url) as one:
        yield one


def copied(conn: Connection, table: str, columns: list[str]) -> list[Row]:
    values: Row = []
    for found in copy_rows(conn, copy_statement(columns, quote_identifier(table)), len(columns), batch_bytes=1000):
        values += found.to_pylist()
    return [values[first : first + len(columns)] for first in range(0, len(values), len(columns))]


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\b\f\n\r\t\v\\N"))
RANDOM = st.tuples(
    st.integers(-(2**31), 2**31 - 1),
    st.none() | TEXTS,
    st.none() | st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=5),  # char(7)
    st.none() | st.binary(),
    st.none() | st.floats(),
    st.none() | st.decimals(allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9),
    st.none() | st.booleans(),
    st.none() | st.datetimes().map(str),
    st.none() | st.lists(TEXTS | st.none(), max_size=3),
    st.none() | st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2).map(Json),
)


def test_random_rows_have_the_bytes_of_the_stream(stream: Stream, conn: Connection) -> None:
    conn.execute(
        "CREATE TABLE random (i int, t text, c char(7), b bytea, f float8, n numeric, flag bool, at timestamptz, "
        "list text[], doc json)"
    )
    names = ["i", "t", "c", "b", "f", "n", "flag", "at", "list", "doc"]
    insert = f"INSERT INTO random VALUES ({', '.join(['%s'] * 8)}, %s::text[], %s)".encode()
    with stream.open(stream.slot()) as capture:

        @given(st.lists(RANDOM, min_size=1, max_size=20))
        @settings(max_examples=25)
        def compare(rows: list[tuple[object, ...]]) -> None:
            conn.execute("TRUNCATE random")
            with conn.transaction():
                conn.cursor().executemany(insert, rows)
            sent = [one.new for one in drain(capture, stream.wal_end()) if one.op == "I"]
            assert len(sent) == len(rows) and copied(conn, "random", names) == sent

        compare()


def test_every_type_and_every_escape_has_the_bytes_of_the_stream(stream: Stream, conn: Connection) -> None:
    cases = [*CASES, *nested_type_cases.CASES]
    for setup in dict.fromkeys(case.setup for case in cases if case.setup):
        stream.execute(setup)
    types = list(dict.fromkeys(case.pg_type for case in cases))
    names = [f"c{number}" for number in range(len(types))]
    stream.execute(f"CREATE TABLE types ({', '.join(f'{n} {t}' for n, t in zip(names, types, strict=True))})")
    slot = stream.slot()
    lines = [f"INSERT INTO types ({names[types.index(case.pg_type)]}) VALUES ({case.sql_literal})" for case in cases]
    every = "".join(map(chr, range(1, 256)))
    with conn.transaction():
        for line in lines:
            conn.execute(line.encode())
        for text in ("", "\\N", "\\", every, "N", "\\.", "😀" * 1000, "\\\t\n" * 3_500_000):
            conn.execute(f"INSERT INTO types ({names[types.index('text')]}) VALUES (%s)".encode(), [text])
    sent = [one.new for one in stream.read(slot).changes if one.op == "I"]
    assert len(sent) == len(cases) + 8
    assert copied(conn, "types", names) == sent


def test_an_error_of_the_server_is_raised_and_the_session_goes_on(database: Database) -> None:
    with connect(database.url) as conn:
        with pytest.raises(psycopg.errors.UndefinedTable):
            list(copy_rows(conn, copy_statement(["x"], "nowhere"), 1))
        with pytest.raises(psycopg.errors.DivisionByZero):  # in the middle of the rows
            statement = copy_statement(["x"], "(SELECT 1 / (50000 - n) AS x FROM generate_series(1, 99999) n) s")
            for _ in copy_rows(conn, statement, 1, batch_bytes=1000):
                pass
        with pytest.raises(psycopg.errors.SyntaxError):
            list(copy_rows(conn, "COPY (SELECT 1) TO STDOUT; CREATE TABLE evil ()", 1))
        assert conn.execute("SELECT to_regclass('evil')").fetchone() == (None,)


def test_a_copy_that_is_not_read_to_its_end_closes_the_connection(database: Database) -> None:
    with connect(database.url) as conn:
        rows = copy_rows(conn, copy_statement(["n"], "(SELECT generate_series(1, 1000000) AS n) s"), 1, batch_bytes=100)
        assert next(rows)[0].as_py() == b"1"
        rows.close()
        assert conn.closed


def test_a_lost_connection_is_an_error(database: Database) -> None:
    with connect(database.url) as conn, database.connect() as other:
        rows = copy_rows(
            conn, copy_statement(["n"], "(SELECT generate_series(1, 100000000) AS n) s"), 1, batch_bytes=100
        )
        next(rows)
        other.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            for _ in rows:
                pass


def test_memory_does_not_grow_with_the_table(database: Database) -> None:
    with connect(database.url) as conn:
        statement = copy_statement(["t"], "(SELECT repeat('x', 1000) AS t FROM generate_series(1, 50000)) s")
        sizes = [found.nbytes for found in copy_rows(conn, statement, 1)]
    assert sum(sizes) > 50_000_000 and max(sizes) < 5_000_000
