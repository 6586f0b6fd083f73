"""Shorter paths through Spark for small batches (decision 0023).

They use Spark's internals, so they are only used with Spark versions that they were tested with. The ordinary path does
the same, slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.sql.datasource import DataSourceStreamReader

from pgcdc.core.compiled import has_short_ways

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_IS_KNOWN = has_short_ways(pyspark.__version__)
_trouble = ""  # Why the ordinary path is used although this version of Spark is known
PREFETCH_BYTES = 256 << 10
"""Spool bytes that may go to the JVM with the plan of a batch. No Python worker has to read them again."""


def is_short() -> bool:
    """Whether small batches take the shorter paths, as far as this process has tried them."""
    return _IS_KNOWN and not _trouble


def find_trouble() -> str:
    """Why the shorter paths are not used although they should be; empty if they are."""
    return _trouble


def _give_up(error: BaseException) -> None:
    """Use the ordinary path from now on."""
    global _trouble
    from pgcdc.spark.session import headline

    _trouble = _trouble or headline(error)


def _find_prefetching() -> type[DataSourceStreamReader] | None:
    """The kind of reader that Spark asks for rows while it plans a batch."""
    if not _IS_KNOWN:
        return None
    try:
        from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper

        return _SimpleStreamReaderWrapper
    except Exception as error:
        _give_up(error)
        return None


_PREFETCHING = _find_prefetching()


def is_prefetching() -> bool:
    """Whether rows can go to the JVM with the plan of a batch."""
    return _PREFETCHING is not None


class StreamReader(_PREFETCHING or DataSourceStreamReader):  # type: ignore[misc]
    """A reader that may provide the rows of a batch while it is planned.

    It keeps nothing between batches: the same offsets give the same rows, even after a crash.
    """

    _prefetched: tuple[dict[str, Any], dict[str, Any], list[pa.RecordBatch]] | None = None

    @property
    def simple_reader(self) -> StreamReader:
        """Spark asks this reader whether a query may end on its own."""
        return self

    def prefetch(self, start: Mapping[str, Any], end: Mapping[str, Any], rows: Iterator[pa.RecordBatch]) -> int:
        """Keep the rows of the only partition of the batch being planned. Returns their number, at least 1; 0 means
        that the task reads them."""
        if not is_prefetching():
            return 0
        taken: list[pa.RecordBatch] = list(rows)
        self._prefetched = (dict(start), dict(end), taken)
        count: int = sum(one.num_rows for one in taken)
        return max(1, count)

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[pa.RecordBatch] | None:
        taken, self._prefetched = self._prefetched, None
        return iter(taken[2]) if taken is not None and taken[:2] == (start, end) else None


class Collector:
    """Collects the rows of a query's micro-batches from Spark. `frame` is what the query computes."""

    def __init__(self, frame: DataFrame) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        spark = frame.sparkSession
        self._schema = to_arrow_schema(frame.schema, timezone="UTC")
        is_large = spark.conf.get("spark.sql.execution.arrow.useLargeVarTypes") == "true"
        self._job_schema = to_arrow_schema(frame.schema, timezone="UTC", prefers_large_types=is_large)
        self._rows = _load(spark, "pgcdc.Rows")
        self._has_python = self._rows is not None and self._rows.hasPython(frame._jdf)

    def to_arrow(self, batch: DataFrame, rows: int) -> pa.Table:
        """The rows of a micro-batch, like its `toArrow`. `rows`: how many its source provided with the plan, else 0."""
        from pyspark.errors.exceptions.captured import unwrap_spark_exception

        if self._rows is None or not rows or not is_short():
            return batch.toArrow()
        try:
            with unwrap_spark_exception():
                found = None if self._has_python else self._rows.take(batch._jdf)
                parts = batch._jdf.toArrowBatchRdd().collect() if found is None else [found] if found else []
                schema = self._job_schema if found is None else self._schema
        except Py4JError as error:
            if not _is_other_spark(error):
                raise
            _give_up(error)
            return batch.toArrow()
        return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(one), schema) for one in parts], schema)


def _is_other_spark(error: BaseException) -> bool:
    """Whether Spark differs from the version that the shorter paths were written for: a method or class is missing."""
    if isinstance(error, Py4JJavaError):
        return bool(is_instance_of(pyspark.SparkContext._gateway, error.java_exception, "java.lang.LinkageError"))
    return type(error) is Py4JError  # other types are connection errors


# --- in the JVM

