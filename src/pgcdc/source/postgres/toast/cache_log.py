"""The log of the TOAST cache: each transaction's changes, to be applied again or undone; and the cache's state. Records
are in files `log-<epoch>-<number of the first record>`. A record contains its length and a checksum: it is either
complete or ignored. An epoch ends at a start where the cache moves to another position; files of other epochs do not
belong to the log."""

from __future__ import annotations

import marshal
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path

from pgcdc.core.state import fsync_folder, write_all

Item = tuple[int, bytes, bytes | None, bytes | None]
"""Place (`cache_place`, like every lsn here), key, new value, old value; None means absent."""
# The END lsn up to which everything is included, and the changes since the previous record
Record = tuple[int, list[Item]]
Columns = tuple[list[int], list[bytes], list[bytes | None], list[bytes | None]]
"""Items by field: there are too many to make each a separate object."""

_HEAD = struct.Struct("<II")  # length and CRC-32
_ID = struct.Struct(">Q")
MISSING = "a part of its log is missing"


class Unusable(Exception):
    """The cache cannot be brought to where the stream resumes. An empty text means that no cache exists."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The entries of one table between two evictions of the whole table."""

    number: int
    shape: str  # The relation's shape: another shape starts another generation
    stamp: str
    stamp_lsn: int  # The catalog's stamp of the table, and an LSN at which it was current
    first_lsn: int  # The first change that was stored
    is_proven: bool = False  # The stream has shown that nothing happened unseen between `first_lsn` and `stamp_lsn`

    @property
    def prefix(self) -> bytes:
        return _ID.pack(self.number)

    def encode(self) -> bytes:
        """The form in the store: the number first, as in entries."""
        return self.prefix + marshal.dumps(astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> Generation:
        return cls(*marshal.loads(data[_ID.size :]))


@dataclass(slots=True)
class State:
    """The state of the whole table; stored in it at each commit."""

    position: int = 0  # END lsn of the last transaction that is completely in the table
    next_id: int = 1
    epoch: int = 1
    records: int = 0  # How many records of that epoch's log are in the table
    floor_lsn: int = 0  # Changes before this cannot be undone
    live: dict[bytes, int] = field(default_factory=dict)  # The number of entries in each generation, by its prefix
    garbage: dict[bytes, int] = field(default_factory=dict)  # Ended generations, and the lsn at which each ended


@dataclass(slots=True)
class _File:
    path: Path
    first: int
    max_lsn: int = 0


class ToastLog:
    """The log of one epoch. `records` is the number of the last record."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self.epoch = epoch
        self._files: deque[_File] = deque()
        self._descriptor = -1
        self._unsynced = False
        self.records = 0

    def load(self) -> None:
        """Find the files and count their records. Raises Unusable for a gap."""
        for path in sorted(self._folder.glob(f"log-{self.epoch:08d}-*")):
            first = int(path.name.rpartition("-")[2])
            if self._files and first != self.records + 1:
                raise Unusable(MISSING)
            self._files.append(_File(path, first))
            self.records = first - 1
            for _, items in _read(path):
                self.records += 1
                if items:
                    self._files[-1].max_lsn = items[-1][0]

    def forwards(self, after: int) -> Iterator[Record]:
        """The records after number `after`, oldest first. Only one file at a time is in memory."""
        for file in self._files:
            for number, record in enumerate(_read(file.path), file.first):
                if number > after:
                    yield record

    def backwards(self, upto: int, lsn: int) -> Iterator[Record]:
        """The records up to number `upto` that contain something after `lsn`, newest first."""
        for file in reversed(self._files):
            if file.max_lsn <= lsn:
                continue
            for number, record in reversed(list(enumerate(_read(file.path), file.first))):
                if number <= upto and record[1] and record[1][-1][0] > lsn:
                    yield record

    def begin_epoch(self, lsn: int) -> ToastLog:
        """A new, durable log with this one's content up to `lsn`. It takes effect once its epoch is in the table."""
        made = ToastLog(self._folder, self.epoch + 1)
        for stray in self._folder.glob(f"log-{made.epoch:08d}-*"):
            stray.unlink()
        made.start_file()
        for position, items in self.forwards(0):
            kept = [item for item in items if item[0] <= lsn]
            if kept or not items:
                lsns, keys, new, old = zip(*kept, strict=True) if kept else ((), (), (), ())
                made.append(min(position, lsn), (list(lsns), list(keys), list(new), list(old)))
        made.sync()
        return made

    def delete_others(self) -> None:
        for path in self._folder.glob("log-*"):
            if not path.name.startswith(f"log-{self.epoch:08d}-"):
                path.unlink()

    def append(self, position: int, items: Columns) -> int:
        """Append a record and return its size. It then survives a kill of the process."""
        data = marshal.dumps((position, items))
        write_all(self._descriptor, memoryview(_HEAD.pack(len(data), zlib.crc32(data)) + data))
        self.records += 1
        self._unsynced = True
        if items[0]:
            self._files[-1].max_lsn = items[0][-1]
        return len(data)

    def sync(self) -> bool:
        """Make everything durable; returns whether there was anything to write."""
        if not self._unsynced:
            return False
        os.fsync(self._descriptor)
        self._unsynced = False
        return True

    def start_file(self) -> None:
        """Continue in a new file, so that older ones can be deleted."""
        self.close()
        path = self._folder / f"log-{self.epoch:08d}-{self.records + 1:012d}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if not self._files or self._files[-1].path != path:
            self._files.append(_File(path, self.records + 1))
        fsync_folder(self._folder)

    def release(self, applied: int, lsn: int) -> None:
        """Delete files whose records are all in the committed table, and not after `lsn`."""
        while len(self._files) > 1 and self._files[1].first <= applied + 1 and self._files[0].max_lsn <= lsn:
            self._files.popleft().path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _read(path: Path) -> Iterator[Record]:
    """The records of a file up to the first incomplete one."""
    data, at = path.read_bytes(), 0
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(body) != size or zlib.crc32(body) != crc:
            return
        position, columns = marshal.loads(body)
        yield position, list(zip(*columns, strict=True))
        at += _HEAD.size + size
