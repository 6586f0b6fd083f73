"""Makes a start fast: a few batches before a run reports ready, and an archive of Spark's classes.

Another process creates the archive beside the first run.

    python -m pgcdc.run.warm        creates the archive, if there is none
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pgcdc import transform
from pgcdc.core.errors import PgcdcError
from pgcdc.core.position import Position
from pgcdc.core.state import Lock
from pgcdc.source.rate.options import RateOptions
from pgcdc.source.rate.source import FIRST_COMMIT, MadeUp
from pgcdc.spark.archive import SWITCH, ClassArchive
from pgcdc.spark.quick import Collector, checkpoint_url
from pgcdc.spark.session import find_archive, headline, session, settings, with_settings
from pgcdc.spool.writer import SpoolWriter
from pgcdc.transform.program import compile_chains
from pgcdc.transform.specs import Chain
from pgcdc.transform.steps import map_in_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pgcdc.transform.program import Program

WARM_BATCHES = 3
WARM_ROWS = 4  # Per batch: each kind of change
EXIT_S = 600.0  # On a busy machine the lowest priority gets little CPU
WORKERS_S = 5.0  # On a cluster executors may come much later: then they start while the stream runs


def warm_up(spark: SparkSession, program: Program) -> None:
    """Run a few micro-batches over an artificial spool with this program, so that the first real one is fast.

    Meanwhile the Python workers start: small batches do not need them, and the first large one would wait seconds for
    them.
    """
    workers = threading.Thread(target=_start_workers, args=[spark], name="workers", daemon=True)
    workers.start()
    with tempfile.TemporaryDirectory(prefix="pgcdc-warm-") as folder:
        _write_spool(Path(folder) / "spool")
        reader = spark.readStream.format("pgcdc").schema(program.source_schema()).options(**program.source_options())
        events = reader.option("_spool", f"{folder}/spool").option("max_batch_rows", str(WARM_ROWS)).load()
        projected = program.project(events)
        collector = Collector(projected)
        place = checkpoint_url(spark, Path(folder) / "checkpoint")
        writer = projected.writeStream.option("checkpointLocation", place)

        def collect(batch: DataFrame, _: int) -> None:
            program.collect(batch, Position.end(0), Position.end(0), partial(collector.to_arrow, rows=1))

        with with_settings(spark, program.settings()):
            query = writer.trigger(availableNow=True).foreachBatch(collect).start()
        query.awaitTermination()
    workers.join(WORKERS_S)


def _start_workers(spark: SparkSession) -> None:
    with contextlib.suppress(Exception):  # a batch that needs them will report the problem
        count = spark.sparkContext.defaultParallelism
        rows = spark.range(0, count, 1, count)
        map_in_arrow(rows, lambda batches: batches, pa.schema([("id", pa.int64())])).toArrow()


def _write_spool(folder: Path) -> None:
    writer = SpoolWriter(folder, Position.end(FIRST_COMMIT))
    options = RateOptions(
        rate_tables=1, rate_transaction_rows=WARM_ROWS, rate_inserts=2, rate_updates=1, rate_deletes=1
    )
    changes = MadeUp(options, writer.relations)
    for commit in range(FIRST_COMMIT + 1, FIRST_COMMIT + 1 + WARM_BATCHES):
        writer.append(changes.transactions(commit, 1, 0))
    writer.close()


# --- the archive


def make_archive_beside(say: Callable[[str], None]) -> None:
    """Have another process create the archive, if there is none. It only uses CPU time that nothing else needs."""
    try:
        archive = find_archive()
        if archive is None:
            return
        _say_failure(archive, say)  # of an attempt that ended after its run
        if archive.is_wanted:
            env = {name: value for name, value in os.environ.items() if not name.startswith("PGCDC_") or name == SWITCH}
            made = subprocess.Popen(
                [sys.executable, "-m", __name__, "beside"], env=env, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            threading.Thread(target=_follow, args=[made, archive, say], daemon=True).start()
            say(f"creating an archive of Spark's classes in {archive.file.parent} in the background, for faster starts")
    except (OSError, PgcdcError, subprocess.SubprocessError) as error:
        say(f"no archive of Spark's classes for faster starts: {error}. Set {SWITCH} to another folder, or to off")


def _follow(made: subprocess.Popen[bytes], archive: ClassArchive, say: Callable[[str], None]) -> None:
    if (code := made.wait()) and archive.is_wanted:  # it left no note: the disk is full
        say(f"no archive of Spark's classes for faster starts: the process that creates it ended with code {code}")
    _say_failure(archive, say)


def _say_failure(archive: ClassArchive, say: Callable[[str], None]) -> None:
    if reason := archive.failure():
        say(f"no archive of Spark's classes for faster starts: {reason}. The next attempt is in a day")


def make_archive(archive: ClassArchive) -> bool:
    """Run Spark once and have its JVM write what it loaded when it ends. False: this Java cannot."""
    from pyspark import SparkContext

    for left in archive.file.parent.glob("classes-*.new"):  # left by a process that was killed
        left.unlink()
    written = archive.file.with_suffix(".new")
    options = settings()["spark.driver.extraJavaOptions"] + f' "-XX:ArchiveClassesAtExit={written}"'
    jvm, log = None, written.with_suffix(".log")
    try:
        more = {"spark__driver__extraJavaOptions": options, "spark__driver__memory": "512m"}
        spark = session(log_file=log, **more)  # type: ignore[arg-type]
        gateway = SparkContext._gateway
        assert gateway is not None
        jvm = gateway.proc
        for chain in (Chain(), Chain((transform.filter(where="operation = 'INSERT'"),))):
            warm_up(spark, compile_chains([chain]))
        spark.stop()
        gateway.shutdown()
        jvm.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            jvm.wait(EXIT_S)
        if (code := jvm.poll()) != 0:
            raise PgcdcError("Java did not end" if code is None else f"Java ended with code {code}")
        if not written.exists():
            return False
        archive.take(written)
        if not archive.is_whole:
            raise PgcdcError("another start removed it")
        return True
    except Exception as error:
        said = log.read_text(errors="replace").strip().rpartition("\n")[2] if log.exists() else ""
        what = error.message if isinstance(error, PgcdcError) else headline(error)
        raise PgcdcError(": ".join(filter(None, [what, said]))) from error
    finally:
        if jvm is not None and jvm.poll() is None:  # it would still write
            jvm.kill()
            jvm.wait()
        for left in (written, log):
            left.unlink(missing_ok=True)


def main() -> int:
    is_beside = "beside" in sys.argv
    if is_beside:
        os.nice(19)
    archive = find_archive()
    if archive is None or not archive.is_wanted:
        return 0
    lock = Lock(archive.lock_file)
    if lock.acquire(0.0) is None:  # another process is creating it
        return 0
    try:
        if is_beside:
            archive.begin()
        if not make_archive(archive):
            archive.give_up()
            print("This Java cannot archive classes: Spark starts without an archive", file=sys.stderr)
    except Exception as error:  # a start retries in a day, and reports the reason
        archive.fail(str(error))
        print(f"No archive of Spark's classes: {error}", file=sys.stderr)
    finally:
        lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
