"""Replays without a run, or to another target than the configuration's."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.run.chains import check_target
from pgcdc.sink.registry import make_sink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec
from pgcdc.transform.specs import Chain, column_chain


class Destination:
    """Where the letters of an adapter go. `is_other`: somewhere else than what the adapter has delivered to.

    `transforms` are those that the adapter's events went through.
    """

    def __init__(self, spec: AdapterSpec, transforms: Sequence[Any] = (), *, is_other: bool) -> None:
        self.spec = spec
        self.chain = Chain(tuple(transforms))
        self.is_other = is_other


@contextlib.contextmanager
def open_destination(state: StateDir, destination: Destination) -> Iterator[Runner]:
    """The adapter, open. Its own target belongs to a run: the lock of the state directory is held meanwhile."""
    with contextlib.ExitStack() as stack:
        spec = destination.spec
        if destination.is_other:
            acks = stack.enter_context(_copy_of_state(state))
        else:
            lock = Lock(state.run_lock)
            if lock.acquire(1.0) is None:
                raise StateError(f"a run has begun in {state.path} meanwhile", "Ask again: the run delivers them then")
            stack.callback(lock.release)
            lock.write({"pid": os.getpid()})
            state.check_whole()
            acks = state.acks
            if not (acks / f"{spec.name}.json").exists():
                raise StateError(
                    f"adapter {spec.name} has not delivered anything from {state.path}",
                    "Check --state-dir, or name another target by the flags of the adapter",
                )
            check_target(state, spec)
        delivery = Runner(make_sink(spec), acks, spec.name, spec.delivery)
        delivery.chain = lambda: column_chain(destination.chain)
        _check_path(delivery, spec)
        delivery.check()
        identity = state.identity()
        delivery.open(Position.end(identity.created if identity else 0))
        stack.callback(delivery.close)
        yield delivery


def _check_path(sink: Runner, spec: AdapterSpec) -> None:
    """The ack of a file knows its path: with another one, a replay would forget how far the first file is written."""
    known, target = sink.progress.detail.get("path"), spec.options.target()
    if known is not None and target and os.path.realpath(known) != target:
        raise StateError(
            f"adapter {sink.name} has delivered to {known}, and not to {target}",
            "Name that one; or, for another target, give the flag beside a configuration file that has the adapter",
        )


@contextlib.contextmanager
def _copy_of_state(state: StateDir) -> Iterator[Path]:
    """The folder of acks in a state directory that has what sinks want to know, and that nobody needs afterwards."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-replay-") as folder:
        copy = StateDir(Path(folder))
        copy.acks.mkdir()
        for file in (state.identity_file, state.shapes_file):
            if file.exists():
                shutil.copy(file, copy.path / file.name)
        yield copy.acks
