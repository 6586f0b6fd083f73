"""Watches what changes on the server while we capture: the slot and publications (checked on connecting, and every few
seconds), tables' shapes (recorded before their rows become visible), and the time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Error

from pgcdc.core.errors import ConnectionLost, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import SCHEMA_SUB, Kind, Position
from pgcdc.core.relation import Op, Relation, ShapeChange, ShapeHistory, append_shapes, cut_tail
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.event.shape import diff_shapes
from pgcdc.postgres.database import Connection
from pgcdc.source.postgres.setup.fingerprint import SlotDetails, check_identity, check_unchanged
from pgcdc.source.postgres.setup.shapes import CatalogLook, read_catalog
from pgcdc.source.postgres.setup.slots import check_not_ahead, check_usable, get_slot, identify, slot_gone
from pgcdc.spool.consumers import Consumers
from pgcdc.spool.segment import CaptureBatch


@contextmanager
def lost_on_error() -> Iterator[None]:
    """A psycopg error on a connection that worked before means that the connection is lost. Also works as a decorator."""
    try:
        yield
    except Error as error:
        raise ConnectionLost(f"the server ended the connection: {' '.join(str(error).split())}") from error


class Guard:
    """Raises GapError as soon as continuing would skip changes."""

    def __init__(self, state: StateDir, identity: Identity, consumers: Consumers, *, temporary: bool) -> None:
        self._state = state
        self._identity = identity
        self._consumers = consumers
        self._temporary = temporary
        self.server_lsn = 0  # The server's WAL position when we last looked
        self.wal_sender_timeout_s = 60.0

    def check_server(self, replication: Connection) -> None:
        """Raise unless this walsender belongs to the known server."""
        known = self._identity
        check_identity(known, *identify(replication), replication.info.dbname, known.stream)

    @lost_on_error()
    def check(self, sql: Connection) -> None:
        """Raise unless slot and publications are unchanged. Takes a few cheap queries."""
        row = sql.execute(
            "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn, setting::int FROM pg_settings "
            "WHERE name = 'wal_sender_timeout'"
        ).fetchone()
        assert row is not None
        self.server_lsn, timeout_ms = int(row[0]), row[1]
        self.wal_sender_timeout_s = timeout_ms / 1000 or 60.0
        self._check_publications(sql)
        if self._temporary:
            return
        slot = get_slot(sql, self._identity.stream)
        if slot is None:
            raise slot_gone(self._identity.stream)
        check_usable(slot, self._identity.database)
        check_not_ahead(slot, self._consumers.confirmed_lsn)

    def _check_publications(self, sql: Connection) -> None:
        """Raise if they were narrowed; remember additions, so that their removal is noticed."""
        lock = Lock(self._state.identity_lock)
        if lock.acquire(timeout_s=0) is None:
            return  # the driver is changing them: look again in a few seconds
        try:
            known = self._state.identity()
            assert known is not None
            details = SlotDetails.of(known)
            now = check_unchanged(sql, details.publications, details.planned, is_open=details.selection.is_open)
            if now != details.publications:
                self._state.save_identity(details.put_into(known, publications=now, planned=None))
        finally:
            lock.release()

    def is_held_by_us(self, sql: Connection) -> bool:
        """Whether the slot's reader is our own walsender from before a crash (or one that has just ended)."""
        slot = get_slot(sql, self._identity.stream)
        return slot is None or slot.reader in (None, f"pgcdc {self._identity.instance}")


# --- how far time has come
#
# Queries need this to close windows while nothing happens: a server time, and an LSN after which nothing was committed
# before that time. The time in a keepalive is not suitable: a lagging walsender sends the current time although earlier
# commits are still to come.

_TIME = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8"
_PLACE = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn, current_setting('wal_block_size')::int8"
_PAGE_HEADERS = (24, 40)
MARGIN_US = 1_000_000
"""A commit takes its time slightly before its place in the WAL (a few milliseconds in practice), so we report a time
this much earlier."""


