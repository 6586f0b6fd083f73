"""Errors of the target for which an event may be to blame, and what people are told about it."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from pgcdc.sink.pg_table.sqlstate import Blame, blame, describe, kind_of
from pgcdc.sink.pg_table.writer import RowFault

__all__ = ["describe_fault", "is_conflict", "is_other_shape", "is_row_fault"]

_COLUMN = re.compile(r"^COPY [^\n]*?, line \d+, column (.+?)(?:: |$)", re.M)
_CONFLICTS = (
    errors.UniqueViolation,
    errors.ExclusionViolation,
    errors.ForeignKeyViolation,
    errors.RestrictViolation,
    errors.CardinalityViolation,
)


def is_conflict(error: psycopg.Error) -> bool:
    """Whether the order of changes may be what is wrong: one after the other they may pass."""
    return isinstance(error, _CONFLICTS)


def is_other_shape(error: psycopg.Error) -> bool:
    """Whether a table is not as it was when we looked."""
    return blame(error) is Blame.SHAPE


def is_row_fault(error: psycopg.Error) -> bool:
    """Whether one event may be to blame."""
    return is_conflict(error) or blame(error) in (Blame.EVENT, Blame.SHAPE)


def describe_fault(error: psycopg.Error, table: str) -> tuple[str, str]:
    """Kind and text of a reject: names the column, and what to do if a transform is behind it."""
    if isinstance(error, RowFault):
        return error.kind, str(error)
    found = _COLUMN.search(error.diag.context or "")
    column = error.diag.column_name or (found[1] if found else "")
    where = f"table {table}, column {column}" if column else f"table {table}"
    text = f"{where}: {describe(error)}"
    if (error.sqlstate or "").startswith("22") and column:
        text += ". Give the column another type at the target; if a transform masks it, text"
    return kind_of(error), text
