"""The queries' side of the spool: follows the index, and finds the rows of segments in (start, end]."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import GapError, SpoolError
from pgcdc.core.position import LAST_SUB, SCHEMA_SUB, Position
from pgcdc.core.relation import GrowingLines, Op, Relation
from pgcdc.spool.index import IndexRecord, chunk_number, chunk_path, list_chunks, load_transactions, scan_records
from pgcdc.spool.schema import ADDRESSED, CHANGES, TRANSACTIONS
from pgcdc.spool.segment import Written, open_segment

Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """The part of one segment within (start, end]. Small and picklable: what an executor needs to read it."""

    path: str
    written: Written
    transactions: bytes  # A serialized record batch in the TRANSACTIONS schema
    start: Position
    end: Position
    continues: bool  # Its first transaction began in an earlier segment


class SpoolReader:
    """Follows the index as it grows. Not thread-safe. Keeps only a little memory per undelivered segment; transactions
    stay in the index until needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._chunk = 0
        self._offset = 0
        self.base = Position.at(0, 0)
        self.end = Position.at(0, 0)
        self.records: list[IndexRecord] = []
        self._relations: list[Relation] = []
        self._relation_lines = GrowingLines(folder / "relations.jsonl")

    def refresh(self) -> None:
        """Read what was appended since the last call."""
        if self._chunk == 0:
            chunks = list_chunks(self._folder)
            if not chunks:
                return
            self._chunk = chunk_number(chunks[0])
        while True:
            self._read_chunk()
            if not chunk_path(self._folder, self._chunk + 1).exists():
                return
            self._read_chunk()  # records appended between the two checks
            self._chunk, self._offset = self._chunk + 1, 0

    def _read_chunk(self) -> None:
        path = chunk_path(self._folder, self._chunk)
        try:
            with open(path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:  # it was released completely: continue with the first chunk left
            later = [number for number in map(chunk_number, list_chunks(self._folder)) if number > self._chunk]
            if later:
                self._chunk, self._offset = later[0] - 1, 0
            return
        for record in scan_records(data, path.name, self._chunk, self._offset):
            self._offset = record.place[2]
            self._take(record)

    def _take(self, record: IndexRecord) -> None:
        if record.is_base:
            if record.end != self.end:  # the first chunk, or one after a hole: nothing before it may be served
                self.records.clear()
                self.base = record.end
        elif record.file:
            self.records.append(record)
        self.end = record.end

    def forget(self, position: Position) -> None:
        """Drop everything up to `position` from memory: no query asks for it again."""
        keep = bisect.bisect_right(self.records, position, key=lambda record: record.end)
        if keep:
            self.base = max(self.base, self.records[keep - 1].end)
            del self.records[:keep]

    def slices(self, start: Position, end: Position) -> list[SegmentSlice]:
        """What to read for (start, end], in order. The caller must have made sure that the spool has reached `end`."""
        records = self.after(start)
        first = len(self.records) - len(records)
        ends = [self.records[first - 1].end if first else self.base, *(record.end for record in records)]
        wanted = list(itertools.takewhile(lambda one: one[1] < end, zip(records, ends, strict=False)))
        found = []
        tables = self._load([record for record, _ in wanted])
        for (record, previous), transactions in zip(wanted, tables, strict=True):
            path = str((self._folder / record.file).resolve())
            found.append(SegmentSlice(path, record.written, transactions, start, end, not previous.is_end))
        return found

    def _load(self, records: list[IndexRecord]) -> Iterator[bytes]:
        for chunk, group in itertools.groupby(records, key=lambda record: record.place[0]):
            path = chunk_path(self._folder, chunk)
            try:
                with open(path, "rb") as file:
                    for record in group:
                        file.seek(record.place[1])
                        yield load_transactions(file.read(record.place[2] - record.place[1]), record, path.name)
            except FileNotFoundError as error:
                raise SpoolError(
                    f"index {path.name} is gone", "Stop pgcdc and start it again: missing changes are read again"
                ) from error

    def after(self, start: Position) -> list[IndexRecord]:
        """The segments that hold changes after `start`."""
        if start < self.base:
            raise GapError(
                f"the query wants to continue from {start}, but changes are kept only after {self.base}",
                "Its checkpoint is older than what was confirmed to the source. Restore the checkpoint that belongs to "
                "this state directory, or start with a new state directory and a new slot",
            )
        return self.records[bisect.bisect_right(self.records, start, key=lambda record: record.end) :]

    def relations(self) -> list[Relation]:
        """All relations, by version."""
        self._relations += map(Relation.from_json, self._relation_lines.read())
        return self._relations


def plan_end(records: list[IndexRecord], end: Position, max_rows: int, max_bytes: int) -> Position | None:
    """Where a batch of these records (those after its start) should end: at a commit, as late as the limits allow.
    `end` is the spool's end. Only a transaction larger than the limits is split, at the end of a segment. None: wait
    for the rest of a transaction."""
    rows = size = 0
    commit: Position | None = None
    split: Position | None = None
    for record in records:
        rows += record.rows
        size += record.written[0]
        if split is not None and (rows > max_rows or size > max_bytes):
            return commit or split
        split = record.end
        if record.end.is_end:
            commit = record.end
    if end.is_end or split is None:
        return end
    return commit


def read_slice(
    piece: SegmentSlice,
    *,
    markers: bool = False,
    shapes: Sequence[SchemaChange] = (),
    addressed: bool = False,
    sentinels: bool = False,
) -> tuple[pa.Table, pa.Table]:
    """The changes in range, and each row's transaction. With `markers`, a BEGIN before and a COMMIT after each
    transaction. With `shapes`, a SCHEMA_CHANGE before the first row of each, or in place of its mark. Their positions
    depend only on the transaction, so a replay with other cuts has the same ones. With `addressed`, also rows that are
    for some adapters only. Sentinels are omitted unless requested."""
    table = open_segment(Path(piece.path), piece.written)
    transactions = pa.ipc.read_record_batch(pa.py_buffer(piece.transactions), TRANSACTIONS)
    counts = transactions.column("rows").to_numpy()
    of_row = np.repeat(np.arange(transactions.num_rows), counts)
    if markers or shapes:
        made_up = _markers(table, transactions, piece.continues) if markers else []
        made_up.append(_schema_changes(table, transactions, shapes))
        table, of_row = _insert(table, of_row, made_up)
    commit, kind = (transactions.column(name).to_numpy()[of_row] for name in ("commit", "kind"))
    ordinal = table.column("ordinal").to_numpy()
    sub = table.column("sub").to_numpy()
    wanted = _after(commit, kind, ordinal, sub, piece.start) & ~_after(commit, kind, ordinal, sub, piece.end)
    origins = transactions.column("origin")
    if not addressed and origins.null_count < len(origins):
        is_others = pc.fill_null(pc.equal(origins, ADDRESSED), False).to_numpy(zero_copy_only=False)
        wanted &= ~is_others[of_row]
    # A stored mark only provides the position of a change of shape.
    wanted &= (table.column("op").to_numpy() != Op.SCHEMA_CHANGE) | (table.column("relation").to_numpy() < 0)
    if not sentinels:
        wanted &= table.column("op").to_numpy() != Op.SENTINEL
    rows = np.flatnonzero(wanted)
    owners = pa.Table.from_batches([transactions]).take(pa.array(of_row[rows]))
    if len(rows) == table.num_rows:
        return table, owners
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return table.slice(int(rows[0]), len(rows)), owners
    return table.take(pa.array(rows)), owners


_MadeUp = tuple[pa.RecordBatch, np.ndarray, np.ndarray]
"""Rows that are not in the segment, their transactions, and their places: for row r of the segment, 4r to 4r+3."""
# Where a table gets another shape, and the values of the event that reports it
SchemaChange = tuple[Position, list[bytes]]
_BEFORE, _DIRECTLY_BEFORE, _ITSELF, _BEHIND = range(4)


def _insert(table: pa.Table, of_row: np.ndarray, made_up: list[_MadeUp]) -> tuple[pa.Table, np.ndarray]:
    """A whole segment with the made-up rows in their places, and the transaction of each row."""
    places = np.concatenate([np.arange(len(of_row)) * 4 + _ITSELF, *(place for _, _, place in made_up)])
    order = np.argsort(places, kind="stable")
    everything = pa.concat_tables([table, *(pa.Table.from_batches([rows]) for rows, _, _ in made_up)])
    owners = np.concatenate([of_row, *(owners for _, owners, _ in made_up)])
    return everything.take(pa.array(order)), owners[order]


def _markers(table: pa.Table, transactions: pa.RecordBatch, continues: bool) -> list[_MadeUp]:
    counts = transactions.column("rows").to_numpy()
    ends = np.cumsum(counts)
    is_real = transactions.column("xid").to_numpy() != 0  # a message may be outside any transaction
    begun, complete = is_real.copy(), is_real & transactions.column("complete").to_numpy(zero_copy_only=False)
    if continues and len(begun):
        begun[0] = False
    begins, commits = np.flatnonzero(begun), np.flatnonzero(complete)
    last_ordinals = table.column("ordinal").to_numpy()[ends[commits] - 1]
    return [
        (_marks(Op.BEGIN, np.zeros(len(begins), np.int64), 0), begins, (ends - counts)[begins] * 4 + _BEFORE),
        (_marks(Op.COMMIT, last_ordinals, LAST_SUB), commits, (ends - 1)[commits] * 4 + _BEHIND),
    ]


def _schema_changes(table: pa.Table, transactions: pa.RecordBatch, shapes: Sequence[SchemaChange]) -> _MadeUp:
    """The schema changes whose row is in this segment: each stays with its row, wherever batches are cut."""
    ends = np.cumsum(transactions.column("rows").to_numpy())
    owned = list(zip(*(transactions.column(name).to_pylist() for name in ("commit", "kind")), strict=True))
    ordinals, subs = table.column("ordinal").to_numpy(), table.column("sub").to_numpy()
    here, owners, rows = [], [], []
    for change in shapes:
        position = change[0]
        owner = bisect.bisect_left(owned, (position.commit, position.kind))
        if owner == len(owned) or owned[owner] != (position.commit, position.kind):
            continue
        first, ordinal = int(ends[owner - 1]) if owner else 0, position.ordinal + 1
        row = first + int(np.searchsorted(ordinals[first : ends[owner]], ordinal))
        if row < ends[owner] and (ordinals[row], subs[row]) == (ordinal, 0):
            here.append(change)
            owners.append(owner)
            rows.append(row)
    values = pa.array([values for _, values in here], CHANGES.field("new").type)
    before = np.array([position.ordinal for position, _ in here], np.int64)
    places = np.array(rows, np.int64) * 4 + _DIRECTLY_BEFORE
    return _marks(Op.SCHEMA_CHANGE, before, SCHEMA_SUB, values), np.array(owners, np.int64), places


def _marks(op: Op, ordinals: np.ndarray, sub: int, new: pa.Array | None = None) -> pa.RecordBatch:
    count = len(ordinals)
    columns = {
        "ordinal": pa.array(ordinals, pa.int64()),
        "sub": pa.array(np.full(count, sub), pa.int32()),
        "op": pa.array(np.full(count, int(op)), pa.uint8()),
        "relation": pa.array(np.full(count, -1), pa.int32()),
        "old_kind": pa.array(np.zeros(count), pa.uint8()),
    }
    if new is not None:
        columns["new"] = new
    nothing = [pa.nulls(count, field.type) for field in CHANGES]
    arrays = [columns.get(field.name, empty) for field, empty in zip(CHANGES, nothing, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)


def _after(commit: Column, kind: Column, ordinal: Column, sub: Column, limit: Position) -> Column:
    later: Column = sub > limit.sub
    for column, bound in ((ordinal, limit.ordinal), (kind, limit.kind), (commit, limit.commit)):
        later = (column > bound) | ((column == bound) & later)
    return later
