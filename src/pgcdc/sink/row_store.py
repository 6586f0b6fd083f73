"""The rows that a log of events leaves of one table, kept in a temporary file so that memory stays bounded.

Used for `read_back`. No sink writes with this.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from pgcdc.core.errors import SinkError
from pgcdc.event.shape import TableShape
from pgcdc.sink.line_files import EventStore

BATCH_ROWS = 10_000
BUFFERED_ROWS = 20_000
Row = dict[str, str | None]


class RowStore(EventStore):
    """The last row of each key; for a table without a key, each row and its count. A context manager."""

    def __init__(self, shape: TableShape, key: Sequence[str] = ()) -> None:
        """`key`: a key other than the table's."""
        relation = shape.relation
        self._key, self._channel, self._name = key or shape.key, relation.channel, relation.name
        self._buffer: dict[str, tuple[bytes | None, int]] = {}
        """Since the file was last written: the row and its count; for a table without a key, the change of the
        count."""

    def __enter__(self) -> RowStore:
        self._folder = tempfile.TemporaryDirectory(prefix="pgcdc-rows-")
        self._db = sqlite3.connect(Path(self._folder.name) / "rows", isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("CREATE TABLE r (key TEXT PRIMARY KEY, row BLOB, n INTEGER) WITHOUT ROWID")
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        self._folder.cleanup()

    def apply(self, event: Mapping[str, Any]) -> None:
        operation, payload = event["operation"], event["payload"]
        if (event["channel"], payload.get("table")) != (self._channel, self._name):
            return
        row, old = payload["row"], payload["old"]
        if operation == "TRUNCATE":
            self._buffer.clear()
            self._db.execute("DELETE FROM r")
        elif operation in ("INSERT", "SNAPSHOT"):
            self.put(self._key_of(row), row)
        elif operation == "DELETE":
            self._take(self._key_of(row))
        elif operation == "UPDATE":
            before = self._key_of({**row, **(old or {})} if self._key else old or row)
            if payload.get("_unchanged_toast_columns"):
                row = {**(self._find(before) or {}), **(old or {}), **row}
            self._take(before)
            self.put(self._key_of(row), row)

    def put(self, key: str, row: Row) -> None:
        count = 1 if self._key else self._buffer.get(key, (b"", 0))[1] + 1
        self._buffer[key] = (orjson.dumps(row), count)
        if len(self._buffer) >= BUFFERED_ROWS:
            self._flush()

    def _take(self, key: str) -> None:
        self._buffer[key] = (None, 0) if self._key else (key.encode(), self._buffer.get(key, (b"", 0))[1] - 1)

    def _key_of(self, row: Mapping[str, str | None]) -> str:
        if lacks := [name for name in self._key if row.get(name) is None]:
            raise SinkError(
                f"an event of table {self._name} lacks {', '.join(lacks)} of its key",
                "The table had another key then. Read it again: pgcdc resync --table",
            )
        if self._key:
            return orjson.dumps([row[name] for name in self._key]).decode()
        return orjson.dumps(row, option=orjson.OPT_SORT_KEYS).decode()

    def _find(self, key: str) -> Row | None:
        if key in self._buffer:
            found = self._buffer[key][0]
        else:
            (found,) = self._db.execute("SELECT row FROM r WHERE key = ?", [key]).fetchone() or (None,)
        return orjson.loads(found) if found is not None else None

    def _flush(self) -> None:
        self._db.execute("BEGIN")
        counted = "DO UPDATE SET n = n + excluded.n" if not self._key else "DO UPDATE SET row = excluded.row"
        rows = [(key, row, n) for key, (row, n) in sorted(self._buffer.items()) if row is not None]
        self._db.executemany(f"INSERT INTO r VALUES (?, ?, ?) ON CONFLICT (key) {counted}", rows)
        gone = [(key,) for key, (row, _) in self._buffer.items() if row is None]
        self._db.executemany("DELETE FROM r WHERE key = ?", gone)
        self._db.execute("COMMIT")
        self._buffer.clear()

    def rows(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows as text columns. Omits a row that was deleted more often than it was added."""
        self._flush()
        schema = pa.schema([(name, pa.string()) for name in columns])
        found = self._db.execute("SELECT row, n FROM r WHERE n > 0")
        while part := found.fetchmany(BATCH_ROWS):
            rows = [row for text, n in part for row in [orjson.loads(text)] * n]
            yield pa.RecordBatch.from_arrays(
                [pa.array([row.get(name) for row in rows], pa.string()) for name in columns], schema=schema
            )
