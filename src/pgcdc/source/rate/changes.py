"""Made-up changes of made-up tables: every one is a function of the settings and its number, so that a replay is the same.

Changes are numbered over all tables, and dealt to them in turn. The changes of a table come in cycles: first its INSERTs,
then UPDATEs of rows that are there, then DELETEs of rows of the cycle before. So nothing has to be remembered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.position import SNAPSHOT, STREAM, Position
from pgcdc.core.relation import Column, OldKind, Op, Relation, Relations
from pgcdc.source.rate.options import RateOptions
from pgcdc.spool.schema import CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part

__all__ = ["FIRST_COMMIT", "INT8", "TEXT", "MadeUp"]

I64 = npt.NDArray[np.int64]

FIRST_COMMIT = 1
"""Where the log begins: rows that exist stand behind it, the first transaction is the next."""
INT8, TEXT = 20, 25  # the numbers that PostgreSQL has for these types
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456", np.uint8)


class MadeUp:
    """The changes that these settings give. `relations` gets the tables."""

    def __init__(self, options: RateOptions, relations: Relations) -> None:
        self._options = options
        self._relations = relations
        columns = (Column("id", INT8, -1, True), Column("number", INT8, -1, False), Column("note", TEXT, -1, False))
        self.tables = [
            Relation(number, "public", f"rate_{number}", "d", columns, "rate")
            for number in range(1, options.rate_tables + 1)
        ]
        self._versions = np.array([relations.intern(table) for table in self.tables], np.int32)
        ops = (
            [Op.INSERT] * options.rate_inserts + [Op.UPDATE] * options.rate_updates + [Op.DELETE] * options.rate_deletes
        )
        self._cycle = np.array(ops, np.uint8)

    def transactions(self, first: int, count: int, began_us: int) -> CaptureBatch:
        """`count` transactions, from the commit `first` on."""
        each, rows = self._options.rate_transaction_rows, self._options.rate_transaction_rows * count
        numbers: I64 = (first - FIRST_COMMIT - 1) * each + np.arange(rows)
        ordinals = np.tile(np.arange(1, each + 1), count)
        commits = np.arange(first, first + count)
        owners = _owners(commits, STREAM, self.commit_time(commits, began_us), np.full(count, each))
        table, key, op = self._choose(numbers)
        data = self._changes(ordinals, op, table, key, numbers)
        last = first + count - 1
        return CaptureBatch(Part.of(data), owners, self._relations, Position.end(last), last, token=b"%d" % last)

    def existing(self, table: int, began_us: int) -> CaptureBatch:
        """The rows that a table (from 0) has before the first transaction."""
        count = self._options.rate_existing_rows
        ordinals = Position.of_chunk(FIRST_COMMIT, table, 1).ordinal + np.arange(count)
        key: I64 = np.arange(1, count + 1)
        data = self._changes(ordinals, np.full(count, Op.SNAPSHOT, np.uint8), np.full(count, table), key, -key)
        owners = _owners(np.array([FIRST_COMMIT]), SNAPSHOT, np.array([began_us]), np.array([count]))
        end = Position.chunk_end(FIRST_COMMIT, table)
        return CaptureBatch(Part.of(data), owners, self._relations, end, FIRST_COMMIT)

    def commit_time(self, commits: I64, began_us: int) -> I64:
        """When a transaction is committed, in microseconds since 1970."""
        a_transaction_s = self._options.rate_transaction_rows / self._options.rate_rows_per_second
        times: I64 = (began_us + (commits - FIRST_COMMIT) * a_transaction_s * 1e6).astype(np.int64)
        return times

    def last_commit(self, now_us: int, began_us: int) -> int:
        """The last transaction that is committed by now."""
        options = self._options
        count = int(max(0, now_us - began_us) / 1e6 * options.rate_rows_per_second / options.rate_transaction_rows)
        return FIRST_COMMIT + (min(count, options.rate_transactions) if options.rate_transactions else count)

    def _choose(self, numbers: I64) -> tuple[I64, I64, npt.NDArray[np.uint8]]:
        """Table, key and operation of each change."""
        options = self._options
        table, of_table = numbers % options.rate_tables, numbers // options.rate_tables
        cycle, place = of_table // len(self._cycle), of_table % len(self._cycle)
        op = self._cycle[place]
        kept = options.rate_inserts - options.rate_deletes  # rows of a cycle that are never deleted: the last of it
        pick = _mix(numbers, options.rate_seed) % (np.maximum(cycle, 1) * kept)
        updated = pick // kept * options.rate_inserts + options.rate_deletes + pick % kept
        deleted = (cycle - 1) * options.rate_inserts + place - options.rate_inserts - options.rate_updates
        slot = np.where(
            op == Op.INSERT, cycle * options.rate_inserts + place, np.where(op == Op.UPDATE, updated, deleted)
        )
        # The first cycle has none before it: instead of deleting, it writes its first row once more.
        is_early = (op == Op.DELETE) & (cycle == 0)
        op = np.where(is_early, np.uint8(Op.UPDATE), op).astype(np.uint8)
        slot = np.where(is_early, options.rate_deletes, slot)
        return table, options.rate_existing_rows + 1 + slot, op

    def _changes(self, ordinals: I64, op: npt.NDArray[np.uint8], table: I64, key: I64, numbers: I64) -> pa.RecordBatch:
        count = len(op)
        is_delete = op == Op.DELETE
        ids = pa.array(key).cast(pa.string()).cast(pa.binary())
        values = [ids, pa.array(numbers).cast(pa.string()).cast(pa.binary()), self._notes(numbers)]
        order = (np.arange(3)[None, :] * count + np.flatnonzero(~is_delete)[:, None]).ravel()
        flat = pa.concat_arrays([*values, pa.nulls(1, pa.binary())])
        deleted = np.flatnonzero(is_delete)
        keys = np.stack([deleted, np.full(len(deleted), 3 * count), np.full(len(deleted), 3 * count)], 1).ravel()
        columns = {
            "ordinal": pa.array(ordinals, pa.int64()),
            "sub": pa.array(np.zeros(count), pa.int32()),
            "op": pa.array(op),
            "relation": pa.array(self._versions[table]),
            "new": _lists(flat.take(pa.array(order)), ~is_delete),
            "old": _lists(flat.take(pa.array(keys)), is_delete),
            "old_kind": pa.array(np.where(is_delete, OldKind.KEY, OldKind.NONE), pa.uint8()),
            "unchanged": pa.nulls(count, CHANGES.field("unchanged").type),
            "prefix": pa.nulls(count, pa.string()),
        }
        return pa.RecordBatch.from_arrays([columns[field.name] for field in CHANGES], schema=CHANGES)

    def _notes(self, numbers: I64) -> pa.Array:
        """Letters by the number and the seed."""
        width = self._options.rate_row_width
        step = _mix(numbers, self._options.rate_seed + 1)[:, None] >> (np.arange(width)[None, :] % 50)
        letters = np.ascontiguousarray(_LETTERS[step % len(_LETTERS)])
        offsets = pa.py_buffer(np.arange(0, (len(numbers) + 1) * width, width or 1, dtype=np.int32)[: len(numbers) + 1])
        if not width:
            offsets = pa.py_buffer(np.zeros(len(numbers) + 1, np.int32))
        return pa.BinaryArray.from_buffers(pa.binary(), len(numbers), [None, offsets, pa.py_buffer(letters)])


def _mix(numbers: I64, seed: int) -> I64:
    """A number that looks like chance, not negative, for each number."""
    x = numbers.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def _lists(flat: pa.Array, is_there: npt.NDArray[np.bool_]) -> pa.Array:
    offsets = np.append(0, np.cumsum(is_there * 3)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pc.invert(pa.array(is_there)))


def _owners(commits: I64, kind: int, times: I64, rows: I64) -> pa.RecordBatch:
    count = len(commits)
    columns = {
        "commit": pa.array(commits),
        "kind": pa.array(np.full(count, kind), pa.uint8()),
        "commit_time": pa.array(times),
        "xid": pa.array(commits if kind == STREAM else np.zeros(count, np.int64)),
        "rows": pa.array(rows),
        "complete": pa.array(np.ones(count, np.bool_)),
        "origin": pa.nulls(count, pa.string()),
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in TRANSACTIONS], schema=TRANSACTIONS
    )
