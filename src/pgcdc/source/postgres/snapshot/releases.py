"""Rows from tables, put into the stream between two transactions, durably, so that every replay has them there.

The stream can be read again from the slot, and the spool is only a copy of it. Snapshot rows cannot be read again: the
table has changed since. So a chunk's file of rows is durable before it is released, and so is the log that records the
position. A lost spool is refilled from both, each row at its position.

A file of rows has the schema CHANGES in any number of record batches, as `stage_rows` writes it. Its `ordinal` and
`relation` are set on release. Its name contains its chunk, rows, size and checksum, so that damage before the release
is found, too.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from pgcdc.core.errors import SpoolError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.position import LAST_CHUNK, MAX_CHUNK_ROWS, SNAPSHOT, Position
from pgcdc.core.relation import OldKind, Op, Relation, Relations
from pgcdc.core.state import append_lines, fsync_folder, read_lines
from pgcdc.core.wording import counted
from pgcdc.event.audience import Letter, append_letter, keep_letters
from pgcdc.postgres.database import name_table
from pgcdc.source.postgres.snapshot.copy import row_lists
from pgcdc.spool.schema import ADDRESSED, CHANGES, TRANSACTIONS
from pgcdc.spool.segment import CaptureBatch, Part, Written, checksum_file


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows in a durable file, in the folder of the releases."""

    file: str  # Its name
    rows: int
    written: Written
    time_us: int  # When they were read, in microseconds since 1970


@dataclass(frozen=True, slots=True)
class Release:
    """The rows of one chunk, and their position in the stream."""

    commit: int  # The transaction that they follow
    chunk: int
    staged: Staged
    relation: dict[str, Any] | None  # The rows' shape; None if none of them belongs to a table
    note: dict[str, Any]  # What the releaser needs after a crash
    adapters: tuple[str, ...] = ()  # The adapters that receive the rows; (): all

    @property
    def end(self) -> Position:
        return Position.chunk_end(self.commit, self.chunk)

    def follows(self, end: Position) -> bool:
        """Whether its position directly follows `end`, or `end` is inside it: then it can become visible now."""
        return end.commit == self.commit and (end.is_snapshot or end.is_end)


_RELEASE = TypeAdapter(Release)
BARE_ROWS = 65_536


_STAGED_NAME = re.compile(r"([\w-]+)\.(\d+)-(\d+)-(\d+)-(\d+)\.\w+\.arrow")


def find_staged(folder: Path) -> dict[str, Staged]:
    """The results of `stage_rows` after a crash, by chunk. The file names contain everything, so no file is read."""
    found = {}
    for path in folder.glob("*.arrow"):
        if match := _STAGED_NAME.fullmatch(path.name):
            rows, size, crc, time_us = map(int, match.groups()[1:])
            found[match[1]] = Staged(path.name, rows, (size, crc), time_us)
    return found


def stage_rows(folder: Path, batches: Iterable[pa.RecordBatch], chunk: str = "rows", time_us: int = 0) -> Staged:
    """Durably write the rows of a chunk: the file gets its name only when complete. Without a time, the rows count as
    read now."""
    rows, token, time_us = 0, secrets.token_hex(8), time_us or time.time_ns() // 1000
    partial = folder / f"{chunk}.{token}.arrow.partial"
    try:
        with open(partial, "wb") as file:
            with pa.ipc.new_file(file, CHANGES) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
            file.flush()
            os.fsync(file.fileno())
        size, crc = checksum_file(partial)
        name = f"{chunk}.{rows}-{size}-{crc}-{time_us}.{token}.arrow"
        os.replace(partial, folder / name)
        fsync_folder(folder)
    except OSError as error:
        advice = "Free space on the disk of the state directory and start again: nothing is lost"
        raise SpoolError(f"{partial} cannot be written: {error.strerror}", advice) from error
    finally:
        partial.unlink(missing_ok=True)
    return Staged(name, rows, (size, crc), time_us)


