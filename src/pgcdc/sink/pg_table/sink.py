"""Events into PostgreSQL, exactly once: the rows, and how far they go, change in one transaction.

The row in the target is the truth (`target.py`); the ack in the state directory follows it. An empty batch moves the ack
alone: databases that mirror each other would never rest otherwise.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar

import psycopg

from pgcdc.core.errors import SinkError, SinkRejected, SinkUnavailable
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.event.batch import Batch
from pgcdc.event.forms import Form
from pgcdc.postgres.database import Connection, redact
from pgcdc.sink.contract import Sink, SinkContext
from pgcdc.sink.pg_table.append import Appender, copy_rows, copy_rows_one_by_one
from pgcdc.sink.pg_table.apply import Applier
from pgcdc.sink.pg_table.options import NO_ORIGIN, PgTableOptions, TableName
from pgcdc.sink.pg_table.session import (
    Blame,
    SessionPlan,
    blame,
    connect_target,
    describe,
    describe_fault,
    explain,
    is_row_fault,
    kind_of,
    mark_transaction,
    open_session,
)
from pgcdc.sink.pg_table.target import Positions, check_target, create_tables, database_of


def pg_table_sink(options: PgTableOptions) -> PgTableSink:
    """The sink for a mode."""
    return PgAppendSink(options) if options.mode == "append" else PgApplySink(options)


class PgTableSink(Sink):
    """What both modes share: the session, the row of positions, and the transaction."""

    keeps_position: ClassVar[bool] = True
    finds_by_halves: ClassVar[bool] = True

    def __init__(self, options: PgTableOptions) -> None:
        self._options = options
        self._conn: Connection | None = None
        self._has_origin = False
        self._said: set[str] = set()
        self._is_fresh = False
        """The row in the target is of this process, and has not moved."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact(self._options.db)!r})"

    # --- start

    def _bind(self, context: SinkContext) -> None:
        self.name, self._context = context.name, context
        self._positions = Positions(self._options.own_schema, context.name, context.stream)

    def check(self, context: SinkContext) -> None:
        self._bind(context)
        with self._explain("look at the target"), connect_target(self._plan()) as conn:
            self._check_target(conn)
            owner = context.progress.owner if context.progress.has_owner else ""
            place = self._positions.read(conn, owner) if self._positions.exists(conn) else None
            if place is not None and place.owner != owner:
                raise self._positions.foreign(place)

    def _check_target(self, conn: Connection) -> None:
        check_target(conn, self._options, self._positions, self._table(), self._context.identity)

    def open(self, context: SinkContext) -> Position:
        self._bind(context)
        if not context.progress.has_owner:
            self.check(context)  # a target that cannot be used gets no owner
        self._owner = context.progress.owner
        self._disconnect()
        conn, self._has_origin = open_session(self._plan(), self._say_once)
        try:
            with self._explain("prepare the target"):
                self._written = self._restore(conn)
                self._connected(conn)
        except BaseException:
            conn.close()
            raise
        self._conn = conn
        return self._written

    def _plan(self) -> SessionPlan:
        origin = self._options.origin
        is_applied = self._options.mode == "apply"
        if not origin and is_applied and self._context.progress.has_owner:
            origin = f"pgcdc_{self.name}_{self._context.progress.owner[:8]}"  # two pipelines may have such an adapter
        return SessionPlan(
            self.name,
            self._options.db,
            self._context.timeout_s,
            "" if origin == NO_ORIGIN else origin,
            bool(self._options.origin),
            is_applied and self._options.triggers == "off",
        )

    def _restore(self, conn: Connection) -> Position:
        """Make what is missing, and find out how far the target is."""
        self._check_target(conn)
        create_tables(conn, self._options, self._positions, self._table())
        context, progress = self._context, self._context.progress
        place = self._positions.read(conn, self._owner)
        if place is None:
            self._begin(conn, database_of(conn))
            place = self._positions.read(conn, self._owner)
        if place is None or place.owner != self._owner:
            raise self._positions.foreign(place) if place else SinkUnavailable("the row vanished", "It is tried again")
        if progress.is_rewound:  # `pgcdc resync` begins again: positions of another server may be smaller
            self._positions.advance(conn, self._owner, place.position, context.start)
            self._positions.note_tables(conn, ())
            self._tables: set[TableName] = set()
            return context.start
        if progress.written is not None and place.position < progress.written and not progress.detail.get("is_free"):
            raise SinkError(
                f"{self._positions.title} at the target is at {place.position} for adapter {self.name}, but everything up "
                f"to {progress.written} was written to it: an older state of it was restored",
                "Restore a newer one, or deliver all of it once more: pgcdc resync --new-slot --truncate. To go on "
                f"without what is missing: UPDATE {self._positions.quoted} SET position = '{progress.written}' WHERE "
                f"adapter = '{self.name}' AND stream = '{self._context.stream}'",
            )
        self._tables = set(place.tables)
        return place.position

    def _begin(self, conn: Connection, where: list[str]) -> None:
        """The first time at this target."""
        progress = self._context.progress
        if progress.written is not None and not progress.is_rewound and not progress.detail.get("is_free"):
            lacks = f"{self._positions.title} at the target has no row of adapter {self.name}, but events up to"
            if progress.detail.get("target") == where:
                raise SinkError(
                    f"{lacks} {progress.written} were written to it: it was deleted, or an older state of the target was "
                    "restored",
                    "Restore it, or deliver all of it once more: pgcdc resync --new-slot --truncate",
                )
            if self._options.mode == "apply":
                raise SinkError(
                    f"{lacks} {progress.written} were written to another database: its tables would lack their rows",
                    "Copy the tables, pgcdc_positions and pgcdc_rejected from there (pg_dump), or deliver all of it once "
                    "more: pgcdc resync --new-slot --truncate",
                )
        hit("pg_table.before_claim")
        self._positions.claim(conn, self._owner, self._context.start, self._context.source)
        progress.save(self._context.start, {"target": where}, written=self._context.start)
        self._is_fresh = True

    # --- events

    def write(self, batch: Batch) -> None:
        conn = self._session()
        if batch.end <= self._written:  # the session was lost at a COMMIT that went through
            return
        batch = batch.after(self._written)
        try:
            with conn.transaction():
                # First: if another one writes, nothing of the target is what we think, and no event is to blame.
                self._positions.advance(conn, self._owner, self._written, batch.end)
                if self._has_origin:
                    mark_transaction(conn, batch.end)
                self._write(conn, batch)
                hit("pg_table.before_ack")
        except psycopg.Error as error:
            raise self._judged(error, batch) from error
        hit("pg_table.committed")
        self._written, self._is_fresh = batch.end, False
        self._committed()

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Deliver events of the past again; the positions of those for which the target has something newer."""
        conn = self._session()
        try:
            with conn.transaction():
                return self._redeliver(conn, batch)
        except psycopg.Error as error:
            raise self._judged(error, batch) from error

    def _session(self) -> Connection:
        if self._conn is None or self._conn.closed or self._conn.broken:
            self.open(self._context)
        assert self._conn is not None
        return self._conn

    def _judged(self, error: psycopg.Error, batch: Batch) -> SinkError:
        """Whether an event is to blame: the runner finds out which."""
        fault = self._fault(error, batch)
        if fault is None:
            return explain(self.name, "write", error)
        kind, text = fault
        return SinkRejected(
            f"adapter {self.name}: the target refuses an event: {text}",
            "Make the target take it, then deliver it again: pgcdc dlq replay",
            kind=kind,
            text=text,
        )

    def close(self) -> None:
        if self._is_fresh and self._conn is not None:
            with contextlib.suppress(psycopg.Error, SinkError):  # nothing was written: whoever wants it may have it
                progress = self._context.progress
                progress.save(progress.position or self._written, {**progress.detail, "is_free": True})
                self._positions.release(self._conn, self._owner, self._written)
        self._disconnect()

    def _disconnect(self) -> None:
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

    # --- what a mode does

    def _table(self) -> Appender | None:
        return None

    def _connected(self, conn: Connection) -> None:
        """There is a new session."""

    def _committed(self) -> None:
        """What `_write` did is durable."""

    @abstractmethod
    def _write(self, conn: Connection, batch: Batch) -> None:
        """In the transaction of the position."""

    @abstractmethod
    def _redeliver(self, conn: Connection, batch: Batch) -> Collection[str]:
        """In a transaction."""

    @abstractmethod
    def _fault(self, error: psycopg.Error, batch: Batch) -> tuple[str, str] | None:
        """Kind and text of a reject, if an event may be to blame."""


class PgAppendSink(PgTableSink):
    """Appends events to a table."""

    form: Form = "lines"

    def _table(self) -> Appender:
        return Appender(self._options.table)

    def _write(self, conn: Connection, batch: Batch) -> None:
        """Lines as they are, or one by one, if some only look like events."""
        try:
            with conn.transaction():
                self._table().copy(conn, copy_rows(batch.events))
        except psycopg.Error as error:
            if blame(error) is not Blame.EVENT:
                raise
            self._table().copy(conn, [copy_rows_one_by_one(batch.events)])

    def _redeliver(self, conn: Connection, batch: Batch) -> Collection[str]:
        self._table().insert_missing(conn, batch.events)
        return ()

    def _fault(self, error: psycopg.Error, batch: Batch) -> tuple[str, str] | None:
        return (kind_of(error), describe(error)) if blame(error) is Blame.EVENT else None


class PgApplySink(PgTableSink):
    """Applies changes to tables like those of the source."""

    form: Form = "tables"

    def __init__(self, options: PgTableOptions) -> None:
        super().__init__(options)
        self._applier: Applier
        self._found: set[TableName] = set()
        self._refused: list[Batch] = []
        """Events that the target refused, and that are not noted there yet."""

    def _connected(self, conn: Connection) -> None:
        context = self._context
        self._applier = Applier(self._options, context.shapes, (context.name, context.stream), self._say_once)
        self._applier.connected(conn)

    def _write(self, conn: Connection, batch: Batch) -> None:
        for refused in self._refused:
            self._applier.note_rejects(conn, refused)
        self._found = self._applier.apply(conn, batch, self._tables)
        if self._found != self._tables:
            self._positions.note_tables(conn, self._found)

    def _committed(self) -> None:
        self._tables, self._refused = self._found, []

    def _redeliver(self, conn: Connection, batch: Batch) -> Collection[str]:
        if self._is_fresh and len(batch):
            raise SinkError(
                f"adapter {self.name} has applied nothing to this database: which of these events are superseded is known "
                "where they were refused",
                "Deliver them to the adapter's own database; or to another one as events: --pg-table-mode append",
            )
        return self._applier.redeliver(conn, batch)

    def _judged(self, error: psycopg.Error, batch: Batch) -> SinkError:
        judged = super()._judged(error, batch)
        is_one = len(batch) > 0 and len(set(batch.positions().to_pylist())) == 1
        if isinstance(judged, SinkRejected) and is_one and batch.start >= self._written:
            self._refused.append(batch)
        return judged

    def _fault(self, error: psycopg.Error, batch: Batch) -> tuple[str, str] | None:
        return describe_fault(error, self._applier.title_of(batch)) if is_row_fault(error) else None
