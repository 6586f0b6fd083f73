"""`pgcdc sentinel --wait` at rest: nothing else happens, so nothing but the sentinel itself brings a batch."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from latency import listener

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_sentinel"]

ROUNDS = 15
REST_S = 2.0


def measure_sentinel(bench: Bench) -> None:
    """`pgcdc sentinel --wait` beside a pipeline at rest."""
    waits, commands = [], []
    with listener(bench.url(), "bench_sentinel") as running:
        running.wait_ready()
        state = str(running.path.parent / "state")
        for _ in range(ROUNDS):
            time.sleep(REST_S)
            began = time.monotonic()
            command = [sys.executable, "-m", "pgcdc", "sentinel", "--wait", "--json", "--state-dir", state]
            said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
            commands.append(time.monotonic() - began)
            waits.append(json.loads(said)["seconds"])
            bench.say(f"wait {waits[-1]:.3f} s, command {commands[-1]:.3f} s")
    note = (
        f"median of {ROUNDS}, slowest {max(commands):.2f} s. Without the start of Python: median "
        f"{statistics.median(waits):.2f} s, slowest {max(waits):.2f} s"
    )
    bench.add("sentinel.command", statistics.median(commands), note)
