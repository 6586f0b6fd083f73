"""`pgcdc verify`: is each target equal to the source at a position?

It writes nothing to either, and uses one connection to the source and one to each target.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pgcdc.core.errors import GapError, PgcdcError, SinkError, StateError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.core.state import Identity, Lock, StateDir, write_json
from pgcdc.postgres.database import Connection, connect, explain_errors, name_table, quote_identifier, quote_qualified
from pgcdc.run.chains import Chains, check_target
from pgcdc.run.control import list_snapshots
from pgcdc.run.letter_service import make_store, name_pipeline
from pgcdc.run.sentinel import wait_for
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.verify.comparing import Comparison
from pgcdc.run.verify.hashing import Key, must_use_md5
from pgcdc.run.verify.plan import Pair, order_of, plan_pairs, quoted_columns, read_table, target_name
from pgcdc.run.verify.repair import repair
from pgcdc.run.verify.report import Notebook, Report, TableResult, last_file
from pgcdc.run.verify.sides import ReadSide, Rows, Side, SourceRows, SqlSide
from pgcdc.sink.contract import Progress, SinkContext
from pgcdc.sink.letters.record import DeadLetter, Query, ReadableDeadLetters, read_event
from pgcdc.sink.pg_table.options import PgTableOptions
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.slots import identify
from pgcdc.source.postgres.setup.tables import read_published

BARRIER_TIMEOUT_S, POLL_S = 120.0, 0.05
NAME = "pgcdc verify"

ShowProgress = Callable[[str, int, int, bool], None]  # Table, rows so far, estimated total, whether it is complete


@dataclass(frozen=True)
class VerifyOptions:
    tables: tuple[str, ...] = ()  # (): all
    adapters: tuple[str, ...] = ()
    keys: int = 20  # How many to show of each kind of difference
    rate: float = 0.0  # The most rows to read per second at the source; 0: no limit
    repair: bool = False
    at_rest: bool = False  # No pipeline runs: compare with the current content of the targets
    resume: bool = True


@dataclass
class Verify:
    """One comparison, performed by `run`."""

    config: PipelineSettings
    chains: Chains
    options: VerifyOptions = field(default_factory=VerifyOptions)
    say: Callable[[str], None] = lambda text: None
    show: ShowProgress = lambda table, rows, of_about, is_complete: None
    wait: Callable[[StateDir, list[str], float], Position] = wait_for

    def __post_init__(self) -> None:
        self.state = StateDir(self.config.state_dir)
        self._stack = contextlib.ExitStack()
        self._targets: dict[str, Connection] = {}
        self._letters: dict[str, list[DeadLetter]] = {}
        self._due = 0.0

    def run(self) -> Report:
        begun, identity = time.monotonic(), self.state.identity()
        if identity is None:
            raise StateError(
                f"{self.state.path} is not a state directory of pgcdc", "Set --state-dir to that of the pipeline"
            )
        self.state.check_whole()
        with self._stack:
            self._lock()
            self._check_running()
            self._source = self._connect(self.config.db)
            self._check_identity(identity)
            published = read_published(self._source, SlotDetails.of(identity).names)
            pairs, left_out = plan_pairs(self.chains, published, self.options.tables, self.options.adapters)
            for pair in pairs:
                check_target(self.state, pair.spec)
            going = ("queued", "running", "paused")
            self._unread = {one["table"] for one in list_snapshots(self.state) if one["status"] in going}
            self._notebook = Notebook(self.state, self._digest(pairs), resume=self.options.resume)
            if self._notebook.is_resumed:
                self.say("resuming the interrupted comparison (--no-resume starts over)")
            done = [one for one in (self._compare(pair, identity) for pair in pairs) if one is not None]
            if self.options.repair:
                repair(self.state, done, self._notebook, self.say)
            results = [self._notebook.results[pair.name] for pair in pairs]
            report = Report(self._notebook.position, results, left_out, time.monotonic() - begun)
            if not self.options.tables and set(self.options.adapters or self.chains.names) == set(self.chains.names):
                write_json(last_file(self.state), report.summary())
            self._notebook.close()
            return report

    # --- preparation

    def _lock(self) -> None:
        lock = Lock(self.state.path / "verify.lock")
        if lock.acquire() is None:
            pid = (Lock.holder(self.state.path / "verify.lock") or {}).get("pid", "?")
            raise StateError(
                f"another verify of {self.state.path} is running (process {pid})", "Wait until it ends, or stop it"
            )
        self._stack.callback(lock.release)
        lock.write({"pid": os.getpid()})

    def _check_running(self) -> None:
        is_running = Lock.holder(self.state.run_lock) is not None
        if not is_running and not self.options.at_rest:
            raise StateError(
                f"the pipeline of {self.state.path} is not running, so changes after its acks are not at the targets",
                "Start it: pgcdc listen. Or compare with what the targets have now: --at-rest (later changes "
                "count as differences)",
            )
        if self.options.repair and not is_running:
            raise StateError("only a running pipeline can repair", "Start it with: pgcdc listen")

    def _connect(self, url: str) -> Connection:
        conn = connect(url, application_name=NAME, may_retry=False)
        self._stack.callback(conn.close)
        return conn

    def _check_identity(self, identity: Identity) -> None:
        with connect(self.config.db, replication=True, application_name=NAME, may_retry=False) as replication:
            with explain_errors("identify the server"):
                system, _ = identify(replication)
            found = system, replication.info.dbname
        if found != (identity.system, identity.database):
            raise GapError(
                f"this is database {found[1]} of server {found[0]}, but {self.state.path} belongs to "
                f"{identity.database} of server {identity.system}",
                "Check --db and --state-dir",
            )

    def _digest(self, pairs: list[Pair]) -> str:
        """A digest of everything that must be unchanged to resume."""
        parts = [(one.name, one.spec.options.place(), one.chain.steps, one.table, one.reason) for one in pairs]
        return hashlib.sha256(repr((self.options.keys, parts)).encode()).hexdigest()

    # --- each table

    def _compare(self, pair: Pair, identity: Identity) -> Comparison | None:
        """Compare a pair; None if it cannot be compared."""
        notebook = self._notebook
        result = notebook.results.setdefault(pair.name, TableResult(pair.spec.name, pair.table.title))
        result.reason = pair.reason
        if pair.reason:
            return None
        channel = pair.table.relation.channel
        letters = [one for one in self._find_letters(pair.spec.name, identity) if one.channel == channel]
        keys = {key for one in letters for key in _letter_keys(one, pair.target_key)} if pair.key else set[Key]()
        result.dead_letters = len(letters)
        if pair.table.title in self._unread:
            _add_note(
                result, "a snapshot of this table is incomplete: rows that it has not delivered yet count as missing"
            )
        estimate = self._estimate(pair)

        def progress(rows: int, is_complete: bool) -> None:
            self.show(pair.name, rows, estimate, is_complete)

        try:
            sides = self._sql_sides(pair, result) if pair.is_by_servers else self._read_sides(pair, result, identity)
            if not pair.key:
                why = "has no key" if not pair.table.key else "has a key that transforms drop or mask"
                _add_note(result, f"the table {why}: its rows are counted, not compared one by one")
            barrier = self._barrier(pair)
            made = Comparison(pair.name, *sides, barrier, notebook, keys, bool(pair.key), self.options.keys, progress)
            if not result.is_done:
                with explain_errors(f"compare table {pair.table.title}"):
                    made.run()
        except SinkError as error:  # from reading back: an incomplete file, for example
            result.reason = str(error)
            return None
        return made

    def _estimate(self, pair: Pair) -> int:
        query = "SELECT greatest(reltuples, 0)::int8 FROM pg_class WHERE oid = %s"
        row = self._source.execute(query, [pair.table.relation.oid]).fetchone()
        return int(row[0]) if row else 0

    def _find_letters(self, adapter: str, identity: Identity) -> list[DeadLetter]:
        """The waiting letters. A store that cannot be read does not affect the comparison."""
        if adapter not in self._letters:
            store, query = make_store(self.config), Query(name_pipeline(identity), adapter, is_waiting=True)
            self._letters[adapter] = []
            with contextlib.suppress(PgcdcError):
                self._letters[adapter] = list(store.find(query)) if isinstance(store, ReadableDeadLetters) else []
        return self._letters[adapter]

    def _barrier(self, pair: Pair) -> Callable[[], None]:
        adapter, oid = pair.spec.name, pair.table.relation.oid

        def pass_barrier() -> None:
            if self.options.at_rest and Lock.holder(self.state.run_lock) is None:
                position = Progress(self.state.acks, adapter).position or Position.end(0)
            else:
                position = self.wait(self.state, [adapter], BARRIER_TIMEOUT_S)
                self._await_reload(adapter, oid, pair.table.title)
            self._notebook.position = self._notebook.position or str(position)

        return pass_barrier

    def _await_reload(self, adapter: str, oid: int, table: str) -> None:
        """Wait until a copy that is being replaced is complete, before comparing it."""
        deadline = time.monotonic() + BARRIER_TIMEOUT_S
        while oid in Progress(self.state.acks, adapter).holds:
            if time.monotonic() > deadline:
                raise StateError(
                    f"adapter {adapter} has been replacing its copy of table {table} for {BARRIER_TIMEOUT_S:.0f} s",
                    "Verify it when that has finished: see pgcdc status",
                )
            time.sleep(POLL_S)

    def _pace(self, rows: int) -> None:
        """Pause after reading rows of the source, to keep to the rate."""
        if self.options.rate:
            now = time.monotonic()
            self._due = max(self._due, now) + rows / self.options.rate
            time.sleep(max(0.0, self._due - now))

    # --- its sides

    def _sql_sides(self, pair: Pair, result: TableResult) -> tuple[Side, Side]:
        options, name, table = pair.spec.options, target_name(pair), pair.table
        assert isinstance(options, PgTableOptions)
        if pair.spec.name not in self._targets:
            self._targets[pair.spec.name] = self._connect(options.resolved().db)
        target = self._targets[pair.spec.name]
        title = f"table {name_table(*name)} at the target"
        here = read_table(self._source, table.relation.namespace, table.relation.name)
        there = read_table(target, *name)
        if {after for _, after in pair.kept} - there.keys():  # maybe they only come with the next rows
            self._barrier(pair)()
            there = read_table(target, *name)
        place = quote_qualified(*name)
        if not there:  # no such table: compare with no rows
            _add_note(result, f"{title} does not exist")
            listed = ", ".join(f"NULL::text AS {quote_identifier(one)}" for one in pair.target_key) or "NULL"
            place = f"(SELECT {listed} WHERE false) AS nothing"
        elif lacks := [after for _, after in pair.kept if after not in there]:
            _add_note(result, f"{title} has no column {', '.join(lacks)}, so NULL is compared there")
        if more := sorted(there.keys() - {after for _, after in pair.kept}):
            _add_note(result, f"{title} also has {', '.join(more)}: not compared")
        keys = order_of(pair.key, here), order_of(pair.target_key, there)
        types = tuple(one.type for one in keys[0])
        is_same = [one.type for one in keys[1]] == list(types)
        is_ordered = keys[0] == keys[1] and all(one.order is not None for one in keys[0])
        result.method = "ranges" if pair.key and is_ordered else "buckets"
        is_md5 = must_use_md5(self._source, target)
        source = SqlSide(
            self._source, table.source, quoted_columns([before for before, _ in pair.kept], here), pair.key,
            types if is_same else (), table.row_filter, is_md5, True, self._pace, f"table {table.title}",
        )  # fmt: skip
        columns = quoted_columns([after for _, after in pair.kept], there)
        other = SqlSide(
            target, place, columns, pair.target_key, types if is_same else (), is_md5=is_md5, title=title
        )  # fmt: skip
        return source, other

    def _read_sides(self, pair: Pair, result: TableResult, identity: Identity) -> tuple[Side, Side]:
        result.method = "reading"
        names = [after for _, after in pair.kept]
        shapes = ShapeHistory(self.state.shapes_file)
        shapes.refresh()
        timeout_s = pair.spec.delivery.timeout

        def read(_: Collection[Key] | None) -> Iterator[Rows]:
            progress = Progress(self.state.acks, pair.spec.name)
            start = progress.position or Position.end(0)
            context = SinkContext(pair.spec.name, start, progress, shapes, self.say, timeout_s, identity.key)
            for batch in pair.sink.read_back(replace(context, identity=identity), pair.shape, names):
                yield batch.columns, None

        here = read_table(self._source, pair.table.relation.namespace, pair.table.relation.name)
        types = tuple(here[one].type for one in pair.key)
        rows = SourceRows(self._source, pair.table, types, pair.chain, self._pace)
        places = tuple(names.index(one) for one in pair.target_key)
        return ReadSide(rows, places), ReadSide(read, places)


def _add_note(result: TableResult, text: str) -> None:
    if text not in result.notes:
        result.notes.append(text)


def _letter_keys(letter: DeadLetter, key: tuple[str, ...]) -> Iterator[Key]:
    """The keys that a refused event was about."""
    for line in letter.lines():
        payload: Any = read_event(line).get("payload")
        for row in (payload.get("row"), payload.get("old")) if isinstance(payload, dict) else ():
            if isinstance(row, dict) and all(isinstance(row.get(name), str) for name in key):
                yield tuple(row[name] for name in key)
