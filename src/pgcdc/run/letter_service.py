"""The dead letters of a run: its store, who is told of them, and replays that a command asks for while the run goes on.

A replay is asked for by a file in the folder `replay` of the state directory, and answered by another one. The run looks for
them by itself, so that none is lost; one whose command is gone is thrown away. Letters are delivered by the adapter's own
thread, batch by batch, between those of the stream.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.state import Identity, Lock, StateDir, is_alive, read_json, write_json
from pgcdc.run.settings import PipelineSettings
from pgcdc.sink.attempts import NoHooks
from pgcdc.sink.letters.choose import check_not_captured, describe_store, make_store, name_pipeline
from pgcdc.sink.letters.record import DeadLetter
from pgcdc.sink.letters.replay import Tally, deliver_again, find_batches
from pgcdc.sink.letters.stores import DeadLetters, Query, ReadableDeadLetters
from pgcdc.sink.registry import make_sink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

__all__ = ["LetterOffice", "ask_run"]

POLL_S = 0.1
LOOK_S = 0.5
TELL_S = 10.0


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
        self._due = 0.0
        self._serving: set[str] = set()
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
        """Nobody waits any more."""
        self._is_closed.set()
        self.store.close()

    # --- replays

    def replay(self, lanes: Lanes, query: Query) -> Tally:
        """Deliver letters again, by the threads of their adapters. From any thread but these."""
        if not isinstance(self.store, ReadableDeadLetters):
            raise ConfigError("these dead letters cannot be read again", "Use --dlq file or --dlq pg_table from now on")
        tally, failed = Tally(), set[str]()
        with self._replaying:  # one after the other: what the one delivers does not wait any more for the next
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

    def serve(self, lanes: Lanes) -> None:
        """Begin what commands have asked for; from the thread of the pipeline, often."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_S
        for path in sorted(self._state.replays.glob("*.ask.json")) if self._state.replays.exists() else []:
            if path.name not in self._serving:
                self._serving.add(path.name)
                threading.Thread(target=self._answer, args=[path, lanes], name="replay", daemon=True).start()

    def _answer(self, path: Path, lanes: Lanes) -> None:
        answer: dict[str, Any] = {}
        asked: dict[str, Any] = {}
        try:
            asked = read_json(path) or {}
            if not _is_waited_for(asked):
                path.unlink(missing_ok=True)
                return
            answer = asdict(self.replay(lanes, _read_query(asked["query"])))
        except PgcdcError as error:
            answer = {"refused": error.to_json()}
        except Exception as error:
            answer = {"refused": StateError(f"the replay failed: {type(error).__name__}: {error}").to_json()}
        with contextlib.suppress(PgcdcError):
            if _is_waited_for(asked):
                write_json(path.with_name(path.name.replace(".ask.", ".answer.")), answer)
            path.unlink(missing_ok=True)
        self._serving.discard(path.name)


def _is_waited_for(asked: dict[str, Any]) -> bool:
    """Whether the command that asks still runs; a wish that has just been taken back is empty."""
    pid = int(asked.get("pid", 0))
    return pid > 0 and is_alive(pid)


def ask_run(state: StateDir, query: Query) -> Tally:
    """Have the run that owns a state directory deliver letters again, and wait for it. StateError: it has ended."""
    state.replays.mkdir(exist_ok=True)
    name = uuid.uuid4().hex
    ask, answer = state.replays / f"{name}.ask.json", state.replays / f"{name}.answer.json"
    write_json(ask, {"pid": os.getpid(), "query": _query_json(query)})
    try:
        while (found := read_json(answer)) is None:
            if Lock.holder(state.run_lock) is None:
                raise StateError(
                    "the run has ended meanwhile", "What was delivered is marked; the rest waits: pgcdc dlq replay"
                )
            time.sleep(POLL_S)
    finally:
        ask.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if "refused" in found:
        raise PgcdcError.from_json(found["refused"])
    return Tally(**found)


def _query_json(query: Query) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(query).items()}


def _read_query(raw: dict[str, Any]) -> Query:
    times = {name: datetime.fromisoformat(raw[name]) if raw[name] else None for name in ("since", "before")}
    return Query(**{**raw, **times, "ids": tuple(raw["ids"])})


class _Telling(NoHooks):
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
