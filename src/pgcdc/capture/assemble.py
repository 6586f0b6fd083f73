"""From pgoutput messages to batches of committed transactions. Pure: bytes in, batches out, no clock and no socket.

All transactions take one path: rows go to the row buffer; what is too large for it goes to pending parts (in memory while
small, on disk when not), and becomes visible at the Commit, where the END lsn is first known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pgcdc.capture import messages as wire
from pgcdc.capture.batch import CaptureBatch, Part
from pgcdc.capture.rows import new_row_buffer
from pgcdc.errors import DecodeError
from pgcdc.position import Position, format_lsn
from pgcdc.relation import Relations
from pgcdc.spool.schema import TRANSACTIONS
from pgcdc.spool.segment import write_segment

__all__ = ["Assembler"]

SEAL_BYTES = 4 << 20
SPILL_BYTES = 16 << 20


@dataclass(slots=True)
class _Transaction:
    """The transaction whose Commit has not come yet."""

    xid: int
    commit_time: int
    ordinal: int = 0
    sub: int = 0
    origin: str | None = None
    buffered_rows: int = 0
    parts: list[Part] = field(default_factory=list)


class Assembler:
    """Feeds on messages in stream order; `pop` gives batches that end at a commit (or are parts of a huge transaction)."""

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
        self.last_lsn = start_lsn
        """END lsn of the last transaction that was read completely."""
        self.seal_rows = seal_rows
        self._seal_bytes = seal_bytes
        self._spill_bytes = spill_bytes
        self._spill_dir = spill_dir
        self._spilled = 0
        self._rows = new_row_buffer()
        self._open: _Transaction | None = None
        self._committed: list[tuple[int, int, int, int, bool, str | None]] = []
        self._committed_rows = 0
        self._ready: deque[CaptureBatch] = deque()
        self._popped_lsn = start_lsn

    def begin_at(self, lsn: int) -> None:
        """The stream begins at `lsn`: a slot was created there just now."""
        self.last_lsn = self._popped_lsn = lsn

    @property
    def in_transaction(self) -> bool:
        """Whether a Begin was read whose Commit was not."""
        return self._open is not None

    @property
    def is_drained(self) -> bool:
        """Whether every committed row was handed out."""
        return not self._ready and not self._committed

    def feed(self, message: memoryview | bytes, lsn: int) -> None:
        """Take one pgoutput message. Raises DecodeError for anything that is not exactly as the protocol says."""
        tag = message[0] if len(message) else 0
        if tag in (wire.INSERT, wire.UPDATE, wire.DELETE):
            transaction = self._require_open(chr(tag), lsn)
            transaction.ordinal += 1
            transaction.sub = 0
            self._rows.add(message, transaction.ordinal, lsn)
            transaction.buffered_rows += 1
            if self._rows.nbytes >= self._seal_bytes or self._rows.rows >= self.seal_rows:
                self._seal()
        elif tag == wire.BEGIN:
            if self._open is not None:
                raise DecodeError(f"Begin inside of transaction {self._open.xid} at {format_lsn(lsn)}", _ADVICE)
            begin = wire.parse_begin(message, lsn)
            self._open = _Transaction(begin.xid, begin.commit_time)
        elif tag == wire.COMMIT:
            self._commit(wire.parse_commit(message, lsn), lsn)
        elif tag == wire.RELATION:
            relation = wire.parse_relation(message, lsn)
            self._rows.define(relation.oid, self.relations.intern(relation), len(relation.columns))
        elif tag == wire.TRUNCATE:
            transaction = self._require_open("Truncate", lsn)
            for oid in wire.parse_truncate(message, lsn).relation_oids:
                transaction.ordinal += 1
                transaction.sub = 0
                self._rows.add_truncate(oid, transaction.ordinal, lsn)
                transaction.buffered_rows += 1
        elif tag == wire.ORIGIN:
            self._require_open("Origin", lsn).origin = wire.parse_origin(message, lsn).name
        elif tag == wire.MESSAGE:
            self._take_message(wire.parse_message(message, lsn), lsn)
        elif tag == wire.TYPE:
            wire.parse_type(message, lsn)
        else:
            wire.parse_pgoutput(message, lsn)  # raises: it names the tag
            raise AssertionError(tag)

    def pop(self, *, drain: bool = True) -> CaptureBatch | None:
        """The next batch; with `drain`, also what is committed but would still fit more."""
        if not self._ready and drain and self._committed:
            self._seal()
        if not self._ready:
            return None
        batch = self._ready.popleft()
        self._popped_lsn = batch.last_lsn
        return batch

    def advance(self, lsn: int) -> CaptureBatch | None:
        """A batch that only moves the position to `lsn`, if nothing received before is still on its way (invariant 2)."""
        lsn = max(lsn, self.last_lsn)  # an empty transaction moved last_lsn without handing anything out
        if self._open is not None or not self.is_drained or lsn <= self._popped_lsn:
            return None
        self.last_lsn = self._popped_lsn = lsn
        return CaptureBatch.advance(lsn, self.relations)

    def abandon(self) -> None:
        """The connection is gone: forget the open transaction (the server sends it again), keep what was committed."""
        if self._committed:
            self._seal()
        if self._open is not None:
            for part in self._open.parts:
                if part.path is not None:
                    part.path.unlink(missing_ok=True)
        self._open = None
        self._rows = new_row_buffer()  # the new connection describes its relations again

    def _require_open(self, name: str, lsn: int) -> _Transaction:
        if self._open is None:
            raise DecodeError(f"message {name} outside of a transaction at {format_lsn(lsn)}", _ADVICE)
        return self._open

    def _take_message(self, message: wire.Message, lsn: int) -> None:
        if message.transactional:
            transaction = self._require_open("Message", lsn)
            transaction.sub += 1
            self._rows.add_message(message.prefix, message.content, transaction.ordinal, transaction.sub, lsn)
            transaction.buffered_rows += 1
            return
        if self._open is not None:
            raise DecodeError(f"a non-transactional Message inside of a transaction at {format_lsn(lsn)}", _ADVICE)
        # It stands alone, just behind the record that begins at its lsn: after every commit that ends there.
        self._rows.add_message(message.prefix, message.content, 0, 1)
        self._add_committed(message.lsn + 1, 0, 0, 1, None)

    def _commit(self, commit: wire.Commit, lsn: int) -> None:
        transaction = self._require_open("Commit", lsn)
        self._open = None
        if transaction.parts:
            self._publish_parts(transaction, commit)
        elif transaction.buffered_rows:
            self._add_committed(
                commit.end_lsn, commit.commit_time, transaction.xid, transaction.buffered_rows, transaction.origin
            )
        self.last_lsn = commit.end_lsn

    def _add_committed(self, lsn: int, commit_time: int, xid: int, rows: int, origin: str | None) -> None:
        self._committed.append((lsn, commit_time, xid, rows, True, origin))
        self._committed_rows += rows
        self.last_lsn = lsn

    def _seal(self) -> None:
        """Turn the buffer into a ready batch (committed rows) and a pending part (rows of the open transaction)."""
        rows = self._rows.take()
        committed = rows.slice(0, self._committed_rows)
        if self._committed:
            self._push(Part(committed.num_rows, committed.nbytes, _NOT_ASKED, committed), self._committed)
            self._committed = []
            self._committed_rows = 0
        pending = rows.slice(committed.num_rows)
        if pending.num_rows:
            assert self._open is not None
            self._open.parts.append(self._keep(pending, self._open))
            self._open.buffered_rows = 0

    def _keep(self, rows: pa.RecordBatch, transaction: _Transaction) -> Part:
        """A pending part: in memory while the transaction is small, on disk when not."""
        held = sum(part.nbytes for part in transaction.parts if part.path is None)
        if self._spill_dir is None or held + rows.nbytes <= self._spill_bytes:
            return Part(rows.num_rows, rows.nbytes, (transaction.ordinal, transaction.sub), rows)
        self._spilled += 1
        path = self._spill_dir / f"pending-{self._spilled:08d}.arrow"
        write_segment(path, rows)
        return Part(rows.num_rows, rows.nbytes, (transaction.ordinal, transaction.sub), None, path)

    def _publish_parts(self, transaction: _Transaction, commit: wire.Commit) -> None:
        if transaction.buffered_rows:
            rest = self._rows.take()
            transaction.parts.append(Part(rest.num_rows, rest.nbytes, (transaction.ordinal, transaction.sub), rest))
        row = (commit.end_lsn, commit.commit_time, transaction.xid)
        for part in transaction.parts:
            is_last = part is transaction.parts[-1]
            self._push(part, [(*row, part.rows, is_last, transaction.origin)])

    def _push(self, part: Part, transactions: list[tuple[int, int, int, int, bool, str | None]]) -> None:
        columns = list(zip(*transactions, strict=True))
        table = pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, TRANSACTIONS, strict=True)],
            schema=TRANSACTIONS,
        )
        lsn, complete = transactions[-1][0], transactions[-1][4]
        end = Position.end(lsn) if complete else Position(lsn, *part.last)
        previous = self._ready[-1].last_lsn if self._ready else self._popped_lsn
        self._ready.append(CaptureBatch(part, table, self.relations, end, lsn if complete else previous))


_NOT_ASKED = (0, 0)

_ADVICE = "The stream is not as the protocol says: please report this with the server's version"
