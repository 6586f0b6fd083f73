"""Copies tables as they are now: through the adapters, transforms, masks and routes of a pipeline, or to Parquet.

One session reads table after table in one snapshot (`copy_source.py`). Rows become events as in a stream and go to the
sinks in batches, so memory does not grow with the tables. Only transforms in SQL or Python need Spark. SNAPSHOT_STARTED
and SNAPSHOT_COMPLETED enclose the rows of each table. Nothing is kept: the sinks' acks are in a folder that is deleted
with the copy, and an event that a target refuses ends it.

Parquet is written by Spark: typed reads of one snapshot, DIR/<table>/part-*.parquet. DIR/_pgcdc_snapshot.json has the
copy's time and row counts. The folder is DIR.partial until it is complete; the next run removes what a failed one left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from pgcdc.core.errors import ConfigError, PgcdcError, SinkError, SourceError
from pgcdc.core.position import Position
from pgcdc.core.relation import Op, Relations
from pgcdc.core.state import Lock, StateDir, fsync_folder
from pgcdc.event.edits import parse_chains
from pgcdc.event.events import block_schema, columns_for, drop_unwanted, events_of, pack_block, rows_for
from pgcdc.event.frame import EventOptions, make_frame
from pgcdc.event.lines import IdSeed
from pgcdc.postgres.lsn import format_lsn
from pgcdc.run.copy_source import CopiedTable, Copy, Progress, Say, Wanted, explain_reading, open_copy
from pgcdc.run.warm import make_archive_beside
from pgcdc.sink.file import FileOptions
from pgcdc.sink.runner import Runner
from pgcdc.sink.spec import AdapterSpec, check_adapters, make_sink
from pgcdc.source.postgres.setup.guard import ShapeObserver
from pgcdc.source.postgres.snapshot.chunks import lock_chunks
from pgcdc.source.postgres.snapshot.copy import copy_rows, copy_statement
from pgcdc.source.postgres.snapshot.releases import number_rows, snapshot_mark, snapshot_rows
from pgcdc.spark.session import check_java, find_ours, headline, start_session, stop_within
from pgcdc.spool.segment import CaptureBatch
from pgcdc.transform import check_chains
from pgcdc.transform.program import BlockProgram, Program, compile_chains
from pgcdc.transform.specs import Chain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KIND = "one-off"
MANIFEST = "_pgcdc_snapshot.json"
SPARK_STOP_S = 10.0


def copy_to_adapters(
    wanted: Wanted,
    adapters: Sequence[AdapterSpec],
    transforms: Sequence[Any] = (),
    *,
    options: EventOptions = EventOptions(),  # noqa: B008 - frozen
    progress: Progress,
    say: Say = lambda text: None,
) -> int:
    """Copy the tables; returns the number of rows. `transforms` apply to all adapters, before their own.

    A file is complete or absent. Other targets cannot be undone: an error says which tables are complete.
    """
    wanted.check()
    check_adapters(adapters)
    with contextlib.ExitStack() as stack:
        state = StateDir(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgcdc-copy-"))))
        state.create()
        sinks = [_make_sink(stack.enter_context(_whole_file(spec)), state) for spec in adapters]
        pairs = zip(adapters, sinks, strict=True)
        chains = [Chain((*transforms, *spec.transforms), spec.routes, sink.sink.form) for spec, sink in pairs]
        check_chains(None, chains)
        program = compile_chains(chains)
        spark = None
        if type(program) is not BlockProgram:
            check_java()
            say("starting Spark: a transform needs it")
            spark = start_session(wanted.url, "pgcdc snapshot", log_file=state.path / "spark.log")
            stack.callback(stop_within, SPARK_STOP_S, spark)
            make_archive_beside(say)
            check_chains(spark, chains)
        copy = stack.enter_context(open_copy(wanted, say))
        start = Position.end(copy.lsn)
        for sink in sinks:
            stack.callback(sink.close)
            sink.open(start)
        shapes = ShapeObserver(state.shapes_file, start)
        return _Copying(copy, sinks, program, spark, options, shapes, progress, start).run()


def _make_sink(spec: AdapterSpec, state: StateDir) -> Runner:
    sink = Runner(make_sink(spec), state.acks, spec.name, spec.delivery)
    try:
        sink.check()
    except SinkError as error:
        raise ConfigError(error.message, error.advice) from error
    return sink


# --- files, which get their final name when they are complete


@contextlib.contextmanager
def _whole_file(spec: AdapterSpec) -> Iterator[AdapterSpec]:
    """A single file (no folder, no rotation) is PATH.partial until the block succeeds. Otherwise nothing is left of it,
    not even of a killed run. Other targets are unchanged."""
    options = spec.options
    if not isinstance(options, FileOptions) or options.is_folder or options.max_size:
        yield spec
        return
    path = options.full_path
    partial = Path(f"{path}.partial")
    _check_free(path)
    partial.unlink(missing_ok=True)
    try:
        yield replace(spec, options=options.model_copy(update={"path": str(partial)}))
        _check_free(path)
        if partial.exists():
            os.replace(partial, path)
        else:
            path.touch()  # no events went there
        fsync_folder(path.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)


def _check_free(path: Path) -> None:
    if path.exists() and (not path.is_file() or path.stat().st_size):
        what = "exists and is not empty" if path.is_file() else "is not a file"
        raise ConfigError(f"{path} {what}", "Move it away, or choose another path")


# --- from rows to sinks


@dataclass(frozen=True, slots=True)
class _Local:
    """Columns not made by Spark, for a program that reads a DataFrame."""

    events: pa.Table

    def toArrow(self) -> pa.Table:
        return self.events


@dataclass(slots=True)
class _Copying:
    copy: Copy
    sinks: Sequence[Runner]
    program: Program
    spark: SparkSession | None
    options: EventOptions
    shapes: ShapeObserver
    progress: Progress
    end: Position
    ordinal: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    seed: IdSeed = field(default_factory=lambda: IdSeed.of("snapshot", uuid.uuid4().hex))
    relations: Relations = field(default_factory=Relations)

    def run(self) -> int:
        total = 0
        for number, table in enumerate(self.copy.tables):
            try:
                total += self._copy_table(table)
            except PgcdcError as error:
                done = ", ".join(one.name for one in self.copy.tables[:number]) or "no table"
                advice = f"{error.advice}. " if error.advice else ""
                error.advice = f"{advice}The copy is incomplete: {done} is complete, {table.name} is not"
                error.args = (error.message, error.advice)
                raise
        return total

    def _copy_table(self, table: CopiedTable) -> int:
        relation, rows = table.relation, 0
        columns = [column.name for column in relation.columns]
        self.progress(table.name, 0, table.estimated_rows, False)
        self._emit(snapshot_mark(Op.SNAPSHOT_STARTED, self.name, KIND, relation, 0), table)
        with explain_reading(table.name):
            lock_chunks(self.copy.conn, table.chunks)
            for chunk in table.chunks:
                statement = copy_statement(columns, chunk.source, [*chunk.conditions, *table.conditions])
                for values in copy_rows(self.copy.conn, statement, len(columns)):
                    batch = snapshot_rows(values, len(columns))
                    self._emit(batch, table)
                    rows += batch.num_rows
                    self.progress(table.name, rows, table.estimated_rows, False)
        self._emit(snapshot_mark(Op.SNAPSHOT_COMPLETED, self.name, KIND, relation, rows), table)
        self.progress(table.name, rows, table.estimated_rows, True)
        return rows

    def _emit(self, rows: pa.RecordBatch, table: CopiedTable) -> None:
        batch = number_rows(
            rows, self.copy.lsn, self.ordinal, table.relation, self.relations, time_us=self.copy.time_us
        )
        self.ordinal += rows.num_rows
        self.shapes.observe(batch, self.copy.catalog)
        start, self.end = self.end, batch.end
        made = self.program.collect(self._frame(batch), start, self.end)
        for sink, one in zip(self.sinks, made, strict=True):
            sink.write(one)

    def _frame(self, batch: CaptureBatch) -> DataFrame:
        assert batch.part is not None and batch.part.batch is not None
        owners = batch.transactions.take(pa.array(np.zeros(batch.part.rows, np.int64)))
        relations = [self.relations[version] for version in range(len(self.relations))]
        frame = make_frame(batch.part.batch, owners, relations, self.options)
        chains = parse_chains(self.program.source_options().get("_chains", ""))
        if self.spark is None:
            events = events_of(frame, self.seed, block_schema(chains), self.options, chains)
            events = drop_unwanted(events) if chains else events
            return cast("DataFrame", _Local(pa.Table.from_batches(pack_block(events))))
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        schema = cast(StructType, StructType.fromDDL(self.program.source_schema()))
        arrow = to_arrow_schema(schema, timezone="UTC")
        events = events_of(frame, self.seed, columns_for(arrow, chains), self.options, chains)
        rows = pa.Table.from_batches(rows_for(arrow, events))
        return self.program.project(self.spark.createDataFrame(rows, schema))


# --- to Parquet


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
    """Copy the tables; returns the number of rows. `types` are options of the source.

    The folder is complete or absent. Without `spark` it starts a session.
    """
    check_java()
    options = {**types, **({"where": wanted.where} if wanted.where else {})}
    options |= {"partitions": str(partitions)} if partitions else {}
    with open_copy(wanted, say) as copy, _partial_folder(folder.absolute()) as partial, contextlib.ExitStack() as stack:
        if spark is None:
            say("starting Spark")
            logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="pgcdc-snapshot-"))
            spark = start_session(
                wanted.url,
                "pgcdc snapshot",
                log_file=Path(logs) / "spark.log",
                spark__sql__caseSensitive="true",  # "A" and "a" are two columns
                spark__sql__parquet__outputTimestampType="TIMESTAMP_MICROS",  # INT96 is read as nanoseconds: up to 2262
            )
            stack.callback(stop_within, SPARK_STOP_S, spark)
            make_archive_beside(say)
        else:
            options["url"] = wanted.url
        counts = [_write(spark, copy, table, partial, options, progress) for table in copy.tables]
        tables = [
            {"schema": one.table.schema, "table": one.table.table, "folder": _folder_name(one), "rows": rows}
            for one, rows in zip(copy.tables, counts, strict=True)
        ]
        manifest = {"lsn": format_lsn(copy.lsn), "time_us": copy.time_us, "tables": tables}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
    return sum(counts)


def _folder_name(table: CopiedTable) -> str:
    """A table's folder: its channel name without characters that have a meaning in paths."""
    return quote(table.relation.channel.removeprefix("pgcdc:"), safe=" $")


