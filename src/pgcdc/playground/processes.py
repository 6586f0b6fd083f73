"""Looking at other processes without a dependency: enough to kill a server and know that it is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["children", "wait_until_gone"]


def children(pid: int) -> Iterator[int]:
    """The children of a process (every PostgreSQL process is a child of the postmaster)."""
    if not Path("/proc/self/stat").exists():  # macOS
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [line.split() for line in listing.splitlines()]
        yield from (int(child) for child, parent in pairs if int(parent) == pid)
        return
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state_and_parent = path.read_text(errors="replace").rpartition(")")[2].split()
            if state_and_parent[1] == str(pid):
                yield int(path.parent.name)


def wait_until_gone(pids: list[int], timeout_s: float = 10.0) -> None:
    """Killed orphans belong to init now: wait until they run no more (a zombie does not)."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
