"""The apply mode of pg_table: keeps tables at the target equal to those of the source.

    changes of a table → fold by key → COPY to staging → DELETE, MERGE, UPDATE → (the caller commits, with the position)

A batch is applied as a whole, in few statements. If the target refuses it because of the order (a unique value that two rows
exchange, a foreign key), the batch is split into halves, down to single events. At an ALTER TABLE the batch is cut, and
everything before it is written first.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import orjson
import psycopg
import pyarrow as pa

from pgcdc.core.counters import ROWS_MISSED, counters
from pgcdc.core.position import Position
from pgcdc.core.relation import OldKind, Op, ShapeChange, ShapeHistory
from pgcdc.core.wording import counted
from pgcdc.event.batch import Batch, TableChanges
from pgcdc.event.changes import settle
from pgcdc.event.edits import SimpleChain
from pgcdc.event.shape import diff_shapes
from pgcdc.postgres.database import Connection
from pgcdc.sink.pg_table.evolve import follow, rebuild
from pgcdc.sink.pg_table.fold import Bools, MissingKey, find_moves, fold_bag, fold_keyed, fold_late, part_of
from pgcdc.sink.pg_table.options import PgTableOptions, TableName
from pgcdc.sink.pg_table.tables import SourceTable, Targets, choose_key, describe_source
from pgcdc.sink.pg_table.target import Blame, Effect, Rejected, RowFault, blame, is_conflict
from pgcdc.sink.pg_table.writer import Writer

KNOWN_S = 60.0  # How long our knowledge of the target's catalog counts as current
_LAST = Position.end((1 << 63) - 1)


class Applier:
    """Applies batches through one session, in the caller's transactions.

    After every error it reads the target's tables again. `say` reports what people should know: created or altered
    tables, missing rows.
    """

    def __init__(
        self,
        conn: Connection,
        options: PgTableOptions,
        shapes: ShapeHistory,
        key: tuple[str, str],
        say: Callable[[str], None],
        tables: Collection[TableName] = (),
        chain: Callable[[], SimpleChain] = lambda: SimpleChain((), ()),
        held: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`key`: the names of adapter and stream. `held`: the oids of tables that will come whole later."""
        self._conn, self._options, self._shapes, self._say = conn, options, shapes, say
        self._chain, self._held, self._name = chain, held, key[0]
        self.tables = set(tables)  # The target's tables at the last commit; the caller keeps it current
        self._rejected = Rejected(options.own_schema, key)
        self._writer: Writer | None = None
        self._is_warm = False  # Our knowledge of the target is from an earlier transaction
        self._known_until = 0.0
        self.missed: Counter[str] = Counter()  # By table: missing rows that were to be updated or deleted

    def apply(self, batch: Batch, refused: Sequence[Batch] = ()) -> set[TableName]:
        """Apply a batch in the caller's transaction; returns the known tables of the target.

        Records the keys of `refused` events first, because changes applied to these keys supersede them. Passes
        psycopg's errors on; the caller rolls back.
        """
        try:
            self._begin()
            for one in refused:
                self._rejected.note(self._conn, self._effects(one))
            missed = self._divide(batch, self._shapes.between(batch.start, batch.end))
            self._is_warm = True
            if self._rejected.waiting:
                self._supersede(batch)
            self.missed.update(missed)
            for table, count in missed.items():
                counters.add(ROWS_MISSED, count, adapter=self._name, table=table)
                self._say(
                    f"table {table}: {counted(count, 'row')} to update or delete not found at the target "
                    f"({self.missed[table]} since it connected). Somebody else changes the table, or rows "
                    "were missing before. Compare and repair it: pgcdc verify --repair"
                )
            return self._open().targets.see()
        except BaseException:
            self.forget()
            raise

    def redeliver(self, batch: Batch) -> set[str]:
        """Apply dead letters in the caller's transaction. Returns the positions that were skipped: their keys have
        newer changes, or the letters were already delivered."""
        try:
            self._begin()
            return {
                position
                for position in batch.positions().to_pylist()
                for run in batch.only([position]).tables()
                if not self._redeliver(position, run)
            }
        finally:
            self.forget()

    # --- one run of changes

    def _begin(self) -> None:
        self._shapes.refresh()
        if time.monotonic() > self._known_until:  # another client may have altered the target's tables
            self.forget()
        self._open().begin()

    def _open(self) -> Writer:
        if self._writer is None:
            targets = Targets(self._conn, self._options, self._say, self.tables)
            self._writer = Writer(self._conn, targets)
            self._rejected.look(self._conn)
            self._known_until = time.monotonic() + KNOWN_S
        return self._writer

    def forget(self) -> None:
        """Forget the target's tables: the transaction may have been rolled back."""
        self._writer = None
        self._is_warm = False

    def _divide(self, batch: Batch, changes: Sequence[ShapeChange]) -> Counter[str]:
        """Apply all at once, or else in halves. Returns, by table, how many rows to change were missing."""
        try:
            with self._conn.transaction():
                return self._run(batch, changes)
        except psycopg.Error as error:
            was_warm = self._is_warm
            self.forget()
            if was_warm and blame(error) is Blame.SHAPE:  # what we knew of the target's tables was outdated
                return self._divide(batch, changes)
            half = batch.first(max(1, len(batch) // 2))
            if not is_conflict(error) or len(half) == len(batch):
                raise
        before = [change for change in changes if change.position <= half.end]
        return self._divide(half, before) + self._divide(batch.after(half.end), changes[len(before) :])

    def _run(self, batch: Batch, changes: Sequence[ShapeChange]) -> Counter[str]:
        writer = self._open()
        writer.missed = Counter()
        for part, due in self._cut(batch, changes):
            for change in due:
                self._follow(change)
            cleared: list[SourceTable] = []
            for run, source in self._runs(part):
                if run.op[0] == Op.TRUNCATE:
                    if _is_reload(part, run):
                        self._rebuild(run, source)
                    else:
                        cleared.append(source)
                    continue
                writer.truncate(cleared)
                cleared = []
                self._check_values(run, source, part.positions())
                self._apply(run, source)
            writer.truncate(cleared)
        return writer.missed

    def _rebuild(self, run: TableChanges, source: SourceTable) -> None:
        writer = self._open()
        names = [column.name for column in run.relation.columns]
        target = writer.targets.of(source)
        key = choose_key(source, replace(target, primary_key=()) if target is not None else None, names)
        history = self._history(run.relation.oid)
        titles = {one.after.channel for one in history}
        oids = {
            one.after.oid for one in self._shapes.changes if one.after.channel in titles
        }  # their copy may use this name
        named = [one for one in self._shapes.changes if one.after.oid in oids]
        rebuild(writer.targets, source, key, history, self._taken(run.relation.oid, _LAST), named)
        writer.forget(source)

    def _history(self, oid: int) -> list[ShapeChange]:
        return [change for change in self._shapes.changes if change.after.oid == oid]

    def _taken(self, oid: int, position: Position) -> set[TableName]:
        """The names at the target that belong to other tables by then."""
        name_of = self._open().targets.name_of
        return {name_of((one.namespace, one.name)) for one in self._shapes.others(oid, position)}

    def _runs(self, batch: Batch) -> Iterator[tuple[TableChanges, SourceTable]]:
        for run in batch.tables():
            yield run, self._describe(run, batch.positions()[int(run.rows[0])].as_py())

    def _apply(self, run: TableChanges, source: SourceTable) -> None:
        """Fold and write one run. Updates that only the target can do split it."""
        if not run.relation.columns:  # for rows without columns only the count matters
            is_new: Bools = (run.op == Op.INSERT) | (run.op == Op.SNAPSHOT)
            self._open().resize(source, int(is_new.sum() - (run.op == Op.DELETE).sum()))
            return
        target = self._open().targets.of(source)
        names = [column.name for column in run.relation.columns]
        key = choose_key(source, target, names)
        places = [names.index(name) for name in key]
        keeps_more = target is not None and not set(target.writable(target.columns)) <= set(names)
        is_simple = not key or source.is_key_deferrable
        begin = 0
        for place in [] if is_simple else find_moves(run, places, keeps_more=keeps_more):
            self._fold(source, key, places, part_of(run, begin, place))
            begin = place + self._move(source, key, part_of(run, place, place + 1))
        self._fold(source, key, places, part_of(run, begin, len(run)))

    def _fold(self, source: SourceTable, key: tuple[str, ...], places: Sequence[int], run: TableChanges) -> None:
        if not len(run):
            return
        try:
            fold = fold_late if source.is_key_deferrable else fold_keyed
            folded = fold(run, places) if key else fold_bag(run)
        except MissingKey as error:
            text = f"the event of table {source.title} lacks the key column {error}"
            raise RowFault("missing_key", text) from None
        self._open().write(source, folded, key)

    def _move(self, source: SourceTable, key: tuple[str, ...], run: TableChanges) -> bool:
        """Have the target give a row another key. Returns False if the target has no such row and the change contains
        all its values."""
        values, unknown = settle(run)
        names = [column.name for column in run.relation.columns]
        old = {name: run.old[names.index(name)][0].as_py() for name in key}
        row = {
            name: value[0].as_py() for name, value, lacks in zip(names, values, unknown, strict=True) if lacks is None
        }
        if self._open().move(source, old, row):
            return True
        if len(row) < len(names):
            raise self._open().missing_row(source)
        return False

    # --- changes of shape

    def _cut(self, batch: Batch, changes: Sequence[ShapeChange]) -> Iterator[tuple[Batch, list[ShapeChange]]]:
        """The events between changes of shape, each with the changes before them."""
        due: list[ShapeChange] = []
        begin, texts = 0, batch.positions()
        held = self._held()
        for change in filter(self._is_cut, (one for one in changes if one.after.oid not in held)):
            place = bisect_left(range(len(batch)), str(change.position), key=lambda row: texts[row].as_py())
            if place > begin:
                yield batch.slice(begin, place), due
                begin, due = place, []
            due.append(change)
        yield batch.slice(begin, len(batch)), due

    def _is_cut(self, change: ShapeChange) -> bool:
        """Whether a table changes here: it was altered, or dropped and recreated."""
        if change.before is not None:
            return True
        first = next(self._shapes.of(change.after.namespace, change.after.name), None)
        return first is not None and first.position < change.position

    def _describe(self, run: TableChanges, position: str) -> SourceTable:
        name = run.relation.namespace, run.relation.name
        known = self._shapes.in_force(*name, Position.parse(position))
        is_same = known is not None and known.after.oid == run.relation.oid  # another table may have had the name
        return describe_source(run.relation, run.details, known if is_same else None)

    def _follow(self, change: ShapeChange) -> None:
        """Repeat the source's change of shape at the target."""
        is_new = not self._shapes.takes_name(change)
        taken = self._taken(change.after.oid, change.position)
        history = [one for one in self._history(change.after.oid) if one.position < change.position]
        follow(self._open().targets, change, self._chain(), history, taken, is_new=is_new)
        if change.before is not None and self._rejected.waiting:
            before = describe_source(change.before, change.before_details)
            after = describe_source(change.after, change.details)
            self._rejected.follow(self._conn, before.title, after.title)
            kinds = {one["type"] for one in diff_shapes(change)}
            others = kinds & {"primary_key_changed", "key_columns_changed", "replica_identity_changed"}
            if len(before.key) != len(after.key) or others:
                self._rejected.supersede(self._conn, {}, {after.title: str(change.position)})

    # --- dead letters

    def _keys(self, run: TableChanges, source: SourceTable, positions: Sequence[str]) -> Iterator[Effect]:
        """The keys that these changes touch. For each change, the key of its row comes first."""
        names = [column.name for column in run.relation.columns]
        places = [names.index(name) for name in choose_key(source, self._open().targets.of(source), names)]
        after, before = (_key_texts([side[one] for one in places], len(run)) for side in (settle(run)[0], run.old))
        has_old = (run.op == Op.UPDATE) & (run.old_kind != OldKind.NONE)
        for position, new, old, is_both in zip(positions, after, before, has_old.tolist(), strict=True):
            for one in dict.fromkeys([new, old] if is_both else [new]):
                yield Effect(source.title, one, position)

    def _effects(self, batch: Batch, tables: Collection[str] | None = None) -> Iterator[Effect]:
        """The keys that changes of these tables touch; None: of all tables."""
        for run, source in self._runs(batch):
            if run.op[0] != Op.TRUNCATE and (tables is None or source.title in tables):
                yield from self._keys(run, source, batch.positions().take(pa.array(run.rows)).to_pylist())

    def _supersede(self, batch: Batch) -> None:
        waiting = {table for table, _ in self._rejected.waiting}
        newest = {(one.table, one.key): one.position for one in self._effects(batch, waiting)}
        runs, positions = self._runs(batch), batch.positions()
        cleared = {one.title: positions[int(run.rows[0])].as_py() for run, one in runs if run.op[0] == Op.TRUNCATE}
        self._rejected.supersede(self._conn, newest, cleared)

    def _check_values(self, run: TableChanges, source: SourceTable, positions: pa.ChunkedArray) -> None:
        """RowFault: an update leaves a long value to the target, which may have an outdated one because an earlier
        change was refused."""
        if all(table != source.title for table, _ in self._rejected.waiting):
            return
        lacks = [marks for marks in settle(run)[1] if marks is not None]
        if not lacks:
            return
        texts = positions.take(pa.array(run.rows)).to_pylist()
        partial = dict(zip(texts, np.logical_or.reduce(lacks).tolist(), strict=True))
        whole: dict[str, str] = {}  # by key: the last position with all values
        for table, key, position in self._keys(run, source, texts):
            refused = self._rejected.waiting.get((table, key), ())
            if not partial[position]:
                whole[key] = position
            elif any(whole.get(key, "") < one < position for one in refused):
                raise RowFault(
                    "missing_value",
                    f"an update of table {table} does not bring its long values (unchanged TOAST), and an earlier change of "
                    "the row is a dead letter, so the target may have older ones; replay both in order, or take a "
                    "snapshot of the table",
                )

    def _redeliver(self, position: str, run: TableChanges) -> bool:
        """Apply a past change. Returns whether it was applied, at least to the key of its row."""
        known = self._rejected.keys_of(position)
        if not known:
            return False
        run = self._as_of_now(run)
        source = self._describe(run, str(_LAST))
        effects = list(self._keys(run, source, [position]))
        may = [one.key in known for one in effects]
        if not may[0]:  # its row has changed since, but it has left this key
            run = replace(run, op=np.array([Op.DELETE], np.uint8))
        elif not all(may):
            values, unknown = settle(run)
            run = replace(run, new=values, unchanged=unknown, old_kind=np.array([OldKind.NONE], np.uint8))
        self._check_values(run, source, pa.chunked_array([[position]]))
        self._apply(run, source)
        self._rejected.forget(self._conn, position)
        done = {(one.table, one.key): position for one, ok in zip(effects, may, strict=True) if ok}
        self._rejected.supersede(self._conn, done, {})
        return may[0]

    def _as_of_now(self, run: TableChanges) -> TableChanges:
        """A past change under its table's current name. RowFault: a column was dropped or renamed."""
        latest = [change for change in self._shapes.changes if change.after.oid == run.relation.oid][-1:]
        if not latest:
            return run
        now = latest[0].after
        run = replace(run, relation=replace(run.relation, namespace=now.namespace, name=now.name))
        source = describe_source(now, latest[0].details)
        target = self._open().targets.of(source)
        known = {*source.types, *(target.columns if target else ())}
        gone = [one.name for one in run.relation.columns if one.name not in known]
        if target is not None and gone:
            raise RowFault(
                "undefined_column",
                f"the event of table {source.title} has the column {', '.join(gone)}, which the table no longer has",
            )
        return run


def _is_reload(batch: Batch, run: TableChanges) -> bool:
    """Whether a TRUNCATE starts the reload of its table, rather than being one of the source."""
    return Position.parse(batch.positions()[int(run.rows[0])].as_py()).is_snapshot


def _key_texts(columns: Sequence[pa.Array], count: int) -> list[str]:
    """Keys in the form of `pgcdc_rejected`; empty for a table without a key."""
    if not columns:
        return [""] * count
    return [orjson.dumps(key).decode() for key in zip(*(one.to_pylist() for one in columns), strict=True)]
