"""Sentinels: wait until targets have everything that was committed before now.

The waiting happens here, in the calling process: the capture says where the sentinel is in the stream, and the run how
far each adapter is.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pgcdc.capture.control import ask
from pgcdc.core.errors import ConfigError, PgcdcError, StateError, sentences
from pgcdc.core.position import Position
from pgcdc.core.state import Lock, StateDir, read_json
from pgcdc.core.wording import counted

POLL_S = 0.02


class Sentinel:
    """A mark in the stream of the pipeline that runs in a state directory, after everything committed before
    `asked_at`."""

    def __init__(self, state: StateDir, adapters: Sequence[str] = ()) -> None:
        """Requests the mark. `wait` then waits for these adapters, or for all. Raises with advice if no pipeline runs
        there."""
        self.id = secrets.token_hex(8)
        self.asked_at = datetime.now().astimezone()
        self.position: Position | None = None  # Where it is in the stream; None: not known yet
        self.took_s: dict[str, float] = {}  # By adapter that has it: seconds from the request until we saw that
        self._state, self._began = state, time.monotonic()
        self.waits_for_copies = True  # Also wait for copies that are being replaced
        self._trouble = ""  # Why the capture cannot say where it is
        run = self._ask_run()
        self._adapters = tuple(adapters or run.get("adapters", ()))
        self._check_adapters(run)
        if not self._adapters or not self._ask_capture():
            phase = run.get("phase", "starting")
            raise StateError(
                f"the pipeline does not read the stream yet: {phase}", "Try again when pgcdc status says streaming"
            )

    def wait(self, timeout_s: float = 30.0) -> float:
        """Wait until the adapters have it; returns the seconds since the request. Raises on timeout or if the pipeline
        ends, naming the adapters that do not have it."""
        deadline = time.monotonic() + timeout_s
        while lacking := self._look():
            if time.monotonic() > deadline:
                raise self._explain(lacking, timeout_s)
            time.sleep(POLL_S)
        return max(self.took_s.values(), default=0.0)

    def _look(self) -> list[dict[str, Any]]:
        """The status of each adapter that does not have it."""
        if self.position is None:
            try:
                self._ask_capture()  # also works with a new capture, where the id creates a new sentinel
                self._trouble = ""
            except PgcdcError as error:  # it may reconnect
                self._trouble = str(error)
        run = self._ask_run()
        self._check_adapters(run)
        lanes, lacking = {one["adapter"]: one for one in run.get("lanes", ())}, []
        for name in self._adapters:
            lane = lanes.get(name, {"adapter": name})
            has_it = self.position and lane.get("ack") and Position.parse(lane["ack"]) >= self.position
            if has_it and not (self.waits_for_copies and lane.get("reloading")):  # rows of these are left out
                self.took_s.setdefault(name, time.monotonic() - self._began)
            elif name not in self.took_s:
                lacking.append(lane)
        return lacking

    def _check_adapters(self, run: dict[str, Any]) -> None:
        known = run.get("adapters", self._adapters)  # a run that is just starting does not say
        for name in self._adapters:
            if name not in known:
                raise ConfigError(f"adapter {name!r} does not exist", f"Known adapters: {', '.join(known)}")

    def _ask_run(self) -> dict[str, Any]:
        run = ask(self._state.run_lock, {"do": "status"})
        if not run and Lock.holder(self._state.run_lock) is None:
            error = (read_json(self._state.run_status) or {}).get("last_error")
            reason = f". Its last error: {PgcdcError.from_json(error)}" if error else ""
            raise StateError(
                f"no pipeline runs in {self._state.path}{reason}",
                "Start it with pgcdc listen and request a new sentinel, or set --state-dir to that of a "
                "running pipeline",
            )
        return run

    def _ask_capture(self) -> bool:
        """Ask where it is in the stream; False if no capture answers."""
        reply = ask(self._state.capture_lock, {"do": "sentinel", "id": self.id})
        self.position = Position.parse(reply["position"]) if reply.get("position") else None
        return "position" in reply

    def _explain(self, lacking: list[dict[str, Any]], timeout_s: float) -> PgcdcError:
        what = f"after {timeout_s:g} s, not every target has the changes committed before {self.asked_at:%H:%M:%S}"
        if self.position is None:
            return PgcdcError(
                f"{what}: the stream has not reached them yet", sentences(self._trouble, "See pgcdc status")
            )
        return PgcdcError(f"{what}: {'; '.join(map(_describe, lacking))}", "See pgcdc status, or wait longer")


def _describe(lane: dict[str, Any]) -> str:
    behind = "not open yet" if lane.get("lag_bytes") is None else f"{counted(lane['lag_bytes'], 'byte')} behind"
    error = f", last error: {lane['last_error']}" if lane.get("last_error") else ""
    if lane.get("reloading"):
        return f"adapter {lane['adapter']} is still replacing its copy of {lane['reloading']}{error}"
    return f"adapter {lane['adapter']} lacks them ({behind}{error})"


def wait_for(state: StateDir, adapters: Sequence[str] = (), timeout_s: float = 30.0) -> Position:
    """Wait until these adapters (none: all) of the pipeline in `state` have everything that was committed before this
    call.

    Does not wait for copies that are being replaced. Returns a position after all of that.
    """
    sentinel = Sentinel(state, adapters)
    sentinel.waits_for_copies = False
    sentinel.wait(timeout_s)
    assert sentinel.position is not None
    return sentinel.position
