"""A copy of tables as Parquet, by Spark: typed reads of one snapshot, one folder per table.

DIR/<table>/part-*.parquet, and DIR/_pgcdc_snapshot.json, which says of when the copy is and how many rows it has. The folder
is DIR.partial until it is whole; what a killed run has left there is cleared by the next one.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow.parquet as pq

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError, SourceError
from pgcdc.core.state import Lock, fsync_folder
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.copy_source import CopiedTable, Copy, Progress, Say, Wanted, open_copy
from pgcdc.spark.session import check_java, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["MANIFEST", "copy_to_parquet", "folder_name"]

MANIFEST = "_pgcdc_snapshot.json"


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
    options = {**types, **({"where": wanted.where} if wanted.where else {})}
    options |= {"partitions": str(partitions)} if partitions else {}
    with open_copy(wanted, say) as copy, _partial_folder(folder.absolute()) as partial, contextlib.ExitStack() as stack:
        if spark is None:
            say("starting Spark")
            spark = stack.enter_context(_start_spark(wanted.url))
        else:
            options["url"] = wanted.url
        counts = [_write(spark, copy, table, partial, options, progress) for table in copy.tables]
        (partial / MANIFEST).write_text(json.dumps(_describe(copy, counts), indent=2))
    return sum(counts)


def folder_name(table: CopiedTable) -> str:
    """Where a table stands: as its channel is named, without what has a meaning in paths."""
    return quote(table.relation.channel.removeprefix("pgcdc:"), safe=" $")


def _describe(copy: Copy, counts: list[int]) -> dict[str, object]:
    tables = [
        {"schema": one.table.schema, "table": one.table.table, "folder": folder_name(one), "rows": rows}
        for one, rows in zip(copy.tables, counts, strict=True)
    ]
    return {"lsn": format_lsn(copy.lsn), "time_us": copy.time_us, "tables": tables}


@contextlib.contextmanager
def _partial_folder(path: Path) -> Iterator[Path]:
    """A folder that gets the name `path`, durably, when the block has ended well; else nothing is left."""
    if not path.name or not path.parent.is_dir():
        raise ConfigError(f"the folder of --to {path} does not exist", "Create it first")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "is not empty" if path.is_dir() else "is not a folder"
        raise ConfigError(f"--to {path} {what}", "Move it away, or give another --to")
    partial = path.with_name(f"{path.name}.partial")
    lock_file = path.with_name(f"{path.name}.lock")
    lock = Lock(lock_file)
    try:
        if lock.acquire() is None:
            raise ConfigError(f"{partial} is being written by another run", "Wait for it, or choose another target")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            for folder, _, files in os.walk(partial):
                for name in files:
                    with open(Path(folder, name), "rb") as file:
                        os.fsync(file.fileno())
                fsync_folder(Path(folder))
            os.rename(partial, path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock_file.unlink(missing_ok=True)
            lock.release()
    except OSError as error:
        raise SinkError(
            f"{path} cannot be written: {error.strerror or error}",
            "Is there room on the disk, and may we write there? Nothing is left there: start again",
        ) from error


@contextlib.contextmanager
def _start_spark(url: str) -> Iterator[SparkSession]:
    """A session that ends with its block, and leaves our handling of signals alone."""
    os.environ["PGCDC_DB"] = url  # the workers inherit it: no secret goes through Spark's options
    ours = signal.getsignal(signal.SIGINT)
    with tempfile.TemporaryDirectory(prefix="pgcdc-snapshot-") as logs:
        spark = session(
            "pgcdc snapshot",
            log_file=Path(logs) / "spark.log",
            spark__sql__caseSensitive="true",  # "A" and "a" are two columns
            spark__sql__parquet__outputTimestampType="TIMESTAMP_MICROS",  # INT96 is read as nanoseconds, which end in 2262
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, ours)
        try:
            yield spark
        finally:
            with contextlib.suppress(Exception):
                spark.stop()


def _write(
    spark: SparkSession, copy: Copy, table: CopiedTable, folder: Path, options: Mapping[str, str], progress: Progress
) -> int:
    """Write one table; the number of rows."""
    target = folder / folder_name(table)
    held = {"table": table.name, "metadata": "false", "_held": copy.held.to_text(), "_files": table.files}
    progress.begin(table.name, table.estimated_rows)
    try:
        spark.read.format("pgcdc").options(**options, **held).load().write.parquet(f"file:{target}")
    except Exception as error:
        raise _explain(error, table.name, folder) from error
    if not (target / "_SUCCESS").exists():
        raise SinkError(f"Spark says that table {table.name} is written, but {target} is not whole")
    rows: int = sum(pq.read_metadata(file).num_rows for file in target.glob("*.parquet"))
    progress.end(rows)
    return rows


def _explain(error: Exception, table: str, folder: Path) -> PgcdcError:
    text = str(error)
    if "No space left on device" in text:
        return SinkError(
            f"{folder.parent} has no room for table {table}: No space left on device",
            "Make room and start again: nothing is left there",
        )
    if ours := re.search(r"pgcdc\.core\.errors\.(\w+): ([^\n]*)", text):
        message = re.sub(r"\b([Ll])oad it again", lambda one: f"{'R' if one[1] == 'L' else 'r'}un it again", ours[2])
        return PgcdcError.from_json({"kind": ours[1], "message": message})
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return SourceError(f"Spark cannot copy table {table}: {lines[0][:300]}", "Check the table and its types")
