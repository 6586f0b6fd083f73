"""The lanes of a run: their queries are started, watched, restarted after failures, and stopped in order.

One thread watches (`step`). Requests from others (add or remove an adapter, other transforms) run between two of its
looks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pgcdc.capture.control import CaptureLink
from pgcdc.core.counters import ROWS_MISSED, counters
from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.core.position import Position
from pgcdc.core.relation import ShapeHistory
from pgcdc.core.state import StateDir
from pgcdc.event.batch import Batch
from pgcdc.postgres.lsn import parse_lsn
from pgcdc.run.lane import Lane, LaneStopped, Planned
from pgcdc.run.member import Adapter, Member, may_pass
from pgcdc.run.progress import Every
from pgcdc.run.query_watch import QUERY_STOP_S, QueryWatch
from pgcdc.run.settings import PipelineSettings
from pgcdc.run.transfer import Moves
from pgcdc.sink.runner import Runner
from pgcdc.spark.parallel import open_large
from pgcdc.spark.session import stop_within
from pgcdc.spool.consumers import MAIN
from pgcdc.transform.program import Program, TypedProgram, compile_chains
from pgcdc.transform.specs import Chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.25
COMMIT_S = 0.05
"""The delay between the end of a batch and the look at what Spark has committed. Also limits how often to look under
load."""
READING_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 8.0
CONSUMERS_INTERVAL_S = 10.0
LIMIT_INTERVAL_S = 1.0


class Lanes:
    """All lanes of a pipeline. `step` raises the error that must end the run."""

    def __init__(
        self,
        config: PipelineSettings,
        state: StateDir,
        link: CaptureLink,
        say: Callable[[str], None],
        options: dict[str, str],
    ) -> None:
        """`options` are those of the Spark source, without the consumer."""
        self.config = config
        self.link = link
        self.say = say
        self.options = options
        self.spark: SparkSession | None = None  # None before the start
        self._state = state
        self._moves = Moves(state, link, say)
        self._watches: dict[Lane, QueryWatch] = {}
        self._looking = threading.RLock()  # Held for each look, and for each request between two looks
        self._is_closed = threading.Event()
        self._is_limit_due, self._is_consumers_due = Every(LIMIT_INTERVAL_S), Every(CONSUMERS_INTERVAL_S)
        self._move_error: PgcdcError | None = None

    # --- the view from outside

    @property
    def main(self) -> Lane:
        """The lane of adapters that keep up."""
        return self._moves.main

    @property
    def place(self) -> Position:
        """The position up to which every lane has delivered."""
        return min(lane.place for lane in list(self._moves.lanes.values()))

    @property
    def position(self) -> Position | None:
        """Main's last ack."""
        return self.watch(self.main).position

    @property
    def last_error(self) -> dict[str, str] | None:
        """The current error: of main, another lane, or the moves between lanes."""
        errors = [*(one.error for one in list(self._watches.values())), self._move_error]  # main's comes first
        return next((one.to_json() for one in errors if one is not None), None)

    def status(self) -> list[dict[str, Any]]:
        """For each adapter: lane, ack, lag in bytes of WAL, skipped and refused events, and the last error."""
        capture = self.link.last_status()
        received = parse_lsn(capture["received_lsn"]) if "received_lsn" in capture else 0
        report = []
        for member in self.members():
            place = self._moves.membership.roster.places.get(member.name)
            error = member.last_error or member.sink.attempts.failing
            if place is None:  # it is being removed
                continue
            ack = member.sink.ack if member.is_open else None
            behind = max(0, received - max(ack, place.floor).commit) if ack else None
            report.append(
                {
                    "adapter": member.name,
                    "lane": "main" if place.lane == MAIN else "own",
                    "ack": str(ack) if ack else None,
                    "lag_bytes": behind,
                    "dropped": place.dropped,
                    "dead_letters": member.sink.dead_letters,
                    "missed_rows": counters.total(ROWS_MISSED, adapter=member.name),
                    "reloading": ", ".join(one.table or one.id for one in member.sink.progress.holds.values()) or None,
                    "last_error": str(error) if error else None,
                }
            )
        return report

    # --- start

    def open(self, adapters: list[Adapter], on_batch: Callable[[Batch], None] | None = None) -> None:
        """Open the lanes as they were left, and the sinks where they resume. GapError: a sink would miss something."""
        self._moves.open(adapters)
        self.main.on_batch = on_batch

    def start(self, spark: SparkSession) -> None:
        """Start the queries. Main's is reading when this returns."""
        self.spark = spark
        self.watch(self.main).start()
        self._await_reading()

    def program_of(self, lane: Lane) -> Program:
        """What a lane reads from now on. Main has the chains of all adapters, so that each can rejoin without a
        restart."""
        assert self.spark is not None
        shapes = ShapeHistory(self._state.shapes_file)
        lane.large = partial(open_large, self.spark, shapes) if self._is_keyed else None
        if "table" in self.options:
            return TypedProgram()
        members = self.members() if lane is self.main else lane.members()
        chains = [member.chain for member in members]
        return self._compile([chain for number, chain in enumerate(chains) if chain not in chains[:number]])

    def _compile(self, chains: Sequence[Chain]) -> Program:
        """Compile chains. Events name their transaction if the source's options say so."""
        transaction = any(self.options.get(name) == "true" for name in ("tx_metadata", "tx_markers"))
        return compile_chains(chains or [Chain()], transaction=transaction, keyed=self._is_keyed)

    @property
    def _is_keyed(self) -> bool:
        """Whether executors may write large batches to one of the sinks; lanes then also read the keys for that."""
        return "table" not in self.options and any(one.takes_parts for one in self.members())

    def _await_reading(self) -> None:
        """Wait until a started query reads: its source starts first. `step` finds failures."""
        deadline = time.monotonic() + READING_TIMEOUT_S
        query = self.main.query
        with contextlib.suppress(Exception):
            while query is not None and time.monotonic() < deadline and not self._is_closed.is_set():
                if not query.isActive or not query.status["message"].startswith("Initializing"):
                    return
                time.sleep(0.05)

    def plan(self, batch: dict[str, Any]) -> None:
        """Called when the source announces the next batch of a lane: start, end and size. Thread-safe."""
        lane = self._moves.lanes.get(batch["lane"])
        if lane is not None:  # otherwise the lane was abandoned, and runs no batch
            start, end = (Position.parse(batch[name]) for name in ("start", "end"))
            lane.planned = Planned(start, end, batch["events"], batch["rows"])
            lane.times.mark("planned")

    # --- watch

    def step(self) -> bool:
        """Look at everything once, after a short wait. True: a bounded run has ended."""
        self._wait()
        with self._looking:
            return self._look()

    def _look(self) -> bool:
        for lane in list(self._moves.lanes.values()):
            try:
                self.watch(lane).acknowledge()
            except Exception as error:  # a restart from the checkpoint also acknowledges again
                self.watch(lane).fail(error)
        for lane in list(self._moves.lanes.values()):
            self.watch(lane).look()
        try:
            self._move()
            self._move_error = None
        except PgcdcError as error:
            if not may_pass(error):
                raise
            self._move_error = error  # the next look tries again
        return self.config.once and all(self.watch(lane).is_done for lane in self._moves.lanes.values())

    def begin_again(self) -> None:
        """A bounded run has more to do."""
        for one in self._watches.values():
            one.is_done = False

    def watch(self, lane: Lane) -> QueryWatch:
        if lane not in self._watches:
            self._watches[lane] = QueryWatch(lane, self)
        return self._watches[lane]

    def _move(self) -> None:
        """Move adapters where they belong, and release what they left."""
        self._moves.open_missing()
        self._moves.rejoin_between()
        if self.config.bus_mode == "fast" and self._is_limit_due():
            self._moves.skip_ahead(self.config.bus_buffer)
        for lane in list(self._moves.left_over):
            self._end(lane)
        if self._is_consumers_due():
            self._moves.let_go_unknown(list(self.link.last_status().get("consumers", {})))

    def _wait(self) -> None:
        """Wait until a batch has ended and Spark has had time to commit it."""
        is_short = self.config.once or self.main.query is None
        if self._moves.ended.wait(POLL_S / 5 if is_short else POLL_S):
            self._moves.ended.clear()
            self._is_closed.wait(COMMIT_S)

    def acknowledge(self) -> None:
        """Every member of a lane has made durable what Spark committed, so the capture may confirm it."""
        for lane in list(self._moves.lanes.values()):
            self.watch(lane).acknowledge()

    def _end(self, lane: Lane) -> None:
        """Stop the query of an abandoned lane, and forget it."""
        if lane.query is not None:
            stop_within(QUERY_STOP_S, lane.query)
        self._moves.let_go(lane)
        self._watches.pop(lane, None)

    # --- changes while it runs

    def add_adapter(self, adapter: Adapter, make: Callable[[], Runner] | None = None) -> None:
        """Add a sink, from main's current place. Durable when this returns. Call it through `ask`, like the next two.

        `make` creates the sink again when no write to it is running.
        """
        self._compile([adapter.chain])
        self._moves.add(adapter, make)
        if self.main.program is not None and adapter.chain not in self.main.program.chains:
            self.main.is_stopping = True  # it restarts with the new chain included

    def remove_adapter(self, name: str) -> None:
        """Stop delivering to a sink; its ack stays. Durable when this returns."""
        self._moves.remove(name, STOP_TIMEOUT_S)

    def reload(self, chains: Mapping[str, Chain]) -> None:
        """Switch each adapter to other transforms and routes, from a batch boundary on.

        Main is at its boundary when this returns; a side lane switches with its next batch.
        """
        unknown = sorted(set(chains) - set(self._moves.members))
        if unknown:
            raise ConfigError(f"adapter {unknown[0]!r} does not exist", "Add it first")
        wanted = {one.name: chains.get(one.name, one.chain) for one in self.members()}
        self._compile(list(wanted.values()))  # if compiling fails, nothing changes
        self._restart(self.main)
        for member in self.members():  # includes one that just left main in its last batch
            if member.chain != wanted[member.name]:
                member.chain = wanted[member.name]
                lane = self._moves.lanes.get(self._moves.membership[member.name].lane)
                if lane is not None:  # otherwise it starts with the new chain
                    lane.is_stopping = True

    def _restart(self, lane: Lane) -> None:
        """Stop a query between two batches. It restarts with the program that its members then want."""
        lane.is_stopping = True
        if not lane.await_boundary(STOP_TIMEOUT_S):
            lane.is_stopping = False
            raise PgcdcError("the running batch did not end in time, so nothing was changed", "Try again")
        query = lane.query
        if query is not None and not query.isActive and query.exception() and not isinstance(lane.error, LaneStopped):
            lane.is_stopping = False  # `QueryWatch.look` finds out why, and whether it may restart
            raise PgcdcError("the query has just failed, so nothing was changed", "Try again when it runs")
        if query is not None:
            stop_within(QUERY_STOP_S, query)
            lane.query = None
        watch = self.watch(lane)
        watch.retry_at, watch.is_done = 0.0, False

    def ask(self, do: Callable[[], None]) -> None:
        """Run something between two looks; thread-safe. Passes its errors on."""
        with self._looking:
            if self._is_closed.is_set():
                raise PgcdcError("the pipeline has stopped", "Start it first")
            do()

    # --- end

    def stop(self, on_main_ended: Callable[[], None] = lambda: None) -> None:
        """Stop all queries between two batches. Running batches finish and commit first, if they end in time.

        Main's batch is waited for while it makes progress; a sink in its own lane gets little time.
        """
        with self._looking:  # finishes the current request and allows no more
            self._is_closed.set()
        side_lanes = [lane for lane, _ in self._moves.side_lanes]
        for lane in (self.main, *side_lanes):
            lane.is_stopping = True
        for _, member in self._moves.side_lanes:
            member.sink.stop()
        is_ended = self.main.await_boundary(STOP_TIMEOUT_S)
        if not is_ended:  # a sink that waits for its rate limit or a retry may stop
            for member in self.main.members():
                member.sink.stop()
        if self.main.query is not None:
            self.main.query.stop() if is_ended else stop_within(QUERY_STOP_S, self.main.query)
        on_main_ended()
        deadline = time.monotonic() + QUERY_STOP_S
        for lane in side_lanes:
            is_ended = lane.await_boundary(deadline - time.monotonic())
            if lane.query is not None:
                stop_within(QUERY_STOP_S if is_ended else 0.2, lane.query)
            if not is_ended:
                names = ", ".join(one.name for one in lane.members())
                self.say(f"adapter {names} did not finish its batch; it is delivered again at the next start")
        self.acknowledge()
        self._moves.rejoin_between()
        for lane in list(self._moves.left_over):
            self._end(lane)

    def close(self, *, end_queries: bool = False) -> None:
        """Close the sinks and release callers of `ask`. A Spark session that stays must not keep the queries."""
        with self._looking:  # includes an adapter that is being added
            self._is_closed.set()
        for lane in (*self._moves.lanes.values(), *self._moves.left_over) if end_queries else ():
            lane.is_stopping = True
            if lane.query is not None:
                stop_within(QUERY_STOP_S, lane.query)
        for member in self.members():
            member.close()

    def members(self) -> list[Member]:
        return list(self._moves.members.values())
