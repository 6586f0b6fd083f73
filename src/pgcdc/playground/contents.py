"""Table contents, from the database and from delivered events, in one shape: proof that nothing was lost.

Both sides hold PostgreSQL's text as the stream carries it, so that they can be compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

__all__ = ["Key", "Row", "Tables", "differences", "fold_events", "read_tables"]

Key = tuple[str | None, ...]
Row = dict[str, str | None]
Tables = dict[str, dict[Key, Row]]

# The stream's session settings: the same value must be the same text on both sides.
_SESSION = {
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "3",
    "bytea_output": "hex",
}
_COLUMNS = """
    SELECT a.attname, coalesce(a.attnum = ANY (i.indkey), false)
    FROM pg_attribute a LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
    WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
    ORDER BY a.attnum
"""


def fold_events(
    events: Iterable[Mapping[str, Any]], keys: Mapping[str, Sequence[str]], *, strict: bool = False
) -> Tables:
    """The tables that result from applying JSON events in order. `keys` maps "schema.table" to its key columns.

    A column named in `_unchanged_toast_columns` keeps its previous value; if none is known it stays absent, which
    `differences` reports. With `strict`, an INSERT of a row that exists, or an UPDATE or DELETE of one that does not,
    is a ValueError: a change came twice, or one was lost.
    """
    tables: Tables = {}
    for event in events:
        operation, payload = event["operation"], event["payload"]
        if operation not in ("INSERT", "UPDATE", "DELETE", "TRUNCATE", "SNAPSHOT"):
            continue
        name = _table_of(event["channel"])
        rows = tables.setdefault(name, {})
        if operation == "TRUNCATE":
            rows.clear()
            continue
        row, old = dict(payload["row"]), payload.get("old") or {}
        try:
            columns = keys[name]
        except KeyError:
            raise ValueError(f"no key columns known for {name}") from None
        key = tuple(row[column] for column in columns)
        old_key = tuple(old[column] for column in columns) if all(column in old for column in columns) else key
        previous = rows.pop(old_key if operation == "UPDATE" else key, None)
        if strict and (previous is None) == (operation in ("UPDATE", "DELETE")):
            found = "does not exist" if previous is None else "exists"
            raise ValueError(f"{operation} at {event.get('position')}: row {old_key} of {name} {found}")
        if operation == "DELETE":
            continue
        known = {**old, **(previous or {})}
        for column in payload.get("_unchanged_toast_columns") or ():
            row.pop(column, None)
            if column in known:
                row[column] = known[column]
        rows[key] = row
    return tables


def _table_of(channel: str) -> str:
    name = channel.removeprefix("pgcdc:")
    return name if "." in name else f"public.{name}"


def read_tables(conn: psycopg.Connection[Any], tables: Iterable[str]) -> Tables:
    """The same shape from the database, in one snapshot.

    `conn` must not be in a transaction, and the tables need a primary key. COPY writes the same text as the
    stream; a cast to text does not (`true` for `t`, char(n) without padding).
    """
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for name, value in _SESSION.items():
            conn.execute("SELECT set_config(%s, %s, true)", (name, value))
        return {table: dict(_read_table(conn, table)) for table in tables}


def _read_table(conn: psycopg.Connection[Any], table: str) -> Iterator[tuple[Key, Row]]:
    identifier = sql.Identifier(*table.split("."))
    described = conn.execute(_COLUMNS, (identifier.as_string(conn),)).fetchall()
    names = [name for name, _ in described]
    key_columns = [name for name, is_key in described if is_key]
    if not key_columns:
        raise ValueError(f"{table} has no primary key")
    listed = sql.SQL(", ").join(map(sql.Identifier, names))
    command = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT").format(listed, identifier)
    with conn.cursor() as cursor, cursor.copy(command) as copy:
        for values in copy.rows():  # unescaped text, no type set
            row = dict(zip(names, values, strict=True))
            yield tuple(row[column] for column in key_columns), row


def differences(source: Tables, folded: Tables) -> list[str]:
    """One readable line per difference; empty when the contents are equal."""
    lines = []
    for table in sorted(source.keys() | folded.keys()):
        wanted, found = source.get(table, {}), folded.get(table, {})
        for key in sorted(wanted.keys() | found.keys(), key=repr):
            place = f"{table} {_shown(key)}"
            if key not in found:
                lines.append(f"{place}: missing in the output")
            elif key not in wanted:
                lines.append(f"{place}: only in the output")
            elif wanted[key] != found[key]:
                lines += [f"{place}: {line}" for line in _row_differences(wanted[key], found[key])]
    return lines


def _row_differences(wanted: Row, found: Row) -> Iterator[str]:
    for column in sorted(wanted.keys() | found.keys()):
        if column not in found:
            yield f"column {column} missing in the output"
        elif column not in wanted:
            yield f"column {column} only in the output"
        elif wanted[column] != found[column]:
            yield f"column {column} is {_shown(wanted[column])} in the source, {_shown(found[column])} in the output"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