class Releases:
    """The log of releases that may be needed again. The capture process owns it."""

    def __init__(self, folder: Path, base: Position, *, keeps_log: bool = False) -> None:
        """Nothing up to `base` is needed again."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.keeps_log = folder, keeps_log
        """Whether the whole log is needed, including delivered rows: while an initial snapshot is running."""
        self._log, self._audience = folder / "releases.jsonl", folder / "audience.jsonl"
        raws = read_lines(self._log)
        self._known = [_RELEASE.validate_python(raw) for raw in raws]
        self.found = [(one.note, one.staged.rows) for one in self._known if one.note]
        """The log's notes with their numbers of rows, for recovery."""
        self.forget(base)
        keep_letters(self._audience, {str(one.end) for one in self._known if one.adapters})

    def add(
        self,
        after: Position,
        staged: Staged,
        relation: Relation | None,
        note: dict[str, Any] | None = None,
        *,
        adapters: tuple[str, ...] = (),
        reload: str = "",
        is_last: bool = False,
    ) -> Release:
        """Release rows after `after`, the spool's end; the release then owns their file. Durable. With `adapters`, only
        these receive them; `reload` and `is_last` are passed on to them (`Letter`)."""
        if staged.rows > MAX_CHUNK_ROWS:
            raise SpoolError(f"a chunk of {counted(staged.rows, 'row')} is too large", "Use smaller chunks")
        if not self.has_place(after):
            raise SpoolError(f"rows of a snapshot have no position after {after}")
        chunk = after.chunk + 1 if after.is_snapshot else 0
        release = Release(after.commit, chunk, staged, relation.to_json() if relation else None, note or {}, adapters)
        if adapters:
            first, last = str(Position.of_chunk(after.commit, chunk, 0)), str(release.end)
            oid, title = (relation.oid, name_table(relation.namespace, relation.name)) if relation else (0, "")
            append_letter(self._audience, Letter(first, last, adapters, reload, oid, is_last, title))
        hit("releases.before_log")
        append_lines(self._log, [asdict(release)])
        hit("releases.after_log")
        self._known.append(release)
        return release

    def stage(self, batches: Iterable[pa.RecordBatch], time_us: int = 0) -> Staged:
        """Write rows to a new file, to be released."""
        return stage_rows(self.folder, batches, time_us=time_us)

    @staticmethod
    def has_place(after: Position) -> bool:
        """Whether rows can be released here: at the end of a transaction, or of other snapshot rows."""
        return after.is_end and not (after.is_snapshot and after.chunk >= LAST_CHUNK)

    def after(self, position: Position) -> list[Release]:
        """The releases after `position`, in order."""
        return [release for release in self._known if release.end > position]

    def forget(self, base: Position) -> None:
        """Nothing up to `base` is needed again: delete the files, and the log once it is empty."""
        gone = [release for release in self._known if release.end <= base]
        self._known = self.after(base)
        if not self._known and not self.keeps_log:
            self._log.unlink(missing_ok=True)
        for release in gone:
            (self.folder / release.staged.file).unlink(missing_ok=True)

    def remove_unknown(self, staged: Collection[str]) -> None:
        """Delete files that are neither released nor `staged`."""
        kept = {release.staged.file for release in self._known}.union(staged)
        for file in self.folder.glob("*.arrow*"):
            if file.name not in kept:
                file.unlink()

    def batches(self, release: Release, relations: Relations) -> Iterator[CaptureBatch]:
        """The rows as capture batches: the last one ends with the chunk."""
        path = self.folder / release.staged.file
        if not path.exists() or checksum_file(path) != release.staged.written:
            raise StateError(
                f"{path}, which contains rows of a snapshot, is missing or damaged",
                "Restore the state directory from a backup, or start over: pgcdc resync --new-slot",
            )
        relation = Relation.from_json(release.relation) if release.relation else None
        with pa.memory_map(str(path)) as source:
            file = pa.ipc.open_file(source)
            ordinal = Position.of_chunk(release.commit, release.chunk, 0).ordinal
            for number in range(file.num_record_batches):
                rows = file.get_batch(number)
                end = release.end if number == file.num_record_batches - 1 else None
                time_us = release.staged.time_us
                origin = ADDRESSED if release.adapters else None
                place = (release.commit, ordinal, relation, relations)
                yield number_rows(rows, *place, time_us=time_us, end=end, origin=origin)
                ordinal += rows.num_rows


