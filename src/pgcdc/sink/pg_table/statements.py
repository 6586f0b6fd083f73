"""Rows on their way to a table of the target: COPY to a staging table, and a statement that takes them from there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.postgres.database import quote_identifier
from pgcdc.sink.pg_table.fold import Rows
from pgcdc.sink.pg_table.tables import TargetTable

__all__ = [
    "copy_texts",
    "delete_rows_statement",
    "delete_statement",
    "fixed_columns",
    "make_way_statement",
    "merge_statement",
    "patch_statement",
]

PIECE_BYTES = 4 << 20
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


def copy_texts(rows: Rows) -> Iterator[memoryview]:
    """The rows in the text format of COPY, some megabytes at a time."""
    values = list(map(_escaped, rows.values))
    if not values:
        return
    step = max(1, len(rows) * PIECE_BYTES // max(1, sum(one.nbytes for one in values)))
    for begin in range(0, len(rows), step):
        *most, last = (one.slice(begin, step) for one in values)
        lines = pc.binary_join_element_wise(*most, pc.binary_join_element_wise(last, "", "\n"), "\t")
        ends = np.frombuffer(lines.buffers()[1], np.int32)
        yield memoryview(lines.buffers()[2])[ends[lines.offset] : ends[lines.offset + len(lines)]]


def _escaped(values: pa.Array) -> pa.Array:
    """Texts as COPY writes them; most columns have nothing to escape, and are left alone."""
    data = values.buffers()[2] if len(values) else None
    raw = data.to_pybytes() if data is not None else b""
    for letter, written in _ESCAPES.items():
        if letter.encode() in raw:
            values = pc.replace_substring(values, letter, written)
    return pc.fill_null(values, "\\N") if values.null_count else values


def _values(columns: Iterable[str]) -> dict[str, str]:
    """Expressions for the columns of the staging table `s`."""
    return {column: f"s.{quote_identifier(column)}" for column in columns}


def _matches(values: dict[str, str], key: Sequence[str]) -> str:
    return " AND ".join(f"t.{quote_identifier(column)} = {values[column]}" for column in key)


def merge_statement(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
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
        f"MERGE INTO {target.sql} AS t USING {stage} AS s ON {_matches(values, key)} WHEN MATCHED THEN {matched} "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(map(quote_identifier, columns))}) {_overriding(target, columns)}"
        f"VALUES ({', '.join(values.values())})"
    )


def fixed_columns(target: TargetTable, columns: Iterable[str], key: Sequence[str]) -> list[str]:
    """Columns beside the key that can be inserted, but never updated."""
    return [column for column in columns if target.columns[column].identity == "a" and column not in key]


def make_way_statement(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Rows whose fixed columns would change go, so that they can be inserted anew."""
    values = _values(columns)
    fixed = fixed_columns(target, columns, key)
    differs = " OR ".join(f"t.{quote_identifier(one)} IS DISTINCT FROM {values[one]}" for one in fixed)
    return f"DELETE FROM {target.sql} AS t USING {stage} AS s WHERE {_matches(values, key)} AND ({differs})"


def _overriding(target: TargetTable, columns: Iterable[str]) -> str:
    return "OVERRIDING SYSTEM VALUE " if any(target.columns[column].identity for column in columns) else ""


def patch_statement(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """Rows get the values of the staging table, and keep their others."""
    values = _values(columns)
    fixed = fixed_columns(target, columns, key)
    settable = [column for column in columns if column not in key and column not in fixed]
    listed = ", ".join(f"{quote_identifier(column)} = {values[column]}" for column in settable or key[:1])
    # A row whose fixed column is another one is not found: it is refused, like one that is not there.
    return f"UPDATE {target.sql} AS t SET {listed} FROM {stage} AS s WHERE {_matches(values, [*key, *fixed])}"


def delete_statement(target: TargetTable, stage: str, columns: Sequence[str], key: Sequence[str]) -> str:
    """The rows with the keys of the staging table go; if it has other columns, only where these are the same, too."""
    values = _values(columns)
    where = _matches(values, key)
    if len(columns) > len(key):
        where += f" AND {_row_text(columns)} = ROW({', '.join(values.values())})::text"
    return f"DELETE FROM {target.sql} AS t USING {stage} AS s WHERE {where}"


def _row_text(columns: Iterable[str]) -> str:
    return f"ROW({', '.join(f't.{quote_identifier(column)}' for column in columns)})::text"


def delete_rows_statement(target: TargetTable, stage: str, columns: Sequence[str]) -> str:
    """For each row of the staging table one that is equal to it goes: as PostgreSQL writes them, so NaN and json, too, and
    1.0 is not 1.00."""
    there = _row_text(columns)
    here = f"ROW({', '.join(_values(columns).values())})::text"
    number = "row_number() OVER (PARTITION BY {0})"
    return (
        f"DELETE FROM {target.sql} AS d USING (SELECT t.tableoid AS home, t.ctid AS place, {there} AS content, "
        f"{number.format(there)} AS number FROM {target.sql} AS t "
        f"WHERE {there} IN (SELECT {here} FROM {stage} AS s)) AS f "
        f"JOIN (SELECT {here} AS content, {number.format(here)} AS number FROM {stage} AS s) AS w "
        "ON f.content = w.content AND f.number = w.number WHERE d.tableoid = f.home AND d.ctid = f.place"
    )
