"""The Spark session: low latency, quiet, and warm before it reports ready.

Every setting here was measured (docs/benchmarks.md, docs/decisions). Your own session works too: it only needs
`register`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pgcdc.core.errors import ConfigError, PgcdcError, Policy, SinkUnavailable
from pgcdc.core.secrets import hide
from pgcdc.core.state import open_log
from pgcdc.spark.archive import ClassArchive, folders, say_once

if TYPE_CHECKING:
    from pyspark.conf import SparkConf
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MINIMUM_JAVA = 17
END_TIMEOUT_S = 3.0
PLANNER_AGE_S = 60.0  # Minimum age of a daemon that may end: far more than it takes to start
_LATE_C2 = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=250000 -XX:Tier4MinInvocationThreshold=30000 "
    "-XX:Tier4CompileThreshold=750000 -XX:Tier4BackEdgeThreshold=2000000"
)
"""C2 spent a third of all CPU on code that Spark runs a few thousand times; only hot code is worth it (decision
0020)."""
_ONLY_C1 = "-XX:TieredStopAtLevel=1"
"""Code that waits for C2 counts its calls and branches, which costs a fifth of a small batch's time."""


def settings(*, is_plain: bool = False) -> dict[str, str]:
    """`is_plain`: Spark only moves blocks of events and computes nothing."""
    log4j = Path(__file__).with_name("log4j2.properties").absolute().as_uri()
    return {
        # Hadoop's local file system forks a process for every checkpoint file; the raw one does not
        "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager",
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
        "spark.driver.extraJavaOptions": "-Djdk.lang.Process.launchMechanism=VFORK "
        f"-Dlog4j2.configurationFile={log4j} -XX:+UseSerialGC {_ONLY_C1 if is_plain else _LATE_C2} "
        # When a query stops inside foreachBatch, Spark matches its Java stack trace with a recursive pattern
        "-Xss16m",
        "spark.sql.streaming.pollingDelay": "1ms",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.python.daemon.module": "pgcdc.spark.daemon",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.locality.wait": "0s",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
        "spark.task.maxDirectResultSize": "16m",  # larger results take a detour through the block manager and a socket
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "false",
    }


def check_java() -> str:
    """The version text of Java. Raises ConfigError unless Java 17 or newer is installed, which Spark needs."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = (
        "Install it (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME"
    )
    if not java or not Path(java).exists():
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise ConfigError(f"Spark needs Java {MINIMUM_JAVA} or newer, but there is no java {where}", advice)
    try:
        answer = _ask_version(java)
    except OSError as error:
        raise ConfigError(f"{java} does not run: {error.strerror}", advice) from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    if not found or int(found.group(1)) < MINIMUM_JAVA:
        version = found.group(1) if found else "unknown"
        raise ConfigError(f"Spark needs Java {MINIMUM_JAVA} or newer, but {java} is version {version}", advice)
    return answer


@functools.cache  # a start asks several times
def _ask_version(java: str) -> str:
    return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr


def check_running(url: str) -> bool:
    """True if no Spark runs in this process yet. ConfigError if its JVM runs and would read another database: Spark's
    workers inherit the JVM's environment, and the JVM outlives its sessions."""
    from pyspark.core.context import SparkContext

    if SparkContext._gateway is not None:
        found = SparkContext._gateway.jvm.System.getenv("PGCDC_DB")
        if found != url:
            has = "another database in PGCDC_DB" if found else "no PGCDC_DB"
            raise ConfigError(
                f"Spark was started in this process with {has}, so its workers would not read this one",
                "Set PGCDC_DB before Spark starts, or run each pipeline in its own process",
            )
    return SparkContext._active_spark_context is None


def stop_within(timeout_s: float, what: SparkSession | StreamingQuery) -> None:
    """Stop Spark or a query. If it does not stop in time, abandon it: a sink that hangs in a batch must not hang us."""

    def stop() -> None:
        with contextlib.suppress(Exception):  # it has already ended, or Spark has
            what.stop()

    thread = threading.Thread(target=stop, name="stop", daemon=True)
    thread.start()
    thread.join(timeout_s)


