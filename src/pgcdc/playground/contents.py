"""Table contents, from the database and from delivered events, in one shape: proof that nothing was lost.

Both sides hold PostgreSQL's text as the stream carries it, so that they can be compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

__all__ = ["Key", "Row", "Tables", "check_sequence", "differences", "fold_events", "read_tables"]

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
    events: Iterable[Mapping[str, Any]],
    keys: Mapping[str, Sequence[str]],
    *,
    strict: bool = False,
    complete: bool = True,
    resynced: bool = False,
) -> Tables:
    """The tables that result from applying JSON events in order. `keys` maps "schema.table" to its key columns.

    A table with no key columns is a bag of rows, of which there are only inserts. A column named in
    `_unchanged_toast_columns` keeps its previous value; if none is known it stays absent, which `differences` reports.

    With `strict`, what cannot be is a ValueError: an INSERT of a row that exists, an UPDATE or DELETE of one that does not,
    and rows of snapshots that are there twice, older than what is known, or gone already. `complete`: the events begin with
    the tables' rows, or with empty tables; else rows that are not known are fine. `resynced`: after a second initial
    snapshot of a table, rows of before are fine until they are deleted.
    """
    tables: Tables = {}
    rules = _Rules(tables, complete, resynced) if strict else None
    for event in events:
        operation, payload = event["operation"], event["payload"]
        if operation == "SNAPSHOT_STARTED" and rules is not None:
            rules.begin(payload["row"])
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
        if not columns:
            if operation not in ("INSERT", "SNAPSHOT"):
                raise ValueError(f"{operation} at {event.get('position')}: {name} has no key")
            rows[_number(row, rows)] = row
            continue
        key = tuple(row[column] for column in columns)
        old_key = tuple(old[column] for column in columns) if all(column in old for column in columns) else key
        previous = rows.pop(old_key if operation == "UPDATE" else key, None)
        fault = rules.fault(event, name, key, previous) if rules is not None else None
        if fault:
            raise ValueError(f"{operation} at {event.get('position')}: row {_shown(old_key)} of {name} {fault}")
        if operation == "DELETE":
            continue
        known = {**old, **(previous or {})}
        for column in payload.get("_unchanged_toast_columns") or ():
            row.pop(column, None)
            if column in known:
                row[column] = known[column]
        rows[key] = row
    return tables


class _Rules:
    """What cannot be, given the events so far."""

    def __init__(self, tables: Tables, complete: bool, resynced: bool) -> None:
        self._tables = tables
        self._complete = complete
        self._resynced = resynced
        self._kinds: dict[str, str] = {}
        self._read: dict[str, dict[Key, str]] = {}
        """Of each table: what has come in the snapshot that was begun last, and behind which transaction."""
        self._old: dict[str, set[Key]] = {}
        """Of each table: rows of before a resync, that nobody has told anything about yet."""

    def begin(self, mark: Mapping[str, str]) -> None:
        name = f"{mark['schema']}.{mark['table']}"
        self._kinds[name] = mark["kind"]
        self._read[name] = {}
        if self._resynced and mark["kind"] == "initial":
            self._old[name] = set(self._tables.get(name, {}))

    def fault(self, event: Mapping[str, Any], name: str, key: Key, previous: Row | None) -> str | None:
        operation = event["operation"]
        old = self._old.get(name, set())
        is_old = key in old
        old.discard(key)
        if operation == "SNAPSHOT":
            return self._snapshot_fault(event, name, key, None if is_old else previous, is_old)
        if operation == "INSERT":
            return "exists" if previous is not None and not is_old else None
        if operation == "UPDATE" and key in self._tables[name] and not is_old:  # the row itself is taken out already
            return f"becomes {_shown(key)}, which exists"
        # rows that vanished before a resync are deleted by rows of a snapshot: the stream may have done it meanwhile
        is_check = operation == "DELETE" and str(event.get("position", "/0")).partition("/")[2].startswith("1")
        return "does not exist" if previous is None and self._complete and not is_check else None

    def _snapshot_fault(
        self, event: Mapping[str, Any], name: str, key: Key, previous: Row | None, is_old: bool
    ) -> str | None:
        row, place = event["payload"]["row"], str(event.get("position")).partition("/")[0]
        read = self._read.setdefault(name, {})
        if read.get(key) == place:  # behind another transaction it may come again: keys that were moved are looked up
            return "came twice in one snapshot"
        read[key] = place
        if previous is None:
            is_again = self._kinds.get(name) in ("incremental", "always")
            return "is gone, and comes back" if is_again and self._complete and not is_old else None
        found = [column for column in row if column in previous and previous[column] != row[column]]
        if not found:
            return None
        return f"has {_shown(row[found[0]])} in column {found[0]}, but the stream had {_shown(previous[found[0]])}"


def check_sequence(events: Iterable[Mapping[str, Any]], faults: list[str]) -> Iterator[Mapping[str, Any]]:
    """The same events; those that came twice or out of order are told in `faults`."""
    ids: set[int] = set()
    last = ""
    for event in events:
        number, position = UUID(event["id"]).int, event["position"]
        if number in ids:
            faults.append(f"event {event['id']} at {position} came twice")
        if position <= last:
            faults.append(f"event {event['id']} at {position} came after {last}")
        ids.add(number)
        last = position
        yield event


def _number(row: Row, rows: Mapping[Key, Row]) -> Key:
    """A key for a row of a table that has none: its values, and the how manieth like it this is."""
    values = tuple(row[column] for column in sorted(row))
    count = 0
    while (key := (*values, str(count))) in rows:
        count += 1
    return key


def _table_of(channel: str) -> str:
    name = channel.removeprefix("pgcdc:")
    return name if "." in name else f"public.{name}"


def read_tables(conn: psycopg.Connection[Any], tables: Iterable[str]) -> Tables:
    """The same shape from the database, in one snapshot.

    `conn` must not be in a transaction. COPY writes the same text as the
    stream; a cast to text does not (`true` for `t`, char(n) without padding).
    """
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for name, value in _SESSION.items():
            conn.execute("SELECT set_config(%s, %s, true)", (name, value))
        return {table: _read_table(conn, table) for table in tables}


def _read_table(conn: psycopg.Connection[Any], table: str) -> dict[Key, Row]:
    identifier = sql.Identifier(*table.split("."))
    described = conn.execute(_COLUMNS, (identifier.as_string(conn),)).fetchall()
    names = [name for name, _ in described]
    key_columns = [name for name, is_key in described if is_key]
    rows: dict[Key, Row] = {}
    listed = sql.SQL(", ").join(map(sql.Identifier, names))
    command = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT").format(listed, identifier)
    with conn.cursor() as cursor, cursor.copy(command) as copy:
        for values in copy.rows():  # unescaped text, no type set
            row = dict(zip(names, values, strict=True))
            rows[tuple(row[column] for column in key_columns) if key_columns else _number(row, rows)] = row
    return rows


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
