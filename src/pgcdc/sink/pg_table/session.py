"""Sessions at the target: settings with which the source's texts mean the same, and what marks a session as ours.

A session of the apply mode fires no triggers and checks no foreign keys (`session_replication_role`), since the source
has done both; and its changes carry a replication origin, by which a capture of the target can leave them out.
Both need rights that not everybody has. Without them it goes on, and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from pgcdc.core.errors import ConnectionLost, SinkError, SinkUnavailable, SourceError
from pgcdc.core.position import Position
from pgcdc.postgres.database import Connection, connect, quote_literal
from pgcdc.postgres.lsn import format_lsn
from pgcdc.sink.pg_table.sqlstate import describe, explain

__all__ = ["Say", "SessionPlan", "connect_target", "mark_transaction", "open_session", "say_on_stderr"]

Say = Callable[[str], None]

LOCK_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 300
"""In a transaction. A process of ours that hangs must not keep locks for ever."""
_NAME_BYTES = 63

_NO_ORIGIN = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.ConfigurationLimitExceeded,
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


def say_on_stderr(adapter: str) -> Say:
    """What an adapter has to say beside its events."""
    return lambda text: print(f"pgcdc: adapter {adapter}: {text}", file=sys.stderr, flush=True)


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
        settings = {**_SETTINGS, "lock_timeout": f"{_lock_timeout_ms(plan)}ms"}
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


def _lock_timeout_ms(plan: SessionPlan) -> int:
    return int(1000 * min(LOCK_TIMEOUT_S, plan.timeout_s / 2))


def _set_replica(conn: Connection, say: Say) -> None:
    try:
        conn.execute("SET session_replication_role = replica")
    except psycopg.errors.InsufficientPrivilege:
        role = conn.info.user
        say(
            "triggers and foreign keys of the target's tables fire, since this role may not switch them off. Run as "
            f'superuser: GRANT SET ON PARAMETER session_replication_role TO "{role}" (PostgreSQL 15), or give '
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
    if isinstance(error, psycopg.errors.ConfigurationLimitExceeded):
        return (
            "Raise max_replication_slots (since PostgreSQL 18: max_active_replication_origins), or drop origins that "
            "nobody uses: pg_replication_origin_drop"
        )
    functions = ("create(text)", "oid(text)", "session_setup(text)", "xact_setup(pg_lsn, timestamptz)")
    names = ", ".join(f"pg_replication_origin_{name}" for name in functions)
    return f'Run as superuser: GRANT EXECUTE ON FUNCTION {names} TO "{role}"'
