"""Where each adapter of a run delivers to, in the state directory: a replay without that run must go to the same place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pgcdc.core.errors import StateError
from pgcdc.core.state import StateDir, read_json, write_json_durably
from pgcdc.sink.spec import AdapterSpec

__all__ = ["check_place", "note_places"]


def note_places(state: StateDir, specs: Iterable[AdapterSpec]) -> None:
    """Remember these adapters beside what is known; durable when this returns."""
    before = read_json(state.places_file) or {}
    after = {**before, **{spec.name: _digest(spec) for spec in specs}}
    if after != before:
        write_json_durably(state.places_file, after)


def check_place(state: StateDir, spec: AdapterSpec) -> None:
    """StateError: the run had another target than these settings name. A letter would be settled where nobody looks."""
    known = (read_json(state.places_file) or {}).get(spec.name)
    if known is not None and known != _digest(spec):
        raise StateError(
            f"adapter {spec.name} has delivered to another target than these settings name",
            "Give the configuration of the run: its --config file, or all of its flags and variables. For another target on "
            "purpose, give its flags beside a file that has the adapter",
        )


def _digest(spec: AdapterSpec) -> str:
    """Nobody can read the target out of it: it may be a secret."""
    return hashlib.sha256(f"{spec.type}\0{spec.options.place()}".encode()).hexdigest()[:16]
