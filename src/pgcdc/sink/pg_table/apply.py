"""The apply mode of pg_table: the tables of the source, kept equal at the target.

    changes of a table → fold by key → COPY to staging → DELETE, MERGE, UPDATE → (the caller commits, with the position)

A batch is applied as a whole, in few statements. Where the target refuses that because of the order (a unique value that two
rows exchange, a foreign key), it is cut into halves, down to single events. Where ALTER TABLE comes in, what was before is
written before.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import orjson
import psycopg
import pyarrow as pa

from pgcdc.core.position import Position
from pgcdc.core.relation import OldKind, Op, ShapeChange, ShapeHistory
from pgcdc.event.batch import Batch, TableChanges
from pgcdc.event.changes import read_changes, settle
from pgcdc.event.shape import diff_shapes
from pgcdc.postgres.database import Connection, name_table
from pgcdc.sink.pg_table.fold import MissingKey, find_moves, fold_bag, fold_keyed, fold_late, part_of
from pgcdc.sink.pg_table.options import PgTableOptions, TableName
from pgcdc.sink.pg_table.session import Blame, RowFault, blame, is_conflict
from pgcdc.sink.pg_table.tables import SourceTable, Targets, choose_key, describe_source
from pgcdc.sink.pg_table.target import Effect, Rejected
from pgcdc.sink.pg_table.writer import Writer

KNOWN_S = 60.0
"""So long the target's catalog is believed to say the same."""
_LAST = Position.end((1 << 63) - 1)


