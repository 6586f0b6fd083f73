"""Replication slots: looking at them, creating and dropping them.

Creating one waits until every transaction that was open when it began has ended, in any database of the server. So the
command runs asynchronously, and a second connection tells every two seconds for whom it waits. Whatever interrupts the
wait, no slot stays behind.
"""

from __future__ import annotations

import re
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from pgcdc.core.errors import ConnectionLost, GapError, PgcdcError, SourceError
from pgcdc.postgres.database import Connection, explain_errors, quote_identifier, quote_literal
from pgcdc.postgres.lsn import format_lsn, parse_lsn
from pgcdc.source.postgres.options import check_slot_name

PLUGIN = "pgoutput"
NEW_SYNTAX_SINCE = 150000
_REPORT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One slot as the server sees it now. LSNs are None where the slot has none (physical, or invalidated)."""

    name: str
    plugin: str | None
    slot_type: str
    """logical or physical."""
    database: str | None
    temporary: bool
    two_phase: bool
    active: bool
    active_pid: int | None
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    wal_status: str | None
    """reserved, extended, unreserved (about to be lost) or lost; None before PostgreSQL 13."""
    invalidation_reason: str | None
    """Why it is lost, where the server says so (16 and later)."""
    retained_bytes: int | None
    """WAL that the server keeps because of this slot."""
    lag_bytes: int | None
    """WAL written since what was confirmed."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that the creation of a slot may be waiting for. `pid` is 0 for a prepared one."""

    pid: int
    age_s: float
    query: str
    """Its last statement, shortened; empty if we may not see it."""


# to_jsonb, because the columns differ between versions; text, because jsonb numbers would be floats
_SLOTS = """
SELECT to_jsonb(s), (s.restart_lsn - '0/0'::pg_lsn)::text, (s.confirmed_flush_lsn - '0/0'::pg_lsn)::text,
       (wal.lsn - '0/0'::pg_lsn)::text
FROM pg_replication_slots s,
     (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS lsn) wal
"""


@explain_errors("list the replication slots")
def list_slots(conn: Connection) -> list[SlotInfo]:
    """Every slot of the server, of all databases, by name."""
    return [_read_slot(row) for row in conn.execute(_SLOTS + "ORDER BY s.slot_name").fetchall()]


@explain_errors("look at the replication slot")
def get_slot(conn: Connection, name: str) -> SlotInfo | None:
    """The slot of this name, if there is one."""
    row = conn.execute(_SLOTS + "WHERE s.slot_name = %s", [name]).fetchone()
    return _read_slot(row) if row else None


def _read_slot(row: tuple[Any, ...]) -> SlotInfo:
    raw, *numbers = row
    restart, confirmed, wal = (int(number) if number is not None else None for number in numbers)
    reason = raw.get("invalidation_reason") or ("conflict" if raw.get("conflicting") else None)
    return SlotInfo(
        name=raw["slot_name"],
        plugin=raw["plugin"],
        slot_type=raw["slot_type"],
        database=raw["database"],
        temporary=raw["temporary"],
        two_phase=raw.get("two_phase") or False,
        active=raw["active"],
        active_pid=raw["active_pid"],
        restart_lsn=restart,
        confirmed_flush_lsn=confirmed,
        wal_status=raw.get("wal_status"),
        invalidation_reason=reason,
        retained_bytes=_distance(restart, wal),
        lag_bytes=_distance(confirmed, wal),
    )


def _distance(start: int | None, end: int | None) -> int | None:
    return max(end - start, 0) if start is not None and end is not None else None


def describe_wait(transactions: Sequence[OpenTransaction]) -> str:
    """Whom the creation of a slot waits for."""
    pids = ", ".join(str(one.pid) for one in transactions) or "unknown"
    return f"creating the slot waits for open transactions of server processes {pids}"


def check_not_ahead(slot: SlotInfo, confirmed_lsn: int) -> None:
    """Raise GapError if the slot has confirmed more than we ever did: it is not the one that we left."""
    if (slot.confirmed_flush_lsn or 0) > confirmed_lsn:
        raise GapError(
            f"slot {slot.name!r} stands at {format_lsn(slot.confirmed_flush_lsn or 0)}, but we confirmed only "
            f"{format_lsn(confirmed_lsn)}: it was recreated, or advanced by somebody else",
            "The changes between are not delivered. Bring the sinks back to the source: pgcdc resync",
        )


