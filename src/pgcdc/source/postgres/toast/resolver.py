"""Unchanged TOAST values: resolved from the old tuple or the cache, or left marked. A step between the stream and the
spool. Changes arrive in commit order and leave unchanged, except that known values replace "unchanged". A batch that
grows much is output in several pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from psycopg import Connection

from pgcdc.core.errors import ConversionError
from pgcdc.core.position import STREAM, Position
from pgcdc.core.relation import Op, Relations
from pgcdc.core.state import StateDir
from pgcdc.postgres.database import name_table
from pgcdc.source.postgres.options import ToastOptions
from pgcdc.source.postgres.toast.identity_rules import TableFacts, TableRules, ToastCatalog, alter_to_full, shape_of
from pgcdc.source.postgres.toast.values import Steps, ToastRows, cache_place, pack_values, single_value, unpack_values
from pgcdc.spool.segment import CaptureBatch

if TYPE_CHECKING:
    from pgcdc.source.postgres.toast.cache import ToastCache
    from pgcdc.source.postgres.toast.cache_log import Generation

PIECE_BYTES = 8 << 20  # A piece is output once this much was filled in

INSERT, DELETE, TRUNCATE = int(Op.INSERT), int(Op.DELETE), int(Op.TRUNCATE)
MAX_KEY = 400  # In key bytes: LMDB allows 511, longer keys are shortened
STORED_HEAD = 12  # Bytes before the values in a stored entry

_UNKNOWN = TableFacts("")
_Found = list[tuple[int, bytes]]


class ToastStep:
    """Resolves what it can. One per capture process."""

    def __init__(
        self, options: ToastOptions, publications: tuple[str, ...], state: StateDir, *, resume: Position, instance: str
    ) -> None:
        """`resume` is where the stream resumes; the cache is brought to that position."""
        self._mode = options.effective_toast
        self.hits = self.misses = 0
        self._cache: ToastCache | None = None
        if self._mode == "cache":
            from pgcdc.source.postgres.toast.cache import ToastCache

            place, limit = cache_place(resume.commit, resume.kind), options.toast_cache_max_entries
            self._cache = ToastCache(state.toast, limit=limit, resume_lsn=place, instance=instance)
        self._catalog = ToastCatalog(publications)
        self._facts: dict[int, TableFacts] = {}
        self._rules: dict[int, TableRules | None] = {}
        self._shapes: dict[int, str] = {}

    def look(self, sql: Connection) -> None:
        """At the start of a connection: read the tables' facts before anything from the stream."""
        if self._cache is not None:
            with self._cache.explaining():
                self._take_facts(*self._catalog.read_all(sql), self._cache)

    def resolve(self, batch: CaptureBatch, sql: Connection) -> Iterator[CaptureBatch]:
        """The batch with resolved values; in several pieces if it has grown much."""
        part, cache = batch.part, self._cache
        if part is None:
            if cache is not None:
                with cache.explaining():
                    cache.advance(cache_place(batch.last_lsn, STREAM))
            yield batch
            return
        data = part.load_batch()
        if cache is None and data.column("unchanged").null_count == data.num_rows:
            yield batch
            return
        rows = ToastRows(batch, data)
        rows.resolve_old()
        if self._mode == "full" and len(rows.open_marks):
            raise _unresolved(rows)
        begin, found = 0, _Found()
        if cache is not None:
            for end in self._walk(batch, rows, sql, cache, found):
                if end < data.num_rows:
                    yield rows.rebuild(begin, end, found)
                    begin, found[:] = end, ()
        if begin or found or rows.is_changed:
            yield rows.rebuild(begin, data.num_rows, found)
            if part.path is not None:
                part.path.unlink()
        else:
            yield batch

    def make_durable(self) -> None:
        """Make what was passed on survive a crash of the machine, as far as the cache is concerned. Call it before
        confirming."""
        if self._cache is not None:
            with self._cache.explaining():
                self._cache.make_durable()

    def release(self, lsn: int) -> None:
        """`lsn` is confirmed: no reader returns to a position before it."""
        if self._cache is not None:
            with self._cache.explaining():
                self._cache.release(cache_place(lsn, STREAM))

    def status(self) -> dict[str, Any]:
        """For `pgcdc status`; the values are None without a cache."""
        cache = self._cache
        counts = (self.hits, self.misses, cache.entries) if cache is not None else (None, None, None)
        return dict(zip(("toast_cache_hits", "toast_cache_misses", "toast_cache_entries"), counts, strict=True))

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    # --- whether the catalog still says the same

    def _take_facts(self, facts: dict[int, TableFacts], lsn: int, cache: ToastCache) -> None:
        """Remember the catalog's facts, and since when they are true: unchanged facts keep their time."""
        self._facts.update(facts)
        self._rules.clear()
        seen = {
            oid: (fact.stamp, cache_place(lsn, STREAM))
            for oid, fact in facts.items()
            if cache.seen_stamp(oid)[0] != fact.stamp
        }
        if seen:
            cache.see_stamps(seen)

    def _check_told(self, batch: CaptureBatch, sql: Connection, cache: ToastCache) -> set[int]:
        """The server described tables again, as it does after any change to a table. Check whether they are still the
        known ones, and return the tables of which nothing may be kept for now. Count 1: described for the first time on
        this connection, before the table's rows. Count 2: described again, somewhere between its rows."""
        if not batch.told:
            return set()
        fresh, lsn = self._catalog.read(sql, list(batch.told))
        self._take_facts({oid: fresh.get(oid, _UNKNOWN) for oid in batch.told}, lsn, cache)
        first_lsn = cache_place(batch.transactions.column("commit")[0].as_py(), batch.end.kind)
        for oid in batch.told:
            if not _is_trusted(cache.tables.get(oid), self._facts[oid]):
                cache.evict_table(oid, first_lsn)
        # If the catalog's facts are older than these changes, nothing happened between them.
        return {oid for oid, count in batch.told.items() if count > 1 and cache.seen_stamp(oid)[1] >= first_lsn}

    def _prove(self, batch: CaptureBatch, oid: int, lsn: int, cache: ToastCache) -> None:
        """Rows after the stamp came without a new description, so nothing was done to the table before the stamp."""
        table = cache.tables.get(oid)
        if batch.end.is_snapshot:  # these rows are not from the stream, and prove nothing
            return
        if table is not None and not table.is_proven and oid not in batch.told and lsn > table.stamp_lsn:
            cache.prove(oid)

    def _rules_of(self, version: int, relations: Relations) -> TableRules | None:
        if version not in self._rules:
            relation = relations[version]
            facts = self._facts.get(relation.oid, _UNKNOWN)
            self._shapes.setdefault(version, shape_of(relation))
            made = TableRules.make(
                relation, facts, block_bytes=self._catalog.block_bytes, is_utf8=self._catalog.is_utf8
            )
            self._rules[version] = made if facts.stamp and made.keys and made.toastable.any() else None
        return self._rules[version]

    # --- the cache

    def _walk(
        self, batch: CaptureBatch, rows: ToastRows, sql: Connection, cache: ToastCache, found: _Found
    ) -> Iterator[int]:
        """Go through the changes; `found` collects (mark, value). Yields the row where each piece ends. By then the
        cache has all changes up to that row, and they survive a kill before the rows go to the spool."""
        with cache.explaining():
            doubtful = self._check_told(batch, sql, cache)
            marks = rows.open_marks
            steps = rows.plan(self._tables_in(batch, rows, cache, doubtful), marks)
            in_steps = sum(steps.end_mark) - sum(steps.first_mark)
            self.misses += len(marks) - in_steps  # those of tables for which nothing is kept
            columns, at = rows.mark_column[marks].tolist(), marks.tolist()
            begin = 0
            while begin < len(steps.row):
                begin = self._take(steps, begin, rows, columns, at, cache, found)
                if begin < len(steps.row):
                    cache.advance(rows.complete_place(steps.row[begin - 1] + 1))
                    yield steps.row[begin - 1] + 1
            cache.advance(rows.complete_place(rows.data.num_rows))
        yield rows.data.num_rows

    def _tables_in(
        self, batch: CaptureBatch, rows: ToastRows, cache: ToastCache, doubtful: set[int]
    ) -> list[tuple[int, npt.NDArray[np.int64], TableRules, bool]]:
        """The tables of a batch that use the cache: version, rows, rules, and whether it has entries for them."""
        versions = [version for version in np.unique(rows.relation).tolist() if version >= 0]
        oids = [rows.relations[version].oid for version in versions]
        first_lsn = int(rows.place[0])
        found = []
        for version, oid in zip(versions, oids, strict=True):
            rules = self._rules_of(version, rows.relations)
            if rules is None or oid in doubtful:
                cache.evict_table(oid, first_lsn)
                continue
            self._prove(batch, oid, first_lsn, cache)
            # If one batch has two shapes of a table, one may find what the other stored.
            has_entries = cache.has_entries(oid) or oids.count(oid) > 1
            found.append((version, np.flatnonzero(rows.relation == version), rules, has_entries))
        return found

    def _take(
        self, steps: Steps, begin: int, rows: ToastRows, columns: list[int], marks: list[int], cache: ToastCache,
        found: _Found,
    ) -> int:  # fmt: skip
        """For each change: look up, resolve, and store what is now known. Stops early when `found` is large. This is
        the hot loop: as few calls as possible."""
        grown = hits = misses = 0
        prefixes: dict[int, bytes | None] = {}
        get, put, remove = cache.get, cache.put, cache.remove
        each = zip(*(field[begin:] if begin else field for field in steps), strict=True)
        number = begin - 1
        for number, (_, version, op, lsn, key, old_key, sent, first, end) in enumerate(each, begin):  # noqa: B007
            prefix = prefixes.get(version)
            if prefix is None or op == TRUNCATE:
                known_tables = cache.generations
                prefix = self._prefix(version, op, lsn, sent, rows.relations, cache)
                if cache.generations != known_tables:
                    prefixes.clear()
                prefixes[version] = prefix
            if prefix is None or key is None:  # nothing is kept for the table, or its rows cannot be identified
                misses += end - first
                continue
            full = prefix + key if len(key) <= MAX_KEY else cache.shorten(prefix, key)
            stored = get(full)
            if op == DELETE:
                if stored is not None:
                    remove(lsn, full, stored)
                continue
            source = stored
            if old_key is not None:
                old_full = prefix + old_key if len(old_key) <= MAX_KEY else cache.shorten(prefix, old_key)
                source = get(old_full)
                if source is not None:
                    remove(lsn, old_full, source)
            packed = sent
            # An INSERT with unchanged values is an update of a row that was filtered out until now: we do not have
            # them.
            before = b"" if source is None or op == INSERT else source[STORED_HEAD:]
            if first + 1 == end and not sent and (value := single_value(before, columns[first])) is not None:
                if cache.is_sound(source, before):
                    found.append((marks[first], value))
                    hits += 1
                    grown += len(value)
                    packed = before
                else:
                    misses += 1
            elif first < end:
                known = unpack_values(before) if cache.is_sound(source, before) else {}
                values = unpack_values(sent) if sent else {}
                for mark in range(first, end):
                    value = known.get(columns[mark])
                    if value is None:
                        misses += 1
                        continue
                    found.append((marks[mark], value))
                    values[columns[mark]] = value
                    hits += 1
                    grown += len(value)
                packed = before if values == known else pack_values(values)
            if not packed:
                if stored is not None:
                    remove(lsn, full, stored)
            elif packed == before and old_key is None:
                assert stored is not None
                if cache.is_old(stored):
                    cache.renew(lsn, full, stored)
            else:
                put(lsn, full, packed, stored)
            if grown > PIECE_BYTES:
                break
        self.hits += hits
        self.misses += misses
        return number + 1

    def _prefix(
        self, version: int, op: int, lsn: int, sent: bytes, relations: Relations, cache: ToastCache
    ) -> bytes | None:
        """The prefix of a table's entries in this version's shape; None if there are no entries and none should be
        created."""
        oid = relations[version].oid
        table = cache.tables.get(oid)
        if table is not None and (op == Op.TRUNCATE or table.shape != self._shapes[version]):
            cache.evict_table(oid, lsn)
            table = None
        if table is None and sent:
            table = cache.begin_table(oid, self._shapes[version], *cache.seen_stamp(oid), lsn)
        return table.prefix if table is not None else None


def _is_trusted(table: Generation | None, facts: TableFacts) -> bool:
    """Whether the stream saw every change to a table since its entries were stored."""
    if table is None or table.stamp != facts.stamp:
        return False
    return table.is_proven or table.first_lsn > table.stamp_lsn


def _unresolved(rows: ToastRows) -> ConversionError:
    """The error if `full` was requested, but the old tuple was not sent."""
    mark = int(rows.open_marks[0])
    row = int(rows.mark_row[mark])
    relation = rows.relations[int(rows.relation[row])]
    column = relation.columns[int(rows.mark_column[mark])].name
    table = name_table(relation.namespace, relation.name)
    return ConversionError(
        f"column {column} of table {table} was not sent with the change at {rows.position(row)}: its value is "
        "stored out of line and unchanged, and the table lacks REPLICA IDENTITY FULL",
        f"Run {alter_to_full(relation.namespace, relation.name)} Earlier changes can only be read with "
        "--toast cache or --toast mark",
    )
