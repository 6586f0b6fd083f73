"""Whether server, slot and publications are still as we left them: looked at when we connect, and every few seconds."""

from __future__ import annotations

from dataclasses import replace

from psycopg import Error

from pgcdc.core.errors import ConnectionLost, GapError
from pgcdc.core.state import Identity, Lock, StateDir, check_identity
from pgcdc.postgres.database import Connection
from pgcdc.source.postgres.setup.fingerprint import check_unchanged
from pgcdc.source.postgres.setup.preflight import identify
from pgcdc.source.postgres.setup.slots import check_not_ahead, check_usable, get_slot
from pgcdc.spool.consumers import Consumers

__all__ = ["Guard", "connection_ended"]


def connection_ended(error: Error) -> ConnectionLost:
    """What psycopg raised on a connection that worked before."""
    return ConnectionLost(f"the server ended the connection: {' '.join(str(error).split())}")


class Guard:
    """Raises GapError as soon as going on would skip changes."""

    def __init__(self, state: StateDir, identity: Identity, consumers: Consumers, *, temporary: bool) -> None:
        self._state = state
        self._identity = identity
        self._consumers = consumers
        self._temporary = temporary
        self.server_lsn = 0
        """How far the server's WAL went when we looked last."""
        self.wal_sender_timeout_s = 60.0

    def check_server(self, replication: Connection) -> None:
        """Whether a walsender belongs to the server that we know."""
        system_identifier, timeline = identify(replication)
        check_identity(
            self._identity,
            system_identifier=system_identifier,
            timeline=timeline,
            database=replication.info.dbname,
            slot=self._identity.slot,
        )

    def check(self, sql: Connection) -> None:
        """Whether slot and publications are as we left them. A few light queries."""
        try:
            self._check(sql)
        except Error as error:
            raise connection_ended(error) from error

    def _check(self, sql: Connection) -> None:
        row = sql.execute(
            "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn, setting::int FROM pg_settings "
            "WHERE name = 'wal_sender_timeout'"
        ).fetchone()
        assert row is not None
        self.server_lsn, timeout_ms = int(row[0]), row[1]
        self.wal_sender_timeout_s = timeout_ms / 1000 or 60.0
        self._check_publications(sql)
        if self._temporary:
            return
        slot = get_slot(sql, self._identity.slot)
        if slot is None:
            raise GapError(
                f"slot {self._identity.slot!r} does not exist any more: somebody dropped it",
                "Changes since then are gone. Bring the sinks back to the source: pgcdc resync",
            )
        check_usable(slot, self._identity.database)
        check_not_ahead(slot, self._consumers.confirmed_lsn)

    def _check_publications(self, sql: Connection) -> None:
        """Stop if somebody narrowed them; remember what was added, so that it is missed when it goes."""
        lock = Lock(self._state.identity_lock)
        if lock.acquire(timeout_s=0) is None:
            return  # the driver is just changing them: we look again in a few seconds
        try:
            known = self._state.identity()
            assert known is not None
            now = check_unchanged(sql, known.publications, known.planned, is_open=known.is_open)
            if now != known.publications:
                self._state.save_identity(replace(known, publications=now, planned=None))
        finally:
            lock.release()

    def is_held_by_us(self, sql: Connection) -> bool:
        """Whether the slot's present reader is our own walsender, of before a crash (or has just gone)."""
        try:
            row = sql.execute(
                "SELECT a.application_name FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid "
                "WHERE s.slot_name = %s",
                [self._identity.slot],
            ).fetchone()
        except Error as error:
            raise connection_ended(error) from error
        return row is None or row[0] == f"pgcdc {self._identity.instance}"
