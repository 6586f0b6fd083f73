"""Events into PostgreSQL, exactly once: rows and position change in one transaction.

The position in the target is authoritative (`target.py`); the ack in the state directory follows it. The first batch
creates the target's record. An empty batch moves only the ack: otherwise databases that mirror each other would never
come to rest.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.state import Identity
from pgcdc.event.batch import Batch
from pgcdc.event.shape import TableShape
from pgcdc.postgres.database import (
    Connection,
    lock_creation,
    name_table,
    quote_identifier,
    quote_qualified,
    redact,
    split_table,
)
from pgcdc.postgres.lsn import format_lsn
from pgcdc.sink.contract import Form, Sink, SinkContext
from pgcdc.sink.pg_table.apply import Applier
from pgcdc.sink.pg_table.fold import Rows
from pgcdc.sink.pg_table.options import NO_ORIGIN, PgTableOptions, TableName, check_captured, database_of
from pgcdc.sink.pg_table.reading import read_rows
from pgcdc.sink.pg_table.target import (
    Blame,
    Positions,
    blame,
    connect_target,
    describe,
    describe_fault,
    explain,
    set_origin,
    set_replica,
)
from pgcdc.sink.pg_table.writer import copy_rows

MERGE_SINCE = 150000  # The first version that has MERGE
COLUMNS = {
    "id": "uuid",
    "channel": "text",
    "operation": "text",
    "payload": "jsonb",
    "source": "text",
    "created_at": "timestamptz",
    "position": "text",
    "transaction": "jsonb",
}
"""Ordered as in an event."""
_IDS = uuid.UUID("6f1c7a54-2f0e-4c0f-9d5e-8a1d7f5a9c11")  # Makes ids for events without one
_NAMES = "ARRAY['id', 'channel', 'operation', 'payload', 'source', 'created_at', 'position']"
_INSERT = """
INSERT INTO {table} ({columns})
SELECT coalesce((own->>'id')::uuid, id), own->>'channel', own->>'operation', coalesce(own->'payload', event),
  own->>'source', (own->>'created_at')::timestamptz, "position", nullif(own->'transaction', 'null')
