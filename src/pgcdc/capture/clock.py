"""How far time has come: a moment of the server, and an LSN behind which nothing was committed before that moment.

A query needs that to close windows while nothing happens. The time of a keepalive would not do: a walsender that is behind
sends it with the present time, and commits of the past would still follow.
"""

from __future__ import annotations

from psycopg import Connection

__all__ = ["Clock"]

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
        moment, place = sql.execute(_TIME).fetchone(), sql.execute(_PLACE).fetchone()  # in this order
        assert moment is not None and place is not None
        time_us, lsn, page = int(moment[0]) - MARGIN_US, int(place[0]), int(place[1])
        if lsn % page in _PAGE_HEADERS:  # the next record would stand behind the header of a page that has none yet
            lsn -= lsn % page
        self._asked = (lsn, time_us)
        return lsn

    def see(self, lsn: int) -> None:
        """Everything up to `lsn` has been read."""
        if self._asked is not None and lsn >= self._asked[0]:
            self.reached, self._asked = self._asked, None