class Clock:
    """Reads the server's clock, and reports a reading once everything up to its LSN has been read."""

    def __init__(self) -> None:
        self.reached: tuple[int, int] | None = None  # (lsn, microseconds since 1970)
        self._asked: tuple[int, int] | None = None

    def ask(self, sql: Connection) -> int | None:
        """Take a new reading unless one is pending; returns the LSN to reach for it."""
        if self._asked is not None:
            return None
        moment = sql.execute(_TIME).fetchone()  # taken before the WAL position
        assert moment is not None
        lsn = wal_place(sql)
        self._asked = (lsn, int(moment[0]) - MARGIN_US)
        return lsn

    def see(self, lsn: int) -> None:
        if self._asked is not None and lsn >= self._asked[0]:
            self.reached, self._asked = self._asked, None


def wal_place(sql: Connection) -> int:
    """The WAL insert position: every visible commit is before it."""
    row = sql.execute(_PLACE).fetchone()
    assert row is not None
    lsn, page = int(row[0]), int(row[1])
    # The next record starts after the header of a page not yet written: no record ends inside the header.
    return lsn - lsn % page if lsn % page in _PAGE_HEADERS else lsn


# --- shapes of tables
#
# Every row names the version of its relation, so a change of shape is seen exactly where it matters: at the first row
# that has it, in commit order, whatever ALTER TABLE was rolled back. What the stream does not say (column numbers,
# whether a column may be null, the name of a type) is read from the catalog at that moment. What no row shows, a mark
# of the watch does (`setup/watch.py`): it has the shape of its table and the catalog's description of it.


_Seen = tuple[Position, int, Relation]
"""A shape at its first appearance, with its transaction; 0: outside a transaction."""


