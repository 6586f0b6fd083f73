"""The server and its replication slots: whether it can be captured; listing, creating and dropping slots.

Each check raises SourceError with the numbers found and the command that helps. The last one opens a real walsender, so
that a pg_hba.conf or pooler that blocks replication is found before anything is created.

Creating a slot waits for every transaction that was open at its start, in any database of the server. So the command
runs in a thread, and every two seconds a second connection reports which transactions it is waiting for. However the
wait is interrupted, no slot is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import errors

from pgcdc.core.errors import ConnectionLost, GapError, PgcdcError, SourceError
from pgcdc.postgres.database import Connection, connect, explain_errors, quote_identifier, quote_literal
from pgcdc.postgres.lsn import format_lsn, parse_lsn
from pgcdc.source.postgres.options import check_age, check_slot_name

PLUGIN = "pgoutput"
NEW_SYNTAX_SINCE = 150000
_REPORT_EVERY_S = 2.0
_RELEASE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot's current state. LSNs are None for a slot that has none (physical, or invalidated)."""

    name: str
    plugin: str | None
    slot_type: str  # logical or physical
    database: str | None
    temporary: bool
    two_phase: bool
    active: bool
    active_pid: int | None
    reader: str | None  # The application name of its current reader
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    wal_status: str | None  # reserved, extended, unreserved (about to be lost) or lost; None before PostgreSQL 13
    invalidation_reason: str | None  # Why it is lost, if the server gives a reason (version 16 and later)
    retained_bytes: int | None  # WAL that this slot keeps on the server
    lag_bytes: int | None  # WAL written since the confirmed position


# to_jsonb, because these columns differ between versions
_SLOTS = """
SELECT s.slot_name::text, s.plugin::text, s.slot_type, s.database::text, s.temporary,
       coalesce((raw ->> 'two_phase')::bool, false), s.active, s.active_pid,
       (SELECT a.application_name FROM pg_stat_activity a WHERE a.pid = s.active_pid),
       (s.restart_lsn - '0/0'::pg_lsn)::int8, (s.confirmed_flush_lsn - '0/0'::pg_lsn)::int8, raw ->> 'wal_status',
       coalesce(raw ->> 'invalidation_reason', CASE WHEN (raw ->> 'conflicting')::bool THEN 'conflict' END),
       greatest(wal.lsn - s.restart_lsn, 0)::int8, greatest(wal.lsn - s.confirmed_flush_lsn, 0)::int8
FROM pg_replication_slots s CROSS JOIN LATERAL (SELECT to_jsonb(s) AS raw) j,
     (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS lsn) wal
"""


@explain_errors("list the replication slots")
def list_slots(conn: Connection) -> list[SlotInfo]:
    """Every slot of the server, in all databases, by name."""
    return [SlotInfo(*row) for row in conn.execute(_SLOTS + "ORDER BY s.slot_name").fetchall()]


@explain_errors("read the replication slot")
def get_slot(conn: Connection, name: str) -> SlotInfo | None:
    row = conn.execute(_SLOTS + "WHERE s.slot_name = %s", [name]).fetchone()
    return SlotInfo(*row) if row else None


def slot_gone(name: str) -> GapError:
    """The error for our missing slot."""
    advice = "Changes since then are gone. Repair the targets: pgcdc resync"
    return GapError(f"slot {name!r} does not exist: somebody dropped it", advice)


def check_not_ahead(slot: SlotInfo, confirmed_lsn: int) -> None:
    """Raise GapError if the slot has confirmed more than we ever did: then it is not the slot we left."""
    if (slot.confirmed_flush_lsn or 0) > confirmed_lsn:
        raise GapError(
            f"slot {slot.name!r} is at {format_lsn(slot.confirmed_flush_lsn or 0)}, but pgcdc confirmed only "
            f"{format_lsn(confirmed_lsn)}: the slot was recreated, or somebody else advanced it",
            "The changes between are not delivered. Repair the targets: pgcdc resync",
        )


def check_usable(slot: SlotInfo, database: str) -> None:
    """Raise unless we can read this slot from `database` without a gap. Ignores its current reader."""
    other = "Choose another --slot-name"
    if slot.slot_type != "logical":
        raise SourceError(f"slot {slot.name} is a physical slot, of a standby or a backup", other)
    if slot.plugin != PLUGIN:
        raise SourceError(
            f"slot {slot.name} uses the plugin {slot.plugin}, not {PLUGIN}: it is not a slot of pgcdc", other
        )
    if slot.database != database:
        raise SourceError(f"slot {slot.name} belongs to database {slot.database}, not {database}", other)
    if slot.wal_status == "lost" or slot.invalidation_reason:
        why = f" ({slot.invalidation_reason})" if slot.invalidation_reason else ""
        raise GapError(
            f"slot {slot.name} is lost{why}: the server has removed changes that were not delivered",
            "Repair the targets: pgcdc resync. If no pipeline needs the slot, drop it: pgcdc slot drop "
            f"--slot-name {slot.name}",
        )


