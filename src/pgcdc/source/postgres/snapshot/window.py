"""The stream's changes to a chunk's rows while it was read, folded into the chunk before its release.

The window opens before the chunk's snapshot is taken, and closes when the stream has passed that snapshot. So it has
every change that the snapshot does not see, and maybe some that it does. Both are folded. That is correct because the
last change of a row in the window is at least as new as the chunk, and a column that no change in the window has
written is current in the chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import SourceError
from pgcdc.core.relation import OldKind, Op, Relation
from pgcdc.core.state import append_lines, decode_lines, read_lines
from pgcdc.source.postgres.setup.tables import PublishedTable
from pgcdc.source.postgres.snapshot.copy import row_lists
from pgcdc.source.postgres.snapshot.releases import snapshot_rows
from pgcdc.source.postgres.snapshot.requests import SkipRule
from pgcdc.spool.segment import CaptureBatch, Part, count_rows

WINDOW_BYTES = 64 << 20
XIDS = 1 << 18

Key = tuple[bytes, ...]  # The values of the key's columns


class Change(NamedTuple):
    """One change of a row, with its keys. A key that was not sent is None."""

    op: int
    key: Key | None
    old_key: Key | None  # Only where it differs
    new: list[bytes | None]
    unchanged: frozenset[int]  # Columns of `new` that were not sent


@dataclass(slots=True)
class Chunk:
    """Rows as read: flat arrays of values, `columns` per row."""

    values: list[pa.Array]
    columns: int
    key: tuple[int, ...]  # The columns of the key, in its order

    @property
    def key_columns(self) -> list[pa.Array]:
        def column(place: int) -> pa.Array:
            picked = [one.take(pa.array(np.arange(place, len(one), self.columns))) for one in self.values]
            return pa.concat_arrays([pa.array([], pa.binary()), *picked])

        return [column(place) for place in self.key]

    def numbers(self) -> dict[Key, int]:
        """Row numbers by key."""
        keys = zip(*(column.to_pylist() for column in self.key_columns), strict=True)
        return {key: number for number, key in enumerate(keys)}

    def row(self, number: int) -> list[bytes | None]:
        at = number * self.columns
        for one in self.values:
            if at < len(one):
                values: list[bytes | None] = one.slice(at, self.columns).to_pylist()
                return values
            at -= len(one)
        raise IndexError(number)

    def rows_without(
        self, touched: npt.NDArray[np.int64], replaced: list[list[bytes | None]]
    ) -> Iterator[pa.RecordBatch]:
        """The rows as changes, without the touched ones and with their replacements."""
        first = 0
        for values in self.values:
            count = len(values) // self.columns
            mine = touched[(touched >= first) & (touched < first + count)] - first
            keep = np.ones(count, bool)
            keep[mine] = False
            left = row_lists(values, self.columns).filter(pa.array(keep)).flatten() if len(mine) else values
            if len(left):
                yield snapshot_rows(left, self.columns)
            first += count
        if replaced:
            flat = [value for row in replaced for value in row]
            yield snapshot_rows(pa.array(flat, pa.binary()), self.columns)


@dataclass(slots=True)
class Window:
    """The changes of one table since it was opened, in order."""

    oid: int
    key: tuple[str, ...]
    limit_bytes: int = WINDOW_BYTES
    relations: set[Relation] = field(default_factory=set)  # The shapes of these changes
    nbytes: int = 0
    is_full: bool = False  # It grew too large, and changes were dropped: read the chunk again
    _parts: list[tuple[pa.RecordBatch, Relation]] = field(default_factory=list)
    _wanted: list[pa.Array] | None = None

    def see(self, rows: pa.RecordBatch, relation: Relation) -> None:
        """Take changes of the table, all of one shape."""
        self.relations.add(relation)
        if not self.is_full and set(self.key) <= {column.name for column in relation.columns}:
            self._keep(rows, relation)

    def narrow(self, keys: list[pa.Array]) -> None:
        """Keep only changes of these keys (an array per column), past and future."""
        self._wanted = keys
        parts, self._parts, self.nbytes = self._parts, [], 0
        for rows, relation in parts:
            self._keep(rows, relation)

    def changes(self) -> Iterator[Change]:
        """The changes still to fold, in stream order."""
        for rows, relation in self._parts:
            yield from changes_of(rows, relation, self.key)

    def _keep(self, rows: pa.RecordBatch, relation: Relation) -> None:
        if self._wanted is not None:
            rows = rows.filter(self._touches(rows, relation))
        if rows.num_rows:
            self._parts.append((rows, relation))
            self.nbytes += rows.nbytes
        if self.nbytes > self.limit_bytes:
            self.is_full, self._parts = True, []

    def _touches(self, rows: pa.RecordBatch, relation: Relation) -> pa.Array:
        """Changes that may have wanted keys. Checked column by column, which excludes nearly all others."""
        assert self._wanted is not None
        names = [column.name for column in relation.columns]
        touches = np.asarray(rows.column("op").to_numpy() == Op.TRUNCATE)
        for side in ("new", "old"):
            fits = np.ones(rows.num_rows, bool)
            for name, wanted in zip(self.key, self._wanted, strict=True):
                values = pc.list_element(rows.column(side), names.index(name))
                # A key that was not sent is checked when folding.
                is_there = values.is_valid().to_numpy(zero_copy_only=False)
                fits &= pc.is_in(values, value_set=wanted).to_numpy(zero_copy_only=False) | ~is_there
            is_row = rows.column(side).is_valid().to_numpy(zero_copy_only=False)
            touches |= fits & is_row
        return pa.array(touches)

    # --- folding into the chunk

    def fold(self, chunk: Chunk) -> tuple[npt.NDArray[np.int64], list[list[bytes | None]]] | None:
        """Numbers of the rows that changed since they were read, and their current values. None if the stream did not
        say which rows it changed."""
        changes = list(self.changes())
        if any(change.key is None and change.op != Op.TRUNCATE for change in changes):
            return None
        numbers = chunk.numbers() if changes else {}
        rows: dict[Key, list[bytes | None] | None] = {}
        is_truncated = False
        for change in changes:
            if change.op == Op.TRUNCATE:
                is_truncated, rows = True, dict.fromkeys(numbers)
                continue
            assert change.key is not None
            if change.old_key in numbers:
                rows[change.old_key] = None
            if change.key not in numbers:
                continue
            if change.op == Op.DELETE:
                rows[change.key] = None
            elif not change.unchanged:
                rows[change.key] = change.new
            elif change.old_key is not None:
                # its long values were read under another key: it is among the moved keys, and read later
                rows[change.key] = None
            else:
                before = rows[change.key] if change.key in rows else chunk.row(numbers[change.key])
                if before is not None:
                    new = enumerate(change.new)
                    before = [before[at] if at in change.unchanged else value for at, value in new]
                rows[change.key] = before
        count = sum(len(one) for one in chunk.values) // chunk.columns
        touched = np.arange(count) if is_truncated else np.array([numbers[key] for key in rows], np.int64)
        return touched, [row for row in rows.values() if row is not None]

    def find_vanished(self, chunk: Chunk, keys: Iterable[Key]) -> list[Key] | None:
        """The keys that are neither in the chunk nor in the stream since. None if the stream did not say which rows it
        changed."""
        touched = set(chunk.numbers())
        for change in self.changes():
            if change.op == Op.TRUNCATE:
                return []
            if change.key is None:
                return None
            touched |= {change.key, change.old_key or change.key}
        return [key for key in keys if key not in touched]


def rows_of(batch: CaptureBatch, oids: Iterable[int]) -> Iterator[tuple[pa.RecordBatch, Relation]]:
    """The changes of these tables in a batch: one shape at a time, in order for each table."""
    if batch.part is None:
        return
    wanted = set(oids)
    data = batch.part.load_batch()
    numbers = data.column("relation").to_numpy()
    versions = [one for one in np.unique(numbers).tolist() if one >= 0 and batch.relations[one].oid in wanted]
    for oid in {batch.relations[version].oid for version in versions}:
        mine = [version for version in versions if batch.relations[version].oid == oid]
        rows = np.flatnonzero(np.isin(numbers, mine))
        cuts = np.flatnonzero(np.diff(numbers[rows])) + 1
        for run in np.split(rows, cuts):
            # Copied: a slice would keep the whole batch in memory.
            yield data.take(pa.array(run)), batch.relations[int(numbers[run[0]])]


def changes_of(rows: pa.RecordBatch, relation: Relation, key: Sequence[str]) -> Iterator[Change]:
    """The changes of one shape, one by one."""
    names = [column.name for column in relation.columns]
    at = [names.index(name) for name in key]
    columns = (rows.column(name).to_pylist() for name in ("op", "new", "old", "old_kind", "unchanged"))
    for op, new, old, old_kind, marks in zip(*columns, strict=True):
        if op not in (Op.INSERT, Op.UPDATE, Op.DELETE):
            yield Change(op, None, None, [], frozenset())
            continue
        unchanged = frozenset(mark for mark in marks or () if mark >= 0)
        old_key = _key(old[one] for one in at) if old_kind != OldKind.NONE else None
        if op == Op.DELETE:
            yield Change(op, old_key, None, [], unchanged)
            continue
        new_key = _key(old[one] if one in unchanged and old else new[one] for one in at)
        yield Change(op, new_key, old_key if old_key != new_key else None, new, unchanged)


def _key(values: Iterable[bytes | None]) -> Key | None:
    found = tuple(values)
    return None if None in found else found  # type: ignore[return-value]


def key_moves(rows: pa.RecordBatch, relation: Relation) -> list[tuple[Key, Key]]:
    """Old and new keys of rows whose key changed while some of their long values were not sent. Values of the replica
    identity, in column order: see `identity_columns`."""
    has_old = rows.column("old_kind").to_numpy() == OldKind.KEY
    has_marks = rows.column("unchanged").is_valid().to_numpy(zero_copy_only=False)
    candidates = has_old & has_marks & (rows.column("op").to_numpy() == Op.UPDATE)
    if not candidates.any():
        return []
    key = [column.name for column in relation.columns if column.is_key]
    return [
        (change.old_key, change.key)
        for change in changes_of(rows.filter(pa.array(candidates)), relation, key)
        if change.unchanged and change.key is not None and change.old_key is not None
    ]


class StreamedXids:
    """The last transactions of the stream, to find commits that a snapshot does not see yet. A commit is in the WAL,
    and may be streamed, before the server makes it visible; with synchronous replication, long before. Numbers have 32
    bits, as in the stream."""

    def __init__(self, size: int = XIDS) -> None:
        self._ring = np.zeros(size, np.uint32)
        self._at = self._count = 0

    def add(self, xids: npt.NDArray[np.int64]) -> None:
        """Add transactions that were passed on; 0 stands for none."""
        xids = xids[xids != 0][-len(self._ring) :]
        places = (self._at + np.arange(len(xids))) % len(self._ring)
        self._ring[places] = xids.astype(np.uint32)
        self._at = (self._at + len(xids)) % len(self._ring)
        self._count = min(self._count + len(xids), len(self._ring))

    def copy(self) -> npt.NDArray[np.uint32]:
        return self._ring[: self._count].copy()


# --- changes of the stream that a table's rows already contained when they were read

_HALF = 1 << 31


def is_visible(xids: npt.NDArray[np.int64], snapshot: str) -> npt.NDArray[np.bool_]:
    """Which of these transactions a pg_snapshot (`xmin:xmax:xip,...`) sees. They have 32 bits, as in the stream."""
    _, xmax, running = snapshot.split(":")
    last = int(xmax)
    # The 64-bit number nearest to the snapshot: no other can occur in the stream together with it.
    distance = (xids - last + _HALF) % (2 * _HALF) - _HALF
    full = last + distance
    in_progress = np.array([int(one) for one in running.split(",") if one], np.int64)
    seen: npt.NDArray[np.bool_] = (full < last) & ~np.isin(full, in_progress)
    return seen


def leave_out(batch: CaptureBatch, rules: Sequence[SkipRule]) -> CaptureBatch:
    """The batch without the changes that a snapshot younger than the slot's saw. Positions stay the same."""
    lsns = batch.transactions.column("commit").to_numpy()
    if batch.part is None or not len(lsns) or lsns[0] > max((rule.lsn for rule in rules), default=0):
        return batch
    data = batch.part.load_batch()
    counts = batch.transactions.column("rows").to_numpy()
    of_row = np.repeat(np.arange(len(counts)), counts)
    versions = data.column("relation").to_numpy()
    gone = np.zeros(len(versions), np.bool_)
    for rule in rules:
        mine = [version for version in np.unique(versions) if version >= 0 and batch.relations[version].oid == rule.oid]
        known = is_visible(batch.transactions.column("xid").to_numpy(), rule.visible) & (lsns <= rule.lsn)
        gone |= np.isin(versions, mine) & known[of_row]
    if not gone.any():
        return batch
    kept = data.filter(pa.array(~gone))
    left = np.bincount(of_row[~gone], minlength=len(counts))
    transactions = count_rows(batch.transactions, left).filter(pa.array(left > 0))
    if batch.part.path is not None:
        batch.part.path.unlink(missing_ok=True)
    part = Part(kept.num_rows, kept.nbytes, batch.part.last, kept) if kept.num_rows else None
    return replace(batch, part=part, transactions=transactions)