def end_idle_planners(spark: SparkSession, seen: set[psutil.Process]) -> int:
    """End the Python daemons that Spark plans queries with, 34 MB each; returns how many. Spark restarts them for its
    next query.

    Ends only daemons that have no workers now and had none at the last look (`seen`), and never young ones: a query may
    be waiting for a daemon that is starting, which has no workers either.
    """
    jvm = getattr(spark.sparkContext._gateway, "proc", None)
    idle: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(jvm.pid).children() if jvm is not None else []:
            with contextlib.suppress(psutil.Error):
                *_, module, kind = ["", "", *one.cmdline()]  # empty while it starts or ends
                is_planner = module == "pyspark.daemon" and kind.startswith("pyspark.sql.worker.")
                if is_planner and time.time() - one.create_time() > PLANNER_AGE_S and not one.children():
                    idle.add(one)
    ending = idle & seen
    seen.clear()
    seen |= idle - ending
    for one in ending:
        with contextlib.suppress(psutil.Error):
            one.terminate()
    return len(ending)


def register(spark: SparkSession) -> None:
    """Register `format("pgcdc")` with a Spark session."""
    from pgcdc.spark.source import ChangeSource

    spark.dataSource.register(ChangeSource)


def start_session(url: str, app_name: str = "pgcdc", **how: Any) -> SparkSession:
    """A session whose workers read this database. Ctrl-C stays ours: Spark's handler would cancel the running batch."""
    os.environ["PGCDC_DB"] = url  # the workers inherit it, so no secret goes through Spark's options
    ours = signal.getsignal(signal.SIGINT)
    spark = session(app_name, **how)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, ours)
    return spark


def session(
    app_name: str = "pgcdc",
    *,
    master: str | None = None,
    log_file: Path | None = None,
    is_plain: bool = False,
    **extra: str,
) -> SparkSession:
    """A Spark session with the low-latency settings and `format("pgcdc")` registered: local, or on the cluster of
    `master`.

    `extra` are more settings, with dots written as double underscores: `session(spark__ui__enabled="true")`. With
    `log_file` the JVM writes there instead of to our standard error, and signals of the terminal do not reach it.
    `is_plain`: Spark computes nothing, so the JVM's optimising compiler would not pay off.
    """
    archive = find_archive()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_here = _is_here(master)
    if is_here:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.conf import SparkConf
    from pyspark.core.context import SparkContext
    from pyspark.sql import SparkSession

    warehouse = Path(tempfile.gettempdir()) / f"pgcdc-warehouse-{os.getpid()}"
    conf = SparkConf().setAppName(app_name).setMaster(master or "local[2,3]")
    conf.set("spark.sql.warehouse.dir", str(warehouse))
    ours = settings(is_plain=is_plain)
    mapped = archive.options(say_once) if archive is not None else ""
    ours["spark.driver.extraJavaOptions"] += mapped
    if not is_here:  # executors on other hosts must reach the driver: Spark knows its name
        del ours["spark.driver.host"], ours["spark.driver.bindAddress"]
    conf.setAll([*ours.items(), *((key.replace("__", "."), value) for key, value in extra.items())])
    _silence_accumulators()
    before, has_jvm = {process.pid for process in _children()}, SparkContext._gateway is not None
    try:
        if log_file is not None and not has_jvm:
            _launch_quietly(conf, log_file)
        spark = SparkSession.builder.config(conf=conf).getOrCreate()
        register(spark)
    except BaseException:  # also on a signal: nothing else knows about a JVM that is starting
        _end_launched(before)
        raise
    if archive is not None and mapped and not has_jvm and (jvm := getattr(SparkContext._gateway, "proc", None)):
        archive.check_used(jvm.pid, say_once)
    return spark


def _silence_accumulators() -> None:
    """PySpark prints a traceback if the JVM ends while it is connected; what that means, we say."""
    from pyspark import accumulators

    for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):
        if (server := getattr(accumulators, name, None)) is not None:
            server.handle_error = lambda *_: None


def find_archive() -> ClassArchive | None:
    """The archive of classes for the Spark and Java that `session` uses; None if archives are switched off."""
    java = check_java()
    if "SPARK_HOME" not in os.environ:
        os.environ["SPARK_HOME"] = str(_unzipped_home())
    return ClassArchive.of(java, Path(os.environ["SPARK_HOME"]) / "jars")


def _is_here(master: str | None) -> bool:
    """Whether all of Spark runs on this host."""
    host = re.match(r"spark://(?:\[(.+)\]|([^:,]+))", master or "")
    found = (host[1] or host[2]) if host else "localhost" if (master or "local").startswith("local") else ""
    return found in ("localhost", "127.0.0.1", "::1")


