"""From pgoutput messages to batches of committed transactions. Pure: bytes in, batches out, no clock and no socket.

Rows go to a row buffer. What overflows it goes to pending parts (in memory while small, else on disk). They become
visible at the commit, where the END lsn is first known. Whole transactions share one row buffer, so that small ones
share a batch; a transaction that the server streams while it runs has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import DecodeError
from pgcdc.core.relation import Column, Relation, Relations
from pgcdc.postgres.lsn import format_lsn
from pgcdc.source.postgres.wire import messages as wire
from pgcdc.source.postgres.wire import undecided
from pgcdc.source.postgres.wire.outgoing import Outbox, Outgoing, TransactionRow, add_told
from pgcdc.source.postgres.wire.rows import RowBuffer, new_row_buffer
from pgcdc.source.postgres.wire.waiting import (
    PendingPart,
    PendingStore,
    PreparedTransactions,
    StreamedTransactions,
    Table,
    Transaction,
    out_of_order,
)
from pgcdc.spool.segment import CaptureBatch, Part

if TYPE_CHECKING:
    from pgcdc.source.postgres.wire.binary.decoder import BinaryDecoder

SEAL_BYTES = 4 << 20
SPILL_BYTES = 16 << 20

_Bytes = memoryview | bytes
_ROWS = frozenset((wire.INSERT, wire.UPDATE, wire.DELETE))


class Assembler:
    """Takes messages in stream order; `pop` returns batches that end at a commit (or are parts of a huge transaction)."""

    def __init__(
        self,
        relations: Relations,
        *,
        start_lsn: int,
        spill_dir: Path | None = None,
        seal_rows: int = 65_536,
        seal_bytes: int = SEAL_BYTES,
        spill_bytes: int = SPILL_BYTES,
    ) -> None:
        self.relations = relations
        self.last_lsn = start_lsn  # END lsn of the last transaction that was read completely
        self._seal_rows = seal_rows
        self._seal_bytes = seal_bytes
        self._store = PendingStore(spill_dir, spill_bytes)
        self._outbox = Outbox(relations, start_lsn)
        self._committed: list[TransactionRow] = []
        self._committed_rows = 0
        # The state of one connection; `abandon` resets it.
        self._shared = self._new_rows()
        self._rows = self._shared  # the buffer for the current rows
        self._open: Transaction | None = None  # the transaction of the current rows
        self._in_stream = False
        self._streams = StreamedTransactions(self._store, spill_bytes)
        self._prepared = PreparedTransactions(self._store)
        self._tables: dict[int, Table] = {}
        self._told: dict[int, int] = {}  # passed on with the next batch
        self._relation_count = 0
        self.leaves: dict[int, set[int]] = {}
        """Relations described directly after another relation by committed transactions: partitions whose changes are
        sent as those of a root (or tables truncated together). The user of this map clears it."""
        self._described = (0, 0, 0)  # The last description: its oid, and its transaction and place there
        self._resume_lsn = 0
        self._parallel = False
        self._rewrite_row: Callable[[bytes, Sequence[Column], int, int], bytes] | None = None
        self._parsers: dict[int, Callable[[_Bytes, int], object]] = {
            wire.BEGIN: self._take_begin,
            wire.COMMIT: self._take_commit,
            wire.RELATION: self._take_relation,
            wire.TRUNCATE: self._take_truncate,
            wire.ORIGIN: self._take_origin,
            wire.MESSAGE: self._take_message,
            wire.TYPE: self._take_type,
            undecided.STREAM_START: self._take_stream_start,
            undecided.STREAM_STOP: self._take_stream_stop,
            undecided.STREAM_COMMIT: self._take_stream_commit,
            undecided.STREAM_ABORT: self._take_stream_abort,
            undecided.BEGIN_PREPARE: self._take_begin_prepare,
            undecided.PREPARE: self._take_prepare,
            undecided.STREAM_PREPARE: self._take_stream_prepare,
            undecided.COMMIT_PREPARED: self._take_commit_prepared,
            undecided.ROLLBACK_PREPARED: self._take_rollback_prepared,
        }

    def begin_at(self, lsn: int) -> None:
        """The stream begins at `lsn`: a slot was just created there."""
        self.last_lsn = self._outbox.last_lsn = lsn

    def begin(self, *, parallel: bool = False, two_phase: bool = False, decoder: BinaryDecoder | None = None) -> None:
        """A connection begins. With `two_phase` the server may start before the position already read; repeats are
        skipped."""
        self._parallel = parallel
        self._resume_lsn = self.last_lsn if two_phase else 0
        self._prepared.begin(two_phase=two_phase)
        self._rewrite_row = decoder.rewrite_row if decoder is not None else None

    def limit(self, rows: int) -> None:
        if rows != self._seal_rows:
            self._seal_rows = rows
            for buffer in (self._shared, self._rows):
                buffer.limit(rows, self._seal_bytes)

    @property
    def is_drained(self) -> bool:
        return not self._outbox and not self._committed

    def feed(self, message: _Bytes, lsn: int) -> None:
        """Take one pgoutput message. Raises DecodeError for anything that violates the protocol."""
        tag = message[0] if len(message) else 0
        if tag in _ROWS:  # once per row: as few steps as possible
            transaction = self._open
            if transaction is None:
                raise _outside(chr(tag), lsn)
            if self._rewrite_row is not None:
                message = self._to_text(message, lsn)
            transaction.ordinal += 1
            transaction.sub = 0
            if self._rows.add(message, transaction.ordinal, lsn, self._in_stream):
                self._seal()
            return
        take = self._parsers.get(tag, wire.parse_pgoutput)  # raises, and names the unknown tag
        take(message, lsn)

    def see(self, lsn: int) -> None:
        """The server has sent everything before `lsn`."""
        self._prepared.see(lsn)

    def confirmable(self, durable_lsn: int) -> int:
        """What may be confirmed once everything returned up to `durable_lsn` is durable."""
        return self._prepared.confirmable(durable_lsn)

    def pop(self, *, drain: bool = True) -> CaptureBatch | None:
        """The next batch; with `drain` also a batch that is not full yet."""
        if not self._outbox and drain and self._committed:
            self._seal_shared(self._open)
        return self._outbox.pop()

    def advance(self, lsn: int) -> CaptureBatch | None:
        """A batch that only moves the position to `lsn`, if nothing received before it is pending (invariant 2). Streamed
        and prepared transactions do not count: they commit after `lsn`."""
        lsn = max(lsn, self.last_lsn)  # an empty transaction moved last_lsn without a batch
        if self._open is not None or not self.is_drained:
            return None
        batch = self._outbox.advance(lsn)
        if batch is not None:
            self.last_lsn = lsn
        return batch

    def abandon(self) -> None:
        """The connection is gone: forget undecided transactions (the server sends them again), keep committed ones."""
        if self._committed:
            self._seal_shared(self._open)
        if self._open is not None and not self._in_stream:
            self._store.drop(self._open.parts)
        self._streams.drop()
        self._prepared.drop()
        self._open, self._in_stream = None, False
        self._tables.clear()  # the new connection describes its relations again
        self._told = {}
        self._rows = self._shared = self._new_rows()

    def rename(self, before: Relation, after: Relation) -> None:
        """From now on rows of this table have its new name, unless the server has described it differently meanwhile.
        It describes a root again only when a partition changes, so rows would keep the old name until then."""
        table = self._tables.get(after.oid)
        if table is None or self.relations[table.version] != before:
            return
        if replace(before, namespace=after.namespace, name=after.name) == after:
            renamed = self._tables[after.oid] = replace(table, version=self.relations.intern(after))
            self._shared.define(after.oid, renamed.version, renamed.columns)

    # --- whole transactions

    def _take_begin(self, message: _Bytes, lsn: int) -> None:
        begin = wire.parse_begin(message, lsn)
        self._require_none("Begin", lsn)
        self._open = Transaction(begin.xid)

    def _take_commit(self, message: _Bytes, lsn: int) -> None:
        commit = wire.parse_commit(message, lsn)
        transaction = self._require_open("Commit", lsn, in_stream=False)
        if transaction.gid is not None:
            raise out_of_order(f"Commit of the prepared transaction {transaction.xid}", lsn)
        is_old = self._is_old(commit.end_lsn, lsn)
        self._open = None
        rows = self._shared.rows - self._committed_rows
        if is_old or transaction.parts:
            self._seal_shared(transaction)
        self._tell(transaction)
        if is_old:
            self._store.drop(transaction.parts)
        elif transaction.parts:
            self._publish(transaction, commit.end_lsn, commit.commit_time)
        elif rows:
            row = (commit.end_lsn, commit.commit_time, transaction.xid, rows, True, transaction.origin)
            self._committed.append(row)
            self._committed_rows += rows
        if not is_old:
            self._move(commit.end_lsn)

    def _take_truncate(self, message: _Bytes, lsn: int) -> None:
        xid, message = self._split(message, lsn)
        truncate = wire.parse_truncate(message, lsn)
        transaction = self._require_open("Truncate", lsn)
        for oid in truncate.relation_oids:
            transaction.ordinal += 1
            transaction.sub = 0
            self._rows.add_truncate(oid, transaction.ordinal, lsn, xid)

    def _take_origin(self, message: _Bytes, lsn: int) -> None:
        self._require_open("Origin", lsn).origin = wire.parse_origin(message, lsn).name

    def _take_message(self, message: _Bytes, lsn: int) -> None:
        xid, message = self._split(message, lsn)
        logical = wire.parse_message(message, lsn)
        if logical.transactional:
            transaction = self._require_open("Message", lsn)
            transaction.sub += 1
            self._rows.add_message(logical.prefix, logical.content, *transaction.last, lsn, xid)
        elif self._open is not None:
            raise out_of_order("a non-transactional Message inside of a transaction", lsn)
        else:
            # It is a batch of its own. Its lsn is the end of its record, where no transaction ends. It must not be a
            # byte further: the next record may be a commit, and the server skips commits that begin before the
            # confirmed position.
            end_lsn = logical.lsn
            if self._is_old(end_lsn, lsn):
                return
            self._rows.add_message(logical.prefix, logical.content, 0, 1, lsn)
            self._committed.append((end_lsn, 0, 0, 1, True, None))
            self._committed_rows += 1
            self._move(end_lsn)
        if self._rows.nbytes >= self._seal_bytes:
            self._seal()

    def _take_relation(self, message: _Bytes, lsn: int) -> None:
        _, message = self._split(message, lsn)
        relation = wire.parse_relation(message, lsn)
        self._relation_count += 1
        table = Table(self.relations.intern(relation), len(relation.columns), self._relation_count)
        self._rows.define(relation.oid, table.version, table.columns)
        is_known = relation.oid in self._tables or relation.oid in self._tables_now
        add_told(self._told if self._open is None else self._open.told, {relation.oid: 2 if is_known else 1})
        self._tables_now[relation.oid] = table
        if self._open is not None:
            root, *place = self._described
            if root not in (0, relation.oid) and place == [self._open.xid, self._open.ordinal]:
                self._open.leaves.append((root, relation.oid))
            self._described = (relation.oid, self._open.xid, self._open.ordinal)

    def _take_type(self, message: _Bytes, lsn: int) -> None:
        wire.parse_type(self._split(message, lsn)[1], lsn)

    # --- streamed transactions

    def _take_stream_start(self, message: _Bytes, lsn: int) -> None:
        start = undecided.parse_stream_start(message, lsn)
        self._require_none("Stream Start", lsn)
        self._open, self._rows = self._streams.begin_block(start, lsn, self._new_rows)
        self._in_stream = True
        self._rows.limit(self._seal_rows, self._seal_bytes)

    def _take_stream_stop(self, message: _Bytes, lsn: int) -> None:
        undecided.parse_stream_stop(message, lsn)
        self._require_open("Stream Stop", lsn, in_stream=True)
        self._open, self._in_stream = None, False
        self._rows = self._shared
        self._streams.end_block()

    def _take_stream_commit(self, message: _Bytes, lsn: int) -> None:
        commit = undecided.parse_stream_commit(message, lsn)
        self._require_none("Stream Commit", lsn)
        self._streams.require(commit.xid, "Stream Commit", lsn)
        is_old = self._is_old(commit.end_lsn, lsn)
        transaction = self._end_stream(commit.xid, "Stream Commit", lsn)
        self._decide(transaction, commit.end_lsn, commit.commit_time, is_old)

    def _take_stream_abort(self, message: _Bytes, lsn: int) -> None:
        parse = undecided.parse_parallel_abort if self._parallel else undecided.parse_stream_abort
        abort = parse(message, lsn)
        self._require_none("Stream Abort", lsn)
        # PostgreSQL 18 also sends this for subtransactions that rolled back before anything of them was streamed.
        if abort.subxid == abort.xid or abort.xid in self._streams:
            self._streams.abort(abort, lsn)

    def _end_stream(self, xid: int, name: str, lsn: int) -> Transaction:
        """End a streamed transaction (Stream Commit or Stream Prepare). From then on the server does not repeat its
        relations: always after Stream Commit, and after Stream Prepare since PostgreSQL 15.20 (older servers describe
        them again). Relations described since then are newer and stay."""
        self._require_none(name, lsn)
        transaction = self._streams.end(xid, name, lsn)
        for oid, table in transaction.tables.items():
            if oid not in self._tables or self._tables[oid].number < table.number:
                self._tables[oid] = table
                self._shared.define(oid, table.version, table.columns)
        return transaction

    # --- prepared transactions

    def _take_begin_prepare(self, message: _Bytes, lsn: int) -> None:
        begin = undecided.parse_begin_prepare(message, lsn)
        self._require_none("Begin Prepare", lsn)
        self._open = Transaction(begin.xid, gid=begin.gid)

    def _take_prepare(self, message: _Bytes, lsn: int) -> None:
        prepare = undecided.parse_prepare(message, lsn)
        transaction = self._require_open("Prepare", lsn, in_stream=False)
        if (transaction.xid, transaction.gid) != (prepare.xid, prepare.gid):
            raise out_of_order(f"Prepare of {prepare.gid!r} inside of transaction {transaction.xid}", lsn)
        self._prepared.require_new(prepare, lsn)
        self._open = None
        self._seal_shared(transaction)
        self._prepared.keep(transaction, prepare)

    def _take_stream_prepare(self, message: _Bytes, lsn: int) -> None:
        prepare = undecided.parse_stream_prepare(message, lsn)
        self._prepared.require_new(prepare, lsn)
        self._prepared.keep(self._end_stream(prepare.xid, "Stream Prepare", lsn), prepare)

    def _take_commit_prepared(self, message: _Bytes, lsn: int) -> None:
        commit = undecided.parse_commit_prepared(message, lsn)
        self._require_none("Commit Prepared", lsn)
        is_old = self._is_old(commit.end_lsn, lsn)
        transaction = self._prepared.commit(commit, is_old=is_old)
        if transaction is not None:
            self._decide(transaction, commit.end_lsn, commit.commit_time, is_old)

    def _take_rollback_prepared(self, message: _Bytes, lsn: int) -> None:
        rollback = undecided.parse_rollback_prepared(message, lsn)
        self._require_none("Rollback Prepared", lsn)
        transaction = self._prepared.roll_back(rollback)
        if transaction is not None:
            add_told(self._told, transaction.told)  # the server does not describe them again

    # --- shared steps

    def _require_none(self, name: str, lsn: int) -> None:
        if self._open is not None:
            raise out_of_order(f"{name} inside of transaction {self._open.xid}", lsn)

    def _require_open(self, name: str, lsn: int, *, in_stream: bool | None = None) -> Transaction:
        if self._open is None or in_stream not in (None, self._in_stream):
            raise _outside(name, lsn)
        return self._open

    @property
    def _tables_now(self) -> dict[int, Table]:
        return self._open.tables if self._open is not None and self._in_stream else self._tables

    def _split(self, message: _Bytes, lsn: int) -> tuple[int, _Bytes]:
        """The xid of a message in a block (0 outside blocks), and the message without it."""
        return undecided.split_xid(message, lsn) if self._in_stream else (0, message)

    def _to_text(self, message: _Bytes, lsn: int) -> bytes:
        """A row message with only text values. Damaged messages pass unchanged: the row buffer reports them."""
        assert self._rewrite_row is not None
        data, head = bytes(message), 5 if self._in_stream else 1
        table = self._tables_now.get(int.from_bytes(data[head : head + 4], "big"))
        if table is None:
            return data
        return self._rewrite_row(data, self.relations[table.version].columns, lsn, head)

    def _is_old(self, end_lsn: int, lsn: int) -> bool:
        """Whether a transaction was read before: it is sent again only on a connection that began before it."""
        if end_lsn > _MAX_LSN:
            raise out_of_order(f"a transaction ends at {end_lsn:X}, which is not an LSN,", lsn)
        if end_lsn > self.last_lsn:
            return False
        if end_lsn > self._resume_lsn:
            raise out_of_order(
                f"a transaction ends at {format_lsn(end_lsn)}, not after {format_lsn(self.last_lsn)},", lsn
            )
        self._prepared.see(end_lsn)
        return True

    def _move(self, end_lsn: int) -> None:
        self.last_lsn = end_lsn
        self._prepared.see(end_lsn)

    def _decide(self, transaction: Transaction, end_lsn: int, commit_time: int, is_old: bool) -> None:
        """Handle the commit of a transaction that was set aside."""
        if self._committed and not is_old:
            self._seal_shared(None)
        self._tell(transaction)
        if is_old:
            self._store.drop(transaction.parts)
            return
        self._publish(transaction, end_lsn, commit_time)
        self._move(end_lsn)

    def _tell(self, transaction: Transaction) -> None:
        add_told(self._told, transaction.told)
        for root, leaf in transaction.leaves:
            self.leaves.setdefault(root, set()).add(leaf)

    def _publish(self, transaction: Transaction, end_lsn: int, commit_time: int) -> None:
        self._store.release(transaction.parts)
        row = (end_lsn, commit_time, transaction.xid, 0, True, transaction.origin)
        self._outbox.put(Outgoing(transaction.parts, [row], transaction.aborted, self._told))
        self._told = {}

    def _new_rows(self, tables: Mapping[int, Table] = {}) -> RowBuffer:
        rows = new_row_buffer()
        rows.limit(self._seal_rows, self._seal_bytes)
        for oid, table in tables.items():
            rows.define(oid, table.version, table.columns)
        return rows

    def _seal(self) -> None:
        if self._in_stream and self._open is not None:
            self._streams.keep(self._rows, self._open)
            # Use a new buffer: an emptied one keeps its memory, and there may be many transactions.
            self._rows = self._open.rows = self._new_rows(self._open.tables)
        else:
            self._seal_shared(self._open)

    def _seal_shared(self, transaction: Transaction | None) -> None:
        """Turn the shared buffer into a ready batch (committed rows) and a pending part (rows of `transaction`)."""
        rows = self._shared.take()
        committed = rows.slice(0, self._committed_rows)
        if self._committed:
            part = Part(committed.num_rows, committed.nbytes, _NOT_ASKED, committed)
            self._outbox.put(Outgoing([PendingPart(part)], self._committed, told=self._told))
            self._committed, self._told = [], {}
            self._committed_rows = 0
        pending = rows.slice(committed.num_rows)
        if pending.num_rows:
            assert transaction is not None
            if committed.num_rows:  # a slice would keep the earlier rows in memory as long as it is pending
                pending = pending.take(pa.array(np.arange(pending.num_rows)))
            transaction.parts.append(self._store.keep(pending, transaction.last, _NO_RUNS))


def _outside(name: str, lsn: int) -> DecodeError:
    return out_of_order(f"message {name} outside of a transaction", lsn)


_NOT_ASKED = (0, 0)
_NO_RUNS = np.empty((0, 2), np.uint32)
_MAX_LSN = 2**63 - 1
