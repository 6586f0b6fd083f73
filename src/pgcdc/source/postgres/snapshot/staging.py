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

from pgcdc.core.errors import ConnectionLost, SourceError, SpoolError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import write_json_durably
from pgcdc.postgres.database import (
    Connection,
    connect,
    explain_errors,
    explain_right,
    name_table,
    quote_literal,
)
from pgcdc.source.postgres.snapshot.chunks import Chunk, lock_chunks
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.releases import stage_rows
from pgcdc.source.postgres.snapshot.snapshot_rows import snapshot_rows
from pgcdc.spool.segment import Written

__all__ = ["Answers", "Staged", "Work", "copy_in_snapshot", "stage"]

ROWS, LOST_SNAPSHOT, LOST_TABLE, NO_RIGHT, FAILED = "rows", "lost snapshot", "lost table", "no right", "failed"
"""What a task can answer: the rows; the snapshot is not held any more; the table is not as it was planned; it may not be
read; try again."""


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
    advice: str = ""


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
                role = conn.info.user
                rows, written = stage_rows(folder / name, _batches(conn, work))
            answer = Staged(work.id, ROWS, file=name, rows=rows, written=written, time_us=time_us)
        except _SnapshotLost:
            answer = Staged(work.id, LOST_SNAPSHOT)
        except ConnectionLost as error:
            answer = Staged(work.id, FAILED, str(error))
        except SourceError as error:
            answer = Staged(work.id, LOST_TABLE, error.message)
            if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
                chunk = work.chunk
                title = name_table(chunk.schema, chunk.table)
                refused = explain_right(title, chunk.sql, role, error.__cause__)
                answer = Staged(work.id, NO_RIGHT, refused.message, advice=refused.advice)
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
    """What tasks have answered. Each answer is read and told once; another one for the same entry does no harm."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[str] = set()

    def find(self) -> list[Staged]:
        """The answers that are new, by entry."""
        found: list[Staged] = []
        try:
            new = sorted(
                name for name in os.listdir(self._folder) if name.endswith(".json") and name not in self._known
            )
        except FileNotFoundError:
            return []
        for name in new:
            with contextlib.suppress(FileNotFoundError):
                raw = json.loads((self._folder / name).read_text())
                found.append(Staged(**{**raw, "written": tuple(raw["written"])}))
                self._known.add(name)
        return found

    def drop(self, staged: Staged) -> None:
        """Forget an answer and its rows: the next one for its entry is new. (Rows of one that it has replaced go last.)"""
        file = _answer_file(self._folder, staged.id)
        file.unlink(missing_ok=True)
        if staged.file:
            (self._folder / staged.file).unlink(missing_ok=True)
        self._known.discard(file.name)


def _answer_file(folder: Path, entry: str) -> Path:
    return folder / f"{entry}.json"