def _children() -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def _end_launched(before: set[int]) -> None:
    """End the scripts and JVMs started since `before`. They have Spark's name in their command lines; a child that was
    forked a moment ago still has ours, and would ignore SIGTERM."""
    launched, ours = [], psutil.Process().cmdline()
    for process in _children():
        with contextlib.suppress(psutil.Error):
            if process.pid in before:
                continue
            command = process.cmdline()
            if command == ours:
                process.kill()
            elif any("spark" in word for word in command):
                process.terminate()
            else:
                continue
            launched.append(process)
    _, alive = psutil.wait_procs(launched, END_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _unzipped_home() -> Path:
    """A Spark home made of links, in which `pyspark.zip` is a folder.

    Spark puts that zip first on every Python worker's path, and Python recompiles imports from a zip each time: about a
    second for each of half a dozen processes per start. The installed package takes a quarter of that.
    """
    import pyspark

    package = Path(pyspark.__file__).parent
    for base in folders():  # the archive of classes is for this path
        home = base / f"pgcdc-spark-{zlib.crc32(str(package).encode()):08x}"
        library = home / "python" / "lib"
        with contextlib.suppress(OSError):
            (library / "pyspark.zip").mkdir(parents=True, exist_ok=True)
            for link, target in {
                library / "pyspark.zip" / "pyspark": package,
                **{library / file.name: file for file in (package / "python" / "lib").glob("py4j*.zip")},
                **{home / name: package / name for name in ("bin", "jars", "sbin")},
            }.items():
                if not link.is_symlink():
                    link.symlink_to(target)
            return home
    return package


def _launch_quietly(conf: SparkConf, log_file: Path) -> None:
    """Start the JVM in its own terminal session, with its output in a file."""
    from pyspark.core.context import SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    with open_log(log_file) as log:
        try:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            gateway = launch_gateway(conf, options)  # type: ignore[no-untyped-call]
        except PySparkRuntimeError as error:
            raise PgcdcError("Spark did not start", f"See {log_file}") from error
    SparkContext(conf=conf, gateway=gateway)


@contextlib.contextmanager
def with_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Apply these settings to Spark temporarily: a query keeps the settings it was started with."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


# --- which of our errors caused a Spark query to fail

Explain = Callable[[Exception], Exception]  # Returns the cause of a Spark error, or the same error


class QueryFailed(PgcdcError):
    """The Spark query failed for a reason outside pgcdc, such as a killed worker: restart it."""

    policy = Policy.RETRY


def explain_failure(
    error: BaseException,
    raised: BaseException | None,
    capture_status: Callable[[], dict[str, Any]],
) -> PgcdcError:
    """`error` is Spark's; `raised` is the error that the lane's own code raised in the batch, if any."""
    for one in (raised, error):
        if isinstance(one, PgcdcError):
            return one
    failed = capture_status()
    if failed.get("phase") == "failed":
        return PgcdcError.from_json(failed["last_error"])
    if ended := explain_end(error):  # before reading the error: its text may come from the JVM
        return ended
    return find_ours(str(error)) or QueryFailed(
        f"the Spark query failed: {headline(raised or error)}", "Start pgcdc again: no events were lost"
    )


@contextlib.contextmanager
def explained(explain: Explain | None, what: str) -> Iterator[None]:
    """Around a sink's Spark job: raises the executor's own error instead of Spark's error that contains its text.

    Other failures (a killed worker, a full disk) may be temporary; `what` then says what failed.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        found: Exception | None = find_ours(str(error))
        if found is None and explain is not None and (other := explain(error)) is not error:
            found = other
        raise found or SinkUnavailable(f"{what}: {headline(error)}", "Is the target up and reachable?") from error


def find_ours(text: str) -> PgcdcError | None:
    """Find our error in the text of a Spark error, the only thing that comes back from an executor."""
    ours = re.search(r"pgcdc\.core\.errors\.(\w+): ([^\n]*)", text)
    return PgcdcError.from_json({"kind": ours[1], "message": ours[2].rstrip(" ;")}) if ours else None


def headline(error: BaseException) -> str:
    """The first non-empty line of an error; with the type, unless it is an error of Spark."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    text = str(error) if isinstance(error, (PySparkException, Py4JError)) else f"{type(error).__name__}: {error}"
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("An error occurred while calling")]
    return hide((telling or lines or [type(error).__name__])[0][:300])


def explain_end(error: BaseException) -> PgcdcError | None:
    """What to say if an error is that the JVM is gone."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.core.context import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    if isinstance(error, (ConnectionError, Py4JError)) and not isinstance(error, Py4JJavaError):
        with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close some time before it is gone
            process.wait(10)
    if process.poll() is None:
        return None
    return PgcdcError("the Spark JVM ended unexpectedly", "Start pgcdc again: nothing is lost")
