"""Failpoints: named places where a test can crash or fail the process.

`hit("name")` does nothing unless the environment variable PGCDC_FAILPOINTS names the place, so production pays one
global read and one comparison. The variable is read once, at import:

    PGCDC_FAILPOINTS="lane.after_write=kill@3,sink.before_ack=raise"

`kill` sends kill -9 to this process, `raise` raises FailpointError; `@3` means at the third hit. If PGCDC_FAILPOINT_ONCE
names a folder for the marker, a failpoint fires once per state directory, so that the restarted process survives. `wait`
waits at every hit until the folder PGCDC_FAILPOINT_TICKETS contains a file, and removes it; without the folder it passes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


class FailpointError(RuntimeError):
    """Raised by a failpoint with the action `raise`."""


@dataclass(slots=True)
class _Point:
    action: str
    countdown: int


def _parse(text: str) -> dict[str, _Point]:
    points: dict[str, _Point] = {}
    for item in filter(None, text.split(",")):
        name, _, action = item.partition("=")
        action, _, at = action.partition("@")
        points[name] = _Point(action or "raise", int(at or 1))
    return points


_POINTS = _parse(os.environ.get("PGCDC_FAILPOINTS", ""))


def hit(name: str) -> None:
    """Crash or fail here if a test asks for it."""
    if _POINTS:
        _fire(name)


def _fire(name: str) -> None:
    point = _POINTS.get(name)
    if point is None:
        return
    if point.action == "wait":
        _take_ticket(Path(os.environ["PGCDC_FAILPOINT_TICKETS"]))
        return
    point.countdown -= 1
    if point.countdown != 0:
        return
    once = os.environ.get("PGCDC_FAILPOINT_ONCE")
    if once:
        marker = Path(once) / f"{name}.hit"
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise FailpointError(f"failpoint {name}")


def _take_ticket(folder: Path) -> None:
    while folder.is_dir():
        for ticket in folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another process took it
                ticket.unlink()
                return
        time.sleep(0.01)
