"""What a target's SQLSTATE means for a batch: the one place that knows.

| class | meaning | what becomes of it |
| --- | --- | --- |
| none, 08, 40, 53, 55P03, 55006, 57, 58, 25006, 25P03, 25P04 | connection, deadlock, full, locked, read-only | tried again |
| 22, 23, 44, 54, P0 | a value, a constraint, a limit, a trigger that says no | an event is to blame |
| 42701, 42703, 42804, 42P01, 42P07, 428C9 | a table is not as expected | applied: an event is to blame; else stop |
| anything else | rights, shape, a defect | stop |
"""

from __future__ import annotations

import re
from enum import Enum

import psycopg
from psycopg import errors

from pgcdc.core.errors import SinkError, SinkUnavailable

__all__ = [
    "Blame",
    "RowFault",
    "blame",
    "describe",
    "describe_fault",
    "explain",
    "is_conflict",
    "is_other_shape",
    "is_row_fault",
    "kind_of",
]


class RowFault(psycopg.DataError):
    """A row that cannot be applied, by our own judgement. The target was not asked, or had nothing against it."""

    sqlstate = "22000"

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Blame(Enum):
    """Whose fault an error is."""

    TARGET_NOW = "may pass"
    EVENT = "one event, maybe"
    SHAPE = "one event, maybe, where events are applied to tables"
    SETUP = "stop"


_PASSES = ("08", "40", "53", "57", "58", "55P03", "55006", "25006", "25P03", "25P04")
_EVENTS = ("22", "23", "44", "54", "P0")
_SHAPES = ("42701", "42703", "42804", "42P01", "42P07", "428C9")
_ADVICE = {
    "25006": "It takes no writes now: is it a standby, or is default_transaction_read_only on? Nothing is lost meanwhile",
    "53100": "Make room on the disk of the target; nothing is lost meanwhile",
    "55P03": "Somebody holds a lock on the table for long: see pg_locks at the target; nothing is lost meanwhile",
    "55006": "Another session uses the replication origin: one of a run that just ended goes away by itself",
    "42501": "Give the role of the URL this right at the target",
    "3F000": "Create the schema, or give the role the right to",
    "0A000": "See docs/adapters/pg_table.md",
}
_COLUMN = re.compile(r"^COPY [^\n]*?, line \d+, column (.+?)(?:: |$)", re.M)
_CONFLICTS = (
    errors.UniqueViolation,
    errors.ExclusionViolation,
    errors.ForeignKeyViolation,
    errors.RestrictViolation,
    errors.CardinalityViolation,
)
_LOST = "Is the target up and reachable? Nothing is lost meanwhile"


def blame(error: psycopg.Error) -> Blame:
    """Whose fault it is."""
    code = error.sqlstate
    if code is None:
        return Blame.TARGET_NOW if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) else Blame.SETUP
    if code.startswith(_PASSES):
        return Blame.TARGET_NOW
    if code.startswith(_SHAPES):
        return Blame.SHAPE
    return Blame.EVENT if code.startswith(_EVENTS) else Blame.SETUP


def kind_of(error: psycopg.Error) -> str:
    """The name of the SQLSTATE as PostgreSQL's manual has it: `not_null_violation`."""
    if error.sqlstate is None:
        return "connection_lost"
    try:
        name = errors.lookup(error.sqlstate).__name__
    except KeyError:
        return f"sqlstate_{error.sqlstate}"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def describe(error: psycopg.Error) -> str:
    """What the server said, in one line, without the values of a row (they stand in the event)."""
    return " ".join((error.diag.message_primary or str(error) or type(error).__name__).split())


def explain(adapter: str, action: str, error: psycopg.Error) -> SinkError:
    """The error of ours for one of the target: may it pass, or does the pipeline stop."""
    text = f"adapter {adapter} cannot {action}: {describe(error)}"
    advice = _ADVICE.get(error.sqlstate or "")
    if blame(error) is Blame.TARGET_NOW:
        return SinkUnavailable(text, advice or _LOST)
    return SinkError(text, advice or error.diag.message_hint or "See docs/adapters/pg_table.md")


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
