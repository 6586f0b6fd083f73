"""The TOAST cache as a store: its state at any position, after a kill, and after a power failure."""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pgcdc.core.relation import Column, Relation
from pgcdc.source.postgres.toast import cache as toast_cache
from pgcdc.source.postgres.toast.cache import ToastCache
from pgcdc.source.postgres.toast.identity_rules import TableFacts, TableRules

TABLES = (11, 12)
Op = tuple[str, int, bytes, bytes]
"""What to do, table, key, value."""


@dataclass
class Model:
    """The cache as a dict: what it should hold at one position."""

    limit: int
    number: int = 1
    tables: set[int] = field(default_factory=set)
    entries: dict[tuple[int, bytes], tuple[int, bytes]] = field(default_factory=dict)

    def run(self, op: Op) -> bytes | None:
        """Do it; what was found for the key before."""
        what, table, key, value = op
        if what == "evict":
            self.tables.discard(table)
            self.entries = {place: one for place, one in self.entries.items() if place[0] != table}
            return None
        if table not in self.tables:
            if what != "put":
                return None
            self.tables.add(table)
            self.number += 1
        found = self.entries.get((table, key))
        if what == "put":
            self._write(table, key, value)
            if len(self.entries) > self.limit:
                oldest = sorted(self.entries, key=lambda place: self.entries[place][0])
                for place in oldest[: len(self.entries) - (self.limit - self.limit // 16)]:
                    del self.entries[place]
        elif what == "remove":
            self.entries.pop((table, key), None)
        elif found and min(len(self.entries), self.number - found[0]) > self.limit - self.limit // 4:
            self._write(table, key, found[1])
        return found[1] if found else None

    def _write(self, table: int, key: bytes, value: bytes) -> None:
        self.entries[table, key] = (self.number, value)
        self.number += 1


def run(cache: ToastCache, op: Op, lsn: int) -> bytes | None:
    """The same by the cache."""
    what, table, key, value = op
    if what == "evict":
        cache.evict_table(table, lsn)
        return None
    generation = cache.tables.get(table)
    if generation is None:
        if what != "put":
            return None
        generation = cache.begin_table(table, "shape", "stamp", 0, lsn)
    place = generation.prefix + key
    stored = cache.get(place)
    if what == "put":
        cache.put(lsn, place, value, stored)
    elif stored is not None and what == "remove":
        cache.remove(lsn, place, stored)
    elif stored is not None and cache.is_old(stored):
        cache.renew(lsn, place, stored)
    if stored is not None:
        assert cache.is_sound(stored, stored[12:])
    return stored[12:] if stored else None


def contents(cache: ToastCache) -> dict[tuple[int, bytes], bytes]:
    cache._flush()
    found = {}
    for table in TABLES:
        generation = cache.tables.get(table)
        if generation is not None:
            with cache._txn.cursor(cache._entry) as cursor:
                there = cursor.set_range(generation.prefix)
                while there and cursor.key().startswith(generation.prefix):
                    found[table, cursor.key()[8:]] = cursor.value()[12:]
                    there = cursor.next()
    return found


ops = st.tuples(
    st.sampled_from(["put"] * 4 + ["touch"] * 3 + ["remove", "remove", "evict"]),
    st.sampled_from(TABLES),
    st.sampled_from([b"%d" % number for number in range(30)]),
    st.binary(max_size=3).map(lambda some: some * 40),
)


class CacheMachine(RuleBasedStateMachine):
    """Transactions come, are confirmed, and come again after any kind of end, from any position that is not confirmed."""

    @initialize(limit=st.sampled_from([1, 5, 20, 1000]), items=st.sampled_from([3, 1 << 20]))
    def begin(self, limit: int, items: int) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of starts, each with its fsyncs
        self.folder = Path(tempfile.mkdtemp(prefix="pgcdc-toast-", dir=in_memory))
        self.kept = toast_cache.COMMIT_ITEMS, toast_cache.PRUNE_ITEMS
        toast_cache.COMMIT_ITEMS, toast_cache.PRUNE_ITEMS = items, 7
        self.limit = limit
        self.history: list[tuple[list[Op], Model, list[bytes | None]]] = []
        """Each transaction, the state behind it, and what was found."""
        self.at = self.confirmed = 0
        self.durable: dict[int, int] = {}
        self.fsync = os.fsync
        os.fsync = self.trace  # type: ignore[assignment]
        self.cache = self.open(0)

    def trace(self, descriptor: int) -> None:
        self.fsync(descriptor)
        self.durable[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def open(self, lsn: int) -> ToastCache:
        return ToastCache(self.folder / "toast", limit=self.limit, resume_lsn=lsn, instance="i")

    def model(self, at: int) -> Model:
        return self.history[at - 1][1] if at else Model(self.limit)

    @rule(transaction=st.lists(ops, max_size=12), cut=st.integers(0, 12))
    def transaction(self, transaction: list[Op], cut: int) -> None:
        """A new one, or the next of those that come again."""
        if self.at == len(self.history):
            model = deepcopy(self.model(self.at))
            self.history.append((transaction, model, [model.run(op) for op in transaction]))
        lsn = (self.at + 1) * 10
        todo, _, expected = self.history[self.at]
        found = []
        for number, op in enumerate(todo):
            if number == cut:
                self.cache.advance(self.at * 10)  # a piece of a huge transaction
            found.append(run(self.cache, op, lsn))
        self.cache.advance(lsn)
        self.at += 1
        assert found == expected

    @rule(share=st.floats(0, 1))
    def confirm(self, share: float) -> None:
        self.cache.make_durable()
        self.confirmed += round((self.at - self.confirmed) * share)
        self.cache.release(self.confirmed * 10)

    @rule(share=st.floats(0, 1), how=st.sampled_from(["close", "kill", "open twice"]))
    def restart(self, share: float, how: str) -> None:
        """At any position that is not confirmed: the spool may have lost what is behind."""
        self.go_to(self.confirmed + round((self.at - self.confirmed) * share), how)

    def go_to(self, at: int, how: str) -> None:
        if how == "close":
            self.cache.close()
        else:
            self.cache._close_files()  # whatever is not in a file is lost
        self.at = at
        self.cache = self.open(at * 10)
        if how == "open twice":
            self.cache._close_files()
            self.cache = self.open(at * 10)

    @rule()
    def lose_power(self) -> None:
        """Nothing is left but what was fsynced; what is confirmed must still be there."""
        self.cache.make_durable()
        self.cache.release(self.confirmed * 10)
        reached = self.at
        run(self.cache, ("put", TABLES[0], b"lost", b"lost"), (self.at + 1) * 10)
        self.cache.advance((self.at + 1) * 10)
        self.cache._close_files()
        for path in (self.folder / "toast").glob("log-*"):
            os.truncate(path, self.durable.get(path.stat().st_ino, 0))
        self.cache = self.open(reached * 10)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if hasattr(self, "cache"):
            model = self.model(self.at)
            assert contents(self.cache) == {place: value for place, (_, value) in model.entries.items()}
            assert self.cache.entries == len(model.entries)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            os.fsync = self.fsync
            toast_cache.COMMIT_ITEMS, toast_cache.PRUNE_ITEMS = self.kept
            shutil.rmtree(self.folder)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "toast"


def filled(folder: Path, rows: int = 100, *, limit: int = 1000, lsn: int = 10) -> ToastCache:
    cache = ToastCache(folder, limit=limit, resume_lsn=0, instance="i")
    for number in range(rows):
        run(cache, ("put", 11, b"%d" % number, b"v" * 50), lsn)
    cache.advance(lsn)
    return cache


def test_what_is_confirmed_is_fsynced_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill cannot show a missing fsync: the calls are traced."""
    cache = filled(folder)
    synced: dict[int, int] = {}
    fsync = os.fsync

    def traced(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", traced)
    cache.make_durable()
    (log,) = [path.stat() for path in folder.glob("log-*") if path.stat().st_size]
    assert synced == {log.st_ino: log.st_size}
    synced.clear()
    cache.make_durable()
    assert synced == {}, "nothing new, nothing to do"
    cache.advance(20)
    cache.make_durable()
    assert synced, "the position alone is something new: a cache that does not reach it would start empty"
    cache.close()


def test_the_log_is_fsynced_before_the_table_commits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table must not be ahead of the log by which it is taken back."""
    cache, calls = filled(folder), list[object]()
    fsync, txn = os.fsync, cache._txn

    def traced(descriptor: int) -> None:
        fsync(descriptor)
        calls.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    class Traced:
        def __getattr__(self, name: str) -> Any:
            if name == "commit":
                calls.append("commit")
            return getattr(txn, name)

    (log,) = [path.stat() for path in folder.glob("log-*") if path.stat().st_size]
    monkeypatch.setattr(os, "fsync", traced)
    monkeypatch.setattr(cache, "_txn", Traced())
    cache._commit()
    assert calls[:2] == [(log.st_ino, log.st_size), "commit"]
    cache.close()


def test_files_of_the_log_go_when_they_are_confirmed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toast_cache, "COMMIT_ITEMS", 10)
    cache = filled(folder, 50)
    for lsn in range(20, 100, 10):
        for number in range(10):
            run(cache, ("put", 11, b"%d" % number, b"w" * 50), lsn)
        cache.advance(lsn)
    before = len(list(folder.glob("log-*")))
    cache.release(50)
    between = len(list(folder.glob("log-*")))
    cache.release(90)
    assert before > between > len(list(folder.glob("log-*"))) >= 1
    cache.close()


def test_what_was_evicted_with_its_table_is_deleted_when_that_is_confirmed(folder: Path) -> None:
    cache = filled(folder)
    cache.evict_table(11, 20)
    cache.advance(20)
    cache._flush()
    assert cache._txn.stat(cache._entry)["entries"] >= 100, "somebody may come back to before"
    cache.release(20)
    cache.release(20)
    assert cache._txn.stat(cache._entry)["entries"] == 0
    assert cache._txn.stat(cache._order)["entries"] == 0
    cache.close()


def test_numbers_of_old_writes_do_not_pile_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toast_cache, "PRUNE_ITEMS", 100)
    cache = filled(folder, 10)
    for lsn in range(20, 4000, 10):
        for number in range(10):
            run(cache, ("put", 11, b"%d" % number, b"w" * 50), lsn)
        cache.advance(lsn)
        cache.release(lsn)
    assert cache._txn.stat(cache._order)["entries"] < 500
    assert len(contents(cache)) == 10
    cache.close()


def test_a_damaged_entry_is_no_entry(folder: Path) -> None:
    cache = filled(folder, 1)
    generation = cache.tables.get(11)
    assert generation is not None
    stored = cache.get(generation.prefix + b"0")
    assert stored is not None and cache.is_sound(stored, stored[12:])
    assert not cache.is_sound(stored, stored[12:-1] + b"?")
    cache.close()


def test_a_log_with_a_hole_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toast_cache, "COMMIT_ITEMS", 10)
    cache = filled(folder, 20)
    for lsn in range(20, 60, 10):
        run(cache, ("put", 11, b"1", b"w%d" % lsn), lsn)
        cache.advance(lsn)
        cache._commit()
    cache.close()
    sorted(folder.glob("log-*"))[2].unlink()
    with caplog.at_level(logging.WARNING):
        cache = ToastCache(folder, limit=10, resume_lsn=30, instance="i")
    assert cache.entries == 0 and "a part of its log is missing" in caplog.text
    cache.close()