# --- chunks of given keys: files with one key per line


class MovedKeys:
    """Keys of one request whose rows moved from the unread part to the read part, as texts by column name.

    An UPDATE contains the whole new row, so this is harmless, except for long values that it does not change: these are
    not in the stream, and a receiver without the row would never get them. So the new keys of such rows are recorded
    durably before the change becomes visible, and read last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: set[Key] | None = None
        read_lines(path)  # cuts off a line that a crash left incomplete: the change comes again

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def add(self, moves: Iterable[tuple[Key, Key]], columns: list[str], done: int) -> None:
        """Add old and new keys, by `columns`. Once everything else was read (`done` >= 0), only unread ones count."""
        wanted = list(moves)
        if done >= 0:
            pending = self._load_pending(columns, done)
            kept = []
            for old, new in wanted:  # in order: a row may move again
                if old in pending:
                    pending.add(new)
                    kept.append((old, new))
            wanted = kept
        if wanted:
            texts = ([one.decode("utf-8", "surrogateescape") for one in new] for _, new in wanted)
            append_lines(self.path, [dict(zip(columns, key, strict=True)) for key in texts])

    def read(self, done: int, count: int, key: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], int]:
        """The next distinct keys, in the order of `key`, and the number of bytes processed after them."""
        found: dict[tuple[str, ...], None] = {}
        for raw, size in decode_lines(self.path.read_bytes()[done:] if self.nbytes else b""):
            if len(found) == count:
                break
            done += size
            if set(key) <= set(raw):
                found[tuple(raw[name] for name in key)] = None
        return tuple(found), done

    def move_on(self) -> None:
        """Some keys were read and are no longer pending."""
        self._pending = None

    def _load_pending(self, columns: list[str], done: int) -> set[Key]:
        if self._pending is None:
            keys, _ = self.read(done, 1 << 62, tuple(columns))
            self._pending = {tuple(one.encode("utf-8", "surrogateescape") for one in key) for key in keys}
        return self._pending


def read_candidates(
    keys_file: str, begin: int, count: int, table: PublishedTable
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """The next distinct keys of a sink that the table may no longer have, and the number of bytes processed. Empty at
    the end."""
    found: dict[tuple[str, ...], None] = {}
    try:
        with open(keys_file, "rb") as file:
            file.seek(begin)
            while len(found) < count and (line := file.readline()):
                key = json.loads(line)
                if not isinstance(key, list) or [type(one) for one in key] != [str] * len(table.key):
                    raise ValueError(f"not a key of {len(table.key)} texts: {line[:80]!r}")
                found[tuple(key)] = None
                begin += len(line)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"the keys of table {table.title} in {keys_file} cannot be read: {error}", "Create the file again"
        ) from error
    return tuple(found), begin
