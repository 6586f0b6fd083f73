"""For tests of pg_table's apply mode: a real server's stream, and a target that they are applied to. No Spark."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from databases import drop_database
from psycopg import sql

from pgcdc.core.errors import ReloadNeeded
from pgcdc.core.position import Position
from pgcdc.core.relation import Relations, ShapeChange, ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.event.batch import Batch
from pgcdc.event.changes import read_changes
from pgcdc.event.edits import SimpleChain
from pgcdc.event.events import block_schema, events_of
from pgcdc.event.forms import FORMS, form_column, read_shapes
from pgcdc.event.frame import EventOptions, make_frame
from pgcdc.event.lines import IdSeed
from pgcdc.event.shape import Described
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.postgres.database import connect, name_table, quote_qualified
from pgcdc.sink.pg_table.apply import Applier
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.sink.pg_table.target import Blame, blame, describe_fault
from pgcdc.source.postgres.options import ToastOptions
from pgcdc.source.postgres.setup.guard import ShapeObserver
from pgcdc.source.postgres.setup.shapes import read_catalog
from pgcdc.source.postgres.setup.slots import create_slot
from pgcdc.source.postgres.setup.tables import find_published
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.releases import number_rows, snapshot_rows, truncated_rows
from pgcdc.source.postgres.toast.resolver import ToastStep
from pgcdc.source.postgres.wire.stream import Capture

_NUMBERS = itertools.count(1)
SEED = IdSeed.of("1", "applying")


@contextmanager
def two_databases(server: EmbeddedPostgres) -> Iterator[tuple[str, str]]:
    """The URLs of a source and a target, gone afterwards."""
    number = next(_NUMBERS)
    names = [f"apply_source_{number}", f"apply_target_{number}"]
    with psycopg.connect(server.url(), autocommit=True) as admin:
        for name in names:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield server.url(names[0]), server.url(names[1])
        finally:
            for name in names:
                drop_database(admin, name)


class Source:
    """A database whose changes are read as the capture process reads them, from its creation on."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.sql = connect(url)
        self.sql.execute("CREATE PUBLICATION p FOR ALL TABLES")
        slot = f"slot_{next(_NUMBERS)}"
        with psycopg.connect(f"{url}?replication=database", autocommit=True) as conn:
            lsn = create_slot(conn, slot)
        self.state = StateDir(folder)
        self.state.create()
        self.start = self.end = Position.end(lsn)
        self._toast = ToastStep(ToastOptions(), ("p",), self.state, resume=Position.end(lsn), instance="1")
        self._observer = ShapeObserver(self.state.shapes_file, self.start, ["p"])
        self._history = ShapeHistory(self.state.shapes_file)
        self._relations = Relations()
        self._capture = Capture(
            url, slot=slot, publications=["p"], start_lsn=lsn, confirmed_lsn=lsn, relations=self._relations
        )
        self._capture.connect()

    def close(self) -> None:
        self._capture.close()
        self.sql.close()

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.sql.execute(statement.encode())

    def read(self, *statements: str) -> Batch:
        """Run the statements; everything since the last call."""
        self.run(*statements)
        self.sql.execute("SELECT pg_logical_emit_message(true, 'flush', '')")
        row = self.sql.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        self._capture.target_lsn = target = int(row[0])
        start, tables, shapes = self.end, [], []
        deadline = time.monotonic() + 120
        while self._capture.handed_out_lsn < target:
            assert time.monotonic() < deadline
            batch = self._capture.receive_batch(timeout_s=0.05)
            if batch is None:
                self._capture.ask_for_progress()
                continue
            for piece in self._toast.resolve(batch, self.sql):
                self._observer.observe(piece, self.sql)
                self.end = max(self.end, piece.end)
                if piece.rows:
                    self._history.refresh()
                    made, beside = tables_of(piece, Described(changes=tuple(self._history.changes)))
                    tables.append(made)
                    shapes.append(beside)
        empty = pa.schema([("position", pa.string()), *FORMS["tables"]]).empty_table()
        return Batch(start, self.end, pa.concat_tables([empty, *tables]), read_shapes(shapes))

    def described_again(self, table: str, statement: str) -> ShapeChange:
        """What the catalog says otherwise after a statement than when a row told the table's shape last."""
        self._history.refresh()
        last = [change for change in self._history.changes if change.after.name == table][-1]
        self.run(statement)
        details = read_catalog(self.sql, [last.after], ["p"]).describe(last.after)
        return ShapeChange(last.position, last.after, last.after, details, last.details)

    def whole_table(self, oid: int) -> Batch:
        """The rows of a table as its reload brings them, behind everything that was read."""
        table = find_published(self.sql, ["p"], oid)
        assert table is not None, oid
        with self.sql.transaction():
            statement = copy_statement(table.columns, table.source, [])
            values = list(copy_rows(self.sql, statement, len(table.columns)))
        parts = [truncated_rows(), *(snapshot_rows(one, len(table.columns)) for one in values)]
        start, made, shapes, ordinal = self.end, [], [], 0
        for part in parts:
            piece = number_rows(part, self.end.commit, ordinal, table.relation, self._relations, time_us=0)
            self._observer.observe(piece, self.sql)
            self._history.refresh()
            rows, beside = tables_of(piece, Described(changes=tuple(self._history.changes)))
            made.append(rows)
            shapes.append(beside)
            ordinal += part.num_rows
        self.end = Position.behind(self.end.commit)
        return Batch(start, self.end, pa.concat_tables(made), read_shapes(shapes))


