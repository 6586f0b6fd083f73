"""How far time has come: a moment of the server, and an LSN behind which nothing was committed before that moment.

A query needs that to close windows while nothing happens. The time of a keepalive would not do: a walsender that is behind
sends it with the present time, and commits of the past would still follow.
"""

from __future__ import annotations

from psycopg import Connection

__all__ = ["Clock", "wal_place"]

_TIME = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_PLACE = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn, current_setting('wal_block_size')::int8"
_PAGE_HEADERS = (24, 40)
MARGIN_US = 1_000_000
"""A commit takes its time a moment before its place in the WAL (some milliseconds were seen): that much earlier is told."""


class Clock:
    """Reads the server's clock, and tells a reading once everything up to its LSN has been read."""

    def __init__(self) -> None:
        self.reached: tuple[int, int] | None = None
        """(lsn, microseconds since 1970)."""
        self._asked: tuple[int, int] | None = None

    def ask(self, sql: Connection) -> int | None:
        """Take a new reading, unless one is on its way; the LSN to be reached for it."""
        if self._asked is not None:
            return None
        moment = sql.execute(_TIME).fetchone()  # before the place
        assert moment is not None
        lsn = wal_place(sql)
        self._asked = (lsn, int(moment[0]) - MARGIN_US)
        return lsn

    def see(self, lsn: int) -> None:
        """Everything up to `lsn` has been read."""
        if self._asked is not None and lsn >= self._asked[0]:
            self.reached, self._asked = self._asked, None


def wal_place(sql: Connection) -> int:
    """How far the WAL has been written, to disk or not: everything that can be seen by now has its commit before."""
    row = sql.execute(_PLACE).fetchone()
    assert row is not None
    lsn, page = int(row[0]), int(row[1])
    # The next record would stand behind the header of a page that has none yet: no record ends there.
    return lsn - lsn % page if lsn % page in _PAGE_HEADERS else lsn
