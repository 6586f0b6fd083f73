"""Waits until adapters have everything that was committed before now."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pgcdc.capture.control import ask
from pgcdc.core.errors import StateError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir
from pgcdc.sink.contract import Progress

POLL_S, HURRY_S = 0.02, 0.5


def wait_for(state: StateDir, adapters: Sequence[str], timeout_s: float) -> Position:
    """The position that all of these adapters have passed. StateError: nothing runs, or they are too slow."""
    deadline, hurried, target = time.monotonic() + timeout_s, 0.0, None
    while True:
        if Lock.holder(state.run_lock) is None:
            raise StateError(f"the pipeline of {state.path} does not run", "Start it: pgcdc listen")
        if time.monotonic() >= hurried + HURRY_S:  # an idle capture reports its progress when it is asked
            hurried, said = time.monotonic(), ask(state.capture_lock, {"do": "target"})
            target = target or (Position.end(int(said["lsn"])) if "lsn" in said else None)
        acks = {name: Progress(state.acks, name).position for name in adapters}
        if target is not None and all(ack is not None and ack >= target for ack in acks.values()):
            return target
        if time.monotonic() > deadline:
            behind = ", ".join(f"{name} at {ack or 'its start'}" for name, ack in acks.items())
            raise StateError(f"not delivered up to {target} within {timeout_s:.0f} s: {behind}", "See pgcdc status")
        time.sleep(POLL_S)
