"""Files of JSON lines: the keys of the rows that their events leave, and the maintenance of rotated files.

Keys are for `pgcdc resync`: a key that the sink has and the source has not belongs to a row that vanished unseen. An
extra key is harmless, since deleting a row that the source does not have is always right. A missing key is not.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, cast

import orjson
import pyarrow as pa

from pgcdc.core.errors import SinkError, StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import fsync_folder

TableName = tuple[str, str]  # Schema and table

Compression = Literal["none", "gzip", "zstd"]
ENDINGS: dict[str, str] = {"gzip": ".gz", "zstd": ".zst"}
_PARTIAL = ".partial"
BUFFERED_KEYS = 100_000
CACHE_KB = 64 << 10
_FFFD = "\ufffd"
_PUTS = ("INSERT", "UPDATE", "SNAPSHOT")


class EventStore(Protocol):
    """Receives the events of a file."""

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply the next event."""


class KeyStore(EventStore):
    """The keys of some tables, in a temporary file. A context manager."""

    def __init__(self, path: Path, tables: Mapping[TableName, Sequence[str]]) -> None:
        """`tables`: the tables to read, with their key columns."""
        self._path = path
        self._names = list(tables)
        self._columns = [tuple(columns) for columns in tables.values()]
        self._number = {
            (f"pgcdc:{name}" if schema == "public" else f"pgcdc:{schema}.{name}", name): number
            for number, (schema, name) in enumerate(tables)
        }
        self._buffer: dict[tuple[int, str], bool] = {}
        """Keys that appeared (True) or vanished since the file was last written."""
        self.unread: dict[TableName, int] = {}
        """Rows without a usable key: the table had another key then, or it is not UTF-8."""
        self.others: set[str] = set()  # Channels of tables that were not requested
        path.unlink(missing_ok=True)
        with self._explain():
            self._db = sqlite3.connect(path, isolation_level=None)
            for setting in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
                self._db.execute(f"PRAGMA {setting}")
            self._db.execute(f"PRAGMA cache_size = -{CACHE_KB}")
            self._db.execute("CREATE TABLE k (t INTEGER, key TEXT, PRIMARY KEY (t, key)) WITHOUT ROWID")

    def __enter__(self) -> KeyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        self._path.unlink(missing_ok=True)

    def apply(self, event: Mapping[str, Any]) -> None:
        operation, payload = event["operation"], event["payload"]
        is_put = operation in _PUTS
        if not is_put and operation not in ("DELETE", "TRUNCATE"):
            return
        number = self._number.get((event["channel"], payload["table"]))
        if number is None:
            self.others.add(event["channel"])
            return
        if operation == "TRUNCATE":
            self._clear(number)
            return
        columns, row, old = self._columns[number], payload["row"], payload["old"]
        if old is not None and is_put:
            before = [old.get(column) for column in columns]
            self._put(number, before, False)
            row = {**old, **row}  # a value that was not sent again keeps its old value
        key = [row.get(column) for column in columns]
        if not self._put(number, key, is_put) and operation in ("INSERT", "SNAPSHOT"):
            name = self._names[number]
            self.unread[name] = self.unread.get(name, 0) + 1

    def _put(self, number: int, key: list[str | None], is_there: bool) -> bool:
        """Record a key. Returns whether the source can be queried by it."""
        if None in key or any(value and (value.startswith("base64:") or _FFFD in value) for value in key):
            return False
        self._buffer[number, orjson.dumps(key).decode()] = is_there  # decoded: orjson's bytes take kilobytes each
        if len(self._buffer) >= BUFFERED_KEYS:
            self._flush()
        return True

    def _clear(self, number: int) -> None:
        self._flush()
        with self._explain():
            self._db.execute("DELETE FROM k WHERE t = ?", [number])

    def _flush(self) -> None:
        there = sorted(key for key, is_there in self._buffer.items() if is_there)  # the file grows in few places
        gone = sorted(key for key, is_there in self._buffer.items() if not is_there)
        with self._explain():
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR IGNORE INTO k VALUES (?, ?)", there)
            self._db.executemany("DELETE FROM k WHERE t = ? AND key = ?", gone)
            self._db.execute("COMMIT")
        self._buffer.clear()

    def write_keys(self, table: TableName, path: Path) -> int:
        """Write the keys of a table, one JSON array of texts per line. Durable on return; returns their number."""
        self._flush()
        count = 0
        partial = path.with_name(f"{path.name}.partial")
        with self._explain():
            with open(partial, "wb") as file:
                for (key,) in self._db.execute(
                    "SELECT key FROM k WHERE t = ? ORDER BY key", [self._names.index(table)]
                ):
                    file.write(f"{key}\n".encode())
                    count += 1
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            fsync_folder(path.parent)
        return count

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StateError(
                f"the keys of the adapter cannot be stored in {self._path.parent}: {reason}",
                "Free space on the disk of the state directory and start again: nothing was changed yet",
            ) from error


# --- their content


@contextlib.contextmanager
def open_lines(path: Path) -> Iterator[BinaryIO]:
    """Open a file of JSON lines. One that a writer compressed since it was listed is read in its compressed form."""
    with contextlib.ExitStack() as opened:
        try:
            file = _open(path, opened)
        except FileNotFoundError:
            forms = (path.with_name(path.name + ending) for ending in ENDINGS.values())
            if (compressed := next((form for form in forms if form.exists()), None)) is None:
                raise
            file = _open(compressed, opened)
        yield file