def test_numbers_are_the_same_on_replay(folder: Path) -> None:
    """They decide who is evicted."""

    def write(cache: ToastCache) -> bytes | None:
        run(cache, ("put", 11, b"1", b"newer"), 20)
        cache.advance(20)
        generation = cache.tables.get(11)
        assert generation is not None
        return cache.get(generation.prefix + b"1")

    cache = filled(folder, 3)
    first = write(cache)
    cache.close()
    cache = ToastCache(folder, limit=10, resume_lsn=10, instance="i")
    assert write(cache) == first is not None
    cache.close()


def test_a_half_written_record_is_not_there(folder: Path) -> None:
    cache = filled(folder, 3)
    run(cache, ("put", 11, b"1", b"newer"), 20)
    cache.advance(20)
    cache._close_files()
    log = max(folder.glob("log-*"), key=lambda path: path.stat().st_size)
    os.truncate(log, log.stat().st_size - random.Random(1).randint(1, 20))
    cache = ToastCache(folder, limit=10, resume_lsn=10, instance="i")
    assert contents(cache)[11, b"1"] == b"v" * 50
    cache.close()


def test_main_values_are_kept_only_of_rows_longer_than_a_page() -> None:
    columns = tuple(Column(name, 25, -1, name == "id") for name in ("id", "body", "price"))
    facts = TableFacts(
        "", {"id": (8, False, False, False), "body": (-1, True, True, True), "price": (-1, True, False, False)}
    )
    rules = TableRules.make(Relation(1, "public", "t", "d", columns), facts, block_bytes=8192, is_utf8=True)
    lengths = np.array([[1, 7, 7], [1, 3000, 7], [1, 0, 7], [1, 9000, 7]])  # the third one's body is unchanged
    has_marks = np.array([False, False, True, False])
    kept = rules.worth_keeping(lengths, rules.is_long(lengths) | has_marks)
    assert kept.tolist() == [[False] * 3, [False, True, False], [False] * 3, [False, True, True]]