_CLASSES = """
package pgcdc;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.permission.FsPermission;
import org.apache.spark.SparkEnv;
import org.apache.spark.SparkEnv$;
import org.apache.spark.TaskContext$;
import org.apache.spark.TaskContextImpl;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.trees.TreePattern$;
import org.apache.spark.sql.execution.LogicalRDD;
import org.apache.spark.sql.execution.arrow.ArrowConverters$;
import org.apache.spark.sql.execution.datasources.v2.DataSourceRDDPartition;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;
import org.apache.spark.sql.internal.SQLConf$;
import org.apache.spark.storage.BlockManager;

public class CheckpointFiles extends org.apache.hadoop.fs.RawLocalFileSystem {
    public java.net.URI getUri() { return java.net.URI.create("pgcdc:///"); }
    public String getScheme() { return "pgcdc"; }
    public void setPermission(Path path, FsPermission asked) throws java.io.IOException {
        String mode = new FsPermission((short) (asked.toShort() & 0777)).toString();
        Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(mode));
    }
}

public class Rows {
    private static final AtomicLong TASKS = new AtomicLong(-1025);  // those of Spark are not below -1024
    public final BlockManager blocks;
    public Rows() throws Throwable {  // SparkEnv has other methods that need classes which are not there
        MethodType kind = MethodType.methodType(BlockManager.class);
        blocks = (BlockManager) MethodHandles.publicLookup().findVirtual(SparkEnv.class, "blockManager", kind)
            .invokeWithArguments(new Object[] {SparkEnv$.MODULE$.get()});
    }
    public boolean hasPython(org.apache.spark.sql.classic.Dataset frame) {  // its workers belong to tasks
        return frame.queryExecution().analyzed().containsPattern(TreePattern$.MODULE$.PYTHON_UDF());
    }
    public byte[] take(org.apache.spark.sql.classic.Dataset batch) {
        Object plan = batch.queryExecution().logical();
        RDD rows = plan instanceof LogicalRDD ? ((LogicalRDD) plan).rdd() : batch.queryExecution().toRdd();
        if (rows.getNumPartitions() != 1 || !isHere(rows)) return null;
        java.util.Properties settings = new java.util.Properties();  // as a task gets them
        scala.collection.Iterator pairs = SQLConf$.MODULE$.get().getAllConfs().iterator();
        while (pairs.hasNext()) {
            scala.Tuple2 pair = (scala.Tuple2) pairs.next();
            settings.setProperty((String) pair._1(), (String) pair._2());
        }
        long task = TASKS.getAndDecrement();
        TaskContextImpl empty = TaskContext$.MODULE$.empty();
        TaskContextImpl context = new TaskContextImpl(
            0, 0, 0, task, 0, 1, null, settings, null, empty.taskMetrics(), empty.cpuAmount(), empty.resources());
        blocks.registerTask(task);
        TaskContext$.MODULE$.setTaskContext(context);
        try {
            scala.collection.Iterator arrow = ArrowConverters$.MODULE$.toBatchIterator(
                rows.iterator(rows.partitions()[0], context), batch.schema(), 0L, "UTC", false, false, context);
            byte[] found = arrow.hasNext() ? (byte[]) arrow.next() : new byte[0];
            if (arrow.hasNext()) throw new IllegalStateException("more than one Arrow batch");
            return found;
        } finally {
            try {
                context.markTaskCompleted(scala.Option.empty());
            } finally {
                TaskContext$.MODULE$.unset();
                blocks.releaseAllLocksForTask(task);  // of an iterator that did not come to its end
            }
        }
    }
    private boolean isHere(RDD rows) {
        for (int one = 0; one < rows.partitions().length; one++) {
            Object part = rows.partitions()[one];
            if (part instanceof DataSourceRDDPartition && !isKept(((DataSourceRDDPartition) part).inputPartition()))
                throw new LinkageError("Spark did not take the rows of a batch with its plan");
        }
        scala.collection.Iterator parents = rows.dependencies().iterator();
        while (parents.hasNext()) {
            Object parent = parents.next();
            if (!(parent instanceof org.apache.spark.NarrowDependency)
                || !isHere(((org.apache.spark.Dependency) parent).rdd())) return false;
        }
        return true;
    }
    private boolean isKept(scala.Option part) {  // else a Python worker reads it
        Object read = part.isDefined() ? part.get() : null;
        return read instanceof PythonStreamingInputPartition && ((PythonStreamingInputPartition) read).blockId().isDefined();
    }
}
"""
"""Compiled by the compiler that Spark uses for its own code.

CheckpointFiles: Hadoop's own implementation starts a process, chmod, for each file: 7 ms, twice in each batch.

Rows: a few rows that are already in this JVM go through the plan that Spark has made for their batch, in the thread of
the query, as Spark does with local relations. A job for them took half of a batch's time (cleaning and serializing
closures, a broadcast, the scheduler), and `toArrow` plans a second time. There is no memory manager for operators that
sort or aggregate: transforms compute one row from one row.
"""
_IMPLEMENTATION = "fs.pgcdc.impl"


def _load(spark: SparkSession, name: str) -> Any:
    """An object of one of our classes. None: use the ordinary path."""
    if not is_short():
        return None
    try:
        jvm, conf = spark._jvm, spark.sparkContext._jsc.hadoopConfiguration()
        assert jvm is not None
        if conf.get(_IMPLEMENTATION) is None:
            compiler = jvm.org.codehaus.janino.SimpleCompiler()
            compiler.setParentClassLoader(conf.getClassLoader())
            compiler.cook(_CLASSES)
            conf.setClassLoader(compiler.getClassLoader())
            conf.set(_IMPLEMENTATION, "pgcdc.CheckpointFiles")
        return conf.getClassLoader().loadClass(name).newInstance()
    except (Py4JError, TypeError) as error:  # TypeError: the class does not exist
        if isinstance(error, Py4JNetworkError):
            raise
        _give_up(error)
        return None


def checkpoint_url(spark: SparkSession, folder: Path) -> str:
    """The checkpoint URL of a folder on this host. The files are the same on both paths."""
    files = _load(spark, "pgcdc.CheckpointFiles")
    return str(folder.absolute()) if files is None else f"pgcdc://{folder.absolute()}"
