"""The dead letters of a pipeline: its store, notices, and replays, both in a running pipeline and without one.

A command requests a replay through the run's socket, with its own id, and repeats the request until it gets the
outcome, so a lost answer does no harm. The adapter's own thread delivers letters, batch by batch, between those of the
stream.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgcdc.capture.control import ask
from pgcdc.core.errors import ConfigError, PgcdcError, StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Identity, Lock, StateDir
from pgcdc.core.wording import counted
from pgcdc.postgres.database import connect, explain_errors, name_table, parse_url, split_table
from pgcdc.run.chains import check_target
from pgcdc.run.settings import PipelineSettings
from pgcdc.sink.attempts import DeliveryHooks
from pgcdc.sink.letters.delivery import Tally, deliver_again, deliver_all
from pgcdc.sink.letters.record import (
    QUERY,
    DeadLetter,
    DeadLetters,
    Dropped,
    Query,
    ReadableDeadLetters,
    StderrDeadLetters,
)
from pgcdc.sink.letters.stores import FileDeadLetters, PgDeadLetters
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec, make_sink
from pgcdc.transform.specs import Chain, column_chain

if TYPE_CHECKING:
    from pgcdc.run.supervisor import Lanes

POLL_S = 0.1
TELL_S = 10.0
KEPT_REPLAYS = 100  # How many outcomes of replays the run keeps, for commands that have not read them yet


# --- the store


def make_store(config: PipelineSettings, say: Callable[[str], None] = lambda text: None) -> DeadLetters:
    """The configured store. Does not access it yet."""
    if config.dlq == "none":
        return Dropped(say)
    if config.dlq == "pg_table":
        return PgDeadLetters(config.dlq_db or config.db, config.dlq_table)
    if config.dlq == "stderr" or (config.temporary_slot and config.dlq_file is None):
        return StderrDeadLetters()  # the state directory of a temporary slot is deleted with the slot
    if config.dlq_file is not None:
        return FileDeadLetters(config.dlq_file)
    return FileDeadLetters(StateDir(config.state_dir).letters_file, makes_folder=True)


def name_pipeline(identity: Identity) -> str:
    """The pipeline's name in a store that others may share."""
    return f"{identity.system}/{identity.stream}"


def check_not_captured(config: PipelineSettings) -> None:
    """Raise ConfigError if a user's publication includes the table of dead letters: each letter would become an
    event."""
    if config.dlq != "pg_table" or not config.uses_existing:
        return
    ours, source = parse_url(config.dlq_db or config.db), parse_url(config.db)
    if any(ours.get(key) != source.get(key) for key in ("host", "hostaddr", "port", "dbname")):
        return
    schema, table = split_table(config.dlq_table)
    with (
        explain_errors(f"read publication {config.publication}"),
        connect(config.db, application_name="pgcdc dead letters", may_retry=False) as conn,
    ):
        found = conn.execute(
            """SELECT 1 FROM pg_publication p WHERE pubname = %s AND (puballtables OR EXISTS (
                   SELECT FROM pg_publication_tables t
                   WHERE t.pubname = p.pubname AND t.schemaname = %s AND t.tablename = %s))""",
            [config.publication, schema, table],
        ).fetchone()
    if found is not None:
        raise ConfigError(
            f"publication {config.publication} contains table {name_table(schema, table)}: each dead letter "
            "would become an event",
            "Use --dlq file, another database (--dlq-db), or a publication that names its tables",
        )


