"""A copy of tables as events with the operation SNAPSHOT: the JSON that the stream has, to a file or standard output.

One session reads table after table and hands the lines on as they come: memory does not grow with the tables, and no Spark
is needed for it. Around the rows of each table stand SNAPSHOT_STARTED and SNAPSHOT_COMPLETED.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError
from pgcdc.core.operation import Op
from pgcdc.core.position import SNAPSHOT, Position
from pgcdc.core.state import write_all
from pgcdc.event.batch import Batch
from pgcdc.event.events import LINES, events_of
from pgcdc.event.frame import EventOptions, make_frame
from pgcdc.event.texts import IdSeed
from pgcdc.run.copy_tables import CopiedTable, Copy, Progress, Say, Wanted, explain_reading, open_copy
from pgcdc.run.copy_target import PartialFile
from pgcdc.source.postgres.snapshot.chunks import lock_chunks
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.releases import snapshot_mark, snapshot_rows
from pgcdc.spool.schema import CHANGES, TRANSACTIONS

__all__ = ["copy_to_adapters"]

KIND = "one-off"
_BEGIN = Position.at(0, 0)


class _Target(Protocol):
    def open(self) -> None: ...
    def write(self, lines: memoryview, /) -> None: ...
    def finish(self) -> None: ...
    def discard(self) -> None: ...


def copy_to_adapters(
    wanted: Wanted,
    adapters: Sequence[str],
    file_path: Path | None,
    *,
    invalid_text: str = "error",
    progress: Progress,
    say: Say = lambda text: None,
) -> int:
    """Copy the tables; the number of rows. A file has all of them or is not there; standard output cannot be taken back.

    BrokenPipeError if standard output is all there is, and its reader has gone.
    """
    targets = [_make_target(adapter, file_path, is_alone=len(adapters) == 1) for adapter in adapters]
    try:
        with open_copy(wanted, say) as copy:
            for target in targets:
                target.open()
            rows = _Writer(copy, wanted.where, targets, EventOptions(invalid_text=invalid_text), progress).write_all()
            for target in targets:
                target.finish()
            return rows
    finally:
        for target in targets:
            target.discard()


def _make_target(adapter: str, file_path: Path | None, *, is_alone: bool) -> _Target:
    if adapter == "stdout":
        return _Stdout(is_alone=is_alone)
    if adapter != "file":
        raise ConfigError(f"--adapter {adapter} is not known", "Use stdout or file, or --to parquet:DIR")
    if file_path is None:
        raise ConfigError("--adapter file needs a path", "Add --file-path events.jsonl")
    return PartialFile(file_path, "--file-path")


class _Stdout:
    """Standard output: what is written is written."""

    def __init__(self, descriptor: int = 1, *, is_alone: bool = True) -> None:
        """`is_alone`: there is no other target, so that all is said when nobody reads on."""
        self._descriptor = descriptor
        self._is_alone = is_alone

    def open(self) -> None:
        try:
            os.fstat(self._descriptor)
        except OSError as error:
            raise SinkError("standard output is closed", "Start with a reader at it, or use --adapter file") from error

    def write(self, lines: memoryview, /) -> None:
        try:
            write_all(self._descriptor, lines)
        except BrokenPipeError:
            if self._is_alone:
                raise
            raise SinkError("nobody reads standard output any more", "Check who reads it") from None
        except OSError as error:
            raise SinkError(f"standard output cannot be written: {error.strerror}", "Check who reads it") from error

    def finish(self) -> None:
        pass

    def discard(self) -> None:
        pass


class _Writer:
    """Writes the tables of a copy, one after the other."""

    def __init__(
        self, copy: Copy, where: str, targets: Sequence[_Target], options: EventOptions, progress: Progress
    ) -> None:
        self._copy = copy
        self._where = where
        self._targets = targets
        self._options = options
        self._progress = progress
        self._name = uuid.uuid4().hex[:8]
        self._seed = IdSeed.of("snapshot", uuid.uuid4().hex)
        self._next = 1
        self._has_stdout = any(isinstance(target, _Stdout) for target in targets)

    def write_all(self) -> int:
        total = 0
        for number, table in enumerate(self._copy.tables):
            try:
                total += self._write_table(table)
            except PgcdcError as error:
                if self._has_stdout:
                    done = ", ".join(one.name for one in self._copy.tables[:number]) or "no table"
                    advice = f"{error.advice}. " if error.advice else ""
                    error.advice = f"{advice}What was written is not complete: {done} is whole, {table.name} is not"
                    error.args = (error.message, error.advice)
                raise
        return total

    def _write_table(self, table: CopiedTable) -> int:
        relation = table.relation
        columns = [column.name for column in relation.columns]
        self._progress.begin(table.name, table.estimated_rows)
        self._emit(snapshot_mark(Op.SNAPSHOT_STARTED, self._name, KIND, relation, 0), table)
        rows = 0
        with explain_reading(table.name):
            lock_chunks(self._copy.conn, table.chunks)
            for chunk in table.chunks:
                conditions = [*chunk.conditions, *([self._where] if self._where else [])]
                statement = copy_statement(columns, chunk.source, conditions)
                for values in copy_rows(self._copy.conn, statement, len(columns)):
                    batch = snapshot_rows(values, len(columns))
                    self._emit(batch, table)
                    rows += batch.num_rows
                    self._progress.advance(rows)
        self._emit(snapshot_mark(Op.SNAPSHOT_COMPLETED, self._name, KIND, relation, rows), table)
        self._progress.end(rows)
        return rows

    def _emit(self, changes: pa.RecordBatch, table: CopiedTable) -> None:
        count = changes.num_rows
        ordinals = pa.array(np.arange(self._next, self._next + count), pa.int64())
        self._next += count
        changes = changes.set_column(CHANGES.get_field_index("ordinal"), CHANGES.field("ordinal"), ordinals)
        frame = make_frame(changes, self._owners(count), [table.relation], self._options)
        events = pa.Table.from_batches([events_of(frame, self._seed, LINES, self._options)])
        for lines in Batch(_BEGIN, _BEGIN, events).lines():
            for target in self._targets:
                target.write(lines)

    def _owners(self, count: int) -> pa.RecordBatch:
        """Where the rows stand: behind what was committed when the snapshot was taken."""
        known = {
            "commit": self._copy.lsn, "kind": SNAPSHOT, "commit_time": self._copy.time_us, "xid": 0, "rows": 1,
            "complete": True,
        }  # fmt: skip
        arrays = [
            pa.repeat(pa.scalar(known[field.name], field.type), count)
            if field.name in known
            else pa.nulls(count, field.type)
            for field in TRANSACTIONS
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=TRANSACTIONS)
