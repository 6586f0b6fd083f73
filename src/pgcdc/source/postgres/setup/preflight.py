"""What is checked in the database before anything is created there.

Each check raises SourceError with the numbers found and the command that helps. The last one opens a real walsender, so
that a server whose pg_hba.conf or pooler does not let replication through is found out here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pgcdc.core.errors import ConfigError, GapError, SourceError
from pgcdc.core.state import Identity, StateDir
from pgcdc.postgres.database import Connection, connect, explain_errors, quote_identifier
from pgcdc.postgres.lsn import format_lsn
from pgcdc.postgres.selection import Selection
from pgcdc.source.postgres.options import PostgresOptions, check_slot_name
from pgcdc.source.postgres.setup.fingerprint import SlotDetails, check_identity
from pgcdc.source.postgres.setup.slots import SlotInfo, check_not_ahead, check_usable, get_slot
from pgcdc.spool.consumers import Consumers, is_side_lane

MIN_VERSION = 120000


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Which server and database this is, and what it allows."""

    version_num: int
    system_identifier: str
    """Given at initdb; shared with standbys and physical copies."""
    timeline: int
    """Grows with every promotion."""
    database: str
    user: str
    slot: SlotInfo | None
    """Our slot, if it exists."""


_FACTS = """
SELECT current_setting('server_version_num')::int, current_database(), current_user::text,
       current_setting('wal_level'), pg_is_in_recovery(),
       current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots)::int,
       current_setting('max_wal_senders')::int, (SELECT count(*) FROM pg_stat_replication)::int
"""

_MAY_REPLICATE = """
SELECT r.rolsuper OR r.rolreplication OR EXISTS (
    SELECT FROM pg_roles g WHERE g.rolname = 'rds_replication' AND pg_has_role(r.oid, g.oid, 'MEMBER'))
FROM pg_roles r WHERE r.rolname = current_user
"""


@explain_errors("check the server")
def check(url: str, slot_name: str) -> ServerInfo:
    """Check that the changes of this database can be captured through this slot, which may exist or not.

    Raises SourceError (also for a server that does not answer: nothing was started yet), GapError if the slot is lost,
    ConnectionLost if only its present reader, who may be our own of before a crash, holds the last walsender.
    """
    check_slot_name(slot_name)
    with connect(url, application_name="pgcdc preflight", may_retry=False) as conn:
        if conn.info.server_version < MIN_VERSION:
            raise SourceError(f"PostgreSQL {_version_text(conn)} is too old", "Use PostgreSQL 12 or later")
        facts = conn.execute(_FACTS).fetchone()
        assert facts is not None
        slot = get_slot(conn, slot_name)
        version, database, user, wal_level, in_recovery, slots, used_slots, senders, used_senders = facts
        _check_role(conn, user)
        check_wal(wal_level, in_recovery)
        if slot is not None:
            check_usable(slot, database)
        elif used_slots >= slots:
            raise SourceError(
                f"all {slots} replication slots of the server are in use (max_replication_slots)",
                "Drop one that is not used (pgcdc slot list), or run ALTER SYSTEM SET max_replication_slots = "
                f"{slots + 10} and restart PostgreSQL",
            )
        if used_senders >= senders and not (slot and slot.active):  # if ours is active, its walsender will be free
            raise SourceError(
                f"all {senders} walsenders of the server are in use (max_wal_senders)",
                f"End one (SELECT * FROM pg_stat_replication), or ALTER SYSTEM SET max_wal_senders = {senders + 10} "
                "and restart PostgreSQL",
            )
        # a reader that has just crashed may still hold the last walsender: that heals
        system_identifier, timeline = _identify_apart(url, conn, may_retry=slot is not None and slot.active)
    return ServerInfo(
        version_num=version,
        system_identifier=system_identifier,
        timeline=timeline,
        database=database,
        user=user,
        slot=slot,
    )


@explain_errors("identify the server")
def identify(replication: Connection) -> tuple[str, int]:
    """System identifier and timeline, as the walsender itself tells them."""
    row = replication.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None
    return str(row[0]), int(row[1])


def _check_role(conn: Connection, user: str) -> None:
    row = conn.execute(_MAY_REPLICATE).fetchone()
    if not row or not row[0]:
        role = quote_identifier(user)
        raise SourceError(
            f"role {user} has no REPLICATION right",
            f"Run as superuser: ALTER ROLE {role} REPLICATION; (on Amazon RDS: GRANT rds_replication TO {role};)",
        )


