"""Values of every type: what SQL writes, and what Spark gets.

Every line of docs/types.md has at least one case here (or, for types that hold others, in nested_type_cases.py), and each
is sent through a real stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pgcdc.types.column import TypeOptions

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One value of one type."""

    pg_type: str
    """As in CREATE TABLE: `numeric(12,2)`."""
    sql_literal: str
    """An SQL expression for the value: `'1.5'`, or `NULL`."""
    spark_type: str
    """Spark's simpleString: `decimal(12,2)`."""
    expected: Any
    """The Python value, as pyarrow's to_pylist gives it; or an exception type (Rejected), if the value is refused."""
    options: TypeOptions = TypeOptions()  # noqa: RUF009 - frozen
    line: str = ""
    """The first cell of the line in docs/types.md that this is a case of; empty: `pg_type` itself."""
    setup: str = ""
    """SQL that makes the type, if the database does not have it: run once per distinct text, before the tables."""


CASES: list[Case] = []