def tables_of(piece: Any, described: Described) -> tuple[pa.Table, str]:
    """The changes in the form of tables, and the shapes beside them."""
    counts = piece.transactions.column("rows").to_numpy()
    owners = piece.transactions.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
    changes = piece.data.combine_chunks().to_batches()[0]
    options = EventOptions(described=described)
    chain = SimpleChain((), (), ("tables",))
    frame = make_frame(changes, owners, piece.relations.shapes, options)
    made = events_of(frame, SEED, block_schema([chain]), options, [chain])
    name = form_column(0, "tables")
    column = made.column(name)
    rows = pa.table({"position": made.column("position"), name: column}).filter(column.is_valid())
    struct = rows.column(name)
    fields = dict(zip(struct.type.names, struct.flatten(), strict=True))
    return pa.table({"position": rows.column("position"), **fields}), made.schema.metadata[name.encode()].decode()


class Mirror:
    """A target, as the sink drives the engine."""

    def __init__(self, url: str, state: StateDir, **options: Any) -> None:
        self.url = url
        self.said: list[str] = []
        self.options = PgTableOptions(mode="apply", **options)
        self.shapes = ShapeHistory(state.shapes_file)
        self.tables: set[tuple[str, str]] = set()
        self.held: dict[int, str] = {}  # Tables that come whole later, and why
        self.restart()

    def restart(self) -> None:
        """A new process, with a session of its own."""
        self.sql = connect(self.url)
        self.sql.execute("SET session_replication_role = replica")
        self.begin()

    def begin(self) -> None:
        """What is known of the target is forgotten, but for what was committed."""
        self.applier = Applier(
            self.sql, self.options, self.shapes, ("mirror", ""), self.said.append, self.tables, held=lambda: self.held
        )

    def close(self) -> None:
        self.sql.close()

    def apply(self, batch: Batch, *refused: Batch) -> None:
        """As the runner does it: a table that cannot follow is left out until `reload`."""
        while True:
            try:
                with self.sql.transaction():
                    found = self.applier.apply(self.without_held(self._as_tables(batch)), refused)
                break
            except ReloadNeeded as error:
                self.held |= {oid: reason for oid, (_, reason) in error.tables.items()}
        self.tables = self.applier.tables = found

    def without_held(self, batch: Batch) -> Batch:
        out = [number for number, shape in batch.shapes.items() if shape.relation.oid in self.held]
        if not out:
            return batch
        is_out = pc.is_in(batch.events.column("relation"), pa.array(out, pa.int32()))
        return replace(batch, events=batch.events.filter(pc.invert(is_out)))

    def reload(self, source: Source) -> None:
        """Replace what was left out by what the source has now."""
        for oid in list(self.held):
            del self.held[oid]
            self.apply(source.whole_table(oid))

    def _as_tables(self, batch: Batch) -> Batch:
        """As the runner does it: dead letters, and what tests change, are lines."""
        self.shapes.refresh()
        return batch if batch.form == "tables" else read_changes(batch, self.shapes)

    def deliver(self, batch: Batch) -> list[tuple[str, str, str]]:
        """As runner and sink do it together: what is refused is found by halves and noted. (position, kind, text)."""
        try:
            self.apply(batch)
            return []
        except psycopg.Error as error:
            if blame(error) not in (Blame.EVENT, Blame.SHAPE):
                raise
            if len(batch) > 1:
                half = batch.first(len(batch) // 2)
                return [*self.deliver(half), *self.deliver(batch.after(half.end))]
            position = batch.positions()[0].as_py()
            batch = self._as_tables(batch)
            relation = next(batch.tables()).relation
            kind, text = describe_fault(error, name_table(relation.namespace, relation.name))
        self.apply(batch.without([position]), batch)
        return [(position, kind, text)]

    def redeliver(self, batch: Batch) -> set[str]:
        with self.sql.transaction():
            return self.applier.redeliver(self._as_tables(batch))

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return self.sql.execute(statement.encode()).fetchall()


def as_letters(batch: Batch) -> Batch:
    """As dead letters come: nothing but the rendered events."""
    return Batch(batch.start, batch.end, pa.table({"position": batch.positions(), "line": pa.array(batch.texts())}))


def content(conn: psycopg.Connection[Any], table: tuple[str, str], columns: list[str] | None = None) -> list[str]:
    """All rows, as PostgreSQL writes them, in one order."""
    if columns is None:
        found = conn.execute(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped "
            'ORDER BY attname COLLATE "C"',
            (quote_qualified(*table),),
        ).fetchall()
        columns = [name for (name,) in found]
    listed = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
    statement = f'SELECT ROW({listed})::text COLLATE "C" FROM {quote_qualified(*table)} ORDER BY 1'
    return [f"({','.join(columns)})", *(row for (row,) in conn.execute(statement.encode()))]


def cuts(batch: Batch, seed: int, most: int = 6) -> Iterator[Batch]:
    """The batch in some pieces that follow each other, cut anywhere."""
    chance = random.Random(seed)
    count = len(batch)
    places = sorted({chance.randint(0, count) for _ in range(chance.randint(0, most))} - {0, count})
    begin = 0
    for place in [*places, count]:
        yield batch.slice(begin, place)
        begin = place
