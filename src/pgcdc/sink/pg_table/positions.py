"""How far an adapter is, in the target itself: a row that changes in the same transaction as what it is about.

So nothing can be there twice or be missing, whatever crashes when. The ack in the state directory follows the row.
The row is compared when it is changed: a process that was taken for dead cannot write over the one that came after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.postgres.database import Connection, name_table, quote_qualified

__all__ = ["POSITIONS", "Place", "Positions", "TargetName"]

POSITIONS = "pgcdc_positions"


@dataclass(frozen=True, slots=True)
class Place:
    """One row."""

    owner: str
    position: Position
    source: str
    updated_at: str
    tables: tuple[tuple[str, str], ...] = ()
    """Tables that the target had: one that is gone is not made again as if it were new."""


@dataclass(frozen=True, slots=True)
class TargetName:
    """Which database it is, by what does not change when its address does."""

    system: str
    database: str

    @classmethod
    def of(cls, conn: Connection) -> TargetName:
        """The one that a session is in."""
        try:
            row = conn.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()
        except psycopg.errors.InsufficientPrivilege:
            row = None
        found = conn.execute("SELECT oid::text FROM pg_database WHERE datname = current_database()").fetchone()
        assert found is not None
        return cls(row[0] if row else "", found[0])


class Positions:
    """The table `pgcdc_positions` of a schema, for one adapter."""

    def __init__(self, schema: str, adapter: str) -> None:
        self._schema, self._adapter = schema, adapter
        self.title = name_table(schema, POSITIONS)
        self.quoted = self._table = quote_qualified(schema, POSITIONS)

    @property
    def ddl(self) -> str:
        """The statement that makes the table."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self._table} (adapter text PRIMARY KEY, owner uuid NOT NULL, "
            '"position" text COLLATE "C" NOT NULL, source text, updated_at timestamptz NOT NULL DEFAULT now(), '
            "tables text[]) WITH (fillfactor = 50)"
        )

    def exists(self, conn: Connection) -> bool:
        """Whether the table is there."""
        return conn.execute("SELECT to_regclass(%s)", (self._table,)).fetchone() != (None,)

    def create(self, conn: Connection) -> None:
        """Make the table, unless it is there."""
        if not self.exists(conn):
            conn.execute(self.ddl.encode())

    def read(self, conn: Connection) -> Place | None:
        """The adapter's row."""
        columns = "owner::text, \"position\", coalesce(source, ''), updated_at::text, coalesce(tables, '{}')"
        query = f"SELECT {columns} FROM {self._table} WHERE adapter = %s"
        row = conn.execute(query.encode(), (self._adapter,)).fetchone()
        if row is None:
            return None
        try:
            tables = [(schema, name) for schema, name in zip(row[4][::2], row[4][1::2], strict=True)]
            return Place(row[0], Position.parse(row[1]), row[2], row[3], tuple(tables))
        except ValueError:
            raise SinkError(
                f"{self.title} at the target has {row[1]!r} for adapter {self._adapter}, which is no position",
                "Restore that row from a backup",
            ) from None

    def claim(self, conn: Connection, owner: str, position: Position, source: str) -> None:
        """Begin the row; somebody else may be faster."""
        columns = 'adapter, owner, "position", source'
        query = f"INSERT INTO {self._table} ({columns}) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING"
        conn.execute(query.encode(), (self._adapter, owner, str(position), source))

    def release(self, conn: Connection, owner: str, position: Position) -> None:
        """Take the row away, if nothing was written since it was made."""
        query = f'DELETE FROM {self._table} WHERE adapter = %s AND owner = %s AND "position" = %s'
        conn.execute(query.encode(), (self._adapter, owner, str(position)))

    def advance(self, conn: Connection, owner: str, before: Position, after: Position) -> None:
        """Move the row, in the transaction of what lies between. SinkUnavailable: it is not where we left it."""
        query = (
            f'UPDATE {self._table} SET "position" = %s, updated_at = now() '
            'WHERE adapter = %s AND owner = %s AND "position" = %s'
        )
        done = conn.execute(query.encode(), (str(after), self._adapter, owner, str(before)))
        if done.rowcount != 1:
            raise SinkUnavailable(
                f"{self.title} at the target is not at {before} any more for adapter {self._adapter}: another one writes",
                "Is a second copy of this pipeline running? It is looked at again",
            )

    def note_tables(self, conn: Connection, tables: Iterable[tuple[str, str]]) -> None:
        """Remember which tables there are, in the transaction that saw them."""
        query = f"UPDATE {self._table} SET tables = %s WHERE adapter = %s"
        conn.execute(query.encode(), ([part for name in sorted(tables) for part in name], self._adapter))

    def foreign(self, place: Place) -> SinkError:
        """The row belongs to another pipeline."""
        whose = f" ({place.source}, at {place.updated_at})" if place.source else f" (at {place.updated_at})"
        return SinkError(
            f"{self.title} at the target has adapter {self._adapter} of another pipeline{whose}",
            "Give this adapter a name of its own: {name: ..., type: pg_table}. If the other one is gone for good: "
            f"DELETE FROM {self._table} WHERE adapter = '{self._adapter}'",
        )
