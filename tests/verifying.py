"""For tests of `pgcdc verify`: a real stream, delivered through chains to adapters when a barrier asks. No Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import psycopg
import pyarrow as pa
from applying import SEED, Source, two_databases

from pgcdc.core.position import Position
from pgcdc.core.settings import make_options
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.event.batch import Batch
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, drop_unwanted, events_of, pack_block
from pgcdc.event.frame import EventOptions, make_frame
from pgcdc.event.shape import Described
from pgcdc.playground.postgres import EmbeddedPostgres
from pgcdc.run.chains import Chains, note_targets
from pgcdc.run.copy import _Local
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.verify.job import Verify, VerifyOptions
from pgcdc.run.verify.report import Report, TableResult
from pgcdc.sink.letters.stores import FileDeadLetters
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import ADAPTERS, AdapterSpec, DeliveryOptions, make_sink
from pgcdc.source.postgres.setup.fingerprint import SlotDetails
from pgcdc.source.postgres.setup.slots import identify
from pgcdc.transform.program import compile_chains

ITEMS = "CREATE TABLE items (id int PRIMARY KEY, name text, price numeric, at timestamptz)"
ROWS = "INSERT INTO items SELECT n, 'item ' || n, n / 4.0, now() FROM generate_series(1, 1000) n"
QUICK = DeliveryOptions(max_retries=2, backoff_base=0.01, backoff_cap=0.05, cb_max_failures=0)


def adapter(
    kind: str, name: str = "", transforms: Sequence[Any] = (), routes: Sequence[str] = (), **options: Any
) -> AdapterSpec:
    made = make_options(ADAPTERS[kind], options, kind)
    return AdapterSpec(name or kind, kind, made, QUICK, tuple(transforms), tuple(routes))


class Flow(Source):
    """A pipeline: what is committed goes to the adapters when `deliver` is called."""

    def __init__(self, url: str, folder: Path, specs: Sequence[AdapterSpec], transforms: Sequence[Any] = ()) -> None:
        super().__init__(url, folder)
        with psycopg.connect(f"{url}?replication=database", autocommit=True) as conn:
            system, timeline = identify(conn)
            database = conn.info.dbname
        details = SlotDetails(timeline, [{"name": "p"}], {})
        identity = Identity("postgres", system, database, "verify", "1", self.start.commit, asdict(details))
        self.state.save_identity(identity)
        self.config = PipelineSettings(db=url, state_dir=self.state.path)
        self.letters = FileDeadLetters(self.state.letters_file)
        self.letters.pipeline = f"{system}/{identity.stream}"
        self.chains = Chains(tuple(specs), tuple(transforms))
        note_targets(self.state, self.chains.by_spec())
        self._program = compile_chains(self.chains.all)
        self.runners = [
            Runner(make_sink(one), self.state.acks, one.name, one.delivery, None, self.letters) for one in specs
        ]
        for runner in self.runners:
            runner.open(self.start)
        self.barriers = 0
        self.shown: list[tuple[str, int, int, bool]] = []  # Progress
        self.lock = Lock(self.state.run_lock)  # as if it ran
        assert self.lock.acquire() is not None

    def close(self) -> None:
        self.lock.release()
        for runner in self.runners:
            runner.close()
        super().close()

    def deliver(self, *statements: str) -> None:
        """Run these, and bring everything that is committed to the adapters."""
        self.run(*statements)
        self.sql.execute("SELECT pg_logical_emit_message(true, 'flush', '')")
        row = self.sql.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        self._capture.target_lsn = target = int(row[0])
        deadline = time.monotonic() + 120
        while self._capture.handed_out_lsn < target:
            assert time.monotonic() < deadline
            batch = self._capture.receive_batch(timeout_s=0.05)
            if batch is None:
                self._capture.ask_for_progress()
                continue
            for piece in self._toast.resolve(batch, self.sql):
                self._observer.observe(piece, self.sql)
                start, self.end = self.end, max(self.end, piece.end)
                if piece.rows:
                    self._history.refresh()
                    for runner, one in zip(self.runners, self._batches(piece, start), strict=True):
                        runner.write(one)

    def _batches(self, piece: Any, start: Position) -> list[Batch]:
        counts = piece.transactions.column("rows").to_numpy()
        owners = piece.transactions.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
        changes = piece.data.combine_chunks().to_batches()[0]
        options = EventOptions(described=Described(changes=tuple(self._history.changes)))
        frame = make_frame(changes, owners, piece.relations.shapes, options)
        chains = parse_chains(self._program.source_options().get("_chains", ""))
        events = events_of(frame, SEED, block_schema(chains), options, chains)
        events = drop_unwanted(events) if chains else events
        local = _Local(pa.Table.from_batches(pack_block(events)))
        return self._program.collect(cast(Any, local), start, self.end)

    def wait(self, state: StateDir, adapters: Sequence[str], timeout_s: float) -> Position:
        """The barrier."""
        self.barriers += 1
        self.deliver()
        return self.end

    def verify(self, **options: Any) -> Report:
        show = lambda *given: self.shown.append(given)  # noqa: E731
        return Verify(self.config, self.chains, VerifyOptions(**options), show=show, wait=self.wait).run()

    def check(self, **options: Any) -> dict[str, TableResult]:
        """By `adapter/table`."""
        return {f"{one.adapter}/{one.table}": one for one in self.verify(**options).tables}


@contextmanager
def mirrored(
    postgres: EmbeddedPostgres,
    folder: Path,
    *first: str,
    transforms: Sequence[Any] = (),
    specs: Sequence[AdapterSpec] = (),
    source: EmbeddedPostgres | None = None,
    **options: Any,
) -> Iterator[tuple[Flow, psycopg.Connection[Any]]]:
    """A source with these tables, whose rows are applied to a mirror, and a session there."""
    own: Mapping[str, Any] = {"mode": "apply", "origin": "none", **options}
    with (
        two_databases(source or postgres) as (url, _),
        two_databases(postgres) as (_, target),
        psycopg.connect(target, autocommit=True) as mirror,
    ):
        flow = Flow(url, folder / "state", [adapter("pg_table", "mirror", db=target, **own), *specs], transforms)
        try:
            flow.deliver(*first)
            yield flow, mirror
        finally:
            flow.close()