@explain_errors("read the replication slot")
def is_two_phase(replication: Connection, name: str) -> bool:
    """Whether the slot decodes prepared transactions at PREPARE. Also works on a walsender."""
    query = f"SELECT to_jsonb(s) -> 'two_phase' FROM pg_replication_slots s WHERE slot_name = {quote_literal(name)}"
    row = replication.execute(query.encode()).fetchone()  # no parameters: a walsender has only the simple protocol
    return bool(row and row[0])


@explain_errors("drop the slot")
def drop_slot(conn: Connection, name: str) -> None:
    """Drop a slot that has no reader."""
    slot = get_slot(conn, name)
    if slot is None:
        raise SourceError(f"slot {name} does not exist", "List them with: pgcdc slot list")
    try:
        if not slot.active:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [name])
            return
    except psycopg.errors.ObjectInUse:
        slot = get_slot(conn, name) or slot
    except psycopg.errors.InsufficientPrivilege:
        raise SourceError(f"the role may not drop slot {name}", "Use a role with the REPLICATION right") from None
    except psycopg.errors.UndefinedObject:
        return
    pid = slot.active_pid
    raise SourceError(
        f"slot {name} is in use by process {pid} of the server",
        f"Stop its reader first, or run SELECT pg_terminate_backend({pid})",
    )


def end_reader(conn: Connection, slot: SlotInfo, reader: str) -> None:
    """End a slot's walsender if it belongs to `reader`, then wait briefly until the slot has no reader."""
    now, deadline = slot, time.monotonic() + _RELEASE_TIMEOUT_S
    if slot.reader == reader:
        conn.execute("SELECT pg_terminate_backend(%s)", [slot.active_pid])
    while now.active and time.monotonic() < deadline:
        time.sleep(0.05)
        now = get_slot(conn, slot.name) or now


@explain_errors("create the slot")
def create_slot(
    replication: Connection,
    name: str,
    *,
    temporary: bool = False,
    two_phase: bool = False,
    monitor: Connection | None = None,
    say: Callable[[str], object] = lambda text: None,
    exported: list[str] | None = None,
) -> int:
    """Create our slot and return its consistent point: every transaction that commits after this LSN will be sent.

    `exported` gets the name of a snapshot of exactly that point, valid until `replication` is used again. `replication`
    is a walsender (it owns the slot if `temporary`). `monitor` is an ordinary connection: through it, `say` gets, every
    two seconds, the transactions that the server is waiting for. If either raises, the creation is cancelled and
    `replication` closed.
    """
    check_slot_name(name)
    is_new = replication.info.server_version >= NEW_SYNTAX_SINCE
    options = "NOEXPORT_SNAPSHOT" if exported is None else "EXPORT_SNAPSHOT"
    if is_new:
        snapshot = "nothing" if exported is None else "export"
        options = f"(SNAPSHOT '{snapshot}'{', TWO_PHASE' if two_phase else ''})"
    kind = "TEMPORARY LOGICAL" if temporary else "LOGICAL"
    command = f"CREATE_REPLICATION_SLOT {quote_identifier(name)} {kind} {PLUGIN} {options}"
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(lambda: replication.execute(command.encode()).fetchone())
        try:
            while not wait([creation], _REPORT_EVERY_S).done:
                if monitor is not None:
                    pids = [str(pid) for (pid,) in monitor.execute(_OPEN, {"pid": replication.info.backend_pid})]
                    waits = f"creating slot {name}: waiting for open transactions of server processes"
                    say(f"{waits} {', '.join(pids) or 'unknown'}")
        except BaseException:  # also if the monitor fails: nobody would know what it is waiting for
            _give_up(replication, creation, name)
            raise
        try:
            row = creation.result()
        except psycopg.Error as error:
            raise _explain_creation(error, name) from None
    assert row is not None
    if exported is not None:
        exported.append(row[2])
    return parse_lsn(row[1])


def _give_up(replication: Connection, creation: Future[Any], name: str) -> None:
    """Cancel the wait on the server, which does not notice a lost client while it waits for a transaction."""
    try:
        replication.cancel_safe(timeout=5.0)
        creation.result()
        # created before the cancel arrived
        replication.execute(f"DROP_REPLICATION_SLOT {quote_identifier(name)}".encode())
    except psycopg.Error:
        pass  # cancelled; or the connection is gone, and the unfinished slot with it
    replication.close()


def _explain_creation(error: psycopg.Error, name: str) -> PgcdcError:
    text = " ".join((error.diag.message_primary or str(error)).split())
    if isinstance(error, errors.DuplicateObject):
        advice = "Another pipeline has just created it: choose another --slot-name"
        return SourceError(f"slot {name} exists already", advice)
    if isinstance(error, errors.ConfigurationLimitExceeded):
        advice = "Drop an unused one (pgcdc slot list), or run ALTER SYSTEM SET max_replication_slots and restart"
        return SourceError(f"cannot create slot {name}: all replication slots of the server are in use", advice)
    if isinstance(error, errors.InsufficientPrivilege):
        return SourceError(f"cannot create slot {name}: {text}", "Run as superuser: ALTER ROLE ... REPLICATION")
    if not error.sqlstate or error.sqlstate.startswith(("57", "08")):
        return ConnectionLost(f"the connection ended while slot {name} was created: {text}", "Start again")
    if isinstance(error, errors.SerializationFailure):
        return SourceError(f"cannot create slot {name}: {text}", "Too many transactions are open. Start again")
    return SourceError(f"cannot create slot {name}: {text}")