@contextlib.contextmanager
def _partial_folder(path: Path) -> Iterator[Path]:
    """A folder that is durably renamed to `path` if the block succeeds; otherwise nothing is left."""
    if not path.name or not path.parent.is_dir():
        raise ConfigError(f"the folder of --to {path} does not exist", "Create it first")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "is not empty" if path.is_dir() else "is not a folder"
        raise ConfigError(f"--to {path} {what}", "Move it away, or choose another --to")
    partial = path.with_name(f"{path.name}.partial")
    lock_file = path.with_name(f"{path.name}.lock")
    lock = Lock(lock_file)
    try:
        if lock.acquire() is None:
            raise ConfigError(f"another run writes to {partial}", "Wait until it ends, or choose another target")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            for folder, _, files in os.walk(partial):
                for name in (*files, "."):
                    fsync_folder(Path(folder, name))
            os.rename(partial, path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock_file.unlink(missing_ok=True)
            lock.release()
    except OSError as error:
        raise SinkError(
            f"{path} cannot be written: {error.strerror or error}",
            "Check that the disk has room and that you may write there. Nothing was left there: start again",
        ) from error


def _write(
    spark: SparkSession, copy: Copy, table: CopiedTable, folder: Path, options: Mapping[str, str], progress: Progress
) -> int:
    from pyarrow.parquet import read_metadata

    target = folder / _folder_name(table)
    held = {"table": table.name, "metadata": "false", "_held": copy.held.to_text(), "_files": table.files}
    progress(table.name, 0, table.estimated_rows, False)
    try:
        spark.read.format("pgcdc").options(**options, **held).load().write.parquet(f"file:{target}")
    except Exception as error:
        raise _explain(error, table.name, folder) from error
    if not (target / "_SUCCESS").exists():
        raise SinkError(f"Spark reports that table {table.name} is written, but {target} is incomplete")
    rows: int = sum(read_metadata(file).num_rows for file in target.glob("*.parquet"))
    progress(table.name, rows, table.estimated_rows, True)
    return rows


def _explain(error: Exception, table: str, folder: Path) -> PgcdcError:
    text = str(error)
    if "No space left on device" in text:
        return SinkError(
            f"{folder.parent} has no room for table {table}: No space left on device",
            "Free some space and start again: nothing was left there",
        )
    found = find_ours(text.replace("Load it again", "Run it again").replace("load it again", "run it again"))
    return found or SourceError(f"Spark cannot copy table {table}: {headline(error)}", "Check the table and its types")
