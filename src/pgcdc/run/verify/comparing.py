"""Compares the two sides of a table: first sums, then rows where sums differ, and then keys that differ, until they
settle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from pgcdc.run.verify.hashing import Key, Seen, Sums
from pgcdc.run.verify.report import Notebook, TableResult
from pgcdc.run.verify.settling import WRONG, settle
from pgcdc.run.verify.sides import ALL, Range, Side, SqlSide

RANGE_ROWS, RANGE_BUCKETS = 50_000, 1 << 10
BUCKETS = 1 << 16  # For a table that is not cut into ranges
GROUP_RANGES = 40  # How many ranges to compare after one barrier
GROUP_ROWS = 400_000  # How many rows of differing buckets to hold at a time
SETTLED_KEYS = 50_000  # How many keys to settle together

Progress = Callable[[int, bool], None]  # Rows compared so far, and whether that is all


@dataclass(frozen=True)
class Comparison:
    """One table at one adapter."""

    name: str
    source: Side
    target: Side
    barrier: Callable[[], object]
    """Returns when everything that was committed before its call is at the target."""
    notebook: Notebook
    letters: Collection[Key]  # Keys of its dead letters
    has_key: bool
    shown_keys: int
    progress: Progress

    @property
    def result(self) -> TableResult:
        return self.notebook.results[self.name]

    def run(self) -> None:
        self.notebook.begin(self.name)
        self.progress(self.result.rows, False)
        if isinstance(self.source, SqlSide) and isinstance(self.target, SqlSide) and self.result.method == "ranges":
            self._compare_ranges(self.source, self.target)
        else:
            self._compare_buckets()
        self.result.is_done = True
        self.notebook.save()
        self.progress(self.result.rows, True)

    def _compare_ranges(self, source: SqlSide, target: SqlSide) -> None:
        result = self.result
        while True:
            after: Key | None = tuple(result.after) if result.after is not None else None
            group, is_last = list[tuple[Range, tuple[int, int]]](), False
            while len(group) < GROUP_RANGES and not is_last:
                upto = source.bound(after, RANGE_ROWS)
                group.append(((after, upto), source.range_sum((after, upto))))
                self.progress(result.rows + sum(rows for _, (rows, _) in group), False)
                after, is_last = upto, upto is None
            self.barrier()
            doubtful = set[Key]()
            for part, found in group:
                result.rows += found[0]
                result.ranges += 1
                if target.range_sum(part) != found:
                    sums = [side.sums(part, RANGE_BUCKETS) for side in (source, target)]
                    for keys in self._unequal(part, *sums):
                        doubtful |= keys
                if len(doubtful) >= SETTLED_KEYS:
                    self._settle(doubtful)
                    doubtful.clear()
            self._settle(doubtful)
            result.after = list(after) if after is not None else None
            if is_last:
                return
            self.notebook.save()

    def _compare_buckets(self) -> None:
        before = self.source.sums(ALL, BUCKETS)
        self.barrier()
        there = self.target.sums(ALL, BUCKETS)
        self.result.rows, self.result.ranges = sum(before.rows), sum(rows > 0 for rows in before.rows)
        for keys in self._unequal(ALL, before, there):
            self._settle(keys)

    def _unequal(self, part: Range, before: Sums, there: Sums) -> Iterator[set[Key]]:
        """Keys that seem to differ, from the buckets that do."""
        for group in groups(before.differing(there), before, there):
            sides = [side.rows(part, group, len(before.rows)) for side in (self.source, self.target)]
            yield unequal(*sides)

    def look_again(self) -> None:
        """Look at wrong keys again after a repair."""
        result, before, keys = self.result, self.result.wrong, self.notebook.keys(self.name)
        result.missing = result.extra = result.different = result.explained = 0
        result.keys = {}
        while some := list(islice(keys, SETTLED_KEYS)):
            self._settle(some, is_noted=True)
        result.repaired = before - result.wrong

    def _settle(self, keys: Collection[Key], *, is_noted: bool = False) -> None:
        ordered = iter(sorted(keys))
        while some := list(islice(ordered, SETTLED_KEYS)):
            wrong = []
            for key, verdict in settle(some, self.source, self.target, self.barrier):
                if verdict != "equal":
                    self.result.add(key, verdict, self.shown_keys)
                if verdict in WRONG:
                    wrong.append(key)
                    self.result.explained += key in self.letters
            if not is_noted:
                self.notebook.add_keys(self.name, wrong)


def unequal(source: Mapping[Key, Seen], target: Mapping[Key, Seen]) -> set[Key]:
    """The keys whose content differs between the sides."""
    missing = {key for key, seen in source.items() if key not in target or target[key].content != seen.content}
    return missing | (target.keys() - source.keys())


def groups(buckets: list[int], *sums: Sums) -> Iterator[list[int]]:
    """Groups of buckets whose rows are held at the same time."""
    group, held = list[int](), 0
    for bucket in buckets:
        size = sum(one.rows[bucket] for one in sums)
        if group and held + size > GROUP_ROWS:
            yield group
            group, held = [], 0
        group.append(bucket)
        held += size
    if group:
        yield group