# Longest first; 0 is a prepared transaction. Without the rights of pg_read_all_stats we see only the sessions that
# block us.
_OPEN = """
SELECT pid FROM (
    SELECT a.pid, a.xact_start AS since FROM pg_stat_activity a, (SELECT pg_blocking_pids(%(pid)s) AS pids OFFSET 0) b
    WHERE a.pid <> %(pid)s AND a.pid <> pg_backend_pid() AND (a.backend_xid IS NOT NULL OR a.pid = ANY (b.pids))
    UNION ALL SELECT 0, prepared FROM pg_prepared_xacts) open
ORDER BY since NULLS LAST
"""


# --- the server


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server and database, and their limits."""

    version_num: int
    system_identifier: str  # Assigned by initdb; shared with standbys and physical copies
    timeline: int  # Increases with every promotion
    database: str
    user: str
    slot: SlotInfo | None  # Our slot, if it exists


_FACTS = """
SELECT current_setting('server_version_num')::int, current_database(), current_user::text,
       current_setting('wal_level'), pg_is_in_recovery(),
       current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots)::int,
       current_setting('max_wal_senders')::int, (SELECT count(*) FROM pg_stat_replication)::int,
       r.rolsuper OR r.rolreplication OR EXISTS (
           SELECT FROM pg_roles g WHERE g.rolname = 'rds_replication' AND pg_has_role(r.oid, g.oid, 'MEMBER'))
FROM pg_roles r WHERE r.rolname = current_user
"""


@explain_errors("check the server")
def check(url: str, slot_name: str) -> ServerInfo:
    """Check that this database can be captured through this slot, existing or not. Raises SourceError (also for an
    unreachable server: nothing has started yet), GapError if the slot is lost, and ConnectionLost if the only obstacle
    is the slot's current reader, maybe our own from before a crash, which holds the last walsender."""
    check_slot_name(slot_name)
    with connect(url, application_name="pgcdc preflight", may_retry=False) as conn:
        check_age(conn.info.server_version)
        facts = conn.execute(_FACTS).fetchone()
        assert facts is not None
        slot = get_slot(conn, slot_name)
        version, database, user, wal_level, in_recovery, slots, used_slots, senders, used_senders, may_replicate = facts
        if not may_replicate:
            role = quote_identifier(user)
            raise SourceError(
                f"role {user} lacks the REPLICATION right",
                f"Run as superuser: ALTER ROLE {role} REPLICATION; (on Amazon RDS: GRANT rds_replication TO {role};)",
            )
        check_wal(wal_level, in_recovery)
        if slot is not None:
            check_usable(slot, database)
        elif used_slots >= slots:
            raise SourceError(
                f"all {slots} replication slots of the server are in use (max_replication_slots)",
                "Drop an unused one (pgcdc slot list), or run ALTER SYSTEM SET max_replication_slots = "
                f"{slots + 10} and restart PostgreSQL",
            )
        # if our slot is active, its walsender will become free
        if used_senders >= senders and not (slot and slot.active):
            raise SourceError(
                f"all {senders} walsenders of the server are in use (max_wal_senders)",
                "End one (SELECT * FROM pg_stat_replication), or run ALTER SYSTEM SET max_wal_senders = "
                f"{senders + 10} and restart PostgreSQL",
            )
        # a reader that just crashed may still hold the last walsender: this resolves itself
        identity = _identify_apart(url, conn, may_retry=slot is not None and slot.active)
    return ServerInfo(version, *identity, database, user, slot)


@explain_errors("identify the server")
def identify(replication: Connection) -> tuple[str, int]:
    """System identifier and timeline, from the walsender itself."""
    row = replication.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None
    return str(row[0]), int(row[1])


def check_wal(wal_level: str, in_recovery: bool) -> None:
    if in_recovery:
        raise SourceError("this server is a standby, but changes are captured on the primary", "Connect to its primary")
    if wal_level != "logical":
        raise SourceError(
            f"wal_level is {wal_level}, not logical",
            "Run ALTER SYSTEM SET wal_level = logical and restart PostgreSQL (managed services: set "
            "rds.logical_replication = 1 or cloudsql.logical_decoding = on)",
        )


def _identify_apart(url: str, conn: Connection, *, may_retry: bool) -> tuple[str, int]:
    """Open a walsender, and wait until it has ended: it may have been the last free one, and the capture needs it next."""
    with connect(url, replication=True, application_name="pgcdc preflight", may_retry=may_retry) as replication:
        identity = identify(replication)
        pid = replication.info.backend_pid
    deadline = time.monotonic() + 2.0
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
    while time.monotonic() < deadline and not (conn.execute(gone, [pid]).fetchone() or (True,))[0]:
        time.sleep(0.01)
    return identity