def check_usable(slot: SlotInfo, database: str) -> None:
    """Raise unless we can read this slot from `database` without a gap. Says nothing about who is reading it now."""
    other = "Choose another --slot-name"
    if slot.slot_type != "logical":
        raise SourceError(f"slot {slot.name} is a physical slot, of a standby or a backup", other)
    if slot.plugin != PLUGIN:
        raise SourceError(f"slot {slot.name} uses the plugin {slot.plugin}, not {PLUGIN}: it is not ours", other)
    if slot.database != database:
        raise SourceError(f"slot {slot.name} belongs to database {slot.database}, not {database}", other)
    if slot.wal_status == "lost" or slot.invalidation_reason:
        why = f" ({slot.invalidation_reason})" if slot.invalidation_reason else ""
        raise GapError(
            f"slot {slot.name} is lost{why}: the server has removed changes that were not delivered",
            "Bring the sinks back to the source: pgcdc resync. A slot that no pipeline needs any more can be dropped: "
            f"pgcdc slot drop --slot-name {slot.name}",
        )


@explain_errors("look at the replication slot")
def is_two_phase(replication: Connection, name: str) -> bool:
    """Whether the slot decodes prepared transactions at their PREPARE; also where the connection is a walsender."""
    query = f"SELECT to_jsonb(s) -> 'two_phase' FROM pg_replication_slots s WHERE slot_name = {quote_literal(name)}"
    row = replication.execute(query.encode()).fetchone()  # no parameters: a walsender has only the simple protocol
    return bool(row and row[0])


@explain_errors("drop the slot")
def drop_slot(conn: Connection, name: str) -> None:
    """Drop a slot that nobody is reading."""
    slot = get_slot(conn, name)
    if slot is None:
        raise SourceError(f"slot {name} does not exist", "pgcdc slot list shows those that do")
    try:
        if not slot.active:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [name])
            return
    except psycopg.errors.ObjectInUse:
        slot = get_slot(conn, name) or slot
    except psycopg.errors.InsufficientPrivilege:
        raise SourceError(f"no right to drop slot {name}", "Use a role with the REPLICATION right") from None
    except psycopg.errors.UndefinedObject:
        return
    pid = slot.active_pid
    raise SourceError(
        f"slot {name} is in use by process {pid} of the server",
        f"Stop its reader first, or SELECT pg_terminate_backend({pid})",
    )


@explain_errors("create the slot")
def create_slot(
    replication: Connection,
    name: str,
    *,
    temporary: bool = False,
    two_phase: bool = False,
    monitor: Connection | None = None,
    on_wait: Callable[[list[OpenTransaction]], None] | None = None,
    exported: list[str] | None = None,
) -> int:
    """Create our slot and return its consistent point: every transaction that commits after this LSN will be sent.

    `exported`, if given, gets the name of a snapshot of that very moment. It is there until `replication` is used again.
    `replication` is a walsender (it owns the slot if `temporary`), `monitor` an ordinary connection: through it,
    `on_wait` hears every two seconds for which transactions the server waits. If `on_wait` raises, the creation is
    given up and `replication` closed.
    """
    check_slot_name(name)
    is_new = replication.info.server_version >= NEW_SYNTAX_SINCE
    if two_phase and not is_new:
        raise SourceError(
            f"two-phase decoding needs PostgreSQL 15, and this server is {replication.info.server_version // 10000}",
            "Leave two_phase out, or upgrade the server",
        )
    options = "NOEXPORT_SNAPSHOT" if exported is None else "EXPORT_SNAPSHOT"
    if is_new:
        snapshot = "nothing" if exported is None else "export"
        options = f"(SNAPSHOT '{snapshot}'{', TWO_PHASE' if two_phase else ''})"
    kind = "TEMPORARY LOGICAL" if temporary else "LOGICAL"
    replication.pgconn.send_query(
        f"CREATE_REPLICATION_SLOT {quote_identifier(name)} {kind} {PLUGIN} {options}".encode()
    )
    try:
        while not _is_done(replication.pgconn, _REPORT_EVERY_S):
            if monitor is not None and on_wait is not None:
                on_wait(_open_transactions(monitor, replication.info.backend_pid))
    except BaseException:
        _give_up(replication, name)
        raise
    result = _last_result(replication.pgconn)
    if result is None or result.status != pq.ExecStatus.TUPLES_OK:
        raise _explain_creation(replication, result, name)
    if exported is not None:
        exported.append((result.get_value(0, 2) or b"").decode())
    return parse_lsn((result.get_value(0, 1) or b"").decode())


