"""Stores of dead letters that can be read again: a file of JSON lines, or a table in PostgreSQL.

The file is append-only and holds letters and outcomes. A crash may leave half a line at the end. It was never
acknowledged, so the next writer cuts it off. `purge` writes the remaining letters to a new file that replaces the old
one. Writers lock the file: a pipeline and a command may use it at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from pgcdc.core.errors import PgcdcError, SourceError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import fsync_folder, is_at, write_all, write_durably
from pgcdc.postgres.database import Connection, connect, explain_errors, lock_creation, name_table, split_table
from pgcdc.sink.letters.record import DeadLetter, Query, ReadableDeadLetters


class FileDeadLetters(ReadableDeadLetters):
    """One file, opened for each call, so that a purge by another process is noticed."""

    def __init__(self, path: Path, *, makes_folder: bool = False) -> None:
        """`makes_folder`: the folder will be created later, if possible."""
        self.path = path.absolute()
        self._makes_folder = makes_folder

    def check(self) -> None:
        with self._explain():
            if self.path.exists():
                os.close(os.open(self.path, os.O_RDWR | os.O_APPEND))
                return
            folder = self.path.parent
            while self._makes_folder and not folder.exists():
                folder = folder.parent
            tempfile.TemporaryFile(dir=folder).close()

    def open(self) -> None:
        with self._explain(), self._locked() as descriptor:
            _cut_half_line(descriptor)
            os.fsync(descriptor)  # a killed run may have written it: it is not written again

    def record(self, letters: Sequence[DeadLetter]) -> None:
        self._append([letter.to_json() for letter in letters])

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        self._append([{"mark": list(ids), "outcome": outcome, "replayed_at": at and at.isoformat(), "error": error}])

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions. Reads the whole file first."""
        found = sorted(filter(query.matches, self._read(query).values()), key=lambda one: (one.position, one.adapter))
        return iter(found[: query.limit or None])

    def purge(self, query: Query) -> int:
        """Write the other letters to a new file that replaces this one."""
        if not self.path.exists():
            return 0
        with self._explain(), self._locked() as descriptor:
            letters = self._read()
            chosen = {one.id for one in list(filter(query.matches, letters.values()))[: query.limit or None]}
            if chosen:
                kept = b"".join(_line(one.to_json()) for one in letters.values() if one.id not in chosen)
                write_durably(self.path, kept, os.fstat(descriptor))
        return len(chosen)

    # --- the file

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        with self._explain(), self._locked() as descriptor:
            size = _cut_half_line(descriptor)
            try:
                for record in records:
                    write_all(descriptor, memoryview(_line(record)))
                    hit("dlq.file_written")
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):  # if this fails, the next writer cuts off the half-written line
                    os.ftruncate(descriptor, size)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, locked exclusively; created if missing."""
        while True:
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not is_at(self.path, descriptor):  # a purge replaced the file
                    continue
                if is_new:
                    fsync_folder(self.path.parent)
                yield descriptor
                return
            finally:
                os.close(descriptor)

    def _read(self, query: Query = Query()) -> dict[str, DeadLetter]:  # noqa: B008 - frozen
        """The matching letters of the file. A later line may say that a letter no longer waits."""
        letters: dict[str, DeadLetter] = {}
        number, query = 0, replace(query, is_waiting=None)
        try:
            with self._explain("read"), open(self.path, "rb") as file:
                for line in file:
                    number += 1
                    if not line.endswith(b"\n"):
                        break  # half-written, or still being written
                    _fold(letters, json.loads(line), query)
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"line {number} of {self.path} is not a dead letter", "Fix that line; the others are intact"
            ) from error
        return letters

    @contextlib.contextmanager
    def _explain(self, done: str = "written") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            if is_missing and done == "read":
                raise
            raise StateError(
                f"the file of dead letters {self.path} cannot be {done}: "
                + ("its folder does not exist" if is_missing else str(error.strerror)),
                "Check the folder, its permissions and free space; or choose another file with --dlq-file",
            ) from error


def _fold(letters: dict[str, DeadLetter], raw: dict[str, Any], query: Query) -> None:
    if "mark" not in raw:
        letter = DeadLetter.from_json(raw)
        if query.matches(letter):
            letters.setdefault(letter.id, letter)
        return
    for one in filter(None, map(letters.get, raw["mark"])):
        at, error = raw["replayed_at"], raw["error"] or one.error
        letters[one.id] = replace(
            one, outcome=raw["outcome"], replayed_at=at, error=error, attempts=one.attempts + (not at)
        )


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


def _cut_half_line(descriptor: int) -> int:
    """The size of the file without a half-written last line."""
    size = end = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        begin = max(0, end - (64 << 10))
        end = begin + os.pread(descriptor, end - begin, begin).rfind(b"\n") + 1
    if end != size:
        os.ftruncate(descriptor, end)
    return end


# --- a table

_COLUMNS = tuple("payload" if field.name == "event" else field.name for field in fields(DeadLetter))
_DDL = """CREATE TABLE {table} (
    id uuid PRIMARY KEY,
    event_id text NOT NULL,
    adapter text NOT NULL,
    error text NOT NULL,
    payload json NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    replayed_at timestamptz,
    pipeline text NOT NULL,
    position text COLLATE "C" NOT NULL,
    channel text NOT NULL,
    operation text NOT NULL,
    error_kind text NOT NULL,
    attempts int NOT NULL,
    outcome text
)"""
_SESSION = """
SET statement_timeout = '30s';
SET lock_timeout = '30s';
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
"""Commits of this session are durable, whatever the database's default."""