def number_rows(
    rows: pa.RecordBatch,
    commit: int,
    ordinal: int,
    relation: Relation | None,
    relations: Relations,
    *,
    time_us: int,
    end: Position | None = None,
    origin: str | None = None,
) -> CaptureBatch:
    """Rows with their final positions and versions, after `ordinal`. `end`: they are the last of their chunk."""
    of_table = rows.column("relation").to_numpy() >= 0
    version = relations.intern(relation) if relation is not None and of_table.any() else -1
    columns = {
        "ordinal": pa.array(ordinal + 1 + np.arange(rows.num_rows), pa.int64()),
        "relation": pa.array(np.where(of_table, version, -1), pa.int32()),
    }
    data = pa.RecordBatch.from_arrays(
        [columns.get(field.name, rows.column(field.name)) for field in CHANGES], schema=CHANGES
    )
    owner = {"commit": commit, "kind": SNAPSHOT, "commit_time": time_us, "xid": 0, "rows": rows.num_rows}
    transactions = pa.RecordBatch.from_pylist(
        [{**owner, "complete": end is not None, "origin": origin}], schema=TRANSACTIONS
    )
    last = (ordinal + rows.num_rows, 0)
    part = Part(rows.num_rows, data.nbytes, last, data)
    return CaptureBatch(part, transactions, relations, end or Position(commit, SNAPSHOT, *last), commit)


# --- rows as changes


def snapshot_rows(values: pa.Array, columns: int) -> pa.RecordBatch:
    """Rows as changes with the operation SNAPSHOT; `values` are flat, from `copy_rows`, `columns` per row."""
    lists = row_lists(values, columns)
    return _batch(Op.SNAPSHOT, {"new": lists}, len(lists))


def bare_rows(count: int) -> Iterator[pa.RecordBatch]:
    """Rows of a table without columns, as `snapshot_rows` makes them."""
    for begin in range(0, count, BARE_ROWS):
        lists = pa.array([()] * min(BARE_ROWS, count - begin), CHANGES.field("new").type)
        yield _batch(Op.SNAPSHOT, {"new": lists}, len(lists))


def deleted_rows(rows: pa.Array) -> pa.RecordBatch:
    """Vanished rows as DELETEs. `rows` are lists of values, one per column; only those of the key matter."""
    return _batch(Op.DELETE, {"old": rows}, len(rows), OldKind.KEY)


def truncated_rows() -> pa.RecordBatch:
    """A TRUNCATE, which announces that all rows of the table follow again."""
    return _batch(Op.TRUNCATE, {}, 1)


def snapshot_mark(op: Op, snapshot: str, kind: str, table: Relation, rows: int) -> pa.RecordBatch:
    """One event on `pgcdc:_snapshot`: the reading of a table begins, or is complete."""
    return marker(op, snapshot, kind, table.namespace, table.name, str(rows))


def marker(op: Op, *texts: str) -> pa.RecordBatch:
    """One event with these values that is no row of a table."""
    values = pa.array([[text.encode() for text in texts]], CHANGES.field("new").type)
    return _batch(op, {"new": values}, 1, relation=-1)


def schema_mark(details: Mapping[str, Any]) -> pa.RecordBatch:
    """From here on a table has the shape that the catalog says (`setup/watch.py`). Readers of the spool do not see it
    as a change."""
    return _batch(Op.SCHEMA_CHANGE, {"prefix": pa.array([json.dumps(details)])}, 1)


def _batch(
    op: Op, known: dict[str, pa.Array], count: int, old_kind: OldKind = OldKind.NONE, relation: int = 0
) -> pa.RecordBatch:
    columns = {
        "ordinal": pa.array(np.zeros(count), pa.int64()),
        "sub": pa.array(np.zeros(count), pa.int32()),
        "op": pa.array(np.full(count, int(op)), pa.uint8()),
        "relation": pa.array(np.full(count, relation), pa.int32()),
        "old_kind": pa.array(np.full(count, int(old_kind)), pa.uint8()),
        **known,
    }
    arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in CHANGES]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)
