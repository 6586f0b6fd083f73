"""A pipeline, as Python and the commands use it: run it, stop it, and change it while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from pgcdc.core.errors import ConfigError, PgcdcError
from pgcdc.run.chains import Chains, as_many, note_targets
from pgcdc.run.driver import Driver, Say, StopNow
from pgcdc.run.sentinel import Sentinel
from pgcdc.run.settings import PipelineSettings, choose_specs
from pgcdc.sink.letters.delivery import Tally
from pgcdc.sink.letters.record import DeadLetters, Query
from pgcdc.sink.spec import AdapterSpec, check_adapters, keep_secrets, with_source_db

__all__ = ["Pipeline", "StopNow"]


class Pipeline(Driver):
    """From a source to adapters, once. `run` blocks; everything else may be called from other threads.

    `source` is a whole configuration, as `pgcdc.sources` makes it or `load_config` reads it. `adapters` and
    `transforms` override those of the configuration. `read_again` reads the configuration again for `request_reload`.
    `dead_letters` is a store of refused events, to replace the configured one (`dlq`).
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
                f"{type(source).__name__} is not a source", "Make one with pgcdc.sources.postgres(url, ...)"
            )
        shared = source.global_transforms if transforms is None else as_many(transforms)
        chains = Chains(choose_specs(source, adapters), shared, is_typed=source.table is not None)
        check_adapters(chains.specs)
        keep_secrets([source.db, source.dlq_db], chains.specs, shared)
        chains.check(None)
        super().__init__(source, chains, read_again, say, dead_letters)
        self._is_begun = False
        self._ended: Future[None] | None = None  # Of a run in its own thread

    @property
    def phase(self) -> str:
        return self._phase

    def run(self) -> None:
        """Run until stopped, or (with `once`) until everything committed by now is delivered and confirmed."""
        if self._is_begun:
            raise PgcdcError("this pipeline runs already or has run before", "A pipeline runs once: create another one")
        self._is_begun = True
        self.drive()

    def start(self) -> None:
        """Run in a separate thread. The stream is being read when this returns. Raises the error of a failed start."""
        ready, ended, before = Future[None](), Future[None](), self.on_ready

        def on_ready() -> None:
            ready.set_result(None)
            if before is not None:
                before()

        def run() -> None:
            try:
                self.run()
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)

        if not self._is_begun:
            self.on_ready, self._ended = on_ready, ended
        threading.Thread(target=run, name="pgcdc", daemon=True).start()
        wait([ready, ended], return_when=FIRST_COMPLETED)
        if ended.done():
            ended.result()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a pipeline that was started has ended; False on timeout. Raises the error that ended it."""
        if self._ended is None:
            raise PgcdcError("the pipeline was not started", "Call start() first")
        if not wait([self._ended], timeout_s).done:
            return False
        self._ended.result()
        return True

    def stop(self) -> None:
        """Finish the batch, commit, confirm, and let `run` return."""
        self._stop.set()

    def add_adapter(self, spec: AdapterSpec) -> None:
        """Deliver to one more adapter, from now on. Durable on return. May be called from any thread while `run`
        streams."""
        lanes = self._running_lanes()
        spec = with_source_db(spec, self.config.db)
        check_adapters((*self._chains.specs, spec))
        self._chains.check(self._spark, [spec])
        (looked,) = self._make_adapters([spec])

        def add() -> None:  # adapters and transforms may have changed by then
            check_adapters((*self._chains.specs, spec))
            note_targets(self.state, self._chains.by_spec([spec]))
            made = replace(looked, chain=self._chains.of(spec))
            lanes.add_adapter(made, lambda: self._make_adapters([spec])[0].sink)
            self._chains = self._chains.having((*self._chains.specs, spec))

        lanes.ask(add)

    def remove_adapter(self, name: str) -> None:
        """Stop delivering to an adapter; its ack stays. Durable on return. May be called from any thread."""

        def remove() -> None:
            self._running_lanes().remove_adapter(name)
            self._chains = self._chains.having([one for one in self._chains.specs if one.name != name])

        self._running_lanes().ask(remove)

    def replay(self, adapter: str | None = None, ids: Sequence[str] = ()) -> Tally:
        """Redeliver waiting dead letters: all, those of an adapter, or these. May be called from any thread while `run`
        streams."""
        query = Query(self._letters.store.pipeline, adapter, tuple(ids), is_waiting=True)
        return self._letters.replay(self._running_lanes(), query)

    def sentinel(self, adapters: Sequence[str] = ()) -> Sentinel:
        """Mark this moment in the stream; its `wait` returns when these adapters (none: all) have everything before
        it."""
        return Sentinel(self.state, adapters)

    def request_reload(self) -> None:
        """Read the configuration again and apply its transforms and routes. Returns immediately, so it is safe in a
        signal handler."""
        self.reloads.ask()
