"""Events into PostgreSQL, exactly once: the rows, and how far they go, change in one transaction.

The row in the target is the truth (`positions.py`); the ack in the state directory follows it. A crash between them is
seen by the row that is ahead. An empty batch moves the ack alone: databases that mirror each other would never rest
otherwise.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa

from pgcdc.core.errors import Reject, SinkError, SinkRejected, SinkUnavailable, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.shapes import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.event.batch import Batch
from pgcdc.postgres.database import Connection, redact
from pgcdc.sink.contract import Progress, Sink, SinkContext
from pgcdc.sink.pg_table.append import Appender
from pgcdc.sink.pg_table.faults import is_row_fault
from pgcdc.sink.pg_table.options import NO_ORIGIN, PgTableOptions
from pgcdc.sink.pg_table.positions import Positions, TargetName
from pgcdc.sink.pg_table.session import Say, SessionPlan, connect_target, mark_transaction, open_session, say_on_stderr
from pgcdc.sink.pg_table.sqlstate import Blame, blame, describe, explain
from pgcdc.sink.pg_table.target import Target

if TYPE_CHECKING:
    from pgcdc.sink.pg_table.apply import Applier

__all__ = ["PgTableSink"]


class PgTableSink(Sink):
    """Appends events to a table, or applies them to tables like those of the source."""

    def __init__(
        self,
        options: PgTableOptions,
        acks: Path,
        name: str = "pg_table",
        *,
        timeout_s: float = 30.0,
        say: Say | None = None,
    ) -> None:
        self.name = name
        self._options = options
        self._say = say or say_on_stderr(name)
        self._state = StateDir(acks.parent)
        self._timeout_s = timeout_s
        self._said: set[str] = set()
        self._positions = Positions(options.own_schema, name)
        self._appender: Appender | None = None
        self._applier: Applier | None = None
        if options.mode == "append":
            self._appender = Appender(options.table)
        else:
            from pgcdc.sink.pg_table.apply import Applier
            from pgcdc.sink.pg_table.seen_tables import KnownTables

            self._known = KnownTables(acks / f"{name}.tables")
            shapes = ShapeHistory(self._state.shapes_file)
            self._applier = Applier(options, shapes, name, self._say_once, self._known)
        self._target = Target(options, name, self._positions, self._appender, self._state)
        self._owner = ""
        self._conn: Connection | None = None
        self._has_origin = False
        self._acked: Position | None = None
        self._written: Position | None = None
        """Where the row in the target is."""
        self._rejected: Batch | None = None
        """What was refused of the batch that comes next without it."""
        self._is_fresh = False
        """The row in the target is of this process, and has not moved."""

    def __repr__(self) -> str:
        return f"PgTableSink({self.name!r}, {redact(self._options.db)!r}, {self._options.mode!r})"

    @property
    def ack(self) -> Position:
        assert self._acked is not None
        return self._acked

    # --- before the start

    def _bind(self, progress: Progress) -> None:
        self._file = progress
        self._owner = self._file.detail.get("owner", "")
        self._acked = self._file.position
        detail = self._file.detail
        self._written = Position.parse(detail["written"]) if detail.get("is_claimed") else None

    def check(self, context: SinkContext) -> None:
        self._bind(context.progress)
        with self._explain("look at the target"), connect_target(self._plan()) as conn:
            self._target.look(conn)
            if self._positions.exists(conn):
                place = self._positions.read(conn)
                if place is not None and place.owner != self._owner:
                    raise self._positions.foreign(place)

    # --- start

    def open(self, context: SinkContext) -> None:
        """A target that cannot be reached now is opened at the first write, if there is an ack to begin from."""
        self._bind(context.progress)
        self._start = context.start
        try:
            self._connect()
        except SinkUnavailable as error:
            if self._file.position is None or not self._file.detail.get("is_claimed"):
                raise
            self._acked = self._file.position
            self._say_once(f"{error}. It goes on when the target does")

    def _plan(self) -> SessionPlan:
        origin = self._options.origin
        if not origin and self._applier is not None:
            origin = f"pgcdc_{self.name}_{self._owner[:8]}"  # two pipelines may have an adapter of this name
        return SessionPlan(
            self.name,
            self._options.db,
            self._timeout_s,
            "" if origin == NO_ORIGIN else origin,
            bool(self._options.origin),
            self._applier is not None and self._options.triggers == "off",
        )

    def _connect(self) -> Connection:
        """The session, with the ack as the target says; one that is broken is made anew."""
        if self._conn is not None and not self._conn.closed and not self._conn.broken:
            return self._conn
        self._disconnect()
        if not self._owner:
            self._owner = str(uuid.uuid4())
        conn, self._has_origin = open_session(self._plan(), self._say_once)
        try:
            with self._explain("prepare the target"):
                self._restore(conn)
        except BaseException:
            conn.close()
            raise
        self._conn = conn
        if self._applier is not None:
            self._applier.connected(conn)
        return conn

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _restore(self, conn: Connection) -> None:
        """Make what is missing, and find out how far the target is."""
        self._target.look(conn)
        self._target.create(conn)
        target, detail = TargetName.of(conn), self._file.detail
        place = self._positions.read(conn)
        if place is None:
            self._begin(conn, target)
            place = self._positions.read(conn)
        if place is None or place.owner != self._owner:
            raise self._positions.foreign(place) if place else SinkUnavailable("the row vanished", "It is tried again")
        known = self._written if detail.get("is_claimed") else None
        if known is not None and place.position < known:
            raise SinkError(
                f"{self._positions.title} at the target is at {place.position} for adapter {self.name}, but everything up "
                f"to {known} was written to it: an older state of it was restored",
                "Restore a newer one, or deliver all of it once more with another --slot-name and --state-dir. To go on "
                f"without what is missing: UPDATE {self._positions.quoted} SET position = '{known}' WHERE adapter = "
                f"'{self.name}'",
            )
        if known is not None and self._file.position is not None and self._file.position < known:
            # An ack is never behind the row, but where `pgcdc resync` begins anew: positions of another server are smaller.
            self._positions.advance(conn, self._owner, place.position, self._file.position)
            self._written = self._acked = self._file.position
            if self._applier is not None:
                self._known.clear()
            return self._save(target)
        self._written = place.position
        # Behind the row the ack may have moved over batches that had nothing for it.
        self._acked = max(place.position, self._file.position or place.position, self._acked or place.position)
        self._save(target)

    def _begin(self, conn: Connection, target: TargetName) -> None:
        """The first time at this target."""
        detail = self._file.detail
        if detail.get("is_claimed"):
            written = f"but events up to {detail['written']}"
            where = f"{self._positions.title} at the target has no row of adapter {self.name}, {written}"
            if detail.get("target") == [target.system, target.database]:
                raise SinkError(
                    f"{where} were written to it: it was deleted, or an older state of the target was restored",
                    "Restore it, or deliver all of it once more with another --slot-name and --state-dir",
                )
            if self._applier is not None:
                raise SinkError(
                    f"{where} were written to another database: its tables would lack their rows",
                    "Copy the tables, pgcdc_positions and pgcdc_rejected from there (pg_dump), or begin anew with another "
                    "--slot-name and --state-dir",
                )
        self._start = max(self._start, self._acked or self._start)
        self._written = self._acked = self._start
        self._save(target, is_claimed=False)  # first: a row whose owner nobody knows would be a foreign one
        hit("pg_table.before_claim")
        identity = self._state.identity()
        source = f"slot {identity.slot} of database {identity.database}" if identity else ""
        self._positions.claim(conn, self._owner, self._start, source)
        self._is_fresh = True

    def _save(self, target: TargetName | None = None, *, is_claimed: bool = True) -> None:
        assert self._acked is not None and self._written is not None
        where = [target.system, target.database] if target else self._file.detail["target"]
        detail = {"owner": self._owner, "written": str(self._written), "target": where, "is_claimed": is_claimed}
        if self._file.position == self._acked and self._file.detail == detail:
            return
        try:
            self._file.save(self._acked, detail)
        except StateError as error:
            raise SinkUnavailable(error.message, error.advice) from error

    # --- events

    def write(self, batch: Batch) -> None:
        if batch.end <= self.ack:
            return
        if batch.after(self.ack).events.num_rows == 0 and self._rejected is None:
            hit("pg_table.before_ack")
            self._acked = batch.end
            if self._written is not None:
                self._save()
            return
        conn = self._connect()
        if batch.end <= self.ack:  # the target was ahead of what we knew
            return
        batch = batch.after(self.ack)
        try:
            self._write(conn, batch, is_parsed=False)
        except SinkUnavailable:
            self._disconnect()  # so that the row is looked at again
            raise
        except psycopg.Error as error:
            if not self._is_event(error):
                raise self._explained("write", error) from error
            self._write_again(batch, error)

    def _write_again(self, batch: Batch, error: psycopg.Error) -> None:
        """After an error in which an event may be to blame: find out which, or do it another way."""
        conn = self._connect()
        try:
            rejects: list[Reject] = []
            assert self._written is not None
            with conn.transaction(force_rollback=True):
                self._positions.advance(conn, self._owner, self._written, batch.end)
                if self._appender is not None:
                    rejects = self._appender.find_rejects(conn, batch.events)
                elif self._applier is not None:
                    rejects = self._applier.find_rejects(conn, batch, error)
            if not rejects and self._appender is not None:
                return self._write(conn, batch, is_parsed=True)  # a line that only looked like an event
        except psycopg.Error as again:
            raise self._explained("write", again) from again
        if not rejects:
            raise SinkError(
                f"adapter {self.name} cannot write: {describe(error)}",
                "No single event is to blame: look at the target",
            ) from error
        positions = {one.position for one in rejects}
        kept = batch.without(positions).events.num_rows
        is_out = pa.array([one in positions for one in batch.events.column("position").to_pylist()])
        refused = batch.events.filter(is_out)
        if self._rejected is not None and self._rejected.end == batch.end:  # the same batch, without others
            refused = pa.concat_tables([self._rejected.events, refused])
        self._rejected = Batch(batch.start, batch.end, refused)
        first = rejects[0]
        raise SinkRejected(
            f"adapter {self.name}: the target refuses {len(rejects)} of {kept + len(rejects)} events; the first, at "
            f"{first.position}: {first.text}",
            "Make the target take them, then deliver them again: pgcdc dlq replay",
            rejects,
        ) from error

    def _write(self, conn: Connection, batch: Batch, *, is_parsed: bool) -> None:
        with self._commit(conn, batch.end):
            if self._rejected is not None and self._applier is not None and self._rejected.end <= batch.end:
                self._applier.note_rejects(conn, self._rejected)
            if self._appender is not None:
                self._appender.copy(conn, batch.events, is_parsed=is_parsed)
            elif self._applier is not None:
                self._applier.apply(conn, batch)
        self._rejected = None

    @contextlib.contextmanager
    def _commit(self, conn: Connection, end: Position) -> Iterator[None]:
        """One transaction with what is done inside, and the position behind it; then the ack in the file."""
        assert self._written is not None
        with conn.transaction():
            # First: if another one writes, nothing of the target is what we think, and no event is to blame.
            self._positions.advance(conn, self._owner, self._written, end)
            if self._has_origin:
                mark_transaction(conn, end)
            yield
            hit("pg_table.before_ack")
        hit("pg_table.committed")
        self._written = self._acked = end
        self._is_fresh = False
        self._save()
        hit("pg_table.after_ack")

    def redeliver(self, batch: Batch) -> Collection[str]:
        """Deliver events of the past again; the positions of those for which the target has something newer."""
        conn = self._connect()
        if self._applier is not None and self._is_fresh and batch.events.num_rows:
            raise SinkError(
                f"adapter {self.name} has applied nothing to this database: which of these events are superseded is known "
                "where they were refused",
                "Deliver them to the adapter's own database; or to another one as events: --pg-table-mode append",
            )
        try:
            with conn.transaction():
                if self._applier is not None:
                    left_out: set[str] = self._applier.redeliver(conn, batch)
                    return left_out
                assert self._appender is not None
                self._appender.insert_missing(conn, batch.events)
                return ()
        except psycopg.Error as error:
            if not self._is_event(error):
                raise self._explained("write", error) from error
            return self._redeliver_again(batch, error)

    def _redeliver_again(self, batch: Batch, error: psycopg.Error) -> Collection[str]:
        conn = self._connect()
        try:
            with conn.transaction(force_rollback=True):
                if self._appender is not None:
                    rejects = self._appender.find_rejects(conn, batch.events)
                else:
                    assert self._applier is not None
                    rejects = self._applier.find_rejects(conn, batch, error)
        except psycopg.Error as again:
            raise self._explained("write", again) from again
        kind = SinkRejected if rejects else SinkError
        text = f"adapter {self.name}: the target refuses these events: {describe(error)}"
        if kind is SinkRejected:
            raise SinkRejected(text, "Make the target take them first", rejects) from error
        raise SinkError(text, "Look at the target") from error

    def close(self) -> None:
        if self._is_fresh and self._conn is not None and self._written is not None:
            with contextlib.suppress(psycopg.Error, SinkError):  # nothing was written: whoever wants it may have it
                self._save(is_claimed=False)
                self._positions.release(self._conn, self._owner, self._written)
        self._disconnect()

    # --- errors

    def _is_event(self, error: psycopg.Error) -> bool:
        return blame(error) is Blame.EVENT if self._applier is None else is_row_fault(error)

    def _explained(self, action: str, error: psycopg.Error) -> SinkError:
        return explain(self.name, action, error)

    @contextlib.contextmanager
    def _explain(self, action: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise explain(self.name, action, error) from error

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