def _open(path: Path, opened: contextlib.ExitStack) -> BinaryIO:
    kind = next((kind for kind, ending in ENDINGS.items() if path.name.endswith(ending)), None)
    if kind is None:
        return opened.enter_context(open(path, "rb"))
    raw = opened.enter_context(pa.OSFile(str(path), "rb"))
    return cast(BinaryIO, io.BufferedReader(opened.enter_context(pa.CompressedInputStream(raw, kind))))


def read_lines(path: Path, size: int | None, store: EventStore) -> int:
    """Pass the events in the first `size` bytes (None: all) of a file of JSON lines to `store`. Returns the number of
    bytes."""
    done, number = 0, 0
    with open_lines(path) as file:
        for line in file:
            if size is not None and done >= size:
                break
            number += 1
            done += len(line)
            try:
                if (size is not None and done > size) or not line.endswith(b"\n"):
                    raise ValueError("it does not end where it ended when it was written")
                store.apply(orjson.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SinkError(
                    f"{path}, line {number} differs from what was written: {error}",
                    "Restore the file. If transforms wrote it in another form, use --truncate. Or start a "
                    "new file: delete the adapter's ack in the state directory (acks/) and set another path",
                ) from error
    return done


def content_kind(path: Path) -> str:
    """The kind of content of a file or folder of JSON lines, from its first line: events, rows (typed ones), zset,
    other (an envelope); "" if empty."""
    if path.is_dir():
        return next((content_kind(part) for part in sorted(path.glob("*.jsonl"))), "")
    with open_lines(path) as file:
        line = file.readline()
    try:
        first = orjson.loads(line)
    except ValueError:
        return ""
    if isinstance(first, dict) and "_op" not in first and not {"operation", "channel", "payload"} <= first.keys():
        return "other"
    if not isinstance(first, dict) or "_op" not in first:
        return "events"
    return "zset" if "_weight" in first else "rows"


# --- rotated files


class Rotated(NamedTuple):
    """Our rotated files: `first` to `last`. Files before `oldest` must be removed. `size` is the total."""

    first: int
    oldest: int
    last: int
    size: int = 0


def rotated_name(path: Path, number: int, ending: str = "") -> Path:
    """The name of a rotated file; `ending` if it is compressed."""
    return path.with_name(f"{path.name}.{number:06d}{ending}")


def find_rotated(path: Path, number: int) -> Path | None:
    """The rotated file with this number, the compressed one if both exist; None if it is missing."""
    forms = (rotated_name(path, number, ending) for ending in (*ENDINGS.values(), ""))
    return next((form for form in forms if form.exists()), None)


def highest_number(path: Path) -> int:
    """The highest number in use for this name, by us or others; 0 if there is none."""
    return max(_numbers(path), default=0)


def _numbers(path: Path) -> set[int]:
    """The numbers of rotated files with this name, ours or not."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6,})(?:\.gz|\.zst)?(?:\.partial)?")
    return {int(one[1]) for one in map(pattern.fullmatch, os.listdir(path.parent)) if one}


def tidy(path: Path, rotated: Rotated, compression: Compression, should_stop: Callable[[], bool]) -> None:
    """Remove old files and compress the rest. Can be repeated at any point."""
    for number in sorted(_numbers(path) & set(range(rotated.first, rotated.last + 1))):
        for ending in ENDINGS.values():  # from an interrupted compression
            rotated_name(path, number, ending + _PARTIAL).unlink(missing_ok=True)
        if number < rotated.oldest:
            for ending in (*ENDINGS.values(), ""):
                rotated_name(path, number, ending).unlink(missing_ok=True)
            hit("file.removed")
        elif compression != "none" and rotated_name(path, number).exists():
            _compress(path, number, compression, should_stop)
        if should_stop():
            return


def _compress(path: Path, number: int, compression: Compression, should_stop: Callable[[], bool]) -> None:
    plain, final = rotated_name(path, number), rotated_name(path, number, ENDINGS[compression])
    partial = final.with_name(final.name + _PARTIAL)
    if find_rotated(path, number) == plain:
        try:
            if not _write_compressed(plain, partial, compression, should_stop):
                partial.unlink()
                return
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk needs the space
            raise
        hit("file.before_compressed")
        os.rename(partial, final)
        fsync_folder(plain.parent)
    hit("file.compressed")
    plain.unlink()
    fsync_folder(plain.parent)


def _write_compressed(plain: Path, partial: Path, compression: str, should_stop: Callable[[], bool]) -> bool:
    """Write the compressed file durably. Returns False if it had to stop."""
    with (
        open(plain, "rb") as source,
        open(partial, "wb") as target,
        pa.CompressedOutputStream(pa.PythonFile(target), compression) as out,
    ):
        while chunk := source.read(1 << 20):
            out.write(chunk)
            hit("file.half_compressed")
            if should_stop():
                return False
    with open(partial, "rb") as written:  # the stream closes the file it writes to
        os.fsync(written.fileno())
    return True
