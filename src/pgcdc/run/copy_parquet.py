"""A copy of tables as Parquet, through Spark: typed columns, one folder per table, all in one snapshot.

DIR/<table>/part-*.parquet, and DIR/_pgcdc_snapshot.json, which says of when the copy is and how many rows it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow.parquet as pq

from pgcdc.core.errors import PgcdcError, SinkError, SourceError
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.copy_tables import CopiedTable, Copy, Progress, Say, Wanted, explain_reading, open_copy
from pgcdc.run.copy_target import PartialFolder, explain_writing
from pgcdc.spark.session import check_java, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["MANIFEST", "copy_to_parquet", "folder_name"]

MANIFEST = "_pgcdc_snapshot.json"
POLL_S = 0.5


def copy_to_parquet(
    wanted: Wanted,
    folder: Path,
    *,
    partitions: int = 0,
    types: Mapping[str, str],
    progress: Progress,
    say: Say = lambda text: None,
    spark: SparkSession | None = None,
) -> int:
    """Copy the tables; the number of rows. `types` are options of the source. The folder has all of them or is not there.

    Without `spark` a session is started for it.
    """
    check_java()
    target = PartialFolder(folder, "--to")
    logs = Path(tempfile.mkdtemp(prefix="pgcdc-snapshot-"))
    is_told = False
    try:
        with open_copy(wanted, say) as copy:
            target.open()
            options = {
                **types,
                **({"where": wanted.where} if wanted.where else {}),
                **({"partitions": str(partitions)} if partitions else {}),
            }
            with contextlib.ExitStack() as stack:
                if spark is None:
                    say("starting Spark")
                    spark = stack.enter_context(_Spark(wanted.url, logs / "spark.log"))
                else:
                    options["url"] = wanted.url
                counts = [
                    _Writing(spark, copy, table, target.partial, logs).run(options, progress) for table in copy.tables
                ]
        with explain_writing(target.path):
            (target.partial / MANIFEST).write_text(json.dumps(_describe(copy, counts), indent=2))
        target.finish()
        return sum(counts)
    except PgcdcError as error:
        is_told = str(logs) in str(error)
        raise
    finally:
        target.discard()
        if not is_told:
            shutil.rmtree(logs, ignore_errors=True)


def folder_name(table: CopiedTable) -> str:
    """Where a table stands: as its channel is named, without what has a meaning in paths."""
    return quote(table.relation.channel.removeprefix("pgcdc:"), safe=" $")


def _describe(copy: Copy, counts: list[int]) -> dict[str, object]:
    return {
        "lsn": format_lsn(copy.lsn),
        "time_us": copy.time_us,
        "tables": [
            {"schema": one.table.schema, "table": one.table.table, "folder": folder_name(one), "rows": rows}
            for one, rows in zip(copy.tables, counts, strict=True)
        ],
    }


class _Spark:
    """A session that ends with its block, and leaves our handling of signals alone."""

    def __init__(self, url: str, log_file: Path) -> None:
        self._url = url
        self._log_file = log_file
        self._spark: SparkSession | None = None

    def __enter__(self) -> SparkSession:
        os.environ["PGCDC_DB"] = self._url  # the workers inherit it: no secret goes through Spark's options
        ours = signal.getsignal(signal.SIGINT)
        self._spark = session(
            "pgcdc snapshot",
            log_file=self._log_file,
            spark__sql__caseSensitive="true",  # "A" and "a" are two columns
            spark__sql__parquet__outputTimestampType="TIMESTAMP_MICROS",  # INT96 is read as nanoseconds, which end in 2262
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, ours)
        return self._spark

    def __exit__(self, *_: object) -> None:
        assert self._spark is not None
        with contextlib.suppress(Exception):
            self._spark.stop()


class _Writing:
    """Spark writes one table in a thread of its own, while this one looks how far it is."""

    def __init__(self, spark: SparkSession, copy: Copy, table: CopiedTable, folder: Path, logs: Path) -> None:
        self._spark = spark
        self._copy = copy
        self._table = table
        self._logs = logs
        self._folder = folder / folder_name(table)
        self._error: BaseException | None = None
        self._finished = 0
        self._running: dict[int, int] = {}

    def run(self, options: Mapping[str, str], progress: Progress) -> int:
        """Write the table; the number of rows."""
        options = {
            **options,
            "table": self._table.name,
            "metadata": "false",
            "_held": self._copy.held.to_text(),
            "_files": self._table.files,
        }
        progress.begin(self._table.name, self._table.estimated_rows)
        thread = threading.Thread(target=self._write, args=[options], daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            progress.advance(self._count())
        if self._error is not None:
            raise self._explain(self._error) from self._error
        if not (self._folder / "_SUCCESS").exists():
            raise SinkError(f"Spark says that table {self._table.name} is written, but {self._folder} is not whole")
        rows: int = sum(pq.read_metadata(file).num_rows for file in self._folder.glob("*.parquet"))
        progress.end(rows)
        return rows

    def _write(self, options: dict[str, str]) -> None:
        try:
            self._spark.read.format("pgcdc").options(**options).load().write.parquet(f"file:{self._folder}")
        except BaseException as error:
            self._error = error

    def _count(self) -> int:
        """How many rows the tasks have read by now, as the server tells (since PostgreSQL 14)."""
        conn = self._copy.conn
        with explain_reading(self._table.name):
            conn.execute("SELECT pg_stat_clear_snapshot()")  # what the next statement shows is kept for the transaction
            if conn.info.server_version < 140000:
                return 0
            rows = conn.execute(
                "SELECT p.pid, p.tuples_processed FROM pg_stat_progress_copy p JOIN pg_stat_activity a USING (pid) "
                "WHERE a.application_name = %s",
                [self._copy.held.session],
            ).fetchall()
        now: dict[int, int] = dict(rows)
        # A session that reads fewer rows than before has begun another chunk; one that is gone has ended.
        self._finished += sum(before for pid, before in self._running.items() if now.get(pid, -1) < before)
        self._running = now
        return self._finished + sum(now.values())

    def _explain(self, error: BaseException) -> PgcdcError:
        text = str(error)
        if "No space left on device" in text:
            return SinkError(
                f"{self._folder.parent.parent} has no room for table {self._table.name}: No space left on device",
                "Make room and start again: nothing is left there",
            )
        ours = re.search(r"pgcdc\.errors\.(\w+): ([^\n]*)", text)
        if ours:
            message = re.sub(
                r"\b([Ll])oad it again", lambda word: f"{'R' if word[1] == 'L' else 'r'}un it again", ours.group(2)
            )
            return PgcdcError.from_json({"kind": ours.group(1), "message": message})
        lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
        return SourceError(f"Spark cannot copy table {self._table.name}: {lines[0][:300]}", f"See {self._logs}")
