"""The target's database: whether it can be used, and the tables of our own in it.

`pgcdc_positions` says how far an adapter is: a row that changes in the same transaction as what it is about. So nothing can
be there twice or be missing, whatever crashes when. The ack in the state directory follows the row. The row is compared
when it is changed: a process that was taken for dead cannot write over the one that came after it.

`pgcdc_rejected` says which keys have an event in the dead letters, so that a replay never puts an old row over a newer one.
It is made with the first reject; while it has no row that waits, it costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import psycopg

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError, SinkUnavailable
from pgcdc.core.position import Position
from pgcdc.core.state import Identity
from pgcdc.postgres.database import (
    Connection,
    connect,
    explain_errors,
    lock_creation,
    name_table,
    parse_url,
    quote_identifier,
    quote_qualified,
    redact,
    split_table,
)
from pgcdc.sink.pg_table.append import Appender
from pgcdc.sink.pg_table.options import PgTableOptions, TableName
from pgcdc.sink.spec import SourceView

MERGE_SINCE = 150000
"""The first version that has MERGE."""
_MINE = "adapter = %s AND stream = %s"


def database_of(conn: Connection) -> list[str]:
    """Which server (empty if the role may not ask) and database it is, by what does not change when its address does."""
    try:
        row = conn.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()
    except psycopg.errors.InsufficientPrivilege:
        row = None
    found = conn.execute("SELECT oid::text FROM pg_database WHERE datname = current_database()").fetchone()
    assert found is not None
    return [row[0] if row else "", found[0]]


# --- loops: a table that is captured must not get the events of its own changes, each would make another one, for ever


def check_source(options: PgTableOptions, adapter: str, source: SourceView) -> None:
    """ConfigError if the adapter writes to tables that a start would capture, before anything is made for it.

    A database that cannot be asked is no matter of this check: who needs it says so.
    """
    if not source.url:
        return
    options = options.resolved()
    try:
        target, origin = (_ask(url) for url in (options.db, source.url))
        if target != origin or (not target[0] and not _is_same_address(options.db, source.url)):
            return
        tables = source.tables()
    except PgcdcError:
        return
    try:
        _check_captured(options, adapter, tables)
    except SinkError as error:
        raise ConfigError(error.message, error.advice) from None


def _ask(url: str) -> list[str]:
    with explain_errors("ask which database it is"), connect(url, may_retry=False) as conn:
        return database_of(conn)


def _is_same_address(one: str, other: str) -> bool:
    """For roles that may not ask which server it is: databases of two servers can have the same oid."""
    first, second = parse_url(one), parse_url(other)
    return all(first.get(key) == second.get(key) for key in ("host", "hostaddr", "port", "dbname"))


def _check_captured(options: PgTableOptions, adapter: str, captured: Collection[TableName]) -> None:
    if options.mode == "append":
        table = split_table(options.table)
        if table in captured:
            raise SinkError(
                f"adapter {adapter} writes to table {name_table(*table)}, which this pipeline captures: each event "
                "would make another one",
                "Give another --pg-table-table, one that begins with pgcdc_ say, or leave the table out of --tables",
            )
        return
    for table in options.names.loops(captured):
        raise SinkError(
            f"adapter {adapter} would apply the rows of {name_table(*table)} to a table that it captures",
            "Give the URL of another database with --pg-table-db, or other names with --pg-table-tables or "
            "--pg-table-target-schema, and capture only the source's tables",
        )


# --- the target


def check_target(
    conn: Connection,
    options: PgTableOptions,
    positions: Positions,
    appender: Appender | None,
    identity: Identity | None,
) -> None:
    """Raise unless the target can be used. It is not changed."""
    adapter, version = positions.adapter, conn.info.server_version
    row = conn.execute("SELECT current_setting('transaction_read_only'), pg_is_in_recovery()").fetchone()
    if row is not None and (row[0] == "on" or row[1]):
        raise SinkUnavailable(
            f"adapter {adapter}: the target {redact(options.db)} takes no writes now",
            "Is it a standby, or is default_transaction_read_only on? Nothing is lost meanwhile",
        )
    if options.mode == "apply" and version < MERGE_SINCE:
        raise SinkError(
            f"adapter {adapter} applies with MERGE, which PostgreSQL {version // 10000} lacks",
            "Use --pg-table-mode append there, or a newer server",
        )
    missing = [appender.ddl()] if appender is not None and not appender.look(conn) else []
    missing += [] if positions.exists(conn) else [positions.ddl]
    publications = identity.details.get("publications") if identity is not None else None
    if identity is not None and publications:
        query = "SELECT system_identifier::text, current_database()::text FROM pg_control_system()"
        if conn.execute(query).fetchone() == (identity.system, identity.database):
            names = [one["name"] for one in publications if "name" in one]
            query = "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = ANY(%s)"
            _check_captured(options, adapter, {(schema, table) for schema, table in conn.execute(query, (names,))})
    if not missing:
        return
    if not options.create:
        raise SinkError(
            f"adapter {adapter}: a table is missing at the target, and create is false",
            f"Run there: {'; '.join(missing)}",
        )
    role, schema = quote_identifier(conn.info.user), quote_identifier(options.own_schema)
    query = "SELECT has_database_privilege(current_database(), 'CREATE')"
    query += ", has_schema_privilege(to_regnamespace(%s), 'CREATE')"
    may_create, may_use = conn.execute(query, (schema,)).fetchone() or (False, None)
    if may_use is None and not may_create:  # there is no such schema
        raise SinkError(
            f"adapter {adapter}: schema {options.own_schema} does not exist at the target",
            f"Run there: CREATE SCHEMA {schema} AUTHORIZATION {role}",
        )
    if may_use is False:
        raise SinkError(
            f"the role {conn.info.user} may not create tables in schema {options.own_schema} of the target",
            f"Run there: GRANT CREATE ON SCHEMA {schema} TO {role}; or as its owner: {'; '.join(missing)}",
        )


def create_tables(conn: Connection, options: PgTableOptions, positions: Positions, appender: Appender | None) -> None:
    """Make what is missing, unless `create` is false."""
    has_table = appender is None or appender.look(conn)
    if not options.create or (has_table and positions.exists(conn)):
        return
    with conn.transaction():
        lock_creation(conn)
        schema = quote_identifier(options.own_schema)
        if conn.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone() == (None,):
            conn.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
        if not positions.exists(conn):
            conn.execute(positions.ddl.encode())
        if appender is not None and not has_table:
            conn.execute(appender.ddl().encode())


# --- positions


@dataclass(frozen=True, slots=True)
class Place:
    """One row."""

    stream: str
    owner: str
    position: Position
    source: str
    updated_at: str
    tables: tuple[TableName, ...] = ()
    """Tables that the target had: one that is gone is not made again as if it were new."""


class Positions:
    """The table `pgcdc_positions` of a schema, for one stream of one adapter."""

    def __init__(self, schema: str, adapter: str, stream: str) -> None:
        self.adapter, self._key = adapter, (adapter, stream)
        self.title = name_table(schema, "pgcdc_positions")
        self.quoted = quote_qualified(schema, "pgcdc_positions")

    @property
    def ddl(self) -> str:
        """The statement that makes the table."""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.quoted} (adapter text, stream text, owner uuid NOT NULL, "
            '"position" text COLLATE "C" NOT NULL, source text, updated_at timestamptz NOT NULL DEFAULT now(), '
            "tables text[], PRIMARY KEY (adapter, stream)) WITH (fillfactor = 50)"
        )

    def exists(self, conn: Connection) -> bool:
        """Whether the table is there."""
        return conn.execute("SELECT to_regclass(%s)", (self.quoted,)).fetchone() != (None,)

    def read(self, conn: Connection, owner: str) -> Place | None:
        """The row of the stream; if there is none, one that another pipeline has for an adapter of this name."""
        columns = "stream, owner::text, \"position\", coalesce(source, ''), updated_at::text, coalesce(tables, '{}')"
        query = f"SELECT {columns} FROM {self.quoted} WHERE adapter = %s ORDER BY stream <> %s"
        row = conn.execute(query.encode(), self._key).fetchone()
        if row is None or (row[0] != self._key[1] and row[1] == owner):
            return None
        try:
            tables = [(schema, name) for schema, name in zip(row[5][::2], row[5][1::2], strict=True)]
            return Place(row[0], row[1], Position.parse(row[2]), row[3], row[4], tuple(tables))
        except ValueError:
            raise SinkError(
                f"{self.title} at the target has {row[2]!r} for adapter {self.adapter}, which is no position",
                "Restore that row from a backup",
            ) from None

    def claim(self, conn: Connection, owner: str, position: Position, source: str) -> None:
        """Begin the row; somebody else may be faster."""
        columns = 'adapter, stream, owner, "position", source'
        query = (
            f"INSERT INTO {self.quoted} ({columns}) SELECT %s, %s, %s::uuid, %s, %s WHERE NOT EXISTS "
            f"(SELECT FROM {self.quoted} WHERE adapter = %s AND owner <> %s) ON CONFLICT DO NOTHING"
        )
        with conn.transaction():
            lock_creation(conn)
            conn.execute(query.encode(), (*self._key, owner, str(position), source, self.adapter, owner))

    def release(self, conn: Connection, owner: str, position: Position) -> None:
        """Take the row away, if nothing was written since it was made."""
        query = f'DELETE FROM {self.quoted} WHERE {_MINE} AND owner = %s AND "position" = %s'
        conn.execute(query.encode(), (*self._key, owner, str(position)))

    def advance(self, conn: Connection, owner: str, before: Position, after: Position) -> None:
        """Move the row, in the transaction of what lies between. SinkUnavailable: it is not where we left it."""
        query = (
            f'UPDATE {self.quoted} SET "position" = %s, updated_at = now() '
            f'WHERE {_MINE} AND owner = %s AND "position" = %s'
        )
        done = conn.execute(query.encode(), (str(after), *self._key, owner, str(before)))
        if done.rowcount != 1:
            raise SinkUnavailable(
                f"{self.title} at the target is no longer at {before} for adapter {self.adapter}: another one writes",
                "Is a second copy of this pipeline running? It is looked at again",
            )

    def note_tables(self, conn: Connection, tables: Iterable[TableName]) -> None:
        """Remember which tables there are, in the transaction that saw them."""
        names = [part for name in sorted(tables) for part in name]
        conn.execute(f"UPDATE {self.quoted} SET tables = %s WHERE {_MINE}".encode(), (names, *self._key))

    def foreign(self, place: Place) -> SinkError:
        """The row belongs to another pipeline."""
        whose = f" ({place.source}, at {place.updated_at})" if place.source else f" (at {place.updated_at})"
        return SinkError(
            f"{self.title} at the target has adapter {self.adapter} of another pipeline{whose}",
            "Give this adapter a name of its own: {name: ..., type: pg_table}. If the other one is gone for good: "
            f"DELETE FROM {self.quoted} WHERE adapter = '{self.adapter}'",
        )


# --- rejects


@dataclass(frozen=True, slots=True)
class Effect:
    """What an event does to one key of one table."""

    table: str
    key: str
    """As JSON; empty for a table without one."""
    position: str


class Rejected:
    """The rows of one adapter and stream in `pgcdc_rejected`."""

    def __init__(self, schema: str, key: tuple[str, str]) -> None:
        self._table = quote_qualified(schema, "pgcdc_rejected")
        self._key = key
        self._exists = False
        self.waiting: dict[tuple[str, str], list[str]] = {}
        """Positions of events that may still be replayed, by table and key."""

    def look(self, conn: Connection) -> None:
        """Read what waits."""
        self._exists = conn.execute("SELECT to_regclass(%s)", (self._table,)).fetchone() != (None,)
        self.waiting = {}
        if not self._exists:
            return
        query = f'SELECT "table", key, "position" FROM {self._table} WHERE {_MINE} AND superseded_by IS NULL'
        for table, key, position in conn.execute(query.encode(), self._key):
            self.waiting.setdefault((table, key), []).append(position)

    def note(self, conn: Connection, effects: Iterable[Effect]) -> None:
        """Write down events that were rejected."""
        if not self._exists:
            lock_creation(conn)
            conn.execute(
                f'CREATE TABLE IF NOT EXISTS {self._table} (adapter text, stream text, "table" text, key text, '
                '"position" text COLLATE "C", superseded_by text COLLATE "C", noted_at timestamptz DEFAULT now(), '
                'PRIMARY KEY (adapter, stream, "position", "table", key))'.encode()
            )
        columns = 'adapter, stream, "table", key, "position"'
        query = f"INSERT INTO {self._table} ({columns}) VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
        rows = [(*self._key, one.table, one.key, one.position) for one in effects]
        conn.cursor().executemany(query.encode(), rows)
        self.look(conn)

    def supersede(self, conn: Connection, newest: Mapping[tuple[str, str], str], cleared: Mapping[str, str]) -> None:
        """These keys have been changed at these positions, and all rows of `cleared` tables went at theirs.

        Events that are superseded for all of their keys go: what has no row here is not replayed.
        """
        found: list[tuple[str, ...]] = []
        for (table, key), positions in self.waiting.items():
            by = max((newest.get((table, key), "") if key else ""), cleared.get(table, ""))
            found += [(by, *self._key, table, key, one) for one in positions if one < by]
        if not found:
            return
        query = (
            f'UPDATE {self._table} SET superseded_by = %s WHERE {_MINE} AND "table" = %s AND key = %s '
            'AND "position" = %s'
        )
        conn.cursor().executemany(query.encode(), found)
        query = (
            f'DELETE FROM {self._table} AS done WHERE {_MINE} AND "position" = ANY(%s) AND NOT EXISTS '
            f'(SELECT FROM {self._table} AS other WHERE (other.adapter, other.stream, other."position") = '
            '(done.adapter, done.stream, done."position") AND other.superseded_by IS NULL)'
        )
        conn.execute(query.encode(), (*self._key, [position for *_, position in found]))
        self.look(conn)

    def follow(self, conn: Connection, old: str, new: str) -> None:
        """A table has another name."""
        if old != new:
            query = f'UPDATE {self._table} SET "table" = %s WHERE {_MINE} AND "table" = %s'
            conn.execute(query.encode(), (new, *self._key, old))
            self.look(conn)

    def of(self, conn: Connection, position: str) -> dict[str, bool]:
        """The keys of a rejected event, and whether it may still be applied to each. Empty: it is done, or never was one."""
        if not self._exists:
            return {}
        query = f'SELECT key, superseded_by IS NULL FROM {self._table} WHERE {_MINE} AND "position" = %s'
        return dict(conn.execute(query.encode(), (*self._key, position)).fetchall())

    def forget(self, conn: Connection, position: str) -> None:
        """An event was replayed."""
        if self._exists:
            query = f'DELETE FROM {self._table} WHERE {_MINE} AND "position" = %s'
            conn.execute(query.encode(), (*self._key, position))
            self.look(conn)
