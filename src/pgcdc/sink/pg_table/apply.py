"""The apply mode of pg_table: the tables of the source, kept equal at the target.

    lines → fold by table and key → COPY to staging → DELETE, MERGE, UPDATE → (the caller commits, with the position)

A batch is applied as a whole, in few statements. Where the target refuses that (a unique value that two rows exchange, a
foreign key), it is cut into halves, down to single events, in the order of the stream. Where ALTER TABLE comes in, what was
before is written before.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import psycopg
import pyarrow as pa

from pgcdc.core.errors import Reject
from pgcdc.core.position import Position
from pgcdc.core.shapes import ShapeChange, ShapeHistory
from pgcdc.event.batch import Batch
from pgcdc.event.shape_diff import diff_shapes
from pgcdc.postgres.database import Connection
from pgcdc.sink.pg_table.faults import describe_fault, is_conflict, is_other_shape, is_row_fault
from pgcdc.sink.pg_table.folding import Folding, Sources
from pgcdc.sink.pg_table.lines import Event, parse_events, scan_lines
from pgcdc.sink.pg_table.mapping import TargetNames, source_name
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.rejected import Rejected
from pgcdc.sink.pg_table.seen_tables import KnownTables
from pgcdc.sink.pg_table.tables import describe_change
from pgcdc.sink.pg_table.targets import Targets
from pgcdc.sink.pg_table.writer import RowFault, Writer

__all__ = ["Applier"]

KNOWN_S = 60.0
"""So long the target's catalog is believed to say the same."""
MOST_REJECTS = 200
"""So many are looked for at once: the search takes time, and the batch comes again without them."""
_LAST = Position.end((1 << 63) - 1)
_Faulty = Callable[[psycopg.Error, pa.Table], None]


class _Enough(Exception):
    """No more rejects are looked for."""


