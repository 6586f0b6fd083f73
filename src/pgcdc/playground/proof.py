"""The playground's proof: the delivered events, applied in order, produce the content of the database.

Both sides hold PostgreSQL's text as in the stream, so they can be compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import psycopg
from psycopg import sql

from pgcdc.core.wording import counted

Key = tuple[str | None, ...]
Row = dict[str, str | None]
Tables = dict[str, dict[Key, Row]]

# The stream's settings: a value must have the same text on both sides.
_SESSION = """
    SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO';
    SET LOCAL IntervalStyle = 'iso_8601'; SET LOCAL extra_float_digits = 3; SET LOCAL bytea_output = 'hex'
"""
_COLUMNS = """
    SELECT a.attname, coalesce(a.attnum = ANY (i.indkey), false)
    FROM pg_attribute a LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
    WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
    ORDER BY a.attnum
"""


class Rules:
    """Finds impossible events: a row inserted twice, or a change of a missing row."""

    def fault(self, event: Mapping[str, Any], rows: Mapping[Key, Row], key: Key, previous: Row | None) -> str | None:
        """What is wrong with an event for the row `key`. `previous` was taken out of the table's `rows`."""
        if event["operation"] in ("INSERT", "SNAPSHOT"):
            return "exists" if previous is not None else None
        if event["operation"] == "UPDATE" and key in rows:
            return f"becomes {shown(key)}, which exists"
        return "does not exist" if previous is None else None

    def observe(self, event: Mapping[str, Any], tables: Tables) -> None:
        """Called for an event that changes no row."""


def fold_events(
    events: Iterable[Mapping[str, Any]], keys: Mapping[str, Sequence[str]], rules: Rules | None = None
) -> Tables:
    """The tables after applying JSON events in order. `keys` maps "schema.table" to its key columns.

    A table without key columns is a bag of rows with inserts only. A column in `_unchanged_toast_columns` keeps its
    previous value; an unknown one stays absent, which `differences` reports. ValueError: the rules call an event
    impossible.
    """
    tables: Tables = {}
    for event in events:
        operation, payload = event["operation"], event["payload"]
        if operation not in ("INSERT", "UPDATE", "DELETE", "TRUNCATE", "SNAPSHOT"):
            if rules is not None:
                rules.observe(event, tables)
            continue
        name = table_of(event)
        rows = tables.setdefault(name, {})
        if operation == "TRUNCATE":
            rows.clear()
            continue
        row, old = dict(payload["row"]), payload.get("old") or {}
        if name not in keys:
            raise ValueError(f"no key columns known for {name}")
        columns = keys[name]
        if not columns:
            if operation not in ("INSERT", "SNAPSHOT"):
                raise ValueError(f"{operation} at {event.get('position')}: {name} has no key")
            rows[_number(row, rows)] = row
            continue
        key = tuple(row[column] for column in columns)
        old_key = tuple(old[column] for column in columns) if all(column in old for column in columns) else key
        previous = rows.pop(old_key if operation == "UPDATE" else key, None)
        fault = rules.fault(event, rows, key, previous) if rules is not None else None
        if fault:
            raise ValueError(f"{operation} at {event.get('position')}: row {shown(old_key)} of {name} {fault}")
        if operation == "DELETE":
            continue
        known = {**old, **(previous or {})}
        for column in payload.get("_unchanged_toast_columns") or ():
            row.pop(column, None)
            if column in known:
                row[column] = known[column]
        rows[key] = row
    return tables


def table_of(event: Mapping[str, Any]) -> str:
    name = str(event["channel"]).removeprefix("pgcdc:")
    return name if "." in name else f"public.{name}"


def check_sequence(events: Iterable[Mapping[str, Any]], faults: list[str]) -> Iterator[Mapping[str, Any]]:
    """Pass the events on, and add repeated and misplaced ones to `faults`."""
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
    """A key for a row of a table without one: its values, and how many equal rows precede it."""
    values = tuple(row[column] for column in sorted(row))
    count = 0
    while (key := (*values, str(count))) in rows:
        count += 1
    return key


def read_tables(conn: psycopg.Connection[Any], tables: Iterable[str]) -> Tables:
    """The same structure from the database, in one snapshot. `conn` must not be in a transaction.

    COPY writes the same text as the stream. A cast to text does not (`true` for `t`, char(n) without padding).
    """
    with conn.transaction():
        conn.execute(_SESSION)
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
        for key, side in _compare(wanted, found):
            place = f"{table} {shown(key)}"
            if side:
                lines.append(f"{place}: {side} the output")
                continue
            for column, absent in _compare(wanted[key], found[key]):
                one, other = shown(wanted[key].get(column)), shown(found[key].get(column))
                lines.append(f"{place}: column {column} {absent or f'is {one} in the source, {other} in'} the output")
    return lines


def _compare(wanted: Mapping[Any, object], found: Mapping[Any, object]) -> Iterator[tuple[Any, str]]:
    """Keys whose values differ; with `missing in` or `only in` if one side has no value."""
    for key in sorted(wanted.keys() | found.keys(), key=repr):
        side = "missing in" if key not in found else "only in" if key not in wanted else ""
        if side or wanted[key] != found[key]:
            yield key, side


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Verdict:
    events: int
    rows: int
    tables: int
    faults: tuple[str, ...]  # One line each; none if source and delivered content are equal

    @property
    def is_equal(self) -> bool:
        """Whether nothing was lost or repeated."""
        return not self.faults

    def __str__(self) -> str:
        if self.faults:
            return f"source and delivered content differ: {counted(len(self.faults), 'difference')}"
        return (
            f"source and delivered content are equal: {counted(self.rows, 'row')} in "
            f"{counted(self.tables, 'table')}, {counted(self.events, 'event')}, none lost, none twice"
        )


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                event = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from None
            if not line.endswith(b"\n"):
                raise ValueError(f"line {number} is incomplete: the file is cut off")
            yield event


def compare(path: Path, source: Tables, keys: Mapping[str, Sequence[str]]) -> Verdict:
    """Fold the file and compare it with the tables. Ids must be unique, and positions must increase."""
    rows = sum(len(table) for table in source.values())
    faults: list[str] = []
    try:
        events = sum(1 for _ in check_sequence(_read_events(path), faults))
        try:
            folded = fold_events(_read_events(path), keys, Rules())
        except ValueError as error:
            faults.append(str(error))
            folded = fold_events(_read_events(path), keys)
        faults += differences(source, folded)
    except (ValueError, KeyError, TypeError) as error:  # these are not our events
        return Verdict(0, rows, len(source), (f"{path.name} cannot be read: {error}",))
    return Verdict(events, rows, len(source), tuple(faults))
