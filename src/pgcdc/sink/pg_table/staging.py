"""Rows on their way to a table of the target: COPY to a staging table, and one statement that takes them from there.

Staging tables are temporary, have the target's types, and are used again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from pgcdc.postgres.database import Connection, quote_identifier
from pgcdc.sink.pg_table.tables import TargetTable

__all__ = [
    "Staging",
    "copy_rows",
    "delete_rows_statement",
    "delete_statement",
    "fixed_columns",
    "make_way_statement",
    "merge_statement",
    "patch_statement",
]


_WRITE_LINES = 4096
MOST_TABLES = 32
"""So many staging tables a session keeps: at each commit all of them are emptied, which takes 0.4 ms each."""


def copy_rows(conn: Connection, table: str, columns: Sequence[str], lines: Sequence[bytes]) -> None:
    """COPY lines to a table; `table` is as SQL takes it."""
    listed = ", ".join(map(quote_identifier, columns))
    with conn.cursor().copy(f"COPY {table} ({listed}) FROM STDIN".encode()) as copy:
        for begin in range(0, len(lines), _WRITE_LINES):
            copy.write(b"\n".join(lines[begin : begin + _WRITE_LINES]) + b"\n")


class Staging:
    """The temporary staging tables of one session."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._known: set[str] = set()
        self._used: set[str] = set()

    def begin(self) -> None:
        """A transaction begins: what the last one left is gone."""
        self._used.clear()

    def fill(self, target: TargetTable, columns: Sequence[str], lines: Sequence[bytes]) -> str:
        """Put rows into a staging table, and nothing else; its name in SQL."""
        name = self._open(", ".join(f"{quote_identifier(column)} {target.columns[column].type}" for column in columns))
        copy_rows(self._conn, name, columns, lines)
        return name

    def _open(self, columns: str) -> str:
        """The table for these columns. Its name follows from them: after a rollback nobody knows which ones are left."""
        name = f"pgcdc_stage_{hashlib.sha256(columns.encode()).hexdigest()[:16]}"
        is_known = name in self._known
        if not is_known:
            self._make_room()
            self._conn.execute(f"CREATE TEMP TABLE IF NOT EXISTS {name} ({columns}) ON COMMIT DELETE ROWS".encode())
            self._known.add(name)
        if not is_known or name in self._used:
            self._conn.execute(f"TRUNCATE pg_temp.{name}".encode())
        self._used.add(name)
        return f"pg_temp.{name}"

    def _make_room(self) -> None:
        """Drop all staging tables if they are many; also those that a writer before us has left in the session."""
        query = "SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r'"
        found = self._conn.execute(query).fetchone()
        if found is not None and found[0] >= MOST_TABLES:
            self._conn.execute("DISCARD TEMP")
            self._known.clear()
            self._used.clear()


def _values(columns: Iterable[str]) -> dict[str, str]:
    """Expressions for the columns of the staging table `s`."""
    return {column: f"s.{quote_identifier(column)}" for column in columns}


def _matches(values: dict[str, str], key: Sequence[str]) -> str:
    return " AND ".join(f"t.{quote_identifier(column)} = {values[column]}" for column in key)


def merge_statement(target: TargetTable, staging: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Rows that are there become those of the staging table, the others are inserted."""
    values = _values(columns)
    fixed = fixed_columns(target, columns, key)
    settable = [column for column in columns if column not in key and column not in fixed]
    if settable:
        listed = ", ".join(f"{quote_identifier(column)} = {values[column]}" for column in settable)
        matched = f"UPDATE SET {listed}"
    else:
        matched = "DO NOTHING"
    return (
        f"MERGE INTO {target.sql} AS t USING {staging} AS s ON {_matches(values, key)} WHEN MATCHED THEN {matched} "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(map(quote_identifier, columns))}) {_overriding(target, columns)}"
        f"VALUES ({', '.join(values.values())})"
    )


def fixed_columns(target: TargetTable, columns: Iterable[str], key: Sequence[str]) -> list[str]:
    """Columns beside the key that can be inserted, but never updated."""
    return [column for column in columns if target.columns[column].identity == "a" and column not in key]


def make_way_statement(target: TargetTable, staging: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Rows whose fixed columns would change go, so that they can be inserted anew."""
    values = _values(columns)
    fixed = fixed_columns(target, columns, key)
    differs = " OR ".join(f"t.{quote_identifier(one)} IS DISTINCT FROM {values[one]}" for one in fixed)
    return f"DELETE FROM {target.sql} AS t USING {staging} AS s WHERE {_matches(values, key)} AND ({differs})"


def _overriding(target: TargetTable, columns: Iterable[str]) -> str:
    return "OVERRIDING SYSTEM VALUE " if any(target.columns[column].identity for column in columns) else ""


def patch_statement(target: TargetTable, staging: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Rows get the values of the staging table, and keep their others."""
    values = _values(columns)
    fixed = fixed_columns(target, columns, key)
    settable = [column for column in columns if column not in key and column not in fixed]
    listed = ", ".join(f"{quote_identifier(column)} = {values[column]}" for column in settable or key[:1])
    # A row whose fixed column is another one is not found: it is refused, like one that is not there.
    return f"UPDATE {target.sql} AS t SET {listed} FROM {staging} AS s WHERE {_matches(values, [*key, *fixed])}"


def delete_statement(target: TargetTable, staging: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """The rows with the keys of the staging table go; if it has other columns, only where these are the same, too."""
    values = _values(columns)
    where = _matches(values, key)
    if len(columns) > len(key):
        where += f" AND {_row_text(columns)} = ROW({', '.join(values.values())})::text"
    return f"DELETE FROM {target.sql} AS t USING {staging} AS s WHERE {where}"


def _row_text(columns: Iterable[str]) -> str:
    return f"ROW({', '.join(f't.{quote_identifier(column)}' for column in columns)})::text"


def delete_rows_statement(target: TargetTable, staging: str, columns: Sequence[str]) -> str:
    """For each row of the staging table one that is equal to it goes: as PostgreSQL writes them, so NaN and json, too, and
    1.0 is not 1.00."""
    there = _row_text(columns)
    here = f"ROW({', '.join(_values(columns).values())})::text"
    number = "row_number() OVER (PARTITION BY {0})"
    return (
        f"DELETE FROM {target.sql} AS d USING (SELECT t.tableoid AS home, t.ctid AS place, {there} AS content, "
        f"{number.format(there)} AS number FROM {target.sql} AS t "
        f"WHERE {there} IN (SELECT {here} FROM {staging} AS s)) AS f "
        f"JOIN (SELECT {here} AS content, {number.format(here)} AS number FROM {staging} AS s) AS w "
        "ON f.content = w.content AND f.number = w.number WHERE d.tableoid = f.home AND d.ctid = f.place"
    )
