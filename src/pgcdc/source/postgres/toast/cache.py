"""The store for `--toast cache`: out-of-line values by table and key, as of a position.

A table on disk (LMDB) holds the newest state. A log beside it holds every change of that state with the END lsn of its
transaction, the new value and the previous one. Changes are logged before their rows go to the spool, so after a kill
the log is not behind. The log is fsynced before a position is confirmed, so it is not behind after a power failure
either. A start brings the table to the position where the stream resumes: later changes are undone, missing earlier
ones applied. If that is impossible, the cache is discarded: an empty cache gives misses, never wrong values.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import marshal
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import lmdb

from pgcdc.core.errors import StateError
from pgcdc.core.failpoint import hit
from pgcdc.core.state import fsync_folder
from pgcdc.source.postgres.toast.cache_log import MISSING, Columns, Generation, State, ToastLog, Unusable

logger = logging.getLogger("pgcdc.capture")

MAP_BYTES = 1 << 38  # Address space, not memory: the file grows as needed
COMMIT_ITEMS = 65_536
COMMIT_BYTES = 32 << 20  # Commit the table after this much: an open transaction keeps its changes in memory
RECORD_BYTES = 8 << 20
PRUNE_ITEMS = 20_000
FORMAT = 2

_ID = struct.Struct(">Q")
_HEAD = struct.Struct(">QI")  # number of the write, CRC-32 of the values
_NOT_PENDING = object()
_TABLES = _ID.pack(0)  # prefix of the entries that describe tables; other entries start with their generation's number


class ToastCache:
    """A bounded map from (generation, key) to values that can return to an older position. One writer."""

    def __init__(self, folder: Path, *, limit: int, resume_lsn: int, instance: str) -> None:
        """Open the cache and bring it to `resume_lsn`; if that is impossible, start with an empty one."""
        self._folder = folder
        self._limit = limit
        self._old_after = limit - limit // 4
        self._instance = instance
        self.tables: dict[int, Generation] = {}  # The generation of each table that has entries
        self.generations = 0  # Generations begun or ended since the start
        self._seen: dict[int, tuple[str, int]] = {}
        self._pending: dict[bytes, bytes | None] = {}
        self._order_new: list[tuple[bytes, bytes]] = []
        self._order_gone: list[bytes] = []
        self._items: Columns = ([], [], [], [])
        self._item_bytes = 0
        self._uncommitted_items = self._uncommitted_bytes = 0
        self.entries = 0  # The number of rows that have an entry
        self._env: Any = None
        self._txn: Any = None
        self._log = ToastLog(folder, 1)
        self._state = State()
        try:
            self._open(resume_lsn)
            return
        except Unusable as error:
            if str(error):
                logger.warning("the TOAST cache starts empty: %s", error)
        except (lmdb.Error, OSError, ValueError, EOFError, TypeError, KeyError) as error:
            logger.warning("the TOAST cache starts empty: it is damaged (%s)", error)
        with self.explaining():
            self._create(resume_lsn)

    # --- for the resolver

    def has_entries(self, oid: int) -> bool:
        """Whether a table may have entries."""
        found = self.tables.get(oid)
        return found is not None and self._state.live.get(found.prefix, 0) > 0

    def seen_stamp(self, oid: int) -> tuple[str, int]:
        """The last stamp that the catalog gave for a table, and an LSN since which it has been the same."""
        return self._seen.get(oid, ("", 0))

    def see_stamps(self, stamps: dict[int, tuple[str, int]]) -> None:
        """Store new stamps of tables. Call it only between batches. Durable immediately, because stamps are true at any
        position."""
        self._seen |= stamps
        self._txn.put(b"seen", marshal.dumps(self._seen), db=self._meta)
        self._commit()

    def begin_table(self, oid: int, shape: str, stamp: str, stamp_lsn: int, lsn: int) -> Generation:
        """Start a generation for a table that has none."""
        made = Generation(self._state.next_id, shape, stamp, stamp_lsn, lsn)
        self._state.next_id += 1
        self.tables[oid] = made
        self.generations += 1
        self._state.live[made.prefix] = 0
        self._write(lsn, _TABLES + _ID.pack(oid), made.encode(), None)
        return made

    def prove(self, oid: int) -> None:
        """Record that the stream has shown a generation to match its stamp. True at every position, so it is not logged."""
        old = self.tables[oid]
        made = self.tables[oid] = replace(old, is_proven=True)
        self._pending[_TABLES + _ID.pack(oid)] = made.encode()

    def evict_table(self, oid: int, lsn: int) -> None:
        """Forget all entries of a table. They are deleted once `lsn` is confirmed."""
        gone = self.tables.pop(oid, None)
        if gone is not None:
            self.generations += 1
            key = _TABLES + _ID.pack(oid)
            self._write(lsn, key, None, self.get(key))
            self.entries -= self._state.live.get(gone.prefix, 0)
            self._state.garbage[gone.prefix] = lsn

    def get(self, full: bytes) -> bytes | None:
        """The stored entry of a key, as input for `put`, `renew` and `remove`."""
        found = self._pending.get(full, _NOT_PENDING)
        return self._txn.get(full, None, self._entry) if found is _NOT_PENDING else found  # type: ignore[return-value]

    @staticmethod
    def shorten(prefix: bytes, key: bytes) -> bytes:
        """The key under which to store an entry whose own key is too long for the store."""
        return prefix + b"\xff" + hashlib.sha256(key).digest()

    @staticmethod
    def is_sound(stored: bytes | None, values: bytes) -> bool:
        """Whether these values are what was stored. A damaged entry counts as missing."""
        return stored is not None and zlib.crc32(values) == _HEAD.unpack_from(stored)[1]

    def put(self, lsn: int, full: bytes, values: bytes, stored: bytes | None) -> None:
        """Store values, replacing `stored`."""
        state = self._state
        new = _HEAD.pack(state.next_id, zlib.crc32(values)) + values
        state.next_id += 1
        self._order_new.append((new[: _ID.size], full))
        if stored is None:
            state.live[full[: _ID.size]] += 1
            self.entries += 1
        else:
            self._order_gone.append(stored[: _ID.size])
        self._write(lsn, full, new, stored)
        if self.entries > self._limit:
            self._evict(lsn)

    def is_old(self, stored: bytes) -> bool:
        """Whether an entry is close to eviction: little room is left, and much was written after it."""
        return self.entries > self._old_after and self._state.next_id - _ID.unpack_from(stored)[0] > self._old_after

    def renew(self, lsn: int, full: bytes, stored: bytes) -> None:
        """Treat an entry as just written. The log needs no values for that."""
        number = _ID.pack(self._state.next_id)
        self._state.next_id += 1
        self._order_new.append((number, full))
        self._order_gone.append(stored[: _ID.size])
        self._write(lsn, full, number, stored[: _ID.size])
        self._pending[full] = number + stored[_ID.size :]

    def remove(self, lsn: int, full: bytes, stored: bytes) -> None:
        self._state.live[full[: _ID.size]] -= 1
        self.entries -= 1
        self._order_gone.append(stored[: _ID.size])
        self._write(lsn, full, None, stored)

    def _write(self, lsn: int, key: bytes, new: bytes | None, old: bytes | None) -> None:
        self._pending[key] = new
        lsns, keys, news, olds = self._items
        lsns.append(lsn)
        keys.append(key)
        news.append(new)
        olds.append(old)
        self._item_bytes += (len(new) if new else 0) + (len(old) if old else 0)
        if self._item_bytes > RECORD_BYTES:
            self._write_record()

    def _flush(self) -> None:
        """Write pending changes to the table."""
        txn = self._txn
        gone = [key for key, new in self._pending.items() if new is None]
        with txn.cursor(self._entry) as cursor:  # in key order: adjacent keys share a page
            cursor.putmulti(sorted((key, new) for key, new in self._pending.items() if new is not None))
        for key in gone:
            txn.delete(key, b"", self._entry)
        with txn.cursor(self._order) as cursor:
            cursor.putmulti(self._order_new, append=True)
        for number in self._order_gone:
            txn.delete(number, b"", self._order)
        self._pending, self._order_new, self._order_gone = {}, [], []

    def _evict(self, lsn: int) -> None:
        """Make room by evicting the oldest entries. Only the state decides which, so a replay evicts the same ones."""
        self._flush()
        target = self._limit - self._limit // 16
        current = {one.prefix for one in self.tables.values()}
        with self._txn.cursor(self._order) as cursor:
            found = cursor.first()
            while self.entries > target and found:
                full = cursor.value()
                self._state.live[full[: _ID.size]] -= 1
                self.entries -= full[: _ID.size] in current
                self._write(lsn, full, None, self.get(full))
                found = cursor.delete()

    # --- durability

    def advance(self, lsn: int) -> None:
        """Everything up to `lsn`, the END of a transaction, is in the cache, and survives a kill from now on."""
        if lsn > self._state.position or self._items[0]:
            self._state.position = max(self._state.position, lsn)
            self._write_record()
        if self._uncommitted_items >= COMMIT_ITEMS or self._uncommitted_bytes >= COMMIT_BYTES:
            self._commit()
        hit("toast.after_write")

    def make_durable(self) -> None:
        """Make everything that `advance` covered survive a crash of the machine."""
        if self._log.sync():
            hit("toast.after_sync")

    def release(self, lsn: int) -> None:
        """No reader returns to a position before `lsn`: delete what was kept for that."""
        self._state.floor_lsn = max(self._state.floor_lsn, lsn)
        self._log.release(self._state.records, lsn)
        left = PRUNE_ITEMS
        for prefix, since in list(self._state.garbage.items()):
            if since <= lsn and left > 0:
                left = self._sweep(prefix, left)

    def _sweep(self, prefix: bytes, left: int) -> int:
        """Delete at most `left` entries of an ended generation; returns how many more may be deleted in this pass."""
        with self._txn.cursor(db=self._entry) as cursor:
            found = cursor.set_range(prefix)
            while found and left > 0 and cursor.key().startswith(prefix):
                self._txn.delete(cursor.value()[: _ID.size], db=self._order)
                found = cursor.delete()
                left -= 1
                self._uncommitted_items += 1
        if left > 0:
            del self._state.garbage[prefix]
            self._state.live.pop(prefix, None)
        return left

    def close(self) -> None:
        """Commit, so that the next start has nothing to replay."""
        try:
            with self.explaining():
                if self._items[0]:
                    self._write_record()
                self._commit()
        except StateError as error:
            logger.warning("%s", error)
        finally:
            self._close_files()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """File errors in this block become StateError with advice."""
        try:
            yield
        except (lmdb.Error, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StateError(
                f"the TOAST cache {self._folder} cannot be written: {reason}",
                "Free space on its disk and start again: nothing is lost. If it is damaged, delete the "
                "folder: the cache then starts empty",
            ) from error

    def _write_record(self) -> None:
        """Append the pending changes to the log, and write them to the table."""
        self._uncommitted_items += len(self._items[0])
        self._uncommitted_bytes += self._log.append(self._state.position, self._items)
        self._items, self._item_bytes = ([], [], [], []), 0
        self._flush()

    def _commit(self) -> None:
        """Commit the table durably, and start a new log file."""
        self._flush()
        self._log.sync()  # the table must not be ahead of the log that can undo it
        state = self._state
        state.epoch, state.records = self._log.epoch, self._log.records
        self._txn.put(b"state", marshal.dumps((FORMAT, self._instance, astuple(state))), db=self._meta)
        self._txn.commit()
        # Pages freed in the same transaction are counted, but not written. Extend the file to include them, so that a
        # shorter file is known to be truncated.
        if (self._folder / "table").stat().st_size < self._used_bytes():
            os.truncate(self._folder / "table", self._used_bytes())
        self._txn = self._env.begin(write=True)
        self._uncommitted_items = self._uncommitted_bytes = 0
        self._log.start_file()

    # --- the start

    def _open_table(self) -> None:
        path = self._folder / "table"
        self._env = lmdb.open(str(path), map_size=MAP_BYTES, max_dbs=3, subdir=False, readahead=False, mode=0o600)
        if path.stat().st_size < self._used_bytes():
            raise Unusable("its file is cut off")  # reading past the end would kill the process
        self._entry = self._env.open_db(b"entry")
        self._order = self._env.open_db(b"order")
        self._meta = self._env.open_db(b"meta")
        self._txn = self._env.begin(write=True)

    def _used_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _open(self, resume_lsn: int) -> None:
        if not (self._folder / "table").exists():
            raise Unusable
        self._open_table()
        version, instance, fields = marshal.loads(self._txn.get(b"state", db=self._meta) or b"")
        if version != FORMAT or instance != self._instance:
            raise Unusable("it belongs to another pipeline")
        self._state = state = State(*fields)
        self._log = ToastLog(self._folder, state.epoch)
        self._log.load()
        if self._log.records < state.records:
            raise Unusable(MISSING)
        if state.floor_lsn > resume_lsn:
            raise Unusable("it cannot be rewound to where the stream resumes")
        self._go_to(resume_lsn)
        if state.position < resume_lsn:
            raise Unusable("it ends before the stream resumes")
        state.position = resume_lsn
        self._load_tables()
        self._log = self._log.begin_epoch(resume_lsn)
        self._commit()
        self._log.delete_others()

    def _go_to(self, resume_lsn: int) -> None:
        """Undo changes after `resume_lsn`, and apply those before it that the table does not have."""
        state = self._state
        for _, items in self._log.backwards(state.records, resume_lsn):
            for lsn, key, new, old in reversed(items):
                if lsn > resume_lsn:
                    self._apply(key, new, old, lsn)
                    if new is not None:
                        state.next_id = min(state.next_id, _number_of(new))
        for position, items in self._log.forwards(state.records):
            for lsn, key, new, old in items:
                if lsn <= resume_lsn:
                    self._apply(key, old, new, lsn)
                    if new is not None:
                        state.next_id = max(state.next_id, _number_of(new) + 1)
            state.position = max(state.position, position)

    def _apply(self, key: bytes, old: bytes | None, new: bytes | None, lsn: int) -> None:
        """Replace `old` by `new`. A value that is only a number renews an entry."""
        txn, state = self._txn, self._state
        if new is None:
            txn.delete(key, b"", self._entry)
        elif len(new) == _ID.size:
            txn.put(key, new + txn.get(key, b"", self._entry)[_ID.size :], db=self._entry)
        else:
            txn.put(key, new, db=self._entry)
        if key.startswith(_TABLES):
            if old is not None and not state.live.get(prefix := old[: _ID.size]):
                state.live.pop(prefix, None)  # its number can be used again
            elif old is not None:
                state.garbage[prefix] = lsn
            if new is not None:
                prefix = new[: _ID.size]
                state.garbage.pop(prefix, None)
                state.live.setdefault(prefix, 0)
            return
        if old is not None:
            txn.delete(old[: _ID.size], b"", self._order)
        if new is not None:
            txn.put(new[: _ID.size], key, db=self._order)
        prefix = key[: _ID.size]
        state.live[prefix] = state.live.get(prefix, 0) + (new is not None) - (old is not None)

    def _load_tables(self) -> None:
        with self._txn.cursor(db=self._entry) as cursor:
            found = cursor.set_range(_TABLES)
            while found and cursor.key().startswith(_TABLES):
                oid = _ID.unpack_from(cursor.key(), _ID.size)[0]
                self.tables[oid] = Generation.decode(cursor.value())
                found = cursor.next()
        self._seen = marshal.loads(self._txn.get(b"seen", db=self._meta) or marshal.dumps({}))
        self.entries = sum(self._state.live.get(one.prefix, 0) for one in self.tables.values())

    def _create(self, lsn: int) -> None:
        self._close_files()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._state = State(position=lsn, floor_lsn=lsn)
        self.tables, self._seen, self.entries = {}, {}, 0
        self._open_table()
        self._log = ToastLog(self._folder, 1)
        self._commit()
        fsync_folder(self._folder.parent)

    def _close_files(self) -> None:
        self._log.close()
        if self._txn is not None:
            self._txn.abort()
        if self._env is not None:
            self._env.close()
        self._txn = self._env = None


def _number_of(value: bytes) -> int:
    """The number of the write of an entry, or of a generation."""
    return int(_ID.unpack_from(value)[0])
