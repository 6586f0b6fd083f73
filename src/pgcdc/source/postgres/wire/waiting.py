"""Transactions that wait for their outcome: those that the server streams in blocks while they run, and prepared ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pgcdc.core.errors import DecodeError, GapError
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.wire import undecided
from pgcdc.source.postgres.wire.confirmable import Confirmable
from pgcdc.source.postgres.wire.pending import PendingStore, Table, Transaction
from pgcdc.source.postgres.wire.rows import RowBuffer


def out_of_order(what: str, lsn: int) -> DecodeError:
    """A message that cannot come where it came."""
    return DecodeError(
        f"{what} at {format_lsn(lsn)}",
        "The stream is not as the protocol says: please report this with the server's version",
    )


class StreamedTransactions:
    """Each has a row buffer of its own while a block of it is read; between blocks all of them share a bound in memory."""

    def __init__(self, store: PendingStore, spill_bytes: int) -> None:
        self._store = store
        self._spill_bytes = spill_bytes
        self._open: dict[int, Transaction] = {}
        self._buffered = 0

    def __contains__(self, xid: int) -> bool:
        return xid in self._open

    def begin_block(
        self, start: undecided.StreamStart, lsn: int, new_rows: Callable[[Mapping[int, Table]], RowBuffer]
    ) -> tuple[Transaction, RowBuffer]:
        """The transaction whose rows come now, and where they go."""
        transaction = self._open.get(start.xid)
        if start.is_first != (transaction is None):
            problem = "begins a second time" if start.is_first else "goes on, but has not begun"
            raise out_of_order(f"the streamed transaction {start.xid} {problem}", lsn)
        transaction = self._open[start.xid] = transaction or Transaction(start.xid)
        transaction.rows = transaction.rows or new_rows(transaction.tables)
        return transaction, transaction.rows

    def end_block(self, transaction: Transaction) -> None:
        """The block is over; what is too much for memory goes to disk."""
        self._count(transaction)
        while self._buffered > self._spill_bytes:
            self._set_aside(max(self._open.values(), key=lambda one: one.buffered))

    def abort(self, abort: undecided.StreamAbort, lsn: int) -> None:
        """A transaction is rolled back, or a part of it."""
        transaction = self.require(abort.xid, "Stream Abort", lsn)
        if abort.subxid == abort.xid:
            transaction.rows = None
            self._count(transaction)
            self._store.drop(transaction.parts)
            del self._open[abort.xid]
            return
        transaction.aborted.append(abort.subxid)
        # The server describes its tables again: the shapes may have been made in what is now undone.
        transaction.tables.clear()
        if transaction.rows is not None:
            transaction.rows.forget()

    def end(self, xid: int, name: str, lsn: int) -> Transaction:
        """One that ends with Stream Commit or Stream Prepare, with everything in parts."""
        transaction = self.require(xid, name, lsn)
        self._set_aside(transaction)
        del self._open[xid]
        return transaction

    def require(self, xid: int, name: str, lsn: int) -> Transaction:
        """The transaction that a message is about."""
        transaction = self._open.get(xid)
        if transaction is None:
            raise out_of_order(f"{name} of transaction {xid}, which was not streamed,", lsn)
        return transaction

    def keep(self, buffer: RowBuffer, transaction: Transaction) -> None:
        """What is in the buffer becomes a part."""
        if buffer.rows:
            runs = buffer.runs()
            transaction.parts.append(self._store.keep(buffer.take(), transaction.last, runs))

    def drop(self) -> None:
        """Forget all: the connection is gone."""
        for transaction in self._open.values():
            self._store.drop(transaction.parts)
        self._open.clear()
        self._buffered = 0

    def _set_aside(self, transaction: Transaction) -> None:
        """Everything into parts, and its buffer away: many may wait between their blocks."""
        if transaction.rows is not None:
            self.keep(transaction.rows, transaction)
            transaction.rows = None
        self._count(transaction)

    def _count(self, transaction: Transaction) -> None:
        held = transaction.rows.nbytes if transaction.rows is not None else 0
        self._buffered += held - transaction.buffered
        transaction.buffered = held


class PreparedTransactions:
    """Those with a PREPARE whose outcome has not come. Nothing behind the PREPARE is confirmed until it has."""

    def __init__(self, store: PendingStore, confirmable: Confirmable) -> None:
        self._store = store
        self._confirmable = confirmable
        self._open: dict[tuple[int, str], Transaction] = {}

    def require_new(self, prepare: undecided.Prepare, lsn: int) -> None:
        """Raise DecodeError if it is prepared already."""
        if (prepare.xid, prepare.gid) in self._open:
            raise out_of_order(f"{prepare.gid!r} is prepared a second time", lsn)

    def keep(self, transaction: Transaction, prepare: undecided.Prepare) -> None:
        """It waits from now on."""
        name = (prepare.xid, prepare.gid)
        self._open[name] = transaction
        self._confirmable.prepare(name, prepare.prepare_lsn)
        self._confirmable.see(prepare.end_lsn)

    def commit(self, commit: undecided.CommitPrepared, *, is_old: bool) -> Transaction | None:
        """The transaction that is committed; None: it was read before. GapError: its changes never came."""
        name = (commit.xid, commit.gid)
        transaction = self._open.pop(name, None)
        if transaction is None:
            if is_old:
                return None
            raise GapError(
                f"prepared transaction {commit.gid!r} was committed at {format_lsn(commit.end_lsn)}, but its changes were "
                "never sent to us: the slot was moved past its PREPARE",
                "Its changes are gone. Begin with a new slot and bring the sinks back: pgcdc resync --new-slot",
            )
        self._confirmable.commit(name, commit.end_lsn)
        return transaction

    def roll_back(self, rollback: undecided.RollbackPrepared) -> Transaction | None:
        """The transaction that is rolled back; None: the slot stood behind its PREPARE, and nobody waits for it."""
        name = (rollback.xid, rollback.gid)
        transaction = self._open.pop(name, None)
        if transaction is not None:
            self._store.drop(transaction.parts)
        self._confirmable.roll_back(name)
        self._confirmable.see(rollback.end_lsn)
        return transaction

    def drop(self) -> None:
        """Forget all: the connection is gone."""
        for transaction in self._open.values():
            self._store.drop(transaction.parts)
        self._open.clear()
