"""Which keys have an event in the dead letters: so that a replay never puts an old row over a newer one.

The table `pgcdc_rejected` at the target changes in the transactions of the rows. It is made with the first reject; while it
has no row that waits, it costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import orjson

from pgcdc.postgres.database import Connection, lock_creation, quote_qualified

__all__ = ["REJECTED", "Effect", "Rejected", "key_text"]

REJECTED = "pgcdc_rejected"


def key_text(values: Iterable[str | None]) -> str:
    """A key as it stands in the table; empty for a table without one."""
    found = list(values)
    return orjson.dumps(found).decode() if found else ""


@dataclass(frozen=True, slots=True)
class Effect:
    """What an event does to one key of one table."""

    table: str
    key: str
    position: str


class Rejected:
    """The rows of one adapter."""

    def __init__(self, schema: str, adapter: str) -> None:
        self._table = quote_qualified(schema, REJECTED)
        self._adapter = adapter
        self._exists = False
        self.waiting: dict[tuple[str, str], list[str]] = {}
        """Positions of events that may still be replayed, by table and key."""

    def look(self, conn: Connection) -> None:
        """Read what waits."""
        found = conn.execute("SELECT to_regclass(%s)", (self._table,)).fetchone()
        self._exists = found is not None and found[0] is not None
        self.waiting = {}
        if not self._exists:
            return
        query = f'SELECT "table", key, "position" FROM {self._table} WHERE adapter = %s AND superseded_by IS NULL'
        for table, key, position in conn.execute(query.encode(), (self._adapter,)):
            self.waiting.setdefault((table, key), []).append(position)

    def note(self, conn: Connection, effects: Iterable[Effect]) -> None:
        """Write down events that were rejected."""
        if not self._exists:
            lock_creation(conn)
            conn.execute(
                f'CREATE TABLE IF NOT EXISTS {self._table} (adapter text, "table" text, key text, '
                '"position" text COLLATE "C", superseded_by text COLLATE "C", noted_at timestamptz DEFAULT now(), '
                'PRIMARY KEY (adapter, "position", "table", key))'.encode()
            )
        rows = [(self._adapter, one.table, one.key, one.position) for one in effects]
        columns = 'adapter, "table", key, "position"'
        query = f"INSERT INTO {self._table} ({columns}) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
        conn.cursor().executemany(query.encode(), rows)
        self.look(conn)

    def supersede(self, conn: Connection, newest: Mapping[tuple[str, str], str], cleared: Mapping[str, str]) -> None:
        """These keys have been changed at these positions, and all rows of `cleared` tables went at theirs."""
        found: list[tuple[str, str, str, str, str]] = []
        for (table, key), positions in self.waiting.items():
            by = max((newest.get((table, key), "") if key else ""), cleared.get(table, ""))
            found += [(by, self._adapter, table, key, one) for one in positions if one < by]
        if not found:
            return
        query = (
            f'UPDATE {self._table} SET superseded_by = %s WHERE adapter = %s AND "table" = %s AND key = %s '
            'AND "position" = %s'
        )
        conn.cursor().executemany(query.encode(), found)
        self._clean(conn, {position for *_, position in found})
        self.look(conn)

    def _clean(self, conn: Connection, positions: Collection[str]) -> None:
        """Of events that are superseded for all of their keys nothing is needed: what has no row here is not replayed."""
        query = (
            f'DELETE FROM {self._table} AS done WHERE adapter = %s AND "position" = ANY(%s) AND NOT EXISTS '
            f'(SELECT FROM {self._table} AS other WHERE other.adapter = done.adapter AND other."position" = '
            'done."position" AND other.superseded_by IS NULL)'
        )
        conn.execute(query.encode(), (self._adapter, list(positions)))

    def follow(self, conn: Connection, old: str, new: str) -> None:
        """A table has another name."""
        if old != new:
            query = f'UPDATE {self._table} SET "table" = %s WHERE adapter = %s AND "table" = %s'
            conn.execute(query.encode(), (new, self._adapter, old))
            self.look(conn)

    def of(self, conn: Connection, position: str) -> dict[str, bool]:
        """The keys of a rejected event, and whether it may still be applied to each. Empty: it is done, or never was one."""
        if not self._exists:
            return {}
        query = f'SELECT key, superseded_by IS NULL FROM {self._table} WHERE adapter = %s AND "position" = %s'
        return dict(conn.execute(query.encode(), (self._adapter, position)).fetchall())

    def forget(self, conn: Connection, position: str) -> None:
        """An event was replayed."""
        if not self._exists:
            return
        query = f'DELETE FROM {self._table} WHERE adapter = %s AND "position" = %s'
        conn.execute(query.encode(), (self._adapter, position))
        left = {place: [one for one in found if one != position] for place, found in self.waiting.items()}
        self.waiting = {place: found for place, found in left.items() if found}