def check_wal(wal_level: str, in_recovery: bool) -> None:
    """Raise SourceError unless this server's WAL can be decoded."""
    if in_recovery:
        raise SourceError("this server is a standby, and changes are captured on the primary", "Connect to its primary")
    if wal_level != "logical":
        raise SourceError(
            f"wal_level is {wal_level}, not logical",
            "Run ALTER SYSTEM SET wal_level = logical and restart PostgreSQL (managed services: set "
            "rds.logical_replication = 1 or cloudsql.logical_decoding = on)",
        )


def _identify_apart(url: str, conn: Connection, *, may_retry: bool) -> tuple[str, int]:
    """Open a walsender and wait until it has gone: it may have been the last free one, which the capture needs next."""
    with connect(url, replication=True, application_name="pgcdc preflight", may_retry=may_retry) as replication:
        identity = identify(replication)
        pid = replication.info.backend_pid
    deadline = time.monotonic() + 2.0
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
    while time.monotonic() < deadline and not (conn.execute(gone, [pid]).fetchone() or (True,))[0]:
        time.sleep(0.01)
    return identity


def _version_text(conn: Connection) -> str:
    version = conn.info.server_version
    minor = version % 10000 if version >= 100000 else version // 100 % 100
    return f"{version // 10000}.{minor}"


# --- slot and state directory


def check_others(options: PostgresOptions, state: StateDir, consumer: str) -> None:
    """Tables that other consumers were promised stay captured until these are forgotten."""
    known = state.identity()
    said_before = SlotDetails.of(known).asked if known is not None else None
    if known is None or said_before is None or options.uses_existing:
        return
    names = Consumers(state.consumers_file).names()
    others = [name for name in names if name != consumer and not is_side_lane(name)]
    asked = Selection.from_json(said_before)
    if others and not options.selection.covers(asked):
        said = ", ".join(f"{name}={value}" for name, value in said_before.items() if value)
        raise ConfigError(
            f"slot {known.stream!r} captures {said} for {', '.join(others)} as well: they would lose what is left out",
            "Name all of it; or use another slot and state directory; or forget them first: "
            f"pgcdc consumer forget NAME --state-dir {state.path}",
        )


def check_known(options: PostgresOptions, state: StateDir, server: ServerInfo) -> Identity | None:
    """Who the state directory belongs to, if slot and server are the ones it knows. Raises with advice if not."""
    if server.slot is not None and not options.temporary_slot:
        options.check_slot(options.slot_name, server.slot.two_phase)
    check_not_taken(options, state, server)
    known = state.identity()
    if known is not None:
        check_identity(
            known,
            system=server.system_identifier,
            timeline=server.timeline,
            database=server.database,
            slot=options.slot_name,
        )
    return known


def check_not_taken(options: PostgresOptions, state: StateDir, server: ServerInfo) -> None:
    """Say at once if somebody else reads this slot; our own capture, or its dying walsender, is no reason."""
    if server.slot is None or not server.slot.active:
        return
    if options.temporary_slot:
        raise SourceError(f"slot {options.slot_name!r} is in use", "Choose another --slot-name for the temporary slot")
    known = state.identity()
    with connect(options.db, may_retry=False) as sql:
        row = sql.execute(
            "SELECT application_name FROM pg_stat_activity WHERE pid = %s", [server.slot.active_pid]
        ).fetchone()
    if row is not None and (known is None or row[0] != f"pgcdc {known.instance}"):
        raise SourceError(
            f"slot {options.slot_name!r} is in use by process {server.slot.active_pid} of the server ({row[0]})",
            "Another consumer reads this slot. Stop it, or use another --slot-name",
        )


def check_rejoin(options: PostgresOptions, state: StateDir, known: Identity, server: ServerInfo) -> None:
    """The pipeline ran before: slot and publications must be as we left them."""
    if options.temporary_slot:
        raise ConfigError(
            f"the state directory {state.path} belongs to the persistent slot {known.stream!r}",
            "Use another --state-dir with --temporary-slot",
        )
    if server.slot is None:
        raise GapError(
            f"slot {options.slot_name!r} does not exist any more: somebody dropped it",
            "Changes since then are gone. Bring the sinks back to the source: pgcdc resync",
        )
    consumers = Consumers(state.consumers_file)
    check_not_ahead(server.slot, consumers.confirmed_lsn)


def check_begin(options: PostgresOptions, state: StateDir, server: ServerInfo) -> None:
    """A slot that exists beside a state directory that is new: somebody has to say what that means."""
    if server.slot is not None and state.identity() is None and options.start_from != "slot":
        raise GapError(
            f"slot {options.slot_name!r} exists (it stands at {format_lsn(server.slot.confirmed_flush_lsn or 0)}), but the "
            f"state directory {state.path} is new: what was delivered is not known",
            "If the state directory was lost, restore it. To deliver everything that the slot still has, give "
            "--start-from slot. Otherwise use another --slot-name, or drop the slot: pgcdc slot drop",
        )
