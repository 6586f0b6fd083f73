"""Whether the target can be used, looked at before anything is written; and tables of our own, where they are missing."""

from __future__ import annotations

from pgcdc.core.errors import SinkError, SinkUnavailable
from pgcdc.core.state import Identity
from pgcdc.postgres.database import Connection, lock_creation, quote_identifier, redact
from pgcdc.sink.pg_table.append import Appender
from pgcdc.sink.pg_table.loops import check_captured
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.positions import Positions

__all__ = ["Target"]

MERGE_SINCE = 150000
"""The first version that has MERGE."""


class Target:
    """The database that an adapter writes to."""

    def __init__(
        self,
        options: PgTableOptions,
        adapter: str,
        positions: Positions,
        appender: Appender | None,
        identity: Identity | None,
    ) -> None:
        self._options, self._adapter = options, adapter
        self._positions, self._appender, self._identity = positions, appender, identity

    def look(self, conn: Connection) -> None:
        """Whether the target can be used, without a change of it."""
        row = conn.execute("SELECT current_setting('transaction_read_only'), pg_is_in_recovery()").fetchone()
        if row is not None and (row[0] == "on" or row[1]):
            raise SinkUnavailable(
                f"adapter {self._adapter}: the target {redact(self._options.db)} takes no writes now",
                "Is it a standby, or is default_transaction_read_only on? Nothing is lost meanwhile",
            )
        if self._options.mode == "apply" and conn.info.server_version < MERGE_SINCE:
            raise SinkError(
                f"adapter {self._adapter} applies with MERGE, which PostgreSQL {conn.info.server_version // 10000} lacks",
                "Use --pg-table-mode append there, or a newer server",
            )
        is_there = self._appender is None or self._appender.look(conn)
        self._check_loop(conn)
        missing = [] if self._positions.exists(conn) else [self._positions.ddl]
        if not is_there and self._appender is not None:
            missing.insert(0, self._appender.ddl())
        if not missing:
            return
        role, schema = quote_identifier(conn.info.user), quote_identifier(self._options.own_schema)
        if not self._options.create:
            raise SinkError(
                f"adapter {self._adapter} lacks a table at the target, and is told not to create any",
                f"Run there: {'; '.join(missing)}",
            )
        found = conn.execute(
            "SELECT to_regnamespace(%s), has_database_privilege(current_database(), 'CREATE')", (schema,)
        )
        namespace, may_create = found.fetchone() or (None, False)
        if namespace is None:
            if may_create:
                return
            raise SinkError(
                f"adapter {self._adapter}: schema {self._options.own_schema} does not exist at the target",
                f"Run there: CREATE SCHEMA {schema} AUTHORIZATION {role}",
            )
        row = conn.execute("SELECT has_schema_privilege(%s::regnamespace, 'CREATE')", (schema,)).fetchone()
        if row is not None and not row[0]:
            raise SinkError(
                f"the role {conn.info.user} may not create tables in schema {self._options.own_schema} of the target",
                f"Run there: GRANT CREATE ON SCHEMA {schema} TO {role}; or as its owner: {'; '.join(missing)}",
            )

    def _check_loop(self, conn: Connection) -> None:
        """A table that is captured must not get the events of its own changes."""
        identity = self._identity
        if identity is None or not identity.publications:
            return
        same = conn.execute(
            "SELECT system_identifier::text, current_database()::text FROM pg_control_system()"
        ).fetchone()
        if same != (identity.system_identifier, identity.database):
            return
        names = [one["name"] for one in identity.publications if "name" in one]
        query = "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = ANY(%s)"
        check_captured(
            self._options, self._adapter, {(schema, table) for schema, table in conn.execute(query, (names,))}
        )

    def create(self, conn: Connection) -> None:
        """Make what is missing, unless we are told not to."""
        if not self._options.create:
            return
        schema = quote_identifier(self._options.own_schema)
        namespace = conn.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone()
        has_table = self._appender is None or self._appender.look(conn)
        if namespace != (None,) and has_table and self._positions.exists(conn):
            return
        with conn.transaction():
            lock_creation(conn)
            if namespace == (None,):
                conn.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
            self._positions.create(conn)
            if self._appender is not None and not has_table:
                conn.execute(self._appender.ddl().encode())
