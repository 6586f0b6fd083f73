"""What a task of an initial snapshot does: read one entry of the plan in its snapshot, into a durable file.

A task answers with a small file beside the rows, `<entry>.json`, once they are durable: how many there are, and the name of
their file. Every attempt has a file of its own, so that two tasks for the same entry (one of a query that was killed, say)
do no harm: the last answer counts. A task that cannot read says why in the same way, and never fails the query for it: what
is to be done is the capture's decision. Only a disk that cannot be written is an error at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from pgcdc.capture.chunks import Chunk, lock_chunks
from pgcdc.capture.copy import copy_rows, copy_statement
from pgcdc.capture.database import Connection, connect, explain_errors, quote_literal
from pgcdc.capture.releases import stage_rows
from pgcdc.capture.snapshot_rows import snapshot_rows
from pgcdc.errors import ConnectionLost, SourceError, SpoolError, StateError
from pgcdc.ops.failpoint import hit
from pgcdc.spool.segment import Written
from pgcdc.state import write_json_durably

__all__ = ["Answers", "Staged", "Work", "copy_in_snapshot", "stage", "unstage"]

ROWS, LOST_SNAPSHOT, LOST_TABLE, FAILED = "rows", "lost snapshot", "lost table", "failed"
"""What a task can answer: the rows; the snapshot is not held any more; the table is not as it was planned; try again."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a task needs to know. Travels to the executors."""

    id: str
    snapshot: str
    """Its name on the server."""
    columns: tuple[str, ...]
    row_filter: str | None
    chunk: Chunk
    folder: str

    def to_json(self) -> dict[str, Any]:
        """For the control socket."""
        return {**asdict(self), "chunk": self.chunk.to_json()}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Work:
        """The work behind `to_json()`."""
        return cls(**{**raw, "columns": tuple(raw["columns"]), "chunk": Chunk.from_json(raw["chunk"])})


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has answered."""

    id: str
    answer: str
    """One of the constants above."""
    message: str = ""
    file: str = ""
    rows: int = 0
    written: Written = (0, 0)
    time_us: int = 0


def stage(url: str, work: Work) -> None:
    """Read the rows of an entry and answer, unless somebody has."""
    folder = Path(work.folder)
    if not folder.is_dir() or _answer_file(folder, work.id).exists():
        return
    name = f"{work.id}.{secrets.token_hex(4)}.arrow"
    time_us = time.time_ns() // 1000
    try:
        try:
            with connect(url, application_name="pgcdc snapshot reader") as conn:
                rows, written = stage_rows(folder / name, _batches(conn, work))
            answer = Staged(work.id, ROWS, file=name, rows=rows, written=written, time_us=time_us)
        except _SnapshotLost:
            answer = Staged(work.id, LOST_SNAPSHOT)
        except ConnectionLost as error:
            answer = Staged(work.id, FAILED, str(error))
        except SourceError as error:
            answer = Staged(work.id, LOST_TABLE, error.message)
        hit("staging.staged")
        write_json_durably(_answer_file(folder, work.id), asdict(answer))
    except (SpoolError, StateError):
        if folder.is_dir():  # else the snapshot is over, and nobody waits for it
            raise
    hit("staging.answered")


class _SnapshotLost(Exception):
    pass


def _batches(conn: Connection, work: Work) -> Iterator[pa.RecordBatch]:
    with explain_errors(f"read {work.chunk.sql}"):
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            conn.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(work.snapshot)}".encode())
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.errors.ObjectNotInPrerequisiteState):
            raise _SnapshotLost from None
        lock_chunks(conn, [work.chunk])
        hit("staging.reading")
        for values in copy_in_snapshot(conn, work.columns, work.chunk, work.row_filter):
            yield snapshot_rows(values, len(work.columns))


def copy_in_snapshot(
    conn: Connection, columns: tuple[str, ...], chunk: Chunk, row_filter: str | None
) -> Iterator[pa.Array]:
    """The rows of a chunk that are published, as flat values, byte for byte as the stream has them."""
    # Rows that a policy hides from us are an error, not missing.
    conn.execute("SET LOCAL row_security = off")
    if conn.info.parameter_status("server_encoding") == "SQL_ASCII":  # as the stream: bytes are sent as they are
        conn.pgconn.exec_(b"SET client_encoding = 'SQL_ASCII'")
    conditions = [*chunk.conditions, *([row_filter] if row_filter else [])]
    yield from copy_rows(conn, copy_statement(columns, chunk.source, conditions), len(columns))


class Answers:
    """What tasks have answered. A file is read once, however often it is looked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, Staged]] = {}

    def find(self) -> list[Staged]:
        """The answers that are here, by entry."""
        found: dict[str, tuple[int, Staged]] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for one in entries:
                if one.name.endswith(".json"):
                    with contextlib.suppress(FileNotFoundError):
                        found[one.name] = self._read(one)
        self._known = found
        return [staged for _, (_, staged) in sorted(found.items())]

    def _read(self, one: os.DirEntry[str]) -> tuple[int, Staged]:
        stamp = one.stat().st_mtime_ns
        if one.name in self._known and self._known[one.name][0] == stamp:
            return self._known[one.name]
        raw = json.loads(Path(one.path).read_text())
        return stamp, Staged(**{**raw, "written": tuple(raw["written"])})


def unstage(folder: Path, entry: str) -> None:
    """Forget what was answered for an entry, and all rows that were staged for it."""
    for path in [_answer_file(folder, entry), *folder.glob(f"{entry}.*.arrow")]:
        path.unlink(missing_ok=True)


def _answer_file(folder: Path, entry: str) -> Path:
    return folder / f"{entry}.json"
