"""The dead letters of a run: its store, who is told of them, and replays that a command asks for while the run goes on.

A command asks for a replay at the run's socket, by an id of its own, until it hears of the end: an answer that got lost is
asked for again. Letters are delivered by the adapter's own thread, batch by batch, between those of the stream.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgcdc.capture.control import ask
from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.run.settings import PipelineSettings
from pgcdc.sink.attempts import DeliveryHooks
from pgcdc.sink.letters.delivery import Tally, deliver_again, find_batches
from pgcdc.sink.letters.record import (
    DeadLetter,
    DeadLetters,
    Query,
    ReadableDeadLetters,
    check_not_captured,
    describe_store,
    make_store,
    name_pipeline,
)
from pgcdc.sink.registry import make_sink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

POLL_S = 0.1
TELL_S = 10.0
KEPT_REPLAYS = 100
"""Of so many replays that have ended, the run knows how: a command may not have heard it yet."""


class LetterOffice:
    """What a pipeline has to do with dead letters, apart from delivery itself."""

    def __init__(
        self, config: PipelineSettings, state: StateDir, say: Callable[[str], None], store: DeadLetters | None
    ) -> None:
        """`store` is one that was given in Python, instead of what the configuration says."""
        self._config = config
        self._state = state
        self._say = say
        self._is_given = store is not None
        self.store = make_store(config, say) if store is None else store
        self._replays: dict[str, dict[str, Any]] = {}
        """By their ids: how they ended; nothing while they go on."""
        self._is_closed = threading.Event()
        self._replaying = threading.Lock()

    def check(self) -> None:
        """Before anything is made. ConfigError, if the pipeline is new, or another one: letters could not be kept."""
        try:
            if not self._is_given:
                check_not_captured(self._config)
            self.store.check()
        except PgcdcError as error:
            if self._state.identity() is None:
                raise ConfigError(error.message, error.advice) from error
            raise

    def open(self, identity: Identity) -> None:
        """Make what is needed, when it is known whose letters they are."""
        self.store.pipeline = name_pipeline(identity)
        self.store.open()
        if not self._is_given:
            check_not_captured(self._config)

    def run(self, spec: AdapterSpec, acks: Path) -> Runner:
        """The sink of an adapter, with its refused events in the store."""
        return Runner(make_sink(spec), acks, spec.name, spec.delivery, _Telling(self._say), self.store)

    def status(self) -> dict[str, Any]:
        """For `pgcdc dlq`, which has to find the letters."""
        return {} if self._is_given else describe_store(self._config)

    def close(self) -> None:
        """Nobody waits from now on."""
        self._is_closed.set()
        self.store.close()

    # --- replays

    def replay(self, lanes: Lanes, query: Query) -> Tally:
        """Deliver letters again, by the threads of their adapters. From any thread but these."""
        if not isinstance(self.store, ReadableDeadLetters):
            raise ConfigError("these dead letters cannot be read again", "Use --dlq file or --dlq pg_table from now on")
        tally, failed = Tally(), set[str]()
        with self._replaying:  # one after the other: the next one must not find what this one delivers
            for letters in find_batches(self.store, query):
                adapter = letters[0].adapter
                if adapter in failed:
                    continue
                part = self._deliver(lanes, self.store, adapter, letters)
                tally.add(part)
                if part.error:
                    failed.add(adapter)
        return tally

    def _deliver(self, lanes: Lanes, store: ReadableDeadLetters, adapter: str, letters: list[DeadLetter]) -> Tally:
        member = next((one for one in lanes.members() if one.name == adapter), None)
        if member is None or not member.is_open:
            return Tally(error=f"adapter {adapter} is not in this run, or not ready yet")
        sink, done = member.sink, list[Tally]()
        future = member.submit_other(lambda: done.append(deliver_again(store, letters, sink.redeliver)))
        while not future.done():
            if self._is_closed.wait(POLL_S):
                return Tally(error="the run has stopped")
        if error := future.exception():
            return Tally(error=str(error))
        return done[0]

    def answer(self, lanes: Lanes | None, request: dict[str, Any]) -> dict[str, Any]:
        """How the replay `id` has ended; as long as it cannot be said, nothing. One that is not known yet begins."""
        name = request["id"]
        if name not in self._replays and lanes is not None:
            for old in [one for one, end in self._replays.items() if end][:-KEPT_REPLAYS]:
                del self._replays[old]
            self._replays[name] = {}
            query = _read_query(request["query"])
            threading.Thread(target=self._replay, args=[name, lanes, query], name="replay", daemon=True).start()
        return self._replays.get(name, {})

    def _replay(self, name: str, lanes: Lanes, query: Query) -> None:
        try:
            self._replays[name] = {"tally": asdict(self.replay(lanes, query))}
        except PgcdcError as error:
            self._replays[name] = {"refused": error.to_json()}
        except Exception as error:
            refused = StateError(f"the replay failed: {type(error).__name__}: {error}")
            self._replays[name] = {"refused": refused.to_json()}


def ask_run(state: StateDir, query: Query) -> Tally:
    """Have the run that owns a state directory deliver letters again, and wait for it. StateError: it has ended."""
    request = {"do": "replay", "id": str(uuid.uuid4()), "query": _query_json(query)}
    while Lock.holder(state.run_lock) is not None:
        found = ask(state.run_lock, request)
        if "refused" in found:
            raise PgcdcError.from_json(found["refused"])
        if "tally" in found:
            return Tally(**found["tally"])
        time.sleep(POLL_S)
    raise StateError("the run has ended meanwhile", "What was delivered is marked; the rest waits: pgcdc dlq replay")


def _query_json(query: Query) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(query).items()}


def _read_query(raw: dict[str, Any]) -> Query:
    times = {name: datetime.fromisoformat(raw[name]) if raw[name] else None for name in ("since", "before")}
    return Query(**{**raw, **times, "ids": tuple(raw["ids"])})


class _Telling(DeliveryHooks):
    """Says that events are refused: the first one at once, then how many in a while."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._untold = 0
        self._due = 0.0

    def on_dead_letters(self, letters: Sequence[DeadLetter]) -> None:
        self._untold += len(letters)
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + TELL_S
        last = letters[-1]
        events = "an event" if self._untold == 1 else f"{self._untold:,} events"
        self._say(
            f"adapter {last.adapter} refused {events}, which {'is' if self._untold == 1 else 'are'} in the dead letters "
            f"now; the last, {last.id}: {last.error_kind}: {last.error[:200]}"
        )
        self._untold = 0
