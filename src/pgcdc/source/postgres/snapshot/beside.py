"""Rows beside the stream: tables are read again by key, chunk by chunk, while changes continue.

1. The window opens: from now on all changes of the table that go to the spool are also remembered (`window.py`).
2. A chunk of the table is read in its own snapshot (`reader.py`). Meanwhile the stream continues.
3. When the stream has passed everything that the snapshot could see, the window is folded into the chunk: now its rows
   are exactly the table's content at this position of the stream. They are released there, and the next chunk begins.

Nothing is ever released at a position that somebody has already seen without it: a chunk waits for an LSN that the
server reached after this process started.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.errors import ConnectionLost, PgcdcError, SourceError, reconnect_delay_s
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.relation import Op
from pgcdc.core.wording import counted
from pgcdc.source.postgres.options import PostgresOptions
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.asking import NeverReadable, describe
from pgcdc.source.postgres.snapshot.reader import CHUNK_BYTES, ChunkOrder, ChunkRead, Readers
from pgcdc.source.postgres.snapshot.releases import Release, Releases, Staged, deleted_rows, schema_mark, snapshot_mark
from pgcdc.source.postgres.snapshot.requests import RequestQueue, RequestState
from pgcdc.source.postgres.snapshot.window import (
    Chunk,
    MovedKeys,
    StreamedXids,
    Window,
    is_visible,
    key_moves,
    read_candidates,
    rows_of,
)
from pgcdc.spool.schema import CHANGES
from pgcdc.spool.segment import CaptureBatch

logger = logging.getLogger("pgcdc.capture")

FIRST_ROWS, MIN_ROWS, MAX_ROWS = 1_000, 1_000, 10_000
"""Chunks are small, because a change committed after a chunk waits until Spark has delivered the chunk."""
CHUNK_S = 0.1
MAX_REST_S = 1.0
KEYS_PER_CHUNK = 5_000
MAX_DISCARDS = 8
RETRY_S, MAX_UNSEEN_S = 0.1, 5.0


@dataclass(slots=True)
class _Attempt:
    """A chunk being read."""

    id: str
    order: ChunkOrder
    window: Window | None  # None: only the table's description is read
    xids: npt.NDArray[np.uint32]  # Transactions streamed before the window was opened
    keys_done: int  # For a chunk of given keys: its end in their file
    begun: float = field(default_factory=time.monotonic)
    read: ChunkRead | None = None
    chunk: Chunk | None = None
    is_cancelled: bool = False


class BesideStream:
    """Works through the requests, one after another."""

    def __init__(
        self, options: PostgresOptions, folder: Path, queue: RequestQueue, releases: Releases, readers: Readers
    ) -> None:
        self._options, self._folder = options, folder
        self._queue, self._releases, self._readers = queue, releases, readers
        self._attempt: _Attempt | None = None
        self._known: tuple[str, PublishedTable | None] = ("", None)
        """The table of a request; the stream has passed the moment at which it was looked up."""
        self.xids = StreamedXids()
        self._moved: dict[str, MovedKeys] = {}
        self._size, self._due = FIRST_ROWS, 0.0
        self._discards = self._retries = 0
        self._pace: tuple[str, float, int] = ("", 0.0, 0)
        self._recover()

    def _recover(self) -> None:
        """Catch up on releases that a crash kept out of the request file."""
        for note, _ in self._releases.found:
            known = {one.id: one for one in self._queue.entries()}.get(note.get("request", ""))
            if known is not None and note["after"]["chunks"] > known.chunks:
                self._advance(known.id, note["after"])
        self._queue.retry_all()
        self._forget_ended()

    @property
    def target_lsn(self) -> int:
        """The LSN that the stream must reach; 0 if none is required."""
        read = self._attempt.read if self._attempt is not None else None
        return read.lsn if read is not None else 0

    @property
    def is_pending(self) -> bool:
        """Whether any requested snapshot is still to be read; one that waits for a retry does not count."""
        return any(one.status in ("queued", "running") and not one.error for one in self._queue.entries())

    def due_s(self) -> float:
        """Seconds until `step` may have something to do without being called for another reason."""
        idle = self._attempt is None and self._queue.next() is not None
        return max(0.0, self._due - time.monotonic()) if idle else 60.0

    def see(self, batch: CaptureBatch) -> None:
        """Take changes of the stream before they become visible."""
        if batch.part is None:
            return
        self.xids.add(batch.transactions.column("xid").to_numpy())
        window = self._attempt.window if self._attempt is not None else None
        going = [one for one in self._queue.entries() if one.oid and not one.is_ended]
        moving = [one for one in going if not one.request.keys_file and one.request.kind != "reload"]
        oids = {one.oid for one in moving} | ({window.oid} if window is not None else set())
        if not oids:
            return
        for rows, relation in rows_of(batch, oids):
            if window is not None and window.oid == relation.oid:
                window.see(rows, relation)
            mine = [one for one in moving if one.oid == relation.oid]
            if mine and (moves := key_moves(rows, relation)):
                columns = [column.name for column in relation.columns if column.is_key]
                for one in mine:
                    self._moved_of(one.id).add(moves, columns, one.keys_done)

    def lose(self) -> None:
        """The stream's connection is gone: nothing may be released that the server might lose in a crash."""
        if self._attempt is not None:
            self._attempt.is_cancelled = True

    def step(self, end: Position, *, may_work: bool) -> Release | None:
        """Continue. `end` is the spool's end; if it `may_work`, the stream is being read and everything read is in the
        spool. A returned release is durable; it must become visible before anything else."""
        self._collect()
        release = None
        if may_work and self._attempt is not None:
            read = self._attempt.read
            if read is not None and end.commit >= read.lsn and Releases.has_place(end):
                release = self._finish(self._attempt, read, end)
        if may_work and self._attempt is None and not self._readers.orders and time.monotonic() >= self._due:
            self._begin()
        return release

    # --- from request to order

    def _begin(self) -> None:
        state = self._queue.next()
        if state is None:
            self._readers.close()  # do not keep an idle process
            return
        if state.is_retried:
            state = self._queue.retry(state.id)
        if self._pace[0] != state.id:
            self._pace, self._size, self._discards = (state.id, time.monotonic(), state.rows), FIRST_ROWS, 0
        request = state.request
        known = self._known[1] if self._known[0] == state.id else None
        limit = request.chunk_size or self._options.snapshot_chunk_size or self._size
        low, high = request.low, request.high
        order = ChunkOrder(
            request.table, state.oid, known, request.where, state.last_key, low, high,
            limit=limit, is_first=state.chunks == 0 and not request.adapters,
        )  # fmt: skip
        window, done = None, -1
        if known is not None:
            window = Window(known.relation.oid, known.key)
            try:
                order, done = self._choose_keys(state, order, known)
            except SourceError as error:
                self._fail(state.id, error)
                return
        self._attempt = _Attempt(state.id, order, window, self.xids.copy(), done)
        self._readers.start(order)

    def _choose_keys(self, state: RequestState, order: ChunkOrder, known: PublishedTable) -> tuple[ChunkOrder, int]:
        """The given keys, in place of the table's next keys."""
        if state.keys_done < 0:
            return order, -1
        if file := state.request.keys_file:
            keys, done = read_candidates(file, state.keys_done, KEYS_PER_CHUNK, known)
        else:
            keys, done = self._moved_of(state.id).read(state.keys_done, KEYS_PER_CHUNK, known.key)
        return replace(
            order, keys=keys, after=None, low=None, high=None, only_keys=state.request.kind == "vanished"
        ), done

    def _moved_of(self, name: str) -> MovedKeys:
        if name not in self._moved:
            self._moved[name] = MovedKeys(self._folder / f"moved-{name}.jsonl")
        return self._moved[name]

    # --- what was read

    def _collect(self) -> None:
        taken = self._readers.take()
        if taken is None:
            if self._attempt is not None and self._attempt.is_cancelled and not self._readers.orders:
                self._attempt = None
            return
        found, attempt = taken[1], self._attempt
        assert not isinstance(found, Staged)
        if attempt is None or attempt.is_cancelled:
            self._attempt = None
        elif isinstance(found, ConnectionLost):
            self._retry(reconnect_delay_s(self._retries))
        elif isinstance(found, PgcdcError):
            self._attempt = None
            self._fail(attempt.id, found)
        elif attempt.window is None:
            self.xids.add(np.array(found.waiting_xids, np.int64))
            attempt.read = found
        elif found.table != attempt.order.known:
            self._known = ("", None)
            self._discard(attempt, "its columns or its publication change all the time")
        elif not is_visible(attempt.xids.astype(np.int64), found.snapshot).all():
            # A streamed commit is not visible yet. With synchronous replication that may take long.
            self._retry(min(RETRY_S * 2.0**self._retries, MAX_UNSEEN_S))
        else:
            self._retries = 0
            hit("beside.read")
            order, names, key = attempt.order, attempt.order.columns, found.table.key
            attempt.read = found
            attempt.chunk = Chunk(found.values, len(names), tuple(names.index(name) for name in key))
            candidates = [
                pa.array([one[at].encode() for one in order.keys or ()], pa.binary()) for at in range(len(key))
            ]
            attempt.window.narrow(candidates if order.keys is not None else attempt.chunk.key_columns)

    def _retry(self, delay_s: float) -> None:
        self._attempt, self._due = None, time.monotonic() + delay_s
        self._retries += 1

    def _discard(self, attempt: _Attempt, reason: str) -> None:
        """Read the chunk again, up to a limit."""
        self._discards += 1
        self._retry(RETRY_S)
        if self._discards > MAX_DISCARDS:
            error = SourceError(f"table {attempt.order.table} cannot be read: {reason}", "Try again later")
            self._fail(attempt.id, error)

    def _fail(self, name: str, error: PgcdcError) -> None:
        logger.warning("snapshot %s: %s", name, error)
        self._discards = 0
        if not self._queue[name].is_ended:
            self._queue.fail(name, str(error), for_good=isinstance(error, NeverReadable))
        self._forget_ended()

    # --- release

    def _finish(self, attempt: _Attempt, read: ChunkRead, end: Position) -> Release | None:
        """Release the chunk: the stream has passed everything it could see."""
        state = self._queue[attempt.id]
        self._attempt = None
        if state.status not in ("queued", "running") or attempt.is_cancelled:  # paused or stopped meanwhile
            return None
        if attempt.window is None:
            one = state.request
            is_part = one.where or one.low or one.high or one.keys_file
            self._known = (state.id, read.table)
            estimated = 0 if is_part else read.estimated_rows
            self._queue.begin(state.id, oid=read.table.relation.oid, estimated_rows=estimated)
            return None
        if attempt.window.relations - {read.table.relation}:
            self._known = ("", None)
            self._discard(attempt, "the stream describes it differently than the catalog")
        elif attempt.window.is_full:
            self._size = max(1, self._size // 4)
            self._discard(attempt, "too many of its rows change while they are read")
        elif (made := self._rows(attempt, is_repair=state.request.kind == "repair")) is None:
            self._discard(attempt, "the stream does not identify changed rows (replica identity)")
        else:
            self._discards = 0
            return self._release(attempt, read, state, made, end)
        return None

    def _release(
        self, attempt: _Attempt, read: ChunkRead, state: RequestState, made: list[pa.RecordBatch], end: Position
    ) -> Release | None:
        try:
            after = self._after(attempt, read, state)
        except UnicodeDecodeError:
            advice = "Store the table's keys in the encoding of the database"
            self._fail(state.id, SourceError(f"a key of table {state.request.table} is not valid UTF-8", advice))
            return None
        rows, relation = state.rows + sum(batch.num_rows for batch in made), read.table.relation
        if state.chunks == 0:
            made.insert(0, snapshot_mark(Op.SNAPSHOT_STARTED, state.id, state.request.kind, relation, 0))
            # first, so that a later ALTER TABLE is not mistaken for the shape in which the rows were read
            if read.details is not None:
                made.insert(0, schema_mark(read.details))
        if after["is_last"]:
            made.append(snapshot_mark(Op.SNAPSHOT_COMPLETED, state.id, state.request.kind, relation, rows))
        after |= {"chunks": state.chunks + bool(made), "rows": rows}
        release = None
        if made:
            staged = self._releases.stage(made, read.time_us)
            hit("beside.staged")
            note = {"request": state.id, "after": after}
            release = self._releases.add(end, staged, relation, note, adapters=state.request.adapters)
        self._advance(state.id, after)
        hit("beside.advanced")
        self._adapt(attempt, read)
        self._due = time.monotonic() + self._rest_s(attempt, state)
        return release

    def _rest_s(self, attempt: _Attempt, state: RequestState) -> float:
        """The requested delay. By default the stream gets half of the time."""
        if given := state.request.chunk_delay_s or self._options.snapshot_chunk_delay:
            return given
        is_adaptive = not (state.request.chunk_size or self._options.snapshot_chunk_size)
        return min(time.monotonic() - attempt.begun, MAX_REST_S) if is_adaptive else 0.0

    def _after(self, attempt: _Attempt, read: ChunkRead, state: RequestState) -> dict[str, Any]:
        """The request's progress after this chunk."""
        last_key, keys_done = state.last_key, attempt.keys_done
        if state.request.keys_file:
            is_last = attempt.order.keys == ()
        elif keys_done >= 0:
            is_last = keys_done >= self._moved_of(state.id).nbytes
        else:
            if read.rows and attempt.chunk is not None:
                row = attempt.chunk.row(read.rows - 1)
                last_key = tuple((row[place] or b"").decode() for place in attempt.chunk.key)
            is_last = read.is_last and not self._moved_of(state.id).nbytes
            keys_done = 0 if read.is_last and not is_last else -1
        return {"last_key": last_key, "keys_done": keys_done, "is_last": is_last}

    def _advance(self, name: str, after: dict[str, Any]) -> None:
        self._queue.advance(name, **after)
        if name in self._moved:
            self._moved[name].move_on()
        if after["is_last"]:
            logger.info("snapshot %s is complete: %s read", name, counted(after["rows"], "row"))
            self._forget_ended()

    @staticmethod
    def _rows(attempt: _Attempt, *, is_repair: bool) -> list[pa.RecordBatch] | None:
        """The rows of a chunk as they are now, or vanished keys as deletes; for a repair both. None: the stream does
        not say which rows changed."""
        order, known = attempt.order, attempt.order.known
        assert attempt.window is not None and attempt.chunk is not None and known is not None
        found: list[pa.RecordBatch] = []
        if not order.only_keys:
            folded = attempt.window.fold(attempt.chunk)
            if folded is None:
                return None
            found = list(attempt.chunk.rows_without(*folded))
            if not is_repair:
                return found
        keys = (tuple(one.encode() for one in key) for key in order.keys or ())
        gone = attempt.window.find_vanished(attempt.chunk, keys)
        if not gone:
            return gone if gone is None else found
        values = (dict(zip(known.key, key, strict=True)) for key in gone)
        rows = [[row.get(name) for name in known.columns] for row in values]
        return [*found, deleted_rows(pa.array(rows, CHANGES.field("old").type))]

    def _adapt(self, attempt: _Attempt, read: ChunkRead) -> None:
        """Adapt the chunk size, so that a chunk takes little time and memory."""
        if attempt.order.keys is not None or read.rows == 0:
            return
        factor = min(2.0, CHUNK_S / max(read.seconds, 0.001))
        size = min(max(int(read.rows * factor), MIN_ROWS), MAX_ROWS)
        self._size = max(1, min(size, int(read.rows * CHUNK_BYTES / max(read.nbytes, 1))))

    def _forget_ended(self) -> None:
        going = {one.id for one in self._queue.entries() if not one.is_ended}
        for path in self._folder.glob("moved-*.jsonl"):
            if (name := path.stem.removeprefix("moved-")) not in going:
                self._moved.pop(name, None)
                path.unlink()

    def status(self) -> list[dict[str, Any]]:
        """For `pgcdc status`: every request, and its remaining time."""
        name, begun, rows = self._pace
        elapsed = max(time.monotonic() - begun, 0.001)
        return [describe(one, (one.rows - rows) / elapsed if one.id == name else None) for one in self._queue.entries()]