def _is_done(pgconn: pq.abc.PGconn, timeout_s: float) -> bool:
    """Wait for the answer to our command; also True when the connection has ended."""
    waiting_to_send = pgconn.flush() == 1
    select.select([pgconn.socket], [pgconn.socket] if waiting_to_send else [], [], timeout_s)
    try:
        pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return not pgconn.is_busy()


def _last_result(pgconn: pq.abc.PGconn) -> pq.abc.PGresult | None:
    last = None
    while (result := pgconn.get_result()) is not None:
        last = result
    return last


def _give_up(replication: Connection, name: str) -> None:
    """End the wait on the server: it does not notice that a client has gone while it waits for a transaction."""
    try:
        replication.cancel_safe(timeout=5.0)
        while not _is_done(replication.pgconn, 5.0):
            pass
        result = _last_result(replication.pgconn)
        if result is not None and result.status == pq.ExecStatus.TUPLES_OK:  # created before the cancel arrived
            replication.pgconn.exec_(f"DROP_REPLICATION_SLOT {quote_identifier(name)}".encode())
    except psycopg.Error:
        pass  # the connection is gone, and the unfinished slot with it
    replication.close()


def _explain_creation(replication: Connection, result: pq.abc.PGresult | None, name: str) -> PgcdcError:
    message = replication.pgconn.get_error_message() if result is None else result.get_error_message()
    text = " ".join(message.replace("ERROR:  ", "").replace("FATAL:  ", "").split())
    sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode() if result is not None else ""
    if sqlstate == "42710":
        return SourceError(
            f"slot {name} exists already", "Another pipeline has just created it: choose another --slot-name"
        )
    if sqlstate == "53400":
        advice = "Drop one that is not used (pgcdc slot list), or ALTER SYSTEM SET max_replication_slots and restart"
        return SourceError(f"cannot create slot {name}: all replication slots of the server are in use", advice)
    if sqlstate == "42501":
        return SourceError(f"cannot create slot {name}: {text}", "Run as superuser: ALTER ROLE ... REPLICATION")
    if not sqlstate or sqlstate.startswith(("57", "08")) or replication.pgconn.status == pq.ConnStatus.BAD:
        return ConnectionLost(f"the connection ended while slot {name} was created: {text}", "Start again")
    return SourceError(f"cannot create slot {name}: {text}")


# Without the rights of pg_read_all_stats we see only the pids of those who block us, and when we asked.
_OPEN = """
SELECT a.pid, extract(epoch FROM clock_timestamp() - a.xact_start)::float8, a.query
FROM pg_stat_activity a, (SELECT pg_blocking_pids(%(pid)s) AS pids OFFSET 0) b
WHERE a.pid <> %(pid)s AND a.pid <> pg_backend_pid() AND (a.backend_xid IS NOT NULL OR a.pid = ANY (b.pids))
UNION ALL
SELECT 0, extract(epoch FROM clock_timestamp() - p.prepared)::float8, 'PREPARE TRANSACTION ' || quote_literal(p.gid)
FROM pg_prepared_xacts p
ORDER BY 2 DESC NULLS LAST
"""


def _open_transactions(monitor: Connection, pid: int) -> list[OpenTransaction]:
    rows = monitor.execute(_OPEN, {"pid": pid}).fetchall()
    return [OpenTransaction(pid, age_s or 0.0, _shorten(query or "")) for pid, age_s, query in rows]


def _shorten(query: str) -> str:
    if query == "<insufficient privilege>" or re.search("password", query, re.IGNORECASE):
        return ""
    text = " ".join(query.split())
    return text if len(text) <= 80 else text[:79] + "…"
