"""Replays without a run, or to another target than the configuration's."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pgcdc.config.adapters import FLAT_KEYS
from pgcdc.config.layers import Loaded, load
from pgcdc.core.errors import ConfigError, StateError
from pgcdc.core.position import Position
from pgcdc.core.settings import make_options
from pgcdc.core.state import Lock, StateDir
from pgcdc.run.target_digests import check_place
from pgcdc.sink.registry import ADAPTERS, check_options, keep_secrets, make_sink
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec, DeliveryOptions

__all__ = ["Destination", "open_destination", "own_options", "plan_destinations"]


class Destination:
    """Where the letters of an adapter go. `is_other`: somewhere else than what the adapter has delivered to."""

    def __init__(self, spec: AdapterSpec, *, is_other: bool) -> None:
        self.spec = spec
        self.is_other = is_other


def own_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Of flags, those that say where an adapter delivers to, and not how."""
    return {
        key: value
        for key, value in flags.items()
        if key in FLAT_KEYS and FLAT_KEYS[key][1] not in DeliveryOptions.model_fields
    }


def plan_destinations(flags: Mapping[str, Any], file: Path | None, adapters: list[str]) -> dict[str, Destination]:
    """By adapter. An option that is given as a flag names another target, if the configuration has one for the adapter."""
    others = own_options(flags)
    base = load({key: value for key, value in flags.items() if key not in others}, os.environ, file)
    known = base.config.adapter_names if ("adapters",) in base.origins else ()
    specs = {spec.name: spec for spec in base.config.adapter_specs} if known else {}
    keep_secrets([base.config.db, base.config.dlq_db], list(specs.values()), base.config.global_transforms)
    found: dict[str, Destination] = {}
    for name in adapters:
        if name in specs:
            given = {FLAT_KEYS[key][1]: one for key, one in others.items() if FLAT_KEYS[key][0] == specs[name].type}
            spec = _change(specs[name], given) if given else specs[name]
            found[name] = Destination(spec, is_other=bool(given))
        elif name in ADAPTERS:  # there is no file: the flags are the configuration
            found[name] = Destination(_only(flags, file, name), is_other=False)
        else:
            raise ConfigError(
                f"the configuration has no adapter {name}", "Give the file of its pipeline with --config, or --adapter"
            )
    return found


def _only(flags: Mapping[str, Any], file: Path | None, name: str) -> AdapterSpec:
    loaded: Loaded = load({**flags, "adapters": [name]}, os.environ, file)
    return loaded.config.adapter_specs[0]


def _change(spec: AdapterSpec, given: Mapping[str, Any]) -> AdapterSpec:
    kept = {
        name: value
        for name, value in spec.options
        if name in spec.options.model_fields_set
        and name.removesuffix("_file") not in given
        and f"{name}_file" not in given
    }
    options = make_options(
        type(spec.options), {**kept, **given}, f"adapter {spec.name}", "See the documentation of the adapter"
    )
    changed = AdapterSpec(spec.name, spec.type, options, spec.delivery)
    check_options(changed)
    return changed


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
            check_place(state, spec)
        delivery = Runner(make_sink(spec, acks), acks, spec.name, spec.delivery)
        _check_path(delivery)
        delivery.check()
        identity = state.identity()
        delivery.open(Position.end(identity.created_lsn if identity else 0))
        stack.callback(delivery.close)
        yield delivery


def _check_path(sink: Runner) -> None:
    """The ack of a file knows its path: with another one, a replay would forget how far the first file is written."""
    known, path = sink.progress.detail.get("path"), getattr(sink.sink, "path", None)
    if known is not None and path is not None and known != str(path):
        raise StateError(
            f"adapter {sink.name} has delivered to {known}, and not to {path}",
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
