"""One run, step by step: prepares the source, starts capture and Spark, runs the lanes, and ends in order.

read batch → transform → sinks durable, acks → Spark commits → confirm to PostgreSQL
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil

from pgcdc.capture.control import CaptureLink, make_spec
from pgcdc.capture.server import remove_socket
from pgcdc.core.compiled import describe_ways
from pgcdc.core.errors import ConfigError, ConnectionLost, PgcdcError, SinkError, SinkUnavailable, StateError
from pgcdc.core.state import Lock, StateDir, write_json
from pgcdc.event.batch import Batch
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.chains import Chains, Own, Reloads, as_many, change_specs, note_targets
from pgcdc.run.control import RunServer
from pgcdc.run.letter_service import LetterService
from pgcdc.run.member import Adapter
from pgcdc.run.progress import Every, SnapshotWatch, TableWatch, describe_stop
from pgcdc.run.settings import PipelineSettings, view_source
from pgcdc.run.supervisor import STOP_TIMEOUT_S, Lanes
from pgcdc.run.table_reloads import TableReloads
from pgcdc.run.verify.beside import VerifyBeside
from pgcdc.run.warm import make_archive_beside, warm_up
from pgcdc.sink.letters.record import DeadLetters
from pgcdc.sink.spec import AdapterSpec
from pgcdc.source.protocol import Prepared, make_source
from pgcdc.spark.options import parse_options, write_options
from pgcdc.spark.quick import find_trouble, is_short
from pgcdc.spark.session import check_java, check_running, end_idle_planners, explain_end, start_session, stop_within
from pgcdc.spool.consumers import MAIN
from pgcdc.transform.program import compile_chains

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_STOP_S = 10.0
CAPTURE_STOP_S = 3.0
PLANNERS_S = 10.0  # How often to look for Spark processes that are no longer needed

Say = Callable[[str], None]


class StopNow(BaseException):
    """Raised by a signal handler while nothing is in flight: ends the start immediately."""


class Driver:
    """The steps of a run, executed in the thread of `drive`. `Pipeline` is the interface for other threads."""

    def __init__(
        self,
        config: PipelineSettings,
        chains: Chains,
        read_again: Callable[[], PipelineSettings] | None,
        say: Say,
        dead_letters: DeadLetters | None,
    ) -> None:
        self.reloads = Reloads(config, read_again, say)
        self._temporary: Path | None = None
        if config.temporary_slot:
            self._temporary = Path(tempfile.mkdtemp(prefix="pgcdc-trial-"))
            config = config.model_copy(update={"state_dir": self._temporary})
        self.config = config
        self.state = StateDir(config.state_dir)
        self.on_batch: Callable[[Batch], None] | None = None
        """Called with every batch after all sinks have it (the playground's live view)."""
        self.on_ready: Callable[[], None] | None = None
        self.on_stuck: Callable[[], None] | None = None
        """Called if a batch does not end when the pipeline stops; our own process may then exit."""
        self.snapshot = SnapshotWatch(say, is_all=config.effective_snapshot_mode == "initial_only")
        self._chains = chains
        self._say = say
        self._stop = threading.Event()
        self._letters = LetterService(config, self.state, say, dead_letters)
        self._source = make_source(config.source)
        self._tables = TableWatch(self._source, self.state, say)
        self._verify = VerifyBeside(config, self.state, say)
        self._link: CaptureLink | None = None
        self._server: RunServer | None = None
        self._prepared: Prepared | None = None
        self._spark: SparkSession | None = None
        self._owns_spark = False
        self._is_plain = False
        """Whether Spark was started only to move blocks, and the warning about other transforms is still due."""
        self._is_short = True
        """Whether small batches took the shorter paths at the last look."""
        self._adapters: list[Adapter] = []
        self._lanes: Lanes | None = None
        self._table_reloads: TableReloads | None = None
        self._phase, self._since = "starting", time.time()
        self._last_error: dict[str, str] | None = None

    @property
    def is_starting(self) -> bool:
        """Whether nothing can be in flight yet, so that `run` may be interrupted anywhere."""
        return self._phase in ("starting", "starting Spark", "warming up")

    def drive(self) -> None:
        """The whole run. Raises the error that ended it."""
        lock = Lock(self.state.run_lock)
        try:
            check_java()
            self._prepare(lock)
            self._run()
        except (StopNow, Exception) as raised:
            # Where Python or Spark swallows StopNow, something else fails because of it.
            if isinstance(raised, StopNow) or (self._stop.is_set() and self.is_starting):
                self._say("stopped before anything was read")
                return
            error = raised if isinstance(raised, PgcdcError) else explain_end(raised)
            if error is None:
                raise
            error.name_state_dir(self.state.path)
            self._last_error = error.to_json()
            self._enter("failed")
            raise error from error.__cause__
        finally:
            self._close()
            lock.release()

    # --- answers for other threads and processes

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer requests of sources and other processes (`run/control.py`)."""
        if request["do"] == "plan":
            if self._lanes is not None:
                self._lanes.plan(request)
            return {}
        if request["do"] == "status":
            return {**self.status(), "capture": self.capture_status()}
        if request["do"] == "reload":
            return self.reloads.answer(request["id"])
        if request["do"] == "replay":
            return self._letters.answer(self._lanes, request)
        if request["do"] == "hold":
            return self._table_reloads.answer(request) if self._table_reloads is not None else {}
        raise ValueError(request["do"])

    def capture_status(self) -> dict[str, Any]:
        return self._link.last_status() if self._link is not None else {}

    def status(self) -> dict[str, Any]:
        """The pipeline's phase and each adapter's progress, for `pgcdc status`."""
        lanes = self._lanes
        return {
            "pid": os.getpid(),
            "time": time.time(),
            "phase": self._phase,
            "phase_since": self._since,
            "adapters": self._chains.names,
            "events": lanes.main.events if lanes else 0,
            "position": str(lanes.position) if lanes and lanes.position else None,
            "lanes": lanes.status() if lanes else [],
            "ways": describe_ways(is_short()),
            "batch_ms": lanes.main.times.status() if lanes else {},
            **self.reloads.status(),
            **self._letters.status(),
            "last_error": self._last_error or (lanes.last_error if lanes else None),
        }

    def _note(self, phase: str) -> None:
        self._phase, self._since = phase, self._since if phase == self._phase else time.time()

    def _enter(self, phase: str) -> None:
        self._note(phase)
        if self._server is not None and self.state.path.exists():  # keep the status of a run that owns it
            write_json(self.state.run_status, self.status())

    # --- start

    def _prepare(self, lock: Lock) -> None:
        """Check everything that can be refused before creating anything, so that a refusal leaves nothing behind."""
        with self.state.claim(lock, timeout_s=0.2) as taken:
            if not taken:
                holder = Lock.holder(self.state.run_lock) or {}
                raise StateError(
                    f"the state directory {self.state.path} is in use by process {holder.get('pid', '?')}",
                    "Stop that run first, or use another --state-dir with another --slot-name",
                )
            remove_socket(lock.previous)
            self._server = RunServer(self.answer)
            lock.write({"pid": os.getpid(), "address": self._server.address})
            self._chains.check(None)
            if self._chains.have_sql:  # only Spark can check that
                self._start_spark()
                self._chains.check(self._spark)
            self._letters.check()
            self._adapters = self._make_adapters(self._chains.specs)
            for spec in self._chains.specs:
                view = view_source(self.config, self.state, self._chains.of(spec))
                spec.options.check_source(spec.name, view)
            if self.config.table:
                from pgcdc.spark.tables import load_table  # together with everything that typed rows need

                # Refuse a table that cannot be read in this form before anything is created.
                load_table(parse_options(self._spark_options()).but(source=self.config.source))
            self._prepared = self._source.prepare(self.state, consumer=MAIN, say=self._say_unless_stopped)
            self._letters.open(self._prepared.identity)
        self._tables.begin(self._prepared, self._chains.all)

    def _say_unless_stopped(self, text: str) -> None:
        self._say(text)
        if self._stop.is_set():
            raise KeyboardInterrupt

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        """Create the adapters after checking their targets: a wrong target must show before slot and publication
        exist."""
        made = []
        for spec in specs:
            sink = self._letters.run(spec, self.state.acks)
            try:
                sink.check()
            except SinkError as error:
                if self.state.identity() is None:  # nothing was ever delivered: the configuration is wrong
                    raise ConfigError(error.message, error.advice) from error
                if not isinstance(error, SinkUnavailable):
                    raise
                self._say(f"{error}. The other adapters start without it")
            made.append(Adapter(spec.name, sink, self._chains.of(spec), spec.priority))
        return made

    def _run(self) -> None:
        self._open_lanes()
        if self._spark is None:
            self._start_spark()
        if self.config.warm_up and not self.config.once:
            self._warm_up()
        if self._stop.is_set():
            raise StopNow
        self._stream()
        self._finish()

    def _spark_options(self) -> dict[str, str]:
        return write_options(self.config)

    def _open_lanes(self) -> None:
        """Start the capture, and open the sinks where they resume."""
        assert self._prepared is not None and self._server is not None
        spec = make_spec(self.config.source, self.config, os.getpid())
        self._link = CaptureLink(spec, is_restart=False, say=self._say)
        options = {**self._spark_options(), "_run": self._server.address}
        note_targets(self.state, self._chains.by_spec())
        lanes = Lanes(self.config, self.state, self._link, self._say, options)
        try:
            lanes.open(self._adapters, self.on_batch)
        except BaseException:
            lanes.close()
            raise
        self._lanes, self._table_reloads = lanes, TableReloads(self._link, lanes, self._say)

    def _start_spark(self) -> None:
        self._enter("starting Spark")
        self._say("starting Spark")
        self._owns_spark = check_running(self.config.db)
        os.environ["PGCDC_WATCH_PID"] = str(os.getpid())  # Spark's workers inherit it: the capture ends with us
        log_file = self.state.path / "spark.log"
        self._is_plain = self._owns_spark and not self.config.table and self._chains.are_simple
        self._spark = start_session(
            self.config.db, master=self.config.spark_master, log_file=log_file, is_plain=self._is_plain
        )

    def _warm_up(self) -> None:
        assert self._spark is not None
        self._enter("warming up")
        self._say("warming up")
        warm_up(self._spark, compile_chains(self._chains.all))

    # --- the stream

    def _stream(self) -> None:
        """Follow the lanes and acknowledge what Spark commits, until the lanes end or we stop."""
        assert self._spark is not None and self._lanes is not None and self._prepared is not None
        assert self._table_reloads is not None and self._link is not None
        self._enter("starting the query")
        self._table_reloads.follow()  # before a run that ends, because that waits for requested reloads
        self._lanes.start(self._spark)
        self._enter("streaming")
        self._say(f"ready: slot {self._prepared.identity.stream} to {', '.join(self._chains.names)}")
        if self.on_ready is not None:
            self.on_ready()
        if self._owns_spark:  # another session does not start with the archive
            make_archive_beside(self._say)
        is_due, idle = Every(PLANNERS_S), set[psutil.Process]()
        try:
            while not self._stop.is_set():
                if self._owns_spark and self._spark is not None and is_due():
                    end_idle_planners(self._spark, idle)
                self._link.keep()
                ended = self._lanes.step()
                self._say_ordinary()
                self.reloads.take(self.reload, self._chains.names)
                self._note("streaming" if self._lanes.main.query is not None else "restarting the query")
                self._tables.follow()
                self._table_reloads.follow()
                self._verify.follow(self._chains)
                self._tables.tell_changes(self._chains.all)
                if self.snapshot.follow(self.capture_status, self._lanes):
                    self._stop.set()
                if ended and self._table_reloads.is_done():
                    return
            self._enter("stopping")
            giving_up = self._give_up_after(STOP_TIMEOUT_S + 1.5)
            self._lanes.stop(giving_up.cancel)
        except PgcdcError:
            raise
        except Exception:
            if not self._stop.is_set():
                raise

    def _say_ordinary(self) -> None:
        if self._is_short and (trouble := find_trouble()):
            self._is_short = False
            self._say(f"small batches take the slower, ordinary path through Spark: {trouble}")

    def reload(self, transforms: Sequence[Any], adapters: Own = MappingProxyType({})) -> None:
        """Replace the shared transforms, and by name the own transforms and routes of adapters; the others keep theirs.

        Each adapter switches at its next batch boundary. ConfigError: nothing has changed.
        """
        transforms = as_many(transforms)

        def change() -> None:  # in one step, so that no adapter joins or leaves meanwhile
            chains = self._chains.having(change_specs(self._chains.specs, adapters), transforms)
            chains.check(self._spark)
            self._tables.tell_missing(chains.all)
            note_targets(self.state, chains.by_spec())
            self._running_lanes().reload({spec.name: chain for spec, chain in chains.by_spec()})
            self._chains = chains
            if self._is_plain and not chains.are_simple:
                self._is_plain = False
                self._say(
                    "Spark runs without its optimising compiler. Restart pgcdc to run SQL and Python transforms faster"
                )

        self._running_lanes().ask(change)

    def _running_lanes(self) -> Lanes:
        if self._lanes is None or self._spark is None or self._phase in ("failed", "stopped"):
            raise PgcdcError("the pipeline is not running", "Start it first")
        return self._lanes

    def _give_up_after(self, timeout_s: float) -> threading.Timer:
        """A blocked sink (a pipe that nobody reads) must not keep a command from ending: its batch is repeated
        later."""

        def end() -> None:
            if self.on_stuck is not None:
                self._say("the last batch did not end in time; it is delivered again at the next start")
                self.on_stuck()

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        return timer

    # --- confirmation and end

    def _finish(self) -> None:
        """Confirm the last ack, and wait until the server has it."""
        assert self._link is not None and self._lanes is not None
        self._lanes.acknowledge()
        lsn = self._link.confirm()
        status = self._link.status()
        self.snapshot.follow(lambda: status, None if self._stop.is_set() else self._lanes, at_once=True)
        if self.config.temporary_slot:
            return
        if self._source.has_confirmed(lsn):
            self._say(describe_stop(status, f"everything up to {format_lsn(lsn)} is delivered and confirmed"))
        elif self.config.once:
            raise ConnectionLost(
                f"everything is delivered, but the server has not received the confirmation of {format_lsn(lsn)}",
                "Run it again: nothing is delivered twice",
            )
        else:
            later = (
                "everything is delivered; the server could not be reached, so the confirmation is sent at "
                "the next start"
            )
            self._say(describe_stop(status, later))

    def _close(self) -> None:
        self._verify.close()
        if self._lanes is not None:  # first, because a query that still runs would restart the capture
            self._lanes.close(end_queries=not self._owns_spark)
        if self._link is not None:
            self._link.stop()
            self._link.close()
            deadline = time.monotonic() + CAPTURE_STOP_S
            while Lock.holder(self.state.capture_lock) is not None and time.monotonic() < deadline:
                time.sleep(0.02)
        self._letters.close()
        if self._spark is not None and self._owns_spark:
            stop_within(SPARK_STOP_S, self._spark)
        if self._server is not None:
            self._server.close()
        if self._phase != "failed":
            self._enter("stopped")
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            if self._prepared is not None:
                self._prepared.undo()
