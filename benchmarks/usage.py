"""CPU and memory of processes: of one, or of a process with all that it started.

`ru_maxrss` is not used: it survives exec, so that a child would begin with the peak of whoever started it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from pathlib import Path

import psutil

__all__ = ["PeakMemory", "cpu_of_tree", "cpu_s", "cpu_since", "peak_rss_bytes", "pss_of_tree", "role_of"]

SAMPLE_S = 0.2


def cpu_s() -> float:
    """User and system seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss_bytes(pid: int | None = None) -> int:
    """The largest RSS that a running process (or this one) has had; 0 if it has ended."""
    if sys.platform != "linux":
        return int(psutil.Process(pid).memory_info().rss)
    try:
        lines = Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def cpu_of_tree(pid: int) -> dict[psutil.Process, tuple[str, float]]:
    """Role and CPU seconds of every process; by process, because Spark ends workers that were idle for a minute."""
    top = psutil.Process(pid)
    found = {}
    for process in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process] = (role_of(process, top), float(sum(process.cpu_times()[:4])))  # with children it reaped
    return found


def cpu_since(
    before: dict[psutil.Process, tuple[str, float]], after: dict[psutil.Process, tuple[str, float]]
) -> dict[str, float]:
    """CPU seconds by role between two looks at the same tree."""
    found: dict[str, float] = {}
    for process, (role, used_s) in after.items():
        found[role] = found.get(role, 0.0) + used_s - (before[process][1] if process in before else 0.0)
    return found


def pss_of_tree(pid: int) -> dict[str, float]:
    """Memory by role, in bytes: pages that processes share are divided among them (RSS where the system does not say it)."""
    top = psutil.Process(pid)
    found: dict[str, float] = {}
    for process in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            role = role_of(process, top)
            found[role] = found.get(role, 0.0) + getattr(memory, "pss", memory.rss)
    return found


def role_of(process: psutil.Process, top: psutil.Process) -> str:
    """What a process of ours is for."""
    command = " ".join(process.cmdline())
    if process == top:
        return "listen"
    if "pgcdc.capture.process" in command:
        return "capture"
    if process.name() == "java":
        return "JVM"
    return "Spark's source in Python" if "source_runner" in command else "Spark's Python workers"


class PeakMemory:
    """Watches a process until the context ends; with `tree`, the sum over it and all that it started.

    A sum of RSS counts pages that forked processes share once for each of them.
    """

    def __init__(self, pid: int, *, tree: bool = False) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._tree = tree
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self._sum() if self._tree else peak_rss_bytes(self._pid))
            if self._stopping.wait(SAMPLE_S):
                return

    def _sum(self) -> int:
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += int(process.memory_info().rss)
        return total
