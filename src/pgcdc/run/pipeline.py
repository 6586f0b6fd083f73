"""The driver: prepares the source, starts capture and Spark, runs the lanes, and ends in order.

read batch → transform → sinks durable, acks → Spark commits → confirm to PostgreSQL
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pgcdc.capture.control import CaptureLink
from pgcdc.capture.server import remove_socket
from pgcdc.capture.spec import make_spec
from pgcdc.core.errors import ConfigError, ConnectionLost, PgcdcError, SinkError, SinkUnavailable, StateError
from pgcdc.core.state import Lock, StateDir, write_json
from pgcdc.event.batch import Batch
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.chains import Chains, Own, Reloads, as_many, change_specs
from pgcdc.run.control import RunServer
from pgcdc.run.letter_service import LetterOffice
from pgcdc.run.member import Adapter
from pgcdc.run.progress import RequestWatch, SnapshotWatch, TableWatch, describe_stop, has_confirmed
from pgcdc.run.rewritten_columns import note_chains
from pgcdc.run.settings import PipelineSettings, choose_specs
from pgcdc.run.source_view import view_source
from pgcdc.run.supervisor import STOP_TIMEOUT_S, Lanes
from pgcdc.run.target_digests import note_places
from pgcdc.sink.letters.replay import Tally
from pgcdc.sink.letters.stores import DeadLetters, Query
from pgcdc.sink.registry import check_adapters, keep_secrets
from pgcdc.sink.spec import AdapterSpec, with_source_db
from pgcdc.source.postgres.setup.prepare import Prepared, drop_publications, prepare
from pgcdc.source.postgres.setup.slots import OpenTransaction
from pgcdc.source.rate.options import RateOptions
from pgcdc.source.rate.source import prepare_rate
from pgcdc.spark.options import parse_options, write_options
from pgcdc.spark.session import check_java, check_running, session, stop_session
from pgcdc.spool.consumers import MAIN
from pgcdc.transform.program import compile_chains

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Pipeline", "StopNow"]

SPARK_STOP_S = 10.0

Say = Callable[[str], None]


class Pipeline:
    """From a source to adapters, once. `run` blocks; everything else may be called from other threads.

    `source` is a whole configuration, as `pgcdc.sources` makes it or `load_config` reads it; what is given as `adapters`
    and `transforms` counts instead of what it says of them. `read_again` reads the configuration anew for `request_reload`.
    `dead_letters` is a store of refused events, if it is not to be the one of the configuration (`dlq`).
    """

    def __init__(
        self,
        source: PipelineSettings,
        adapters: Sequence[AdapterSpec] | None = None,
        transforms: Sequence[Any] | None = None,
        *,
        say: Say = lambda text: None,
        read_again: Callable[[], PipelineSettings] | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        if not isinstance(source, PipelineSettings):
            raise ConfigError(
                f"a source is not {type(source).__name__}", "Make one with pgcdc.sources.postgres(url, ...)"
            )
        config = self.config = source
        shared = config.global_transforms if transforms is None else as_many(transforms)
        self._chains = Chains(choose_specs(config, adapters), shared, is_typed=config.table is not None)
        self._spark: SparkSession | None = None
        check_adapters(self._chains.specs)
        keep_secrets([config.db, config.dlq_db], self._chains.specs, shared)
        self._chains.check(None)
        self.reloads = Reloads(source, read_again, say)
        self._say = say
        self._stop = threading.Event()
        self._temporary: Path | None = None
        if config.temporary_slot:
            self._temporary = Path(tempfile.mkdtemp(prefix="pgcdc-trial-"))
            config = self.config = config.model_copy(update={"state_dir": self._temporary})
        self.state = StateDir(config.state_dir)
        self._letters = LetterOffice(config, self.state, say, dead_letters)
        self._tables = TableWatch(config, self.state.shapes_file, say)
        self._link: CaptureLink | None = None
        self._server: RunServer | None = None
        self._prepared: Prepared | None = None
        self._owns_spark = False
        self._phase = "starting"
        self._last_error: dict[str, str] | None = None
        self._adapters: list[Adapter] = []
        self._is_locked = self._is_open = False
        self._lanes: Lanes | None = None
        self.on_batch: Callable[[Batch], None] | None = None
        """Called with every batch after all sinks have it (the playground's live view)."""
        self.on_ready: Callable[[], None] | None = None
        self.snapshot = SnapshotWatch(say, is_all=config.effective_snapshot_mode == "initial_only")
        self._requests = RequestWatch(say)
        self.on_stuck: Callable[[], None] | None = None
        """Called if a batch does not end when the pipeline stops: a process of our own may end itself then."""
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._is_begun = False
        self._failure: BaseException | None = None

    @property
    def phase(self) -> str:
        """What the pipeline is doing, in a few words."""
        return self._phase

    @property
    def is_starting(self) -> bool:
        """Whether nothing can be in flight yet: then `run` may be interrupted anywhere."""
        return self._phase in ("starting", "starting Spark", "warming up")

    def start(self) -> None:
        """Run in a thread of its own; the stream is read when this returns. Raises what ended the start."""
        self._begin()
        self._thread = threading.Thread(target=self._run_quietly, name="pgcdc", daemon=True)
        self._thread.start()
        while not self._ready.wait(0.1) and self._thread.is_alive():
            continue
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until a pipeline that was started has ended; False: not in this time. Raises what ended it."""
        if self._thread is None:
            raise PgcdcError("the pipeline was not started", "Call start() first")
        self._thread.join(timeout_s)
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def _begin(self) -> None:
        if self._is_begun:
            raise PgcdcError("this pipeline has run already, or still runs", "A pipeline runs once: make another one")
        self._is_begun = True

    def _run_quietly(self) -> None:
        try:
            self._run_once()
        except BaseException as error:
            self._failure = error

    def stop(self) -> None:
        """Finish the batch, commit, confirm, and let `run` return."""
        self._stop.set()

    def run(self) -> None:
        """Run until stopped, or (with `once`) until everything committed by now is delivered and confirmed."""
        self._begin()
        self._run_once()

    def _run_once(self) -> None:
        lock = Lock(self.state.run_lock)
        check_java()
        try:
            self._prepare(lock)
            self._run()
        except PgcdcError as error:
            self._last_error = error.to_json()
            self._enter("failed")
            raise
        except StopNow:
            self._say("stopped before anything was read")
        finally:
            self._close()
            lock.release()

    def capture_status(self) -> dict[str, Any]:
        """The capture's last status."""
        return self._link.status() if self._link is not None else {}

    # --- start

    def _prepare(self, lock: Lock) -> None:
        """Everything that can be refused is checked before the first thing is created; what is refused leaves nothing."""
        with self.state.claim(lock, timeout_s=0.2) as taken:
            if not taken:
                holder = Lock.holder(self.state.run_lock) or {}
                raise StateError(
                    f"the state directory {self.state.path} is in use by process {holder.get('pid', '?')}",
                    "Stop that run first, or use another --state-dir (with another --slot-name)",
                )
            remove_socket(lock.previous)
            self._server = RunServer(self._answer)
            lock.write({"pid": os.getpid(), "address": self._server.address})
            self._is_locked = True
            self._check_transforms()
            self._letters.check()
            self._adapters = self._make_adapters(self._chains.specs)
            for spec in self._chains.specs if self.config.made_up is None else ():
                spec.options.check_source(spec.name, view_source(self.config.source_options(), self.state))
            if self.config.table:
                from pgcdc.spark.table import load_table  # with all that typed rows need

                # Refuses a table that cannot be read in this form, before anything is made for it.
                load_table(parse_options(self._spark_options()).but(db=self.config.db))
            self._prepared = self._prepare_source()
            self._letters.open(self._prepared.identity)
        self._tables.tell_prepared(self._prepared, self._chains.all)

    def _prepare_source(self) -> Prepared:
        if self.config.made_up is not None:
            return Prepared(prepare_rate(self.config.made_up, self.state), (), (), (), is_new=False)
        self._say(f"checking the database and slot {self.config.slot_name}")
        return prepare(self.config.source_options(), self.state, consumer=MAIN, on_wait=self._report_wait)

    def _report_wait(self, transactions: list[OpenTransaction]) -> None:
        pids = ", ".join(str(one.pid) for one in transactions) or "unknown"
        self._say(f"creating the slot waits for open transactions of server processes {pids}")
        if self._stop.is_set():
            raise KeyboardInterrupt

    def _run(self) -> None:
        assert self._prepared is not None
        self._tables.begin()
        self._open_lanes()
        if self._spark is None:
            self._start_spark()
        if self.config.warm_up and not self.config.once:
            self._warm_up()
        if not self._stop.is_set():
            self._stream()
            self._finish()

    def _spark_options(self) -> dict[str, str]:
        if self.config.made_up is None:
            return write_options(self.config)
        other = {"kind": RateOptions.kind, "source": self.config.made_up.model_dump(mode="json")}
        return {**write_options(self.config), "_source": json.dumps(other)}

    def _open_lanes(self) -> None:
        """Start the capture, and open the sinks where they go on."""
        assert self._prepared is not None and self._server is not None
        source = self.config.made_up or self.config.source_options()
        spec = make_spec(source, self.config, self._prepared.names, os.getpid())
        self._link = CaptureLink(spec, is_restart=False, say=self._say)
        self._lanes = Lanes(
            self.state, self._link, self._say,
            options=self._spark_options(), address=self._server.address,
            once=self.config.once, fail_fast=self.config.fail_fast,
            bus_mode=self.config.bus_mode, bus_buffer=self.config.bus_buffer,
        )  # fmt: skip
        note_chains(self.state.transforms_file, self._chains.by_spec())
        note_places(self.state, self._chains.specs)
        self._lanes.open(self._adapters, self.on_batch)
        self._is_open = True

    def add_adapter(self, spec: AdapterSpec) -> None:
        """Deliver to one more adapter, from now on. Durable when this returns; from any thread, while `run` streams."""
        lanes = self._running_lanes()
        spec = with_source_db(spec, self.config.db)
        check_adapters((*self._chains.specs, spec))
        self._chains.check(self._spark, [spec])
        (looked,) = self._make_adapters([spec])

        def add() -> None:  # adapters and transforms may be others by then
            check_adapters((*self._chains.specs, spec))
            note_chains(self.state.transforms_file, self._chains.by_spec([spec]))
            note_places(self.state, [spec])
            made = replace(looked, chain=self._chains.of(spec))
            lanes.add_adapter(made, lambda: self._make_adapters([spec])[0].sink)
            self._chains = self._chains.having((*self._chains.specs, spec))

        lanes.ask(add)

    def remove_adapter(self, name: str) -> None:
        """Deliver nothing more to an adapter; its ack stays. Durable when this returns; from any thread."""

        def remove() -> None:
            self._running_lanes().remove_adapter(name)
            self._chains = self._chains.having([one for one in self._chains.specs if one.name != name])

        self._running_lanes().ask(remove)

    def replay(self, adapter: str | None = None, ids: Sequence[str] = ()) -> Tally:
        """Deliver dead letters again that wait: all, those of an adapter, or these. From any thread, while `run` streams."""
        query = Query(self._letters.store.pipeline, adapter, tuple(ids), is_waiting=True)
        return self._letters.replay(self._running_lanes(), query)

    # --- other transforms and routes

    def reload(self, transforms: Sequence[Any], adapters: Own = MappingProxyType({})) -> None:
        """Other transforms for all, and for adapters by name their own ones and their routes; the others keep theirs.

        They hold from a batch boundary on, all of one adapter at once. ConfigError: nothing has changed.
        """
        transforms = as_many(transforms)

        def change() -> None:  # all at once: no adapter comes or goes meanwhile
            chains = self._chains.having(change_specs(self._chains.specs, adapters), transforms)
            chains.check(self._spark)
            self._tables.tell_missing(self._prepared, chains.all)
            note_chains(self.state.transforms_file, chains.by_spec())
            self._running_lanes().reload({spec.name: chain for spec, chain in chains.by_spec()})
            self._chains = chains

        self._running_lanes().ask(change)

    def request_reload(self) -> None:
        """Read the configuration again and take its transforms and routes. Returns at once: fit for a signal handler."""
        self.reloads.ask()

    def _running_lanes(self) -> Lanes:
        if self._lanes is None or not self._is_open or self._spark is None or self._phase in ("failed", "stopped"):
            raise PgcdcError("the pipeline does not run", "Start it first")
        return self._lanes

    def _start_spark(self) -> None:
        self._enter("starting Spark")
        self._say("starting Spark")
        # The workers of Spark inherit these: no secret goes through Spark's options, and the capture ends with us.
        self._owns_spark = check_running(self.config.db)
        os.environ["PGCDC_DB"] = self.config.db
        os.environ["PGCDC_WATCH_PID"] = str(os.getpid())
        in_main, ours = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGINT)
        self._spark = session(master=self.config.spark_master, log_file=self.state.path / "spark.log")
        if in_main:  # Spark installs a handler of its own, which would cancel the running batch
            signal.signal(signal.SIGINT, ours)

    def _check_transforms(self) -> None:
        """What is wrong with them is said before anything is created. Only for SQL, Spark has to start first."""
        self._chains.check(None)
        if self._chains.have_sql:
            self._start_spark()
            self._chains.check(self._spark)

    def _make_adapters(self, specs: Sequence[AdapterSpec]) -> list[Adapter]:
        """Adapters, after a look at their targets: a wrong one must not be found when slot and publication exist."""
        made = []
        for spec in specs:
            sink = self._letters.run(spec, self.state.acks)
            try:
                sink.check()
            except SinkError as error:
                if self.state.identity() is None:  # nothing was ever delivered: it is the configuration that is wrong
                    raise ConfigError(error.message, error.advice) from error
                if not isinstance(error, SinkUnavailable):
                    raise
                self._say(f"{error}. The others do not wait for it")
            made.append(Adapter(spec.name, sink, self._chains.of(spec), spec.priority))
        return made

    def _warm_up(self) -> None:
        from pgcdc.spark.warm import warm_up

        assert self._spark is not None
        self._enter("warming up")
        self._say("warming up")
        warm_up(self._spark, compile_chains(self._chains.all))

    # --- the stream

    def _stream(self) -> None:
        """Follow the lanes: pass on what Spark commits, until they end or we are told to stop."""
        assert self._spark is not None and self._lanes is not None and self._prepared is not None
        self._enter("starting the query")
        self._lanes.start(self._spark)
        self._enter("streaming")
        self._say(f"ready: slot {self.config.slot_name} to {', '.join(self._chains.names)}")
        self._ready.set()
        if self.on_ready is not None:
            self.on_ready()
        try:
            while not self._stop.is_set():
                ended = self._lanes.step()
                self.reloads.take(self.reload, self._chains.names)
                self._letters.serve(self._lanes)
                self._phase = "streaming" if self._lanes.main.query is not None else "restarting the query"
                self._prepared = self._tables.follow(self._prepared)
                self._tables.tell_changes(self._prepared, self._chains.all)
                self._requests.follow(self.capture_status)
                if self.snapshot.follow(self.capture_status, self._lanes):
                    self._stop.set()
                if ended:
                    return
            self._enter("stopping")
            giving_up = self._give_up_after(STOP_TIMEOUT_S + 1.5)
            self._lanes.stop(giving_up.cancel)
        except PgcdcError:
            raise
        except Exception:
            if not self._stop.is_set():
                raise

    def _give_up_after(self, timeout_s: float) -> threading.Timer:
        """A sink that blocks (a pipe that nobody reads) must not keep a command from ending: the batch comes again."""

        def end() -> None:
            if self.on_stuck is not None:
                self._say("the batch did not end in time: it comes again at the next start")
                self.on_stuck()

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        return timer

    # --- acknowledge, confirm, end

    def _finish(self) -> None:
        """The last ack is confirmed before we go, and the server has seen it."""
        assert self._link is not None and self._lanes is not None
        self._lanes.acknowledge()
        lsn = self._link.call(lambda client: client.confirm())
        status = self._link.call(lambda client: client.status())
        if not self._stop.is_set():
            self.snapshot.follow(lambda: status, self._lanes, at_once=True)
        self._requests.follow(lambda: status, at_once=True)
        if self.config.temporary_slot:
            return
        if self.config.made_up or has_confirmed(self.config.db, self.config.slot_name, lsn):
            self._say(describe_stop(status, f"everything up to {format_lsn(lsn)} is delivered and confirmed"))
        elif self.config.once:
            raise ConnectionLost(
                f"everything is delivered, but the server has not taken the confirmation of {format_lsn(lsn)}",
                "Run it again: what is delivered is not delivered twice",
            )
        else:
            later = "everything is delivered; the server was not reached, it is confirmed at the next start"
            self._say(describe_stop(status, later))

    def _close(self) -> None:
        if self._lanes is not None:  # first: a query that goes on would start the capture again
            self._lanes.close(end_queries=not self._owns_spark)
        if self._link is not None:
            self._link.stop()
            self._link.close()
            deadline = time.monotonic() + 3
            while Lock.holder(self.state.capture_lock) is not None and time.monotonic() < deadline:
                time.sleep(0.02)
        self._letters.close()
        if self._spark is not None and self._owns_spark:
            stop_session(self._spark, SPARK_STOP_S)
        if self._server is not None:
            self._server.close()
        if self._phase != "failed":
            self._enter("stopped")
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            if self._prepared is not None and self._prepared.created_publications:
                drop_publications(self.config.source_options(), self._prepared.created_publications)

    # --- status

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What others ask of this run (`run/control.py`)."""
        if request["do"] == "plan":
            if self._lanes is not None:
                self._lanes.plan(request)
            return {}
        if request["do"] == "status":
            return {**self.status(), "capture": self.capture_status()}
        if request["do"] == "reload":
            self.request_reload()
            return {}
        raise ValueError(request["do"])

    def _enter(self, phase: str) -> None:
        self._phase = phase
        if self._is_locked and self.state.path.exists():  # not over the status of the run that has it
            write_json(self.state.run_status, self.status())

    def status(self) -> dict[str, Any]:
        """What the pipeline does and how far each adapter is: what `pgcdc status` shows."""
        lanes = self._lanes
        main = lanes.main if lanes and self._is_open else None
        return {
            "pid": os.getpid(),
            "time": time.time(),
            "phase": self._phase,
            "adapters": self._chains.names,
            "events": main.events if main else 0,
            "batches": main.batches if main else 0,
            "position": str(lanes.position) if lanes and lanes.position else None,
            "lanes": lanes.status() if lanes and main else [],
            **self.reloads.status(),
            **self._letters.status(),
            "last_error": self._last_error or (lanes.last_error if lanes else None),
        }


class StopNow(BaseException):
    """Raised by a signal handler while nothing is in flight: ends the start at once."""
