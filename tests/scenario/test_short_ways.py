"""The shorter ways through Spark are taken, not only switched on: the tests run with the PySpark that they are for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from killing import daemons
from py4j.java_gateway import get_field
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.classic import dataframe as classic
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pgcdc import transform
from pgcdc.core.state import StateDir, read_json
from pgcdc.run import warm
from pgcdc.run.warm import warm_up
from pgcdc.spark import quick
from pgcdc.spark.quick import Collector, checkpoint_url, find_trouble
from pgcdc.spark.session import headline, with_settings
from pgcdc.transform.program import compile_chains
from pgcdc.transform.specs import Chain

CHAINS = [
    Chain(),
    Chain((transform.filter(where="operation = 'INSERT'"),)),
    Chain((transform.sql(note="upper(row['note'])"),)),
]


@pytest.mark.parametrize("chain", CHAINS, ids=["block", "where", "sql"])
def test_small_batches_of_a_stream_need_no_job_and_their_checkpoint_no_processes(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, chain: Chain
) -> None:
    def take_the_ordinary_way(batch: DataFrame) -> None:
        raise AssertionError("the batch was collected by toArrow")

    monkeypatch.setattr(classic.DataFrame, "toArrow", take_the_ordinary_way)
    monkeypatch.setattr(warm, "_start_workers", lambda spark: None)
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    before, readers = scheduler.numTotalJobs(), daemons()
    for one in readers:
        one.kill()
    psutil.wait_procs(readers, 10)
    warm_up(spark, compile_chains([chain]))
    assert scheduler.numTotalJobs() == before
    assert daemons() == [], "no Python worker reads what went to Spark with the plan"
    assert checkpoint_url(spark, Path("/x")) == "pgcdc:///x"
    assert find_trouble() == ""


def test_batches_that_fail_hold_no_locks(spark: SparkSession, tmp_path: Path) -> None:
    """Spark waits for the lock of a block before it drops it: a thread of its own for each."""
    program = compile_chains([Chain((transform.sql(note="raise_error('no')"),))])
    warm._write_spool(tmp_path / "spool")
    options = {**program.source_options(), "_spool": str(tmp_path / "spool"), "max_batch_rows": "4"}
    frame = program.project(spark.readStream.format("pgcdc").schema(program.source_schema()).options(**options).load())
    collector, failed = Collector(frame), []

    def fail(batch: DataFrame, number: int) -> None:
        try:
            collector.to_arrow(batch, rows=1)
        except Exception as error:
            failed.append(headline(error))

    writer = frame.writeStream.option("checkpointLocation", checkpoint_url(spark, tmp_path / "checkpoint"))
    with with_settings(spark, program.settings()):
        writer.foreachBatch(fail).trigger(availableNow=True).start().awaitTermination()
    assert len(failed) == 3 and all("no" in one for one in failed)
    blocks = get_field(collector._rows, "blocks").blockInfoManager().entries()
    held = []
    while blocks.hasNext():
        entry = blocks.next()
        held += [entry._1().name()] if entry._2().readerCount() else []
    assert held == [] and find_trouble() == ""


def test_a_method_that_spark_lacks_is_told_from_an_error_of_an_expression(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "_trouble", "")
    frame = spark.range(3).coalesce(1)
    assert Collector(frame).to_arrow(frame, rows=3).num_rows == 3 and quick.is_short()
    wrong = frame.selectExpr("raise_error('not known')")
    with pytest.raises(PySparkException, match="not known"):
        Collector(wrong).to_arrow(wrong, rows=3)
    collector, jvm = Collector(frame), spark._jvm
    assert jvm is not None
    collector._rows = SimpleNamespace(take=lambda batch: jvm.java.util.Optional.empty().get())
    with pytest.raises(Py4JJavaError, match="NoSuchElement"):
        collector.to_arrow(frame, rows=3)
    assert quick.is_short()
    collector._rows = jvm.java.lang.Object()
    assert collector.to_arrow(frame, rows=3).num_rows == 3
    assert not quick.is_short() and "take" in find_trouble()
    assert checkpoint_url(spark, Path("/x")) == "/x"


def test_a_session_with_large_types_gets_the_same_rows(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_trouble", "")
    for python, is_large in itertools.product((False, True), ("false", "true")):
        frame = spark.createDataFrame([("a", 1)], "text STRING, n INT")
        if python:
            frame = frame.withColumn("text", F.udf(str.upper)("text"))
        with with_settings(spark, {"spark.sql.execution.arrow.useLargeVarTypes": is_large}):
            found = Collector(frame).to_arrow(frame, rows=1).to_pylist()
        assert found == [{"text": "A" if python else "a", "n": 1}], (python, is_large)


def test_no_python_worker_reads_in_the_thread_of_a_query(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Spark did not take the rows of a batch with its plan."""

    class Reader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[bool]]:
            from pyspark import TaskContext

            context = TaskContext.get()
            yield (context is not None and context.taskAttemptId() >= 0,)

    class Source(DataSource):
        def schema(self) -> str:
            return "is_task BOOLEAN"

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

    monkeypatch.setattr(quick, "_trouble", "")
    spark.dataSource.register(Source)
    frame = spark.read.format("Source").load()
    assert Collector(frame).to_arrow(frame, rows=1).to_pylist() == [{"is_task": True}]
    assert "did not take the rows" in find_trouble()


def test_a_run_goes_on_the_ordinary_way_and_says_so_if_spark_is_not_as_it_was(tmp_path: Path) -> None:
    program = (
        "from pgcdc.spark import quick; quick._CLASSES = 'class X { Gone it; }'; import pgcdc.__main__ as m; m.run()"
    )
    output = tmp_path / "events.jsonl"
    command = [
        *(sys.executable, "-c", program, "listen", "--once", "--detector", "rate", "--rate-transactions", "20"),
        *("--state-dir", str(tmp_path / "state"), "--adapter", "file", "--file-path", str(output)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert output.stat().st_size > 0
    (said,) = [line for line in run.stderr.splitlines() if "slower, ordinary path" in line]
    assert "Gone" in said
    status = read_json(StateDir(tmp_path / "state").run_status)
    assert status is not None and status["ways"]["small batches"] == "ordinary ways through Spark"