class Applier:
    """Applies batches through a session of the caller, who owns connection and transactions.

    What it knows of the target it learns anew after every error. `say` gets what people should know: tables that were
    created or altered.
    """

    def __init__(
        self,
        options: PgTableOptions,
        shapes: ShapeHistory,
        adapter: str,
        say: Callable[[str], None],
        known: KnownTables | None = None,
    ) -> None:
        """ConfigError: the names of tables cannot be read. `shapes` may be read already: it is refreshed where it can be."""
        self._options = options
        self._shapes = shapes
        self._say = say
        self._names = TargetNames(options.tables, options.target_schema)
        self._schema = options.target_schema or "public"
        self._rejected = Rejected(self._schema, adapter)
        self._tables = known or KnownTables()
        self._conn: Connection | None = None
        self._targets: Targets | None = None
        self._writer: Writer | None = None
        self._is_warm = False
        """What is known of the target is of an earlier transaction."""
        self._known_until = 0.0

    def connected(self, conn: Connection) -> None:
        """A new connection: what was known of the old one is forgotten."""
        self._forget()
        self._conn = conn
        self._rejected.look(conn)

    def apply(self, conn: Connection, batch: Batch) -> None:
        """Apply a batch, inside of the caller's transaction. psycopg's errors pass; what was done is to be rolled back."""
        changes = self._begin(conn, batch.start, batch.end)
        try:
            if self._rejected.waiting:  # what was noted may have been rolled back
                self._rejected.look(conn)
            self._divide(conn, batch.events, changes, self._stop_at, is_conflict)
            self._is_warm = True
            if self._rejected.waiting:
                self._supersede(conn, batch.events, changes)
            if self._targets is not None:
                self._tables.see(conn, self._targets.present)
        except BaseException:
            self._forget()
            raise

    def find_rejects(self, conn: Connection, batch: Batch, error: psycopg.Error) -> list[Reject]:
        """Which events are to blame for an error, the first of them if they are many; empty: none of them alone.

        In a transaction that is rolled back then.
        """
        changes = self._begin(conn, batch.start, batch.end)
        rejects: list[Reject] = []

        def note(fault: psycopg.Error, events: pa.Table) -> None:
            event = next(parse_events(events))
            kind, text = describe_fault(fault, _title(Sources(self._shapes, lambda source: None), event))
            rejects.append(Reject(event["position"], kind, text))
            if len(rejects) == MOST_REJECTS:
                raise _Enough

        try:
            self._divide(conn, batch.events, changes, note, is_row_fault)
        except _Enough:
            pass
        finally:
            self._forget()
        return rejects

    def note_rejects(self, conn: Connection, batch: Batch) -> None:
        """Remember the keys of rejected events, in the transaction of the batch that goes on without them, before it is
        applied: what is applied to these keys later supersedes them."""
        changes = self._begin(conn, batch.start, batch.end)
        self._rejected.look(conn)
        effects = (one for event, sources in self._keyed(conn, batch.events, changes) for one in sources.effects(event))
        self._rejected.note(conn, effects)

    def redeliver(self, conn: Connection, batch: Batch) -> set[str]:
        """Apply dead letters, in the caller's transaction. The positions of those that were left out: their keys have been
        changed by something newer, or they have been delivered."""
        self._begin(conn, batch.start, batch.end)
        left_out: set[str] = set()
        try:
            self._rejected.look(conn)
            for event in sorted(parse_events(batch.events), key=lambda one: str(one["position"])):
                if not self._redeliver(conn, event):
                    left_out.add(event["position"])
        except BaseException:
            self._forget()
            raise
        return left_out

    # --- a run

    def _begin(self, conn: Connection, start: Position, end: Position) -> list[ShapeChange]:
        """The changes of shapes in (start, end]."""
        self._shapes.refresh()
        if conn is not self._conn:
            self.connected(conn)
        self._tables.settle(conn)
        if time.monotonic() > self._known_until:  # somebody may have altered the target's tables
            self._forget()
        self._open(conn).begin()
        return self._shapes.between(start, end)

    def _open(self, conn: Connection) -> Writer:
        if self._writer is None or self._targets is None:
            self._targets = Targets(conn, self._options, self._names, self._say, self._tables)
            self._writer = Writer(conn, self._targets)
            self._known_until = time.monotonic() + KNOWN_S
        return self._writer

    def _forget(self) -> None:
        """After a rollback the target may be other than we know."""
        self._targets = self._writer = None
        self._tables.forget()
        self._is_warm = False

    def _divide(
        self,
        conn: Connection,
        events: pa.Table,
        changes: Sequence[ShapeChange],
        fault: _Faulty,
        is_divisible: Callable[[psycopg.Error], bool],
    ) -> None:
        """Apply all at once, or else in halves; `fault` is called with an event that cannot be applied alone."""
        try:
            with conn.transaction():
                self._run(conn, events, changes)
            return
        except psycopg.Error as error:
            was_warm = self._is_warm
            self._forget()
            if was_warm and is_other_shape(error):  # we knew an older state of the target's tables
                self._divide(conn, events, changes, fault, is_divisible)
                return
            if not is_divisible(error):
                raise
            if events.num_rows <= 1:
                fault(error, events)
                self._run(conn, events.slice(0, 0), changes)
                return
        half = events.num_rows // 2
        middle = events.column("position")[half].as_py()
        before = [change for change in changes if str(change.position) < middle]
        self._divide(conn, events.slice(0, half), before, fault, is_divisible)
        self._divide(conn, events.slice(half), changes[len(before) :], fault, is_divisible)

    @staticmethod
    def _stop_at(error: psycopg.Error, events: pa.Table) -> None:
        raise error

    def _run(self, conn: Connection, events: pa.Table, changes: Sequence[ShapeChange]) -> None:
        writer = self._open(conn)
        assert self._targets is not None
        folding = Folding(Sources(self._shapes, self._targets.of), writer)
        for part, due in self._cut(events, changes):
            if due:
                folding.end()
                for change in due:
                    self._follow(conn, change)
            take_all(folding, part)
        folding.end()

    def _cut(self, events: pa.Table, changes: Sequence[ShapeChange]) -> Iterator[tuple[pa.Table, list[ShapeChange]]]:
        """The events between changes of shapes, with the changes before them."""
        due: list[ShapeChange] = []
        begin, texts = 0, events.column("position")
        for change in changes:
            if not self._is_cut(change):
                continue
            place = bisect_left(range(events.num_rows), str(change.position), key=lambda row: texts[row].as_py())
            if place > begin:
                yield events.slice(begin, place - begin), due
                begin, due = place, []
            due.append(change)
        yield events.slice(begin), due

    def _is_cut(self, change: ShapeChange) -> bool:
        """Whether a table looks otherwise from here on: it was altered, or dropped and made again."""
        if change.before is not None:
            return True
        first = next(self._shapes.of(change.after.namespace, change.after.name), None)
        return first is not None and first.position < change.position

    # --- dead letters

    def _keyed(
        self, conn: Connection, events: pa.Table, changes: Sequence[ShapeChange]
    ) -> Iterator[tuple[Event, Sources]]:
        """Every event that has a row, with what tells its keys."""
        self._open(conn)
        assert self._targets is not None
        sources = Sources(self._shapes, self._targets.of)
        for part, due in self._cut(events, changes):
            if due:
                sources.forget()
            for event in parse_events(part):
                if event["payload"]["table"] is not None and event["payload"]["row"] is not None:
                    yield event, sources

    def _supersede(self, conn: Connection, events: pa.Table, changes: Sequence[ShapeChange]) -> None:
        waiting = {table for table, _ in self._rejected.waiting}
        newest: dict[tuple[str, str], str] = {}
        for event, sources in self._keyed(conn, events, changes):
            if sources.of_event(event)[0].title in waiting:
                newest |= {(one.table, one.key): one.position for one in sources.effects(event)}
        sources = Sources(self._shapes, lambda source: None)
        cleared = {
            _title(sources, event): event["position"]
            for event in parse_events(events)
            if event["operation"] == "TRUNCATE"
        }
        self._rejected.supersede(conn, newest, cleared)

    def _redeliver(self, conn: Connection, event: Event) -> bool:
        """Whether it was applied, to the key of its row at least."""
        position = event["position"]
        known = self._rejected.of(conn, position)
        if not any(known.values()):
            return False
        writer = self._open(conn)
        assert self._targets is not None
        sources = Sources(self._shapes, self._targets.of)
        event = self._as_of_now(event, sources)
        source, key = sources.of_event(event)
        old, row = event["payload"]["old"], event["payload"]["row"]
        keys = [one.key for one in sources.effects(event)]
        may = [known.get(one, True) for one in keys]
        payload = dict(event["payload"])
        if not may[0]:  # its row has become another one, but it has left this key
            payload |= {"op": "DELETE", "row": {name: old[name] for name in key}, "old": None}
        elif not all(may):
            payload |= {"row": {**old, **row}, "old": None}
        folding = Folding(sources, writer)
        folding.take_event({**event, "operation": payload["op"], "payload": payload})
        folding.end()
        self._rejected.forget(conn, position)
        done = {(source.title, one): position for one, ok in zip(keys, may, strict=True) if ok}
        self._rejected.supersede(conn, done, {})
        return may[0]

    def _as_of_now(self, event: Event, sources: Sources) -> Event:
        """An event of the past, under the name that its table has now. RowFault: a column is gone, or called otherwise."""
        payload = event["payload"]
        name = source_name(event["channel"], payload["table"])
        then = self._shapes.in_force(*name, Position.parse(event["position"]))
        if then is None:
            return event
        now = [change.after for change in self._shapes.changes if change.after.oid == then.after.oid][-1]
        event = {**event, "channel": now.channel, "position": str(_LAST), "payload": {**payload, "table": now.name}}
        source, _ = sources.of_event(event)
        target = sources.find(source)
        known = {*source.types, *(target.columns if target else ())}
        gone = [one for one in payload["row"] if one not in known]
        if target is not None and gone:
            raise RowFault(
                "undefined_column",
                f"the event of table {source.title} has the column {', '.join(gone)}, which the table has no more",
            )
        return event

    def _follow(self, conn: Connection, change: ShapeChange) -> None:
        """Do to the target what was done to the source."""
        assert self._targets is not None
        if change.before is None:
            self._targets.say_anew((change.after.namespace, change.after.name))
        self._targets.follow(change)
        if self._rejected.waiting and change.before is not None:
            names = [(one.namespace, one.name) for one in (change.before, change.after)]
            before = describe_change(names[0], ShapeChange(change.position, change.before, None, change.before_details))
            after = describe_change(names[1], change)
            self._rejected.follow(conn, before.title, after.title)
            if len(before.key) != len(after.key) or not _same_key(change):
                self._rejected.supersede(conn, {}, {after.title: str(change.position)})


def _same_key(change: ShapeChange) -> bool:
    kinds = {one["type"] for one in diff_shapes(change)}
    return not kinds & {"primary_key_changed", "key_columns_changed", "replica_identity_changed"}


def take_all(folding: Folding, events: pa.Table) -> None:
    """Fold all of these events."""
    first = 0
    for piece in scan_lines(events):
        folding.take(piece, events.column("position"), first)
        first += len(piece)


def _title(sources: Sources, event: Event) -> str:
    return sources.describe((event["channel"], event["payload"]["table"]), event["position"]).title
