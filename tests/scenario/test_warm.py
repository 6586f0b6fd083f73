"""What is ready when a run says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from killing import daemons
from listening import wait_until
from pyspark.sql import SparkSession

from pgcdc.run.warm import warm_up
from pgcdc.spark import archive
from pgcdc.spark.session import end_idle_planners
from pgcdc.transform.program import compile_chains
from pgcdc.transform.specs import Chain


def test_the_workers_of_the_first_large_batch_are_ready_after_the_warm_up(spark: SparkSession) -> None:
    before = daemons()
    for one in before:
        one.kill()
    psutil.wait_procs(before, 10)
    warm_up(spark, compile_chains([Chain()]))
    (daemon,) = daemons()
    assert 1 <= len(daemon.children()) <= spark.sparkContext.defaultParallelism  # one may serve two short tasks


def test_the_result_of_a_task_comes_without_a_fetch(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobGroup("large", "one result of 3 MB")
    (found,) = spark.range(1).selectExpr("repeat('x', 3000000)")._jdf.toArrowBatchRdd().collect()
    assert len(found) > 3_000_000
    context._jsc.sc().listenerBus().waitUntilEmpty()
    tracker = context.statusTracker()
    job = tracker.getJobInfo(tracker.getJobIdsForGroup("large")[0])
    assert job is not None
    task = context._jsc.sc().statusStore().taskList(job.stageIds[0], 0, 1).apply(0)
    assert task.resultFetchStart().isEmpty()


_START = """
import os, pathlib, time
from pgcdc.spark.session import find_archive, session
one, made = find_archive(), pathlib.Path("made")
made.write_text("nothing that Java knows")
os.utime(made, (time.time() - 100_000,) * 2)
one.take(made)
spark = session(log_file=pathlib.Path("spark.log"))
print(spark.range(3).count(), one.file.exists(), one.is_wanted)
spark.stop()
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="only Linux shows what a JVM has mapped")
def test_an_archive_that_java_refuses_is_said_and_removed_and_spark_starts(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    ran = subprocess.run(
        [sys.executable, "-c", _START], env=env | {archive.SWITCH: str(tmp_path / "cache")}, cwd=tmp_path, check=True,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout == "3 False True\n"
    (said,) = [line for line in ran.stderr.splitlines() if "class archive" in line]
    assert "Java refused" in said


@pytest.mark.slow  # Spark ends idle workers after a minute
def test_daemons_that_planned_a_query_end_when_idle_and_come_back_for_the_next_one(spark: SparkSession) -> None:
    program = compile_chains([Chain()])
    warm_up(spark, program)
    ended, seen, deadline = 0, set[psutil.Process](), time.monotonic() + 150
    while ended < 3 and time.monotonic() < deadline:
        ended += end_idle_planners(spark, seen)
        time.sleep(1)
    assert ended == 3
    warm_up(spark, program)
    assert [end_idle_planners(spark, seen) for _ in range(3)] == [0, 0, 0]


def test_a_daemon_that_starts_or_works_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process that looks like one of Spark's to `end_idle_planners`."""
    jvm = SimpleNamespace(_gateway=SimpleNamespace(proc=SimpleNamespace(pid=os.getpid())))
    spark, seen = cast(SparkSession, SimpleNamespace(sparkContext=jvm)), set[psutil.Process]()
    script = "import subprocess, sys\nfor line in sys.stdin: subprocess.run(['sleep', '60'])"
    words = [sys.executable, "-c", script, "pyspark.daemon", "pyspark.sql.worker.made_up"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as daemon:
        assert [end_idle_planners(spark, seen) for _ in range(3)] == [0, 0, 0], "it is young"
        monkeypatch.setattr("pgcdc.spark.session.PLANNER_AGE_S", -1.0)
        assert end_idle_planners(spark, seen) == 0, "seen once"
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "cmdline", lambda one: [])
            assert end_idle_planners(spark, seen) == 0, "a process that ends has no command line"
        assert end_idle_planners(spark, seen) == 0, "seen once"
        assert daemon.stdin is not None
        daemon.stdin.write(b"work\n")
        daemon.stdin.flush()
        wait_until(lambda: bool(psutil.Process(daemon.pid).children()), 10, "it has a worker")
        assert end_idle_planners(spark, seen) == 0
        psutil.Process(daemon.pid).children()[0].kill()
        wait_until(lambda: not psutil.Process(daemon.pid).children(), 10, "its worker is gone")
        assert [end_idle_planners(spark, seen) for _ in range(3)] == [0, 1, 0]
        assert daemon.wait(10) == -signal.SIGTERM
