"""Which tables of the target were there: one that is gone is not made again as if it were new, without its rows.

A name counts when the transaction that saw the table has been committed. The names stand in a file beside the ack, so that
a restart does not forget them; without the file only that is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from pgcdc.core.errors import StateError
from pgcdc.core.state import read_json, write_json_durably
from pgcdc.postgres.database import Connection
from pgcdc.sink.pg_table.mapping import TableName

__all__ = ["KnownTables"]


class KnownTables:
    """The names of one adapter."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names: set[TableName] = set()
        self._seen: tuple[str, set[TableName]] | None = None
        """What the last transaction saw that had seen something new, and its number."""
        with contextlib.suppress(StateError, TypeError, ValueError):
            self._names = {(schema, name) for schema, name in (read_json(path) if path else None) or ()}

    def __contains__(self, name: TableName) -> bool:
        return name in self._names

    def see(self, conn: Connection, names: Iterable[TableName]) -> None:
        """These tables are there, in the transaction that is open."""
        fresh = set(names) - self._names
        row = conn.execute("SELECT pg_current_xact_id()::text").fetchone() if fresh else None
        self._seen = (row[0], fresh) if row else None

    def settle(self, conn: Connection) -> None:
        """Take over what the last transaction saw, if it was committed."""
        if self._seen is None:
            return
        (number, names), self._seen = self._seen, None
        if conn.execute("SELECT pg_xact_status(%s::xid8)", (number,)).fetchone() == ("committed",):
            self._names |= names
            self._save()

    def forget(self) -> None:
        """The last transaction was rolled back, or nobody knows."""
        self._seen = None

    def drop(self, name: TableName) -> None:
        """A table of this name may be made anew: the other one was renamed, or the source dropped its own."""
        if name in self._names:
            self._names.discard(name)
            self._save()

    def clear(self) -> None:
        """All tables come anew."""
        self._names, self._seen = set(), None
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            with contextlib.suppress(StateError):
                write_json_durably(self._path, sorted(self._names))