FROM (
  SELECT *, CASE jsonb_typeof(event) WHEN 'object' THEN CASE WHEN event ?& {names} AND length(event->>'id') = 36
    AND event - 'transaction' - {names} = jsonb_build_object() THEN event END END AS own FROM {stage}
) n WHERE NOT EXISTS (SELECT FROM {table} t WHERE t."id" = coalesce((n.own->>'id')::uuid, n."id"))
"""
"""`own`: the event, if it is in our own form; any other form is kept whole."""


class PgTableSink(Sink):
    """One session, one transaction per batch. `Appender` or `Applier` does the work, depending on the mode."""

    keeps_position: ClassVar[bool] = True
    finds_by_halves: ClassVar[bool] = True

    def __init__(self, options: PgTableOptions) -> None:
        self._options = options
        self._appender = Appender(options.table) if options.mode == "append" else None
        self.form: Form = "fields" if self._appender else "tables"
        self.reads_back = options.mode == "apply"
        self._conn: Connection | None = None
        self._has_origin = False
        self._said: set[str] = set()
        self._refused: list[Batch] = []  # Refused events that are not recorded at the target yet

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact(self._options.db)!r})"

    # --- start

    def check(self, context: SinkContext) -> None:
        self._bind(context)
        with self._explain("inspect the target"), self._connect() as conn:
            missing = self._check_target(conn)
            if not self._positions.missing(conn):
                self._positions.read(conn, context.progress.owner if context.progress.has_owner else "")
            make_tables(conn, self._options, self.name, missing, is_trial=True)

    def open(self, context: SinkContext) -> Position | None:
        self._bind(context)
        if not context.progress.has_owner:
            self.check(context)  # a target that cannot be used gets no owner
        self._owner = context.progress.owner
        self.close()
        conn = self._connect()
        try:
            with self._explain("begin a session"):
                self._mark_session(conn)
            with self._explain("prepare the target"):
                self._written, tables = self._restore(conn)
                if not self._appender:
                    key = context.name, context.stream
                    known = (key, self._say_once, tables, context.chain, lambda: context.progress.holds)
                    self._applier = Applier(conn, self._options, context.shapes, *known)
        except BaseException:
            conn.close()
            raise
        self._conn = conn
        return self._written or self._elsewhere()

    def _bind(self, context: SinkContext) -> None:
        self.name, self._context = context.name, context
        self._positions = Positions(self._options.own_schema, context.name, context.stream)

    def _connect(self) -> Connection:
        return connect_target(self.name, self._options.db, self._context.timeout_s)

    def _check_target(self, conn: Connection) -> list[str]:
        """The statements that create our missing tables."""
        check_target(conn, self._options, self.name, self._context.identity)
        missing = self._appender.missing(conn) if self._appender else []
        return missing + self._positions.missing(conn)

    def _mark_session(self, conn: Connection) -> None:
        options, origin = self._options, self._options.origin
        if options.mode == "apply" and options.triggers == "off":
            set_replica(conn, self._say_once)
        if not origin and options.mode == "apply":
            origin = f"pgcdc_{self.name}_{self._owner[:8]}"  # two pipelines may have an adapter of this name
        self._has_origin = origin not in ("", NO_ORIGIN) and set_origin(
            conn, self.name, origin, self._say_once, is_wanted=bool(options.origin)
        )

    def _restore(self, conn: Connection) -> tuple[Position | None, set[TableName]]:
        """Create what is missing; find the target's position and tables."""
        make_tables(conn, self._options, self.name, self._check_target(conn))
        self._where = database_of(conn)
        found = self._positions.read(conn, self._owner)
        if self._context.progress.is_rewound:  # `pgcdc resync` restarts: positions of another server may be smaller
            start = self._context.start
            self._positions.begin(conn, self._owner, start, self._context.source, may_exist=True)
            return start, set()
        return found or (None, set())

    def _elsewhere(self) -> Position | None:
        """Where appending continues if the database has changed; None if it is the same."""
        before = self._context.progress.detail.get("target", self._where)
        return self._context.start if self._appender and tuple(before) != self._where else None

    # --- events

    def write(self, batch: Batch) -> None:
        conn = self._session()
        if self._written is not None:
            if batch.end <= self._written:  # the session was lost at a COMMIT that succeeded
                return
            batch = batch.after(self._written)
        try:
            with conn.transaction():
                # First of all: if another process moves the position, our view of the target is wrong, and no event is
                # to blame.
                with self._explain("write its position"):
                    self._move(conn, batch.end)
                tables = self._put(conn, batch)
                hit("pg_table.before_ack")
        except psycopg.Error as error:
            raise self._judged(error, batch) from error
        hit("pg_table.committed")
        self._written, self._refused = batch.end, []
        self._context.progress.next_detail = {"target": list(self._where)}
        if not self._appender:
            self._applier.tables = tables

    def _move(self, conn: Connection, end: Position) -> None:
        if self._written is None:
            self._positions.begin(conn, self._owner, end, self._context.source)
        else:
            self._positions.advance(conn, self._owner, self._written, end)
        if self._has_origin:  # the source position of this transaction: `pg_replication_origin_status`
            conn.execute("SELECT pg_replication_origin_xact_setup(%s, now())", (format_lsn(end.commit),))

    def _put(self, conn: Connection, batch: Batch) -> set[TableName]:
        if self._appender:
            self._appender.append(conn, batch)
            return set()
        tables = self._applier.apply(batch, self._refused)
        if tables != self._applier.tables:
            self._positions.note_tables(conn, tables)
        return tables

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Redeliver past events; returns positions for which the target has something newer."""
        conn = self._session()
        try:
            with conn.transaction():
                if not self._appender:
                    return self._applier.redeliver(batch)
                self._appender.insert_missing(conn, batch)
                return ()
        except psycopg.Error as error:
            raise self._judged(error, batch) from error

    def _session(self) -> Connection:
        if self._conn is None or self._conn.closed:
            found, written = self.open(self._context), self._context.progress.written
            if written is not None and (
                found is None or found < written
            ):  # the runner opens again, which explains the problem
                self.close()
                where = f"is at {found}, not {written}" if found is not None else "has no row"
                raise SinkUnavailable(f"{self._positions.title} at the target {where}", "The position is read again")
        assert self._conn is not None
        return self._conn

    def _judged(self, error: psycopg.Error, batch: Batch) -> SinkError:
        """Decide whether an event is to blame. The runner finds out which one."""
        faults = (Blame.EVENT,) if self._appender else (Blame.EVENT, Blame.SHAPE)
        if blame(error) not in faults:
            return explain(self.name, "write", error)
        if self._appender:
            title = self._appender.title
        else:
            self._applier.forget()
            relations = (run.relation for run in batch.tables())
            title = next((name_table(one.namespace, one.name) for one in relations), "")
            is_one = len(set(batch.positions().to_pylist())) == 1
            if is_one and (self._written is None or batch.start >= self._written):
                self._refused.append(batch)
        kind, text = describe_fault(error, title)
        return SinkRejected(
            f"adapter {self.name}: the target refuses an event: {text}",
            "Fix the target, then deliver the event again: pgcdc dlq replay",
            kind=kind,
            text=text,
        )

    def read_back(self, context: SinkContext, shape: TableShape, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        self._bind(context)
        with self._explain("read back"), self._connect() as conn:
            yield from read_rows(conn, self._options.names((shape.relation.namespace, shape.relation.name)), columns)

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    @contextlib.contextmanager
    def _explain(self, action: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise explain(self.name, action, error) from error

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._context.say(text)


# --- the mode append


class Appender:
    """The table that receives the events."""

    def __init__(self, name: str) -> None:
        schema, table = split_table(name)
        self.title = name_table(schema, table)  # The name, for people
        self._quoted = quote_qualified(schema, table)
        self._columns = ", ".join(map(quote_identifier, COLUMNS))

    def missing(self, conn: Connection) -> list[str]:
        """The statement that creates the table, unless it exists. SinkError: it has another shape, or is not
        writable."""
        rows = conn.execute(
            "SELECT attname::text, attgenerated::text FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (self._quoted,),
        ).fetchall()
        if not rows:
            more = {"id": " PRIMARY KEY", "position": ' COLLATE "C"'}
            columns = (f"{quote_identifier(name)} {kind}{more.get(name, '')}" for name, kind in COLUMNS.items())
            return [f"CREATE TABLE IF NOT EXISTS {self._quoted} ({', '.join(columns)})"]
        known = {name for name, generated in rows if not generated}
        lacks = [name for name in COLUMNS if name not in known]
        if lacks:
            add = ", ".join(f"ADD COLUMN {quote_identifier(name)} {COLUMNS[name]}" for name in lacks)
            raise SinkError(
                f"table {self.title} of the target has no column {', '.join(lacks)} for events",
                f"Run: ALTER TABLE {self._quoted} {add}; or choose another --pg-table-table, which is created",
            )
        row = conn.execute("SELECT has_table_privilege(%s, 'INSERT')", (self._quoted,)).fetchone()
        if row is None or not row[0]:
            raise SinkError(
                f"role {conn.info.user} has no INSERT right on table {self.title} of the target",
                f"Run: GRANT INSERT, SELECT ON {self._quoted} TO {quote_identifier(conn.info.user)}",
            )
        return []

    def append(self, conn: Connection, batch: Batch) -> None:
        if "payload" not in batch.events.column_names:  # typed rows come as lines
            return self.insert_missing(conn, batch)
        for part in batch.events.combine_chunks().to_batches():
            made = {name: part.column(name).cast(pa.string()) for name in COLUMNS}
            if made["id"].null_count:  # for an event in another envelope only the text is known
                made["id"] = pc.coalesce(made["id"], pa.array(_make_ids(part.column("position"))))
            copy_rows(conn, self._quoted, Rows(tuple(made), list(made.values())))

    def insert_missing(self, conn: Connection, batch: Batch) -> None:
        """Append events given as text, unless they exist. The server parses them."""
        stage = f"pgcdc_again_{uuid.uuid4().hex[:12]}"
        kinds = '"id" uuid, "position" text, event jsonb'
        conn.execute(f"CREATE TEMP TABLE {stage} ({kinds}) ON COMMIT DROP".encode())
        positions = batch.positions().combine_chunks()
        values = [pa.array(_make_ids(positions)), positions, pa.array(batch.texts(), pa.string())]
        copy_rows(conn, stage, Rows(("id", "position", "event"), values))
        insert = _INSERT.format(table=self._quoted, columns=self._columns, stage=stage, names=_NAMES)
        conn.execute(insert.encode())


def _make_ids(positions: pa.Array) -> list[str]:
    found, before, number = [], None, 0
    for position in positions.to_pylist():
        number = number + 1 if position == before else 0
        before = position
        found.append(str(uuid.uuid5(_IDS, f"{position}#{number}")))
    return found


# --- checks of the target


def check_target(conn: Connection, options: PgTableOptions, adapter: str, identity: Identity | None) -> None:
    """Raise unless the target is writable and none of our target tables is captured. Changes nothing."""
    row = conn.execute("SELECT current_setting('transaction_read_only'), pg_is_in_recovery()").fetchone()
    if row is not None and (row[0] == "on" or row[1]):
        raise SinkUnavailable(
            f"adapter {adapter}: the target {redact(options.db)} is read-only",
            "Is it a standby, or is default_transaction_read_only on? Nothing is lost meanwhile",
        )
    if options.mode == "apply" and conn.info.server_version < MERGE_SINCE:
        raise SinkError(
            f"adapter {adapter} applies with MERGE, which PostgreSQL {conn.info.server_version // 10000} does "
            "not support",
            "Use --pg-table-mode append there, or a newer server",
        )
    publications = identity.details.get("publications") if identity is not None else None
    if identity is not None and publications and database_of(conn) == (identity.system, identity.database):
        names = [one["name"] for one in publications if "name" in one]
        query = "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = ANY(%s)"
        check_captured(options, adapter, {(schema, table) for schema, table in conn.execute(query, (names,))})


def make_tables(
    conn: Connection, options: PgTableOptions, adapter: str, statements: list[str], *, is_trial: bool = False
) -> None:
    """Run these statements, which create our tables, unless another adapter was faster. A trial is rolled back."""
    if not statements:
        return
    listed = "; ".join(statements)
    if not options.create:
        raise SinkError(
            f"adapter {adapter}: a table is missing at the target and `create` is false", f"Run there: {listed}"
        )
    schema, role = quote_identifier(options.own_schema), conn.info.user
    try:
        with conn.transaction(force_rollback=is_trial):
            lock_creation(conn)
            if conn.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone() == (None,):
                conn.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
            for statement in statements:
                conn.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege as error:
        raise SinkError(
            f"role {role} cannot create tables in schema {options.own_schema} of the target: {describe(error)}",
            f"Run there: CREATE SCHEMA IF NOT EXISTS {schema}; GRANT USAGE, CREATE ON SCHEMA {schema} TO "
            f"{quote_identifier(role)}; or as its owner: {listed}",
        ) from None
