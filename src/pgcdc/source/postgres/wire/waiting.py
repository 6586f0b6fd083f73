"""Transactions that wait for their outcome: streamed ones (sent in blocks while they run) and prepared ones. Their
changes share one memory limit and go to disk beyond it. Each part records which changes belong to which subtransaction,
because a rollback of one removes only its own changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import DecodeError, GapError, SpoolError
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.wire import undecided
from pgcdc.source.postgres.wire.rows import RowBuffer, Runs
from pgcdc.spool.segment import Part, write_segment

Name = tuple[int, str]  # xid and gid of a prepared transaction
_FEW_RUNS = 64  # If there are more runs, they are kept on disk next to their part: each subtransaction has at least one


@dataclass(frozen=True, slots=True)
class Table:
    version: int
    columns: int
    number: int  # Counts Relation messages: the greater number is newer


@dataclass(frozen=True, slots=True)
class PendingPart:
    """A part, and the subtransaction of each of its changes."""

    part: Part
    runs: Runs | None = None
    runs_path: Path | None = None

    def load_runs(self) -> Runs:
        """Two columns: the first change of a run, and its xid."""
        if self.runs is not None:
            return self.runs
        if self.runs_path is None:
            return np.empty((0, 2), np.uint32)
        return np.fromfile(self.runs_path, np.uint32).reshape(-1, 2)

    def drop(self) -> None:
        for path in (self.part.path, self.runs_path):
            if path is not None:
                path.unlink(missing_ok=True)


@dataclass(slots=True)
class Transaction:
    """A transaction without an outcome yet."""

    xid: int
    ordinal: int = 0
    sub: int = 0
    origin: str | None = None
    gid: str | None = None  # Its name, if it started with Begin Prepare
    parts: list[PendingPart] = field(default_factory=list)
    # Only streamed ones have these: their rows arrive between those of others, and their relations stay private until
    # commit.
    rows: RowBuffer | None = None
    tables: dict[int, Table] = field(default_factory=dict)
    aborted: array[int] = field(default_factory=lambda: array("I"))
    told: dict[int, int] = field(default_factory=dict)  # As in CaptureBatch
    leaves: list[tuple[int, int]] = field(default_factory=list)  # Roots and partitions, as in Assembler.leaves

    @property
    def buffered(self) -> int:
        return self.rows.nbytes if self.rows is not None else 0

    @property
    def last(self) -> tuple[int, int]:
        """Ordinal and sub-ordinal of the last change so far."""
        return self.ordinal, self.sub


class PendingStore:
    """Keeps parts in memory while their total is small, else on disk."""

    def __init__(self, folder: Path | None, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._held = 0
        self._written = 0

    def keep(self, rows: pa.RecordBatch, last: tuple[int, int], runs: Runs) -> PendingPart:
        if self._folder is None or self._held + rows.nbytes <= self._limit_bytes:
            self._held += rows.nbytes
            return PendingPart(Part(rows.num_rows, rows.nbytes, last, rows), runs if len(runs) else None)
        self._written += 1
        path = self._folder / f"pending-{self._written:08d}.arrow"
        runs_path = path.with_suffix(".xids") if len(runs) > _FEW_RUNS else None
        try:
            write_segment(path, rows)
            if runs_path is not None:
                runs.tofile(runs_path)
        except OSError as error:
            raise SpoolError(
                f"the changes of an open transaction cannot be written to {self._folder}: {error.strerror}",
                "Free space on its disk and start again: nothing is lost",
            ) from error
        kept = runs.copy() if runs_path is None and len(runs) else None
        return PendingPart(Part(rows.num_rows, rows.nbytes, last, None, path), kept, runs_path)

    def release(self, parts: Iterable[PendingPart]) -> None:
        """These parts are being returned: they no longer count."""
        self._held -= sum(one.part.nbytes for one in parts if one.part.path is None)

    def drop(self, parts: list[PendingPart]) -> None:
        self.release(parts)
        for one in parts:
            one.drop()


def out_of_order(what: str, lsn: int) -> DecodeError:
    """The error for a message out of order."""
    return DecodeError(
        f"{what} at {format_lsn(lsn)}",
        "The server broke the protocol: please report this with the server's version",
    )


class StreamedTransactions:
    """Each has its own row buffer while one of its blocks is read; between blocks they share a memory limit."""

    def __init__(self, store: PendingStore, spill_bytes: int) -> None:
        self._store = store
        self._spill_bytes = spill_bytes
        self._open: dict[int, Transaction] = {}

    def __contains__(self, xid: int) -> bool:
        return xid in self._open

    def begin_block(
        self, start: undecided.StreamStart, lsn: int, new_rows: Callable[[Mapping[int, Table]], RowBuffer]
    ) -> tuple[Transaction, RowBuffer]:
        """The transaction to which the next rows belong, and their buffer."""
        transaction = self._open.get(start.xid)
        if start.is_first != (transaction is None):
            problem = "begins a second time" if start.is_first else "continues, but has not begun"
            raise out_of_order(f"the streamed transaction {start.xid} {problem}", lsn)
        transaction = self._open[start.xid] = transaction or Transaction(start.xid)
        transaction.rows = transaction.rows or new_rows(transaction.tables)
        return transaction, transaction.rows

    def end_block(self) -> None:
        """The block ended; move what exceeds the memory limit to disk."""
        while sum(one.buffered for one in self._open.values()) > self._spill_bytes:
            self._set_aside(max(self._open.values(), key=lambda one: one.buffered))

    def abort(self, abort: undecided.StreamAbort, lsn: int) -> None:
        """A transaction or subtransaction was rolled back."""
        transaction = self.require(abort.xid, "Stream Abort", lsn)
        if abort.subxid == abort.xid:
            self._store.drop(transaction.parts)
            del self._open[abort.xid]
            return
        transaction.aborted.append(abort.subxid)
        # The server will describe its tables again: the rollback may have undone their shapes.
        transaction.tables.clear()
        if transaction.rows is not None:
            transaction.rows.forget()

    def end(self, xid: int, name: str, lsn: int) -> Transaction:
        """The transaction at its Stream Commit or Stream Prepare, with everything in parts."""
        transaction = self.require(xid, name, lsn)
        self._set_aside(transaction)
        del self._open[xid]
        return transaction

    def require(self, xid: int, name: str, lsn: int) -> Transaction:
        transaction = self._open.get(xid)
        if transaction is None:
            raise out_of_order(f"{name} of transaction {xid}, which was not streamed,", lsn)
        return transaction

    def keep(self, buffer: RowBuffer, transaction: Transaction) -> None:
        """Turn the buffer's content into a part."""
        if buffer.rows:
            runs = buffer.runs()
            transaction.parts.append(self._store.keep(buffer.take(), transaction.last, runs))

    def drop(self) -> None:
        """Forget all of them: the connection is gone."""
        for transaction in self._open.values():
            self._store.drop(transaction.parts)
        self._open.clear()

    def _set_aside(self, transaction: Transaction) -> None:
        """Move everything into parts and free the buffer: many transactions may wait between blocks."""
        if transaction.rows is not None:
            self.keep(transaction.rows, transaction)
            transaction.rows = None