class PgDeadLetters(ReadableDeadLetters):
    """One table, created if missing. Letters are rare, so each call opens a connection."""

    def __init__(self, url: str, table: str = "pgcdc_dead_letters") -> None:
        self.table = split_table(table)
        self._url = url
        self._name = sql.Identifier(*self.table)

    def __repr__(self) -> str:
        return f"PgDeadLetters({name_table(*self.table)})"

    def check(self) -> None:
        with self._connected("use") as conn, contextlib.suppress(psycopg.Rollback), conn.transaction():
            self._create(conn)
            conn.execute(sql.SQL("INSERT INTO {} SELECT * FROM {} WHERE false").format(self._name, self._name))
            conn.execute(sql.SQL("UPDATE {} SET outcome = NULL WHERE false").format(self._name))
            raise psycopg.Rollback

    def open(self) -> None:
        faster = contextlib.suppress(psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation)
        with self._connected("create") as conn, faster:  # another pipeline: a session may not see its table immediately
            self._create(conn)

    def record(self, letters: Sequence[DeadLetter]) -> None:
        rows = [list({**asdict(one), "event": _to_json(one.event)}.values()) for one in letters]
        insert = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT (id) DO NOTHING").format(
            self._name,
            sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)),
            sql.SQL(", ").join(sql.Placeholder() for _ in _COLUMNS),
        )
        with self._connected("write to") as conn, conn.transaction(), conn.cursor() as cursor:
            cursor.executemany(insert, rows)

    def find(self, query: Query) -> Iterator[DeadLetter]:
        """The letters, in the order of their positions; read in pieces."""
        texts = {one: sql.SQL("{}::text").format(sql.Identifier(one)) for one in ("id", "payload")}
        columns = sql.SQL(", ").join(texts.get(one) or sql.Identifier(one) for one in _COLUMNS)
        select, values = self._select(columns, query)
        with self._connected("read") as conn:
            if not self._exists(conn):
                return
            with conn.transaction(), conn.cursor("letters") as cursor:
                cursor.itersize = 500
                for row in cursor.execute(select, values):
                    letter = DeadLetter(*row)
                    yield replace(letter, event=_from_json(letter.event))

    def mark(self, ids: Sequence[str], outcome: str, at: datetime | None, error: str = "") -> None:
        update = sql.SQL(
            "UPDATE {} SET outcome = %s, replayed_at = %s, error = coalesce(nullif(%s, ''), error), "
            "attempts = attempts + %s WHERE id = ANY (%s)"
        ).format(self._name)
        with self._connected("write to") as conn:
            conn.execute(update, [outcome, at, error.replace("\0", ""), int(at is None), list(ids)])

    def purge(self, query: Query) -> int:
        chosen, values = self._select(sql.Identifier("id"), query)
        delete = sql.SQL("DELETE FROM {} WHERE id IN ({})").format(self._name, chosen)
        with self._connected("delete from") as conn:
            return conn.execute(delete, values).rowcount if self._exists(conn) else 0

    # --- the table

    @contextlib.contextmanager
    def _connected(self, action: str) -> Iterator[Connection]:
        title = name_table(*self.table)
        try:
            with (
                explain_errors(f"{action} table {title} of dead letters"),
                connect(self._url, application_name="pgcdc dead letters") as conn,
            ):
                conn.execute(_SESSION)
                yield conn
        except PgcdcError as error:
            if not error.advice:
                error.advice = f"Check --dlq-db, and that this role may create and write table {title}"
            raise

    def _exists(self, conn: Connection) -> bool:
        return conn.execute("SELECT to_regclass(%s)", [self._name.as_string(conn)]).fetchone() != (None,)

    def _create(self, conn: Connection) -> None:
        (encoding,) = conn.execute("SHOW server_encoding").fetchone() or ("",)
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise SourceError(
                f"the database of the dead letters is encoded in {encoding}, which lacks some characters",
                "Use one in UTF8 (--dlq-db), or --dlq file",
            )
        if not self._exists(conn):
            with conn.transaction():
                lock_creation(conn)
                if not self._exists(conn):  # unless another pipeline was faster
                    conn.execute(sql.SQL(_DDL).format(table=self._name))
                    conn.execute(sql.SQL("CREATE INDEX ON {} (adapter, position)").format(self._name))

    def _select(self, columns: sql.Composable, query: Query) -> tuple[sql.Composed, list[Any]]:
        parts: list[tuple[str, Any]] = [
            ("pipeline = %s", query.pipeline),
            ("adapter = %s", query.adapter),
            ("id::text = ANY (%s)", list(query.ids) or None),
            ("created_at >= %s", query.since),
            ("created_at < %s", query.before),
            ("(replayed_at IS NULL) = %s", query.is_waiting),
            ("position > %s", query.after),
        ]
        used = [(sql.SQL(text), value) for text, value in parts if value is not None]
        where = sql.SQL(" AND ").join([sql.SQL("true"), *(text for text, _ in used)])
        limit = sql.SQL(f" LIMIT {query.limit:d}" if query.limit else "")
        order = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY position, adapter, id{}")
        return order.format(columns, self._name, where, limit), [value for _, value in used]


def _to_json(event: str) -> str:
    """The event itself, which `json` keeps unchanged. Several lines, a JSON list, or invalid JSON become a list of texts."""
    try:
        if "\n" in event or event.startswith("["):
            raise ValueError
        json.loads(event, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(event.split("\n"))
    return event


def _refuse(name: str) -> None:
    raise ValueError(name)


def _from_json(payload: str) -> str:
    return "\n".join(json.loads(payload)) if payload.startswith("[") else payload
