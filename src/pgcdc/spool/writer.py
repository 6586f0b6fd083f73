"""The capture's side of the spool: append, release, recover. The slot is the durable log and the spool may be lost at
any time, so nothing is fsynced here. The next start cuts off what a crash damaged, and reads it again from the slot."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from pgcdc.core.errors import SpoolError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import Position
from pgcdc.core.relation import Relation, Relations
from pgcdc.core.state import encode_line, read_lines, write_all
from pgcdc.spool.index import (
    NO_TOKEN,
    IndexRecord,
    Token,
    chunk_number,
    chunk_path,
    encode_record,
    list_chunks,
    scan_records,
)  # fmt: skip
from pgcdc.spool.segment import CaptureBatch, Part, checksum_file, count_rows, write_segment

CHUNK_BYTES = 1 << 20


class SpoolWriter:
    """Owns the spool's folder. There is one writer at a time: the capture process holds the slot's lock."""

    def __init__(self, folder: Path, base: Position, token: Token = NO_TOKEN) -> None:
        """Open the spool, keep what is intact, cut off the rest. Nothing before `base` is needed: an empty spool begins
        there, and earlier segments may be gone. `token` is the last known one before it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._held: deque[IndexRecord] = deque()  # Segments that are not released yet
        self._bases: dict[int, Position] = {}  # Where each chunk of the index begins
        self._chunk = 0
        self._chunk_size = 0
        self.bytes_held = 0
        self.relations = Relations([Relation.from_json(one) for one in read_lines(folder / "relations.jsonl")])
        self._relations_written = len(self.relations)
        self._relations_file = open(folder / "relations.jsonl", "ab", buffering=0)  # noqa: SIM115 - lives with the writer
        self.end = base
        self.resume_lsn = base.commit  # END lsn of the last complete transaction here: where the stream resumes
        self._tokens = deque([token])  # The tokens of the transactions here, and the last one before them; in order
        self._recover(base)
        self._index = open(chunk_path(folder, self._chunk), "ab", buffering=0)  # noqa: SIM115
        for stray in {*folder.glob("pending-*"), *folder.glob("*.partial")}:
            stray.unlink()

    def append(self, batch: CaptureBatch) -> None:
        """Make one batch visible, without changes that are already here (transactions repeated after a crash)."""
        if batch.end <= self.end:
            if batch.part is not None and batch.part.path is not None:
                batch.part.path.unlink()
            return
        try:
            self._append(batch if self.end.is_end else _without(batch, self.end))
        except OSError as error:
            raise SpoolError(
                f"the spool {self._folder} cannot be written: {error.strerror}",
                "Free space on its disk (or lower --spool-limit) and start again: nothing is lost",
            ) from error

    def _append(self, batch: CaptureBatch) -> None:
        if self._chunk_size >= CHUNK_BYTES:
            self._start_chunk(self._chunk + 1)
        token = batch.token if batch.end.is_end else b""
        record = IndexRecord(batch.end, token=token)
        if batch.part is not None:
            self._write_relations()
            name = f"seg-{self._next_segment:012d}.arrow"
            self._next_segment += 1
            path = self._folder / name
            if batch.part.path is not None:
                os.replace(batch.part.path, path)
                written = checksum_file(path)
            else:
                assert batch.part.batch is not None
                written = write_segment(path, batch.part.batch)
            since_us = batch.transactions.column("commit_time")[0].as_py()
            record = IndexRecord(
                batch.end, name, written, batch.part.rows, len(self.relations), since_us, token=token,
                place=(self._chunk, 0, 0),
            )  # fmt: skip
            self._hold(record)
        hit("spool.before_index")
        self._append_record(record, batch.transactions if record.file else None)
        hit("spool.after_index")
        self._move_end(batch.end, token)

    def _hold(self, record: IndexRecord) -> None:
        self._held.append(record)
        self.bytes_held += record.written[0]

    def _move_end(self, end: Position, token: bytes = b"") -> None:
        self.end = end
        if end.is_end:
            self.resume_lsn = end.commit
        if token and end.commit > self._tokens[0].commit:  # a crash may have left an older index
            self._tokens.append(Token(end.commit, token))

    @property
    def has_tokens(self) -> bool:
        """Whether the source needs more than a number to continue."""
        return len(self._tokens) > 1 or bool(self._tokens[0].value)

    def token_at(self, commit: int) -> Token:
        """The last token up to `commit`: the source can continue from it."""
        return next((one for one in reversed(self._tokens) if one.commit <= commit), self._tokens[0])

    @property
    def state(self) -> Position:
        """The position to which state that affects later changes, such as a cache, must be restored."""
        return self.end if self.end.is_snapshot else Position.end(self.resume_lsn)

    def release(self, base: Position) -> None:
        """Delete the segments that every consumer has passed."""
        while len(self._tokens) > 1 and self._tokens[1].commit <= base.commit:
            self._tokens.popleft()
        while self._held and self._held[0].end <= base:
            record = self._held.popleft()
            (self._folder / record.file).unlink(missing_ok=True)
            self.bytes_held -= record.written[0]
        oldest = self._held[0].place[0] if self._held else self._chunk
        for path in list_chunks(self._folder):
            # otherwise the next start finds a hole
            if chunk_number(path) >= oldest or self._bases[chunk_number(path) + 1] > base:
                break
            del self._bases[chunk_number(path)]
            path.unlink()

    @property
    def oldest_commit_us(self) -> int | None:
        """Commit time of the oldest change not released yet, in microseconds since 1970."""
        return self._held[0].since_us if self._held else None

    def close(self) -> None:
        self._index.close()
        self._relations_file.close()

    def _write_relations(self) -> None:
        """Write new relations to disk, before the first segment that refers to them becomes visible."""
        fresh = self.relations.shapes[self._relations_written :]
        if fresh:
            write_all(self._relations_file.fileno(), memoryview(b"".join(encode_line(one.to_json()) for one in fresh)))
            self._relations_written = len(self.relations)

    def _append_record(self, record: IndexRecord, transactions: pa.RecordBatch | None = None) -> None:
        self._chunk_size += write_all(self._index.fileno(), memoryview(encode_record(record, transactions)))

    def _start_chunk(self, number: int) -> None:
        self._index.close()
        self._index = open(chunk_path(self._folder, number), "ab", buffering=0)  # noqa: SIM115
        self._chunk, self._chunk_size = number, 0
        self._bases[number] = self.end
        self._append_record(IndexRecord(self.end, is_base=True))

    def _recover(self, base: Position) -> None:
        """Read the index again, and cut at the first incomplete record or segment."""
        sound, sizes = True, {0: 0}
        chunks = list_chunks(self._folder)
        for path in chunks:
            size = 0
            if sound:
                size, sound = self._recover_chunk(path, base)
            if size == 0:
                path.unlink()
            else:
                os.truncate(path, size)
                sizes[chunk_number(path)] = size
        self._chunk = max(sizes)
        self._chunk_size = sizes[self._chunk]
        if self._chunk_size == 0 or self.end < base:
            # Never reuse a number: a reader that is still running looks for the next one.
            self._chunk = max(map(chunk_number, chunks), default=0)
            self._start_over(base)
        kept = {record.file for record in self._held}
        self._next_segment = 1
        for file in self._folder.glob("seg-*.arrow"):
            self._next_segment = max(self._next_segment, int(file.stem.removeprefix("seg-")) + 1)
            if file.name not in kept:
                file.unlink()

    def _recover_chunk(self, path: Path, base: Position) -> tuple[int, bool]:
        """(intact bytes, whether that is all of them). A missing segment is acceptable only if it was already confirmed."""
        data = path.read_bytes()
        number, size = chunk_number(path), 0
        try:
            for record in scan_records(data, path.name, number):
                if record.is_base and record.end > self.end:  # an older chunk has lost its tail, or is gone
                    return size, False
                if record.is_base:
                    self._bases[number] = record.end
                if record.file and record.end > base:
                    segment = self._folder / record.file
                    if (
                        not segment.exists()
                        or checksum_file(segment) != record.written
                        or record.relations > len(self.relations)
                    ):
                        return size, False
                    self._hold(record)
                self._move_end(record.end, record.token)
                size = record.place[2]
        except SpoolError:
            return size, False
        return size, size == len(data)

    def _start_over(self, base: Position) -> None:
        for path in list_chunks(self._folder):
            path.unlink()
        self._held.clear()
        self.bytes_held = 0
        self._chunk += 1
        self._bases = {self._chunk: base}
        data = encode_record(IndexRecord(base, is_base=True))
        chunk_path(self._folder, self._chunk).write_bytes(data)
        self._chunk_size = len(data)
        self._move_end(base)


def _without(batch: CaptureBatch, end: Position) -> CaptureBatch:
    """The batch without the first changes of its first transaction, up to `end`, which is inside it."""
    first = tuple(batch.transactions.column(name)[0].as_py() for name in ("commit", "kind")) if batch.part else None
    if batch.part is None or first != (end.commit, end.kind):
        return batch
    rows = batch.part.load_batch()
    ordinal, sub = rows.column("ordinal").to_numpy(), rows.column("sub").to_numpy()
    later = (ordinal > end.ordinal) | ((ordinal == end.ordinal) & (sub > end.sub))
    later[batch.transactions.column("rows")[0].as_py() :] = True
    skipped = int((~later).sum())
    if batch.part.path is not None:
        batch.part.path.unlink()
    counts = batch.transactions.column("rows").to_pylist()
    counts[0] -= skipped
    transactions = count_rows(batch.transactions, counts)
    return replace(batch, part=Part.of(rows.slice(skipped)), transactions=transactions, told={})