class PreparedTransactions:
    """Transactions that are prepared but have no outcome yet (two-phase commit), and what may be confirmed meanwhile.

    A slot that has confirmed more than the LSN of a PREPARE never sends that transaction's rows again: after a restart
    only its COMMIT PREPARED would come. So confirmation stops before the first PREPARE whose outcome is not durable.
    Without two-phase decoding, confirmation is not limited.
    """

    def __init__(self, store: PendingStore) -> None:
        self._store = store
        self._open: dict[Name, Transaction] = {}
        # The limit on confirmation outlives a connection.
        self._is_on = False
        self._undecided: dict[Name, int] = {}
        self._decided: list[tuple[int, int]] = []
        self._seen = 0

    def begin(self, *, two_phase: bool) -> None:
        """A new connection starts at the slot's position: a PREPARE that we have not seen may follow."""
        self._is_on = two_phase or bool(self._undecided or self._decided)
        self._seen = 0

    def see(self, lsn: int) -> None:
        """Everything before `lsn` was sent on this connection."""
        self._seen = max(self._seen, lsn)

    def confirmable(self, durable_lsn: int) -> int:
        """What may be confirmed when everything up to `durable_lsn` is durable."""
        if not self._is_on:
            return durable_lsn
        self._decided = [one for one in self._decided if one[1] > durable_lsn]
        return min([durable_lsn, self._seen, *self._undecided.values(), *(lsn for lsn, _ in self._decided)])

    def require_new(self, prepare: undecided.Prepare, lsn: int) -> None:
        """Raise DecodeError if the transaction is already prepared."""
        if (prepare.xid, prepare.gid) in self._open:
            raise out_of_order(f"{prepare.gid!r} is prepared a second time", lsn)

    def keep(self, transaction: Transaction, prepare: undecided.Prepare) -> None:
        """The transaction waits from now on. If sent again after a reconnect, it counts once."""
        name = (prepare.xid, prepare.gid)
        self._is_on = True
        self._open[name] = transaction
        self._undecided[name] = prepare.prepare_lsn
        self.see(prepare.end_lsn)

    def commit(self, commit: undecided.CommitPrepared, *, is_old: bool) -> Transaction | None:
        """The committed transaction; None if it was read before. Raises GapError if its changes never came. It limits
        confirmation until its END lsn is durable."""
        name = (commit.xid, commit.gid)
        transaction = self._open.pop(name, None)
        if transaction is None:
            if is_old:
                return None
            raise GapError(
                f"prepared transaction {commit.gid!r} was committed at {format_lsn(commit.end_lsn)}, but its changes were "
                "never sent to us: the slot was moved past its PREPARE",
                "Its changes are gone. Repair the targets with a new slot: pgcdc resync --new-slot",
            )
        self._decided.append((self._undecided.pop(name), commit.end_lsn))
        return transaction

    def roll_back(self, rollback: undecided.RollbackPrepared) -> Transaction | None:
        """The rolled-back transaction; None if the slot was already past its PREPARE, so nothing is waiting."""
        name = (rollback.xid, rollback.gid)
        transaction = self._open.pop(name, None)
        if transaction is not None:
            self._store.drop(transaction.parts)
        self._undecided.pop(name, None)
        self.see(rollback.end_lsn)
        return transaction

    def drop(self) -> None:
        """Forget their changes: the connection is gone."""
        for transaction in self._open.values():
            self._store.drop(transaction.parts)
        self._open.clear()
