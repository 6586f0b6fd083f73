"""Reloads: some adapters replace their copy of one table, whatever it contained before, while the stream continues.

1. The window opens: from now on every change of the table that goes to the spool is also kept here.
2. The whole table is read in one snapshot, into files.
3. When the stream has passed everything that the snapshot could see, a TRUNCATE is released, then the rows file by
   file, and last the changes of the window that the snapshot did not see. These releases are addressed: other adapters
   do not receive them.

Between the first and the last release an adapter accepts nothing else for this table (`sink/holds.py`), so its copy is
then the table's content at that position of the stream. No key is needed, and no row is compared. If something
interrupts it (a crash, an ALTER TABLE), the reload just begins again: the TRUNCATE comes first each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.errors import ConnectionLost, PgcdcError, reconnect_delay_s
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relation, ShapeChange
from pgcdc.core.wording import counted
from pgcdc.source.postgres.snapshot.asking import NeverReadable
from pgcdc.source.postgres.snapshot.reader import ChunkRead, Readers, TableOrder
from pgcdc.source.postgres.snapshot.releases import (
    Release,
    Releases,
    Staged,
    schema_mark,
    snapshot_mark,
    truncated_rows,
)
from pgcdc.source.postgres.snapshot.requests import RequestQueue, RequestState
from pgcdc.source.postgres.snapshot.window import StreamedXids, is_visible
from pgcdc.spool.schema import CHANGES
from pgcdc.spool.segment import CaptureBatch

logger = logging.getLogger("pgcdc.capture")

WINDOW_BYTES = 32 << 20  # How much a window keeps in memory; the rest goes to disk
AGAIN_S = 0.2  # The catalog may need up to a second to show why a table differs
_KEPT = pa.schema([*CHANGES, ("xid", pa.int64())])


class TableWindow:
    """The changes of one table since it was opened, in order, with their transactions."""

    def __init__(self, path: Path, oid: int) -> None:
        self._path, self.oid = path, oid
        self.relations: set[Relation] = set()  # The shapes of these changes
        self._parts: list[pa.RecordBatch] = []
        self._nbytes = 0
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def see(self, batch: CaptureBatch) -> None:
        if batch.part is None:
            return
        data = batch.part.load_batch()
        versions: npt.NDArray[np.int32] = data.column("relation").to_numpy()
        mine = [one for one in np.unique(versions).tolist() if one >= 0 and batch.relations[one].oid == self.oid]
        if not mine:
            return
        self.relations.update(batch.relations[one] for one in mine)
        rows = np.flatnonzero(np.isin(versions, mine))
        counts = batch.transactions.column("rows").to_numpy()
        xids = np.repeat(batch.transactions.column("xid").to_numpy(), counts)[rows]
        taken = data.take(pa.array(rows))  # copied: a slice would keep the whole batch in memory
        self._parts.append(pa.RecordBatch.from_arrays([*taken.columns, pa.array(xids, pa.int64())], schema=_KEPT))
        self._nbytes += taken.nbytes
        if self._nbytes > WINDOW_BYTES:
            self._writer = self._writer or pa.ipc.new_stream(self._path, _KEPT)
            for part in self._parts:
                self._writer.write_batch(part)
            self._parts, self._nbytes = [], 0

    def unseen(self, snapshot: str) -> Iterator[pa.RecordBatch]:
        """The changes that a snapshot (a pg_snapshot) does not see. Closes the window."""
        if self._writer is not None:
            self._writer.close()
            with pa.ipc.open_stream(self._path) as stream:
                for part in stream:
                    yield from _unseen(part, snapshot)
        for part in self._parts:
            yield from _unseen(part, snapshot)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._path.unlink(missing_ok=True)


def _unseen(part: pa.RecordBatch, snapshot: str) -> Iterator[pa.RecordBatch]:
    left = part.filter(pa.array(~is_visible(part.column("xid").to_numpy(), snapshot)))
    if left.num_rows:
        yield pa.RecordBatch.from_arrays(left.columns[:-1], schema=CHANGES)


def _place_of(shape: ShapeChange | None) -> Position | None:
    return shape.position if shape is not None else None


@dataclass(slots=True)
class _Job:
    """A reload in progress."""

    state: RequestState
    window: TableWindow
    xids: npt.NDArray[np.uint32]  # Transactions streamed before the window was opened
    shape: ShapeChange | None  # The record of the table's shape: if it changes, the rows are outdated
    read: ChunkRead | None = None
    files: list[Staged] = field(default_factory=list)  # Still to be released
    mark: Release | None = None  # The catalog's description from the moment they were read
    first: Release | None = None  # The TRUNCATE

    @property
    def id(self) -> str:
        return self.state.id


class Reloads:
    """One reload after another, in the capture's loop: every method returns quickly."""

    def __init__(
        self, folder: Path, queue: RequestQueue, releases: Releases, readers: Readers, xids: StreamedXids
    ) -> None:
        self._folder, self._queue, self._releases, self._xids = folder, queue, releases, xids
        self.readers = readers
        self.shape_of: Callable[[int], ShapeChange | None] = lambda oid: None
        """The record of a table's shape at the stream's position."""
        self.is_taken: Callable[[Relation], bool] = lambda shape: False
        """Whether another table has this name at the stream's position. The new name of this table is only reported
        later."""
        self._job: _Job | None = None
        self._due, self._failures = 0.0, 0

    @property
    def target_lsn(self) -> int:
        """The LSN that the stream must reach; 0 if none is required."""
        return self._job.read.lsn if self._job is not None and self._job.read is not None else 0

    def due_s(self) -> float:
        """Seconds until `step` may have something to do without being called for another reason."""
        if self._job is not None and self._job.read is not None:
            return 0.02
        is_next = self._job is None and self._queue.next(is_reload=True) is not None
        return max(0.0, self._due - time.monotonic()) if is_next else 60.0

    def see(self, batch: CaptureBatch) -> None:
        """Take changes of the stream before they become visible."""
        if self._job is not None:
            self._job.window.see(batch)

    def released(self, release: Release) -> None:
        """The release is visible, and the shape of its rows is recorded."""
        if self._job is not None and release in (self._job.mark, self._job.first):
            self._job.shape = self.shape_of(self._job.window.oid)

    def lose(self) -> None:
        """The stream's connection is gone, and the next one may repeat changes: begin again."""
        self._drop(0.0)

    def close(self) -> None:
        self.readers.close()
        if self._job is not None:
            self._job.window.close()

    def step(self, end: Position, *, may_work: bool) -> Release | None:
        """Continue, like `BesideStream.step`."""
        self._collect()
        job = self._job
        if not may_work:
            return None
        if job is None:
            if time.monotonic() >= self._due:
                self._begin()
            return None
        if job.state.id not in {one.id for one in self._queue.entries() if not one.is_ended}:  # a user stopped it
            self._drop(0.0)
        elif job.read is not None and end.commit >= job.read.lsn and Releases.has_place(end):
            is_same = _place_of(self.shape_of(job.window.oid)) == _place_of(job.shape)
            is_same = is_same and not self.is_taken(job.read.table.relation)
            if is_same and job.window.relations <= {job.read.table.relation}:
                return self._release(job, job.read, end)
            logger.info("table %s was altered while it was read; reading it again", job.read.table.title)
            self._drop(AGAIN_S)
        return None

    def _begin(self) -> None:
        state = self._queue.next(is_reload=True)
        if state is None:
            self.readers.close()  # do not keep an idle process
            return
        if state.is_retried:
            state = self._queue.retry(state.id)
        window = TableWindow(self._folder / f"window-{state.id}.arrow.partial", state.oid)
        self._job = _Job(state, window, self._xids.copy(), self.shape_of(state.oid))
        self.readers.start(TableOrder(state.id, state.request.table, state.oid, self._folder))

    def _collect(self) -> None:
        taken = self.readers.take()
        if taken is None:
            return
        order, found = taken
        job = self._job
        if job is None or order.id != job.id or job.read is not None:  # type: ignore[union-attr]
            if isinstance(found, ChunkRead):
                self._remove(found.files)
        elif isinstance(found, ChunkRead):
            if not is_visible(job.xids.astype(np.int64), found.snapshot).all():
                # A streamed commit is not visible yet. With synchronous replication that may take long.
                self._remove(found.files)
                self._drop(reconnect_delay_s(self._failures))
                return
            job.read, job.files, self._failures = found, found.files, 0
            self._queue.begin(job.id, oid=found.table.relation.oid, estimated_rows=found.rows)
            hit("reload.read")
        else:
            assert isinstance(found, PgcdcError)
            self._drop(reconnect_delay_s(self._failures))
            if not isinstance(found, ConnectionLost) and not self._queue[job.id].is_ended:
                logger.warning("reload %s: %s", job.id, found)
                self._queue.fail(job.id, str(found), for_good=isinstance(found, NeverReadable))

    def _drop(self, delay_s: float) -> None:
        """Abandon this attempt; the request remains."""
        job, self._job = self._job, None
        if job is not None:
            self._due = time.monotonic() + delay_s
            self._failures += delay_s > 0
            self._remove(job.files)
            job.window.close()
            if job.read is None:
                self.readers.close()  # it may read for a long time
                self._releases.remove_unknown(())

    def _remove(self, files: list[Staged]) -> None:
        for one in files:
            (self._folder / one.file).unlink(missing_ok=True)

    def _release(self, job: _Job, read: ChunkRead, end: Position) -> Release:
        relation, request = read.table.relation, job.state.request
        if job.mark is None and read.details is not None:
            # Released to all adapters. The table may have been altered since it was read, without a trace in the shape
            # of its rows.
            job.mark = self._releases.add(end, self._releases.stage([schema_mark(read.details)]), relation)
            return job.mark
        is_last = job.first is not None and not job.files
        if job.first is None:
            mark = snapshot_mark(Op.SNAPSHOT_STARTED, job.id, "reload", relation, 0)
            staged = self._releases.stage([mark, truncated_rows()], read.time_us)
        elif job.files:
            staged = job.files.pop(0)
        else:
            mark = snapshot_mark(Op.SNAPSHOT_COMPLETED, job.id, "reload", relation, read.rows)
            staged = self._releases.stage(chain(job.window.unseen(read.snapshot), [mark]))
        whose = request.adapters
        release = self._releases.add(end, staged, relation, adapters=whose, reload=job.id, is_last=is_last)
        job.first = job.first or release
        hit("reload.released")
        rows = read.rows - sum(one.rows for one in job.files)
        self._queue.advance(job.id, is_last=is_last, chunks=self._queue[job.id].chunks + 1, rows=rows)
        if is_last:
            logger.info("table %s was reloaded for %s: %s", read.table.title, ", ".join(whose), counted(rows, "row"))
            job.window.close()
            self._job = None
        return release