class Applier:
    """Applies batches through a session of the caller, who owns connection and transactions.

    What it knows of the target it learns again after every error. `say` gets what people should know: tables that were
    created or altered, rows that should have been there.
    """

    def __init__(
        self, options: PgTableOptions, shapes: ShapeHistory, key: tuple[str, str], say: Callable[[str], None]
    ) -> None:
        """`key`: the names of adapter and stream."""
        self._options, self._shapes, self._say = options, shapes, say
        self._names = options.names
        self._were_there: Collection[TableName] = ()
        self._rejected = Rejected(options.own_schema, key)
        self._conn: Connection | None = None
        self._writer: Writer | None = None
        self._is_warm = False
        """What is known of the target is of an earlier transaction."""
        self._known_until = 0.0
        self._missed: Counter[str] = Counter()
        """By table: rows that should have been deleted and were not there, in this transaction."""
        self.missed: Counter[str] = Counter()
        """The same since it connected."""

    def connected(self, conn: Connection) -> None:
        """A new connection: what was known of the old one is forgotten."""
        self._forget()
        self._conn = conn
        self._rejected.look(conn)

    def apply(self, conn: Connection, batch: Batch, were_there: Collection[TableName] = ()) -> set[TableName]:
        """Apply a batch, inside of the caller's transaction; the tables that the target has now, as far as they are known.

        `were_there` is what an earlier call returned. psycopg's errors pass; what was done is to be rolled back.
        """
        self._were_there = were_there
        changes = self._begin(conn, batch.start, batch.end)
        batch = self._as_tables(batch)
        try:
            if self._rejected.waiting:  # what was noted may have been rolled back
                self._rejected.look(conn)
            self._divide(conn, batch, changes)
            self._is_warm = True
            if self._rejected.waiting:
                self._supersede(conn, batch)
            self.missed.update(self._missed)
            for table, count in self._missed.items():
                self._say(
                    f"table {table}: {count} rows that were to be deleted are not at the target ({self.missed[table]} since "
                    "it connected). Somebody else changes the table, or rows were missing before: compare it with the "
                    "source, and take a snapshot of it"
                )
            return self._open(conn).targets.see()
        except BaseException:
            self._forget()
            raise

    def note_rejects(self, conn: Connection, batch: Batch) -> None:
        """Remember the keys of rejected events, in the transaction of the batch that goes on without them, before it is
        applied: what is applied to these keys later supersedes them."""
        self._begin(conn, batch.start, batch.end)
        self._rejected.look(conn)
        self._rejected.note(conn, self._all_effects(conn, self._as_tables(batch)))

    def redeliver(self, conn: Connection, batch: Batch) -> set[str]:
        """Apply dead letters, in the caller's transaction. The positions of those that were left out: their keys have been
        changed by something newer, or they have been delivered."""
        self._were_there = ()
        self._begin(conn, batch.start, batch.end)
        batch = self._as_tables(batch)
        try:
            self._rejected.look(conn)
            return {
                position
                for position in batch.positions().to_pylist()
                for run in batch.only([position]).tables()
                if not self._redeliver(conn, position, run)
            }
        except BaseException:
            self._forget()
            raise

    def title_of(self, batch: Batch) -> str:
        """The table of the first event, for messages."""
        run = next(iter(self._as_tables(batch).tables()))
        return name_table(run.relation.namespace, run.relation.name)

    def _as_tables(self, batch: Batch) -> Batch:
        """Dead letters come as lines."""
        return batch if batch.form == "tables" else read_changes(batch, self._shapes)

    # --- a run

    def _begin(self, conn: Connection, start: Position, end: Position) -> list[ShapeChange]:
        """The changes of shapes in (start, end]."""
        self._shapes.refresh()
        if conn is not self._conn:
            self.connected(conn)
        if time.monotonic() > self._known_until:  # somebody may have altered the target's tables
            self._forget()
        self._missed.clear()
        self._open(conn).begin()
        return self._shapes.between(start, end)

    def _open(self, conn: Connection) -> Writer:
        if self._writer is None:
            self._writer = Writer(conn, Targets(conn, self._options, self._names, self._say, self._were_there))
            self._known_until = time.monotonic() + KNOWN_S
        return self._writer

    def _forget(self) -> None:
        """After a rollback the target may be other than we know."""
        self._writer = None
        self._is_warm = False

    def _divide(self, conn: Connection, batch: Batch, changes: Sequence[ShapeChange]) -> None:
        """Apply all at once, or else in halves."""
        try:
            with conn.transaction():
                writer = self._run(conn, batch, changes)
            self._missed.update(writer.missed)
            writer.missed.clear()
            return
        except psycopg.Error as error:
            was_warm = self._is_warm
            self._forget()
            if was_warm and blame(error) is Blame.SHAPE:  # we knew an older state of the target's tables
                return self._divide(conn, batch, changes)
            half = batch.first(max(1, len(batch) // 2))
            if not is_conflict(error) or len(half) == len(batch):
                raise
        before = [change for change in changes if change.position <= half.end]
        self._divide(conn, half, before)
        self._divide(conn, batch.after(half.end), changes[len(before) :])

    def _run(self, conn: Connection, batch: Batch, changes: Sequence[ShapeChange]) -> Writer:
        writer = self._open(conn)
        for part, due in self._cut(batch, changes):
            for change in due:
                self._follow(conn, change)
            cleared: list[SourceTable] = []
            for run in part.tables():
                source = self._describe(run, part.positions()[int(run.rows[0])].as_py())
                if run.op[0] == Op.TRUNCATE:
                    cleared.append(source)
                    continue
                writer.truncate(cleared)
                cleared = []
                self._apply(writer, run, source)
            writer.truncate(cleared)
        return writer

    def _apply(self, writer: Writer, run: TableChanges, source: SourceTable) -> None:
        """Fold and write one run; updates that only the target can do cut it."""
        target, names = writer.targets.of(source), [column.name for column in run.relation.columns]
        key = choose_key(source, target, names)
        places = [names.index(name) for name in key]
        keeps_more = target is not None and not set(target.writable(target.columns)) <= set(names)
        is_simple = not key or source.is_key_deferrable
        begin = 0
        for place in [] if is_simple else find_moves(run, places, keeps_more=keeps_more):
            self._fold(writer, source, key, places, part_of(run, begin, place))
            begin = place + self._move(writer, source, key, part_of(run, place, place + 1))
        self._fold(writer, source, key, places, part_of(run, begin, len(run)))

    def _fold(
        self, writer: Writer, source: SourceTable, key: tuple[str, ...], places: Sequence[int], run: TableChanges
    ) -> None:
        if not len(run):
            return
        try:
            fold = fold_late if source.is_key_deferrable else fold_keyed
            folded = fold(run, places) if key else fold_bag(run)
        except MissingKey as error:
            text = f"the event of table {source.title} has no value of its key {error}"
            raise RowFault("missing_key", text) from None
        writer.write(source, folded, key)

    def _move(self, writer: Writer, source: SourceTable, key: tuple[str, ...], run: TableChanges) -> bool:
        """Have the target give a row another key. False: it does not have the row, which is whole."""
        values, unknown = settle(run)
        names = [column.name for column in run.relation.columns]
        old = {name: run.old[names.index(name)][0].as_py() for name in key}
        row = {
            name: value[0].as_py() for name, value, lacks in zip(names, values, unknown, strict=True) if lacks is None
        }
        if writer.move(source, old, row):
            return True
        if len(row) < len(names):
            raise writer.missing_row(source)
        return False

    def _cut(self, batch: Batch, changes: Sequence[ShapeChange]) -> Iterator[tuple[Batch, list[ShapeChange]]]:
        """The events between changes of shapes, with the changes before them."""
        due: list[ShapeChange] = []
        begin, texts = 0, batch.positions()
        for change in filter(self._is_cut, changes):
            place = bisect_left(range(len(batch)), str(change.position), key=lambda row: texts[row].as_py())
            if place > begin:
                yield batch.slice(begin, place), due
                begin, due = place, []
            due.append(change)
        yield batch.slice(begin, len(batch)), due

    def _is_cut(self, change: ShapeChange) -> bool:
        """Whether a table looks otherwise from here on: it was altered, or dropped and made again."""
        if change.before is not None:
            return True
        first = next(self._shapes.of(change.after.namespace, change.after.name), None)
        return first is not None and first.position < change.position

    def _describe(self, run: TableChanges, position: str) -> SourceTable:
        name = run.relation.namespace, run.relation.name
        return describe_source(run.relation, run.details, self._shapes.in_force(*name, Position.parse(position)))

    def _follow(self, conn: Connection, change: ShapeChange) -> None:
        """Do to the target what was done to the source."""
        targets = self._open(conn).targets
        if change.before is None:
            return targets.say_new((change.after.namespace, change.after.name))
        targets.follow(change)
        if self._rejected.waiting:
            before = describe_source(change.before, change.before_details)
            after = describe_source(change.after, change.details)
            self._rejected.follow(conn, before.title, after.title)
            kinds = {one["type"] for one in diff_shapes(change)}
            others = kinds & {"primary_key_changed", "key_columns_changed", "replica_identity_changed"}
            if len(before.key) != len(after.key) or others:
                self._rejected.supersede(conn, {}, {after.title: str(change.position)})

    # --- dead letters

    def _effects(
        self, writer: Writer, run: TableChanges, source: SourceTable, positions: Sequence[str]
    ) -> Iterator[Effect]:
        """Which keys these changes touch; of each first that of its row."""
        names = [column.name for column in run.relation.columns]
        places = [names.index(name) for name in choose_key(source, writer.targets.of(source), names)]
        after, before = (_key_texts([side[one] for one in places], len(run)) for side in (settle(run)[0], run.old))
        has_old = (run.op == Op.UPDATE) & (run.old_kind != OldKind.NONE)
        for position, new, old, is_both in zip(positions, after, before, has_old.tolist(), strict=True):
            for one in dict.fromkeys([new, old] if is_both else [new]):
                yield Effect(source.title, one, position)

    def _all_effects(self, conn: Connection, batch: Batch, tables: Collection[str] | None = None) -> Iterator[Effect]:
        """Those of the changes of these tables; None: of all."""
        for run in batch.tables():
            positions = batch.positions().take(pa.array(run.rows)).to_pylist()
            source = self._describe(run, positions[0])
            if run.op[0] != Op.TRUNCATE and (tables is None or source.title in tables):
                yield from self._effects(self._open(conn), run, source, positions)

    def _supersede(self, conn: Connection, batch: Batch) -> None:
        waiting = {table for table, _ in self._rejected.waiting}
        newest = {(one.table, one.key): one.position for one in self._all_effects(conn, batch, waiting)}
        cleared = {}
        for run in batch.tables():
            if run.op[0] == Op.TRUNCATE:
                position = batch.positions()[int(run.rows[0])].as_py()
                cleared[self._describe(run, position).title] = position
        self._rejected.supersede(conn, newest, cleared)

    def _redeliver(self, conn: Connection, position: str, run: TableChanges) -> bool:
        """Whether it was applied, to the key of its row at least."""
        known = self._rejected.of(conn, position)
        if not any(known.values()):
            return False
        writer = self._open(conn)
        run = self._as_of_now(writer.targets, run)
        source = self._describe(run, str(_LAST))
        effects = list(self._effects(writer, run, source, [position]))
        may = [known.get(one.key, True) for one in effects]
        if not may[0]:  # its row has become another one, but it has left this key
            run = replace(run, op=np.array([Op.DELETE], np.uint8))
        elif not all(may):
            values, unknown = settle(run)
            run = replace(run, new=values, unchanged=unknown, old_kind=np.array([OldKind.NONE], np.uint8))
        self._apply(writer, run, source)
        self._rejected.forget(conn, position)
        done = {(one.table, one.key): position for one, ok in zip(effects, may, strict=True) if ok}
        self._rejected.supersede(conn, done, {})
        return may[0]

    def _as_of_now(self, targets: Targets, run: TableChanges) -> TableChanges:
        """A change of the past, under the name that its table has now. RowFault: a column is gone, or called otherwise."""
        latest = [change for change in self._shapes.changes if change.after.oid == run.relation.oid][-1:]
        if not latest:
            return run
        now = latest[0].after
        run = replace(run, relation=replace(run.relation, namespace=now.namespace, name=now.name))
        source = describe_source(now, latest[0].details)
        target = targets.of(source)
        known = {*source.types, *(target.columns if target else ())}
        gone = [one.name for one in run.relation.columns if one.name not in known]
        if target is not None and gone:
            raise RowFault(
                "undefined_column",
                f"the event of table {source.title} has the column {', '.join(gone)}, which the table no longer has",
            )
        return run


def _key_texts(columns: Sequence[pa.Array], count: int) -> Iterable[str]:
    """Keys as they stand in `pgcdc_rejected`; empty for a table without one."""
    if not columns:
        return [""] * count
    return [orjson.dumps(key).decode() for key in zip(*(one.to_pylist() for one in columns), strict=True)]
