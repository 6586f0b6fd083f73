"""Statements that make and alter the target's tables. Pure: they only write SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pgcdc.postgres.database import quote_identifier, quote_qualified
from pgcdc.sink.pg_table.mapping import TableName

__all__ = [
    "add_columns",
    "create_schema",
    "create_table",
    "drop_not_null",
    "move_table",
    "rename_column",
    "retype_column",
]


def create_schema(name: str) -> str:
    """A schema, if it is not there."""
    return f"CREATE SCHEMA IF NOT EXISTS {quote_identifier(name)}"


def create_table(name: TableName, types: Mapping[str, str], key: Sequence[str]) -> str:
    """A table with the columns and the primary key. Nothing but the key is NOT NULL: what the source allows may change."""
    columns = [f"{quote_identifier(column)} {kind}" for column, kind in types.items()]
    if key:
        columns.append(f"PRIMARY KEY ({', '.join(map(quote_identifier, key))})")
    return f"CREATE TABLE {quote_qualified(*name)} ({', '.join(columns)})"


def add_columns(name: TableName, types: Mapping[str, str]) -> str:
    """More columns."""
    added = ", ".join(f"ADD COLUMN {quote_identifier(column)} {kind}" for column, kind in types.items())
    return f"ALTER TABLE {quote_qualified(*name)} {added}"


def rename_column(name: TableName, old: str, new: str) -> str:
    """Another name for a column."""
    return f"ALTER TABLE {quote_qualified(*name)} RENAME COLUMN {quote_identifier(old)} TO {quote_identifier(new)}"


def retype_column(name: TableName, column: str, kind: str, *, by_text: bool) -> str:
    """Another type for a column; its values are cast, or written as text and read again."""
    quoted = quote_identifier(column)
    value = f"{quoted}::text" if by_text else quoted
    return f"ALTER TABLE {quote_qualified(*name)} ALTER COLUMN {quoted} TYPE {kind} USING ({value})::{kind}"


def drop_not_null(name: TableName, column: str) -> str:
    """Let a column be empty."""
    return f"ALTER TABLE {quote_qualified(*name)} ALTER COLUMN {quote_identifier(column)} DROP NOT NULL"


def move_table(old: TableName, new: TableName) -> Iterable[str]:
    """Another name, and another schema, for a table."""
    if old[1] != new[1]:
        yield f"ALTER TABLE {quote_qualified(*old)} RENAME TO {quote_identifier(new[1])}"
    if old[0] != new[0]:
        yield f"ALTER TABLE {quote_qualified(old[0], new[1])} SET SCHEMA {quote_identifier(new[0])}"