class LetterService:
    """A pipeline's dead letters, apart from delivery itself."""

    def __init__(
        self, config: PipelineSettings, state: StateDir, say: Callable[[str], None], store: DeadLetters | None
    ) -> None:
        """`store` replaces the configured one, if it was given in Python."""
        self._config = config
        self._state = state
        self._say = say
        self._is_given = store is not None
        self.store = make_store(config, say) if store is None else store
        self._replays: dict[str, dict[str, Any]] = {}  # Outcomes by id; empty while they run
        self._is_closed = threading.Event()
        self._replaying = threading.Lock()

    def check(self) -> None:
        """Check the store before anything is created. ConfigError if the pipeline is new or another one, and letters
        could not be kept."""
        try:
            if not self._is_given:
                check_not_captured(self._config)
            self.store.check()
        except PgcdcError as error:
            if self._state.identity() is None:
                raise ConfigError(error.message, error.advice) from error
            raise

    def open(self, identity: Identity) -> None:
        """Create what is needed, once the owner of the letters is known."""
        self.store.pipeline = name_pipeline(identity)
        self.store.open()
        if not self._is_given:
            check_not_captured(self._config)

    def run(self, spec: AdapterSpec, acks: Path) -> Runner:
        """An adapter's sink that puts refused events into the store."""
        return Runner(make_sink(spec), acks, spec.name, spec.delivery, _Telling(self._say), self.store)

    def status(self) -> dict[str, Any]:
        """For `pgcdc dlq`, to find the letters. Without secrets."""
        if self._is_given:
            return {}
        config = self._config
        file = str(Path(config.dlq_file).absolute()) if config.dlq_file is not None else None
        elsewhere = bool(config.dlq_db) and config.dlq_db != config.db
        return {"dlq": config.dlq, "dlq_file": file, "dlq_table": config.dlq_table, "dlq_elsewhere": elsewhere}

    def close(self) -> None:
        """Release all waiters."""
        self._is_closed.set()
        self.store.close()

    # --- replays

    def replay(self, lanes: Lanes, query: Query) -> Tally:
        """Redeliver letters on their adapters' threads. May be called from any other thread."""
        store = self.store
        if not isinstance(store, ReadableDeadLetters):
            raise ConfigError("these dead letters cannot be read back", "Use --dlq file or --dlq pg_table from now on")

        def deliver(adapter: str, letters: list[DeadLetter]) -> Tally:
            member = next((one for one in lanes.members() if one.name == adapter), None)
            if member is None or not member.is_open:
                return Tally(error=f"adapter {adapter} is not part of the running pipeline, or not ready yet")
            sink, done = member.sink, list[Tally]()
            future = member.submit_other(lambda: done.append(deliver_again(store, letters, sink.redeliver)))
            while not future.done():
                if self._is_closed.wait(POLL_S):
                    return Tally(error="the pipeline has stopped")
            error = future.exception()
            return Tally(error=str(error)) if error else done[0]

        with self._replaying:  # one at a time: the next one must not find letters that this one delivers
            return deliver_all(store, query, deliver)

    def answer(self, lanes: Lanes | None, request: dict[str, Any]) -> dict[str, Any]:
        """The outcome of the replay `id`, or None while it runs. An unknown id starts a replay."""
        name = request["id"]
        if name not in self._replays and lanes is not None:
            for old in [one for one, end in self._replays.items() if end][:-KEPT_REPLAYS]:
                del self._replays[old]
            self._replays[name] = {}
            query = QUERY.validate_python(request["query"])
            threading.Thread(target=self._replay, args=[name, lanes, query], name="replay", daemon=True).start()
        return self._replays.get(name, {})

    def _replay(self, name: str, lanes: Lanes, query: Query) -> None:
        try:
            self._replays[name] = {"tally": asdict(self.replay(lanes, query))}
        except Exception as error:
            if not isinstance(error, PgcdcError):
                error = StateError(f"the replay failed: {type(error).__name__}: {error}")
            self._replays[name] = {"refused": error.to_json()}


class _Telling(DeliveryHooks):
    """Reports refused events: the first immediately, then a count per interval."""

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
        self._say(
            f"adapter {last.adapter} refused {counted(self._untold, 'event')}, now in the dead letters. "
            f"Last one: {last.id}: {last.error_kind}: {last.error[:200]}"
        )
        self._untold = 0


def ask_run(state: StateDir, query: Query) -> Tally:
    """Have the running pipeline redeliver letters, and wait. StateError: it has ended."""
    request = {"do": "replay", "id": str(uuid.uuid4()), "query": QUERY.dump_python(query, mode="json")}
    while Lock.holder(state.run_lock) is not None:
        found = ask(state.run_lock, request)
        if "refused" in found:
            raise PgcdcError.from_json(found["refused"])
        if "tally" in found:
            return Tally(**found["tally"])
        time.sleep(POLL_S)
    raise StateError(
        "the pipeline ended during the replay",
        "Delivered dead letters are marked. Deliver the rest with: pgcdc dlq replay",
    )


# --- replays without a run, or to a target other than the configured one


class Destination:
    """Where an adapter's letters go. `is_other`: not the adapter's own target. `transforms`: those that its events went
    through."""

    def __init__(self, spec: AdapterSpec, transforms: Sequence[Any] = (), *, is_other: bool) -> None:
        self.spec = spec
        self.chain = Chain(tuple(transforms))
        self.is_other = is_other


@contextlib.contextmanager
def open_destination(state: StateDir, destination: Destination) -> Iterator[Runner]:
    """The adapter, open. Its own target belongs to a run, so the state directory's lock is held meanwhile."""
    with contextlib.ExitStack() as stack:
        spec = destination.spec
        if destination.is_other:
            acks = stack.enter_context(_copy_of_state(state))
        else:
            lock = Lock(state.run_lock)
            if lock.acquire(1.0) is None:
                raise StateError(
                    f"a pipeline was started in {state.path} meanwhile",
                    "Run the command again: that pipeline then delivers them",
                )
            stack.callback(lock.release)
            lock.write({"pid": os.getpid()})
            state.check_whole()
            acks = state.acks
            if not (acks / f"{spec.name}.json").exists():
                raise StateError(
                    f"adapter {spec.name} has not delivered anything from {state.path}",
                    "Check --state-dir, or name another target with the adapter's flags",
                )
            check_target(state, spec)
        delivery = Runner(make_sink(spec), acks, spec.name, spec.delivery)
        delivery.chain = lambda: column_chain(destination.chain)
        stack.callback(delivery.close)
        delivery.check()
        identity = state.identity()
        delivery.open(Position.end(identity.created if identity else 0))
        yield delivery


@contextlib.contextmanager
def _copy_of_state(state: StateDir) -> Iterator[Path]:
    """A temporary copy of the parts of the state directory that sinks need."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-replay-") as folder:
        copy = StateDir(Path(folder))
        copy.acks.mkdir()
        for file in (state.identity_file, state.shapes_file):
            if file.exists():
                shutil.copy(file, copy.path / file.name)
        yield copy.acks