class ShapeObserver:
    """Sees every batch in commit order. After a crash it sees batches again, but records each change only once."""

    def __init__(self, path: Path, resume: Position, publications: Sequence[str] = ()) -> None:
        """The stream resumes at `resume`, and the shapes in force there come from the history."""
        cut_tail(path)
        self._path, self._publications = path, publications
        self._history = ShapeHistory(path)
        self._history.refresh()
        self._current: dict[int, ShapeChange] = {}
        for change in self._history.between(Position.at(0, 0), resume):
            self._current[change.after.oid] = change
        self._in_force: set[int] = set()  # current versions, as far as seen
        self.on_mark: Callable[[Relation, Relation], object] = lambda before, after: None
        """Called when a mark gives a table another shape."""
        self.changes = sum(change.before is not None for change in self._history.changes)
        """Number of shape changes since the state directory was created, not counting first sightings of tables."""

    def observe(self, batch: CaptureBatch, sql: Connection) -> None:
        """Durably record which tables change shape in this batch. Raises ConnectionLost if the catalog is unreachable:
        then nothing has happened, and the batch may be passed again."""
        if batch.part is None:
            return
        rows = batch.data if batch.part.batch is None else pa.Table.from_batches([batch.part.batch])
        if batch.end.is_snapshot and rows.column("op").slice(0, 1).to_pylist() == [Op.SCHEMA_CHANGE]:
            self._take_mark(batch, rows)
            return
        versions = [version for version in pc.unique(rows.column("relation")).to_pylist() if version >= 0]
        if self._in_force.issuperset(versions):
            return
        # The rows at which a table's shape changes, in order, and the versions in force at the end.
        oids = {batch.relations[version].oid for version in versions if version not in self._in_force}
        mine = [version for version in versions if batch.relations[version].oid in oids]
        numbers = rows.column("relation").to_numpy()
        places = np.flatnonzero(np.isin(numbers, mine))
        places = places[np.append(True, np.diff(numbers[places]) != 0)]
        shapes = {oid: known.after for oid in oids if (known := self._current.get(oid)) is not None}
        found, lasts = [], dict[int, int]()
        for row, version in zip(places.tolist(), numbers[places].tolist(), strict=True):
            shape = batch.relations[version]
            if shapes.get(shape.oid) != shape:
                found.append((*_place(batch, rows, row), shape))
            shapes[shape.oid], lasts[shape.oid] = shape, version
        self._record(found, sql)
        self._in_force -= {version for version in self._in_force if batch.relations[version].oid in oids}
        self._in_force.update(lasts.values())

    @property
    def current(self) -> Mapping[int, ShapeChange]:
        """The records of the shapes in force, by oid. Their catalog details may be newer than those in the file."""
        return self._current

    def is_taken(self, shape: Relation) -> bool:
        """Whether another table has had this name since the table was last seen: then it must have a different name by
        now."""
        mine = self._current.get(shape.oid)
        return mine is not None and any(
            (one.after.namespace, one.after.name) == (shape.namespace, shape.name) and one.position > mine.position
            for oid, one in self._current.items()
            if oid != shape.oid
        )

    def taken(self) -> set[int]:
        """The tables for which `is_taken` is true."""
        owners: dict[tuple[str, str], ShapeChange] = {}
        for one in sorted(self._current.values(), key=lambda one: one.position):
            owners[one.after.namespace, one.after.name] = one
        return self._current.keys() - {one.after.oid for one in owners.values()}

    def adopt(self, oid: int, details: dict[str, Any]) -> None:
        """The catalog shows no difference that matters: take its newer details (a filenode) without writing a record."""
        self._current[oid] = replace(self._current[oid], details=details)

    def _take_mark(self, batch: CaptureBatch, rows: pa.Table) -> None:
        """Record the shape in a mark. A mark is always the only row of its batch."""
        version = rows.column("relation")[0].as_py()
        shape, position = batch.relations[version], _place(batch, rows, 0)[0]
        last, details = self._current.get(shape.oid), json.loads(rows.column("prefix")[0].as_py())
        is_known = last is not None and not is_other(last, shape, details) and not self.is_taken(shape)
        if self._history.at(position) is None and is_known:
            self.adopt(shape.oid, details)  # a new object tells whoever asked for the mark that it came
            return
        self._append([(position, 0, shape)], lambda shape, last, xid: details)
        if last is not None:
            self.on_mark(last.after, shape)
        self._in_force = {one for one in self._in_force if batch.relations[one].oid != shape.oid} | {version}

    def _record(self, found: list[_Seen], sql: Connection) -> None:
        fresh = [shape for position, _, shape in found if self._history.at(position) is None]
        with lost_on_error():
            look = read_catalog(sql, fresh, self._publications) if fresh else CatalogLook()
        self._append(found, look.describe)

    def _append(
        self,
        found: Iterable[_Seen],
        describe: Callable[[Relation, dict[str, Any] | None, int], dict[str, Any] | None],
    ) -> None:
        """Record these shapes, unless the history has them. `describe` also gets the details of the previous shape, and
        the transaction that shows the new one."""
        current: dict[int, ShapeChange] = {}
        records = []
        for position, xid, shape in found:
            known = self._history.at(position)
            if known is None:
                last = current.get(shape.oid) or self._current.get(shape.oid)
                before, before_details = (last.after, last.details) if last is not None else (None, None)
                known = ShapeChange(position, shape, before, describe(shape, before_details, xid), before_details)
                records.append(known)
            elif known.after != shape:
                raise StateError(
                    f"table {shape.namespace}.{shape.name} has another shape at {position} than recorded in "
                    f"{self._path}",
                    "The file belongs to another slot, or the server decodes its WAL differently than "
                    "before: please report it. To continue, start over with a new slot: pgcdc resync "
                    "--new-slot",
                )
            current[shape.oid] = known
        if records:
            hit("shapes.before_append")
            append_shapes(self._path, records)
            hit("shapes.after_append")
            self._history.refresh()
            self.changes += sum(record.before is not None for record in records)
        # The same records as in the file, so that a restart continues identically.
        self._current |= {oid: self._history.at(record.position) or record for oid, record in current.items()}


def is_other(known: ShapeChange, shape: Relation, details: dict[str, Any] | None) -> bool:
    """Whether a table differs from what is known."""
    return shape != known.after or bool(
        diff_shapes(ShapeChange(known.position, shape, known.after, details, known.details))
    )


def _place(batch: CaptureBatch, rows: pa.Table, row: int) -> tuple[Position, int]:
    """The position directly before a row, and its transaction."""
    ends = np.cumsum(batch.transactions.column("rows").to_numpy())
    transaction = int(np.searchsorted(ends, row, side="right"))
    commit, kind, xid = (batch.transactions.column(name)[transaction].as_py() for name in ("commit", "kind", "xid"))
    return Position(commit, Kind(kind), rows.column("ordinal")[row].as_py() - 1, SCHEMA_SUB), xid
