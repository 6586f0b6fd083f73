"""Sessions at the target: settings with which the source's texts mean the same, and what its errors mean for a batch.

A session of the apply mode fires no triggers and checks no foreign keys (`session_replication_role`), since the source
has done both; and its changes carry a replication origin, by which a capture of the target can leave them out.
Both need rights that not everybody has. Without them it goes on, and says so.

| class of SQLSTATE | meaning | what becomes of it |
| --- | --- | --- |
| none, 08, 40, 53, 55P03, 55006, 57, 58, 25006, 25P03, 25P04 | connection, deadlock, full, locked, read-only | tried again |
| 22, 23, 44, 54, P0 | a value, a constraint, a limit, a trigger that says no | an event is to blame |
| 42701, 42703, 42804, 42P01, 42P07, 428C9 | a table is not as expected | applied: an event is to blame; else stop |
| anything else | rights, shape, a defect | stop |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import psycopg
from psycopg import errors

from pgcdc.core.errors import ConnectionLost, SinkError, SinkUnavailable, SourceError
from pgcdc.core.position import Position
from pgcdc.postgres.database import Connection, connect, quote_literal
from pgcdc.postgres.lsn import format_lsn

Say = Callable[[str], None]

LOCK_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 300
"""In a transaction. A process of ours that hangs must not keep locks for ever."""
_NAME_BYTES = 63

_NO_ORIGIN = (
    errors.InsufficientPrivilege,
    errors.ObjectNotInPrerequisiteState,
    errors.ConfigurationLimitExceeded,
)
_SETTINGS = {
    "idle_in_transaction_session_timeout": f"{IDLE_TIMEOUT_S}s",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "xmloption": "content",
}


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session is to be like."""

    adapter: str
    url: str = field(repr=False)
    timeout_s: float = 30.0
    """For one write."""
    origin: str = ""
    """Empty: none."""
    is_origin_wanted: bool = False
    """Somebody named it: without the right to use it nothing goes on."""
    is_replica: bool = False


def connect_target(plan: SessionPlan) -> Connection:
    """A session in autocommit, with settings that everybody needs. SinkUnavailable: not now; SinkError: not so."""
    name = f"pgcdc {plan.adapter}"[:_NAME_BYTES]
    try:
        conn = connect(plan.url, application_name=name, connect_timeout_s=max(2, min(10, int(plan.timeout_s / 2))))
    except ConnectionLost as error:
        raise SinkUnavailable(f"adapter {plan.adapter}: {error.message}", error.advice) from None
    except SourceError as error:
        raise SinkError(f"adapter {plan.adapter}: {error.message}", error.advice) from None
    try:
        settings = {**_SETTINGS, "lock_timeout": f"{int(1000 * min(LOCK_TIMEOUT_S, plan.timeout_s / 2))}ms"}
        # What is acknowledged must survive a crash of the target; stricter settings of the role or the URL stay.
        keep = "coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on')"
        calls = [
            f"set_config({quote_literal(name)}, {quote_literal(value)}, false)" for name, value in settings.items()
        ]
        conn.execute(f"SELECT {', '.join(calls)}, set_config('synchronous_commit', {keep}, false)".encode())
    except psycopg.Error as error:
        conn.close()
        raise explain(plan.adapter, "begin a session", error) from error
    return conn


def open_session(plan: SessionPlan, say: Say) -> tuple[Connection, bool]:
    """A session that writes, and whether its transactions are to be marked with an origin."""
    conn = connect_target(plan)
    try:
        if plan.is_replica:
            _set_replica(conn, say)
        return conn, bool(plan.origin) and _set_origin(conn, plan, say)
    except psycopg.Error as error:
        conn.close()
        raise explain(plan.adapter, "begin a session", error) from error
    except BaseException:
        conn.close()
        raise


def mark_transaction(conn: Connection, end: Position) -> None:
    """Say how far of the source this transaction of a session with an origin goes: `pg_replication_origin_status`."""
    conn.execute("SELECT pg_replication_origin_xact_setup(%s, now())", (format_lsn(end.commit),))


def _set_replica(conn: Connection, say: Say) -> None:
    try:
        conn.execute("SET session_replication_role = replica")
    except errors.InsufficientPrivilege:
        say(
            "triggers and foreign keys of the target's tables fire, since this role may not switch them off. Run as "
            f'superuser: GRANT SET ON PARAMETER session_replication_role TO "{conn.info.user}" (PostgreSQL 15), or give '
            "--pg-table-triggers on"
        )


def _set_origin(conn: Connection, plan: SessionPlan, say: Say) -> bool:
    try:
        conn.execute(
            "SELECT pg_replication_origin_create(%s) WHERE pg_replication_origin_oid(%s) IS NULL",
            (plan.origin, plan.origin),
        )
        conn.execute("SELECT pg_replication_origin_session_setup(%s)", (plan.origin,))
    except _NO_ORIGIN as error:
        advice = _origin_advice(error, conn.info.user)
        if plan.is_origin_wanted:
            raise SinkError(
                f"adapter {plan.adapter} cannot use a replication origin: {describe(error)}", advice
            ) from None
        say(
            f"its changes carry no replication origin ({describe(error)}): a capture of the target cannot tell them from "
            f"others. {advice}"
        )
        return False
    return True


def _origin_advice(error: psycopg.Error, role: str) -> str:
    if isinstance(error, errors.ConfigurationLimitExceeded):
        return (
            "Raise max_replication_slots (since PostgreSQL 18: max_active_replication_origins), or drop origins that "
            "nobody uses: pg_replication_origin_drop"
        )
    functions = ("create(text)", "oid(text)", "session_setup(text)", "xact_setup(pg_lsn, timestamptz)")
    names = ", ".join(f"pg_replication_origin_{name}" for name in functions)
    return f'Run as superuser: GRANT EXECUTE ON FUNCTION {names} TO "{role}"'


# --- errors


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
