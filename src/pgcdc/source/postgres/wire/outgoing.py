"""Committed changes on their way out of the capture, and the batches they become.

A change is numbered on arrival, as if every subtransaction would commit. Most do, and then the parts go out unchanged.
Only after a rollback are the remaining changes renumbered, part by part on the way out. So a streamed transaction has
the same positions as an unstreamed one, and only one part of it is in memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc.core.position import STREAM, Position
from pgcdc.core.relation import Op, Relations
from pgcdc.source.postgres.wire.waiting import PendingPart
from pgcdc.spool.schema import TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part

TransactionRow = tuple[int, int, int, int, bool, str | None]  # One row of the schema TRANSACTIONS; the kind is STREAM


class Outbox:
    """What is ready to be returned, in order."""

    def __init__(self, relations: Relations, start_lsn: int) -> None:
        self._relations = relations
        self._ready: deque[Outgoing] = deque()
        self.last_lsn = start_lsn  # END lsn of the last transaction that was returned completely

    def __bool__(self) -> bool:
        return bool(self._ready)

    def put(self, outgoing: Outgoing) -> None:
        if outgoing:
            self._ready.append(outgoing)

    def pop(self) -> CaptureBatch | None:
        if not self._ready:
            return None
        told = self._ready[0].told
        part, transactions = self._ready[0].take()
        if not self._ready[0]:
            self._ready.popleft()
        columns = list(zip(*transactions, strict=True))
        columns.insert(1, (STREAM,) * len(transactions))
        table = pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, TRANSACTIONS, strict=True)],
            schema=TRANSACTIONS,
        )
        lsn, is_complete = transactions[-1][0], transactions[-1][4]
        if is_complete:
            self.last_lsn = lsn
        end = Position.end(lsn) if is_complete else Position.at(lsn, *part.last)
        return CaptureBatch(part, table, self._relations, end, self.last_lsn, told)

    def advance(self, lsn: int) -> CaptureBatch | None:
        """A batch that only moves the position. None if the position does not change or anything is ready."""
        if self._ready or lsn <= self.last_lsn:
            return None
        self.last_lsn = lsn
        return CaptureBatch.advance(lsn, self._relations)


class Outgoing:
    """The rows of several small transactions, or one large transaction in parts."""

    def __init__(
        self,
        parts: list[PendingPart],
        transactions: list[TransactionRow],
        aborted: array[int] | None = None,
        told: Mapping[int, int] = {},
    ) -> None:
        """`transactions` describes the rows; if there is only one, `take` counts its rows."""
        self.told = told  # As in CaptureBatch, for the next part
        self._transactions = transactions
        self._aborted = np.unique(np.frombuffer(aborted, np.uint32)) if aborted else np.empty(0, np.uint32)
        self._parts: deque[PendingPart] = deque()
        self._clean = 0  # the number of leading parts that are final
        self._at = (0, 0)
        is_clean = True
        for one in parts:
            mask = self._survivors(one)
            is_clean = is_clean and mask is None  # after the first gap every number is wrong
            self._clean += is_clean
            if mask is None or mask.any():
                self._parts.append(one)
            else:
                one.drop()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self) -> tuple[Part, list[TransactionRow]]:
        """The next part, in final form, with its transactions."""
        one = self._parts.popleft()
        # where in the transaction is not known
        self.told = {oid: count for oid, count in self.told.items() if count > 1}
        if self._clean:
            self._clean -= 1
            part = one.part
            self._at = part.last
            if one.runs_path is not None:
                one.runs_path.unlink(missing_ok=True)
        else:
            part = self._renumber(one)
        if len(self._transactions) > 1:
            return part, self._transactions
        lsn, commit_time, xid, _, _, origin = self._transactions[0]
        return part, [(lsn, commit_time, xid, part.rows, not self._parts, origin)]

    def _survivors(self, one: PendingPart) -> npt.NDArray[np.bool_] | None:
        """Which changes of a part remain; None if all do."""
        if not len(self._aborted):
            return None
        runs = one.load_runs()
        gone = np.isin(runs[:, 1], self._aborted)
        if not gone.any():
            return None
        lengths = np.append(runs[1:, 0], one.part.rows) - runs[:, 0]
        mask: npt.NDArray[np.bool_] = ~np.repeat(gone, lengths)
        return mask

    def _renumber(self, one: PendingPart) -> Part:
        mask = self._survivors(one)
        rows = one.part.load().combine_chunks().to_batches()[0]
        if mask is not None:
            rows = rows.filter(pa.array(mask))
        one.drop()  # mapped data stays readable
        ordinals, subs = number_changes(rows.column("op").to_numpy(), *self._at)
        self._at = int(ordinals[-1]), int(subs[-1])
        columns = [pa.array(ordinals, pa.int64()), pa.array(subs, pa.int32()), *rows.columns[2:]]
        rows = pa.RecordBatch.from_arrays(columns, schema=rows.schema)
        return Part(rows.num_rows, rows.nbytes, self._at, rows)


def number_changes(
    ops: npt.NDArray[np.uint8], ordinal: int, sub: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ordinals and sub-ordinals of changes that follow the change (ordinal, sub)."""
    is_row = ops != Op.MESSAGE
    ordinals = ordinal + np.cumsum(is_row)
    messages = np.cumsum(~is_row)
    before = np.maximum.accumulate(np.where(is_row, messages, -sub))
    return ordinals, np.where(is_row, 0, messages - before)


def add_told(told: dict[int, int], more: Mapping[int, int]) -> None:
    """Merge counts; a table described again counts as 2."""
    for oid, count in more.items():
        told[oid] = 2 if oid in told else count
