"""Unchanged TOAST values: resolved from the old tuple, resolved from the cache, or left marked.

A step between the stream and the spool. Changes come in the order of their commits; what leaves is the same changes, with
values in the place of "unchanged" wherever they are known. A batch that grows much by that leaves in several pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from psycopg import Connection

from pgcdc.capture.batch import CaptureBatch
from pgcdc.capture.database import name_table
from pgcdc.capture.toast_rows import Step, ToastRows, pack_values, unpack_values
from pgcdc.capture.toast_rules import TableFacts, TableRules, ToastCatalog, alter_to_full, shape_of
from pgcdc.errors import ConfigError, SourceError
from pgcdc.relation import Relations
from pgcdc.spool.schema import Op
from pgcdc.state import StateDir

if TYPE_CHECKING:
    from pgcdc.capture.toast_cache import Generation, ToastCache

__all__ = ["DEFAULT_CACHE_ENTRIES", "TOAST_MODES", "ToastOptions", "ToastStep"]

TOAST_MODES = ("full", "cache", "mark")
DEFAULT_CACHE_ENTRIES = 100_000
PIECE_BYTES = 8 << 20
"""A piece leaves when so much was put in."""

_UNKNOWN = TableFacts("")
_Found = list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class ToastOptions:
    """What to do with values that PostgreSQL does not send because an update left them as they were."""

    mode: str = "mark"
    cache_max_entries: int = DEFAULT_CACHE_ENTRIES

    def check(self, origin: str) -> None:
        """Raise ConfigError for what is not known, or cannot be."""
        if self.mode not in TOAST_MODES:
            raise ConfigError(f"toast is {self.mode!r}", f"Give one of: {', '.join(TOAST_MODES)}")
        if self.cache_max_entries < 1:
            raise ConfigError("the TOAST cache has no room for an entry", "Give --toast-cache-max-entries at least 1")
        if self.mode == "cache" and origin != "any":
            raise ConfigError(
                "--toast cache does not go with --origin none: changes that are left out would make its values stale",
                "Use --toast full or --toast mark",
            )


class ToastStep:
    """Resolves what can be resolved. One per capture process."""

    def __init__(
        self,
        options: ToastOptions,
        publications: tuple[str, ...],
        state: StateDir,
        *,
        resume_lsn: int,
        instance: str,
    ) -> None:
        """`resume_lsn` is where the stream goes on: the cache is brought there."""
        self._mode = options.mode
        self.hits = self.misses = 0
        self._cache: ToastCache | None = None
        if options.mode == "cache":
            from pgcdc.capture.toast_cache import ToastCache

            self._cache = ToastCache(
                state.toast, limit=options.cache_max_entries, resume_lsn=resume_lsn, instance=instance
            )
        self._catalog = ToastCatalog(publications)
        self._facts: dict[int, TableFacts] = {}
        self._rules: dict[int, TableRules | None] = {}
        self._shapes: dict[int, str] = {}

    def look(self, sql: Connection) -> None:
        """A connection begins: see what the tables are like before anything is read from the stream."""
        if self._cache is not None:
            with self._cache.explaining():
                self._take_facts(*self._catalog.read_all(sql), self._cache)

    def resolve(self, batch: CaptureBatch, sql: Connection | None) -> Iterator[CaptureBatch]:
        """The batch with what could be resolved; in pieces if it has grown much."""
        part, cache = batch.part, self._cache
        if part is None:
            if cache is not None:
                with cache.explaining():
                    cache.advance(batch.last_lsn)
            yield batch
            return
        data = part.batch if part.batch is not None else part.load().combine_chunks().to_batches()[0]
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
        """What was handed on survives a crash of the machine, as far as the cache goes: to be called before confirming."""
        if self._cache is not None:
            with self._cache.explaining():
                self._cache.make_durable()

    def release(self, lsn: int) -> None:
        """`lsn` is confirmed: nobody goes back before it."""
        if self._cache is not None:
            with self._cache.explaining():
                self._cache.release(lsn)

    def status(self) -> dict[str, Any]:
        """For `pgcdc status`: None where there is no cache."""
        if self._cache is None:
            return dict.fromkeys(("toast_cache_hits", "toast_cache_misses", "toast_cache_entries"))
        return {
            "toast_cache_hits": self.hits,
            "toast_cache_misses": self.misses,
            "toast_cache_entries": self._cache.entries,
        }

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()

    # --- whether the catalog still says what it said

    def _take_facts(self, facts: dict[int, TableFacts], lsn: int, cache: ToastCache) -> None:
        """Remember what the catalog says, and since when: if it says the same as before, since before."""
        self._facts.update(facts)
        self._rules.clear()
        seen = {oid: (fact.stamp, lsn) for oid, fact in facts.items() if cache.seen_stamp(oid)[0] != fact.stamp}
        if seen:
            cache.see_stamps(seen)

    def _check_told(self, batch: CaptureBatch, sql: Connection | None, cache: ToastCache) -> set[int]:
        """The server has described tables anew. Are they what we knew? Returns those of which nothing is to be kept now.

        It does so after whatever was done to a table, and what was done the catalog tells. Count 1: for the first time on
        this connection, and before its rows. Count 2: once more, somewhere between its rows.
        """
        if not batch.told:
            return set()
        fresh, lsn = self._catalog.read(sql, list(batch.told))
        self._take_facts({oid: fresh.get(oid, _UNKNOWN) for oid in batch.told}, lsn, cache)
        first_lsn = batch.transactions.column("lsn")[0].as_py()
        for oid in batch.told:
            if not _is_trusted(cache.generation(oid), self._facts[oid]):
                cache.evict_table(oid, first_lsn)
        # What the catalog has said since before these changes was not done between them.
        return {oid for oid, count in batch.told.items() if count > 1 and cache.seen_stamp(oid)[1] >= first_lsn}

    def _prove(self, batch: CaptureBatch, oid: int, lsn: int, cache: ToastCache) -> None:
        """Rows behind the stamp came without a new description: nothing was done to the table before the stamp."""
        table = cache.generation(oid)
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
        self, batch: CaptureBatch, rows: ToastRows, sql: Connection | None, cache: ToastCache, found: _Found
    ) -> Iterator[int]:
        """Go through the changes; `found` gets (mark, value). Yields the row where a piece is to end, at last the end.

        The cache has all changes up to there, and they survive a kill, before the rows go to the spool.
        """
        with cache.explaining():
            doubtful = self._check_told(batch, sql, cache)
            grown = 0
            marks_of = _group_marks(rows)
            for step in self._plan(batch, rows, cache, doubtful, marks_of):
                before = len(found)
                self._take(step, rows, cache, marks_of.get(step.row, ()), found)
                grown += sum(len(value) for _, value in found[before:])
                if grown > PIECE_BYTES:
                    cache.advance(rows.complete_lsn(step.row + 1))
                    yield step.row + 1
                    grown = 0
            cache.advance(rows.complete_lsn(rows.data.num_rows))
        yield rows.data.num_rows

    def _plan(
        self,
        batch: CaptureBatch,
        rows: ToastRows,
        cache: ToastCache,
        doubtful: set[int],
        marks_of: dict[int, list[int]],
    ) -> list[Step]:
        """What is to be done, in the order of the changes. Changes that cannot concern the cache are not among it."""
        has_marks = np.zeros(rows.data.num_rows, bool)
        has_marks[list(marks_of)] = True
        steps: list[Step] = []
        versions = [version for version in np.unique(rows.relation).tolist() if version >= 0]
        oids = [rows.relations[version].oid for version in versions]
        first_lsn = int(rows.lsn[0])
        for version, oid in zip(versions, oids, strict=True):
            mine = np.flatnonzero(rows.relation == version)
            rules = self._rules_of(version, rows.relations)
            if rules is None or oid in doubtful:
                self.misses += sum(len(marks_of[row]) for row in mine[has_marks[mine]].tolist())
                cache.evict_table(oid, first_lsn)
                continue
            self._prove(batch, oid, first_lsn, cache)
            # Of two shapes in one batch, one may find what the other has stored.
            has_entries = cache.has_entries(oid) or oids.count(oid) > 1
            steps += rows.plan(version, mine, rules, has_marks, has_entries=has_entries)
        return sorted(steps) if len(versions) > 1 else steps

    def _take(
        self, step: Step, rows: ToastRows, cache: ToastCache, marks: list[int] | tuple[()], found: _Found
    ) -> None:
        """One change: look up, resolve, and store what is known now."""
        row, version, key, old_key, values = step
        oid, op, lsn = rows.relations[version].oid, int(rows.op[row]), int(rows.lsn[row])
        table = cache.generation(oid)
        if table is not None and (op == Op.TRUNCATE or table.shape != self._shapes[version]):
            cache.evict_table(oid, lsn)
            table = None
        if op == Op.TRUNCATE:
            return
        if key is None or (
            table is None and not values
        ):  # a row without a key, or one of which there is nothing to keep
            self.misses += len(marks)
            return
        if table is None:
            table = cache.begin_table(oid, self._shapes[version], *cache.seen_stamp(oid), lsn)
        place, stored = cache.get(table.prefix, key)
        if op == Op.DELETE:
            if stored is not None:
                cache.remove(lsn, place, stored)
            return
        from_place, from_stored = cache.get(table.prefix, old_key) if old_key is not None else (place, stored)
        # An INSERT with unchanged values is an update of a row that was filtered out until now: what is here is not its.
        before = cache.values_of(from_place, from_stored) if op == Op.UPDATE else None
        known = unpack_values(before) if marks and before is not None else {}
        for mark in marks:
            column = int(rows.mark_column[mark])
            value = known.get(column)
            if value is None:
                self.misses += 1
                continue
            self.hits += 1
            rows.mark_left[mark] = False
            found.append((mark, value))
            values[column] = value
        packed = pack_values(values)
        if from_place != place and from_stored is not None:
            cache.remove(lsn, from_place, from_stored)
        if not packed:
            if stored is not None:
                cache.remove(lsn, place, stored)
        elif stored is not None and packed == before and from_place == place:
            cache.keep_young(lsn, place, packed, stored)
        else:
            cache.put(lsn, place, packed, stored)


def _is_trusted(table: Generation | None, facts: TableFacts) -> bool:
    """Whether nothing was done to a table since its entries were stored that the stream does not tell."""
    if table is None or table.stamp != facts.stamp:
        return False
    return table.is_proven or table.first_lsn > table.stamp_lsn


def _group_marks(rows: ToastRows) -> dict[int, list[int]]:
    marks = rows.open_marks
    grouped: dict[int, list[int]] = {}
    for mark, row in zip(marks.tolist(), rows.mark_row[marks].tolist(), strict=True):
        grouped.setdefault(row, []).append(mark)
    return grouped


def _unresolved(rows: ToastRows) -> SourceError:
    """`full` was asked for, and the old tuple is not there any more."""
    mark = int(rows.open_marks[0])
    row = int(rows.mark_row[mark])
    relation = rows.relations[int(rows.relation[row])]
    column = relation.columns[int(rows.mark_column[mark])].name
    table = name_table(relation.namespace, relation.name)
    return SourceError(
        f"column {column} of table {table} was not sent with the change at {rows.position(row)}: "
        "its value is out of line and unchanged, and the table has no REPLICA IDENTITY FULL (any more)",
        f"Run {alter_to_full(relation.namespace, relation.name)} What was written before that can only be read with "
        "--toast cache or --toast mark",
    )
